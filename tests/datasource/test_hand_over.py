"""Small batches that travel with the plan, as PySpark's own code in the planning process asks for them."""

import contextlib
import json
import logging
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.serializers import CPickleSerializer, read_int, write_with_length
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming import python_streaming_source_runner as runner
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.plan.splitting import TaskLimits
from rmq_spark.datasource.spark import hand_over
from rmq_spark.datasource.spark.hand_over import HandOver, find_wrapper, make_hand_over
from rmq_spark.datasource.spark.partition import RmqPartition, plan_partitions
from rmq_spark.datasource.spark.partition_reader import read_partition
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.backend import Fence
from rmq_spark.store.local.backend import LocalBackend
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from tests.datasource.conftest import GrowingStore, Query

Grow = Callable[..., "GrowingStore"]
QueryOn = Callable[..., "Query"]
SCHEMA = StructType(
    [StructField("queueId", IntegerType()), StructField("queueOffset", LongType()), StructField("body", BinaryType())]
)
SETTINGS = ReadSettings(("queueId", "queueOffset", "body"), False, 64 << 20, True)
ON = {"startingOffsets": "earliest", "handOverBytes": "1m"}


class Planned(NamedTuple):
    """What PySpark sends to the JVM for one batch. `rows` is None if tasks must read it."""

    partitions: list[RmqPartition]
    rows: list[dict[str, Any]] | None


def plan(query: "Query", start: str, end: str) -> Planned:
    """Run PySpark's own `partitions_func`, and return what it sends."""
    infile, outfile = BytesIO(), BytesIO()
    for offset in (start, end):
        write_with_length(offset.encode(), infile)
    infile.seek(0)
    source = RmqDataSource({"path": "/none", "subscribe": "orders"})
    runner.partitions_func(query.reader, source, SCHEMA, 10_000, infile, outfile)
    outfile.seek(0)
    partitions = [pickle.loads(outfile.read(read_int(outfile))) for _ in range(read_int(outfile))]
    status = read_int(outfile)
    if status == runner.PREFETCHED_RECORDS_NOT_FOUND:
        return Planned(partitions, None)
    if status == runner.EMPTY_PYARROW_RECORD_BATCHES:
        return Planned(partitions, [])
    assert status == runner.NON_EMPTY_PYARROW_RECORD_BATCHES
    read_int(outfile)  # the beginning of the Arrow stream
    return Planned(partitions, pa.ipc.open_stream(outfile).read_all().to_pylist())


def next_batch(query: "Query") -> Planned:
    """Plan the next batch of a query, as Spark does."""
    start, end = query.committed, query.plan()
    query.committed = end
    return plan(query, start, end)


def rows_of(partitions: list[RmqPartition], settings: ReadSettings = SETTINGS) -> list[dict[str, Any]]:
    """Return the rows that a task reads."""
    return [row for one in partitions for batch in read_partition(one, settings) for row in batch.to_pylist()]


def offsets(rows: list[dict[str, Any]] | None) -> list[int] | None:
    return None if rows is None else [row["queueOffset"] for row in rows]


def is_wrapper(reader: object) -> bool:
    return isinstance(reader, _SimpleStreamReaderWrapper)


def record_bytes(path: Path, begin: int, end: int) -> int:
    """Return the size in the log of some messages of queue 0."""
    part = QueueRange(QueueKey("orders", 0), begin, end)
    with contextlib.closing(StoreDirectory(str(path)).open()) as backend:
        return backend.measure([part])[part]


def test_find_wrapper_finds_the_class_in_the_runner_of_pyspark() -> None:
    assert find_wrapper(runner) is _SimpleStreamReaderWrapper


class _WithoutCache:
    pass


def _asks_before_partitions(reader: Any) -> Any:
    if isinstance(reader, _SimpleStreamReaderWrapper):
        return reader.getCache(0, 1), runner.send_batch_func
    return reader.partitions(0, 1)


