"""Three drivers share a group while messages arrive, one joins late, the topic gets more queues, one is killed, one
is stopped: every message is delivered, each queue in order by its owner, and what the dead one had is owned at once.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_files import GroupPaths

if TYPE_CHECKING:
    from tests.torture.conftest import Life

pytestmark = pytest.mark.spark

Start = Callable[..., "Life"]

GROUP = "crew"  # of member_life.py
QUEUES, MORE_QUEUES = 8, 12
ROWS_AT_ONCE = 500
STARTS_WITHIN_S = 120
ENDS_WITHIN_S = 300


class Crew:
    """The store to which messages come, and the drivers of the group."""

    def __init__(self, start: Start, folder: Path, seed: int, messages: int) -> None:
        self.random, self.seed, self._start, self._folder = Random(seed), seed, start, folder
        self.path, self.messages = folder / "store", messages
        self.rows_a_batch = messages // 100
        self.fed = dict.fromkeys(range(QUEUES), 0)
        self.lives: dict[str, Life] = {}
        self._store = rmq_spark.open_store(self.path)
        self._store.create_topic("orders", QUEUES)
        self.claims = GroupPaths(str(self.path), GROUP).claims

    def hire(self, name: str) -> None:
        """Start a driver, that waits until it is told to begin."""
        arguments = (self._folder / f"{name}.{kind}" for kind in ("notes", "checkpoint", "stop"))
        paths = [str(path) for path in (self.path, *arguments)]
        self.lives[name] = self._start("member_life.py", "local[2]", *paths, str(self.rows_a_batch))

    def begin(self, name: str) -> None:
        """Have a driver's query begin."""
        self.expect(name, "ready")
        self.notes(name).touch()
        self.expect(name, "started")

    def expect(self, name: str, word: str) -> None:
        """Wait until a driver says so."""
        assert self.lives[name].wait_for(word, STARTS_WITHIN_S), self.text(name)

    def stop(self, name: str) -> None:
        """Have a driver stop its query, and wait until it has."""
        (self._folder / f"{name}.stop").touch()
        self.expect(name, "stopped")

    def notes(self, name: str) -> Path:
        """Return the file of what a driver delivered."""
        return self._folder / f"{name}.notes"

    def text(self, name: str) -> str:
        """Return what a driver printed, and the seed."""
        return f"seed {self.seed}, {name}\n{self.lives[name].log.read_text(errors='replace')}"

    def feed(self, until: int) -> None:
        """Append messages until their number is `until`."""
        while (total := sum(self.fed.values())) < until:
            queue_ids = self.random.choices(list(self.fed), k=min(ROWS_AT_ONCE, until - total))
            rows = {"body": pa.array([b"x"] * len(queue_ids), pa.binary()), "queueId": pa.array(queue_ids, pa.int32())}
            self._store.send_many(pa.table(rows), topic="orders")
            for queue_id in queue_ids:
                self.fed[queue_id] += 1
            time.sleep(0.05)

    def add_queues(self) -> None:
        """Give the topic more queues, as an administrator of RocketMQ does."""
        self._store.close()
        path = self.path / "config" / "topics.json"
        table = json.loads(path.read_text())
        table["topicConfigTable"]["orders"] |= {"readQueueNums": MORE_QUEUES, "writeQueueNums": MORE_QUEUES}
        path.write_text(json.dumps(table))
        self._store = rmq_spark.open_store(self.path)
        self.fed |= dict.fromkeys(range(QUEUES, MORE_QUEUES), 0)

    def owners(self) -> dict[int, str]:
        """Return by queue the driver that owns it now, "" without an owner and for an unknown driver."""
        drivers = {str(pid): name for name, life in self.lives.items() for pid in life.members()}
        claims = read_claims(self.claims).queues
        pids = {queue.queue_id: claim.owner.partition("@")[2].partition("#")[0] for queue, claim in claims.items()}
        return {queue_id: drivers.get(pids.get(queue_id, ""), "") for queue_id in self.fed}

    def wait_for_owners(self, *names: str) -> float:
        """Wait until all queues are owned by these, each of which owns some; return how many ms it took."""
        begun = time.monotonic()
        while set((owners := self.owners()).values()) != set(names):
            assert time.monotonic() - begun < ENDS_WITHIN_S, f"{owners}, {[self.text(name) for name in names]}"
            time.sleep(0.002)
        return (time.monotonic() - begun) * 1000

    def wait_until_published(self, name: str) -> None:
        """Wait until the group's offsets are the ends of all queues."""
        until = time.monotonic() + ENDS_WITHIN_S
        while (at := rmq_spark.group_offsets(self.path, GROUP).get("orders")) != self.fed:
            assert time.monotonic() < until, f"{at}, {self.fed}, {self.text(name)}"
            time.sleep(0.05)

    def delivered(self, name: str) -> list[tuple[int, int]]:
        """Return what a driver noted, in order; a line that its death cut off is none."""
        lines = self.notes(name).read_text().split("\n")[:-1]
        return [(int(queue_id), int(offset)) for _, queue_id, offset in map(str.split, lines)]


