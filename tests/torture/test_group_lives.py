"""A group whose only query is stopped and killed again and again: nothing is lost, and its offsets never run ahead.

Each run of the query continues with the previous checkpoint, or with a new one from the group's offsets. The sink is a
store. With the old checkpoint every message arrives once; with a new one the messages above the group's offsets arrive
again, at most one batch. The group's offsets and the sink are compared all the time: the sink has all messages below
the offsets, and at most one batch more.
"""

import os
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

GROUP, ROWS_A_BATCH = "copies", 25  # of group_life.py
QUEUES = 3
STARTS_WITHIN_S = 120
ENDS_WITHIN_S = 240
ENDED_WITHIN_S = 3.0  # after a run of the query began: some batches


class Lives:
    """The stores, and the drivers that run the query, one after the other. The next one is started beforehand."""

    def __init__(self, start: Start, folder: Path, seed: int, keep_share: float) -> None:
        self.random, self.seed, self._start, self._folder = Random(seed), seed, start, folder
        self._keep_share = keep_share
        self.source, self.store = folder / "source", folder / "store"
        self._fed = dict.fromkeys(range(QUEUES), 0)
        self._checkpoints = self.lives = self.runs = self.looks = 0
        self.life = self._next = self._begin()
        self._orders: Path
        self.feed(100)

    def feed(self, count: int) -> None:
        """Give the source so many more messages; a body is the message's offset."""
        queue_ids = self.random.choices(range(QUEUES), k=count)
        bodies = []
        for queue_id in queue_ids:
            bodies.append(f"{self._fed[queue_id]}".encode())
            self._fed[queue_id] += 1
        with rmq_spark.open_store(str(self.source), queues=QUEUES, segment_bytes=1 << 14) as store:
            store.create_topic("orders", QUEUES)
            rows = {"body": pa.array(bodies, pa.binary()), "queueId": pa.array(queue_ids, pa.int32())}
            store.send_many(pa.table(rows), topic="orders")

    def next_life(self) -> None:
        """Have the next driver, and start the one after it."""
        self.life, self._orders = self._next, self._folder / f"orders-{self.lives}"
        self._next = self._begin()
        assert self.life.wait_for("ready", STARTS_WITHIN_S), self.text()

    def run(self, number: int) -> None:
        """Begin the life's run of this number."""
        if self.runs == 0 or self.random.random() >= self._keep_share:
            self._checkpoints += 1
        self.runs += 1
        self._order(f"start-{number}", str(self._folder / f"checkpoint-{self._checkpoints}"))
        assert self.life.wait_for(f"start-{number}", STARTS_WITHIN_S), self.text()

    def stop(self, number: int) -> None:
        """Stop the run; what it finished last is published by the listener of its session, or not."""
        self._order(f"stop-{number}", "")
        assert self.life.wait_for(f"stop-{number}", ENDS_WITHIN_S), self.text()

    def kill(self) -> str:
        """Kill the driver in one of three ways; return which."""
        ways = {
            "everything": self.life.members(),
            "the JVM": self.life.members("java"),
            "the Python driver": [self.life.pid],
        }
        way = self.random.choice(sorted(ways))
        self.life.kill(ways[way])
        return way

    def text(self) -> str:
        """Return what the driver printed, and the seed."""
        return f"seed {self.seed}\n{self.life.log.read_text(errors='replace')}"

    def _begin(self) -> "Life":
        self.lives += 1
        orders = self._folder / f"orders-{self.lives}"
        orders.mkdir()
        return self._start("group_life.py", "local[2]", str(self.source), str(self.store), str(orders))

    def _order(self, name: str, text: str) -> None:
        (self._orders / f"{name}.new").write_text(text)
        os.replace(self._orders / f"{name}.new", self._orders / name)

    def group(self) -> dict[int, int]:
        """Return where the group stands."""
        return rmq_spark.group_offsets(self.source, GROUP).get("orders", {})

    def copies(self) -> dict[int, Counter[int]]:
        """Return how often the sink's store has each message, by queue and offset."""
        found: dict[int, Counter[int]] = {queue_id: Counter() for queue_id in range(QUEUES)}
        if not (self.store / "consumequeue" / "orders").exists():
            return found
        with rmq_spark.open_reader(str(self.store)) as store:
            for queue in store.queues("orders"):
                for batch in store.read(queue, 0, store.bounds(queue).max_offset, ["body"]):
                    found[queue.queue_id].update(int(body) for body in batch.column("body").to_pylist())
        return found

    def let_run(self, when: str) -> None:
        """Look at the group until it is time to end the run: at a random moment, or soon after a batch of it."""
        ends = time.monotonic() + self.random.uniform(0, ENDED_WITHIN_S)
        before, most = self.refresh(when), time.monotonic() + ENDS_WITHIN_S
        if self.random.random() < 0.7:
            while self.refresh(when) == before:
                assert time.monotonic() < most, f"no batch {when}: {self.text()}"
                time.sleep(0.01)  # the driver needs the processor, too
            ends = time.monotonic() + self.random.uniform(0, 0.5)
        while (left := ends - time.monotonic()) > 0:
            self.refresh(when)
            time.sleep(min(self.random.uniform(0, 0.3), left))

    def refresh(self, when: str) -> int:
        """Compare the group with the sink; return how many different messages that has.

        Whatever happens between two looks makes neither comparison wrong.
        """
        behind = held(self.copies())
        group = self.group()
        ahead = held(self.copies())
        self.looks += 1
        for queue_id in range(QUEUES):
            at = group.get(queue_id, 0)
            assert at <= ahead[queue_id], f"queue {queue_id}: the group is ahead, {when}: {group} {ahead} {self.text()}"
            more = behind[queue_id] - at
            assert more <= ROWS_A_BATCH, f"queue {queue_id}: {more} rows behind, {when}: {group} {behind} {self.text()}"
        return sum(ahead.values())

    def finish(self) -> None:
        """Let the query come to the end, and look at everything."""
        self.next_life()
        self.run(1)
        until = time.monotonic() + ENDS_WITHIN_S
        while self.group() != self._fed:
            assert time.monotonic() < until, f"{self.group()} {self._fed} {self.text()}"
            time.sleep(0.05)
        copies = self.copies()
        lost = {queue_id: set(range(end)) - set(copies[queue_id]) for queue_id, end in self._fed.items()}
        assert not any(lost.values()), f"{lost} {self.text()}"
        assert all(set(copies[queue_id]) == set(range(end)) for queue_id, end in self._fed.items())
        doubled = sum(count - 1 for counter in copies.values() for count in counter.values())
        assert doubled <= ROWS_A_BATCH * (self._checkpoints - 1), f"{doubled} rows doubled, {self.text()}"
        print(
            f"seed {self.seed}: {sum(self._fed.values())} messages, {self.lives - 2} drivers killed, {self.runs} runs, "
            f"{self._checkpoints} checkpoints: {doubled} rows doubled, {self.looks} looks"
        )


