"""The keys of records held against the entries of the key index, block by block of the log."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.explore.finding import NOTE, REPAIRABLE, Finding
from rmq_spark.store.explore.index_check import NEXT_STEP, IndexChunk, IndexLook, read_units
from rmq_spark.store.format import filenames
from rmq_spark.store.format.index_file import MAX_SECONDS
from rmq_spark.store.format.record import TRANSACTION_MASK, TRANSACTION_ROLLBACK
from rmq_spark.store.format.record_columns import RecordColumns

_CHUNKS_KEPT = 8


@dataclass(slots=True)
class _Entries:
    """Entries of a block of the log, in the order of the index: places, hashes, and when the index says they were."""

    places: NDArray[np.int64]
    hashes: NDArray[np.int64]
    seconds: NDArray[np.int64]  # since the file's begin; -1 where that says nothing
    begins: NDArray[np.int64]  # the file's begin, in ms
    chunks: NDArray[np.int64]  # number of the chunk
    numbers: NDArray[np.int64]  # of the unit in its file


class IndexJoin:
    """Joins blocks in the order of the log. One thread.

    `missing` counts keys without an entry, `first_missing` and `last_missing` are places of their records.
    """

    def __init__(self, look: IndexLook) -> None:
        self._chunks = look.chunks
        self._least = np.array([chunk.least for chunk in look.chunks], np.int64)
        self._most = np.array([chunk.most for chunk in look.chunks], np.int64)
        self._kept: OrderedDict[int, NDArray[np.void]] = OrderedDict()
        self.missing = self.missing_records = self.spare = 0
        self.first_missing = self.last_missing = -1
        self.findings: list[Finding] = []
        self._wrong_seconds = 0

    def add(self, records: RecordColumns, begin: int, end: int) -> None:
        """Join the records of a block, which is [begin, end) of the log."""
        rows, hashes = records.key_rows, records.key_hashes.astype(np.int64)
        is_rolled_back = records.sys_flags & TRANSACTION_MASK == TRANSACTION_ROLLBACK
        if is_rolled_back.any():
            kept = ~is_rolled_back[rows]
            rows, hashes = rows[kept], hashes[kept]
        places = records.places[rows]
        found = self._entries(begin, end)
        if len(found.places) == len(places) and (found.places == places).all() and (found.hashes == hashes).all():
            self._look_at_times(found, records.store_times[rows])
            return
        expected, there = (places - begin) << 32 | hashes, (found.places - begin) << 32 | found.hashes
        if len(expected) == len(there):  # the keys of one record may stand in any order
            ours, theirs = np.argsort(expected, kind="stable"), np.argsort(there, kind="stable")
            if (expected[ours] == there[theirs]).all():
                self._look_at_times(_part(found, theirs), records.store_times[rows][ours])
                return
        missing = ~np.isin(expected, there)
        if missing.any():
            self.missing += int(missing.sum())
            self.missing_records += len(np.unique(places[missing]))
            self.first_missing = int(places[missing][0]) if self.first_missing < 0 else self.first_missing
            self.last_missing = int(places[missing][-1])
        spare = ~np.isin(there, expected)
        self.spare += int(spare.sum())
        order = np.argsort(expected, kind="stable")
        good = np.flatnonzero(~spare)
        if len(good):
            at = order[np.searchsorted(expected[order], there[good])]
            self._look_at_times(_part(found, good), records.store_times[rows][at])

    def result(
        self, root: str, *, has_files: bool, is_unknown: bool, severity: str, is_expected: bool = False
    ) -> list[Finding]:
        """Return what is wrong with the entries. `severity` is that of keys that are missing.

        `is_expected`: who made the store writes an index always, or the folder is there in which one was; a broker may
        be told not to write one, and then makes no folder.
        """
        path = f"{root}/{filenames.INDEX}"
        if not has_files and not is_expected:
            if self.missing:
                what = "there is no key index: messages are not found by key, and by id only slowly or not at all"
                return [Finding(NOTE, filenames.INDEX, what, path)]
            return []
        if self.missing and not is_unknown:
            found = f"{self.missing} keys without one, of {self.missing_records} messages"
            where = f"physical offsets {self.first_missing} to {self.last_missing}"
            self.findings.append(
                Finding(
                    severity,
                    filenames.INDEX,
                    f"keys of messages that the index does not have ({where})",
                    path,
                    0,
                    "an entry for each key of each message",
                    found,
                    messages=self.missing_records,
                    next_step=NEXT_STEP if severity == REPAIRABLE else "",
                    action="rebuild" if severity == REPAIRABLE else "leave",
                )
            )
        if self.spare:
            what = f"{self.spare} entries of the index name no record of their key: look-ups pass over them"
            self.findings.append(Finding(NOTE, filenames.INDEX, what, path))
        return self.findings

    def _entries(self, begin: int, end: int) -> _Entries:
        parts = []
        for number in np.flatnonzero((self._most >= begin) & (self._least < end)).tolist():
            chunk = self._chunks[number]
            units = self._units(number, chunk)
            places = units["physical_offset"].astype(np.int64)
            chosen = np.flatnonzero((places >= begin) & (places < end))
            numbers = chunk.first + chosen
            seconds = units["seconds"][chosen].astype(np.int64)
            seconds[numbers == 1] = -1
            parts.append(
                _Entries(
                    places[chosen],
                    units["key_hash"][chosen].astype(np.int64),
                    seconds,
                    np.full(len(chosen), chunk.header.begin_timestamp),
                    np.full(len(chosen), number),
                    numbers,
                )
            )
        if len(parts) == 1:
            return parts[0]
        names = ("places", "hashes", "seconds", "begins", "chunks", "numbers")
        empty = [np.zeros(0, np.int64)]
        return _Entries(*(np.concatenate(empty + [getattr(part, name) for part in parts]) for name in names))

    def _units(self, number: int, chunk: IndexChunk) -> NDArray[np.void]:
        if number not in self._kept:
            with OpenFile(chunk.path) as file:
                self._kept[number] = read_units(file, chunk.shape, chunk.first, chunk.end)
            if len(self._kept) > _CHUNKS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[number]

    def _look_at_times(self, found: _Entries, times: NDArray[np.int64]) -> None:
        """Compare the seconds of entries, and the times of files, with the store times of their records (ms)."""
        expected = np.clip((times - found.begins) // 1000, 0, MAX_SECONDS)
        wrong = np.flatnonzero((found.seconds >= 0) & (found.seconds != expected))
        for at in wrong[:1].tolist() if not self._wrong_seconds else []:
            chunk = self._chunks[int(found.chunks[at])]
            position = chunk.shape.unit_position(int(found.numbers[at])) + 12
            what = "the seconds of a unit of the index are not its message's"
            self.findings.append(
                _wrong(what, chunk.path, position, str(int(expected[at])), str(int(found.seconds[at])))
            )
        self._wrong_seconds += len(wrong)
        for at in np.flatnonzero(found.numbers == 1).tolist():
            chunk = self._chunks[int(found.chunks[at])]
            if chunk.header.begin_timestamp != int(times[at]):
                told = str(chunk.header.begin_timestamp)
                what = "the begin of a file of the index is not when its first message was stored"
                self.findings.append(_wrong(what, chunk.path, 0, str(int(times[at])), told))
        lasts = np.array([chunk.header.next_unit - 1 for chunk in self._chunks], np.int64)
        for at in np.flatnonzero(found.numbers == lasts[found.chunks]).tolist() if len(lasts) else []:
            chunk = self._chunks[int(found.chunks[at])]
            if chunk.header.end_timestamp != int(times[at]):
                told = str(chunk.header.end_timestamp)
                what = "the end of a file of the index is not when its last message was stored"
                self.findings.append(_wrong(what, chunk.path, 8, str(int(times[at])), told))


def _part(found: _Entries, rows: NDArray[np.intp]) -> _Entries:
    return _Entries(
        found.places[rows],
        found.hashes[rows],
        found.seconds[rows],
        found.begins[rows],
        found.chunks[rows],
        found.numbers[rows],
    )


def _wrong(what: str, path: str, position: int, expected: str, found: str) -> Finding:
    return Finding(
        REPAIRABLE, filenames.INDEX, what, path, position, expected, found, next_step=NEXT_STEP, action="rebuild"
    )
