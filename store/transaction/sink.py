"""The parts of a sink: argument checks, the encoding of rows as records, their staging by tasks, and the commit.

The checks raise OptionError before anything is changed. A RecordBuilder encodes rows without the store's lock, for the
topics that exist at that time. When the records are appended, the topics are checked again under the lock.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from rmq_spark.store.argument_checks import check_flags, check_setting, check_word
from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import random_bits, wall_clock_ms
from rmq_spark.store.disk.host import ipv4_address
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.delay_routing import DelayRules
from rmq_spark.store.format.java import Host, encode_host
from rmq_spark.store.format.message_encoder import EncodedRecords, MessageEncoder
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.own_files import BROKER_VERSIONS, DelayTerms, StoreSettings
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.single_message import SingleEncoder, SingleMessage, SingleRecord
from rmq_spark.store.log.segments import FileSizes, list_segments
from rmq_spark.store.log.store_lock import refuse_network
from rmq_spark.store.log.store_state import commit_log_folders, found_broker_version, read_settings, settings_stamp
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.topics import TopicWriter
from rmq_spark.store.model import CommitKey
from rmq_spark.store.names import MAX_QUEUES
from rmq_spark.store.transaction.commit import CommitOptions, commit_staged
from rmq_spark.store.transaction.intents import StagedFile
from rmq_spark.store.transaction.ledger import folder_of
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.staging import StageWriter
from rmq_spark.store.transaction.staging_cleanup import abort_staged

FLUSHES = ("async", "sync")
COMPRESSIONS = ("none", "zlib", "lz4", "zstd")
MAX_SEGMENT_BYTES = (1 << 31) - 1  # mappedFileSizeCommitLog is a Java int
MAX_TIMER_DELAY_S = (1 << 31) - 1  # timerMaxDelaySec is a Java int
_MIN_SEGMENT_BYTES = 1024  # a record without a body takes a tenth of it
_DELAY_COLUMNS = frozenset({"delayLevel", "deliverTimestamp"})
_KEPT_BYTES = 31 << 20  # glibc ignores larger blocks
BROKER_PORT = 10911  # RocketMQ's default. The store host of a record is the address of a broker that serves the store.

_NO_TIMER = (
    "deliverTimestamp is for stores of RocketMQ 5, and this one is for 4.9, whose brokers have no timer and would "
    "never deliver it: use delayLevel, or, if only brokers of 5.x will use the store, open it once with "
    'open_store(path, broker_version="5")'
)


def check_opening(
    *,
    flush: object,
    queues: object,
    create_topic: object,
    compression: str | None,
    compress_over: object,
    commit_log_path: object,
    lock_timeout_ms: object,
    allow_network_store: object,
    segment_bytes: object,
) -> str | None:
    """Check the arguments of `open_store` except the path and those of `check_delays`.

    Returns the name of the compression, or None if bodies are not compressed. Raises OptionError.
    """
    check_word("flush", flush, FLUSHES)
    check_setting("queues", queues, 1, MAX_QUEUES)
    check_setting("compress_over", compress_over, 0)
    check_setting("lock_timeout_ms", lock_timeout_ms, 0)
    check_setting("segment_bytes", segment_bytes, _MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES)
    check_flags(create_topic=create_topic, allow_network_store=allow_network_store)
    if commit_log_path is not None and not isinstance(commit_log_path, str):
        raise OptionError(f"commit_log_path={commit_log_path!r} is not a str: a folder, or several joined by commas.")
    if compression is not None:
        check_word("compression", compression, COMPRESSIONS)
    return None if compression == "none" else compression


def check_delays(message_delay_level: object, timer_max_delay_sec: object, broker_version: object) -> DelayTerms:
    """Check the arguments of `open_store` about delayed messages, and return them as DelayTerms.

    None means that an argument was not given. Raises OptionError if one is invalid.
    """
    if timer_max_delay_sec is not None:
        check_setting("timer_max_delay_sec", timer_max_delay_sec, 0, MAX_TIMER_DELAY_S)
    if broker_version is not None:
        check_word("broker_version", broker_version, BROKER_VERSIONS)
    levels = None if message_delay_level is None else DelayLevels.parse(message_delay_level)
    assert timer_max_delay_sec is None or isinstance(timer_max_delay_sec, int)
    assert broker_version is None or isinstance(broker_version, str)
    return DelayTerms(levels, timer_max_delay_sec, broker_version)


@dataclass(frozen=True, slots=True)
class RecordBuilderSettings:
    """The settings of a RecordBuilder.

    If a row's topic does not exist, it is treated as a topic with `queue_count` queues. If `creates_topics` is False,
    such a row is an error.
    """

    commit_log_path: str | None = None
    queue_count: int = 4
    creates_topics: bool = True
    compression: str | None = None  # zlib, lz4 or zstd; None: bodies are not compressed
    compress_over: int = 4096  # bodies of at least this many bytes are compressed
    sizes: FileSizes = field(default_factory=FileSizes)  # used if the store does not exist yet
    delays: DelayTerms = field(default_factory=DelayTerms)  # the writer saves these in the store's settings


class RecordBuilder:
    """Encodes rows as records for the store at `root`, which need not exist yet. Not thread-safe."""

    def __init__(self, root: str, settings: RecordBuilderSettings) -> None:
        self._root, self._settings, self._topics = root, settings, TopicWriter(Disk(), root)
        self._delays = settings.delays
        self._topics_path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
        self._topics_stamp: tuple[int, int, int] | None = None  # of topics.json when its queue counts were read
        self._settings_stamp: tuple[int, int] | None = None  # of the settings when the delay rules were read
        address = ipv4_address()
        born_host, store_host = Host(address, 0), Host(address, BROKER_PORT)
        ids, segment_bytes = UniqueIds(address, files.process_id(), random_bits()), self._segment_bytes()
        rules = BodyRules.named(settings.compression, settings.compress_over)
        self._encoder = MessageEncoder(
            born_host=born_host, store_host=store_host, ids=ids, body_rules=rules, segment_bytes=segment_bytes
        )
        self._single = SingleEncoder(encode_host(born_host), encode_host(store_host), ids, rules, segment_bytes)
        self._router = QueueRouter(self._write_queues, random_bits())

    def encode(self, messages: pa.RecordBatch, first_row: int | None) -> EncodedRecords:
        """Encode rows, whose columns must be among MESSAGE_COLUMNS, as records in the same order.

        Raises OptionError if a message is invalid, and NotFoundError if a topic is missing and may not be created. If
        `first_row` is given, it is the number of the first row, and the error text contains the number of the row.
        """
        if not _DELAY_COLUMNS.isdisjoint(messages.schema.names):
            self._refresh_delay_rules()
        self._follow_topics()
        return self._encoder.encode(messages, self._router, wall_clock_ms(), first_row)

    def encode_one(self, message: SingleMessage) -> SingleRecord | None:
        """Encode one message without a delay. Return None if `encode` must encode or refuse it.

        Raises the errors of `encode` that concern the topic.
        """
        self._follow_topics()
        return self._single.encode(message, self._router, wall_clock_ms())

    @property
    def topics_stamp(self) -> tuple[int, int, int] | None:
        """The stamp of topics.json as of the last call of `encode` or `encode_one`. None if the file did not exist."""
        return self._topics_stamp

    def _follow_topics(self) -> None:
        """Make the router read the numbers of queues again if topics.json has changed."""
        stamp = files.stamp(self._topics_path)
        if stamp != self._topics_stamp:
            self._router.forget_counts()
            self._topics_stamp = stamp

    def forget_topics(self) -> None:
        """Make the next `encode` call read the topics again. Needed after a topic has lost queues."""
        self._router = QueueRouter(self._write_queues, random_bits())

    def _write_queues(self, topic: str) -> int:
        count = self._topics.write_queues(topic)
        if count is not None:
            return count
        if not self._settings.creates_topics:
            raise NotFoundError(
                f'topic "{topic}" is not in the store, and createTopic=false. Create it first, or set createTopic=true.'
            )
        return self._settings.queue_count

    def _refresh_delay_rules(self) -> None:
        """Give the encoder the delay levels and the broker version that the store's settings contain now."""
        stamp = settings_stamp(self._root)
        if stamp == self._settings_stamp:
            return
        found = read_settings(self._root)
        stored = found if isinstance(found, StoreSettings) else StoreSettings("")
        settings = self._delays.applied_to(stored)
        if settings is stored:
            self._delays = DelayTerms()  # they are saved by now, and from here only the saved ones apply
        version = settings.broker_version
        if version is None:  # no writer has saved the version yet
            has_log = bool(files.list_folder(files.join(self._root, filenames.COMMIT_LOG)))
            version = "5" if stored.file_sizes else found_broker_version(self._root, has_log=has_log)
        refusal = _NO_TIMER if version == "4.9" else None
        self._encoder.delay_rules = DelayRules(settings.levels, settings.timer_max_delay_ms, refusal)
        self._settings_stamp = stamp

    def _segment_bytes(self) -> int:
        found = read_settings(self._root)
        stored = found.file_sizes if isinstance(found, StoreSettings) else {}
        of_new_store = self._settings.sizes.or_those(stored).segment_bytes
        has_log = bool(files.list_folder(files.join(self._root, filenames.COMMIT_LOG)))
        if not has_log and self._settings.commit_log_path is None:
            return of_new_store
        return list_segments(*commit_log_folders(self._root, self._settings.commit_log_path)).size or of_new_store


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """The settings of a sink, for its tasks and the driver. They are small, because Spark sends them to each task."""

    path: str
    record_builder: RecordBuilderSettings = field(default_factory=RecordBuilderSettings)
    commit: CommitOptions = field(default_factory=CommitOptions)
    application: str = "rmq-spark sink"
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False


