"""The source as Spark creates it, without a JVM: time of errors, pickled objects, imports."""

import pickle
import subprocess
import sys
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

from rmq_spark.datasource.options.schema import DEFAULT_COLUMNS, SPARK_TYPES
from rmq_spark.datasource.spark.refused_stream import RefusedStream
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
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


def test_options_of_a_load_are_refused_when_spark_makes_the_source() -> None:
    with pytest.raises(OptionError, match="unknown option"):
        source_of("/x", nonsense="1")


def test_options_that_may_be_a_writes_are_refused_by_whom_spark_asks_then() -> None:
    source = RmqDataSource({"path": "/x", "queuess": "8"})
    with pytest.raises(OptionError, match=r"unknown option \"queuess\"\. docs/OPTIONS\.md lists all options"):
        source.schema()
    with pytest.raises(OptionError, match=r"Did you mean queues\?"):
        source.writer(struct("body"), False)
    assert isinstance(source.streamReader(struct("body")), RefusedStream)
    with pytest.raises(OptionError, match="It is for writing"):
        RmqDataSource({"path": "/x", "queues": "8"}).reader(struct("body"))


def test_path_and_columns_are_checked_when_spark_asks_for_the_schema(store) -> None:
    assert source_of(store).schema().startswith("topic string, queueId int, queueOffset bigint,")
    assert source_of(store, columns="body").schema() == "body binary"
    with pytest.raises(StorePathError, match="does not exist"):
        source_of("/nowhere").schema()
    with pytest.raises(OptionError, match="there is no column"):
        source_of(store, columns="nobody").schema()
    with pytest.raises(OptionError, match="exactly one of"):
        RmqDataSource({"path": str(store)}).schema()


def test_a_write_is_refused_before_anything_is_made(tmp_path) -> None:
    path = str(tmp_path / "store")
    body = struct("body")
    for given, schema, overwrite, message in (
        ({"path": path}, body, False, "found neither a column topic nor the option topic"),
        ({"topic": "a"}, body, False, "path or nameServer is required"),
        ({"path": path, "topic": "a"}, struct("topic"), False, "there is no column body"),
        ({"path": path, "topic": "a"}, body, True, "no message can be overwritten"),
        ({"path": path, "topic": "a", "subscribe": "a"}, body, False, "It is for reading"),
    ):
        source = RmqDataSource(given)
        for make in (source.writer, source.streamWriter):
            with pytest.raises(OptionError, match=message):
                make(schema, overwrite)
    with pytest.raises(OptionError, match="work in batch writes only"):
        RmqDataSource({"path": path, "topic": "a", "txnAppId": "a", "txnVersion": "1"}).streamWriter(body, False)
    assert not (tmp_path / "store").exists()


def test_a_writer_finds_a_store_or_makes_one(tmp_path) -> None:
    for make in ("writer", "streamWriter"):
        source = RmqDataSource({"path": str(tmp_path / make), "topic": "a"})
        getattr(source, make)(struct("body"), False)
        getattr(source, make)(struct("body"), False)
        assert (tmp_path / make / "commitlog").is_dir()
    with pytest.raises(StorePathError, match="is not a RocketMQ store"):
        RmqDataSource({"path": str(tmp_path), "topic": "a"}).writer(struct("body"), False)


def test_a_relative_path_of_a_write_is_made_absolute_where_the_source_is_made(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    source = pickle.loads(cloudpickle.dumps(RmqDataSource({"path": "store", "topic": "a"})))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    source.writer(struct("body"), False)
    assert (tmp_path / "store" / "commitlog").is_dir()


def test_a_source_that_only_reads_loads_nothing_that_writes() -> None:
    code = (
        "import sys, rmq_spark.datasource.spark.source as made; made.RmqDataSource({'path': '/x', 'subscribe': 'a'}); "
        "print([name for name in sys.modules if name.startswith('rmq_spark.store.transaction')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


def test_paths_that_are_not_a_list_of_one_path_are_refused() -> None:
    for paths in ("x", "5", "[1]", "[" * 100_000):
        with pytest.raises(OptionError, match="paths: expected the argument of load"):
            RmqDataSource({"paths": paths, "subscribe": "TopicA"}).schema()


def test_a_relative_path_is_made_absolute_where_the_source_is_made(monkeypatch, store) -> None:
    monkeypatch.chdir(store.parent)
    source = pickle.loads(cloudpickle.dumps(source_of("basic", commitLogPath="basic/commitlog")))
    monkeypatch.chdir("/")
    (partition, *_) = source.reader(struct("body")).partitions()
    assert partition.location.path == str(store)
    assert partition.location.commit_log_path == str(store / "commitlog")


def test_the_home_in_a_path_is_that_of_the_drivers_user(monkeypatch, store) -> None:
    monkeypatch.setenv("HOME", str(store.parent))
    source = source_of("~/basic", commitLogPath="~/basic/commitlog,~nobody-of-this-name/log")
    monkeypatch.setenv("HOME", "/nowhere")
    assert source._reading.location.path == str(store)
    nobody = Path("~nobody-of-this-name/log").absolute()
    assert source._reading.location.commit_log_path == f"{store / 'commitlog'},{nobody}"


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
