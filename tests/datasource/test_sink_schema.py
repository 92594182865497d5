"""Columns that can be written, and the calls that errors suggest."""

import pytest

from rmq_spark.datasource.options.schema import DEFAULT_COLUMNS, SPARK_TYPES, Field, resolve_columns
from rmq_spark.datasource.options.sink_schema import SINK_COLUMNS, check_sink_schema
from rmq_spark.store.errors import OptionError


def fields(**columns):
    return [Field(name, spark_type, True) for name, spark_type in columns.items()]


def refusal(columns, topic="orders"):
    with pytest.raises(OptionError) as caught:
        check_sink_schema(columns, topic)
    return str(caught.value)


def test_all_columns_with_all_their_types_are_accepted() -> None:
    for position in (0, -1):
        columns = fields(**{name: types[position] for name, types in SINK_COLUMNS.items()})
        assert check_sink_schema(columns, None) == tuple(SINK_COLUMNS)


def test_a_body_alone_is_enough_with_the_option_topic_and_whether_it_may_be_null_shows_later() -> None:
    assert check_sink_schema(fields(body="string"), "orders") == ("body",)
    assert check_sink_schema([Field("body", "binary", False)], "orders") == ("body",)


def test_texts_with_a_collation_are_texts() -> None:
    columns = fields(body="string collate UNICODE_CI", properties="map<string collate UTF8_LCASE,string>")
    assert check_sink_schema(columns, "orders") == ("body", "properties")


def test_the_columns_that_only_the_source_has_are_answered_with_the_drop_that_helps() -> None:
    columns = fields(**{name: SPARK_TYPES[name] for name in DEFAULT_COLUMNS})
    message = refusal(columns, None)
    assert "given by the store when a message is written" in message
    drop = '.drop("queueOffset", "commitLogOffset", "bornTimestamp", "storeTimestamp", "reconsumeTimes")'
    assert drop in message
    dropped = [column for column in columns if f'"{column.name}"' not in drop]
    assert check_sink_schema(dropped, None) == ("topic", "queueId", "tags", "keys", "body")


def test_default_columns_of_a_cluster_are_answered_with_the_same_drop() -> None:
    columns = fields(**{name: SPARK_TYPES[name] for name in resolve_columns(None, has_brokers=True)})
    drop = '.drop("queueOffset", "commitLogOffset", "bornTimestamp", "storeTimestamp", "reconsumeTimes")'
    assert refusal(columns, None).endswith(f"Leave these out: {drop}.")
    kept = [column for column in columns if f'"{column.name}"' not in drop]
    assert check_sink_schema(kept, None) == ("topic", "brokerName", "queueId", "tags", "keys", "body")


@pytest.mark.parametrize("name", ["mode", "value", "error", "reconsumeCount"])
def test_a_column_that_does_not_exist_is_answered_with_those_that_do(name) -> None:
    message = refusal(fields(body="string", **{name: "int"}))
    assert f'there is no column "{name}" to write; expected' in message
    assert (
        "expected some of: body, topic, tags, keys, properties, queueId, brokerName, shardingKey, flag, delayLevel, "
        "deliverTimestamp." in message
    )
    assert f'.drop("{name}")' in message


@pytest.mark.parametrize(("name", "near"), [("Body", "body"), ("queueid", "queueId"), ("propertys", "properties")])
def test_a_column_that_is_nearly_one_is_answered_with_it_and_one_advice(name, near) -> None:
    message = refusal(fields(**{name: "string"}))
    assert f'Did you mean {near}? Rename it: .withColumnRenamed("{name}", "{near}").' in message
    assert ".drop(" not in message


@pytest.mark.parametrize("name", ["value", "line", "payload"])
@pytest.mark.parametrize("spark_type", ["string", "binary", "string collate UTF8_LCASE"])
def test_the_one_column_that_could_be_the_body_is_told_to_be_renamed(name, spark_type) -> None:
    message = refusal(fields(**{name: spark_type}))
    assert f'Did you mean body? Rename it: .withColumnRenamed("{name}", "body").' in message
    assert ".drop(" not in message


def test_what_kafkas_source_gives_is_renamed_and_the_rest_left_out() -> None:
    kafka = fields(key="binary", value="binary", topic="string", partition="int", offset="bigint")
    assert refusal(kafka).endswith(
        "Did you mean keys and body? Rename them, and leave out the other columns: "
        '.withColumnRenamed("key", "keys").withColumnRenamed("value", "body").drop("partition", "offset").'
    )


def test_columns_of_which_none_could_be_the_body_are_not_told_to_be_left_out() -> None:
    for columns in (fields(value="int"), fields(first="string", second="string")):
        message = refusal(columns)
        assert f"there is no column body, which every message needs. Columns are: {columns[0].name}" in message
        assert '.select(to_json(struct("*")).alias("body"))' in message
        assert ".drop(" not in message


def test_a_column_that_is_there_already_is_not_suggested() -> None:
    assert "Did you mean" not in refusal(fields(body="string", bodi="string"))


def test_a_column_twice_is_refused() -> None:
    assert 'column "body" exists twice' in refusal([*fields(body="string"), *fields(body="string")])


@pytest.mark.parametrize(
    ("name", "given", "expected", "remedy"),
    [
        ("body", "int", "string or binary", '.withColumn("body", col("body").cast("string"))'),
        ("body", "struct<a:int>", "string or binary", '.withColumn("body", to_json("body"))'),
        ("tags", "void", "string", '.withColumn("tags", col("tags").cast("string"))'),
        ("tags", "array<string>", "string", '.withColumn("tags", get("tags", 0))'),
        ("tags", "map<string,string>", "string", '.withColumn("tags", to_json("tags"))'),
        ("keys", "array<int>", "string or array<string>", '.withColumn("keys", col("keys").cast("array<string>"))'),
        ("queueId", "bigint", "int", '.withColumn("queueId", col("queueId").cast("int"))'),
        ("brokerName", "int", "string", '.withColumn("brokerName", col("brokerName").cast("string"))'),
        ("flag", "string", "int", '.cast("int")'),
        ("properties", "map<string,int>", "map<string,string>", '.cast("map<string,string>")'),
        ("properties", "string", "map<string,string>", "create_map("),
        ("topic", "binary", "string", '.cast("string")'),
        ("shardingKey", "bigint", "string", '.cast("string")'),
        ("delayLevel", "bigint", "int", '.withColumn("delayLevel", col("delayLevel").cast("int"))'),
        ("deliverTimestamp", "timestamp_ntz", "timestamp", '.cast("timestamp")'),
        ("deliverTimestamp", "bigint", "timestamp", '.cast("timestamp")'),
    ],
)
def test_a_wrong_type_is_answered_with_the_right_ones_and_a_call(name, given, expected, remedy) -> None:
    message = refusal(fields(**{"body": "string", name: given}))
    assert f"column {name} is {given}, expected {expected}." in message
    assert remedy in message


def test_a_body_is_missed_with_the_columns_that_are_there() -> None:
    message = refusal(fields(tags="string", keys="string"))
    assert "there is no column body" in message
    assert "Columns are: tags, keys." in message
    assert 'withColumnRenamed("value", "body")' in message
    assert "there is no column body" in refusal([])


def test_a_topic_is_missed_unless_a_column_or_the_option_gives_it() -> None:
    assert 'option("topic", "orders")' in refusal(fields(body="string"), None)
    check_sink_schema(fields(body="string", topic="string"), None)
