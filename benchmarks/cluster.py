"""Measure reading from a cluster and sending to it: `python benchmarks/cluster.py`. See README.md beside this file.

`read`, `send`, `commit`, `latency` and `group` need a JDK and Maven, as tests/compat does; `queues` needs neither.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, table
from real_broker import UnavailableError, enter_network, find_java, new_folder

MESSAGES = 1_000_000
SENDS = 1_000
NAMES = {
    "read": "messages a second and processor time, over the Java client; a Spark scan",
    "send": "messages a second and processor time of send_many and sink, over the Java producer and Kafka's sink",
    "commit": "a batch of one row in a stream, exactly once and at least once, and its parts",
    "latency": "from a Java send to our long poll's answer, over a Java push consumer; an idle long poll",
    "group": "what a trigger spends on its consumer group, over Spark's own commit",
    "queues": "triggers over many queues: requests, processor time, memory",
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write the JSON. A missed limit is not a failure: the machine may be busy."""
    asked = _parse(arguments)
    names = asked.only or list(NAMES)
    folder = new_folder(asked.data / "cluster")
    begin = time.perf_counter()
    try:
        if set(names) - {"queues"}:
            code = enter_network(folder)
            if code is not None:
                return code
        figures = []
        for figure in _measure(names, folder, asked):
            figures.append(figure)
            print(f"{figure.name}: {figure.value:.3g}{figure.unit} {figure.verdict} ({figure.note})", flush=True)
    except UnavailableError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    finally:
        new_folder(folder).rmdir()
    print(f"\n{asked.messages:,} messages, {asked.repeats} repeats, {time.perf_counter() - begin:.0f} s\n")
    print(table(figures))
    if asked.json:
        asked.json.write_text(json.dumps([figure.to_json() for figure in figures], indent=2) + "\n")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure reading from a cluster and sending to it.")
    parser.add_argument("--only", action="append", choices=NAMES, help="one of these; may be given again")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="in each topic (%(default)s)")
    parser.add_argument("--sends", type=int, default=SENDS, help="messages of `latency` (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each comparison (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(tempfile.gettempdir()) / "rmq-spark-benchmarks",
        help="folder of the stores, which are removed in the end: 8 GiB (%(default)s)",
    )
    return parser.parse_args(arguments)


def _measure(names: list[str], folder: Path, asked: argparse.Namespace) -> Iterator[Figure]:
    if "queues" in names:  # first, because freed memory is used again
        from cluster_queues import measure_cluster_queues

        yield from measure_cluster_queues()
    if "latency" in names:
        from cluster_latency import measure_cluster_latency

        yield from measure_cluster_latency(find_java(folder), folder, asked.sends)
    if {"read", "send", "commit", "group"} & set(names):
        yield from _measure_with_spark(names, folder, asked)


def _measure_with_spark(names: list[str], folder: Path, asked: argparse.Namespace) -> Iterator[Figure]:
    from cluster_committing import measure_cluster_commits
    from cluster_grouping import measure_cluster_groups
    from cluster_reading import measure_cluster_reading
    from cluster_sending import measure_cluster_sending
    from kafka_node import spark_jars
    from spark_for_benchmarks import start_spark

    java, looks_file = find_java(folder), folder / "looks"
    spark = start_spark(looks_file, spark_jars() if "send" in names else ())
    try:
        if "group" in names:
            yield from measure_cluster_groups(java, folder, spark, looks_file)
        if "commit" in names:
            yield from measure_cluster_commits(java, folder, spark, looks_file)
        if "read" in names:
            yield from measure_cluster_reading(java, folder, spark, asked.messages, asked.repeats)
        if "send" in names:
            yield from measure_cluster_sending(java, folder, spark, asked.messages, asked.repeats)
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
