"""Many processes commit, wait for each other, die and are started again, in random order: every row comes once.

Processes are threads of which one runs at a time; another may take over wherever a section is about to begin or
somebody sleeps. A process dies at a random system call, and then nothing that it does changes the disk.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import BatchConflictError
from rmq_spark.store.log.store_writer import StoreWriter
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import ProcessDeathError
from rmq_spark.store.transaction.commit import sweep_staging

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

BATCHES = 3
HOUR_MS = 3_600_000


class MortalCalls(SystemCalls):
    """System calls of a process that dies when it has made `left` of them that change something; no sync waits."""

    def __init__(self) -> None:
        self.left: int | None = None

    def _live(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ProcessDeathError

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        self._live()
        super().make_folder(path, is_own=is_own)

    def create(self, path: str, size_bytes: int, **owner: Any) -> None:
        self._live()
        super().create(path, size_bytes, **owner)

    def write(self, descriptor: int, position: int, data: memoryview) -> int:
        if self.left == 0 and len(data) > 1024:
            super().write(descriptor, position, data[:512])  # dies half-way
        self._live()
        return super().write(descriptor, position, data)

    def sync(self, descriptor: int) -> None:
        self._live()

    def sync_folder(self, path: str) -> None:
        self._live()

    def rename(self, source: str, target: str) -> None:
        self._live()
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._live()
        super().remove(path)

    def remove_folder(self, path: str) -> None:
        self._live()
        super().remove_folder(path)


class Process:
    """One process: runs `job` until it pauses, ends or dies, each time that somebody says `step`."""

    def __init__(self, job: Callable[["Process"], None]) -> None:
        self.calls = MortalCalls()
        self.is_over = self.is_done = False
        self.error: BaseException | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=[job], daemon=True)
        self._thread.start()

    def step(self) -> None:
        self._go.release()
        assert self._paused.acquire(timeout=180)
        if self.error is not None:
            raise self.error

    def pause(self) -> None:
        self._paused.release()
        self._go.acquire()
        if self.calls.left == 0:
            raise ProcessDeathError

    def _run(self, job: Callable[["Process"], None]) -> None:
        self._go.acquire()
        try:
            job(self)
            self.is_done = True
        except ProcessDeathError:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._paused.release()


@dataclass
class Place:
    """Where one query runs: started again with the batch at which it died, until all batches are in the store."""

    query: str
    flush: str
    next_batch: int = 0
    process: Process | None = None
    deaths: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.next_batch >= BATCHES


def rows_of(query: str, batch: int) -> list[str]:
    """Return the same rows each time; some batches have none."""
    random = Random(f"{query}/{batch}")
    return [f"{query}-{batch}-{number}" + "y" * random.randrange(60) for number in range(random.choice((0, 2, 9, 14)))]


def run_place(place: Place, kit: "Kit", process: Process) -> None:
    """Write the batches as a query does: stage, commit, next."""
    while not place.is_done:
        key = CommitKey(place.query, place.next_batch)
        files = kit.stage(key, rows_of(place.query, place.next_batch))
        process.pause()
        try:
            kit.commit(key, files, flush=place.flush)
        except BatchConflictError:
            assert kit.ledger(place.query).batch_id > place.next_batch  # type: ignore[union-attr]
        place.next_batch += 1


def race(make_kit: "type[Kit]", root: Path, seed: int) -> list[int]:
    """Run queries against each other; return at which of its calls each process died."""
    random = Random(seed)
    shared = make_kit(str(root))
    flush = random.choice(("sync", "async"))
    # The same query in two places: restarted while its old driver is still at work.
    places = [Place(query, flush) for query in random.choice(("ab", "aab", "aba", "abcc"))]

    def acting(process: Process) -> "Kit":
        kit = make_kit(str(root), Disk(process.calls), attempts=shared.attempts, ticks=shared.ticks)
        kit.sleep = lambda _: process.pause()
        opened = kit.writer

        def writer() -> StoreWriter:
            store = opened()
            section = store.section
            store.section = lambda: (process.pause(), section())[1]  # type: ignore[method-assign]
            return store

        kit.writer = writer  # type: ignore[method-assign]
        return kit

    def start(place: Place) -> Process:
        return Process(lambda process: run_place(place, acting(process), process))

    for _ in range(10_000):
        waiting = [place for place in places if not place.is_done]
        if not waiting:
            break
        place = random.choice(waiting)
        if place.process is None:
            place.process = start(place)
            if len(place.deaths) < 6 and random.random() < 0.8:
                place.deaths.append(random.randrange(250))
                place.process.calls.left = place.deaths[-1]
        place.process.step()
        if place.process.is_over:
            place.process = None
    else:
        raise AssertionError("they wait for each other")
    check(shared, places)
    return [death for place in places for death in place.deaths]


def check(kit: "Kit", places: list[Place]) -> None:
    kit.settle()
    found: dict[str, list[str]] = {}
    for names in kit.rows().values():
        for name in names:
            found.setdefault(name.split("-")[0], []).append(name)
    for query in {place.query for place in places}:
        wanted = [name for batch in range(BATCHES) for name in rows_of(query, batch)]
        assert sorted(found.get(query, [])) == sorted(wanted), "every row once"
        row = kit.ledger(query)
        assert row is not None
        assert (row.batch_id, row.rows) == (BATCHES - 1, len(rows_of(query, BATCHES - 1)))
    for names in kit.rows().values():
        for query in {place.query for place in places}:
            own: list[Any] = [name.split("-")[1:] for name in names if name.startswith(query)]
            assert [(int(batch), int(number.rstrip("y"))) for batch, number in own] == sorted(
                (int(batch), int(number.rstrip("y"))) for batch, number in own
            ), "in order"
    assert not any(name.startswith("intents/") for name in kit.own_files())
    sweep_staging(kit.root, kit.disk, 4_000_000_000_000, HOUR_MS)
    assert kit.own_files() == []


@pytest.mark.parametrize("seed", range(12))
def test_processes_that_race_and_die(make_kit: "type[Kit]", tmp_path: Path, seed: int) -> None:
    race(make_kit, tmp_path / "store", seed)


@pytest.mark.torture(minutes=0.2)
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_processes_that_race_and_die(make_kit: "type[Kit]", tmp_path: Path, seed: int) -> None:
    race(make_kit, tmp_path / "store", seed)
