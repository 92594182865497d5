"""Two streams that send to real brokers, while tasks, executors, drivers and brokers die; and a judge of what arrived.

The source has each body twice, in equal rows, so that a sink that drops one of two equal rows is noticed. A row that
was sent again has the id of its twin: the number of different ids of a body is the number of its rows.
"""

import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow as pa

import rmq_spark
from compat_kit.clusters import FourServers
from compat_kit.deliveries import Delivery, pull_deliveries
from compat_kit.sessions import kill_session, processes_of, signal_all
from compat_kit.sink_life import COPIED, PLAIN, ROWS_A_BATCH, SHUFFLED

QUEUES, KEYS = 4, 8
_LIFE = Path(__file__).with_name("sink_life.py")
_STARTS_WITHIN_S, _ENDS_WITHIN_S = 300.0, 900.0
_EXECUTOR, _WORKER = "CoarseGrainedExecutorBackend", "pyspark.daemon"
TASK, EXECUTOR, DRIVER, JVM, BROKER = "task", "executor", "driver", "JVM alone", "broker"


@dataclass(slots=True)
class Verdict:
    """What a judge found in one topic. All but `rows`, `doubled` and `moved` must be 0."""

    topic: str
    rows: int = 0
    missing: int = 0
    foreign: int = 0
    doubled: int = 0  # rows that were sent again, with the id of their twin
    lost_ids: int = 0  # bodies with fewer ids than rows: a reader that drops copies would lose a row
    other_ids: int = 0  # bodies with more ids than rows: a copy that cannot be recognised
    inversions: int = 0  # first copies of a sharding key in a queue that are out of order
    moved: int = 0  # sharding keys that are in several queues

    @property
    def has_faults(self) -> bool:
        """Whether a message was lost, invented, or lost its order, or a copy cannot be recognised."""
        return bool(self.missing or self.foreign or self.lost_ids or self.other_ids or self.inversions)


def fill_source(path: Path, batches: int) -> int:
    """Write the store that the streams copy: so many batches of messages. Return the number of bodies."""
    bodies = batches * ROWS_A_BATCH // 2
    numbers = [number for number in range(bodies) for _ in range(2)]
    table = pa.table(
        {
            "body": pa.array([b"%08d" % number for number in numbers], pa.binary()),
            "tags": pa.array([f"tag{number % 3}" for number in numbers]),
            "keys": pa.array([f"key-{number}" for number in numbers]),
            "shardingKey": pa.array([f"k{number % KEYS}" for number in numbers]),
            "queueId": pa.array([number % KEYS % QUEUES for number in numbers], pa.int32()),
        }
    )
    with rmq_spark.open_store(str(path), queues=QUEUES) as store:
        store.send_many(table, topic="orders")
    return bodies


def judge(topic: str, found: Sequence[Delivery], bodies: int) -> Verdict:
    """Compare what a consumer got of a topic with what was to be sent: each of the bodies twice."""
    verdict = Verdict(topic, rows=len(found))
    ids: defaultdict[bytes, set[str]] = defaultdict(set)
    for one in found:
        ids[one.body].add(one.msg_id)
    wanted = {b"%08d" % number for number in range(bodies)}
    verdict.missing, verdict.foreign = len(wanted - ids.keys()), len(ids.keys() - wanted)
    verdict.lost_ids = sum(len(ids[body]) < 2 for body in wanted & ids.keys())
    verdict.other_ids = sum(len(ids[body]) > 2 for body in wanted & ids.keys())
    verdict.doubled = len(found) - len({one.msg_id for one in found})
    if topic == PLAIN:
        verdict.inversions, verdict.moved = _count_inversions(found)
    return verdict


