"""Rows of a cluster in this process, as the source has them, and as a sink of failed rows gets them."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_spark.store.backend import COLUMNS
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.reader import ClusterReader
from rmq_spark.store.format.failed_columns import failed_column_type
from rmq_spark.store.testing.brokers import RunningCluster

Row = dict[str, Any]
GROUP, RETRY, DEAD = "billing", "%RETRY%billing", "%DLQ%billing"


def address_of(cluster: RunningCluster, **terms: Any) -> ClusterAddress:
    terms = {"broker_down_timeout_ms": 5_000, "request_timeout_ms": 20_000, **terms}
    return ClusterAddress(parse_name_servers(cluster.address), **terms)


def rows_of(cluster: RunningCluster, topic: str = "orders", columns: Sequence[str] = tuple(COLUMNS)) -> list[Row]:
    """Return the rows of all brokers, as the source has them."""
    with ClusterReader(address_of(cluster)) as reader:
        reader.refresh()
        found: list[Row] = []
        for queue in reader.queues(topic):
            bounds = reader.bounds(queue)
            for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, list(columns)):
                found += batch.to_pylist(maps_as_pydicts="strict")
        return found


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    names = list(rows[0])
    types = [(name, failed_column_type(name, pa.null())) for name in names]
    arrays = [
        pa.array([list(row[name].items()) if isinstance(row[name], dict) else row[name] for row in rows], kind)
        for name, kind in types
    ]
    return pa.RecordBatch.from_arrays(arrays, names)
