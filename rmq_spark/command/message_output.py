"""Output formats of `rmq cat`: text, JSON, CSV, Arrow's stream format and Parquet, to stdout or to a file.

A file is written under a temporary name and renamed when it is complete. After an error or Ctrl-C an existing file is
unchanged.
"""

import os
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import cell, csv_lines, escaped, json_line, rows_of
from rmq_spark.command.queue_views import BROKER_NAME
from rmq_spark.store.model import QueueKey

_STAGING_PREFIX = ".rmq-cat-"
FORMATS = ("text", "json", "csv", "arrow", "parquet")


class Output(ABC):
    """Writer of messages in one format; `messages` is the number written."""

    def __init__(self, stream: IO[bytes], names: Sequence[str]) -> None:
        self.stream, self.names, self.messages = stream, names, 0

    def write(self, table: pa.Table) -> None:
        """Write the rows of a table that has the columns `names`."""
        if table.num_rows:
            self.put(table)
            self.messages += table.num_rows

    @abstractmethod
    def put(self, table: pa.Table) -> None:
        """Write a table that has at least one row."""

    def finish(self) -> None:  # noqa: B027 - most formats have no footer
        """Write the footer, if the format has one."""


class _Text(Output):
    """One line per message: store time (UTC), queue and offset, tags, keys and body."""

    def put(self, table: pa.Table) -> None:
        lines = ["  ".join(filter(None, self.texts(row))) for row in rows_of(table)]
        self.stream.write(("\n".join(lines) + "\n").encode())
        self.stream.flush()

    def texts(self, row: dict[str, Any]) -> Iterator[str]:
        """Yield the fields of a line."""
        yield cell("", row["storeTimestamp"], in_ms=True)
        queue = QueueKey(row["topic"], row["queueId"], row.get(BROKER_NAME, ""))
        yield cell("", f"{queue}@{row['queueOffset']}")
        if row["reconsumeTimes"]:
            yield f"(try {row['reconsumeTimes'] + 1})"
        yield from (cell("", row[name]) for name in ("tags", "keys", "body"))


class _Columns(Output):
    """One line per message: the chosen columns, separated by tabs."""

    def put(self, table: pa.Table) -> None:
        for row in rows_of(table):
            line = "\t".join(cell("", value, in_ms=True) for value in row.values())
            self.stream.write(line.encode() + b"\n")
        self.stream.flush()


class _Json(Output):
    """A JSON list of objects."""

    def put(self, table: pa.Table) -> None:
        for at, row in enumerate(rows_of(table), self.messages):
            self.stream.write((",\n  " if at else "[\n  ").encode() + json_line(row).encode())

    def finish(self) -> None:
        self.stream.write(b"\n]\n" if self.messages else b"[]\n")


class _JsonLines(Output):
    """One JSON object per line, for `--follow`: a list without an end is not valid JSON."""

    def put(self, table: pa.Table) -> None:
        for row in rows_of(table):
            self.stream.write(json_line(row).encode() + b"\n")
        self.stream.flush()


class _Csv(Output):
    """A header, and one row per message. Behind a column of bytes is one with the base64 of those that are not text."""

    def put(self, table: pa.Table) -> None:
        header = "" if self.messages else self._header()
        text = header + csv_lines(rows_of(table), self._fields())
        is_shown = self.stream is sys.stdout.buffer and sys.stdout.isatty()
        self.stream.write((escaped(text) if is_shown else text).encode())
        self.stream.flush()

    def finish(self) -> None:
        if not self.messages:
            self.stream.write(self._header().encode())

    def _header(self) -> str:
        names = self._fields()
        return csv_lines([dict(zip(names, names, strict=True))], names)

    def _fields(self) -> list[str]:
        binary = [name for name in self.names if name in rmq_spark.COLUMNS and rmq_spark.COLUMNS[name] == pa.binary()]
        return [field for name in self.names for field in (name, *([f"{name}Base64"] if name in binary else []))]


class _Tables(Output):
    """Arrow tables of one schema, which is written even without rows."""

    _writer: Any = None

    def put(self, table: pa.Table) -> None:
        self._opened(table.schema).write_table(table)

    def finish(self) -> None:
        columns = {**rmq_spark.COLUMNS, BROKER_NAME: pa.string()}
        self._opened(pa.schema([(name, columns[name]) for name in self.names])).close()

    def _opened(self, schema: pa.Schema) -> Any:
        if self._writer is None:
            self._writer = self.open(schema)
        return self._writer

    @abstractmethod
    def open(self, schema: pa.Schema) -> Any:
        """Return a writer with `write_table` and `close`."""


class _Arrow(_Tables):
    """Arrow's stream format."""

    def open(self, schema: pa.Schema) -> Any:
        return pa.ipc.new_stream(self.stream, schema)


class _Parquet(_Tables):
    """A Parquet file."""

    def open(self, schema: pa.Schema) -> Any:
        from pyarrow import parquet  # slow to import, so only where it is used

        return parquet.ParquetWriter(self.stream, schema, compression="zstd")


_OUTPUTS: dict[str, type[Output]] = {"text": _Text, "json": _Json, "csv": _Csv, "arrow": _Arrow, "parquet": _Parquet}


def is_file(stream: IO[str]) -> bool:
    """Return whether a stream is redirected to a regular file."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:  # the stream has no file descriptor
        return False


def is_writable(folder: os.PathLike[str]) -> bool:
    """Return whether the user may create files in a folder."""
    return os.access(folder, os.W_OK)


@contextmanager
def open_output(
    form: str, path: str | None, names: Sequence[str], *, is_endless: bool, is_plain: bool
) -> Iterator[Output]:
    """Yield an Output that writes the format `form` to the file `path`, or to stdout for None and "-".

    With `is_endless` JSON is one object per line; with `is_plain` text is just the columns `names`. Raises UsageError
    for a binary format on a terminal, and for a path that is a folder or a device or whose folder does not exist.
    """
    kind = _OUTPUTS[form]
    if form == "json" and is_endless:
        kind = _JsonLines
    if form == "text" and is_plain:
        kind = _Columns
    if path is None or path == "-":
        if form in ("arrow", "parquet") and sys.stdout.isatty():
            raise click.UsageError(
                f"--format {form} is binary, and stdout is a terminal. Add --output FILE, or a pipe."
            )
        with _finished(kind(sys.stdout.buffer, names)) as out:
            yield out
        return
    if os.path.exists(path) and not os.path.isfile(path):
        raise click.UsageError(f"--output {path} exists and is not a regular file. Choose another name.")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise click.UsageError(f"--output {path}: the folder {folder} does not exist. Create it first.")
    # Beside the target, because a rename cannot cross file systems. Its own folder, because removing the folder also
    # removes what an error or Ctrl-C left in it.
    with (
        _named(path),
        tempfile.TemporaryDirectory(dir=folder, prefix=_STAGING_PREFIX, ignore_cleanup_errors=True) as made,
    ):
        part = os.path.join(made, "part")
        with click.open_file(part, "wb") as stream:
            with _finished(kind(stream, names)) as out:
                yield out
            os.fsync(stream.fileno())
        os.replace(part, path)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Let errors of the staging file name the file of the user, and those of its writes, which name none."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) or (
            error.filename is not None and _STAGING_PREFIX not in os.fspath(error.filename)
        ):
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot be written: {reason}. An existing file is unchanged", path) from error


@contextmanager
def _finished(out: Output) -> Iterator[Output]:
    yield out
    out.finish()
    out.stream.flush()
