"""Failed rows that go back to a cluster: their check, the requests, and brokers that are away or refuse."""

import itertools
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.failed_messages import DEAD, GROUP, RETRY, Row, address_of, batch_of, rows_of

from rmq_spark.store import open_consumer, open_store
from rmq_spark.store.backend import CommitTerms, SendBackTerms
from rmq_spark.store.cluster import broker_calls
from rmq_spark.store.cluster import client as cluster_client
from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.broker_calls import BrokerCalls
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.send_back_sink import ClusterSendBackSink
from rmq_spark.store.cluster.write_routes import WriteRoutes
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
    UnknownOutcomeError,
)
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.brokers import Account, AccountTable, Answer, RunningCluster, faults
from rmq_spark.store.testing.brokers.broker import Broker

RunCluster = Callable[..., RunningCluster]
KEY = CommitKey("query", 0)
SEND_BACK, RECORD_AT = RequestCode.CONSUMER_SEND_MSG_BACK, RequestCode.VIEW_MESSAGE_BY_ID
FUTURE_MS = 3 * 3600 * 1000
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(broker_calls, "_LAST_PAUSE_MS", 50.0)
    monkeypatch.setattr("rmq_spark.store.cluster.write_routes._RENEW_MS", 20.0)
    yield
    cluster_client._idle.forget()


@pytest.fixture
def start(run_cluster: RunCluster) -> Callable[..., RunningCluster]:
    """A function that starts two brokers. Queue 0 of the topic orders has three messages at each, of equal sizes."""

    def begin(release: str = "5.3", **terms: Any) -> RunningCluster:
        cluster = run_cluster(release=release, brokers=2, **terms)
        cluster.create_topic("orders", queues=1)
        for name, broker in cluster.brokers.items():
            broker.settings.delivers = False
            bodies = [f"{name[-1]}{number}".encode() for number in range(3)]
            cluster.send("orders", *bodies, broker=name, queue_id=0, tags="A", keys="k", properties={"p": "v"}, flag=3)
        return cluster

    return begin


def sink_of(cluster: RunningCluster, at: dict[str, Any] | None = None, **terms: Any) -> ClusterSendBackSink:
    return ClusterSendBackSink(address_of(cluster, **(at or {})), SendBackTerms(GROUP, **terms), CommitTerms())


def commit(sink: ClusterSendBackSink, rows: Sequence[Row]) -> int:
    sink.prepare()
    return sink.commit(KEY, [check(sink, rows)]).rows


def check(sink: ClusterSendBackSink, *parts: Sequence[Row]) -> Any:
    """Run a task with rows, in parts. Return its receipt as the driver gets it."""
    task = sink.open_task(None, KEY, "task", 0)
    try:
        for rows in parts:
            task.write(batch_of(rows))
        return pickle.loads(pickle.dumps(task.finish()))
    except BaseException:
        task.discard()
        raise


def waiting(broker: Broker, level: int) -> int:
    return broker.loop.run(broker.store.bounds, QueueKey(SCHEDULE_TOPIC, level - 1)).max_offset