def run_crew(start: Start, folder: Path, seed: int, messages: int) -> None:
    """Let three drivers come and go while messages arrive."""
    print("seed", seed)
    crew = Crew(start, folder, seed, messages)
    for name in ("first", "second", "late"):
        crew.hire(name)
    crew.feed(messages // 10)
    crew.begin("first")
    crew.begin("second")
    for name in ("first", "second"):
        crew.expect(name, "started")
    crew.feed(messages * 3 // 10)
    shared_ms = crew.wait_for_owners("first", "second")
    crew.begin("late")
    joined_ms = crew.wait_for_owners("first", "second", "late")
    crew.feed(messages * 5 // 10)
    crew.add_queues()
    crew.feed(messages * 6 // 10)
    raised_ms = crew.wait_for_owners("first", "second", "late")
    crew.feed(messages * 7 // 10 + crew.random.randrange(messages // 10))
    owners = crew.owners()
    crew.lives["second"].kill(crew.lives["second"].members())
    killed_ms = crew.wait_for_owners("first", "late")
    crew.feed(messages * 9 // 10)
    crew.stop("first")
    stopped_ms = crew.wait_for_owners("late")
    crew.feed(messages)
    crew.wait_until_published("late")
    crew.stop("late")
    rows = {name: crew.delivered(name) for name in crew.lives}
    every = [row for given in rows.values() for row in given]
    print(
        f"seed {seed}: {messages} messages, delivered by { ({name: len(given) for name, given in rows.items()}) }: "
        f"{len(every) - len(set(every))} again; of {len(owners)} queues the one that was killed had "
        f"{list(owners.values()).count('second')}; ms until all queues were owned: two shared {shared_ms:.0f}, "
        f"one joined {joined_ms:.0f}, queues came {raised_ms:.0f}, one killed {killed_ms:.0f}, "
        f"one stopped {stopped_ms:.0f}"
    )
    assert set(every) == {(queue_id, offset) for queue_id, end in crew.fed.items() for offset in range(end)}
    for name, given in rows.items():
        last = dict.fromkeys(crew.fed, -1)
        for queue_id, offset in given:
            assert offset > last[queue_id], (
                f"seed {seed}: {name} delivered {offset} of {queue_id} after {last[queue_id]}"
            )
            last[queue_id] = offset
    assert len(every) - len(set(every)) <= crew.rows_a_batch * 2, "a death or a stop costs one batch at most"


@pytest.mark.torture(minutes=2)
def test_three_drivers_that_come_and_go_deliver_every_message(start: Start, tmp_path: Path, run_seed: int) -> None:
    run_crew(start, tmp_path, run_seed, 40_000)


@pytest.mark.torture(minutes=5)
@pytest.mark.parametrize("seed", range(3))
def test_three_drivers_that_come_and_go_deliver_every_message_of_many(start: Start, tmp_path: Path, seed: int) -> None:
    run_crew(start, tmp_path, seed, 200_000)
