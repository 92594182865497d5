"""A trigger that finds one message in each of many queues, over one that finds as many in one queue.

Two streams wait for messages, each of a store of its own: one has a topic with a thousand queues, the other a topic
with one. In each round the same number of messages is appended to both, and one trigger reads them.

In the process, a trigger is what PySpark's planning process does for it: `latestOffset`, `partitions`, the rows if they
travel with the plan, and the JSON of the offsets. In Spark it is `durationMs.triggerExecution`.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from figures import Figure, ratio_figure, take_turns
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadMinRows
from sample_stores import BODY_BYTES, TOPIC, SampleStores

import rmq_spark
from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.hand_over import HandOver
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store import COLUMNS
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES

QUEUES = 1000
_WARM_UP_TRIGGERS = 5
_LIMIT_S = 120
_HAND_OVER_BYTES = 1 << 20
_COLUMNS = tuple(COLUMNS)[:10]  # selected by default


class _Queues:
    """A new store whose topic has `queues` queues. Each append adds `QUEUES` messages, evenly."""

    def __init__(self, folder: Path, queues: int) -> None:
        self.options = {"path": str(folder / "store"), "subscribe": TOPIC, "startingOffsets": "earliest"}
        # A trigger may come while messages are appended. It waits for the others, except the first trigger.
        self.options |= {"minOffsetsPerTrigger": str(QUEUES), "maxTriggerDelay": "1h"}
        self._store = rmq_spark.open_store(self.options["path"], queues=queues, flush="async")
        self._store.create_topic(TOPIC, queues)
        bodies = [f"{number}".encode().ljust(BODY_BYTES, b".") for number in range(QUEUES)]
        queue_ids = pa.array([number % queues for number in range(QUEUES)], pa.int32())
        self._messages = pa.table({"body": bodies, "queueId": queue_ids})

    def append(self) -> None:
        """Append one message to each queue, or as many to the only one."""
        self._store.send_many(self._messages, topic=TOPIC)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class _Trigger:
    """A stream reader, called as PySpark calls it. `hand_over_bytes` is the option handOverBytes."""

    def __init__(self, queues: _Queues, hand_over_bytes: int) -> None:
        self._queues = queues
        source = RmqDataSource(queues.options)
        self._reader: Any = source.streamReader(from_arrow_schema(pa.schema([(n, COLUMNS[n]) for n in _COLUMNS])))
        self._reader._hand_over = None
        if hand_over_bytes:
            settings = ReadSettings(_COLUMNS, False, MAX_DECOMPRESSED_BYTES, True)
            self._reader._hand_over = HandOver(hand_over_bytes, settings, _Wrapper)
        self._start = json.dumps(self._reader.initialOffset())

    def run(self) -> None:
        """Append, then run one trigger."""
        self._queues.append()
        self.plan_and_read()

    def plan_and_read(self) -> None:
        """Read what was appended."""
        end = json.dumps(self._reader.latestOffset(json.loads(self._start), ReadMinRows(QUEUES)))
        json.dumps(self._reader.reportLatestOffset())
        planned = self._reader.partitions(json.loads(self._start), json.loads(end))
        batches = self._reader.getCache(json.loads(self._start), json.loads(end))
        if batches is None:
            batches = (batch for one in planned for batch in self._reader.read(one))
        rows = sum(batch.num_rows for batch in batches)
        if rows != QUEUES:
            raise RuntimeError(f"{rows} messages came out of {QUEUES}")
        self._start = end

    def seconds(self) -> float:
        """Return the processor time of one trigger."""
        self._queues.append()
        begin = time.process_time()
        self.plan_and_read()
        return time.process_time() - begin


class _Wrapper:
    """Stands for PySpark's class that a reader appears to have."""


def measure_many_queues(stores: SampleStores, repeats: int) -> Iterable[Figure]:
    """Yield the figures without Spark, in processor time: with the plan, and by a task."""
    for name, hand_over_bytes in (("with the plan", _HAND_OVER_BYTES), ("by a task", 0)):
        many, one = (_Queues(stores.scratch(f"{count}-queues"), count) for count in (QUEUES, 1))
        try:
            triggers = [_Trigger(queues, hand_over_bytes) for queues in (many, one)]
            for _ in range(_WARM_UP_TRIGGERS):
                for trigger in triggers:
                    trigger.run()
            spread, alone = take_turns(repeats, *(trigger.seconds for trigger in triggers))
        finally:
            many.close()
            one.close()
        yield _figure(f"trigger of {QUEUES} queues over one, {name}, without Spark", spread, alone, None)


def measure_many_queues_in_spark(spark: SparkSession, stores: SampleStores, repeats: int) -> Iterable[Figure]:
    """Yield the figure of Spark's triggers; at most 2."""
    many, one = (_Queues(stores.scratch(f"{count}-queues"), count) for count in (QUEUES, 1))
    queries = []
    try:
        measures = []
        for queues in (many, one):
            queues.append()
            queries.append(query := _start(spark, stores, queues))
            measures.append(_measure_of(query, queues))
        for _ in range(_WARM_UP_TRIGGERS):
            for measure in measures:
                measure()
        spread, alone = take_turns(repeats, *measures)
    finally:
        for query in queries:
            query.stop()
        many.close()
        one.close()
    yield _figure(f"trigger of {QUEUES} queues over one", spread, alone, 2.0)


def _start(spark: SparkSession, stores: SampleStores, queues: _Queues) -> Any:
    writer = spark.readStream.format("rmq").options(**queues.options).load().writeStream.format("noop")
    name = Path(queues.options["path"]).parent.name
    return writer.option("checkpointLocation", str(stores.scratch(f"checkpoint-{name}"))).start()


def _measure_of(query: Any, queues: _Queues) -> Callable[[], float]:
    read = 0

    def seconds() -> float:
        nonlocal read
        if read:
            queues.append()
        read += QUEUES
        give_up = time.perf_counter() + _LIMIT_S
        while _rows(query) < read:
            if query.exception() is not None or time.perf_counter() > give_up:
                raise RuntimeError(f"the stream does not get on: {query.status}")
            time.sleep(0.05)
        batches = [one for one in query.recentProgress if one["numInputRows"]]
        if batches[-1]["numInputRows"] != QUEUES:
            raise RuntimeError(f"a trigger of {batches[-1]['numInputRows']} messages; expected {QUEUES}")
        return float(batches[-1]["durationMs"]["triggerExecution"]) / 1e3

    return seconds


def _rows(query: Any) -> int:
    return sum(one["numInputRows"] for one in query.recentProgress)


def _figure(name: str, spread: list[float], alone: list[float], required: float | None) -> Figure:
    note = f"{median(spread) * 1e3:.0f} ms, one queue {median(alone) * 1e3:.0f} ms"
    return ratio_figure(name, spread, alone, required=required, at_most=True, note=note)
