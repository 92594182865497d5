"""A program that reads a live cluster through the product: `cluster_reader.py FUNCTION NAME_SERVERS TARGET`.

Its standard input is a pickle of the function's arguments by name. It writes a pickle of what the function returns.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

import rmq_spark
from rmq_spark.store.backend import COLUMNS, DecodeLimits
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import borrowed_client
from rmq_spark.store.cluster.group_requests import AllGroupOffsetsRequest, CommitOffsetRequest, CreateGroupRequest
from rmq_spark.store.format.config_json import GroupConfig
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange
from rmq_spark.store.places import locate

Row = dict[str, Any]
Place = tuple[str, int, int]


def read_backend(address: str, topics: list[str]) -> list[Row]:
    """Return every message of topics, read through the backend without Spark."""
    location = locate({"nameServer": address})
    assert location is not None
    backend = location.open()
    try:
        backend.refresh()
        queues = [queue for found in backend.queues(topics).values() for queue in found]
        rows: list[Row] = []
        for queue, bounds in backend.bounds(queues).items():
            assert isinstance(bounds, QueueBounds), (queue, bounds)
            part = QueueRange(queue, bounds.min_offset, bounds.max_offset)
            for found in backend.read(part, list(COLUMNS), DecodeLimits(check_crc=True), None):
                rows += found.batch.to_pylist()
        return rows
    finally:
        backend.close()


def read_batch(address: str, topics: list[str], options: dict[str, str]) -> list[Row]:
    """Return every message of topics, read by a batch query."""
    spark = rmq_spark.session(master="local[2]", conf={"spark.log.level": "ERROR", "spark.ui.enabled": "false"})
    reader = spark.read.format("rmq").options(nameServer=address, subscribe=",".join(topics))
    reader = reader.options(columns="*", checkCrc="true")
    return _rows(reader.options(**options).load())


def read_stream(address: str, topics: list[str], options: dict[str, str], checkpoint: str) -> list[Row]:
    """Return the messages that a streaming query delivers, from its checkpoint to the ends of the queues."""
    spark = rmq_spark.session(master="local[2]", conf={"spark.log.level": "ERROR", "spark.ui.enabled": "false"})
    reader = spark.readStream.format("rmq").options(nameServer=address, subscribe=",".join(topics), columns="*")
    rows: list[Row] = []
    frame = reader.options(startingOffsets="earliest", **options).load()
    writer = frame.writeStream.foreachBatch(lambda batch, _: rows.extend(_rows(batch)))
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    return rows


def find_messages(address: str, topic: str, keys: list[str], ids: list[str]) -> dict[str, list[Place]]:
    """Return broker, queue id and queue offset of the messages with each of the keys and ids."""
    with rmq_spark.open_reader(name_server=address) as reader:
        found = {key: reader.find_key(topic, key) for key in keys}
        found |= {one: reader.find_message_id(one, [topic]) for one in ids}
    return {
        word: [(queue.broker, queue.queue_id, offset) for queue, offset in places] for word, places in found.items()
    }


def begin_group(
    address: str, topic: str, group: str, commits: list[tuple[str, str, int, int]]
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Commit offsets, each (broker, its address, queue id, offset), as the group.

    Return the group's committed offsets in the topic, where the group begins with the fallback latest, both by broker
    and queue id, and the entries of the brokers' tables of offsets.
    """
    location = locate({"nameServer": address})
    assert isinstance(location, ClusterAddress)
    backend = location.open()
    table: set[str] = set()
    with borrowed_client(location) as client:
        for _, to, _, _ in commits:
            client.call(to, CreateGroupRequest(GroupConfig(group)))
        for broker, to, queue_id, offset in commits:
            client.call(to, CommitOffsetRequest(group, QueueKey(topic, queue_id, broker), offset))
        backend.refresh()
        bounds = {queue: found for queue, found in backend.bounds(backend.queues([topic])[topic]).items()}
        committed = backend.committed_offsets(group, list(bounds))
        begins = backend.start_offsets(group, bounds, committed, "latest", {})
        for to in {backend._catalog.book.address(queue.broker) for queue in bounds}:
            table |= client.call(to, AllGroupOffsetsRequest("")).offsets.keys()
    backend.close()
    return _by_id(committed), _by_id(begins), sorted(table)


def _by_id(offsets: dict[QueueKey, int]) -> dict[str, int]:
    return {queue.id_text: offset for queue, offset in offsets.items()}


def _rows(frame: DataFrame) -> list[Row]:
    return [dict(row) for row in frame.toArrow().to_pylist()]


if __name__ == "__main__":
    function, name_servers, target = sys.argv[1:]
    found = globals()[function](name_servers, **pickle.load(sys.stdin.buffer))
    Path(target).write_bytes(pickle.dumps(found))
