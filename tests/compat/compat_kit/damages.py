"""Damage to a store of one topic, as it may happen to files while no broker runs, done byte by byte."""

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rmq_spark.store.format.record import MAGIC_V1, MAGIC_V2

_MAGICS = (MAGIC_V1, MAGIC_V2)
_BODY_AT = 88  # of records whose hosts are IPv4
_FUTURE_MS = 4_000_000_000_000


@dataclass
class Store:
    """A store's folder, and the positions of its records: (physical offset, size), in order."""

    path: Path
    records: list[tuple[int, int]]

    @classmethod
    def of(cls, path: Path) -> "Store":
        """Read the records of an undamaged store."""
        records = []
        for segment in sorted((path / "commitlog").iterdir()):
            content, position = segment.read_bytes(), 0
            while position + 8 <= len(content):
                size, magic = struct.unpack_from(">iI", content, position)
                if magic not in _MAGICS:
                    break
                records.append((int(segment.name) + position, size))
                position += size
        return cls(path, records)

    @property
    def end(self) -> int:
        """Where the next record would go."""
        return sum(self.records[-1])

    def segments(self) -> list[Path]:
        """Return the segments that have records."""
        size = self.segment_bytes
        return sorted({self.path / "commitlog" / f"{place // size * size:020d}" for place, _ in self.records})

    @property
    def segment_bytes(self) -> int:
        """How long a segment is."""
        return min((self.path / "commitlog").iterdir()).stat().st_size

    def write(self, place: int, content: bytes) -> None:
        """Put bytes at a physical offset."""
        name = f"{place // self.segment_bytes * self.segment_bytes:020d}"
        put(self.path / "commitlog" / name, place % self.segment_bytes, content)

    def read(self, place: int, size: int) -> bytes:
        """Return the bytes at a physical offset."""
        name = f"{place // self.segment_bytes * self.segment_bytes:020d}"
        at = place % self.segment_bytes
        return (self.path / "commitlog" / name).read_bytes()[at : at + size]

    def flip(self, place: int) -> None:
        """Flip one bit."""
        self.write(place, bytes([self.read(place, 1)[0] ^ 0x10]))

    def in_last_segment(self) -> tuple[int, int]:
        """Return a record in the middle of the last segment that has any."""
        begin = int(self.segments()[-1].name)
        inside = [record for record in self.records if record[0] >= begin]
        return inside[len(inside) // 2]

    def last_unit(self) -> tuple[Path, int]:
        """Return the queue file with the unit of the last record, and the unit's position in it."""
        place, size = self.records[-1]
        unit = struct.pack(">qi", place, size)
        for path in sorted((self.path / "consumequeue").rglob("*")):
            if path.is_file() and unit in path.read_bytes():
                return path, path.read_bytes().index(unit)
        raise AssertionError("no unit of the last record")


def put(path: Path, position: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def last_record_cut(store: Store) -> None:
    """Its second half is zeros."""
    place, size = store.records[-1]
    store.write(place + size // 2, bytes(size - size // 2))


def last_record_gone(store: Store) -> None:
    """All of it is zeros, its unit is not."""
    store.write(store.records[-1][0], bytes(store.records[-1][1]))


def last_body_flipped(store: Store) -> None:
    store.flip(store.records[-1][0] + _BODY_AT)


def last_size_flipped(store: Store) -> None:
    store.flip(store.records[-1][0] + 3)


def middle_record_gone(store: Store) -> None:
    """Zeros; whole records follow."""
    place, size = store.in_last_segment()
    store.write(place, bytes(size))


def middle_body_flipped(store: Store) -> None:
    store.flip(store.in_last_segment()[0] + _BODY_AT)


def middle_size_flipped(store: Store) -> None:
    store.flip(store.in_last_segment()[0] + 3)


def middle_magic_flipped(store: Store) -> None:
    store.flip(store.in_last_segment()[0] + 4)


def oldest_body_flipped(store: Store) -> None:
    store.flip(store.records[2][0] + _BODY_AT)


def first_segment_missing(store: Store) -> None:
    store.segments()[0].unlink()


def middle_segment_missing(store: Store) -> None:
    store.segments()[1].unlink()


def last_segment_missing(store: Store) -> None:
    for segment in sorted((store.path / "commitlog").iterdir())[len(store.segments()) - 1 :]:
        segment.unlink()


def foreign_record_behind_the_end(store: Store) -> None:
    """A copy of the first record, with its old physical offset."""
    store.write(store.end, store.read(*store.records[0]))


def _stale_record(store: Store) -> tuple[bytes, int]:
    record = bytearray(store.read(*store.records[-1]))
    queue_offset, _ = struct.unpack_from(">qq", record, 20)
    struct.pack_into(">qq", record, 20, queue_offset + 1, store.end)
    (stored,) = struct.unpack_from(">q", record, 56)
    struct.pack_into(">q", record, 56, stored - 600_000)
    return bytes(record), len(record)


def stale_record_behind_the_end(store: Store) -> None:
    """A complete record at its own physical offset, ten minutes older than the previous one, as after a truncation."""
    store.write(store.end, _stale_record(store)[0])


def stale_record_and_unit_behind_the_end(store: Store) -> None:
    """The same with its unit."""
    path, position = store.last_unit()
    record, size = _stale_record(store)
    store.write(store.end, record)
    put(path, position + 20, struct.pack(">qiq", store.end, size, 0))


def half_written_unit(store: Store) -> None:
    """The entry of the last record has its physical offset, but zeros for size and tags code."""
    path, position = store.last_unit()
    put(path, position + 8, bytes(12))


def last_unit_gone(store: Store) -> None:
    put(*store.last_unit(), bytes(20))


def unit_behind_the_end(store: Store) -> None:
    """One more entry, whose record does not exist."""
    path, position = store.last_unit()
    put(path, position + 20, struct.pack(">qiq", store.end + 4000, 300, 0))


def queue_missing(store: Store) -> None:
    shutil.rmtree(store.last_unit()[0].parent)


def all_queues_missing(store: Store) -> None:
    shutil.rmtree(store.path / "consumequeue")


def index_from_the_future(store: Store) -> None:
    """An index file of the next century, whose last message is far beyond the end of the log."""
    newest = max((store.path / "index").iterdir())
    later = newest.with_name("21001231235959000")
    shutil.copy2(newest, later)
    put(later, 8, struct.pack(">qqq", _FUTURE_MS, store.end, store.end + 100_000))


def index_of_rubbish(store: Store) -> None:
    newest = max((store.path / "index").iterdir())
    put(newest, 0, b"\xa5" * 4000)


def checkpoint_missing(store: Store) -> None:
    (store.path / "checkpoint").unlink()


def checkpoint_of_zeros(store: Store) -> None:
    put(store.path / "checkpoint", 0, bytes(64))


def checkpoint_from_the_future(store: Store) -> None:
    put(store.path / "checkpoint", 0, struct.pack(">qqq", _FUTURE_MS, _FUTURE_MS, _FUTURE_MS))


DAMAGES: tuple[Callable[[Store], None], ...] = (
    *(last_record_cut, last_record_gone, last_body_flipped, last_size_flipped),
    *(middle_record_gone, middle_body_flipped, middle_size_flipped, middle_magic_flipped, oldest_body_flipped),
    *(first_segment_missing, middle_segment_missing, last_segment_missing),
    *(foreign_record_behind_the_end, stale_record_behind_the_end, stale_record_and_unit_behind_the_end),
    *(half_written_unit, last_unit_gone, unit_behind_the_end, queue_missing, all_queues_missing),
    *(index_from_the_future, index_of_rubbish),
    *(checkpoint_missing, checkpoint_of_zeros, checkpoint_from_the_future),
)
