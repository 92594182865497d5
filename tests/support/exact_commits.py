"""Commits of the exactly-once sink to a cluster in this process: staged batches, processes that die, what is stored.

A *process* is a thread with a `Script`. It dies or is frozen at one of its requests: before the request is sent, or
after the broker has executed it, so that nobody gets the answer.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

import pytest
from support.sent_messages import address_of
from support.staged_runs import STAGE, Staging

from rmq_spark.store.backend import CommitTerms, CommitTotals, SinkTerms
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.exactly_once import taking_over
from rmq_spark.store.cluster.exactly_once.preparation import LEDGER_QUEUES
from rmq_spark.store.cluster.exactly_once.sink import ExactSink
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRows, StagedRun
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.group.pull_limits import PullLimits
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

TOPIC, LEDGER = "orders", "RMQ_SPARK_LEDGER"
A, B = QueueKey(TOPIC, 0, "broker-a"), QueueKey(TOPIC, 0, "broker-b")
RUN_LENGTHS = {A: (1, 1), B: (2,)}  # how many rows each run of a batch has: as in `exactly_once_model`
_attempts = count()


class Death(BaseException):
    """A process has died. It sends nothing any more, and its connections are closed."""


def prepare(cluster: RunningCluster) -> RunningCluster:
    """Create the target topic on two brokers, the stage on both, and the ledger on the first one."""
    cluster.create_topic(TOPIC, queues=1)
    cluster.create_topic(STAGE, queues=1)
    cluster.create_topic(LEDGER, queues=LEDGER_QUEUES, brokers=[A.broker])
    return cluster


def make_sink(cluster: RunningCluster, *, timeout_ms: int = 20_000, wait_ms: int = 60_000, **terms: Any) -> ExactSink:
    """Return the sink of one driver. It settles at once, unless `terms` say otherwise."""
    address = address_of(cluster, request_timeout_ms=timeout_ms, broker_down_timeout_ms=wait_ms)
    return ExactSink(address, SinkTerms(TOPIC), CommitTerms(**{"settle_ms": 0, "fence_timeout_ms": 60_000, **terms}))


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Let sessions that wait look again soon."""
    patch.setattr(taking_over, "_LOOK_MS", 5.0)
    patch.setattr(taking_over, "_LEDGER_MS", 5.0)


# Batches.


@dataclass(frozen=True)
class Attempt:
    """The rows of a batch as one attempt has staged them: the bodies for each queue, and the receipt."""

    bodies: Mapping[QueueKey, list[bytes]]
    receipt: StagedRows


def stage(
    cluster: RunningCluster,
    key: CommitKey,
    runs: Mapping[QueueKey, Sequence[int]] | None = None,
    digest: int = 7,
    label: int | None = None,
) -> Attempt:
    """Stage a batch. `runs` say how many rows each run has. Each attempt has rows that no other attempt has.

    Attempts with the same `digest` have the same rows for the sink. A body has the batch, the attempt, by default a new
    number, and the number of the row in its queue.
    """
    staging = Staging(cluster, f"{uuid.uuid4().hex[:20].upper()}")
    attempt = next(_attempts) if label is None else label
    bodies: dict[QueueKey, list[bytes]] = {}
    staged: list[StagedRun] = []
    for queue, lengths in (RUN_LENGTHS if runs is None else runs).items():
        number = count()
        for length in lengths:
            rows = [f"{key.batch_id} {attempt} {next(number)}".encode() for _ in range(length)]
            bodies.setdefault(queue, []).extend(rows)
            staged.append(staging.add(queue, rows))
    rows_count = sum(map(len, bodies.values()))
    queues = {TOPIC: tuple(QueueKey(TOPIC, 0, name) for name in sorted(cluster.brokers))}
    return Attempt(bodies, StagedRows(key, tuple(staged), rows_count, digest, queues))


def commit(sink: ExactSink, *attempts: Attempt, key: CommitKey | None = None) -> CommitTotals:
    """Commit a batch of the receipts of these attempts."""
    return sink.commit(key or attempts[0].receipt.key, [attempt.receipt for attempt in attempts])


def ends(cluster: RunningCluster) -> dict[QueueKey, int]:
    """Return the ends of the target queues."""
    return {queue: cluster.brokers[queue.broker].bounds(TOPIC)[0].max_offset for queue in (A, B)}


def stored(cluster: RunningCluster, since: Mapping[QueueKey, int] | None = None) -> dict[QueueKey, list[bytes]]:
    """Return the bodies of the target queues, in order, from the offsets `since` on."""
    return {
        queue: read_bodies(cluster, queue, since[queue] if since else 0, end) for queue, end in ends(cluster).items()
    }


