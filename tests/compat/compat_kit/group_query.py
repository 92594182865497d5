"""One query that is a member of a group: `-m compat_kit.group_query LEDGER NAME_SERVERS CHECKPOINT OPTIONS KIND`.

It runs until its standard input ends, then it stops the query. OPTIONS are those of the source, as JSON. On the
standard output it says that it runs, and how it ended. LEDGER gets a line of JSON

- for each batch after it was read, with its rows, when reading began, and when it ended (KIND `spark`, or `bare`: the
  query calls the source as Spark does, without Spark);
- for each call of a listener, before it answers (KIND `listening`). A message whose body begins with MENDED fails
  FAILURES times, and one whose body begins with DEAD always. It becomes a dead letter after FAILURES retries.
"""

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

import rmq_spark
from compat_kit.bare_streams import BareStream
from compat_kit.recording_queries import COLUMNS
from rmq_spark.store.disk.clock import wall_clock_ms

DEAD, MENDED = "dead", "mended"
FAILURES = 2
_CONF = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


class Ledger:
    """The sink of a query: writes a line for each batch."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Read a batch and write its rows."""
        self.record(number, lambda: batch.select(*COLUMNS).collect())

    def record(self, number: int, read: Callable[[], Iterable[Sequence[Any]]]) -> None:
        """Read a batch, whose rows have the columns `COLUMNS`, and write them in one piece."""
        from_ms = wall_clock_ms()
        rows = [
            (broker, queue, offset, bytes(body).decode().partition(" ")[0]) for broker, queue, offset, body in read()
        ]
        line = {"event": "batch", "number": number, "fromMs": from_ms, "atMs": wall_clock_ms(), "rows": rows}
        data = f"{json.dumps(line)}\n".encode()
        while data:
            data = data[os.write(self._file, data) :]


class SparkQuery:
    """The query on Spark."""

    def __init__(self, ledger: Path, checkpoint: Path, options: dict[str, str]) -> None:
        spark = rmq_spark.session(master="local[2]", conf=_CONF)
        frame = spark.readStream.format("rmq").options(**options).load()
        self._query = self._begin(ledger, checkpoint, frame, options)

    def _begin(self, ledger: Path, checkpoint: Path, frame: DataFrame, options: dict[str, str]) -> Any:
        writer = frame.writeStream.foreachBatch(Ledger(ledger)).option("checkpointLocation", str(checkpoint))
        return writer.trigger(processingTime="200 milliseconds").start()

    def error(self) -> str | None:
        """Return the error with which the query has ended, None while it runs."""
        found = self._query.exception()
        return None if found is None else str(found)

    def stop(self) -> None:
        """Stop the query, and wait until its listeners know."""
        self._query.stop()
        self._query.awaitTermination()


def _listen(ledger: str, rows: list[Any], context: rmq_spark.ConsumeContext) -> str:
    """Note the message, and fail it or not. Runs in Spark's tasks."""
    (row,) = rows
    body, times = bytes(row.body).decode(), row.reconsumeTimes
    place = {"topic": context.topic, "broker": context.broker_name, "queueId": context.queue_id}
    call = {"event": "call", "body": body, "reconsumeTimes": times, "atMs": wall_clock_ms(), **place}
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{json.dumps(call)}\n".encode())  # in one piece
    os.close(file)
    fails = body.startswith(DEAD) or (body.startswith(MENDED) and times < FAILURES)
    return "RECONSUME_LATER" if fails else "CONSUME_SUCCESS"


class ListeningQuery(SparkQuery):
    """A query with a listener."""

    def _begin(self, ledger: Path, checkpoint: Path, frame: DataFrame, options: dict[str, str]) -> Any:
        return rmq_spark.consume(
            frame,
            functools.partial(_listen, str(ledger)),
            name_server=options["nameServer"],
            group=options["consumerGroup"],
            checkpoint_location=checkpoint,
            max_reconsume_times=FAILURES,
            trigger="200 milliseconds",
        )


class BareQuery(BareStream):
    """The query without Spark."""

    def __init__(self, ledger: Path, checkpoint: Path, options: dict[str, str]) -> None:
        super().__init__(checkpoint, options, Ledger(ledger))

    def error(self) -> str | None:
        """Return the error with which the query has ended, None while it runs."""
        return self._error


_KINDS = {"spark": SparkQuery, "listening": ListeningQuery, "bare": BareQuery}


def main(ledger: str, address: str, checkpoint: str, given: str, kind: str) -> None:
    """Run the query until the end of the standard input, or until it fails."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Spark may print
    options = {"nameServer": address, **json.loads(given)}
    query = _KINDS[kind](Path(ledger), Path(checkpoint), options)
    print(json.dumps({"event": "ready"}), file=answers, flush=True)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not ended.wait(0.2):
        if (error := query.error()) is not None:
            print(json.dumps({"event": "failed", "error": error}), file=answers, flush=True)
            os._exit(1)
    query.stop()
    print(json.dumps({"event": "left"}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
