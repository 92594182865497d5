"""The stream's reader as Spark calls it, in this process and on stores that grow meanwhile."""

import json
import pickle

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from rmq_spark.datasource.offsets import decode_offset, initial_offset
from rmq_spark.datasource.options import parse_options
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.datasource.stream_reader import RefusedStream, RmqStreamReader
from rmq_spark.store import StoreReader
from rmq_spark.store.errors import (
    DataLossError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    StoreChangedError,
)
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.units import QueueKey

SETTINGS = ReadSettings(("queueId", "queueOffset", "body"), False, 64 << 20, "auto", True)
ANY_LIMIT = ReadMaxRows(1)  # what Spark passes when there is a default limit; the options say what it is


class Clock:
    def __init__(self, now_ms=1_700_000_000_000):
        self.now_ms = now_ms

    def __call__(self):
        return self.now_ms


class Query:
    """What Spark does with a stream: offsets go through JSON text, and a batch ends before the next is planned."""

    def __init__(self, path, clock=None, checkpoint=None, available_now=False, **given):
        self.clock = clock or Clock()
        options = {"path": str(path), "subscribe": "orders"} | given
        if {"assign", "subscribePattern"} & given.keys():
            del options["subscribe"]
        self.options = parse_options(options, self.clock())
        fail = self.options.fail_on_data_loss
        self.settings = ReadSettings(SETTINGS.columns, False, 64 << 20, "auto", fail)
        self.reader = RmqStreamReader(self.options, self.settings, self.clock)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self.committed = checkpoint or json.dumps(self.reader.initialOffset())
        self.limit = self.reader.getDefaultReadLimit()

    def plan(self):
        """Return the text of the next end offset, which may be that of the start."""
        return json.dumps(self.reader.latestOffset(json.loads(self.committed), self.limit))

    def rows(self, start, end):
        task = pickle.loads(pickle.dumps(self.reader))
        rows = []
        for partition in self.reader.partitions(json.loads(start), json.loads(end)):
            for batch in task.read(pickle.loads(pickle.dumps(partition))):
                rows += [(row["queueId"], row["queueOffset"]) for row in batch.to_pylist()]
        return rows

    def trigger(self):
        """Run one micro-batch if there is one; return its rows, None without one."""
        end = self.plan()
        if end == self.committed:
            return None
        rows = self.rows(self.committed, end)
        self.committed = end
        return rows

    def offset(self):
        return decode_offset(json.loads(self.committed))

    def drain(self, at_most=100):
        batches = []
        while (rows := self.trigger()) is not None:
            batches.append(rows)
            assert len(batches) < at_most, "does not come to rest"
        return batches


@pytest.fixture
def store(grow):
    store = grow(queues=2)
    store.append("orders", 0, 3)
    return store


def test_the_first_offset_is_constant_and_batch_0_fixes_the_start_even_if_it_is_empty(store) -> None:
    query = Query(store.path)
    assert query.reader.initialOffset() == initial_offset() == query.reader.initialOffset()
    assert query.trigger() == []
    assert query.committed == ('{"orders": {"0": 3, "1": 0}, "@": {"v": 1, "start": {"orders": {"0": 3, "1": 0}}}}')
    assert query.trigger() is None


def test_a_latest_query_that_dies_before_its_first_row_loses_nothing(store) -> None:
    query = Query(store.path)
    query.trigger()
    store.append("orders", 0, 2)
    store.append("orders", 1, 1)
    assert Query(store.path, checkpoint=query.committed).trigger() == [(0, 3), (0, 4), (1, 0)]


def test_a_first_batch_that_was_planned_and_not_committed_is_repeated_with_the_start_it_had(store) -> None:
    query = Query(store.path, startingOffsets="earliest")
    end = query.plan()
    store.append("orders", 0, 2)
    again = Query(store.path, startingOffsets="latest")  # a start that has moved meanwhile
    assert again.rows(again.committed, end) == [(0, 0), (0, 1), (0, 2)]
    again.committed = end
    assert again.trigger() == [(0, 3), (0, 4)]


def test_the_start_is_resolved_once_in_a_process(store) -> None:
    query = Query(store.path)
    first = query.plan()
    store.append("orders", 0, 2)
    second = query.plan()
    assert decode_offset(json.loads(second)).starts == decode_offset(json.loads(first)).starts
    assert query.rows(query.committed, second) == [(0, 3), (0, 4)]


