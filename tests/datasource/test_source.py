"""The source as Spark makes it, without a JVM: when errors come, what travels, what is imported."""

import pickle
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from rmq_spark.datasource.schema import DEFAULT_COLUMNS, SPARK_TYPES
from rmq_spark.datasource.source import RmqDataSource
from rmq_spark.datasource.stream_reader import RefusedStream, RmqStreamReader
from rmq_spark.store.errors import OptionError, StorePathError

TYPES = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "binary": BinaryType(),
    "timestamp": TimestampType(),
    "map<string,string>": MapType(StringType(), StringType()),
}


def struct(*columns):
    schema = StructType()
    for name in columns:
        schema = schema.add(name, TYPES[SPARK_TYPES[name]])
    return schema


@pytest.fixture
def store(golden):
    return golden / "basic"


def source_of(path, **given):
    return RmqDataSource({"path": str(path), "subscribe": "TopicA"} | given)


def test_it_is_called_rmq_whatever_the_instance() -> None:
    assert RmqDataSource.name() == "rmq"
    assert issubclass(RmqDataSource, DataSource)


def test_options_are_refused_when_spark_makes_the_source() -> None:
    with pytest.raises(OptionError, match="unknown option"):
        source_of("/x", nonsense="1")


def test_path_and_columns_are_checked_when_spark_asks_for_the_schema(store) -> None:
    assert source_of(store).schema().startswith("topic string, queueId int, queueOffset bigint,")
    assert source_of(store, columns="body").schema() == "body binary"
    with pytest.raises(StorePathError, match="does not exist"):
        source_of("/nowhere").schema()
    with pytest.raises(OptionError, match="there is no column"):
        source_of(store, columns="nobody").schema()
    with pytest.raises(OptionError, match="exactly one of"):
        RmqDataSource({"path": str(store)}).schema()


def test_a_writer_needs_no_subscription_to_hear_that_it_cannot_write() -> None:
    source = RmqDataSource({"path": "/x"})
    for make in (source.writer, source.streamWriter):
        with pytest.raises(OptionError, match="writing is not supported by this version"):
            make(struct("body"), False)


def test_a_relative_path_is_made_absolute_where_the_source_is_made(monkeypatch, store) -> None:
    monkeypatch.chdir(store.parent)
    source = pickle.loads(cloudpickle.dumps(source_of("basic", commitLogPath="basic/commitlog")))
    monkeypatch.chdir("/")
    (partition, *_) = source.reader(struct("body")).partitions()
    assert partition.path == str(store)
    assert partition.commit_log_path == str(store / "commitlog")


def test_the_home_in_a_path_is_that_of_the_drivers_user(monkeypatch, store) -> None:
    monkeypatch.setenv("HOME", str(store.parent))
    source = source_of("~/basic", commitLogPath="~/basic/commitlog,~nobody-of-this-name/log")
    monkeypatch.setenv("HOME", "/nowhere")
    assert source._options.path == str(store)
    assert source._options.commit_log_path == (
        str(store / "commitlog"),
        str(Path("~nobody-of-this-name/log").absolute()),
    )


def test_a_wrong_stream_is_refused_at_its_first_call_not_when_it_is_made(store) -> None:
    made = source_of(store, keys="k").streamReader(struct("body"))
    assert isinstance(made, RefusedStream)
    with pytest.raises(OptionError, match="keys works in batch queries only"):
        made.initialOffset()
    wrong = StructType().add("body", StringType())
    assert isinstance(source_of(store).streamReader(wrong), RefusedStream)
    assert isinstance(source_of(store).streamReader(struct("body")), RmqStreamReader)


def test_a_wrong_batch_is_refused_when_its_reader_is_made(store) -> None:
    with pytest.raises(OptionError, match="expected binary"):
        source_of(store).reader(StructType().add("body", StringType()))
    with pytest.raises(OptionError, match="is NOT NULL"):
        source_of(store).reader(StructType().add("body", BinaryType(), nullable=False))
    with pytest.raises(OptionError, match="where a batch query ends"):
        source_of(store, startingOffsets="latest").reader(struct("body"))


@pytest.mark.parametrize(
    "columns", [DEFAULT_COLUMNS, tuple(SPARK_TYPES), tuple(reversed(SPARK_TYPES)), *((name,) for name in SPARK_TYPES)]
)
def test_batches_have_just_the_schema_that_spark_compares_with(store, columns) -> None:
    schema = struct(*columns)
    reader = source_of(store).reader(schema)
    expected = to_arrow_schema(schema, timezone="UTC")
    rows = 0
    for partition in reader.partitions():
        for batch in reader.read(partition):
            assert expected.equals(batch.schema)
            rows += batch.num_rows
    assert rows == 4
