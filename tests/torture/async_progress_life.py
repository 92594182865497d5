"""One driver whose query runs with Spark's asynchronous progress tracking, until somebody kills it.

    python async_progress_life.py STORE NOTES CHECKPOINT SINK INTERVAL_MS

Adds a line "<queue id> <queue offset>" to the file NOTES for each row that the sink gets. The sink "foreach" does this
itself; for "noop" and "console" a function just before the sink does it. Prints "started" when the query runs.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions

import rmq_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

GROUP = "tracked"
ROWS_A_BATCH = 50


def write(frame: "DataFrame", sink: str, notes: str) -> "DataStreamWriter":
    """Return the writer of the query, without its options."""

    def note(queue_id: int, offset: int) -> bool:
        # One small write at the end of the file: what two tasks write does not mix, and a kill cuts no line.
        descriptor = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{queue_id} {offset}\n".encode())
        os.close(descriptor)
        return True

    def note_row(row: Any) -> None:
        note(row.queueId, row.queueOffset)

    if sink == "foreach":
        return frame.writeStream.foreach(note_row)
    is_noted = functions.udf(note, "boolean").asNondeterministic()
    return frame.where(is_noted("queueId", "queueOffset")).writeStream.format(sink)


def main(store: str, notes: str, checkpoint: str, sink: str, interval_ms: str) -> None:
    """Run the query until this process is killed."""
    conf = {
        "spark.log.level": "ERROR",
        # A short life is not worth what Java's second compiler costs.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = rmq_spark.session("tracked", master="local[2]", conf=conf)
    reader = spark.readStream.format("rmq").options(subscribe="orders", columns="topic,queueId,queueOffset,body")
    reader = reader.options(consumerGroup=GROUP, startingOffsets="group", groupFallback="earliest")
    frame = reader.options(maxOffsetsPerTrigger=ROWS_A_BATCH, minPartitions=2).load(store)
    writer = write(frame, sink, notes).option("checkpointLocation", checkpoint).trigger(processingTime="0 seconds")
    writer = writer.option("asyncProgressTrackingEnabled", "true")
    query = writer.option("asyncProgressTrackingCheckpointIntervalMs", interval_ms).start()
    print("started", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
