"""Publishing: what reaches the target queues, in which order, and what each answer means."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sent_messages import read_bodies
from support.staged_runs import STAGE, TERMS, SessionCalls, Staging

from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.publishing import Publishing, PublishRequest
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows, count_rows
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.errors import BackendUnavailableError, IntentStuckError
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults
from rmq_spark.store.testing.brokers.faults import REGION

BATCH, PULL = RequestCode.SEND_BATCH_MESSAGE, RequestCode.PULL_MESSAGE
KEY = CommitKey("query", 7)
A, B = "broker-a", "broker-b"


@pytest.fixture(params=["5.3", "4.9"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=3)
        yield cluster


@pytest.fixture
def calls(cluster: RunningCluster) -> Iterator[SessionCalls]:
    calls = SessionCalls(cluster)
    yield calls
    calls.close()


def publish(
    calls: SessionCalls, runs: list[StagedRun], stored: dict[QueueKey, int] | None = None, **limits: Any
) -> WrittenRows:
    return make_publishing(calls, **limits).run(runs, stored)


def make_publishing(calls: SessionCalls, **limits: Any) -> Publishing:
    given = {"request_timeout_ms": 10_000, "busy_timeout_ms": 60_000, **limits}
    return Publishing(calls, TERMS, monotonic_ms=monotonic_ms, now_ms=now_ms, **given)


def bodies(name: str, count: int) -> list[bytes]:
    return [f"{name}-{number:04d}".encode() for number in range(count)]


def orders(queue_id: int, broker: str = A) -> QueueKey:
    return QueueKey("orders", queue_id, broker)


def test_runs_are_stored_in_order_with_one_request_in_flight_for_each_queue(
    cluster: RunningCluster, calls: SessionCalls
) -> None:
    for broker in cluster.brokers.values():
        broker.settings.holds_sends_ms = 5
    staging, expected, runs = Staging(cluster), {}, []
    for number in range(6):
        for queue in (orders(0), orders(2), orders(1, B)):
            rows = bodies(f"{queue}-{number}", number + 1)
            runs.append(staging.add(queue, rows, on=B if number % 2 else A))
            expected.setdefault(queue, []).extend(rows)
    assert publish(calls, runs) == WrittenRows(count_rows(runs))
    assert read_bodies(cluster, "orders") == expected
    most = [most for broker in cluster.brokers.values() for most in broker.sends.most_in_flight.values()]
    assert set(most) == {1}


def test_blob_of_several_runs_is_pulled_once(cluster: RunningCluster, calls: SessionCalls) -> None:
    parts = [(orders(queue_id, broker), bodies(f"{broker}{queue_id}", 3)) for broker in (A, B) for queue_id in range(3)]
    runs = Staging(cluster).add_together([*parts, *parts])
    assert publish(calls, runs).rows == {queue: 6 for queue, _ in parts}
    assert read_bodies(cluster, "orders") == {queue: rows * 2 for queue, rows in parts}
    assert sum(isinstance(request, PullRequest) for request in calls.sent[A]) == 1
    assert calls.sent[B]
    assert not any(isinstance(request, PullRequest) for request in calls.sent[B])


@pytest.mark.parametrize("max_blob_bytes", [1, 700, 2000])
def test_blobs_in_memory_are_bounded(cluster: RunningCluster, calls: SessionCalls, max_blob_bytes: int) -> None:
    staging, runs = Staging(cluster), []
    queues = [orders(queue_id, broker) for queue_id in range(3) for broker in (A, B)]
    for number in range(4):
        runs += staging.add_together([(queue, bodies(f"{number}", 2)) for queue in queues], on=A)
        runs += [staging.add(queue, [b"x" * 200], on=B) for queue in reversed(queues)]
    publishing = make_publishing(calls, max_blob_bytes=max_blob_bytes)
    largest = max(run.begin + run.size for run in runs)
    seen = []
    beat = calls.beat
    calls.beat = lambda: seen.append(publishing._blob_bytes) or beat()
    publishing.run(runs)
    assert max(seen) <= max(max_blob_bytes, largest)
    rows = [row for number in range(4) for row in (*bodies(f"{number}", 2), b"x" * 200)]
    assert read_bodies(cluster, "orders") == dict.fromkeys(queues, rows)
    assert (publishing._cached, publishing._blob_bytes) == ({}, 0), "blobs without other runs are forgotten"


def test_rows_that_are_stored_are_not_sent_again(cluster: RunningCluster, calls: SessionCalls) -> None:
    staging = Staging(cluster)
    runs = [staging.add(orders(queue_id), bodies(f"r{run}", 4)) for run in range(3) for queue_id in range(3)]
    stored = {orders(0): 0, orders(1): 6, orders(2): 12}
    assert publish(calls, runs, stored) == WrittenRows(dict.fromkeys(stored, 12))
    rows = [row for run in range(3) for row in bodies(f"r{run}", 4)]
    assert read_bodies(cluster, "orders") == {orders(0): rows, orders(1): rows[6:]}
    items = [request.count for request in calls.sent[A] if isinstance(request, PublishRequest)]
    assert sorted(items) == [2, 4, 4, 4, 4]


def test_rows_of_a_part_keep_their_ids(cluster: RunningCluster, calls: SessionCalls) -> None:
    run = Staging(cluster).add(orders(0), bodies("r", 3))
    publish(calls, [run], {orders(0): 2})
    (request,) = [request for request in calls.sent[A] if isinstance(request, PublishRequest)]
    last_id = f"{run.first_id[:20]}{int(run.first_id[20:], 16) + 2:012X}".encode()
    assert b"UNIQ_KEY\x01" + last_id in bytes(request.content)
    assert bytes(request.content).count(b"UNIQ_KEY") == 1


@pytest.mark.parametrize("code", [10, 11, 12])
def test_stored_late_is_stored(cluster: RunningCluster, calls: SessionCalls, code: int) -> None:
    cluster.brokers[A].fail(BATCH, faults.stored_late(code))
    staging = Staging(cluster)
    runs = [staging.add(orders(0), bodies(f"r{run}", 2)) for run in range(3)]
    assert publish(calls, runs) == WrittenRows({orders(0): 6})
    assert len(read_bodies(cluster, "orders")[orders(0)]) == 6


@pytest.mark.parametrize("fault", [faults.busy(), faults.with_code(2, faults.REJECTED)], ids=["busy", "rejected"])
def test_busy_broker_gets_the_same_request_again(
    cluster: RunningCluster, calls: SessionCalls, fault: faults.Fault
) -> None:
    cluster.brokers[A].fail(BATCH, fault, times=3)
    run = Staging(cluster).add(orders(0), bodies("r", 2))
    assert publish(calls, [run]) == WrittenRows({orders(0): 2})
    assert read_bodies(cluster, "orders")[orders(0)] == bodies("r", 2)
    sent = [request for request in calls.sent[A] if isinstance(request, PublishRequest)]
    assert len(sent) == 4
    assert all(request is sent[0] for request in sent)


def test_broker_that_stays_busy_is_given_up(cluster: RunningCluster, calls: SessionCalls) -> None:
    cluster.brokers[A].fail(BATCH, faults.busy())
    run = Staging(cluster).add(orders(0), bodies("r", 2))
    with pytest.raises(BackendUnavailableError, match=r"orders/broker-a:0: .* that it is busy, for .* s"):
        publish(calls, [run], busy_timeout_ms=100)


def test_broker_that_stays_busy_is_named_once_in_the_log(
    cluster: RunningCluster,
    calls: SessionCalls,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.exactly_once.publishing._BUSY_LOG_MS", 30.0)
    cluster.brokers[A].fail(BATCH, faults.busy(), times=10)
    staging = Staging(cluster)
    publish(calls, [staging.add(orders(queue_id), bodies("r", 2)) for queue_id in range(2)])
    assert [record.getMessage() for record in caplog.records] == [
        "rmq: publishing waits: broker broker-a answers that it is busy"
    ]


REFUSALS = {
    "13": (13, "the message is illegal, maybe msg body or properties length not matched"),
    "16": (16, "the broker[127.0.0.1] sending message is forbidden"),
    "17": (17, "topic[orders] not exist, apply first please!"),
    "29": (29, "request queueId[3] is illegal, TopicConfig [...]"),
    "1 queue": (1, "request queueId[3] is illegal, TopicConfig [...]"),
    "1 right": (1, "org.apache.rocketmq.acl.common.AclException: No default permission for orders, SessionHandler"),
    "1 account": (1, "org.apache.rocketmq.acl.common.AclException: No acl config for rmq, SessionHandler"),
    "1 size": (1, "java.lang.RuntimeException: message body size exceeded, MessageExtEncoder"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_queue_is_stuck_and_does_not_stop_the_others(
    cluster: RunningCluster, calls: SessionCalls, name: str
) -> None:
    staging = Staging(cluster)
    runs = [staging.add(orders(queue_id), bodies(f"r{run}", 2)) for run in range(2) for queue_id in range(2)]
    fault = faults.with_code(*REFUSALS[name], REGION)
    cluster.brokers[A].fail(BATCH, fault, when=lambda call: call.command.fields["e"] == "1")
    found = publish(calls, runs)
    assert found.rows == {orders(0): 4, orders(1): 0}
    assert list(found.stuck) == [orders(1)]
    assert len([1 for request in calls.sent[A] if isinstance(request, PublishRequest)]) == 3
    with pytest.raises(IntentStuckError) as caught:
        found.require(KEY, runs)
    assert (caught.value.written, caught.value.missing) == (4, 4)
    text = str(caught.value)
    assert text.startswith(
        "batch 7 of query query was begun and cannot be finished, because of queue orders/broker-a:1"
    )
    assert "4 of its rows are written, 4 are missing" in text
    assert text.endswith("give the missing rows up: rmq intents skip ID --yes 4.")


UNKNOWN = {
    "14": faults.disk_full(),
    "1": faults.with_code(1, "java.lang.NullPointerException: null"),
    "1 page cache": faults.with_code(1, "[PC_SYNCHRONIZED]broker busy, start flow control for a while", REGION),
    "1 replicas": faults.with_code(1, "in-sync replicas not enough", REGION),
    "1 file": faults.with_code(1, "create mapped file failed, server is busy or broken.", REGION),
    "3": faults.with_code(3, "request type not supported"),
    "501": faults.with_code(501, "not leader for queue"),
    "1500": faults.with_code(1500, "please go away"),
    "silent": faults.nothing(),
    "not executed": faults.nothing(executes=False),
    "closed": faults.closes_connection(),
    "garbage": faults.garbage(executes=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_outcome_ends_the_session(cluster: RunningCluster, calls: SessionCalls, name: str) -> None:
    staging = Staging(cluster)
    runs = [staging.add(orders(0), bodies(f"r{run}", 2)) for run in range(3)]
    cluster.brokers[A].fail(BATCH, UNKNOWN[name], times=1)
    with pytest.raises(SessionOverError):
        publish(calls, runs, request_timeout_ms=100)
    calls.close()
    sent = [request for request in calls.sent[A] if isinstance(request, PublishRequest)]
    assert len(sent) == 1, "nothing is sent after an unknown outcome"
    assert cluster.brokers[A].requests[BATCH] <= 1 + (name == "1500")


def test_unknown_answers_end_the_session_when_the_other_queues_are_finished(
    cluster: RunningCluster, calls: SessionCalls
) -> None:
    staging = Staging(cluster)
    runs = [staging.add(orders(queue_id), bodies(f"r{run}", 2)) for run in range(3) for queue_id in range(3)]
    fault = faults.with_code(1, "java.lang.NullPointerException: null")
    rule = cluster.brokers[A].fail(BATCH, fault, when=lambda call: call.command.fields["e"] in ("0", "2"))
    publishing = make_publishing(calls)
    with pytest.raises(SessionOverError, match=r"may be stored or not: .*NullPointerException") as caught:
        publishing.run(runs)
    assert set(caught.value.answers) == {orders(0), orders(2)}
    assert all("NullPointerException" in answer for answer in caught.value.answers.values())
    assert rule.count == 2, "nothing more is sent to these queues"
    assert len(read_bodies(cluster, "orders")[orders(1)]) == publishing.stored_rows == 6


def test_unexpected_answers_are_told_if_the_session_ends_otherwise(
    cluster: RunningCluster, calls: SessionCalls
) -> None:
    staging = Staging(cluster)
    runs = [staging.add(orders(queue_id), bodies("r", 2)) for queue_id in range(2)]
    refuses = faults.with_code(1, "java.lang.NullPointerException: null")
    cluster.brokers[A].fail(BATCH, refuses, when=lambda call: call.command.fields["e"] == "0")
    cluster.brokers[A].fail(BATCH, faults.nothing(), when=lambda call: call.command.fields["e"] == "1")
    with pytest.raises(SessionOverError, match="no response within") as caught:
        publish(calls, runs, request_timeout_ms=100)
    assert list(caught.value.answers) == [orders(0)]


def test_lost_connection_of_another_broker_ends_the_session(cluster: RunningCluster, calls: SessionCalls) -> None:
    calls.client.call(calls.address(B), PullRequest(orders(0, B), 0, 1, "g"))
    calls.submit_all(B, [PullRequest(orders(0, B), 0, 1, "g")])
    cluster.brokers[B].kill()
    staging = Staging(cluster)
    cluster.brokers[A].fail(BATCH, faults.slowly(50))
    runs = [staging.add(orders(0), bodies(f"r{run}", 2)) for run in range(50)]
    with pytest.raises(SessionOverError, match="is lost"):
        publish(calls, runs)


def damage_nothing(cluster: RunningCluster, run: StagedRun) -> StagedRun:
    cluster.brokers[A].expire(STAGE, 0, run.offset + 1)
    return run


def keep_entries(cluster: RunningCluster, run: StagedRun) -> StagedRun:
    cluster.brokers[A].expire(STAGE, 0, run.offset + 1, keeps_minimum=True)
    return run


def change_crc(cluster: RunningCluster, run: StagedRun) -> StagedRun:
    return StagedRun(run.queue, run.stage, run.offset, run.begin, run.size, run.crc32 ^ 1, run.first_id, run.rows)


def ask_beyond_the_end(cluster: RunningCluster, run: StagedRun) -> StagedRun:
    return StagedRun(run.queue, run.stage, 99, run.begin, run.size, run.crc32, run.first_id, run.rows)


def delete_stage(cluster: RunningCluster, run: StagedRun) -> StagedRun:
    cluster.brokers[A].delete_topic(STAGE)
    return run


@pytest.mark.parametrize("spoil", [damage_nothing, keep_entries, change_crc, ask_beyond_the_end, delete_stage])
def test_blob_that_cannot_be_used_makes_its_queues_stuck(
    cluster: RunningCluster, calls: SessionCalls, spoil: Callable[[RunningCluster, StagedRun], StagedRun]
) -> None:
    staging = Staging(cluster)
    bad = spoil(cluster, staging.add(orders(0), bodies("bad", 2)))
    good = staging.add(orders(1), bodies("good", 2), on=B)
    later = staging.add(orders(0), bodies("later", 2), on=B)
    found = publish(calls, [bad, good, later])
    assert found.rows == {orders(0): 0, orders(1): 2}
    assert "of queue RMQ_SPARK_STAGE/broker-a:0" in found.stuck[orders(0)]
    assert read_bodies(cluster, "orders") == {orders(1): bodies("good", 2)}


def test_reset_of_the_group_that_pulls_does_not_count(tmp_path: Path) -> None:
    with RunningCluster(tmp_path / "cluster") as cluster:
        cluster.create_topic("orders", queues=1)
        staging, calls = Staging(cluster), SessionCalls(cluster)
        runs = [staging.add(orders(0), bodies(f"r{run}", 2)) for run in range(2)]
        broker = cluster.broker
        broker.loop.run(broker.offsets.reset, TERMS.group, QueueKey(STAGE, 0), 0)
        assert publish(calls, runs) == WrittenRows({orders(0): 4})
        calls.close()


def test_broker_of_a_blob_that_does_not_answer_ends_the_call(cluster: RunningCluster, calls: SessionCalls) -> None:
    run = Staging(cluster).add(orders(0), bodies("r", 2), on=B)
    cluster.brokers[B].kill()
    with pytest.raises(BackendUnavailableError, match=r"127\.0\.0\.1"):
        publish(calls, [run])


def test_batch_without_missing_rows_sends_nothing(cluster: RunningCluster, calls: SessionCalls) -> None:
    run = Staging(cluster).add(orders(0), bodies("r", 2))
    found = publish(calls, [run], {orders(0): 2})
    assert found == WrittenRows({orders(0): 2})
    assert not calls.sent
    found.require(KEY, [run])
