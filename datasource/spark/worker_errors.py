"""Errors of ours as Spark shows them: the class and the message, without the frames of the worker.

A worker of Spark answers with the traceback of an error, and Spark makes it a part of its own message. For an error of
ours the frames say nothing to the user, and they hide the sentence that does. PySpark leaves them out if the variable
SPARK_HIDE_TRACEBACK is in the environment (pyspark.util.handle_worker_exception, 4.3). It is set here just before an
error of ours leaves the source, and only in the process of a worker, which ends with this error. Other errors, those of
a user's function included, keep their frames.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

from rmq_spark.store.errors import RmqError

_LOG = logging.getLogger("rmq_spark")
_HIDE = "SPARK_HIDE_TRACEBACK"
_OF_WORKERS = "PYTHON_WORKER_FACTORY_"  # the beginning of variables that Spark sets for its Python workers
# The methods of a source, its readers and writers that Spark calls.
_CALLED_BY_SPARK = {
    "__init__",
    "schema",
    "reader",
    "streamReader",
    "writer",
    "streamWriter",
    "partitions",
    "initialOffset",
    "latestOffset",
    "prepareForTriggerAvailableNow",
    "reportLatestOffset",
    "getCache",
    "read",
    "write",
    "commit",
    "abort",
}

Class = TypeVar("Class", bound=type)


def without_frames(decorated: Class) -> Class:
    """Decorate a class whose methods Spark calls: in a worker, their errors of ours are shown without frames."""
    for name, method in list(vars(decorated).items()):
        if name in _CALLED_BY_SPARK and isinstance(method, FunctionType):
            setattr(decorated, name, _guarded(method))
    return decorated


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            result = method(*args, **named)
        except RmqError:
            _hide_frames()
            raise
        return _guarded_rows(result) if isinstance(result, Iterator) else result

    return call


def _guarded_rows(rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except RmqError:
        _hide_frames()
        raise


def _hide_frames() -> None:
    """Let the worker in whose process this is answer without frames. They are logged at level DEBUG instead."""
    if any(name.startswith(_OF_WORKERS) for name in os.environ):
        _LOG.debug("rmq: where the error was raised", exc_info=True)
        os.environ[_HIDE] = "1"
