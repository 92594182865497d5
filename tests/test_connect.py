"""A session of Spark Connect with a local server: source, sink, `parse`, `stop_at_end` and errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys, tempfile
import rmq_spark
from pyspark.sql import SparkSession

folder = sys.argv[1]
store = folder + "/store"
with rmq_spark.open_store(store, queues=1) as opened:
    for number in range(5):
        opened.send("orders", json.dumps({"number": number}))
found = {}


def refusal(function):
    try:
        function()
    except Exception as error:
        return rmq_spark.explain(error)


def stream(name, **more):
    frame = spark.readStream.format("rmq").options(subscribe="orders", startingOffsets="earliest", **more).load(store)
    return frame.writeStream.format("noop").option("checkpointLocation", f"{folder}/{name}")


spark = rmq_spark.session(conf={"spark.sql.shuffle.partitions": "2"})
found["module"] = type(spark).__module__
found["pushdown"] = spark.conf.get("spark.sql.python.filterPushdown.enabled")
rmq_spark.register(spark)  # again
orders = spark.read.format("rmq").load(store, subscribe="orders")
found["rows"] = orders.count()
parsed = rmq_spark.parse(orders, "json", "number int")
found["parsed"] = sorted(row["number"] for row in parsed.select("value.number").collect())
good, bad = rmq_spark.parse(orders, "json", "number int", on_corrupt_record="split")
found["split"] = [good.count(), bad.count()]
spark.createDataFrame([("x",)], "body string").write.format("rmq").mode("append").save(store, topic="copies")
found["written"] = spark.read.format("rmq").load(store, subscribe="copies").count()
found["end"] = rmq_spark.stop_at_end(stream("bounded", endingOffsets="latest").start(), 100)
found["now"] = rmq_spark.stop_at_end(stream("now").trigger(availableNow=True).start(), 100)
found["load"] = refusal(lambda: spark.read.format("rmq").load(store, subscrib="orders").count())
found["plan"] = refusal(lambda: spark.read.format("rmq").load(store, subscribe="order").count())
frame = spark.readStream.format("rmq").option("subscribe", "orders").load(store)
found["consume"] = refusal(
    lambda: rmq_spark.consume(frame, print, path=store, group="g", checkpoint_location=folder + "/consumed")
)
failed = spark.readStream.format("rmq").option("subscribe", "order").load(store).writeStream.format("noop")
failed = failed.option("checkpointLocation", folder + "/failed").start()
refusal(lambda: failed.awaitTermination(100))
found["stream"] = rmq_spark.explain(failed.exception())
print(json.dumps(found), flush=True)
"""


def test_connect_serves_the_source_and_the_functions_of_rmq_spark(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs grpcio")
    pytest.importorskip("grpc_status", reason="Spark Connect needs grpcio-status")
    pytest.importorskip("pandas", reason="Spark Connect needs pandas")
    pytest.importorskip("zstandard", reason="Spark Connect needs zstandard")
    script = tmp_path / "script.py"  # given with -c, PySpark would take it for a doctest, and end without a word
    script.write_text(SCRIPT)
    environment = os.environ | {"SPARK_REMOTE": "local[2]", "PYSPARK_PYTHON": sys.executable}
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert ran.stdout, ran.stderr[-5000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    missing = 'NotFoundError: no topic "order" in the store at '
    assert found.pop("load").startswith('OptionError: unknown option "subscrib". Did you mean subscribe?')
    assert found.pop("plan").startswith(missing)
    assert found.pop("stream").startswith(missing)
    assert found.pop("consume").startswith("OptionError: consume() needs a session in this process: Spark Connect")
    assert found == {
        "module": "pyspark.sql.connect.session",
        "pushdown": "true",
        "rows": 5,
        "parsed": [0, 1, 2, 3, 4],
        "split": [5, 0],
        "written": 1,
        "end": True,
        "now": True,
    }