def _count_inversions(found: Sequence[Delivery]) -> tuple[int, int]:
    """Return how many first copies of a sharding key come after a later one of their queue, and how many keys moved.

    A key moves when a batch begins while a broker is away, as with Java's producer. So order is that of one queue.
    """
    seen: set[tuple[str, int, str]] = set()
    last: dict[tuple[str, int, str], bytes] = {}
    inversions = 0
    for one in sorted(found, key=lambda one: (one.broker, one.queue_id, one.queue_offset)):
        place = (one.broker, one.queue_id)
        if (copy := (*place, one.msg_id)) in seen:
            continue
        seen.add(copy)
        key = (*place, one.properties["__SHARDINGKEY"])
        inversions += one.body < last.get(key, b"")
        last[key] = max(one.body, last.get(key, b""))
    queues = Counter(key for _, _, key in last)
    return inversions, sum(count > 1 for count in queues.values())


def is_merge(rows: Sequence[object], parts: Sequence[Sequence[object]]) -> bool:
    """Return whether `rows` has the rows of all parts and no others, those of each part in their order.

    >>> is_merge("axbyc", ["abc", "xy"]), is_merge("axcyb", ["abc", "xy"])
    (True, False)
    """
    taken = {(0,) * len(parts)}  # numbers of rows of each part that can have led here
    for row in rows:
        taken = {
            (*counts[:number], counts[number] + 1, *counts[number + 1 :])
            for counts in taken
            for number, part in enumerate(parts)
            if counts[number] < len(part) and part[counts[number]] == row
        }
    return tuple(map(len, parts)) in taken


