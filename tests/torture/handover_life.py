"""One driver whose query shares a group, and may be told to sleep in its batches, or to have a long trigger interval.

    python handover_life.py MASTER STORE FOLDER INTERVAL HANDOVER_TIMEOUT LEASE_TIMEOUT LEASE_HEARTBEAT

Prints "ready" when it has a session, begins its query when FOLDER has a file `begin`, and then prints "started". To the
file `notes` it adds a line "<queue id> <queue offset>" for each message of a batch. While a file `sleep` exists, each
batch sleeps after that. A file `stop` stops the query; then it prints "stopped".

INTERVAL is the trigger's, "" for none.
"""

import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame

import rmq_spark

GROUP = "relay"


def main(master: str, store: str, folder: str, interval: str, *times: str) -> None:
    """Deliver until told to stop."""
    conf = {
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # A short life is not worth what Java's second compiler costs.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = rmq_spark.session("relay", master=master, conf=conf)
    print("ready", flush=True)
    here = Path(folder)
    wait_for(here / "begin")
    with open(here / "notes", "a") as file:

        def note(frame: DataFrame, batch_id: int) -> None:
            table = frame.toArrow()
            rows = zip(table.column("queueId").to_pylist(), table.column("queueOffset").to_pylist(), strict=True)
            file.writelines(f"{queue_id} {offset}\n" for queue_id, offset in rows)
            file.flush()
            while (here / "sleep").exists() and table.num_rows:
                time.sleep(0.02)

        names = ("handoverTimeout", "leaseTimeout", "leaseHeartbeat")
        reader = spark.readStream.format("rmq").options(subscribe="orders", columns="queueId,queueOffset")
        reader = reader.options(consumerGroup=GROUP, assignment="shared", groupFallback="earliest")
        reader = reader.options(longPollingMs="1s", **dict(zip(names, times, strict=True)))
        writer = reader.load(store).writeStream.foreachBatch(note)
        if interval:
            writer = writer.trigger(processingTime=interval)
        query = writer.option("checkpointLocation", str(here / "checkpoint")).start()
        print("started", flush=True)
        wait_for(here / "stop")
        failure = query.exception()
        query.stop()
        print("stopped" if failure is None else f"failed: {failure}", flush=True)
    spark.stop()


def wait_for(path: Path) -> None:
    """Return once there is such a file."""
    while not path.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
