"""A batch query's plan and rows, in this process, on stores made to measure."""

import logging
import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from support.parsed_options import parse_options

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark import key_selection as selection
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.datasource.spark.key_selection import join_ranges
from rmq_spark.store import SearchAnswer, StoreReader
from rmq_spark.store.errors import (
    DataLossError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    StoreChangedError,
    StorePathError,
)
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

FIRST_MS = 1_600_000_000_000


@pytest.fixture
def store(tmp_path):
    """Topic orders: queue 0 has the offsets 0 to 9 stored every ms, queue 1 has 4 to 5, queue 2 none."""
    messages = [SampleMessage("orders", 0, b"x", keys=f"k{n}", store_timestamp=FIRST_MS + n) for n in range(10)]
    messages += [SampleMessage("orders", 1, b"x", store_timestamp=FIRST_MS + 100 + n) for n in range(2)]
    build_store(tmp_path / "store", messages, first_offsets={QueueKey("orders", 1): 4}, empty_topics={"orders": 3})
    return tmp_path / "store"


def reader_of(path, **given):
    options = {"path": str(path), "subscribe": "orders"} | given
    if {"assign", "subscribePattern"} & given.keys():
        del options["subscribe"]
    parsed = parse_options(options, FIRST_MS + 1000)
    settings = ReadSettings(("topic", "queueId", "queueOffset"), False, 1 << 20, parsed.fail_on_data_loss)
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


def test_without_options_everything_is_read_and_small_queues_share_a_task(store) -> None:
    assert read(store) == ALL
    assert [len(partition.pieces) for partition in reader_of(store).partitions()] == [2]


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


def test_a_start_time_before_deleted_messages_is_logged(store, caplog) -> None:
    read(store, startingTimestamp=str(FIRST_MS - 1), endingTimestamp=str(FIRST_MS))
    assert caplog.text.count("startingTimestamp is earlier than the stored messages") == 1


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


def test_keys_and_ids_are_found_without_an_index_too(store) -> None:
    assert read(store, keys="nothing") == []
    assert read(store, keys="k3 k5") == [(0, 3), (0, 5)]
    (partition,) = reader_of(store, keys="k3").partitions()
    assert [(piece.begin, piece.end) for piece in partition.pieces] == [(0, 10), (4, 6)]


def test_found_messages_of_a_queue_are_one_task_however_scattered(store, monkeypatch) -> None:
    found = [QueueRange(QueueKey("orders", 0), offset, offset + 1) for offset in (7, 1, 2, 8)]
    answer = SearchAnswer(found, [QueueRange(QueueKey("orders", 0), 0, 4)])
    monkeypatch.setattr(StoreReader, "search", lambda *given: answer)
    reader = reader_of(store, keys="k3")
    partitions = reader.partitions()
    pieces = [[(piece.begin, piece.end) for piece in part.pieces] for part in partitions]
    assert pieces == [[(1, 3), (7, 9)], [(0, 1), (3, 4)]]
    assert rows_of(reader) == [(0, 1), (0, 2), (0, 7), (0, 8), (0, 3)]


def test_found_messages_near_together_are_read_with_what_is_between_but_not_beyond_a_condition(
    store, monkeypatch
) -> None:
    answer = SearchAnswer([QueueRange(QueueKey("orders", 0), offset, offset + 1) for offset in (8, 1, 3, 6)], [])
    monkeypatch.setattr(StoreReader, "search", lambda *given: answer)
    one, inside = EqualTo(("keys",), "k3"), Not(EqualTo(("queueOffset",), 5))
    assert pushed(store, one, inside) == ([(0, n) for n in (1, 2, 3, 6, 7, 8)], [one])
    assert read(store, keys="k3 k6") == [(0, 3), (0, 6)]  # between them others are compared, and so are they


def test_found_messages_far_apart_are_read_alone(store, monkeypatch) -> None:
    monkeypatch.setattr(selection, "_NEAR_MESSAGES", 0)
    found = [QueueRange(QueueKey("orders", 0), offset, offset + 1) for offset in (8, 1, 3, 6)]
    monkeypatch.setattr(StoreReader, "search", lambda *given: SearchAnswer(found, []))
    one = EqualTo(("keys",), "k3")
    assert pushed(store, one) == ([(0, n) for n in (1, 3, 6, 8)], [one])


def pushed(path, *filters, **given):
    """Return the rows that are read, and the filters that Spark is to ask again."""
    reader = reader_of(path, **given)
    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters
    left = list(reader.pushFilters(list(filters)))
    assert all(any(one is other for other in filters) for one in left)
    return rows_of(reader), left


def at(ms, us=0):
    return datetime.fromtimestamp((FIRST_MS + ms) // 1000, UTC) + timedelta(
        milliseconds=(FIRST_MS + ms) % 1000, microseconds=us
    )


