"""`rmq send --from-json`: what `rmq cat --json` prints becomes the same messages again."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.command import send

Rmq = Callable[..., Any]
BODIES = [
    b"text",
    b"",
    'ü \u2028 \x7f \x85 \\ "'.encode(),
    bytes(range(256)),
    b"\xff\xfe",
    b"line\nline\r\n",
    b"\x00" * 3,
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A store whose messages have all that is kept."""
    messages = {
        "body": pa.array(BODIES, pa.binary()),
        "tags": [None, "a", "b", None, "a", "ü", "c"],
        "keys": pa.array([None, ["k1", "k2"], ["k"], None, None, None, None], pa.list_(pa.string())),
        "properties": pa.array(
            [None, [("colour", "red\n=x")], [("ü", "")], None, None, None, None], pa.map_(pa.string(), pa.string())
        ),
        "queueId": pa.array([2, 0, 1, 3, 3, 3, 0], pa.int32()),
        "flag": pa.array([0, 7, 0, 0, 0, 0, 0], pa.int32()),
    }
    path = tmp_path / "source"
    with rmq_spark.open_store(path, segment_bytes=1 << 20) as store:
        store.send_many(pa.table(messages), topic="orders")
    return path


def rows(rmq: Rmq, path: Path, topic: str = "orders") -> list[dict[str, Any]]:
    kept = ("queueId", "tags", "keys", "body", "bodyBase64", "properties", "flag")
    found = rmq("cat", path, topic, "--columns", "*", "--json").rows
    for row in found:
        row["properties"] = {name: text for name, text in row["properties"].items() if name != "UNIQ_KEY"}
    return [{name: row.get(name) for name in kept} for row in found]


@pytest.mark.parametrize("follow", [False, True], ids=["list", "lines"])
def test_what_cat_prints_becomes_the_same_messages(rmq: Rmq, source: Path, tmp_path: Path, follow: bool) -> None:
    words = ("--follow", "--limit", len(BODIES)) if follow else ()
    printed = rmq("cat", source, "orders", "--columns", "*", "--json", *words).out
    target = tmp_path / "target"
    assert rmq("create", target, "orders").status == 0
    ran = rmq("send", target, "orders", "--from-json", "-", "--keep-queues", stdin=printed)
    assert (ran.status, ran.err) == (0, "")
    assert rows(rmq, target) == rows(rmq, source)
    with rmq_spark.open_reader(target) as store:
        sent: list[bytes] = []
        for queue in store.queues("orders"):
            end = store.bounds(queue).max_offset
            sent += [body.as_py() for one in store.read(queue, 0, end, ["body"]) for body in one.column("body")]
    assert sorted(sent) == sorted(BODIES)


def test_a_file_may_have_lines_of_other_programs(rmq: Rmq, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    lines = [{"body": "a", "keys": "k1 k2", "tags": None}, {"bodyBase64": "/w==", "shardingKey": "s", "delayLevel": 1}]
    file.write_text("\n".join(map(json.dumps, lines)))
    ran = rmq("send", store, "orders", "--from-json", file, "--json")
    assert (ran.status, ran.err, len(ran.rows)) == (0, "", 2)
    (first,) = rmq("get", store, "--id", ran.rows[0]["msgId"], "--json").rows
    assert (first["body"], first["keys"]) == ("a", "k1 k2")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("nonsense", 'found nonsense; expected a JSON object, such as {"body": "hello"}'),
        ("7", "found 7; expected a JSON object"),
        ('{"body": null}', "found body null; expected a text, or null and base64 in bodyBase64"),
        ("{}", "found no body; expected a text, or null and base64 in bodyBase64"),
        ('{"body": {"a": 1}}', 'found body {"a": 1}; expected a text'),
        ('{"bodyBase64": "*"}', 'found bodyBase64 "*"; expected base64'),
        ('{"body": "x", "tag": "a"}', "found the field 'tag'; expected some of body, bodyBase64, tags,"),
        ('{"body": "x", "tags": 1}', "found tags 1; expected a text"),
        ('{"body": "x", "keys": [1]}', "found keys [1]; expected a text, or a list of texts"),
        ('{"body": "x", "properties": {"a": 1}}', 'found properties {"a": 1}; expected an object whose values are'),
        ('{"body": "x", "delayLevel": true}', "found delayLevel true; expected an integer"),
        ('{"body": "x", "deliverTimestamp": "noon"}', "found deliverTimestamp \"noon\": 'noon' is not a time"),
        ('{"body": "x", "deliverTimestamp": true}', "found deliverTimestamp true; expected ms since 1970, or a time"),
        (
            '{"body": "x", "deliverTimestamp": 100000000000000000000}',
            "found deliverTimestamp 100000000000000000000; ex",
        ),
        ('{"body": "x", "deliverTimestamp": "now+999999999999d"}', 'found deliverTimestamp "now+999999999999d"; expec'),
        ('{"body": "x", "delayLevel": 19}', "found delayLevel 19; expected one of the levels 1 to 18"),
        ('{"body": "x", "delayLevel": 0}', "found delayLevel 0; expected one of the levels 1 to 18"),
        ('{"body": "\\ud800"}', 'found body "\\ud800", half of a surrogate pair; expected valid text'),
        ('{"body": "x", "tags": "\\ud800"}', 'found tags "\\ud800", half of a surrogate pair; expected valid text'),
        ('{"body": "x", "keys": ["\\udc00"]}', 'found keys ["\\udc00"], half of a surrogate pair'),
        ('{"body": "x", "properties": {"\\ud800": "a"}}', 'found properties {"\\ud800": "a"}, half of a surrogate'),
        ('{"bodyBase64": "ü"}', 'found bodyBase64 "ü"; expected base64'),
        ("[" * 100_000, "found " + "[" * 60 + "…; expected a JSON object"),
        ('{"body": ' + "[" * 100_000 + "]" * 100_000 + "}", 'found {"body": ' + "[" * 51 + "…; expected a JSON obj"),
        ('{"url": "x?name=1"}', "found no body; expected a text, or null and base64 in bodyBase64"),
        ('["x?name=1"]', 'found ["x?name=1"]; expected a JSON object'),
        ('{"body": "x", "tags": ["name=1"]}', 'found tags ["name=1"]; expected a text'),
    ],
)
def test_a_wrong_line_is_named_and_those_before_it_are_sent(
    rmq: Rmq, store: Path, tmp_path: Path, line: str, text: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"body": "1"}}\n\n{{"body": "2"}}\n{line}\n{{"body": "3"}}\n')
    ran = rmq("send", store, "clicks", "--from-json", file)
    assert ran.status == 1
    assert ran.err.startswith(f"2 messages were sent before this error:\nrmq send: cannot send {file}:4: {text}"), (
        ran.err
    )
    assert ran.err.endswith(". Correct the line, and send from it on.\n")
    assert [row["body"] for row in rmq("cat", store, "clicks", "--last", 2, "--json").rows] == ["1", "2"]
    ran = rmq("send", store, "clicks", "--from-json", "-", stdin=line)
    assert ran.err.startswith(f"Nothing was sent before this error:\nrmq send: cannot send stdin:1: {text}"), ran.err


