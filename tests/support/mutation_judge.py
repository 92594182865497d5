"""Judge of a reader on a damaged store: it must give the rows of the undamaged store, or errors.

`plain_truth` gives the true rows. The judge accepts a case if

1. each row equals the row of the undamaged store. Otherwise the record at the row's physical offset, decoded slowly
   from the damaged bytes, must be complete, with the right CRC; its length, queue, queue offset, topic and stored body
   must be the undamaged ones, and the row must agree with the record. So only fields without a checksum may differ
   (flag, times, hosts, properties, reconsumeTimes, and the bits of sysFlag that leave the record complete);
2. the rows of a queue are those from its min to its max offset, without a gap;
3. no row of the undamaged store is missing without an error, unless a reader cannot know better:
   - its segment and all earlier ones are gone: retention deletes like this;
   - `abort` exists: a queue may end earlier, because readers end with the last entry;
   - its entry and all later ones are gone, and the record is below the last segment with records: readers look for
     messages without an entry in the last segment only, as a broker's recovery does;
   - its queue's first file is gone, and the log does not begin at 0: retention deletes like this; or a later entry of
     the queue is fill or points below the log's begin: then all earlier entries count as expired;
   - its record's store time was set back, and another message has the last store time, which is in the checkpoint:
     then the record is older than the end of the log, like a stale one;
   - the first damaged record is exactly where a broker's recovery ended the log according to the checkpoint;
   - it is the log's last record, and both it and its entry are damaged;
   - the log's file is another store's: complete records, newer than the checkpoint;
   - another queue of its topic gives an error: a queue id may be damaged, and the error reveals the incomplete read;
4. `find_key` names only messages that have the key, `offset_at_time` an offset within the bounds, and the right one
   where store times ascend.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

from support.arrow_rows import Row, arrow_rows
from support.plain_truth import LogBytes, Truth, protected

from rmq_spark.store import COLUMNS, StoreReader, open_reader
from rmq_spark.store.errors import RmqError
from rmq_spark.store.model import QueueKey

_NAMES = list(COLUMNS)
_UNIT_BYTES = 20  # of a plain queue


@dataclass
class Found:
    """Rows and errors of the reader on a damaged store."""

    rows: dict[QueueKey, list[Row]] = field(default_factory=dict)
    bounds: dict[QueueKey, tuple[int, int]] = field(default_factory=dict)
    errors: dict[QueueKey | None, RmqError] = field(default_factory=dict)


def read_all(path: Path, read_mode: str) -> tuple[Found, list[str]]:
    """Read everything; return the rows and errors, and faults of the bounds."""
    found = Found()
    faults: list[str] = []
    try:
        with open_reader(str(path), read_mode=read_mode) as reader:
            reader.refresh()
            for topic in reader.topics():
                for queue in reader.queues(topic):
                    faults += _read_queue(reader, queue, found)
    except RmqError as error:
        found.errors[None] = error
    return found, faults


def _read_queue(reader: StoreReader, queue: QueueKey, found: Found) -> Iterator[str]:
    rows = found.rows.setdefault(queue, [])
    try:
        bounds = reader.bounds(queue)
        for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, _NAMES, check_crc=True):
            rows += arrow_rows([batch])
    except RmqError as error:
        found.errors[queue] = error
        return
    found.bounds[queue] = bounds.min_offset, bounds.max_offset
    offsets = [row["queueOffset"] for row in rows]
    if offsets != list(range(bounds.min_offset, bounds.max_offset)):
        yield f"{queue}: bounds {bounds}, rows {offsets}"


@dataclass
class Judge:
    """Compares the rows of a damaged store with the truth."""

    truth: Truth
    damaged: Path
    foreign: bool  # a segment of another store was put in: its records are as good as any

    @cached_property
    def log(self) -> LogBytes:
        """The damaged log."""
        return self.truth.log_of(self.damaged)

    @property
    def crashed(self) -> bool:
        """Return whether `abort` exists in the damaged or the undamaged store."""
        return (self.damaged / "abort").exists() or (self.truth.path / "abort").exists()

    def faults(self, found: Found) -> Iterator[str]:
        """Yield the faults."""
        for queue, rows in found.rows.items():
            for row in rows:
                why = self.wrong(queue, row)
                if why:
                    yield f"{queue} offset {row['queueOffset']}: {why}"
        if None in found.errors or self.foreign:
            return
        topics = {queue.topic for queue in found.errors if queue is not None}
        for queue, rows_by_offset in self.truth.rows.items():
            if queue.topic not in topics:
                yield from self.missing(queue, rows_by_offset, found)

    def wrong(self, queue: QueueKey, row: Row) -> str | None:
        """Return the fault of a row, None if it is right."""
        right = self.truth.rows.get(queue, {}).get(row["queueOffset"])
        if row == right:
            return None
        place = row["commitLogOffset"]
        record = self.log.record(place)
        if record is None:
            return f"no whole record at {place}"
        if (record.topic, record.queue_id) != (queue.topic, queue.queue_id):
            return f"the record at {place} is of {record.topic}/{record.queue_id}"
        meanings = self.truth.meanings(record)
        if row not in meanings:
            return f"not what the record at {place} says: {_difference(row, meanings)}"
        if self.foreign:
            return None
        before = self.truth.log.record(place)
        if before is None or protected(before) != protected(record):
            return f"another record at {place} than before"
        if right is None:
            return f"stale: no message of the undamaged store (record at {place})"
        return None if right["commitLogOffset"] == place else f"the record at {place}, not {right['commitLogOffset']}"

    def missing(self, queue: QueueKey, rows: dict[int, Row], found: Found) -> Iterator[str]:
        """Yield the offsets of a queue that are missing without an error or an excuse."""
        there = {row["queueOffset"] for row in found.rows.get(queue, [])}
        begin, end = found.bounds.get(queue, (0, 0))
        shortened = self.log.begin > 0 and _first_file(self.damaged, queue) > _first_file(self.truth.path, queue)
        shortened = shortened or self.looks_expired(queue, begin)
        lost = []
        for offset, row in rows.items():
            place = row["commitLogOffset"]
            if offset in there or place < self.log.begin:
                continue
            if offset >= end and (self.crashed or place < self.truth.last_segment):
                continue
            if offset < begin and shortened:
                continue
            if offset >= end and 0 < self.confirmed() <= place:
                continue  # bytes that end exactly at the end of the log in the checkpoint, as after a truncation
            if offset >= end and (self.looks_stale(row, found) or self.looks_cut(place)):
                continue
            if row == self.truth.last_row and self.is_lost_twice(queue, row):
                continue
            lost.append(offset)
        if lost:
            yield f"{queue}: offsets {lost} are silently missing, bounds {found.bounds.get(queue)}"

    def confirmed(self) -> int:
        """Return the checkpoint's confirmPhyOffset, 0 without one."""
        page = self.damaged / "checkpoint"
        data = page.read_bytes()[32:40] if page.is_file() else b""
        return int.from_bytes(data, "big", signed=True) if len(data) == 8 else 0

    def looks_stale(self, row: Row, found: Found) -> bool:
        """Say whether the row's record was set back in time, without a gap to the time of the last message."""
        record = self.log.record(row["commitLogOffset"])
        there = any(other["storeTimestamp"] >= self.truth.last_time for rows in found.rows.values() for other in rows)
        return record is not None and record.store_ms * 1000 < row["storeTimestamp"] and there

    def looks_cut(self, place: int) -> bool:
        """Return whether the log may have been truncated below `place`: no record at the end in the checkpoint."""
        (confirmed,) = struct.unpack_from(">q", (self.truth.path / "checkpoint").read_bytes(), 32)
        return 0 < confirmed <= place and self.truth.log.record(confirmed) != self.log.record(confirmed)

    def is_lost_twice(self, queue: QueueKey, row: Row) -> bool:
        """Return whether both a row's record and its entry are damaged."""
        if self.log.record(row["commitLogOffset"]) == self.truth.log.record(row["commitLogOffset"]):
            return False
        units = [_unit(store, queue, row["queueOffset"]) for store in (self.damaged, self.truth.path)]
        return units[0] != units[1]

    def looks_expired(self, queue: QueueKey, begin: int) -> bool:
        """Return whether the entry before a queue's first offset is fill, or points below the log."""
        unit = _unit(self.damaged, queue, begin - 1) if begin else b""
        if len(unit) < _UNIT_BYTES:
            return False
        place, size = struct.unpack_from(">qi", unit)
        return bool(size > 0 and 0 <= place < max(self.log.begin, 1 if size == self.truth.fill_size else 0))


