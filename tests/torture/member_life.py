"""One driver whose query shares a group with others, and notes each message that it delivers, until told to stop.

    python member_life.py MASTER STORE NOTES CHECKPOINT STOP ROWS_A_BATCH

Prints "ready" when it has a session, and begins when the file NOTES exists. It appends to NOTES a line
"<batch> <queue id> <queue offset>" for each message, in the order of the batch. Prints "started", and "stopped" when it
has stopped its query because the file STOP exists.
"""

import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame

import rmq_spark

GROUP = "crew"
LEASE_TIMEOUT = "1h"


def main(master: str, store: str, notes: str, checkpoint: str, stop: str, rows_a_batch: str) -> None:
    """Deliver until told to stop."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # A short life is not worth what Java's second compiler costs.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = rmq_spark.session("member", master=master, conf=conf)
    print("ready", flush=True)
    while not Path(notes).exists():
        time.sleep(0.01)

    with open(notes, "a") as file:

        def note(frame: DataFrame, batch_id: int) -> None:
            table = frame.toArrow()
            rows = zip(table.column("queueId").to_pylist(), table.column("queueOffset").to_pylist(), strict=True)
            file.writelines(f"{batch_id} {queue_id} {offset}\n" for queue_id, offset in rows)
            file.flush()

        reader = spark.readStream.format("rmq").options(subscribe="orders", columns="queueId,queueOffset")
        reader = reader.options(consumerGroup=GROUP, assignment="shared", groupFallback="earliest")
        reader = reader.options(maxOffsetsPerTrigger=rows_a_batch, longPollingMs="1s")
        # Longer than any test waits, so a takeover of a dead member's queues never waits for its lease to expire.
        reader = reader.options(leaseTimeout=LEASE_TIMEOUT)
        writer = reader.load(store).writeStream.foreachBatch(note)
        query = writer.option("checkpointLocation", checkpoint).start()
        print("started", flush=True)
        while not Path(stop).exists():
            time.sleep(0.01)
        failure = query.exception()
        query.stop()
        print("stopped" if failure is None else f"failed: {failure}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
