"""What a trigger of a stream spends on its consumer group in a cluster, over what Spark spends on its own two commits.

The stream is the only member of its group, over real brokers. Each trigger reads one message of every queue, so every
queue has an offset to publish. A trigger looks at the group, and every 5 s it publishes and looks at the members.
"""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from compat_kit.rocketmq import Java
from figures import Figure
from grouping import BATCHES, WARM_UP, measure_triggers
from pyspark.sql import SparkSession
from real_broker import new_folder, two_brokers

import rmq_spark

_QUEUES = (16, 1000)  # on two brokers
_MESSAGES = WARM_UP + BATCHES + 25  # of each queue


def measure_cluster_groups(java: Java, folder: Path, spark: SparkSession, looks_file: Path) -> Iterable[Figure]:
    """Yield the figure of each number of queues."""
    for queues in _QUEUES:
        home = new_folder(folder / f"group-{queues}")
        with two_brokers(java, home) as cluster:
            with cluster.client() as client:
                client("create-topic", topic="grouped", queues=queues // 2)
            with rmq_spark.open_store(name_server=cluster.address) as producer:
                for _ in range(_MESSAGES):
                    producer.send_many(_one_of_each(cluster.brokers, queues // 2), topic="grouped")
            options = {
                "nameServer": cluster.address,
                "subscribe": "grouped",
                "groupFallback": "earliest",
                "maxOffsetsPerTrigger": str(queues),
            }
            name = f"the group's share of a trigger at {queues} queues, over Spark's own commit"
            yield measure_triggers(spark, looks_file, options, home / "checkpoint", name)
        new_folder(home).rmdir()


def _one_of_each(brokers: Iterable[str], queues: int) -> pa.Table:
    """Return a message for each queue."""
    names = [name for name in brokers for _ in range(queues)]
    ids = [number for _ in brokers for number in range(queues)]
    return pa.table({"body": [b"x" * 200] * len(ids), "brokerName": names, "queueId": pa.array(ids, pa.int32())})