def test_lines_are_sent_in_batches(rmq: Rmq, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    send_many = rmq_spark.store.Producer.send_many

    def count(self: Any, messages: pa.Table, **words: Any) -> pa.Table:
        calls.append(len(messages))
        return send_many(self, messages, **words)

    monkeypatch.setattr(rmq_spark.store.Producer, "send_many", count)
    text = "".join(json.dumps({"body": str(number)}) + "\n" for number in range(5_000))
    assert rmq("send", store, "orders", "--from-json", "-", stdin=text).status == 0
    assert sum(calls) == 5_000
    assert len(calls) == 1


def test_lost_properties_are_told(rmq: Rmq, source: Path, store: Path) -> None:
    printed = rmq("cat", source, "orders", "--json").out
    ran = rmq("send", store, "orders", "--from-json", "-", stdin=printed)
    assert ran.status == 0
    assert ran.err.count("The lines have no properties") == 1


@pytest.mark.parametrize("words", [("x",), ("--lines",), ("--tags", "a"), ("--delay-level", 1)])
def test_options_of_one_message_are_refused(rmq: Rmq, store: Path, words: tuple[Any, ...]) -> None:
    ran = rmq("send", store, "orders", *words, "--from-json", "-")
    assert ran.status == 2
    assert "--from-json cannot be combined" in ran.err
    assert "requires --from-json" in rmq("send", store, "orders", "x", "--keep-queues").err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"body": "x", "tags": "name=1\\u0002"}', "topic 'clicks': "),
        ('{"body": "x", "properties": {"name=": "a\\u0002"}}', "topic 'clicks': "),
        ('{"body": "x", "deliverTimestamp": "9999-01-01"}', "topic 'clicks': "),
        ('{"body": "x", "queueId": 99}', "topic 'clicks': "),
    ],
)
def test_a_line_that_the_store_refuses_is_named_and_those_before_it_are_sent(
    rmq: Rmq, store: Path, line: str, text: str
) -> None:
    lines = "".join(f'{{"body": "{number}"}}\n' for number in range(37))
    before = rmq("count", store, "clicks", "--json").rows[0]["messages"]
    ran = rmq("send", store, "clicks", "--from-json", "-", "--keep-queues", "--json", stdin=f"\n{lines}{line}\n{lines}")
    assert ran.status == 1
    assert ran.err.startswith(f"37 messages were sent before this error:\nrmq send: cannot send stdin:39: {text}"), (
        ran.err
    )
    assert ran.err.endswith(". Correct the line, and send from it on.\n")
    assert "--name" not in ran.err
    assert len(ran.rows) == 37, "the list is complete"
    assert rmq("count", store, "clicks", "--json").rows[0]["messages"] == before + 37
    bodies = [row["body"] for row in rmq("cat", store, "clicks", "--last", 37, "--json").rows]
    assert bodies == [str(number) for number in range(37)]


def test_results_are_printed_while_messages_are_sent(rmq: Rmq, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the number of messages."""
    parts = [[str(number).encode() for number in range(first, first + 10)] for first in (0, 10, 20)]
    printed: list[int] = []

    def feed(stream: Any) -> Any:
        for part in parts:
            printed.append(sys.stdout.buffer.getvalue().count(b"orders"))  # type: ignore[attr-defined]
            yield part

    monkeypatch.setattr(send, "line_parts", feed)
    ran = rmq("send", store, "orders", "--lines", "--json")
    assert printed == [0, 10, 20]
    assert (ran.status, len(ran.rows), all(row["msgId"] for row in ran.rows)) == (0, 30, True)
    ran = rmq("send", store, "orders", "--lines", "--csv")
    assert printed[3:] == [0, 10, 20]
    assert len(ran.out.splitlines()) == 31
    ran = rmq("send", store, "orders", "--lines")
    rows = [line.split() for line in ran.out.splitlines()[1:]]
    assert sum(int(row[2]) for row in rows) == 30
    assert all(int(row[4]) - int(row[3]) == int(row[2]) - 1 for row in rows)
