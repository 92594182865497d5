"""Where a stream begins, and that a replay begins there again."""

import json

import pytest

from rmq_spark.datasource.plan.offsets import decode_offset, initial_offset
from rmq_spark.store import open_reader
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.model import QueueKey


def test_the_first_offset_is_constant_and_batch_0_fixes_the_start_even_if_it_is_empty(store, query_on) -> None:
    query = query_on(store.path)
    assert query.reader.initialOffset() == initial_offset() == query.reader.initialOffset()
    assert query.trigger() == []
    assert query.committed == '{"orders": {"0": 3, "1": 0}, "@": {"v": 1}}'
    assert query.trigger() is None


def test_the_offset_tells_only_of_queues_with_rows_where_they_began(store, query_on) -> None:
    query = query_on(store.path, startingOffsets='{"orders": {"0": 1}}')
    query.trigger()
    assert query.committed == '{"orders": {"0": 3, "1": 0}, "@": {"v": 1, "start": {"orders": {"0": 1}}}}'


def test_a_first_batch_that_names_the_start_of_every_queue_is_repeated_as_it_was(store, query_on) -> None:
    end = '{"orders": {"0": 3, "1": 0}, "@": {"v": 1, "start": {"orders": {"0": 1, "1": 0}}}}'
    query = query_on(store.path)
    assert query.rows(query.committed, end) == [(0, 1), (0, 2)]
    assert query_on(store.path, checkpoint=end).trigger() is None


def test_a_latest_query_that_dies_before_its_first_row_loses_nothing(store, query_on) -> None:
    query = query_on(store.path)
    query.trigger()
    store.append("orders", 0, 2)
    store.append("orders", 1, 1)
    assert query_on(store.path, checkpoint=query.committed).trigger() == [(0, 3), (0, 4), (1, 0)]


