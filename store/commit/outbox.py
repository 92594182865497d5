"""What a program or a task needs to turn rows into records for one store: encoder, ids, and the queues of topics.

The encoder works outside the lock. So it goes by the topics as they are now; what changed by the time of the append
is noticed there.
"""

from dataclasses import dataclass, field

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import random_bits, wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.host import ipv4_address
from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.body_codec import Compression
from rmq_spark.store.format.diversion import DelayRules
from rmq_spark.store.format.encoding import EncodedRecords, MessageEncoder
from rmq_spark.store.format.java import Host
from rmq_spark.store.format.outgoing_bodies import BodyRules
from rmq_spark.store.format.routing import QueueRouter
from rmq_spark.store.format.store_settings import DelayTerms, StoreSettings
from rmq_spark.store.format.unique_ids import UniqueIds
from rmq_spark.store.log.broker_kind import found_broker_version
from rmq_spark.store.log.file_sizes import FileSizes
from rmq_spark.store.log.segments import list_segments
from rmq_spark.store.log.settings_file import read_settings, settings_stamp
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.topic_writer import TopicWriter

BROKER_PORT = 10911  # RocketMQ's default: a store host is an address at which a broker would serve the store

_NO_TIMER = (
    "deliverTimestamp is for stores of RocketMQ 5, and this one is for 4.9, whose brokers have no timer and would "
    "never deliver it: use delayLevel, or, if only brokers of 5.x will take the store, open it once with "
    'open_store(path, broker_version="5")'
)


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """How rows become records: topics that are missing are made with `queue_count` queues, if `creates_topics`."""

    commit_log_path: str | None = None
    queue_count: int = 4
    creates_topics: bool = True
    compression: str | None = None  # zlib, lz4 or zstd; None: bodies stay as they are
    compress_over: int = 4096  # bytes, inclusive
    sizes: FileSizes = field(default_factory=FileSizes)  # of a store that is not there yet
    delays: DelayTerms = field(default_factory=DelayTerms)  # as its writer will have them in the store's settings


_DELAY_COLUMNS = frozenset({"delayLevel", "deliverTimestamp"})


class Outbox:
    """Encodes rows for the store at `root`, which need not be there yet. For one thread."""

    def __init__(self, root: str, settings: OutboxSettings) -> None:
        self._root, self._settings, self._topics = root, settings, TopicWriter(Disk(), root)
        self._terms = settings.delays
        self._topics_path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
        self._topics_seen: tuple[int, int, int] | None = None  # of which the router knows numbers of queues
        self._settings_seen: tuple[int, int] | None = None  # of which the encoder has its rules of delays
        address = ipv4_address()
        self._encoder = MessageEncoder(
            born_host=Host(address, 0),
            store_host=Host(address, BROKER_PORT),
            ids=UniqueIds(address, files.process_id(), random_bits()),
            body_rules=BodyRules(
                None if settings.compression is None else Compression[settings.compression.upper()],
                settings.compress_over,
            ),
            segment_bytes=self._segment_bytes(root),
        )
        self._router = QueueRouter(self._write_queues, random_bits())

    def encode(self, messages: pa.RecordBatch, first_row: int | None) -> EncodedRecords:
        """Encode rows; columns are some of MESSAGE_COLUMNS.

        Raises OptionError for a row that is no message: it names the row, counted from `first_row`, if that is given.
        """
        if not _DELAY_COLUMNS.isdisjoint(messages.schema.names):
            self._look_at_delays()
        seen = files.stamp(self._topics_path)
        if seen != self._topics_seen:
            self._router.forget_counts()
            self._topics_seen = seen
        return self._encoder.encode(messages, self._router, wall_clock_ms(), first_row)

    def forget_topics(self) -> None:
        """Look the topics up again: one has fewer queues than it had."""
        self._router = QueueRouter(self._write_queues, random_bits())

    def _write_queues(self, topic: str) -> int:
        count = self._topics.write_queues(topic)
        if count is not None:
            return count
        if not self._settings.creates_topics:
            raise NotFoundError(
                f'topic "{topic}" is not in the store, and createTopic=false. Create it first, or leave createTopic '
                "at true."
            )
        return self._settings.queue_count

    def _look_at_delays(self) -> None:
        """Go by the store's table of levels as it is now, and by what it says of its brokers."""
        seen = settings_stamp(self._root)
        if seen == self._settings_seen:
            return
        found = read_settings(self._root)
        held = found if isinstance(found, StoreSettings) else StoreSettings("")
        settings = self._terms.applied_to(held)
        if settings is held:
            self._terms = DelayTerms()  # said by now: who opens the store later may say otherwise
        version = settings.broker_version
        if version is None:  # nobody of ours has written here yet, or none that asked
            has_log = bool(files.list_folder(files.join(self._root, filenames.COMMIT_LOG)))
            version = "5" if held.file_sizes else found_broker_version(self._root, has_log=has_log)
        refusal = _NO_TIMER if version == "4.9" else None
        self._encoder.delay_rules = DelayRules(settings.levels, settings.timer_max_delay_ms, refusal)
        self._settings_seen = seen

    def _segment_bytes(self, root: str) -> int:
        found = read_settings(root)
        named = found.file_sizes if isinstance(found, StoreSettings) else {}
        made = self._settings.sizes.or_those(named).segment_bytes
        is_there = bool(files.list_folder(files.join(root, filenames.COMMIT_LOG)))
        if not is_there and self._settings.commit_log_path is None:
            return made
        return list_segments(*commit_log_folders(root, self._settings.commit_log_path)).size or made
