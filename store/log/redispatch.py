"""Redispatch: recovery rebuilds missing consume-queue entries and index keys from the commit log.

`dispatch` works on columns, because recovery may have to read a whole log. `tests/support/dispatch_twin.py` does the
same record by record. Source: DefaultMessageStore#doReput, #doDispatch, IndexService#buildIndex (5.3).

`rewind_queues` moves the ends of queues back to the records with which `dispatch` starts, and no further. An entry that
points to no record or to a wrong one may have survived its record. But it may also be the damaged entry of a message
that recovery keeps. The log contains the right values, so recovery reads the log before it decides which of the two is
true.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.record import TRANSACTION_MASK, TRANSACTION_ROLLBACK, Record
from rmq_spark.store.format.record_batch import RecordColumns
from rmq_spark.store.log.consume_queue_writer import NewEntries
from rmq_spark.store.log.log_blocks import BLOCK_BYTES, log_blocks, needs_entry, sound_blocks
from rmq_spark.store.log.queue_registration import refuse_lost_queue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")


def rewind_queues(store: StoreFiles, keys: Iterable[QueueKey], physical_offset: int) -> None:
    """Set the end of each queue after its last entry for a record below `physical_offset`.

    These records all have entries, but any of the entries may be damaged. The bytes after the new ends may be anything.
    They are not cleared, but overwritten, mostly with the same bytes, so that a concurrent reader loses nothing.
    `clear_behind` removes the rest later.
    """
    begins = dict[QueueKey, int]()
    for key in keys:
        begin = store.queues.rewind(key, physical_offset, partial(is_of, store, key), store.log.segments.begin)
        if begin is not None:
            begins[key] = begin
    if begins:
        _skip_damaged(store, begins, physical_offset)


def is_of(store: StoreFiles, key: QueueKey, queue_offset: int, physical_offset: int) -> bool:
    """Return whether the record at `physical_offset` is the queue's message with queue offset `queue_offset`."""
    record = store.log.record_at(physical_offset)
    return isinstance(record, Record) and (record.topic, record.queue_id, record.queue_offset) == (
        key.topic.encode(),
        key.queue_id,
        queue_offset,
    )


def _skip_damaged(store: StoreFiles, begins: Mapping[QueueKey, int], end: int) -> None:
    """Set the end of each queue after the entries for its records below physical offset `end`, damaged or not.

    `begins` has the physical offset of each queue's last record with a valid entry, or -1 if there is none.
    """
    registered = store.registry.read()
    first_records = registered.queues if registered is not None else {}
    firsts = {key: begin if begin >= 0 else max(first_records.get(key, end), 0) for key, begin in begins.items()}
    # For each queue: the number of skipped entries, the queue offset after them, and the physical offset of the last
    # record.
    last = dict[QueueKey, tuple[int, int, int]]()
    for records in sound_blocks(store, min(firsts.values()), end):
        store.heartbeat()
        rows = np.flatnonzero(needs_entry(records))
        for key, first in firsts.items():
            if key.topic not in records.topics:
                continue
            count, offset, _ = last.get(key, (0, store.queues.next_offset(key), 0))
            mine = rows[
                (records.topic_numbers[rows] == records.topics.index(key.topic))
                & (records.queue_ids[rows] == key.queue_id)
                & (records.queue_offsets[rows] >= offset)
                & (records.places[rows] >= first)
            ]
            if len(mine):
                next_offset = int(records.queue_offsets[mine[-1]] + records.message_counts[mine[-1]])
                last[key] = count + len(mine), next_offset, int(records.places[mine[-1]])
    for key, (count, offset, physical_offset) in last.items():
        _LOG.error(
            "rmq: %s: entries of queue %s below queue offset %d are damaged. They were not changed, and the log still "
            "has their messages. Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log",
            store.root,
            key,
            offset,
        )
        store.queues.pass_over(key, count, offset, physical_offset)


@dataclass(frozen=True, slots=True)
class LastRecord:
    """The physical offset and the store time (ms) of the last record."""

    physical_offset: int
    store_time_ms: int


