"""The key index looked at: the structure of each file, and whether each message is found by its keys.

Structure: every unit's predecessor is the last one of its slot before it, every slot names its last unit, the header
counts both. Entries: the keys of each record of the log are among the entries of its place. An entry too many does no
harm (a look-up compares the record); one too few is a message that look-ups do not find.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.explore.finding import NOTE, REPAIRABLE, Finding
from rmq_spark.store.format import filenames
from rmq_spark.store.format.index_file import (
    INDEX_HEADER,
    INDEX_SLOT,
    INDEX_UNIT,
    IndexHeader,
    IndexShape,
    decode_header,
    learn_shape,
)

CHUNK_UNITS = 1 << 16
_CHUNK_SLOTS = 1 << 18
NEXT_STEP = "Look-ups by key may miss messages. rmq_spark.repair makes the index anew from the log."


@dataclass(slots=True)
class IndexChunk:
    """Some units of one file: numbers [first, end), and between which physical offsets their records lie."""

    path: str
    shape: IndexShape
    header: IndexHeader
    first: int
    end: int
    least: int
    most: int


@dataclass(slots=True)
class IndexLook:
    """What one look at the files of an index found."""

    chunks: list[IndexChunk] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    entries: int = 0
    bytes: int = 0
    is_partly_unknown: bool = False  # some file's entries could not be looked at


def look_at_index(root: str, *, is_live: bool) -> IndexLook:
    """Look at every file of a store's key index. Of a `live` one slots may be newer than the header."""
    look = IndexLook()
    folder = files.join(root, filenames.INDEX)
    shapes: dict[int, IndexShape] = {}
    opened = []
    for name, is_folder in files.list_folder(folder):
        path = files.join(folder, name)
        if is_folder or not filenames.is_index_name(name):
            what = "something that is no file of the index; a broker passes over it"
            look.findings.append(Finding(NOTE, filenames.INDEX, what, path))
            continue
        look.files += 1
        with OpenFile(path) as file:
            size = file.size()
            header = decode_header(file.read(0, INDEX_HEADER.itemsize))
            shape = learn_shape(file.read, size)
        if shape is not None and not header.is_empty:
            shapes.setdefault(size, shape)
        opened.append((path, size, header, shape))
    look.findings.extend(_overlaps([(path, header) for path, _, header, _ in opened if not header.is_empty]))
    for path, size, header, shape in opened:
        _look_at_file(look, path, size, header, shape or shapes.get(size), is_live=is_live)
    return look


def _overlaps(held: list[tuple[str, IndexHeader]]) -> Iterator[Finding]:
    """Yield files that begin before the one before them ends: whoever looks a key up finds a message twice."""
    for (_, before), (path, header) in pairwise(held):
        if header.begin_physical_offset < before.end_physical_offset:
            what = "a file of the index for records that another one has"
            expected = f"from physical offset {before.end_physical_offset} on"
            yield _finding(what, path, 16, expected, f"from {header.begin_physical_offset} on")


def _look_at_file(
    look: IndexLook, path: str, size: int, header: IndexHeader, shape: IndexShape | None, *, is_live: bool
) -> None:
    if size < INDEX_HEADER.itemsize:
        look.findings.append(_finding("a file of the index is too short", path, 0, "a header of 40 bytes", f"{size}"))
        return
    if header.is_empty:
        if any((header.used_slot_count, header.next_unit not in (0, 1))) and not is_live:
            found = f"{header.used_slot_count} and {header.next_unit}"
            look.findings.append(_finding("the header of an empty file of the index", path, 32, "0 and 0 or 1", found))
        elif not is_live and any(files.data_extents(path, INDEX_HEADER.itemsize, size)):
            found = f"next unit {header.next_unit}, and units"
            look.findings.append(_finding("the header of a file of the index", path, 36, "the number of units", found))
        return
    if shape is None:
        found = f"a file of {size} bytes, {header.next_unit} units in its header"
        what = "the numbers of slots and units of a file of the index cannot be told, so its entries were not looked at"
        look.findings.append(_finding(what, path, 32, "a header that its units agree with", found))
        look.is_partly_unknown = True
        return
    with OpenFile(path) as file:
        last = min(header.next_unit, shape.unit_count)
        newest = np.zeros(shape.slot_count, np.int32)
        for first in range(1, last, CHUNK_UNITS):
            end = min(first + CHUNK_UNITS, last)
            units = read_units(file, shape, first, end)
            look.bytes += units.nbytes
            look.entries += len(units)
            places = units["physical_offset"]
            if len(units):
                look.chunks.append(IndexChunk(path, shape, header, first, end, int(places.min()), int(places.max())))
            fault = _link(units, first, newest, shape)
            if fault is not None:
                number, newest_before, named = fault
                what = "a unit of the index does not lead to the one before it in its slot"
                at = shape.unit_position(number) + 16
                look.findings.append(_finding(what, path, at, f"unit {newest_before}", f"unit {named}"))
        look.findings.extend(_slot_faults(file, shape, newest, last, is_live=is_live))
        look.bytes += shape.slot_count * INDEX_SLOT.itemsize
        if not is_live:
            look.findings.extend(_header_faults(file, path, header, shape, newest))


