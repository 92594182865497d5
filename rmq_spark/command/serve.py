"""`rmq serve`: deliver delayed messages until SIGTERM or SIGINT."""

import json
import logging
import signal
import sys
from datetime import UTC, datetime

import click

import rmq_spark
from rmq_spark.command.parameters import commit_log_path as commit_log_path_option
from rmq_spark.command.parameters import examples, network_store, store_path

_LEVELS = ("debug", "info", "warning", "error")


@click.command(epilog=examples("rmq serve store", "rmq serve store --log-level warning"))
@store_path
@commit_log_path_option
@network_store
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="Lowest level to log.")
@click.option("--json", "as_json", is_flag=True, help="Log to stdout as JSON, one object per line.")
def serve(path: str, commit_log_path: str | None, allow_network_store: bool, log_level: str, as_json: bool) -> None:
    """Deliver delayed messages of the store at PATH when they are due, until SIGTERM or SIGINT.

    Several servers and Spark queries may use the store at the same time, and may be killed at any time: each message is
    delivered once. While a RocketMQ broker runs on the store, the broker delivers and the server waits.
    """
    _log_to_terminal(log_level, as_json=as_json)
    stop = _StopSignal()
    served = rmq_spark.serve_store(path, stop, commit_log_path=commit_log_path, allow_network_store=allow_network_store)
    logging.getLogger("rmq_spark").info("rmq: stopped by %s; delivered %d messages", stop.name, served.messages)


class _StopSignal:
    """Callable that returns True after SIGTERM or SIGINT. A delivery round in progress is completed."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.name = signal.Signals(number).name

    def __call__(self) -> bool:
        return bool(self.name)


class _JsonFormatter(logging.Formatter):
    """Formatter of log records as JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        """Return an object with time, level and message."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": time, "level": record.levelname, "message": record.getMessage()}, ensure_ascii=False)


def _log_to_terminal(level: str, *, as_json: bool) -> None:
    """Log to stderr, in colour on a terminal; with `as_json` to stdout."""
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
