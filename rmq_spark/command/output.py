"""What a command prints: tables for people, JSON for programs; results to stdout, all else to stderr.

A table of what can be long is as wide as it is where nobody looks (a pipe, a file), so nothing is cut there.
"""

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_PIPE_CHARS = 10_000  # wide enough that no row of a table is folded
_BYTES = ("bytes", "lagBytes", "sizeBytes")
_QUIET_S = 0.5  # a bar that is gone before anybody has read it only flickers


def console(*, is_error: bool = False) -> Console:
    """Return where to print, colours where somebody looks."""
    stream = sys.stderr if is_error else sys.stdout
    width = None if stream.isatty() else _PIPE_CHARS
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def say(text: str) -> None:
    """Print a line for people, to stderr."""
    click.echo(text, err=True)


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool, nothing: str) -> None:
    """Print rows: a table of these columns, or JSON of all that they have. Without a row: `nothing`, or []."""
    if as_json:
        print_json(rows)
    elif not rows:
        say(nothing)
    else:
        console().print(_table(rows, columns))


def print_json(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as one JSON list, an object a line."""
    click.echo("[" + ",".join("\n  " + json_line(row) for row in rows) + ("\n]" if rows else "]"))


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a JSON object: times in ISO 8601 (UTC), bytes as text, or in base64 if they are none."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                found[name] = value.decode()
            except UnicodeDecodeError:
                found[name], found[name + "Base64"] = None, base64.b64encode(value).decode()
        else:
            found[name] = value
    return json.dumps(found, ensure_ascii=False, default=_json_value)


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return str(value)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False, header_style="bold")
    for name in columns:
        numbers = any(isinstance(row.get(name), int | float) and row.get(name) is not True for row in rows)
        table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(name, row.get(name))) for name in columns))
    return table


def cell(name: str, value: Any) -> str:
    """Return a value as it is shown in a table. Times are UTC; what is not there is empty."""
    if value is None:
        return ""
    if name in _BYTES:
        return decimal(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    if isinstance(value, bytes):
        return readable(value)
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.1f}"
    return str(value)


def readable(data: bytes) -> str:
    """Return bytes as one line of text, or as hex if they are none."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data.hex(" ")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@contextmanager
def progress(what: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    """Yield what is to be called with (done, total). On a terminal a bar shows after half a second."""
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.fields[done]}} {'' if unit == 'bytes' else unit}"),
        TimeRemainingColumn(),
        console=console(is_error=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    begun = shown.get_time()
    task = None

    def note(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            if shown.get_time() - begun < _QUIET_S:
                return
            shown.start()
            task = shown.add_task(what, total=total, done="")
        shown.update(task, completed=done, total=total, done=decimal(done) if unit == "bytes" else f"{done:,}")

    try:
        yield note
    finally:
        shown.stop()
