"""RangeStatistics: the share of messages that pass a filter, estimated from sampled entries."""

from pathlib import Path

import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.filter.row_filter import only_tags
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE, BATCHES = QueueKey("orders", 0), QueueKey("batches", 0)
A = only_tags({"A"})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A queue of 3,000 messages, every 30th from 1,500 with the tag A, and one of a batch of four without it."""
    messages = [SampleMessage("orders", 0, tags="A" if n >= 1500 and n % 30 == 0 else "B") for n in range(3000)]
    items = encode_items([Item(0, b"x", b"TAGS\x01B\x02")] * 4)
    batch = SampleMessage("batches", 0, items, properties={"INNER_NUM": "4", "INNER_BASE": "0"}, message_count=4)
    folder: Path = tmp_path_factory.mktemp("surveyed") / "store"
    build_store(folder, [*messages, batch], batch_topics=["batches"])
    return str(folder)


@pytest.mark.parametrize(
    ("begin", "end", "places", "share"),
    [
        (0, 3000, 1000, 50 / 3000),
        (1500, 3000, 25, 1 / 30),
        (0, 1500, 3, 0.0),
        (2970, 3000, 4, 1 / 30),
        (1530, 1531, 1, 1),
    ],
)
def test_wanted_share_is_the_share_of_the_sampled_entries(path, begin, end, places, share) -> None:
    with open_reader(path) as store:
        assert store.wanted_share(QUEUE, begin, end, A, places) == pytest.approx(share, abs=0.005)


def test_wanted_share_reads_few_entries_evenly_and_none_twice(path, monkeypatch) -> None:
    looked_at: list[int] = []
    real = ConsumeQueue.read
    with open_reader(path) as store:
        store.wanted_share(QUEUE, 0, 3000, A, 1)
        monkeypatch.setattr(
            ConsumeQueue,
            "read",
            lambda queue, begin, end: (looked_at.extend(range(begin, end)), real(queue, begin, end))[1],
        )
        store.wanted_share(QUEUE, 100, 2900, A, 10)
    assert len(looked_at) == len(set(looked_at)) == 640
    assert (min(looked_at), max(looked_at)) == (100, 2899)
    assert all(any(at <= unit < at + 300 for unit in looked_at) for at in range(100, 2900, 300))


def test_wanted_share_is_1_if_entries_cannot_be_filtered(path) -> None:
    with open_reader(path) as store:
        assert store.wanted_share(BATCHES, 0, 4, A, 3) == 1.0
