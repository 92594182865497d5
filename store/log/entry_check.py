"""Validation of consume-queue entries against their records, many at once as columns, or one by one.

`compare_headers` compares thousands of entries with the headers of their records. Headers do not contain the topic. So
`EntryValidator` checks the last entries of a queue one by one for `log_end.LogEnd`, and `missing_entry_fault` the
messages whose entry is missing. They decide whether an entry is late (not written yet), stale (left by a truncation) or
damaged.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.byte_ranges import Bytes
from rmq_spark.store.format.checkpoint import Checkpoint
from rmq_spark.store.format.consume_queue_entry import MAX_ADDRESS, is_address, message_count
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Texts
from rmq_spark.store.format.properties import TAGS, parse
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    MAGIC_V1,
    MAGIC_V2,
    MAX_RECORD_BYTES,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    RECORD_HEAD_BORN_V6,
    Blank,
    Record,
    Torn,
)
from rmq_spark.store.format.record_batch import NotWholeError, WholeRecords
from rmq_spark.store.format.record_headers import gather
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.log.record_chain import RecordChain, ShutdownState
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC

_MANY_QUEUES = 16  # from this many, reading all at once is faster
_BLOCK_RECORDS = 1 << 13  # so few that their headers stay in the processor's cache during the comparison


def compare_headers(
    log: CommitLog,
    physical_offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    queue_ids: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return two arrays: whether each entry agrees with its record's header, and the record's store time (ms).

    Each argument after `log` has one element per entry. `physical_offsets` must ascend, `sizes` are in bytes, and
    `offsets` are queue offsets. If an entry does not agree, its store time is meaningless.
    """
    agree = np.zeros(len(physical_offsets), np.bool_)
    times = np.zeros(len(physical_offsets), np.int64)
    begins = np.array([segment.begin for segment in log.segments.segments], np.int64)
    if not len(begins) or not len(physical_offsets):
        return agree, times
    holding = np.searchsorted(begins, physical_offsets, side="right") - 1
    segment_ends = np.where(holding >= 0, begins[holding] + log.segments.size, 0)
    possible = (sizes >= MIN_RECORD_BYTES) & (sizes <= MAX_RECORD_BYTES) & (holding >= 0)
    possible &= sizes <= segment_ends - physical_offsets  # not with a sum, which could overflow
    rows = np.flatnonzero(possible)
    # Stale entries may overlap live ones, so that records do not end in the order in which they begin.
    for chosen in _split_disordered(physical_offsets[rows] + sizes[rows], rows):
        for stretch in log.stretches(physical_offsets[chosen], sizes[chosen]):
            part = chosen[stretch.first : stretch.last]
            for at in range(0, len(part), _BLOCK_RECORDS):
                block = part[at : at + _BLOCK_RECORDS]
                run = (physical_offsets[block], sizes[block], offsets[block], queue_ids[block])
                agree[block], times[block] = _headers_agree(
                    stretch.buffer, stretch.positions[at : at + _BLOCK_RECORDS], *run
                )
            stretch.check()
    return agree, times