def read_bodies(cluster: RunningCluster, queue: QueueKey, begin: int, end: int) -> list[bytes]:
    """Return the bodies of messages of a queue."""
    broker = cluster.brokers[queue.broker]
    bodies: list[bytes] = []
    while begin < end:
        of = QueueKey(queue.topic, queue.queue_id)
        found = broker.loop.run(broker.store.get, of, begin, end - begin, PullLimits(memory_bytes=1 << 50), None)
        rest = memoryview(found.body)
        while rest:
            record = decode_record(rest)
            assert isinstance(record, Record), record
            bodies.append(record.body)
            rest = rest[record.total_size :]
        assert found.next_offset > begin, found
        begin = found.next_offset
    return bodies


def check_once(found: Mapping[QueueKey, list[bytes]], *batches: Sequence[Attempt]) -> list[Attempt]:
    """Check that queues have each batch once and in order, all of it from one attempt. Return these attempts.

    `batches` are the attempts of each batch.
    """
    left = {queue: list(bodies) for queue, bodies in found.items()}
    chosen = []
    for attempts in batches:
        for attempt in attempts:
            parts = {queue: left[queue][: len(bodies)] for queue, bodies in attempt.bodies.items()}
            if parts == attempt.bodies:
                break
        else:
            raise AssertionError(f"no attempt of {attempts[0].receipt.key} is stored in order and completely: {found}")
        chosen.append(attempt)
        for queue, bodies in attempt.bodies.items():
            del left[queue][: len(bodies)]
    assert not any(left.values()), f"rows that no batch has, or twice: {left} in {found}"
    return chosen


# Processes.

_scripts: dict[int, "Script"] = {}


@dataclass
class Script:
    """Calls `act`, which may raise, at the request number `at` of a process.

    With `after`, the request is executed first. `when` chooses among requests; others are not counted. `seen` has what
    was counted.
    """

    act: Callable[["Script"], None]
    at: int = -1
    after: bool = False
    when: Callable[[Request[Any]], bool] = lambda _: True
    is_dead: bool = False
    is_used: bool = False
    seen: list[str] = field(default_factory=list)
    clients: set[ClusterClient] = field(default_factory=set)

    def submit_all(self, client: ClusterClient, requests: Sequence[Request[Any]], submit: Any) -> list[Ticket[Any]]:
        """Send requests one by one, and act at the right one."""
        self.clients.add(client)
        tickets: list[Ticket[Any]] = []
        for request in requests:
            if self.is_dead:
                raise Death
            number = len(self.seen)
            if self.when(request):
                self.seen.append(type(request).__name__)
            is_due = number == self.at and len(self.seen) > number
            if is_due and not self.after:
                self.reach()
            tickets += submit(request)
            if is_due and self.after:
                while not tickets[-1].is_done:
                    client._work(inf)
                self.reach()
        return tickets

    def reach(self) -> None:
        """Act."""
        self.is_used = True
        self.act(self)


def die(script: Script) -> None:
    """Let the process die: its connections are closed, and it sends nothing any more."""
    script.is_dead = True
    for client in script.clients:
        client.close()
    raise Death


def live(_: Script) -> None:
    """Let the process live."""


@contextmanager
def scripted(script: Script) -> Iterator[Script]:
    """Let the script apply to requests of this thread."""
    _scripts[threading.get_ident()] = script
    try:
        yield script
    finally:
        del _scripts[threading.get_ident()]


@contextmanager
def watched_requests() -> Iterator[None]:
    """Let scripts apply."""
    real = ClusterClient.submit_all

    def submit_all(
        client: ClusterClient,
        to: str,
        requests: Sequence[Request[Any]],
        timeout_ms: int | None = None,
        done: list[Ticket[Any]] | None = None,
    ) -> list[Ticket[Any]]:
        script = _scripts.get(threading.get_ident())
        if script is None:
            return real(client, to, requests, timeout_ms, done)
        return script.submit_all(client, requests, lambda request: real(client, to, [request], timeout_ms, done))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClusterClient, "submit_all", submit_all)
        yield


class Process:
    """A commit in a thread of its own. It is frozen at a request until `thaw`."""

    def __init__(self, run: Callable[[], object], script: Script | None = None) -> None:
        self.outcome: object = None
        self.is_held, self._is_thawed = threading.Event(), threading.Event()
        self.script = script or Script(live)
        self.script.act = self._hold
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _hold(self, _: Script) -> None:
        self.is_held.set()
        assert self._is_thawed.wait(300)

    def _run(self, run: Callable[[], object]) -> None:
        with scripted(self.script):
            try:
                self.outcome = run()
            except BaseException as error:
                self.outcome = error
        self.is_held.set()  # whoever waits finds that it has ended

    @property
    def has_ended(self) -> bool:
        """Whether the commit has an outcome."""
        return not self._thread.is_alive()

    def await_hold(self) -> bool:
        """Wait until it is frozen. Return False if it has ended without that."""
        assert self.is_held.wait(300)
        return self.script.is_used

    def release(self) -> None:
        """Let it continue."""
        self._is_thawed.set()

    def thaw(self) -> object:
        """Let it continue, and return its outcome when it has ended."""
        self.release()
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self.outcome
