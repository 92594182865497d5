"""Arguments and options that several commands share, and the parsers of times and sizes."""

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from rmq_spark.store.model import describe_unit, is_in_another_unit

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_LAST_MS = 2**63 - 1
_TIME_FORMS = "ms since 1970, 2026-01-31T12:00:00Z, now, or now-10m"


class Moment(click.ParamType):
    """A time, such as `1767225600000` (ms since 1970), `2026-01-01T00:00:00Z`, `now`, `now-10m`, `now+1h` or `-10m`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the time in ms since 1970. Fails for a date without a time zone, which is ambiguous."""
        if isinstance(value, int):
            return value
        if value.isdecimal() and int(value) <= _LAST_MS:
            if is_in_another_unit(int(value)):
                self.fail(f"{value} {describe_unit(int(value))}.", param, ctx)
            return int(value)
        shift = re.fullmatch(r"(?:now)?([+-])(\d{1,12})(ms|s|m|h|d)|now", value)
        if shift is not None:
            now_ms = time.time_ns() // 1_000_000  # noqa: TID251 - the command line is where the clock is read
            shift_ms = int(shift[2]) * _UNITS_MS[shift[3]] if shift[1] else 0
            return max(0, now_ms - shift_ms if shift[1] == "-" else now_ms + shift_ms)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time; expected {_TIME_FORMS}.", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no time zone. Add Z for UTC, or an offset such as +08:00.", param, ctx)
        return max(0, round(moment.timestamp() * 1000))


class Size(click.ParamType):
    """A size in bytes: `1048576`, `64k`, `16m`, `1g`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the size in bytes."""
        if isinstance(value, int):
            return value
        size = re.fullmatch(r"(\d{1,18})([kmg]?)b?", value.lower())
        if size is None:
            self.fail(f"{value!r} is not a size; expected bytes, 64k, 16m or 1g.", param, ctx)
        return int(size[1]) * _SIZES[size[2]]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*decorators: Decorator) -> Decorator:
    """Return one decorator that applies all of these, the first one outermost."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def examples(*lines: str) -> str:
    """Return the section of a help text that shows these command lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


store_path = click.argument("path", metavar="PATH")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects, keyed by column.")
commit_log_path = click.option(
    "--commit-log-path",
    metavar="FOLDERS",
    help="Folder of the commit log, or several separated by commas.  [default: PATH/commitlog]",
)
lock_timeout = click.option(
    "--lock-timeout",
    "lock_timeout_s",
    type=click.FloatRange(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait in seconds for the lock of a writer that makes no progress.",
)
network_store = click.option(
    "--allow-network-store",
    is_flag=True,
    help="Write to a store on a network file system, where locks may not work.",
)
begin_time = click.option(
    "--from", "begin_ms", type=Moment(), metavar="TIME", help="Start at the first message stored at or after TIME."
)
end_time = click.option(
    "--to", "end_ms", type=Moment(), metavar="TIME", help="End before the first message stored at or after TIME."
)
message_filters = together(
    click.option("--tags", help='Only messages with one of these tags: "A || B".'),
    click.option("--sql92", help="Only messages whose properties match: \"colour = 'red' AND size > 3\"."),
)

# Parameters of commands that read a store, that change its config, and that append to it.
reading_options = together(commit_log_path, as_json)
writing_options = together(commit_log_path, lock_timeout, as_json)
appending_options = together(commit_log_path, lock_timeout, network_store, as_json)
reading = together(store_path, reading_options)
appending = together(store_path, appending_options)
TIMES = f"TIME: {_TIME_FORMS} (units: ms, s, m, h, d)."