def _sends_nothing(reader: Any) -> Any:
    return reader.partitions(0, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"_SimpleStreamReaderWrapper": None},
        {"_SimpleStreamReaderWrapper": _WithoutCache},
        {"partitions_func": None},
        {"partitions_func": _asks_before_partitions},
        {"partitions_func": _sends_nothing},
    ],
)
def test_find_wrapper_returns_none_for_another_pyspark(
    changed: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    known = {
        "_SimpleStreamReaderWrapper": _SimpleStreamReaderWrapper,
        "partitions_func": runner.partitions_func,
    }
    assert find_wrapper(SimpleNamespace(**known)) is _SimpleStreamReaderWrapper
    with caplog.at_level(logging.INFO, logger="rmq_spark"):
        assert find_wrapper(SimpleNamespace(**known | changed)) is None
        assert find_wrapper(None) is None
    assert not caplog.records


def test_make_hand_over_needs_the_planning_process_a_limit_and_a_schema_that_arrow_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert make_hand_over(1 << 20, SETTINGS, SCHEMA) is None  # this process is not the planning process
    monkeypatch.setattr(hand_over, "sys", SimpleNamespace(modules={"__main__": runner}))
    assert make_hand_over(1 << 20, SETTINGS, SCHEMA) is not None
    assert make_hand_over(0, SETTINGS, SCHEMA) is None
    text = StringType()
    for field, is_handed_over in (
        (StructField("topic", text, metadata={"comment": "x"}), False),
        (StructField("properties", MapType(text, text, False)), False),
        (StructField("properties", MapType(text, text)), True),
    ):
        found = make_hand_over(1 << 20, SETTINGS, StructType([*SCHEMA, field]))
        assert (found is not None) == is_handed_over, field


def test_reader_appears_as_another_class_only_from_partitions_to_getCache(
    store: "GrowingStore", query_on: QueryOn
) -> None:
    query = query_on(store.path, **ON)
    reader = query.reader
    assert not is_wrapper(reader)
    start, end = json.loads(query.committed), json.loads(query.plan())
    assert reader.reportLatestOffset() is not None
    assert not is_wrapper(reader)
    reader.partitions(start, end)
    assert is_wrapper(reader)
    assert isinstance(reader, DataSourceStreamReader)
    assert [batch.num_rows for batch in reader.getCache(start, end) or ()] == [3]
    assert not is_wrapper(reader)
    assert reader.__class__ is type(reader)
    assert reader.getCache(start, end) is None  # nothing is kept


def test_reader_has_its_true_class_if_getCache_is_not_called(store: "GrowingStore", query_on: QueryOn) -> None:
    query = query_on(store.path, **ON)
    start, end = json.loads(query.committed), json.loads(query.plan())
    query.reader.partitions(start, end)
    query.plan()
    assert not is_wrapper(query.reader)
    assert query.reader.getCache(start, end) is None


def test_reader_is_pickled_with_its_true_class(store: "GrowingStore", query_on: QueryOn) -> None:
    query = query_on(store.path, **ON)
    start, end = json.loads(query.committed), json.loads(query.plan())
    (partition,) = query.reader.partitions(start, end)
    assert is_wrapper(query.reader)
    read = CPickleSerializer().loads(CPickleSerializer().dumps(query.reader.read))
    assert read.__self__.__class__ is type(query.reader)
    assert sum(batch.num_rows for batch in read(partition)) == 3


def test_small_batch_of_one_queue_is_handed_over_with_the_rows_of_a_task(
    store: "GrowingStore", query_on: QueryOn
) -> None:
    query = query_on(store.path, **ON)
    first = next_batch(query)
    assert offsets(first.rows) == [0, 1, 2]
    assert first.rows == rows_of(first.partitions)
    store.append("orders", 1, 2)
    second = next_batch(query)
    assert [(row["queueId"], row["queueOffset"]) for row in second.rows or ()] == [(1, 0), (1, 1)]
    assert second.rows == rows_of(second.partitions)


def test_batch_without_ranges_or_with_two_partitions_is_left_to_tasks(store: "GrowingStore", query_on: QueryOn) -> None:
    query = query_on(store.path, minPartitions="2", **ON)
    assert plan(query, query.committed, query.committed) == ([], None)
    batch = next_batch(query)
    assert (len(batch.partitions), batch.rows) == (2, None)


def test_batch_without_hand_over_is_left_to_tasks(store: "GrowingStore", query_on: QueryOn) -> None:
    batch = next_batch(query_on(store.path, startingOffsets="earliest"))
    assert (len(batch.partitions), batch.rows) == (1, None)


def test_repeated_batch_is_handed_over_before_the_first_latestOffset(store: "GrowingStore", query_on: QueryOn) -> None:
    query = query_on(store.path, **ON)
    start, end = query.committed, query.plan()
    again = query_on(store.path, checkpoint=start, **ON)
    assert offsets(plan(again, start, end).rows) == [0, 1, 2]


def test_handOverBytes_is_the_size_of_the_records(store: "GrowingStore", query_on: QueryOn) -> None:
    size = record_bytes(store.path, 0, 3)
    for limit, expected in ((size, [0, 1, 2]), (size - 1, None)):
        assert offsets(next_batch(query_on(store.path, **ON | {"handOverBytes": str(limit)})).rows) == expected


def test_batch_with_too_many_messages_is_not_measured(store: "GrowingStore", query_on: QueryOn) -> None:
    query = query_on(store.path, **ON | {"handOverBytes": str(3 * 88 - 1)})
    query.reader.partitions(json.loads(query.committed), json.loads(query.plan()))
    assert not is_wrapper(query.reader)


def test_batch_with_a_fence_is_left_to_tasks(store: "GrowingStore", query_on: QueryOn) -> None:
    batch = next_batch(query_on(store.path, **ON, consumerGroup="billing", fenceLostQueues="true"))
    assert len(batch.partitions) == 1
    assert batch.partitions[0].fences
    assert batch.rows is None


def test_batch_of_a_group_without_fences_is_handed_over(store: "GrowingStore", query_on: QueryOn) -> None:
    query = query_on(store.path, **ON, consumerGroup="billing")
    assert offsets(next_batch(query).rows) == [0, 1, 2]
    assert "group" in (query.reader.reportLatestOffset() or {})["@"]


def test_partition_without_a_filter_match_is_handed_over_without_rows(store: "GrowingStore", query_on: QueryOn) -> None:
    settings = replace(SETTINGS, filters=query_on(store.path, tags="never").options.filters)
    query = query_on(store.path, **ON)
    query.reader._hand_over = HandOver(1 << 20, settings, _SimpleStreamReaderWrapper)
    batch = next_batch(query)
    assert (len(batch.partitions), batch.rows) == (1, [])


def test_partition_of_several_queues_is_handed_over(store: "GrowingStore", query_on: QueryOn) -> None:
    store.append("orders", 1, 2)
    query = query_on(store.path, **ON)
    query.plan()
    ranges = [QueueRange(QueueKey("orders", 0), 1, 3), QueueRange(QueueKey("orders", 1), 0, 2)]
    planned = plan_partitions(query.reader._view, ranges, TaskLimits())
    query.hand_over.offer(planned)
    rows = [row for batch in query.hand_over.take(query.reader._view) or () for row in batch.to_pylist()]
    assert [(row["queueId"], row["queueOffset"]) for row in rows] == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert rows == rows_of(planned)


def test_offer_refuses_partitions_of_spark_and_with_a_fence(store: "GrowingStore", query_on: QueryOn) -> None:
    query = query_on(store.path, **ON)
    query.plan()
    view, ranges = query.reader._view, [QueueRange(QueueKey("orders", 0), 0, 3)]
    (planned,) = plan_partitions(view, ranges, TaskLimits())
    fenced = plan_partitions(view, ranges, TaskLimits(), {QueueKey("orders", 0): Fence("billing", "me", 1)})
    for refused in ([], [InputPartition(None)], fenced, [planned, planned]):
        query.hand_over.offer([planned])
        query.hand_over.offer(refused)
        assert query.hand_over.take(query.reader._view) is None
    query.hand_over.offer([planned])
    assert query.hand_over.take(query.reader._view) is not None


def test_bodies_that_grow_too_much_are_left_to_tasks(tmp_path: Path, query_on: QueryOn) -> None:
    compressed = 1  # sysFlag: the body is compressed
    for size, is_handed_over in ((1_500, True), (40_000, False)):
        path = tmp_path / str(size)
        build_store(path, [SampleMessage("orders", 0, zlib.compress(b"x" * size), sys_flag=compressed)] * 2)
        limit = record_bytes(path, 0, 2)
        assert (2 * size < 16 * limit) == is_handed_over
        batch = next_batch(query_on(path, **ON | {"handOverBytes": str(limit)}))
        assert offsets(batch.rows) == ([0, 1] if is_handed_over else None)
        assert len(rows_of(batch.partitions)) == 2


def test_place_without_sizes_is_left_to_tasks(
    store: "GrowingStore", query_on: QueryOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = query_on(store.path, **ON)
    monkeypatch.setattr(LocalBackend, "sizes", None)
    assert next_batch(query).rows is None
    assert query.reader._view.has_bounds  # it is no error, after which the store is opened again


@pytest.mark.parametrize("where", ["measure", "read"])
def test_error_on_the_driver_is_left_to_the_task_and_the_next_batch_is_handed_over(
    where: str, store: "GrowingStore", query_on: QueryOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = query_on(store.path, **ON)
    with monkeypatch.context() as broken:

        def fail(*arguments: object) -> Iterator[Any]:
            raise OSError("the disk fails")

        broken.setattr(LocalBackend, where, fail)
        batch = next_batch(query)
        assert batch.rows is None
        assert not is_wrapper(query.reader)
        assert not query.reader._view.has_bounds  # the next plan opens the store again
        if where == "read":
            with pytest.raises(OSError, match="the disk fails"):
                rows_of(batch.partitions)
    assert len(rows_of(batch.partitions)) == 3
    store.append("orders", 0, 1)
    assert offsets(next_batch(query).rows) == [3]


def test_interrupt_on_the_driver_ends_the_planning(
    store: "GrowingStore", query_on: QueryOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> Iterator[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalBackend, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next_batch(query_on(store.path, **ON))


def test_messages_that_expired_before_the_plan_are_skipped_and_logged_and_the_rest_is_handed_over(
    grow: Grow, query_on: QueryOn, caplog: pytest.LogCaptureFixture
) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = query_on(store.path, **ON, failOnDataLoss="false")
    start, end = query.committed, query.plan()
    store.expire_segment()
    rows = plan(query_on(store.path, start, **ON, failOnDataLoss="false"), start, end).rows or []
    assert 0 < len(rows) < 30
    assert offsets(rows) == list(range(30 - len(rows), 30))
    assert f": {30 - len(rows)} messages of queue " in caplog.text


def test_messages_that_expire_after_the_plan_are_left_to_the_task(grow: Grow, query_on: QueryOn) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    query = query_on(store.path, **ON, failOnDataLoss="false")
    start, end = json.loads(query.committed), json.loads(query.plan())
    planned = query.reader.partitions(start, end)
    store.expire_segment()
    query.reader._view.reopen()
    assert query.reader.getCache(start, end) is None
    rows = rows_of(planned, replace(SETTINGS, fail_on_data_loss=False))
    assert 0 < len(rows) < 30
    store.append("orders", 0, 1)
    query.committed = json.dumps(end)
    assert offsets(next_batch(query).rows) == [30]


def test_getCache_opens_no_backend(store: "GrowingStore", query_on: QueryOn, monkeypatch: pytest.MonkeyPatch) -> None:
    query = query_on(store.path, **ON)
    start, end = query.committed, query.plan()

    def refuse(location: StoreDirectory) -> LocalBackend:
        raise AssertionError("opened the store again")

    monkeypatch.setattr(StoreDirectory, "open", refuse)
    batch = plan(query, start, end)
    assert offsets(batch.rows) == [0, 1, 2]
    with pytest.raises(AssertionError, match="opened the store again"):
        rows_of(batch.partitions)