class _Life:
    """A process with all that it starts, in a session of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def says(self, word: str) -> bool:
        return word in self.log.read_text(errors="replace").splitlines()

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def members(self, word: str = "") -> list[int]:
        """Return the living processes of the session whose command line has the word."""
        return processes_of(self.pid, word)

    def kill_all(self) -> None:
        """Kill all processes of the session, and wait until they are gone."""
        kill_session(self._process)


@dataclass(slots=True)
class SinkDrill:
    """Lives of the streams over `servers`, and their deaths, in `folder`. `say` gets lines for people."""

    servers: FourServers
    folder: Path
    random: Random
    master: str
    spark_home: str | None
    say: Callable[[str], None]
    deaths: Counter[str] = field(default_factory=Counter)
    lives: int = 0

    def run(self, batches: int, kills: Sequence[str], pause_s: tuple[float, float]) -> list[Verdict]:
        """Copy so many batches while the deaths in `kills` happen. Return the verdicts.

        Before each death the streams finish none, one or two batches; then there is a random pause.
        """
        bodies = fill_source(self.folder / "source", batches)
        with self.servers.client() as client:
            for topic in (PLAIN, SHUFFLED):
                client("create-topic", topic=topic, queues=QUEUES)
        self._live(kills, pause_s, target="")
        with self.servers.client() as client:
            found = pull_deliveries(client, [PLAIN, SHUFFLED])
        return [judge(topic, [one for one in found if one.topic == topic], bodies) for topic in (PLAIN, SHUFFLED)]

    def copy_back(self, kills: Sequence[str], pause_s: tuple[float, float]) -> list[int]:
        """Copy the topic plain into a store directory while the deaths in `kills` happen.

        Returns the queues that differ: each must have the rows of both brokers, those of each broker in their order.
        """
        target = self.folder / "target"
        self._live(kills, pause_s, target=str(target))
        with self.servers.client() as client:
            sent = pull_deliveries(client, [PLAIN])
        copied: defaultdict[int, list[object]] = defaultdict(list)
        with rmq_spark.open_reader(str(target)) as store:
            for queue in store.queues(PLAIN):
                for batch in store.read(queue, 0, store.bounds(queue).max_offset, COPIED.split(",")):
                    for row in batch.to_pylist():
                        given = dict(row["properties"])
                        shard = given.get("__SHARDINGKEY")
                        copied[queue.queue_id].append((row["body"], row["tags"], row["keys"], row["flag"], shard))
        parts: defaultdict[int, defaultdict[str, list[object]]] = defaultdict(lambda: defaultdict(list))
        for one in sent:
            row = (one.body, one.tags, one.keys, one.flag, one.properties["__SHARDINGKEY"])
            parts[one.queue_id][one.broker].append(row)
        whole = [queue for queue, own in parts.items() if is_merge(copied[queue], [*own.values()])]
        return sorted((parts.keys() | copied.keys()).difference(whole))

    def _live(self, kills: Sequence[str], pause_s: tuple[float, float], target: str) -> None:
        left = list(kills)
        life = self._start(target)
        until = time.monotonic() + _ENDS_WITHIN_S
        try:
            while not life.says("done"):
                if left:
                    self._wait_for_batches(life, self.random.randint(0, 2))
                    time.sleep(self.random.uniform(*pause_s))
                    until = time.monotonic() + _ENDS_WITHIN_S
                    if life.code is None and self._die(life, left[-1]):
                        self.deaths[left.pop()] += 1
                        self.say(f"{self.deaths.total()} deaths: {dict(self.deaths)}")
                time.sleep(0.2)
                if life.code is not None and not life.says("done"):  # also if a death of a task ended a query
                    life.kill_all()
                    life = self._start(target)
                if time.monotonic() > until:
                    raise RuntimeError(f"the last life does not end: {life.log.read_text(errors='replace')[-4000:]}")
        finally:
            life.kill_all()

    def _wait_for_batches(self, life: _Life, batches: int) -> None:
        """Wait until so many more batches are committed, until the life ends, or for a minute."""
        wanted, until = self._count_batches() + batches, time.monotonic() + 60
        while self._count_batches() < wanted and life.code is None and time.monotonic() < until:
            time.sleep(0.1)

    def _count_batches(self) -> int:
        newest: Counter[Path] = Counter()  # Spark deletes old commits
        for path in self.folder.glob("checkpoints/*/commits/[0-9]*"):
            newest[path.parent] = max(newest[path.parent], int(path.name))
        return newest.total()

    def _start(self, target: str) -> _Life:
        self.lives += 1
        options = ["spark.task.maxFailures=100", "spark.deploy.maxExecutorRetries=-1"]
        source, checkpoints = str(self.folder / "source"), str(self.folder / "checkpoints")
        arguments = [self.master, source, self.servers.address, checkpoints]
        options += [f"target={target}"] if target else []
        prefix = list(self.servers.java.network.prefix)
        home = [] if self.spark_home is None else ["env", f"SPARK_HOME={self.spark_home}", "SPARK_LOCAL_IP=127.0.0.1"]
        command = [*prefix, *home, sys.executable, "-P", str(_LIFE), *arguments, *options]
        life = _Life(command, self.folder / f"life-{self.lives:03}.log")
        until = time.monotonic() + _STARTS_WITHIN_S
        while not life.says("started"):
            if life.code is not None or time.monotonic() > until:
                raise RuntimeError(f"a life did not start: {life.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)
        return life

    def _die(self, life: _Life, kind: str) -> bool:
        """Kill something of a kind. Return whether there was something to kill."""
        if kind == TASK:
            victims = self._one_of(life.members(_WORKER))
        elif kind == EXECUTOR:
            victims = self._one_of(life.members(_EXECUTOR))
        elif kind == JVM:
            victims = self._one_of(life.members("org.apache.spark.deploy.SparkSubmit"))
        elif kind == DRIVER:
            victims = life.members()
        else:
            broker = self.random.choice([*self.servers.brokers.values()])
            broker.kill()
            time.sleep(self.random.uniform(0.1, 3))
            self.servers.start(broker)
            return True
        signal_all(victims, signal.SIGKILL)
        if kind in (JVM, DRIVER):
            until = time.monotonic() + 30
            while life.code is None and time.monotonic() < until:
                time.sleep(0.1)
            life.kill_all()
        return bool(victims)

    def _one_of(self, pids: list[int]) -> list[int]:
        return [self.random.choice(pids)] if pids else []
