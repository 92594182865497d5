"""A small store with waiting messages, whose timer the test drives directly, without a scheduler."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from support.encoded_samples import encode_samples

from rmq_spark.store.delivery.timer import TimerStore
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.properties import parse
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import TIMER_TOPIC
from rmq_spark.store.testing.sample_message import SampleMessage


class UnsyncedCalls(SystemCalls):
    """System calls that wait for no disk."""

    def sync(self, descriptor: int) -> None:
        """Do nothing."""

    def sync_folder(self, path: str) -> None:
        """Do nothing."""

    def _sync_new(self, descriptor: int) -> None:
        """Do nothing."""


START_MS = 1_800_000_000_000
SECOND = 1000
SIZES = FileSizes(1 << 16, 2000, 10 * 46, IndexShape(50, 400))


@dataclass
class Clock:
    """The time, which only the test advances."""

    now_ms: int = START_MS

    def __call__(self) -> int:
        return self.now_ms


def waiting(
    number: int, deliver_ms: int, *, topic: str = "T", queue_id: int = 0, body: bytes = b"", **more: str
) -> SampleMessage:
    """Return a message that waits as a broker stores it: TIMER_OUT_MS is the last second before its time."""
    out_ms = deliver_ms - SECOND if deliver_ms % SECOND == 0 else deliver_ms // SECOND * SECOND
    properties = {
        "UNIQ_KEY": f"K{number:05d}",
        "TIMER_DELIVER_MS": str(deliver_ms),
        "TIMER_OUT_MS": str(out_ms),
        "REAL_TOPIC": topic,
        "REAL_QID": str(queue_id),
        **more,
    }
    return SampleMessage(TIMER_TOPIC, 0, body or b"%05d" % number, properties=properties)


@dataclass
class TimerRig:
    """A store whose timer is ticked by hand: `append`, `tick`, `delivered`."""

    root: Path
    clock: Clock = field(default_factory=Clock)
    disk: Disk = field(default_factory=lambda: Disk(UnsyncedCalls()))
    note: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        """Be another process from now on."""
        self.writer = StoreWriter(str(self.root), self.disk, WriterSettings(sizes=SIZES), self.clock, time.sleep)
        self.timer = TimerStore(str(self.root), (str(self.root / "commitlog"),), self.disk)

    def append(self, *messages: SampleMessage) -> None:
        """Have messages in the store."""
        with self.writer.section() as section:
            section.append(encode_samples(messages))

    def prepare(self) -> None:
        """Make the source read the waiting messages."""
        with self.writer.section() as section:
            self.timer.prepare(section, self.clock.now_ms, self.note)

    def tick(self, *, room_bytes: int = 1 << 24, room_count: int = 32_768) -> int:
        """Deliver due messages; return the number of batches."""
        batches = 0
        while self.timer.refresh(self.clock.now_ms, self.note).has_work:
            self.prepare()
            due = self.timer.take(self.clock.now_ms, room_bytes, room_count)
            if not due.records and not due.metadata:
                if not self.timer.refresh(self.clock.now_ms, self.note).has_work:
                    break
                continue
            with self.writer.section() as section:
                for records in due.records:
                    section.append(records)
            self.note.update(due.metadata)
            batches += 1
        return batches

    def records(self, topic: str = "T", queue_id: int = 0) -> list[Record]:
        """Return the records of a queue, in order."""
        key = QueueKey(topic, queue_id)
        queue = ConsumeQueue(key, str(self.root / "consumequeue" / topic / str(queue_id)))
        log = CommitLog((str(self.root / "commitlog"),), mapped=False)
        if not queue.run.segments:
            return []
        end = queue.search_written_end()
        units = queue.read(queue.first_from(log.segments.begin, end), end)
        found = [log.record_at(int(place)) for place in units.physical_offsets]
        assert all(isinstance(record, Record) for record in found)
        return [record for record in found if isinstance(record, Record)]

    def delivered(self, topic: str = "T", queue_id: int = 0) -> list[int]:
        """Return the numbers of a queue's messages, in order."""
        return [int(record.body) for record in self.records(topic, queue_id)]


def properties_of(record: Record) -> dict[str, str]:
    """Return a record's properties."""
    return parse(record.properties)
