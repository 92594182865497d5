"""What lies where in one segment of the commit log: records by topic, what no queue names, the filler, the tail.

Read from units: where a unit says that a record lies, there one lies. Only what no unit names is looked at itself.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, NotFoundError, OptionError, StorePathError
from rmq_spark.store.explore.summary_reader import StoreExplorer
from rmq_spark.store.format.record import Blank, Record
from rmq_spark.store.log.segments import Segment

MAX_TOPICS = 6  # that are told apart; the rest is one
OTHER_TOPICS = "other topics"
NO_UNIT = "records without a unit"  # half messages of old kinds, of topics that were deleted, not dispatched
BLANK_FILLER = "filler (BLANK)"  # what was left of the segment was too short for the next record
STALE = "stale bytes behind the end"
UNWRITTEN = "zeros behind the end"  # not written yet

_READ_UNITS = 1 << 20
_WALKED_RECORDS = 1 << 14  # without a unit, to find where the filler begins
_STALE_BYTES = 64 << 20  # of the tail are looked at
_CELL_BYTES = 2  # at least
_NEXT_TO_NOTHING = 16  # so small a part of a segment would be a few cells of its picture


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """One segment, [begin, end) in physical offsets; [begin, shown_end) of it is cut into cells of equal size.

    `cells` has for each the index in `names` of what takes most of it; `sizes` are the bytes of each name in the whole
    segment. `record_begins` are the physical offsets at which records that have units begin. Behind `shown_end`, which
    is `end` unless next to nothing was written yet, there are zeros.
    """

    path: str
    begin: int
    end: int
    shown_end: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    cells: NDArray[np.int64]
    record_begins: NDArray[np.int64]


def segment_layout(reader: StoreExplorer, physical_offset: int | None, cell_count: int) -> SegmentLayout:
    """Return the layout of the segment that holds a physical offset, of the last one that has records for None.

    Raises NotFoundError where no segment holds it.
    """
    reader.refresh()
    segment = _segment(reader, physical_offset)
    extents = _extents_by_topic(reader, segment)
    extents = dict(sorted(extents.items(), key=lambda one: -int(one[1][1].sum())))
    names = list(extents)
    if len(names) > MAX_TOPICS:
        rest = [extents.pop(name) for name in names[MAX_TOPICS:]]
        extents[OTHER_TOPICS] = _in_order(
            np.concatenate([places for places, _ in rest]), np.concatenate([sizes for _, sizes in rest])
        )
    written_end = min(max(reader.log_end, segment.begin), segment.end)
    stale = _stale_extents(segment, written_end)
    shown_end = _shown_end(segment, max([written_end, *(last for _, last in stale)]), cell_count)
    # Behind the cells one more, for what is not shown.
    edges = np.append(np.linspace(segment.begin, shown_end, cell_count + 1), segment.end)
    covered = {name: _covered(places, sizes, edges) for name, (places, sizes) in extents.items()}
    none = np.zeros(0, np.int64)
    places, sizes = _in_order(
        np.concatenate([none, *(places for places, _ in extents.values())]),
        np.concatenate([none, *(sizes for _, sizes in extents.values())]),
    )
    filler = _filler_begin(reader, segment, int(places[-1] + sizes[-1]) if len(places) else segment.begin)
    taken = np.sum(list(covered.values()), axis=0) if covered else np.zeros(cell_count + 1)
    live = _overlap(edges, segment.begin, min(filler, written_end))
    covered[NO_UNIT] = live - taken
    covered[BLANK_FILLER] = _overlap(edges, filler, written_end)
    covered[STALE] = sum((_overlap(edges, *extent) for extent in stale), np.zeros(cell_count + 1))
    covered[UNWRITTEN] = _overlap(edges, written_end, segment.end) - covered[STALE]
    totals = {name: round(float(cells.sum())) for name, cells in covered.items()}
    kept = [name for name, total in totals.items() if total > 0]
    cells = np.argmax(np.array([covered[name][:cell_count] for name in kept]), axis=0)
    sizes_kept = tuple(totals[name] for name in kept)
    return SegmentLayout(segment.path, segment.begin, segment.end, shown_end, tuple(kept), sizes_kept, cells, places)


def _shown_end(segment: Segment, used_end: int, cell_count: int) -> int:
    """Return up to where a segment is worth a picture: its end, or twice what is used where that is next to nothing."""
    used = max(used_end - segment.begin, _CELL_BYTES * cell_count)
    shown: int = 1 << (2 * used - 1).bit_length()  # a round number of KiB or MiB
    return segment.begin + shown if shown <= segment.size // _NEXT_TO_NOTHING else segment.end


def _segment(reader: StoreExplorer, physical_offset: int | None) -> Segment:
    run = reader.log.segments
    if physical_offset is None:
        physical_offset = max(reader.log_end - 1, run.begin)
    elif isinstance(physical_offset, bool) or not isinstance(physical_offset, int):
        raise OptionError(f"physical_offset={physical_offset!r} is no whole number. It counts bytes of the commit log.")
    found = run.holding(physical_offset)
    if found is None:
        raise NotFoundError(
            f'no segment of the store at "{reader.path}" holds physical offset {physical_offset}. '
            + (f"They hold [{run.begin}, {run.end})." if run.segments else "It has none.")
        )
    return found


Extents = tuple[NDArray[np.int64], NDArray[np.int64]]  # physical offsets, and bytes, of records in order


def _extents_by_topic(reader: StoreExplorer, segment: Segment) -> dict[str, Extents]:
    """Return where the records of each topic lie in the segment, by their units."""
    found: dict[str, Extents] = {}
    for topic in reader.topics():
        places, sizes = [], []
        for queue in reader.queues(topic):
            try:
                for units in reader.units_between(queue, segment.begin, segment.end, _READ_UNITS):
                    places.append(units.physical_offsets)
                    sizes.append(units.sizes)
            except (DamageError, StorePathError) as error:
                if is_unreadable(error):
                    raise
                continue  # its records are without a unit then
        if places and sum(map(len, places)):
            found[topic] = _in_order(np.concatenate(places), np.concatenate(sizes))
    return found


def _in_order(places: NDArray[np.int64], sizes: NDArray[np.int64]) -> Extents:
    order = np.argsort(places, kind="stable")
    return places[order], sizes[order]


def _covered(places: NDArray[np.int64], sizes: NDArray[np.int64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how many bytes of each cell the extents, in order and apart from each other, cover."""
    reached = np.append(0, np.cumsum(sizes))
    last = np.searchsorted(places, edges, side="right") - 1
    inside = np.where(last >= 0, np.minimum(edges - places[last], sizes[last]), 0)
    covered: NDArray[np.float64] = np.diff(np.where(last >= 0, reached[last], 0) + inside)
    return covered


