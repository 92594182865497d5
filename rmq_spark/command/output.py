"""What a command prints: values as people and programs read them. Results go to stdout, all else to stderr.

What a message carries may be meant for a terminal's ears: whatever is shown as text has no control characters left.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

# What a terminal obeys (C0 without tab and line feed, DEL, C1), and line ends that are not of ours.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


# What texts say to programs, and what is typed instead.
_TYPED = {
    "rmq_spark.check": "`rmq check`",
    "rmq_spark.repair": "`rmq repair`",
    "rmq_spark.plan_repair": "`rmq repair --dry-run`",
    "rmq_spark.reset_offsets": "`rmq reset`",
    "rmq_spark.close": "`rmq close`",
    "export_parquet": "`rmq export`",
    "Name the topics to reset": "Name the topics to reset with --topic",
    "startingOffsets and endingOffsets of the source": "`rmq cat --offset`; in Spark startingOffsets and endingOffsets",
    "user who runs Spark": "user who runs rmq",
    "; on a cluster it must be visible under the same path on the driver and on every executor": "",
    "set lockTimeout": "give --lock-timeout",
    "set allowNetworkStore=true": "give --allow-network-store",
    "Give topic=, or leave it out": "Give --to-topic, or leave it out",
    "Give topic=, or a file": "Give --topic, or a file",
    "(topic=...)": "(--topic)",
    "name=": "--name ",
    "or None to go by": "or none to go by",
    "keep_queues=False": "--spread",
    "overwrite=True": "--overwrite",
    "accept_loss=True": "--accept-loss",
    "cut_log=True": "--cut-log",
}


def typed(text: str, own: Iterable[str] = ()) -> str:
    """Return a text with what is typed at a terminal in it, instead of what a program calls.

    `own` are texts of the user, such as paths, which stay as they are wherever they occur.
    """
    kept = [re.escape(one) for one in sorted(set(own), key=len, reverse=True) if one and _typed(one) != one]
    if not kept:
        return _typed(text)
    parts = re.split(rf"(?<!\w)({'|'.join(kept)})(?!\w)", text)
    return "".join(part if number % 2 else _typed(part) for number, part in enumerate(parts))


def _typed(text: str) -> str:
    for name, words in _TYPED.items():
        # What is in a path is a name of somebody's: behind a slash nothing is replaced.
        begin, end = r"(?<![\w/])" * name[0].isalnum(), r"(?!\w)" * name[-1].isalnum()
        text = re.sub(begin + re.escape(name) + end, words, text)
    return text


def say(text: str) -> None:
    """Print lines for people, to stderr, with control characters spelt as Python spells them."""
    click.echo(_CONTROLS.sub(lambda found: repr(found[0])[1:-1], text), err=True)


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table or batch: a map as a dict, a time as a datetime in UTC.

    A producer may write any time: one that no date can say is its number of ms, as text.
    """
    columns: dict[str, list[Any]] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = str(field.type)
        if kind.startswith("timestamp["):
            per_s = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[field.type.unit]
            columns[field.name] = [_moment(count, per_s) for count in column.cast("int64").to_pylist()]
        elif kind.startswith("map<"):
            columns[field.name] = [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
        else:
            columns[field.name] = column.to_pylist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _moment(count: int | None, per_s: int) -> datetime | str | None:
    if count is None:
        return None
    seconds, rest = divmod(count, per_s)
    try:
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest * 1_000_000 // per_s)
    except (ValueError, OverflowError, OSError):
        return f"{count * 1000 // per_s} ms"


def print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as one JSON list, an object a line."""
    is_first = True
    for row in rows:
        click.echo(("[\n  " if is_first else ",\n  ") + json_line(row), nl=False)
        is_first = False
    click.echo("[]" if is_first else "\n]")


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
    text = json.dumps(found, ensure_ascii=False, default=_json_value)
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # JSON leaves DEL and C1 as they are


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return str(value)


def cell(name: str, value: Any, *, in_ms: bool = False) -> str:
    """Return a value as people read it, on one line. Times are UTC; what is not there is empty."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        text = f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"
        return text[:-3] if in_ms else text[:-7]
    if isinstance(value, bytes):
        return readable(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.lower().endswith("bytes"):
        return bytes_text(value)
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, Mapping):
        return printable(", ".join(f"{key}={held}" for key, held in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return printable(", ".join(map(str, value)))
    return printable(str(value))


def readable(data: bytes) -> str:
    """Return bytes as one line of text, or as hex if they are none."""
    try:
        return printable(data.decode())
    except UnicodeDecodeError:
        return data.hex(" ")


def printable(text: str) -> str:
    """Return the text on one line, control characters spelt as Python spells them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def bytes_text(size: float) -> str:
    """Return bytes as "512 B", "3.4 MiB"."""
    if size < 1024:
        return f"{size:.0f} B"
    power = 0
    while size >= 999.5 and power < len(_SIZES) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.3g} {_SIZES[power]}"
