"""Check of the key index: the structure of each file, and whether a lookup by key finds each message.

Structure: each entry contains the number of the previous entry of its slot. Each slot contains the number of its newest
entry. The header contains the number of used slots and the number of the next entry.

Keys: each key of each record in the commit log must have an entry. If an entry is missing, a lookup by that key does
not find the message. A surplus entry is harmless, because a lookup reads the record and compares its key.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.index_file import (
    INDEX_HEADER,
    INDEX_SLOT,
    INDEX_UNIT,
    MAX_SECONDS,
    IndexHeader,
    IndexShape,
    decode_header,
    learn_shape,
)
from rmq_spark.store.format.record import TRANSACTION_MASK, TRANSACTION_ROLLBACK
from rmq_spark.store.format.record_batch import RecordColumns
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity

_CHUNK_ENTRIES = 1 << 16
_CHUNK_SLOTS = 1 << 18
_CHUNKS_KEPT = 8
_NEXT_STEP = "Lookups by key may miss messages. rmq_spark.repair rebuilds the index from the commit log."


@dataclass(slots=True)
class IndexChunk:
    """A range of entries in one index file: the numbers [first, end).

    `least` and `most` are the lowest and the highest physical offset of the entries' records.
    """

    path: str
    shape: IndexShape
    header: IndexHeader
    first: int
    end: int
    least: int
    most: int


@dataclass(slots=True)
class IndexScan:
    """The result of a scan of all files of a key index: chunks of entries, findings, and what was read.

    `files`, `entries` and `bytes` are the numbers of files, entries and bytes.
    """

    chunks: list[IndexChunk] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    entries: int = 0
    bytes: int = 0
    is_partly_unknown: bool = False  # whether the entries of a file could not be located


def check_index(root: str, *, is_live: bool) -> IndexScan:
    """Scan every file of the key index of the store at `root`.

    Set `is_live` if a writer is running. Then a slot may contain the number of an entry that was added after the header
    was read, and that is not reported.
    """
    scan = IndexScan()
    folder = files.join(root, filenames.INDEX)
    shapes: dict[int, IndexShape] = {}
    opened = []
    for name, is_folder in files.list_folder(folder):
        path = files.join(folder, name)
        if is_folder or not filenames.is_index_name(name):
            what = "a file or folder that is not part of the index; brokers ignore it"
            scan.findings.append(Finding(severity=Severity.NOTE, area=Area.INDEX, what=what, path=path))
            continue
        scan.files += 1
        with OpenFile(path) as file:
            size = file.size()
            header = decode_header(file.read(0, INDEX_HEADER.itemsize))
            shape = learn_shape(file.read, size)
        if shape is not None and not header.is_empty:
            shapes.setdefault(size, shape)
        opened.append((path, size, header, shape))
    for (_, _, previous, _), (path, _, header, _) in pairwise(one for one in opened if not one[2].is_empty):
        if header.begin_physical_offset < previous.end_physical_offset:
            what = "an index file for records of the previous index file: lookups find a message twice"
            expected = f"a begin of at least physical offset {previous.end_physical_offset}"
            scan.findings.append(_finding(what, path, 16, expected, f"{header.begin_physical_offset}"))
    for path, size, header, shape in opened:
        _scan_file(scan, path, size, header, shape or shapes.get(size), is_live=is_live)
    return scan


def _scan_file(
    scan: IndexScan, path: str, size: int, header: IndexHeader, shape: IndexShape | None, *, is_live: bool
) -> None:
    if size < INDEX_HEADER.itemsize:
        scan.findings.append(_finding("the length of an index file", path, 0, "a header of 40 bytes", f"{size} bytes"))
        return
    if header.is_empty:
        if not is_live:
            scan.findings.extend(_empty_file_faults(path, size, header))
        return
    if shape is None:
        found = f"a file of {size} bytes, {header.next_unit} entries in its header"
        what = "the numbers of slots and entries of an index file are unknown, so its entries were not checked"
        scan.findings.append(_finding(what, path, 32, "a header that agrees with the entries", found))
        scan.is_partly_unknown = True
        return
    with OpenFile(path) as file:
        last = min(header.next_unit, shape.unit_count)
        newest = np.zeros(shape.slot_count, np.int32)  # for each slot, the number of its newest entry, or 0
        for first in range(1, last, _CHUNK_ENTRIES):
            end = min(first + _CHUNK_ENTRIES, last)
            entries = read_entries(file, shape, first, end)
            scan.bytes += entries.nbytes
            scan.entries += len(entries)
            if len(entries):
                least, most = int(entries["physical_offset"].min()), int(entries["physical_offset"].max())
                scan.chunks.append(IndexChunk(path, shape, header, first, end, least, most))
            fault = _link(entries, first, newest, shape)
            if fault is not None:
                number, expected, found_entry = fault
                what = "an index entry does not name the previous entry of its slot"
                at = shape.unit_position(number) + 16
                scan.findings.append(_finding(what, path, at, f"entry {expected}", f"entry {found_entry}"))
        scan.findings.extend(_slot_faults(file, shape, newest, last, is_live=is_live))
        scan.bytes += shape.slot_count * INDEX_SLOT.itemsize
        if not is_live:
            scan.findings.extend(_header_faults(file, path, header, shape, newest))


def _empty_file_faults(path: str, size: int, header: IndexHeader) -> Iterator[Finding]:
    if header.used_slot_count or header.next_unit not in (0, 1):
        found = f"{header.used_slot_count} and {header.next_unit}"
        yield _finding("the header of an empty index file", path, 32, "0 and 0 or 1", found)
    elif any(files.data_extents(path, INDEX_HEADER.itemsize, size)):
        found = f"next entry {header.next_unit}, and entries"
        yield _finding("the header of an index file", path, 36, "the number of entries", found)


def read_entries(file: OpenFile, shape: IndexShape, first: int, end: int) -> NDArray[np.void]:
    """Return the entries [first, end) of an index file, by number. Returns fewer if the file ends before `end`."""
    raw = file.read(shape.unit_position(first), (end - first) * INDEX_UNIT.itemsize)
    return np.frombuffer(raw, INDEX_UNIT, len(raw) // INDEX_UNIT.itemsize)


def _link(
    entries: NDArray[np.void], first: int, newest: NDArray[np.int32], shape: IndexShape
) -> tuple[int, int, int] | None:
    """Verify the previous-entry numbers of consecutive entries, and update `newest`.

    The first of the entries has the number `first`. `newest` has for each slot the number of its newest entry so far.
    Returns None if all entries are right. Otherwise, returns three numbers for the first wrong entry: its own, the
    expected previous entry, and the previous entry that it contains.
    """
    slots = entries["key_hash"].astype(np.int64) % shape.slot_count
    order = np.argsort(slots, kind="stable")
    sorted_slots, numbers = slots[order], (order + first).astype(np.int32)
    is_first = np.append(True, sorted_slots[1:] != sorted_slots[:-1]) if len(order) else np.zeros(0, np.bool_)
    expected = np.append(np.zeros(1, np.int32), numbers[:-1]) if len(order) else numbers
    expected[is_first] = newest[sorted_slots[is_first]]
    is_last = np.append(is_first[1:], True) if len(order) else is_first
    newest[sorted_slots[is_last]] = numbers[is_last]
    wrong = np.flatnonzero(entries["previous_unit"][order] != expected)
    if not len(wrong):
        return None
    at = wrong[np.argmin(numbers[wrong])]
    return int(numbers[at]), int(expected[at]), int(entries["previous_unit"][order[at]])


def _slot_faults(
    file: OpenFile, shape: IndexShape, newest: NDArray[np.int32], last: int, *, is_live: bool
) -> Iterator[Finding]:
    for first in range(0, shape.slot_count, _CHUNK_SLOTS):
        count = min(_CHUNK_SLOTS, shape.slot_count - first)
        raw = file.read(shape.slot_position(first), count * INDEX_SLOT.itemsize)
        slots = np.frombuffer(raw, INDEX_SLOT, len(raw) // INDEX_SLOT.itemsize)["newest_unit"]
        wrong = slots != newest[first : first + len(slots)]
        if is_live:
            wrong &= slots < last
        if wrong.any():
            at = int(np.argmax(wrong))
            what = f"{int(wrong.sum())} slots of the index do not name their newest entry, the first here"
            expected, found = f"entry {int(newest[first + at])}", f"entry {int(slots[at])}"
            yield _finding(what, file.path, shape.slot_position(first + at), expected, found)


def _header_faults(
    file: OpenFile, path: str, header: IndexHeader, shape: IndexShape, newest: NDArray[np.int32]
) -> Iterator[Finding]:
    if header.next_unit > shape.unit_count:
        expected = f"at most {shape.unit_count}"
        yield _finding("the number of the next entry of the index", path, 36, expected, str(header.next_unit))
        return
    used = int(np.count_nonzero(newest))
    if header.used_slot_count != used:
        expected, found = str(used), str(header.used_slot_count)
        yield _finding("the number of used slots of the index", path, 32, expected, found)
    ends = [read_entries(file, shape, number, number + 1) for number in (1, header.next_unit - 1)]
    in_header = (header.begin_physical_offset, header.end_physical_offset)
    in_entries = tuple(int(entries["physical_offset"][0]) if len(entries) else -1 for entries in ends)
    if in_header != in_entries:
        what = "the first and last physical offset in the header of the index differ from those of its entries"
        yield _finding(what, path, 16, str(in_entries), str(in_header))
    if header.next_unit < shape.unit_count:
        following = read_entries(file, shape, header.next_unit, header.next_unit + 1)
        if len(following) and int(following["physical_offset"][0]) > 0 and int(following["key_hash"][0]) > 0:
            what = "an entry after those that the header of the index counts: its writer died"
            finding = _finding(what, path, shape.unit_position(header.next_unit), "zeros", "an entry")
            yield replace(finding, severity=Severity.NOTE)


def _finding(what: str, path: str, position: int, expected: str, found: str) -> Finding:
    return Finding(
        severity=Severity.REPAIRABLE,
        area=Area.INDEX,
        what=what,
        path=path,
        position=position,
        expected=expected,
        found=found,
        next_step=_NEXT_STEP,
        action=Action.REBUILD,
    )


@dataclass(slots=True)
class _Entries:
    """The index entries for the records of one block of the log, in the order of the index; one row for each entry."""

    physical_offsets: NDArray[np.int64]
    hashes: NDArray[np.int64]
    seconds: NDArray[np.int64]  # from the file's begin time; -1 for the first entry of a file, which is not checked
    begins: NDArray[np.int64]  # begin time of the entry's file (ms)
    chunks: NDArray[np.int64]  # index of the entry's chunk in `IndexScan.chunks`
    numbers: NDArray[np.int64]  # number of the entry in its file

    def take(self, rows: NDArray[np.intp]) -> "_Entries":
        return _Entries(*(getattr(self, one.name)[rows] for one in fields(self)))


class IndexJoin:
    """Compares the keys of records with index entries, block by block in the order of the log. Not thread-safe.

    `missing` is the number of keys that have no entry. `first_missing` and `last_missing` are the physical offsets of
    the first and the last record with such a key, or -1 if no entry is missing.
    """

    def __init__(self, scan: IndexScan) -> None:
        self._chunks = scan.chunks
        self._least = np.array([chunk.least for chunk in scan.chunks], np.int64)
        self._most = np.array([chunk.most for chunk in scan.chunks], np.int64)
        self._kept: OrderedDict[int, NDArray[np.void]] = OrderedDict()
        self.first_missing = self.last_missing = -1
        self.missing = self._missing_records = self._surplus = 0
        self._findings: list[Finding] = []
        self._has_wrong_seconds = False

    def add(self, records: RecordColumns, begin: int, end: int) -> None:
        """Compare the keys of a block's records with their index entries.

        `begin` and `end` are the physical offsets of the block.
        """
        rows, hashes = records.key_rows, records.key_hashes.astype(np.int64)
        is_rolled_back = records.sys_flags & TRANSACTION_MASK == TRANSACTION_ROLLBACK
        if is_rolled_back.any():
            kept = ~is_rolled_back[rows]
            rows, hashes = rows[kept], hashes[kept]
        offsets = records.places[rows]
        found = self._entries(begin, end)
        if (
            len(found.physical_offsets) == len(offsets)
            and (found.physical_offsets == offsets).all()
            and (found.hashes == hashes).all()
        ):
            self._check_times(found, records.store_times[rows])
            return
        expected, actual = (offsets - begin) << 32 | hashes, (found.physical_offsets - begin) << 32 | found.hashes
        if len(expected) == len(actual):  # the entries of one record's keys may be in any order
            ours, theirs = np.argsort(expected, kind="stable"), np.argsort(actual, kind="stable")
            if (expected[ours] == actual[theirs]).all():
                self._check_times(found.take(theirs), records.store_times[rows][ours])
                return
        missing = ~np.isin(expected, actual)
        if missing.any():
            self.missing += int(missing.sum())
            self._missing_records += len(np.unique(offsets[missing]))
            self.first_missing = int(offsets[missing][0]) if self.first_missing < 0 else self.first_missing
            self.last_missing = int(offsets[missing][-1])
        surplus = ~np.isin(actual, expected)
        self._surplus += int(surplus.sum())
        order = np.argsort(expected, kind="stable")
        good = np.flatnonzero(~surplus)
        if len(good):
            at = order[np.searchsorted(expected[order], actual[good])]
            self._check_times(found.take(good), records.store_times[rows][at])

    def result(
        self, root: str, *, has_files: bool, is_unknown: bool, severity: Severity, is_expected: bool = False
    ) -> list[Finding]:
        """Return the findings about all blocks that were added.

        `severity` is used for the finding about missing keys. `has_files` is whether the index has any file.
        `is_unknown` is whether the entries of a file could not be located; then missing keys are not reported.
        `is_expected` is whether the store must have an index: rmq-spark created the store, or the index folder exists.
        A broker that is configured without an index creates no index folder.
        """
        path = f"{root}/{filenames.INDEX}"
        if not has_files and not is_expected:
            if not self.missing:
                return []
            what = "the store has no key index: messages are not found by key, and by id only slowly or not at all"
            return [Finding(severity=Severity.NOTE, area=Area.INDEX, what=what, path=path)]
        if self.missing and not is_unknown:
            is_repairable = severity == Severity.REPAIRABLE
            self._findings.append(
                Finding(
                    severity=severity,
                    area=Area.INDEX,
                    what=f"keys of messages at physical offsets {self.first_missing} to {self.last_missing} are not in "
                    "the index",
                    path=path,
                    expected="an entry for each key of each message",
                    found=f"{self.missing} keys of {self._missing_records} messages without an entry",
                    messages=self._missing_records,
                    next_step=_NEXT_STEP if is_repairable else "",
                    action=Action.REBUILD if is_repairable else Action.LEAVE,
                )
            )
        if self._surplus:
            what = f"{self._surplus} entries of the index match no record with their key: lookups skip them"
            self._findings.append(Finding(severity=Severity.NOTE, area=Area.INDEX, what=what, path=path))
        return self._findings

    def _entries(self, begin: int, end: int) -> _Entries:
        """Return the index entries for records at the physical offsets [begin, end)."""
        parts = []
        for number in np.flatnonzero((self._most >= begin) & (self._least < end)).tolist():
            chunk = self._chunks[number]
            entries = self._read_chunk(number, chunk)
            offsets = entries["physical_offset"].astype(np.int64)
            chosen = np.flatnonzero((offsets >= begin) & (offsets < end))
            numbers = chunk.first + chosen
            seconds = entries["seconds"][chosen].astype(np.int64)
            seconds[numbers == 1] = -1
            parts.append(
                _Entries(
                    physical_offsets=offsets[chosen],
                    hashes=entries["key_hash"][chosen].astype(np.int64),
                    seconds=seconds,
                    begins=np.full(len(chosen), chunk.header.begin_timestamp),
                    chunks=np.full(len(chosen), number),
                    numbers=numbers,
                )
            )
        if len(parts) == 1:
            return parts[0]
        empty = [np.zeros(0, np.int64)]
        return _Entries(
            *(np.concatenate(empty + [getattr(part, one.name) for part in parts]) for one in fields(_Entries))
        )

    def _read_chunk(self, number: int, chunk: IndexChunk) -> NDArray[np.void]:
        if number not in self._kept:
            with OpenFile(chunk.path) as file:
                self._kept[number] = read_entries(file, chunk.shape, chunk.first, chunk.end)
            if len(self._kept) > _CHUNKS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[number]

    def _check_times(self, found: _Entries, times: NDArray[np.int64]) -> None:
        """Compare the times in entries and file headers with the store times of their records.

        `times` has the store time (ms) of the record of each entry in `found`.
        """
        expected = np.clip((times - found.begins) // 1000, 0, MAX_SECONDS)
        wrong = np.flatnonzero((found.seconds >= 0) & (found.seconds != expected))
        if len(wrong) and not self._has_wrong_seconds:  # one finding for the whole index is enough
            self._has_wrong_seconds = True
            at = wrong[0]
            chunk = self._chunks[int(found.chunks[at])]
            position = chunk.shape.unit_position(int(found.numbers[at])) + 12
            what = "the seconds of an index entry differ from its message's"
            self._findings.append(
                _finding(what, chunk.path, position, str(int(expected[at])), str(int(found.seconds[at])))
            )
        lasts = np.array([chunk.header.next_unit - 1 for chunk in self._chunks], np.int64)
        is_last = found.numbers == lasts[found.chunks] if len(lasts) else np.zeros(0, np.bool_)
        for name, position, rows in (("begin", 0, found.numbers == 1), ("end", 8, is_last)):
            for at in np.flatnonzero(rows).tolist():
                chunk = self._chunks[int(found.chunks[at])]
                in_header = getattr(chunk.header, f"{name}_timestamp")
                if in_header != int(times[at]):
                    which = "first" if name == "begin" else "last"
                    what = f"the {name} time of an index file is not the store time of its {which} message"
                    self._findings.append(_finding(what, chunk.path, position, str(int(times[at])), str(in_header)))
