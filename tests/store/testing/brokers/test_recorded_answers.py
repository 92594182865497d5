"""The servers answer as real ones did: the requests of recorded frames get answers of the recorded form."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode, SystemFlag
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.filter.row_filter import SQL92, TAG
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, ConsumerData, RunningCluster
from rmq_spark.store.testing.brokers.broker import HANDLER_TABLES, Broker
from rmq_spark.store.testing.brokers.name_server import HANDLERS as NAME_SERVER_HANDLERS
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.relay_requests import INVOKE_BROKER_TO_GET_CONSUMER_STATUS
from rmq_spark.store.testing.brokers.send_back_requests import CONSUMER_SEND_MSG_BACK
from rmq_spark.store.testing.brokers.server import Server
from rmq_spark.store.testing.brokers.wire import encode_binary

# The recordings, and how many pairs of each the servers can answer so far.
PAIRS = {
    "5.3.3.jsonl": 89,
    "4.9.7.jsonl": 84,
    "5.3.3-acl.jsonl": 24,
    "4.9.7-acl.jsonl": 22,
    "5.3.3-send10.jsonl": 4,
    "4.9.7-send10.jsonl": 4,
    "5.3.3-binary.jsonl": 24,
    "4.9.7-binary.jsonl": 22,
    "5.3.3-client-side-reset.jsonl": 1,
    "5.3.3-ours.jsonl": 28,
    "4.9.7-ours.jsonl": 25,
}
UNKNOWN_CODE = 31999
KNOWN_CODES = {UNKNOWN_CODE, *NAME_SERVER_HANDLERS, *(code for table in HANDLER_TABLES for code in table)}
ABOUT_MEMBERS = (RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.GET_CONSUMER_CONNECTION_LIST)
RELAYED = (BrokerRequestCode.GET_CONSUMER_RUNNING_INFO, INVOKE_BROKER_TO_GET_CONSUMER_STATUS)  # a member answers them
ONE = "192.0.2.2@one"  # a client id of the recordings
PULLS = (RequestCode.PULL_MESSAGE, 361)


@dataclass(frozen=True, slots=True)
class Pair:
    """A recorded request and its answer."""

    request: dict[str, Any]
    answer: dict[str, Any]

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the request."""
        return self.request.get("ext") or {}

    @property
    def answered(self) -> dict[str, str]:
        """The fields of the answer."""
        return self.answer.get("ext") or {}

    @property
    def body(self) -> bytes:
        """The body of the answer."""
        return body_of(self.answer)

    @property
    def is_supported(self) -> bool:
        """Whether the servers answer the request themselves."""
        code = self.request["code"]
        return code in KNOWN_CODES and code not in RELAYED


def body_of(frame: dict[str, Any]) -> bytes:
    data = bytes.fromhex(frame["hex"])
    return data[8 + (int.from_bytes(data[4:8], "big") & 0xFFFFFF) :]


def pairs_of(file: Path) -> Iterator[Pair]:
    requests: dict[int, dict[str, Any]] = {}
    for line in file.read_text().splitlines():
        frame = json.loads(line)
        if frame["kind"] == "request" and frame["from"] == "client":
            requests[frame["frame"]] = frame
        elif frame["kind"] == "response" and frame["request"] in requests:
            yield Pair(requests[frame["request"]], frame)


def prepare(broker: Broker, pair: Pair) -> None:
    """Bring a broker into the state that the recorded answer shows."""
    code, fields, answered = pair.request["code"], pair.fields, pair.answered
    remark = pair.answer.get("remark")
    if code in PULLS and not int(fields.get("sysFlag", SystemFlag.SUBSCRIPTION)) & SystemFlag.SUBSCRIPTION:
        prepare_subscription(broker, pair)
    if code in PULLS and "maxOffset" in answered:
        queue = QueueKey(fields["topic"], int(fields["queueId"]))
        fill(broker, queue, int(answered["maxOffset"]))
        if remark == "OFFSET_TOO_SMALL":
            broker.expire(queue.topic, queue.queue_id, int(answered["minOffset"]))
        if remark == "MESSAGE_WAS_REMOVING":
            broker.expire(queue.topic, queue.queue_id, 1800, keeps_minimum=True)
    elif code in (RequestCode.QUERY_MESSAGE, RequestCode.VIEW_MESSAGE_BY_ID):
        fill(broker, QueueKey("GT", 0), 1)
    else:
        prepare_group(broker, pair)


