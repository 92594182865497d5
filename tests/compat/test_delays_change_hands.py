"""Delayed messages and retries of failed ones, in one store, under a real broker and us alternately.

Each side delivers the messages that the other left waiting: each once, to its queue, and not early.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from compat_kit import our_stores
from compat_kit.rocketmq import Broker, Client, Java

import rmq_spark
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms

pytestmark = pytest.mark.compat

TOPIC, QUEUES = "delayed", 3
THEIRS, OURS = "theirs", "ours"  # groups: of a real consumer, and of ours
SCHEDULE = "SCHEDULE_TOPIC_XXXX"
LEVELS = 18
# A failed message waits at level 3: longer than a broker takes to stop, or to start. Messages wait at all of them.
DELAYS_S = {1: 1, 2: 4, 3: 20, 4: 25, **dict.fromkeys(range(5, LEVELS + 1), 6)}
TABLE = " ".join(f"{DELAYS_S[level]}s" for level in range(1, LEVELS + 1))
CONF = our_stores.broker_conf() | {"messageDelayLevel": TABLE}
COLUMNS = ["body", "queueId", "queueOffset", "commitLogOffset", "reconsumeTimes", "properties", "storeTimestamp",
           "physicalTopic", "offsetMsgId"]  # fmt: skip
WITHIN_S = 90


class Shared:
    """A store, and the queue of TOPIC in which each text must arrive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.queues: dict[str, int] = {}

    def new(self, name: str, level: int) -> tuple[str, int]:
        """Return the text and queue of one more message."""
        text, queue_id = f"{name} at level {level}, {len(self.queues)}", len(self.queues) % QUEUES
        self.queues[text] = queue_id
        return text, queue_id

    def rows(self, topic: str) -> list[dict[str, Any]]:
        """Return the messages of a topic, `text` and `store_ms` with them."""
        found = []
        with rmq_spark.open_reader(str(self.path)) as reader:
            reader.refresh()
            for queue in reader.queues(topic) if topic in reader.topics() else ():
                bounds = reader.bounds(queue)
                for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, COLUMNS):
                    found += batch.to_pylist()
        for row in found:
            row["text"], row["properties"] = row["body"].decode(), dict(row["properties"])
            row["store_ms"] = round(row["storeTimestamp"].timestamp() * 1000)
        return found

    def waiting(self) -> list[tuple[str, str, int]]:
        """Return topic, text and level of the messages that were not delivered yet."""
        there = {
            (topic, row["text"], row["reconsumeTimes"]) for topic in self._delivered_to() for row in self.rows(topic)
        }
        return [
            (row["properties"]["REAL_TOPIC"], row["text"], row["queueId"] + 1)
            for row in self.rows(SCHEDULE)
            if (row["properties"]["REAL_TOPIC"], row["text"], row["reconsumeTimes"]) not in there
        ]

    def check(self) -> None:
        """Assert that every message arrived once, in its queue, at its time or later."""
        due_ms = {
            (row["properties"]["REAL_TOPIC"], row["text"]): row["store_ms"] + 1000 * DELAYS_S[row["queueId"] + 1]
            for row in self.rows(SCHEDULE)
        }
        found = {topic: self.rows(topic) for topic in self._delivered_to()}
        for topic, rows in found.items():
            counts = Counter(row["text"] for row in rows)
            assert [text for text, count in counts.items() if count > 1] == [], topic
            assert [row["text"] for row in rows if row["store_ms"] < due_ms.get((topic, row["text"]), 0)] == [], topic
        assert {row["text"]: row["queueId"] for row in found[TOPIC]} == self.queues
        assert due_ms.keys() <= {(topic, row["text"]) for topic, rows in found.items() for row in rows}

    def we_tick(self) -> int:
        """Deliver by ourselves until nothing waits; return how many messages."""
        count, give_up = 0, time.monotonic() + WITHIN_S
        with DeliveryScheduler(str(self.path)) as ticker:
            while self.waiting():
                assert time.monotonic() < give_up, self.waiting()
                tick = ticker.tick(wall_clock_ms())
                assert tick.problem is None
                count += tick.delivered
                time.sleep(0.2)
        return count

    @staticmethod
    def _delivered_to() -> tuple[str, ...]:
        return TOPIC, f"%RETRY%{THEIRS}", f"%RETRY%{OURS}"


