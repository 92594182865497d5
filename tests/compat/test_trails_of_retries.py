"""A real consumer that fails, and ours, on the same message: the copies in the store have the same trails."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from compat_kit import our_stores
from compat_kit.rocketmq import Broker, Client, Java

import rmq_spark

pytestmark = pytest.mark.compat

TOPIC = "orders"
THEIRS, OURS = "theirs", "ours"
LEVELS = " ".join(["1s"] * 18)  # all delays: a real ladder would take a minute
CONF = our_stores.broker_conf() | {"messageDelayLevel": LEVELS}
FAILURES = 2
COLUMNS = ["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes", "topic", "body", "tags",
           "keys", "properties", "flag", "sysFlag", "bornTimestamp", "bornHost", "offsetMsgId"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copy:
    """The fields of a message's copy that do not depend on its time or its writer."""

    topic: str
    queue_id: int
    reconsume_times: int
    properties: Mapping[str, str]
    kept: tuple[Any, ...]


def rows(path: Path, topic: str) -> list[dict[str, Any]]:
    """Return the messages of a topic, in order of the log."""
    found = []
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        for queue in reader.queues(topic) if topic in reader.topics() else ():
            there = reader.bounds(queue)
            for batch in reader.read(queue, there.min_offset, there.max_offset, COLUMNS):
                found += batch.to_pylist()
    return sorted(found, key=lambda row: row["commitLogOffset"])


def copies(path: Path, topic: str, group: str) -> list[Copy]:
    """Return the copies of a group's messages in a topic, the group's name left out of them."""
    found = []
    for row in rows(path, topic):
        properties = {name: value.replace(group, "G") for name, value in row["properties"]}
        if topic.endswith(group) or (properties.get("REAL_TOPIC") == "%RETRY%G" and group in str(row["properties"])):
            kept = tuple(row[name] for name in ("body", "tags", "keys", "flag", "sysFlag", "bornTimestamp", "bornHost"))
            found.append(Copy(topic.replace(group, "G"), row["queueId"], row["reconsumeTimes"], properties, kept))
    return found


def fail_theirs(java: Java, path: Path) -> None:
    """Have a real consumer fail `FAILURES` times, and another time beyond its limit."""
    with Broker(java, path, **CONF) as broker, Client(broker) as client:
        client("produce", topic=TOPIC, text="hello", queueId=0, tags="A", keys="k1 k2", properties={"x": "y"})
        # Of a topic that the broker makes for the first failure the consumer learns half a minute later.
        client("create-topic", topic=f"%RETRY%{THEIRS}", queues=1)
        client(
            "push", topic=TOPIC, group=THEIRS, count=FAILURES + 1, countFailed=True, timeoutMs=90_000,
            failTimes=FAILURES + 1, maxReconsumeTimes=FAILURES, body=True,
        )  # fmt: skip


def fail_ours(path: Path) -> None:
    """Pull the same message, and fail as often."""
    with rmq_spark.open_consumer(path, OURS, columns=COLUMNS) as consumer:
        (queue,) = [queue for queue in consumer.queues(TOPIC) if consumer.max_offset(queue)]
        consumer.send_back(consumer.pull(queue, 0), max_reconsume_times=FAILURES)
        for failure in range(FAILURES):
            give_up = time.monotonic() + 30
            while len(rows(path, f"%RETRY%{OURS}")) <= failure:
                assert time.monotonic() < give_up
                consumer.pull(queue, 0)  # which delivers what is due
                time.sleep(0.1)
            again = pa.Table.from_pylist([rows(path, f"%RETRY%{OURS}")[failure]])
            again = again.select(["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes"])
            consumer.send_back(again, max_reconsume_times=FAILURES)


def test_copies_of_a_message_that_fails_are_those_of_a_broker(java: Java, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with our_stores.open_small(path) as store:
        store.create_topic(TOPIC, 1)
    rmq_spark.open_store(path, message_delay_level=LEVELS).close()
    fail_theirs(java, path)
    fail_ours(path)
    for topic in ("%RETRY%{}", "%DLQ%{}"):
        theirs = copies(path, topic.format(THEIRS), THEIRS)
        assert copies(path, topic.format(OURS), OURS) == theirs
        assert len(theirs) == (FAILURES if "RETRY" in topic else 1)
    theirs, ours = (copies(path, "SCHEDULE_TOPIC_XXXX", group) for group in (THEIRS, OURS))
    assert ours == theirs
    assert [copy.queue_id for copy in theirs] == [2, 3]
