"""The controls of a running cluster: stores, ports, frozen servers, spoilt answers, counts, and light brokers."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import FrameError
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.brokers import Answer, Broker, RunningCluster, faults
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.wire import Call

RunCluster = Callable[..., RunningCluster]
MAX = RequestCode.GET_MAX_OFFSET
ORDERS = {"topic": "orders", "queueId": 0}
NOBODY_ANSWERS_S = 0.2
FUTURE_MS = 1 << 42
UNKNOWN = 9_999


def filled(run_cluster: RunCluster, count: int = 5, **terms: Any) -> RunningCluster:
    cluster = run_cluster(**terms)
    cluster.create_topic("orders", 1)
    cluster.send("orders", *([b"x"] * count))
    return cluster


def max_offset(cluster: RunningCluster) -> int:
    with RawClient(cluster.broker.address) as client:
        return int(client.call(MAX, ORDERS).fields["offset"])


def test_the_directory_of_a_broker_is_a_store(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    with open_reader(cluster.folder / "broker-a") as reader:
        assert reader.bounds(QueueKey("orders", 0)) == QueueBounds(0, 5)


def test_topics_grow_and_shrink_and_keep_their_messages(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    cluster.create_topic("orders", 3)
    cluster.send("orders", b"y", queue_id=2)
    cluster.broker.set_topic("orders", read_queues=1, write_queues=1)
    with RawClient(cluster.broker.address) as client:
        assert client.call(MAX, {**ORDERS, "queueId": 2}).fields == {"offset": "1"}
    cluster.create_topic("orders", 3)
    assert {number: one.max_offset for number, one in cluster.broker.bounds("orders").items()} == {0: 5, 1: 0, 2: 1}


def test_a_topic_that_is_created_again_begins_at_0(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    cluster.delete_topic("orders")
    assert max_offset(cluster) == 0
    cluster.create_topic("orders", 1)
    assert max_offset(cluster) == 0
    cluster.send("orders", b"again")
    assert max_offset(cluster) == 1


def test_a_store_is_replaced_by_an_older_or_an_empty_one(run_cluster: RunCluster, tmp_path: Path) -> None:
    cluster = filled(run_cluster)
    older = cluster.broker.copy_store(tmp_path / "older")
    cluster.send("orders", b"y")
    cluster.broker.replace_store(older)
    assert max_offset(cluster) == 5
    cluster.broker.replace_store(tmp_path / "empty")
    assert max_offset(cluster) == 0
    cluster.send("orders", b"z")
    assert max_offset(cluster) == 1


def test_the_engine_may_delete_old_segments(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    for _ in range(3):
        cluster.send("orders", bytes(4 << 20), bytes(3 << 20))
    cluster.broker.loop.run(cluster.broker.store.expire_log, 9 << 20)
    bounds = cluster.broker.bounds("orders")[0]
    assert (bounds.min_offset > 5, bounds.max_offset) == (True, 11)


def test_delayed_messages_are_delivered_by_the_engine(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.send("orders", b"later", delayLevel=3)
    assert max_offset(cluster) == 0

    def deliver(path: Path) -> None:
        scheduler = DeliveryScheduler(str(path))
        assert scheduler.tick(FUTURE_MS).delivered == 1
        scheduler.close()

    cluster.broker.write(deliver)
    assert max_offset(cluster) == 1


@pytest.mark.parametrize(("leave", "error"), [("stop", ConnectionError), ("kill", ConnectionResetError)])
def test_a_broker_that_ends_closes_its_connections(run_cluster: RunCluster, leave: str, error: type) -> None:
    cluster = filled(run_cluster)
    with RawClient(cluster.broker.address) as client:
        assert client.call(MAX, ORDERS).code == 0
        getattr(cluster.broker, leave)()
        with pytest.raises(error):
            client.receive()
    with pytest.raises(ConnectionRefusedError):
        RawClient(cluster.broker.address)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_broker_starts_again_with_its_messages(run_cluster: RunCluster, is_new: bool) -> None:
    cluster = filled(run_cluster)
    address = cluster.broker.address
    cluster.broker.kill()
    cluster.broker.restart(new_port=is_new)
    assert max_offset(cluster) == 5
    assert (cluster.broker.address != address) == is_new


def test_a_frozen_broker_accepts_and_answers_when_it_is_thawed(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    with RawClient(cluster.broker.address, timeout_s=NOBODY_ANSWERS_S) as known:
        known.call(MAX, ORDERS)
        cluster.broker.freeze()
        with RawClient(cluster.broker.address, timeout_s=NOBODY_ANSWERS_S) as unknown:
            for client in (known, unknown):
                client.send(MAX, ORDERS)
                with pytest.raises(TimeoutError):
                    client.receive()
            cluster.broker.thaw()
            assert [client.receive().fields for client in (known, unknown)] == [{"offset": "5"}] * 2


def test_requests_are_counted_by_code(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, brokers=1, name_servers=2)
    with RawClient(cluster.broker.address) as client, RawClient(cluster.name_servers[1].address) as other:
        client.call(MAX, ORDERS)
        client.call(MAX, ORDERS)
        other.call(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert [one.fields for one in cluster.broker.seen_requests(MAX)] == [{"topic": "orders", "queueId": "0"}] * 2
    assert cluster.clear_requests() == {
        "broker-a": {MAX: 2},
        "name servers": {RequestCode.GET_BROKER_CLUSTER_INFO: 1},
    }
    assert cluster.clear_requests() == {}


def test_one_way_requests_are_executed_and_not_answered(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, release="4.9")
    with RawClient(cluster.broker.address) as client:
        fields = {**ORDERS, "consumerGroup": "billing", "commitOffset": 3}
        client.send(RequestCode.UPDATE_CONSUMER_OFFSET, fields, flag=2)
        answer = client.call(RequestCode.QUERY_CONSUMER_OFFSET, {**ORDERS, "consumerGroup": "billing"})
    assert answer.fields == {"offset": "3"}


def test_garbage_is_no_frame(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    cluster.broker.fail(MAX, faults.garbage())
    with RawClient(cluster.broker.address) as client:
        client.send(MAX, ORDERS)
        with pytest.raises(FrameError):
            client.receive()


@pytest.mark.parametrize("closes", [False, True])
def test_half_a_frame_is_followed_by_nothing(run_cluster: RunCluster, closes: bool) -> None:
    cluster = filled(run_cluster)
    cluster.broker.fail(MAX, faults.half_a_frame(closes=closes))
    with RawClient(cluster.broker.address, timeout_s=NOBODY_ANSWERS_S) as client:
        client.send(MAX, ORDERS)
        size = int.from_bytes((half := client.receive_bytes())[:4], "big") + 4
        assert len(half) == size // 2
        with pytest.raises(ConnectionError if closes else TimeoutError):
            client.receive_bytes()


@pytest.mark.parametrize("executes", [False, True])
@pytest.mark.parametrize("fault", [faults.nothing, faults.closes_connection])
def test_a_request_without_an_answer_may_be_executed(
    run_cluster: RunCluster, fault: Callable[..., faults.Fault], executes: bool
) -> None:
    cluster = filled(run_cluster, release="4.9")
    cluster.broker.fail(RequestCode.UPDATE_CONSUMER_OFFSET, fault(executes=executes))
    fields = {**ORDERS, "consumerGroup": "billing", "commitOffset": 3}
    with RawClient(cluster.broker.address, timeout_s=NOBODY_ANSWERS_S) as client:
        client.send(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
        with pytest.raises(TimeoutError if fault is faults.nothing else ConnectionError):
            client.receive()
    assert cluster.broker.offsets.find("billing", QueueKey("orders", 0)) == (3 if executes else None)


def test_a_slow_answer_arrives_in_pieces(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    cluster.broker.fail(MAX, faults.slowly(20, pieces=3, pause_ms=20))
    with RawClient(cluster.broker.address) as client:
        client.send(MAX, ORDERS)
        parts = [client.receive_bytes() for _ in range(3)]
    assert int.from_bytes(parts[0][:4], "big") + 4 == sum(map(len, parts))


def test_too_much_claims_more_than_a_frame_may_have(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    cluster.broker.fail(MAX, faults.too_much(1 << 30, sent_bytes=1 << 20))
    with RawClient(cluster.broker.address) as client:
        client.send(MAX, ORDERS)
        received = b""
        while len(received) < 4 + (1 << 20):
            received += client.receive_bytes()
    assert int.from_bytes(received[:4], "big") + 4 == 1 << 30


def test_a_fault_applies_so_many_times_and_to_chosen_requests(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    cluster.create_topic("payments", 1)
    rule = cluster.broker.fail(MAX, faults.busy(), times=2, when=lambda call: call.text("topic") == "orders")
    with RawClient(cluster.broker.address) as client:
        assert client.call(MAX, {**ORDERS, "topic": "payments"}).code == 0
        codes = [client.call(MAX, ORDERS).code for _ in range(3)]
    assert codes == [ResponseCode.SYSTEM_BUSY, ResponseCode.SYSTEM_BUSY, 0]
    assert rule.count == 2


def test_an_answer_can_be_changed_until_the_rule_is_removed(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    rule = cluster.broker.fail(None, faults.changed(lambda answer: Answer(fields={"offset": "99"})))
    assert max_offset(cluster) == 99
    cluster.broker.heal(rule)
    assert max_offset(cluster) == 5
    cluster.broker.fail(MAX, faults.with_code(ResponseCode.NO_PERMISSION, "forbidden"))
    cluster.broker.heal()
    assert max_offset(cluster) == 5


def test_a_server_closes_a_connection_that_sends_no_frames(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    for data in (b"GET / HTTP/1.1\r\n\r\n", (1 << 24).to_bytes(4, "big"), bytes(8)):
        with RawClient(cluster.broker.address) as client:
            client.send_bytes(data)
            with pytest.raises(ConnectionError):
                client.receive()


def test_a_server_stops_reading_while_its_answers_are_not_read(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, 1)
    cluster.broker.fail(MAX, faults.changed(lambda answer: Answer(body=bytes(1 << 18))))
    with RawClient(cluster.broker.address) as client:
        for _ in range(300):
            client.send(MAX, ORDERS)
        client.receive()
        counts = [cluster.broker.loop.run(lambda: cluster.broker.requests[MAX]) for _ in range(50)]
        assert counts[-1] < 100  # although each call let the loop look at its sockets
        for _ in range(299):
            client.receive()
    assert cluster.broker.requests[MAX] == 300


def test_a_broker_may_advertise_another_address(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    cluster.broker.advertise("192.0.2.1:10911")
    with RawClient(cluster.name_servers[0].address) as client:
        body = bytes(client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}).body)
    assert b"192.0.2.1:10911" in body


def test_a_light_cluster_counts_messages_of_many_queues(run_cluster: RunCluster) -> None:
    cluster = run_cluster(brokers=50, is_light=True)
    cluster.create_topic("orders", 400)
    cluster.advance("orders", 3, broker="broker-50")
    with RawClient(cluster.brokers["broker-50"].address) as client:
        body = bytes(client.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "orders"}).body)
        fields = {"consumerGroup": "g", "topic": "orders", "queueId": 399, "queueOffset": 1, "maxMsgNums": 32}
        more = {"sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*"}
        answer = client.call(RequestCode.PULL_MESSAGE, {**fields, **more})
    assert body.count(b'"maxOffset":3') == 400
    records = []
    rest = bytes(answer.body)
    while rest:
        record = decode_record(rest)
        assert isinstance(record, Record)
        records.append((record.topic, record.queue_id, record.queue_offset))
        rest = rest[record.total_size :]
    assert records == [(b"orders", 399, 1), (b"orders", 399, 2)]


def test_closing_raises_the_error_of_a_handler(tmp_path: Path) -> None:
    def break_it(broker: Broker, call: Call) -> Answer:
        raise ZeroDivisionError

    cluster = RunningCluster(tmp_path)
    cluster.broker.handlers[MAX] = break_it
    with RawClient(cluster.broker.address) as client:
        assert client.call(MAX, ORDERS).code == ResponseCode.SYSTEM_ERROR
    with pytest.raises(ZeroDivisionError):
        cluster.close()


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "brokers"]


def test_a_cluster_that_cannot_start_leaves_no_thread(tmp_path: Path) -> None:
    before = loops()
    with pytest.raises(AssertionError, match="broker-a"):
        RunningCluster(tmp_path / "cluster", brokers=["broker-a", "broker-a"])
    assert loops() == before


def test_close_stops_the_others_if_a_server_cannot_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = loops()
    cluster = RunningCluster(tmp_path / "cluster")
    stop = cluster.broker.stop

    def fail() -> None:
        stop()
        raise OSError("planted")

    monkeypatch.setattr(cluster.broker, "stop", fail)
    with pytest.raises(OSError, match="planted"):
        cluster.close()
    assert not cluster.name_servers[0].is_running
    assert loops() == before


def test_seen_requests_are_limited_by_the_bytes_of_their_bodies(
    run_cluster: RunCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.testing.brokers.server._KEPT_BODY_BYTES", 10)
    broker = run_cluster().broker
    with RawClient(broker.address) as client:
        for body in (b"first___", b"second", b"last"):
            client.call(UNKNOWN, {}, body)
        assert [one.body for one in broker.seen_requests(UNKNOWN)] == [b"second", b"last"]
        assert broker.requests[UNKNOWN] == 3
        client.call(UNKNOWN, {}, b"x" * 100)
    assert [len(one.body) for one in broker.seen_requests(UNKNOWN)] == [100]
