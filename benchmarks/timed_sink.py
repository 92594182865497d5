"""The real source, whose stream sink records how long the parts of each batch take.

A record is a line of JSON: the kind of call (`prepare`, `task` or `commit`) and the ms of each part. Spark prepares a
batch twice: for its tasks, and for its commit.

Spark's Python workers import this module by name: `spark_for_benchmarks` puts its folder on their path.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from plain_sources import LOOKS_FILE
from pyspark.sql.datasource import DataSourceStreamArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster.exactly_once import batch_commit, commit_session
from rmq_spark.store.cluster.exactly_once.commit_session import CommitSession
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.publishing import Publishing
from rmq_spark.store.cluster.exactly_once.registration import Registration

_TIMED: tuple[tuple[Any, str, str], ...] = (
    (batch_commit, "judge_batch", "judge"),
    (commit_session, "check_staged", "check"),
    (commit_session, "prove_brokers", "check"),
    (CommitSession, "_floors", "floors"),
    (Registration, "register", "register"),
    (Registration, "reach", "register"),
    (Registration, "register_again", "register"),
    (Registration, "close", "register"),
    (Ledger, "read", "read ledger"),
    (Ledger, "append", "intent and done"),
    (Ledger, "read_through", "intent and done"),
    (Ledger, "store_mark", "marks"),
    (Publishing, "run", "publish"),
)
_spent_ms: dict[str, float] = {}  # by part; empty until the first commit of a process


class TimedSink(RmqDataSource):
    """The real source; each call of its stream sink adds a line to the looks file."""

    @classmethod
    def name(cls) -> str:
        return "timed_sink"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        begin_ns = time.perf_counter_ns()
        writer = super().streamWriter(schema, overwrite)
        _note("prepare", {"all": _ms_since(begin_ns)})
        return _TimedWriter(writer)


class _TimedWriter(DataSourceStreamArrowWriter):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        begin_ns = time.perf_counter_ns()
        message: WriterCommitMessage = self._writer.write(iterator)
        _note("task", {"all": _ms_since(begin_ns)})
        return message

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        if not _spent_ms:
            for owner, name, part in _TIMED:
                setattr(owner, name, _timed(getattr(owner, name), part))
        _spent_ms.update(dict.fromkeys((part for _, _, part in _TIMED), 0.0))
        begin_ns = time.perf_counter_ns()
        self._writer.commit(messages, batchId)
        _note("commit", {"all": _ms_since(begin_ns), **_spent_ms})

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.abort(messages, batchId)


def read_sink_times(looks_file: Path) -> dict[str, list[dict[str, float]]]:
    """Return the ms of the parts, by the kind of call, in the order of their ends."""
    found: dict[str, list[dict[str, float]]] = {"prepare": [], "task": [], "commit": []}
    for line in looks_file.read_text().splitlines():
        kind, parts = json.loads(line)
        found[kind].append(parts)
    return found


def _timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return call(*arguments, **named)
        finally:
            _spent_ms[part] += _ms_since(begin_ns)

    return timed


def _note(kind: str, parts: dict[str, float]) -> None:
    descriptor = os.open(os.environ[LOOKS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"{json.dumps([kind, parts])}\n".encode())
    finally:
        os.close(descriptor)


def _ms_since(begin_ns: int) -> float:
    return (time.perf_counter_ns() - begin_ns) / 1e6
