"""Requests: equal to those of the official client, and what they say of themselves."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remoting_frames import QUEUE, SAMPLES, RecordedFrame, read_frames

from rmq_spark.store.cluster.codes import RequestCode as Code
from rmq_spark.store.cluster.frame import MAX_FRAME_BYTES, FrameReader, encode_command
from rmq_spark.store.cluster.group_requests import (
    CommitOffsetRequest,
    CommittedOffsetRequest,
    CreateGroupRequest,
    GroupConnectionsRequest,
    GroupMembersRequest,
    GroupStatsRequest,
)
from rmq_spark.store.cluster.member_requests import (
    CONSUME_FROM,
    HeartbeatRequest,
    LockRequest,
    UnlockRequest,
    UnregisterRequest,
)
from rmq_spark.store.cluster.producer_requests import ProducerHeartbeatRequest, ProducersRequest
from rmq_spark.store.cluster.requests import (
    CheckFilterRequest,
    ClusterInfoRequest,
    CreateTopicRequest,
    Deadline,
    EarliestTimeRequest,
    KeySearchRequest,
    MaxOffsetRequest,
    MinOffsetRequest,
    OffsetAtRequest,
    PullRequest,
    RecordAtRequest,
    Request,
    RouteRequest,
    TopicConfigRequest,
    TopicListRequest,
    TopicStatsRequest,
)
from rmq_spark.store.cluster.responses import Subscription
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format import fastjson
from rmq_spark.store.format.config_json import GroupConfig, TopicConfig, decode_groups_file, encode_groups_file
from rmq_spark.store.model import QueueKey

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"queueOffset":"0","maxMsgNums":"0"', '"opaque":0', '"queueOffset', "a\\", "%d", "{0}", "||"]
)
int64s = st.integers(-(1 << 63), (1 << 63) - 1)
int32s = st.integers(-(1 << 31), (1 << 31) - 1)
pulls = st.builds(
    PullRequest,
    st.builds(QueueKey, texts, int32s, texts),
    int64s,
    int32s,
    texts,
    texts,
    texts,
    st.integers(0, 30_000),
)

Fields = Mapping[str, Any]


def queue_of(fields: Fields) -> QueueKey:
    return QueueKey(fields["topic"], int(fields["queueId"]), fields.get("bname", ""))


def queues_of(body: Fields) -> tuple[QueueKey, ...]:
    return tuple(QueueKey(one["topic"], one["queueId"], one["brokerName"]) for one in body["mqSet"])


def heartbeat_of(body: Fields) -> HeartbeatRequest:
    (consumer,) = body["consumerDataSet"] or [{"groupName": "", "subscriptionDataSet": [], "consumeFromWhere": ""}]
    subscriptions = consumer["subscriptionDataSet"]
    return HeartbeatRequest(
        body["clientID"],
        consumer["groupName"],
        tuple(Subscription(one["topic"], one["subString"], one["expressionType"]) for one in subscriptions),
        max((one["subVersion"] for one in subscriptions), default=0),
        next((name for name, where in CONSUME_FROM.items() if where == consumer["consumeFromWhere"]), "latest"),
    )


def hold_of(fields: Fields) -> int:
    return int(fields["suspendTimeoutMillis"]) if int(fields["sysFlag"]) & 2 else 0


# How a request with the fields of the official client's is made.
MAKERS: dict[int, Callable[[Fields, Any], Request[Any]]] = {
    11: lambda f, _: PullRequest(
        queue_of(f),
        int(f["queueOffset"]),
        int(f["maxMsgNums"]),
        f["consumerGroup"],
        f["subscription"],
        f["expressionType"],
        hold_of(f),
    ),
    12: lambda f, _: KeySearchRequest(
        f["topic"], "b", f["key"], int(f["maxNum"]), int(f["beginTimestamp"]), int(f["endTimestamp"])
    ),
    14: lambda f, _: CommittedOffsetRequest(f["consumerGroup"], queue_of(f)),
    15: lambda f, _: CommitOffsetRequest(f["consumerGroup"], queue_of(f), int(f["commitOffset"])),
    17: lambda f, _: CreateTopicRequest(
        TopicConfig(f["topic"], int(f["readQueueNums"]), int(f["writeQueueNums"]), int(f["perm"]))
    ),
    29: lambda f, _: OffsetAtRequest(queue_of(f), int(f["timestamp"])),
    30: lambda f, _: MaxOffsetRequest(queue_of(f)),
    31: lambda f, _: MinOffsetRequest(queue_of(f)),
    32: lambda f, _: EarliestTimeRequest(queue_of(f)),
    33: lambda f, _: RecordAtRequest(int(f["offset"]), f.get("topic", ""), "b"),
    34: lambda _, body: heartbeat_of(body),
    35: lambda f, _: UnregisterRequest(f["clientID"], f["consumerGroup"]),
    38: lambda f, _: GroupMembersRequest(f["consumerGroup"], "b"),
    41: lambda _, body: LockRequest(body["clientId"], body["consumerGroup"], queues_of(body)),
    42: lambda _, body: UnlockRequest(body["clientId"], body["consumerGroup"], queues_of(body)),
    46: lambda _, body: CheckFilterRequest(
        body["subscriptionData"]["topic"],
        body["group"],
        body["subscriptionData"]["subString"],
        body["subscriptionData"]["expressionType"],
        body["clientId"],
    ),
    105: lambda f, _: RouteRequest(f["topic"]),
    106: lambda _, __: ClusterInfoRequest(),
    202: lambda f, _: TopicStatsRequest(f["topic"], "b"),
    203: lambda f, _: GroupConnectionsRequest(f["consumerGroup"], "b"),
    204: lambda f, _: ProducersRequest(f["producerGroup"], "b"),
    206: lambda _, __: TopicListRequest(),
    208: lambda f, _: GroupStatsRequest(f["consumerGroup"], "b", f.get("topic")),
    351: lambda f, _: TopicConfigRequest(f["topic"], "b"),
}
# Fields of the official client that have no effect on what we read, and those that we add.
LEFT_OUT = {"ReqT", "maxMsgBytes", "_UNIQUE_KEY_QUERY", "AccessKey", "Signature"}
ADDED = {code: {"bname"} for code in (11, 12, 15, 31, 32, 38, 41, 42, 202, 203, 204, 208, 351)}  # 4.9 sends none
ADDED |= {
    14: {"bname", "setZeroIfNotFound"},
    17: {"attributes", "force"},
    29: {"bname", "boundaryType"},
    30: {"bname", "committed"},
    33: {"bname", "topic"},
    105: {"acceptStandardJsonOnly"},
}
# Numbers of a pull whose bits in sysFlag are not set in ours, or that only count in a group.
UNUSED = {"sysFlag", "commitOffset", "suspendTimeoutMillis", "subVersion"}


def is_like_ours(frame: RecordedFrame) -> bool:
    """Return whether the official client made the frame, and made a request of a kind that we make too.

    A push consumer's pull can lack the subscription, and a time can be searched backwards.
    """
    fields, code = frame.line.get("ext") or {}, frame.line["code"]
    if frame.line["kind"] == "response" or frame.file.endswith("ours") or code not in MAKERS:
        return False
    return (code != 11 or "subscription" in fields) and fields.get("boundaryType") != "UPPER"


OFFICIAL = [frame for frame in read_frames() if is_like_ours(frame)]


def make_twin(frame: RecordedFrame) -> Request[Any]:
    body = frame.line.get("body") or {}
    return MAKERS[frame.line["code"]](frame.command().fields, body.get("json"))


@pytest.mark.parametrize("code", MAKERS, ids=lambda code: Code(code).name)
def test_a_request_is_the_official_client_s(code: int) -> None:
    frames = [frame for frame in OFFICIAL if frame.line["code"] == code]
    assert frames
    for frame in frames:
        ours, theirs = make_twin(frame).fields(), dict(frame.command().fields)
        for name in theirs.keys() - LEFT_OUT:
            assert ours[name] == theirs[name] or name in UNUSED, f"{frame}: {name}"
        assert ours.keys() - theirs.keys() <= ADDED.get(code, set()), frame


def test_fields_that_the_official_client_does_not_send_have_their_values() -> None:
    fields = {(request.code, name): text for request in SAMPLES for name, text in request.fields().items()}
    assert fields[Code.QUERY_CONSUMER_OFFSET, "setZeroIfNotFound"] == "false"
    assert fields[Code.GET_ROUTEINFO_BY_TOPIC, "acceptStandardJsonOnly"] == "true"
    assert fields[Code.SEARCH_OFFSET_BY_TIMESTAMP, "boundaryType"] == "LOWER"
    assert fields[Code.GET_MAX_OFFSET, "committed"] == "true"
    assert fields[Code.GET_TOPIC_CONFIG, "lo"] == "true"
    assert fields[Code.UPDATE_AND_CREATE_TOPIC, "force"] == "false"


def test_a_pull_without_a_group_is_the_lite_pull_consumer_s() -> None:
    frames = [frame for frame in OFFICIAL if frame.command().fields.get("sysFlag") == "4"]
    assert len(frames) > 3
    for frame in frames:
        ours = make_twin(frame).fields()
        assert (ours["sysFlag"], ours["commitOffset"], ours["suspendTimeoutMillis"]) == ("4", "0", "0")
        assert frame.command().fields["commitOffset"] == "0"


def test_the_body_of_a_filter_check_is_the_official_client_s() -> None:
    frames = [frame for frame in OFFICIAL if frame.line["code"] == 46]
    for frame in frames:
        theirs = fastjson.parse(str(frame.command().body, "utf-8"))
        theirs["subscriptionData"]["subVersion"] = 0
        assert fastjson.parse(make_twin(frame).body.decode()) == theirs


# Sets without an order, and fields of 5.x heartbeats that mean nothing in version 1 of it.
UNORDERED = {"subscriptionDataSet", "codeSet", "tagsSet", "mqSet", "lockOKMQSet"}
HEARTBEATS_5 = {"heartbeatFingerprint", "withoutSub"}


def normalize(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        items = {key: normalize(one, key) for key, one in value.items() if key not in HEARTBEATS_5}
        return items | {"subVersion": 0} if "subVersion" in items else items  # ours has the same for all topics
    if isinstance(value, list):
        items = [normalize(one) for one in value]
        return sorted(items, key=repr) if name in UNORDERED else items
    return value


def test_the_body_of_a_heartbeat_is_that_of_a_push_consumer() -> None:
    checked = 0
    for frame in OFFICIAL:
        if frame.line["code"] != Code.HEART_BEAT:
            continue
        theirs = normalize(fastjson.parse(str(frame.command().body, "utf-8")))
        if [one["consumeType"] for one in theirs["consumerDataSet"]] != ["CONSUME_PASSIVELY"]:
            continue
        ours = normalize(fastjson.parse(make_twin(frame).body.decode()))
        assert theirs | {"producerDataSet": []} == ours, frame
        checked += 1
    assert checked >= 10


def test_the_body_of_a_producer_s_heartbeat_is_the_official_client_s() -> None:
    checked = 0
    for frame in (one for one in OFFICIAL if one.line["code"] == Code.HEART_BEAT):
        theirs = normalize(fastjson.parse(str(frame.command().body, "utf-8")))
        if theirs["consumerDataSet"]:
            continue
        for group in theirs["producerDataSet"]:
            ours = fastjson.parse(ProducerHeartbeatRequest(theirs["clientID"], group["groupName"]).body.decode())
            assert ours == theirs | {"producerDataSet": [group]}, frame
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("code", [Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ])
def test_the_body_about_locks_is_the_official_client_s(code: int) -> None:
    for frame in (one for one in OFFICIAL if one.line["code"] == code):
        theirs = normalize(fastjson.parse(str(frame.command().body, "utf-8")))
        assert {"onlyThisBroker": False, **theirs} == normalize(fastjson.parse(make_twin(frame).body.decode())), frame


@pytest.mark.parametrize(
    ("expression", "kind", "tags", "codes"),
    [
        ("*", "TAG", [], []),
        (" A||BB ||", "TAG", ["A", "BB"], [65, 2112]),
        ("a,b", "TAG", [], []),  # a tag of another client that ours refuses
        ("A || B", "SQL92", [], []),
    ],
)
def test_a_subscription_has_the_tags_of_its_expression_and_their_hashes(
    expression: str, kind: str, tags: list[str], codes: list[int]
) -> None:
    request = HeartbeatRequest("one", "billing", (Subscription("orders", expression, kind),), 7)
    (found,) = fastjson.parse(request.body.decode())["consumerDataSet"][0]["subscriptionDataSet"]
    assert (found["tagsSet"], found["codeSet"]) == (tags, codes)
    assert (found["subString"], found["expressionType"], found["subVersion"]) == (expression, kind, 7)


def test_a_group_is_created_with_the_fields_of_subscription_group_json() -> None:
    config = GroupConfig("billing", consume_enable=False, retry_queue_count=3, retry_max_times=5)
    body = fastjson.parse(CreateGroupRequest(config).body.decode())
    file = fastjson.parse(encode_groups_file(decode_groups_file(b'{"subscriptionGroupTable":{"g":{}}}')).decode())
    assert body.keys() == file["subscriptionGroupTable"]["g"].keys() - {"unknown"}
    assert (body["groupName"], body["consumeEnable"]) == ("billing", False)
    assert (body["retryQueueNums"], body["retryMaxTimes"]) == (3, 5)


def test_every_request_survives_its_frame() -> None:
    for request in SAMPLES:
        (command,) = FrameReader().feed(encode_command(request.command(7)))
        assert (command.code, command.opaque, command.flag) == (request.code, 7, 0)
        assert (command.fields, bytes(command.body)) == (request.fields(), request.body)
        assert (command.language, command.version) == ("PYTHON", 407)


def test_requests_about_queues_and_brokers_carry_the_name_of_the_broker() -> None:
    named = {"bname", "n"}  # sends have short names
    without = {request.code for request in SAMPLES if not named & request.fields().keys()}
    assert without == {17, 26, 28, 34, 35, 43, 46, 105, 106, 200, 206, 215, 216}
    assert {request.fields().get("n", "broker-a") for request in SAMPLES} == {"broker-a"}
    assert {request.fields().get("bname", "broker-a") for request in SAMPLES} == {"broker-a"}


def test_the_purpose_of_a_request_names_its_object() -> None:
    words = ("orders", "billing", "broker-a", "brokers", "topics")
    assert all(any(word in request.purpose for word in words) for request in SAMPLES)
    assert len({request.purpose for request in SAMPLES}) == len(SAMPLES)


def test_a_held_pull_has_its_own_deadline() -> None:
    held, pull = PullRequest(QUEUE, 1, 32, "g", hold_ms=15_000), PullRequest(QUEUE, 1, 32, "g")
    assert (held.deadline, held.hold_ms, held.fields()["sysFlag"]) == (Deadline.HELD, 15_000, "6")
    assert (pull.deadline, pull.hold_ms, pull.fields()["sysFlag"]) == (Deadline.PULL, 0, "4")
    assert {request.deadline for request in SAMPLES if request.code != 11} == {Deadline.QUICK}
    assert {int(one.code) for one in SAMPLES if not one.is_repeatable} == {36, 310, 320}


def test_attributes_of_a_topic_are_added_one_by_one() -> None:
    config = TopicConfig("t", order=True, attributes={"message.type": "NORMAL", "queue.type": "SimpleCQ"})
    fields = CreateTopicRequest(config).fields()
    assert (fields["attributes"], fields["order"]) == ("+message.type=NORMAL,+queue.type=SimpleCQ", "true")


@settings(deadline=None)
@given(pulls, int32s)
def test_frame_of_a_pull_is_that_of_its_command(pull: PullRequest, opaque: int) -> None:
    assert pull.frame(opaque) == encode_command(pull.command(opaque))


def test_frame_of_a_pull_refuses_what_encode_command_refuses() -> None:
    command = encode_command(PullRequest(QUEUE, 0, 1, "readers", "").command(1))
    largest = PullRequest(QUEUE, 0, 1, "readers", "a" * (MAX_FRAME_BYTES - len(command)))
    assert len(largest.frame(1)) == MAX_FRAME_BYTES
    for refused in (replace(largest, offset=10), replace(largest, subscription="\ud800")):
        with pytest.raises(OptionError):
            refused.frame(1)
