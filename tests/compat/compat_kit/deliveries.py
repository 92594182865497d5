"""What Java consumers get from a live cluster: each message with its place, all its properties and its time.

    first = pull_deliveries(client, ["T"])                       # everything, of all queues of all brokers
    begin_push(other, "T", "g", count=9, fail_keys=["key-3"])    # `other` is a client of its own
    pushed = finish_push(other)

Between the last two lines a producer sends.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compat_kit.rocketmq import Client, Line


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as a consumer got it. Times are ms since the epoch, as `delivered_ms`, when the consumer had it.

    `msg_id` is the UNIQ_KEY, or the id with the physical offset where a message has none. `result` is what a push
    consumer answered, and empty for a pull consumer.
    """

    topic: str
    broker: str
    queue_id: int
    queue_offset: int
    msg_id: str
    body: bytes
    tags: str | None
    keys: str | None
    flag: int
    sys_flag: int
    properties: Mapping[str, str]
    reconsume_times: int
    born_ms: int
    store_ms: int
    delivered_ms: int
    result: str


def pull_deliveries(client: Client, topics: Sequence[str], group: str = "compat_pull") -> list[Delivery]:
    """Return all messages of topics, of all queues of all brokers, by topic, broker, queue id and queue offset."""
    found = _deliveries(client("pull", topic=list(topics), group=group, body=True))
    return sorted(found, key=lambda one: (one.topic, one.broker, one.queue_id, one.queue_offset))


def begin_push(
    client: Client,
    topic: str,
    group: str,
    count: int,
    *,
    fail_keys: Sequence[str] = (),
    fail_times: int = 1,
    timeout_ms: int = 60_000,
    **fields: object,
) -> None:
    """Begin a push consumer, which ends when it has consumed `count` messages, or at the timeout.

    It starts at the first messages if the group is new. Each message with one of `fail_keys` fails `fail_times` times,
    and comes again by the group's retry topic; create that topic first. `fields` are further ones of the operation.
    """
    fails = {"failKeys": list(fail_keys), "failTimes": fail_times} if fail_keys else {}
    wanted = {"count": count, "timeoutMs": timeout_ms}
    client.begin("push", topic=topic, group=group, body=True, **wanted, **fails, **fields)


def finish_push(client: Client) -> list[Delivery]:
    """Return the deliveries of a push consumer that was begun, failed ones too, in order. Wait for its end."""
    return _deliveries(client.finish())


def _deliveries(lines: list[Line]) -> list[Delivery]:
    return [_delivery(line) for line in lines if line["event"] == "message"]


def _delivery(line: Line) -> Delivery:
    return Delivery(
        topic=line["topic"],
        broker=line["brokerName"],
        queue_id=line["queueId"],
        queue_offset=line["queueOffset"],
        msg_id=line["msgId"],
        body=base64.b64decode(line["body"]),
        tags=line.get("tags"),
        keys=line.get("keys"),
        flag=line["flag"],
        sys_flag=line["sysFlag"],
        properties=line["properties"],
        reconsume_times=line["reconsumeTimes"],
        born_ms=line["bornTimestamp"],
        store_ms=line["storeTimestamp"],
        delivered_ms=line["deliveredTimestamp"],
        result=line.get("result", ""),
    )
