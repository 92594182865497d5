"""A stream from a store to a live cluster, exactly once: until all is copied, or until somebody kills it.

    python exact_life.py SOURCE NAME_SERVERS CHECKPOINT TOPIC ROWS_A_BATCH

Prints "started" when the stream runs, and "done" when everything was written.
"""

import sys

import rmq_spark

SOURCE_TOPIC = "orders"
_CONF = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def main(source: str, address: str, checkpoint: str, topic: str, rows_a_batch: str) -> None:
    """Run the stream to its end."""
    spark = rmq_spark.session("exact life", master="local[2]", conf=_CONF)
    reader = spark.readStream.format("rmq").options(columns="body", startingOffsets="earliest")
    rows = reader.options(subscribe=SOURCE_TOPIC, maxOffsetsPerTrigger=rows_a_batch).load(source)
    writer = rows.writeStream.format("rmq").options(nameServer=address, topic=topic, delivery="exactlyOnce")
    writer = writer.options(checkpointLocation=checkpoint, settleTime="1s")
    query = writer.trigger(availableNow=True).start()
    print("started", flush=True)
    query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
