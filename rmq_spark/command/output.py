"""Output of commands: values as text, JSON or CSV, messages to stderr, and progress bars.

Results go to stdout, everything else to stderr. Control characters are escaped in every text, because messages may
contain escape sequences of terminals. A progress bar, or a spinner if the total is unknown, appears on a terminal
after half a second.
"""

import base64
import csv
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import click

from rmq_spark.command.colours import Meaning, paint
from rmq_spark.datasource.spark.json_text import json_text

# Control characters of terminals (C0 without tab and line feed, DEL, C1) and Unicode's line separators.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_CSV = "rmq_spark.csv"  # the key in the metadata of click's context
STOPPED = 130  # the status that shells give a process stopped by Ctrl-C
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_SECONDS = frozenset({"secondsBehind", "age"})  # columns with durations in seconds
_BAR_DELAY_S = 0.5

# Python and Spark names in error texts, and their spelling on the command line.
_TYPED = {
    "rmq_spark.check": "`rmq check`",
    "rmq_spark.repair, or `rmq repair`": "`rmq repair`",
    "rmq_spark.repair": "`rmq repair`",
    "rmq_spark.plan_repair": "`rmq repair --dry-run`",
    "rmq_spark.reset_offsets": "`rmq reset`",
    "rmq_spark.close": "`rmq close`",
    "export_parquet": "`rmq export`",
    "expected offsets by queue id: {0: 12}": (
        'expected offsets by queue id, such as \'{"orders": {"0": 12}}\', '
        'in a cluster \'{"orders": {"broker-a:0": 12}}\''
    ),
    "Name the topics to reset": "Name the topics to reset with --topic",
    "Read around the position with startingOffsets and endingOffsets": (
        "Find all damage with `rmq check`, read around it with `rmq cat --offset` or --from"
    ),
    "Read around the message with startingOffsets and endingOffsets": (
        "Read around the message with `rmq cat --offset` or --from"
    ),
    "startingOffsets and endingOffsets of the source": "`rmq cat --offset`; in Spark startingOffsets and endingOffsets",
    "user who runs Spark": "user who runs rmq",
    "Set tls=false if the server has no TLS (tls.server.mode=disabled), or tlsCertFile and": (
        "Leave --tls out if the server has no TLS (tls.server.mode=disabled), or give --tls-cert-file and"
    ),
    "then set tls=true": "then give --tls",
    "tlsVerify=none": "--tls-verify none",
    "tlsCaFile=": "--tls-ca-file ",
    "tlsCaFile": "--tls-ca-file",
    "tlsCertFile": "--tls-cert-file",
    "tlsKeyFile": "--tls-key-file",
    ", and tlsKeyPassword if the key has a password": ", without a password",
    "Check the options accessKey, secretKey and securityToken, or credentialsFile": (
        "Check --access-key and RMQ_SECRET_KEY, RMQ_ACCESS_KEY and RMQ_SECRET_KEY, or --credentials-file"
    ),
    "the file of credentialsFile": "the file of --credentials-file",
    "the option nameServer": "--name-server",
    "Set nameServer to": "Set --name-server to",
    "name more servers in nameServer": "name more servers with --name-server",
    ", or name the topics with subscribe": ", or name the topics",
    "Name the topics with subscribe instead of subscribePattern": "Name the topics",
    "set pullGroup to a group": "give --pull-group a group",
    "(option pullGroup)": "(--pull-group)",
    "nameServer=… (name_server=…, -n …)": "-n HOST:PORT",
    "nameServer=": "--name-server ",
    "whether nameServer names": "whether --name-server names",
    "the option brokerAddresses=": "--broker-addresses ",
    "the option brokerAddresses": "--broker-addresses",
    "raise the option requestTimeout": "raise --request-timeout",
    "Start the broker, or set brokerDownTimeout to a longer time": "Repeat the command when the broker is back",
    " (option subscribe)": "",
    ", on every machine of the query": "",
    "; on a cluster it must be visible under the same path on the driver and on every executor": "",
    "set lockTimeout": "give --lock-timeout",
    "set allowNetworkStore=true": "give --allow-network-store",
    "Give topic=, or leave it out": "Give --to-topic, or leave it out",
    "Give topic=, or a file": "Give --topic, or a file",
    "(topic=...)": "(--topic)",
    "name=": "--name ",
    "or None to go by": "or none to go by",
    "keep_queues=False": "--spread",
    "skip_rows=": "--skip ",
    "without skip_rows": "without --skip",
    "Add the column brokerName, or leave queueId out": "Give --queue BROKER:ID, or leave it out",
    "Leave out queueId and brokerName for any queue": "Leave --queue out for any queue",
    "leave out queueId and brokerName for any queue": "leave --queue out for any queue",
    "create_topic=True (createTopic=true in Spark)": "--create-topic",
    "createTopic=true": "--create-topic",
    " (brokerDownTimeout)": "",
    " (UnknownOutcomeError.message_ids)": "",
    "overwrite=True": "--overwrite",
    "accept_loss=True": "--accept-loss",
    "cut_log=True": "--cut-log",
}


