"""Republishing dead letters: which messages, with what contents, and each once."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rmq_spark
from rmq_spark.store.delivery.dead_letters import Republished, republish_dead_letters
from rmq_spark.store.errors import BatchConflictError, NotFoundError, OptionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

GROUP = "billing"
DEAD = f"%DLQ%{GROUP}"


def dead_letter(number: int, tags: str = "A", **properties: str) -> SampleMessage:
    """Return what a broker leaves of a message of the topic orders that failed too often."""
    trail = {
        "UNIQ_KEY": f"{number:032X}",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "ORIGIN",
        "CONSUME_ERROR": "boom",
        "DELAY": "0",
        "REAL_TOPIC": f"%RETRY%{GROUP}",
        "REAL_QID": "0",
        "WAIT": "false",
        "x": "y",
    }
    return SampleMessage(
        DEAD, 0, f"{number}".encode(), tags=tags, keys="k", properties=trail | properties, reconsume_times=17
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with 6 dead letters, those of even numbers with the tag A, others with B."""
    letters = [dead_letter(number, "AB"[number % 2]) for number in range(6)]
    build_store(tmp_path / "store", letters, empty_topics={"orders": 3}, segment_bytes=1 << 16)
    return tmp_path / "store"


def republished(path: Path, topic: str = "orders") -> list[dict[str, Any]]:
    """Return what is in a topic by now, by what the bodies say."""
    found = []
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        for queue in reader.queues(topic):
            there = reader.bounds(queue)
            for batch in reader.read(queue, there.min_offset, there.max_offset, list(rmq_spark.COLUMNS)):
                found += batch.to_pylist()
    return sorted(found, key=lambda row: int(row["body"]))


def bodies(path: Path, topic: str = "orders") -> list[int]:
    return [int(row["body"]) for row in republished(path, topic)]


def test_republish_dead_letters_resets_all_that_failures_left(path: Path) -> None:
    assert republish_dead_letters(str(path), GROUP) == Republished(6, 0, 6)
    rows = republished(path)
    assert [int(row["body"]) for row in rows] == list(range(6))
    assert {row["reconsumeTimes"] for row in rows} == {0}
    assert {row["queueId"] for row in rows} == {0, 1, 2}, "spread over the topic's queues"
    assert dict(rows[3]["properties"]) == {
        "UNIQ_KEY": f"{3:032X}",
        "TAGS": "B",
        "KEYS": "k",
        "ORIGIN_MESSAGE_ID": "ORIGIN",
        "CONSUME_ERROR": "boom",
        "WAIT": "false",
        "x": "y",
        "REPUBLISHED_FROM": f"{DEAD}/0/3",
    }
    assert rows[3]["bornTimestamp"] == republished(path, DEAD)[3]["bornTimestamp"]
    assert bodies(path, DEAD) == list(range(6)), "dead letters stay where they are"


def test_republish_dead_letters_resumes_where_the_first_call_ended(path: Path) -> None:
    republish_dead_letters(str(path), GROUP)
    assert republish_dead_letters(str(path), GROUP) == Republished(0, 0, 6)
    with rmq_spark.open_store(path) as store:
        with rmq_spark.open_reader(path) as reader:
            reader.refresh()
            queue = reader.queues("orders")[0]
            (batch,) = reader.read(queue, 0, 1, list(rmq_spark.COLUMNS)[:10])
        store.send_back(pa.Table.from_batches([batch]), GROUP, -1)
    assert republish_dead_letters(str(path), GROUP) == Republished(1, 0, 7)
    assert len(bodies(path)) == 7


@pytest.mark.parametrize(
    "chosen",
    [
        pc.field("tags") == "A",
        lambda batch: pc.equal(batch.column("tags"), "A"),
        lambda batch: [tag == "A" for tag in batch.column("tags").to_pylist()],
        lambda batch: np.array([tag == "A" for tag in batch.column("tags").to_pylist()]),
    ],
    ids=["expression", "arrow", "list", "numpy"],
)
def test_republish_dead_letters_filter_skips_for_ever(path: Path, chosen: Any) -> None:
    assert republish_dead_letters(str(path), GROUP, chosen) == Republished(3, 3, 6)
    assert bodies(path) == [0, 2, 4]
    assert republish_dead_letters(str(path), GROUP) == Republished(0, 0, 6)


def test_republish_dead_letters_progress_is_kept_by_name(path: Path) -> None:
    chosen = pc.field("tags") == "A"
    assert republish_dead_letters(str(path), GROUP, chosen, progress="of A").sent == 3
    assert republish_dead_letters(str(path), GROUP, chosen, progress="of A").sent == 0
    assert republish_dead_letters(str(path), GROUP, pc.field("tags") == "B", progress="of B").sent == 3
    assert bodies(path) == list(range(6))
    for _ in range(2):
        assert republish_dead_letters(str(path), GROUP, progress=None, begin=5) == Republished(1, 0, 6)
    assert bodies(path) == [*range(6), 5, 5]


