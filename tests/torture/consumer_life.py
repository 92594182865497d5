"""One driver whose query gives the messages of a group to a listener that fails, until it is killed or told to stop.

    python consumer_life.py MASTER STORE NOTES CHECKPOINT STOP MODEL THREADS

A call of the listener takes up to 20 ms, and THREADS calls of a task run at the same time. The listener fails at
random, and always for bodies that begin with "bad". It adds lines to the file NOTES: "given <queue id> <queue offset>
<topic> <key> <ms since the epoch> <pid>" for each row, and "done …" for those that it did not fail. Prints "started",
and "stopped" when a file STOP has appeared.
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms

GROUP = "crew"


def main(master: str, store: str, notes: str, checkpoint: str, stop: str, model: str, threads: str) -> None:
    """Consume until told to stop."""
    conf = {"spark.log.level": "ERROR", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    spark = rmq_spark.session("consumer", master=master, conf=conf)

    def note(word: str, row: Any) -> None:
        # One small write at the end of the file: what two tasks write does not mix, and a kill cuts no line.
        now_ms = wall_clock_ms()
        text = f"{word} {row.queueId} {row.queueOffset} {row.physicalTopic} {row.keys} {now_ms} {os.getpid()}\n"
        descriptor = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, text.encode())
        os.close(descriptor)

    def listen(rows: list[Any], context: rmq_spark.ConsumeContext) -> str | None:
        context.suspend_ms = 10
        for row in rows:
            note("given", row)
        time.sleep(random.random() * 0.02)
        if rows[0].body.startswith(b"bad") or random.random() < 0.1:
            return None
        for row in rows:
            note("done", row)
        return "SUCCESS" if model == "orderly" else "CONSUME_SUCCESS"

    options = {"subscribe": "orders", "columns": "*", "consumerGroup": GROUP, "startingOffsets": "earliest"}
    options |= {"orderly": "true"} if model == "orderly" else {}
    frame = spark.readStream.format("rmq").options(**options, maxOffsetsPerQueue="25", longPollingMs="200").load(store)
    place = {"path": store, "group": GROUP, "checkpoint_location": checkpoint}
    query = rmq_spark.consume(frame, listen, **place, model=model, max_reconsume_times=2, threads=int(threads))
    print("started", flush=True)
    while query.isActive and not Path(stop).exists():
        time.sleep(0.01)
    failure = query.exception()
    query.stop()
    print("stopped" if failure is None else f"failed: {failure}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
