"""Summaries of a store, a topic, a group and a message: the numbers, as text, tables and HTML."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest
from support.broken_packages import GONE, break_package

import rmq_spark
from rmq_spark.store import StoreExplorer
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, OptionError, StoreError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import BORN_MS, SampleMessage
from rmq_spark.store.testing.sample_store import build_store, build_uniform_store
from rmq_spark.store.view.message import _indented, hex_dump
from rmq_spark.store.view.summary import as_pandas
from rmq_spark.store.view.summary_text import bytes_text, count_text, span_text, time_text

EVIL = "<script>alert('&')</script>"


class Page(HTMLParser):
    """The elements of a piece of HTML, and what is open at its end."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data


def html_of(shown: object) -> Page:
    """Return what the object shows in a notebook: whole, with nothing that runs or is fetched."""
    html: str = shown._repr_html_()  # type: ignore[attr-defined]
    page = Page(html)
    assert not page.open
    assert page.seen <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td", "span", "pre", "details", "summary"}
    assert not re.search(r"<\w[^>]*(http|url\(|onclick|class=)", html)
    return page


@pytest.fixture
def demo(golden: Path) -> Iterator[StoreExplorer]:
    with rmq_spark.open_reader(golden / "demo") as reader:
        yield reader


@pytest.mark.parametrize("name", ["basic", "preblank", "truncated-stale", "batchcq-cqext", "demo", "livekill533"])
def test_a_summary_has_the_queues_and_counts_of_an_independent_decoder(golden: Path, name: str) -> None:
    expected = json.loads((golden / "expected" / f"{name}.json").read_text())
    with rmq_spark.open_reader(golden / name) as reader:
        summary = reader.summary()
    held = {
        topic.topic: {
            str(queue.queue_id): (queue.min_offset, queue.max_offset) for queue in topic.queues if queue.messages
        }
        for topic in summary.topics
        if topic.messages
    }
    assert held == {
        topic: {queue_id: (queue["min"], queue["max"]) for queue_id, queue in queues.items()}
        for topic, queues in expected["topics"].items()
    }
    rows = [row for queues in expected["topics"].values() for queue in queues.values() for row in queue.get("rows", [])]
    if rows:
        assert summary.first_ms == min(row["storeTimestamp"] for row in rows)
        assert summary.last_ms == max(row["storeTimestamp"] for row in rows)
    assert summary.messages == sum(
        queue["max"] - queue["min"] for qs in expected["topics"].values() for queue in qs.values()
    )


def test_a_store_shows_what_it_holds_and_folds_away_what_is_not_the_users(demo: StoreExplorer) -> None:
    page = html_of(demo)
    assert "1,515 in 18 queues of 1,094" in page.text
    assert "14 topics of RocketMQ's own, 22 messages" in page.text
    assert "2 topics without a message" in page.text
    assert page.text.index("orders") < page.text.index("SCHEDULE_TOPIC_XXXX")
    text = repr(demo.summary())
    assert "1,515 messages" in text
    assert "2026-11-21 05:50:31.752" in text
    assert "(closed)" in text


def test_how_the_store_was_left_is_said(golden: Path) -> None:
    with rmq_spark.open_reader(golden / "livekill533") as reader:
        assert reader.summary().state == "crashed"
        assert "its last writer died" in html_of(reader).text


def test_tables_have_a_row_for_each_topic_and_queue(demo: StoreExplorer) -> None:
    summary = demo.summary()
    topics = {row["topic"]: row for row in summary.to_arrow().to_pylist()}
    assert topics["orders"]["messages"] == 1170
    assert topics["%DLQ%audit"]["isSystem"]
    queues = demo.topic("orders").to_arrow()
    assert queues.num_rows == 4
    assert queues["messages"].to_pylist() == [289, 292, 293, 296]
    first = next(demo.read(QueueKey("orders", 0), 0, 1, ["storeTimestamp"]))["storeTimestamp"][0]
    assert queues["firstTimestamp"][0].as_py() == first.as_py()


def test_bytes_are_those_of_the_records(demo: StoreExplorer) -> None:
    queues = demo.queues("orders")
    assert demo.topic("orders").bytes == sum(
        demo.record_bytes(queue, 0, demo.bounds(queue).max_offset) for queue in queues
    )


