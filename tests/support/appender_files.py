"""The files of a store for one that appends: byte by byte as a broker writes them, and its recovery.

Everything is written in place with pwrite, in pieces, and between any two pieces the caller's `step` runs: it may
wait, so that readers see the piece alone, or raise, which is the writer's death at that very point.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, QUEUE_UNIT
from rmq_spark.store.format.file_names import parse_segment_name, segment_name
from rmq_spark.store.format.record import BLANK_BYTES, Blank, Record, decode_record, encode_blank

Step = Callable[[], None]


class FileRun:
    """Files of one size in a folder, named by their first byte's position; `write` makes the one it needs."""

    def __init__(self, folder: Path, file_bytes: int, step: Step) -> None:
        self.folder, self.file_bytes, self._step = folder, file_bytes, step
        self._open: tuple[int, int] | None = None  # a file's first position, and its descriptor

    def begins(self) -> list[int]:
        """Return the first positions of the existing files, in order."""
        names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        return [begin for begin in map(parse_segment_name, names) if begin is not None]

    def make(self, begin: int) -> None:
        """Make a file at full size, as RandomAccessFile and a mapping do: empty first, then zeros."""
        path = self.folder / segment_name(begin)
        if path.exists() and path.stat().st_size == self.file_bytes:
            return
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            self._step()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._step()
            os.ftruncate(descriptor, self.file_bytes)
        finally:
            os.close(descriptor)

    def write(self, position: int, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Write pieces, (distance from `position`, bytes) in the given order, with a step after each."""
        begin = position // self.file_bytes * self.file_bytes
        if self._open is None or self._open[0] != begin:
            self.close()
            self.make(begin)
            self._open = begin, os.open(self.folder / segment_name(begin), os.O_RDWR | os.O_CLOEXEC)
        descriptor = self._open[1]
        for distance, data in pieces:
            os.pwrite(descriptor, data, position - begin + distance)
            self._step()

    def delete(self, begin: int) -> None:
        """Delete one file."""
        if self._open is not None and self._open[0] == begin:
            self.close()
        (self.folder / segment_name(begin)).unlink()

    def drop_empty(self) -> None:
        """Delete a last file that a death left empty, as MappedFileQueue#doLoad does."""
        last = self.begins()[-1:]
        if last and (self.folder / segment_name(last[0])).stat().st_size == 0:
            self.delete(last[0])

    def close(self) -> None:
        """Close the file that is open; writing opens it again."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def read_all(self) -> tuple[int, bytes]:
        """Return the first position and all bytes; an empty file that a death left behind counts as zeros."""
        begins = self.begins()
        parts = [(self.folder / segment_name(begin)).read_bytes().ljust(self.file_bytes, b"\0") for begin in begins]
        return (begins[0] if begins else 0), b"".join(parts)


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """The records of a log in order, by the walk of CommitLog#recoverAbnormally, and where it ends."""

    records: list[Record]
    end: int


def recover_log(log: FileRun) -> RecoveredLog:
    """Walk a log from its first segment. Ends also at a step back in time: those records were truncated earlier."""
    begins = log.begins()
    if not begins:
        return RecoveredLog([], 0)
    base, data = log.read_all()
    records: list[Record] = []
    at = 0
    while at < len(data):
        rest = log.file_bytes - at % log.file_bytes
        found = decode_record(memoryview(data)[at : at + rest])
        if isinstance(found, Blank):
            if at + rest >= len(data):
                break
            at += rest
            continue
        if not isinstance(found, Record) or found.physical_offset != base + at or not found.crc_matches:
            break
        if records and found.store_timestamp < records[-1].store_timestamp:
            break
        if b"\0" in found.topic:
            break  # written up to the middle of its topic, and without properties: its lengths agree all the same
        records.append(found)
        at += found.total_size
    return RecoveredLog(records, base + at)


def truncate_log(log: FileRun, end: int) -> None:
    """Truncate at `end` like MappedFileQueue#truncateDirtyFiles: later files are removed, bytes remain."""
    for begin in log.begins():
        if begin > end:
            log.delete(begin)
    log.close()


def unit_pieces(unit: bytes) -> list[tuple[int, bytes]]:
    """Cut a unit into its fields, in the order in which they are put into the buffer."""
    layout = QUEUE_UNIT if len(unit) == QUEUE_UNIT.itemsize else BATCH_UNIT
    fields = [layout.fields[name] for name in layout.names or ()] if layout.fields else []
    return [(field[1], unit[field[1] : field[1] + field[0].itemsize]) for field in fields]


def blank_for(log: FileRun, position: int, size: int) -> bytes | None:
    """Return the BLANK to be written at `position` if a record of `size` bytes must go to the next segment."""
    remaining = log.file_bytes - position % log.file_bytes
    return encode_blank(remaining) if size + BLANK_BYTES > remaining else None