def _keep_freed_memory() -> None:
    """Let malloc keep up to 64 MiB of freed memory for the next arrays, instead of giving it back to the kernel.

    Otherwise the kernel clears the same memory for each batch again. When a large block is freed, glibc raises its
    limits to the size of the block (mallopt(3), M_MMAP_THRESHOLD). The memory of this block is never used.
    """
    np.empty(_KEPT_BYTES, np.uint8)


class TaskStage:
    """Encodes and stages the rows of one task. Their staging file is ignored until the driver commits it."""

    def __init__(self, settings: SinkSettings, key: CommitKey, name: str) -> None:
        root = files.store_folder(settings.path)
        refuse_network(root, allowed=settings.allow_network_store)
        _keep_freed_memory()
        self._record_builder = RecordBuilder(root, settings.record_builder)
        self._stage = StageWriter(root, Disk(), folder_of(key), name)
        self._row_count = 0

    def write(self, messages: pa.RecordBatch) -> None:
        """Encode and stage rows, whose columns must be among MESSAGE_COLUMNS.

        Raises OptionError if a message is invalid. The error text contains the number of the row; rows are counted from
        0 in each task.
        """
        self._stage.write(self._record_builder.encode(messages, self._row_count))
        self._row_count += messages.num_rows

    def finish(self) -> StagedFile:
        """Make the staging file durable, and return its description for the commit."""
        return self._stage.finish()

    def discard(self) -> None:
        """Delete the staging file of a failed task."""
        self._stage.discard()


def commit_sink(
    settings: SinkSettings,
    key: CommitKey,
    staged: Sequence[StagedFile],
    before_intent: Callable[[], None] | None = None,
) -> CommitTotals:
    """Append each row that the tasks staged to the store once, and return the totals. See `commit_staged`.

    Creates the store if it does not exist.
    """
    root, disk = files.store_folder(settings.path), Disk()
    _keep_freed_memory()
    writer = StoreWriter(
        root,
        disk,
        WriterSettings(
            settings.application,
            settings.lock_timeout_ms,
            settings.allow_network_store,
            settings.record_builder.commit_log_path,
            settings.record_builder.sizes,
            settings.record_builder.delays,
        ),
        wall_clock_ms,
        time.sleep,
        (IntentRollForward(root, disk, wall_clock_ms),),
    )
    with writer:
        return commit_staged(writer, key, staged, settings.commit, before_intent=before_intent)


def abort_sink(settings: SinkSettings, key: CommitKey, staged: Sequence[StagedFile]) -> None:
    """Remove the staging files of an aborted batch, except files that an intent names. Errors are only logged."""
    abort_staged(files.store_folder(settings.path), Disk(), folder_of(key), staged)
