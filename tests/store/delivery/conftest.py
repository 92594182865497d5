"""Fixtures for delivery rounds: a small store in which messages wait, a clock, schedulers, delivered messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import open_reader
from rmq_spark.store.delivery.delay_source import QUERY_ID
from rmq_spark.store.delivery.scheduler import DeliveryRound, DeliveryScheduler
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.config_json import decode_delay_offsets
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow
from rmq_spark.store.transaction.roll_forward import IntentRollForward

FIRST_MS = 1_700_000_000_000
LEVELS = 18
SIZES = FileSizes(8192, 2000, 50 * 46, IndexShape(20, 200))


class UnsyncedCalls(SystemCalls):
    """System calls that do not wait for the disk."""

    def sync(self, descriptor: int) -> None:
        """Do nothing."""

    def sync_folder(self, path: str) -> None:
        """Only check that it exists."""
        assert Path(path).is_dir(), path


def delayed(
    level: int, name: str, topic: str | None = "T", queue_id: int | str | None = 0, **fields: Any
) -> SampleMessage:
    """Return a message as it waits in the queue of a level."""
    properties = {"UNIQ_KEY": f"id-{name}", "DELAY": str(level), "TAGS": "t"}
    properties |= {} if topic is None else {"REAL_TOPIC": topic}
    properties |= {} if queue_id is None else {"REAL_QID": str(queue_id)}
    return SampleMessage(SCHEDULE_TOPIC, level - 1, name.encode(), properties=properties, **fields)


@dataclass
class Kit:
    """One store and its time. `disk` may be one that dies."""

    root: str
    disk: Disk = field(default_factory=lambda: Disk(UnsyncedCalls()))
    settings: WriterSettings = field(default_factory=lambda: WriterSettings(sizes=SIZES))
    now_ms: int = FIRST_MS

    def clock(self) -> int:
        """Return the time."""
        return self.now_ms

    def writer(self) -> StoreWriter:
        """Open the store as another process would."""
        finisher = IntentRollForward(self.root, self.disk, self.clock)
        return StoreWriter(self.root, self.disk, self.settings, self.clock, self._sleep, [finisher])

    def ticker(self) -> DeliveryScheduler:
        """Return a ticker of another process."""
        return DeliveryScheduler(self.root, self.settings, disk=self.disk, clock_ms=self.clock, sleep=self._sleep)

    def tick(self, ticker: DeliveryScheduler | None = None) -> DeliveryRound:
        """Tick now, as a process of its own where no ticker is given."""
        return (ticker or self.ticker()).tick(self.now_ms)

    def put(self, *messages: SampleMessage) -> None:
        """Append messages, stored now."""
        with self.writer() as writer, writer.section() as section:
            self.append(section, messages)

    def append(self, section: WriteSession, messages: Sequence[SampleMessage]) -> None:
        """Append messages in a section; what waits has a topic as a broker makes it."""
        section.ensure_topic(SCHEDULE_TOPIC, LEVELS)
        section.ensure_topic("T", 2)
        section.append(encode_samples(messages))

    def settle(self) -> None:
        """Take the lock and leave the store in order, as any writer does that comes by."""
        self.writer().close()

    def messages(self, topic: str = "T", columns: Sequence[str] = ("body",)) -> dict[int, list[Any]]:
        """Return what each queue of a topic holds, by queue id, as any reader sees it; one column plain."""
        found: dict[int, list[Any]] = {}
        with open_reader(self.root) as reader:
            reader.refresh()
            for queue in reader.queues(topic) if topic in reader.topics() else []:
                held = reader.bounds(queue)
                batches = reader.read(QueueKey(topic, queue.queue_id), held.min_offset, held.max_offset, columns)
                rows = [row for batch in batches for row in batch.to_pylist()]
                if rows:
                    found[queue.queue_id] = [
                        row["body"].decode() if tuple(columns) == ("body",) else row for row in rows
                    ]
        return found

    def offsets(self) -> dict[int, int]:
        """Return what delayOffset.json says."""
        path = Path(self.root, "config/delayOffset.json")
        return dict(decode_delay_offsets(path.read_bytes()).offsets) if path.exists() else {}

    def ledger(self) -> LedgerRow | None:
        """Return the last commit of ticks."""
        return Ledger(self.root, Disk()).read(QUERY_ID)

    def _sleep(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """A store that does not exist yet."""
    return Kit(str(tmp_path / "store"))


@pytest.fixture
def make_kit() -> type[Kit]:
    """Kits for stores in other places, on other disks."""
    return Kit


@pytest.fixture
def wait() -> Any:
    """Messages that wait in the queue of a level."""
    return delayed
