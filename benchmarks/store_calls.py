"""Count the calls from the Spark side to the storage engine while the driver plans a stream over a store directory.

    python benchmarks/store_calls.py

It prints a table for a query without a consumer group, and one for a query of a group. A row is a public function,
method, property or constructor of the engine. A column is a step of the query: its reader is created; its first batch
is planned; a trigger finds no new message; the next trigger, with the same offset, finds none either.

A call counts if a function in `datasource/` made it to a function in `store/`, directly or through the standard
library. Calls to `store/model.py`, `store/errors.py` and `store/filter/` do not count, nor do generated constructors of
dataclasses. Each query runs once before it is counted, so imports do not count.
"""

import functools
import inspect
import shutil
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql.types import BinaryType, LongType, StructField, StructType

import rmq_spark
from rmq_spark.datasource.spark.source import RmqDataSource

PACKAGE = Path(rmq_spark.__file__).resolve().parent
CALLER, CALLEE = (f"{(PACKAGE / name).resolve()}/" for name in ("datasource", "store"))
NOT_COUNTED = tuple(CALLEE + name for name in ("model.py", "errors.py", "filter/"))
WRAPPER = f"{CALLEE}synchronized.py"  # of methods; treated like the standard library
QUEUES = 8
STEPS = ("new reader", "first batch", "first idle", "next idle")


class StoreCalls:
    """The number of calls from the Spark side to each function of the engine, while it was entered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._generators: set[types.FrameType] = set()  # those that have begun: resuming one is not another call

    def __enter__(self) -> "StoreCalls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_engine(code.co_filename) or frame in self._generators:
            return
        if code.co_name.startswith("_") and code.co_name != "__init__":
            return
        if code.co_flags & inspect.CO_GENERATOR:
            self._generators.add(frame)
        caller = frame.f_back
        while caller is not None and not _is_ours(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None and _resolve(caller.f_code.co_filename).startswith(CALLER):
            self.counts[code.co_qualname] += 1


@functools.cache
def _resolve(file: str) -> str:
    return str(Path(file).resolve())


def _is_ours(file: str) -> bool:
    return _resolve(file).startswith((CALLER, CALLEE)) and _resolve(file) != WRAPPER


def _is_engine(file: str) -> bool:
    return _is_ours(file) and _resolve(file).startswith(CALLEE) and not _resolve(file).startswith(NOT_COUNTED)


def count_steps(store: str, **options: str) -> dict[str, Counter[str]]:
    """Plan a stream as Spark does, without its tasks, and return the calls of each step."""
    given = {"path": store, "subscribe": "orders", "startingOffsets": "earliest"} | options
    source = RmqDataSource(given | {"columns": "queueOffset,body"})
    schema = StructType([StructField("queueOffset", LongType()), StructField("body", BinaryType())])
    counts = {}

    def count(step: str, work: Callable[[], Any]) -> Any:
        with StoreCalls() as calls:
            result = work()
        counts[step] = calls.counts
        return result

    reader: Any = count("new reader", lambda: source.streamReader(schema))

    def plan_first() -> dict[str, Any]:
        start = reader.initialOffset()
        end: dict[str, Any] = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert len(reader.partitions(start, end)) == QUEUES, "a queue has no message"
        return end

    end = count("first batch", plan_first)
    for step in ("first idle", "next idle"):
        after = count(step, lambda: reader.latestOffset(end, reader.getDefaultReadLimit()))
        assert after == end, "the trigger is not idle"
    reader.stop()
    return counts


def show(title: str, counts: dict[str, Counter[str]]) -> None:
    """Print the table of one query."""
    names = sorted(set().union(*counts.values()))
    print(f"{title:40}" + "".join(f"{step:>13}" for step in STEPS))
    for name in names:
        print(f"{name:40}" + "".join(f"{counts[step][name] or '-':>13}" for step in STEPS))
    print(f"{'calls':40}" + "".join(f"{counts[step].total():>13}" for step in STEPS))
    print(f"{'different functions':40}" + "".join(f"{len(counts[step]):>13}" for step in STEPS), end="\n\n")


def main() -> None:
    """Print both tables, for a new store of a topic with one message in each queue."""
    folder = tempfile.mkdtemp()
    try:
        store = f"{folder}/store"
        with rmq_spark.open_store(store, segment_bytes=1 << 20, queues=QUEUES) as producer:
            for queue_id in range(QUEUES):
                producer.send("orders", b"body", queue_id=queue_id)
        for title, options in (("without a group", {}), ("with a group", {"consumerGroup": "counted"})):
            count_steps(store, **dict.fromkeys(options, "warm"))
            show(title, count_steps(store, **options))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
