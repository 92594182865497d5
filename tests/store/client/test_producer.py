"""Errors of Producer for invalid arguments and after close; nothing is changed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import (
    LockTimeoutError,
    OptionError,
    RmqError,
    StoreError,
    StorePathError,
    close,
    open_reader,
    open_store,
)
from rmq_spark.store.client import producer
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey


@pytest.fixture
def store(tmp_path: Path) -> Producer:
    return open_store(str(tmp_path / "s"))


def count(store: Producer) -> int:
    return sum(held.max_offset for topic in store.topics() for held in store.bounds(topic).values())


@pytest.mark.parametrize("opening", [open_reader, open_store, close])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/a\0b", "contains the character 0"),
        ("", "'' is not a path"),
        (None, "None is not a path|open_(reader|store): neither path nor name_server was given"),
        (5, "5 is not a path"),
        (b"store", "is not a path"),
    ],
)
def test_what_is_no_path_is_an_error_of_ours(opening: Callable[[Any], object], path: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        opening(path)


def test_a_path_may_be_a_path_object_or_begin_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_store(tmp_path / "s") as store:
        store.send("T", "a")
    close("~/s")
    with open_reader("~/s") as reader:
        assert reader.topics() == ["T"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"queues": 65537}, "queues=65537 must be an integer from 1 to 65536"),
        ({"queues": True}, "queues=True must be an integer"),
        ({"segment_bytes": 1 << 31}, "segment_bytes=2147483648 must be an integer from 1024 to 2147483647"),
        ({"compress_over": -1}, "compress_over=-1 must be an integer ≥ 0"),
        ({"create_topic": "no"}, "create_topic='no' must be True or False"),
        ({"allow_network_store": 1}, "allow_network_store=1 must be True or False"),
        ({"commit_log_path": 5}, "commit_log_path=5 is not a str"),
        ({"commit_log_path": "/a\0b"}, "contains the character 0"),
        ({"flush": None}, "flush=None is none of: async, sync"),
    ],
)
def test_a_bad_argument_of_opening_is_refused(tmp_path: Path, arguments: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        open_store(str(tmp_path / "s"), **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"body": 5},
        {"body": "\ud800"},
        {"topic": 5},
        {"tags": 5},
        {"tags": "a\ud800"},
        {"keys": ["k", 5]},
        {"properties": 5},
        {"properties": {"n": 1}},
        {"sharding_key": 7},
        {"queue_id": "1"},
        {"flag": 1 << 40},
    ],
)
def test_an_argument_of_another_type_is_no_message(store: Producer, arguments: Any) -> None:
    with pytest.raises(
        OptionError, match=r"^invalid message: \w+: .* Types are: topic string, .* Nothing was appended"
    ):
        store.send(**({"topic": "T", "body": "a"} | arguments))
    assert store.topics() == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tags": ["a", "b"]}, "tags: found ['a', 'b']; expected text. A message has one: send one message for each."),
        ({"tags": 5}, "tags: found 5; expected text. Types are: "),
        ({"tags": b"\xff"}, "with type bytes: was not a utf8 string. Types are: "),
        ({"keys": {"a"}}, "keys: found {'a'}; expected text or a list of texts. Types are: "),
        ({"body": {"n": 1}}, "body: found {'n': 1}; expected bytes or text. Make text of it: json.dumps(…)."),
        ({"body": list(range(99))}, "21, 2…; expected bytes or text."),
        ({"body": bytearray(b"x"), "flag": 1 << 40}, "invalid message: flag: "),
        ({"tag": "a"}, "Producer.send: unknown argument tag. Did you mean tags?"),
    ],
)
def test_a_wrong_argument_is_shown_with_what_helps(store: Producer, arguments: Any, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        store.send(**({"topic": "T", "body": "a"} | arguments))
    assert text in str(caught.value)
    assert store.topics() == []


def test_keys_may_be_a_list(store: Producer) -> None:
    sent = store.send("T", "a", keys=["k", "l"])
    with open_reader(store.path) as reader:
        assert reader.find_key("T", "l") == [(QueueKey("T", sent.queue_id), sent.queue_offset)]


@pytest.mark.parametrize("keys", [["k", "", None, "l m"], ("k", "l m"), [None], []])
def test_a_list_of_keys_is_joined_as_the_same_list_in_a_table_is(store: Producer, keys: Any) -> None:
    store.send("T", "a", keys=keys, queue_id=0)
    table = pa.table({"body": ["a"], "keys": pa.array([keys], pa.list_(pa.string())), "queueId": pa.array([0])})
    store.send_many(table, topic="T")
    with open_reader(store.path) as reader:
        (batch,) = reader.read(QueueKey("T", 0), 0, 2, ["keys"])
    sent, of_table = batch.column("keys").to_pylist()
    assert sent == of_table == ("k l m" if "k" in keys else None)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"value": ["a"]}, "no such column: value"),
        ({"body": [1]}, "invalid messages: .* Types are"),
        ({"body": ["a"], "queueId": ["x"]}, "invalid messages: "),
        ({"body": ["a"], "queueId": [1 << 40]}, "invalid messages: "),
    ],
)
def test_a_table_of_other_columns_holds_no_messages(store: Producer, columns: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        store.send_many(pa.table(columns), topic="T")
    assert store.topics() == []


def test_a_column_that_is_there_twice_is_named(store: Producer) -> None:
    with pytest.raises(OptionError, match="duplicate columns: body"):
        store.send_many(pa.table([pa.array(["a"]), pa.array(["b"])], names=["body", "body"]), topic="T")


def test_texts_with_long_offsets_are_taken_too(store: Producer) -> None:
    keys = pa.array([["k", "l"]], pa.large_list(pa.large_string()))
    store.send_many(pa.table({"body": pa.array(["a"], pa.large_string()), "keys": keys}), topic="T")
    assert count(store) == 1


@pytest.mark.parametrize("topic", [5, "", "a b"])
def test_a_topic_that_is_no_name_is_refused_wherever_it_is_given(store: Producer, topic: Any) -> None:
    for call in (
        lambda: store.send_many(pa.table({"body": ["a"]}), topic=topic),
        lambda: store.create_topic(topic),
        lambda: store.bounds(topic),
    ):
        with pytest.raises(OptionError, match="topic"):
            call()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("T", 0), "queues=0 must be an integer from 1 to 65536"),
        (("T", "4"), "queues='4' must be an integer"),
        (("T", 65537), "queues=65537"),
        (("SCHEDULE_TOPIC_XXXX",), "an internal topic of RocketMQ"),
    ],
)
def test_a_topic_that_no_broker_would_make_is_not_made(store: Producer, arguments: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        store.create_topic(*arguments)
    assert store.topics() == []


@pytest.mark.parametrize("perm", [0, 1, 7, "6", True])
def test_a_perm_that_means_nothing_is_refused(store: Producer, perm: Any) -> None:
    with pytest.raises(OptionError, match=r"is none of: 6 \(read and write\)"):
        store.create_topic("T", perm=perm)


def test_rows_in_errors_count_in_their_call(store: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    store.send_many(pa.table({"body": ["a"] * 10}), topic="T")
    with pytest.raises(OptionError, match=r"^topic 'T': its body is null"):
        store.send("T", missing)
    with pytest.raises(OptionError, match=r"^row 1, topic 'T': its body is null") as caught:
        store.send_many(pa.table({"body": ["a", None]}), topic="T")
    assert not hasattr(caught.value, "__notes__")
    monkeypatch.setattr(producer, "_ROWS_AT_ONCE", 4)
    with pytest.raises(OptionError, match=r"^row 9, topic 'T': its body is null") as caught:
        store.send_many(pa.table({"body": ["a"] * 9 + [None]}), topic="T")
    assert caught.value.__notes__ == ["The first 8 rows of the call were appended. Send only the others again."]
    assert count(store) == 18


def test_a_call_that_dies_between_two_turns_says_how_many_rows_are_there(
    store: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "MAX_SESSION_BYTES", 1000)
    turns = 0

    def ensure_topics(*_: object) -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            raise StoreError("the disk fails")

    monkeypatch.setattr(Producer, "_ensure_topics", ensure_topics)
    with pytest.raises(StoreError, match="the disk fails") as caught:
        store.send_many(pa.table({"body": [b"x" * 300] * 10}), topic="T")
    assert caught.value.__notes__ == ["The first 4 rows of the call were appended. Send only the others again."]


def test_a_store_that_another_writer_keeps_is_refused_and_nothing_is_written(store: Producer, tmp_path: Path) -> None:
    store.send("T", "a")
    settings = WriterSettings(application="nightly import")
    keeper = StoreWriter(str(tmp_path / "s"), Disk(), settings, wall_clock_ms, time.sleep)
    with open_store(tmp_path / "s", lock_timeout_ms=50) as late:
        with keeper, keeper.section():
            for call in (
                lambda: late.send("T", "b"),
                lambda: late.send_many(pa.table({"body": ["b"] * 3}), topic="U"),
                lambda: late.create_topic("U"),
                lambda: late.expire(max_bytes=0),
                late.settle,
            ):
                with pytest.raises(LockTimeoutError, match="nightly import"):
                    call()
        assert (late.topics(), count(late)) == (["T"], 1)
        late.send("T", "b")
        assert count(late) == 2


@pytest.mark.parametrize("opening", [open_store, close])
def test_a_store_of_another_version_of_ours_is_refused_and_still_read(
    store: Producer, tmp_path: Path, opening: Callable[[Path], object]
) -> None:
    store.send("T", "a")
    store.close()
    (tmp_path / "s" / "rmq" / "settings.json").write_text('{"v": 99}')
    with pytest.raises(StorePathError, match=r"settings\.json is of version 99; .* Reading works with any"):
        opening(tmp_path / "s")
    with open_reader(tmp_path / "s") as reader:
        assert reader.topics() == ["T"]
    assert not (tmp_path / "s" / "abort").exists()


def test_a_closed_store_refuses_everything_and_stays_in_order(store: Producer, tmp_path: Path) -> None:
    store.send("T", "a")
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.send("T", "late"),
        lambda: store.send_many(pa.table({"body": ["late"]}), topic="T"),
        lambda: store.create_topic("late"),
        lambda: store.expire(max_bytes=0),
        lambda: store.set_retention(max_bytes=0),
        store.settle,
        store.topics,
        lambda: store.bounds("T"),
        store.__enter__,
    ]
    for call in calls:
        with pytest.raises(RmqError, match=r"was closed\. Open it again with rmq_spark\.open_store"):
            call()
    assert not (tmp_path / "s" / "abort").exists()
    with open_store(str(tmp_path / "s")) as again:
        assert (again.topics(), count(again)) == (["T"], 1)


def test_an_open_store_goes_by_the_queues_that_a_topic_has_now(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "s") as store:
        store.create_topic("orders", 1)
        store.send("orders", "x")
        path = tmp_path / "s" / "config" / "topics.json"
        path.write_text(path.read_text().replace('QueueNums":1', 'QueueNums":8'))
        assert store.send("orders", "x", queue_id=5).queue_id == 5
        assert {store.send("orders", "x").queue_id for _ in range(8)} == set(range(8))


def test_an_error_while_closing_does_not_hide_the_error_of_the_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: StoreWriter) -> None:
        raise rmq_spark.StoreError("the disk is gone")

    monkeypatch.setattr(StoreWriter, "close", fail)
    with pytest.raises(ZeroDivisionError) as error, rmq_spark.open_store(tmp_path / "s"):
        _ = 1 / 0
    assert any("the disk is gone" in note for note in error.value.__notes__)
    with pytest.raises(rmq_spark.StoreError), rmq_spark.open_store(tmp_path / "s"):
        pass
