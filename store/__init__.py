"""The engine's door: open a store for reading, and the columns that its messages have.

May import every folder of the engine. What lives where: `format/` turns bytes into values and back, `disk/` is the
only place that touches files, `log/` knows how RocketMQ keeps messages in them. Outside the engine only this door
and the words beside it (`errors`, `units`, `options`) are seen.

Whoever imports one of the words comes through here. So nothing is loaded until it is asked for: each name is
fetched from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rmq_spark.store.options import MAX_DECOMPRESSED_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import PurePath

    from rmq_spark.store.commit.commits import CommitOptions, CommitTotals
    from rmq_spark.store.commit.keys import CommitKey
    from rmq_spark.store.commit.message_store import SendResult
    from rmq_spark.store.commit.outbox import OutboxSettings
    from rmq_spark.store.commit.sink import SinkSettings, TaskStage, abort_sink, commit_sink
    from rmq_spark.store.commit.staged_file import StagedFile
    from rmq_spark.store.delivery.dead_letters import Republished, republish_dead_letters
    from rmq_spark.store.delivery.failed_rows import COPY_TIMES, failed_column_type, refuse_missing_places
    from rmq_spark.store.delivery.half_messages import pending_transactions
    from rmq_spark.store.delivery.message_store import MessageStore
    from rmq_spark.store.delivery.pull_consumer import PullConsumer
    from rmq_spark.store.delivery.retry_topics import check_retrying_group, retry_topic_of
    from rmq_spark.store.delivery.send_back import SendBackTerms
    from rmq_spark.store.delivery.send_back_sink import (
        SendBackSettings,
        SendBackTask,
        StagedCopies,
        abort_copies,
        check_send_back_sink,
        commit_copies,
    )
    from rmq_spark.store.delivery.serving import serve_store
    from rmq_spark.store.delivery.stopped_queues import read_stopped_queues
    from rmq_spark.store.delivery.ticker import Ticker
    from rmq_spark.store.disk.files import parent_process_id
    from rmq_spark.store.explore.checking import check
    from rmq_spark.store.explore.dumping import DUMP_KINDS, dump
    from rmq_spark.store.explore.new_store import create_store
    from rmq_spark.store.explore.parquet_export import export_parquet
    from rmq_spark.store.explore.parquet_import import import_parquet
    from rmq_spark.store.explore.repair_plan import plan_repair
    from rmq_spark.store.explore.repairing import repair
    from rmq_spark.store.explore.summary import GroupLag, TopicSummary
    from rmq_spark.store.explore.summary_reader import StoreExplorer
    from rmq_spark.store.explore.summary_segment import segment_layout
    from rmq_spark.store.explore.summary_series import stored_delays, stored_over_time, tag_counts
    from rmq_spark.store.explore.summary_text import bytes_text, count_text, span_text
    from rmq_spark.store.filter.row_filter import (
        SQL92,
        TAG,
        Expression,
        RowFilter,
        compile_filter,
        is_filtered_by_default,
        only_tags,
    )
    from rmq_spark.store.filter.tag_expression import parse_tag_expression
    from rmq_spark.store.format.columns import COLUMNS
    from rmq_spark.store.format.config_json import TopicConfig
    from rmq_spark.store.format.encoding import MESSAGE_COLUMNS
    from rmq_spark.store.format.filenames import check_sent_topic, is_system_topic
    from rmq_spark.store.format.rows import DecodeLimits
    from rmq_spark.store.format.sought import SOUGHT_COLUMNS, Sought, has_sought
    from rmq_spark.store.group.admin import group_lag, group_offsets, groups, reset_offsets
    from rmq_spark.store.group.allocation import find_strategy
    from rmq_spark.store.group.arrival_wait import wait_for_arrival
    from rmq_spark.store.group.assignment import check_epochs
    from rmq_spark.store.group.beginnings import find_beginnings
    from rmq_spark.store.group.group_name import check_consumer_group
    from rmq_spark.store.group.last_words import publish_last_offsets
    from rmq_spark.store.group.members import group_members
    from rmq_spark.store.group.offset_file import read_group_offsets
    from rmq_spark.store.group.query_group import GroupStep, GroupTerms, QueryGroup
    from rmq_spark.store.group.read_rights import (
        GroupRights,
        describe_beyond,
        describe_closed,
        is_beyond,
        is_closed,
        refuse_queue,
        refuse_topic,
    )
    from rmq_spark.store.group.suspended import Suspended, Suspension, write_outcomes
    from rmq_spark.store.log.message_search import SearchAnswer, Span, subtract_spans
    from rmq_spark.store.log.store_reader import StoreReader

__all__ = [
    "COLUMNS",
    "COPY_TIMES",
    "DUMP_KINDS",
    "MESSAGE_COLUMNS",
    "SOUGHT_COLUMNS",
    "SQL92",
    "TAG",
    "CommitKey",
    "CommitOptions",
    "CommitTotals",
    "DecodeLimits",
    "Expression",
    "GroupLag",
    "GroupRights",
    "GroupStep",
    "GroupTerms",
    "MessageStore",
    "OutboxSettings",
    "PullConsumer",
    "QueryGroup",
    "Republished",
    "RowFilter",
    "SearchAnswer",
    "SendBackSettings",
    "SendBackTask",
    "SendBackTerms",
    "SendResult",
    "SinkSettings",
    "Sought",
    "Span",
    "StagedCopies",
    "StagedFile",
    "StoreExplorer",
    "StoreReader",
    "Suspended",
    "Suspension",
    "TaskStage",
    "Ticker",
    "TopicConfig",
    "TopicSummary",
    "abort_copies",
    "abort_sink",
    "bytes_text",
    "check",
    "check_consumer_group",
    "check_epochs",
    "check_retrying_group",
    "check_send_back_sink",
    "check_sent_topic",
    "close",
    "commit_copies",
    "commit_sink",
    "compile_filter",
    "count_text",
    "create_store",
    "describe_beyond",
    "describe_closed",
    "dump",
    "export_parquet",
    "failed_column_type",
    "find_beginnings",
    "find_strategy",
    "group_lag",
    "group_members",
    "group_offsets",
    "groups",
    "has_sought",
    "import_parquet",
    "is_beyond",
    "is_closed",
    "is_filtered_by_default",
    "is_system_topic",
    "only_tags",
    "open_consumer",
    "open_reader",
    "open_store",
    "parent_process_id",
    "parse_tag_expression",
    "pending_transactions",
    "plan_repair",
    "publish_last_offsets",
    "read_group_offsets",
    "read_stopped_queues",
    "refuse_missing_places",
    "refuse_queue",
    "refuse_topic",
    "repair",
    "republish_dead_letters",
    "reset_offsets",
    "retry_topic_of",
    "segment_layout",
    "serve_store",
    "span_text",
    "stored_delays",
    "stored_over_time",
    "subtract_spans",
    "tag_counts",
    "wait_for_arrival",
    "write_outcomes",
]

# Where the names live that are not defined here.
_MODULES = {
    "commit.commits": "CommitOptions CommitTotals",
    "commit.keys": "CommitKey",
    "commit.message_store": "SendResult",
    "commit.outbox": "OutboxSettings",
    "commit.sink": "abort_sink commit_sink SinkSettings TaskStage",
    "commit.staged_file": "StagedFile",
    "delivery.dead_letters": "republish_dead_letters Republished",
    "delivery.failed_rows": "COPY_TIMES failed_column_type refuse_missing_places",
    "delivery.half_messages": "pending_transactions",
    "delivery.message_store": "MessageStore",
    "delivery.pull_consumer": "PullConsumer",
    "delivery.retry_topics": "check_retrying_group retry_topic_of",
    "delivery.send_back": "SendBackTerms",
    "delivery.send_back_sink": (
        "abort_copies check_send_back_sink commit_copies SendBackSettings SendBackTask StagedCopies"
    ),
    "delivery.serving": "serve_store",
    "delivery.stopped_queues": "read_stopped_queues",
    "delivery.ticker": "Ticker",
    "disk.files": "parent_process_id",
    "explore.checking": "check",
    "explore.dumping": "dump DUMP_KINDS",
    "explore.new_store": "create_store",
    "explore.parquet_export": "export_parquet",
    "explore.parquet_import": "import_parquet",
    "explore.repair_plan": "plan_repair",
    "explore.repairing": "repair",
    "explore.summary": "GroupLag TopicSummary",
    "explore.summary_reader": "StoreExplorer",
    "explore.summary_segment": "segment_layout",
    "explore.summary_series": "stored_delays stored_over_time tag_counts",
    "explore.summary_text": "bytes_text count_text span_text",
    "filter.row_filter": "compile_filter Expression is_filtered_by_default only_tags RowFilter SQL92 TAG",
    "filter.tag_expression": "parse_tag_expression",
    "format.columns": "COLUMNS",
    "format.config_json": "TopicConfig",
    "format.encoding": "MESSAGE_COLUMNS",
    "format.filenames": "check_sent_topic is_system_topic",
    "format.rows": "DecodeLimits",
    "format.sought": "has_sought Sought SOUGHT_COLUMNS",
    "group.admin": "group_lag group_offsets groups reset_offsets",
    "group.allocation": "find_strategy",
    "group.arrival_wait": "wait_for_arrival",
    "group.assignment": "check_epochs",
    "group.beginnings": "find_beginnings",
    "group.group_name": "check_consumer_group",
    "group.last_words": "publish_last_offsets",
    "group.members": "group_members",
    "group.offset_file": "read_group_offsets",
    "group.query_group": "GroupStep GroupTerms QueryGroup",
    "group.read_rights": "describe_beyond describe_closed GroupRights is_beyond is_closed refuse_queue refuse_topic",
    "group.suspended": "Suspended Suspension write_outcomes",
    "log.message_search": "SearchAnswer Span subtract_spans",
    "log.store_reader": "StoreReader",
}
_HOMES = {name: f"rmq_spark.store.{module}" for module, names in _MODULES.items() for name in names.split()}


def open_reader(
    path: "str | PurePath", *, commit_log_path: str | None = None, read_mode: str = "auto"
) -> "StoreExplorer":
    """Open the store at `path` for reading; nothing on disk is changed, created or locked.

    `commit_log_path` names the commit log's folder, or several joined by commas, where it lies elsewhere.
    `read_mode` is "mmap", "pread" or "auto", which maps files except on network and FUSE file systems. Raises
    StorePathError for a path that holds no store, or one of an unsupported kind. In a notebook the reader shows itself.
    """
    from rmq_spark.store.disk import files
    from rmq_spark.store.explore.summary_reader import StoreExplorer  # the whole engine: not before it is asked for

    return StoreExplorer(files.absolute(path), commit_log_path=commit_log_path, read_mode=read_mode)


def open_store(
    path: "str | PurePath",
    *,
    flush: str = "async",
    queues: int = 4,
    create_topic: bool = True,
    compression: str | None = None,
    compress_over: int = 4096,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    segment_bytes: int = 1 << 30,
    message_delay_level: str | None = None,
    timer_max_delay_sec: int | None = None,
    broker_version: str | None = None,
) -> "MessageStore":
    """Open the store at `path` to append to it; it is made where nothing is yet, with segments of `segment_bytes`.

    `flush` is "async" (each call's messages survive the death of any process) or "sync" (power cuts too); missing
    topics are made with so many `queues`; bodies of `compress_over` bytes or more are compressed by `compression`
    (none, zlib, lz4, zstd). Others are waited for up to `lock_timeout_ms` without progress of theirs.

    `message_delay_level` is the store's table of delay levels (RocketMQ's own: "1s 5s 10s 30s 1m … 2h"),
    `timer_max_delay_sec` how far ahead a message's time may lie (259,200), `broker_version` for which brokers it is:
    "5", or "4.9", which know no times. What is given stays in the store, for all who write to it. Raises
    OptionError before anything is made, StorePathError for a path that is no store or where none can be made, and
    LockTimeoutError from sends while a broker holds it.
    """
    from rmq_spark.store.commit.arguments import check_delays, check_opening
    from rmq_spark.store.commit.outbox import OutboxSettings
    from rmq_spark.store.delivery.message_store import MessageStore
    from rmq_spark.store.disk import files
    from rmq_spark.store.log.file_sizes import FileSizes
    from rmq_spark.store.log.store_writer import WriterSettings

    compression = check_opening(
        flush=flush,
        queues=queues,
        create_topic=create_topic,
        compression=compression,
        compress_over=compress_over,
        commit_log_path=commit_log_path,
        lock_timeout_ms=lock_timeout_ms,
        allow_network_store=allow_network_store,
        segment_bytes=segment_bytes,
    )
    delays = check_delays(message_delay_level, timer_max_delay_sec, broker_version)
    sizes = FileSizes(segment_bytes=segment_bytes)
    settings = WriterSettings("rmq-spark", lock_timeout_ms, allow_network_store, commit_log_path, sizes, delays)
    outbox = OutboxSettings(commit_log_path, queues, create_topic, compression, compress_over, sizes, delays)
    return MessageStore(files.absolute(path), settings, outbox, flush)


def open_consumer(
    path: "str | PurePath",
    group: str | None = None,
    *,
    columns: "Sequence[str] | None" = None,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    long_polling: bool = True,
    max_transfer_bytes_on_message_in_memory: int = 262_144,
    max_transfer_count_on_message_in_memory: int = 32,
    max_transfer_bytes_on_message_in_disk: int = 65_536,
    max_transfer_count_on_message_in_disk: int = 8,
    access_message_in_memory_max_ratio: int = 40,
    max_filter_message_count: int = 16_000,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> "PullConsumer":
    """Open the store at `path` to pull from its queues, as RocketMQ's pull consumers do; use it in `with`.

    `group` is needed for what is about a group's offsets, `columns` are those of a message (the reader's default ones).
    Every pull first delivers delayed messages that are due, unless a broker does or the store may not be written to.

    What one pull gives and how far it looks is limited as by a broker, by its names and defaults (MessageStoreConfig):
    what lies more than `access_message_in_memory_max_ratio` percent of the memory behind the log's end counts as on
    disk, and `max_filter_message_count` counts bytes of units, 20 a message. Without `long_polling` a pull that waits
    does so for a second. Writers are waited for up to `lock_timeout_ms` without progress of theirs;
    `allow_network_store` is for what appends, `send` and what is due: offsets are written anywhere.

    Raises OptionError for a group's name that RocketMQ refuses, unknown columns and limits that are none,
    StorePathError for a path that holds no store. Source: DefaultMQPullConsumer (4.9, 5.3).
    """
    from rmq_spark.store.commit.arguments import check_flags, check_number
    from rmq_spark.store.delivery.pull_consumer import PullConsumer
    from rmq_spark.store.delivery.ticker import Ticker
    from rmq_spark.store.disk import files
    from rmq_spark.store.group.pull_consumer import DEFAULT_COLUMNS
    from rmq_spark.store.group.pull_limits import limits_of_broker
    from rmq_spark.store.log.store_writer import WriterSettings

    check_number("max_decompressed_bytes", max_decompressed_bytes, 1)
    check_number("lock_timeout_ms", lock_timeout_ms, 0)
    check_flags(check_crc=check_crc, long_polling=long_polling, allow_network_store=allow_network_store)
    limits = limits_of_broker(
        max_transfer_bytes_on_message_in_memory=max_transfer_bytes_on_message_in_memory,
        max_transfer_count_on_message_in_memory=max_transfer_count_on_message_in_memory,
        max_transfer_bytes_on_message_in_disk=max_transfer_bytes_on_message_in_disk,
        max_transfer_count_on_message_in_disk=max_transfer_count_on_message_in_disk,
        access_message_in_memory_max_ratio=access_message_in_memory_max_ratio,
        max_filter_message_count=max_filter_message_count,
    )
    root = files.absolute(path)
    ticker = Ticker(root, commit_log_path=commit_log_path, allow_network_store=allow_network_store)
    return PullConsumer(
        root,
        group,
        columns=DEFAULT_COLUMNS if columns is None else columns,
        limits=limits,
        long_polling=long_polling,
        commit_log_path=commit_log_path,
        read_mode=read_mode,
        check_crc=check_crc,
        max_decompressed_bytes=max_decompressed_bytes,
        settings=WriterSettings("rmq-spark", lock_timeout_ms, allow_network_store, commit_log_path),
        ticker=ticker,
    )


def close(
    path: "str | PurePath",
    *,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> None:
    """Leave the store at `path` as one that was closed in order: all is on disk for good, `abort` is gone.

    For a store to which programs appended with flush=async, before a broker opens it. What dead writers left is
    finished first, and what was delivered of messages that waited is told where a broker looks. Raises StorePathError
    where there is no store, and LockTimeoutError while a broker holds it.
    """
    from rmq_spark.store.delivery.ticker import Ticker
    from rmq_spark.store.disk import files
    from rmq_spark.store.log.store_kind import commit_log_folders
    from rmq_spark.store.log.store_writer import WriterSettings

    commit_log_folders(files.absolute(path), commit_log_path)  # nothing is made where nothing is
    opened = open_store(
        path,
        commit_log_path=commit_log_path,
        lock_timeout_ms=lock_timeout_ms,
        allow_network_store=allow_network_store,
    )
    settings = WriterSettings("rmq-spark", lock_timeout_ms, allow_network_store, commit_log_path)
    Ticker(files.absolute(path), settings).hand_over()
    opened.close()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rmq_spark.store' has no attribute {name!r}; it has {__all__}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
