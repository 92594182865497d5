"""Filters: a real consumer and our reader get the same messages, from a store that a broker and we wrote.

The broker writes its part with extended entries, in which the hash of a tag is not in its usual field.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from compat_kit import our_stores
from compat_kit.dispatch import await_units
from compat_kit.rocketmq import Broker, Client, Java
from support.sql92_samples import Sql92Samples

import rmq_spark
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import PullStatus

pytestmark = pytest.mark.compat

TOPIC, QUEUES = "filtered", 2
TAGS = [None, "A", "B", "Aa", "BB", "C D", "*", "中文", "😀", "order-created", "polygenelubricants", "GydZG_"]
OURS, THEIRS = 1500, 150
TAG_EXPRESSIONS = [
    *("*", "A", "Aa", "A || B", "A||B||", " A ", " * ", "A || *", "中文 || 😀", "\tA\n||B", "A\u3000||B"),
    *("order-created", "GydZG_", "C D || BB", "nobody", "|| ||"),
]
SQL92_EXPRESSIONS = [
    "TAGS = 'Aa'",
    "TAGS IS NULL",
    "a > 5 AND a <= 12",
    "a BETWEEN 3 AND 6 OR region = 'EU'",
    "a NOT BETWEEN 3 AND 16",
    "region IN ('EU', 'US') AND NOT (a = 7)",
    "region NOT IN ('EU')",
    "a >= 1.5 AND b IS NOT NULL",
    "b = TRUE",
    "b <> a",
    "KEYS = 'k7'",
    "_d$1 IS NULL AND a = 3000000000",
    "TRUE",
    "b",
    "-a = 5",
    "nothing = other",
]
RANDOM_EXPRESSIONS = 40
SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "queueId": pa.int32(),
        "body": pa.binary(),
        "tags": pa.string(),
        "keys": pa.string(),
        "properties": pa.map_(pa.string(), pa.string()),
    }
)


@dataclass
class Shared:
    """A store, and the broker and client at work on it."""

    store: Path
    java: Java
    client: Client

    def theirs(self, kind: str, text: str) -> list[tuple[int, int]]:
        """Return the messages of a real consumer, queue by queue in order."""
        lines = self.client("pull", topic=TOPIC, group="compat_filters", expr=text, exprType=kind)
        places = [(line["queueId"], line["queueOffset"]) for line in lines]
        return sorted(places, key=lambda place: place[0])

    def read(self, **given: str) -> list[tuple[int, int]]:
        """Return the messages of our reader."""
        found = []
        with rmq_spark.open_reader(str(self.store)) as reader:
            for queue in reader.queues(TOPIC):
                held = reader.bounds(queue)
                for batch in reader.read(queue, held.min_offset, held.max_offset, ["queueOffset"], **given):
                    found += [(queue.queue_id, offset) for offset in batch.column(0).to_pylist()]
        return found

    def pulled(self, **given: str) -> list[tuple[int, int]]:
        """Return the messages of our pull consumer, pull by pull."""
        found = []
        with rmq_spark.open_consumer(str(self.store), columns=["queueOffset"]) as consumer:
            consumer.subscribe(TOPIC, **given)
            for queue in consumer.queues(TOPIC):
                at = 0
                while (result := consumer.pull(queue, at)).pull_status is not PullStatus.NO_NEW_MSG:
                    offsets = result.messages.column("queueOffset").to_pylist()
                    found += [(queue.queue_id, offset) for offset in offsets]
                    at = result.next_begin_offset
        return found


def messages(count: int, seed: int) -> list[dict[str, Any]]:
    """Return messages with tags that collide, and properties that are numbers, texts, or missing."""
    random = Random(seed)
    values = ["1", "2.5", "3000000000", "-5", "true", "x", *map(str, range(20))]
    made = []
    for number in range(count):
        properties = {name: random.choice(values) for name in ("a", "b", "c", "_d$1") if random.random() < 0.7}
        if random.random() < 0.5:
            properties["region"] = random.choice(["EU", "US", "eu"])
        tags, keys = random.choice(TAGS), f"k{number % 50}"
        made.append({"body": b"%d" % number, "tags": tags, "keys": keys, "properties": properties})
    return made


@pytest.fixture(scope="module")
def shared(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    store = tmp_path_factory.mktemp(f"filtered-{java.version}") / "store"
    rows = [
        {**row, "topic": TOPIC, "queueId": number % QUEUES, "properties": list(row["properties"].items())}
        for number, row in enumerate(messages(OURS, 1))
    ]
    with our_stores.open_small(store) as writer:
        writer.create_topic(TOPIC, QUEUES)
        writer.send_many(pa.Table.from_pylist(rows, schema=SCHEMA))
    conf = our_stores.broker_conf() | {"enablePropertyFilter": True, "enableConsumeQueueExt": True}
    with Broker(java, store, **conf) as broker, Client(broker) as client:
        for number, row in enumerate(messages(THEIRS, 2)):
            fields = {name: value for name, value in row.items() if value is not None and name != "body"}
            client("produce", topic=TOPIC, text=f"theirs {number}", queueId=number % QUEUES, **fields)
        await_units(store, TOPIC, OURS + THEIRS)
        yield Shared(store, java, client)


def test_units_of_the_broker_are_extended(shared: Shared) -> None:
    with rmq_spark.open_reader(str(shared.store)) as reader:
        held = reader.bounds(QueueKey(TOPIC, 0))
    assert held.max_offset * QUEUES > OURS
    assert any((shared.store / "consumequeue_ext" / TOPIC).rglob("*"))


@pytest.mark.parametrize("text", TAG_EXPRESSIONS)
def test_a_tag_expression_gives_what_a_real_consumer_gets(shared: Shared, text: str) -> None:
    theirs = shared.theirs("TAG", text)
    assert shared.read(tags=text) == theirs
    assert shared.pulled(tags=text) == theirs
    assert theirs or text in ("nobody", "|| ||")


def test_separators_alone_are_refused_by_both(shared: Shared) -> None:
    with pytest.raises(RuntimeError, match="parse subscription error"):
        shared.theirs("TAG", "||")
    with pytest.raises(rmq_spark.OptionError):
        shared.read(tags="||")


@pytest.mark.parametrize("text", SQL92_EXPRESSIONS)
def test_an_sql92_expression_gives_what_a_real_consumer_gets(shared: Shared, text: str) -> None:
    theirs = shared.theirs("SQL92", text)
    assert shared.read(sql92=text) == theirs
    assert shared.pulled(sql92=text) == theirs


def test_random_sql92_expressions_give_what_a_real_consumer_gets(shared: Shared) -> None:
    samples, tried, seen = Sql92Samples(11), 0, 0
    while tried < RANDOM_EXPRESSIONS:
        text = samples.expression()
        if not shared.java.is_5 and any(word in text.upper() for word in ("CONTAINS", "STARTSWITH", "ENDSWITH")):
            continue
        try:
            ours = shared.read(sql92=text)
        except rmq_spark.OptionError:  # RocketMQ ignores the text after the longest valid beginning
            continue
        assert shared.theirs("SQL92", text) == ours, text
        tried, seen = tried + 1, seen + len(ours)
    assert seen


def test_a_wrong_expression_gives_all_to_a_real_pull_consumer_and_is_refused_by_us(shared: Shared) -> None:
    """ConsumerFilterManager#build returns null, and ExpressionMessageFilter takes that for no filter."""
    assert shared.theirs("SQL92", "a >") == shared.theirs("TAG", "*")
    with pytest.raises(rmq_spark.OptionError, match="sql92"):
        shared.read(sql92="a >")