def test_bytes_of_many_messages_are_estimated_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.store.view.explorer._ALL_ENTRIES", 1000)
    build_uniform_store(tmp_path / "store", topic="orders", queue_count=2, message_count=20_001, body_bytes=10)
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        topic = reader.topic("orders")
        exact = sum(reader.record_bytes(queue, 0, reader.bounds(queue).max_offset) for queue in reader.queues("orders"))
    assert not topic.is_exact
    assert topic.bytes == exact  # all records of this store have one size
    assert topic.messages == 20_001
    assert "about" in html_of(topic).text
    assert topic.last_ms > topic.first_ms  # type: ignore[operator]


def test_markup_from_a_store_is_text(tmp_path: Path) -> None:
    message = SampleMessage("orders", body=EVIL.encode(), keys=EVIL, properties={EVIL: EVIL})
    build_store(tmp_path / EVIL.replace("/", ""), [message])
    with rmq_spark.open_reader(tmp_path / EVIL.replace("/", "")) as reader:
        html_of(reader)
        page = html_of(reader.message(QueueKey("orders", 0), 0))
    assert page.text.count(EVIL) == 4  # key, property, its value, body


def test_a_long_table_says_what_it_leaves_out(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [SampleMessage("orders", queue_id=number) for number in range(70)])
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        assert "… and 20 queues more: to_pandas() has all" in html_of(reader.topic("orders")).text


@pytest.mark.parametrize("size", [b"\xdf\x00\x00\x00", b"\x00\x00\x00\x00", b"\x00\x04\x00\x00", b"\x7f\x00\x00\x00"])
def test_sizes_that_no_record_has_are_not_added_up(tmp_store: Callable[[str], Path], size: bytes) -> None:
    path = tmp_store("demo")
    with rmq_spark.open_reader(path) as reader:
        sound = reader.topic("orders")
    units = path / "consumequeue" / "orders" / "1" / "00000000000000000000"
    data = bytearray(units.read_bytes())
    spoilt = int.from_bytes(data[20 * 10 + 8 : 20 * 10 + 12], "big")
    data[20 * 10 + 8 : 20 * 10 + 12] = size
    units.write_bytes(data)
    with rmq_spark.open_reader(path) as reader:
        topic = reader.topic("orders")
    assert topic.bytes == sound.bytes - spoilt
    assert not topic.is_exact
    assert topic.problems == {
        1: "damaged, see rmq_spark.check: 1 consume-queue entry with a size that no record there can have"
    }
    assert topic.messages == 1170
    assert (topic.first_ms, topic.last_ms) == (sound.first_ms, sound.last_ms)