def test_what_has_not_moved_is_the_same_object_so_the_same_text(store) -> None:
    query = Query(store.path, startingOffsets="earliest")
    query.trigger()
    start = json.loads(query.committed)
    assert query.reader.latestOffset(start, query.limit) is start
    restarted = Query(store.path, checkpoint=query.committed)
    assert restarted.reader.latestOffset(start, restarted.limit) is start


def test_an_idle_trigger_looks_at_no_queue(store, monkeypatch) -> None:
    query = Query(store.path, startingOffsets="earliest")
    query.drain()
    query.reader.reportLatestOffset()
    for name in ("_plan", "_decode", "_look"):
        monkeypatch.setattr(query.reader, name, None)
    assert query.trigger() is None
    assert query.reader.reportLatestOffset() is query.reader.reportLatestOffset()


def test_messages_of_other_topics_start_no_batch(store) -> None:
    query = Query(store.path, startingOffsets="earliest")
    query.drain()
    store.append("payments", 0, 5)
    assert query.trigger() is None


def test_a_batch_in_the_middle_is_repeated_from_its_two_offsets_alone(store) -> None:
    query = Query(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    query.trigger()
    start, end = query.committed, query.plan()
    restarted = Query(store.path, checkpoint=start)
    assert restarted.rows(start, end) == query.rows(start, end) == [(0, 2)]


def test_messages_that_come_later_are_read_once_and_in_order(store) -> None:
    query = Query(store.path, startingOffsets="earliest")
    read = query.trigger()
    for _ in range(3):
        store.append("orders", 0, 2)
        store.append("orders", 1, 1)
        read += query.trigger()
    assert sorted(read) == [(0, n) for n in range(9)] + [(1, n) for n in range(3)]


def test_a_new_queue_and_a_new_topic_begin_at_their_earliest(grow) -> None:
    store = grow(queues=1)
    store.append("orders", 0, 2)
    query = Query(store.path, subscribePattern="orders.*")
    assert query.trigger() == []
    store.append("orders-eu", 0, 2)
    assert query.trigger() == [(0, 0), (0, 1)]
    assert query.committed == (
        '{"orders": {"0": 2}, "orders-eu": {"0": 2}, "@": {"v": 1, "start": {"orders-eu": {"0": 0}}}}'
    )
    store.append("orders", 5, 1)  # a queue beyond what topics.json says, as after an update by an admin
    assert query.trigger() == [(5, 0)]


def test_a_pattern_that_matches_nothing_yet_waits(store) -> None:
    query = Query(store.path, subscribePattern="shop-.*", startingOffsets="latest")
    assert query.trigger() == []
    assert query.committed == '{"@": {"v": 1, "start": {}}}'
    assert query.trigger() is None
    store.append("shop-1", 0, 1)
    assert query.trigger() == [(0, 0)]


def test_a_topic_that_is_not_there_is_an_error_in_the_first_batch(store) -> None:
    with pytest.raises(NotFoundError, match='no topic "order"'):
        Query(store.path, subscribe="order").trigger()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("earliest", [(0, 0), (0, 1), (0, 2), (1, 0)]),
        ("latest", []),
        ('{"orders": {"0": 1}}', [(0, 1), (0, 2)]),
        ('{"orders": {"0": -1, "1": -2}}', [(1, 0)]),
    ],
)
def test_a_stream_starts_where_it_is_told_and_at_latest_without_a_word(store, text, rows) -> None:
    store.append("orders", 1, 1)
    assert Query(store.path, startingOffsets=text).trigger() == rows


def test_a_checkpoint_goes_before_starting_offsets(store) -> None:
    query = Query(store.path, startingOffsets="earliest")
    query.drain()
    store.append("orders", 0, 1)
    assert Query(store.path, checkpoint=query.committed, startingOffsets="earliest").drain() == [[(0, 3)]]


def test_limits_share_a_batch_over_queues_and_nothing_is_left(store) -> None:
    store.append("orders", 0, 97)
    store.append("orders", 1, 10)
    batches = Query(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="22").drain()
    assert [len(rows) for rows in batches] == [22] * 5
    assert [sum(queue == 1 for queue, _ in rows) for rows in batches][:4] == [3, 2, 2, 2]  # of 110 messages 10
    assert sorted(row for rows in batches for row in rows) == [(0, n) for n in range(100)] + [(1, n) for n in range(10)]


