"""`--csv`: the data of `--json` as CSV."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv as arrow_csv

import rmq_spark
from rmq_spark.store.testing.brokers import RunningCluster

Rmq = Callable[..., Any]
BODIES = ['a "quoted", text', "two\nlines", "", "=1+1", b"\xff\x00", "ü\x1b[1m"]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def text_of(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    with rmq_spark.open_store(path) as opened:
        for body in BODIES:
            opened.send("orders", body, tags="a,b", keys="k1 k2", properties={"p": 'x"'})
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("topics",),
        ("queues",),
        ("groups",),
        ("lag",),
        ("lag", "billing"),
        ("count", "orders"),
        ("count", "orders", "--by", "tag"),
        ("count", "orders", "--by", "minute"),
        ("dlq", "list"),
        ("dlq", "list", "audit"),
        ("get", "--key", "O-1010"),
        ("check",),
    ],
)
def test_csv_has_the_fields_and_values_of_json(rmq: Rmq, demo: Path, words: tuple[str, ...]) -> None:
    number = 2 if words[0] == "dlq" else 1
    words = (*words[:number], str(demo), *words[number:])
    ran = rmq(*words, "--csv")
    assert (ran.status, ran.err) == (0, "")
    rows = [{name: text_of(value) for name, value in row.items()} for row in rmq(*words, "--json").rows]
    found = read(ran.out)
    if words[0] not in ("groups", "lag"):  # seconds behind the present
        assert found == [{name: row.get(name, "") for name in found[0]} for row in rows]
    assert [set(row) for row in found] == [{name for one in rows for name in one}] * len(rows)
    assert "\r" not in ran.out


def test_csv_of_a_healthy_store_is_a_header(rmq: Rmq, store: Path) -> None:
    ran = rmq("check", store, "--csv")
    assert ran.status == 0
    assert re.fullmatch("severity,area,what,[^\n]+\n", ran.out)


def test_csv_of_messages_is_quoted(rmq: Rmq, store: Path) -> None:
    ran = rmq("cat", store, "orders", "--csv", "--columns", "tags,keys,body,properties")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("tags,keys,body,bodyBase64,properties\n")
    json_rows = rmq("cat", store, "orders", "--json", "--columns", "tags,keys,body,properties").rows
    for row, expected in zip(read(ran.out), json_rows, strict=True):
        assert row["body"] == (expected["body"] or "")
        assert row["bodyBase64"] == expected.get("bodyBase64", "")
        assert row["tags"] == "a,b"
        assert json.loads(row["properties"]) == expected["properties"]
    table = arrow_csv.read_csv(
        pa.BufferReader(ran.out.encode()), parse_options=arrow_csv.ParseOptions(newlines_in_values=True)
    )
    assert table.num_rows == len(BODIES)


def test_csv_of_nothing_is_a_header(rmq: Rmq, store: Path) -> None:
    ran = rmq("cat", store, "orders", "--tags", "none", "--csv", "--columns", "queueId,body")
    assert (ran.status, ran.out, ran.err) == (0, "queueId,body,bodyBase64\n", "")
    assert rmq("groups", store, "--csv").out.startswith("group,topics,queues,")


def test_csv_of_messages_is_written_to_a_file(rmq: Rmq, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.csv"
    assert rmq("cat", store, "orders", "--format", "csv", "--columns", "body", "-o", file).status == 0
    assert file.read_bytes().decode() == rmq("cat", store, "orders", "--csv", "--columns", "body").out


def test_csv_of_a_cluster_has_the_broker(run_cluster: Callable[..., RunningCluster], rmq: Rmq) -> None:
    cluster = run_cluster(release="5.3", brokers=2)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", "x", broker="broker-b", queue_id=0)
    assert rmq("count", "-n", cluster.address, "orders", "--by", "queue", "--csv").out == (
        "topic,brokerName,queueId,messages\norders,broker-b,0,1\n"
    )
    assert rmq("cat", "-n", cluster.address, "orders", "--csv", "--columns", "brokerName,body").out == (
        "brokerName,body,bodyBase64\nbroker-b,x,\n"
    )


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("topics", "--json", "--csv"), "--json and --csv"),
        (("topics", "--csv", "--json"), "--json and --csv"),
        (("cat", "orders", "--csv", "--json"), "--json and --csv"),
        (("cat", "orders", "--csv", "--format", "json"), "--csv and --format json"),
        (("cat", "orders", "--json", "--format", "csv"), "--json and --format csv"),
    ],
)
def test_two_forms_are_refused(rmq: Rmq, store: Path, words: tuple[str, ...], found: str) -> None:
    ran = rmq(words[0], store, *words[1:])
    assert (ran.status, ran.out) == (2, "")
    assert f"{found} cannot be combined. Give one of them." in ran.err


@pytest.mark.slow
def test_csv_on_a_terminal_has_no_colours_and_no_control_characters(terminal: Callable[..., Any], store: Path) -> None:
    for words in (
        ("cat", store, "orders", "--csv"),
        ("get", store, "--key", "k1", "--csv"),
        ("topics", store, "--csv"),
    ):
        started = terminal(*words)
        assert started.end() == 0
        # A progress bar moves the cursor; nothing else does.
        shown = re.sub(r"\x1b\[(\?25[lh]|2K|1A)|\r", "", started.raw)
        assert "\x1b[1m" not in shown
        assert words[0] == "topics" or r"ü\x1b[1m" in shown
