"""`rmq dlq list` and `rmq dlq republish`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark

Rmq = Callable[..., Any]


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A store in which the group billing has given up six messages."""
    path = tmp_path / "store"
    with rmq_spark.open_store(path, segment_bytes=1 << 20) as store:
        store.create_topic("orders", 1)
        for number in range(6):
            store.send("orders", f"body {number}", tags="ab"[number % 2], keys=f"k{number} all")
    with rmq_spark.open_consumer(path, "billing") as consumer:
        found = consumer.pull(consumer.queues("orders")[0], 0).messages
    with rmq_spark.open_store(path) as store:
        store.send_back(found, "billing", delay_level=-1)
    return path


def test_groups_with_dead_letters_are_listed(rmq: Rmq, failed: Path) -> None:
    (row,) = rmq("dlq", "list", failed, "--json").rows
    assert (row["group"], row["topic"], row["messages"]) == ("billing", "%DLQ%billing", 6)
    assert row["lastTimestamp"] >= row["firstTimestamp"]
    assert rmq("dlq", "list", failed).out.splitlines()[1].split()[:2] == ["billing", "6"]


def test_the_dead_letters_of_a_group_are_listed_the_newest_last(rmq: Rmq, failed: Path) -> None:
    rows = rmq("dlq", "list", failed, "billing", "--json").rows
    assert [row["body"] for row in rows] == [f"body {number}" for number in range(6)]
    assert {(row["topic"], row["physicalTopic"], row["queueId"]) for row in rows} == {("orders", "%DLQ%billing", 0)}
    ran = rmq("dlq", "list", failed, "billing", "--limit", 2)
    assert [line.split()[:2] for line in ran.out.splitlines()[1:]] == [["4", "orders"], ["5", "orders"]]
    assert "the last 2 of 6" in ran.err


def test_no_dead_letter_is_no_error(rmq: Rmq, demo: Path) -> None:
    ran = rmq("dlq", "list", demo, "reporting")
    assert (ran.status, ran.out, ran.err) == (0, "", "reporting has no dead letters.\n")


def test_a_group_that_nobody_knows_is_an_error(rmq: Rmq, demo: Path, store: Path) -> None:
    for ran in (rmq("dlq", "list", demo, "auditt"), rmq("dlq", "republish", store, "auditt")):
        assert (ran.status, ran.out) == (1, "")
        assert 'no consumer group "auditt"' in ran.err


def test_those_from_one_topic_are_sent_again(rmq: Rmq, failed: Path) -> None:
    (row,) = rmq("dlq", "republish", failed, "billing", "--topic", "payments", "--progress", "no", "--json").rows
    assert (row["sent"], row["passedOver"]) == (0, 6)
    (row,) = rmq("dlq", "republish", failed, "billing", "--topic", "orders", "--tags", "b", "--json").rows
    assert (row["sent"], row["passedOver"]) == (3, 3)


def test_what_is_chosen_is_sent_again_once(rmq: Rmq, failed: Path) -> None:
    (row,) = rmq("dlq", "republish", failed, "billing", "--tags", "a", "--json").rows
    assert row == {"group": "billing", "sent": 3, "passedOver": 3, "nextOffset": 6}
    assert "0 sent, 0 skipped" in rmq("dlq", "republish", failed, "billing").err
    ran = rmq("dlq", "republish", failed, "billing", "--key", "k3", "--progress", "k3", "--to-topic", "orders")
    assert "1 sent, 5 skipped" in ran.err
    ran = rmq("dlq", "republish", failed, "billing", "--from", "now+1h", "--progress", "later")
    assert "0 sent, 6 skipped" in ran.err
    ran = rmq("dlq", "republish", failed, "billing", "--to", "now+1h", "--key", "all", "--progress", "all")
    assert "6 sent" in ran.err
    bodies = [row["body"] for row in rmq("cat", failed, "orders", "--offset", 6, "--json").rows]
    assert bodies == ["body 0", "body 2", "body 4", "body 3", *(f"body {number}" for number in range(6))]


def test_a_group_is_needed(rmq: Rmq, failed: Path) -> None:
    assert rmq("dlq", "republish", failed).status == 2
    assert rmq("dlq", "list").status == 2
    assert len(rmq("dlq", "list", failed, "billing", "-n", 2, "--json").rows) == 2
    assert len(rmq("dlq", "list", failed, "billing", "-n3", "--json").rows) == 3
    assert rmq("dlq").status == 2
    assert rmq("dlq", "republish", failed / "none", "billing").status == 1