def _unit(store: Path, queue: QueueKey, offset: int) -> bytes:
    """Return the unit of a queue offset in a plain queue, b"" if there is none."""
    folder, position = store / "consumequeue" / queue.topic / str(queue.queue_id), offset * _UNIT_BYTES
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.is_file() and file.name.isdigit() and 0 <= position - int(file.name) < file.stat().st_size:
            return file.read_bytes()[position - int(file.name) :][:_UNIT_BYTES]
    return b""


def _first_file(store: Path, queue: QueueKey) -> int:
    """Return the number in the name of the queue's first file."""
    folders = [store / tree / queue.topic / str(queue.queue_id) for tree in ("consumequeue", "batchconsumequeue")]
    files = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    return min((int(path.name) for path in files if path.name.isdigit() and path.stat().st_size), default=1 << 63)


def _difference(row: Row, rows: list[Row]) -> str:
    if not rows:
        return "nothing"
    nearest = min(rows, key=lambda other: sum(row[name] != other[name] for name in _NAMES))
    return str({name: (row[name], nearest[name]) for name in _NAMES if row[name] != nearest[name]})[:600]


def search_faults(path: Path, random: Random, truth: Truth, found: Found, read_mode: str) -> Iterator[str]:
    """Yield faults of look-ups by time and by key."""
    queues = [queue for queue, rows in truth.rows.items() if rows and queue in found.bounds]
    if not queues:
        return
    queue = random.choice(queues)
    row = random.choice(list(truth.rows[queue].values()))
    time_ms = row["storeTimestamp"] // 1000 + random.choice((-1, 0, 0, 1, -(10**12), 10**12))
    key = random.choice([*(row["keys"] or "k").split(" "), row["msgId"]])
    try:
        with open_reader(str(path), read_mode=read_mode) as reader:
            yield from _time_faults(queue, time_ms, reader.offset_at_time(queue, time_ms), found)
            for hit, offset in reader.find_key(queue.topic, key):
                rows = {other["queueOffset"]: other for other in found.rows.get(hit, [])}
                if hit in found.bounds and (offset not in rows or not _has_key(rows[offset], key)):
                    yield f"find_key({key!r}) names {hit} offset {offset}: {rows.get(offset)}"
    except RmqError:
        return


def _has_key(row: Row, key: str) -> bool:
    return key in (row["keys"] or "").split(" ") or key == row["msgId"]


def _time_faults(queue: QueueKey, time_ms: int, offset: int, found: Found) -> Iterator[str]:
    begin, end = found.bounds[queue]
    times = [row["storeTimestamp"] // 1000 for row in found.rows[queue]]
    if not begin <= offset <= end:
        yield f"offset_at_time({queue}, {time_ms}) = {offset}, bounds {begin}, {end}"
    elif times == sorted(times) and offset != begin + sum(time < time_ms for time in times):
        yield f"offset_at_time({queue}, {time_ms}) = {offset}, times {times} from {begin} on"
