"""One driver of a group's query from store to store, that is told when to start and to stop it, until it is killed.

    python group_life.py MASTER SOURCE STORE ORDERS

Prints "ready" when it has a session. The folder ORDERS tells it what to do: a file `start-<number>` holds the path of
a checkpoint with which the query begins, `stop-<number>` stops it. Prints the file's name when it is done.
"""

import sys
import time
from pathlib import Path

import rmq_spark

GROUP = "copies"
ROWS_A_BATCH = 25


def main(master: str, source: str, store: str, orders: str) -> None:
    """Obey until killed."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        # A short life is not worth what Java's second compiler costs.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = rmq_spark.session("group", master=master, conf=conf)
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        checkpoint = wait_for(Path(orders) / f"start-{number}")
        reader = spark.readStream.format("rmq").options(subscribe="orders", columns="topic,queueId,body")
        reader = reader.options(consumerGroup=GROUP, startingOffsets="group", groupFallback="earliest")
        writer = reader.options(maxOffsetsPerTrigger=ROWS_A_BATCH).load(source).writeStream.format("rmq")
        query = writer.option("checkpointLocation", checkpoint).start(store)
        print(f"start-{number}", flush=True)
        wait_for(Path(orders) / f"stop-{number}")
        failure = query.exception()
        query.stop()
        print(f"stop-{number}" if failure is None else f"failed: {failure}", flush=True)


def wait_for(order: Path) -> str:
    """Wait until the file exists, and return its contents."""
    while not order.exists():
        time.sleep(0.01)
    return order.read_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
