"""`make demo`: stream a store that a real RocketMQ wrote to the console, and measure the speed.

For your own store: .venv/bin/python notebooks/demo.py /path/to/store
"""

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from demo_sink import write_and_stream_back
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

import rmq_spark

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "tests" / "golden" / "demo"
LOGGING = (HERE / "log4j2.properties").as_uri()
ROWS_SHOWN = 5
BATCH_COUNT = 3  # enough to show that it is a stream


def main(store: Path) -> None:
    """Print an overview of the store, a few rows, a line for each batch, the totals, and suggestions."""
    total = print_overview(store)
    print("Starting Spark ... (some seconds, or a minute on a busy machine)", flush=True)
    begun = time.perf_counter()
    spark = rmq_spark.session(
        "rmq-spark demo",
        conf={
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOGGING}",
            "spark.sql.shuffle.partitions": "4",
            "spark.ui.showConsoleProgress": "false",
        },
    )
    print(f"Spark is ready after {time.perf_counter() - begun:.0f} s.{busy()}", flush=True)

    messages = (
        spark.readStream.format("rmq")
        .option("path", str(store))
        .option("subscribePattern", ".*")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", max(1, total // BATCH_COUNT))
        .load()
    )
    counts: Counter[tuple[str, int]] = Counter()
    body_bytes = 0

    def on_batch(batch: DataFrame, batch_id: int) -> None:
        """Read every message of the batch, including its body, and print the speed."""
        nonlocal body_bytes
        if batch_id == 0:
            title(f"The first {ROWS_SHOWN} messages")
            show(batch)
            title("The stream, batch by batch")
        begun = time.perf_counter()
        sums = (
            batch.groupBy("topic", "queueId")
            .agg(f.count("*").alias("messages"), f.sum(f.length("body")).alias("bytes"))
            .collect()
        )
        seconds = time.perf_counter() - begun
        rows, size = sum(row.messages for row in sums), sum(row.bytes or 0 for row in sums)
        counts.update({(row.topic, row.queueId): row.messages for row in sums})
        body_bytes += size
        print(f"batch {batch_id:3} {rows:10,} messages {megabytes(size)} {rate(rows, seconds)}")

    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            messages.writeStream.foreachBatch(on_batch)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    title("What was read")
    for (topic, queue_id), count in sorted(counts.items()):
        print(f"{topic + '/' + str(queue_id):<30} {count:10,} messages")
    print(f"{'all together':<30} {counts.total():10,} messages {megabytes(body_bytes)}")
    read_alone(store, {topic for topic, _ in counts})
    print(f"\nSpark itself takes some tenths of a second for each batch, and more for the first one.{busy()}")

    title("A million messages written to a new store, and streamed back")
    write_and_stream_back(spark)
    spark.stop()

    title("What to try next")
    print(
        ".venv/bin/python notebooks/demo.py /path/to/store   the same with your own store\n"
        "notebooks/01_read_a_store.ipynb                     inspect messages, in batch\n"
        "make bench                                          speed with millions of messages\n"
        "make test                                           linters and tests\n"
        "docs/GUIDE.md, docs/OPTIONS.md                      reading and writing, columns, options"
    )


def print_overview(store: Path) -> int:
    """Print an overview of the store, without Spark; return its number of messages."""
    title("rmq-spark: a RocketMQ store as a Spark stream")
    with rmq_spark.open_reader(str(store)) as reader:
        topics = reader.topics()
        bounds = [reader.bounds(queue) for topic in topics for queue in reader.queues(topic)]
    counts = [bound.max_offset - bound.min_offset for bound in bounds]
    used = sum(count > 0 for count in counts)
    print(f"The store: {store}")
    print(f"{sum(counts):,} messages in {used} queues, including the system topics of the broker")
    print("No broker runs, no jar is installed, and nothing in the folder changes.\n")
    return sum(counts)


def read_alone(store: Path, topics: set[str]) -> None:
    """Read the same messages without Spark, and print the speed."""
    begun = time.perf_counter()
    rows = 0
    with rmq_spark.open_reader(str(store)) as reader:
        for topic in topics:
            for queue in reader.queues(topic):
                bounds = reader.bounds(queue)
                batches = reader.read(queue, bounds.min_offset, bounds.max_offset, ["tags", "body"])
                rows += sum(batch.num_rows for batch in batches)
    print(f"{'without Spark':<30} {rows:10,} messages {rate(rows, time.perf_counter() - begun)}")


def show(batch: DataFrame) -> None:
    """Print the first messages of a batch, with the beginning of the body as text."""
    body = f.substring(f.col("body").cast("string"), 1, 40).alias("body")
    columns = ["topic", "queueId", "queueOffset", "tags", "keys", "storeTimestamp", body]
    batch.select(*columns).limit(ROWS_SHOWN).show(truncate=False)


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n{text}\n{'─' * len(text)}", flush=True)


def busy() -> str:
    """Return a warning if other programs load the machine, which lowers all rates; else an empty text."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 2 * processors:
        return ""
    return f"\nThis machine is busy ({load:.0f} programs for {processors} processors), so everything takes longer."


def megabytes(size: int) -> str:
    """Return a size in bytes as megabytes, right-aligned."""
    return f"{size / 1e6:8.1f} MB"


def rate(rows: int, seconds: float) -> str:
    """Return the duration and the number of messages per second, right-aligned."""
    return f"{seconds:7.2f} s {rows / seconds:12,.0f} messages/s"


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SHIPPED)
