"""Two streams that send to real brokers, while tasks, executors, drivers and brokers die; and a judge of what arrived.

The source has each body twice, in equal rows, so that a sink that drops one of two equal rows is noticed. With
delivery=atLeastOnce a row that was sent again has the id of its twin: the number of different ids of a body is the
number of its rows. With delivery=exactlyOnce no row is sent again.

A process that is frozen for longer than a broker keeps a silent connection goes on beside the process that has taken
its place. So do two drivers with one checkpoint.
"""

import math
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow as pa

import rmq_spark
from compat_kit.clusters import FourServers, TwoBrokers
from compat_kit.deliveries import Delivery, pull_deliveries
from compat_kit.sessions import kill_session, processes_of, signal_all
from compat_kit.sink_life import COPIED, PLAIN, ROWS_A_BATCH, SHUFFLED

QUEUES, KEYS = 4, 8
_LIFE = Path(__file__).with_name("sink_life.py")
_STARTS_WITHIN_S, _ENDS_WITHIN_S = 300.0, 900.0
_EXECUTOR, _WORKER, _COMMIT = "CoarseGrainedExecutorBackend", "pyspark.daemon", "python_streaming_sink_runner"
TASK, EXECUTOR, DRIVER, JVM, BROKER = "task", "executor", "driver", "JVM alone", "broker"
COMMIT, NAME_SERVER, RIVAL, FREEZE = "commit", "name server", "second driver", "freeze"


@dataclass(slots=True)
class Verdict:
    """What a judge found in one topic. All but `rows`, `moved`, and unless it `is_exact` `doubled` must be 0."""

    topic: str
    is_exact: bool = False
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
        counts = (self.missing, self.foreign, self.lost_ids, self.other_ids, self.inversions)
        return any(counts) or bool(self.is_exact and self.doubled)


def fill_source(path: Path, bodies: int, batches: int) -> int:
    """Add so many batches of messages to the store that the streams copy, which has `bodies`. Return what it has then.

    Each body is in two messages.
    """
    total = bodies + batches * ROWS_A_BATCH // 2
    numbers = [number for number in range(bodies, total) for _ in range(2)]
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
    return total