def prepare_subscription(broker: Broker, pair: Pair) -> None:
    """Let a member subscribe to the topic of a pull without a subscription, so that its answer is the recorded one."""
    code, fields = pair.answer["code"], pair.fields
    if code == ResponseCode.SUBSCRIPTION_NOT_EXIST:
        return
    broker.loop.run(broker.members.clear)
    kind, version = fields["expressionType"], int(fields["subVersion"])
    wanted = {TAG: "TagA", SQL92: "p = 'other'" if code == ResponseCode.PULL_RETRY_IMMEDIATELY else "p = 'v'"}
    broker.members.add(
        fields["consumerGroup"],
        ONE,
        {fields["topic"]: wanted[kind]},
        expression_type=kind,
        sub_version=version - (code == ResponseCode.SUBSCRIPTION_NOT_LATEST),
    )


def prepare_group(broker: Broker, pair: Pair) -> None:
    """Bring a broker into the state that the recorded answer to a request about a group shows."""
    code, fields, answered = pair.request["code"], pair.fields, pair.answered
    if code == RequestCode.QUERY_CONSUMER_OFFSET and "offset" in answered:
        queue = QueueKey(fields["topic"], int(fields["queueId"]))
        if needs_commit(broker, queue, answered):
            broker.offsets.commit(fields["consumerGroup"], queue, int(answered["offset"]))
    elif code == RequestCode.UPDATE_CONSUMER_OFFSET:
        broker.groups.add(fields["consumerGroup"])
    elif code == RequestCode.GET_CONSUME_STATS:
        broker.offsets.commit(fields["consumerGroup"], QueueKey("GT", 0), 1)
    elif code in ABOUT_MEMBERS and pair.answer["code"] == ResponseCode.SUCCESS:
        broker.members.add(fields["consumerGroup"], ONE, {"GT": "*"})
    elif code == RequestCode.GET_PRODUCER_CONNECTION_LIST:
        broker.producers.add(fields["producerGroup"], ONE)
    elif code == RequestCode.INVOKE_BROKER_TO_RESET_OFFSET:
        for number in range(broker.topics["GT"].write_queues):
            broker.offsets.commit(fields["group"], QueueKey("GT", number), 1)
        broker.members.add(fields["group"], ONE, {"GT": "*"})


def needs_commit(broker: Broker, queue: QueueKey, answered: dict[str, str]) -> bool:
    """Return whether the recorded offset was committed. Without one, 5.3 answers no offset for an empty queue."""
    is_empty = not broker.bounds(queue.topic)[queue.queue_id].max_offset
    return answered["offset"] != "0" or (broker.release.is_5 and is_empty)


def fill(broker: Broker, queue: QueueKey, count: int) -> None:
    """Append messages to a queue until it has this many."""
    missing = count - broker.bounds(queue.topic)[queue.queue_id].max_offset
    if missing > 0:
        bodies = [b"hello"] * missing
        columns: dict[str, Any] = {"tags": "TagA", "keys": "k1 k2", "properties": {"p": "v"}}
        broker.send(queue.topic, *bodies, queue_id=queue.queue_id, **columns)


def frame_of(broker: Broker, pair: Pair) -> bytes:
    """Return the recorded request. A search by key gets the time and the UNIQ_KEY of the broker's own messages.

    A pull that is held in vain gets a shorter time. The first message in the log is sent back.
    """
    fields = dict(pair.fields)
    if pair.request["code"] == RequestCode.QUERY_MESSAGE:
        fields["endTimestamp"] = str(2**63 - 1)
    elif pair.request["code"] == CONSUMER_SEND_MSG_BACK:
        fields["offset"] = "0"
    elif pair.answer["code"] == ResponseCode.PULL_NOT_FOUND and fields["suspendTimeoutMillis"] != "0":
        fields["suspendTimeoutMillis"] = "10"
    else:
        return bytes.fromhex(pair.request["hex"])
    if fields.get("_UNIQUE_KEY_QUERY") == "true":
        record = decode_record(broker.loop.run(broker.store.record_at, 0) or b"")
        assert isinstance(record, Record)
        fields["key"] = record.properties.decode().partition("UNIQ_KEY\x01")[2].partition("\x02")[0]
    command = Command(
        pair.request["code"], pair.request["opaque"], fields, language="JAVA", version=pair.request["version"]
    )
    return encode_binary(command) if pair.request["serialize"] else encode_command(command)


