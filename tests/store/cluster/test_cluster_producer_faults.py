"""The producer of a cluster while brokers are away, answers are missing, routes change, and calls are interrupted."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from support.forked import run_forked
from support.interrupts import interrupted
from support.sent_messages import count_ids, read_bodies, read_rows

from rmq_spark.store import open_store
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.producer import ClusterProducer
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    RmqError,
    StoreError,
    UnknownOutcomeError,
)
from rmq_spark.store.model import QueueKey
from rmq_spark.store.send_result import SendStatus
from rmq_spark.store.testing.brokers import RunningCluster, faults

BATCH, SINGLE, ROUTE = (
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
)
SHORT_MS = 1000
Open = Callable[..., ClusterProducer]
QUEUE_OF_B = {"queue_id": 0, "broker_name": "broker-b"}


@pytest.fixture(params=["5.3", "4.9"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster


@pytest.fixture
def open_producer(cluster: RunningCluster) -> Iterator[Open]:
    """A function that opens a producer, which is closed at the end."""
    opened = []

    def open_one(**options: Any) -> ClusterProducer:
        opened.append(open_store(name_server=cluster.address, **options))
        return opened[-1]

    yield open_one
    for producer in opened:
        producer.close()


@pytest.fixture
def producer(open_producer: Open) -> ClusterProducer:
    return open_producer(request_timeout_ms=SHORT_MS, broker_down_timeout_ms=SHORT_MS)


def bodies_of(count: int) -> list[bytes]:
    return [b"%05d" % number for number in range(count)]


def table_of(bodies: list[bytes], **columns: Any) -> pa.Table:
    return pa.table({"topic": ["orders"] * len(bodies), "body": pa.array(bodies, pa.binary()), **columns})


def all_bodies(cluster: RunningCluster) -> list[bytes]:
    return sorted(body for bodies in read_bodies(cluster, "orders").values() for body in bodies)


def fail_all(cluster: RunningCluster, fault: faults.Fault, times: int | None = None) -> None:
    for broker in cluster.brokers.values():
        broker.fail(None, fault, times=times, when=lambda call: call.command.code in (BATCH, SINGLE))


@pytest.mark.parametrize("body", [b"x", b""], ids=["usual", "empty"])
@pytest.mark.parametrize(
    ("fault", "is_stored"),
    [
        (faults.closes_connection(), True),
        (faults.closes_connection(executes=False), False),
        (faults.garbage(executes=True), True),
        (faults.half_a_frame(), True),
    ],
    ids=["closed", "not executed", "garbage", "half an answer"],
)
def test_send_reports_an_unknown_outcome_with_the_id(
    cluster: RunningCluster, producer: ClusterProducer, fault: faults.Fault, is_stored: bool, body: bytes
) -> None:
    fail_all(cluster, fault)
    with pytest.raises(UnknownOutcomeError, match="is unknown") as caught:
        producer.send("orders", body)
    (message_id,) = caught.value.message_ids
    assert message_id in str(caught.value)
    assert count_ids(cluster, "orders") == ({message_id: 1} if is_stored else {})
    for broker in cluster.brokers.values():
        broker.heal()
    assert producer.send("orders", b"after").message_id != message_id


@pytest.mark.slow
def test_send_to_a_silent_broker_reports_an_unknown_outcome(cluster: RunningCluster, producer: ClusterProducer) -> None:
    fail_all(cluster, faults.nothing())
    with pytest.raises(UnknownOutcomeError, match="is unknown") as caught:
        producer.send("orders", b"x")
    assert count_ids(cluster, "orders") == {caught.value.message_ids[0]: 1}


def test_send_many_reports_all_ids_that_may_be_stored(cluster: RunningCluster, producer: ClusterProducer) -> None:
    cluster.brokers["broker-b"].settings.holds_sends_ms = 100
    cluster.brokers["broker-b"].fail(BATCH, faults.closes_connection())
    with pytest.raises(UnknownOutcomeError) as caught:
        producer.send_many(table_of(bodies_of(400)))
    reported, (note,) = set(caught.value.message_ids), caught.value.__notes__
    stored = count_ids(cluster, "orders")
    assert set(stored.values()) == {1}
    of_b = {
        row["msgId"]
        for queue, rows in read_rows(cluster, "orders").items()
        for row in rows
        if queue.broker == "broker-b"
    }
    assert of_b <= reported
    acknowledged = len(stored.keys() - of_b)
    assert f"{acknowledged} of 400 messages of the call are stored. {len(reported)} are stored or not" in note


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (
            faults.with_code(16, "the broker[127.0.0.1] sending message is forbidden"),
            NoPermissionError,
            "allow sending",
        ),
        (faults.with_code(17, "topic[orders] not exist, apply first please!"), NotFoundError, "updateTopic"),
        (faults.with_code(13, "the message is illegal"), BrokerError, "maxMessageSize"),
        (faults.with_code(1, "java.lang.NullPointerException, x"), UnknownOutcomeError, "Look for"),
    ],
    ids=["forbidden", "no topic", "illegal", "exception"],
)
def test_refusals_of_brokers_are_errors(
    cluster: RunningCluster, producer: ClusterProducer, fault: faults.Fault, error: type[RmqError], text: str
) -> None:
    fail_all(cluster, fault)
    with pytest.raises(error, match=text):
        producer.send("orders", b"x")
    with pytest.raises(error, match=text) as caught:
        producer.send_many(table_of(bodies_of(8)))
    assert "0 of 8 messages of the call are stored." in caught.value.__notes__[-1]
    for broker in cluster.brokers.values():
        broker.heal()
    producer.send("orders", b"after")
    assert all_bodies(cluster) == [b"after"]


def test_a_message_without_a_valid_answer_is_not_sent_again(cluster: RunningCluster, producer: ClusterProducer) -> None:
    fail_all(cluster, faults.with_fields(msgId=None, queueOffset="?"))
    with pytest.raises(BrokerError, match=r"is stored in queue .*has no valid position.*Do not send the message again"):
        producer.send("orders", b"x")
    sent = producer.send_many(table_of([b"y", b"z"]))
    assert sent["queueOffset"].null_count == sent["commitLogOffset"].null_count == 2
    assert set(sent["msgId"].to_pylist()) <= count_ids(cluster, "orders").keys()
    assert all_bodies(cluster) == [b"x", b"y", b"z"]


def test_a_late_flush_is_a_status(cluster: RunningCluster, producer: ClusterProducer) -> None:
    fail_all(cluster, faults.stored_late(12))
    assert producer.send("orders", b"x").status is SendStatus.FLUSH_SLAVE_TIMEOUT
    assert len(producer.send_many(table_of([b"y"]))) == 1
    assert all_bodies(cluster) == [b"x", b"y"]


@pytest.mark.parametrize("fault", [faults.busy(), faults.disk_full()], ids=["busy", "full"])
def test_nothing_stored_is_repeated(cluster: RunningCluster, producer: ClusterProducer, fault: faults.Fault) -> None:
    fail_all(cluster, fault, times=2)
    producer.send("orders", b"x")
    fail_all(cluster, fault, times=2)
    producer.send_many(table_of([b"y", b"z"], shardingKey=["k", "k"]))
    assert all_bodies(cluster) == [b"x", b"y", b"z"]


def test_messages_for_any_queue_go_to_another_broker(cluster: RunningCluster, producer: ClusterProducer) -> None:
    producer.send_many(table_of(bodies_of(4)))
    cluster.brokers["broker-b"].kill()
    results = [producer.send("orders", b"x") for _ in range(4)]
    assert {one.broker for one in results} == {"broker-a"}
    sent = producer.send_many(table_of(bodies_of(50)))
    assert set(sent["brokerName"].to_pylist()) == {"broker-a"}


def test_a_message_for_a_broker_that_is_away_is_an_error(cluster: RunningCluster, open_producer: Open) -> None:
    producer = open_producer(broker_down_timeout_ms=200)
    producer.send("orders", b"x", **QUEUE_OF_B)
    cluster.brokers["broker-b"].kill()
    with pytest.raises(BackendUnavailableError, match="broker-b") as caught:
        producer.send("orders", b"y", **QUEUE_OF_B)
    assert "brokerDownTimeout" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    cluster.brokers["broker-b"].restart(new_port=True)
    producer.send("orders", b"z", **QUEUE_OF_B)
    assert all_bodies(cluster) == [b"x", b"z"]


@pytest.mark.slow
def test_a_message_waits_for_a_restart_of_its_broker(cluster: RunningCluster, open_producer: Open) -> None:
    producer = open_producer(broker_down_timeout_ms=20_000)
    producer.send("orders", b"x", **QUEUE_OF_B)
    broker = cluster.brokers["broker-b"]
    broker.kill()
    timer = threading.Timer(0.2, broker.restart, kwargs={"new_port": True})
    timer.start()
    result = producer.send("orders", b"y", **QUEUE_OF_B)
    timer.join()
    assert (result.broker, result.queue_id, result.queue_offset) == ("broker-b", 0, 1)


def test_routes_are_asked_for_again_after_a_time_and_after_an_error(
    cluster: RunningCluster, producer: ClusterProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 0.0
    monkeypatch.setattr("rmq_spark.store.cluster.producer.monotonic_ms", lambda: now_ms)
    producer.send("orders", b"x")
    cluster.create_topic("orders", queues=5)
    cluster.clear_requests()
    now_ms = 29_999.0
    assert {producer.send("orders", b"x").queue_id for _ in range(10)} == {0, 1}
    assert cluster.name_servers[0].requests[ROUTE] == 0
    now_ms = 30_000.0
    assert {producer.send("orders", b"x").queue_id for _ in range(10)} == set(range(5))
    assert cluster.name_servers[0].requests[ROUTE] == 1
    cluster.create_topic("orders", queues=7)
    fail_all(cluster, faults.with_code(17, "topic[orders] not exist"), times=1)
    with pytest.raises(NotFoundError):
        producer.send("orders", b"x")
    producer.send("orders", b"x", queue_id=6, broker_name="broker-a")


def test_a_queue_that_was_taken_away_is_an_error_once(cluster: RunningCluster, producer: ClusterProducer) -> None:
    producer.send("orders", b"x", queue_id=1, broker_name="broker-a")
    for broker in cluster.brokers.values():
        broker.set_topic("orders", 1)
    with pytest.raises(NotFoundError, match="writeQueueNums"):
        producer.send("orders", b"x", queue_id=1, broker_name="broker-a")
    assert {producer.send("orders", b"x").queue_id for _ in range(4)} == {0}


def test_no_name_server_is_an_error(cluster: RunningCluster, producer: ClusterProducer) -> None:
    port = int(cluster.name_servers[0].address.rpartition(":")[2])
    cluster.name_servers[0].kill()
    with pytest.raises(BackendUnavailableError, match="name server"):
        producer.send("orders", b"x")
    cluster.name_servers[0].restart(port)
    cluster.register_all()
    producer.send("orders", b"x")


MODULES = ("producer", "sender", "client", "message_spool", "connection", "server", "ticket")


# An interrupt may drop a socket that is not stored yet, which Python closes with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
def test_an_interrupt_leaves_the_producer_usable(
    cluster: RunningCluster, producer: ClusterProducer, many: bool
) -> None:
    """Whatever place it comes at. The message of an interrupted call is stored once or not at all."""
    numbers = iter(range(10_000))

    def call() -> None:
        body = b"%05d" % next(numbers)
        if many:
            producer.send_many(table_of([body, body + b"+"]))
        else:
            producer.send("orders", body)

    call()
    places = interrupted(call, 0, MODULES)[0].seen
    assert places > 20
    step = max(places // 12, 1)
    for at in range(1, places + 1, step):
        interrupt, error = interrupted(call, at, MODULES)
        assert error is not None or interrupt.seen < at, interrupt.place
        call()
    bodies = all_bodies(cluster)
    assert len(set(bodies)) == len(bodies), "nothing twice"
    sent = {body[:5] for body in bodies}
    uninterrupted = {b"%05d" % number for number in range(1, next(numbers), 2)}
    assert uninterrupted <= sent


def check_call(cluster: RunningCluster, producer: ClusterProducer, prefix: bytes, columns: dict[str, Any]) -> str:
    """Send many messages, and check that each one is stored once, or as the error says. Return the error's class."""
    bodies, note, reported, name = [b"%b-%05d" % (prefix, number) for number in range(200)], "", set(), ""
    try:
        sent = producer.send_many(table_of(bodies, **columns))["msgId"].to_pylist()
    except RmqError as error:
        sent, note, name = None, error.__notes__[-1], type(error).__name__
        reported = set(getattr(error, "message_ids", ()))
    rows = [row for rows in read_rows(cluster, "orders").values() for row in rows if row["body"].startswith(prefix)]
    stored = [row["msgId"] for row in rows]
    assert len({row["body"] for row in rows}) == len(set(stored)) == len(stored), "nothing twice"
    if sent is None:
        known = int(re.search(r"(\d+) of 200 messages of the call are stored", note)[1])  # type: ignore[index]
        assert len(set(stored) - reported) == known, "what is not reported as unknown is acknowledged"
    else:
        assert sorted(sent) == sorted(stored)
    if name in ("", "BackendUnavailableError") and "shardingKey" in columns:
        for rows_of_queue in read_rows(cluster, "orders").values():
            own = [row["body"] for row in rows_of_queue if row["body"].startswith(prefix)]
            assert own == sorted(own)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_faults_hide_no_message(cluster: RunningCluster, producer: ClusterProducer, seed: int) -> None:
    chance, seen = Random(seed), Counter[str]()
    kinds = [
        faults.closes_connection(),
        faults.closes_connection(executes=False),
        faults.busy(),
        faults.disk_full(),
        faults.garbage(executes=True),
        faults.half_a_frame(),
        faults.stored_late(),
        faults.with_fields(msgId=None),
        faults.with_code(13, "the message is illegal"),
        faults.with_code(16, "sending message is forbidden"),
        faults.with_code(1, "java.lang.NullPointerException, x"),
    ]
    for number in range(20):
        for broker in cluster.brokers.values():
            broker.heal()
            broker.settings.holds_sends_ms = chance.choice([0, 0, 5])
            for _ in range(chance.randrange(3)):
                broker.fail(chance.choice([BATCH, SINGLE]), chance.choice(kinds), times=chance.randrange(1, 4))
        keys = [f"key-{chance.randrange(5)}" for _ in range(200)]
        columns = chance.choice([{}, {"shardingKey": keys}, {"delayLevel": [None] * 199 + [0], "shardingKey": keys}])
        seen[check_call(cluster, producer, b"%d" % number, columns)] += 1
    assert seen.keys() >= {"", "UnknownOutcomeError"}, seen