def prepare_cluster(servers: FourServers | TwoBrokers) -> None:
    """Create the topics that delivery=exactlyOnce needs, with the ledger on the first broker."""
    words = ("prepare-sink", "-n", servers.address, "--ledger-broker", next(iter(servers.brokers)))
    command = [*servers.java.network.prefix, sys.executable, "-P", "-m", "rmq_spark.command", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def judge(topic: str, found: Sequence[Delivery], bodies: int, *, is_exact: bool = False) -> Verdict:
    """Compare what a consumer got of a topic with what was to be sent: each of the bodies twice.

    If it `is_exact`, each further row of a body counts as doubled, and as out of order if it is.
    """
    verdict = Verdict(topic, is_exact, rows=len(found))
    ids: defaultdict[bytes, set[str]] = defaultdict(set)
    for one in found:
        ids[one.body].add(one.msg_id)
    wanted = {b"%08d" % number for number in range(bodies)}
    verdict.missing, verdict.foreign = len(wanted - ids.keys()), len(ids.keys() - wanted)
    verdict.lost_ids = sum(len(ids[body]) < 2 for body in wanted & ids.keys())
    verdict.other_ids = sum(len(ids[body]) > 2 for body in wanted & ids.keys())
    verdict.doubled = len(found) - len({one.msg_id for one in found})
    if is_exact:
        verdict.doubled = sum(count - 2 for count in Counter(one.body for one in found).values() if count > 2)
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
    sink: Mapping[str, str] = field(default_factory=lambda: {"delivery": "atLeastOnce"})
    kills_for_s: float = math.inf  # nothing dies later
    frozen_s: float = 135.0  # a broker closes a connection that was silent for 120 s
    deaths: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    bodies: int = 0  # in the source

    def run(self, batches: int, kills: Sequence[str], pause_s: tuple[float, float]) -> list[Verdict]:
        """Copy so many batches while the deaths in `kills` happen, and as many again until all have happened.

        Before each death the streams finish one more batch or none; then there is a random pause. Returns the verdicts.
        Raises RuntimeError if nothing died while `batches` were copied.
        """
        left = list(kills)
        kills_until = time.monotonic() + self.kills_for_s
        with self.servers.client() as client:
            for topic in (PLAIN, SHUFFLED):
                client("create-topic", topic=topic, queues=QUEUES)
        while True:
            self.bodies = fill_source(self.folder / "source", self.bodies, batches)
            deaths = len(left)
            self._live(left, pause_s, kills_until, target="")
            if not left or time.monotonic() > kills_until:
                break
            if len(left) == deaths:
                raise RuntimeError(f"no {left[-1]} died while {batches} batches were copied")
        with self.servers.client() as client:
            found = pull_deliveries(client, [PLAIN, SHUFFLED])
        is_exact = self.sink["delivery"] == "exactlyOnce"
        return [
            judge(topic, [one for one in found if one.topic == topic], self.bodies, is_exact=is_exact)
            for topic in (PLAIN, SHUFFLED)
        ]

    def copy_back(self, kills: Sequence[str], pause_s: tuple[float, float]) -> list[int]:
        """Copy the topic plain into a store directory while the deaths in `kills` happen.

        Returns the queues that differ: each must have the rows of both brokers, those of each broker in their order.
        """
        target = self.folder / "target"
        self._live(list(kills), pause_s, math.inf, target=str(target))
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

    def _live(self, left: list[str], pause_s: tuple[float, float], kills_until: float, target: str) -> None:
        """Run the streams to their end. Takes each death from the end of `left`. None happens after `kills_until`."""
        life = self._start(target)
        until = time.monotonic() + _ENDS_WITHIN_S
        try:
            while not life.says("done"):
                if left and time.monotonic() < kills_until:
                    self._wait_for_batches(life, self.random.randint(0, 1))
                    time.sleep(self.random.uniform(*pause_s))
                    until = time.monotonic() + _ENDS_WITHIN_S
                    survivor = self._die(life, left[-1], target) if life.code is None else None
                    if survivor is not None:
                        life = survivor
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
        options += [f"target={target}"] if target else [f"sink.{name}={value}" for name, value in self.sink.items()]
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

    def _die(self, life: _Life, kind: str, target: str) -> _Life | None:
        """Let something of a kind die. Return the life to go on with, None if there was nothing to kill."""
        if kind in (BROKER, NAME_SERVER):
            servers = [*self.servers.brokers.values()] if kind == BROKER else self.servers.name_servers
            server = self.random.choice(servers)
            server.kill()
            time.sleep(self.random.uniform(0.1, 3))
            self.servers.start(server)
            return life
        if kind in (RIVAL, FREEZE):
            return self._meet_rival(life, target, is_frozen=kind == FREEZE)
        words = {TASK: _WORKER, EXECUTOR: _EXECUTOR, COMMIT: _COMMIT, JVM: "org.apache.spark.deploy.SparkSubmit"}
        victims = life.members(words.get(kind, ""))
        until = time.monotonic() + 5
        while kind == COMMIT and not victims and life.code is None and time.monotonic() < until:
            victims = life.members(_COMMIT)  # such a process lives for a moment only
        if kind in (TASK, EXECUTOR, COMMIT):
            victims = self._one_of(victims)
        signal_all(victims, signal.SIGKILL)
        if kind in (JVM, DRIVER):
            until = time.monotonic() + 30
            while life.code is None and time.monotonic() < until:
                time.sleep(0.1)
            life.kill_all()
        return life if victims else None

    def _meet_rival(self, life: _Life, target: str, *, is_frozen: bool) -> _Life:
        """Start a second driver with the same checkpoints. Return the one of the two that stays.

        With `is_frozen` the first one is frozen meanwhile, and both run when it is thawed.
        """
        frozen = life.members() if is_frozen else []
        signal_all(frozen, signal.SIGSTOP)
        thaws = time.monotonic() + self.frozen_s
        try:
            rival = self._start(target)
            while is_frozen and time.monotonic() < thaws:
                time.sleep(0.2)
        finally:
            signal_all(frozen, signal.SIGCONT)
        time.sleep(self.random.uniform(3, 15))
        pair = [life, rival]
        self.random.shuffle(pair)
        pair[0].kill_all()
        return pair[1]

    def _one_of(self, pids: list[int]) -> list[int]:
        return [self.random.choice(pids)] if pids else []
