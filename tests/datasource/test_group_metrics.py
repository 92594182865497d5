"""Metrics of queries that share the queues of a group, by the offsets that they report."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rmq_spark

CollectorRegistry = pytest.importorskip(
    "prometheus_client", reason="the extra metrics is not installed"
).CollectorRegistry

SHARED = {"consumerGroup": "billing", "assignment": "shared", "groupFallback": "earliest"}


@pytest.fixture
def listener() -> rmq_spark.MetricsListener:
    return rmq_spark.MetricsListener(registry=CollectorRegistry())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of two queues of four messages each."""
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 20) as writer:
        writer.create_topic("orders", 2)
        for queue_id in (0, 1) * 4:
            writer.send("orders", "x" * 100, queue_id=queue_id)
    return tmp_path / "store"


def run_batch(query: Any, listener: rmq_spark.MetricsListener, name: str) -> int:
    """Run a batch, let the listener hear of it as Spark tells it, and return the number of its rows."""
    before = query.committed
    rows = query.trigger()
    assert rows is not None
    source = SimpleNamespace(
        startOffset="null" if json.loads(before) == query.reader.initialOffset() else before,
        endOffset=query.committed,
        latestOffset=json.dumps(query.reader.reportLatestOffset()),
        numInputRows=len(rows),
    )
    progress = SimpleNamespace(
        id=name,
        runId=name,
        name=name,
        batchId=0,
        timestamp="2026-11-28T10:00:00.500Z",
        durationMs={},
        sink=SimpleNamespace(numOutputRows=-1),
        sources=[source],
    )
    listener.onQueryProgress(SimpleNamespace(progress=progress))  # type: ignore[arg-type]
    return len(rows)


def lags(listener: rmq_spark.MetricsListener, name: str) -> dict[int, float]:
    """Return the lag of each queue that a query reports."""
    samples = [one for family in listener.registry.collect() for one in family.samples]
    return {
        int(one.labels["queue"]): one.value
        for one in samples
        if one.name == "rmq_query_lag_messages" and one.labels["query"] == name
    }


def test_MetricsListener_has_the_lag_of_owned_queues(
    listener: rmq_spark.MetricsListener, path: Path, query_on: Callable[..., Any]
) -> None:
    first = query_on(path, **SHARED)
    run_batch(first, listener, "first")
    assert lags(listener, "first") == {0: 0, 1: 0}
    second = query_on(path, **SHARED, maxOffsetsPerQueue="1")
    for query in (second, first, second):  # the first lets one go, and the second takes it
        query.drain()
    ((its, _),) = second.reader._group.query.epochs.items()
    with rmq_spark.open_store(path) as writer:
        for queue_id in (its.queue_id, its.queue_id, 1 - its.queue_id):
            writer.send("orders", "x", queue_id=queue_id)
    run_batch(first, listener, "first")
    run_batch(second, listener, "second")
    assert lags(listener, "first") == {1 - its.queue_id: 0}
    assert lags(listener, "second") == {its.queue_id: 1}
    for query in (first, second):
        query.reader._group.query.leave({})


def test_MetricsListener_counts_the_bytes_that_a_batch_reads(
    listener: rmq_spark.MetricsListener, path: Path, query_on: Callable[..., Any]
) -> None:
    query = query_on(path, **SHARED)

    def counted() -> float:
        value = listener.registry.get_sample_value("rmq_query_bytes_total", {"query": "q"})
        assert value is not None
        return value

    assert run_batch(query, listener, "q") == 8
    a_message = counted() / 8
    assert a_message > 100, "the begin of the first batch is in its own offset"
    rmq_spark.reset_offsets(path, "billing", {"orders": {0: 1, 1: 4}})
    assert run_batch(query, listener, "q") == 3
    assert counted() == 11 * a_message, "a batch that goes back reads again"
    query.reader._group.query.leave({})
