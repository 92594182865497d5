"""Tests of the sender against brokers in this process: order, repeats, moves to another broker, halves, and errors."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from support.sent_messages import address_of, count_ids, read_bodies

from rmq_spark.store.cluster.client import ClusterClient, monotonic_ms, now_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.message_spool import MessageSpool
from rmq_spark.store.cluster.sender import Sender, SendTerms
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    RmqError,
    UnknownOutcomeError,
)
from rmq_spark.store.format.batch_items import ItemEncoder
from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.content_ids import ContentIds
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults

BATCH, SINGLE = RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2
REPEATS = SendTerms(20_000, repeats_unknown=True, moved_after_ms=10_000, batch_messages=16)
STRICT = SendTerms(1_000, batch_messages=16)
COUNT = 200
SHORT_MS = 1000  # a request timeout that a broker here meets on a busy machine too


@pytest.fixture(params=["5.3", "4.9"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster


def bodies_of(count: int) -> list[bytes]:
    return [b"%05d" % number for number in range(count)]


def send(
    cluster: RunningCluster,
    terms: SendTerms,
    *,
    columns: dict[str, pa.Array] | None = None,
    count: int = COUNT,
    keeps_ids: bool = True,
    timeout_ms: int = 3000,
    before: Callable[[], None] = lambda: None,
) -> int:
    """Send `count` messages with these bodies and columns to the topic orders. Return how many were noted as stored.

    `before` is called when the queues are known and nothing was sent.
    """
    stored = []
    client = ClusterClient(address_of(cluster, request_timeout_ms=timeout_ms))
    routes = WriteRoutes(client, monotonic_ms, NewTopics())
    encoder, ids = ItemEncoder(BodyRules(), lambda topics: None), ContentIds("seed")
    try:
        with MessageSpool(keeps_ids=keeps_ids) as spool:
            table = {"topic": pa.array(["orders"] * count), "body": pa.array(bodies_of(count), pa.binary())}
            rows = pa.RecordBatch.from_pydict(table | (columns or {}))
            router = BrokerRouter(routes.queues, 0)
            spool.add(encoder.encode(rows, router, lambda _, digests: ids.take(digests()), now_ms()))
            before()
            Sender(client, routes, terms, monotonic_ms, now_ms, lambda sent, _: stored.append(sent.count)).send(spool)
    finally:
        client.close()
    return sum(stored)


def is_sorted_by_first(bodies: list[bytes]) -> bool:
    """Return whether the first copies of the bodies are in their order."""
    firsts = list(dict.fromkeys(bodies))
    return firsts == sorted(firsts)


def test_send_keeps_the_order_of_each_queue_at_brokers_that_reorder(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.settings.holds_sends_ms = 5
    assert send(cluster, SendTerms(1_000, batch_messages=4)) == COUNT
    found = read_bodies(cluster, "orders")
    assert len(found) == 4
    assert sorted(body for bodies in found.values() for body in bodies) == bodies_of(COUNT)
    assert all(bodies == sorted(bodies) for bodies in found.values())
    most = {most for broker in cluster.brokers.values() for most in broker.sends.most_in_flight.values()}
    assert most == {1}, "one request in flight for each queue"


def test_send_of_sharding_keys_leads_each_key_to_one_queue_in_order(cluster: RunningCluster) -> None:
    keys = [f"key-{number % 7}" for number in range(COUNT)]
    send(cluster, REPEATS, columns={"shardingKey": pa.array(keys)})
    found = read_bodies(cluster, "orders")
    for number in range(7):
        own = set(bodies_of(COUNT)[number::7])
        places = [queue for queue, bodies in found.items() if own & set(bodies)]
        assert len(places) == 1
        assert [body for body in found[places[0]] if body in own] == sorted(own)


@pytest.mark.parametrize(
    "fault",
    [faults.closes_connection(), faults.nothing(), faults.garbage(executes=True), faults.half_a_frame()],
    ids=["closed", "silent", "garbage", "half an answer"],
)
def test_unknown_outcomes_are_repeated_with_the_same_ids_and_in_order(
    cluster: RunningCluster, fault: faults.Fault, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.brokers["broker-a"].fail(BATCH, fault, times=2)
    assert send(cluster, REPEATS, timeout_ms=SHORT_MS) == COUNT
    counts = count_ids(cluster, "orders")
    assert len(counts) == COUNT, "a copy has the id of its twin"
    assert sum(counts.values()) > COUNT
    waits = [one for one in caplog.messages if "sending to broker broker-a waits" in one]
    assert waits
    assert all(one.endswith("; it is sent again") and "Find out" not in one for one in waits)
    assert all(is_sorted_by_first(bodies) for bodies in read_bodies(cluster, "orders").values())


@pytest.mark.parametrize(
    "fault",
    [faults.closes_connection(executes=False), faults.nothing(executes=False), faults.garbage()],
    ids=["closed", "silent", "garbage"],
)
def test_unknown_outcomes_of_requests_that_were_not_executed_lose_nothing(
    cluster: RunningCluster, fault: faults.Fault
) -> None:
    cluster.brokers["broker-b"].fail(BATCH, fault, times=2)
    assert send(cluster, REPEATS, timeout_ms=SHORT_MS) == COUNT
    assert len(count_ids(cluster, "orders")) == COUNT
    assert all(is_sorted_by_first(bodies) for bodies in read_bodies(cluster, "orders").values())


def test_an_answer_without_valid_fields_is_not_sent_again(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].fail(BATCH, faults.with_fields(msgId=None, queueOffset="?"), times=5)
    assert send(cluster, STRICT) == COUNT
    assert set(count_ids(cluster, "orders").values()) == {1}


@pytest.mark.parametrize("code", [10, 11, 12])
def test_a_late_flush_or_replica_means_stored(cluster: RunningCluster, code: int) -> None:
    for broker in cluster.brokers.values():
        broker.fail(BATCH, faults.stored_late(code))
    assert send(cluster, STRICT) == COUNT
    assert set(count_ids(cluster, "orders").values()) == {1}


@pytest.mark.parametrize(
    "fault",
    [faults.closes_connection(), faults.nothing(), faults.garbage(executes=True)],
    ids=["closed", "silent", "garbage"],
)
def test_strict_terms_report_an_unknown_outcome_with_the_ids(cluster: RunningCluster, fault: faults.Fault) -> None:
    cluster.brokers["broker-a"].fail(BATCH, fault, times=1)
    with pytest.raises(UnknownOutcomeError, match="is unknown") as caught:
        send(cluster, STRICT, timeout_ms=SHORT_MS)
    counts = count_ids(cluster, "orders")
    assert set(counts.values()) == {1}, "nothing was sent twice"
    assert len(caught.value.message_ids) in (16, 32), "also those of the other queue, if their connection was closed"
    assert len(set(caught.value.message_ids) & counts.keys()) >= 16, "the ids to look for"
    assert caught.value.message_ids[0] in str(caught.value)


def test_strict_terms_report_the_ids_of_all_requests_with_an_unknown_outcome(cluster: RunningCluster) -> None:
    """A connection that breaks has a request of each queue in flight."""
    for broker in cluster.brokers.values():
        broker.settings.holds_sends_ms = 200
        broker.fail(BATCH, faults.closes_connection())
    with pytest.raises(UnknownOutcomeError, match="other requests") as caught:
        send(cluster, STRICT)
    counts = count_ids(cluster, "orders")
    assert len(read_bodies(cluster, "orders")) > 2
    assert counts.keys() <= set(caught.value.message_ids), "each message that is stored is reported"
    assert len(set(caught.value.message_ids)) == len(caught.value.message_ids)


def test_an_unknown_outcome_is_reported_before_a_refusal(cluster: RunningCluster) -> None:
    refused, unknown = cluster.brokers.values()
    refused.fail(BATCH, faults.with_code(16, "the broker[127.0.0.1] sending message is forbidden"))
    unknown.settings.holds_sends_ms = 300  # the refusal comes first
    unknown.fail(BATCH, faults.closes_connection())
    with pytest.raises(UnknownOutcomeError, match="broker-b") as caught:
        send(cluster, STRICT)
    assert count_ids(cluster, "orders").keys() <= set(caught.value.message_ids)
    assert any("forbidden" in note for note in caught.value.__notes__)


def test_a_name_server_that_refuses_does_not_end_the_sending(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.write_routes._RENEW_MS", 0.0)
    cluster.brokers["broker-a"].fail(BATCH, faults.disk_full(), times=3)

    def break_name_server() -> None:
        cluster.name_servers[0].fail(RequestCode.GET_ROUTEINFO_BY_TOPIC, faults.with_code(1, "a planted fault"))

    assert send(cluster, REPEATS, before=break_name_server) == COUNT
    cluster.name_servers[0].heal()
    assert set(count_ids(cluster, "orders").values()) == {1}


def test_busy_brokers_are_asked_again(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].fail(BATCH, faults.busy(), times=4)
    assert send(cluster, STRICT) == COUNT
    assert set(count_ids(cluster, "orders").values()) == {1}


def test_rows_for_any_queue_go_to_another_broker(cluster: RunningCluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.brokers["broker-b"].fail(BATCH, faults.disk_full())
    with caplog.at_level(logging.WARNING, "rmq_spark"):
        assert send(cluster, STRICT) == COUNT
    found = read_bodies(cluster, "orders")
    assert {queue.broker for queue in found} == {"broker-a"}
    assert sorted(body for bodies in found.values() for body in bodies) == bodies_of(COUNT)
    assert "because broker broker-b stores nothing now" in caplog.text
    assert "its disk is full" in caplog.text


@pytest.mark.parametrize("column", ["shardingKey", "queueId"])
def test_rows_for_one_queue_wait_for_their_broker(cluster: RunningCluster, column: str) -> None:
    columns = {"shardingKey": pa.array(["k"] * COUNT)}
    if column == "queueId":
        columns = {
            "queueId": pa.array([1] * COUNT, pa.int32()),
            "brokerName": pa.array(["broker-b"] * COUNT),
        }
    for broker in cluster.brokers.values():
        broker.fail(BATCH, faults.disk_full(), times=3)
    assert send(cluster, REPEATS, columns=columns) == COUNT
    ((_, bodies),) = read_bodies(cluster, "orders").items()
    assert bodies == bodies_of(COUNT)


def test_rows_for_one_queue_survive_a_restart_of_their_broker_at_another_port(cluster: RunningCluster) -> None:
    broker = cluster.brokers["broker-b"]
    broker.settings.holds_sends_ms = 10
    columns = {"queueId": pa.array([0] * COUNT, pa.int32()), "brokerName": pa.array(["broker-b"] * COUNT)}

    def restart() -> None:
        broker.kill()
        broker.restart(new_port=True)

    timers = [threading.Timer(0.05, restart), threading.Timer(0.6, restart)]
    for timer in timers:
        timer.start()
    assert send(cluster, REPEATS, columns=columns) == COUNT
    for timer in timers:
        timer.join()
    ((_, bodies),) = read_bodies(cluster, "orders").items()
    assert set(bodies) == set(bodies_of(COUNT))
    assert is_sorted_by_first(bodies)
    assert len(count_ids(cluster, "orders")) == COUNT


def test_rows_that_may_be_stored_leave_a_broker_that_stays_silent(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].fail(BATCH, faults.nothing())  # stored, and no answer
    terms = SendTerms(20_000, repeats_unknown=True, moved_after_ms=1500, batch_messages=16)
    assert send(cluster, terms, timeout_ms=SHORT_MS) == COUNT
    counts = count_ids(cluster, "orders")
    assert len(counts) == COUNT
    assert sum(counts.values()) > COUNT, "a copy is at the silent broker"


def test_a_broker_that_stays_away_is_an_error_that_names_it(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].kill()
    columns = {"queueId": pa.array([0] * COUNT, pa.int32()), "brokerName": pa.array(["broker-b"] * COUNT)}
    cluster.register_all()
    client = ClusterClient(address_of(cluster))
    routes = WriteRoutes(
        client,
        monotonic_ms,
        NewTopics(),
        {"orders": (QueueKey("orders", 0, "broker-b"),)},
        {"broker-b": cluster.brokers["broker-b"].address},
    )
    with MessageSpool() as spool:
        rows = pa.RecordBatch.from_pydict(
            {"topic": pa.array(["orders"]), "body": pa.array([b"x"])} | {k: v[:1] for k, v in columns.items()}
        )
        encoder, ids = ItemEncoder(BodyRules(), lambda topics: None), ContentIds("seed")
        spool.add(encoder.encode(rows, BrokerRouter(routes.queues, 0), lambda _, d: ids.take(d()), now_ms()))
        with pytest.raises(BackendUnavailableError, match="broker-b") as caught:
            Sender(client, routes, SendTerms(300), monotonic_ms, now_ms, lambda *_: None).send(spool)
    client.close()
    assert "cannot send 1 message to queue" in str(caught.value)
    assert "brokerDownTimeout" in str(caught.value)
    assert "connection refused" in str(caught.value)


def test_a_batch_over_the_brokers_limit_is_sent_in_halves(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.settings.max_message_bytes = 400
    assert send(cluster, SendTerms(1_000, batch_messages=64)) == COUNT
    assert set(count_ids(cluster, "orders").values()) == {1}
    assert all(bodies == sorted(bodies) for bodies in read_bodies(cluster, "orders").values())


def test_a_message_over_the_brokers_limit_is_refused_after_those_before_it(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.settings.max_message_bytes = 400
    bodies = bodies_of(64)
    bodies[40] = b"x" * 401
    columns = {
        "body": pa.array(bodies, pa.binary()),
        "queueId": pa.array([0] * 64, pa.int32()),
        "brokerName": pa.array(["broker-a"] * 64),
    }
    with pytest.raises(BrokerError, match="maxMessageSize") as caught:
        send(cluster, SendTerms(1_000, batch_messages=64), columns=columns, count=64)
    assert caught.value.code in (1, 13)
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"rmq: the broker refused row 40, message [0-9A-F]+\.", note)
    ((_, found),) = read_bodies(cluster, "orders").items()
    assert found == bodies[:40]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (faults.with_code(16, "the broker[127.0.0.1] sending message is forbidden"), NoPermissionError),
        (faults.with_code(17, "topic[orders] not exist, apply first please!"), NotFoundError),
        (faults.with_code(1, "java.lang.NullPointerException, x"), UnknownOutcomeError),
        (faults.with_code(29, "request queueId[9] is illegal"), NotFoundError),
    ],
    ids=["forbidden", "no topic", "exception", "no queue"],
)
def test_refusals_end_the_sending(cluster: RunningCluster, fault: faults.Fault, error: type[RmqError]) -> None:
    cluster.brokers["broker-a"].fail(None, fault, when=lambda call: call.command.code in (BATCH, SINGLE))
    with pytest.raises(error, match="broker-a"):
        send(cluster, REPEATS)
    counts = count_ids(cluster, "orders")
    assert set(counts.values()) <= {1}
    assert sum(counts.values()) < COUNT


def test_empty_bodies_and_single_rows_are_stored(cluster: RunningCluster) -> None:
    bodies = pa.array([b"", b"one", b"", b"", b"two"], pa.binary())
    queues = pa.array([0, 1, 1, 0, 0], pa.int32())
    brokers = pa.array(["broker-a", "broker-a", "broker-b", "broker-b", "broker-b"])
    send(cluster, STRICT, columns={"body": bodies, "queueId": queues, "brokerName": brokers}, count=5)
    assert {queue.id_text: found for queue, found in read_bodies(cluster, "orders").items()} == {
        "broker-a:0": [b""],
        "broker-a:1": [b"one"],
        "broker-b:0": [b"", b"two"],
        "broker-b:1": [b""],
    }


@pytest.mark.slow
def test_random_faults_lose_no_row_and_keep_the_order(cluster: RunningCluster) -> None:
    chance, patient = Random(7), replace(REPEATS, wait_ms=60_000)
    kinds = [
        faults.closes_connection(),
        faults.closes_connection(executes=False),
        faults.busy(),
        faults.disk_full(),
        faults.garbage(executes=True),
        faults.half_a_frame(),
        faults.stored_late(),
        faults.with_fields(msgId=None),
    ]
    for number in range(12):
        for broker in cluster.brokers.values():
            broker.heal()
            broker.fail(BATCH, faults.nothing(), times=chance.randrange(2))  # each time-out is twice as long
            for _ in range(4):
                broker.fail(BATCH, chance.choice(kinds), times=chance.randrange(1, 4))
        keys = pa.array([f"key-{row % 5}" for row in range(COUNT)])
        before = {queue: len(bodies) for queue, bodies in read_bodies(cluster, "orders").items()}
        assert send(cluster, patient, columns={"shardingKey": keys}, timeout_ms=SHORT_MS) == COUNT
        for queue, bodies in read_bodies(cluster, "orders").items():
            assert is_sorted_by_first(bodies[before.get(queue, 0) :]), (number, queue)
    assert len(count_ids(cluster, "orders")) == COUNT, "all rounds have the same rows and the same seed of ids"


def test_a_slow_broker_gets_few_copies(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].fail(BATCH, faults.slowly(2500))
    columns = {"queueId": pa.array([0] * 16, pa.int32()), "brokerName": pa.array(["broker-b"] * 16)}
    assert send(cluster, REPEATS, columns=columns, count=16, timeout_ms=SHORT_MS) == 16
    counts = count_ids(cluster, "orders")
    assert len(counts) == 16
    assert max(counts.values()) <= 3, "each time-out is twice as long as the one before"


def test_wait_ms_is_for_a_broker_whatever_the_number_of_its_queues(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=24)
    for broker in cluster.brokers.values():
        broker.fail(BATCH, faults.nothing(executes=False))
        broker.fail(SINGLE, faults.nothing(executes=False))
    with pytest.raises(BackendUnavailableError, match="confirmed none"):
        send(cluster, SendTerms(2_500, repeats_unknown=True), timeout_ms=SHORT_MS)
    for broker in cluster.brokers.values():
        sent = sum(len(broker.seen_requests(code)) for code in (BATCH, SINGLE))
        assert sent <= 4 + 3, "one request at a time finds out whether a broker that fails is back"


def test_a_busy_page_cache_is_asked_again(cluster: RunningCluster) -> None:
    remark = "[PC_SYNCHRONIZED]broker busy, start flow control for a while"
    for broker in cluster.brokers.values():
        broker.fail(BATCH, faults.with_code(2 if broker.release.is_5 else 1, remark), times=3)
    assert send(cluster, STRICT) == COUNT
    assert set(count_ids(cluster, "orders").values()) == {1}
    assert all(broker.requests[BATCH] > 3 for broker in cluster.brokers.values())