def read_units(file: OpenFile, shape: IndexShape, first: int, end: int) -> NDArray[np.void]:
    """Return the units [first, end) of an index file, fewer where it ends."""
    raw = file.read(shape.unit_position(first), (end - first) * INDEX_UNIT.itemsize)
    return np.frombuffer(raw, INDEX_UNIT, len(raw) // INDEX_UNIT.itemsize)


def _link(
    units: NDArray[np.void], first: int, newest: NDArray[np.int32], shape: IndexShape
) -> tuple[int, int, int] | None:
    """Bring `newest`, by slot, behind these units; return the first one whose predecessor is another one."""
    slots = units["key_hash"].astype(np.int64) % shape.slot_count
    order = np.argsort(slots, kind="stable")
    sorted_slots, numbers = slots[order], (order + first).astype(np.int32)
    is_first = np.append(True, sorted_slots[1:] != sorted_slots[:-1]) if len(order) else np.zeros(0, np.bool_)
    expected = np.append(np.zeros(1, np.int32), numbers[:-1]) if len(order) else numbers
    expected[is_first] = newest[sorted_slots[is_first]]
    is_last = np.append(is_first[1:], True) if len(order) else is_first
    newest[sorted_slots[is_last]] = numbers[is_last]
    wrong = np.flatnonzero(units["previous_unit"][order] != expected)
    if not len(wrong):
        return None
    at = wrong[np.argmin(numbers[wrong])]
    return int(numbers[at]), int(expected[at]), int(units["previous_unit"][order[at]])


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
            what = f"{int(wrong.sum())} slots of the index do not name their newest unit, the first here"
            expected, found = f"unit {int(newest[first + at])}", f"unit {int(slots[at])}"
            yield _finding(what, file.path, shape.slot_position(first + at), expected, found)


def _header_faults(
    file: OpenFile, path: str, header: IndexHeader, shape: IndexShape, newest: NDArray[np.int32]
) -> Iterator[Finding]:
    if header.next_unit > shape.unit_count:
        expected = f"at most {shape.unit_count}"
        yield _finding("the number of the next unit of the index", path, 36, expected, str(header.next_unit))
        return
    used = int(np.count_nonzero(newest))
    if header.used_slot_count != used:
        expected, found = str(used), str(header.used_slot_count)
        yield _finding("the number of used slots of the index", path, 32, expected, found)
    ends = [read_units(file, shape, number, number + 1) for number in (1, header.next_unit - 1)]
    told = (header.begin_physical_offset, header.end_physical_offset)
    held = tuple(int(units["physical_offset"][0]) if len(units) else -1 for units in ends)
    if told != held:
        what = "the header of the index names other records than its first and its last unit"
        yield _finding(what, path, 16, str(held), str(told))
    if header.next_unit < shape.unit_count:
        behind = read_units(file, shape, header.next_unit, header.next_unit + 1)
        if len(behind) and int(behind["physical_offset"][0]) > 0 and int(behind["key_hash"][0]) > 0:
            what = "a unit behind those that the header of the index counts: its writer died"
            yield replace(_finding(what, path, shape.unit_position(header.next_unit), "zeros", "a unit"), severity=NOTE)


def _finding(what: str, path: str, position: int, expected: str, found: str) -> Finding:
    return Finding(
        REPAIRABLE,
        filenames.INDEX,
        what,
        path,
        position,
        expected,
        found,
        next_step=NEXT_STEP,
        action="rebuild",
    )