def typed(text: str, own: Iterable[str] = ()) -> str:
    """Return a text with options of the command line in place of Python and Spark names.

    `own` are texts of the user, such as paths; they are not changed.
    """
    kept = [re.escape(one) for one in sorted(set(own), key=len, reverse=True) if one and _typed(one) != one]
    if not kept:
        return _typed(text)
    parts = re.split(rf"(?<!\w)({'|'.join(kept)})(?!\w)", text)
    return "".join(part if number % 2 else _typed(part) for number, part in enumerate(parts))


def _typed(text: str) -> str:
    for name, words in _TYPED.items():
        # After a slash nothing is replaced, which may be part of a path, and no part of a word such as broker-name.
        begin, end = r"(?<![\w/-])" * name[0].isalnum(), r"(?!\w)" * name[-1].isalnum()
        text = re.sub(begin + re.escape(name) + end, words, text)
    return text


def escaped(text: str) -> str:
    """Return a text with the control characters of terminals escaped as in Python."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def say(text: str) -> None:
    """Print a text to stderr, with control characters escaped as in Python."""
    click.echo(escaped(text), err=True)


def say_error(command: str, text: str) -> None:
    """Print an error of a command to stderr, after its name in the colour of errors."""
    click.echo(f"{paint(f'{command}:', Meaning.ERROR, sys.stderr)} {escaped(text)}", err=True, color=True)


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table or batch: maps as dicts, times as datetimes in UTC.

    A time outside of datetime's range is text, such as "4611686018427387 ms": producers may write any number.
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


def choose_csv(ctx: click.Context) -> None:
    """Let `print_data` print CSV."""
    ctx.meta[_CSV] = True


def is_csv(ctx: click.Context | None = None) -> bool:
    """Return whether the command prints its data as CSV."""
    ctx = ctx or click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(_CSV))


def print_data(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = (), *, has_others: bool = True) -> None:
    """Print rows as a JSON list, one object per line; with --csv as CSV, the `columns` before all other fields.

    A list is complete even if an error ends `rows`. CSV is printed row by row only if the rows have no other fields.
    """
    if is_csv():
        if has_others:
            rows = [_decoded(row) for row in rows]
            columns = list(dict.fromkeys((*columns, *(name for row in rows for name in row))))
        if columns:
            for row in chain([dict(zip(columns, columns, strict=True))], rows):
                text = csv_lines([row], columns)
                click.echo(escaped(text) if sys.stdout.isatty() else text, nl=False)
        return
    is_first = True
    try:
        for row in rows:
            click.echo(("[\n  " if is_first else ",\n  ") + json_line(row), nl=False)
            is_first = False
    finally:
        if not is_first:
            click.echo("\n]")
    if is_first:
        click.echo("[]")


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a JSON object: times in ISO 8601 (UTC), bytes as text.

    Bytes that are not valid UTF-8 are null, and base64 in a second field NAMEBase64.
    """
    return json_text(_decoded(row), _json_value)


