"""A batch query's plan and rows, in this process, on stores made to measure."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql.datasource import InputPartition

from rmq_spark.datasource.batch_reader import RmqBatchReader
from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.options import parse_options
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.store import StoreReader
from rmq_spark.store.errors import (
    DataLossError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    StoreChangedError,
    StorePathError,
)
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.units import QueueKey

FIRST_MS = 1_600_000_000_000


@pytest.fixture
def store(tmp_path):
    """Topic orders: queue 0 has the offsets 0 to 9 stored every ms, queue 1 has 4 to 5, queue 2 none."""
    messages = [SampleMessage("orders", 0, b"x", store_timestamp=FIRST_MS + n) for n in range(10)]
    messages += [SampleMessage("orders", 1, b"x", store_timestamp=FIRST_MS + 100 + n) for n in range(2)]
    build_store(tmp_path / "store", messages, first_offsets={QueueKey("orders", 1): 4}, empty_topics={"orders": 3})
    return tmp_path / "store"


def reader_of(path, **given):
    options = {"path": str(path), "subscribe": "orders"} | given
    if {"assign", "subscribePattern"} & given.keys():
        del options["subscribe"]
    parsed = parse_options(options, FIRST_MS + 1000)
    settings = ReadSettings(("topic", "queueId", "queueOffset"), False, 1 << 20, "auto", parsed.fail_on_data_loss)
    return RmqBatchReader(parsed, settings)


def rows_of(reader):
    task = pickle.loads(pickle.dumps(reader))
    rows = []
    for partition in reader.partitions():
        for batch in task.read(pickle.loads(pickle.dumps(partition))):
            rows += [(row["queueId"], row["queueOffset"]) for row in batch.to_pylist()]
    return rows


def read(path, **given):
    return rows_of(reader_of(path, **given))


ALL = [(0, n) for n in range(10)] + [(1, 4), (1, 5)]


def test_without_options_everything_is_read_with_one_task_a_queue(store) -> None:
    assert read(store) == ALL
    assert len(reader_of(store).partitions()) == 2


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"startingOffsets": '{"orders": {"0": 8}}'}, [(0, 8), (0, 9), (1, 4), (1, 5)]),
        ({"endingOffsets": '{"orders": {"0": 2}}'}, [(0, 0), (0, 1), (1, 4), (1, 5)]),
        (
            {"startingOffsets": '{"orders": {"0": 3, "1": -2}}', "endingOffsets": '{"orders": {"0": 4, "1": -1}}'},
            [(0, 3), (1, 4), (1, 5)],
        ),
        ({"startingOffsets": '{"orders": {"0": 3}}', "endingOffsets": '{"orders": {"0": 3, "1": 4}}'}, []),
        ({"assign": '{"orders": [1]}'}, [(1, 4), (1, 5)]),
        ({"assign": '{"orders": [2]}'}, []),
        ({"subscribePattern": "none"}, []),
        ({"startingTimestamp": str(FIRST_MS + 8)}, [(0, 8), (0, 9), (1, 4), (1, 5)]),
        ({"endingTimestamp": str(FIRST_MS + 2)}, [(0, 0), (0, 1)]),
        ({"endingTimestamp": str(FIRST_MS + 10**9)}, ALL),
        ({"startingTimestamp": f'{{"orders": {{"0": {FIRST_MS + 9}}}}}'}, [(0, 9), (1, 4), (1, 5)]),
        (
            {"startingTimestamp": '{"orders": {"0": "-995ms"}}', "endingTimestamp": '{"orders": "-993ms"}'},
            [(0, 5), (0, 6)],
        ),
    ],
)
def test_bounds_are_half_open_and_what_is_not_named_is_read_whole(store, given, rows) -> None:
    assert read(store, **given) == rows


def test_a_start_time_behind_the_last_message_is_decided_by_the_strategy(store) -> None:
    late = {"startingTimestamp": str(FIRST_MS + 50)}
    with pytest.raises(OptionError, match="nothing was stored in queue orders/0") as caught:
        read(store, **late)
    assert "startingOffsetsByTimestampStrategy" in str(caught.value)
    assert read(store, startingOffsetsByTimestampStrategy="latest", **late) == [(1, 4), (1, 5)]
    assert read(store, startingOffsetsByTimestampStrategy="earliest", **late) == ALL


def test_offsets_out_of_range_follow_fail_on_data_loss(store) -> None:
    cases = [
        ({"startingOffsets": '{"orders": {"1": 2}}'}, DataLossError, ALL),
        ({"startingOffsets": '{"orders": {"0": 11}}'}, OffsetRangeError, [(1, 4), (1, 5)]),
        ({"endingOffsets": '{"orders": {"0": 11}}'}, OffsetRangeError, ALL),
        ({"endingOffsets": '{"orders": {"1": 1}}'}, None, [(0, n) for n in range(10)]),
    ]
    for given, error, rows in cases:
        if error is not None:
            with pytest.raises(error):
                read(store, **given)
        assert read(store, failOnDataLoss="false", **given) == rows


def test_only_what_was_wanted_is_lost(store) -> None:
    with pytest.raises(DataLossError) as caught:
        read(store, startingOffsets='{"orders": {"1": 1}}', endingOffsets='{"orders": {"1": 3}}')
    assert (caught.value.begin, caught.value.end) == (1, 3), "queue 1 begins at 4"


def test_what_is_not_there_is_said_by_name(store) -> None:
    with pytest.raises(NotFoundError, match='no topic "order"'):
        read(store, subscribe="order")
    with pytest.raises(NotFoundError, match="orders/7"):
        read(store, startingOffsets='{"orders": {"7": 1}}')
    with pytest.raises(NotFoundError, match="no queue 9"):
        read(store, assign='{"orders": [9]}')
    with pytest.raises(StorePathError):
        read(store / "nowhere")


def test_a_big_queue_is_split_and_every_piece_has_its_proof(store) -> None:
    partitions = reader_of(store, maxRecordsPerPartition="4").partitions()
    assert [(piece.begin, piece.end) for part in partitions for piece in part.pieces] == [
        (0, 3),
        (3, 6),
        (6, 10),
        (4, 6),
    ]
    assert all(piece.first and piece.last for part in partitions for piece in part.pieces)
    assert read(store, minPartitions="6") == ALL


def test_spark_s_empty_partition_has_no_rows(store) -> None:
    assert list(reader_of(store).read(InputPartition(None))) == []


def test_the_reader_in_a_task_knows_only_how_to_read(store) -> None:
    assert len(pickle.dumps(reader_of(store))) < 500


GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def found(**given):
    return read(GOLDEN / "basic", subscribePattern=".*", **given)


def test_keys_are_found_by_the_index_within_topics_and_bounds() -> None:
    assert found(keys="k1") == found(keys="k2 k1 nothing") == [(0, 0)]
    assert found(keys="nothing") == []
    assert found(keys="k1", startingOffsets='{"TopicA": {"0": 1}}') == []
    assert read(GOLDEN / "basic", subscribe="TopicB", keys="k1") == []


def test_ids_are_found_by_producer_s_and_by_broker_s() -> None:
    assert found(msgId="7F000001ABCD18B4AAC200000000") == [(0, 0)]
    assert found(msgId="7F00000100002A9F0000000000000000") == [(0, 0)]
    assert found(msgId="7F00000100002A9F0000000000000001") == []


def test_found_messages_of_a_queue_are_one_task_however_scattered(store) -> None:
    reader = reader_of(store, keys="x")
    hits = [(QueueKey("orders", 0), offset) for offset in (7, 1, 2, 8, 9)]

    class Index:
        @staticmethod
        def find_key(topic, key):
            return hits

        @staticmethod
        def store_id():
            return None

    view = SimpleNamespace(path=str(store), commit_log_path=None, store=Index, proof=lambda queue, offset: None)
    (partition,) = reader._found_partitions(view, [QueueRange(QueueKey("orders", 0), 0, 9)])
    assert [(piece.begin, piece.end) for piece in partition.pieces] == [(1, 3), (7, 9)]
    assert [batch["queueOffset"].to_pylist() for batch in reader.read(partition)] == [[1, 2], [7, 8]]


def test_a_file_that_goes_away_while_a_batch_is_planned_is_planned_again(store, monkeypatch) -> None:
    real, calls = StoreReader.bounds, []

    def fail_once(self, queue):
        calls.append(queue)
        if len(calls) == 2:
            raise StoreChangedError("a segment is gone")
        return real(self, queue)

    monkeypatch.setattr(StoreReader, "bounds", fail_once)
    assert read(store) == ALL
    assert len(calls) > 3
