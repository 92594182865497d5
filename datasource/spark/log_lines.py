"""Log lines as JSON, and the set-up of the logger `rmq_spark` by the environment of a Python process.

Spark starts Python processes in which no program can call `json_logging`: those that plan, and the workers of
executors. They read RMQ_LOG_LEVEL and RMQ_LOG_FORMAT.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from rmq_spark.datasource.spark.json_text import json_text
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import CommitKey, QueueKey

LOGGER = "rmq_spark"
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LEVEL_VARIABLE, FORMAT_VARIABLE = "RMQ_LOG_LEVEL", "RMQ_LOG_FORMAT"

TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# What is in every record, so it is not a field that a call has given.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_CONVERSION = re.compile(r"%[-+0# ]*\d*(?:\.\d+)?([sdrifgx%])")
# The word before an argument in the text of a message, and the field that the argument is.
_FIELDS = {"group": "group", "topic": "topic", "queue": "queue", "broker": "broker", "level": "delayLevel"}
_WORD = re.compile(r"(\w+) [\"']?$")


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object in one line.

    Every object has `time` (ISO 8601 in UTC, with milliseconds), `level`, `logger`, `module` and `message`. If the log
    call names them, it has `topic`, `queue`, `broker`, `group`, `query`, `batch` and `delayLevel`, and each field of
    `extra`. An exception is in `error`, as text with its traceback, and `stack_info` is in `stack`. A field of `extra`
    whose name is taken gets an underscore at its end, such as `time_`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        shown: dict[str, Any] = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "module": record.module,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["error"] = self.formatException(record.exc_info)
        if record.stack_info:
            shown["stack"] = self.formatStack(record.stack_info)
        given = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        for name in given:
            free = name
            while free in shown or (free != name and free in given):
                free += "_"
            shown[free] = given[name]
        for name, value in _named_arguments(record):
            shown.setdefault(name, value)
        return json_text(shown, str)


def _named_arguments(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a record whose meaning is known, with the names of their fields."""
    if not isinstance(record.args, tuple):
        return
    values, message = iter(record.args), str(record.msg)
    for found in _CONVERSION.finditer(message):
        if found[1] == "%":
            continue
        value = next(values, None)
        word = _WORD.search(message, 0, found.start())
        if isinstance(value, QueueKey):
            yield from (("topic", value.topic), ("queue", value.queue_id))
            if value.broker:
                yield "broker", value.broker
        elif isinstance(value, CommitKey):
            yield from (("query", value.query_id), ("batch", value.batch_id))
        elif word and word[1] in _FIELDS and isinstance(value, str | int):
            yield _FIELDS[word[1]], value


def json_logging(level: str = "info", stream: TextIO | None = None) -> logging.Handler:
    """Write the log lines of rmq-spark as JSON to `stream`, by default standard error, and return the handler.

    `level` is the lowest level: debug, info, warning or error, in upper or lower case. The lines no longer go to the
    handlers of the root logger. A second call replaces the handler of the first. docs/LOGGING.md describes the fields,
    and how to do this in the Python processes that Spark starts. Raises OptionError for another level. Call it in one
    thread at a time.
    """
    return _set_up(_check("level", level, LEVELS), "json", stream)


def configure_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Set up the logger by RMQ_LOG_LEVEL and RMQ_LOG_FORMAT, if one of them is set and the logger has no handler.

    A wrong value is logged, and its default is used: info and text.
    """
    level, form = environment.get(LEVEL_VARIABLE), environment.get(FORMAT_VARIABLE)
    if (level is None and form is None) or logging.getLogger(LOGGER).handlers:
        return
    found: list[str] = []
    wrong: list[OptionError] = []
    for name, value, known, default in (
        (LEVEL_VARIABLE, level, LEVELS, "info"),
        (FORMAT_VARIABLE, form, FORMATS, "text"),
    ):
        try:
            found.append(_check(name, value or default, known))
        except OptionError as error:
            found.append(default)
            wrong.append(error)
    _set_up(found[0], found[1], None)
    for one in wrong:
        logging.getLogger(LOGGER).warning("rmq: %s", one)


def _check(name: str, value: str, known: tuple[str, ...]) -> str:
    """Return the value in lower case. Raises OptionError if it is not known."""
    if value.lower() not in known:
        raise OptionError(f'{name} is "{value}"; expected one of {", ".join(known)}. Give one of them.')
    return value.lower()


def _set_up(level: str, form: str, stream: TextIO | None) -> logging.Handler:
    logger = logging.getLogger(LOGGER)
    for handler in list(logger.handlers):
        if isinstance(handler, _OwnHandler):
            logger.removeHandler(handler)
    handler = _OwnHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler


class _OwnHandler(logging.StreamHandler[TextIO]):
    """The handler that this module has added."""