def _overlap(edges: NDArray[np.float64], begin: int, end: int) -> NDArray[np.float64]:
    """Return how many bytes of each cell lie in [begin, end)."""
    clipped: NDArray[np.float64] = np.diff(np.clip(edges, begin, max(begin, end)))
    return clipped


def _filler_begin(reader: StoreExplorer, segment: Segment, place: int) -> int:
    """Return where the filler of a segment begins, its end if it has none, by the records from `place` on."""
    if reader.log_end < segment.end:
        return segment.end
    for _ in range(_WALKED_RECORDS):
        found = reader.log.record_at(place)
        if isinstance(found, Blank):
            return place
        if not isinstance(found, Record):
            break
        place += found.total_size
        if place >= segment.end:
            break
    return segment.end


def _stale_extents(segment: Segment, written_end: int) -> list[tuple[int, int]]:
    """Return where bytes that are not zero stand behind the end, [begin, end) in physical offsets."""
    found = []
    begin = written_end - segment.begin
    for first, last in files.data_extents(segment.path, begin, min(segment.size, begin + _STALE_BYTES)):
        with files.OpenFile(segment.path) as file:
            there = np.flatnonzero(np.frombuffer(file.read(first, last - first), np.uint8))
        # From the first byte that is not zero to the last: zeros are in every record.
        found.append((segment.begin + first + int(there[0]), segment.begin + first + int(there[-1]) + 1))
    return found