def test_republish_dead_letters_begin_and_topic(path: Path) -> None:
    with rmq_spark.open_store(path) as store:
        store.create_topic("second", 1)
    assert republish_dead_letters(str(path), GROUP, topic="second", begin=4) == Republished(2, 0, 6)
    assert bodies(path, "second") == [4, 5]
    assert republish_dead_letters(str(path), GROUP, begin=0) == Republished(6, 0, 6)


def test_republish_dead_letters_routes_by_sharding_key(tmp_path: Path) -> None:
    letters = [dead_letter(number, __SHARDINGKEY="s") for number in range(4)]
    build_store(tmp_path / "store", letters, empty_topics={"orders": 3})
    republish_dead_letters(str(tmp_path / "store"), GROUP)
    assert len({row["queueId"] for row in republished(tmp_path / "store")}) == 1


class Died(BaseException):
    """End the process here."""


@pytest.mark.parametrize(
    "where",
    [
        "rmq_spark.store.log.write_session.WriteSession.append",
        "rmq_spark.store.transaction.roll_forward.BatchRollForward.conclude",
    ],
)
def test_republish_dead_letters_sends_once_after_a_crash(
    path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(where, die)
        with pytest.raises(Died):
            republish_dead_letters(str(path), GROUP)
    assert republish_dead_letters(str(path), GROUP).next_offset == 6
    assert bodies(path) == list(range(6))


def test_republish_dead_letters_sends_once_in_concurrent_calls(path: Path) -> None:
    def meanwhile(batch: pa.RecordBatch) -> list[bool]:
        republish_dead_letters(str(path), GROUP, pc.field("tags") == "A")
        return [True] * len(batch)

    with pytest.raises(BatchConflictError):
        republish_dead_letters(str(path), GROUP, meanwhile)
    assert bodies(path) == [0, 2, 4]


def test_republish_dead_letters_refuses_bad_input(tmp_path: Path, path: Path) -> None:
    gone = tmp_path / "gone"
    build_store(gone, [dead_letter(0), dead_letter(1)])
    with pytest.raises(NotFoundError, match='came from topic "orders", which does not exist'):
        republish_dead_letters(str(gone), GROUP)
    unnamed = tmp_path / "unnamed"
    build_store(unnamed, [dead_letter(0), SampleMessage(DEAD, 0, b"1")], empty_topics={"orders": 1})
    with pytest.raises(OptionError, match=r"queue offset 1 of %DLQ%billing/0 has no property RETRY_TOPIC"):
        republish_dead_letters(str(unnamed), GROUP)
    assert republish_dead_letters(str(unnamed), GROUP, topic="orders").sent == 2
    with pytest.raises(OptionError, match="1 values of type bool for 6 dead letters"):
        republish_dead_letters(str(path), GROUP, lambda batch: [True])
    with pytest.raises(OptionError, match="neither an Arrow expression"):
        republish_dead_letters(str(path), GROUP, "tags = 'A'")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"filter: .*nothing"):
        republish_dead_letters(str(path), GROUP, pc.field("nothing") == 1)
    with pytest.raises(OptionError, match="begin=-1"):
        republish_dead_letters(str(path), GROUP, begin=-1)
    with pytest.raises(OptionError, match="progress=''"):
        republish_dead_letters(str(path), GROUP, progress="")
    with pytest.raises(OptionError, match="name of a topic"):
        republish_dead_letters(str(path), DEAD)
    assert bodies(path) == []


def test_republish_dead_letters_of_a_group_without_any(path: Path) -> None:
    assert republish_dead_letters(str(path), "other") == Republished(0, 0, 0)


def test_pull_consumer_sends_back_and_pulls_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with rmq_spark.open_store(path, message_delay_level="0s 0s 0s") as store:
        store.create_topic("orders", 1)
        store.send("orders", "x", queue_id=0)
    with rmq_spark.open_consumer(path, GROUP) as consumer:
        found = consumer.pull(QueueKey("orders", 0), 0)
        sent = consumer.send_back(found)
        assert sent["topic"].to_pylist() == [f"%RETRY%{GROUP}"]
        consumer.pull(QueueKey("orders", 0), 1)  # which delivers what is due
        again = consumer.pull(QueueKey(f"%RETRY%{GROUP}", 0), 0).messages
        assert (again["topic"].to_pylist(), again["reconsumeTimes"].to_pylist()) == (["orders"], [1])
        assert consumer.send_back(again, delay_level=-1)["topic"].to_pylist() == [DEAD]
    with rmq_spark.open_consumer(path) as nobody, pytest.raises(OptionError, match="retries need a consumer group"):
        nobody.send_back(found)
