"""One life of two streams from a store to a live cluster: until all is copied, or until somebody kills it.

    python sink_life.py MASTER SOURCE NAME_SERVERS CHECKPOINTS [OPTION=VALUE …]

The stream `plain` sends each message with its sharding key. The stream `shuffled` has a shuffle without order before
its sink. Prints "started" when both run, and "done" when everything was sent. Options are Spark's.
"""

import sys

import rmq_spark

ROWS_A_BATCH = 500
PLAIN, SHUFFLED = "plain", "shuffled"


def main(master: str, source: str, address: str, checkpoints: str, *options: str) -> None:
    """Run both queries to their end."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "3",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    conf |= dict(option.split("=", 1) for option in options)
    spark = rmq_spark.session("sink life", master=master, conf=conf)
    reader = spark.readStream.format("rmq").options(subscribe="orders", columns="topic,tags,keys,body,properties,flag")
    reader = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=ROWS_A_BATCH)
    rows = reader.load(source).drop("topic")
    queries = []
    for topic, frame in (
        (PLAIN, rows.selectExpr("*", "properties['__SHARDINGKEY'] as shardingKey")),
        (SHUFFLED, rows.repartition(3, "body")),
    ):
        writer = frame.writeStream.format("rmq").options(nameServer=address, topic=topic, delivery="atLeastOnce")
        writer = writer.option("checkpointLocation", f"{checkpoints}/{topic}").queryName(topic)
        queries.append(writer.trigger(availableNow=True).start())
    print("started", flush=True)
    for query in queries:
        query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
