"""parse(): bodies as columns, in batches and streams; corrupt bodies and their outcomes."""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark
from rmq_spark import OptionError
from rmq_spark.parsing import parse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

fastavro = pytest.importorskip("fastavro", reason="the extra avro is not installed")

pytestmark = pytest.mark.spark

JSON_SCHEMA = "a int, b string, c struct<d: int>, e array<int>"
# Body -> value; None: corrupt.
JSON_BODIES: list[tuple[bytes, tuple[Any, ...] | None]] = [
    (b'{"a":1,"b":"x","c":{"d":2},"e":[1,null]}', (1, "x", (2,), [1, None])),
    (b'{"b":"y"}', (None, "y", None, None)),
    (b"{}", (None, None, None, None)),
    (b'{"a":null,"other":[{}]}', (None, None, None, None)),
    (b' {"a":1}\r\n', (1, None, None, None)),
    (b'\xef\xbb\xbf{"a":1}', (1, None, None, None)),
    (b'{"b":7}', (None, "7", None, None)),
    (b'{"b":"\xc3\xbc ] , }"}', (None, "ü ] , }", None, None)),
    (b"", None),
    (b" \n", None),
    (b"null", None),
    (b"5", None),
    (b'"a"', None),
    (b'[{"a":1}]', None),
    (b'{"a":1', None),
    (b'{"a":1} x', None),
    (b'{"a":1}{"a":2}', None),
    (b'{"a":1},{"a":2}', None),
    (b'{"a":1}] x', None),
    (b'{"a":1}} x', None),
    (b'{"a":1},{"rmq-spark: end of the body":1}] x', None),
    (b'{"a":1}\x00', None),
    (b'{"a":"1"}', None),
    (b'{"a":1.5}', None),
    (b'{"a":3000000000}', None),
    (b'{"a":1,"c":{"d":"x"}}', None),
    (b'{"a":1,"c":5}', None),
    (b'{"a":1,"e":[1,"x"]}', None),
    (b'{"b":"\xff"}', None),
]
CSV_BODIES: list[tuple[bytes, tuple[Any, ...] | None]] = [
    (b"1,x", (1, "x")),
    (b"1,x\n", (1, "x")),
    (b"1,x\r\n", (1, "x")),
    (b'"1","x, y"', (1, "x, y")),
    (b",", (None, None)),
    (b"\xef\xbb\xbf1,x", (1, "x")),
    (b"1", None),
    (b"1,x,3", None),
    (b"1,x\n2,y", None),
    (b"a,x", None),
    (b"3000000000,x", None),
    (b"", None),
    (b" ", None),
    (b"\n", None),
    (b"1,\xff", None),
]
AVRO_SCHEMA = json.dumps(
    {"type": "record", "name": "Order", "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": "string"}]}
)


def avro(a: int, b: str) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(AVRO_SCHEMA)), {"a": a, "b": b})
    return stream.getvalue()


