"""Messages read back as sent: by a decoder that shares no code with us, and after a copy to another store."""

import base64
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmq_spark import NotFoundError, OptionError, StoreError, close, open_reader, open_store
from rmq_spark.store.model import QueueBounds

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00\x01\x02"), min_size=1, max_size=12)
VALUES = NAMES
CONTROL = [*map(chr, range(0x20)), "\x7f"]  # refused in the names of properties
PROPERTY_NAMES = st.text(st.characters(codec="utf-8", exclude_characters=CONTROL), min_size=1, max_size=12)
KEYS = st.text("abcdefgh0123456789_-/", min_size=1, max_size=20)
MESSAGE = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["orders", "payments", "T" * 127]),
        "body": st.binary(max_size=300),
        "tags": st.none() | NAMES,
        "keys": st.none() | st.lists(KEYS, min_size=1, max_size=3).map(" ".join),
        "properties": st.none() | st.dictionaries(PROPERTY_NAMES.map(lambda name: f"x-{name}"), VALUES, max_size=4),
        "queueId": st.none() | st.integers(0, 3),
        "flag": st.integers(-(2**31), 2**31 - 1),
    }
)
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("body", pa.binary()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("queueId", pa.int32()),
        ("flag", pa.int32()),
    ]
)
COPIED = ("topic", "body", "tags", "keys", "properties", "queueId", "flag")


