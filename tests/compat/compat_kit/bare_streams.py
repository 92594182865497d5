"""The program `recording_queries` without Spark: streams that call the source as Spark does.

They need a tenth of the processor time. Each keeps a checkpoint as Spark does: the end of a batch is written before the
batch is read, and a batch that was not committed is repeated after a restart.
"""

import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql.types import StructType

from compat_kit.recording_queries import COLUMNS, Recorder, main
from rmq_spark.datasource.spark.source import RmqDataSource

_SCHEMA = StructType().add("brokerName", "string").add("queueId", "integer")
_SCHEMA = _SCHEMA.add("queueOffset", "long").add("body", "binary")
_IDLE_S = 0.2  # between two triggers without a message


class BareStreams:
    """Starts streams, each in a thread."""

    def start(self, home: Path, options: dict[str, str], recorder: Recorder) -> "BareStream":
        """Start a stream, from its checkpoint if it has one."""
        return BareStream(home / "bare-checkpoint", options, recorder)


class BatchSink(Protocol):
    """What a stream does with a batch."""

    def record(self, number: int, read: Callable[[], Iterable[Sequence[Any]]]) -> None:
        """Read a batch, whose rows have the columns `COLUMNS`, and write them."""


class BareStream:
    """A stream in a thread."""

    def __init__(self, checkpoint: Path, options: dict[str, str], recorder: BatchSink) -> None:
        self._checkpoint, self._recorder = checkpoint, recorder
        checkpoint.mkdir(parents=True, exist_ok=True)
        self._reader = RmqDataSource(options).streamReader(_SCHEMA)
        self._error: str | None = None
        self._report: dict[str, Any] | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the stream's error, and the brokers that its progress calls away."""
        return {"error": self._error, "away": (self._report or {}).get("@", {}).get("away")}

    def stop(self) -> None:
        """Stop the stream after its batch."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._follow()
            self._reader.stop()
        except Exception as error:  # the status shows it
            self._error = f"{type(error).__name__}: {error}"

    def _follow(self) -> None:
        start, number = self._reader.initialOffset(), 0
        while (end := self._load(number, "offsets")) is not None:
            if self._load(number, "commits") is None:
                self._read(number, start, end)
            start, number = end, number + 1
        while not self._is_stopped:
            end = json.loads(json.dumps(self._reader.latestOffset(start, self._reader.getDefaultReadLimit())))
            self._report = self._reader.reportLatestOffset()
            if end == start:
                time.sleep(_IDLE_S)
                continue
            self._save(number, "offsets", end)
            self._read(number, start, end)
            start, number = end, number + 1

    def _read(self, number: int, start: dict[str, Any], end: dict[str, Any]) -> None:
        partitions = pickle.dumps(self._reader.partitions(start, end))
        self._recorder.record(number, lambda: self._rows(partitions))
        self._save(number, "commits", {})

    def _rows(self, partitions: bytes) -> Iterator[Sequence[Any]]:
        task = pickle.loads(pickle.dumps(self._reader))
        for part in pickle.loads(partitions):
            for batch in task.read(part):
                yield from zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True)

    def _load(self, number: int, kind: str) -> Any:
        path = self._checkpoint / f"{kind}-{number}"
        return json.loads(path.read_text()) if path.exists() else None

    def _save(self, number: int, kind: str, contents: Any) -> None:
        path = self._checkpoint / f"{kind}-{number}.new"
        path.write_text(json.dumps(contents))
        os.replace(path, path.with_suffix(""))


if __name__ == "__main__":
    main(BareStreams)
