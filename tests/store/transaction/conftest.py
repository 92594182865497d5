"""Kit for tests of commits: a small store, rows with names, tasks that stage them, and the outcome."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import open_reader
from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.transaction.commit import CommitOptions, commit_staged
from rmq_spark.store.transaction.intents import StagedFile
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow, folder_of
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.staging import StageWriter

QUEUES = 2
# Small: a few dozen rows fill several segments, queue files and index files.
SIZES = FileSizes(4096, 400, 50 * 46, IndexShape(20, 60))
CHUNK_BYTES = 700  # four or five rows
OPTIONS = CommitOptions(queue_count=QUEUES, chunk_bytes=CHUNK_BYTES, session_bytes=CHUNK_BYTES)
FIRST_MS = 1_700_000_000_000


def encode_rows(names: Sequence[str], topic: str = "T", queues: int = QUEUES, ids: str = "") -> EncodedRecords:
    """Return a record for each name, spread over the queues by place; the digest depends on the names alone.

    `ids` tells attempts apart: the same rows, encoded again, have other UNIQ_KEYs.
    """
    messages = [
        SampleMessage(topic, place % queues, name.encode(), tags="t", properties={"UNIQ_KEY": f"{ids}/{name}"})
        for place, name in enumerate(names)
    ]
    return replace(encode_samples(messages), digest=sum(map(digest_of, names)) % (1 << 64))


def digest_of(name: str) -> int:
    """Return a digest of one row."""
    return int.from_bytes(name.encode(), "big") * 0x9E3779B97F4A7C15 % (1 << 64)


class UnsyncedCalls(SystemCalls):
    """System calls that wait for no disk: what is tested here does not depend on the machine staying on."""

    def sync(self, descriptor: int) -> None:
        """Do nothing."""

    def sync_folder(self, path: str) -> None:
        """Only assert that it exists."""
        assert Path(path).is_dir(), path


def unsynced_disk() -> Disk:
    """Return a disk that is fast."""
    return Disk(UnsyncedCalls())


@dataclass
class Kit:
    """One store and what is done to it. `disk` may be one that dies."""

    root: str
    disk: Disk = field(default_factory=unsynced_disk)
    options: CommitOptions = OPTIONS
    settings: WriterSettings = field(default_factory=lambda: WriterSettings(sizes=SIZES))
    attempts: count = field(default_factory=count)
    ticks: count = field(default_factory=lambda: count(FIRST_MS))
    sleep: Callable[[float], None] = time.sleep

    def now_ms(self) -> int:
        """Return the time, a ms later each time."""
        return next(self.ticks)

    def writer(self) -> StoreWriter:
        """Open the store as another process would."""
        finisher = IntentRollForward(self.root, self.disk, self.now_ms, CHUNK_BYTES)
        return StoreWriter(self.root, self.disk, self.settings, self.now_ms, self.sleep, [finisher])

    def stage(
        self,
        key: CommitKey,
        names: Sequence[str],
        tasks: int = 2,
        topic: str = "T",
        queues: int = QUEUES,
        batch_rows: int = 3,
    ) -> list[StagedFile]:
        """Stage rows as `tasks` tasks, each with its share, in batches of a few rows."""
        attempt = next(self.attempts)
        share = -(-len(names) // tasks)
        files = []
        for task in range(tasks):
            stage = StageWriter(self.root, self.disk, folder_of(key), f"{task:05d}-{attempt}")
            own = names[task * share : (task + 1) * share]
            for first in range(0, len(own), batch_rows):
                stage.write(encode_rows(own[first : first + batch_rows], topic, queues, ids=f"{task}-{attempt}"))
            files.append(stage.finish())
        return files

    def commit(self, key: CommitKey, files: Sequence[StagedFile], **options: object) -> CommitTotals:
        """Commit staged files as a process of its own."""
        with self.writer() as writer:
            chosen = replace(self.options, **options)
            return commit_staged(writer, key, files, chosen, sleep=self.sleep)

    def settle(self) -> None:
        """Take the lock and leave the store in order, as any writer does that comes by."""
        self.writer().close()

    def ledger(self, query_id: str) -> LedgerRow | None:
        """Return a query's row."""
        return Ledger(self.root, Disk()).read(query_id)

    def rows(self, topic: str = "T") -> dict[int, list[str]]:
        """Return what each queue of a topic holds, by queue id, as any reader sees it."""
        if not (Path(self.root) / "commitlog").is_dir():
            return {}
        found = {}
        with open_reader(self.root) as reader:
            reader.refresh()
            for queue in reader.queues(topic) if topic in reader.topics() else []:
                held = reader.bounds(queue)
                assert held.min_offset == 0
                batches = reader.read(queue, 0, held.max_offset, ("body",), check_crc=True)
                found[queue.queue_id] = [row["body"].decode() for batch in batches for row in batch.to_pylist()]
                assert len(found[queue.queue_id]) == held.max_offset
        return found

    def all_rows(self, topic: str = "T") -> list[str]:
        """Return what all queues of a topic hold, one after the other."""
        return list(chain.from_iterable(self.rows(topic).values()))

    def own_files(self) -> list[str]:
        """Return what is in the folders for intents and staged files."""
        side = Path(self.root) / "rmq"
        found = [path for folder in ("intents", "staging") for path in (side / folder).rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(side)) for path in found)


def by_queue(names: Sequence[str], queues: int = QUEUES, batch_rows: int = 3, tasks: int = 2) -> dict[int, list[str]]:
    """Return how `Kit.stage` spreads these rows: queue id -> names in order."""
    found: dict[int, list[str]] = {}
    share = -(-len(names) // tasks)
    for task in range(tasks):
        own = names[task * share : (task + 1) * share]
        for place, name in enumerate(own):
            found.setdefault(place % batch_rows % queues, []).append(name)
    return found


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """A store that is yet to be made."""
    return Kit(str(tmp_path / "store"))


@pytest.fixture
def make_kit() -> type[Kit]:
    """Kits for stores in other places, on other disks."""
    return Kit


@pytest.fixture
def spread() -> Callable[..., dict[int, list[str]]]:
    """How `Kit.stage` spreads rows over queues."""
    return by_queue


@pytest.fixture
def encode() -> Callable[..., EncodedRecords]:
    """Rows as records."""
    return encode_rows
