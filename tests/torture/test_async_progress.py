"""Drivers with asynchronous progress tracking are killed again and again: no row is lost, and some come twice.

Each driver is a program of its own. It is killed at a random moment after its query began, while messages arrive. Most
drivers continue with the checkpoint of the one before them, others begin at the offsets of the consumer group.
"""

import time
from collections import Counter
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

Start = Callable[..., "Life"]

GROUP = "tracked"  # of async_progress_life.py
QUEUES = 3
STARTS_WITHIN_S = 120
ENDS_WITHIN_S = 240
RUNS_FOR_S = 6.0  # at most, after its first row
NEW_CHECKPOINT_SHARE = 0.2
EARLY_SHARE = 0.1  # of the drivers: killed perhaps before the first row


class Tracked:
    """A store to which messages come, and the rows that the drivers' sinks have noted."""

    def __init__(self, start: Start, folder: Path, seed: int, sink: str) -> None:
        self.random, self.seed, self.sink = Random(seed), seed, sink
        self._start, self._folder = start, folder
        self.store, self.notes = folder / "store", folder / "notes"
        self.fed = dict.fromkeys(range(QUEUES), 0)
        self.kills = self.checkpoints = 0
        self._messages = rmq_spark.open_store(self.store, queues=QUEUES, segment_bytes=1 << 16)
        self._messages.create_topic("orders", QUEUES)
        self.feed(50)

    def feed(self, count: int) -> None:
        """Append so many messages to queues at random."""
        queue_ids = self.random.choices(range(QUEUES), k=count)
        for queue_id in queue_ids:
            self.fed[queue_id] += 1
        rows = {"body": pa.array([b"x"] * count, pa.binary()), "queueId": pa.array(queue_ids, pa.int32())}
        self._messages.send_many(pa.table(rows), topic="orders")

    def begin(self) -> "Life":
        """Start the next driver and wait until its query runs."""
        if not self.checkpoints or self.random.random() < NEW_CHECKPOINT_SHARE:
            self.checkpoints += 1
        checkpoint = self._folder / f"checkpoint-{self.checkpoints}"
        interval_ms = self.random.choice((300, 1000, 5000))
        arguments = (self.store, self.notes, checkpoint, self.sink, interval_ms)
        life = self._start("async_progress_life.py", *map(str, arguments))
        assert life.wait_for("started", STARTS_WITHIN_S), self.text(life)
        return life

    def run_and_kill(self) -> None:
        """Let a driver run while messages arrive, kill it, and check what it has published."""
        life, before = self.begin(), self.size()
        give_up, is_early = time.monotonic() + ENDS_WITHIN_S, self.random.random() < EARLY_SHARE
        while not is_early and self.size() == before:
            assert life.wait(0.1) is None, self.text(life)
            assert time.monotonic() < give_up, self.text(life)
        until = time.monotonic() + self.random.uniform(0, RUNS_FOR_S)
        while time.monotonic() < until:
            self.feed(self.random.randint(1, 20))
            assert life.wait(0.1) is None, self.text(life)
        way = self.random.choice(("everything", "the JVM", "the Python driver"))
        life.kill({"everything": life.members(), "the JVM": life.members("java"), "the Python driver": [life.pid]}[way])
        life.end()
        self.kills += 1
        self.check_published(life)
        print(f"seed {self.seed}, {self.sink}: kill {self.kills} of {way}, {self.counts()}", flush=True)

    def check_published(self, life: "Life") -> None:
        """Check that the sink has had every message below the group's offsets."""
        delivered = self.delivered()
        for queue_id, end in rmq_spark.group_offsets(self.store, GROUP).get("orders", {}).items():
            missing = [offset for offset in range(end) if (queue_id, offset) not in delivered]
            assert not missing, f"queue {queue_id}, group at {end}: {missing}, {self.text(life)}"

    def finish(self) -> None:
        """Let a last driver deliver what is left."""
        life = self.begin()
        until = time.monotonic() + ENDS_WITHIN_S
        while len(self.delivered()) < sum(self.fed.values()) and time.monotonic() < until:
            assert life.wait(0.2) is None, self.text(life)
        life.end()
        self.check_published(life)

    def size(self) -> int:
        """Return the size of the notes, in bytes."""
        return self.notes.stat().st_size if self.notes.exists() else 0

    def delivered(self) -> Counter[tuple[int, int]]:
        """Return how often the sink got each message."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return Counter((int(queue_id), int(offset)) for queue_id, offset in map(str.split, lines))

    def lost(self) -> int:
        """Return the number of messages that the sink did not get."""
        delivered = self.delivered()
        return sum((queue, offset) not in delivered for queue, end in self.fed.items() for offset in range(end))

    def counts(self) -> str:
        """Return the numbers of messages, and of rows that came more than once."""
        delivered = self.delivered()
        return f"{sum(self.fed.values())} messages, {len(delivered)} delivered, {delivered.total()} rows"

    def text(self, life: "Life") -> str:
        """Return what a driver printed, and the seed."""
        return f"seed {self.seed}\n{life.log.read_text(errors='replace')}"


def run_and_count(tracked: Tracked, kills: int) -> None:
    """Kill drivers so often, let the last one finish, and check that the sink got every message."""
    for _ in range(kills):
        tracked.run_and_kill()
    tracked.finish()
    print(f"seed {tracked.seed}, {tracked.sink}: {tracked.kills} kills, {tracked.counts()}, {tracked.lost()} lost")
    assert tracked.lost() == 0, tracked.counts()


@pytest.mark.torture(minutes=1)
@pytest.mark.parametrize("sink", ["foreach", "noop", "console"])
def test_a_sink_gets_every_message_though_its_driver_is_killed(
    start: Start, tmp_path: Path, run_seed: int, sink: str
) -> None:
    run_and_count(Tracked(start, tmp_path, run_seed, sink), kills=2)


@pytest.mark.torture(minutes=10)
@pytest.mark.parametrize("sink", ["foreach", "noop", "console"])
def test_a_sink_gets_every_message_though_its_driver_is_killed_fifty_times(
    start: Start, tmp_path: Path, run_seed: int, sink: str
) -> None:
    run_and_count(Tracked(start, tmp_path, run_seed, sink), kills=50)