def form_of(body: bytes) -> str:
    """Return a body's form: "records", or its JSON with one element of each list and without values."""
    if body[4:8] in (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab"):
        at = 0
        while at < len(body):
            record = decode_record(body[at:])
            assert isinstance(record, Record), record
            at += record.total_size
        return "records"
    text = re.sub(r'"(?:[^"\\]|\\.)*"(:?)', lambda found: found[0] if found[1] else "S", body.decode())
    text = re.sub(r"\b\d+(\.\d+)?\b", "N", text)
    text = re.sub(r"\b(true|false)\b", "B", text)
    for _ in range(3):
        text = re.sub(r"(\{[^{}]*\}:\{[^{}]*\}|\{[^{}]*\}|\"?N\"?:S|S)(,\1)+", r"\1", text)
    return text


def plain(remark: str | None) -> str:
    """Return a remark without its numbers, and without the class that a missing field broke."""
    return re.sub(r"\d+", "0", remark or "")


def differences(pair: Pair, answer: Command, is_binary: bool) -> Iterator[str]:
    expected = pair.answer
    found = {
        "code": answer.code,
        "serialize": int(is_binary),
        "language": answer.language,
        "version": answer.version,
        "fields": sorted(answer.fields),
        "form": form_of(bytes(answer.body)),
        "remark": plain(answer.remark),
    }
    wanted = {
        **{name: expected[name] for name in ("code", "serialize", "language", "version")},
        "fields": sorted(pair.answered),
        "form": form_of(pair.body),
        "remark": plain(expected.get("remark")),
    }
    if "Exception" in wanted["remark"]:
        wanted["remark"] = found["remark"] if "Exception" in found["remark"] else "an exception"
    for name, value in wanted.items():
        if found[name] != value:
            yield f"{name}: found {found[name]!r}; recorded {value!r}"


@pytest.mark.parametrize("name", PAIRS)
def test_answers_have_the_recorded_form(name: str, golden: Path, tmp_path: Path) -> None:
    wrong: list[str] = []
    count = 0
    with RunningCluster(tmp_path / "cluster", release=name[:3], cluster="c1") as cluster:
        broker = cluster.broker
        broker.settings.resets_at_broker = "client-side-reset" not in name
        broker.set_topic("GT", 4)
        broker.set_topic("G1", 1)  # of the half messages
        slave = cluster.add_slave("broker-a", creates_topics=True)
        slave.stop()
        if not cluster.release.is_5:
            del slave.topics["GT"]  # a slave of 4.9 learns of it later
        if "acl" in name:
            broker.accounts = AccountTable(Account("rocketmq", "12345678", is_admin=True))
        for pair in filter(lambda pair: pair.is_supported, pairs_of(golden / "remoting" / name)):
            count += 1
            server: Server = {"namesrv": cluster.name_servers[0], "broker": broker, "slave": slave}[pair.request["to"]]
            if server is slave and not slave.is_running:
                slave.start()
            elif server is not slave:
                prepare(broker, pair)
            with RawClient(server.address) as client:
                client.send_bytes(frame_of(broker, pair))
                answer = client.receive()
                wrong += [
                    f"{pair.request['frame']} {pair.request['name']} {pair.fields}: {one}"
                    for one in differences(pair, answer, client.is_binary)
                ]
    assert not wrong, "\n".join(wrong)
    assert count == PAIRS[name]


RecordedRequest = tuple[int, int, str, int, tuple[str, ...], str]


def requests_to_members(file: Path) -> Iterator[RecordedRequest]:
    """Yield what matters in the requests that a broker has sent to members."""
    for frame in map(json.loads, file.read_text().splitlines()):
        if frame["from"] == "broker" and frame["kind"] != "response" and frame["code"] in set(BrokerRequestCode):
            fields = tuple(sorted(frame.get("ext") or {}))
            yield frame["code"], frame["flag"], frame["language"], frame["version"], fields, form_of(body_of(frame))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("4.9.7.jsonl", {40, 220, 221, 307}),
        ("5.3.3.jsonl", {40, 221, 307}),
        ("5.3.3-client-side-reset.jsonl", {220}),
    ],
)
def test_requests_to_members_have_the_recorded_form(name: str, codes: set[int], golden: Path, tmp_path: Path) -> None:
    with RunningCluster(tmp_path / "cluster", release=name[:3]) as cluster:
        broker = cluster.broker
        broker.set_topic("GT", 4)
        broker.settings.resets_at_broker = False
        broker.settings.member_answer_s = 0
        for number in range(4):
            broker.offsets.commit("gc", QueueKey("GT", number), 1)
        with RawClient(broker.address) as member, RawClient(broker.address) as admin:
            member.heartbeat(ONE, ConsumerData.of("gc", {"GT": "*"}))
            topic = {"topic": "GT", "group": "gc"}
            admin.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {**topic, "timestamp": 0, "isForce": True})
            admin.call(INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {**topic, "clientAddr": ""})
            running = {"clientId": ONE, "jstackEnable": "false", "consumerGroup": "gc"}
            admin.call(BrokerRequestCode.GET_CONSUMER_RUNNING_INFO, running)
            found = [member.receive_request() for _ in range(4)]
    recorded = set(requests_to_members(golden / "remoting" / name))
    assert {one[0] for one in recorded} == codes
    assert recorded <= {
        (one.code, one.flag, one.language, one.version, tuple(sorted(one.fields)), form_of(bytes(one.body)))
        for one in found
    }