def test_threads_share_a_producer(cluster: RunningCluster, producer: ClusterProducer) -> None:
    results: list[Any] = []

    def work(thread: int) -> None:
        for number in range(10):
            results.append(producer.send("orders", b"%d-%d" % (thread, number)))
            results.extend(producer.send_many(table_of([b"%d-%d-m" % (thread, number)])).to_pylist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    counts = count_ids(cluster, "orders")
    assert len(counts) == 80
    assert set(counts.values()) == {1}


def test_a_forked_child_has_connections_and_ids_of_its_own(cluster: RunningCluster, producer: ClusterProducer) -> None:
    """Otherwise parent and child would read each other's answers, and give messages the same ids."""
    results = [producer.send("orders", b"before")]
    thread = threading.Thread(target=lambda: results.extend(producer.send("orders", b"parent") for _ in range(60)))
    thread.start()
    ended = run_forked(lambda: [producer.send("orders", b"child") for _ in range(60)], 20)
    thread.join()
    results.append(producer.send("orders", b"after"))
    assert ended.fault == ""
    rows = read_rows(cluster, "orders")
    for name, group in ((b"child", ended.value), (b"parent", results[1:-1])):
        assert len(group) == 60
        for one in group:
            row = rows[QueueKey("orders", one.queue_id, one.broker)][one.queue_offset]
            assert (row["body"], row["msgId"]) == (name, one.message_id)
    assert len({one.message_id for one in [*results, *ended.value]}) == 122


def test_two_producers_have_connections_and_ids_of_their_own(cluster: RunningCluster, open_producer: Open) -> None:
    one, other = open_producer(), open_producer()
    ids = {producer.send("orders", b"x").message_id for _ in range(3) for producer in (one, other)}
    assert len(ids) == 6
    one.close()
    other.send("orders", b"x")


def test_close_ends_a_producer(producer: ClusterProducer) -> None:
    with producer as same:
        assert same is producer
        producer.send("orders", b"x")
    producer.close()
    for call in (
        lambda: producer.send("orders", b"x"),
        lambda: producer.send_many(table_of([b"x"])),
        lambda: producer.create_topic("new"),
        lambda: producer.topics(),
        lambda: producer.bounds("orders"),
        producer.__enter__,
    ):
        with pytest.raises(StoreError, match="is closed; expected an open one"):
            call()


def test_close_without_a_call_opens_no_connection(cluster: RunningCluster, open_producer: Open) -> None:
    cluster.clear_requests()
    producer = open_producer()
    assert cluster.address in repr(producer)
    producer.close()
    assert cluster.clear_requests() == {}


def test_errors_before_sending_leave_a_producer_usable(cluster: RunningCluster, producer: ClusterProducer) -> None:
    with pytest.raises(StoreError, match="absent"):
        producer.bounds("absent")
    bad = table_of([b"a", b"b"], tags=["A", "b\x02"])
    for _ in range(3):
        with pytest.raises(RmqError, match="row 1"):
            producer.send_many(bad)
    producer.send_many(table_of([b"c"]))
    assert all_bodies(cluster) == [b"c"]