def they_leave(shared: Shared, java: Java) -> None:
    """Have a broker make the store, a producer send to each level, and a consumer fail; then the broker stops."""
    with Broker(java, shared.path, **CONF) as broker, Client(broker) as client:
        client("create-topic", topic=TOPIC, queues=QUEUES)
        for tags in ("bad", "good"):
            text, _ = shared.new(f"theirs, {tags}", 0)
            shared.queues[text] = 0
            client("produce", topic=TOPIC, text=text, queueId=0, tags=tags)
        push = {"count": 1, "failTimes": 9, "failTag": "bad", "timeoutMs": 60_000}
        assert len(client("push", topic=TOPIC, group=THEIRS, **push)) >= 2
        for level in (1, 2, 3, 3, 4, 4, LEVELS):
            text, queue_id = shared.new("theirs", level)
            client("produce", topic=TOPIC, text=text, queueId=queue_id, delayLevel=level)


def we_leave(shared: Shared, java: Java) -> None:
    """Send to each level, and fail: by ourselves."""
    with rmq_spark.open_store(shared.path, message_delay_level=TABLE) as store:
        if not java.is_5:
            with pytest.raises(rmq_spark.OptionError, match=r"4\.9"):
                store.send(TOPIC, "never", deliver_at_ms=wall_clock_ms() + 60_000)
        for level in (0, 3, 4, *range(1, LEVELS + 1)):
            text, queue_id = shared.new("ours", level)
            store.send(TOPIC, text, queue_id=queue_id, delay_level=level)
    with rmq_spark.open_consumer(shared.path, OURS) as consumer:
        queue = consumer.queues(TOPIC)[0]
        (copy,) = consumer.send_back(consumer.pull(queue, 0, max_messages=1)).to_pylist()
        assert (copy["topic"], copy["delayLevel"], copy["reconsumeTimes"]) == (f"%RETRY%{OURS}", 3, 1)


def check_trail(shared: Shared, group: str) -> None:
    """Assert that the failed message returned to its group, with its original position."""
    first = min(shared.rows(TOPIC), key=lambda row: row["commitLogOffset"])
    (copy,) = shared.rows(f"%RETRY%{group}")
    trail = {"RETRY_TOPIC": TOPIC, "ORIGIN_MESSAGE_ID": first["offsetMsgId"], "DELAY": "3"}
    trail |= {"REAL_TOPIC": f"%RETRY%{group}", "REAL_QID": "0"}
    assert (copy["text"], copy["reconsumeTimes"], copy["queueId"]) == (first["text"], 1, 0)
    assert trail.items() <= copy["properties"].items()


def test_what_one_leaves_waiting_the_other_delivers_once(java: Java, tmp_path: Path) -> None:
    shared = Shared(tmp_path / "store")
    they_leave(shared, java)
    left = shared.waiting()
    assert {3, 4} <= {level for topic, _, level in left if topic == TOPIC}
    assert [level for topic, _, level in left if topic == f"%RETRY%{THEIRS}"] == [3]

    rmq_spark.open_store(shared.path, message_delay_level=TABLE).close()
    assert shared.we_tick() == len(left)
    shared.check()
    check_trail(shared, THEIRS)

    we_leave(shared, java)
    left = shared.waiting()
    assert {3, 4} <= {level for topic, _, level in left if topic == TOPIC}
    assert [level for topic, _, level in left if topic == f"%RETRY%{OURS}"] == [3]
    with Broker(java, shared.path, **CONF) as broker, Client(broker) as client:
        give_up = time.monotonic() + WITHIN_S
        while shared.waiting():
            assert time.monotonic() < give_up, shared.waiting()
            time.sleep(0.2)
        (seen,) = client("pull", topic=f"%RETRY%{OURS}", group="looks")
        assert seen["reconsumeTimes"] == 1
        client.program.kill()  # to stop takes them ten seconds
        broker.kill()
    shared.check()
    check_trail(shared, OURS)
