"""A Spark listener that counts rows, bytes and batch times of queries for Prometheus. Needs the extra `metrics`."""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from rmq_spark.datasource.plan.offsets import (
    decode_offset,
    decode_queues,
    decode_reported,
    initial_offset,
    read_reported,
)
from rmq_spark.datasource.plan.planning import ranges_between
from rmq_spark.joined_collectors import add_collectors, remove_collectors
from rmq_spark.metric_table import BUCKETS_S, COUNTER, HISTOGRAM, METRICS, Labels, make_families
from rmq_spark.metrics import MeasuredPlace, MetricsServer, PlaceCollector, load_client
from rmq_spark.store.backend import Capability
from rmq_spark.store.errors import OptionError
from rmq_spark.store.places import from_mark

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import CollectorRegistry
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

_LOG = logging.getLogger("rmq_spark")


class QueryCounts:
    """A collector of prometheus_client with the metrics of queries. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = defaultdict(dict)
        self._times: dict[Labels, list[float]] = {}  # of each query: the batches in each bucket, and the sum in s

    def describe(self) -> "list[Family]":
        """Return nothing, because no query is known yet."""
        return []

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add to a counter, or set a gauge."""
        with self._lock:
            before = self._values[name].get(labels, 0.0) if METRICS[name].kind == COUNTER else 0.0
            self._values[name][labels] = before + value

    def time_batch(self, query: str, seconds: float) -> None:
        """Count a batch in the histogram."""
        with self._lock:
            counts = self._times.setdefault((query,), [0.0] * (len(BUCKETS_S) + 2))
            counts[sum(seconds > bound for bound in BUCKETS_S)] += 1
            counts[-1] += seconds

    def replace(self, name: str, query: str, values: Mapping[Labels, float]) -> None:
        """Set the values of a gauge of a query, and remove its others."""
        with self._lock:
            others = {labels: value for labels, value in self._values[name].items() if labels[0] != query}
            self._values[name] = {**others, **values}

    def forget_gauges(self, query: str) -> None:
        """Remove the gauges of a query that has ended. Its counters remain."""
        with self._lock:
            for name, values in self._values.items():
                if METRICS[name].kind != COUNTER:
                    for labels in [one for one in values if one[0] == query]:
                        del values[labels]

    def collect(self) -> "list[Family]":
        """Return the metrics."""
        from prometheus_client.core import HistogramMetricFamily

        with self._lock:
            families = make_families({name: list(values.items()) for name, values in self._values.items()})
            ((name, metric),) = ((name, one) for name, one in METRICS.items() if one.kind == HISTOGRAM)
            histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
            for labels, (*counts, total_s) in self._times.items():
                bounds = [*map(str, BUCKETS_S), "+Inf"]
                buckets = [(bound, sum(counts[: at + 1])) for at, bound in enumerate(bounds)]
                histogram.add_metric(labels, buckets, total_s)
        return [*families, histogram]


