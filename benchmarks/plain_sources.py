"""Baselines, the cost of Spark without us: sources that do only the work that the measurement needs.

`Ready` returns one ready-made Arrow batch again and again: the limit of Spark's transport from a Python source to its
own rows. `Counting` is a stream of numbers, one per micro-batch. The others are `format("rmq")`: `CountedRmq` counts
its polls for new messages, as `Counting` does, and `WokenRmq` records the time of its answers.

Spark's Python workers import this module by name: `spark_for_benchmarks` puts its folder on their path.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from rmq_spark.datasource.spark.source import RmqDataSource

# The file with the number of a stream's polls, or with a number for each poll: eight bytes, little-endian.
# Inherited by the workers.
LOOKS_FILE = "RMQ_SPARK_BENCHMARK_LOOKS"


class Ready(DataSource):
    """Options: batch (an Arrow file with one batch), rows (of all partitions), partitions."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _ReadyReader(self.options)


class _Rows(InputPartition):
    def __init__(self, count: int) -> None:
        self.count = count


class _ReadyReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._file = options["batch"]
        self._rows, self._partitions = int(options["rows"]), int(options["partitions"])

    def partitions(self) -> list[InputPartition]:
        cuts = [self._rows * part // self._partitions for part in range(self._partitions + 1)]
        return [_Rows(end - begin) for begin, end in pairwise(cuts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Rows)
        batch = read_batch(self._file)
        for _ in range(partition.count // batch.num_rows):
            yield batch
        if partition.count % batch.num_rows:
            yield batch.slice(0, partition.count % batch.num_rows)


def write_batch(file: str, batch: pa.RecordBatch) -> None:
    """Keep one batch as an Arrow file."""
    with pa.ipc.new_file(file, batch.schema) as writer:
        writer.write(batch)


def read_batch(file: str) -> pa.RecordBatch:
    """Return the batch that `write_batch` kept, in memory of its own."""
    with open(file, "rb") as data:
        return pa.ipc.open_file(pa.py_buffer(data.read())).get_batch(0)


class Discard(DataSource):
    """A sink, batch and stream, whose tasks count the rows of their Arrow batches and discard them."""

    @classmethod
    def name(cls) -> str:
        return "discard"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _DiscardWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _DiscardStreamWriter()


@dataclass
class _Counted(WriterCommitMessage):
    rows: int


class _DiscardWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _Counted(sum(batch.num_rows for batch in iterator))


class _DiscardStreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


class Counting(DataSource):
    """A stream whose micro-batches have one row each; with the option idle=true it has none."""

    @classmethod
    def name(cls) -> str:
        return "counting"

    def schema(self) -> str:
        return "n long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _CountingReader(idle=self.options.get("idle") == "true")


class _CountingReader(DataSourceStreamReader):
    def __init__(self, *, idle: bool) -> None:
        self._idle = idle
        self._note_look = look_counter()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        self._note_look()
        return start if self._idle else {"n": start["n"] + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(start["n"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (partition.value,)


class CountedRmq(RmqDataSource):
    """The real source; it counts its polls for new messages, which costs a microsecond."""

    @classmethod
    def name(cls) -> str:
        return "counted_rmq"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        reader = super().streamReader(schema)
        note_look, look = look_counter(), reader.latestOffset

        def latest_offset(start: dict[str, Any], limit: Any) -> dict[str, Any]:
            note_look()
            return look(start, limit)

        reader.latestOffset = latest_offset  # type: ignore[method-assign]
        return reader


def look_counter() -> Callable[[], None]:
    """Return a function that increments the number in the polls file, which restarts at zero."""
    descriptor = os.open(os.environ[LOOKS_FILE], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    count = 0

    def note_look() -> None:
        nonlocal count
        count += 1
        os.pwrite(descriptor, struct.pack("<q", count), 0)

    return note_look


class WokenRmq(RmqDataSource):
    """The real source; when it answers with something new is noted, in ns of the machine's monotonic clock."""

    @classmethod
    def name(cls) -> str:
        return "woken_rmq"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        reader = super().streamReader(schema)
        look = reader.latestOffset
        descriptor = os.open(os.environ[LOOKS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

        def latest_offset(start: dict[str, Any], limit: Any) -> dict[str, Any]:
            answer = look(start, limit)
            if answer is not start:
                os.write(descriptor, struct.pack("<q", time.monotonic_ns()))
            return answer

        reader.latestOffset = latest_offset  # type: ignore[method-assign]
        return reader


def read_noted(looks_file: Path) -> list[int]:
    """Return the numbers that `WokenRmq` has recorded, one per trigger."""
    return [noted for (noted,) in struct.iter_unpack("<q", looks_file.read_bytes())]