def _decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with bytes as text. If bytes are not text, NAME is None, and NAMEBase64 has their base64."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                found[name] = value.decode()
            except UnicodeDecodeError:
                found[name], found[name + "Base64"] = None, base64.b64encode(value).decode()
        else:
            found[name] = value
    return found


class _Written:
    """Texts that were written."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        """Keep a text."""
        self.texts.append(text)


def csv_lines(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the fields `names` of rows as CSV: quotes where RFC 4180 wants them, each line ended by a line feed.

    Values are those of JSON: texts as they are, null as an empty field, lists and objects as JSON.
    """
    written = _Written()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerows([_csv_value(row.get(name)) for name in names] for row in map(_decoded, rows))
    return "".join(written.texts)


def _csv_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        value = _json_value(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_json_value)


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return str(value)


def cell(name: str, value: Any, *, in_ms: bool = False) -> str:
    """Return a value as one line of text. Times are UTC; None is empty."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        text = f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"
        return text[:-3] if in_ms else text[:-7]
    if isinstance(value, bytes):
        try:
            return printable(value.decode())
        except UnicodeDecodeError:
            return value.hex(" ")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number_text(name, value)
    if isinstance(value, Mapping):
        return printable(", ".join(f"{key}={item}" for key, item in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return printable(", ".join(map(str, value)))
    return printable(str(value))


def _number_text(name: str, value: float) -> str:
    """Return a number of the column `name` with its unit."""
    if name.lower().endswith("bytes"):
        return bytes_text(value)
    if name in _SECONDS:
        return duration_text(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def printable(text: str) -> str:
    """Return the text on one line, with control characters escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def bytes_text(size: float) -> str:
    """Return a size as text: "512 B", "3.4 MiB"."""
    if size < 1024:
        return f"{size:.0f} B"
    power = 0
    while size >= 999.5 and power < len(_SIZES) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.3g} {_SIZES[power]}"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: "1 d 3 h", "5 min 10 s", "1.25 s"; under 60 s with 3 digits."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    left, parts = round(seconds), []
    for size, name in _SPANS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count:,} {name}")
    return " ".join(parts[:2])


@contextmanager
def progress(what: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr; yield a function that takes (done, total). Before its first call: a spinner."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = _ProgressBar(what, unit)
    try:
        yield bar.update
    finally:
        bar.stop()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner while the block runs: it may wait for another writer's lock."""
    with progress(what):
        yield


class _ProgressBar:
    """A progress bar that a timer's thread shows after a delay; the working thread calls `update`."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._lock = threading.Lock()
        self._progress: tuple[int, int] | None = None
        self._bar: Any = None
        self._task: Any = None
        self._is_stopped = False
        self._timer = threading.Timer(_BAR_DELAY_S, self._start)
        self._timer.daemon = True
        self._timer.start()

    def update(self, done: int, total: int) -> None:
        """Record the progress, and show it if the bar is visible."""
        with self._lock:
            self._progress = done, total
            if self._bar is not None:
                self._draw()

    def stop(self) -> None:
        """Remove the bar."""
        self._timer.cancel()
        with self._lock:
            self._is_stopped = True
            if self._bar is not None:
                self._bar.stop()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

        with self._lock:
            if self._is_stopped:
                return
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
            counts = TextColumn("{task.fields[counts]}"), TimeRemainingColumn()
            self._bar = Progress(*columns, *counts, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=None, counts="")
            self._draw()
            self._bar.start()

    def _draw(self) -> None:
        if self._progress is not None:
            done, total = self._progress
            texts = [bytes_text(count) if self._unit == "bytes" else f"{count:,}" for count in (done, total)]
            counts = f"{' of '.join(texts)}{'' if self._unit == 'bytes' else ' ' + self._unit}"
            self._bar.update(self._task, completed=done, total=total, counts=counts)