def test_a_limit_of_bytes_is_exact(grow) -> None:
    store = grow()
    store.append("orders", 0, 10, size=300)
    query = Query(store.path, startingOffsets="earliest", maxBytesPerTrigger="1000")
    batches = query.drain()
    assert [len(rows) for rows in batches] == [2] * 5  # records of about 400 bytes
    assert Query(store.path, startingOffsets="earliest", maxBytesPerTrigger="10").drain() == [
        [(0, n)] for n in range(10)
    ]


def test_the_limit_of_each_queue_holds(store) -> None:
    store.append("orders", 1, 1)
    batches = Query(store.path, startingOffsets="earliest", maxOffsetsPerQueue="2").drain()
    assert batches == [[(0, 0), (0, 1), (1, 0)], [(0, 2)]]


def test_trigger_once_passes_over_every_limit(store) -> None:
    query = Query(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="1", minOffsetsPerTrigger="1")
    query.limit = ReadAllAvailable()
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, ReadAllAvailable()),
        ({"maxOffsetsPerTrigger": "7"}, ReadMaxRows(7)),
        ({"maxOffsetsPerQueue": "8"}, ReadMaxRows(8)),
        ({"maxBytesPerTrigger": "9"}, ReadMaxBytes(9)),
        ({"minOffsetsPerTrigger": "5"}, ReadMinRows(5)),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "7"}, ReadMaxRows(7)),
    ],
)
def test_the_default_limit_lets_trigger_once_be_told_apart(store, given, limit) -> None:
    assert Query(store.path, **given).limit == limit


def test_a_minimum_waits_for_messages_or_for_the_delay(store) -> None:
    query = Query(store.path, minOffsetsPerTrigger="3", maxTriggerDelay="1m")
    assert query.trigger() == []  # the first batch never waits
    store.append("orders", 0, 2)
    assert query.trigger() is None
    query.clock.now_ms += 59_999
    assert query.trigger() is None
    query.clock.now_ms += 1
    assert query.trigger() == [(0, 3), (0, 4)]
    store.append("orders", 0, 2)
    assert query.trigger() is None
    store.append("orders", 0, 1)
    assert query.trigger() == [(0, 5), (0, 6), (0, 7)]


def test_available_now_reads_up_to_its_snapshot_and_comes_to_rest(store) -> None:
    query = Query(store.path, startingOffsets="earliest", available_now=True, maxOffsetsPerTrigger="2")
    store.append("orders", 0, 5)
    store.append("orders", 1, 5)
    assert query.drain() == [[(0, 0), (0, 1)], [(0, 2)]]
    following = Query(store.path, checkpoint=query.committed, available_now=True)
    assert following.drain() == [[(0, n) for n in range(3, 8)] + [(1, n) for n in range(5)]]


def test_available_now_leaves_a_queue_that_appeared_meanwhile_to_the_next_run(grow) -> None:
    store = grow(queues=1)
    store.append("orders", 0, 1)
    query = Query(store.path, startingOffsets="earliest", available_now=True)
    store.append("orders", 3, 2)
    assert query.drain() == [[(0, 0)]]
    assert Query(store.path, checkpoint=query.committed, available_now=True).drain() == [[(3, 0), (3, 1)]]


def test_available_now_does_not_wait_for_a_minimum(store) -> None:
    given = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "2", "maxOffsetsPerTrigger": "2"}
    assert Query(store.path, available_now=True, **given).drain() == [[(0, 0), (0, 1)], [(0, 2)]]
    assert Query(store.path, **given).drain() == [[(0, 0), (0, 1)]]


def test_available_now_on_an_empty_store_comes_to_rest(grow) -> None:
    store = grow()
    assert Query(store.path, subscribePattern="x.*", available_now=True).drain() == [[]]


