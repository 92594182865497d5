"""A batch query on a place without capabilities: planned on the driver, read in tasks, without Spark."""

import pickle
from typing import Any

import pytest
from support.dict_backend import PLACES, DictPlace
from support.place_fixtures import DictFixtures

from rmq_spark.datasource.options.read_options import ReadOptions, ReadSettings, parse_options
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.store.errors import DataLossError, OptionError, StoreChangedError
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, QueueKey
from rmq_spark.store.testing.backend_fixtures import FIRST_MS, Append, Expire, Message

MESSAGES = [
    Message(b"%d" % number, tags="even" if number % 2 == 0 else "odd", store_time_ms=FIRST_MS + number * 1000)
    for number in range(8)
]


def options_of(given: dict[str, str]) -> ReadOptions:
    return parse_options({"path": "main", **given}, FIRST_MS, lambda found: DictPlace(found["path"]))


def reader_of(given: dict[str, str]) -> RmqBatchReader:
    options = options_of(given)
    settings = ReadSettings(
        ("queueId", "queueOffset", "body"), False, MAX_DECOMPRESSED_BYTES, options.fail_on_data_loss, options.filters
    )
    return RmqBatchReader(options, settings)


def read(given: dict[str, str]) -> list[Any]:
    """Return the rows of a query, whose reader and partitions are pickled for its tasks."""
    reader = reader_of(given)
    partitions = pickle.loads(pickle.dumps(reader.partitions()))
    task = pickle.loads(pickle.dumps(reader))
    return [tuple(row.values()) for part in partitions for batch in task.read(part) for row in batch.to_pylist()]


class TestQueryOfADict(DictFixtures):
    @pytest.fixture(autouse=True)
    def _filled(self, append: Append) -> None:
        append("orders", 0, MESSAGES)
        append("orders", 2, MESSAGES[:3])

    def test_query_reads_all_queues_of_a_topic(self) -> None:
        expected = [(0, offset, b"%d" % offset) for offset in range(8)] + [(2, n, b"%d" % n) for n in range(3)]
        assert read({"subscribe": "orders"}) == expected
        assert read({"subscribePattern": "or.*", "maxRecordsPerPartition": "3"}) == expected

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({"tags": "odd"}, [1, 3, 5, 7]),
            ({"sql92": "TAGS = 'even'"}, [0, 2, 4, 6]),
            ({"startingOffsets": '{"orders": {"0": 5}}'}, [5, 6, 7]),
            ({"startingTimestamp": str(FIRST_MS + 2500), "endingTimestamp": str(FIRST_MS + 6000)}, [3, 4, 5]),
        ],
    )
    def test_query_reads_what_its_options_say(self, given: dict[str, str], expected: list[int]) -> None:
        assert [offset for _, offset, _ in read({"assign": '{"orders": [0]}', **given})] == expected

    def test_query_detects_lost_messages(self, expire: Expire) -> None:
        reader = reader_of({"subscribe": "orders"})
        partitions = reader.partitions()
        expire(QueueKey("orders", 0), 4)
        with pytest.raises(DataLossError, match=r"4 messages, queue offsets \[0, 4\)"):
            list(reader.read(partitions[0]))
        assert len(read({"subscribe": "orders"})) == 4 + 3

    def test_query_detects_another_place(self) -> None:
        reader = reader_of({"subscribe": "orders"})
        partitions = reader.partitions()
        for message in PLACES["main"][QueueKey("orders", 0)]:
            message["storeTimestamp"] += 1000
        with pytest.raises(StoreChangedError, match=r"the dict main on host .* Only the process that has the dict"):
            list(reader.read(partitions[0]))

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("maxBytesPerTrigger", "64m", "estimate the size of messages before it reads them"),
            ("keys", "a", "look messages up by key or id"),
            ("consumerGroup", "billing", "tell the committed offsets of consumer groups"),
            ("secretKey", "hidden", "be reached through a name server"),
            ("readMode", "pread", "be read or written as files of this machine"),
        ],
    )
    def test_option_that_the_place_cannot_serve_is_refused(self, name: str, value: str, reason: str) -> None:
        with pytest.raises(OptionError, match=f"^{name} is not possible here: the dict main cannot {reason}; "):
            options_of({"subscribe": "orders", name: value})
