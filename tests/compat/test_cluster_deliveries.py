"""What the kit returns of Java consumers at two brokers: one pulls all messages of a producer, another fails some."""

import base64
from collections import Counter
from pathlib import Path

import pytest
from compat_kit.clusters import NAMES, TwoBrokers
from compat_kit.deliveries import Delivery, begin_push, finish_push, pull_deliveries
from compat_kit.rocketmq import Client, Java, Line
from compat_kit.their_lives import CONF

pytestmark = pytest.mark.compat

_TOPIC, _GROUP = "delivered", "failing"
_COUNT = 20
_FAILED = ("key-3", "key-12")


class Sent:
    """Messages that a Java producer sent to two brokers, and what the consumers got."""

    def __init__(self, java: Java, folder: Path) -> None:
        with TwoBrokers(java, folder, **CONF) as cluster, cluster.client() as client, cluster.client() as other:
            client("create-topic", topic=_TOPIC, queues=2)
            client("create-topic", topic=f"%RETRY%{_GROUP}", queues=1)
            begin_push(other, _TOPIC, _GROUP, _COUNT, fail_keys=_FAILED)
            self.sent = [self._send(client, number) for number in range(_COUNT)]
            self.pulled = pull_deliveries(client, [_TOPIC])
            self.pushed = finish_push(other)

    def _send(self, client: Client, number: int) -> Line:
        body = base64.b64encode(_body(number)).decode()
        properties = {"number": f"{number}"}
        fields = {"tags": "even" if number % 2 == 0 else "odd", "keys": f"key-{number} all", "flag": number}
        (line,) = client("produce", topic=_TOPIC, body=body, properties=properties, **fields)
        return line


def _body(number: int) -> bytes:
    return bytes([number, 0, 255])


@pytest.fixture(scope="module")
def sent(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Sent:
    return Sent(java, tmp_path_factory.mktemp(f"deliveries-{java.version}"))


def test_pull_deliveries_returns_every_message_of_all_queues(sent: Sent) -> None:
    by_id = {one.msg_id: one for one in sent.pulled}
    assert len(by_id) == len(sent.pulled) == _COUNT
    for number, line in enumerate(sent.sent):
        found = by_id[line["msgId"]]
        assert (found.topic, found.queue_id, found.queue_offset) == (_TOPIC, line["queueId"], line["queueOffset"])
        assert (found.body, found.flag, found.keys) == (_body(number), number, f"key-{number} all")
        assert (found.tags, found.properties["number"]) == ("odd" if number % 2 else "even", f"{number}")
        assert found.properties["UNIQ_KEY"] == found.msg_id
        assert found.born_ms <= found.store_ms + 1 <= found.delivered_ms + 1
    assert {(one.broker, one.queue_id) for one in sent.pulled} == {(name, id_) for name in NAMES for id_ in range(2)}


def test_finish_push_returns_chosen_messages_twice(sent: Sent) -> None:
    tries = Counter(_number(one) for one in sent.pushed)
    failed = {int(key.removeprefix("key-")) for key in _FAILED}
    assert tries == {number: 2 if number in failed else 1 for number in range(_COUNT)}
    results = [(one.reconsume_times, one.result) for one in sent.pushed if _number(one) in failed]
    assert sorted(results) == [(0, "RECONSUME_LATER")] * 2 + [(1, "CONSUME_SUCCESS")] * 2
    assert {one.broker for one in sent.pushed} == set(NAMES)


def _number(one: Delivery) -> int:
    return int(one.properties["number"])