def test_what_a_missing_segment_leaves_is_shown(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("demo")
    with rmq_spark.open_reader(path) as reader:
        sound = reader.summary()
    missing = path / "commitlog" / "00000000000000262144"
    missing.unlink()
    with rmq_spark.open_reader(path) as reader:
        summary = reader.summary()
        with pytest.raises(StoreError, match=f"{missing} is missing.*rmq_spark.check"):
            list(reader.read(QueueKey("orders", 1), 0, 292, ["body"]))
    problems = {(topic.topic, number): text for topic in summary.topics for number, text in topic.problems.items()}
    assert ("orders", 1) in problems
    assert ("%DLQ%audit", 0) not in problems
    assert all(str(missing) in text and "rmq_spark.check" in text for text in problems.values())
    assert 0 < sum(topic.bytes for topic in summary.topics) < sum(topic.bytes for topic in sound.topics)
    assert summary.last_ms == sound.last_ms


def test_a_damaged_queue_is_shown_beside_the_others(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("basic")
    damaged = next((path / "consumequeue" / "TopicR" / "0").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with rmq_spark.open_reader(path) as reader:
        queue = reader.topic("TopicR").queues[0]
        assert queue.messages == 0
        assert queue.problem is not None
        assert str(damaged.parent) in queue.problem
        assert "1 queue" in html_of(reader).text
        assert "problem" in html_of(reader.topic("TopicR")).text
        assert reader.topic("TopicA").messages > 0


def test_an_empty_store_shows_that_it_is(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store") as store:
        store.create_topic("orders", queues=2)
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        summary = reader.summary()
        assert (summary.messages, summary.first_ms) == (0, None)
        assert "nothing yet" in html_of(reader).text
        assert reader.topic("orders").to_arrow()["firstTimestamp"].null_count == 2


def test_printing_a_reader_looks_at_no_disk(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = rmq_spark.open_reader(golden / "demo")
    monkeypatch.setattr(StoreExplorer, "refresh", lambda self: pytest.fail("it looked"))
    assert str(golden / "demo") in repr(reader)
    monkeypatch.undo()
    reader.close()
    assert "closed" in repr(reader)
    assert "closed" in html_of(reader).text
    for look in (reader.summary, reader.lag):
        with pytest.raises(StoreError, match="was closed"):
            look()


def test_the_lag_of_a_group_is_that_of_group_lag(demo: StoreExplorer) -> None:
    lag = demo.lag("reporting")
    assert lag == rmq_spark.group_lag(demo.path, "reporting", now_ms=lag.at_ms)
    assert lag.messages == 270
    assert "270 messages" in html_of(lag).text
    assert "orders/0 ok, 67 messages" in repr(lag)
    everybody = demo.lag()
    assert "billing" in html_of(everybody).text
    assert everybody.at.timestamp() * 1000 == everybody.at_ms


def test_what_is_not_there_is_an_error_that_names_what_is(demo: StoreExplorer) -> None:
    with pytest.raises(NotFoundError, match="orders"):
        demo.topic("order")
    with pytest.raises(NotFoundError, match="0, 1, 2, 3"):
        demo.message(QueueKey("orders", 9), 0)
    with pytest.raises(OffsetRangeError, match="289"):
        demo.message(QueueKey("orders", 0), 289)
    for wrong in ("1", 1.0, True):
        with pytest.raises(OptionError, match="must be an integer"):
            demo.message(QueueKey("orders", 0), wrong)  # type: ignore[arg-type]


class TestMessage:
    """One message, decoded whole."""

    def test_it_has_all_that_a_row_has(self, demo: StoreExplorer) -> None:
        (queue, offset), *_ = demo.find_key("orders", "O-1000")
        message = demo.message(queue, offset)
        assert message.json()["orderId"] == "O-1000"
        assert message.properties["region"] == "eu-north"
        assert message.to_arrow().column_names == list(rmq_spark.COLUMNS)
        assert message.to_arrow()["msgId"][0].as_py() == message.message_id
        page = html_of(message)
        assert '"orderId": "O-1000"' in page.text
        assert "119 B of JSON" in page.text
        assert "region = eu-north" in repr(message)

    def test_a_retry_shows_both_topics(self, demo: StoreExplorer) -> None:
        message = demo.message(QueueKey("%RETRY%billing", 0), 0)
        assert (message.topic, message.physical_topic, message.reconsume_times) == ("payments", "%RETRY%billing", 1)
        assert "1 time" in html_of(message).text

    @pytest.mark.parametrize(
        ("body", "kind", "shown"),
        [
            (b"", "nothing", ""),
            (b"plain", "text", "plain"),
            ("é\n".encode(), "text", "é\n"),
            (b"{no json", "text", "{no json"),
            (b"[1,2]", "JSON", "[\n  1,\n  2\n]"),
            ("已付　100\u00a0元 👩\u200d💻\ufeff".encode(), "text", "已付　100\u00a0元 👩\u200d💻\ufeff"),
            (b"\x1b[31mred", "bytes", hex_dump(b"\x1b[31mred")),
            ("\x9b31mred".encode(), "bytes", hex_dump("\x9b31mred".encode())),
            (b'{"a":1.10,"a":{},"b":[],"c":1e400}', "JSON", '{\n  "a": 1.10,\n  "a": {},\n  "b": [],\n  "c": 1e400\n}'),
            (
                b'["\\u4e2d", "\\ud800", "\\u009b", "{\\""]',
                "JSON",
                '[\n  "中",\n  "\\ud800",\n  "\\u009b",\n  "{\\""\n]',
            ),
            (b"\x00\x01A", "bytes", hex_dump(b"\x00\x01A")),
            (b"\xff\xfe", "bytes", hex_dump(b"\xff\xfe")),
            (b"[" * 100_000, "text", "[" * 4000),
        ],
    )
    def test_a_body_is_shown_as_what_it_is(self, tmp_path: Path, body: bytes, kind: str, shown: str) -> None:
        build_store(tmp_path / "store", [SampleMessage("orders", body=body)], segment_bytes=1 << 18)
        with rmq_spark.open_reader(tmp_path / "store") as reader:
            message = reader.message(QueueKey("orders", 0), 0)
        found_kind, text, left = message.readable_body()
        assert (found_kind, text) == (kind, shown)
        assert left == (len(body) - 4000 if len(body) > 4000 else 0)
        html_of(message)

    def test_json_is_shown_as_python_indents_it(self, demo: StoreExplorer) -> None:
        deep = {"a": [1, {"b": [[], {}, [None, True]]}, "x, y: [z]"], "c": {"d": -0.5e-7, "é": '"\\\n'}}
        assert _indented(json.dumps(deep)) == json.dumps(deep, indent=2, ensure_ascii=False)

    def test_a_huge_body_is_not_taken_apart_to_be_shown(self, tmp_path: Path) -> None:
        body = b"[" + b"1," * 600_000 + b"1]"
        build_store(tmp_path / "store", [SampleMessage("orders", body=body)], segment_bytes=1 << 21)
        with rmq_spark.open_reader(tmp_path / "store") as reader:
            message = reader.message(QueueKey("orders", 0), 0)
        assert message.readable_body() == ("text", body[:4000].decode(), len(body) - 4000)
        assert len(html_of(message).text) < 6000

    def test_a_property_that_a_terminal_would_obey_is_written_out(self, tmp_path: Path) -> None:
        build_store(tmp_path / "store", [SampleMessage("orders", properties={"a": "\x1b[2J\nb = c"})])
        with rmq_spark.open_reader(tmp_path / "store") as reader:
            assert "a = \\x1b[2J\\nb = c" in repr(reader.message(QueueKey("orders", 0), 0))

    def test_a_time_beyond_all_dates_is_shown_as_a_number(self, tmp_path: Path) -> None:
        build_store(tmp_path / "store", [SampleMessage("orders", born_timestamp=2**53)])
        with rmq_spark.open_reader(tmp_path / "store") as reader:
            message = reader.message(QueueKey("orders", 0), 0)
        assert message.born_ms == 2**53
        assert f"{2**53} ms" in html_of(message).text


def test_a_missing_pandas_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "rmq-spark\[pandas\]"'):
        as_pandas(pa.table({"a": [1]}))


def test_an_import_that_fails_inside_pandas_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_package(monkeypatch, tmp_path, "pandas")
    with pytest.raises(ModuleNotFoundError) as caught:
        as_pandas(pa.table({"a": [1]}))
    assert str(caught.value) == GONE


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (count_text(1, "queue"), "1 queue"),
        (count_text(12345, "queue"), "12,345 queues"),
        (bytes_text(1023), "1023 B"),
        (bytes_text(1024), "1 KiB"),
        (bytes_text(1023.9 * 1024), "1 MiB"),
        (bytes_text(5e12, is_exact=False), "about 4.55 TiB"),
        (time_text(BORN_MS), "2023-11-14 22:13:20.123"),
        (time_text(None), "-"),
        (time_text(2**62), f"{2**62} ms"),
        (span_text(0), "0 s"),
        (span_text(0.0404), "40.4 ms"),
        (span_text(59), "59 s"),
        (span_text(3661), "1 h 1 min"),
        (span_text(200_000), "2 d 7 h"),
        (span_text(-2), "-2 s"),
    ],
)
def test_numbers_are_written_with_their_unit(found: str, expected: str) -> None:
    assert found == expected


def test_a_hex_dump_has_positions_bytes_and_text() -> None:
    lines = hex_dump(bytes(range(60, 80)), first=16).split("\n")
    assert lines[0] == "00000010  3c 3d 3e 3f 40 41 42 43 44 45 46 47 48 49 4a 4b  <=>?@ABCDEFGHIJK"
    assert lines[1] == f"00000020  {'4c 4d 4e 4f':<47}  LMNO"


def test_the_first_message_of_a_queue_may_be_its_last(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store", queues=1) as store:
        store.send("orders", "the only one")
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        topic = reader.topic("orders")
    assert topic.first_ms == topic.last_ms is not None
