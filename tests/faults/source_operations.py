"""Calls of the data source by Spark, in the driver and in tasks, to try with faults: see `operations.py`.

Each operation plans and reads its plan; its answer is the rows, independent of the plan's partitions.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import base_stores
from operations import Operation, Rows, Session
from support.parsed_options import parse_options

from rmq_spark.datasource.options.read_options import ReadOptions, ReadSettings
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
from rmq_spark.store.disk.clock import wall_clock_ms

_COLUMNS = ("topic", "body")
_EARLIEST = {"startingOffsets": "earliest"}
_LIMITED = {"maxBytesPerTrigger": "40000"} | _EARLIEST
_CREW = {"consumerGroup": "crew", "groupFallback": "earliest"}


def _options(session: Session, given: dict[str, str]) -> tuple[ReadOptions, ReadSettings]:
    subscription = {} if "subscribePattern" in given else {"subscribe": "orders"}
    options = parse_options({"path": session.store} | subscription | given, wall_clock_ms())
    return options, ReadSettings(_COLUMNS, False, 1 << 20, options.fail_on_data_loss)


def _rows(reader: Any, partitions: list[Any]) -> Rows:
    rows: Rows = Counter()
    for partition in partitions:
        for batch in reader.read(partition):
            topics, bodies = (column.to_pylist() for column in batch.columns)
            words = [bytes(body).split(b" ")[0].decode() for body in bodies]
            rows.update(zip(topics, words, strict=True))
    return rows


def _read_batch(**given: str) -> Callable[[Session, int], Rows]:
    def act(session: Session, number: int) -> Rows:
        reader = RmqBatchReader(*_options(session, given))
        return _rows(reader, reader.partitions())

    return act


def _read_stream(*, is_available_now: bool = False, **given: str) -> Callable[[Session, int], Rows]:
    """Plan and read the first micro-batch. A plan is not repeated: Spark has it in its checkpoint."""

    def act(session: Session, number: int) -> Rows:
        session.reader = session.reader or RmqStreamReader(*_options(session, given), wall_clock_ms)
        reader: RmqStreamReader = session.reader
        start = reader.initialOffset()
        if session.planned is None:
            if is_available_now:
                reader.prepareForTriggerAvailableNow()
            end = reader.latestOffset(start, reader.getDefaultReadLimit())
            reader.reportLatestOffset()
            session.planned = json.loads(json.dumps(end))
        return _rows(reader, reader.partitions(start, session.planned))

    return act


def _operation(name: str, base: Callable[[str], None], act: Callable[[Session, int], Rows]) -> Operation:
    return Operation(name, base, act, reads=True, is_durable=False)  # what a trigger publishes may stay for the next


PLANNING = (
    _operation("batch", base_stores.in_use, _read_batch(minPartitions="3")),
    _operation("batch-by-time", base_stores.settled, _read_batch(startingTimestamp="2001-01-01T00:00:00Z")),
    _operation("batch-by-key", base_stores.settled, _read_batch(keys="a-key")),
    _operation("batch-from-group", base_stores.with_a_group, _read_batch(startingOffsets="group", **_CREW)),
    _operation("stream", base_stores.in_use, _read_stream(**_EARLIEST)),
    _operation("stream-pattern", base_stores.settled, _read_stream(subscribePattern="orders|la.*", **_EARLIEST)),
    _operation("stream-now", base_stores.settled, _read_stream(is_available_now=True, **_LIMITED)),
    _operation("stream-group", base_stores.with_a_group, _read_stream(startingOffsets="group", **_CREW)),
    _operation("stream-shared", base_stores.with_a_group, _read_stream(assignment="shared", **_CREW)),
)