def held(copies: dict[int, Counter[int]]) -> dict[int, int]:
    """Return by queue the offset below which no message is missing."""
    ends = {}
    for queue_id, counter in copies.items():
        ends[queue_id] = next(offset for offset in range(len(counter) + 1) if offset not in counter)
    return ends


def run_lives(start: Start, folder: Path, seed: int, *, deaths: int, stops_a_life: int, keep_share: float) -> None:
    """Stop the query some times in each life, and then kill its driver; look all the time."""
    print("seed", seed)
    lives = Lives(start, folder, seed, keep_share)
    random = lives.random
    for death in range(1, deaths + 1):
        lives.next_life()
        for number in range(1, stops_a_life + 2):
            lives.feed(random.randrange(50, 150))
            lives.run(number)
            lives.let_run(f"in run {number} of life {death}")
            if number <= stops_a_life:
                lives.stop(number)
                lives.refresh(f"after stop {number} of life {death}")
        print(f"seed {seed}: kill {death} of {lives.kill()}")
        lives.refresh(f"after kill {death}")
        if random.random() < 0.5:
            lives.life.end()  # else the next run begins while processes of this one may still be at work
            lives.refresh(f"after end {death}")
    lives.finish()


@pytest.mark.torture(minutes=2)
def test_a_groups_query_that_is_stopped_and_killed_four_times_loses_and_doubles_nothing(
    start: Start, tmp_path: Path, run_seed: int
) -> None:
    run_lives(start, tmp_path, run_seed, deaths=4, stops_a_life=1, keep_share=1.0)


@pytest.mark.torture(minutes=2)
def test_a_group_goes_on_without_its_querys_checkpoint_and_loses_nothing(
    start: Start, tmp_path: Path, run_seed: int
) -> None:
    run_lives(start, tmp_path, run_seed, deaths=3, stops_a_life=2, keep_share=0.5)


@pytest.mark.torture(minutes=5)
@pytest.mark.parametrize("seed", range(10))
def test_groups_whose_query_is_stopped_and_killed_a_hundred_times_lose_nothing(
    start: Start, tmp_path: Path, seed: int
) -> None:
    run_lives(start, tmp_path, seed, deaths=10, stops_a_life=1, keep_share=1.0 if seed % 2 else 0.5)