def _headers_agree(
    buffer: Bytes,
    positions: NDArray[np.int64],
    physical_offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    queue_ids: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return two arrays: whether each record matches its entry, and the record's store time (ms) if it matches."""
    headers = gather(buffer, positions, RECORD_HEAD)
    good = (
        (headers["physical_offset"] == physical_offsets)
        & (headers["total_size"] == sizes)
        & (headers["queue_offset"] == offsets)
        & (headers["queue_id"] == queue_ids)
        & ((headers["magic"] == MAGIC_V1) | (headers["magic"] == MAGIC_V2))
    )
    times = headers["store_timestamp"].astype(np.int64)
    v6 = np.flatnonzero(good & (headers["sys_flag"] & BORN_HOST_V6 != 0))
    if len(v6):
        good[v6] = sizes[v6] >= RECORD_HEAD_BORN_V6.itemsize + 3
        v6 = v6[good[v6]]
        times[v6] = gather(buffer, positions[v6], RECORD_HEAD_BORN_V6)["store_timestamp"]
    return good, times


def _split_disordered(ends: NDArray[np.int64], rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Split rows into pieces whose `ends` never decrease."""
    steps = np.flatnonzero(ends[1:] < ends[:-1]) + 1
    return [piece for piece in np.split(rows, steps) if len(piece)]


class EntryValidator:
    """Checks single entries of one store against the log. Keeps no state.

    `last_indexed` returns the physical offset of the last message in the key index, or -1 if the index is empty.
    """

    def __init__(self, log: CommitLog, checkpoint: Callable[[], Checkpoint], last_indexed: Callable[[], int]) -> None:
        self._log, self._checkpoint, self._last_indexed = log, checkpoint, last_indexed

    def fault_after_end(
        self,
        queues: Mapping[QueueKey, ConsumeQueue],
        key: QueueKey,
        number: int,
        entries: Entries,
        agreeing: int,
        chained: RecordChain,
        unnamed: Mapping[int, Record],
    ) -> DamageError | None:
        """Return the error for written entries after a queue's end, in a store that was shut down cleanly.

        Return None if there are none, or if a truncation of the log can have left them. `entries` begin at entry number
        `number`. The first `agreeing` of them agree with the headers of their records. `unnamed` has the messages of
        the queue's topic for which no entry agrees, by physical offset.
        """
        if not len(entries):
            return None
        queue = queues[key]
        if agreeing:
            fault = self._fault_of_agreeing(queues, queue, number, entries)
        else:
            fault = self._fault_beyond_log(queue, number, int(entries.physical_offsets[0]), chained)
        return fault or self._fault_of_mismatch(queue, number, entries, unnamed)

    def _fault_beyond_log(
        self, queue: ConsumeQueue, number: int, physical_offset: int, chained: RecordChain
    ) -> DamageError | None:
        """Return the error for an entry whose record is at or after the log's end.

        Return None if the entry can be stale.

        A truncation leaves complete records after the log's end, which are older than the newest message below the end.
        If the bytes are zeros, a torn record or a newer record, damage or a power cut caused this: an entry may survive
        a power cut although its record does not. A broker that recovers such a store moves the queue's end in memory,
        and leaves those entries on disk (ConsumeQueue#truncateDirtyLogicFiles, 4.9, 5.3).
        """
        if physical_offset < chained.end or self._checkpoint().confirm_phy_offset == chained.end > 0:
            return None
        record = self._log.record_at(physical_offset)
        if isinstance(record, Record) and record.store_timestamp < chained.newest_ms():
            return None
        if chained.is_all_that_was_known(self._checkpoint(), self._last_indexed):
            return None
        path, position = queue.run.path_of(number)
        return DamageError(
            f"an entry of queue {queue.key} beyond the end of the log, which is at {chained.end}",
            path,
            position,
            f"a record at physical offset {physical_offset}",
            record.why if isinstance(record, Torn) else "another record",
        )

    def _fault_of_mismatch(
        self, queue: ConsumeQueue, number: int, entries: Entries, unnamed: Mapping[int, Record]
    ) -> DamageError | None:
        """Return the error for an entry that points to a message whose entry is missing. Return None if there is none.

        Such an entry has the physical offset and size of a message of its topic for which no entry agrees. Every
        message has an entry and this message has no other one, so the entry belongs to it. Since they disagree, the
        entry or the record is damaged. A stale entry cannot be meant: if it points to a newer record, that record has
        an entry of its own.
        """
        for at in np.flatnonzero(np.isin(entries.physical_offsets, list(unnamed))).tolist():
            record = unnamed[int(entries.physical_offsets[at])]
            if int(entries.sizes[at]) == record.total_size:
                path, position = queue.run.path_of(number + at)
                return DamageError(
                    f"an entry of queue {queue.key} for the record at physical offset {record.physical_offset}",
                    path,
                    position,
                    f"queue offset {int(entries.queue_offsets[at])} of queue {queue.key.queue_id} in the record",
                    f"queue offset {record.queue_offset} of queue {record.queue_id}",
                )
        return None

    def _fault_of_agreeing(
        self, queues: Mapping[QueueKey, ConsumeQueue], queue: ConsumeQueue, number: int, entries: Entries
    ) -> DamageError | None:
        """Return the error for an entry that agrees with its record's header but is not valid.

        Return None if it is stale.

        The entry is stale if the record belongs to another queue that has an entry for it.
        """
        physical_offset = int(entries.physical_offsets[0])
        record = self._log.record_at(physical_offset)
        if isinstance(record, Record):
            owner = queues.get(QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id))
            if owner is not None and owner is not queue:
                if owner.run.is_damaged():
                    return None  # it is unknown which entries the queue has
                if record.queue_offset >= owner.run.begin:
                    end = owner.search_written_end()
                    is_in_queue = record.queue_offset < owner.offset_of(end, end)
                    at = owner.unit_of(record.queue_offset, end) if is_in_queue else end
                    if physical_offset in owner.read(at, at + 1).physical_offsets:
                        return None
        path, position = queue.run.path_of(number)
        found = record.why if isinstance(record, Torn) else "a record that disagrees with it"
        return DamageError(f"an entry of queue {queue.key}", path, position, "one for a complete record", found)

    def fault_of_older_end(self, queue: ConsumeQueue, end: int) -> DamageError | None:
        """Return the error if a queue's last entry does not match its record. Return None if it matches.

        Call it only for a queue that has no entries for records in the last segment. `end` is the number after its last
        entry.
        """
        entries = queue.read(max(end - 1, queue.run.begin), end)
        if not len(entries) or int(entries.physical_offsets[0]) < self._log.segments.begin:
            return None  # the queue is empty, or its messages expired
        if self.confirm(queue.key, entries, 1, ShutdownState.CLOSED):
            return None
        record = self._log.record_at(int(entries.physical_offsets[0]))
        path, position = queue.run.path_of(end - 1)
        found = record.why if isinstance(record, Torn) else "a record that disagrees with it"
        return DamageError(f"the last entry of queue {queue.key}", path, position, "one for its record", found)

    def find_good(self, last: Mapping[QueueKey, Entries], closing: ShutdownState) -> set[QueueKey]:
        """Return queues of whose last entries `confirm` removes none. It may return fewer than there are.

        `last` has the last entry of each queue. Each has one message, and agrees with the header of its record.
        """
        if len(last) < _MANY_QUEUES:
            return set()
        entries = Entries.joined(list(last.values()))
        order = np.argsort(entries.physical_offsets, kind="stable")
        names = list(last)
        entries, keys = entries.take(order), [names[at] for at in order.tolist()]
        if (np.diff(entries.physical_offsets) < entries.sizes[:-1]).any():
            return set()
        good: set[QueueKey] = set()
        with suppress(StoreError, NotWholeError):
            for stretch in self._log.stretches(entries.physical_offsets, entries.sizes, are_scattered=True):
                part, asked = entries.part(stretch.first, stretch.last), keys[stretch.first : stretch.last]
                whole = WholeRecords.of(stretch.buffer, stretch.positions, stretch.positions + part.sizes)
                topics = pa.array([key.topic.encode() for key in asked], pa.binary())
                agree = pc.equal(whole.topics(), topics).to_numpy(zero_copy_only=False)
                if closing is not ShutdownState.CLOSED:
                    hashes = Texts.of(whole.pairs().column(TAGS)).java_hashes()
                    agree &= (part.tags_codes == hashes) | (part.tags_codes <= MAX_ADDRESS)
                stretch.check()
                good.update(key for key, agrees in zip(asked, agree.tolist(), strict=True) if agrees)
        return good

    def confirm(self, key: QueueKey, entries: Entries, last: int, closing: ShutdownState) -> int:
        """Return how many of the first `last` entries remain if trailing stale or partly written entries are removed.

        This completes `compare_headers`, which does not compare topics. In a queue that a broker truncated, a stale
        entry may point to a newer record of another topic with the same queue id and queue offset. And while an entry
        is being written, its physical offset may be visible before its tags code.
        """
        while last:
            record = self._log.record_at(int(entries.physical_offsets[last - 1]))
            same = isinstance(record, Record) and record.topic.decode("utf-8", "replace") == key.topic
            counted = entries.message_counts is None or int(entries.message_counts[last - 1]) == message_count(record)
            if (
                same
                and counted
                and (closing is ShutdownState.CLOSED or _tags_agree(key, int(entries.tags_codes[last - 1]), record))
            ):
                break
            last -= 1
        return last


@dataclass(frozen=True, slots=True)
class NextEntry:
    """The entry at a queue's end, which belongs to the queue's next message.

    `queue_offset` is that message's queue offset. `found` is the (physical offset, size) that the entry has on disk, or
    None if the entry is not written. `path` and `position` (bytes) are the entry's place. In a live store only
    `queue_offset` is set.
    """

    queue_offset: int
    found: tuple[int, int] | None = None
    path: str = ""
    position: int = 0


def read_next_entry(queue: ConsumeQueue, end: int, closing: ShutdownState) -> NextEntry:
    """Read the entry at the queue's end, number `end`. In a live store, only find the queue offset.

    The queue has no open file afterwards.
    """
    expected = NextEntry(queue.offset_of(end, end))
    if closing is not ShutdownState.LIVE:
        entries = queue.read(end, end + 1)
        is_written = len(entries) > 0 and int(entries.sizes[0]) > 0
        found = (int(entries.physical_offsets[0]), int(entries.sizes[0])) if is_written else None
        expected = NextEntry(expected.queue_offset, found, *queue.run.path_of(end))
    queue.run.close()  # a store may have more queues than a process may have open files
    return expected


def missing_entry_fault(
    key: QueueKey, record: Record, expected: NextEntry, closing: ShutdownState
) -> DamageError | None:
    """Return the error if a record's entry is missing. Return None if the entry may only be late.

    `expected` is the entry at the end of the record's queue.
    """
    if closing is ShutdownState.LIVE:
        return None
    if closing is ShutdownState.CRASHED:
        # If the entry points to this record, its writer crashed before it had written the whole entry.
        is_next = record.queue_offset == expected.queue_offset
        if not is_next or expected.found in (None, (record.physical_offset, record.total_size)):
            return None
    found = "nothing" if expected.found is None else str(expected.found)
    return no_entry_error(record, key, expected.path, expected.position, found)


def no_entry_error(record: Record, key: QueueKey, path: str, position: int, found: str = "nothing") -> DamageError:
    """Return the error for a message that has no entry.

    `path` and `position` (bytes) are where the entry should be, and `found` describes what is there.
    """
    return DamageError(
        f"the entry of queue offset {record.queue_offset} of {key}, whose record is at physical offset "
        f"{record.physical_offset}",
        path,
        position,
        f"({record.physical_offset}, {record.total_size})",
        found,
    )


def no_queue_error(record: Record, key: QueueKey) -> DamageError:
    """Return the error for a message whose queue has no files."""
    return DamageError(
        f"queue {key} has no files, and the log has a message of it at physical offset {record.physical_offset}",
        f"{filenames.CONSUME_QUEUE}/{key}",
        0,
        f"({record.physical_offset}, {record.total_size})",
        "nothing",
        "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log. If a broker deleted the topic and "
        "created it again, send the queue's first message through a broker.",
    )


def _tags_agree(key: QueueKey, tags_code: int, record: Record | Blank | Torn) -> bool:
    """Return whether an entry's tags code matches its record's tags (MessageExtBrokerInner#tagsString2tagsCode)."""
    if key.topic == SCHEDULE_TOPIC or is_address(tags_code) or not isinstance(record, Record):
        return True  # the tags code is not a hash but a due time, or an address in the queue's extension
    tags = parse(record.properties).get(TAGS)
    return tags_code == (string_hash(tags) if tags else 0)