def test_conditions_choose_queues_and_offsets(store) -> None:
    assert pushed(store, EqualTo(("queueId",), 1)) == ([(1, 4), (1, 5)], [])
    assert pushed(store, Not(EqualTo(("queueId",), 1)), In(("queueOffset",), (2, 3, 7, 99, None)))[0] == [
        (0, 2),
        (0, 3),
        (0, 7),
    ]
    assert pushed(store, EqualTo(("topic",), "other"))[0] == []
    nested = EqualTo(("queueId", "x"), 1)
    assert pushed(store, nested) == (ALL, [nested])
    assert pushed(store, GreaterThan(("queueOffset",), 5), startingOffsets='{"orders": {"0": 7}}') == (
        [(0, 7), (0, 8), (0, 9)],
        [],
    )


def test_conditions_on_time_cut_a_second_beyond_both_ends_and_are_asked_again(tmp_path) -> None:
    times = [0, 0, 5000, 5001, 10_000, 20_000]
    build_store(tmp_path, [SampleMessage("orders", 0, b"x", store_timestamp=FIRST_MS + ms) for ms in times])
    late, early = GreaterThan(("storeTimestamp",), at(5000)), LessThanOrEqual(("storeTimestamp",), at(9000))
    assert pushed(tmp_path, late) == ([(0, n) for n in (2, 3, 4, 5)], [late])
    assert pushed(tmp_path, early)[0] == [(0, n) for n in (0, 1, 2, 3, 4)]
    assert pushed(tmp_path, late, early)[0] == [(0, n) for n in (2, 3, 4)]
    assert pushed(tmp_path, EqualTo(("storeTimestamp",), at(5000, us=1)))[0] == []
    assert pushed(tmp_path, LessThan(("storeTimestamp",), at(-5000)))[0] == []
    assert pushed(tmp_path, GreaterThan(("storeTimestamp",), at(10**9)))[0] == []


def test_a_clock_that_was_set_back_loses_no_message(tmp_path, caplog) -> None:
    times = [*range(0, 3_600_000, 60_000), *range(1_800_000, 7_200_000, 60_000)]
    build_store(tmp_path, [SampleMessage("orders", 0, b"x", store_timestamp=FIRST_MS + ms) for ms in times])
    for minute in range(-5, 125, 7):
        wanted = [(0, n) for n, ms in enumerate(times) if minute * 60_000 <= ms <= (minute + 5) * 60_000]
        between = (
            GreaterThanOrEqual(("storeTimestamp",), at(minute * 60_000)),
            LessThanOrEqual(("storeTimestamp",), at((minute + 5) * 60_000)),
        )
        assert set(wanted) <= set(pushed(tmp_path, *between)[0]), minute
    assert "store times of queue orders/0 are not in order" in caplog.text


def test_keys_and_ids_in_conditions_are_looked_up_and_what_the_index_does_not_tell_is_read(store) -> None:
    one = EqualTo(("keys",), "k1")
    rows, left = pushed(GOLDEN / "basic", one, subscribePattern=".*")
    assert left == [one]
    assert (0, 0) in rows
    assert len(rows) < len(read(GOLDEN / "basic", subscribePattern=".*"))
    assert pushed(store, one)[0] == ALL, "it has no index"
    by_place = EqualTo(("msgId",), "7F00000100002A9F0000000000000000")
    assert pushed(GOLDEN / "basic", by_place, subscribePattern=".*")[0] == [(0, 0)]


def test_what_was_pushed_and_what_it_saves_is_in_the_log(store, caplog) -> None:
    caplog.set_level("INFO", "rmq_spark")
    pushed(store, EqualTo(("queueId",), 1), IsNotNull(("queueId",)), GreaterThan(("queueOffset",), 4))
    (record,) = (one for one in caplog.records if one.levelno == logging.INFO)
    assert record.message.startswith(
        "rmq: pushed down: queueId = 1 and queueOffset > 4. Reads 1 of 12 messages, about "
    )
    assert record.message.endswith(" bytes of the log, in 1 of 2 queues")
    caplog.clear()
    pushed(store, IsNotNull(("tags",)))
    assert not [one for one in caplog.records if one.levelno == logging.INFO], "nothing was saved"


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


def test_messages_that_were_found_twice_are_read_once() -> None:
    orders, others = QueueKey("orders", 0), QueueKey("orders", 1)
    found = [QueueRange(others, 0, 9), QueueRange(orders, 4, 5), QueueRange(orders, 3, 8), QueueRange(orders, 3, 4)]
    assert join_ranges(found) == [QueueRange(orders, 3, 8), QueueRange(others, 0, 9)], (
        "offsets within a batch are part of its range"
    )
