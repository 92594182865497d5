"""Columns as Spark sees them, and errors for unknown ones."""

import pytest

from rmq_spark.datasource.options.schema import (
    DEFAULT_COLUMNS,
    SPARK_TYPES,
    Field,
    check_schema,
    columns_ddl,
    resolve_columns,
)
from rmq_spark.store.backend import COLUMNS
from rmq_spark.store.errors import OptionError


def test_the_default_columns_are_the_cheap_ones_in_the_order_of_all() -> None:
    assert resolve_columns(None) == DEFAULT_COLUMNS == tuple(COLUMNS)[:10]
    assert resolve_columns(("*",)) == tuple(COLUMNS)


def test_every_column_has_sparks_type() -> None:
    assert SPARK_TYPES["topic"] == "string"
    assert SPARK_TYPES["queueId"] == "int"
    assert SPARK_TYPES["queueOffset"] == "bigint"
    assert SPARK_TYPES["body"] == "binary"
    assert SPARK_TYPES["storeTimestamp"] == "timestamp"
    assert SPARK_TYPES["properties"] == "map<string,string>"
    assert SPARK_TYPES.keys() == COLUMNS.keys()


def test_ddl_keeps_the_order_that_was_asked_for() -> None:
    assert columns_ddl(resolve_columns(("body", "properties"))) == "body binary, properties map<string,string>"


def refusal(call, *arguments):
    with pytest.raises(OptionError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_column_that_does_not_exist_is_answered_with_the_nearest_and_all() -> None:
    message = refusal(resolve_columns, ("bodi", "tags"))
    assert 'columns="bodi,tags": there is no column "bodi". Did you mean body?' in message
    assert all(name in message for name in COLUMNS)
    assert "Did you mean queueOffset?" in refusal(resolve_columns, ("QUEUEOFFSET",))
    assert "expected * alone, or names" in refusal(resolve_columns, ("*", "body"))


def fields(*names):
    return [Field(name, SPARK_TYPES[name], True) for name in names]


def test_a_schema_may_be_any_columns_in_any_order() -> None:
    assert check_schema(fields("tags", "body"), None) == ("tags", "body")
    assert check_schema(fields("tags", "body"), ("tags", "body")) == ("tags", "body")
    assert check_schema(fields(*COLUMNS), ("*",)) == tuple(COLUMNS)


@pytest.mark.parametrize(
    ("schema", "asked", "part"),
    [
        ([Field("body", "string", True)], None, "column body is string, expected binary"),
        ([Field("queueId", "bigint", True)], None, "column queueId is bigint, expected int"),
        ([Field("properties", "map<string,binary>", True)], None, "expected map<string,string>"),
        ([Field("body", "binary", False)], None, "body is NOT NULL, expected nullable"),
        ([Field("Body", "binary", True)], None, 'no column "Body". Did you mean body?'),
        ([], None, "schema(): found no column"),
        (fields("body"), ("tags",), 'schema() and columns="tags" differ: schema() has body.'),
        (fields("body", "tags"), ("tags", "body"), "Give one of them"),
    ],
)
def test_a_schema_that_the_source_does_not_have_is_refused(schema, asked, part) -> None:
    assert part in refusal(check_schema, schema, asked)
