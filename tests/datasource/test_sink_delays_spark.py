"""Rows with a delay level or a time, written by Spark: they wait in the same queues as under a broker."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SCHEDULE, TIMER = "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"


def read(spark: "SparkSession", path: Path, topic: str) -> dict[int, tuple[int, dict[str, str]]]:
    """Return queue id and properties of a topic's messages, by the number in their body."""
    frame = spark.read.format("rmq").options(subscribe=topic, columns="queueId,body,properties").load(str(path))
    found = {}
    for row in frame.collect():
        properties = {name: value for name, value in row["properties"].items() if name != "UNIQ_KEY"}
        found[int(row["body"])] = row["queueId"], properties
    return found


def test_rows_with_levels_and_times_wait_and_all_others_are_there(spark: "SparkSession", tmp_path: Path) -> None:
    second = wall_clock_ms() // 1000 + 600
    rows = spark.range(0, 120, numPartitions=3).select(
        F.col("id").cast("string").alias("body"),
        F.when(F.col("id") % 2 == 0, "orders").otherwise("payments").alias("topic"),
        F.lit("t").alias("tags"),
        (F.col("id") % 4).cast("int").alias("queueId"),
        F.when(F.col("id") % 3 == 0, F.col("id") - 20).cast("int").alias("delayLevel"),
        F.when(F.col("id") % 5 == 0, F.timestamp_seconds(F.lit(second))).alias("deliverTimestamp"),
    )
    rows.write.format("rmq").mode("append").save(str(tmp_path))
    leveled = {number: min(number - 20, 18) for number in range(21, 120, 3)}
    timed = set(range(0, 120, 5)) - set(leveled)
    real = {number: (("orders", "payments")[number % 2], str(number % 4)) for number in range(120)}
    assert read(spark, tmp_path, SCHEDULE) == {
        number: (
            level - 1,
            {"TAGS": "t", "DELAY": str(level), "REAL_TOPIC": real[number][0], "REAL_QID": real[number][1]},
        )
        for number, level in leveled.items()
    }
    times = {"TIMER_DELIVER_MS": str(second * 1000), "TIMER_OUT_MS": str(second * 1000 - 1000)}
    assert read(spark, tmp_path, TIMER) == {
        number: (0, {"TAGS": "t", **times, "REAL_TOPIC": real[number][0], "REAL_QID": real[number][1]})
        for number in timed
    }
    here = {**read(spark, tmp_path, "orders"), **read(spark, tmp_path, "payments")}
    assert here == {number: (number % 4, {"TAGS": "t"}) for number in set(range(120)) - set(leveled) - timed}


def test_the_tables_of_a_store_are_those_of_the_program_that_opened_it(spark: "SparkSession", tmp_path: Path) -> None:
    rmq_spark.open_store(tmp_path, message_delay_level="3s 1h").close()
    rows = spark.createDataFrame([("0", 9)], "body string, delayLevel int")
    rows.write.format("rmq").mode("append").option("topic", "orders").save(str(tmp_path))
    assert {number: found[0] for number, found in read(spark, tmp_path, SCHEDULE).items()} == {0: 1}
