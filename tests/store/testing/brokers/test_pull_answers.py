"""What brokers answer to pulls: records, limits, statuses, filters, and pulls that are held."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Broker, RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
HOLD, SUBSCRIPTION = 2, 4
LONG_MS = 600_000


def pull_fields(topic: str, offset: int, **fields: Any) -> dict[str, Any]:
    return {
        "consumerGroup": "readers",
        "topic": topic,
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": SUBSCRIPTION,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "expressionType": "TAG",
        "subVersion": 0,
        **fields,
    }


def pull(broker: Broker, offset: int, topic: str = "orders", **fields: Any) -> Command:
    with RawClient(broker.address) as client:
        return client.call(RequestCode.PULL_MESSAGE, pull_fields(topic, offset, **fields))


def records(answer: Command) -> list[Record]:
    body, found = bytes(answer.body), []
    while body:
        record = decode_record(body)
        assert isinstance(record, Record)
        found.append(record)
        body = body[record.total_size :]
    return found


def offsets(answer: Command) -> list[int]:
    return [record.queue_offset for record in records(answer)]


def place(answer: Command) -> tuple[int, str | None, int, int, int]:
    """Return code, status, and the next, the minimum and the maximum offset."""
    numbers = (int(answer.fields[name]) for name in ("nextBeginOffset", "minOffset", "maxOffset"))
    return answer.code, answer.remark, *numbers  # type: ignore[return-value]


@contextmanager
def held(broker: Broker, offset: int, **fields: Any) -> Iterator[RawClient]:
    """Send a pull that is held, and yield its connection when the broker holds it."""
    sys_flag = HOLD | SUBSCRIPTION
    with RawClient(broker.address) as client:
        client.send(RequestCode.PULL_MESSAGE, pull_fields("orders", offset, sysFlag=sys_flag, **fields))
        while not broker.loop.run(len, broker.held):
            time.sleep(0.001)
        yield client


@BOTH
def test_a_pull_returns_the_records_of_the_commit_log(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    cluster.send("orders", *(f"{number}" for number in range(40)), tags="A", keys="k")
    answer = pull(cluster.broker, 5)
    assert place(answer) == (0, "FOUND", 37, 0, 40)
    assert offsets(answer) == list(range(5, 37))
    found = records(answer)
    assert [record.body for record in found] == [str(number).encode() for number in range(5, 37)]
    log = (cluster.folder / "broker-a" / "commitlog" / f"{0:020}").read_bytes()
    begin = found[0].physical_offset
    assert log[begin : begin + len(answer.body)] == bytes(answer.body)


def test_a_pull_ends_at_the_limit_of_bytes_and_has_at_least_one_message(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.send("orders", *([bytes(100_000)] * 4), bytes(500_000))
    assert offsets(pull(cluster.broker, 0)) == [0, 1]
    assert offsets(pull(cluster.broker, 4)) == [4]
    assert offsets(pull(cluster.broker, 0, maxMsgNums=0)) == [0]


def test_a_pull_of_old_messages_returns_eight(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.send("orders", *([b"x"] * 40))
    cluster.broker.settings.on_disk = True
    assert offsets(pull(cluster.broker, 3)) == list(range(3, 11))


@BOTH
def test_a_pull_outside_of_the_queue_says_where_to_continue(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    broker = cluster.broker
    cluster.create_topic("orders", 2)
    cluster.send("orders", *([b"x"] * 9), queue_id=0)
    broker.expire("orders", 0, 4)
    assert place(pull(broker, 9)) == (19, "OFFSET_OVERFLOW_ONE", 9, 4, 9)
    assert place(pull(broker, 10)) == (21, "OFFSET_OVERFLOW_BADLY", 9, 4, 9)
    assert place(pull(broker, 3)) == (21, "OFFSET_TOO_SMALL", 4, 4, 9)
    assert place(pull(broker, -1)) == (21, "OFFSET_TOO_SMALL", 4, 4, 9)
    assert place(pull(broker, 0, queueId=1)) == (19, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)
    assert place(pull(broker, 5, queueId=1)) == (21, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)
    assert broker.moved_event_count == (1 if release == "4.9" else 0)


@BOTH
def test_a_pull_after_expiry_jumps_while_the_old_minimum_is_shown(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    cluster.send("orders", *([b"x"] * 1000))
    cluster.broker.expire("orders", 0, 850, keeps_minimum=True)
    assert place(pull(cluster.broker, 10)) == (20, "MESSAGE_WAS_REMOVING", 810, 0, 1000)
    jump = pull(cluster.broker, 800, maxMsgNums=2)
    assert (place(jump), offsets(jump)) == ((0, "FOUND", 852, 0, 1000), [850, 851])
    with RawClient(cluster.broker.address) as client:
        fields = {"topic": "orders", "queueId": 0}
        assert client.call(RequestCode.GET_EARLIEST_MSG_STORETIME, fields).fields == {"timestamp": "-1"}
        assert client.call(RequestCode.GET_MIN_OFFSET, fields).fields == {"offset": "0"}


@BOTH
def test_a_pull_of_a_queue_that_does_not_exist_is_refused(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 2)
    assert pull(cluster.broker, 0, "nothing").code == ResponseCode.TOPIC_NOT_EXIST
    wanted = {"4.9": ResponseCode.SYSTEM_ERROR, "5.3": ResponseCode.INVALID_PARAMETER}[release]
    assert pull(cluster.broker, 0, queueId=2).code == wanted
    cluster.broker.set_topic("orders", read_queues=1)
    assert pull(cluster.broker, 0, queueId=1).code == wanted


@pytest.mark.parametrize("forbidden_by", ["broker", "group", "topic"])
@BOTH
def test_a_pull_without_permission_is_refused(run_cluster: RunCluster, release: str, forbidden_by: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1, perm=2 if forbidden_by == "topic" else 6)
    cluster.broker.settings.is_readable = forbidden_by != "broker"
    cluster.broker.settings.forbidden_groups = frozenset({"readers"} if forbidden_by == "group" else ())
    answer = pull(cluster.broker, 0)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert ("forbiddenType" in answer.fields) == (release == "5.3")


def test_a_group_that_cannot_be_created_is_refused(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.broker.settings.creates_groups = False
    assert pull(cluster.broker, 0).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    cluster.broker.groups.add("readers")
    assert pull(cluster.broker, 0).code == ResponseCode.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("TAG", "A || C", [0, 2, 4]),
        ("TAG", "nothing", []),
        ("TAG", "||", [0, 1, 2, 3, 4]),
        ("SQL92", "number > 1 AND TAGS = 'A'", [2, 4]),
        ("SQL92", "number > > 1", [0, 1, 2, 3, 4]),
        ("XPATH", "/", [0, 1, 2, 3, 4]),
    ],
)
@BOTH
def test_a_subscription_in_the_pull_filters(
    run_cluster: RunCluster, release: str, kind: str, text: str, expected: list[int]
) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    for number in range(5):
        cluster.send("orders", b"x", tags="AB"[number % 2], properties={"number": str(number)})
    answer = pull(cluster.broker, 0, subscription=text, expressionType=kind)
    assert offsets(answer) == expected
    status = "FOUND" if expected else "NO_MATCHED_MESSAGE"
    assert place(answer) == (0 if expected else 20, status, 5, 0, 5)


def test_a_broker_may_refuse_filters_by_properties(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.broker.settings.filters_by_properties = False
    assert pull(cluster.broker, 0, subscription="a > 1", expressionType="SQL92").code == ResponseCode.SYSTEM_ERROR


@BOTH
def test_a_pull_without_its_subscription_uses_that_of_the_members(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    cluster.create_topic("bills", 1)
    cluster.send("orders", b"a", tags="A")
    cluster.send("orders", b"b", tags="B", properties={"p": "1"})

    def ask(topic: str = "orders", **fields: Any) -> Command:
        return pull(cluster.broker, 0, topic, sysFlag=0, **fields)

    assert ask().code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    cluster.broker.members.add("readers", "java-1", {"orders": "A"}, sub_version=5)
    assert ask("bills").code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert ask(subVersion=6).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert offsets(ask(subVersion=5)) == [0]
    for text, code in (("p = '1'", 0), ("p > > 1", ResponseCode.FILTER_DATA_NOT_EXIST)):
        cluster.broker.members.remove("readers", "java-1")
        cluster.broker.members.add("readers", "java-1", {"orders": text}, expression_type="SQL92")
        answer = ask()
        assert (answer.code, offsets(answer)) == (code, [1] if code == 0 else [])
    assert offsets(pull(cluster.broker, 0)) == [0, 1]


def test_compressed_and_retried_messages_are_served_as_stored(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.send("%RETRY%billing", b"again", properties={"RETRY_TOPIC": "orders"})
    cluster.send("orders", b"z" * 1000, queue_id=0, compression="zlib")
    (record,) = records(pull(cluster.broker, 0))
    assert (len(record.body) < 100, record.sys_flag & 1) == (True, 1)
    places = cluster.send("%RETRY%billing", b"more")
    assert places[0][0].topic == "%RETRY%billing"
    queues = range(cluster.broker.topics["%RETRY%billing"].read_queues)
    found = [one for number in queues for one in records(pull(cluster.broker, 0, "%RETRY%billing", queueId=number))]
    assert sorted(record.body for record in found) == [b"again", b"more"]


def test_a_held_pull_is_answered_when_a_message_arrives(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 2)
    cluster.broker.settings.tick_ms = LONG_MS
    with held(cluster.broker, 0, suspendTimeoutMillis=LONG_MS) as client:
        cluster.send("orders", b"for another queue", queue_id=1)
        assert len(cluster.broker.held) == 1
        cluster.send("orders", b"here", queue_id=0)
        answer = client.receive()
    assert (place(answer), records(answer)[0].body) == ((0, "FOUND", 1, 0, 1), b"here")
    assert len(cluster.broker.held) == 0


def test_a_held_pull_is_answered_at_a_tick_when_its_time_is_over(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.broker.settings.tick_ms = 5
    with held(cluster.broker, 0, suspendTimeoutMillis=20) as client:
        assert place(client.receive()) == (19, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)


def test_a_held_pull_waits_for_a_message_that_matches(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.broker.settings.tick_ms = LONG_MS
    with held(cluster.broker, 0, suspendTimeoutMillis=LONG_MS, subscription="A") as client:
        cluster.send("orders", b"x", tags="B")
        assert len(cluster.broker.held) == 1
        cluster.send("orders", b"x", tags="A")
        answer = client.receive()
    assert (place(answer), offsets(answer)) == ((0, "FOUND", 2, 0, 2), [1])


def test_a_held_pull_continues_at_a_tick_after_messages_that_do_not_match(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.broker.settings.tick_ms = 20
    with held(cluster.broker, 0, suspendTimeoutMillis=LONG_MS, subscription="A") as client:
        cluster.send("orders", b"x", tags="B")
        assert place(client.receive()) == (20, "NO_MATCHED_MESSAGE", 1, 0, 1)


def test_a_pull_may_commit_an_offset(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    pull(cluster.broker, 0, sysFlag=SUBSCRIPTION | 1, commitOffset=7)
    assert cluster.broker.offsets.find("readers", QueueKey("orders", 0)) == 7


def test_a_reset_is_delivered_once_by_5(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.send("orders", b"x", b"y")
    cluster.broker.offsets.reset("readers", QueueKey("orders", 0), 1)
    assert place(pull(cluster.broker, 0, consumerGroup="others")) == (0, "FOUND", 2, 0, 2)
    assert place(pull(cluster.broker, 0)) == (21, "OFFSET_RESET", 1, 0, 2)
    assert place(pull(cluster.broker, 0)) == (0, "FOUND", 2, 0, 2)


def test_lite_pulls_are_unknown_to_4(run_cluster: RunCluster) -> None:
    for release, code in (("4.9", ResponseCode.REQUEST_CODE_NOT_SUPPORTED), ("5.3", ResponseCode.PULL_NOT_FOUND)):
        cluster = run_cluster(release=release)
        cluster.create_topic("orders", 1)
        with RawClient(cluster.broker.address) as client:
            assert client.call(361, pull_fields("orders", 0, sysFlag=SUBSCRIPTION | 16)).code == code


def test_a_slave_refuses_pulls_as_its_release_does(run_cluster: RunCluster) -> None:
    for release, code in (("4.9", ResponseCode.PULL_RETRY_IMMEDIATELY), ("5.3", ResponseCode.SYSTEM_BUSY)):
        cluster = run_cluster(release=release)
        cluster.create_topic("orders", 1)
        cluster.send("orders", b"x")
        slave = cluster.add_slave("broker-a")
        for offset in (0, 1):
            answer = pull(slave, offset, sysFlag=HOLD | SUBSCRIPTION, suspendTimeoutMillis=LONG_MS)
            assert (answer.code, bytes(answer.body)) == (code, b"")


def test_an_acting_master_serves_its_own_end(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.send("orders", b"x")
    slave = cluster.add_slave("broker-a")
    cluster.send("orders", b"only at the master")
    slave.act_as_master()
    assert place(pull(slave, 0)) == (0, "FOUND", 1, 0, 1)
    assert place(pull(slave, 1)) == (19, "OFFSET_OVERFLOW_ONE", 1, 0, 1)
    assert place(pull(slave, 2)) == (20, "OFFSET_OVERFLOW_BADLY", 2, 0, 1)
