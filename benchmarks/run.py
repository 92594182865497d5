"""Measure the speed and the memory of rmq-spark: `python benchmarks/run.py`. See README.md beside this file."""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from figures import Figure, table
from sample_stores import SampleStores

MESSAGES = 4_000_000
NAMES = {
    "decode": "log bytes to Arrow columns, over memcpy",
    "scan": "a Spark scan, over the limit of Spark's transport",
    "triggers": "an idle trigger, a micro-batch of one message, over a source that counts; many queues over one",
    "latency": "one message a trigger, over a source that counts; from send to the end of the trigger",
    "open": "open a store and read a row, ten segments over one",
    "memory": "anonymous memory of a reading task",
    "append": "columns to messages in a store, over memcpy; waits for the lock",
    "deliver": "a tick where a million messages wait, over a thousand; how late they are",
    "sink": "rows through Spark into a store, over a sink that only counts; bytes to disk",
    "seek": "seeks by time and key in a hundred times the messages; the end of a topic by a condition",
    "filter": "a filter that keeps one in a hundred, over no filter; bytes of the log that it touches",
    "listen": "a listener of 50 ms with one thread and with 20, in both models",
    "group": "an idle member of a group, polled over waiting; its wake; publishing, over Spark's own commit",
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write the JSON. A missed limit is not a failure: the machine may be busy."""
    asked = _parse(arguments)
    names = asked.only or list(NAMES)
    messages = MESSAGES // 10 if asked.quick else MESSAGES
    begin = time.perf_counter()
    figures = []
    for figure in _measure(names, asked.data, messages, asked.repeats, asked.pause):
        figures.append(figure)
        print(f"{figure.name}: {figure.value:.3g}{figure.unit} {figure.verdict} ({figure.note})", flush=True)
    about = {**_machine(), "messages": messages, "repeats": asked.repeats, "seconds": time.perf_counter() - begin}
    print("\n" + "; ".join(f"{name} {value}" for name, value in _machine().items()))
    print(f"{messages:,} messages, {asked.repeats} repeats, {about['seconds']:.0f} s\n")
    print(table(figures))
    if asked.json:
        report = {"about": about, "figures": [figure.to_json() for figure in figures]}
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the speed and the memory of rmq-spark.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the data: minutes less, more noise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument("--only", action="append", choices=NAMES, help="one of these; may be given again")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between the messages of `latency` (0.5)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each comparison (7)")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(tempfile.gettempdir()) / "rmq-spark-benchmarks",
        help="folder of the stores, which are built once: 5 GiB, 1 with --quick (%(default)s)",
    )
    return parser.parse_args(arguments)


def _measure(names: Iterable[str], data: Path, messages: int, repeats: int, pause_s: float) -> Iterator[Figure]:
    stores = SampleStores(data.absolute())
    if "decode" in names:
        from decoding import measure_decoding

        yield from measure_decoding(stores, messages, repeats)
    if "memory" in names:
        from task_memory import measure_task_memory

        yield from measure_task_memory(stores, messages, 3)
    if "open" in names:
        from opening import measure_opening

        yield from measure_opening(stores, messages, max(2 * repeats, 11))
    if "append" in names:
        from appending import measure_appending

        yield from measure_appending(stores, messages, repeats)
    if "deliver" in names:
        from delivering import measure_delivering

        yield from measure_delivering(stores, messages, max(repeats, 5))
    if "seek" in names:
        from seeking import measure_seeking

        yield from measure_seeking(stores, messages, repeats)
    if {"scan", "triggers", "latency", "open", "sink", "group", "listen", "seek", "filter"} & set(names):
        yield from _measure_in_spark(names, stores, messages, repeats, pause_s)


def _measure_in_spark(
    names: Iterable[str], stores: SampleStores, messages: int, repeats: int, pause_s: float
) -> Iterator[Figure]:
    from many_queues import measure_many_queues, measure_many_queues_in_spark
    from opening import measure_opening_in_spark
    from scanning import measure_scans
    from spark_for_benchmarks import start_spark
    from triggers import measure_triggers

    looks_file = stores.scratch("looks") / "count"
    spark = start_spark(looks_file)
    try:
        if "open" in names:
            yield from measure_opening_in_spark(spark, stores, messages, repeats)
        if "seek" in names:
            from seeking import measure_pushdown

            yield from measure_pushdown(spark, stores, messages, repeats)
        if "scan" in names:
            yield from measure_scans(spark, stores, messages, repeats)
        if "filter" in names:
            from filtering import measure_filtering

            yield from measure_filtering(stores, spark, messages, repeats)
        if "sink" in names:
            from sinking import measure_sinks

            yield from measure_sinks(spark, stores, messages, repeats)
        if "triggers" in names:
            yield from measure_triggers(spark, stores, looks_file, messages, max(repeats // 2, 3))
            yield from measure_many_queues(stores, max(repeats, 5))
            yield from measure_many_queues_in_spark(spark, stores, max(2 * repeats, 11))
        if "latency" in names:
            from latency import measure_latency

            yield from measure_latency(spark, stores, messages, max(repeats // 2, 3), pause_s)
        if "listen" in names:
            from listening import measure_listening

            yield from measure_listening(spark, stores, repeats)
        if "group" in names:
            from grouping import measure_groups

            yield from measure_groups(spark, stores, looks_file, repeats)
    finally:
        spark.stop()


def _machine() -> dict[str, str]:
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("pyspark", "pyarrow", "numpy")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
