"""`dump`: any file of a store as a table, with the position of each entry in bytes.

For a segment of the commit log, the rows are records, fillers, damaged bytes, and the unused end. For a small file, the
rows are names and values: numbers of a page, values of a JSON file, slots of the watermark, or lines of text.
`dump_entries.py` dumps the files that have entries of a fixed size.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError, StorePathError
from rmq_spark.store.format import fastjson
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.byte_ranges import as_text
from rmq_spark.store.format.checkpoint import CHECKPOINT_FIELDS
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.file_names import parse_segment_name
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.own_files import SLOT_BYTES, SLOT_COUNT, decode_slots
from rmq_spark.store.format.properties import KEYS, TAGS
from rmq_spark.store.format.record import BORN_HOST_V6, RECORD_HEAD, STORE_HOST_V6, Blank, body_crc
from rmq_spark.store.format.record_batch import WholeRecords, field_shift
from rmq_spark.store.format.timer import TIMER_CHECK
from rmq_spark.store.html_tables import MAX_ROWS, box, number_column, table, text_column
from rmq_spark.store.log.segments import Segment, SegmentRun
from rmq_spark.store.tools import dump_entries
from rmq_spark.store.tools.finding import field_position
from rmq_spark.store.tools.log_walk import LogBlock, LogFault, LogWalk, TolerantCommitLog

_FIELDS: Any = RECORD_HEAD.fields
# Used if no record begins at the position that the caller gave.
_WITHIN = "position {} may be within a record; the next record that can be read follows"
_HOST_BYTES, _V6_HOST_BYTES = 8, 20
LOG_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("entry", pa.string()),  # record, filler, damage, end
        ("size", pa.int64()),
        ("physicalOffset", pa.int64()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("storeTimestamp", pa.timestamp("ms", tz="UTC")),
        ("bornTimestamp", pa.timestamp("ms", tz="UTC")),
        ("storeHost", pa.string()),
        ("bornHost", pa.string()),
        ("magic", pa.int64()),
        ("sysFlag", pa.int32()),
        ("flag", pa.int32()),
        ("reconsumeTimes", pa.int32()),
        ("preparedTransactionOffset", pa.int64()),
        ("bodyPosition", pa.int64()),
        ("bodySize", pa.int32()),
        ("bodyCrc", pa.int64()),
        ("crcMatches", pa.bool_()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("found", pa.string()),
    ]
)


class _OneSegment(TolerantCommitLog):
    """A commit log that consists of one segment, which may be in any folder."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        super().__init__(())

    def refresh(self) -> None:
        """Keep the one segment. No folder is listed."""
        self.close()
        self.segments = SegmentRun((self._segment,), self._segment.size)


