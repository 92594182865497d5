"""Words that name topics: lists with commas, and patterns of a shell."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.command import queue_views
from rmq_spark.command.messages import MessageRanges
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster

Rmq = Callable[..., Any]
SECRET = "secret-key-of-tests"


@pytest.mark.parametrize("command", ["count", "cat", "queues", "watch"])
@pytest.mark.parametrize("words", [("",), (",",), ("", ",")])
def test_words_without_a_name_are_refused(rmq: Rmq, demo: Path, command: str, words: tuple[str, ...]) -> None:
    ran = rmq(command, demo, *words)
    assert (ran.status, ran.out) == (2, "")
    assert f"TOPIC {' '.join(words)!r}: found no name; expected a topic" in ran.err
    assert rmq("export", demo, "x.parquet", "--topic", ",").status == 2
    assert rmq("get", demo, "--key", "k", "--topic", "").status == 2


def test_an_error_about_a_pattern_lists_the_first_topics_only() -> None:
    with pytest.raises(rmq_spark.NotFoundError) as caught:
        queue_views.expand_topics(["x*"], lambda: [f"topic-{number:04}" for number in range(1_020)])
    text = str(caught.value)
    assert "topic-0019 and 1,000 more." in text
    assert "topic-0020" not in text


@pytest.mark.slow
def test_options_with_topics_take_patterns_and_lists(rmq: Rmq, store: Path, tmp_path: Path) -> None:
    def exported(*topics: str) -> list[str]:
        options = [word for topic in topics for word in ("--topic", topic)]
        ran = rmq("export", store, tmp_path / "m.parquet", "--overwrite", "--json", *options)
        assert ran.status == 0, ran.err
        return sorted(ran.rows[0]["topics"])

    assert exported("[op]*") == exported("orders,payments") == exported("pay*", "orders") == ["orders", "payments"]
    key = rmq("cat", store, "orders", "--limit", 1, "--json").rows[0]["keys"].split()[0]
    found = rmq("get", store, "--key", key, "--topic", "orders", "--json").out
    assert rmq("get", store, "--key", key, "--topic", "o*,orders", "--json").out == found
    assert rmq("get", store, "--topic", "order*", "--queue", 0, "--offset", 0).status == 0
    ran = rmq("get", store, "--topic", "[op]*", "--queue", 0, "--offset", 0)
    assert (ran.status, "--offset requires one topic: found orders, payments." in ran.err) == (2, True)
    letters = rmq("dlq", "list", store, "audit", "--json").rows
    topics = sorted({row["topic"] for row in letters})
    ran = rmq("dlq", "republish", store, "audit", "--topic", f"{topics[0][:3]}*,absent", "--json")
    assert ran.rows[0]["sent"] == sum(row["topic"].startswith(topics[0][:3]) for row in letters)


def test_follow_reads_topics_that_match_later(store: Path) -> None:
    with rmq_spark.open_reader(store) as reader, rmq_spark.open_store(store, create_topic=True) as producer:
        view = queue_views.StoreView(reader)
        ranges = MessageRanges(view, lambda: queue_views.expand_topics(["order*"], reader.topics), (), {}, None)
        rounds = ranges.rounds(["topic", "body"], queue_views.Beginning(last=0), None, follow=True)
        assert sum(table.num_rows for table in next(rounds)) == 0
        producer.send("order-later", b"new")
        producer.send("other", b"new")
        found = [row for table in next(rounds) for row in table.select(["topic", "body"]).to_pylist()]
    assert found == [{"topic": "order-later", "body": b"new"}]


def test_a_pattern_reads_only_the_topics_that_match(
    run_cluster: Callable[..., RunningCluster], rmq: Rmq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics that the account may not read are named, once, if they match."""
    cluster = run_cluster(release="5.3")
    for topic in ("orders", "orders-secret", "payments"):
        cluster.create_topic(topic, queues=1)
        cluster.send(topic, "x")
    reader = Account("reader", SECRET, topics={"orders": "SUB|GET"}, groups={"*": "SUB|GET"})
    cluster.broker.accounts = AccountTable(reader)
    monkeypatch.setenv("RMQ_ACCESS_KEY", "reader")
    monkeypatch.setenv("RMQ_SECRET_KEY", SECRET)
    ran = rmq("count", "-n", cluster.address, "order?", "--json")
    assert (ran.status, ran.err, len(ran.rows)) == (0, "", 1)
    for command in ("count", "cat"):
        ran = rmq(command, "-n", cluster.address, "orders*", "--json")
        assert ran.status == 1
        assert ran.rows[0]["topic"] == "orders"
        assert ran.err.startswith("orders-secret/broker-a:0: ")
        assert ran.err.count("\n") == 1
        assert "payments" not in ran.err
    assert rmq("count", "-n", cluster.address, "pay*").status == 1


def test_a_topic_that_cannot_be_read_as_a_whole_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Reader:
        def all_queues(self, topics: Sequence[str]) -> dict[str, list[Any]]:
            if "light" in topics:
                raise rmq_spark.OptionError("it has light queues")
            return {}

        def answers(self, queues: Sequence[Any]) -> dict[Any, Any]:
            return {}

    view = queue_views.ClusterView(Reader(), 0, is_strict=False)
    assert view.readable(["orders"]) == ["orders"]
    assert not view.is_incomplete
    for _ in range(2):
        assert view.readable(["light", "orders"]) == ["orders"]
    assert capsys.readouterr().err == "light: it has light queues\n"
    assert view.is_incomplete
    with pytest.raises(rmq_spark.OptionError):
        queue_views.ClusterView(Reader(), 0, is_strict=False).readable(["light"])
