"""The commit log walked from end to end: blocks of whole records as columns, and what is none.

A walk follows lengths, as recovery does. Where no record stands it goes on at the next place that certifies itself: a
whole record that names the very place where it stands, or a filler that reaches just to its segment's end. What lies
between is a fault, and its extent. Nothing is believed of time or units here: where the log ends is told by who calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.explore.layouts import field_position
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.record import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_HEAD,
    Blank,
    Record,
    Torn,
    decode_record,
)
from rmq_spark.store.format.record_columns import RecordColumns, split_records, walk_records
from rmq_spark.store.format.whole_records import NotWholeError, WholeRecords
from rmq_spark.store.log.segments import Segment

_BLOCK_BYTES = 8 << 20  # looked at together: bounds memory
_WINDOW_BYTES = 1 << 20  # searched together for where the log goes on
_PLACE_AT = field_position(RECORD_HEAD, "physical_offset")
_MAGIC_AT = field_position(RECORD_HEAD, "magic")
_MAGICS = tuple(magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK))


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Whole records, one behind the other: their columns, and where the parts of each lie in `whole.data`."""

    columns: RecordColumns
    whole: WholeRecords
    begin: int  # physical offset of the first byte of `whole.data`
    end: int  # physical offset behind the last record; `whole.data` may go on with a part of the next one


@dataclass(frozen=True, slots=True)
class LogFault:
    """The bytes [begin, end) of the log (physical offsets) are no records: what was expected, and what stands there."""

    begin: int
    end: int
    expected: str
    found: str


class LogWalk:
    """One walk. `place` is how far it got, `records` how many it met. One thread."""

    def __init__(self, log: SoundLog, levels: DelayLevels) -> None:
        self._log, self._levels = log, levels
        self.place = 0
        self.records = 0
        self._is_over = False  # with an open end: nothing follows

    def run(self, begin: int, end: int | None) -> Iterator[LogBlock | LogFault]:
        """Yield what stands in [begin, end), in order; without an `end`, to where no more records come.

        Segments that retention deletes meanwhile are passed over. Raises StoreChangedError for a segment that shrinks.
        """
        self.place = begin
        while not self._is_over and (end is None or self.place < end):
            segment = self._log.segments.holding(self.place)
            if segment is None:
                later = self._log.segment_from(self.place)
                if later is None or (end is not None and later.begin >= end):
                    return
                yield LogFault(self.place, later.begin, "a segment", "none")
                self.place = later.begin
                continue
            try:
                yield from self._step(segment, segment.end if end is None else min(end, segment.end), end is None)
            except StoreChangedError:
                self._log.look()
                if self._log.segments.begin <= segment.begin:
                    raise
                self.place = self._log.segments.begin

    def _step(self, segment: Segment, stop: int, is_open: bool) -> Iterator[LogBlock | LogFault]:
        place = self.place
        data = self._log.bytes_at(place, min(_BLOCK_BYTES, stop - place))
        positions, size = walk_records(data)
        if len(positions):
            yield from self._blocks(segment, stop, data, positions, size, is_open)
            return
        record = self._log.record_at(place)
        if isinstance(record, Blank):
            if record.remaining_size != segment.end - place:
                yield LogFault(place, place, f"a filler of {segment.end - place} bytes", f"{record.remaining_size}")
            self.place = segment.end
        elif isinstance(record, Record) and record.total_size <= stop - place:
            data = self._log.bytes_at(place, record.total_size)
            one = np.zeros(1, np.int64)
            yield from self._blocks(segment, stop, data, one, record.total_size, is_open)
        else:
            why = record.why if isinstance(record, Torn) else "a record that reaches beyond the log's end"
            yield from self._fault(segment, place, stop, why, is_open)

    def _blocks(
        self, segment: Segment, stop: int, data: bytes, positions: NDArray[np.int64], size: int, is_open: bool
    ) -> Iterator[LogBlock | LogFault]:
        """Yield the whole records; where one is not whole, those before it and the fault."""
        count, end = len(positions), size
        place = self.place
        while count:
            try:
                part = positions[:count]
                columns = split_records(data, part, end, place, self._levels)
                whole = WholeRecords.of(np.frombuffer(data, np.uint8), part, np.append(part[1:], end))
            except NotWholeError as fault:  # the first of a kind of fault: there may be others before it
                count, end = fault.row, int(positions[fault.row])
                continue
            self.records += count
            yield LogBlock(columns, whole, place, place + end)
            break
        self.place = place + end
        if count < len(positions):
            found = decode_record(data[end:])
            if isinstance(found, Record) and found.physical_offset != self.place:
                why = f"a record that says of itself that it lies at {found.physical_offset}"
            else:
                why = found.why if isinstance(found, Torn) else "another record"
            yield from self._fault(segment, self.place, stop, why, is_open)

    def _fault(self, segment: Segment, place: int, stop: int, why: str, is_open: bool) -> Iterator[LogFault]:
        """Go on where the log goes on. With an open end nothing is wrong where nothing follows."""
        self.place = self._goes_on_at(segment, place + 1, stop)
        if is_open and self.place == segment.end and not self._comes_again(segment):
            self.place, self._is_over = place, True
            return
        yield LogFault(place, self.place, "a record", why)

    def _comes_again(self, segment: Segment) -> bool:
        """Say whether a later segment begins with a record."""
        later = self._log.segments.segments
        return any(one.begin > segment.begin and isinstance(self._log.record_at(one.begin), Record) for one in later)

    def _goes_on_at(self, segment: Segment, begin: int, stop: int) -> int:
        """Return the first place in [begin, stop) that certifies itself; `stop` if there is none."""
        at = begin
        while at < stop:
            window = self._log.bytes_at(at, min(_WINDOW_BYTES, stop - at))
            found = [self._certain_in(window, at, segment, magic) for magic in _MAGICS]
            best = min((place for place in found if place is not None), default=None)
            if best is not None:
                return best
            at += max(len(window) - RECORD_HEAD.itemsize, 1) if len(window) == _WINDOW_BYTES else len(window)
            if not window:
                return stop
        return stop

    def _certain_in(self, window: bytes, begin: int, segment: Segment, magic: bytes) -> int | None:
        at = window.find(magic)
        while at >= 0:
            place = begin + at - _MAGIC_AT
            if at >= _MAGIC_AT and self._is_certain(window, at - _MAGIC_AT, place, segment):
                return place
            at = window.find(magic, at + 1)
        return None

    def _is_certain(self, window: bytes, position: int, place: int, segment: Segment) -> bool:
        if int.from_bytes(window[position + _MAGIC_AT :][:4], "big") == MAGIC_BLANK:
            return int.from_bytes(window[position : position + 4], "big", signed=True) == segment.end - place
        named = int.from_bytes(window[position + _PLACE_AT : position + _PLACE_AT + 8], "big")
        return named == place and isinstance(self._log.record_at(place), Record)


def written_bytes(segment: Segment, begin: int) -> int:
    """Return how many bytes of a segment, from a physical offset on, lie in parts that are not all zeros.

    Of one that retention deletes meanwhile there are none.
    """
    first = max(begin - segment.begin, 0)
    if first >= segment.size:
        return 0
    try:
        return sum(last - one for one, last in files.data_extents(segment.path, first, segment.size))
    except StoreChangedError:
        return 0