def dump_log(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the records, fillers and damage of a commit-log segment at and after `position` (bytes).

    `position` may be within a record. Then the first row describes the bytes before the next record.
    """
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    segment = Segment(begin, max(files.file_size(path), 0), path)
    if position >= segment.size:
        return
    log = _OneSegment(segment)
    try:
        walk, at = LogWalk(log, DEFAULT_DELAY_LEVELS), begin + position
        for step in walk.run(at, None):
            if isinstance(step, LogFault):
                if step.begin < step.end:
                    is_first = position > 0 and step.begin == begin + position
                    found = f"{_WITHIN.format(position)}: {step.found}" if is_first else step.found
                    yield _row(step.begin - begin, "damage", step.end - step.begin, step.begin, found)
                    at = step.end
                continue
            yield _records(step, begin)
            at = step.begin + int(step.whole.ends[-1])
        if at < segment.end:
            record, size = log.record_at(at), segment.end - at
            if isinstance(record, Blank):
                yield _row(at - begin, "filler", size, at, f"a filler of {record.remaining_size} bytes")
            else:
                is_zero = not log.bytes_at(at, 8).strip(b"\0")
                found = "zeros" if is_zero else getattr(record, "why", "not a record")
                yield _row(at - begin, "end", size, at, found)
    finally:
        log.close()


def _row(position: int, entry: str, size: int, physical_offset: int, found: str) -> pa.RecordBatch:
    row = {"position": position, "entry": entry, "size": size, "physicalOffset": physical_offset, "found": found}
    return pa.RecordBatch.from_pylist([row], LOG_SCHEMA)


def _records(block: LogBlock, segment_begin: int) -> pa.RecordBatch:
    whole, columns, count = block.whole, block.columns, len(block.whole)
    pairs = whole.pairs()
    shift = block.begin - segment_begin
    crcs = whole.field("body_crc").astype(np.int64)
    view = whole.data.data
    found = [
        body_crc(view[begin:end]) if end > begin else -1
        for begin, end in zip(whole.body_begins.tolist(), whole.body_ends.tolist(), strict=True)
    ]
    matches = (np.array(found, np.int64) == crcs) | (whole.body_begins == whole.body_ends)
    arrays = [
        pa.array(whole.positions + shift),
        pa.repeat(pa.scalar("record"), count),
        pa.array(columns.sizes),
        pa.array(columns.places),
        pa.array(columns.topics, pa.string()).take(pa.array(columns.topic_numbers)),
        pa.array(columns.queue_ids.astype(np.int32)),
        pa.array(columns.queue_offsets),
        pairs.column(TAGS),
        pairs.column(KEYS),
        pa.array(columns.store_times, pa.timestamp("ms", tz="UTC")),
        pa.array(whole.field("born_timestamp").astype(np.int64), pa.timestamp("ms", tz="UTC")),
        _hosts(whole, "store_host"),
        _hosts(whole, "born_host"),
        pa.array(whole.field("magic").astype(np.int64)),
        pa.array(columns.sys_flags.astype(np.int32)),
        pa.array(whole.field("flag").astype(np.int32)),
        pa.array(whole.field("reconsume_times").astype(np.int32)),
        pa.array(whole.field("prepared_transaction_offset").astype(np.int64)),
        pa.array(whole.body_begins + shift),
        pa.array((whole.body_ends - whole.body_begins).astype(np.int32)),
        pa.array(crcs),
        pa.array(matches),
        pairs.maps(),
        pa.nulls(count, pa.string()),
    ]
    texts = [as_text(array) if pa.types.is_binary(array.type) else array for array in arrays]
    return pa.RecordBatch.from_arrays(
        [array.cast(field.type) for array, field in zip(texts, LOG_SCHEMA, strict=True)], schema=LOG_SCHEMA
    )


def _hosts(whole: WholeRecords, name: str) -> pa.StringArray:
    """Return one host of each record as text. `name` is "born_host" or "store_host"."""
    bit = BORN_HOST_V6 if name == "born_host" else STORE_HOST_V6
    sizes = np.where(whole.sys_flags & bit, _V6_HOST_BYTES, _HOST_BYTES)
    begins = whole.positions + _FIELDS[name][1] + field_shift(name, whole.sys_flags)
    each = zip(begins.tolist(), (begins + sizes).tolist(), strict=True)
    raw = pa.array([whole.data[begin:end].tobytes() for begin, end in each], pa.binary()).dictionary_encode()
    decoded = pa.array([str(decode_host(host)) for host in raw.dictionary.to_pylist()], pa.string())
    return decoded.take(raw.indices)


TEXT_SCHEMA = pa.schema([("position", pa.int64()), ("entry", pa.string()), ("value", pa.string())])
_PAGES = {"checkpoint": CHECKPOINT_FIELDS, "timercheck": TIMER_CHECK}
_SHOWN_BYTES = 4096
_PRINTED_ROWS, _PRINTED_CHARS = 20, 240  # of a dump that is printed
_CRC_DIGITS = 8


def dump_page(path: str, position: int, kind: str) -> Iterator[pa.RecordBatch]:
    """Yield the name and the value of each field of a checkpoint or a timer check. `kind` is the kind of the file."""
    layout = _PAGES[kind]
    page = files.read_small(path) or b""
    fields = np.frombuffer(page[: layout.itemsize].ljust(layout.itemsize, b"\0"), layout)[0]
    rows = [(field_position(layout, name), name, str(int(fields[name]))) for name in layout.names or ()]
    rest = page[layout.itemsize :]
    if rest.strip(b"\0"):
        rows.append((layout.itemsize, "bytes after the fields", rest.rstrip(b"\0").hex()))
    yield _text_batch(rows, position)


def dump_text(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the lines of a text file. A line that is not printable is shown in hex."""
    data = (files.read_small(path) or b"")[: 1 << 20]
    rows, at = [], 0
    for line in data.splitlines(keepends=True):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        shown = text if text.isprintable() else line[:_SHOWN_BYTES].hex()
        rows.append((at, "text" if text.isprintable() else "bytes", shown))
        at += len(line)
    yield _text_batch(rows, position)


def dump_watermark(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the slots of the watermark that are not empty.

    Two slots belong to the last write sessions, and two belong to the last clean shutdowns ("settled").
    """
    data = files.read_small(path) or b""
    rows = []
    for number in range(SLOT_COUNT):
        begin = number * SLOT_BYTES
        slot = data[begin : begin + SLOT_BYTES]
        if not slot.strip(b"\0"):
            continue
        line = slot.partition(b"\n")[0]
        is_valid = decode_slots(slot.ljust(SLOT_BYTES, b"\0"))[0] is not None
        entry = f"slot {number}, {'settled' if number >= SLOT_COUNT // 2 else 'last sections'}"
        entry += "" if is_valid else ", damaged"
        rows.append((begin, entry, line[_CRC_DIGITS:].decode("utf-8", "replace")))
    yield _text_batch(rows, position)


def dump_json(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the values of a JSON file, each with its path in the JSON, such as `offsetTable.orders@group`.

    If the file is not valid JSON, yields one row with the error and the begin of the text.
    """
    data = files.read_small(path) or b""
    try:
        text = data.decode()
        value = fastjson.parse(text)
    except ValueError as error:
        shown = data[:_SHOWN_BYTES].decode("utf-8", "replace")
        yield _text_batch([(getattr(error, "position", 0), f"no JSON: {error}", shown)], position)
        return
    rows: list[tuple[int, str, str]] = []
    _JsonPositions(text).walk(value, "", rows)
    if not text.isascii():  # convert positions from characters to bytes
        rows = [(len(text[:at].encode()), entry, shown) for at, entry, shown in rows]
    yield _text_batch(rows, position)


class _JsonPositions:
    """Finds the position of each parsed value in its JSON text. Values must be given in the order of the text."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def walk(self, value: Any, name: str, rows: list[tuple[int, str, str]]) -> None:
        """Append a row for `value`, or for each value in it, to `rows`: position (characters), path, and text.

        `name` is the path of `value`. Its text must begin at or after the current position.
        """
        if isinstance(value, dict) and value:
            for key, one in value.items():
                self._pass_key(key)
                self.walk(one, f"{name}.{key}" if name else key, rows)
            return
        if isinstance(value, list) and value:
            for number, one in enumerate(value):
                self._pass_separators()
                self.walk(one, f"{name}[{number}]", rows)
            return
        self._pass_separators()
        shown = json.dumps(value, ensure_ascii=False)
        rows.append((self._at, name, shown))
        if self._text.startswith(shown, self._at):
            self._at += len(shown)
        else:  # the text has other escapes or spaces
            ends: dict[type, str] = {str: '"', dict: "}", list: "]"}
            self._at = max(self._text.find(ends.get(type(value), ","), self._at + 1) + 1, self._at)

    def _pass_key(self, key: str) -> None:
        quoted = self._text.find(json.dumps(key, ensure_ascii=False), self._at)
        bare = self._text.find(f"{key}:", self._at) if key.lstrip("-").isdigit() else -1
        found = [at for at in (quoted, bare) if at >= 0]
        if found:
            colon = self._text.find(":", min(found) + len(key))
            self._at = colon + 1 if colon >= 0 else self._at

    def _pass_separators(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\r\n,:{[":
            if self._text[self._at] in "{[" and self._text[self._at + 1 : self._at + 2] in "}]":
                return
            self._at += 1


def _text_batch(rows: list[tuple[int, str, str]], position: int) -> pa.RecordBatch:
    kept = [row for row in rows if row[0] >= position]
    columns = list(zip(*kept, strict=True)) if kept else [(), (), ()]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, TEXT_SCHEMA, strict=True)], schema=TEXT_SCHEMA
    )


Reader = Callable[[str, int], Iterator[pa.RecordBatch]]
_KINDS: Mapping[str, tuple[pa.Schema, Reader]] = {
    "commitlog": (LOG_SCHEMA, dump_log),
    "consumequeue": (dump_entries.QUEUE_SCHEMA, dump_entries.dump_queue),
    "batchconsumequeue": (dump_entries.BATCH_SCHEMA, dump_entries.dump_batch_queue),
    "consumequeue_ext": (dump_entries.EXT_SCHEMA, dump_entries.dump_ext),
    "index": (dump_entries.INDEX_SCHEMA, dump_entries.dump_index),
    "timerlog": (dump_entries.TIMER_LOG_SCHEMA, dump_entries.dump_timer_log),
    "timerwheel": (dump_entries.WHEEL_SCHEMA, dump_entries.dump_timer_wheel),
    "checkpoint": (TEXT_SCHEMA, lambda path, at: dump_page(path, at, "checkpoint")),
    "timercheck": (TEXT_SCHEMA, lambda path, at: dump_page(path, at, "timercheck")),
    "watermark": (TEXT_SCHEMA, dump_watermark),
    "json": (TEXT_SCHEMA, dump_json),
    "abort": (TEXT_SCHEMA, dump_text),
    "lock": (TEXT_SCHEMA, dump_text),
    "text": (TEXT_SCHEMA, dump_text),
}
DUMP_KINDS = tuple(_KINDS)
_TREES = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "timerlog", "commitlog")
_NAMED = {
    "checkpoint": "checkpoint",
    "timercheck": "timercheck",
    "timerwheel": "timerwheel",
    "watermark": "watermark",
    "lock": "lock",
    "abort": "abort",
    "abort.bak": "abort",
    "turn": "lock",
    "queues": "text",
    "rebuild": "text",
    "timermetrics": "json",
    "transactionMetrics": "json",
    "position-checkpoint": "json",
}


@dataclass(frozen=True, slots=True, repr=False)
class Dump:
    """The entries of one file. Each iteration opens the file and yields Arrow batches, so memory is bounded.

    Printing it shows the first entries, and a notebook displays them as a table; both read the file.

    The first two columns are `position` (bytes from the begin of the file) and `entry` (the kind of the entry, or its
    name). The fields of the entry follow.
    """

    path: str
    kind: str
    position: int = 0
    limit: int | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table. They depend on the kind of the file."""
        return _KINDS[self.kind][0]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the entries in batches, at most `limit` entries in total.

        Raises StoreError if the file cannot be read, or if it is deleted meanwhile.
        """
        left = self.limit
        for batch in _KINDS[self.kind][1](self.path, self.position):
            if left is not None:
                batch = batch.slice(0, left)
                left -= batch.num_rows
            if batch.num_rows:
                yield batch
            if left == 0:
                return

    def to_arrow(self) -> pa.Table:
        """Return all entries as one table."""
        return pa.Table.from_batches(list(self), self.schema)

    def __repr__(self) -> str:
        # Without entries, because a debugger or a log line must not read from the disk.
        return f"<dump of {self.path} ({self.kind}) from position {self.position}: print it, or call to_arrow()>"

    def __str__(self) -> str:
        rows, has_more = self._first_rows(_PRINTED_ROWS)
        lines = [f"{self.path} ({self.kind}), from position {self.position}"]
        for row in rows:
            values = [f"{name}={_in_a_line(value)}" for name, value in row.items() if name not in ("position", "entry")]
            line = f"{row['position']:>10} {row['entry']}  {', '.join(values)}"
            lines.append(line if len(line) <= _PRINTED_CHARS else f"{line[: _PRINTED_CHARS - 1]}…")
        return "\n".join([*lines, *(["… and more: to_arrow() has all"] if has_more else [])])

    def _repr_html_(self) -> str:
        rows, has_more = self._first_rows(MAX_ROWS)
        facts = {"kind": self.kind, "from position": f"{self.position:,}"}
        columns = []
        for field in self.schema:
            values = [row.get(field.name) for row in rows]
            if pa.types.is_integer(field.type):
                columns.append(number_column(field.name, values))
            elif any(value is not None for value in values):
                columns.append(text_column(field.name, [None if one is None else _in_a_line(one) for one in values]))
        more = "… and more: to_arrow() has all" if has_more else ""
        return box("dump of", self.path, facts, table(columns, more) if rows else "no entries")

    def _first_rows(self, count: int) -> tuple[list[dict[str, Any]], bool]:
        """Return the first `count` entries without null values, and whether there are more."""
        rows: list[dict[str, Any]] = []
        for batch in Dump(self.path, self.kind, self.position, count + 1 if self.limit is None else self.limit):
            rows += batch.slice(0, count + 1 - len(rows)).to_pylist(maps_as_pydicts="lossy")
            if len(rows) > count:
                break
        return [{k: v for k, v in row.items() if v is not None} for row in rows[:count]], len(rows) > count


def _in_a_line(value: object) -> str:
    """Return a value as one printable line. Times are in UTC."""
    text = value.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if isinstance(value, datetime) else str(value)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def dump(file: str | PurePath, *, kind: str | None = None, position: int = 0, limit: int | None = None) -> Dump:
    """Return the entries of one file of a store. Iterate over the result, or call its `to_arrow`.

    The result has the entries at and after `position` (bytes from the begin of the file), at most `limit` of them.
    Damaged entries are included and marked.

    The file may be a segment of the commit log; a file of a consume queue, of its extension, of the key index or of the
    timer log; the timer wheel, timer check, checkpoint, abort or lock; a JSON file; or a file in `rmq/`. If `kind` is
    None, it is derived from the file's name and folders.

    Raises OptionError if `kind` is not a known kind, if it is None and the kind cannot be derived, or if `position` or
    `limit` is invalid. Raises StorePathError if the file does not exist or is a folder.
    """
    path = files.absolute(file)
    if files.is_folder(path) or files.file_size(path) < 0:
        what = "is a folder" if files.is_folder(path) else "does not exist"
        raise StorePathError(f"{path} {what}. Give a file of a store, such as commitlog/00000000000000000000.")
    if kind is None:
        kind = _kind_of(path)
    if kind not in _KINDS:
        raise OptionError(f"kind={kind!r} is none of: {', '.join(DUMP_KINDS)}.")
    for name, value in (("position", position), ("limit", limit)):
        if value is not None:
            check_setting(name, value, 0)
    return Dump(path, kind, position, limit)


def _kind_of(path: str) -> str:
    """Return the kind of a file, derived from its name and folders. Raises OptionError if the kind is unknown."""
    *folders, name = path.split("/")
    if name in _NAMED:
        return _NAMED[name]
    plain = name.removesuffix(filenames.BACKUP_SUFFIX).removesuffix(".tmp")
    if plain.endswith((".json", ".unsynced")) or plain in _NAMED:
        return _NAMED.get(plain, "json")
    if filenames.parse_segment_name(name) is not None:
        found = next((folder for folder in reversed(folders) if folder in _TREES), None)
        if found is not None:
            return found
    if filenames.is_index_name(name) and folders[-1] == filenames.INDEX:
        return "index"
    if name.endswith((".conf", ".progress", ".count")):
        return "text"
    if name.endswith(".lock"):
        return "lock"
    raise OptionError(f"the kind of {path} is unknown. Give its kind, one of: {', '.join(DUMP_KINDS)}.")
