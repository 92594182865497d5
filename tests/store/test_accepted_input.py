"""Input that send, create_topic and import_parquet accept can be read back; anything else is refused untouched."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rmq_spark
from rmq_spark import DamageError, OptionError
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.config_json import TopicConfig, TopicsFile, encode_topics_file
from rmq_spark.store.log.topics import MAX_QUEUES, TopicWriter
from rmq_spark.store.model import QueueKey

INVALID_UTF8 = b"\xc3("
COLUMNS_READ = ["body", "tags", "keys", "properties"]
CHARACTERS = st.characters(codec="utf-8") | st.sampled_from("\0\x01\x02\n\r\t\x1b\x7f\x85\u2028 %|/.\ud800")
TEXTS = st.text(CHARACTERS, max_size=12)
NAMES = (
    TEXTS
    | st.sampled_from(["orders", "%LMQ%x", "%LMQ%", "%RETRY%g", "%DLQ%g", "TBW102", "SCHEDULE_TOPIC_XXXX", ".", "a|b"])
    | st.integers(120, 260).map(lambda size: "t" * size)
    | st.integers(120, 256).map(lambda size: "%RETRY%".ljust(size, "g"))
)
WHOLE = st.integers(-(2**63), 2**63) | st.integers(-3, 20) | st.sampled_from([2**31 - 1, 2**31, 65_535, 65_536])
PROPERTIES = st.dictionaries(TEXTS | st.sampled_from(["TAGS", "KEYS", "DELAY", "UNIQ_KEY", "WAIT"]), TEXTS, max_size=4)


def tree(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*.json") if one.is_file()}


def bodies_of(path: Path, topic: str) -> list[bytes]:
    with rmq_spark.open_reader(path) as reader:
        return [
            body
            for queue in reader.queues(topic)
            for rows in reader.read(queue, *bounds(reader, queue), ["body"])
            for body in rows.column("body").to_pylist()
        ]


def bounds(reader: Any, queue: QueueKey) -> tuple[int, int]:
    held = reader.bounds(queue)
    return held.min_offset, held.max_offset


def assert_readable(path: Path) -> None:
    """Every queue can be listed and read, and nothing is damaged."""
    with rmq_spark.open_reader(path) as reader:
        for topic in reader.topics():
            for queue in reader.queues(topic):
                first, last = bounds(reader, queue)
                read = sum(rows.num_rows for rows in reader.read(queue, first, last, COLUMNS_READ, check_crc=True))
                assert read == last - first, queue
    report = rmq_spark.check(path)
    assert report.is_healthy, report


@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {"topic": NAMES, "body": st.binary(max_size=20) | TEXTS},
            optional={
                "tags": st.none() | TEXTS,
                "keys": st.none() | TEXTS | st.lists(TEXTS, max_size=3),
                "properties": st.none() | PROPERTIES,
                "queue_id": st.none() | WHOLE,
                "sharding_key": st.none() | TEXTS,
                "flag": WHOLE,
                "delay_level": st.none() | WHOLE,
                "deliver_at_ms": st.none() | WHOLE,
            },
        ),
        min_size=1,
        max_size=6,
    ),
    topics=st.lists(st.tuples(NAMES, WHOLE, st.integers(0, 8)), max_size=2),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_accepted_messages_and_topics_can_be_read_back(
    messages: list[dict[str, Any]],
    topics: list[tuple[str, int, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("store") / "s"
    sent: list[tuple[QueueKey, int, bytes]] = []
    with rmq_spark.open_store(path, segment_bytes=1 << 20) as store:
        for name, queues, perm in topics:
            with contextlib.suppress(OptionError):
                # Each queue of a large topic would be one look at the disk here.
                store.create_topic(name, queues if queues > MAX_QUEUES else min(queues, 50), perm=perm)
        for message in messages:
            try:
                result = store.send(**message)
            except (OptionError, rmq_spark.StorePathError):  # of a topic without permission to write
                continue
            body = message["body"]
            key = QueueKey(result.topic, result.queue_id)
            sent.append((key, result.queue_offset, body.encode() if isinstance(body, str) else body))
    with rmq_spark.open_reader(path) as reader:
        for key, offset, body in sent:
            assert key in reader.queues(key.topic)
            rows = [rows for rows in reader.read(key, offset, offset + 1, ["body"], check_crc=True)]
            assert [one for batch in rows for one in batch.column("body").to_pylist()] == [body]
    assert_readable(path)


COLUMNS: dict[str, st.SearchStrategy[pa.DataType]] = {
    "queueId": st.sampled_from([pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float64(), pa.string(), pa.null()]),
    "flag": st.sampled_from([pa.int32(), pa.int64(), pa.string(), pa.bool_(), pa.date32()]),
    "tags": st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.int64(), pa.list_(pa.string())]),
    "keys": st.sampled_from([pa.string(), pa.list_(pa.string()), pa.list_(pa.int64()), pa.float64()]),
    "topic": st.sampled_from([pa.string(), pa.binary(), pa.int64(), pa.list_(pa.string()), pa.null()]),
    "body": st.sampled_from([pa.binary(), pa.string(), pa.int64(), pa.list_(pa.int8()), pa.null()]),
}


def value_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_list(kind):
        return st.none() | st.lists(value_of(kind.value_type), max_size=2)
    if pa.types.is_integer(kind):
        most = 2 ** (kind.bit_width - 1) - 1
        return st.none() | st.integers(0, 3) | st.sampled_from([0, 1, most, min(most, 70_000)])
    if pa.types.is_floating(kind):
        return st.sampled_from([None, 0.0, 1.5, float("nan"), 1e300])
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_date(kind):
        return st.dates()
    if pa.types.is_null(kind):
        return st.none()
    if pa.types.is_binary(kind):
        return st.none() | st.sampled_from([b"orders", INVALID_UTF8, b""])
    return st.none() | st.sampled_from(["orders", "1", "%LMQ%x", "", "\0"])


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_imported_files_of_any_types_are_read_back_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("import")
    count = data.draw(st.integers(0, 3))
    names = ["topic", "body", *data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), max_size=3))]
    arrays = []
    for name in names:
        kind = data.draw(COLUMNS[name])
        arrays.append(pa.array(data.draw(st.lists(value_of(kind), min_size=count, max_size=count)), kind))
    pq.write_table(pa.Table.from_arrays(arrays, names=names), folder / "f.parquet")
    try:
        done = rmq_spark.import_parquet(folder / "s", folder / "f.parquet")
    except OptionError:
        if not (folder / "s" / "commitlog").is_dir():
            return
    else:
        assert done.messages == count
    assert_readable(folder / "s")


def write_messages(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table({"topic": ["orders"] * 2, "body": [b"a", b"b"], **columns}), path)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with rmq_spark.open_store(tmp_path / "s") as opened:
        opened.send("pay", "x")
    return tmp_path / "s"


@pytest.mark.parametrize("queue_id", [MAX_QUEUES, 70_000, 2**31 - 1, 2**40, -2, -(2**31)])
def test_import_parquet_refuses_a_queueId_that_no_topic_has(store: Path, tmp_path: Path, queue_id: int) -> None:
    before = tree(store)
    source = write_messages(tmp_path / "f.parquet", queueId=pa.array([0, queue_id], pa.int64()))
    with pytest.raises(OptionError, match=f"queueId.*{queue_id}"):
        rmq_spark.import_parquet(store, source)
    assert tree(store) == before
    assert_readable(store)
    assert bodies_of(store, "pay") == [b"x"]


@pytest.mark.parametrize(
    "held", ['{"queues": {"orders": 1099511627776}}', '{"queues": {"orders": "many"}}', '{"queues": 5}', "[" * 200_000]
)
def test_import_parquet_refuses_counts_in_a_file_that_no_export_wrote(store: Path, tmp_path: Path, held: str) -> None:
    from rmq_spark.store.tools.parquet_file import METADATA

    table = pa.table({"topic": ["orders"], "body": [b"a"]}).replace_schema_metadata({METADATA: held.encode()})
    pq.write_table(table, tmp_path / "f.parquet")
    with pytest.raises(OptionError, match=r"f\.parquet"):
        rmq_spark.import_parquet(store, tmp_path / "f.parquet")
    assert_readable(store)
    assert bodies_of(store, "pay") == [b"x"]


def test_import_parquet_refuses_a_column_that_is_there_twice(store: Path, tmp_path: Path) -> None:
    arrays = [pa.array(["orders"]), pa.array([b"1"]), pa.array([b"2"])]
    pq.write_table(pa.Table.from_arrays(arrays, names=["topic", "body", "body"]), tmp_path / "f.parquet")
    with pytest.raises(OptionError, match="body twice"):
        rmq_spark.import_parquet(store, tmp_path / "f.parquet")


@pytest.mark.parametrize("columns", [{"topic": [b"\xff\xfe", b"o"]}, {"queueId": ["one", "two"]}, {"tags": [[1], [2]]}])
def test_import_parquet_refuses_columns_of_other_types(store: Path, tmp_path: Path, columns: dict[str, Any]) -> None:
    before = tree(store)
    source = write_messages(tmp_path / "f.parquet", **columns)
    with pytest.raises(OptionError, match=r"f\.parquet.*topic string"):
        rmq_spark.import_parquet(store, source)
    assert tree(store) == before


@pytest.mark.parametrize(
    "act",
    [
        lambda store, path: store.send("%LMQ%x", "b"),
        lambda store, path: store.create_topic("%LMQ%x"),
        lambda store, path: store.send_many(pa.table({"topic": ["orders", "%LMQ%x"], "body": [b"1", b"2"]})),
        lambda store, path: rmq_spark.import_parquet(path, write_messages(path.parent / "f.parquet"), topic="%LMQ%x"),
    ],
)
def test_light_message_queues_cannot_be_written_to(store: Path, act: Callable[[Any, Path], object]) -> None:
    before = tree(store)
    with rmq_spark.open_store(store) as opened, pytest.raises(OptionError, match=r"%LMQ%x.*light message queue"):
        act(opened, store)
    assert tree(store) == before
    assert_readable(store)


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "\x1b[2J", "a\x7f", "\t"])
def test_property_names_with_control_characters_are_refused(store: Path, name: str) -> None:
    with rmq_spark.open_store(store) as opened:
        with pytest.raises(OptionError, match="control character"):
            opened.send("orders", "x", properties={"good": "1", name: "value"})
        opened.send("orders", "x", properties={"good": "a\nb\0\x1b"})
    assert_readable(store)


@pytest.mark.parametrize("column", ["tags", "keys", "shardingKey", "properties"])
def test_texts_that_are_not_UTF8_are_refused(store: Path, column: str) -> None:
    """Spark and parquet files keep bytes in a string column unchecked."""
    data = pa.array([b"fine", INVALID_UTF8])
    texts = pa.StringArray.from_buffers(2, *data.buffers()[1:])
    if column == "properties":
        given_column: pa.Array = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]), texts)
    else:
        given_column = texts
    table = pa.table({"topic": ["orders"] * 2, "body": [b"1", b"2"], column: given_column})
    with rmq_spark.open_store(store) as opened, pytest.raises(OptionError, match=r"row 1.*UTF-8"):
        opened.send_many(table)
    assert_readable(store)


def test_a_topic_is_never_made_with_more_queues_than_a_reader_accepts(tmp_path: Path) -> None:
    topics = TopicWriter(Disk(), str(tmp_path))
    with pytest.raises(OptionError, match="65536"):
        topics.ensure(["small", "orders"], MAX_QUEUES + 1, 0)
    assert not (tmp_path / "config").exists()


def test_a_writer_refuses_counts_of_queues_that_a_reader_refuses(store: Path) -> None:
    topics = TopicsFile({"orders": TopicConfig("orders", 2**31, 2**31)})
    (store / "config" / "topics.json").write_bytes(encode_topics_file(topics))
    (store / "consumequeue" / "bills" / "99999999999").mkdir(parents=True)
    with rmq_spark.open_store(store) as opened:
        for topic in ("orders", "bills"):
            with pytest.raises(DamageError, match="number of queues"):
                opened.send(topic, "x")
