"""The daemon that forks Spark's Python workers, with the modules that a task of ours needs already loaded.

Set `spark.python.daemon.module` to the name of this module. Without it each new worker imports numpy, pyarrow, PySpark
and the reader before its first row. Spark ends idle workers after a minute, but not the daemon.

A fork copies only the thread that calls it. A lock that another thread held would stay locked in the worker, so the
daemon must have one thread when it forks. numpy and pyarrow can start threads when they are imported. `main` therefore
asks their allocator for none, and counts the threads afterwards. If there are several, it replaces itself with
PySpark's daemon, which loads none of these modules.
"""

import gc
import os
import sys
from importlib import import_module

# What a worker loads before the first row of a task: PySpark's side of it, then ours, the sink included.
_MODULES = (
    "pyspark.worker",
    "rmq_spark.datasource.spark.source",
    "rmq_spark.datasource.spark.partition_reader",
    "rmq_spark.datasource.spark.writer",
)
_THREADS = "/proc/self/task"  # a folder with an entry for each thread of this process
# Settings that are read when a library is loaded. This one makes jemalloc, which pyarrow contains, start no thread.
_AT_IMPORT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


def main() -> None:
    """Load the modules and serve Spark. Returns only when Spark closes the standard input."""
    if not (_count_threads() == 1 and load_modules()):
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    from pyspark.daemon import manager

    manager()


def load_modules() -> bool:
    """Load what tasks need. Return whether that succeeded and this process still has one thread.

    The environment is the same afterwards, so the workers inherit what Spark and the user set.
    """
    added = {name: value for name, value in _AT_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        for name in _MODULES:
            import_module(name)
    except Exception:  # of any library: tasks that do not need it must still run
        return False
    finally:
        for name in added:
            del os.environ[name]
    # The collections between two tasks then skip what was loaded here, and do not copy its pages.
    gc.freeze()
    return _count_threads() == 1


def _count_threads() -> int:
    """Return the number of threads of this process, 0 if the system does not tell."""
    try:
        return len(os.listdir(_THREADS))
    except OSError:
        return 0


if __name__ == "__main__":
    main()
