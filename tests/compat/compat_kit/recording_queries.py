"""A program with streaming queries that record each batch: `-m compat_kit.recording_queries FOLDER NAME_SERVERS`.

It takes orders, lines of JSON on its standard input, and answers each with a line. FOLDER/STREAM/batches has one file
for each attempt at a batch, also in later runs: the rows as JSON, [broker, queue id, queue offset, body]. Spark and the
product log to its standard error.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import rmq_spark

HOLD_S = 120.0  # a stream has a batch within this time
COLUMNS = ("brokerName", "queueId", "queueOffset", "body")
_CONF = {"spark.log.level": "ERROR", "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}


class Recorder:
    """The sink of a stream: writes a file for each attempt at a batch. It can hold a batch before or after reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._place: str | None = None
        self._is_held, self._is_released = threading.Event(), threading.Event()
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Read a batch and write its rows."""
        self.record(number, lambda: batch.select(*COLUMNS).collect())

    def record(self, number: int, read: Callable[[], Iterable[Sequence[Any]]]) -> None:
        """Read a batch, whose rows have the columns `COLUMNS`, and write them."""
        self._stay("planned")
        rows = [(broker, queue, offset, bytes(body).decode()) for broker, queue, offset, body in read()]
        path = self.folder / f"{number:08}-{len(list(self.folder.iterdir())):06}"
        path.write_text(json.dumps(rows))
        path.rename(path.with_suffix(".json"))
        self._stay("recorded")

    def hold(self, place: str) -> None:
        """Wait until a batch is "planned" or "recorded", and keep it there. A batch that is held elsewhere continues.

        Raises TimeoutError if none comes.
        """
        before, self._is_released = self._is_released, threading.Event()
        self._is_held.clear()
        self._place = place
        before.set()
        if not self._is_held.wait(HOLD_S):
            raise TimeoutError(f"no batch within {HOLD_S:g} s")

    def release(self) -> None:
        """Let the batch that is held continue."""
        self._place = None
        self._is_released.set()

    def _stay(self, place: str) -> None:
        if self._place == place:
            released = self._is_released
            self._is_held.set()
            released.wait()


class SparkStreams:
    """Starts streams on Spark."""

    def __init__(self) -> None:
        self._spark: SparkSession = rmq_spark.session(master="local[6]", conf=_CONF)

    def start(self, home: Path, options: dict[str, str], recorder: Recorder) -> "SparkStream":
        """Start a stream, from its checkpoint if it has one."""
        frame = self._spark.readStream.format("rmq").options(**options).load()
        writer = frame.writeStream.foreachBatch(recorder).option("checkpointLocation", str(home / "checkpoint"))
        return SparkStream(writer.trigger(processingTime="500 milliseconds").start())


class SparkStream:
    """A stream on Spark."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query

    def status(self) -> dict[str, Any]:
        """Return the stream's error, and the brokers that its progress calls away."""
        error, progress = self._query.exception(), self._query.lastProgress
        latest = json.loads(progress["sources"][0]["latestOffset"] or "null") if progress else None
        return {"error": None if error is None else str(error), "away": (latest or {}).get("@", {}).get("away")}

    def stop(self) -> None:
        """Stop the stream."""
        self._query.stop()


class Orders:
    """The streams of this program, by name, and the orders. `streams` starts them."""

    def __init__(self, folder: Path, address: str, streams: Any) -> None:
        self._folder, self._address, self._streams = folder, address, streams
        self._running: dict[str, tuple[Any, Recorder]] = {}

    def start(self, stream: str, options: dict[str, str]) -> dict[str, Any]:
        """Start a stream, from its checkpoint if it has one."""
        home = self._folder / stream
        recorder = Recorder(home / "batches")
        started = self._streams.start(home, {"nameServer": self._address, **options}, recorder)
        self._running[stream] = started, recorder
        return {}

    def hold(self, stream: str, place: str) -> dict[str, Any]:
        """Wait until a batch of a stream is at a place, and keep it there."""
        self._running[stream][1].hold(place)
        return {}

    def release(self, stream: str) -> dict[str, Any]:
        """Let the batch of a stream that is held continue."""
        self._running[stream][1].release()
        return {}

    def status(self, stream: str) -> dict[str, Any]:
        """Return what a stream says of itself: its error, and the brokers that its progress calls away."""
        found: dict[str, Any] = self._running[stream][0].status()
        return found

    def stop(self, stream: str) -> dict[str, Any]:
        """Stop a stream."""
        running, recorder = self._running.pop(stream)
        recorder.release()
        running.stop()
        return {}


def _answer(orders: Orders, order: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"event": "done", **getattr(orders, order.pop("op"))(**order)}
    except Exception as error:  # the other side raises it
        return {"event": "error", "error": f"{type(error).__name__}: {error}"}


def main(make_streams: Callable[[], Any]) -> None:
    """Take orders until the end of the standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Spark may print
    orders = Orders(Path(sys.argv[1]), sys.argv[2], make_streams())
    print(json.dumps({"event": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(orders, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(SparkStreams)
