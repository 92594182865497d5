"""One driver whose query, alone in its group, has read all there is and waits in a trigger for more, until killed.

    python waiting_life.py MASTER STORE CHECKPOINT WAIT

WAIT is its longPollingMs. Prints "waits" when the query has published that it has read the one message of the topic
orders: then its trigger is about to wait.
"""

import sys
import time

import rmq_spark

GROUP = "waiters"


def main(master: str, store: str, checkpoint: str, wait: str) -> None:
    """Wait until killed."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        # A short life is not worth what Java's second compiler costs.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = rmq_spark.session("waiting", master=master, conf=conf)
    reader = spark.readStream.format("rmq").options(subscribe="orders", consumerGroup=GROUP)
    reader = reader.options(startingOffsets="earliest", longPollingMs=wait, queryName="the one that waits")
    reader.load(store).writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    while rmq_spark.group_offsets(store, GROUP) != {"orders": {0: 1}}:
        time.sleep(0.01)
    print("waits", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
