"""One life of a pipeline from store to store: it runs until all is copied, or until somebody kills it.

    python pipeline_life.py MASTER SOURCE STORE CHECKPOINT [OPTION=VALUE …]

Prints "started" when its query runs, and "done" when everything was written. Options are Spark's.
"""

import sys

import rmq_spark

ROWS_A_BATCH = 25


def main(master: str, source: str, store: str, checkpoint: str, *options: str) -> None:
    """Run the query to its end."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        # A short life is not worth what Java's second compiler costs.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    conf |= dict(option.split("=", 1) for option in options)
    spark = rmq_spark.session("pipeline", master=master, conf=conf)
    reader = spark.readStream.format("rmq").options(subscribe="orders", columns="topic,queueId,tags,keys,body")
    reader = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=ROWS_A_BATCH, minPartitions=4)
    writer = reader.load(source).writeStream.format("rmq").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start(store)
    print("started", flush=True)
    query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