@pytest.fixture(scope="module")
def decoder(golden: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("decode_store", golden / "decode_store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_of(messages: list[dict[str, Any]]) -> pa.Table:
    rows = [
        {**message, "properties": None if message["properties"] is None else list(message["properties"].items())}
        for message in messages
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def read_all(root: Path, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return every row, queue by queue in order, properties as dicts without what the engine owns."""
    rows = []
    with open_reader(str(root)) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                held = reader.bounds(queue)
                for batch in reader.read(queue, held.min_offset, held.max_offset, columns, check_crc=True):
                    rows += batch.to_pylist()
    for row in rows:
        row["properties"] = {name: value for name, value in row["properties"] if name != "UNIQ_KEY"}
    return rows


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(MESSAGE, min_size=1, max_size=25))
def test_an_independent_decoder_sees_what_was_sent(
    tmp_path_factory: pytest.TempPathFactory, decoder: ModuleType, messages: list[dict[str, Any]]
) -> None:
    root = tmp_path_factory.mktemp("store") / "s"
    with open_store(str(root), segment_bytes=1 << 20) as store:
        sent = store.send_many(table_of(messages)).to_pylist()
    decoded = decoder.decode_store(root)["topics"]
    for message, place in zip(messages, sent, strict=True):
        queue = decoded[message["topic"]][str(place["queueId"])]
        row = queue["rows"][place["queueOffset"] - queue["min"]]
        assert row["queueOffset"] == place["queueOffset"]
        assert row["commitLogOffset"] == place["commitLogOffset"]
        assert base64.b64decode(row["body"]) == message["body"]
        assert (row["tags"], row["keys"], row["flag"]) == (message["tags"], message["keys"], message["flag"])
        own = {name: value for name, value in row["properties"].items() if name.startswith("x-")}
        assert own == (message["properties"] or {})
        assert message["queueId"] in (None, place["queueId"])
    assert sum(len(queue["rows"]) for queues in decoded.values() for queue in queues.values()) == len(messages)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(MESSAGE, min_size=1, max_size=25))
def test_a_store_written_again_from_its_own_rows_equals_it(
    tmp_path_factory: pytest.TempPathFactory, messages: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("stores")
    with open_store(str(folder / "first"), segment_bytes=1 << 20) as store:
        store.send_many(table_of(messages))
    with open_store(str(folder / "second"), segment_bytes=1 << 20) as store, open_reader(str(folder / "first")) as one:
        one.refresh()
        for topic in one.topics():
            for queue in one.queues(topic):
                held = one.bounds(queue)
                for batch in one.read(queue, held.min_offset, held.max_offset, COPIED):
                    store.send_many(batch)
    assert read_all(folder / "second", COPIED) == read_all(folder / "first", COPIED)


def test_one_message_says_where_it_went_and_is_found_there(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "s")) as store:
        first = store.send("orders", "hello", tags="new", keys="k1 k2", sharding_key="customer-7")
        again = store.send("orders", b"again", sharding_key="customer-7")
        assert again.queue_id == first.queue_id
        assert again.queue_offset == first.queue_offset + 1
        assert store.topics() == ["orders"]
        assert store.bounds("orders")[first.queue_id] == QueueBounds(0, 2)
        with open_reader(str(tmp_path / "s")) as reader:
            place = [(queue, offset) for queue, offset in reader.find_message_id(first.message_id, ["orders"])]
            assert [(queue.queue_id, offset) for queue, offset in place] == [(first.queue_id, 0)]
            assert reader.find_key("orders", "k2") == place


def test_more_than_one_section_holds_goes_in_turns(tmp_path: Path) -> None:
    body = b"x" * 1_000_000
    with open_store(str(tmp_path / "s"), segment_bytes=1 << 25) as store:
        sent = store.send_many(pa.table({"body": [body] * 150}), topic="large")
    assert sorted(sent.column("commitLogOffset").to_pylist()) == sent.column("commitLogOffset").to_pylist()
    with open_reader(str(tmp_path / "s")) as reader:
        reader.refresh()
        assert sum(reader.bounds(queue).max_offset for queue in reader.queues("large")) == 150


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"body": [b""], "colour": ["red"]}, "no such column: colour. Columns are: topic, body"),
        ({"tags": ["a"]}, "no body"),
        ({"body": [b"a", None]}, "row 1, topic 'T': its body is null"),
        ({"body": [b"x" * (4 << 20) + b"x"]}, "4194304"),
        ({"body": [b""], "queueId": pa.array([9], pa.int32())}, "queueId 9 is not one of the 4 queues"),
    ],
)
def test_what_is_no_message_is_refused_and_nothing_is_written(tmp_path: Path, table: Any, said: str) -> None:
    store = open_store(str(tmp_path / "s"))
    with pytest.raises(OptionError, match=said.replace("(", r"\(")):
        store.send_many(pa.table(table), topic="T")
    assert not list((tmp_path / "s" / "commitlog").iterdir())


def test_a_topic_is_not_made_where_that_was_not_wanted(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"), create_topic=False)
    with pytest.raises(NotFoundError, match="createTopic=false"):
        store.send("T", b"a")
    store.create_topic("T", 2)
    assert store.send("T", b"a", queue_id=1).queue_id == 1


def test_closing_a_path_leaves_it_in_order_and_makes_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    store.send("T", b"a")
    assert (tmp_path / "s" / "abort").exists()
    close(str(tmp_path / "s"))
    assert not (tmp_path / "s" / "abort").exists()
    with pytest.raises(OptionError, match="flush"):
        open_store(str(tmp_path / "other"), flush="later")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"queues": 0}, "queues=0 must be an integer from 1 to 65536"),
        ({"queues": "4"}, "queues='4' must be an integer"),
        ({"segment_bytes": 0}, "segment_bytes=0 must be an integer from 1024 to 2147483647"),
        ({"lock_timeout_ms": "60s"}, "lock_timeout_ms='60s' must be an integer"),
        ({"compression": "gzip"}, "compression='gzip' is none of: none, zlib, lz4, zstd"),
    ],
)
def test_a_bad_argument_is_refused_before_a_folder_is_made(tmp_path: Path, arguments: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        open_store(str(tmp_path / "s"), **arguments)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("limit", ["1h", -1, 1.5])
def test_a_retention_that_is_no_number_is_refused(tmp_path: Path, limit: Any) -> None:
    with open_store(str(tmp_path / "s"), compression="none") as store:
        with pytest.raises(OptionError, match=r"max_age_ms=.* must be an integer ≥ 0. Times are ms"):
            store.set_retention(max_age_ms=limit)
        with pytest.raises(OptionError, match="max_bytes="):
            store.expire(max_bytes=limit)


def test_what_is_no_message_is_an_error_of_ours(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    wrong: Any = 5
    with pytest.raises(OptionError, match=r"Types are: topic string, body binary"):
        store.send("T", wrong)
    with pytest.raises(OptionError, match=r"Table.from_pylist"):
        store.send_many([{"body": b"a"}], topic="T")
    with pytest.raises(OptionError, match="Types are"):
        store.send_many(pa.table({"body": [b"a"], "properties": [{"a": "b"}]}), topic="T")
    store.send_many(pa.table({"body": ["text"], "keys": [["a", "b"]]}), topic="T")
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.send("T", b"late")
