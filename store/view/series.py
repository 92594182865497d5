"""Data of plots: the layout of a segment, messages and bytes over time, tags, and delays.

The layout of a segment is computed from consume-queue entries. The segment is read only where no entry refers to it. If
a queue has very many messages, an even sample of them is used, and the result is marked as an estimate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, NotFoundError, OptionError, StorePathError
from rmq_spark.store.format.consume_queue_entry import MAX_ADDRESS
from rmq_spark.store.format.record import Blank, Record
from rmq_spark.store.log.segments import Segment
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import WAITING_TOPICS, is_system_topic
from rmq_spark.store.view.explorer import StoreExplorer
from rmq_spark.store.view.message import NO_TIME, EntrySample, SampleSize

MAX_TOPICS = 6  # number of topics that are shown separately; the other topics are shown as OTHER_TOPICS
OTHER_TOPICS = "other topics"
NO_ENTRY = "records without an entry"  # records of deleted topics, records not dispatched yet, old half messages
BLANK_FILLER = "filler (BLANK)"  # the rest of the segment was too short for the next record
STALE = "stale bytes after the end"
UNWRITTEN = "zeros after the end"  # not written yet
_READ_ENTRIES = 1 << 20  # entries that are read at once
_WALKED_RECORDS = 1 << 14  # maximum number of records that are read one by one to find the filler
_STALE_BYTES = 64 << 20  # maximum number of bytes that are read after the log's end
_CELL_BYTES = 2  # minimum size of a cell
_MIN_USED_PART = 16  # if less than 1/16 of a segment is used, only a part of the segment is shown


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The layout of one segment: what its bytes are used for. The segment has the physical offsets [begin, end).

    `names` are the uses: topics, NO_ENTRY, BLANK_FILLER, STALE and UNWRITTEN. `sizes` are the numbers of bytes that
    each name takes in the whole segment.

    For the plot, [begin, shown_end) is divided into cells of equal size. `cells` has for each cell the index in `names`
    of the name that takes most of the cell. `shown_end` is `end`, unless most of the segment is unwritten.
    `record_begins` are the physical offsets of the records that have an entry.
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
    """Return the layout of the segment that contains `physical_offset`, divided into `cell_count` cells.

    If `physical_offset` is None, the last segment with records is used. Raises NotFoundError if no segment contains the
    offset.
    """
    reader.refresh()
    segment = _segment(reader, physical_offset)
    extents = _extents_by_topic(reader, segment)
    extents = dict(sorted(extents.items(), key=lambda one: -int(one[1][1].sum())))
    names = list(extents)
    if len(names) > MAX_TOPICS:
        rest = [extents.pop(name) for name in names[MAX_TOPICS:]]
        extents[OTHER_TOPICS] = _in_order(
            np.concatenate([offsets for offsets, _ in rest]), np.concatenate([sizes for _, sizes in rest])
        )
    written_end = min(max(reader.log_end, segment.begin), segment.end)
    stale = _stale_extents(segment, written_end)
    shown_end = _shown_end(segment, max([written_end, *(last for _, last in stale)]), cell_count)
    # One more cell at the end is for the part that is not shown.
    edges = np.append(np.linspace(segment.begin, shown_end, cell_count + 1), segment.end)
    covered = {name: _covered(offsets, sizes, edges) for name, (offsets, sizes) in extents.items()}
    none = np.zeros(0, np.int64)
    offsets, sizes = _in_order(
        np.concatenate([none, *(offsets for offsets, _ in extents.values())]),
        np.concatenate([none, *(sizes for _, sizes in extents.values())]),
    )
    filler = _filler_begin(reader, segment, int(offsets[-1] + sizes[-1]) if len(offsets) else segment.begin)
    taken = np.sum(list(covered.values()), axis=0) if covered else np.zeros(cell_count + 1)
    live = _overlap(edges, segment.begin, min(filler, written_end))
    covered[NO_ENTRY] = live - taken
    covered[BLANK_FILLER] = _overlap(edges, filler, written_end)
    covered[STALE] = sum((_overlap(edges, *extent) for extent in stale), np.zeros(cell_count + 1))
    covered[UNWRITTEN] = _overlap(edges, written_end, segment.end) - covered[STALE]
    totals = {name: round(float(cells.sum())) for name, cells in covered.items()}
    kept = [name for name, total in totals.items() if total > 0]
    cells = np.argmax(np.array([covered[name][:cell_count] for name in kept]), axis=0)
    sizes_kept = tuple(totals[name] for name in kept)
    return SegmentLayout(segment.path, segment.begin, segment.end, shown_end, tuple(kept), sizes_kept, cells, offsets)


def _shown_end(segment: Segment, used_end: int, cell_count: int) -> int:
    """Return the physical offset up to which the segment is shown.

    This is the segment's end. If the used part of the segment is small, only about twice the used part is shown.
    """
    used = max(used_end - segment.begin, _CELL_BYTES * cell_count)
    shown: int = 1 << (2 * used - 1).bit_length()  # a round number of KiB or MiB
    return segment.begin + shown if shown <= segment.size // _MIN_USED_PART else segment.end


def _segment(reader: StoreExplorer, physical_offset: int | None) -> Segment:
    run = reader.log.segments
    if physical_offset is None:
        physical_offset = max(reader.log_end - 1, run.begin)
    elif isinstance(physical_offset, bool) or not isinstance(physical_offset, int):
        raise OptionError(f"physical_offset={physical_offset!r} must be an integer. It counts bytes of the commit log.")
    found = run.holding(physical_offset)
    if found is None:
        raise NotFoundError(
            f'no segment of the store at "{reader.path}" contains physical offset {physical_offset}. '
            + (f"They hold [{run.begin}, {run.end})." if run.segments else "It has none.")
        )
    return found


Extents = tuple[NDArray[np.int64], NDArray[np.int64]]  # physical offsets of records, ascending, and their sizes


def _extents_by_topic(reader: StoreExplorer, segment: Segment) -> dict[str, Extents]:
    """Return a dict from topic to the extents of its records in the segment, according to their entries."""
    found: dict[str, Extents] = {}
    for topic in reader.topics():
        offsets, sizes = [], []
        for queue in reader.queues(topic):
            try:
                for entries in reader.entries_between(queue, segment.begin, segment.end, _READ_ENTRIES):
                    offsets.append(entries.physical_offsets)
                    sizes.append(entries.sizes)
            except (DamageError, StorePathError) as error:
                if is_unreadable(error):
                    raise
                continue  # the records of a damaged queue are shown as NO_ENTRY
        if offsets and sum(map(len, offsets)):
            found[topic] = _in_order(np.concatenate(offsets), np.concatenate(sizes))
    return found


def _in_order(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> Extents:
    order = np.argsort(offsets, kind="stable")
    return offsets[order], sizes[order]


def _covered(offsets: NDArray[np.int64], sizes: NDArray[np.int64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each cell how many of its bytes are covered by extents. Extents must be sorted and must not overlap.

    `edges` are the begins of the cells, and the end of the last cell.
    """
    reached = np.append(0, np.cumsum(sizes))
    last = np.searchsorted(offsets, edges, side="right") - 1
    inside = np.where(last >= 0, np.minimum(edges - offsets[last], sizes[last]), 0)
    covered: NDArray[np.float64] = np.diff(np.where(last >= 0, reached[last], 0) + inside)
    return covered


