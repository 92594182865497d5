"""What the words of a command line may be: the arguments and options that several commands have, and their values."""

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from rmq_spark.store.units import describe_unit, is_in_another_unit

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_LAST_MS = 2**63 - 1


class Moment(click.ParamType):
    """A time as ms since the epoch: `1767225600000`, `2026-01-01T00:00:00Z`, `now`, `now-10m`, `now+1h`, or `-10m`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the ms. Fails for a time of day without a zone: nobody could say which one was meant."""
        if isinstance(value, int):
            return value
        if value.isdecimal() and int(value) <= _LAST_MS:
            if is_in_another_unit(int(value)):
                self.fail(f"{value} {describe_unit(int(value))}.", param, ctx)
            return int(value)
        shift = re.fullmatch(r"(?:now)?([+-])(\d{1,12})(ms|s|m|h|d)|now", value)
        if shift is not None:
            now_ms = time.time_ns() // 1_000_000  # noqa: TID251 - here the clock comes in
            shift_ms = int(shift[2]) * _UNITS_MS[shift[3]] if shift[1] else 0
            return max(0, now_ms - shift_ms if shift[1] == "-" else now_ms + shift_ms)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time: ms since 1970, 2026-01-31T12:00:00Z, now, or now-10m.", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no time zone. Add Z for UTC, or +08:00.", param, ctx)
        return max(0, round(moment.timestamp() * 1000))


class Size(click.ParamType):
    """Bytes: `1048576`, `64k`, `16m`, `1g`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        if isinstance(value, int):
            return value
        size = re.fullmatch(r"(\d{1,18})([kmg]?)b?", value.lower())
        if size is None:
            raise click.BadParameter(f"{value!r} is no size: bytes, or such as 64k, 16m, 1g.", ctx, param)
        return int(size[1]) * _SIZES[size[2]]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*decorators: Decorator) -> Decorator:
    """Return one decorator that does what these do, the first one outermost."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def examples(*lines: str) -> str:
    """Return the end of a help text: the lines as they are to be typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


store_path = click.argument("path", metavar="PATH")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects named as the columns.")
commit_log_path = click.option(
    "--commit-log-path",
    metavar="FOLDERS",
    help="The commit log's folder where it lies elsewhere, or several joined by commas.",
)
lock_timeout = click.option(
    "--lock-timeout",
    "lock_timeout_s",
    type=click.FloatRange(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for another writer that makes no progress.",
)
network_store = click.option(
    "--allow-network-store",
    is_flag=True,
    help="Append although the store lies on a network file system, where locks may not hold.",
)
begin_time = click.option(
    "--from", "begin_ms", type=Moment(), metavar="TIME", help="From the first message stored at or after TIME."
)
end_time = click.option(
    "--to", "end_ms", type=Moment(), metavar="TIME", help="Up to the first message stored at or after TIME."
)

# The options of a command that reads a store, that changes one, and that appends to one.
reading = together(store_path, commit_log_path, as_json)
writing = together(store_path, commit_log_path, lock_timeout, as_json)
appending = together(store_path, commit_log_path, lock_timeout, network_store, as_json)
TIMES = "A TIME is ms since 1970, 2026-01-31T12:00:00Z, now, or now-10m (ms, s, m, h, d)."
