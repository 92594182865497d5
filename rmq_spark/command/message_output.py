"""How `rmq cat` writes messages: lines for people, JSON, Arrow's stream format, Parquet; to stdout or to a file.

A file gets its name when it is whole: one that exists stays as it was until then, and after an error or Ctrl-C.
"""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from rmq_spark.command.output import cell, json_line

FORMATS = ("text", "json", "arrow", "parquet")


class Output(ABC):
    """Where messages go. `messages` counts them."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.messages = stream, 0

    def write(self, table: pa.Table) -> None:
        """Write the rows of a table; all tables have the same columns."""
        if table.num_rows:
            self.put(table)
            self.messages += table.num_rows

    @abstractmethod
    def put(self, table: pa.Table) -> None:
        """Write rows, of which there are some."""

    def finish(self) -> None:
        """Write what belongs behind the last row."""


class _Text(Output):
    """A line for each message: its columns, separated by two blanks; times are UTC."""

    def put(self, table: pa.Table) -> None:
        lines = ["  ".join(cell(name, value) for name, value in _shown(row).items()) for row in table.to_pylist()]
        self.stream.write(("\n".join(lines) + "\n").encode())
        self.stream.flush()


class _Json(Output):
    """A list of objects."""

    def put(self, table: pa.Table) -> None:
        for at, row in enumerate(table.to_pylist(), self.messages):
            self.stream.write((",\n  " if at else "[\n  ").encode() + json_line(_named(row)).encode())

    def finish(self) -> None:
        self.stream.write(b"\n]\n" if self.messages else b"[]\n")


class _JsonLines(Output):
    """An object a line, as they come: a list that never ends could not be read."""

    def put(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            self.stream.write(json_line(_named(row)).encode() + b"\n")
        self.stream.flush()


class _Arrow(Output):
    """Arrow's stream format."""

    _writer: Any = None

    def put(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self.stream, table.schema)
        self._writer.write_table(table)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Parquet(Output):
    """A Parquet file."""

    _writer: Any = None

    def put(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.stream, table.schema, compression="zstd")
        self._writer.write_table(table)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


_OUTPUTS: dict[str, type[Output]] = {"text": _Text, "json": _Json, "arrow": _Arrow, "parquet": _Parquet}


@contextmanager
def open_output(form: str, path: str | None, *, is_endless: bool) -> Iterator[Output]:
    """Yield where to write messages in one of FORMATS: to the file at `path`, or to stdout."""
    kind = _JsonLines if form == "json" and is_endless else _OUTPUTS[form]
    if path is None:
        if form in ("arrow", "parquet") and sys.stdout.isatty():
            raise click.UsageError(f"{form} is nothing for a terminal. Give --output FILE, or pipe it on.")
        out = kind(sys.stdout.buffer)
        yield out
        out.finish()
        return
    part = f"{path}.part"
    try:
        with open(part, "wb") as stream:
            out = kind(stream)
            yield out
            out.finish()
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose properties are an object, as JSON wants them."""
    return {**row, "properties": dict(row["properties"] or [])} if "properties" in row else row


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for people: the place of a message is one word."""
    if not row.keys() >= {"topic", "queueId", "queueOffset"}:
        return row
    place = f"{row['topic']}/{row['queueId']}@{row['queueOffset']}"
    left_out = ("topic", "queueId", "queueOffset", "commitLogOffset", "bornTimestamp", "storeTimestamp")
    times = row.get("reconsumeTimes") or 0
    rest = {
        name: value for name, value in row.items() if name not in (*left_out, "reconsumeTimes") and value is not None
    }
    return {"storeTimestamp": row.get("storeTimestamp"), "place": place, **rest} | (
        {"reconsumeTimes": f"(try {times + 1})"} if times else {}
    )