def _overlap(edges: NDArray[np.float64], begin: int, end: int) -> NDArray[np.float64]:
    """Return for each cell how many of its bytes are in [begin, end)."""
    clipped: NDArray[np.float64] = np.diff(np.clip(edges, begin, max(begin, end)))
    return clipped


def _filler_begin(reader: StoreExplorer, segment: Segment, physical_offset: int) -> int:
    """Return the physical offset at which a segment's filler begins, or the segment's end if it has no filler.

    Reads the records that begin at `physical_offset`, which is the end of the last record with an entry.
    """
    if reader.log_end < segment.end:
        return segment.end
    for _ in range(_WALKED_RECORDS):
        found = reader.log.record_at(physical_offset)
        if isinstance(found, Blank):
            return physical_offset
        if not isinstance(found, Record):
            break
        physical_offset += found.total_size
        if physical_offset >= segment.end:
            break
    return segment.end


def _stale_extents(segment: Segment, written_end: int) -> list[tuple[int, int]]:
    """Return the ranges of stale bytes after the log's end, as (begin, end) in physical offsets.

    `written_end` is the log's end.
    """
    found = []
    begin = written_end - segment.begin
    for first, last in files.data_extents(segment.path, begin, min(segment.size, begin + _STALE_BYTES)):
        with files.OpenFile(segment.path) as file:
            nonzero = np.flatnonzero(np.frombuffer(file.read(first, last - first), np.uint8))
        # A range extends from the first byte that is not zero to the last one, because every record contains zeros.
        found.append((segment.begin + first + int(nonzero[0]), segment.begin + first + int(nonzero[-1]) + 1))
    return found


