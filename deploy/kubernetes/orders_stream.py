"""Streams large orders into a topic of their own, at least once, until SIGTERM. Not run: see ../README.md."""

import os
import signal
import threading

import rmq_spark

TRIGGER = "10 seconds"
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())

spark = rmq_spark.session(
    "orders-stream",
    master=os.environ["SPARK_MASTER"],
    conf={
        # Workers connect to the driver at the address of its pod.
        "spark.driver.host": os.environ["POD_IP"],
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.driver.port": "7078",
        "spark.executor.memory": "2g",
        "spark.executor.cores": "2",
        # How long a stop waits for the query's thread to end.
        "spark.sql.streaming.stopTimeout": "100s",
    },
)
orders = (
    spark.readStream.format("rmq")
    .option("nameServer", os.environ["RMQ_NAME_SERVER"])
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .option("columns", "tags,keys,body")
    .load()
)
query = (
    orders.where("try_cast(get_json_object(string(body), '$.amount') AS DECIMAL(18, 2)) >= 1000")
    .writeStream.format("rmq")
    .option("nameServer", os.environ["RMQ_NAME_SERVER"])
    .option("topic", "orders_big")
    .option("delivery", "atLeastOnce")
    .option("checkpointLocation", "/opt/checkpoint/orders_big")
    .trigger(processingTime=TRIGGER)
    .start()
)
while query.isActive and not stopped.wait(1):
    pass
query.stop()
if query.exception() is not None:
    raise query.exception()
spark.stop()