def test_a_first_batch_that_was_planned_and_not_committed_is_repeated_with_the_start_it_had(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    end = query.plan()
    store.append("orders", 0, 2)
    again = query_on(store.path, startingOffsets="latest")  # a start that has moved meanwhile
    assert again.rows(again.committed, end) == [(0, 0), (0, 1), (0, 2)]
    again.committed = end
    assert again.trigger() == [(0, 3), (0, 4)]


def test_the_start_is_resolved_once_in_a_process(store, query_on) -> None:
    query = query_on(store.path)
    first = query.plan()
    store.append("orders", 0, 2)
    second = query.plan()
    assert decode_offset(json.loads(first)).starts is None
    assert decode_offset(json.loads(second)).starts == {QueueKey("orders", 0): 3}
    assert query.rows(query.committed, second) == [(0, 3), (0, 4)]


def test_a_batch_in_the_middle_is_repeated_from_its_two_offsets_alone(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    query.trigger()
    start, end = query.committed, query.plan()
    restarted = query_on(store.path, checkpoint=start)
    assert restarted.rows(start, end) == query.rows(start, end) == [(0, 2)]


def test_messages_that_come_later_are_read_once_and_in_order(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    read = query.trigger()
    for _ in range(3):
        store.append("orders", 0, 2)
        store.append("orders", 1, 1)
        read += query.trigger()
    assert sorted(read) == [(0, n) for n in range(9)] + [(1, n) for n in range(3)]


def test_a_new_queue_and_a_new_topic_begin_at_their_earliest(grow, query_on) -> None:
    store = grow(queues=1)
    store.append("orders", 0, 2)
    query = query_on(store.path, subscribePattern="orders.*")
    assert query.trigger() == []
    store.append("orders-eu", 0, 2)
    assert query.trigger() == [(0, 0), (0, 1)]
    assert query.committed == (
        '{"orders": {"0": 2}, "orders-eu": {"0": 2}, "@": {"v": 1, "start": {"orders-eu": {"0": 0}}}}'
    )
    store.append("orders", 5, 1)  # a queue beyond the number in topics.json, as after a change by an admin
    assert query.trigger() == [(5, 0)]


def test_a_pattern_that_matches_nothing_yet_waits(store, query_on) -> None:
    query = query_on(store.path, subscribePattern="shop-.*", startingOffsets="latest")
    assert query.trigger() == []
    assert query.committed == '{"@": {"v": 1, "start": {}}}'
    assert query.trigger() is None
    store.append("shop-1", 0, 1)
    assert query.trigger() == [(0, 0)]


def test_a_topic_that_is_not_there_is_an_error_in_the_first_batch(store, query_on) -> None:
    with pytest.raises(NotFoundError, match='no topic "order"'):
        query_on(store.path, subscribe="order").trigger()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("earliest", [(0, 0), (0, 1), (0, 2), (1, 0)]),
        ("latest", []),
        ('{"orders": {"0": 1}}', [(0, 1), (0, 2)]),
        ('{"orders": {"0": -1, "1": -2}}', [(1, 0)]),
    ],
)
def test_a_stream_starts_where_it_is_told_and_at_latest_without_a_word(store, text, rows, query_on) -> None:
    store.append("orders", 1, 1)
    assert query_on(store.path, startingOffsets=text).trigger() == rows


def test_a_checkpoint_goes_before_starting_offsets(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    query.drain()
    store.append("orders", 0, 1)
    assert query_on(store.path, checkpoint=query.committed, startingOffsets="earliest").drain() == [[(0, 3)]]


def test_a_start_time_is_the_first_message_at_or_after_it(tmp_path, query_on, write_store) -> None:
    path = write_store(tmp_path / "store", 10, first_ms=1_600_000_000_000)
    assert query_on(path, startingTimestamp="1600000000007").trigger() == [(0, 7), (0, 8), (0, 9)]
    assert query_on(path, startingTimestamp="0").trigger() == [(0, n) for n in range(10)]
    late = {"startingTimestamp": "1600000000010"}
    with pytest.raises(OptionError, match=r"nothing was stored in queue orders/0 at or after 2020-09-13T12:26:40.010"):
        query_on(path, **late).trigger()
    assert query_on(path, startingOffsetsByTimestampStrategy="latest", **late).trigger() == []
    assert len(query_on(path, startingOffsetsByTimestampStrategy="earliest", **late).trigger()) == 10


def test_a_relative_start_time_counts_from_the_clock_at_load(tmp_path, query_on, write_store) -> None:
    path = write_store(tmp_path / "store", 10, first_ms=1_600_000_000_000)
    query = query_on(path, now_ms=1_600_000_000_000 + 60_005, startingTimestamp='{"orders": {"0": "-1m"}}')
    query.clock.now_ms += 10**9
    assert query.trigger() == [(0, n) for n in range(5, 10)]


DELETED = "startingTimestamp is earlier than the stored messages"


def test_a_start_time_before_the_first_message_is_logged_once_if_messages_were_deleted(grow, query_on, caplog) -> None:
    store = grow(queues=2)
    store.append("orders", 0, 30, size=300)
    store.append("orders", 1, 3)
    with open_reader(store.path) as reader:
        begin_ms = reader.proof(QueueKey("orders", 0), 0).store_time_ms
    whole = query_on(store.path, startingTimestamp=str(begin_ms - 1000))
    whole.trigger()
    assert DELETED not in caplog.text
    store.expire_segment()
    query = query_on(store.path, startingTimestamp=str(begin_ms - 1000))
    query.trigger()
    store.append("orders", 0, 1)
    query.trigger()
    (line,) = [record.getMessage() for record in caplog.records if DELETED in record.getMessage()]
    with open_reader(store.path) as reader:
        first = QueueKey("orders", 0), reader.bounds(QueueKey("orders", 0)).min_offset
        since_ms = reader.proof(*first).store_time_ms
    assert "deleted older ones in 1 of 2 queues, and those that exist were stored since" in line
    assert f"({since_ms} ms); expected messages since" in line
    assert f"({begin_ms - 1000} ms). The query reads what exists." in line


def test_a_start_time_after_the_oldest_message_of_the_log_is_not_logged(grow, query_on, caplog) -> None:
    store = grow(queues=2)
    store.append("orders", 1, 1)
    store.append("orders", 0, 30, size=300)
    store.append("orders", 1, 1)
    store.expire_segment()
    with open_reader(store.path) as reader:
        queues = [QueueKey("orders", 0), QueueKey("orders", 1)]
        first = [reader.proof(queue, reader.bounds(queue).min_offset).store_time_ms for queue in queues]
        assert reader.bounds(queues[1]).min_offset == 1
    assert first[0] < first[1]
    query_on(store.path, startingTimestamp=str(first[0] + 1)).trigger()
    assert DELETED not in caplog.text
    query_on(store.path, startingTimestamp=str(first[0] - 1)).trigger()
    assert "deleted older ones in 2 of 2 queues" in caplog.text


@pytest.mark.parametrize("assignment", ["all", "shared"])
def test_a_group_that_begins_at_a_time_before_the_first_message_logs_that_messages_were_deleted(
    grow, query_on, caplog, assignment
) -> None:
    store = grow(queues=2)
    store.append("orders", 0, 30, size=300)
    store.append("orders", 1, 3)
    with open_reader(store.path) as reader:
        begin_ms = reader.proof(QueueKey("orders", 0), 0).store_time_ms
    store.expire_segment()
    store.close()  # so that the group's offsets can be written
    group = {"consumerGroup": "billing", "groupFallback": "timestamp", "startingTimestamp": str(begin_ms - 1000)}
    group |= {"startingOffsets": "group"} if assignment == "all" else {"assignment": "shared"}
    query = query_on(store.path, **group)
    assert query.trigger()
    query.reader.stop()
    assert caplog.text.count("deleted older ones in 1 of 2 queues") == 1, caplog.text
