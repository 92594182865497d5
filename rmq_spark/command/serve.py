"""`rmq serve`: deliver delayed messages until SIGTERM or SIGINT."""

import contextlib
import logging
import signal
import sys

import click

import rmq_spark
from rmq_spark.command.colours import Meaning, has_colours
from rmq_spark.command.default_place import StoreCommand
from rmq_spark.command.parameters import commit_log_path as commit_log_path_option
from rmq_spark.command.parameters import examples, metrics_option, network_store, store_path
from rmq_spark.datasource.spark.log_lines import FORMATS, LEVELS, TEXT_FORMAT, JsonFormatter
from rmq_spark.metrics import MetricsServer, serve_delivery_metrics
from rmq_spark.store import Served


@click.command(cls=StoreCommand, epilog=examples("rmq serve store", "rmq serve store --log-level warning"))
@store_path
@commit_log_path_option
@network_store
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Lowest level to log.")
@click.option(
    "--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Format of the log on stderr."
)
@metrics_option
@click.option("--json", "as_json", is_flag=True, help="Log to stdout as JSON, one object per line.")
def serve(
    path: str,
    commit_log_path: str | None,
    allow_network_store: bool,
    log_level: str,
    log_format: str,
    metrics: str | None,
    as_json: bool,
) -> None:
    """Deliver delayed messages of the store at PATH when they are due, until SIGTERM or SIGINT.

    Several servers and Spark queries may use the store at the same time, and may be killed at any time: each message is
    delivered once. While a RocketMQ broker runs on the store, the broker delivers and the server waits.
    """
    _log_to_terminal(log_level, as_json=as_json or log_format == "json", is_stdout=as_json)
    stop = _StopSignal()
    served = Served()
    with contextlib.ExitStack() as stack:
        if metrics is not None:
            stack.enter_context(_serve_metrics(metrics, path, commit_log_path, served))
        rmq_spark.serve_store(
            path, stop, commit_log_path=commit_log_path, allow_network_store=allow_network_store, served=served
        )
    logging.getLogger("rmq_spark").info("rmq: stopped by %s; delivered %d messages", stop.name, served.messages)


def _serve_metrics(address: str, path: str, commit_log_path: str | None, served: Served) -> MetricsServer:
    """Serve the metrics of the store, and the totals of this process."""
    server = serve_delivery_metrics(address, path, served, commit_log_path)
    logging.getLogger("rmq_spark").info("rmq: metrics are at %s", server.url)
    return server


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


def _log_to_terminal(level: str, *, as_json: bool, is_stdout: bool) -> None:
    """Log to stderr, in colour on a terminal unless it is JSON; with `is_stdout` to stdout."""
    handler: logging.Handler
    if as_json:
        handler = logging.StreamHandler(sys.stdout if is_stdout else sys.stderr)
        handler.setFormatter(JsonFormatter())
    elif has_colours(sys.stderr):
        from rich.console import Console
        from rich.highlighter import NullHighlighter
        from rich.logging import RichHandler
        from rich.theme import Theme

        levels = {
            "critical": Meaning.ERROR,
            "error": Meaning.ERROR,
            "warning": Meaning.WARNING,
            "info": "none",
            "debug": "none",
        }
        theme = Theme({"log.time": "none"} | {f"logging.level.{name}": style for name, style in levels.items()})
        handler = RichHandler(
            console=Console(stderr=True, theme=theme),
            highlighter=NullHighlighter(),
            keywords=[],
            show_path=False,
            log_time_format="%Y-%m-%d %H:%M:%S",
        )
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(TEXT_FORMAT))
    logger = logging.getLogger("rmq_spark")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
