"""KeyboardInterrupt wherever CPython may raise it in a call: no lock stays held, and the same object is usable.

The exception is kept, as a notebook keeps its last one: its traceback keeps every frame, and all that frames refer to.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from support.interrupts import interrupted

import rmq_spark
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.disk.locks import is_locked, is_open_to_write
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms
from rmq_spark.store.log.open_session import LINGER_S
from rmq_spark.store.model import QueueKey

# A file that is dropped without being closed warns; here an interrupt has kept it from that.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

Call = Callable[[], object]
LOCKING = (
    *(
        "store_lock",
        "locks",
        "store_writer",
        "write_session",
        "open_session",
        "single_append",
        "contextlib",
        "member_lease",
        "group_files",
        "membership",
    ),
    *("offset_file", "synchronized", "scheduler", "commit", "intents", "roll_forward", "producer"),
    *("create_store", "pull_consumer", "admin", "import_parquet"),
)
# Only a query's own process makes these calls, and it ends with the interrupt: the exception is not kept.
FORGOTTEN = {"join"}
PLACES = 40  # of each call, in a usual run


def held(root: Path) -> list[str]:
    """Return the locks of a store that somebody holds, by which others are kept waiting."""
    found = []
    for path in sorted(root.rglob("*")):
        if path.name in ("lock", "turn") or path.suffix == ".lock":
            found += [f"{path.relative_to(root)}, byte {at}" for at in (0, 1) if is_locked(str(path), at)]
    path = root / "lock"
    if path.exists():
        if is_open_to_write(str(path)):
            found.append("lock is open for writing")
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except BlockingIOError:
            found.append("lock has a lease")
    return found


def held_for_long(root: Path) -> list[str]:
    """Return the locks that somebody holds, except those of a session that ends by itself."""
    end_s = time.monotonic() + 20 * LINGER_S
    while (found := held(root)) and time.monotonic() < end_s:
        time.sleep(LINGER_S / 10)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 22) as store:
        store.send("orders", "first", queue_id=0)
    return tmp_path / "store"


def _sending(root: Path) -> Iterator[Call]:
    store = rmq_spark.open_store(root, lock_timeout_ms=500)
    while True:
        yield lambda: store.send("orders", "x", queue_id=0)


def _making(root: Path) -> Iterator[Call]:
    for number in range(1_000_000):
        store = rmq_spark.open_store(root / f"new{number}", lock_timeout_ms=500, segment_bytes=1 << 16)
        yield lambda store=store: store.send("orders", "x", queue_id=0)  # type: ignore[misc]


def _ticking(root: Path) -> Iterator[Call]:
    ticker, store = DeliveryScheduler(str(root)), rmq_spark.open_store(root)
    now_ms = time.time_ns() // 1_000_000  # noqa: TID251
    while True:
        store.send("orders", "later", delay_level=1)
        yield lambda: ticker.tick(now_ms + 60_000)


def _committing_offsets(root: Path) -> Iterator[Call]:
    consumer = rmq_spark.open_consumer(root, "billing", lock_timeout_ms=500)
    for offset in range(1, 1_000_000):
        consumer.update_consume_offset(QueueKey("orders", 0), offset)
        yield consumer.commit


def _resetting_offsets(root: Path) -> Iterator[Call]:
    while True:
        yield lambda: rmq_spark.reset_offsets(root, "billing", "earliest", "orders", lock_timeout_ms=500)


def _importing(root: Path) -> Iterator[Call]:
    for number in range(1_000_000):
        file = root.parent / f"{number}.parquet"
        pa.parquet.write_table(pa.table({"topic": ["orders"], "body": [f"row {number}"]}), file)
        yield lambda file=file: rmq_spark.import_parquet(root, file, lock_timeout_ms=500)  # type: ignore[misc]


def _joining(root: Path) -> Iterator[Call]:
    clocks = Clocks(lambda: 1_700_000_000_000, time.monotonic, time.sleep)
    terms = MemberTerms("app", "one", "shared", "avg", "orders:*", lease_heartbeat_ms=3_600_000)
    for number in range(1_000_000):
        member = Membership(GroupPaths(str(root), "g"), Disk(), terms, clocks, str(number), is_shared=False)

        def join(member: Membership = member) -> None:
            try:
                member.join()
            finally:
                member.leave()

        yield join


CALLS = {
    "send": _sending,
    "open_store": _making,
    "tick": _ticking,
    "commit": _committing_offsets,
    "reset_offsets": _resetting_offsets,
    "import_parquet": _importing,
    "join": _joining,
}


def test_locking_modules_have_these_names() -> None:
    folder = Path(rmq_spark.store.__file__).parent
    names = {path.stem for path in folder.rglob("*.py")} | {"contextlib"}
    assert names.issuperset(LOCKING)


def _locks_left(root: Path, name: str, sample: int | None) -> tuple[Counter[str], int]:
    """Interrupt a call at `sample` of its places, or at all; return where locks were left, and how many were tried."""
    calls, left = CALLS[name](root), Counter[str]()
    next(calls)()  # makes what only the first call makes
    count = interrupted(next(calls), 0, LOCKING)[0].seen
    assert count > 50, "the modules that lock have other names"
    places: list[int] | range = range(1, count + 1)
    if sample is not None and sample < count:
        places = sorted(random.Random(name).sample(places, sample))
    for at in places:
        call = next(calls)
        interrupt, error = interrupted(call, at, LOCKING)
        if name in FORGOTTEN:
            error = None
        for lock in held_for_long(root):
            left[f"{interrupt.place}: {lock}"] += 1
        del error  # until here it has kept all frames
        call()
    return left, len(places)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_calls_leave_no_lock(root: Path, name: str) -> None:
    left, count = _locks_left(root, name, PLACES)
    assert not left, f"{left.total()} of {count} interrupted calls left a lock: {dict(left)}"


@pytest.mark.torture
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_calls_leave_no_lock_anywhere(root: Path, name: str) -> None:
    left, count = _locks_left(root, name, None)
    print(f"{name}: {count} places interrupted, {left.total()} left a lock")
    assert not left, f"{left.total()} of {count} interrupted calls left a lock: {dict(left)}"