def dispatch(
    store: StoreFiles,
    begin: int,
    end: int,
    unit_begin: int,
    *,
    rewind: bool = False,
    lives: Mapping[QueueKey, int] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> LastRecord | None:
    """Add missing index keys for the records in [begin, end), and missing entries for those at or after `unit_begin`.

    If `rewind` is true, existing entries of records at or after `unit_begin` are written again. `lives` is the result
    of `last_lives` for these records; None means that it is computed first. Return the last record, or None if there
    are no records. Raises DamageError at bytes that are not a record, and if a queue ends before its next message in
    the log.
    """
    last = None
    if lives is None:
        lives = last_lives(store, max(begin, unit_begin), end, block_bytes)
    for records in log_blocks(store, begin, end, block_bytes):
        store.heartbeat()
        _put_entries(store, records, unit_begin, lives, rewind=rewind)
        _put_keys(store, records)
        last = LastRecord(int(records.places[-1]), int(records.store_times[-1]))
    return last


def last_lives(store: StoreFiles, begin: int, end: int, block_bytes: int = BLOCK_BYTES) -> dict[QueueKey, int]:
    """Return the physical offset of each queue's last record in [begin, end) that has queue offset 0.

    A queue starts at queue offset 0 again if its topic was deleted and created again. Its earlier messages are still in
    the log, but have no entries any more. Raises DamageError at bytes that are not a record. Changes nothing.
    """
    found = {}
    for records in log_blocks(store, begin, end, block_bytes):
        store.heartbeat()
        for row in np.flatnonzero(needs_entry(records) & (records.queue_offsets == 0)).tolist():
            key = QueueKey(records.topics[int(records.topic_numbers[row])], int(records.queue_ids[row]))
            found[key] = int(records.places[row])
    return found


def _put_entries(
    store: StoreFiles, records: RecordColumns, unit_begin: int, lives: Mapping[QueueKey, int], *, rewind: bool
) -> None:
    """Append the missing entries of the records, queue by queue."""
    rows = np.flatnonzero(needs_entry(records) & (records.places >= unit_begin))
    if not len(rows):
        return
    rows = rows[np.lexsort((rows, records.queue_ids[rows], records.topic_numbers[rows]))]
    topics, queue_ids = records.topic_numbers[rows], records.queue_ids[rows]
    edges = np.flatnonzero((topics[1:] != topics[:-1]) | (queue_ids[1:] != queue_ids[:-1])) + 1
    for of_queue in np.split(rows, edges):
        key = QueueKey(records.topics[int(records.topic_numbers[of_queue[0]])], int(records.queue_ids[of_queue[0]]))
        of_queue = of_queue[records.places[of_queue] >= lives.get(key, 0)]
        if rewind and len(of_queue):
            rewind_queues(store, (key,), int(records.places[of_queue[0]]))
        _put_missing(store, key, records, of_queue, unit_begin)


def _put_missing(
    store: StoreFiles, key: QueueKey, records: RecordColumns, rows: NDArray[np.intp], unit_begin: int
) -> None:
    """Append the missing entries of one queue's records. Raises DamageError if the queue has lost other entries.

    Records before the queue's last one are skipped, because their topic was deleted and created again. If an earlier
    record has the same queue offset, the later one is skipped too, as a broker does
    (ConsumeQueue#putMessagePositionInfo).
    """
    next_offset, last_place = store.queues.next_offset(key), store.queues.last_place(key)
    missing = rows[(records.queue_offsets[rows] >= next_offset) & (records.places[rows] > last_place)]
    if not len(missing):
        return
    is_new = not next_offset and not store.queues.has_files(key)
    begin = int(records.queue_offsets[missing[0]]) if is_new else next_offset
    missing = missing[records.queue_offsets[missing] >= np.maximum.accumulate(_expected(records, missing, begin))]
    _refuse_gap(store, key, records, missing, _expected(records, missing, begin))
    if begin != next_offset:
        if unit_begin > store.log.segments.begin:
            refuse_lost_queue(store, key, unit_begin)
        store.queues.begin_at(key, begin)
    counts = records.message_counts[missing]
    store.queues.put(
        key,
        NewEntries(
            records.places[missing],
            records.sizes[missing],
            records.tags_codes[missing],
            records.queue_offsets[missing],
            records.store_times[missing],
            None if (counts == 1).all() else counts,
        ),
    )


def _expected(records: RecordColumns, rows: NDArray[np.intp], begin: int) -> NDArray[np.int64]:
    """Return the queue offset that each row should have, which is the one after the previous row's messages.

    The first row should have `begin`.
    """
    ends = records.queue_offsets[rows] + records.message_counts[rows]
    return np.concatenate([np.array([begin], np.int64), ends])[: len(rows)]


def _refuse_gap(
    store: StoreFiles, key: QueueKey, records: RecordColumns, rows: NDArray[np.intp], expected: NDArray[np.int64]
) -> None:
    """Raise DamageError if a row does not have its expected queue offset."""
    bad = np.flatnonzero(records.queue_offsets[rows] != expected)
    if not len(bad):
        return
    row, end = rows[bad[0]], int(expected[bad[0]])
    found, physical_offset = int(records.queue_offsets[row]), int(records.places[row])
    segment = store.log.segments.holding(physical_offset)
    raise DamageError(
        f"queue {key} ends at queue offset {end}, and the next message in the log has {found}",
        segment.path if segment else store.root,
        physical_offset - (segment.begin if segment else 0),
        end,
        found,
    )


def _put_keys(store: StoreFiles, records: RecordColumns) -> None:
    """Add the keys of records to the index. Keys that the index has are skipped (IndexService#buildIndex)."""
    rows, hashes = records.key_rows, records.key_hashes
    is_rolled_back = records.sys_flags & TRANSACTION_MASK == TRANSACTION_ROLLBACK
    if is_rolled_back.any():
        kept = ~is_rolled_back[rows]
        rows, hashes = rows[kept], hashes[kept]
    store.index.put_many(hashes, records.places[rows], records.store_times[rows], skip_known=True)
