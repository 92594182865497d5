"""Conditions of batch queries give the same rows whether Spark pushes them down or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from support.index_twin import IndexKey, write_one_by_one
from support.row_twin import walk_records

from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.log.key_search import keys_of as keys_of_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

FIRST_MS = 1_700_000_000_000
SWITCH = "spark.sql.python.filterPushdown.enabled"
COLUMNS = "topic,physicalTopic,queueId,queueOffset,tags,keys,msgId,storeTimestamp"
KEY = ("physicalTopic", "queueId", "queueOffset")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two topics and a retry topic, with and without tags, keys and ids; times are equal or step back a little."""
    random, path, messages, now_ms = Random(4), tmp_path_factory.mktemp("pushed") / "store", [], FIRST_MS
    for number in range(400):
        topic = random.choice(["orders", "orders", "payments", "%RETRY%g"])
        properties = {}
        if topic == "%RETRY%g":
            properties["RETRY_TOPIC"] = random.choice(["orders", "payments"])
        if random.random() < 0.7:
            properties["UNIQ_KEY"] = f"{number:032X}"
        words = random.sample(["a", "b", "c d", "Aa", "BB", f"k{number}"], random.randrange(3))
        now_ms += random.choice([0, 0, 1, 700, 5000])
        messages.append(
            SampleMessage(
                topic,
                {"orders": random.randrange(2), "payments": 1}.get(topic, 0),
                b"x",
                tags=random.choice([None, "A", "B", "Aa", "BB"]),
                keys=" ".join(words) or None,
                properties=properties,
                store_timestamp=now_ms - random.choice([0, 0, 0, 900]),
            )
        )
    build_store(path, messages, first_offsets={QueueKey("orders", 1): 7})
    keys = [
        IndexKey(index_key_hash(f"{record.topic.decode()}#{word}"), record.physical_offset, record.store_timestamp)
        for record in walk_records(path)
        for word in filter(None, keys_of_record(record))
    ]
    (path / "index").mkdir()
    for number, data in enumerate(write_one_by_one(keys, IndexShape(50, 300))):
        (path / "index" / f"{20240101000000000 + number}").write_bytes(data)
    return path


@contextmanager
def switched(spark: "SparkSession", state: str) -> Iterator[None]:
    before = spark.conf.get(SWITCH)
    spark.conf.set(SWITCH, state)
    yield
    spark.conf.set(SWITCH, before)


def load(spark: "SparkSession", path: Path) -> "DataFrame":
    reader = spark.read.format("rmq").option("path", str(path)).option("columns", COLUMNS)
    return reader.option("assign", '{"orders": [0, 1], "payments": [1], "%RETRY%g": [0]}').load()


def keys_of(frame: "DataFrame") -> list[tuple[object, ...]]:
    return sorted(tuple(row) for row in frame.select(*KEY).collect())


def time_text(random: Random) -> str:
    at = datetime.fromtimestamp(FIRST_MS / 1000, UTC) + timedelta(microseconds=random.randrange(-(10**6), 500 * 10**6))
    return random.choice([f"timestamp'{at:%Y-%m-%d %H:%M:%S.%f}'", f"'{at:%Y-%m-%dT%H:%M:%S}Z'"])


def condition(random: Random, message_ids: list[str]) -> str:
    """Return one random condition in SQL: mostly of the kinds that are pushed down."""
    number = str(random.choice([-1, 0, 1, 2, 7, 20, 40, 2**40, "5L", "2.5", "'1'"]))
    less = random.choice(["=", "<", "<=", ">", ">=", "<>", "<=>"])
    topic = random.choice(["'orders'", "'payments'", "'%RETRY%g'", "'o'", "null"])
    word = random.choice(["'a'", "'b'", "'Aa'", "'BB'", "'c d'", "'d'", "''", "' '", "'a b'", "'k17'", "null"])
    one_id = f"'{random.choice(message_ids)}'"
    some = [
        f"queueId {less} {number}",
        f"queueOffset {less} {number}",
        f"queueOffset in ({', '.join(str(random.randrange(50)) for _ in range(random.choice([1, 3, 12])))})",
        f"queueOffset between {random.randrange(20)} and {random.randrange(60)}",
        f"queueId not in ({random.randrange(3)}, {random.choice(['null', '9'])})",
        f"topic {random.choice(['=', '<>', '<=>'])} {topic}",
        f"physicalTopic {random.choice(['=', '<>', '>'])} {topic}",
        "physicalTopic like '%RETRY%'",
        "topic like 'pay%'",
        f"storeTimestamp {less} {time_text(random)}",
        f"storeTimestamp between {time_text(random)} and {time_text(random)}",
        f"storeTimestamp in ({time_text(random)}, {time_text(random)})",
        f"keys {random.choice(['=', '=', '<>', '<=>'])} {word}",
        f"keys in ({word}, 'a b', 'b a')",
        f"tags {random.choice(['=', '<>', '<=>'])} {word}",
        "tags in ('A', null)",
        "tags is null",
        f"msgId = {one_id}",
        f"msgId in ({one_id}, 'nothing', null)",
        f"lower(tags) = {word}",
        f"array_contains(split(keys, ' '), cast({word} as string))",
    ]
    text = random.choice(some)
    return f"not ({text})" if random.random() < 0.15 else text


def compare(spark: "SparkSession", path: Path, seeds: range) -> int:
    """Compare both ways for a random conjunction a seed; return how many gave rows, but not all."""
    with switched(spark, "false"):
        rows = load(spark, path).collect()
    plain = spark.createDataFrame(rows, load(spark, path).schema).coalesce(1).cache()
    ids, told = [row.msgId for row in rows], 0
    for seed in seeds:
        random = Random(seed)
        text = random.choice([" and ", " and ", " or "]).join(
            condition(random, ids) for _ in range(random.choice([1, 2, 3]))
        )
        expected = keys_of(plain.where(text))
        with switched(spark, "true"):
            assert keys_of(load(spark, path).where(text)) == expected, (seed, text)
        told += 0 < len(expected) < len(rows)
    plain.unpersist()
    return told


@pytest.mark.slow
def test_rows_are_the_same_with_pushdown_on_and_off(spark: "SparkSession", path: Path) -> None:
    assert compare(spark, path, range(10)) > 2


@pytest.mark.torture
def test_rows_are_the_same_with_pushdown_on_and_off_for_many_conditions(spark: "SparkSession", path: Path) -> None:
    assert compare(spark, path, range(10, 210)) > 60


def test_a_session_of_ours_pushes_conditions_down_and_asks_again_only_what_must_be(
    spark: "SparkSession", path: Path
) -> None:
    assert spark.conf.get(SWITCH) == "true"
    frame = load(spark, path).where("queueId = 1 and QUEUEOFFSET > 7 and tags = 'A' and topic = 'orders'")
    plan = frame._jdf.queryExecution().executedPlan().toString()
    asked = " ".join(line for line in plan.splitlines() if "Filter " in line and "tags" in line)
    assert "topic" in asked
    assert "queueId" not in asked
    assert "queueOffset" not in asked
    assert {row.queueId for row in frame.collect()} == {1}


def test_a_session_in_which_pushdown_is_off_reads_plainly(spark: "SparkSession", path: Path) -> None:
    with switched(spark, "false"):
        frame = load(spark, path).where("queueId = 1 and queueOffset > 7")
        plan = frame._jdf.queryExecution().executedPlan().toString()
        assert any("Filter " in line and "queueOffset" in line for line in plan.splitlines())
        off = keys_of(frame)
    assert off == keys_of(load(spark, path).where("queueId = 1 and queueOffset > 7"))
    assert off
