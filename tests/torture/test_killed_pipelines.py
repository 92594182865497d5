"""A pipeline from store to store whose driver is killed again and again: every message comes out once.

Each life is a program of its own, killed after its query began: at a random moment, when a commit has promised to
append its rows, or when the store's ledger has a batch of which Spark's checkpoint does not know yet. Three ways:
everything at once, as when a container is killed; Spark's JVM alone, whose Python processes live on for a moment and
may finish a commit; the Python driver alone, after which the JVM ends by itself.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import rmq_spark

if TYPE_CHECKING:
    from tests.torture.conftest import Life

pytestmark = pytest.mark.spark

QUEUES = 3
STARTS_WITHIN_S = 300
ENDS_WITHIN_S = 600
KILLED_WITHIN_S = 3.0  # after its query began: some batches

Start = Callable[..., "Life"]


def feed(source: Path, first: int, count: int) -> None:
    """Give the store to copy from so many more messages, or make it; bodies are numbers from `first` on."""
    with rmq_spark.open_store(str(source), queues=QUEUES, segment_bytes=1 << 14) as store:
        bodies = [f"{number}".encode() for number in range(first, first + count)]
        store.send_many(pa.table({"body": pa.array(bodies, pa.binary())}), topic="orders")


def read_bodies(path: Path) -> list[int]:
    """Return the numbers in the bodies of all messages, after a look at every one's checksum."""
    found: list[int] = []
    with rmq_spark.open_reader(str(path)) as store:
        for queue in store.queues("orders"):
            bounds = store.bounds(queue)
            assert bounds.min_offset == 0
            for batch in store.read(queue, 0, bounds.max_offset, ["body"], check_crc=True):
                found += [int(body) for body in batch.column("body").to_pylist()]
    return sorted(found)


def assert_left_in_order(store: Path) -> None:
    """Look at what writers leave: no promise is open, and nothing is staged but what came to nothing."""
    assert not list((store / "rmq" / "intents").glob("*.json"))
    assert not (store / "abort").exists()
    (ledger,) = (store / "rmq" / "ledger").glob("*.json")
    assert ledger.stat().st_size


def wait_for_moment(life: "Life", store: Path, random: Random) -> tuple[int | None, str]:
    """Wait until it is time to kill; return the life's exit code if it ended before, and what was waited for."""
    moment = random.choice(("a random moment", "a promise", "a row in the ledger"))
    code = life.wait(random.uniform(0, KILLED_WITHIN_S if moment == "a random moment" else 1))
    before = changes(store / "rmq" / "ledger")
    until = time.monotonic() + ENDS_WITHIN_S
    while code is None and moment != "a random moment" and time.monotonic() < until:
        if moment == "a promise" and changes(store / "rmq" / "intents"):
            break
        if moment == "a row in the ledger" and changes(store / "rmq" / "ledger") != before:
            break
        code = life.wait(0.001)
    return code, moment


def changes(folder: Path) -> list[tuple[str, int]]:
    """Return the JSON files of a folder and when they were changed."""
    found = []
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            found.append((file.name, file.stat().st_mtime_ns))
    return found


def kill_somehow(life: "Life", random: Random) -> str:
    """Kill the driver in one of three ways; return which."""
    from_outside = {"everything": life.members(), "the JVM": life.members("java"), "the Python driver": [life.pid]}
    way = random.choice(sorted(from_outside))
    life.kill(from_outside[way])
    return way


def run_lives(start: Start, folder: Path, seed: int, kills: int) -> None:
    """Kill a pipeline `kills` times, let it finish, and check the messages that it wrote."""
    random = Random(seed)
    source, store, checkpoint = folder / "source", folder / "store", folder / "checkpoint"
    fed, killed = 40 * kills, 0
    feed(source, 0, fed)
    arguments = ["local[2]", str(source), str(store), str(checkpoint)]
    while killed < kills:
        life = start("pipeline_life.py", *arguments)
        assert life.wait_for("started", STARTS_WITHIN_S), life.log.read_text(errors="replace")
        code, moment = wait_for_moment(life, store, random)
        if code is not None:
            assert life.says("done"), life.log.read_text(errors="replace")
            feed(source, fed, 20 * kills)  # all is copied: something to be killed for
            fed += 20 * kills
            continue
        way = kill_somehow(life, random)
        killed += 1
        print(f"seed {seed}: kill {killed} of {way} at {moment}")
        if random.random() < 0.5:
            life.end()  # else the next life begins while Python processes of this one may still be at work
    life = start("pipeline_life.py", *arguments)
    assert life.wait(ENDS_WITHIN_S) == 0, life.log.read_text(errors="replace")
    assert read_bodies(store) == list(range(fed)), f"seed {seed}"
    assert_left_in_order(store)


@pytest.mark.torture(minutes=1.5)
def test_a_pipeline_that_is_killed_four_times_copies_every_message_once(
    start: Start, tmp_path: Path, run_seed: int
) -> None:
    run_lives(start, tmp_path, run_seed, kills=4)


@pytest.mark.torture(minutes=4)
@pytest.mark.parametrize("seed", range(10))
def test_pipelines_that_are_killed_a_hundred_times_copy_every_message_once(
    start: Start, tmp_path: Path, seed: int
) -> None:
    run_lives(start, tmp_path, seed, kills=10)
