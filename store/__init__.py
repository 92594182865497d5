"""The storage engine's public interface: open, create, read and write a store, and its tools.

`format/` converts between bytes and values. `disk/` is the only folder that touches files. `log/` uses both to
implement RocketMQ's commit log and consume queues. Programs and the command import from this module. The Spark side
imports the contract instead (`backend`).

Python imports this module before any other module of the engine, so importing this one must be cheap. Each public name
is therefore loaded from its own module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import PurePath

    from rmq_spark.store.backend import GroupTerms, SearchAnswer, SendBackTerms
    from rmq_spark.store.client.create_store import create_store
    from rmq_spark.store.client.producer import Producer, SendResult
    from rmq_spark.store.client.pull_consumer import PullConsumer
    from rmq_spark.store.cluster.consumer import ClusterConsumer
    from rmq_spark.store.cluster.diagnosis import ClusterFinding
    from rmq_spark.store.delivery.dead_letters import Republished, pending_transactions, republish_dead_letters
    from rmq_spark.store.delivery.scheduler import DeliveryScheduler
    from rmq_spark.store.delivery.send_back_sink import SendBackSettings, SendBackTask, commit_copies
    from rmq_spark.store.delivery.serve import serve_store
    from rmq_spark.store.filter.row_filter import SQL92, TAG, Expression
    from rmq_spark.store.format.columns import COLUMNS
    from rmq_spark.store.format.config_json import TopicConfig
    from rmq_spark.store.format.message_encoder import MESSAGE_COLUMNS
    from rmq_spark.store.group.admin import group_lag, group_members, group_offsets, groups, reset_offsets
    from rmq_spark.store.group.final_commit import commit_final_offsets
    from rmq_spark.store.group.group_session import GroupSession
    from rmq_spark.store.log.store_reader import StoreReader
    from rmq_spark.store.model import CommitKey
    from rmq_spark.store.tools.check import check
    from rmq_spark.store.tools.dump import DUMP_KINDS, dump
    from rmq_spark.store.tools.import_parquet import import_parquet
    from rmq_spark.store.tools.parquet_file import export_parquet
    from rmq_spark.store.tools.repair import repair
    from rmq_spark.store.tools.repair_plan import plan_repair
    from rmq_spark.store.transaction.commit import CommitOptions
    from rmq_spark.store.transaction.intents import StagedFile
    from rmq_spark.store.transaction.sink import RecordBuilderSettings, SinkSettings, TaskStage, abort_sink, commit_sink
    from rmq_spark.store.view.cluster_explorer import ClusterExplorer
    from rmq_spark.store.view.explorer import StoreExplorer
    from rmq_spark.store.view.series import segment_layout, stored_delays, stored_over_time, tag_counts
    from rmq_spark.store.view.summary import GroupLag, TopicSummary
    from rmq_spark.store.view.summary_text import bytes_text, count_text, span_text

__all__ = [
    "COLUMNS",
    "DUMP_KINDS",
    "MESSAGE_COLUMNS",
    "SQL92",
    "TAG",
    "ClusterFinding",
    "CommitKey",
    "CommitOptions",
    "DeliveryScheduler",
    "Expression",
    "GroupLag",
    "GroupSession",
    "GroupTerms",
    "Producer",
    "PullConsumer",
    "RecordBuilderSettings",
    "Republished",
    "SearchAnswer",
    "SendBackSettings",
    "SendBackTask",
    "SendBackTerms",
    "SendResult",
    "SinkSettings",
    "StagedFile",
    "StoreExplorer",
    "StoreReader",
    "TaskStage",
    "TopicConfig",
    "TopicSummary",
    "abort_sink",
    "bytes_text",
    "check",
    "close",
    "commit_copies",
    "commit_final_offsets",
    "commit_sink",
    "count_text",
    "create_store",
    "dump",
    "examine_cluster",
    "export_parquet",
    "group_lag",
    "group_members",
    "group_offsets",
    "groups",
    "import_parquet",
    "open_consumer",
    "open_reader",
    "open_store",
    "pending_transactions",
    "plan_repair",
    "repair",
    "republish_dead_letters",
    "reset_offsets",
    "segment_layout",
    "serve_store",
    "span_text",
    "stored_delays",
    "stored_over_time",
    "tag_counts",
]

# Module -> the names that are loaded from it.
_MODULES = {
    "backend": "GroupTerms SearchAnswer SendBackTerms",
    "model": "CommitKey",
    "client.create_store": "create_store",
    "client.producer": "Producer SendResult",
    "client.pull_consumer": "PullConsumer",
    "cluster.diagnosis": "ClusterFinding",
    "delivery.dead_letters": "pending_transactions republish_dead_letters Republished",
    "delivery.scheduler": "DeliveryScheduler",
    "delivery.send_back_sink": "commit_copies SendBackSettings SendBackTask",
    "delivery.serve": "serve_store",
    "filter.row_filter": "Expression SQL92 TAG",
    "format.columns": "COLUMNS",
    "format.config_json": "TopicConfig",
    "format.message_encoder": "MESSAGE_COLUMNS",
    "group.admin": "group_lag group_members group_offsets groups reset_offsets",
    "group.final_commit": "commit_final_offsets",
    "group.group_session": "GroupSession",
    "log.store_reader": "StoreReader",
    "tools.check": "check",
    "tools.dump": "dump DUMP_KINDS",
    "tools.import_parquet": "import_parquet",
    "tools.parquet_file": "export_parquet",
    "tools.repair": "repair",
    "tools.repair_plan": "plan_repair",
    "transaction.commit": "CommitOptions",
    "transaction.intents": "StagedFile",
    "transaction.sink": "abort_sink commit_sink RecordBuilderSettings SinkSettings TaskStage",
    "view.explorer": "StoreExplorer",
    "view.series": "segment_layout stored_delays stored_over_time tag_counts",
    "view.summary": "GroupLag TopicSummary",
    "view.summary_text": "bytes_text count_text span_text",
}
_HOMES = {name: f"rmq_spark.store.{module}" for module, names in _MODULES.items() for name in names.split()}


@overload
def open_reader(
    path: "str | PurePath", *, commit_log_path: str | None = None, read_mode: str = "auto"
) -> "StoreExplorer":
    """Open a store directory."""


@overload
def open_reader(
    *,
    name_server: str,
    broker_addresses: str = "",
    namespace: str = "",
    access_key: str | None = None,
    secret_key: str | None = None,
    security_token: str | None = None,
    credentials_file: str | None = None,
    tls: bool = False,
    tls_verify: str = "ca",
    tls_ca_file: str | None = None,
    tls_cert_file: str | None = None,
    tls_key_file: str | None = None,
    tls_key_password: str | None = None,
    request_timeout_ms: int = 3000,
    broker_down_timeout_ms: int = 300_000,
    pull_group: str = "rmq-spark-reader",
) -> "ClusterExplorer":
    """Open a live cluster."""


def open_reader(
    path: "str | PurePath | None" = None,
    *,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "StoreExplorer | ClusterExplorer":
    """Open the store at `path`, or the cluster of `name_server`, for reading.

    In a store no file is changed, created or locked. `commit_log_path` is needed only if the commit log is outside of
    the store's folder: its folder, or several separated by commas. `read_mode` is "mmap" (map files into memory),
    "pread" (do not map them) or "auto" (map them except on network and FUSE file systems). A notebook shows the reader
    as a summary. Raises StorePathError if there is no store at `path`, or a store of an unsupported kind.

    `name_server` is "host:9876", several separated by a semicolon. The reader of a cluster connects at its first call.
    The other arguments are like a query's options. `tls_verify` is "ca", "full" or "none". A read waits
    `broker_down_timeout_ms` for a broker (0: for ever). Raises OptionError for an invalid argument.
    """
    if (path is None) == (name_server is None):
        found = "both were given" if path is not None else "none was given"
        raise OptionError(f"open_reader: {found}; expected either path or name_server. Name one place to read from.")
    if name_server is not None:
        from rmq_spark.store.places import locate_cluster
        from rmq_spark.store.view.cluster_explorer import ClusterExplorer

        if commit_log_path is not None or read_mode != "auto":
            raise OptionError(
                "open_reader: commit_log_path and read_mode are for a store directory; expected none of them with "
                "name_server. Remove them."
            )
        return ClusterExplorer(locate_cluster(name_server, cluster_options))
    if cluster_options:
        raise OptionError(
            f"open_reader: {', '.join(cluster_options)} only mean something with name_server; expected a store at "
            "path. Remove them, or give name_server instead of path."
        )
    from rmq_spark.store.disk import files
    from rmq_spark.store.view.explorer import StoreExplorer

    assert path is not None
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
) -> "Producer":
    """Open the store at `path` for appending. If it does not exist, create it with segments of `segment_bytes`.

    With `flush="async"`, sent messages survive the death of any process; with "sync" they also survive a power cut.
    With `create_topic`, a missing topic is created with `queues` queues. Bodies of at least `compress_over` bytes are
    compressed with `compression` (none, zlib, lz4 or zstd). If another process writes, a call waits, and fails when
    that process has made no progress for `lock_timeout_ms`.

    Three settings are saved in the store and apply to all its writers. `message_delay_level` is the table of delay
    levels (default: RocketMQ's "1s 5s 10s 30s 1m … 2h"). `timer_max_delay_sec` is the maximum time until a message is
    delivered, in seconds (default 259,200). `broker_version` is the version of the store's brokers, "5" or "4.9";
    brokers of version 4.9 do not support delivery times.

    Raises OptionError for an invalid argument, before anything is changed. Raises StorePathError if `path` is not a
    store and no store can be created there. While a broker holds the store, sends raise LockTimeoutError.
    """
    from rmq_spark.store.client.producer import Producer
    from rmq_spark.store.disk import files
    from rmq_spark.store.log.segments import FileSizes
    from rmq_spark.store.log.store_writer import WriterSettings
    from rmq_spark.store.transaction.sink import RecordBuilderSettings, check_delays, check_opening

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
    builder = RecordBuilderSettings(commit_log_path, queues, create_topic, compression, compress_over, sizes, delays)
    return Producer(files.absolute(path), settings, builder, flush)


@overload
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
    """Open a store directory."""


@overload
def open_consumer(
    *,
    name_server: str,
    group: str | None = None,
    columns: "Sequence[str] | None" = None,
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    long_polling: bool = True,
    broker_addresses: str = "",
    namespace: str = "",
    access_key: str | None = None,
    secret_key: str | None = None,
    security_token: str | None = None,
    credentials_file: str | None = None,
    tls: bool = False,
    tls_verify: str = "ca",
    tls_ca_file: str | None = None,
    tls_cert_file: str | None = None,
    tls_key_file: str | None = None,
    tls_key_password: str | None = None,
    request_timeout_ms: int = 3000,
) -> "ClusterConsumer":
    """Open a live cluster."""


def open_consumer(
    path: "str | PurePath | None" = None,
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
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "PullConsumer | ClusterConsumer":
    """Open the store at `path`, or the cluster of `name_server`, for pulling messages as RocketMQ's pull consumers do.

    Use it in `with`. `group` is required for committed offsets and for sending messages back. `columns` are the columns
    of the pulled messages. If `long_polling` is False, a pull that finds no message waits at most a second for one.

    In a store, every pull first delivers scheduled messages that are due, unless a broker does this or the store is
    read-only. The size of a pull is limited as a broker limits it. The limits have the names and defaults of
    MessageStoreConfig. A record is treated as on disk if its distance from the end of the log is more than
    `access_message_in_memory_max_ratio` percent of the machine's memory. `max_filter_message_count` is in bytes of
    consume-queue entries, which have 20 bytes per message. If another process writes, a call waits, and fails when that
    process has made no progress for `lock_timeout_ms`. `allow_network_store` applies to sends and deliveries; offsets
    are committed on any file system.

    In a cluster, the brokers deliver and limit. The other arguments mean what they mean for `open_reader`. The consumer
    connects at its first call, and cannot send so far.

    Raises OptionError for an invalid group name, an unknown column or an invalid argument, and StorePathError if there
    is no store at `path`. Source: DefaultMQPullConsumer (4.9, 5.3).
    """
    given = dict(locals())
    if (path is None) == (name_server is None):
        found = "both were given" if path is not None else "none was given"
        raise OptionError(f"open_consumer: {found}; expected either path or name_server. Name one place to pull from.")
    from rmq_spark.store.argument_checks import check_setting
    from rmq_spark.store.transaction.sink import check_flags

    check_setting("max_decompressed_bytes", max_decompressed_bytes, 1)
    check_flags(check_crc=check_crc, long_polling=long_polling, allow_network_store=allow_network_store)
    pulling = {name: given[name] for name in ("group", "check_crc", "max_decompressed_bytes", "long_polling")}
    if columns is not None:
        pulling["columns"] = columns
    if name_server is not None:
        return _open_cluster_consumer(name_server, pulling, given, cluster_options)
    return _open_store_consumer(pulling, given, cluster_options)


def _open_store_consumer(
    pulling: "dict[str, Any]", given: "Mapping[str, Any]", cluster_options: "Mapping[str, Any]"
) -> "PullConsumer":
    """Return a consumer of a store directory from the arguments of `open_consumer`."""
    from rmq_spark.store.argument_checks import check_setting
    from rmq_spark.store.client.pull_consumer import PullConsumer
    from rmq_spark.store.delivery.scheduler import DeliveryScheduler
    from rmq_spark.store.disk import files
    from rmq_spark.store.group.pull_limits import LIMIT_SETTINGS, limits_of_broker
    from rmq_spark.store.log.store_writer import WriterSettings

    if cluster_options:
        raise OptionError(
            f"open_consumer: {', '.join(cluster_options)} only mean something with name_server; expected a store at "
            "path. Remove them, or give name_server instead of path."
        )
    check_setting("lock_timeout_ms", given["lock_timeout_ms"], 0)
    limits = limits_of_broker(**{name: given[name] for name in LIMIT_SETTINGS})
    root, log = files.absolute(given["path"]), given["commit_log_path"]
    return PullConsumer(
        root,
        **pulling,
        limits=limits,
        commit_log_path=log,
        read_mode=given["read_mode"],
        settings=WriterSettings("rmq-spark", given["lock_timeout_ms"], given["allow_network_store"], log),
        scheduler=DeliveryScheduler(root, commit_log_path=log, allow_network_store=given["allow_network_store"]),
    )


def _open_cluster_consumer(
    name_server: str, pulling: "dict[str, Any]", given: "Mapping[str, Any]", cluster_options: "Mapping[str, Any]"
) -> "ClusterConsumer":
    """Return a consumer of a cluster from the arguments of `open_consumer`."""
    from rmq_spark.store.cluster.consumer import ClusterConsumer
    from rmq_spark.store.places import locate_cluster

    defaults = open_consumer.__kwdefaults__ or {}
    for_stores = defaults.keys() - pulling.keys() - {"columns", "name_server"}
    found = [name for name in defaults if name in for_stores and given[name] != defaults[name]]
    if found:
        raise OptionError(
            f"open_consumer: {', '.join(found)} only mean something for a store directory; expected none of them with "
            "name_server. Remove them."
        )
    if "broker_down_timeout_ms" in cluster_options:
        raise OptionError(
            "open_consumer: broker_down_timeout_ms was given; expected request_timeout_ms, because a consumer does not "
            "wait for a broker that is away. Remove it."
        )
    return ClusterConsumer(locate_cluster(name_server, cluster_options), **pulling)


def examine_cluster(
    name_server: str, topics: "Sequence[str]" = (), group: str | None = None, **cluster_options: "str | int | None"
) -> "list[ClusterFinding]":
    """Try what a query of a live cluster needs, and return a finding for each: what, its state, why, and the next step.

    The state is "ok", "warning" (a query runs, but slower or without a feature) or "missing" (a query fails or waits).
    `topics` are to be read, and the committed offsets of the consumer group `group`. The other arguments are those of
    `open_reader` for a cluster. Nothing there is changed. Raises OptionError for an invalid argument.
    """
    from rmq_spark.store.cluster.doctor import diagnose_cluster
    from rmq_spark.store.disk.clock import wall_clock_ms
    from rmq_spark.store.places import locate_cluster

    address = locate_cluster(name_server, cluster_options, group=group)
    return diagnose_cluster(address, topics, group, now_ms=wall_clock_ms())


def close(
    path: "str | PurePath",
    *,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> None:
    """Make all messages durable, and mark the store at `path` as cleanly shut down by removing its file `abort`.

    Call it after programs appended with `flush="async"`, before a broker opens the store. It first finishes the commits
    of dead writers. It also writes to the broker's files how far scheduled messages have been delivered. Raises
    StorePathError if `path` is not a store, and LockTimeoutError while a broker holds the store.
    """
    from rmq_spark.store.delivery.scheduler import DeliveryScheduler
    from rmq_spark.store.disk import files
    from rmq_spark.store.log.store_state import commit_log_folders
    from rmq_spark.store.log.store_writer import WriterSettings

    # Raises if the store is missing; open_store would create it.
    commit_log_folders(files.absolute(path), commit_log_path)
    producer = open_store(
        path,
        commit_log_path=commit_log_path,
        lock_timeout_ms=lock_timeout_ms,
        allow_network_store=allow_network_store,
    )
    settings = WriterSettings("rmq-spark", lock_timeout_ms, allow_network_store, commit_log_path)
    DeliveryScheduler(files.absolute(path), settings).hand_over()
    producer.close()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rmq_spark.store' has no attribute {name!r}; it has {__all__}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next look-up does not call this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