_HEADERS = 1 << 15  # headers that are read for one plot; each one reads a page of the log
_MIN_HEADERS = 64  # minimum number of headers that are read for a queue
_TAG_SIZE = SampleSize(1 << 21, 1 << 11, 64)
_DECODED_TAGS = 100_000  # messages that are decoded of a queue whose entries do not have the tags codes of its messages
_NAMED_CODES = 64  # tags codes whose tags are shown; the others are rare
_DECODED_PER_CODE = 4  # messages that are decoded for each tags code, because two tags may share a code
_STEPS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000)
_LONG_STEPS_MS = (600_000, 900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 43_200_000)
_DAY_MS = 86_400_000
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """The number of messages, or of bytes of their records, that were stored in consecutive spans of time.

    `values` maps the name of each topic, or of each queue, to an array with one number for each span. `begin_ms` is the
    begin of the first span (ms since the epoch), and `step_ms` is the length of every span (ms). If `is_exact` is
    False, the numbers are estimates.
    """

    begin_ms: int
    step_ms: int
    values: dict[str, Floats]
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of messages: the time from their birth at the producer until they were stored.

    `delays_ms` are delays in ms, ascending, and `messages` has for each the number of messages that it represents. A
    delay is negative if the producer's clock was ahead of the store's clock. If `is_exact` is False, the delays are a
    sample.
    """

    delays_ms: NDArray[np.int64]
    messages: Floats
    is_exact: bool

    def quantile(self, part: float) -> float:
        """Return the delay (ms) that a part of all messages does not exceed. `part` is 0.99 for 99% of them."""
        reached = np.cumsum(self.messages)
        at = int(np.searchsorted(reached, part * reached[-1]))
        return float(self.delays_ms[min(at, len(self.delays_ms) - 1)])


@dataclass(frozen=True, slots=True)
class TagCounts:
    """The number of messages with each tag.

    `messages` maps tags to numbers of messages, most frequent first. The key None is for messages that have no tag. If
    there are very many tags, the rare ones are not in `messages`. Then `rare_tags` is the number of rare tags, and
    `rare_messages` is the number of their messages. If `is_exact` is False, all numbers are estimates.
    """

    messages: dict[str | None, float]
    rare_tags: int
    rare_messages: float
    is_exact: bool


class _CodeCounts:
    """The number of messages with each tags code in a topic, and the queue offsets of a few messages of each code."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._offsets: dict[int, list[tuple[QueueKey, int]]] = {}

    def add(self, queue: QueueKey, sample: EntrySample) -> None:
        """Add the entries of a queue's sample."""
        codes, firsts, which = np.unique(sample.entries.tags_codes, return_index=True, return_inverse=True)
        totals = np.bincount(which, weights=sample.messages)
        lasts = np.zeros(len(codes), np.int64)
        lasts[which] = np.arange(len(which))  # the last assignment of equal codes wins
        for code, total, *rows in zip(codes.tolist(), totals.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            self._counts[code] = self._counts.get(code, 0) + total
            offsets = self._offsets.setdefault(code, [])
            if len(offsets) < _DECODED_PER_CODE:
                offsets.extend((queue, int(sample.entries.queue_offsets[row])) for row in sorted(set(rows)))

    def by_name(self, reader: StoreExplorer) -> Iterator[tuple[str | None, float]]:
        """Yield (tag, number of messages) for the frequent tags, most frequent first.

        Decodes a few messages of each tags code to find its tag.
        """
        for code, count in self._ordered()[:_NAMED_CODES]:
            names = {_tag_at(reader, queue, offset) for queue, offset in self._offsets[code]}
            yield next(iter(names)) if len(names) == 1 else " / ".join(sorted(str(one) for one in names)), count

    def rare(self) -> list[float]:
        """Return a list with the number of messages of each rare tags code, in descending order."""
        return [count for _, count in self._ordered()[_NAMED_CODES:]]

    def _ordered(self) -> list[tuple[int, float]]:
        return sorted(self._counts.items(), key=lambda one: -one[1])


def chosen_topics(reader: StoreExplorer, topics: str | Sequence[str] | None) -> list[str]:
    """Return a list with the topics in `topics`, each once. If it is None, returns all topics except RocketMQ's own.

    Raises NotFoundError if a topic does not exist. The error names other topics.
    """
    if topics is None:
        return [topic for topic in reader.topics() if not is_system_topic(topic)]
    named = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
    for topic in named:
        reader.queues(topic)
    return named


def stored_over_time(
    reader: StoreExplorer, topics: str | Sequence[str] | None, what: str, bin_count: int
) -> TimeSeries | None:
    """Return how many messages or bytes were stored over time, in about `bin_count` spans of time.

    `what` is "messages" or "bytes". If `topics` is a name, the result has a series for each queue of this topic. If it
    is a list of names, or None for all topics except RocketMQ's own, the result has a series for each topic. Returns
    None if there are no messages. Only headers of records are read.
    """
    reader.refresh()
    parts: list[tuple[str, EntrySample, NDArray[np.int64]]] = []
    for queue, sample in _samples(reader, chosen_topics(reader, topics)):
        _, stored = reader.times_of(sample.entries)
        parts.append((f"queue {queue.queue_id}" if isinstance(topics, str) else queue.topic, sample, stored))
    known = [stored[stored != NO_TIME] for _, _, stored in parts]
    known = [stored for stored in known if len(stored)]
    if not known:
        return None
    first, last = min(int(stored.min()) for stored in known), max(int(stored.max()) for stored in known)
    step_ms = _step(last - first + 1, bin_count)
    begin_ms = first // step_ms * step_ms
    edges = np.arange(begin_ms, last + step_ms + 1, step_ms, dtype=np.float64)
    values: dict[str, Floats] = {}
    for name, sample, stored in parts:
        counted = _histogram(sample, stored, what, edges)
        values[name] = values[name] + counted if name in values else counted
    return TimeSeries(begin_ms, step_ms, values, all(sample.is_complete for _, sample, _ in parts))


def stored_delays(reader: StoreExplorer, topics: str | Sequence[str] | None) -> Delays | None:
    """Return the delays from the birth of messages until they were stored. Returns None if there are no messages.

    If `topics` is None, these are the messages of all topics except RocketMQ's own. Only headers of records are read.
    """
    reader.refresh()
    delays, messages, is_exact = [], [], True
    for _, sample in _samples(reader, chosen_topics(reader, topics)):
        born, stored = reader.times_of(sample.entries)
        good = stored != NO_TIME
        delays.append((stored - born)[good])
        messages.append(sample.messages[good])
        is_exact &= sample.is_complete
    all_delays, all_messages = np.concatenate(delays or [[]]), np.concatenate(messages or [[]])
    if not len(all_delays):
        return None
    order = np.argsort(all_delays, kind="stable")
    return Delays(all_delays[order].astype(np.int64), all_messages[order], is_exact)


def tag_counts(reader: StoreExplorer, topic: str) -> TagCounts:
    """Return the number of messages of a topic with each tag.

    Entries contain a hash of the tag, its tags code. So entries are counted by their tags codes, and a few messages of
    each code are decoded to find the tag. If two tags share a code, their messages are counted together, under a name
    such as "AaAa / BBBB". If the entries of a queue do not contain tags codes, its latest messages are decoded instead.
    """
    reader.refresh()
    counts: dict[str | None, float] = {}
    codes, is_exact = _CodeCounts(), True
    for queue in reader.queues(topic):
        sample = reader.sample(queue, _TAG_SIZE)
        if not len(sample.entries):
            continue
        is_other = sample.entries.message_counts is not None or topic in WAITING_TOPICS
        if is_other or int(sample.entries.tags_codes.min()) <= MAX_ADDRESS:
            decoded, is_complete = _decoded_tags(reader, queue)
            for tag, count in decoded.items():
                counts[tag] = counts.get(tag, 0) + count
        else:
            is_complete = sample.is_complete
            codes.add(queue, sample)
        is_exact &= is_complete
    for tag, count in codes.by_name(reader):
        counts[tag] = counts.get(tag, 0) + count
    rare = codes.rare()
    return TagCounts(dict(sorted(counts.items(), key=lambda one: -one[1])), len(rare), sum(rare), is_exact)


def _samples(reader: StoreExplorer, topics: Sequence[str]) -> list[tuple[QueueKey, EntrySample]]:
    queues = [queue for topic in topics for queue in reader.queues(topic)]
    share = max(_HEADERS // max(1, len(queues)), _MIN_HEADERS)
    found = ((queue, reader.sample(queue, SampleSize(share, share, 1))) for queue in queues)
    return [(queue, sample) for queue, sample in found if len(sample.entries)]


def _step(span_ms: int, bin_count: int) -> int:
    """Return the shortest round length of a bin (ms) with which `bin_count` bins cover `span_ms`."""
    least = -(-span_ms // bin_count)
    for step in (*_STEPS_MS, *_LONG_STEPS_MS):
        if step >= least:
            return step
    return -(-least // _DAY_MS) * _DAY_MS


def _histogram(sample: EntrySample, stored: NDArray[np.int64], what: str, edges: Floats) -> Floats:
    good = stored != NO_TIME
    weights = sample.messages[good]
    if what == "bytes":
        counts = sample.entries.message_counts
        weights = weights * sample.entries.sizes[good] / (1 if counts is None else counts[good])
    if sample.is_complete:
        return np.histogram(stored[good], edges, weights=weights)[0].astype(np.float64)
    # An entry represents the messages that were stored between its own message and that of the sample's next entry.
    times = np.maximum.accumulate(stored[good])
    before = np.append(0.0, np.cumsum(weights))[:-1]
    reached = np.interp(edges, times, before, left=0.0, right=float(weights.sum()))
    reached[[0, -1]] = 0.0, weights.sum()  # if many messages have the first or the last ms, this includes all of them
    return np.diff(reached)


def _tag_at(reader: StoreExplorer, queue: QueueKey, offset: int) -> str | None:
    (batch,) = reader.read(queue, offset, offset + 1, ["tags"])
    tag: str | None = batch["tags"][0].as_py()
    return tag


def _decoded_tags(reader: StoreExplorer, queue: QueueKey) -> tuple[dict[str | None, float], bool]:
    """Return a dict from tag to the number of a queue's messages, and whether all messages were decoded.

    If only the latest messages were decoded, the numbers are estimates for the whole queue.
    """
    bounds = reader.bounds(queue)
    begin = max(bounds.min_offset, bounds.max_offset - _DECODED_TAGS)
    counts: dict[str | None, float] = {}
    for batch in reader.read(queue, begin, bounds.max_offset, ["tags"]):
        for one in batch["tags"].value_counts().to_pylist():
            counts[one["values"]] = counts.get(one["values"], 0) + one["counts"]
    share = (bounds.max_offset - bounds.min_offset) / max(1, bounds.max_offset - begin)
    return {tag: count * share for tag, count in counts.items()}, begin == bounds.min_offset
