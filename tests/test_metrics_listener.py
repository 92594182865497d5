"""Metrics of queries, from the events that Spark sends to a listener, and with a query of Spark."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.metric_pages import ANY_PORT, scrape, value

import rmq_spark
from rmq_spark.store.testing.embedded import EmbeddedStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CollectorRegistry = pytest.importorskip(
    "prometheus_client", reason="the extra metrics is not installed"
).CollectorRegistry


def progress(*, start: int, end: int, latest: int, mark: dict[str, object] | None = None, **changes: Any) -> Any:
    """Return the event of a batch that read [start, end) of the one queue of the topic orders."""
    ours = SimpleNamespace(
        startOffset=json.dumps({"orders": {"0": start}, "@": {"v": 1}}),
        endOffset=json.dumps({"orders": {"0": end}, "@": {"v": 1}}),
        latestOffset=json.dumps({"orders": {"0": latest}, "@": {"v": 1, **(mark or {})}}),
        numInputRows=end - start,
    )
    rate = SimpleNamespace(startOffset="1", endOffset="7", latestOffset="9", numInputRows=1000)
    event = {
        "id": "an id",
        "runId": "a run",
        "name": "billing query",
        "batchId": 3,
        "timestamp": "2026-11-28T10:00:00.500Z",
        "durationMs": {"triggerExecution": 700, "addBatch": 400, "walCommit": 100},
        "sink": SimpleNamespace(numOutputRows=-1),
        "sources": [rate, ours],
    }
    return SimpleNamespace(progress=SimpleNamespace(**{**event, **changes}))


def terminated(error: str | None = None) -> Any:
    return SimpleNamespace(runId="a run", id="an id", exception=error)


@pytest.fixture
def registry() -> Any:
    return CollectorRegistry()


@pytest.fixture
def listener(registry: Any) -> rmq_spark.MetricsListener:
    return rmq_spark.MetricsListener(registry=registry)


QUERY = {"query": "billing query"}
QUEUE = {**QUERY, "topic": "orders", "broker": "", "queue": "0"}


def test_MetricsListener_counts_batches(listener: rmq_spark.MetricsListener, registry: Any) -> None:
    listener.onQueryProgress(progress(start=0, end=4, latest=10))
    listener.onQueryProgress(progress(start=4, end=6, latest=10, sink=SimpleNamespace(numOutputRows=2)))
    found = registry.get_sample_value
    assert found("rmq_query_rows_total", QUERY) == 6
    assert found("rmq_query_sink_rows_total", QUERY) == 2
    assert found("rmq_query_lag_messages", QUEUE) == 4
    assert found("rmq_query_batch_seconds_count", QUERY) == 2
    assert found("rmq_query_batch_seconds_sum", QUERY) == pytest.approx(1.4)
    assert found("rmq_query_batch_seconds_bucket", {**QUERY, "le": "0.5"}) == 0
    assert found("rmq_query_batch_seconds_bucket", {**QUERY, "le": "1.0"}) == 2
    assert found("rmq_query_phase_seconds_total", {**QUERY, "phase": "addBatch"}) == pytest.approx(0.8)
    assert found("rmq_query_last_batch_timestamp_seconds", QUERY) == 1_795_860_000.5
    assert found("rmq_query_active", QUERY) == 1


def test_MetricsListener_counts_an_end_with_an_error_and_removes_gauges(
    listener: rmq_spark.MetricsListener, registry: Any
) -> None:
    listener.onQueryStarted(SimpleNamespace(runId="a run", id="an id", name="billing query"))  # type: ignore[arg-type]
    assert registry.get_sample_value("rmq_query_failures_total", QUERY) == 0, "increase() needs a begin"
    listener.onQueryProgress(progress(start=0, end=4, latest=10))
    listener.onQueryTerminated(terminated("it failed"))
    assert registry.get_sample_value("rmq_query_failures_total", QUERY) == 1
    assert registry.get_sample_value("rmq_query_active", QUERY) is None
    assert (
        registry.get_sample_value("rmq_query_lag_messages", {**QUERY, "topic": "orders", "broker": "", "queue": "0"})
        is None
    )
    assert registry.get_sample_value("rmq_query_rows_total", QUERY) == 4


def test_MetricsListener_logs_what_it_cannot_count(
    listener: rmq_spark.MetricsListener, caplog: pytest.LogCaptureFixture
) -> None:
    listener.onQueryProgress(progress(start=0, end=4, latest=10, timestamp="never"))
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("rmq_spark", logging.WARNING)
    assert text.startswith("rmq: the batch 3 of query billing query was not counted")


@pytest.mark.parametrize("place", [{"path": "/dev/null/gone"}, {"nameServer": 7}, {}])
def test_MetricsListener_counts_the_other_sources_if_one_cannot_be_measured(
    listener: rmq_spark.MetricsListener, registry: Any, caplog: pytest.LogCaptureFixture, place: dict[str, object]
) -> None:
    gone = {"group": "billing", "member": "m", **place}
    (_, failing), (_, counted) = (
        progress(start=0, end=4, latest=10, mark=mark).progress.sources for mark in (gone, None)
    )
    for _ in range(2):
        listener.onQueryProgress(progress(start=0, end=4, latest=10, sources=[failing, counted]))
    assert registry.get_sample_value("rmq_query_rows_total", QUERY) == 16
    failed = [one.getMessage() for one in caplog.records if "was not counted" in one.getMessage()]
    assert len(failed) == 1
    assert "of query billing query was not counted, or not all of it: " in failed[0]


def test_MetricsListener_forgets_the_group_of_a_query_that_has_ended(
    listener: rmq_spark.MetricsListener, registry: Any, tmp_path: Path
) -> None:
    store = EmbeddedStore(tmp_path / "store")
    store.send("orders", "x")
    mark = {"group": "billing", "member": "m", "path": store.path}
    for run in ("a run", "another run"):
        listener.onQueryProgress(progress(start=0, end=1, latest=1, mark=mark, runId=run))
    up = {"place": store.path}
    listener.onQueryTerminated(SimpleNamespace(runId="another run", id="an id", exception=None))  # type: ignore[arg-type]
    assert registry.get_sample_value("rmq_up", up) == 1
    listener.onQueryTerminated(terminated())
    assert registry.get_sample_value("rmq_up", up) is None


def test_MetricsListener_shares_a_registry(listener: rmq_spark.MetricsListener, registry: Any) -> None:
    second = rmq_spark.MetricsListener(registry=registry)
    listener.onQueryProgress(progress(start=0, end=4, latest=10))
    second.onQueryProgress(progress(start=0, end=5, latest=10, name="other"))
    names = [family.name for family in registry.collect()]
    assert len(names) == len(set(names))
    assert registry.get_sample_value("rmq_query_rows_total", QUERY) == 4
    assert registry.get_sample_value("rmq_query_rows_total", {"query": "other"}) == 5
    assert registry.get_sample_value("rmq_query_batch_seconds_count", {"query": "other"}) == 1
    second.close()
    assert registry.get_sample_value("rmq_query_rows_total", {"query": "other"}) is None
    listener.close()
    assert list(registry.collect()) == []


def test_MetricsListener_measures_bytes_and_the_group(
    listener: rmq_spark.MetricsListener, registry: Any, tmp_path: Path
) -> None:
    store = EmbeddedStore(tmp_path / "store")
    store.create_topic("orders", queues=1)
    store.send("orders", *["x" * 100] * 10)
    mark = {"group": "billing", "member": "m", "path": store.path}
    listener.onQueryProgress(progress(start=0, end=4, latest=10, mark=mark))
    size = registry.get_sample_value("rmq_query_bytes_total", QUERY)
    assert size is not None
    assert 400 < size < 4000
    labels = {"place": store.path, "group": "billing", "topic": "orders", "broker": "", "queue": "0"}
    assert registry.get_sample_value("rmq_up", {"place": store.path}) == 1
    assert registry.get_sample_value("rmq_group_lag_messages", labels) is None, "the group has no offsets yet"
    rmq_spark.reset_offsets(store.path, "billing", {"orders": {0: 4}})
    listener.onQueryProgress(progress(start=4, end=5, latest=10, mark=mark))
    other = rmq_spark.MetricsListener(registry=CollectorRegistry())
    other.onQueryProgress(progress(start=4, end=5, latest=10, mark=mark))
    assert other.registry.get_sample_value("rmq_group_lag_messages", labels) == 6


def test_MetricsListener_wants_a_reader() -> None:
    with pytest.raises(rmq_spark.OptionError, match="found neither address nor registry"):
        rmq_spark.MetricsListener()


@pytest.mark.slow
@pytest.mark.spark
def test_MetricsListener_serves_the_metrics_of_a_query(spark: "SparkSession", tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store")
    store.send("orders", *["x"] * 10)
    listener = rmq_spark.MetricsListener(ANY_PORT)
    spark.streams.addListener(listener)
    try:
        run = (
            spark.readStream.format("rmq")
            .options(**store.options)
            .options(subscribe="orders", startingOffsets="earliest", consumerGroup="billing")
            .load()
            .writeStream.format("noop")
            .queryName("counted")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
        )
        run.start().awaitTermination()
        store.send("orders", *["x"] * 5)
        query = run.trigger(processingTime="0 seconds").start()
        query.processAllAvailable()
        bus = spark.sparkContext._jsc.sc().listenerBus()  # type: ignore[union-attr]
        bus.waitUntilEmpty()
        assert listener.url is not None
        assert value(scrape(listener.url), "rmq_up") == 1, "its group is measured while it runs"
        query.stop()
        bus.waitUntilEmpty()
        found = scrape(listener.url)
    finally:
        spark.streams.removeListener(listener)
        listener.close()
    assert value(found, "rmq_query_rows_total", query="counted") == 15
    assert value(found, "rmq_query_bytes_total", query="counted") > 100
    assert value(found, "rmq_query_batch_seconds_count", query="counted") >= 2
    assert not [name for name, _ in found if name in ("rmq_query_active", "rmq_up")]
