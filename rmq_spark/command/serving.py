"""`rmq serve`: deliver what waits for its time, until a signal says stop."""

import json
import logging
import signal
import sys
from datetime import UTC, datetime

import click

import rmq_spark
from rmq_spark.command.words import commit_log_path as commit_log_path_option
from rmq_spark.command.words import examples, network_store, store_path

_LEVELS = ("debug", "info", "warning", "error")


@click.command(epilog=examples("rmq serve store", "rmq serve store --log-level warning"))
@store_path
@commit_log_path_option
@network_store
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="What is logged.")
@click.option("--json", "as_json", is_flag=True, help="Log to stdout, an object a line.")
def serve(path: str, commit_log_path: str | None, allow_network_store: bool, log_level: str, as_json: bool) -> None:
    """Deliver delayed messages of the store at PATH when they are due, until SIGTERM or SIGINT.

    Any number of these may run beside each other and beside Spark queries, and be killed at any time: each message is
    delivered once. While a RocketMQ broker runs on the store, that one delivers, and this one waits. With --json a log
    line is an object.
    """
    _log_to_terminal(log_level, as_json=as_json)
    stop = _StopSignal()
    served = rmq_spark.serve_store(path, stop, commit_log_path=commit_log_path, allow_network_store=allow_network_store)
    logging.getLogger("rmq_spark").info("rmq: stopped by %s; delivered %d messages", stop.name, served.messages)


class _StopSignal:
    """Says whether SIGTERM or SIGINT has come since it was made. A tick that runs is finished."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.name = signal.Signals(number).name

    def __call__(self) -> bool:
        return bool(self.name)


class _JsonFormatter(logging.Formatter):
    """A log line as an object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level and message."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": time, "level": record.levelname, "message": record.getMessage()}, ensure_ascii=False)


def _log_to_terminal(level: str, *, as_json: bool) -> None:
    """Log to stderr: in colour where people look at it, else a line each with the time in front; JSON to stdout."""
    handler: logging.Handler
    if as_json:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_JsonFormatter())
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%Y-%m-%d %H:%M:%S")
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("rmq_spark")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
