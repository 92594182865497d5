"""How `rmq cat` writes messages: lines for people, JSON, Arrow's stream format, Parquet; to stdout or to a file.

A file gets its name when it is whole: one that exists stays as it was until then, and after an error or Ctrl-C.
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
from rmq_spark.command.output import cell, json_line, rows_of

FORMATS = ("text", "json", "arrow", "parquet")


class Output(ABC):
    """Where messages go. `messages` counts them."""

    def __init__(self, stream: IO[bytes], names: Sequence[str]) -> None:
        self.stream, self.names, self.messages = stream, names, 0

    def write(self, table: pa.Table) -> None:
        """Write the rows of a table that has the columns `names`."""
        if table.num_rows:
            self.put(table)
            self.messages += table.num_rows

    @abstractmethod
    def put(self, table: pa.Table) -> None:
        """Write rows, of which there are some."""

    def finish(self) -> None:  # noqa: B027 - mostly there is nothing
        """Write what belongs behind the last row."""


class _Text(Output):
    """A line for each message: when, where, tags, keys and body; times are UTC."""

    def put(self, table: pa.Table) -> None:
        lines = ["  ".join(filter(None, self.texts(row))) for row in rows_of(table)]
        self.stream.write(("\n".join(lines) + "\n").encode())
        self.stream.flush()

    def texts(self, row: dict[str, Any]) -> Iterator[str]:
        """Yield the parts of a line."""
        yield cell("", row["storeTimestamp"], in_ms=True)
        yield cell("", f"{row['topic']}/{row['queueId']}@{row['queueOffset']}")
        if row["reconsumeTimes"]:
            yield f"(try {row['reconsumeTimes'] + 1})"
        yield from (cell("", row[name]) for name in ("tags", "keys", "body"))


class _Columns(Output):
    """A line for each message: just the columns that were asked for, with tabs between."""

    def put(self, table: pa.Table) -> None:
        for row in rows_of(table):
            line = "\t".join(cell("", value, in_ms=True) for value in row.values())
            self.stream.write(line.encode() + b"\n")
        self.stream.flush()


class _Json(Output):
    """A list of objects."""

    def put(self, table: pa.Table) -> None:
        for at, row in enumerate(rows_of(table), self.messages):
            self.stream.write((",\n  " if at else "[\n  ").encode() + json_line(row).encode())

    def finish(self) -> None:
        self.stream.write(b"\n]\n" if self.messages else b"[]\n")


class _JsonLines(Output):
    """An object a line, as they come: a list that never ends could not be read."""

    def put(self, table: pa.Table) -> None:
        for row in rows_of(table):
            self.stream.write(json_line(row).encode() + b"\n")
        self.stream.flush()


class _Tables(Output):
    """Tables of one schema, which is written without a row too."""

    _writer: Any = None

    def put(self, table: pa.Table) -> None:
        self._opened(table.schema).write_table(table)

    def finish(self) -> None:
        columns = rmq_spark.COLUMNS
        self._opened(pa.schema([(name, columns[name]) for name in self.names])).close()

    def _opened(self, schema: pa.Schema) -> Any:
        if self._writer is None:
            self._writer = self.open(schema)
        return self._writer

    @abstractmethod
    def open(self, schema: pa.Schema) -> Any:
        """Return what writes tables."""


class _Arrow(_Tables):
    """Arrow's stream format."""

    def open(self, schema: pa.Schema) -> Any:
        return pa.ipc.new_stream(self.stream, schema)


class _Parquet(_Tables):
    """A Parquet file."""

    def open(self, schema: pa.Schema) -> Any:
        from pyarrow import parquet  # half as long to load as all of the rest

        return parquet.ParquetWriter(self.stream, schema, compression="zstd")


_OUTPUTS: dict[str, type[Output]] = {"text": _Text, "json": _Json, "arrow": _Arrow, "parquet": _Parquet}


def is_file(stream: IO[str]) -> bool:
    """Say whether what is printed to a stream goes to a file: nobody sees it come."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:  # it is none of the system's
        return False


def may_write_to(folder: os.PathLike[str]) -> bool:
    """Say whether whoever runs this may make files in a folder."""
    return os.access(folder, os.W_OK)


def refuse_output(path: str | None, store: Any) -> None:
    """Raise OptionError for a file among those of a store, the one that is read or another."""
    if path is not None and path != "-":
        store.refuse_inside(path)


@contextmanager
def open_output(
    form: str, path: str | None, names: Sequence[str], *, is_endless: bool, is_plain: bool
) -> Iterator[Output]:
    """Yield where to write messages in one of FORMATS: to the file at `path`, or to stdout.

    What is endless is written as it comes; what is plain is text that has just the columns asked for.
    """
    kind = _OUTPUTS[form]
    if form == "json" and is_endless:
        kind = _JsonLines
    if form == "text" and is_plain:
        kind = _Columns
    if path is None or path == "-":
        if form in ("arrow", "parquet") and sys.stdout.isatty():
            raise click.UsageError(f"{form} is nothing for a terminal. Give --output FILE, or pipe it on.")
        with _finished(kind(sys.stdout.buffer, names)) as out:
            yield out
        return
    if os.path.exists(path) and not os.path.isfile(path):
        raise click.UsageError(f"--output {path} is no file.")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise click.UsageError(f"--output {path}: there is no folder {folder}.")
    # In the same folder, so that it can be renamed. A folder of its own, which goes whatever happens, and with it what
    # an error or Ctrl-C left in it.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rmq-cat-", ignore_cleanup_errors=True) as made:
        part = os.path.join(made, "part")
        with click.open_file(part, "wb") as stream:
            with _finished(kind(stream, names)) as out:
                yield out
            os.fsync(stream.fileno())
        os.replace(part, path)


@contextmanager
def _finished(out: Output) -> Iterator[Output]:
    yield out
    out.finish()
    out.stream.flush()
