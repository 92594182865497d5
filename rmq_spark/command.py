"""The command `rmq`: what was typed -> a call. It needs the extra `cli`, and says so where that is missing.

    rmq serve PATH      deliver delayed messages of the store at PATH when they are due, until SIGTERM or SIGINT

Exit status: 0 stopped as told, 1 an error that a message explains, 2 wrong words, or the extra is missing. Never loads
Spark.
"""

import logging
import signal
import sys
from importlib.util import find_spec
from typing import Any

_EXTRA = ("click", "rich")
_LEVELS = ("debug", "info", "warning", "error")
_MISSING = """\
rmq needs {missing}, which rmq-spark's extra "cli" brings. Install it:

    pip install "rmq-spark[cli]"
"""


def main() -> None:
    """Run the command with the words of the command line; ends the process."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        sys.stderr.write(_MISSING.format(missing=" and ".join(missing)))
        raise SystemExit(2)
    _make_group()(prog_name="rmq")


def _make_group() -> Any:
    """Return the command with all its commands, as click has them."""
    import click

    path = click.Argument(["path"], metavar="PATH")
    options = [
        click.Option(
            ["--commit-log-path"],
            metavar="FOLDERS",
            help="The commit log's folder where it lies elsewhere, or several joined by commas.",
        ),
        click.Option(
            ["--allow-network-store"],
            is_flag=True,
            help="Append although the store lies on a network file system, where locks may not hold.",
        ),
        click.Option(
            ["--log-level"], type=click.Choice(_LEVELS), default="info", show_default=True, help="What is logged."
        ),
    ]
    serve = click.Command(
        "serve",
        callback=_serve,
        params=[path, *options],
        short_help="Deliver delayed messages when they are due.",
        help="Deliver delayed messages of the store at PATH when they are due, until SIGTERM or SIGINT. Any number of "
        "these may run beside each other and beside Spark queries, and be killed at any time: each message is "
        "delivered once. While a RocketMQ broker runs on the store, that one delivers, and this one waits.",
    )
    return click.Group("rmq", commands=[serve], help="Work on a store of Apache RocketMQ.")


def _serve(path: str, commit_log_path: str | None, allow_network_store: bool, log_level: str) -> None:
    """Serve until a signal says stop; a tick that runs is finished."""
    _log_to_terminal(log_level)
    stop = _StopSignal()
    from rmq_spark.store import serve_store
    from rmq_spark.store.errors import RmqError

    try:
        served = serve_store(path, stop, commit_log_path=commit_log_path, allow_network_store=allow_network_store)
    except RmqError as error:
        sys.stderr.write(f"rmq serve: {error}\n")
        raise SystemExit(1) from None
    logging.getLogger("rmq_spark").info("rmq: stopped by %s; delivered %d messages", stop.name, served.messages)


class _StopSignal:
    """Says whether SIGTERM or SIGINT has come since it was made."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.name = signal.Signals(number).name

    def __call__(self) -> bool:
        return bool(self.name)


def _log_to_terminal(level: str) -> None:
    """Log to stderr: in colour where people look at it, else a line each with the time in front."""
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%Y-%m-%d %H:%M:%S")
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("rmq_spark")
    logger.addHandler(handler)
    logger.setLevel(level.upper())


if __name__ == "__main__":
    main()
