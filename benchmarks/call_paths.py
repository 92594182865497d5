"""Count the functions, files and file switches that a reader of the code must follow in four common calls.

    python benchmarks/call_paths.py

Each call runs once before it is counted. A function counts once, a file counts once; a switch is a call from a function
in one file to a function in another. Only files of this project count. Imports are not counted.
"""

import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

from pyspark.sql.types import BinaryType, LongType, StructField, StructType

import rmq_spark
from rmq_spark.datasource.spark.source import RmqDataSource

ROOTS = tuple(str(Path(rmq_spark.__file__).resolve().parent / name) for name in ("store", "datasource", ""))


class CallPath:
    """The project's functions that ran while it was entered, and how often control passed from file to file."""

    def __init__(self) -> None:
        self.functions: set[types.CodeType] = set()
        self.switches = 0

    def __enter__(self) -> "CallPath":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {code.co_filename for code in self.functions}

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_ours(code) or code.co_name == "<module>":
            return
        self.functions.add(code)
        caller = frame.f_back
        while caller is not None and not _is_ours(caller.f_code):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.switches += 1


def _is_ours(code: types.CodeType) -> bool:
    return "/rmq_spark/" in code.co_filename or code.co_filename.startswith(ROOTS)


def count(name: str, call: Callable[[], object]) -> CallPath:
    """Run the call twice, count the second time, print a line."""
    call()
    with CallPath() as path:
        call()
    print(f"{name:34} {len(path.functions):5} functions {len(path.files):4} files {path.switches:6} switches")
    return path


def read_one(store: str) -> None:
    """Open the store, and read the first queue of its topic."""
    with rmq_spark.open_reader(store) as reader:
        reader.refresh()
        queue = reader.queues("orders")[0]
        bounds = reader.bounds(queue)
        for _ in reader.read(queue, bounds.min_offset, bounds.max_offset, ["queueOffset", "body"]):
            pass


def first_batch(store: str) -> None:
    """Do what Spark does for a stream's first batch: plan it on the driver, read its partitions in tasks."""
    options = {"path": store, "subscribe": "orders", "startingOffsets": "earliest", "columns": "queueOffset,body"}
    schema = StructType([StructField("queueOffset", LongType()), StructField("body", BinaryType())])
    reader = RmqDataSource(options).streamReader(schema)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    for partition in reader.partitions(start, end):
        for _ in reader.read(partition):
            pass
    reader.stop()


def main() -> None:
    """Print the four counts, for a new store of a few messages."""
    folder = tempfile.mkdtemp()
    try:
        store = f"{folder}/store"
        with rmq_spark.open_store(store) as producer:
            send = count("send, warm", lambda: producer.send("orders", b"body", tags="a", keys="k"))
            producer.settle()
        count("open_reader and one read", lambda: read_one(store))
        batch = count("a stream's first batch", lambda: first_batch(store))
        files = send.files | batch.files
        print(f"{'from send to a row in Spark':34} {'':15} {len(files):4} files")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
