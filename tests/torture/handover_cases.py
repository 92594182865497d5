"""Four ways in which a member keeps queues from another, how long the other waits, and which messages come twice.

    python -m tests.torture.handover_cases [CASE ...] [HANDOVER_TIMEOUT=60s] [LEASE_TIMEOUT=120s] [LEASE_HEARTBEAT=30s]

Prints a line for each case. The cases run one after the other: with the default times that takes about six minutes.
"""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

import rmq_spark
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_files import GroupPaths

if TYPE_CHECKING:
    from tests.torture.conftest import Life

Row = tuple[int, int]  # queue id and queue offset

GROUP = "relay"  # of handover_life.py
QUEUES, MESSAGES = 4, 50  # of each queue, at a time
LIMIT_S = 600  # ends a hang


@dataclass(frozen=True, slots=True)
class Times:
    """The options that decide how long a handover takes, as a query gets them."""

    handover_timeout: str = "60s"
    lease_timeout: str = "120s"
    lease_heartbeat: str = "30s"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a case: the seconds until the second member had the queues, and the rows that each one delivered.

    `taken` are the queues that the second member got from the first one.
    """

    seconds: float
    first: list[Row]
    second: list[Row]
    taken: frozenset[int]
    messages: int  # of each queue

    @property
    def twice(self) -> set[Row]:
        """The messages that were delivered more than once."""
        return {row for row, count in Counter(self.first + self.second).items() if count > 1}

    @property
    def missing(self) -> set[Row]:
        """The messages that nobody delivered."""
        every = {(queue_id, offset) for queue_id in range(QUEUES) for offset in range(self.messages)}
        return every - set(self.first) - set(self.second)


class Relay:
    """A store, and two drivers that share a group on it."""

    def __init__(self, start: "Callable[..., Life]", folder: Path, times: Times, interval: str = "") -> None:
        self.path, self._folder, self.messages = folder / "store", folder, 0
        with rmq_spark.open_store(self.path) as store:
            store.create_topic("orders", QUEUES)
        self.append()
        self._claims = GroupPaths(str(self.path), GROUP).claims
        options = (times.handover_timeout, times.lease_timeout, times.lease_heartbeat)
        self.lives: dict[str, Life] = {}
        for name, trigger in (("first", interval), ("second", "")):
            (folder / name).mkdir()
            arguments = (str(self.path), str(folder / name), trigger, *options)
            self.lives[name] = start("handover_life.py", "local[2]", *arguments)

    def append(self) -> None:
        """Give each queue more messages."""
        queue_ids = [queue_id for queue_id in range(QUEUES) for _ in range(MESSAGES)]
        rows = {"body": pa.array([b"x"] * len(queue_ids), pa.binary()), "queueId": pa.array(queue_ids, pa.int32())}
        with rmq_spark.open_store(self.path) as store:
            store.send_many(pa.table(rows), topic="orders")
        self.messages += MESSAGES

    def tell(self, name: str, what: str) -> None:
        """Make a file that the driver looks for."""
        (self._folder / name / what).touch()

    def wake(self, name: str) -> None:
        """Have a driver's batches sleep no more."""
        (self._folder / name / "sleep").unlink()

    def begin(self, name: str) -> None:
        """Have a driver's query begin."""
        self.expect(name, "ready")
        self.tell(name, "begin")
        self.expect(name, "started")

    def expect(self, name: str, word: str) -> None:
        """Wait until the driver says so."""
        assert self.lives[name].wait_for(word, LIMIT_S), self._text()

    def owned(self, name: str) -> frozenset[int]:
        """Return the queues that a driver's query owns."""
        pids = {str(pid) for pid in self.lives[name].members()}
        claims = read_claims(self._claims).queues
        return frozenset(
            queue.queue_id for queue, claim in claims.items() if claim.owner.partition("@")[2].partition("#")[0] in pids
        )

    def wait(self, is_so: Callable[[], bool]) -> float:
        """Wait until it is so; return for how many seconds."""
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < LIMIT_S, self._text()
            time.sleep(0.01)
        return time.monotonic() - begun

    def wait_until_owned(self, name: str, count: int) -> float:
        """Wait until a driver's query owns `count` queues; return the seconds waited."""
        return self.wait(lambda: len(self.owned(name)) == count)

    def delivered(self, name: str) -> list[Row]:
        """Return what a driver noted. A line that its death cut off does not count."""
        notes = self._folder / name / "notes"
        lines = notes.read_text().split("\n")[:-1] if notes.exists() else []
        return [(int(queue_id), int(offset)) for queue_id, offset in map(str.split, lines)]

    def wait_until_noted(self, name: str, count: int) -> None:
        """Wait until a driver has delivered `count` messages."""
        self.wait(lambda: len(self.delivered(name)) >= count)

    def wait_until_published(self) -> None:
        """Wait until the group has finished all messages."""
        end = dict.fromkeys(range(QUEUES), self.messages)
        self.wait(lambda: rmq_spark.group_offsets(self.path, GROUP).get("orders") == end)

    def finish(self, seconds: float, taken: frozenset[int]) -> Outcome:
        """Stop the queries that live, and return what came of it."""
        for name, life in self.lives.items():
            if life.members():
                self.tell(name, "stop")
                self.expect(name, "stopped")
        return Outcome(seconds, self.delivered("first"), self.delivered("second"), taken, self.messages)

    def _text(self) -> str:
        logs = [f"{name}\n{life.log.read_text(errors='replace')}" for name, life in self.lives.items()]
        return f"{read_claims(self._claims)}\n" + "\n".join(logs)


