"""`rmq count --by`, and patterns of topics."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.command.count import count_groups
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

Rmq = Callable[..., Any]


def messages(rmq: Rmq, demo: Path, topic: str) -> list[dict[str, Any]]:
    return rmq("cat", demo, topic, "--json").rows


@pytest.mark.parametrize("by", ["tag", "key", "queue", "minute"])
def test_count_by_agrees_with_the_messages(rmq: Rmq, demo: Path, by: str) -> None:
    expected: Counter[Any] = Counter()
    for row in messages(rmq, demo, "orders"):
        values = {
            "tag": [row["tags"]],
            "key": (row["keys"] or "").split() or [None],
            "queue": [row["queueId"]],
            "minute": [row["storeTimestamp"][:16] + ":00.000Z"],
        }
        expected.update(values[by])
    rows = rmq("count", demo, "orders", "--by", by, "--json").rows
    name = "queueId" if by == "queue" else by
    assert {row[name]: row["messages"] for row in rows} == expected
    assert all(row["topic"] == "orders" for row in rows)


def test_count_by_uses_the_filters(rmq: Rmq, demo: Path) -> None:
    rows = rmq("count", demo, "orders", "--by", "queue", "--tags", "paid", "--json").rows
    paid = Counter(row["queueId"] for row in messages(rmq, demo, "orders") if row["tags"] == "paid")
    assert {row["queueId"]: row["messages"] for row in rows} == paid
    assert [row["tag"] for row in rmq("count", demo, "orders", "--by", "tag", "--tags", "paid", "--json").rows] == [
        "paid"
    ]


def test_topics_may_be_patterns_and_lists(rmq: Rmq, demo: Path) -> None:
    def names(*words: str) -> list[str]:
        return [row["topic"] for row in rmq("count", demo, *words, "--json").rows]

    assert names("o*") == ["orders"]
    assert names("orders,payments") == names("orders", "payments") == names("orders,", "pay*") == ["orders", "payments"]
    assert not any(name.startswith("%") for name in names("*"))
    assert names("%DLQ%*") == ["%DLQ%audit"]
    assert {row["topic"] for row in rmq("queues", demo, "[op]*", "--json").rows} == {"orders", "payments"}
    assert {row["topic"] for row in rmq("cat", demo, "o*,clicks", "--json").rows} == {"orders", "clicks"}
    ran = rmq("count", demo, "x*")
    assert ran.status == 1
    assert "pattern 'x*': no topic matches it; expected one of the topics: " in ran.err


def test_count_by_of_a_cluster(run_cluster: Callable[..., RunningCluster], rmq: Rmq) -> None:
    cluster = run_cluster(release="5.3", brokers=2)
    cluster.create_topic("orders", queues=1)
    for name, tags, keys in (("broker-a", "paid", "k1 k2"), ("broker-b", "paid", "k2"), ("broker-b", "sent", None)):
        cluster.send("orders", "x", broker=name, queue_id=0, tags=tags, **({"keys": keys} if keys else {}))

    def found(by: str) -> list[tuple[Any, ...]]:
        rows = rmq("count", "-n", cluster.address, "orders", "--by", by, "--json").rows
        return [tuple(row.values()) for row in rows]

    assert found("tag") == [("orders", "paid", 2), ("orders", "sent", 1)]
    assert found("key") == [("orders", "k2", 2), ("orders", "k1", 1), ("orders", None, 1)]
    assert found("queue") == [("orders", "broker-a", 0, 1), ("orders", "broker-b", 0, 2)]
    assert sum(row[-1] for row in found("minute")) == 3


def test_count_by_key_shows_the_most_frequent_ones(rmq: Rmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.command.count._MERGED_ROWS", 10)
    with rmq_spark.open_store(tmp_path / "s") as store:
        for number in range(150):
            store.send("orders", "x", keys=f"k{number:03} often")
    ran = rmq("count", tmp_path / "s", "orders", "--by", "key")
    lines = ran.out.splitlines()
    assert [line.split() for line in lines[1:3]] == [["orders", "often", "150"], ["orders", "k000", "1"]]
    assert len(lines) == 1 + 100
    assert ran.err == "orders: 51 other keys with 51 messages. --top 151 shows all.\n"
    assert len(rmq("count", tmp_path / "s", "orders", "--by", "key", "--json").rows) == 151
    assert len(rmq("count", tmp_path / "s", "orders", "--by", "key", "--csv", "--top", 3).out.splitlines()) == 4
    assert "--top requires --by" in rmq("count", tmp_path / "s", "orders", "--top", 3).err


@pytest.mark.parametrize("words", [(), ("--by", "tag"), ("--tags", "paid")])
def test_the_table_is_printed_when_the_progress_bar_is_gone(
    rmq: Rmq, demo: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    events: list[str] = []

    @contextmanager
    def progress(*given: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: None
        events.append("bar is gone")

    monkeypatch.setattr("rmq_spark.command.count.progress", progress)
    monkeypatch.setattr("rmq_spark.command.count.show", lambda *given, **named: events.append("table"))
    assert rmq("count", demo, "orders", *words).status == 0
    assert events == ["bar is gone", "table"]


def test_each_key_of_a_message_counts_once(rmq: Rmq, tmp_path: Path) -> None:
    keys = ["a b a", " a", "b ", "  ", "a  c", None]
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 20) as store:
        properties = [[] if text is None else [("KEYS", text)] for text in keys]
        bodies = pa.array([b"x"] * len(keys))
        columns = {"body": bodies, "properties": pa.array(properties, pa.map_(pa.string(), pa.string()))}
        store.send_many(pa.table(columns), topic="orders")
    rows = rmq("count", tmp_path / "store", "orders", "--by", "key", "--json").rows
    assert {row["key"]: row["messages"] for row in rows} == {"a": 3, "b": 2, "c": 1, None: 2}


def test_minutes_after_the_year_9999_are_counted() -> None:
    class View:
        def read(self, *given: Any, **filters: Any) -> Any:
            times = pa.array([0, 61_000, 4611686018427387], pa.timestamp("ms", "UTC"))
            yield pa.record_batch({"storeTimestamp": times})

    ranges = {QueueKey("orders", 0): (0, 3)}
    rows, _ = count_groups(View(), ranges, "minute", {}, lambda done, total: None)  # type: ignore[arg-type]
    assert [row["minute"] if isinstance(row["minute"], str) else row["minute"].minute for row in rows] == [
        0,
        1,
        "4611686018400000 ms",
    ]
