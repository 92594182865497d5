"""What clients have sent to a cluster in this process, read back through the contract."""

from collections import Counter
from contextlib import closing
from typing import Any

from rmq_spark.store.backend import DecodeLimits
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange
from rmq_spark.store.testing.brokers import RunningCluster

_LIMITS = DecodeLimits(check_crc=True, max_decompressed_bytes=64 << 20)
COLUMNS = ("body", "tags", "keys", "msgId", "flag", "properties", "queueOffset", "commitLogOffset", "reconsumeTimes")


def address_of(cluster: RunningCluster, **changes: Any) -> ClusterAddress:
    """Return the address of a cluster in this process."""
    return ClusterAddress(parse_name_servers(cluster.address), **changes)


def read_rows(cluster: RunningCluster, topic: str) -> dict[QueueKey, list[dict[str, Any]]]:
    """Return the messages of each queue of a topic, in order. Queues without messages are left out."""
    rows: dict[QueueKey, list[dict[str, Any]]] = {}
    with closing(address_of(cluster).open()) as backend:
        for queue, bounds in backend.bounds(backend.queues([topic])[topic]).items():
            assert isinstance(bounds, QueueBounds), bounds
            if bounds.min_offset < bounds.max_offset:
                part = QueueRange(queue, bounds.min_offset, bounds.max_offset)
                found = [read.batch for read in backend.read(part, COLUMNS, _LIMITS, None)]
                rows[queue] = [row for batch in found for row in batch.to_pylist()]
    return rows


def read_bodies(cluster: RunningCluster, topic: str) -> dict[QueueKey, list[bytes]]:
    """Return the bodies in each queue of a topic, in order."""
    return {queue: [row["body"] for row in rows] for queue, rows in read_rows(cluster, topic).items()}


def count_ids(cluster: RunningCluster, topic: str) -> Counter[str]:
    """Return how many messages of a topic have each id."""
    return Counter(row["msgId"] for rows in read_rows(cluster, topic).values() for row in rows)
