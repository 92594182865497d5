"""What brokers answer about offsets: bounds, times, groups, single messages and topics."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.format import fastjson
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
ORDERS = {"topic": "orders", "queueId": 0}
MAX_MS = 2**63 - 1


def ask(cluster: RunningCluster, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
    with RawClient(cluster.broker.address) as client:
        return client.call(code, fields, body)


def offset(cluster: RunningCluster, code: int, **fields: Any) -> int:
    answer = ask(cluster, code, {**ORDERS, **fields})
    assert answer.code == 0, answer
    return int(answer.fields["offset"])


def table(answer: Command) -> dict[int, dict[str, int]]:
    """Return the rows of an answer's offsetTable by queue id. Its keys are objects."""
    rows = fastjson.parse(bytes(answer.body).decode())["offsetTable"]
    return {fastjson.parse(key)["queueId"]: row for key, row in rows.items()}


@BOTH
def test_bounds_of_a_queue_that_does_not_exist_are_0(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    cluster.send("orders", *([b"x"] * 5))
    cluster.broker.expire("orders", 0, 2)
    assert offset(cluster, RequestCode.GET_MAX_OFFSET) == 5
    assert offset(cluster, RequestCode.GET_MIN_OFFSET) == 2
    assert offset(cluster, RequestCode.GET_MAX_OFFSET, queueId=7) == 0
    assert offset(cluster, RequestCode.GET_MAX_OFFSET, topic="nothing") == 0
    assert offset(cluster, RequestCode.GET_MIN_OFFSET, topic="nothing") == 0


@BOTH
def test_statistics_have_every_queue_for_reading_or_writing(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.broker.set_topic("orders", read_queues=1, write_queues=3)
    cluster.send("orders", b"x", b"y", queue_id=2)
    answer = ask(cluster, RequestCode.GET_TOPIC_STATS_INFO, {"topic": "orders"})
    assert b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:{' in bytes(answer.body)
    found = table(answer)
    assert {number: (row["minOffset"], row["maxOffset"]) for number, row in found.items()} == {
        0: (0, 0),
        1: (0, 0),
        2: (0, 2),
    }
    assert (found[0]["lastUpdateTimestamp"], found[2]["lastUpdateTimestamp"] > 0) == (0, True)
    assert ask(cluster, RequestCode.GET_TOPIC_STATS_INFO, {"topic": "nothing"}).code == ResponseCode.TOPIC_NOT_EXIST


@BOTH
def test_the_time_of_a_last_message_that_has_expired_is_unknown(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    cluster.send("orders", b"x", b"y")
    cluster.broker.expire("orders", 0, 2, keeps_minimum=True)
    (row,) = table(ask(cluster, RequestCode.GET_TOPIC_STATS_INFO, {"topic": "orders"})).values()
    assert row == {"lastUpdateTimestamp": -1, "maxOffset": 2, "minOffset": 0}


@BOTH
def test_a_time_after_the_last_message_is_its_neighbour_in_4(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 2)
    cluster.send("orders", b"x", b"y", queue_id=0)
    code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    assert offset(cluster, code, timestamp=1) == 0
    assert offset(cluster, code, timestamp=MAX_MS) == (1 if release == "4.9" else 2)
    assert offset(cluster, code, timestamp=MAX_MS, boundaryType="upper") == 1
    assert offset(cluster, code, timestamp=MAX_MS, queueId=1) == 0
    assert offset(cluster, code, timestamp=MAX_MS, topic="nothing") == 0


@BOTH
def test_the_earliest_time_is_that_of_the_first_message(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 2)
    cluster.send("orders", b"x", queue_id=0)
    record = decode_record(bytes(ask(cluster, RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 0}).body))
    assert isinstance(record, Record)
    code = RequestCode.GET_EARLIEST_MSG_STORETIME
    assert ask(cluster, code, ORDERS).fields == {"timestamp": str(record.store_timestamp)}
    assert ask(cluster, code, {**ORDERS, "queueId": 1}).fields == {"timestamp": "-1"}
    assert ask(cluster, code, {**ORDERS, "topic": "nothing"}).fields == {"timestamp": "-1"}


def test_the_settings_of_a_topic_are_unknown_to_4(run_cluster: RunCluster) -> None:
    for release in ("4.9", "5.3"):
        cluster = run_cluster(release=release)
        cluster.broker.set_topic("orders", 3, attributes={"message.type": "NORMAL"})
        answer = ask(cluster, RequestCode.GET_TOPIC_CONFIG, {"topic": "orders", "lo": True})
        if release == "4.9":
            assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        else:
            body = json.loads(bytes(answer.body))
            assert (body["attributes"], body["readQueueNums"]) == ({"message.type": "NORMAL"}, 3)
            assert ask(cluster, RequestCode.GET_TOPIC_CONFIG, {"topic": "nothing"}).code == ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize(
    ("release", "of_empty", "of_filled", "of_expired", "without_zero"),
    [("4.9", 0, 0, None, 0), ("5.3", None, 0, None, None)],
)
def test_a_group_without_an_offset(
    run_cluster: RunCluster,
    release: str,
    of_empty: int | None,
    of_filled: int | None,
    of_expired: int | None,
    without_zero: int | None,
) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 3)
    cluster.send("orders", b"x", b"y", queue_id=1)
    cluster.send("orders", b"x", b"y", queue_id=2)
    cluster.broker.expire("orders", 2, 1)

    def query(queue_id: int, **fields: Any) -> int | None:
        answer = ask(
            cluster,
            RequestCode.QUERY_CONSUMER_OFFSET,
            {"consumerGroup": "billing", "topic": "orders", "queueId": queue_id, **fields},
        )
        assert answer.code in (0, ResponseCode.QUERY_NOT_FOUND)
        return int(answer.fields["offset"]) if answer.code == 0 else None

    assert [query(0), query(1), query(2)] == [of_empty, of_filled, of_expired]
    assert query(1, setZeroIfNotFound=False) == without_zero


@BOTH
def test_a_committed_offset_is_answered_and_listed(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 2)
    cluster.send("orders", *([b"x"] * 4), queue_id=0)
    cluster.broker.groups.add("billing")
    group = {"consumerGroup": "billing"}
    assert ask(cluster, RequestCode.UPDATE_CONSUMER_OFFSET, {**ORDERS, **group, "commitOffset": 3}).code == 0
    assert offset(cluster, RequestCode.QUERY_CONSUMER_OFFSET, **group) == 3
    everything = fastjson.parse(bytes(ask(cluster, RequestCode.GET_ALL_CONSUMER_OFFSET, {}).body).decode())
    assert everything["offsetTable"] == {"orders@billing": {"0": 3}}
    rows = table(ask(cluster, RequestCode.GET_CONSUME_STATS, group))
    assert (rows[0]["brokerOffset"], rows[0]["consumerOffset"], rows[0]["lastTimestamp"] > 0) == (4, 3, True)
    assert ("pullOffset" in rows[0]) == (release == "5.3")


@BOTH
def test_the_progress_of_a_group_with_members_is_that_in_its_topics(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    for topic in ("orders", "bills"):
        cluster.create_topic(topic, 1)
        cluster.broker.offsets.commit("billing", QueueKey(topic, 0), 1)

    def topics(**fields: str) -> set[str]:
        answer = ask(cluster, RequestCode.GET_CONSUME_STATS, {"consumerGroup": "billing", **fields})
        rows = fastjson.parse(bytes(answer.body).decode())["offsetTable"]
        return {fastjson.parse(key)["topic"] for key in rows}

    assert (topics(), topics(topic="bills")) == ({"orders", "bills"}, {"bills"})
    cluster.broker.members.add("billing", "java-1", {"orders": "*"})
    assert (topics(), topics(topic="bills")) == ({"orders"}, set())


@pytest.mark.parametrize(
    ("release", "of_topic", "of_group"),
    [("4.9", 0, 0), ("5.3", ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)],
)
def test_an_offset_of_nobody_is_refused_by_5(
    run_cluster: RunCluster, release: str, of_topic: int, of_group: int
) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    fields = {"consumerGroup": "billing", "topic": "orders", "queueId": 0, "commitOffset": 9}
    for topic in ("orders", "nothing"):
        assert ask(cluster, RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "topic": topic}).code == of_group
    cluster.broker.members.add("billing", "java-1", {"orders": "*"})
    assert ask(cluster, RequestCode.UPDATE_CONSUMER_OFFSET, {**fields, "topic": "nothing"}).code == of_topic
    assert ask(cluster, RequestCode.UPDATE_CONSUMER_OFFSET, fields).code == 0


def test_a_commit_is_dropped_while_a_reset_waits(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.broker.groups.add("billing")
    cluster.broker.offsets.reset("billing", QueueKey("orders", 0), 5)
    group = {"consumerGroup": "billing"}
    assert ask(cluster, RequestCode.UPDATE_CONSUMER_OFFSET, {**ORDERS, **group, "commitOffset": 9}).code == 0
    assert offset(cluster, RequestCode.QUERY_CONSUMER_OFFSET, **group) == 5


def test_a_group_without_members_is_an_error(run_cluster: RunCluster) -> None:
    cluster, group = run_cluster(), {"consumerGroup": "billing"}
    assert ask(cluster, RequestCode.GET_CONSUMER_LIST_BY_GROUP, group).code == ResponseCode.SYSTEM_ERROR
    assert ask(cluster, RequestCode.GET_CONSUMER_CONNECTION_LIST, group).code == ResponseCode.CONSUMER_NOT_ONLINE


def test_groups_are_created_and_forbidden_by_request(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 1)
    cluster.broker.settings.creates_groups = False
    numbers = {"queueOffset": 0, "maxMsgNums": 1, "commitOffset": 0, "suspendTimeoutMillis": 0, "sysFlag": 4}
    pull = {**ORDERS, **numbers, "consumerGroup": "billing", "subscription": "*"}
    codes = [ask(cluster, RequestCode.PULL_MESSAGE, pull).code]
    for is_enabled in (True, False, True):
        config = json.dumps({"groupName": "billing", "consumeEnable": is_enabled}).encode()
        assert ask(cluster, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, config).code == 0
        codes.append(ask(cluster, RequestCode.PULL_MESSAGE, pull).code)
    found, refused = ResponseCode.PULL_NOT_FOUND, ResponseCode.NO_PERMISSION
    assert codes == [ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, found, refused, found]


@pytest.mark.parametrize(
    ("kind", "text", "is_allowed", "code"),
    [
        ("SQL92", "a > 1", True, 0),
        ("SQL92", "a > > 1", True, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ("SQL92", "a > 1", False, ResponseCode.SYSTEM_ERROR),
        ("TAG", "A || B", False, 0),
    ],
)
def test_an_expression_is_compiled_on_request(
    run_cluster: RunCluster, kind: str, text: str, is_allowed: bool, code: int
) -> None:
    cluster = run_cluster()
    cluster.broker.settings.filters_by_properties = is_allowed
    subscription = {"topic": "orders", "subString": text, "expressionType": kind, "subVersion": 0}
    body = {"clientId": "c", "group": "g", "subscriptionData": subscription}
    assert ask(cluster, RequestCode.CHECK_CLIENT_CONFIG, {}, json.dumps(body).encode()).code == code


@BOTH
def test_messages_are_found_by_key_and_by_place(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 2)
    cluster.send("orders", b"one", queue_id=0, keys="k1 k2")
    cluster.send("orders", b"two", queue_id=1, keys="k2")
    search = {"topic": "orders", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": MAX_MS}
    body = bytes(ask(cluster, RequestCode.QUERY_MESSAGE, {**search, "key": "k2"}).body)
    newest = decode_record(body)
    assert isinstance(newest, Record)
    older = decode_record(body[newest.total_size :])
    assert isinstance(older, Record)
    assert (newest.body, older.body, len(body)) == (b"two", b"one", newest.total_size + older.total_size)
    assert bytes(ask(cluster, RequestCode.QUERY_MESSAGE, {**search, "key": "k2", "maxNum": 1}).body) == bytes(
        body[: newest.total_size]
    )
    assert ask(cluster, RequestCode.QUERY_MESSAGE, {**search, "key": "k3"}).code == ResponseCode.QUERY_NOT_FOUND
    unique = newest.properties.decode().partition("UNIQ_KEY\x01")[2].partition("\x02")[0]
    found = ask(cluster, RequestCode.QUERY_MESSAGE, {**search, "key": unique, "_UNIQUE_KEY_QUERY": True})
    assert bytes(found.body) == body[: newest.total_size]
    there = ask(cluster, RequestCode.VIEW_MESSAGE_BY_ID, {"offset": newest.physical_offset})
    assert bytes(there.body) == body[: newest.total_size]
    for nowhere in (newest.physical_offset + 1, 1 << 40):
        answer = ask(cluster, RequestCode.VIEW_MESSAGE_BY_ID, {"offset": nowhere})
        assert answer.code == ResponseCode.SYSTEM_ERROR


@BOTH
def test_topics_are_created_and_changed_by_request(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    fields = {
        "topic": "orders",
        "defaultTopic": "TBW102",
        "readQueueNums": 2,
        "writeQueueNums": 2,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": "+message.type=FIFO",
    }
    assert ask(cluster, RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == 0
    cluster.send("orders", b"x", queue_id=1)
    assert ask(cluster, RequestCode.UPDATE_AND_CREATE_TOPIC, {**fields, "readQueueNums": 5}).code == 0
    topic = cluster.broker.topics["orders"]
    assert (topic.read_queues, topic.write_queues, topic.attributes) == (5, 2, {"message.type": "FIFO"})
    cluster.send("orders", b"y", queue_id=4)
    assert cluster.broker.bounds("orders")[4].max_offset == 1
    refused = ask(cluster, RequestCode.UPDATE_AND_CREATE_TOPIC, {**fields, "topic": "no name"})
    assert refused.code == (ResponseCode.INVALID_PARAMETER if release == "5.3" else ResponseCode.SYSTEM_ERROR)


@pytest.mark.parametrize("fields", [{"topic": "orders"}, {"topic": "orders", "queueId": "zero"}])
def test_a_missing_or_wrong_field_is_a_system_error(run_cluster: RunCluster, fields: dict[str, Any]) -> None:
    answer = ask(run_cluster(), RequestCode.GET_MAX_OFFSET, fields)
    assert (answer.code, "Exception" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
