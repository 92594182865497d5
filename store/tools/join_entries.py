"""Join of consume-queue entries and records, block by block of the commit log.

For each record that must have an entry, the entry is read from the record's queue and compared with the record.
`EntryRanges` keeps which entries agree with a record. All other entries are orphans (`orphan_entries.py`). Records
whose entries are missing or differ are kept as `Mismatch`, one for each run of consecutive queue offsets.

Mismatches are judged after the whole log has been scanned (`judge_entries.py`), because only then is it known whether
the record or its entry is wrong.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import StoreChangedError, StoreError
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, MAX_ADDRESS
from rmq_spark.store.format.record import TRANSACTION_COMMIT, TRANSACTION_MASK
from rmq_spark.store.format.record_batch import RecordColumns
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.tools.extended_entries import ExtendedEntries


class EntryRanges:
    """Half-open ranges of entry numbers for each queue. Not thread-safe. Adding numbers in ascending order is cheapest.

    The number of an entry is its index in its queue, counted from 0. `count` is how many numbers were added.
    """

    def __init__(self) -> None:
        self._begins: dict[QueueKey, list[int]] = {}
        self._ends: dict[QueueKey, list[int]] = {}
        self.count = 0

    def add(self, key: QueueKey, numbers: NDArray[np.int64]) -> None:
        """Add entry numbers of a queue. If a number occurs twice in one call, it is counted once."""
        if not len(numbers):
            return
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first + 1 == len(numbers) and (numbers[1:] > numbers[:-1]).all():  # the usual case: consecutive
            self.count += len(numbers)
            self._add_range(key, first, last + 1)
            return
        numbers = np.unique(numbers)
        self.count += len(numbers)
        edges = np.flatnonzero(np.diff(numbers) != 1) + 1
        for piece in np.split(numbers, edges):
            self._add_range(key, int(piece[0]), int(piece[-1]) + 1)

    def _add_range(self, key: QueueKey, begin: int, end: int) -> None:
        begins, ends = self._begins.setdefault(key, []), self._ends.setdefault(key, [])
        if not ends or begin > ends[-1]:
            begins.append(begin)
            ends.append(end)
            return
        first = bisect_right(ends, begin - 1)  # the first range that touches [begin, end) or is above it
        last = first
        while last < len(begins) and begins[last] <= end:
            begin, end = min(begin, begins[last]), max(end, ends[last])
            last += 1
        begins[first:last], ends[first:last] = [begin], [end]

    def end(self, key: QueueKey) -> int:
        """Return the end of the queue's last range, or 0 if the queue has no ranges."""
        return self._ends.get(key, [0])[-1]

    def begin(self, key: QueueKey) -> int | None:
        """Return the begin of the queue's first range, or None if the queue has no ranges."""
        return next(iter(self._begins.get(key, [])), None)

    def gaps(self, key: QueueKey, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of numbers in [begin, end) that were not added, in ascending order."""
        found, at = [], begin
        for first, last in zip(self._begins.get(key, []), self._ends.get(key, []), strict=True):
            if first > at:
                found.append((at, min(first, end)))
            at = max(at, last)
        if at < end:
            found.append((at, end))
        return [(first, last) for first, last in found if first < last]


RUNS_MAX = 20_000  # maximum length of each list of disagreements; bounds memory if everything is damaged
NO_QUEUE, NO_ENTRY, OTHER_ENTRY, OTHER_TAGS = "no queue", "no entry", "another entry", "other tags"


@dataclass(slots=True)
class Mismatch:
    """A run of records of one queue, with consecutive queue offsets, whose entries are missing or differ.

    `kind` is NO_QUEUE, NO_ENTRY, OTHER_ENTRY or OTHER_TAGS. `[begin, end)` are the queue offsets of the records.
    `first` and `last` are the physical offsets of the first and the last record, and `count` is the number of records.
    `found` shows the entry that was found for one of them.
    """

    key: QueueKey
    kind: str
    begin: int
    end: int
    first: int
    last: int
    count: int
    size: int  # size of the first record (bytes)
    found: str = ""


@dataclass(slots=True)
class OffsetJump:
    """A record whose queue offset is not the one that follows the previous record of its queue.

    `expected` and `found` are queue offsets. `physical_offset` is the physical offset of the record.
    """

    key: QueueKey
    expected: int
    found: int
    physical_offset: int
    previous: int  # physical offset of the queue's previous record


@dataclass(slots=True)
class Duplicate:
    """Queue offsets [begin, end) of one queue that two records have: an earlier and a later one.

    Each queue offset has only one entry, so only one of the two records has an entry. `physical_offset` is the physical
    offset of the first later record. The queue offsets of the earlier records are below `limit`.
    """

    begin: int
    end: int
    limit: int
    physical_offset: int


@dataclass(slots=True)
class JoinResult:
    """The result of the join for all blocks so far: which entries agree with records, and all disagreements."""

    matched: EntryRanges = field(default_factory=EntryRanges)
    mismatches: list[Mismatch] = field(default_factory=list)
    jumps: list[OffsetJump] = field(default_factory=list)
    last_runs: dict[tuple[QueueKey, str], Mismatch] = field(default_factory=dict)  # last mismatch by queue and kind
    restarts: dict[QueueKey, int] = field(default_factory=dict)  # physical offset of the last record with offset 0
    duplicates: dict[QueueKey, list[Duplicate]] = field(default_factory=dict)

    def add_jump(self, jump: OffsetJump) -> None:
        """Add a jump. If the record has queue offset 0, only note that the queue restarted there.

        A queue restarts at 0 after its topic was deleted and created again.
        """
        if jump.found == 0:
            self.restarts[jump.key] = jump.physical_offset
        elif len(self.jumps) < RUNS_MAX:
            self.jumps.append(jump)

    def add_duplicates(
        self,
        key: QueueKey,
        rows: Mapping[str, NDArray[np.int64]],
        expected: NDArray[np.int64],
        breaks: NDArray[np.intp],
    ) -> None:
        """Add the queue offsets of a queue's next records that earlier records have, too.

        `rows` maps "begin" and "end" to the first queue offset of each record and the one after its last, and
        "physical_offset" to the records' physical offsets. `expected` are the queue offsets that would follow the
        previous records, and `breaks` are the indexes of the records that differ from it. A record with queue offset 0
        restarts the queue, so it is not a duplicate.
        """
        begins, ends, runs = rows["begin"], rows["end"], self.duplicates.get(key, [])
        if not runs and not (begins[breaks] < expected[breaks]).any():
            return
        stops = np.append(breaks, len(begins)).tolist()
        if runs and stops[0] > 0:
            runs[-1].end = max(runs[-1].end, min(runs[-1].limit, int(ends[stops[0] - 1])))
        for at, stop in zip(breaks.tolist(), stops[1:], strict=True):
            begin, limit = int(begins[at]), int(expected[at])
            if runs and begin:
                limit = max(limit, runs[-1].limit)
            elif runs:
                runs[-1].limit = runs[-1].end
            if 0 < begin < limit and len(runs) < RUNS_MAX:
                end = min(limit, int(ends[stop - 1]))
                runs.append(Duplicate(begin, end, limit, int(rows["physical_offset"][at])))
        if runs:
            self.duplicates[key] = runs

    def add_mismatch(
        self, key: QueueKey, kind: str, records: RecordColumns, rows: NDArray[np.intp], found: str = ""
    ) -> None:
        """Add records of a queue whose entries disagree. `rows` are the indexes of these records in `records`.

        Records that continue the last run of the same queue and kind extend that run. At least one run is kept for each
        queue and kind, even beyond RUNS_MAX, because a repair is planned from the runs.
        """
        if not len(rows):
            return
        offsets = records.queue_offsets[rows]
        ends = offsets + records.message_counts[rows]
        for piece in np.split(np.arange(len(rows)), np.flatnonzero(offsets[1:] != ends[:-1]) + 1):
            first, last = rows[piece[0]], rows[piece[-1]]
            previous = self.last_runs.get((key, kind))
            if previous is not None and previous.end == int(offsets[piece[0]]):
                previous.end, previous.last = int(ends[piece[-1]]), int(records.places[last])
                previous.count += len(piece)
            elif previous is None or len(self.mismatches) < RUNS_MAX:
                run = Mismatch(
                    key=key,
                    kind=kind,
                    begin=int(offsets[piece[0]]),
                    end=int(ends[piece[-1]]),
                    first=int(records.places[first]),
                    last=int(records.places[last]),
                    count=len(piece),
                    size=int(records.sizes[first]),
                    found=found,
                )
                self.mismatches.append(run)
                self.last_runs[key, kind] = run


_OPEN_QUEUES = 64
_NEARBY_ENTRIES = 64  # number of entries of a batch queue to search before and after the expected entry


@dataclass(slots=True)
class _QueueProgress:
    """How far a queue's records have been joined: the next queue offset, and the last record's physical offset."""

    next_offset: int
    last_physical_offset: int
    next_entry: int = -1  # number of the next entry of a batch queue; -1 if it was not searched for yet


class EntryJoin:
    """Compares records with their consume-queue entries. Add blocks in the order of the commit log, then call `close`.

    Not thread-safe. `queues` are all queues that have a folder. The entries of queues in `unreadable` are not read,
    because these queues have a finding already. `joined` is the result so far.
    """

    def __init__(
        self, queues: dict[QueueKey, ConsumeQueue], unreadable: set[QueueKey], extension: ExtendedEntries
    ) -> None:
        self._queues, self._unreadable, self._extension = queues, unreadable, extension
        self._progress: dict[QueueKey, _QueueProgress] = {}
        self._open: OrderedDict[QueueKey, ConsumeQueue] = OrderedDict()
        self.joined = JoinResult()
        # For each queue of the delay levels: delay (ms) -> number of such entries, number of the first such entry.
        self.odd_delays: dict[QueueKey, dict[int, tuple[int, int]]] = {}

    def close(self) -> None:
        """Close all files that are open."""
        while self._open:
            self._open.popitem()[1].run.close()

    def add(self, records: RecordColumns) -> None:
        """Compare the records of one block with their entries."""
        gets_entry = np.isin(records.sys_flags & TRANSACTION_MASK, (0, TRANSACTION_COMMIT))
        rows = np.flatnonzero(gets_entry & (records.queue_ids >= 0))
        rows = rows[np.lexsort((rows, records.queue_ids[rows], records.topic_numbers[rows]))]
        topics, queue_ids = records.topic_numbers[rows], records.queue_ids[rows]
        edges = np.flatnonzero((topics[1:] != topics[:-1]) | (queue_ids[1:] != queue_ids[:-1])) + 1
        for chosen in np.split(rows, edges):
            if len(chosen):
                first = chosen[0]
                topic = records.topics[int(records.topic_numbers[first])]
                self._add_queue(QueueKey(topic, int(records.queue_ids[first])), records, chosen)

    def _add_queue(self, key: QueueKey, records: RecordColumns, rows: NDArray[np.intp]) -> None:
        offsets, counts = records.queue_offsets[rows], records.message_counts[rows]
        physical_offsets = records.places[rows]
        progress = self._progress.setdefault(key, _QueueProgress(int(offsets[0]), -1))
        expected = np.append(progress.next_offset, (offsets + counts)[:-1])
        breaks = np.flatnonzero(offsets != expected)
        previous = np.append(progress.last_physical_offset, physical_offsets)
        for at in breaks.tolist():
            self.joined.add_jump(
                OffsetJump(key, int(expected[at]), int(offsets[at]), int(physical_offsets[at]), int(previous[at]))
            )
        if len(breaks) or key in self.joined.duplicates:
            rows_of = {"begin": offsets, "end": offsets + counts, "physical_offset": physical_offsets}
            self.joined.add_duplicates(key, rows_of, expected, breaks)
        progress.next_offset = int(offsets[-1] + counts[-1])
        progress.last_physical_offset = int(physical_offsets[-1])
        if key in self._unreadable:
            return
        queue = self._opened(key)
        if queue is None:
            for piece in np.split(rows, breaks):
                self.joined.add_mismatch(key, NO_QUEUE, records, piece)
            return
        try:
            for piece in np.split(rows, breaks):
                if len(piece) and queue.layout is BATCH_UNIT:
                    self._join_batches(queue, progress, records, piece)
                elif len(piece):
                    self._join_plain(queue, records, piece)
        except StoreChangedError:
            queue.run.refresh()  # retention deleted the queue's first files, and their records expire, too

    def _opened(self, key: QueueKey) -> ConsumeQueue | None:
        """Return a queue, or None if it has no folder. Closes the least recently used queue if too many are open."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        self._open[key] = queue
        self._open.move_to_end(key)
        if len(self._open) > _OPEN_QUEUES:
            self._open.popitem(last=False)[1].run.close()
        return queue

    def _join_plain(self, queue: ConsumeQueue, records: RecordColumns, rows: NDArray[np.intp]) -> None:
        """Compare records of a plain queue with their entries. The records must have consecutive queue offsets."""
        run, numbers = queue.run, records.queue_offsets[rows]
        is_inside = (numbers >= run.begin) & (numbers < run.end)
        self.joined.add_mismatch(queue.key, NO_ENTRY, records, rows[~is_inside])
        rows, numbers = rows[is_inside], numbers[is_inside]
        if not len(rows):
            return
        first, end = int(numbers[0]), int(numbers[-1]) + 1
        self._compare(queue, records, rows, run.read(first, end)[numbers - first], numbers)

    def _join_batches(
        self, queue: ConsumeQueue, progress: _QueueProgress, records: RecordColumns, rows: NDArray[np.intp]
    ) -> None:
        """Compare records of a batch queue with their entries. Each entry is searched for near the previous entry."""
        run = queue.run
        if progress.next_entry < 0:
            progress.next_entry = queue.first_from(int(records.places[rows[0]]), queue.search_written_end())
        begin = max(progress.next_entry, run.begin)
        entries = run.read(begin, begin + len(rows))
        numbers = begin + np.arange(len(rows))
        physical_offsets = records.places[rows]
        if len(entries) < len(rows) or (entries["physical_offset"] != physical_offsets).any():
            begin = max(begin - _NEARBY_ENTRIES, run.begin)
            nearby = run.read(begin, begin + len(rows) + 2 * _NEARBY_ENTRIES)
            order = np.argsort(nearby["physical_offset"], kind="stable")
            at = np.searchsorted(nearby["physical_offset"][order].astype(np.int64), physical_offsets)
            is_found = at < len(order)
            at = order[np.minimum(at, max(len(order) - 1, 0))] if len(order) else np.zeros(len(rows), np.intp)
            if len(nearby):
                is_found &= nearby["physical_offset"][at] == physical_offsets
            else:
                is_found[:] = False
            self.joined.add_mismatch(queue.key, NO_ENTRY, records, rows[~is_found])
            rows, entries, numbers = rows[is_found], nearby[at[is_found]], begin + at[is_found]
        if len(rows):
            progress.next_entry = int(numbers[-1]) + 1
            self._compare(queue, records, rows, entries, numbers)

    def _compare(
        self,
        queue: ConsumeQueue,
        records: RecordColumns,
        rows: NDArray[np.intp],
        entries: NDArray[np.void],
        numbers: NDArray[np.int64],
    ) -> None:
        agrees = (entries["physical_offset"] == records.places[rows]) & (entries["record_size"] == records.sizes[rows])
        if queue.layout is BATCH_UNIT:
            agrees &= (entries["base_offset"] == records.queue_offsets[rows]) & (
                entries["message_count"] == records.message_counts[rows]
            )
            agrees &= entries["store_timestamp"] == records.store_times[rows]
        self.joined.matched.add(queue.key, numbers[agrees])
        tags = entries["tags_code"].astype(np.int64)
        same_tags = tags == records.tags_codes[rows]
        if not same_tags.all():
            same_tags |= self._have_other_tags(queue.key, records, rows, tags, numbers, agrees)
        is_written = (entries["record_size"] != 0) | (entries["physical_offset"] != 0)
        for kind, wrong in (
            (NO_ENTRY, ~agrees & ~is_written),
            (OTHER_ENTRY, ~agrees & is_written),
            (OTHER_TAGS, agrees & ~same_tags),
        ):
            if wrong.any():
                entry = entries[int(np.argmax(wrong))]
                found = f"({int(entry['physical_offset'])}, {int(entry['record_size'])}, {int(entry['tags_code'])})"
                self.joined.add_mismatch(queue.key, kind, records, rows[wrong], found)

    def _have_other_tags(
        self,
        key: QueueKey,
        records: RecordColumns,
        rows: NDArray[np.intp],
        tags: NDArray[np.int64],
        numbers: NDArray[np.int64],
        agrees: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Return a mask of the tags codes that are not the expected ones but may be right.

        Such a code is either an address in the queue's extension, or a due time by another table of delay levels. It is
        treated as an address only if the rest of the entry agrees with its record and the store has extensions.
        """
        good = agrees & (tags <= MAX_ADDRESS) & self._extension.exists
        if good.any():
            good[good] = self._extension.agree(
                key, tags[good], records.tags_codes[rows[good]], records.store_times[rows[good]]
            )
        if key.topic == SCHEDULE_TOPIC:
            delays = tags - records.store_times[rows]
            odd = np.flatnonzero((tags != records.tags_codes[rows]) & (delays >= 0))
            for at in odd.tolist():
                counts = self.odd_delays.setdefault(key, {})
                count, first = counts.get(int(delays[at]), (0, int(numbers[at])))
                if len(counts) < RUNS_MAX:
                    counts[int(delays[at])] = count + 1, first
            good[odd] = True
        return good

    def has_records(self, key: QueueKey) -> bool:
        """Return whether a block had a record of the queue `key`. Only records that must have an entry are counted."""
        return key in self._progress

    def bounds_of(self, key: QueueKey) -> tuple[int, int] | None:
        """Return the lowest and the next queue offset of a queue, according to its entries and records.

        If the queue has no readable files, the lowest offset is 0. Returns None if it has no records either.
        """
        queue, progress = self._queues.get(key), self._progress.get(key)
        if queue is None or key in self._unreadable:
            return None if progress is None else (0, progress.next_offset)
        end = queue.written_end(self.joined.matched.end(key) or queue.search_written_end())
        first = self.joined.matched.begin(key)
        begin = queue.offset_of(end if first is None else first, end)
        next_offset = max(queue.offset_of(end, end), progress.next_offset if progress is not None else 0)
        queue.run.close()
        return begin, next_offset


def unreadable_queues(queues: dict[QueueKey, ConsumeQueue]) -> Iterator[tuple[QueueKey, StoreError]]:
    """Yield each queue whose files cannot be read, together with the error."""
    for key, queue in queues.items():
        fault = queue.run.fault()
        if fault is not None:
            yield key, fault
