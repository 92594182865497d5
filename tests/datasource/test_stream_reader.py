"""The stream's reader as Spark calls it, in this process and on stores that grow meanwhile."""

import errno
import json
import os
import pickle

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from rmq_spark.datasource.spark.refused_stream import RefusedStream
from rmq_spark.store.errors import OptionError, StoreError

ANY_LIMIT = ReadMaxRows(1)  # as Spark passes it with a default limit, whose value is in the options


def test_what_has_not_moved_is_the_same_object_so_the_same_text(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    query.trigger()
    start = json.loads(query.committed)
    assert query.reader.latestOffset(start, query.limit) is start
    restarted = query_on(store.path, checkpoint=query.committed)
    assert restarted.reader.latestOffset(start, restarted.limit) is start


def test_an_idle_trigger_looks_at_no_queue(store, monkeypatch, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    query.drain()
    query.reader.reportLatestOffset()
    for name in ("_plan", "_decode", "_refresh"):
        monkeypatch.setattr(query.reader, name, None)
    assert query.trigger() is None
    assert query.reader.reportLatestOffset() is query.reader.reportLatestOffset()


def test_messages_of_other_topics_start_no_batch(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    query.drain()
    store.append("payments", 0, 5)
    assert query.trigger() is None


def test_the_latest_offset_is_reported_with_what_lies_behind_a_limit(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="1")
    assert query.reader.reportLatestOffset() is None
    query.trigger()
    assert query.reader.reportLatestOffset() == {"orders": {"0": 3, "1": 0}, "@": {"v": 1}}
    store.append("orders", 1, 2)
    query.trigger()
    assert query.reader.reportLatestOffset() == {"orders": {"0": 3, "1": 2}, "@": {"v": 1}}


def test_splitting_a_queue_changes_no_row(store, query_on) -> None:
    store.append("orders", 0, 97)
    query = query_on(store.path, startingOffsets="earliest", minPartitions="7", maxRecordsPerPartition="30")
    end = query.plan()
    assert len(query.reader.partitions(json.loads(query.committed), json.loads(end))) >= 7
    assert query.trigger() == [(0, n) for n in range(100)]


def test_commit_and_stop_do_no_harm_at_any_time(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    query.reader.stop()
    query.reader.commit({})
    assert len(query.trigger()) == 3
    query.reader.commit(json.loads(query.committed))
    query.reader.stop()
    store.append("orders", 0, 1)
    assert query.trigger() == [(0, 3)]


def test_what_goes_to_the_tasks_is_small(grow, query_on) -> None:
    store = grow(queues=50)
    for queue_id in range(50):
        store.append("orders", queue_id, 3)
    query = query_on(store.path, startingOffsets="earliest")
    partitions = query.reader.partitions(json.loads(query.committed), json.loads(query.plan()))
    assert len(partitions) == 1
    assert len(pickle.dumps(query.reader)) < 500
    assert len(pickle.dumps(partitions[0])) < 200 + len(str(store.path)) + 50 * 60


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


def test_a_checkpoint_of_another_source_is_refused(store, query_on) -> None:
    with pytest.raises(OptionError, match="version"):
        query_on(store.path, checkpoint='{"orders": {"0": 1}}').trigger()


def test_a_look_that_failed_once_is_no_error_of_the_next_one(store, monkeypatch, query_on) -> None:
    folder, real = str(store.path / "consumequeue/orders/0"), os.scandir

    def refuse(path):
        if path == folder:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)
        return real(path)

    query = query_on(store.path, startingOffsets="earliest")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(StoreError, match=f"{folder} cannot be listed: Cannot allocate memory"):
            query.reader.prepareForTriggerAvailableNow()
    query.reader.prepareForTriggerAvailableNow()
    assert query.trigger() == [(0, 0), (0, 1), (0, 2)]
