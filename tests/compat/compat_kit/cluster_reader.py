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
from rmq_spark.store.model import QueueBounds, QueueRange
from rmq_spark.store.places import locate

Row = dict[str, Any]


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


def _rows(frame: DataFrame) -> list[Row]:
    return [dict(row) for row in frame.toArrow().to_pylist()]


if __name__ == "__main__":
    function, name_servers, target = sys.argv[1:]
    found = globals()[function](name_servers, **pickle.load(sys.stdin.buffer))
    Path(target).write_bytes(pickle.dumps(found))
