"""Every Prometheus metric of this project: name, kind, help text, labels.

Names follow Prometheus: base units (seconds, bytes), `_total` for counters. docs/METRICS.md lists the same metrics.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# Upper bounds of the buckets of batch times, in s. The last bucket has no bound.
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its kind, the text after HELP, and the names of its labels."""

    kind: str
    help: str
    labels: tuple[str, ...]


_QUEUE = ("place", "group", "topic", "broker", "queue")

METRICS = {
    "rmq_up": Metric(GAUGE, "Whether the place answered when it was last measured: 1, or 0.", ("place",)),
    "rmq_group_lag_messages": Metric(
        GAUGE, "Unread messages of a consumer group that are not deleted, by queue.", _QUEUE
    ),
    "rmq_group_lag_bytes": Metric(
        GAUGE, "Size of the records of these messages, in bytes. In a cluster it is an estimate.", _QUEUE
    ),
    "rmq_group_oldest_waiting_seconds": Metric(
        GAUGE, "Time since the next unread message was stored, in seconds. 0 if there is none.", _QUEUE
    ),
    "rmq_group_expired_messages": Metric(GAUGE, "Unread messages that retention has deleted, by queue.", _QUEUE),
    "rmq_group_offset": Metric(GAUGE, "Committed queue offset of a consumer group.", _QUEUE),
    "rmq_group_away_queues": Metric(
        GAUGE, "Queues of a consumer group whose broker does not answer.", ("place", "group", "broker")
    ),
    "rmq_queue_max_offset": Metric(
        GAUGE, "Queue offset that the next message will get.", ("place", "topic", "broker", "queue")
    ),
    "rmq_group_retries_total": Metric(
        COUNTER, "Messages that were stored in the retry topic of a group.", ("place", "group")
    ),
    "rmq_group_dead_letters_total": Metric(
        COUNTER, "Messages that were stored in the dead-letter topic of a group.", ("place", "group")
    ),
    "rmq_delivered_messages_total": Metric(COUNTER, "Delayed messages that this process has delivered.", ("place",)),
    "rmq_delivery_rounds_total": Metric(COUNTER, "Rounds that delivered at least one message.", ("place",)),
    "rmq_delivery_failures_total": Metric(COUNTER, "Rounds that ended with a problem.", ("place",)),
    "rmq_delivery_latest_seconds": Metric(
        GAUGE, "Longest time from a message being due to the end of its round, in seconds.", ("place",)
    ),
    "rmq_query_active": Metric(GAUGE, "1 while the query runs.", ("query",)),
    "rmq_query_rows_total": Metric(COUNTER, "Rows that the query has read from RocketMQ.", ("query",)),
    "rmq_query_bytes_total": Metric(
        COUNTER,
        "Size of the records that batches of a member of a group have read from a store directory, in bytes.",
        ("query",),
    ),
    "rmq_query_sink_rows_total": Metric(
        COUNTER, "Rows that the query has written, if its sink counts them.", ("query",)
    ),
    "rmq_query_batch_seconds": Metric(HISTOGRAM, "Time of a batch from trigger to commit.", ("query",)),
    "rmq_query_phase_seconds_total": Metric(
        COUNTER, "Time that batches have spent in a phase (durationMs of Spark).", ("query", "phase")
    ),
    "rmq_query_lag_messages": Metric(
        GAUGE,
        "Messages between the end of the last batch and the end of the queue as of that batch.",
        ("query", "topic", "broker", "queue"),
    ),
    "rmq_query_last_batch_timestamp_seconds": Metric(
        GAUGE, "Start of the last batch, in seconds since 1970.", ("query",)
    ),
    "rmq_query_failures_total": Metric(COUNTER, "Ends of the query with an error.", ("query",)),
}


def make_families(samples: Mapping[str, Iterable[tuple[Labels, float]]]) -> "list[Family]":
    """Return counters and gauges for Prometheus. `samples` has (label values, value) by the name of the metric.

    Requires prometheus_client.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: list[Family] = []
    for name, found in samples.items():
        metric = METRICS[name]
        kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
        family = kind(name, metric.help, labels=metric.labels)
        for labels, value in found:
            family.add_metric(labels, value)
        families.append(family)
    return families
