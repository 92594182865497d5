"""Reading back from brokers in this process: after kills, expiry, and among the messages of other producers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.sent_messages import count_ids, read_bodies
from support.staged_runs import STAGE, TERMS, SessionCalls, Staging, tear_last_record

from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.publishing import Publishing
from rmq_spark.store.cluster.exactly_once.read_back import ReadBack
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows, count_rows
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.errors import DamageError, IntentStuckError
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.brokers import Answer, Broker, RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import Call

BATCH, PULL, STATS = RequestCode.SEND_BATCH_MESSAGE, RequestCode.PULL_MESSAGE, RequestCode.GET_TOPIC_STATS_INFO
KEY = CommitKey("query", 7)
A, B = "broker-a", "broker-b"


def orders(queue_id: int, broker: str = A) -> QueueKey:
    return QueueKey("orders", queue_id, broker)


def bodies(name: str, count: int) -> list[bytes]:
    return [f"{name}-{number:04d}".encode() for number in range(count)]


@dataclass
class Session:
    """A session with a cluster: it publishes, and reads back."""

    cluster: RunningCluster
    calls: SessionCalls

    def publish(self, runs: list[StagedRun], stored: dict[QueueKey, int] | None = None) -> WrittenRows:
        publishing = Publishing(
            self.calls,
            TERMS,
            request_timeout_ms=10_000,
            busy_timeout_ms=1000,
            monotonic_ms=monotonic_ms,
            now_ms=now_ms,
        )
        return publishing.run(runs, stored)

    def read(
        self, runs: list[StagedRun], floors: dict[QueueKey, int] | None = None, terms: PullTerms = TERMS
    ) -> WrittenRows:
        known = dict.fromkeys((run.queue for run in runs), 0) | (floors or {})
        return ReadBack(self.calls, self.calls.client, self.calls.address, terms, monotonic_ms).read(runs, known)


@pytest.fixture(params=["5.3", "4.9"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=3)
        yield cluster


@pytest.fixture
def open_session(cluster: RunningCluster) -> Iterator[Callable[[], Session]]:
    opened: list[SessionCalls] = []

    def open_session() -> Session:
        opened.append(SessionCalls(cluster))
        return Session(cluster, opened[-1])

    yield open_session
    for calls in opened:
        calls.close()


@pytest.fixture
def session(open_session: Callable[[], Session]) -> Session:
    return open_session()


def test_empty_queues_have_no_row(cluster: RunningCluster, session: Session) -> None:
    runs = [Staging(cluster).add(queue, bodies("r", 3)) for queue in (orders(0), orders(2, B))]
    assert session.read(runs) == WrittenRows({orders(0): 0, orders(2, B): 0})


@pytest.mark.parametrize("stored", [0, 1, 3, 4, 5, 8])
def test_kill_in_a_batch_leaves_a_beginning_that_is_continued(
    cluster: RunningCluster, open_session: Callable[[], Session], stored: int
) -> None:
    staging, queue = Staging(cluster), orders(1)
    runs = [staging.add(queue, bodies(f"r{number}", 4), on=B) for number in range(3)]
    cluster.send("orders", *bodies("foreign", 5), broker=A, queue_id=1)
    batches = iter(range(9))
    cluster.brokers[A].fail(BATCH, faults.killed_in_batch(stored % 4), when=lambda _: next(batches) == stored // 4)
    with pytest.raises(SessionOverError):
        open_session().publish(runs)
    cluster.brokers[A].heal()
    cluster.brokers[A].restart()
    cluster.send("orders", *bodies("later", 5), broker=A, queue_id=1)
    session = open_session()
    found = session.read(runs, {queue: 5})
    assert found == WrittenRows({queue: stored})
    assert session.publish(runs, dict(found.rows)) == WrittenRows({queue: 12})
    assert open_session().read(runs, {queue: 3}) == WrittenRows({queue: 12})
    rows = [row for number in range(3) for row in bodies(f"r{number}", 4)]
    expected = [*bodies("foreign", 5), *rows[:stored], *bodies("later", 5), *rows[stored:]]
    assert read_bodies(cluster, "orders") == {queue: expected}
    assert set(count_ids(cluster, "orders").values()) == {1}


def cuts_of(size: int, body: int, own: int) -> dict[str, int]:
    """Return bytes of a record of `size` bytes of which a kill leaves as many. `own` are properties of ours."""
    begin = RECORD_HEAD.itemsize + body + 1 + len("orders") + 2
    return {
        "in the head": 30,
        "in the body": RECORD_HEAD.itemsize + body - 1,
        "in the topic": begin - 5,
        "before the properties": begin,
        "in the name of the key": begin + 4,
        "in the key": begin + 20,
        "before the end of the key": begin + 41,
        "after the key": begin + 42,
        "in our properties": begin + own - 1,
        "after our properties": begin + own,
        "in properties of the broker": size - 1,
        "at the end": size,
    }


IS_DROPPED = {"in the head", "in the body", "in the topic"}
IS_STORED = {"after our properties", "in properties of the broker", "at the end"}


@pytest.mark.parametrize("where", cuts_of(0, 0, 0))
@pytest.mark.parametrize("foreign", [[], [b"same", b"other"]], ids=["alone", "with others"])
def test_torn_last_record_is_recognised_after_recovery(
    cluster: RunningCluster, open_session: Callable[[], Session], tmp_path: Path, where: str, foreign: list[bytes]
) -> None:
    staging, queue, broker = Staging(cluster), orders(0), cluster.brokers[A]
    run, later = staging.add(queue, [b"same"] * 3), staging.add(queue, [b"same"], on=B)
    if foreign:
        broker.send("orders", *foreign, queue_id=0)
    open_session().publish([run])
    record = last_record(broker, 0)
    own = len(b"UNIQ_KEY") + 34 + len(b"TAGS\x01A\x02colour\x01red\x02")
    tear_last_record(broker, queue, cuts_of(len(record), 4, own)[where], tmp_path / "torn")
    if foreign:
        broker.send("orders", *foreign, queue_id=0)
    session = open_session()
    found = session.read([run, later], {queue: len(foreign)})
    whole = 3 if where in IS_STORED else 2
    is_torn = where not in IS_STORED | IS_DROPPED
    torn = {queue: (len(foreign) + 2,)} if is_torn else {}
    assert found == WrittenRows({queue: whole}, {}, torn)
    if is_torn:
        with pytest.raises(IntentStuckError, match=rf"queue offset {len(foreign) + 2} is a row of the batch without"):
            found.require(KEY, [run, later])
    else:
        found.require(KEY, [run, later])
    # What an administrator does who skips it: the row is sent again whole.
    session.publish([run, later], dict(found.rows))
    expected = torn if where not in ("before the properties", "in the name of the key", "in the key") else {}
    if where == "before the end of the key":
        expected = {}
    assert open_session().read([run, later], {queue: len(foreign)}) == WrittenRows({queue: 4}, {}, expected)


def last_record(broker: Broker, queue_id: int) -> bytes:
    queue = QueueKey("orders", queue_id)
    limits = broker.settings.pull_limits

    def get() -> bytes:
        return broker.store.get(queue, broker.store.bounds(queue).max_offset - 1, 1, limits, None).body

    return broker.loop.run(get)


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_found_among_many_foreign_messages_in_many_answers(
    cluster: RunningCluster, session: Session, *, on_disk: bool
) -> None:
    staging, floors, runs = Staging(cluster), {}, []
    queues = [orders(queue_id, broker) for broker in (A, B) for queue_id in range(3)]
    for queue in queues:
        cluster.send("orders", *bodies("before", 11), broker=queue.broker, queue_id=queue.queue_id)
        floors[queue] = 7
    for number in range(3):
        some = staging.add_together([(queue, bodies(f"r{number}", 3)) for queue in queues])
        session.publish(some)
        runs += some
        for queue in queues:
            cluster.send("orders", *bodies("between", 50), broker=queue.broker, queue_id=queue.queue_id)
    for broker in cluster.brokers.values():
        broker.settings.on_disk = on_disk
    assert session.read(runs, floors) == WrittenRows(count_rows(runs))
    assert session.calls.beats > len(queues)


def test_namespace_is_in_the_names_of_the_cluster(cluster: RunningCluster, session: Session) -> None:
    cluster.create_topic("ns%orders", queues=1)
    cluster.create_topic(f"ns%{STAGE}", queues=1)
    run = Staging(cluster).add(orders(0), bodies("r", 3))
    cluster.send(f"ns%{STAGE}", blob_of(cluster, run), broker=A, queue_id=0)
    terms = PullTerms(TERMS.group, "ns")
    publishing = Publishing(
        session.calls, terms, request_timeout_ms=10_000, busy_timeout_ms=0, monotonic_ms=monotonic_ms, now_ms=now_ms
    )
    publishing.run([run])
    assert read_bodies(cluster, "ns%orders") == {QueueKey("ns%orders", 0, A): bodies("r", 3)}
    assert session.read([run], terms=terms) == WrittenRows({orders(0): 3})


def blob_of(cluster: RunningCluster, run: StagedRun) -> bytes:
    (found,) = read_bodies(cluster, STAGE)[run.stage]
    return found


# Queues that have changed.


@pytest.mark.parametrize("keeps_minimum", [False, True])
@pytest.mark.parametrize("before", [4, 5, 6, 9])
def test_expired_messages_matter_only_while_rows_are_missing(
    cluster: RunningCluster, session: Session, before: int, *, keeps_minimum: bool
) -> None:
    staging, queue = Staging(cluster), orders(0)
    cluster.send("orders", *bodies("before", 5), broker=A, queue_id=0)
    run, later = staging.add(queue, bodies("r", 4)), staging.add(queue, bodies("r", 4))
    session.publish([run])
    cluster.send("orders", *bodies("after", 5), broker=A, queue_id=0)
    cluster.brokers[A].expire("orders", 0, before, keeps_minimum=keeps_minimum)
    found = session.read([run], {queue: 3})
    if before <= 5:
        assert found == WrittenRows({queue: 4})
    else:
        assert "messages from queue offset 3 have expired while rows are missing" in found.stuck[queue]
    assert "have expired while rows are missing" in session.read([run, later], {queue: 3}).stuck[queue]
    if before <= 5:
        assert session.read([run, later], {queue: 5}) == WrittenRows({queue: 4})


def test_queue_whose_messages_have_all_expired(cluster: RunningCluster, session: Session) -> None:
    run = Staging(cluster).add(orders(0), bodies("r", 4))
    session.publish([run])
    cluster.brokers[A].expire("orders", 0, 4, keeps_minimum=True)
    assert "expired while rows are missing" in session.read([run]).stuck[orders(0)]


def test_queues_that_are_gone_or_smaller_are_stuck_and_the_others_are_read(
    cluster: RunningCluster, session: Session
) -> None:
    cluster.create_topic("gone", queues=1)
    staging = Staging(cluster)
    queues = [orders(0), orders(1), orders(0, B), QueueKey("gone", 0, A), QueueKey("orders", 7, A)]
    runs = [staging.add(queue, bodies("r", 2), on=A) for queue in queues]
    session.publish(runs[:4])
    cluster.brokers[A].delete_topic("gone")
    found = session.read(runs, {orders(1): 3})
    assert found.rows == {orders(0): 2, orders(1): 0, orders(0, B): 2, queues[3]: 0, queues[4]: 0}
    assert set(found.stuck) == {orders(1), queues[3], queues[4]}
    assert "ends at 2, and at 3 when the batch was begun" in found.stuck[orders(1)]
    assert "does not have the topic" in found.stuck[queues[3]] or "gone" in found.stuck[queues[3]]
    assert "without this queue" in found.stuck[queues[4]]
    with pytest.raises(IntentStuckError, match=r"[^.]\. 2 more queues cannot be finished either\. "):
        found.require(KEY, runs)


def test_right_that_was_withdrawn_makes_queues_stuck(cluster: RunningCluster, session: Session) -> None:
    run = Staging(cluster).add(orders(0), bodies("r", 2))
    session.publish([run])
    cluster.brokers[A].fail(PULL, faults.with_code(16, "the topic[orders] pulling message is forbidden"))
    assert "forbidden" in session.read([run]).stuck[orders(0)]


def test_blob_that_is_gone_matters_only_while_rows_are_missing(cluster: RunningCluster, session: Session) -> None:
    staging = Staging(cluster)
    run, later = staging.add(orders(0), bodies("r", 2)), staging.add(orders(0), bodies("s", 2))
    session.publish([run])
    cluster.brokers[A].expire(STAGE, 0, later.offset)
    assert session.read([run]) == WrittenRows({orders(0): 2})
    assert session.read([run, later]) == WrittenRows({orders(0): 2})
    cluster.brokers[A].expire(STAGE, 0, later.offset + 1)
    found = session.read([run, later])
    assert found.rows == {orders(0): 2}
    assert f"the blob at offset {later.offset} of queue {STAGE}/broker-a:0 is missing" in found.stuck[orders(0)]


def test_other_bytes_in_the_place_of_messages_are_damage(cluster: RunningCluster, session: Session) -> None:
    run = Staging(cluster).add(orders(0), bodies("r", 2))
    session.publish([run])
    session.publish([run])
    record = bytearray(last_record(cluster.brokers[A], 0))
    record[12:16] = (2).to_bytes(4, "big")
    record[20:28] = bytes(8)
    fields = {"nextBeginOffset": "1", "minOffset": "0", "maxOffset": "4", "suggestWhichBrokerId": "0"}

    def other(call: Call, serve: Callable[[], None]) -> None:
        call.answer(Answer(0, fields, bytes(record), "FOUND"))

    cluster.brokers[A].fail(PULL, other, when=lambda call: call.command.fields["topic"] == "orders")
    with pytest.raises(DamageError, match="orders/broker-a:0"):
        session.read([run])


def test_lost_connection_ends_the_session(cluster: RunningCluster, session: Session) -> None:
    runs = [Staging(cluster).add(orders(0, broker), bodies("r", 2)) for broker in (A, B)]
    session.publish(runs)
    cluster.brokers[B].kill()
    with pytest.raises(SessionOverError):
        session.read(runs)
