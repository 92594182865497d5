"""Anonymous memory of a reading task: with ten times the messages, and over a task that reads nothing.

A task is a process that works like Spark's Python worker: it unpickles a reader and one partition, and writes the
batches of `read` to an Arrow stream. Only anonymous memory (RssAnon) counts, sampled every millisecond: mapped files
belong to the page cache, which the kernel can reclaim. Run with a file, this module is that process.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import pyarrow as pa
from decoding import DEFAULT_COLUMNS
from figures import Figure, ratio_figure, take_turns
from opening import segment_shapes
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from sample_stores import TOPIC, SampleStores

from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store import COLUMNS

OVER_NOTHING_MIB = 150
_SAMPLE_SECONDS = 0.001
_MIB = 1 << 20


def measure_task_memory(stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield both figures for the default columns and for every one. Nothing where there is no /proc."""
    if not Path("/proc/self/status").exists():
        print("memory: skipped, it takes /proc, which only Linux has", flush=True)
        return
    tasks = stores.scratch("tasks")
    for name, columns in (("default columns", DEFAULT_COLUMNS), ("every column", list(COLUMNS))):
        files = [tasks / "one", tasks / "ten"]
        for shape, file in zip(segment_shapes(messages), files, strict=True):
            _plan(str(stores.path(shape)), columns, file)
        nothing_file = tasks / "nothing"
        _plan_nothing(files[0], nothing_file)
        one, ten, nothing = take_turns(
            repeats,
            lambda files=files: peak_mib(__file__, str(files[0])),
            lambda files=files: peak_mib(__file__, str(files[1])),
            lambda file=nothing_file: peak_mib(__file__, str(file)),
        )
        yield ratio_figure(
            f"memory of a task, {name}, 10x the messages over 1x",
            ten,
            one,
            required=1.15,
            at_most=True,
            note=f"{median(ten):.0f} and {median(one):.0f} MiB",
            detail={"mib": median(ten), "mib_at_a_tenth": median(one)},
        )
        extra = [much - least for much, least in zip(ten, nothing, strict=True)]
        yield Figure(
            f"memory of a task, {name}, over one that reads nothing",
            median(extra),
            min(extra),
            max(extra),
            required=OVER_NOTHING_MIB,
            at_most=True,
            unit="MiB",
            note=f"nothing takes {median(nothing):.0f} MiB",
            detail={"mib_of_nothing": median(nothing)},
        )


def _plan(path: str, columns: list[str], file: Path) -> None:
    """Keep a reader and its first partition, as the driver sends them."""
    options = {"path": path, "subscribe": TOPIC, "columns": ",".join(columns)}
    schema = from_arrow_schema(pa.schema([(name, COLUMNS[name]) for name in columns]))
    reader = RmqDataSource(options).reader(schema)
    file.write_bytes(pickle.dumps((reader, reader.partitions()[0])))


def _plan_nothing(like: Path, file: Path) -> None:
    """Keep the same reader with the empty partition that Spark puts in where a plan has none."""
    reader, _ = pickle.loads(like.read_bytes())
    file.write_bytes(pickle.dumps((reader, InputPartition(None))))


def peak_mib(*arguments: str) -> float:
    """Run Python with these arguments and return the peak of its anonymous memory, in MiB.

    The program prints its own measurement, in bytes. A number below 0 is its earlier memory; then return the growth.
    """
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    peak = 0
    while True:
        try:
            process.wait(_SAMPLE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, _anonymous_bytes(process.pid))
    assert process.stdout is not None
    with process.stdout as output:
        told = int(output.read())
    if process.returncode:
        raise RuntimeError(f"the process failed with {process.returncode}")
    return (peak + told if told < 0 else max(peak, told)) / _MIB


def _anonymous_bytes(process_id: int | str) -> int:
    """Return RssAnon of a process, 0 if it has ended."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def run_task(file: str) -> int:
    """Run a task like a Python worker; return the largest RssAnon between two batches."""
    import pyspark.worker  # noqa: F401

    reader: DataSourceReader
    reader, partition = pickle.loads(Path(file).read_bytes())
    peak, writer = 0, None
    with open("/dev/null", "wb") as sink:
        for batch in reader.read(partition):
            if writer is None:
                writer = pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
            peak = max(peak, _anonymous_bytes("self"))
    return max(peak, _anonymous_bytes("self"))


if __name__ == "__main__":
    print(run_task(sys.argv[1]))
