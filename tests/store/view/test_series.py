"""Data of plots: over time, tags, delays; compared with all messages, read one by one."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rmq_spark
from rmq_spark.store import StoreExplorer, stored_delays, stored_over_time, tag_counts
from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.format.java import Host
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import BORN_MS, SampleMessage
from rmq_spark.store.testing.sample_store import build_store, build_uniform_store
from rmq_spark.store.view.message import NO_TIME, SampleSize

SERIES = "rmq_spark.store.view.series"


@pytest.fixture
def demo(golden: Path) -> Iterator[StoreExplorer]:
    with rmq_spark.open_reader(golden / "demo") as reader:
        yield reader


def rows_of(reader: StoreExplorer, topic: str) -> list[dict[str, object]]:
    """Return every message of a topic, the slow way."""
    found = []
    for queue in reader.queues(topic):
        held = reader.bounds(queue)
        for batch in reader.read(queue, held.min_offset, held.max_offset, list(rmq_spark.COLUMNS)):
            found += batch.to_pylist()
    return found


def ms(time: object) -> int:
    return round(time.timestamp() * 1000)  # type: ignore[attr-defined]


@pytest.mark.parametrize("topic", ["orders", "clicks"])
@pytest.mark.parametrize("bins", [1, 7, 1000])
def test_stored_over_time_counts_messages_by_store_time(demo: StoreExplorer, topic: str, bins: int) -> None:
    series = stored_over_time(demo, topic, "messages", bins)
    assert series is not None
    assert series.is_exact
    expected = {f"queue {queue.queue_id}": Counter[int]() for queue in demo.queues(topic)}
    for row in rows_of(demo, topic):
        expected[f"queue {row['queueId']}"][(ms(row["storeTimestamp"]) - series.begin_ms) // series.step_ms] += 1
    for name, values in series.values.items():
        assert {at: int(count) for at, count in enumerate(values) if count} == dict(expected[name])
    assert len(next(iter(series.values.values()))) <= bins + 2


def test_stored_over_time_without_topics_has_a_series_for_each_user_topic(demo: StoreExplorer) -> None:
    series = stored_over_time(demo, None, "messages", 60)
    assert series is not None
    assert {name: values.sum() for name, values in series.values.items()} == {
        "clicks": 16,
        "invoices": 8,
        "orders": 1170,
        "payments": 299,
    }


def test_stored_over_time_bytes_add_up_to_the_records(demo: StoreExplorer) -> None:
    series = stored_over_time(demo, ["orders", "clicks"], "bytes", 60)
    assert series is not None
    assert round(series.values["orders"].sum()) == demo.topic("orders").bytes
    assert round(series.values["clicks"].sum()) == demo.topic("clicks").bytes


def test_stored_over_time_of_a_sample_has_exact_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_uniform_store(tmp_path / "store", topic="orders", queue_count=2, message_count=20_000, body_bytes=10)
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        exact = stored_over_time(reader, "orders", "messages", 20)
        monkeypatch.setattr(f"{SERIES}._HEADERS", 1000)
        sampled = stored_over_time(reader, "orders", "messages", 20)
    assert exact is not None
    assert sampled is not None
    assert exact.is_exact
    assert not sampled.is_exact
    assert sampled.values.keys() == exact.values.keys()
    for name, values in sampled.values.items():
        assert values.sum() == pytest.approx(exact.values[name].sum())
        assert np.abs(values - exact.values[name]).max() < 0.02 * values.sum()


def test_stored_over_time_is_none_without_messages(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store") as store:
        store.create_topic("orders")
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        assert stored_over_time(reader, None, "messages", 60) is None
        assert stored_delays(reader, "orders") is None
        assert tag_counts(reader, "orders").messages == {}
        with pytest.raises(NotFoundError, match="orders"):
            stored_over_time(reader, "order", "messages", 60)


@pytest.mark.parametrize("topic", ["orders", "payments", "clicks", "SCHEDULE_TOPIC_XXXX"])
def test_tag_counts_equals_the_tags_of_the_messages(demo: StoreExplorer, topic: str) -> None:
    assert tag_counts(demo, topic).messages == Counter(row["tags"] for row in rows_of(demo, topic))


@pytest.mark.parametrize(
    ("store", "topic"), [("batchcq-cqext", "TopicE"), ("demo", "clicks"), ("demo", "SCHEDULE_TOPIC_XXXX")]
)
def test_tag_counts_decodes_messages_if_entries_have_no_tags_code(
    golden: Path, store: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SERIES}._NAMED_CODES", 0)  # what is counted by its code has no name then
    with rmq_spark.open_reader(golden / store) as reader:
        assert tag_counts(reader, topic).messages == Counter(row["tags"] for row in rows_of(reader, topic))


def test_tag_counts_merges_and_names_tags_of_one_hash(tmp_path: Path) -> None:
    tags = ["Aa", "BB", None, "Aa", None, "C"]
    build_store(tmp_path / "store", [SampleMessage("orders", queue_id=at % 2, tags=tag) for at, tag in enumerate(tags)])
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        assert tag_counts(reader, "orders").messages == {"Aa / BB": 3, None: 2, "C": 1}


def test_tag_counts_merges_rare_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SERIES}._NAMED_CODES", 3)
    build_store(tmp_path / "store", [SampleMessage("orders", tags=f"T{min(at, 9)}") for at in range(15)])
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        counts = tag_counts(reader, "orders")
    assert (counts.rare_tags, counts.rare_messages) == (7, 7)
    assert (sum(counts.messages.values()), counts.messages["T9"]) == (8, 6)
    assert counts.is_exact


def test_tag_counts_of_a_sample_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_uniform_store(tmp_path / "store", topic="orders", queue_count=2, message_count=20_000, body_bytes=10)
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        delays = stored_delays(reader, "orders")
        assert delays is not None
        assert delays.is_exact
        assert tag_counts(reader, "orders").is_exact
        monkeypatch.setattr(f"{SERIES}._HEADERS", 1000)
        monkeypatch.setattr(f"{SERIES}._TAG_SIZE", SampleSize(100, 10, 10))
        delays, tags = stored_delays(reader, "orders"), tag_counts(reader, "orders")
        assert delays is not None
        assert not delays.is_exact
        assert not tags.is_exact
        assert sum(tags.messages.values()) == delays.messages.sum() == 20_000


def test_stored_over_time_counts_a_repeated_topic_once(demo: StoreExplorer) -> None:
    series, delays = stored_over_time(demo, ["clicks", "clicks"], "messages", 60), stored_delays(demo, ["clicks"] * 2)
    assert series is not None
    assert delays is not None
    assert series.values["clicks"].sum() == delays.messages.sum() == 16


@pytest.mark.parametrize("topic", ["orders", "payments", "invoices"])
def test_stored_delays_equals_the_delays_of_the_messages(demo: StoreExplorer, topic: str) -> None:
    delays = stored_delays(demo, topic)
    assert delays is not None
    expected = sorted(ms(row["storeTimestamp"]) - ms(row["bornTimestamp"]) for row in rows_of(demo, topic))
    assert delays.delays_ms.tolist() == expected
    assert delays.quantile(0.5) == expected[(len(expected) - 1) // 2]
    assert delays.quantile(1) == expected[-1]
    assert delays.quantile(0) == expected[0]


def test_times_of_reads_headers_of_any_host_length_and_no_other_record(tmp_path: Path) -> None:
    hosts = [Host("10.0.0.1", 1), Host("2001:db8::1", 2)]
    messages = [
        SampleMessage(
            "orders",
            born_host=born,
            store_host=stored,
            born_timestamp=BORN_MS + at,
            store_timestamp=BORN_MS + 50 + 3 * at,
        )
        for at, (born, stored) in enumerate((born, stored) for born in hosts for stored in hosts)
    ]
    build_store(tmp_path / "store", messages)
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        reader.refresh()
        entries = reader.sample(QueueKey("orders", 0), SampleSize(100, 10, 1)).entries
        born, stored = reader.times_of(entries)
        assert born.tolist() == [BORN_MS + at for at in range(4)]
        assert stored.tolist() == [BORN_MS + 50 + 3 * at for at in range(4)]
        entries.sizes[1] -= 1
        born, stored = reader.times_of(entries)
        assert (born[1], stored[1]) == (NO_TIME, NO_TIME)
        assert born[[0, 2, 3]].tolist() == [BORN_MS, BORN_MS + 2, BORN_MS + 3]
        entries.physical_offsets[3] += 1 << 40
        assert reader.times_of(entries)[0].tolist()[3] == NO_TIME
