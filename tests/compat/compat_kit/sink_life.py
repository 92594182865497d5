"""One life of two streams from a store to a live cluster: until all is copied, or until somebody kills it.

    python sink_life.py MASTER SOURCE NAME_SERVERS CHECKPOINTS [OPTION=VALUE …]

The stream `plain` sends each message with its sharding key. The stream `shuffled` has a shuffle without order before
its sink. With the option `target` there is one stream instead, which copies the topic plain from the cluster into this
store. Options that begin with "sink." are those of the sink, such as sink.delivery=atLeastOnce. Others are Spark's.
Prints "started" when the streams run, and "done" when everything was written.
"""

import sys
from typing import Any

import rmq_spark

ROWS_A_BATCH = 500
PLAIN, SHUFFLED = "plain", "shuffled"
_SINK = "sink."
COPIED = "queueId,tags,keys,body,properties,flag"


def send(reader: Any, source: str, address: str, checkpoints: str, sink: dict[str, str]) -> list[Any]:
    """Start the two streams from the store at `source` to the cluster. `sink` has further options of the sink."""
    rows = reader.option("subscribe", "orders").load(source).drop("topic", "queueId")
    queries = []
    for topic, frame in (
        (PLAIN, rows.selectExpr("*", "properties['__SHARDINGKEY'] as shardingKey")),
        (SHUFFLED, rows.repartition(3, "body")),
    ):
        writer = frame.writeStream.format("rmq").options(nameServer=address, topic=topic, **sink)
        writer = writer.option("checkpointLocation", f"{checkpoints}/{topic}").queryName(topic)
        queries.append(writer.trigger(availableNow=True).start())
    return queries


def copy_back(reader: Any, address: str, target: str, checkpoints: str) -> list[Any]:
    """Start the stream from the cluster into the store at `target`."""
    writer = reader.options(nameServer=address, subscribe=PLAIN).load().writeStream.format("rmq")
    writer = writer.option("checkpointLocation", f"{checkpoints}/back")
    return [writer.trigger(availableNow=True).start(target)]


def main(master: str, source: str, address: str, checkpoints: str, *options: str) -> None:
    """Run the queries to their end."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "3",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    conf |= dict(option.split("=", 1) for option in options)
    target = conf.pop("target", "")
    sink = {name[len(_SINK) :]: conf.pop(name) for name in list(conf) if name.startswith(_SINK)}
    spark = rmq_spark.session("sink life", master=master, conf=conf)
    reader = spark.readStream.format("rmq").options(columns=f"topic,{COPIED}", startingOffsets="earliest")
    reader = reader.option("maxOffsetsPerTrigger", ROWS_A_BATCH)
    if target:
        queries = copy_back(reader, address, target, checkpoints)
    else:
        queries = send(reader, source, address, checkpoints, sink)
    print("started", flush=True)
    for query in queries:
        query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
