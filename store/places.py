"""Places: from the options of a query to the location of what it reads or writes.

This module is above every implementation of the contract (`store.backend`), so that the Spark side needs none of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmq_spark.store.backend import Location
from rmq_spark.store.disk.files import parent_process_id
from rmq_spark.store.disk.host import usable_cores
from rmq_spark.store.local.directory import StoreDirectory

__all__ = ["from_mark", "locate", "parent_process_id", "usable_cores"]

# The values of these options say where a place is.
PATH, COMMIT_LOG_PATH, READ_MODE = "path", "commitLogPath", "readMode"


def locate(options: Mapping[str, Any]) -> Location | None:
    """Return the location that parsed options name, by their names. Return None if none of them says where it is.

    A relative path starts at this process's working directory, and `~` is the home of its user. So call this on the
    driver: executors may have another working directory and user.
    """
    path = options.get(PATH)
    if path is None:
        return None
    log = options.get(COMMIT_LOG_PATH)
    log_text = None if log is None else ",".join(map(_absolute, log))
    return StoreDirectory(_absolute(path), log_text, options.get(READ_MODE, "auto"))


def from_mark(mark: Mapping[str, Any]) -> Location:
    """Return the location in a query's progress, which `Location.mark` returned."""
    log = mark.get(COMMIT_LOG_PATH)
    return StoreDirectory(str(mark[PATH]), None if log is None else str(log))


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # the user does not exist, so `~name` is a folder
        return str(Path(path).absolute())