def test_retention_that_overtook_the_stream_is_data_loss(grow) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = Query(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    query.trigger()
    store.expire_segment()
    store.append("orders", 0, 1)
    with pytest.raises(DataLossError) as caught:
        query.trigger()
    lost = caught.value
    assert (lost.topic, lost.queue_id, lost.begin) == ("orders", 0, 2)
    assert f"{lost.end - 2} messages, queue offsets [2, {lost.end})" in str(lost)
    assert "failOnDataLoss=false" in str(lost)

    lenient = Query(store.path, checkpoint=query.committed, failOnDataLoss="false")
    assert lenient.drain() == [[(0, n) for n in range(lost.end, 31)]]
    assert lenient.offset().lost == {QueueKey("orders", 0): lost.end - 2}
    assert f'"lost": {{"orders": {{"0": {lost.end - 2}}}}}' in lenient.committed


def test_messages_that_expired_between_plan_and_read_are_data_loss_too(grow) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = Query(store.path, startingOffsets="earliest")
    end = query.plan()
    partitions = query.reader.partitions(json.loads(query.committed), json.loads(end))
    store.expire_segment()
    with pytest.raises(DataLossError):
        [row for partition in partitions for row in query.reader.read(partition)]
    lenient = Query(store.path, startingOffsets="earliest", failOnDataLoss="false")
    rows = [row for partition in partitions for batch in lenient.reader.read(partition) for row in batch.to_pylist()]
    assert [row["queueOffset"] for row in rows] == list(range(30 - len(rows), 30))
    assert 10 < len(rows) < 30


def test_a_replayed_batch_of_which_a_part_expired_is_data_loss_or_what_is_left(grow) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = Query(store.path, startingOffsets="earliest")
    end = query.plan()
    store.expire_segment()
    with pytest.raises(DataLossError):
        Query(store.path, startingOffsets="earliest").rows(query.committed, end)
    rows = Query(store.path, failOnDataLoss="false").rows(query.committed, end)
    assert 10 < len(rows) < 30
    assert rows[-1] == (0, 29)


def write(path, count, topic="orders", first_ms=None):
    messages = [
        SampleMessage(topic, 0, b"x", store_timestamp=None if first_ms is None else first_ms + n) for n in range(count)
    ]
    build_store(path, messages)
    return path


def test_a_store_that_was_rebuilt_shorter_is_data_loss_or_goes_on_at_its_end(tmp_path) -> None:
    query = Query(write(tmp_path / "long", 10), startingOffsets="earliest")
    query.drain()
    short = write(tmp_path / "short", 4)
    with pytest.raises(DataLossError) as caught:
        Query(short, checkpoint=query.committed).trigger()
    assert (caught.value.begin, caught.value.end) == (4, 10)
    lenient = Query(short, checkpoint=query.committed, failOnDataLoss="false")
    assert lenient.drain() == [[]]
    assert lenient.offset().positions == {QueueKey("orders", 0): 4}
    assert lenient.offset().lost == {QueueKey("orders", 0): 6}


def test_a_topic_that_vanished_is_data_loss_or_is_left_out(tmp_path) -> None:
    query = Query(write(tmp_path / "one", 10), startingOffsets="earliest")
    query.drain()
    other = write(tmp_path / "other", 4, topic="payments")
    with pytest.raises(DataLossError, match="no such queue any more"):
        Query(other, checkpoint=query.committed).trigger()
    lenient = Query(other, checkpoint=query.committed, failOnDataLoss="false", subscribe="orders,payments")
    assert lenient.drain() == [[(0, 0), (0, 1), (0, 2), (0, 3)]]
    assert lenient.offset().positions == {QueueKey("payments", 0): 4}


def test_a_queue_is_gone_only_if_a_second_look_says_so(store, monkeypatch) -> None:
    query = Query(store.path, startingOffsets="earliest")
    query.drain()
    store.append("orders", 0, 1)
    real = type(query.options.subscription).find_queues
    looks = []

    def forgetful(self, catalog, known=()):
        looks.append(len(looks))
        return [] if looks[-1] == 0 else real(self, catalog, known)

    monkeypatch.setattr(type(query.options.subscription), "find_queues", forgetful)
    assert query.trigger() == [(0, 3)]
    assert len(looks) == 2


def test_a_subscription_that_shrank_is_data_loss_or_drops_the_queue(store) -> None:
    store.append("payments", 0, 1)
    query = Query(store.path, subscribe="orders,payments", startingOffsets="earliest")
    query.drain()
    with pytest.raises(DataLossError, match="does not subscribe to it any more"):
        Query(store.path, checkpoint=query.committed).trigger()
    lenient = Query(store.path, checkpoint=query.committed, failOnDataLoss="false")
    assert lenient.drain() == [[]]
    assert lenient.committed == '{"orders": {"0": 3, "1": 0}, "@": {"v": 1}}'


def test_a_start_beyond_the_end_never_was_and_one_that_expired_is_lost(grow) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    with pytest.raises(OffsetRangeError):
        Query(store.path, startingOffsets='{"orders": {"0": 31}}').trigger()
    store.expire_segment()
    with pytest.raises(DataLossError):
        Query(store.path, startingOffsets='{"orders": {"0": 1}}').trigger()
    lenient = Query(store.path, startingOffsets='{"orders": {"0": 1}}', failOnDataLoss="false")
    rows = lenient.trigger()
    assert rows[-1] == (0, 29)
    assert lenient.offset().lost == {QueueKey("orders", 0): 29 - len(rows)}


def test_ending_latest_is_what_the_run_found_and_then_it_idles_and_says_so(store) -> None:
    query = Query(store.path, startingOffsets="earliest", endingOffsets="latest", maxOffsetsPerTrigger="2")
    assert query.trigger() == [(0, 0), (0, 1)]
    assert '"ending": true' in query.committed
    assert '"ended"' not in query.committed
    store.append("orders", 0, 5)
    store.append("orders", 9, 5)  # a queue that is no part of it
    assert query.drain() == [[(0, 2)]]
    assert '"ending": true, "ended": true' in query.committed


def test_an_ending_offset_may_lie_ahead(store) -> None:
    query = Query(store.path, startingOffsets="earliest", endingOffsets='{"orders": {"0": 5}}')
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert not query.offset().ended
    store.append("orders", 0, 4)
    store.append("orders", 1, 4)  # not named: ends where this run found it
    assert query.drain() == [[(0, 3), (0, 4)]]
    assert query.offset().ended


def test_available_now_ends_at_the_smaller_of_snapshot_and_bound(store) -> None:
    given = {"startingOffsets": "earliest", "endingOffsets": '{"orders": {"0": 2}}'}
    query = Query(store.path, available_now=True, **given)
    assert query.drain() == [[(0, 0), (0, 1)]]
    assert query.offset().ended
    query = Query(store.path, available_now=True, **(given | {"endingOffsets": '{"orders": {"0": 4}}'}))
    store.append("orders", 0, 4)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert not query.offset().ended


def test_a_bound_that_is_behind_already_is_reported_by_one_empty_batch(store) -> None:
    query = Query(store.path, startingOffsets="earliest")
    query.drain()
    bounded = Query(store.path, checkpoint=query.committed, endingOffsets='{"orders": {"0": 1, "1": 0}}')
    assert bounded.drain() == [[]]
    assert bounded.offset().ended
    unbounded = Query(store.path, checkpoint=bounded.committed)
    assert unbounded.drain() == [[]]
    assert '"ended"' not in unbounded.committed


def test_a_bound_in_a_queue_that_is_not_there_is_an_error(store) -> None:
    with pytest.raises(NotFoundError, match="endingOffsets names the queue orders/7"):
        Query(store.path, endingOffsets='{"orders": {"7": 1}}').trigger()


def test_an_ending_time_that_lies_behind_is_an_offset(tmp_path) -> None:
    path = write(tmp_path / "store", 10, first_ms=1_600_000_000_000)
    for clock in (Clock(), Clock(1_500_000_000_000)):  # a message tells, whatever the clock says
        query = Query(path, clock, startingOffsets="earliest", endingTimestamp="1600000000004")
        assert query.drain() == [[(0, 0), (0, 1), (0, 2), (0, 3)]]
        assert query.offset().ended


def test_an_ending_time_that_lies_ahead_ends_by_a_message_or_by_the_clock(grow) -> None:
    store = grow()
    store.append("orders", 0, 2)
    clock = Clock()
    query = Query(store.path, clock, startingOffsets="earliest", endingTimestamp=str(clock.now_ms + 60_000))
    assert query.drain() == [[(0, 0), (0, 1)]]
    assert not query.offset().ended
    clock.now_ms += 60_000
    store.append("payments", 0, 1)
    assert query.trigger() is None  # a broker may still make visible what it stored in time
    clock.now_ms += 1_000
    assert query.trigger() == []
    assert query.offset().ended
    store.append("orders", 0, 2)
    assert query.trigger() is None


def test_a_start_time_is_the_first_message_at_or_after_it(tmp_path) -> None:
    path = write(tmp_path / "store", 10, first_ms=1_600_000_000_000)
    assert Query(path, startingTimestamp="1600000000007").trigger() == [(0, 7), (0, 8), (0, 9)]
    assert Query(path, startingTimestamp="0").trigger() == [(0, n) for n in range(10)]
    late = {"startingTimestamp": "1600000000010"}
    with pytest.raises(OptionError, match=r"nothing was stored in queue orders/0 at or after 2020-09-13T12:26:40.010"):
        Query(path, **late).trigger()
    assert Query(path, startingOffsetsByTimestampStrategy="latest", **late).trigger() == []
    assert len(Query(path, startingOffsetsByTimestampStrategy="earliest", **late).trigger()) == 10


def test_a_relative_start_time_counts_from_the_clock_at_load(tmp_path) -> None:
    path = write(tmp_path / "store", 10, first_ms=1_600_000_000_000)
    query = Query(path, Clock(1_600_000_000_000 + 60_005), startingTimestamp='{"orders": {"0": "-1m"}}')
    query.clock.now_ms += 10**9
    assert query.trigger() == [(0, n) for n in range(5, 10)]


def test_the_latest_offset_is_reported_with_what_lies_behind_a_limit(store) -> None:
    query = Query(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="1")
    assert query.reader.reportLatestOffset() is None
    query.trigger()
    assert query.reader.reportLatestOffset() == {"orders": {"0": 3, "1": 0}, "@": {"v": 1}}
    store.append("orders", 1, 2)
    query.trigger()
    assert query.reader.reportLatestOffset() == {"orders": {"0": 3, "1": 2}, "@": {"v": 1}}


def test_splitting_a_queue_changes_no_row(store) -> None:
    store.append("orders", 0, 97)
    query = Query(store.path, startingOffsets="earliest", minPartitions="7", maxRecordsPerPartition="30")
    end = query.plan()
    assert len(query.reader.partitions(json.loads(query.committed), json.loads(end))) >= 7
    assert query.trigger() == [(0, n) for n in range(100)]


def test_commit_and_stop_do_no_harm_at_any_time(store) -> None:
    query = Query(store.path, startingOffsets="earliest")
    query.reader.stop()
    query.reader.commit({})
    assert len(query.trigger()) == 3
    query.reader.commit(json.loads(query.committed))
    query.reader.stop()
    store.append("orders", 0, 1)
    assert query.trigger() == [(0, 3)]


def test_what_goes_to_the_tasks_is_small(grow) -> None:
    store = grow(queues=50)
    for queue_id in range(50):
        store.append("orders", queue_id, 3)
    query = Query(store.path, startingOffsets="earliest")
    partitions = query.reader.partitions(json.loads(query.committed), json.loads(query.plan()))
    assert len(partitions) == 50
    assert len(pickle.dumps(query.reader)) < 500
    assert max(len(pickle.dumps(partition)) for partition in partitions) < 200 + len(str(store.path))


def test_a_refused_stream_raises_its_error_whatever_is_asked_first() -> None:
    refused = RefusedStream(OptionError("why"))
    for call in (
        refused.initialOffset,
        lambda: refused.latestOffset({}, ANY_LIMIT),
        lambda: refused.partitions({}, {}),
        lambda: refused.read(None),
    ):
        with pytest.raises(OptionError, match="why"):
            call()


def test_a_checkpoint_of_another_source_is_refused(store) -> None:
    with pytest.raises(OptionError, match="version"):
        Query(store.path, checkpoint='{"orders": {"0": 1}}').trigger()


@pytest.mark.parametrize("name", ["refresh", "bounds", "record_bytes", "offset_within_bytes"])
def test_a_file_that_goes_away_while_a_batch_is_planned_is_planned_again(store, monkeypatch, name) -> None:
    real, calls = getattr(StoreReader, name), []

    def fail_once(self, *arguments):
        calls.append(name)
        if len(calls) == 1:
            raise StoreChangedError("a segment is gone")
        return real(self, *arguments)

    monkeypatch.setattr(StoreReader, name, fail_once)
    query = Query(store.path, startingOffsets="earliest", maxBytesPerTrigger="1m")
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert calls


def test_a_file_that_keeps_going_away_is_an_error_and_no_hang(store, monkeypatch) -> None:
    calls = []

    def fail(self):
        calls.append(1)
        raise StoreChangedError("a segment is gone")

    query = Query(store.path, startingOffsets="earliest")
    monkeypatch.setattr(StoreReader, "refresh", fail)
    with pytest.raises(StoreChangedError, match="a segment is gone"):
        query.trigger()
    assert len(calls) == 3
