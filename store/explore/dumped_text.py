"""Small files as tables of what they say: pages of numbers, JSON, notes in slots, texts. Each value with its place."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.explore.layouts import field_position
from rmq_spark.store.format import fastjson
from rmq_spark.store.format.checkpoint import CHECKPOINT_FIELDS
from rmq_spark.store.format.timer_check import TIMER_CHECK
from rmq_spark.store.format.watermark import SLOT_BYTES, SLOT_COUNT, decode_slots

SCHEMA = pa.schema([("position", pa.int64()), ("entry", pa.string()), ("value", pa.string())])
_PAGES = {"checkpoint": CHECKPOINT_FIELDS, "timercheck": TIMER_CHECK}
_SHOWN_BYTES = 4096
_CRC_DIGITS = 8


def dump_page(path: str, position: int, kind: str) -> Iterator[pa.RecordBatch]:
    """Yield the fields of a page of numbers: their names and values."""
    layout = _PAGES[kind]
    page = files.read_small(path) or b""
    fields = np.frombuffer(page[: layout.itemsize].ljust(layout.itemsize, b"\0"), layout)[0]
    rows = [(field_position(layout, name), name, str(int(fields[name]))) for name in layout.names or ()]
    rest = page[layout.itemsize :]
    if rest.strip(b"\0"):
        rows.append((layout.itemsize, "bytes behind the fields", rest.rstrip(b"\0").hex()))
    yield _batch(rows, position)


def dump_text(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the lines of a text; bytes that are no text in hex."""
    data = (files.read_small(path) or b"")[: 1 << 20]
    rows, at = [], 0
    for line in data.splitlines(keepends=True):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        shown = text if text.isprintable() else line[:_SHOWN_BYTES].hex()
        rows.append((at, "text" if text.isprintable() else "bytes", shown))
        at += len(line)
    yield _batch(rows, position)


def dump_watermark(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the notes of how far the store was written: two of the last sections, two of the last settlings."""
    data = files.read_small(path) or b""
    rows = []
    for number in range(SLOT_COUNT):
        begin = number * SLOT_BYTES
        slot = data[begin : begin + SLOT_BYTES]
        line = slot.partition(b"\n")[0]
        if not slot.strip(b"\0"):
            continue
        is_whole = decode_slots(slot.ljust(SLOT_BYTES, b"\0"))[0] is not None
        kind = f"slot {number}, {'settled' if number >= SLOT_COUNT // 2 else 'last sections'}"
        entry = kind if is_whole else f"{kind}, damaged"
        rows.append((begin, entry, line[_CRC_DIGITS:].decode("utf-8", "replace")))
    yield _batch(rows, position)


def dump_json(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the values of a file of JSON by their path in it, each where it stands; the text itself if it is none."""
    data = files.read_small(path) or b""
    try:
        text = data.decode()
        value = fastjson.parse(text)
    except ValueError as error:
        rows = [(getattr(error, "position", 0), f"no JSON: {error}", data[:_SHOWN_BYTES].decode("utf-8", "replace"))]
        yield _batch(rows, position)
        return
    rows = []
    _Places(text).walk(value, "", rows)
    if not text.isascii():  # characters are no bytes
        rows = [(len(text[:at].encode()), entry, shown) for at, entry, shown in rows]
    yield _batch(rows, position)


class _Places:
    """Finds the values of a text of JSON again, in the order in which they were read: their keys lead to them."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def walk(self, value: Any, name: str, rows: list[tuple[int, str, str]]) -> None:
        """Add the values in `value`, which stands from here on, with their places (characters)."""
        if isinstance(value, dict) and value:
            for key, one in value.items():
                self._pass_key(key)
                self.walk(one, f"{name}.{key}" if name else key, rows)
            return
        if isinstance(value, list) and value:
            for number, one in enumerate(value):
                self._skip()
                self.walk(one, f"{name}[{number}]", rows)
            return
        self._skip()
        shown = json.dumps(value, ensure_ascii=False)
        rows.append((self._at, name, shown))
        plain = self._text.startswith(shown, self._at)
        end = self._at + len(shown) if plain else self._text.find(_last_of(value), self._at + 1) + 1
        self._at = max(end, self._at)

    def _pass_key(self, key: str) -> None:
        quoted = self._text.find(json.dumps(key, ensure_ascii=False), self._at)
        bare = self._text.find(f"{key}:", self._at) if key.lstrip("-").isdigit() else -1
        found = [at for at in (quoted, bare) if at >= 0]
        if found:
            colon = self._text.find(":", min(found) + len(key))
            self._at = colon + 1 if colon >= 0 else self._at

    def _skip(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\r\n,:{[":
            if self._text[self._at] in "{[" and self._text[self._at + 1 : self._at + 2] in "}]":
                return
            self._at += 1


def _last_of(value: Any) -> str:
    return (
        '"' if isinstance(value, str) else "}" if isinstance(value, dict) else "]" if isinstance(value, list) else ","
    )


def _batch(rows: list[tuple[int, str, str]], position: int) -> pa.RecordBatch:
    kept = [row for row in rows if row[0] >= position]
    columns = list(zip(*kept, strict=True)) if kept else [(), (), ()]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )
