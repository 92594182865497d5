"""Avro bodies decoded without Spark: types, and corrupt bodies."""

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

from rmq_spark.avro_bodies import _Types, avro_decoder, decode_bodies
from rmq_spark.store.errors import OptionError

fastavro = pytest.importorskip("fastavro", reason="the extra avro is not installed")

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "name", "type": ["null", "string"], "default": None},
    ],
}
ALL = {
    "type": "record",
    "name": "All",
    "namespace": "x.y",
    "fields": [
        {"name": "flag", "type": "boolean"},
        {"name": "big", "type": "long"},
        {"name": "ratio", "type": "float"},
        {"name": "exact", "type": "double"},
        {"name": "raw", "type": "bytes"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "again", "type": ["Kind", "null"]},
        {"name": "sum", "type": {"type": "fixed", "name": "Sum", "size": 2}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}]},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "uuid", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "many", "type": {"type": "array", "items": ["null", "int"]}},
        {"name": "by", "type": {"type": "map", "values": ORDER}},
        {"name": "one", "type": "Order"},
    ],
}
ROW = {
    "flag": True,
    "big": 1 << 40,
    "ratio": 0.5,
    "exact": 0.1,
    "raw": b"\x00\xff",
    "kind": "B",
    "again": None,
    "sum": b"ab",
    "day": date(2026, 1, 2),
    "at": datetime(2026, 1, 2, 3, 4, 5, 6000, UTC),
    "local": datetime(2026, 1, 2, 3, 4, 5, 6),
    "price": Decimal("12.30"),
    "uuid": "0b6f8d6c-6a0a-4d6f-9a4e-0123456789ab",
    "clock": 1000,
    "many": [1, None],
    "by": [("a", {"id": 1, "name": None})],
    "one": {"id": 2, "name": "ü"},
}


def encode(schema, row) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return stream.getvalue()


def decode(schema, *bodies):
    plain, spark_type = _Types().read(fastavro.parse_schema(schema, _write_hint=False), "schema")
    assert isinstance(spark_type, StructType)
    given = pa.array(bodies, pa.binary())
    return decode_bodies(given, json.dumps(plain), to_arrow_type(spark_type, timezone="UTC")).to_pylist()


def test_every_type_comes_out_as_it_went_in() -> None:
    uuid_as_text = {
        **ALL,
        "fields": [{**one, "type": "string"} if one["name"] == "uuid" else one for one in ALL["fields"]],
    }
    clock = {"name": "clock", "type": "int"}
    plain = {**uuid_as_text, "fields": [clock if one["name"] == "clock" else one for one in uuid_as_text["fields"]]}
    ((found),) = decode(ALL, encode(plain, {**ROW, "by": dict(ROW["by"])}))
    assert found == {"value": ROW, "error": None}


def test_a_decimal_of_more_digits_than_spark_has_is_bytes() -> None:
    def record(precision: int) -> dict[str, object]:
        price = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 2}
        return {"type": "record", "name": "R", "fields": [{"name": "price", "type": price}]}

    for precision, value in [(38, Decimal("1.23")), (39, b"\x7b")]:
        assert decode(record(precision), encode(record(precision), {"price": Decimal("1.23")})) == [
            {"value": {"price": value}, "error": None}
        ]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (None, "the body is null"),
        (b"", "the body is empty"),
        (encode(ORDER, {"id": 1})[:1], "is not Avro of the schema: EOFError"),
        (encode(ORDER, {"id": 1, "name": "abc"})[:-1], "is not Avro of the schema"),
        (encode(ORDER, {"id": 1}) + b"x", "the body has 3 bytes, and its value ends after 2"),
        (b"\x02\x09", "is not Avro of the schema"),
        (b"\x02\x02\x02\xff", "is not Avro of the schema"),
        (b"\x80\x80\x80\x80\x80\x80\x01\x00", "is not Avro of the schema"),  # an int of more than 32 bits
    ],
)
def test_a_corrupt_body_is_told_and_its_neighbours_are_right(body, told) -> None:
    good = encode(ORDER, {"id": 7, "name": "x"})
    first, found, last = decode(ORDER, good, body, good)
    assert first == last == {"value": {"id": 7, "name": "x"}, "error": None}
    assert found["value"] is None
    assert told in found["error"]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("{", "not an Avro schema as JSON"),
        ('{"type": "record"}', "not an Avro schema as JSON"),
        ('"int"', "expected a record"),
        ({**ORDER, "fields": [{"name": "a", "type": ["int", "string"]}]}, "schema.a is a union of 2 types"),
        ({**ORDER, "fields": [{"name": "a", "type": "null"}]}, "schema.a is a null"),
        ({**ORDER, "fields": [{"name": "a", "type": ["null", "Order"]}]}, "schema.a is a Order within itself"),
    ],
)
def test_a_schema_that_spark_has_no_type_for_is_refused_with_the_place(schema, told) -> None:
    with pytest.raises(OptionError, match=told):
        avro_decoder(schema)


def test_without_fastavro_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fastavro", None)
    with pytest.raises(OptionError, match=r'pip install "rmq-spark\[avro\]"'):
        avro_decoder(ORDER)
