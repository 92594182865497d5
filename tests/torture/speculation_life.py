"""Writes with tasks that are slow or fail at their first attempt, so that Spark runs them a second time.

    python speculation_life.py MASTER STORE NOTES WRITES [OPTION=VALUE …]

Every write has four tasks of 50 rows. In each write the first attempt of one task fails, and that of another one waits
until Spark has started a second one; then both run. The folder NOTES has a file
`<write>-<partition>-<attempt>` for each attempt. Prints "done" when everything was written.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pyspark import TaskContext

import rmq_spark

TASKS, ROWS = 4, 50
FAILS, WAITS = 1, 2  # partitions
DOUBLED_WITHIN_S = 120


def stumbling(notes: Path, write: int) -> Callable[[Iterator[int]], Iterator[tuple[str]]]:
    """Return what makes rows of a partition's numbers, and fails or waits in the middle of two of them."""

    def rows(numbers: Iterator[int]) -> Iterator[tuple[str]]:
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        (notes / f"{write}-{partition}-{attempt}").touch()
        for place, number in enumerate(numbers):
            if place == ROWS // 2 and attempt == 0 and partition == FAILS:
                raise RuntimeError("the first attempt fails")
            if place == ROWS // 2 and attempt == 0 and partition == WAITS:
                until = time.monotonic() + DOUBLED_WITHIN_S
                while not (notes / f"{write}-{partition}-1").exists() and time.monotonic() < until:
                    time.sleep(0.01)
            yield (str(number),)

    return rows


def main(master: str, store: str, notes: str, writes: str, *options: str) -> None:
    """Run `writes` writes."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        # A short life is not worth what Java's second compiler costs.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    conf |= dict(option.split("=", 1) for option in options)
    spark = rmq_spark.session("speculation", master=master, conf=conf)
    for write in range(int(writes)):
        numbers = range(write * TASKS * ROWS, (write + 1) * TASKS * ROWS)
        rows = spark.sparkContext.parallelize(numbers, TASKS).mapPartitions(stumbling(Path(notes), write))
        frame = spark.createDataFrame(rows, "body string")
        frame.write.format("rmq").mode("append").option("topic", "orders").save(store)
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
