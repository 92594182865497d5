"""Arguments and options that several commands share, and the parsers of times and sizes."""

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

import click
from click.shell_completion import CompletionItem

from rmq_spark.command.output import choose_csv, is_csv
from rmq_spark.store.model import describe_unit, is_in_another_unit

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_LAST_MS = 2**63 - 1
_TIME_FORMS = "ms since 1970, 2026-01-31T12:00:00Z, 2026-01-31 (UTC without a zone), now, or now-10m"


def require_package(package: str, extra: str) -> None:
    """Raise UsageError, with the pip command, if a package of an extra is not installed."""
    if find_spec(package) is None:
        raise click.UsageError(
            f'the package {package} is not installed; expected rmq-spark\'s extra "{extra}". Install it: pip install '
            f'"rmq-spark[{extra}]"'
        )


def _check_metrics(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        require_package("prometheus_client", "metrics")
    return value


metrics_option = click.option(
    "--metrics",
    metavar="HOST:PORT",
    callback=_check_metrics,
    help="Address (HOST:PORT) at which Prometheus metrics are served, under /metrics. Needs the extra metrics.",
)


class Moment(click.ParamType):
    """A time, such as `1767225600000` (ms since 1970), `2026-01-01T00:00:00Z`, `now`, `now-10m`, `now+1h` or `-10m`.

    All times that the command prints are accepted. Without a time zone a time is in UTC, as in its tables.
    """

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the time in ms since 1970."""
        if isinstance(value, int):
            return value
        # A time after the year 9999 is printed as a number and " ms".
        number = value.removesuffix(" ms")
        if number.isdecimal() and int(number) <= _LAST_MS:
            if number == value and is_in_another_unit(int(value)):
                self.fail(f"{value} {describe_unit(int(value))}.", param, ctx)
            return int(number)
        shift = re.fullmatch(r"(?:now)?([+-])(\d{1,12})(ms|s|m|h|d)|now", value)
        if shift is not None:
            now_ms = time.time_ns() // 1_000_000  # noqa: TID251 - the command line is where the clock is read
            shift_ms = int(shift[2]) * _UNITS_MS[shift[3]] if shift[1] else 0
            return max(0, now_ms - shift_ms if shift[1] == "-" else now_ms + shift_ms)
        try:
            moment = datetime.fromisoformat(value.removesuffix(" UTC"))
        except ValueError:
            self.fail(f"{value!r} is not a time; expected {_TIME_FORMS}.", param, ctx)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(0, round(moment.timestamp() * 1000))


# The permission of a topic: a sum of 4 read, 2 write, 1 inherit (PermName).
PERMS = {"rw": 6, "r": 4, "w": 2, "rwx": 7, "rx": 5, "wx": 3, "x": 1, "none": 0}
_PERM_TEXTS = {number: text for text, number in PERMS.items()}


def perm_text(perm: int) -> str:
    """Return a topic's permission as `--perm` takes it. One with a bit that only later brokers know is a number."""
    return _PERM_TEXTS.get(perm, str(perm))


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


class _Folder(click.ParamType):
    """A path that a shell completes with folders. The functions of `rmq_spark` check it."""

    name = "folder"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Propose folders."""
        return [CompletionItem(incomplete, type="dir")]


store_path = click.argument("path", metavar="PATH", type=_Folder())


def _is_data(ctx: click.Context, is_json: bool) -> bool:
    """Return whether the command prints data: JSON or CSV. Fails for both."""
    if is_json and is_csv(ctx):
        raise click.UsageError("--json and --csv cannot be combined. Give one of them.", ctx)
    return is_json or is_csv(ctx)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects, keyed by column.")
# The parameter of both options is true if a command prints data, with every field and exact values, and no text.
as_data = together(
    click.option(
        "--json",
        "as_data",
        is_flag=True,
        callback=lambda ctx, _, value: _is_data(ctx, value),
        help="Print JSON: a list of objects, keyed by column.",
    ),
    click.option(
        "--csv",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=lambda ctx, _, value: choose_csv(ctx) if value else None,
        help="Print CSV with a header: the fields of --json.",
    ),
)
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


def _require_text(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the value of a filter. Fails for an empty one: RocketMQ takes it for all messages."""
    if value is not None and not value.strip():
        example = '"A || B"' if param.name == "tags" else '"size > 3"'
        raise click.BadParameter(f"found an empty text; expected {example}. Leave it out for all messages.", ctx, param)
    return value


message_filters = together(
    click.option("--tags", callback=_require_text, help='Only messages with one of these tags: "A || B".'),
    click.option(
        "--sql92",
        callback=_require_text,
        help="Only messages whose properties match: \"colour = 'red' AND size > 3\".",
    ),
)

# Parameters of commands that read a store, that change its config, and that append to it.
reading_options = together(commit_log_path, as_data)
writing_options = together(commit_log_path, lock_timeout, as_data)
appending_options = together(commit_log_path, lock_timeout, network_store, as_data)
reading = together(store_path, reading_options)
appending = together(store_path, appending_options)
TIMES = f"TIME: {_TIME_FORMS} (units: ms, s, m, h, d)."