class MetricsListener(StreamingQueryListener):
    """Counts rows, bytes, batch times and failures of a session's queries, and measures the lag of their groups.

        listener = rmq_spark.MetricsListener("0.0.0.0:9464")
        spark.streams.addListener(listener)

    With `address` ("HOST:PORT") it serves the metrics there, at `listener.url`, until `close`. Or give the `registry`
    of prometheus_client that your program serves. Both are possible. docs/METRICS.md lists the metrics. The label
    `query` is the name of a query, or its id. Queries without a source or sink of ours are counted too.

    The lag of consumer groups is measured when Prometheus asks, by the driver, at most once in 5 s. In a cluster it
    uses the account in the query's credentialsFile, or in the environment of the driver (RMQ_ACCESS_KEY,
    RMQ_SECRET_KEY), because Spark's reports contain no secrets.

    Thread-safe. Failures are logged, and the query does not fail. Raises ModuleNotFoundError without the extra
    `metrics`, and OptionError if neither `address` nor `registry` is given, or the address is invalid or in use.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        registry: "CollectorRegistry | None" = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        client = load_client("MetricsListener")
        if address is None and registry is None:
            raise OptionError(
                "MetricsListener: found neither address nor registry, so nobody could read the metrics; expected "
                'one of them, such as MetricsListener("127.0.0.1:9464").'
            )
        self.registry: CollectorRegistry = client.CollectorRegistry() if registry is None else registry
        self._server = None if address is None else MetricsServer(address, self.registry)
        self._counts, self._groups = QueryCounts(), PlaceCollector(monotonic_s=monotonic_s)
        self._names: dict[str, str] = {}  # the value of the label `query`, by the id of a run
        self._failed_runs: set[str] = set()  # the runs of which a failure was logged
        add_collectors(self.registry, (self._counts, self._groups))

    @property
    def url(self) -> str | None:
        """The address of the page with the metrics, None without `address`."""
        return None if self._server is None else self._server.url

    def close(self) -> None:
        """Stop serving, and take the metrics out of the registry. Remove the listener from the session first."""
        remove_collectors(self.registry, (self._counts, self._groups))
        if self._server is not None:
            self._server.close()

    def onQueryStarted(self, event: "QueryStartedEvent") -> None:
        """Note the query's name."""
        name = self._names[str(event.runId)] = str(event.name or event.id)
        self._counts.add("rmq_query_active", (name,), 1)
        # increase() of Prometheus notices no first failure of a series that begins with 1.
        self._counts.add("rmq_query_failures_total", (name,), 0)

    def onQueryIdle(self, event: "QueryIdleEvent") -> None:
        """Do nothing: an idle query has no batch."""

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Count the batch. The first failure of a query is logged."""
        try:
            self._count(event.progress)
        except Exception as error:
            self._log_failure(event.progress, error)

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Count a failure, remove the query's gauges, and stop measuring groups that no other query has."""
        self._groups.drop(str(event.runId))
        self._failed_runs.discard(str(event.runId))
        name = self._names.pop(str(event.runId), str(event.id))
        if event.exception is not None:
            self._counts.add("rmq_query_failures_total", (name,), 1)
        self._counts.forget_gauges(name)

    def _count(self, progress: Any) -> None:
        name, counts = str(progress.name or progress.id), self._counts
        self._names[str(progress.runId)] = name
        durations = dict(progress.durationMs)
        counts.time_batch(name, durations.pop("triggerExecution", 0) / 1000)
        for phase, spent_ms in durations.items():
            counts.add("rmq_query_phase_seconds_total", (name, phase), spent_ms / 1000)
        began = datetime.fromisoformat(progress.timestamp).timestamp()
        counts.add("rmq_query_active", (name,), 1)
        counts.add("rmq_query_last_batch_timestamp_seconds", (name,), began)
        if progress.sink.numOutputRows >= 0:
            counts.add("rmq_query_sink_rows_total", (name,), progress.sink.numOutputRows)
        lags: dict[Labels, float] = {}
        for source in progress.sources:
            try:
                self._count_source(name, str(progress.runId), source, lags)
            except Exception as error:
                self._log_failure(progress, error)
        counts.replace("rmq_query_lag_messages", name, lags)

    def _log_failure(self, progress: Any, error: Exception) -> None:
        run = str(progress.runId)
        if run not in self._failed_runs:
            self._failed_runs.add(run)
            _LOG.warning(
                "rmq: the batch %s of query %s was not counted, or not all of it: %s. Later failures of this query are "
                "not logged.",
                progress.batchId,
                progress.name or progress.id,
                error,
            )

    def _count_source(self, name: str, run: str, source: Any, lags: dict[Labels, float]) -> None:
        """Count the rows of a source, and add the lag of its queues to `lags`. Another kind of source is left out.

        The lag is not known in the queues of a broker that is away, and in a batch that Spark repeats.
        """
        end = read_reported(source.endOffset)
        if not isinstance(end.get("@"), Mapping):
            return
        self._counts.add("rmq_query_rows_total", (name,), source.numInputRows)
        latest = read_reported(source.latestOffset)
        mark, known = latest.get("@", {}), decode_reported(latest)
        others = decode_queues(mark.get("others", {}))
        for queue, offset in decode_reported(end).items():
            if queue in known and queue not in others:
                labels = (name, queue.topic, queue.broker, str(queue.queue_id))
                lags[labels] = max(known[queue] - offset, 0)
        if "group" in mark:
            self._count_of_member(name, run, mark, read_reported(source.startOffset) or initial_offset(), end)

    def _count_of_member(
        self, name: str, run: str, mark: Mapping[str, Any], start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> None:
        """Count the bytes of a source that is a member of a group, and measure its group until the run ends."""
        location, group = from_mark(mark), str(mark["group"])
        place = str(mark.get("path") or mark["nameServer"])
        self._groups.add(MeasuredPlace(place, location, (group,)), run)
        if Capability.SIZES in location.capabilities:
            ranges = ranges_between(decode_offset(start), decode_offset(end))
            with contextlib.closing(location.open()) as backend:
                assert backend.sizes is not None
                backend.refresh()
                self._counts.add("rmq_query_bytes_total", (name,), sum(backend.sizes.measure(ranges).values()))
