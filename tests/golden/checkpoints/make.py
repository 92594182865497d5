"""Write the checkpoints of this folder: run each query of queries.json over a copy of its golden store.

    python tests/golden/checkpoints/make.py --out FOLDER [NAME ...]

Rows and positions are the same in every run. The ids of the queries, the times and the number of the group's reset
differ, so a run does not write the committed bytes again.
"""

import argparse
import json
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import rmq_spark

HERE = Path(__file__).resolve().parent
QUERIES: dict[str, dict[str, Any]] = json.loads((HERE / "queries.json").read_text())
LIVES = {"plain": "ok ok", "group": "ok dies", "losses": "dies", "finished": "ok"}  # one batch in each life
RESET = {"orders": {0: 1}}  # of the group, between its two lives
DEATH = "the query dies"
WITHIN_S = 120


class Life:
    """One run of a query, which processes one batch. In this batch the query dies, if `dies`."""

    def __init__(self, spark: SparkSession, name: str, store: Path, checkpoint: Path, dies: bool) -> None:
        self._spark, self._name, self._store, self._checkpoint, self._dies = spark, name, store, checkpoint, dies

    def run(self) -> None:
        """Run the query until its batch is committed, or until it dies."""
        reader = self._spark.readStream.format("rmq").options(**QUERIES[self._name]["options"])
        writer = reader.load(str(self._store)).writeStream.foreachBatch(self._process)
        query = writer.option("checkpointLocation", str(self._checkpoint)).trigger(processingTime="1 hour").start()
        if self._dies:
            _wait_for_death(query)
            return
        until = time.monotonic() + WITHIN_S
        while not query.lastProgress:  # which comes after the commit
            assert query.isActive, query.exception()
            assert time.monotonic() < until, f"no batch within {WITHIN_S} s"
            time.sleep(0.1)
        query.stop()

    def _process(self, frame: DataFrame, batch_id: int) -> None:
        rows = sorted((row["topic"], row["queueId"], row["queueOffset"]) for row in frame.collect())
        print(self._name, "batch", batch_id, rows, flush=True)
        if self._dies:
            raise RuntimeError(DEATH)


def _wait_for_death(query: StreamingQuery) -> None:
    try:
        query.awaitTermination(WITHIN_S)
    except StreamingQueryException as error:
        if DEATH in str(error):
            return
        raise
    raise TimeoutError(f"the query lives after {WITHIN_S} s")


def make(spark: SparkSession, name: str, folder: Path, out: Path) -> None:
    """Run all lives of one query. Copy its checkpoint, and the files that it wrote into the store.

    Spark's checksums, empty lock files and the files of the dead member are left out, because the last ones name this
    machine and its processes. In the ids of members the name of this machine is replaced.
    """
    golden = HERE.parent / QUERIES[name]["store"]
    store, checkpoint = folder / "store", folder / "checkpoint"
    shutil.copytree(golden, store)
    for number, end in enumerate(LIVES[name].split()):
        if name == "group" and number == 1:
            rmq_spark.reset_offsets(store, "billing", RESET)
        Life(spark, name, store, checkpoint, end == "dies").run()
    for file in (checkpoint / "metadata", *checkpoint.glob("offsets/[0-9]*"), *checkpoint.glob("commits/[0-9]*")):
        _write(out / name / file.relative_to(checkpoint), file.read_bytes())
    for file in (path for path in store.rglob("*") if path.is_file() and path.parent.name != "members"):
        old, written = golden / file.relative_to(store), file.read_bytes()
        if written and (not old.exists() or old.read_bytes() != written):
            anonymous = written.replace(f"{socket.gethostname()}@".encode(), b"driver@")
            _write(out / f"{name}-files" / file.relative_to(store), anonymous)


def _write(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def main() -> None:
    """Write the checkpoints that the arguments name, or all of them."""
    parser = argparse.ArgumentParser(description="Write golden checkpoints.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUERIES)}")
    given = parser.parse_args()
    spark = rmq_spark.session("golden checkpoints", master="local[1]", conf={"spark.sql.shuffle.partitions": "2"})
    for name in given.names or QUERIES:
        with tempfile.TemporaryDirectory() as folder:
            make(spark, name, Path(folder), given.out)
    spark.stop()


if __name__ == "__main__":
    main()
