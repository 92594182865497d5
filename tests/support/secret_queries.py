"""A program that reads and writes a cluster with secrets: `secret_queries.py FOLDER`, options as JSON in its input.

Everything that Spark and its processes write is in the folder then: logs, events, plans, progress, checkpoint, local
files, and the environment and arguments of all processes. It prints the rows' bodies as JSON.
"""

import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import rmq_spark


def run(folder: Path, options: dict[str, str]) -> list[str]:
    """Run a batch query, a stream and a query that fails, and the same kinds of writes.

    Return the bodies of the rows of the first two queries, and of the rows that were written.
    """
    (folder / "events").mkdir()
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(folder / "events"),
        "spark.local.dir": str(folder / "local"),
        "spark.log.level": "INFO",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = rmq_spark.session(master="local[2]", conf=conf)
    batch = spark.read.format("rmq").options(**options).load()
    bodies = _bodies(batch)
    (folder / "plans").write_text("\n".join([*_plans(spark, batch), repr(batch), str(batch.schema)]))
    stream = spark.readStream.format("rmq").options(**options, startingOffsets="earliest").load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(folder / "rows"))
    query.awaitTermination()
    bodies += _bodies(spark.read.parquet(str(folder / "rows")))
    (folder / "progress").write_text("\n".join(_progress(query)))
    wrong = {**options, "secretKey": options["secretKey"] + "-wrong"}
    errors = [_error(spark.read.format("rmq").options(**wrong).load().collect)]
    errors += _write(spark, folder, options)
    bodies += _bodies(spark.read.format("rmq").options(**options | {"subscribe": "copies"}).load())
    (folder / "error").write_text("\n".join(errors))
    (folder / "processes").write_bytes(b"\n".join(_processes()))
    shutil.copytree(folder / "local", folder / "local-at-work")  # Spark will delete them
    spark.stop()
    return sorted(bodies)


def _bodies(frame: DataFrame) -> list[str]:
    return [bytes(row.body).decode() for row in frame.collect()]


def _write(spark: SparkSession, folder: Path, options: dict[str, str]) -> list[str]:
    """Write to the topic copies, in a batch and a stream. Return the texts of writes that fail."""
    of_source = {name: text for name, text in options.items() if name != "subscribe"}
    sink = {**of_source, "topic": "copies", "queues": "1", "delivery": "atLeastOnce"}
    rows = spark.createDataFrame([("written",)], "body string")
    rows.write.format("rmq").options(**sink).mode("append").save()
    stream = spark.readStream.format("rmq").options(**options, startingOffsets="earliest", columns="body").load()
    writer = stream.writeStream.format("rmq").options(**sink, checkpointLocation=str(folder / "sink-checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    (folder / "sink-progress").write_text("\n".join(_progress(query)))
    failing = {
        "in the driver": {"secretKey": options["secretKey"] + "-wrong", "topic": "others"},
        "of an option": {"delivery": "exactlyOnce"},
        "in a task": {"maxMessageSize": "1"},
    }
    return [_error(rows.write.format("rmq").options(**sink | given).mode("append").save) for given in failing.values()]


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("a query or write that must fail did not")


def _plans(spark: SparkSession, frame: DataFrame) -> Iterator[str]:
    yield frame._jdf.queryExecution().toString()
    yield frame._jdf.queryExecution().explainString(
        spark._jvm.org.apache.spark.sql.execution.ExplainMode.fromString("formatted")
    )
    yield frame._jdf.queryExecution().logical().toJSON()
    frame.createOrReplaceTempView("planned")
    yield spark.sql("DESCRIBE EXTENDED planned")._jdf.showString(100, 0, False)


def _progress(query: StreamingQuery) -> Iterator[str]:
    yield from (progress.json for progress in query.recentProgress)
    yield query._jsq.explainInternal(True)
    yield str(query.status)


def _processes() -> Iterator[bytes]:
    """Yield environment and arguments of this process and all that it has started."""
    found, more = set[int](), {os.getpid()}
    while more:
        found |= more
        more = {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) in found} - found
    for number in found:
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{number}/environ").read_bytes()
            yield Path(f"/proc/{number}/cmdline").read_bytes()


def _parent(stat: Path) -> int:
    with contextlib.suppress(OSError):
        return int(stat.read_text().rpartition(")")[2].split()[1])
    return -1


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(json.dumps(run(place, json.load(sys.stdin))))