def sleeping_batch(start: "Callable[..., Life]", folder: Path, times: Times) -> Outcome:
    """Have the first member sleep in foreachBatch while the second one joins."""
    relay = Relay(start, folder, times)
    relay.tell("first", "sleep")
    relay.begin("first")
    relay.wait_until_noted("first", QUEUES * MESSAGES)
    relay.begin("second")
    seconds = relay.wait_until_owned("second", QUEUES // 2)
    taken = relay.owned("second")
    relay.wake("first")
    relay.append()
    relay.wait_until_published()
    return relay.finish(seconds, taken)


def long_interval(start: "Callable[..., Life]", folder: Path, times: Times) -> Outcome:
    """Have the second member join while the first one has ended its batch, and starts the next one in an hour."""
    relay = Relay(start, folder, times, "1 hour")
    relay.begin("first")
    relay.wait_until_noted("first", QUEUES * MESSAGES)
    relay.begin("second")
    seconds = relay.wait_until_owned("second", QUEUES // 2)
    return relay.finish(seconds, relay.owned("second"))


def killed(start: "Callable[..., Life]", folder: Path, times: Times) -> Outcome:
    """Kill the first of two members in its batch."""
    relay = _two_with_one_in_a_batch(start, folder, times)
    taken = relay.owned("first")
    relay.lives["first"].kill(relay.lives["first"].members())
    seconds = relay.wait_until_owned("second", QUEUES)
    relay.wait_until_published()
    return relay.finish(seconds, taken)


def stopped_process(start: "Callable[..., Life]", folder: Path, times: Times) -> Outcome:
    """Stop (SIGSTOP) all processes of the first of two members in its batch; resume them afterwards."""
    relay = _two_with_one_in_a_batch(start, folder, times)
    taken, pids = relay.owned("first"), relay.lives["first"].members()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        seconds = relay.wait_until_owned("second", QUEUES)
    finally:
        relay.wake("first")
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    relay.wait_until_owned("first", QUEUES // 2)
    relay.append()
    relay.wait_until_published()
    return relay.finish(seconds, taken)


def _two_with_one_in_a_batch(start: "Callable[..., Life]", folder: Path, times: Times) -> Relay:
    relay = Relay(start, folder, times)
    relay.begin("first")
    relay.begin("second")
    for name in relay.lives:
        relay.wait_until_owned(name, QUEUES // 2)
    relay.wait_until_published()
    noted = len(relay.delivered("first"))
    relay.tell("first", "sleep")
    relay.append()
    relay.wait_until_noted("first", noted + QUEUES // 2 * MESSAGES)
    relay.wait(lambda: len(relay.delivered("second")) + noted >= QUEUES // 2 * MESSAGES)
    return relay


CASES = {
    "sleeping-batch": sleeping_batch,
    "long-interval": long_interval,
    "killed": killed,
    "stopped-process": stopped_process,
}


def main(*words: str) -> None:
    """Run cases and print what came of each."""
    from tests.torture.conftest import Life, script_command

    given = dict(word.split("=", 1) for word in words if "=" in word)
    times = Times(**{name.lower(): value for name, value in given.items()})
    names = [word for word in words if "=" not in word] or list(CASES)
    print(times, f"{QUEUES} queues, {MESSAGES} messages of each in a batch", flush=True)
    for name in names:
        lives: list[Life] = []
        with tempfile.TemporaryDirectory() as folder:

            def start(script: str, *arguments: str, folder: str = folder, lives: "list[Life]" = lives) -> "Life":
                lives.append(Life([*script_command(script), *arguments], Path(folder, f"{len(lives)}.log")))
                return lives[-1]

            try:
                found = CASES[name](start, Path(folder), times)
            finally:
                for life in lives:
                    life.end()
            print(
                f"{name}: handed over after {found.seconds:.1f} s; {len(found.twice)} messages twice, "
                f"{len(found.missing)} missing",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