AVRO_BODIES: list[tuple[bytes, tuple[Any, ...] | None]] = [
    (avro(1, "x"), (1, "x")),
    (avro(1, "x") + b"y", None),
    (b"", None),
    (b'{"a":1}', None),
]
CASES = [
    pytest.param("json", JSON_SCHEMA, JSON_BODIES, id="json"),
    pytest.param("csv", "a int, b string", CSV_BODIES, id="csv"),
    pytest.param("avro", AVRO_SCHEMA, AVRO_BODIES, id="avro"),
]


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def frame_of(spark: "SparkSession", bodies: list[tuple[bytes, tuple[Any, ...] | None]]) -> "DataFrame":
    rows = [("t", number, bytearray(body)) for number, (body, _) in enumerate(bodies)]
    return spark.createDataFrame(rows, "topic string, queueOffset bigint, body binary").coalesce(1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schema", "bodies"), CASES)
def test_good_bodies_become_values_and_corrupt_ones_what_was_asked(
    spark: "SparkSession", kind: str, schema: str, bodies: list[tuple[bytes, tuple[Any, ...] | None]]
) -> None:
    frame = frame_of(spark, bodies)
    nulled = parse(frame, kind, schema, on_corrupt_record="null")
    assert not isinstance(nulled, tuple)
    assert nulled.columns == ["topic", "queueOffset", "value"]
    found = {row.queueOffset: plain(row.value) for row in nulled.collect()}
    assert found == {number: value for number, (_, value) in enumerate(bodies)}
    dropped = parse(frame, kind, schema, on_corrupt_record="drop")
    assert not isinstance(dropped, tuple)
    kept = {number: value for number, value in found.items() if value is not None}
    assert {row.queueOffset: plain(row.value) for row in dropped.collect()} == kept
    good, bad = parse(frame, kind, schema, on_corrupt_record="split")
    assert {row.queueOffset: plain(row.value) for row in good.collect()} == kept
    assert bad.columns == ["topic", "queueOffset", "body", "error"]
    errors = {row.queueOffset: (bytes(row.body), row.error) for row in bad.collect()}
    assert errors.keys() == found.keys() - kept.keys()
    for number, (body, error) in errors.items():
        assert body == bodies[number][0]
        assert error.startswith(("the body is ", "the body has "))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schema", "bodies"), CASES)
def test_a_corrupt_body_fails_the_query_and_names_its_row(
    spark: "SparkSession", kind: str, schema: str, bodies: list[tuple[bytes, tuple[Any, ...] | None]]
) -> None:
    frame = frame_of(spark, bodies)
    parsed = parse(frame.where("queueOffset = 0"), kind, schema)
    assert not isinstance(parsed, tuple)
    assert [row.a for row in parsed.select("value.a").collect()] == [bodies[0][1][0]]  # type: ignore[index]
    corrupt = next(number for number, (body, value) in enumerate(bodies) if value is None and body)
    failing = parse(frame, kind, schema)
    assert not isinstance(failing, tuple)
    for chosen in (failing, failing.select("value.a")):
        with pytest.raises(Exception, match=f"rmq: parse {kind}: topic t, queueOffset {corrupt}: the body"):
            chosen.where(f"queueOffset = {corrupt}").collect()


def test_options_are_sparks_own_for_what_is_behind_a_value_too(spark: "SparkSession") -> None:
    frame = frame_of(spark, [(b'{"a":1} // a note', None), (b'{"a":/* one */1}', None), (b'{"a":1} // {\n2', None)])
    for options, expected in [({"allowComments": "true"}, [1, 1, None]), ({}, [None, None, None])]:
        parsed = parse(frame, "json", "a int", on_corrupt_record="null", options=options)
        assert not isinstance(parsed, tuple)
        assert [row.a for row in parsed.orderBy("queueOffset").select("value.a").collect()] == expected


def test_columns_keep_names_that_sql_would_take_for_something_else(spark: "SparkSession") -> None:
    frame = frame_of(spark, [(b"1", (1,))]).withColumnsRenamed({"topic": "from.where", "body": "the body"})
    good, bad = parse(frame, "csv", "a int", on_corrupt_record="split", column="the body")
    assert (good.columns, bad.columns) == (
        ["from.where", "queueOffset", "value"],
        ["from.where", "queueOffset", "the body", "error"],
    )


@pytest.mark.slow
def test_a_stream_is_split_and_what_is_bad_goes_back_to_be_retried(spark: "SparkSession", tmp_path: Path) -> None:
    store = rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 20, message_delay_level="1s")
    for body in ("1,x", "oops", "2,y"):
        store.send("orders", body)
    source = spark.readStream.format("rmq").options(subscribe="orders", startingOffsets="earliest", columns="*")
    seen: list[Any] = []

    def batch(frame: "DataFrame", number: int) -> None:
        good, bad = parse(frame, "csv", "a int, b string", on_corrupt_record="split")
        seen.extend(good.select("value.a").collect())
        columns = ["topic", "physicalTopic", "commitLogOffset", "queueId", "queueOffset", "reconsumeTimes", "error"]
        writer = bad.select(*columns).write.format("rmq").mode("append")
        writer.options(mode="sendBack", consumerGroup="g").save(str(tmp_path / "store"))

    query = source.load(str(tmp_path / "store")).writeStream.foreachBatch(batch)
    query.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    assert sorted(row.a for row in seen) == [1, 2]
    waiting = rmq_spark.open_reader(tmp_path / "store")
    waiting.refresh()
    assert any("SCHEDULE" in topic for topic in waiting.topics()), "the bad one waits for its second try"
    waiting.close()
    rmq_spark.close(tmp_path / "store")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"format": "xml"}, 'format="xml" is none of: json, csv, avro'),
        ({"on_corrupt_record": "skip"}, 'on_corrupt_record="skip" is none of: fail, null, drop, split'),
        ({"column": "bodies"}, 'the column "bodies" is none of: topic, queueOffset, body'),
        ({"column": "queueOffset"}, 'the column "queueOffset" is bigint'),
        ({"schema": "a nonsense"}, 'schema="a nonsense" is not DDL'),
        ({"schema": "int"}, "takes a StructType"),
        ({"schema": {"type": "record"}}, "takes a StructType"),
        ({"options": {"Mode": "FAILFAST"}}, 'options has "Mode"'),
        ({"format": "avro", "options": {"x": "y"}}, "takes no options"),
        ({"format": "avro", "schema": "{"}, "not an Avro schema as JSON"),
    ],
)
def test_what_can_be_refused_is_refused_before_the_query_starts(
    spark: "SparkSession", given: dict[str, Any], told: str
) -> None:
    asked: dict[str, Any] = {"format": "json", "schema": "a int"} | given
    with pytest.raises(OptionError) as caught:
        parse(frame_of(spark, []), **asked)
    assert told in str(caught.value)


def test_a_column_named_value_is_not_replaced(spark: "SparkSession") -> None:
    with pytest.raises(OptionError, match='there is a column "value" already'):
        parse(frame_of(spark, []).withColumnRenamed("topic", "value"), "json", "a int")