def deliver(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.deliver_due(wall_clock_ms() + FUTURE_MS)


@BOTH
def test_rows_come_back_until_they_are_dead(start: Callable[..., RunningCluster], release: str) -> None:
    cluster = start(release)
    sink = sink_of(cluster, max_reconsume_times=2)
    rows = [row for row in rows_of(cluster) if row["queueOffset"] == 1]
    for times, level in ((1, 3), (2, 4)):
        assert commit(sink, rows) == 2
        assert [waiting(broker, level) for broker in cluster.brokers.values()] == [1, 1]
        deliver(cluster)
        rows = [row for row in rows_of(cluster, RETRY) if row["reconsumeTimes"] == times]
        assert [(row["topic"], row["physicalTopic"]) for row in rows] == [("orders", RETRY)] * 2
        assert sorted(row["body"] for row in rows) == [b"a1", b"b1"]
        assert sorted(row["brokerName"] for row in rows) == ["broker-a", "broker-b"]
    places = ("topic", "brokerName", "queueId", "queueOffset", "commitLogOffset", "reconsumeTimes")
    commit(sink, [{name: row[name] for name in places} for row in rows])  # without physicalTopic
    dead = rows_of(cluster, DEAD)
    assert sorted((row["body"], row["reconsumeTimes"]) for row in dead) == [(b"a1", 3), (b"b1", 3)]


def test_the_name_of_the_broker_decides(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    rows = rows_of(cluster)
    pairs = {(row["queueOffset"], row["commitLogOffset"]) for row in rows}
    assert len(rows) == 2 * len(pairs), "the brokers have their messages at equal offsets"
    at_b = [row | {"delayLevel": -1} for row in rows if row["brokerName"] == "broker-b"]
    assert commit(sink_of(cluster), at_b[:2]) == 2
    assert sorted(row["body"] for row in rows_of(cluster, DEAD)) == [b"b0", b"b1"]


@pytest.mark.parametrize(("level", "place"), [(5, 5), (0, 3), (None, 3), (-1, None)])
def test_the_level_of_a_row_decides(start: Callable[..., RunningCluster], level: int | None, place: int | None) -> None:
    cluster = start()
    commit(sink_of(cluster), [rows_of(cluster)[0] | {"delayLevel": level}])
    counts = {number: waiting(cluster.brokers["broker-a"], number) for number in range(1, 19)}
    assert {number for number, count in counts.items() if count} == ({place} if place else set())


@pytest.mark.parametrize("change", ["commitLogOffset", "queueOffset", "queueId", "topic", "reconsumeTimes", "middle"])
def test_rows_of_other_messages_are_refused_before_anything_is_sent(
    start: Callable[..., RunningCluster], change: str
) -> None:
    cluster = start()
    places = ["topic", "brokerName", "queueId", "queueOffset", "commitLogOffset", "reconsumeTimes"]
    rows = rows_of(cluster, columns=places)[:2]
    changed = {"commitLogOffset": rows[0]["commitLogOffset"], "topic": "payments", "middle": None}
    if change == "middle":
        rows[1]["commitLogOffset"] += 1
    else:
        rows[1][change] = changed.get(change, rows[1][change] + 1 if change != "topic" else None)
    with pytest.raises(OptionError, match=r"row 1: .*is not a message of this cluster"):
        commit(sink_of(cluster), rows)
    assert all(not broker.requests[SEND_BACK] for broker in cluster.brokers.values())


def test_rows_without_a_broker_are_refused(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    row = rows_of(cluster)[0]
    with pytest.raises(OptionError, match="row 0: its brokerName is null"):
        commit(sink_of(cluster), [row | {"brokerName": None}])
    del row["brokerName"]
    with pytest.raises(OptionError, match="without the column brokerName"):
        commit(sink_of(cluster), [row])


@BOTH
@pytest.mark.parametrize("keeps_minimum", [False, True])
def test_expired_rows_are_an_error_before_anything_is_sent(
    start: Callable[..., RunningCluster], release: str, keeps_minimum: bool
) -> None:
    cluster = start(release)
    rows = rows_of(cluster)
    cluster.brokers["broker-a"].expire("orders", 0, 1, keeps_minimum=keeps_minimum)
    with pytest.raises(NotFoundError, match=r"row 0: orders/broker-a/0 at queue offset 0.*has expired"):
        commit(sink_of(cluster), rows)
    assert all(not broker.requests[SEND_BACK] for broker in cluster.brokers.values())


@BOTH
def test_expired_rows_are_sent_from_their_rows(start: Callable[..., RunningCluster], release: str) -> None:
    cluster = start(release)
    rows = rows_of(cluster)
    cluster.brokers["broker-a"].expire("orders", 0, 1)
    sink = sink_of(cluster, expired_original="resend", max_reconsume_times=1)
    assert commit(sink, rows[:2]) == 2
    assert cluster.brokers["broker-a"].requests[SEND_BACK] == 1
    assert waiting(cluster.brokers["broker-a"], 3) == 2
    deliver(cluster)
    (copy,) = (row for row in rows_of(cluster, RETRY) if row["body"] == b"a0")
    first = rows[0]
    for name in ("topic", "msgId", "tags", "keys", "flag", "bornTimestamp"):
        assert copy[name] == first[name], name
    assert copy["reconsumeTimes"] == 1
    assert copy["properties"]["ORIGIN_MESSAGE_ID"] == first["msgId"]
    assert copy["properties"]["p"] == "v"
    assert not {"RECONSUME_TIME", "MAX_RECONSUME_TIMES"} & copy["properties"].keys()
    cluster.brokers["broker-a"].expire(RETRY, 0, 2)
    commit(sink, [copy])
    ((dead),) = rows_of(cluster, DEAD)
    assert (dead["body"], dead["reconsumeTimes"]) == (b"a0", 2)
    assert dead["properties"]["ORIGIN_MESSAGE_ID"] == first["msgId"]
    assert dead["properties"]["RETRY_TOPIC"] == "orders"


def test_expired_rows_without_ids_get_ids_of_their_places(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    cluster.send("orders", b"same", b"same", broker="broker-a", queue_id=0)
    names = ("topic", "brokerName", "queueId", "queueOffset", "commitLogOffset", "reconsumeTimes", "body")
    rows = [{name: row[name] for name in names} for row in rows_of(cluster) if row["body"] == b"same"]
    cluster.brokers["broker-a"].expire("orders", 0, 5)
    for some in (rows[:1], rows[1:], rows):  # each is a task of its own
        commit(sink_of(cluster, expired_original="resend"), some)
    deliver(cluster)
    ids = [row["msgId"] for row in rows_of(cluster, RETRY)]
    assert [ids.count(one) for one in set(ids)] == [2, 2], "an id for each message, however often it is sent"


def test_expired_rows_without_a_body_are_refused(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    rows = [row | {"body": None} for row in rows_of(cluster)]
    cluster.brokers["broker-a"].expire("orders", 0, 1)
    with pytest.raises(OptionError, match=r"row 0: .*the row has no body"):
        commit(sink_of(cluster, expired_original="resend"), rows)


def test_rows_wait_for_a_broker_that_is_away(
    start: Callable[..., RunningCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start()
    sink = sink_of(cluster)
    receipt = check(sink, [row | {"delayLevel": -1} for row in rows_of(cluster)])
    broker = cluster.brokers["broker-b"]
    broker.kill()
    looks, renew = itertools.count(1), WriteRoutes.renew

    def renew_and_restart(self: WriteRoutes, topic: str) -> None:
        if next(looks) == 3:
            broker.restart(new_port=True)
        renew(self, topic)

    monkeypatch.setattr(WriteRoutes, "renew", renew_and_restart)
    assert sink.commit(KEY, [receipt]).rows == 6
    assert sorted(row["body"] for row in rows_of(cluster, DEAD)) == [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]


def test_a_broker_that_stays_away_fails_with_what_was_sent(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    sink = sink_of(cluster, {"broker_down_timeout_ms": 200})
    receipt = check(sink, rows_of(cluster))
    cluster.brokers["broker-b"].kill()
    with pytest.raises(BackendUnavailableError) as caught:
        sink.commit(KEY, [receipt])
    away, rest = caught.value.__notes__
    assert "broker broker-b was away for" in away
    assert rest.startswith("rmq: 3 of 6 rows were sent back before that. Not sent back: orders/broker-b:0 at")


def test_an_answer_that_is_lost_lets_the_row_be_copied_twice(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    cluster.brokers["broker-a"].fail(SEND_BACK, faults.closes_connection(executes=True), times=1)
    assert commit(sink_of(cluster), [rows_of(cluster)[0] | {"delayLevel": -1}]) == 1
    assert [row["body"] for row in rows_of(cluster, DEAD)] == [b"a0", b"a0"]


@pytest.mark.parametrize(
    ("code", "remark", "kind"),
    [
        (ResponseCode.NO_PERMISSION, "the broker is not writable", NoPermissionError),
        (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "subscription group not exist", NoPermissionError),
        (ResponseCode.SYSTEM_ERROR, "look message by offset failed, 0", NotFoundError),
        (ResponseCode.MESSAGE_ILLEGAL, "too long", BrokerError),
        (ResponseCode.SYSTEM_ERROR, "a planted fault", UnknownOutcomeError),
    ],
)
def test_a_refusal_ends_the_commit(
    start: Callable[..., RunningCluster], code: int, remark: str, kind: type[Exception]
) -> None:
    cluster = start()
    broker = cluster.brokers["broker-a"]
    broker.fail(SEND_BACK, faults.with_code(code, remark), times=1)
    with pytest.raises(kind) as caught:
        commit(sink_of(cluster), rows_of(cluster)[:3])
    assert "of 3 rows were sent back before that. Not sent back: orders/broker-a:0" in caught.value.__notes__[-1]


@BOTH
def test_a_late_copy_at_disk_or_slave_means_stored(start: Callable[..., RunningCluster], release: str) -> None:
    cluster = start(release)
    late = faults.changed(lambda answer: replace(answer, code=ResponseCode.SYSTEM_ERROR, remark="SLAVE_NOT_AVAILABLE"))
    for broker in cluster.brokers.values():
        broker.fail(SEND_BACK, late)
    rows = [row | {"delayLevel": -1} for row in rows_of(cluster)]
    assert commit(sink_of(cluster), rows) == 6
    assert sorted(row["body"] for row in rows_of(cluster, DEAD)) == [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]


@pytest.mark.parametrize("remark", ["OS_PAGECACHE_BUSY", "IN_SYNC_REPLICAS_NOT_ENOUGH", "SERVICE_NOT_AVAILABLE"])
def test_a_broker_that_stores_nothing_gets_the_row_again(start: Callable[..., RunningCluster], remark: str) -> None:
    cluster = start()
    cluster.brokers["broker-a"].fail(SEND_BACK, faults.with_code(ResponseCode.SYSTEM_ERROR, remark), times=2)
    rows = [row | {"delayLevel": -1} for row in rows_of(cluster)[:3]]
    assert commit(sink_of(cluster), rows) == 3
    assert sorted(row["body"] for row in rows_of(cluster, DEAD)) == [b"a0", b"a1", b"a2"]


def test_several_tasks_send_the_row_of_a_message_once(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    sink = sink_of(cluster)
    rows = [row | {"delayLevel": -1} for row in rows_of(cluster)]
    receipts = [check(sink, some, some) for some in (rows[:2] + rows[:1], rows[1:3])]
    totals = sink.commit(KEY, receipts)
    assert (totals.rows, totals.queues, totals.bytes > 0) == (3, 1, True)
    assert sorted(row["body"] for row in rows_of(cluster, DEAD)) == [b"a0", b"a1", b"a2"]


def test_requests_in_flight_are_bounded(start: Callable[..., RunningCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = start()
    cluster.send("orders", *(b"%d" % number for number in range(30)), broker="broker-a", queue_id=0)
    seen, take = [], BrokerCalls._take

    def note(self: BrokerCalls, *args: Any) -> None:
        seen.append(len(self._active))
        take(self, *args)

    monkeypatch.setattr(BrokerCalls, "_take", note)
    sink = sink_of(cluster, {"request_timeout_ms": 20_000})
    commit(sink, [row for row in rows_of(cluster) if row["brokerName"] == "broker-a"])
    assert cluster.brokers["broker-a"].requests[SEND_BACK] == 33
    assert max(seen) == broker_calls.MAX_IN_FLIGHT


def test_discard_closes_a_client_that_was_interrupted(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    rows = batch_of(rows_of(cluster))
    cluster_client._idle.forget()
    for error, kept in ((KeyboardInterrupt(), 0), (OptionError("a row is not valid"), 1)):
        task = sink_of(cluster).open_task(None, KEY, "task", 0)
        task.write(rows)
        try:
            raise error
        except BaseException:
            task.discard()
        assert len(cluster_client._idle._clients) == kept


def test_errors_of_rows_are_logged(start: Callable[..., RunningCluster], caplog: pytest.LogCaptureFixture) -> None:
    cluster = start()
    with caplog.at_level(logging.WARNING, "rmq_spark"):
        commit(sink_of(cluster), [row | {"error": f"E{row['queueOffset']}"} for row in rows_of(cluster)[:2]])
    assert "The first: E0; E1" in caplog.text


def test_a_namespace_is_added_to_names(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.broker.settings.delivers = False
    cluster.create_topic("shop%orders", queues=1)
    cluster.send("shop%orders", b"x", queue_id=0)
    row = {
        "topic": "orders",
        "brokerName": "broker-a",
        "queueId": 0,
        "queueOffset": 0,
        "commitLogOffset": 0,
        "reconsumeTimes": 0,
    }
    assert commit(sink_of(cluster, {"namespace": "shop"}), [row]) == 1
    deliver(cluster)
    assert [one["topic"] for one in rows_of(cluster, "%RETRY%shop%billing")] == ["shop%orders"]


@pytest.mark.parametrize("limit", [None, 1])
def test_send_back_of_programs_returns_where_copies_go(start: Callable[..., RunningCluster], limit: int | None) -> None:
    cluster = start()
    rows = [row | {"delayLevel": level} for row, level in zip(rows_of(cluster)[:3], [None, 5, -1], strict=True)]
    with open_store(name_server=cluster.address, request_timeout_ms=20_000) as producer:
        table = producer.send_back(batch_of(rows), GROUP, 4, limit)
        with pytest.raises(OptionError, match="is not a message of this cluster"):
            producer.send_back([rows[0] | {"queueId": 7}], GROUP)
    retry = None if limit is None else RETRY
    assert table.to_pylist() == [
        {"topic": topic, "brokerName": "broker-a", "delayLevel": level, "reconsumeTimes": 1}
        for topic, level in ((retry, 4), (retry, 5), (DEAD, 0))
    ]
    assert [waiting(cluster.brokers["broker-a"], level) for level in (4, 5)] == [1, 1]


def test_send_back_of_a_consumer_takes_what_it_pulled(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    with open_consumer(name_server=cluster.address, group=GROUP) as consumer:
        pulled = consumer.pull(QueueKey("orders", 0, "broker-b"), 0)
        table = consumer.send_back(pulled, delay_level=-1)
    assert table.column("topic").to_pylist() == [DEAD] * 3
    assert sorted(row["body"] for row in rows_of(cluster, DEAD)) == [b"b0", b"b1", b"b2"]
    with (
        open_consumer(name_server=cluster.address) as consumer,
        pytest.raises(OptionError, match="need a consumer group"),
    ):
        consumer.send_back(pulled)


def test_send_back_takes_properties_as_dicts(start: Callable[..., RunningCluster]) -> None:
    cluster = start()
    rows = rows_of(cluster)[:2]
    cluster.brokers["broker-a"].expire("orders", 0, 2)
    rows[1]["properties"] = {"other": "v"}
    with open_store(name_server=cluster.address, request_timeout_ms=20_000) as producer:
        producer.send_back(rows, GROUP, expired_original="resend")
    deliver(cluster)
    found = {row["body"]: row["properties"] for row in rows_of(cluster, RETRY)}
    assert (found[b"a0"]["p"], found[b"a1"]["other"]) == ("v", "v")
    assert "p" not in found[b"a1"]


def test_bytes_that_a_broker_returns_for_an_offset_inside_of_a_record_are_no_message(
    start: Callable[..., RunningCluster],
) -> None:
    cluster = start()
    row = rows_of(cluster)[0]

    def move(answer: Answer) -> Answer:
        record = bytearray(answer.body)
        record[28:36] = (row["commitLogOffset"] + 8).to_bytes(8, "big")
        return replace(answer, body=bytes(record))

    cluster.brokers["broker-a"].fail(RECORD_AT, faults.changed(move), times=1)
    with pytest.raises(OptionError, match="is not a message of this cluster: no message begins at"):
        commit(sink_of(cluster), [row])


@BOTH
def test_an_account_needs_the_rights_of_a_reader(start: Callable[..., RunningCluster], release: str) -> None:
    cluster = start(release)
    rows = rows_of(cluster)
    cluster.brokers["broker-a"].expire("orders", 0, 1)
    groups = {GROUP: "SUB", "rmq-spark-reader": "SUB"}
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("reader", "a secret", topics={"orders": "SUB"}, groups=groups))
    at = {"credentials": Credentials("reader", "a secret")}
    assert commit(sink_of(cluster, at), rows[1:]) == 5
    with pytest.raises(NotFoundError, match="has expired"):
        commit(sink_of(cluster, at), rows)
    other = ClusterSendBackSink(address_of(cluster, **at), SendBackTerms("others"), CommitTerms())
    with pytest.raises(NoPermissionError, match="Sub of the group"):
        commit(other, rows[1:])


@BOTH
def test_an_expired_row_can_be_a_dead_letter_at_once(start: Callable[..., RunningCluster], release: str) -> None:
    cluster = start(release)
    row = rows_of(cluster)[0]
    cluster.brokers["broker-a"].expire("orders", 0, 1)
    commit(sink_of(cluster, expired_original="resend"), [row | {"delayLevel": -1}])
    assert [(one["body"], one["reconsumeTimes"]) for one in rows_of(cluster, DEAD)] == [(b"a0", 1)]
