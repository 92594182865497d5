"""The Spark that is measured: two local cores, and the sources of the benchmark beside the real one."""

import os
from collections.abc import Sequence
from pathlib import Path

from plain_sources import LOOKS_FILE, CountedRmq, Counting, Discard, Ready, WokenRmq
from pyspark.sql import SparkSession
from timed_group import TimedGroup
from timed_sink import TimedSink

import rmq_spark

CORES = 2


def start_spark(looks_file: Path, jars: Sequence[str] = ()) -> SparkSession:
    """Return a session with the sources of the benchmark; streams keep the number of their polls in the file.

    Its virtual machine has `jars` too.
    """
    # Workers inherit the environment of the JVM: they import the plain sources by name, and this rmq_spark.
    folders = [str(Path(__file__).parent), str(Path(rmq_spark.__file__).parent.parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ[LOOKS_FILE] = str(looks_file)
    spark = rmq_spark.session(
        "rmq-spark benchmarks",
        master=f"local[{CORES}]",
        conf={
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "OFF",  # a stream that is stopped in mid-batch logs that as an error
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": "2",
            **({"spark.jars": ",".join(jars)} if jars else {}),
        },
    )
    for source in (Ready, Discard, Counting, CountedRmq, TimedGroup, TimedSink, WokenRmq):
        spark.dataSource.register(source)
    return spark
