"""Sends to the tests' brokers: what is stored, what is answered, and what is refused, in both releases."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stored_records import properties_of, records_of

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.brokers import Broker, RunningCluster, deliveries
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.sent_message import SEND_BATCH_MESSAGE, SEND_MESSAGE, SEND_MESSAGE_V2, Item
from rmq_spark.store.testing.brokers.wire import QueueId

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
BORN_MS = 1_700_000_000_000
LONG_NAMES = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "m": "batch",
}
WHOLE_PROPERTIES_BYTES = 32_767


def send_fields(**changes: Any) -> dict[str, Any]:
    return {"a": "group", "b": "orders", "e": 0, "f": 0, "g": BORN_MS, "h": 0, "i": ""} | changes


def send(server: Broker, body: bytes = b"x", *, code: int = SEND_MESSAGE_V2, **changes: Any) -> Command:
    with RawClient(server.address) as client:
        return client.call(code, send_fields(**changes), body)


def send_batch(server: Broker, *items: Item, **changes: Any) -> Command:
    return send(server, batch(*items), code=SEND_BATCH_MESSAGE, **({"m": True} | changes))


def batch(*items: Item) -> bytes:
    return b"".join(item.encode() for item in items)


def place(answer: Command) -> tuple[int, str, str]:
    return answer.code, answer.fields.get("queueId", ""), answer.fields.get("queueOffset", "")


@pytest.fixture
def start(run_cluster: RunCluster) -> Callable[..., Broker]:
    """A function that starts a broker with the topic orders, which has two queues."""

    def begin(release: str = "5.3", **settings: Any) -> Broker:
        cluster = run_cluster(release=release)
        for name, value in settings.items():
            setattr(cluster.broker.settings, name, value)
        cluster.create_topic("orders", 2)
        return cluster.broker

    return begin


@BOTH
@pytest.mark.parametrize("code", [SEND_MESSAGE_V2, SEND_MESSAGE])
def test_a_message_is_stored_as_it_was_sent(start: Callable[..., Broker], release: str, code: int) -> None:
    broker = start(release)
    fields = send_fields(e=1, f=0x301, h=7, i="TAGS\x01A\x02p\x01q\x01r\x02", d=4, c="TBW102", m=False)
    if code == SEND_MESSAGE:
        fields = {LONG_NAMES[name]: value for name, value in fields.items()}
    with RawClient(broker.address) as client:
        answer = client.call(code, fields, b"packed")
    (record,) = records_of(broker, queue_id=1)
    assert (record.body, record.flag, record.sys_flag, record.born_timestamp) == (b"packed", 7, 0x301, BORN_MS)
    properties = properties_of(record)
    assert properties["TAGS"] == "A"
    assert properties["p"] == "q\x01r"
    assert place(answer) == (0, "1", "0")
    assert answer.fields["msgId"] == (record.store_host + record.physical_offset.to_bytes(8, "big")).hex().upper()
    assert record.born_host[:4] == b"\x7f\0\0\1"
    assert answer.remark is None


@BOTH
def test_a_broker_adds_the_properties_of_its_release(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    answers = [send(broker, i="WAIT\x01true\x02"), send(broker, i="UNIQ_KEY\x01mine\x02")]
    without, with_key = map(properties_of, records_of(broker))
    if release == "4.9":
        assert without == {"CLUSTER": "DefaultCluster"}
        assert with_key == {"UNIQ_KEY": "mine", "CLUSTER": "DefaultCluster"}
        assert all("transactionId" not in answer.fields for answer in answers)
    else:
        added = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}
        assert without == {"WAIT": "true", "UNIQ_KEY": answers[0].fields["transactionId"], **added}
        assert with_key == {"UNIQ_KEY": "mine", **added}
        assert answers[1].fields["transactionId"] == "mine"


def test_the_broker_chooses_a_queue(start: Callable[..., Broker]) -> None:
    broker = start()
    chosen = {send(broker, e=-1).fields["queueId"] for _ in range(20)}
    assert chosen == {"0", "1"}
    assert sum(bounds.max_offset for bounds in broker.bounds("orders").values()) == 20


@BOTH
def test_a_batch_is_one_piece_of_a_queue(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    send(broker, e=1)
    items = Item(5, b"one", b"TAGS\x01A\x02UNIQ_KEY\x01u1"), Item(6, b"", b""), Item(0, b"three", b"KEYS\x01k\x02")
    answer = send_batch(broker, *items, e=1, i="of\x01batch\x02")
    assert place(answer) == (0, "1", "1")
    records = records_of(broker, queue_id=1)[1:]
    assert [(record.queue_offset, record.flag, record.body) for record in records] == [
        (1, 5, b"one"),
        (2, 6, b""),
        (3, 0, b"three"),
    ]
    places = [record.physical_offset for record in records]
    assert [int(one[16:], 16) for one in answer.fields["msgId"].split(",")] == places
    assert [after - before for before, after in itertools.pairwise(places)] == [
        record.total_size for record in records[:-1]
    ]
    added = {"of": "batch", "CLUSTER": "DefaultCluster"}
    added |= {} if release == "4.9" else {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert [properties_of(record) for record in records] == [
        {"TAGS": "A", "UNIQ_KEY": "u1", **added},
        added,
        {"KEYS": "k", **added},
    ]
    assert "transactionId" not in answer.fields


def test_the_field_m_makes_a_batch(start: Callable[..., Broker]) -> None:
    broker = start()
    body = batch(Item(0, b"one", b""), Item(0, b"two", b""))
    send(broker, body, code=SEND_MESSAGE_V2, m=True)
    send(broker, body, code=SEND_BATCH_MESSAGE, m=False)
    assert [record.body for record in records_of(broker)] == [b"one", b"two", body]


@pytest.mark.parametrize("name", ["5.3.3", "4.9.7"])
def test_recorded_sends_are_stored_as_they_were_then(name: str, run_cluster: RunCluster, golden: Path) -> None:
    cluster = run_cluster(release=name[:3], cluster="c1")
    cluster.create_topic("GT", 4)
    recorded: dict[int, bytes] = {}
    for line in (golden / "remoting" / f"{name}.jsonl").read_text().splitlines():
        frame = json.loads(line)
        data = bytes.fromhex(frame["hex"])
        if frame["name"] in ("SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE") and frame["kind"] in ("request", "oneway"):
            if frame["ext"]["b"] == "GT" and frame["ext"]["e"] == "0":
                with RawClient(cluster.broker.address) as client:
                    client.send_bytes(data)
                    if frame["kind"] == "request":
                        assert client.receive().code == 0
                    else:
                        client.call(RequestCode.GET_MAX_OFFSET, {"topic": "GT", "queueId": 0})
        elif frame["step"] in ("pull found", "pull blocking, message arrives") and frame["kind"] == "response":
            body = data[8 + (int.from_bytes(data[4:8], "big") & 0xFFFFFF) :]
            while body and frame["name"] == "PULL_MESSAGE":
                record = decode_record(body)
                assert isinstance(record, Record)
                recorded[record.queue_offset], body = body[: record.total_size], body[record.total_size :]
    found = records_of(cluster.broker, "GT")[:7]  # later ones were not pulled then
    assert [record.queue_offset for record in found] == sorted(recorded) == list(range(7))
    for record in found:
        then = decode_record(recorded[record.queue_offset])
        assert isinstance(then, Record)
        for field in ("flag", "sys_flag", "born_timestamp", "reconsume_times", "body", "total_size", "magic"):
            assert getattr(record, field) == getattr(then, field), field
        assert properties_of(record) == properties_of(then)
        assert record.properties[-1:] == then.properties[-1:] or name == "4.9.7"


@BOTH
def test_delayed_messages_wait_for_their_level(start: Callable[..., Broker], release: str) -> None:
    broker = start(release, delivers=False)
    answer = send(broker, b"later", e=1, i="DELAY\x0199\x02WAIT\x01true\x02")
    assert place(answer) == (0, "1", "0")
    assert records_of(broker, queue_id=1) == []
    now_ms = wall_clock_ms()
    assert broker.deliver_due(now_ms) == 0
    assert broker.deliver_due(now_ms + 2 * 3600 * 1000 + 1000) == 1
    (record,) = records_of(broker, queue_id=1)
    properties = properties_of(record)
    assert (properties["DELAY"], properties["REAL_TOPIC"], properties["REAL_QID"]) == ("18", "orders", "1")
    assert (record.body, properties["WAIT"]) == (b"later", "true")


def test_timed_messages_wait_in_5_only(start: Callable[..., Broker]) -> None:
    due_ms = wall_clock_ms() + 60_000
    for release, at_once in (("4.9", 1), ("5.3", 0)):
        broker = start(release, delivers=False)
        answer = send(broker, i=f"TIMER_DELIVER_MS\x01{due_ms}\x02")
        assert place(answer) == (0, "0", "0")
        assert ("recallHandle" in answer.fields) == (release == "5.3")
        assert len(records_of(broker)) == at_once
        assert broker.deliver_due(due_ms + 2000) == 1 - at_once
        (record,) = records_of(broker)
        assert properties_of(record)["TIMER_DELIVER_MS"] == str(due_ms)


def test_times_of_5_in_the_past_and_far_ahead(start: Callable[..., Broker]) -> None:
    broker = start(delivers=False)
    assert send(broker, i="TIMER_DELAY_SEC\x010\x02").code == 0
    assert len(records_of(broker)) == 1
    far = send(broker, i=f"TIMER_DELAY_SEC\x01{4 * 24 * 3600}\x02")
    assert (far.code, (far.remark or "")[:21]) == (ResponseCode.MESSAGE_ILLEGAL, "timer message illegal")
    both = send(broker, i="TIMER_DELAY_SEC\x015\x02DELAY\x012\x02")
    assert both.code == 0
    assert broker.deliver_due(wall_clock_ms() + 6000) == 1
    assert "TIMER_DELAY_SEC" not in properties_of(records_of(broker)[1])


def test_messages_that_are_due_are_delivered_by_themselves(
    start: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "wall_clock_ms", lambda: wall_clock_ms() + 800)  # most of the delay is over
    broker = start()
    send(broker, b"later", i="DELAY\x011\x02")
    broker.kill()
    broker.restart()
    ends_s = time.monotonic() + 10
    while not records_of(broker) and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert [record.body for record in records_of(broker)] == [b"later"]


@BOTH
def test_bodies_and_batches_have_a_largest_size(start: Callable[..., Broker], release: str) -> None:
    broker = start(release, max_message_bytes=100)
    assert send(broker, bytes(100)).code == 0
    single = send(broker, bytes(101))
    assert single.code == ResponseCode.MESSAGE_ILLEGAL
    assert "msg body length limit 100B" in (single.remark or "")
    assert send_batch(broker, Item(0, bytes(28), b""), Item(0, bytes(28), b"")).code == 0
    whole = send_batch(broker, Item(0, bytes(28), b""), Item(0, bytes(29), b""))
    if release == "4.9":
        assert (whole.code, whole.remark) == (single.code, single.remark)
    else:
        assert whole.code == ResponseCode.SYSTEM_ERROR
        assert "message body size exceeded" in (whole.remark or "")
    assert len(records_of(broker)) == 3


def test_the_largest_size_is_4_mib(start: Callable[..., Broker]) -> None:
    broker = start()
    assert send(broker, bytes(4 << 20)).code == 0
    assert send(broker, bytes((4 << 20) + 1)).code == ResponseCode.MESSAGE_ILLEGAL


@BOTH
def test_properties_have_a_largest_size(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    added = len(b"CLUSTER\x01DefaultCluster\x02") - 1
    if release == "5.3":
        added += 1 + len(b"MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02UNIQ_KEY\x01") + 32 + 1
    room = WHOLE_PROPERTIES_BYTES - added - len("p\x01\x02")
    assert send(broker, i=f"p\x01{'v' * room}\x02").code == 0
    assert send(broker, i=f"p\x01{'v' * (room + 1)}\x02").code == ResponseCode.MESSAGE_ILLEGAL
    assert len(records_of(broker)) == 1


def test_an_item_with_long_properties_takes_the_rest_of_its_batch_away(start: Callable[..., Broker]) -> None:
    broker = start()
    long = b"p\x01" + b"v" * 32_720 + b"\x02"
    answer = send_batch(broker, Item(0, b"one", b""), Item(0, b"two", long), Item(0, b"three", b""))
    assert (answer.code, len(answer.fields["msgId"].split(","))) == (0, 3)
    assert [record.body for record in records_of(broker)] == [b"one"]


def test_an_empty_body_is_stored_by_4_only(start: Callable[..., Broker]) -> None:
    broker = start("4.9")
    assert send(broker, b"").code == 0
    assert records_of(broker)[0].body == b""
    answer = send(start("5.3"), b"")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "NullPointerException" in (answer.remark or "")


@BOTH
def test_batches_that_are_refused(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    good = Item(0, b"x", b"")
    assert send_batch(broker, good, i="DELAY\x011\x02").code == ResponseCode.MESSAGE_ILLEGAL
    assert send_batch(broker, good, f=4).code == ResponseCode.MESSAGE_ILLEGAL
    for body in (b"garbage", good.encode()[:-1], good.encode() + b"\0", good.encode()[:16] + b"\xff" * 8):
        answer = send(broker, body, code=SEND_BATCH_MESSAGE, m=True)
        assert (answer.code, answer.fields) == (ResponseCode.SYSTEM_ERROR, {})
        assert "Exception" in (answer.remark or "")
    assert records_of(broker) == []
    assert send_batch(broker, Item(0, b"x", b"DELAY\x011\x02")).code == 0  # stored at once
    assert len(records_of(broker)) == 1


@BOTH
def test_topics_and_queues_that_are_refused(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    invalid = ResponseCode.SYSTEM_ERROR if release == "4.9" else ResponseCode.INVALID_PARAMETER
    for topic, code, remark in (
        (
            "SCHEDULE_TOPIC_XXXX",
            ResponseCode.NO_PERMISSION,
            "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden",
        ),
        ("payments", ResponseCode.TOPIC_NOT_EXIST, "topic[payments] not exist, apply first please!"),
        ("not a topic", invalid, "The specified topic contains illegal characters"),
        (" ", invalid, "The specified topic is blank"),
        ("t" * 128, invalid, "The specified topic is longer than topic max length"),
    ):
        answer = send(broker, b=topic)
        assert answer.code == code, topic
        assert (answer.remark or "").startswith(remark), answer
        assert set(answer.fields) == {"MSG_REGION", "TRACE_ON"}
    queue = send(broker, e=2)
    assert queue.code == invalid
    assert (queue.remark or "").startswith("request queueId[2] is illegal, TopicConfig [topicName=orders, ")


@BOTH
def test_missing_fields_are_refused(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    for name in ("a", "b", "e", "f", "g", "h"):
        fields = send_fields()
        del fields[name]
        with RawClient(broker.address) as client:
            answer = client.call(SEND_MESSAGE_V2, fields, b"x")
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert f"the custom field <{name}> is null" in (answer.remark or "")


def test_topics_are_created_if_the_broker_may(start: Callable[..., Broker]) -> None:
    broker = start(creates_topics=True)
    assert send(broker, b="payments", c="TBW102", d=16, e=7).code == 0
    assert len(broker.bounds("payments")) == 8
    assert send(broker, b="others", c="no such topic").code == ResponseCode.TOPIC_NOT_EXIST


def test_a_topic_without_write_permission_takes_messages(start: Callable[..., Broker]) -> None:
    broker = start()
    broker.set_topic("orders", perm=4)
    assert send(broker).code == 0
    assert len(records_of(broker)) == 1


def test_a_slave_refuses_as_its_release_does(run_cluster: RunCluster) -> None:
    for release, code, fields in (("4.9", 14, {"MSG_REGION", "TRACE_ON"}), ("5.3", 2, set())):
        cluster = run_cluster(release=release)
        cluster.create_topic("orders", 1)
        slave = cluster.add_slave("broker-a")
        for answer in (send(slave), send_batch(slave, Item(0, b"x", b""))):
            assert (answer.code, set(answer.fields)) == (code, fields)


@BOTH
def test_the_retries_of_a_group_become_dead_letters(start: Callable[..., Broker], release: str) -> None:
    broker = start(release, delivers=False)
    retry = {"b": "%RETRY%readers", "i": "DELAY\x013\x02", "l": 3}
    # A broker of 4.9 makes a dead letter one retry earlier, and lets it wait at its level too.
    for times, waits in ((2, 1), (3, 2), (4, 3 if release == "4.9" else 2)):
        assert send(broker, j=times, **retry).code == 0
        assert broker.loop.run(broker.store.bounds, QueueKey(SCHEDULE_TOPIC, 2)).max_offset == waits
    assert broker.deliver_due(wall_clock_ms() + 11_000) == waits
    dead = records_of(broker, "%DLQ%readers")
    assert [record.reconsume_times for record in dead] == ([3, 4] if release == "4.9" else [4])
    again = records_of(broker, "%RETRY%readers")
    assert [record.reconsume_times for record in again] == ([2] if release == "4.9" else [2, 3])
    broker.settings.creates_groups = False
    assert send(broker, b="%RETRY%nobody").code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


@BOTH
def test_while_a_queue_is_locked_retries_are_dead_letters_of_5(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    retry = {"b": "%RETRY%readers", "j": 1, "l": 3}
    broker.loop.run(broker.locks.lock, "readers", [QueueId("orders", "broker-a", 0)], "a")
    assert send(broker, **retry).code == 0
    assert len(records_of(broker, "%DLQ%readers")) == (1 if release == "5.3" else 0)
    broker.pass_time(61)
    assert send(broker, **retry).code == 0
    assert len(records_of(broker, "%RETRY%readers")) == (1 if release == "5.3" else 2)


def test_one_way_sends_are_stored(start: Callable[..., Broker]) -> None:
    broker = start()
    with RawClient(broker.address) as client:
        client.send(SEND_MESSAGE_V2, send_fields(), b"one way", flag=2)
        assert client.call(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0}).fields == {"offset": "1"}


def test_messages_become_visible_after_their_dispatch(start: Callable[..., Broker]) -> None:
    broker = start(dispatch_delay_ms=200)
    assert send(broker).code == 0
    assert send(broker, e=1).code == 0
    assert [bounds.max_offset for bounds in broker.bounds("orders").values()] == [0, 0]
    ends_s = time.monotonic() + 10
    while broker.bounds("orders")[1].max_offset == 0 and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert [bounds.max_offset for bounds in broker.bounds("orders").values()] == [1, 1]


def test_light_brokers_count_what_is_sent(run_cluster: RunCluster) -> None:
    cluster = run_cluster(is_light=True)
    cluster.create_topic("orders", 2)
    assert place(send(cluster.broker, e=1)) == (0, "1", "0")
    assert place(send_batch(cluster.broker, Item(0, b"x", b""), Item(0, b"y", b""), e=1)) == (0, "1", "1")
    assert cluster.broker.bounds("orders")[1].max_offset == 3
