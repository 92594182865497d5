"""Queue reader: reads a range of one queue as Arrow record batches, searches by time, and estimates range statistics.

`read_range` reads entries, then their records, then the requested columns. It verifies each entry against its record.
So it needs no lock, and it need not find the log's end: the caller passes the end of the range. One batch at a time is
in memory, and its rows and bytes are limited.

A filter by tags needs only the entries, 20 bytes per message. So a few matching messages among many are found without
reading the commit log. Entries that are read together are checked against each other, including those that do not
match. Without this check, most damaged queues would look like queues without matches.

`TimeSearch` finds the queue offset for a point in time by each of RocketMQ's three rules. The store times of a queue
never decrease, except where a clock was set back. So each rule is a binary search, and each step reads one entry and
the header of one record. Source: ConsumeQueue#getOffsetInQueueByTime (5.3 has BoundaryType LOWER and UPPER; 4.9 has no
BoundaryType).

`RangeStatistics` reads only entries. It returns the sizes of messages, and the share of them that passes a filter.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.backend import ReadBatch
from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.columns import decode, empty_batch
from rmq_spark.store.format.record import Record
from rmq_spark.store.format.record_headers import RecordFault, RecordRun
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.model import QueueKey

BATCH_ROWS = 32_768
BATCH_BYTES = 16 << 20  # size of the records, as stored in the log
_SCANNED_ENTRIES = 1 << 20  # after this many entries without a full batch the reader reports its progress
_MAX_PHYSICAL_OFFSET = 1 << 62  # longer than any log; above it sums of offsets and sizes would overflow


def filters_entries(queue: ConsumeQueue, wanted: RowFilter | None) -> bool:
    """Return whether the filter `wanted` can rule out messages of the queue by their entries alone."""
    return wanted is not None and wanted.asks_units_of(queue.key.topic, are_batches=queue.are_batches)


def messages_within(queue: ConsumeQueue, entries: Entries, begin: int, end: int, *, looked_at: int) -> int:
    """Return how many messages with queue offsets in [begin, end) the scanned entries hold.

    `looked_at` is the number of scanned entries, and `entries` are those of them that were chosen.
    """
    if entries.message_counts is None:
        return looked_at  # one message per entry, and only entries of the range are scanned
    ends = np.minimum(entries.queue_offsets + entries.message_counts, end)
    return int(np.maximum(ends - np.maximum(entries.queue_offsets, begin), 0).sum())


def next_entries(queue: ConsumeQueue, number: int, last: int, wanted: RowFilter | None) -> tuple[Entries, int]:
    """Return the entries of the next batch, and the number after the last scanned entry. The scan starts at `number`.

    The batch has at most BATCH_ROWS entries and BATCH_BYTES of records, but at least one entry if any may match. Raises
    DamageError if entries are missing or if their records are not in ascending order, and StoreChangedError if a file
    is removed during the read.
    """
    if wanted is not None and filters_entries(queue, wanted):
        return _next_wanted(queue, number, last, wanted)
    entries = _read(queue, number, last)
    if int(entries.sizes.sum()) > BATCH_BYTES:
        fitting = int(np.searchsorted(np.cumsum(entries.sizes), BATCH_BYTES, side="right"))
        entries = entries.part(0, max(fitting, 1))
    fault = _disorder(queue, number, entries)
    if fault is not None:
        raise fault
    return entries, number + len(entries)


def _next_wanted(queue: ConsumeQueue, number: int, last: int, wanted: RowFilter) -> tuple[Entries, int]:
    parts: list[Entries] = []
    count, size, end, stop = 0, 0, 0, min(last, number + _SCANNED_ENTRIES)
    while number < stop and count < BATCH_ROWS and size < BATCH_BYTES:
        entries = _read(queue, number, stop)
        fault = _disorder(queue, number, entries)
        if fault is not None and not parts:
            raise fault
        if fault is not None or int(entries.physical_offsets[0]) < end:
            break  # the parts found so far are correct; the next call reports the fault
        end = int(entries.physical_offsets[-1] + entries.sizes[-1])
        found = entries.take(np.flatnonzero(wanted.may_match(entries.tags_codes)))
        fitting = min(BATCH_ROWS - count, int(np.searchsorted(np.cumsum(found.sizes), BATCH_BYTES - size, "right")))
        fitting = fitting if count else max(fitting, 1)
        number = int(found.queue_offsets[fitting]) if fitting < len(found) else number + len(entries)
        parts.append(found.part(0, fitting))
        count += len(parts[-1])
        size += int(parts[-1].sizes.sum())
        if fitting < len(found):
            break
    return Entries.joined(parts), number


def _read(queue: ConsumeQueue, number: int, last: int) -> Entries:
    entries = queue.read(number, min(number + BATCH_ROWS, last))
    if not len(entries):
        path, position = queue.run.path_of(number)
        raise DamageError(f"entry number {number} of {queue.key} is missing", path, position)
    return entries


def _disorder(queue: ConsumeQueue, first: int, entries: Entries) -> DamageError | None:
    """Return the error for entries whose records are not in ascending order. Return None if they are.

    `first` is the number of the first of `entries`.
    """
    ends = entries.physical_offsets + entries.sizes
    if (
        entries.message_counts is None
        and int(entries.sizes.min()) > 0
        and entries.physical_offsets[0] >= 0
        and int(entries.physical_offsets.max()) <= _MAX_PHYSICAL_OFFSET
        and (entries.physical_offsets[1:] >= ends[:-1]).all()
    ):
        return None  # the usual case: nothing to locate
    beyond = entries.physical_offsets > _MAX_PHYSICAL_OFFSET
    bad = np.flatnonzero(beyond | (entries.sizes <= 0) | (np.diff(entries.physical_offsets, prepend=-1) <= 0))
    overlapping = np.flatnonzero(entries.physical_offsets[1:] < ends[:-1])
    if entries.message_counts is not None and not len(bad) and not len(overlapping):
        next_offsets = entries.queue_offsets + entries.message_counts
        overlapping = np.flatnonzero(entries.queue_offsets[1:] != next_offsets[:-1])
    if not len(bad) and not len(overlapping):
        return None
    at = int(bad[0]) if len(bad) else int(overlapping[0]) + 1
    path, position = queue.run.path_of(first + at)
    return DamageError(
        f"the entry of queue offset {entries.queue_offsets[at]} of {queue.key}",
        path,
        position,
        f"a record after physical offset {ends[at - 1] if at else 0}",
        f"({entries.physical_offsets[at]}, {entries.sizes[at]})",
    )


def read_range(
    log: CommitLog,
    queue: ConsumeQueue,
    begin: int,
    end: int,
    entries_end: int,
    columns: Sequence[str],
    limits: DecodeLimits,
    wanted: RowFilter | None = None,
) -> Iterator[ReadBatch]:
    """Yield the messages with queue offsets [begin, end) in order, at most BATCH_ROWS records per batch.

    If the filter `wanted` is given, yield only matching messages. For each other message its entry is read; its header
    and properties are read only if the entry does not rule it out. `entries_end` is the number after the queue's last
    entry.

    Raises DamageError if an entry disagrees with its record or a record cannot be decoded, and StoreChangedError if
    files are removed during the read. All rows that were yielded before an error are correct.
    """
    # Allocating and freeing one block as large as a batch makes the allocator keep freed memory for the next batches.
    # Otherwise every batch returns its pages to the kernel, and the next one faults them in again.
    np.empty(BATCH_BYTES, np.uint8)
    count = 0
    number = queue.unit_of(begin, entries_end)
    last = queue.unit_of(end - 1, entries_end) + 1
    while number < last:
        entries, next_number = next_entries(queue, number, last, wanted)
        count += messages_within(queue, entries, begin, end, looked_at=next_number - number)
        number, until = next_number, min(queue.offset_behind(entries, next_number), end)
        if not len(entries):
            yield ReadBatch(empty_batch(columns), until)
        is_scattered = filters_entries(queue, wanted)
        yield from decode_entries_of(
            log, queue.key, entries, begin, until, columns, limits, wanted, is_scattered=is_scattered
        )
    if count != end - begin:
        path, position = queue.run.path_of(number)
        what = f"entries of queue {queue.key} for the queue offsets [{begin}, {end})"
        raise DamageError(what, path, position, f"{end - begin} messages", count)


def decode_entries_of(
    log: CommitLog,
    queue: QueueKey,
    entries: Entries,
    begin: int,
    end: int,
    columns: Sequence[str],
    limits: DecodeLimits,
    wanted: RowFilter | None = None,
    *,
    is_scattered: bool = False,
) -> Iterator[ReadBatch]:
    """Yield the messages of `entries` with queue offsets in [begin, end), as batches of the columns.

    The records of `entries` must be in ascending order. If the filter `wanted` is given, yield only matching messages.
    `is_scattered` means that a filter left out entries between these. Raises DamageError if an entry disagrees with its
    record or a record cannot be decoded, and StoreChangedError if files were removed.
    """
    for stretch in log.stretches(entries.physical_offsets, entries.sizes, are_scattered=is_scattered):
        first, next_offset = stretch.first, begin
        while first < stretch.last and next_offset < end:
            part = entries.part(first, stretch.last)
            run = RecordRun(
                stretch.buffer,
                stretch.positions[first - stretch.first :],
                part.sizes,
                part.physical_offsets,
                part.queue_offsets,
                queue.topic,
                queue.queue_id,
                part.message_counts,
            )
            try:
                batch, next_offset = decode(run, columns, begin, end, limits, wanted, expects_all=is_scattered)
            except RecordFault as fault:
                stretch.check()
                raise _damage(log, queue, part, fault) from fault
            stretch.check()  # without this check the batch might contain zeros of a truncated file
            first += int(np.searchsorted(part.queue_offsets, next_offset))
            if next_offset == end and first < len(entries):
                next_offset = int(entries.queue_offsets[first])
            yield ReadBatch(batch, next_offset)


def _damage(log: CommitLog, queue: QueueKey, entries: Entries, fault: RecordFault) -> DamageError:
    at = int(entries.physical_offsets[fault.row])
    segment = log.segments.holding(at)
    assert segment is not None  # the stretch came from it
    what = f"{fault.what}, message {int(entries.queue_offsets[fault.row])} of queue {queue} at physical offset {at}"
    return DamageError(what, segment.path, at - segment.begin, fault.expected, fault.found)


LOWER = "lower"  # the first message stored at or after the time; if there is none, the queue's end
UPPER = "upper"  # the last message stored at or before the time; if there is none, the first message
# As in 4.9: any message stored at exactly the time. If there is none, the nearest one in a file chosen by its mtime.
NEAREST = "nearest"
RULES = (LOWER, UPPER, NEAREST)


class TimeSearch:
    """A search by store time among the entries with the numbers [first, end) of one queue."""

    def __init__(self, log: CommitLog, queue: ConsumeQueue, first: int, end: int) -> None:
        self._log, self._queue, self._first, self._end = log, queue, first, end

    def store_time(self, number: int) -> int:
        """Return the store time (ms) of the record of entry `number`.

        Raises DamageError if there is no record at the physical offset in the entry.
        """
        physical_offset = int(self._queue.read(number, number + 1).physical_offsets[0])
        record = self._log.record_at(physical_offset)
        if not isinstance(record, Record):
            path, position = self._queue.run.path_of(number)
            raise DamageError("consume-queue entry", path, position, "the physical offset of a record", physical_offset)
        return record.store_timestamp

    def unit_at(self, time_ms: int, rule: str) -> int:
        """Return the number, in [first, end], of the entry that `rule` chooses for the time `time_ms` (ms)."""
        assert rule in RULES, rule
        if self._first >= self._end:
            return self._first
        if rule == NEAREST:
            return self._nearest(time_ms)
        if rule == LOWER:
            return self._first_stored_from(time_ms)
        return max(self._first_stored_from(time_ms + 1) - 1, self._first)

    def _first_stored_from(self, time_ms: int) -> int:
        begin, end = self._first, self._end
        while begin < end:
            middle = (begin + end) // 2
            if self.store_time(middle) >= time_ms:
                end = middle
            else:
                begin = middle + 1
        return begin

    def _nearest(self, time_ms: int) -> int:
        low, high = self._file_by_mtime(time_ms)
        left = right = None
        while low <= high:
            middle = (low + high) // 2
            stored = self.store_time(middle)
            if stored == time_ms:
                return middle
            if stored > time_ms:
                high, right = middle - 1, (middle, stored)
            else:
                low, left = middle + 1, (middle, stored)
        if left is None or right is None:
            chosen = left or right
            assert chosen is not None  # the file has at least one entry
            return chosen[0]
        return right[0] if time_ms - left[1] > right[1] - time_ms else left[0]

    def _file_by_mtime(self, time_ms: int) -> tuple[int, int]:
        """Return the numbers of the first and the last entry of the file that 4.9 searches.

        Source: MappedFileQueue#getMappedFileByTime.
        """
        size = self._queue.layout.itemsize
        chosen = None
        for segment in self._queue.run.segments:
            begin, end = max(segment.begin // size, self._first), min(segment.end // size, self._end)
            if begin >= end:
                continue
            chosen = begin, end - 1
            if files.modified_ms(segment.path) >= time_ms:
                break
        assert chosen is not None  # [first, end) is not empty
        return chosen


_FEW_ENTRIES, _MANY_ENTRIES = 1 << 7, 1 << 16  # entries whose sizes are read at once: at first, and at most
_SAMPLED_ENTRIES = 64  # adjacent entries in each sample


class RangeStatistics:
    """Statistics of a range [begin, end) of queue offsets, from its entries alone, for planning.

    The range must exist and must not be empty. `entries_end` is the number after the queue's last entry. Entries are
    not compared with their records. Each method closes the queue's files at its end.
    """

    def __init__(self, queue: ConsumeQueue, begin: int, end: int, entries_end: int) -> None:
        self._queue, self._begin, self._end = queue, begin, end
        self._first, self._last = queue.unit_of(begin, entries_end), queue.unit_of(end - 1, entries_end) + 1

    def record_bytes(self) -> int:
        """Return the size in the log (bytes) of the records whose first message is in the range."""
        return sum(int(sizes.sum()) for _, sizes in self._sizes())

    def offset_within_bytes(self, max_bytes: int) -> int:
        """Return the largest queue offset <= `end` such that the records before it take at most `max_bytes`.

        Only records of the range are added up.
        """
        left = max_bytes
        for offsets, sizes in self._sizes():
            total = np.cumsum(sizes)
            if int(total[-1]) > left:
                return max(self._begin, int(offsets[int(np.searchsorted(total, left, side="right"))]))
            left -= int(total[-1])
        return self._end

    def wanted_share(self, wanted: RowFilter, samples: int) -> float:
        """Estimate the share (0 to 1) of the entries that pass a filter. Return 1.0 if the filter cannot use entries.

        Reads `samples` groups of adjacent entries, spread evenly over the range. In a short range, reads all entries.
        """
        if not filters_entries(self._queue, wanted):
            return 1.0
        count = passed = 0
        starts = np.linspace(self._first, max(self._last - _SAMPLED_ENTRIES, self._first), samples).astype(np.int64)
        number = self._first
        for start in starts.tolist():
            number = max(number, start)
            entries = self._queue.read(number, min(start + _SAMPLED_ENTRIES, self._last))
            number += len(entries)
            count += len(entries)
            passed += int(wanted.may_match(entries.tags_codes).sum())
        self._queue.run.close()
        return passed / count if count else 1.0

    def _sizes(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield pairs of arrays with equal length: queue offsets, and the sizes of their records (bytes).

        The first pairs are short and later ones long, because the caller may stop after a few entries.
        """
        number, step = self._first, _FEW_ENTRIES
        while number < self._last:
            entries = self._queue.read(number, min(number + step, self._last))
            step = min(step * 8, _MANY_ENTRIES)
            # If the range begins inside a record of several messages, the record counts in the range before this one.
            yield entries.queue_offsets, np.where(entries.queue_offsets < self._begin, 0, entries.sizes)
            number += len(entries)
        self._queue.run.close()
