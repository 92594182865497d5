"""Messages that a group sends back to the tests' brokers, and the creation of topics over the wire."""

from collections.abc import Callable
from typing import Any

import pytest
from support.stored_records import properties_of, records_of

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.signing import sign_command
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.format.record import Record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.brokers import Account, AccountTable, Broker, RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.send_back_requests import CONSUMER_SEND_MSG_BACK
from rmq_spark.store.testing.brokers.topics import Topic
from rmq_spark.store.testing.brokers.wire import text_of

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
RETRY, DEAD = "%RETRY%billing", "%DLQ%billing"
FUTURE_MS = 3 * 3600 * 1000


@pytest.fixture
def start(run_cluster: RunCluster) -> Callable[..., Broker]:
    """A function that starts a broker with three messages in queue 1 of the topic orders."""

    def begin(release: str = "5.3", **settings: Any) -> Broker:
        cluster = run_cluster(release=release)
        cluster.broker.settings.delivers = False
        for name, value in settings.items():
            setattr(cluster.broker.settings, name, value)
        cluster.create_topic("orders", 2)
        cluster.send("orders", b"one", b"two", b"three", queue_id=1, tags="A", properties={"p": "v"}, flag=3)
        return cluster.broker

    return begin


def send_back(broker: Broker, offset: int, **changes: Any) -> Command:
    fields = {"offset": offset, "group": "billing", "delayLevel": 0, "unitMode": False, "maxReconsumeTimes": 16}
    with RawClient(broker.address) as client:
        return client.call(CONSUMER_SEND_MSG_BACK, fields | changes)


def waiting(broker: Broker, level: int) -> int:
    return broker.loop.run(broker.store.bounds, QueueKey(SCHEDULE_TOPIC, level - 1)).max_offset


def offset_id(record: Record) -> str:
    return (record.store_host + record.physical_offset.to_bytes(8, "big")).hex().upper()


@BOTH
def test_a_message_that_is_sent_back_comes_again(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    original = records_of(broker, queue_id=1)[1]
    answer = send_back(broker, original.physical_offset)
    assert (answer.code, answer.fields, answer.remark) == (0, {}, None)
    assert waiting(broker, 3) == 1
    assert broker.deliver_due(wall_clock_ms() + FUTURE_MS) == 1
    (copy,) = records_of(broker, RETRY)
    assert (copy.body, copy.flag, copy.reconsume_times) == (b"two", 3, 1)
    assert (copy.born_timestamp, copy.born_host) == (original.born_timestamp, original.born_host)
    added = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": offset_id(original), "WAIT": "false"}
    added |= {"DELAY": "3", "REAL_TOPIC": RETRY, "REAL_QID": "0"}
    assert properties_of(copy) == properties_of(original) | added
    assert send_back(broker, copy.physical_offset).code == 0
    assert waiting(broker, 4) == 1
    broker.deliver_due(wall_clock_ms() + FUTURE_MS)
    again = records_of(broker, RETRY)[1]
    assert properties_of(again) == properties_of(copy) | {"DELAY": "4"}
    assert again.reconsume_times == 2


@pytest.mark.parametrize(
    ("changes", "level"),
    [({"delayLevel": 5}, 5), ({"delayLevel": 99}, 18), ({"delayLevel": -1}, 0), ({"maxReconsumeTimes": 0}, 0)],
)
def test_level_and_limit_decide_where_the_copy_goes(
    start: Callable[..., Broker], changes: dict[str, int], level: int
) -> None:
    broker = start()
    original = records_of(broker, queue_id=1)[0]
    assert send_back(broker, original.physical_offset, **changes).code == 0
    assert [number for number in range(1, 19) if waiting(broker, number)] == ([level] if level else [])
    dead = records_of(broker, DEAD)
    assert [(record.body, record.reconsume_times) for record in dead] == ([] if level else [(b"one", 1)])
    assert all(properties_of(record)["DELAY"] == "0" for record in dead)


def test_messages_that_are_gone_are_refused(start: Callable[..., Broker]) -> None:
    broker = start()
    first, second, _ = records_of(broker, queue_id=1)
    broker.expire("orders", 1, 1)
    for offset in (first.physical_offset, second.physical_offset + 1, 1 << 40):
        answer = send_back(broker, offset)
        remark = f"look message by offset failed, {offset}"
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, remark)
    assert send_back(broker, second.physical_offset).code == 0
    broker.expire("orders", 1, 2, keeps_minimum=True)
    assert send_back(broker, second.physical_offset).code == ResponseCode.SYSTEM_ERROR


def test_groups_and_slaves_that_are_refused(run_cluster: RunCluster, start: Callable[..., Broker]) -> None:
    answer = send_back(start(creates_groups=False), 0)
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert (answer.remark or "").startswith("subscription group not exist, billing ")
    for release, code in (("4.9", ResponseCode.SYSTEM_ERROR), ("5.3", ResponseCode.SYSTEM_BUSY)):
        cluster = run_cluster(release=release)
        cluster.send("orders", b"x")
        assert send_back(cluster.add_slave("broker-a"), 0).code == code


@BOTH
def test_the_right_to_consume_is_the_right_to_send_back(start: Callable[..., Broker], release: str) -> None:
    broker = start(release)
    reader = Account("reader", "a secret", groups={"billing": "SUB"})
    broker.accounts = AccountTable(reader)
    for group, is_allowed in (("billing", True), ("others", False)):
        fields = {"offset": 0, "group": group, "delayLevel": 0}
        texts = {name: text_of(value) for name, value in fields.items()}
        command = sign_command(Command(CONSUMER_SEND_MSG_BACK, 1, texts), "reader", "a secret", "")
        with RawClient(broker.address) as client:
            client.send_bytes(encode_command(command))
            assert (client.receive().code == 0) == is_allowed


TOPIC = {"topic": "new", "defaultTopic": "TBW102", "readQueueNums": 3, "writeQueueNums": 2, "perm": 6, "order": False}
TOPIC |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}


@BOTH
def test_a_topic_is_created_and_overwritten(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    broker = cluster.broker

    def create(**changes: Any) -> Command:
        with RawClient(broker.address) as client:
            return client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, TOPIC | changes)

    assert create(attributes="+message.type=NORMAL,+a=b").code == 0
    assert broker.topics["new"] == Topic("new", 3, 2, attributes={"message.type": "NORMAL", "a": "b"})
    assert create(perm=4, writeQueueNums=1, readQueueNums=1, attributes="-a", order=True).code == 0
    assert broker.topics["new"] == Topic("new", 1, 1, 4, order=True, attributes={"message.type": "NORMAL"})
    (known,) = cluster.name_servers[0].routes.topics["new"].values()
    assert (known.perm, known.read_queues) == (4, 1)
    invalid = ResponseCode.SYSTEM_ERROR if release == "4.9" else ResponseCode.INVALID_PARAMETER
    for name, remark in (
        ("", "The specified topic is blank."),
        ("a b", "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("TBW102", "The topic[TBW102] is conflict with system topic."),
        ("rmq_sys_mine", "The topic[rmq_sys_mine] is conflict with system topic."),
    ):
        answer = create(topic=name)
        assert (answer.code, answer.remark) == (invalid, remark)
    with RawClient(broker.address) as client:
        fields = {name: value for name, value in TOPIC.items() if name != "defaultTopic"}
        assert client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == ResponseCode.SYSTEM_ERROR
