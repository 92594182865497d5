"""A stream when messages, queues or files are gone."""

import json

import pytest

from rmq_spark.datasource.plan.offsets import decode_offset
from rmq_spark.store import StoreReader
from rmq_spark.store.errors import (
    DataLossError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    StoreChangedError,
)
from rmq_spark.store.model import QueueKey


def test_retention_that_overtook_the_stream_is_data_loss(grow, query_on, caplog) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = query_on(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    query.trigger()
    store.expire_segment()
    store.append("orders", 0, 1)
    with pytest.raises(DataLossError) as caught:
        query.trigger()
    lost = caught.value
    assert (lost.topic, lost.queue_id, lost.begin) == ("orders", 0, 2)
    assert f"{lost.end - 2} messages, queue offsets [2, {lost.end})" in str(lost)
    assert "failOnDataLoss=false" in str(lost)

    lenient = query_on(store.path, checkpoint=query.committed, failOnDataLoss="false")
    assert lenient.drain() == [[(0, n) for n in range(lost.end, 31)]]
    assert lenient.offset().lost == {QueueKey("orders", 0): lost.end - 2}
    assert f'"lost": {{"orders": {{"0": {lost.end - 2}}}}}' in lenient.committed
    assert caplog.text.count('. The offset of this batch counts them under "@".lost') == 1


def test_messages_that_expired_between_plan_and_read_are_data_loss_too(grow, query_on, caplog) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = query_on(store.path, startingOffsets="earliest")
    end = query.plan()
    partitions = query.reader.partitions(json.loads(query.committed), json.loads(end))
    store.expire_segment()
    with pytest.raises(DataLossError):
        [row for partition in partitions for row in query.reader.read(partition)]
    lenient = query_on(store.path, startingOffsets="earliest", failOnDataLoss="false")
    rows = [row for partition in partitions for batch in lenient.reader.read(partition) for row in batch.to_pylist()]
    assert [row["queueOffset"] for row in rows] == list(range(30 - len(rows), 30))
    assert 10 < len(rows) < 30
    assert f"counted in no offset: {30 - len(rows)} messages of queue orders/0" in caplog.text


def test_a_replayed_batch_of_which_a_part_expired_is_data_loss_or_what_is_left(grow, query_on, caplog) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = query_on(store.path, startingOffsets="earliest")
    end = query.plan()
    store.expire_segment()
    with pytest.raises(DataLossError):
        query_on(store.path, startingOffsets="earliest").rows(query.committed, end)
    rows = query_on(store.path, failOnDataLoss="false").rows(query.committed, end)
    assert 10 < len(rows) < 30
    assert rows[-1] == (0, 29)
    assert f": {30 - len(rows)} messages of queue " in caplog.text
    assert caplog.text.count(". No offset counts them") == 1


def test_a_store_that_was_rebuilt_shorter_is_data_loss_or_goes_on_at_its_end(tmp_path, query_on, write_store) -> None:
    query = query_on(write_store(tmp_path / "long", 10), startingOffsets="earliest")
    query.drain()
    short = write_store(tmp_path / "short", 4)
    with pytest.raises(DataLossError) as caught:
        query_on(short, checkpoint=query.committed).trigger()
    assert (caught.value.begin, caught.value.end) == (4, 10)
    lenient = query_on(short, checkpoint=query.committed, failOnDataLoss="false")
    assert lenient.drain() == [[]]
    assert lenient.offset().positions == {QueueKey("orders", 0): 4}
    assert lenient.offset().lost == {QueueKey("orders", 0): 6}


def test_a_topic_that_vanished_is_data_loss_or_is_left_out(tmp_path, query_on, write_store) -> None:
    query = query_on(write_store(tmp_path / "one", 10), startingOffsets="earliest")
    query.drain()
    other = write_store(tmp_path / "other", 4, topic="payments")
    with pytest.raises(DataLossError, match="the queue does not exist any more"):
        query_on(other, checkpoint=query.committed).trigger()
    lenient = query_on(other, checkpoint=query.committed, failOnDataLoss="false", subscribe="orders,payments")
    assert lenient.drain() == [[(0, 0), (0, 1), (0, 2), (0, 3)]]
    assert lenient.offset().positions == {QueueKey("payments", 0): 4}


def test_a_queue_is_gone_only_if_a_second_look_says_so(store, monkeypatch, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
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


@pytest.mark.parametrize("first_call", ["prepare", "replay"])
def test_what_a_first_look_without_a_checkpoint_missed_is_looked_for_again(
    store, monkeypatch, query_on, first_call
) -> None:
    store.append("orders", 1, 3)
    query = query_on(store.path, startingOffsets="earliest")
    query.drain()
    checkpoint = query.committed
    store.append("orders", 0, 1)
    planned = query.plan()
    real = type(query.options.subscription).find_queues
    looks = []

    def forgetful(self, catalog, known=()):
        looks.append(len(looks))
        return real(self, catalog, known)[: 1 if looks[-1] == 0 else None]  # the first refresh misses queue 1

    monkeypatch.setattr(type(query.options.subscription), "find_queues", forgetful)
    again = query_on(store.path, checkpoint=checkpoint, available_now=first_call == "prepare")
    if first_call == "replay":
        assert again.rows(checkpoint, planned) == [(0, 3)]
        again.committed = planned
        assert again.trigger() is None
    else:
        assert again.trigger() == [(0, 3)]
    assert len(looks) == 2
    assert again.offset().positions == {QueueKey("orders", 0): 4, QueueKey("orders", 1): 3}


def test_a_topic_is_missing_only_if_a_second_look_says_so(store, monkeypatch, query_on) -> None:
    real, looks = StoreReader.queues, []

    def forgetful(self, topic):
        looks.append(topic)
        if len(looks) == 1:
            raise NotFoundError(f'no topic "{topic}"')
        return real(self, topic)

    monkeypatch.setattr(StoreReader, "queues", forgetful)
    query = query_on(store.path, startingOffsets="earliest", available_now=True)
    assert query.trigger() == [(0, 0), (0, 1), (0, 2)]


def test_a_subscription_that_shrank_is_refused_or_drops_the_queue(store, query_on, caplog) -> None:
    store.append("payments", 0, 1)
    query = query_on(store.path, subscribe="orders,payments", startingOffsets="earliest")
    query.drain()
    with pytest.raises(OptionError, match=r"positions in payments \(queues 0, 1\)") as caught:
        query_on(store.path, checkpoint=query.committed).trigger()
    assert 'subscribe="orders"' in str(caught.value)
    lenient = query_on(store.path, checkpoint=query.committed, failOnDataLoss="false")
    assert lenient.drain() == [[]]
    assert lenient.committed == '{"orders": {"0": 3, "1": 0}, "@": {"v": 1}}'
    assert "positions in payments (queues 0, 1)" in caplog.text
    assert "0 messages" not in caplog.text


def test_a_checkpoint_of_another_topic_is_refused_by_its_name(store, query_on) -> None:
    store.append("payments", 0, 4)
    query = query_on(store.path, startingOffsets="earliest")
    query.drain()
    with pytest.raises(OptionError) as caught:
        query_on(store.path, checkpoint=query.committed, subscribe="payments").trigger()
    said = str(caught.value)
    assert 'the checkpoint is not one of subscribe="payments": it has positions in orders (queues 0, 1)' in said
    assert "checkpointLocation" in said
    assert "0 messages" not in said


def test_a_planned_batch_of_another_topic_is_refused_by_its_name(store, query_on) -> None:
    store.append("payments", 0, 4)
    query = query_on(store.path, startingOffsets="earliest")
    planned = query.plan()
    with pytest.raises(OptionError, match=r"it has positions in orders \(queue 0\)"):
        query_on(store.path, subscribe="payments").rows(query.committed, planned)


def test_what_is_counted_in_the_offset_is_not_called_uncounted(grow, query_on, caplog) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = query_on(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    query.trigger()
    store.expire_segment()
    store.append("orders", 0, 1)
    lenient = query_on(store.path, checkpoint=query.committed, failOnDataLoss="false")
    (rows,) = lenient.drain()
    lost = rows[0][1] - 2
    assert lenient.offset().lost == {QueueKey("orders", 0): lost}
    assert caplog.text.count(f": {lost} messages of queue ") == 1
    assert "No offset counts" not in caplog.text


def test_what_expires_after_the_plan_is_called_uncounted_and_no_more_than_that(grow, query_on, caplog) -> None:
    store = grow()
    store.append("orders", 0, 60, size=300)
    query = query_on(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    query.trigger()
    store.expire_segment()
    store.append("orders", 0, 1)
    lenient = query_on(store.path, checkpoint=query.committed, failOnDataLoss="false")
    planned = lenient.plan()
    counted = decode_offset(json.loads(planned)).lost[QueueKey("orders", 0)]
    store.expire_segment()
    rows = query_on(store.path, failOnDataLoss="false").rows(lenient.committed, planned)
    uncounted = rows[0][1] - 2 - counted
    assert uncounted > 0
    assert f": {uncounted} messages of queue " in caplog.text
    assert ". No offset counts them" in caplog.text


def test_a_start_beyond_the_end_never_was_and_one_that_expired_is_lost(grow, query_on) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    with pytest.raises(OffsetRangeError):
        query_on(store.path, startingOffsets='{"orders": {"0": 31}}').trigger()
    store.expire_segment()
    with pytest.raises(DataLossError):
        query_on(store.path, startingOffsets='{"orders": {"0": 1}}').trigger()
    lenient = query_on(store.path, startingOffsets='{"orders": {"0": 1}}', failOnDataLoss="false")
    rows = lenient.trigger()
    assert rows[-1] == (0, 29)
    assert lenient.offset().lost == {QueueKey("orders", 0): 29 - len(rows)}


@pytest.mark.parametrize("name", ["refresh", "bounds", "record_bytes", "offset_within_bytes"])
def test_a_file_that_goes_away_while_a_batch_is_planned_is_planned_again(store, monkeypatch, name, query_on) -> None:
    real, calls = getattr(StoreReader, name), []

    def fail_once(self, *arguments):
        calls.append(name)
        if len(calls) == 1:
            raise StoreChangedError("a segment is gone")
        return real(self, *arguments)

    monkeypatch.setattr(StoreReader, name, fail_once)
    query = query_on(store.path, startingOffsets="earliest", maxBytesPerTrigger="1m")
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert calls


def test_a_file_that_keeps_going_away_is_an_error_and_no_hang(store, monkeypatch, query_on) -> None:
    calls = []

    def fail(self):
        calls.append(1)
        raise StoreChangedError("a segment is gone")

    query = query_on(store.path, startingOffsets="earliest")
    monkeypatch.setattr(StoreReader, "refresh", fail)
    with pytest.raises(StoreChangedError, match="a segment is gone"):
        query.trigger()
    assert len(calls) == 3
