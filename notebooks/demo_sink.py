"""The second half of `make demo`: a million messages through the sink into a new store, and streamed back."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

MESSAGES = 1_000_000
TOPIC = "orders"
BATCHES = 4


def write_and_stream_back(spark: SparkSession) -> None:
    """Write messages, stream them back with Trigger.AvailableNow, and print counts, rates and the backlog."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        write(spark, store)
        stream_back(spark, store, Path(folder) / "checkpoint")


def write(spark: SparkSession, store: Path) -> None:
    """Write generated messages in one atomic batch."""
    number = f.col("id").cast("string")
    rows = spark.range(MESSAGES).select(
        f.concat(f.lit("order "), number, f.lit(": "), f.md5(number), f.md5(f.reverse(number))).alias("body"),
        f.concat(f.lit("customer-"), f.col("id") % 1000).alias("shardingKey"),
        f.concat(f.lit("order-"), number).alias("keys"),
        f.when(f.col("id") % 10 == 0, "express").otherwise("normal").alias("tags"),
    )
    begun = time.perf_counter()
    rows.write.format("rmq").mode("append").option("path", str(store)).option("topic", TOPIC).save()
    seconds = time.perf_counter() - begun
    print(f"written, exactly once {MESSAGES:18,} messages {seconds:7.2f} s {MESSAGES / seconds:12,.0f} messages/s")


def stream_back(spark: SparkSession, store: Path, checkpoint: Path) -> None:
    """Read everything as a stream, and print the backlog after each batch."""
    messages = (
        spark.readStream.format("rmq")
        .options(path=str(store), subscribe=TOPIC, startingOffsets="earliest")
        .option("maxOffsetsPerTrigger", MESSAGES // BATCHES)
        .load()
    )
    totals = messages.groupBy("tags").count()
    begun = time.perf_counter()
    query = (
        totals.writeStream.format("memory")
        .queryName("demo_totals")
        .outputMode("complete")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    seconds = time.perf_counter() - begun
    print(f"{'before the first batch':<24} {MESSAGES:15,} messages still to read")
    for progress in query.recentProgress:
        source = progress["sources"][0]
        left = count(source["latestOffset"]) - count(source["endOffset"])
        print(f"after batch {progress['batchId']:<12} {left:15,} messages still to read (latestOffset - endOffset)")
    print(f"{'streamed back':<21} {MESSAGES:18,} messages {seconds:7.2f} s {MESSAGES / seconds:12,.0f} messages/s")
    for row in spark.table("demo_totals").orderBy("tags").collect():
        print(f"  with the tag {row['tags']:<10} {row['count']:15,}")


def count(offset: str | dict[str, Any] | None) -> int:
    """Return the number of messages up to an offset, as progress shows it: topic, queue id, next queue offset."""
    value = json.loads(offset) if isinstance(offset, str) else offset or {}
    return sum(sum(queues.values()) for topic, queues in value.items() if topic != "@")
