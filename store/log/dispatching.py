"""Units and index keys made anew from the log, by columns: for recovery, which may have all of a log to go through.

`store/testing/dispatch_twin.py` does the same record by record.
Source: DefaultMessageStore#doReput, #doDispatch, IndexService#buildIndex (5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.record import TRANSACTION_MASK, TRANSACTION_ROLLBACK
from rmq_spark.store.format.record_columns import RecordColumns
from rmq_spark.store.log.log_blocks import BLOCK_BYTES, gets_unit, log_blocks
from rmq_spark.store.log.queue_registration import refuse_lost_queue
from rmq_spark.store.log.queue_writer import NewUnits
from rmq_spark.store.log.settled_units import rewind_queues
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class LastRecord:
    """Where the last record begins, and when it was stored (ms)."""

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
    """Make the keys that are missing for the records of [begin, end), and from `unit_begin` on the units.

    With `rewind` units that are there from `unit_begin` on are written again. `lives` are the `last_lives` of those
    records, None to look for them first. Return the last record, None without any. Raises DamageError for what is no
    record, and for a queue that ends before the next message in the log.
    """
    last = None
    if lives is None:
        lives = last_lives(store, max(begin, unit_begin), end, block_bytes)
    for records in log_blocks(store, begin, end, block_bytes):
        store.note_progress()
        _put_units(store, records, unit_begin, lives, rewind=rewind)
        _put_keys(store, records)
        last = LastRecord(int(records.places[-1]), int(records.store_times[-1]))
    return last


def last_lives(store: StoreFiles, begin: int, end: int, block_bytes: int = BLOCK_BYTES) -> dict[QueueKey, int]:
    """Return where in [begin, end) each queue began at queue offset 0, by physical offset; the last time if several.

    A queue begins anew when its topic was deleted and made again: what it held before is still in the log, and has no
    units any more. Raises DamageError for what is no record; changes nothing.
    """
    found = {}
    for records in log_blocks(store, begin, end, block_bytes):
        store.note_progress()
        for row in np.flatnonzero(gets_unit(records) & (records.queue_offsets == 0)).tolist():
            key = QueueKey(records.topics[int(records.topic_numbers[row])], int(records.queue_ids[row]))
            found[key] = int(records.places[row])
    return found


def _put_units(
    store: StoreFiles, records: RecordColumns, unit_begin: int, lives: Mapping[QueueKey, int], *, rewind: bool
) -> None:
    """Put the units, queue by queue, of those records that have none yet."""
    rows = np.flatnonzero(gets_unit(records) & (records.places >= unit_begin))
    if not len(rows):
        return
    rows = rows[np.lexsort((rows, records.queue_ids[rows], records.topic_numbers[rows]))]
    topics, queue_ids = records.topic_numbers[rows], records.queue_ids[rows]
    edges = np.flatnonzero((topics[1:] != topics[:-1]) | (queue_ids[1:] != queue_ids[:-1])) + 1
    for of_queue in np.split(rows, edges):
        key = QueueKey(records.topics[int(records.topic_numbers[of_queue[0]])], int(records.queue_ids[of_queue[0]]))
        of_queue = of_queue[records.places[of_queue] >= lives.get(key, 0)]
        if rewind and len(of_queue):
            first = int(records.places[of_queue[0]])
            rewind_queues(store, (key,), first)
        _put_missing(store, key, records, of_queue, unit_begin)


def _put_missing(
    store: StoreFiles, key: QueueKey, records: RecordColumns, rows: NDArray[np.intp], unit_begin: int
) -> None:
    """Put the units of those records of one queue that have none yet. Raises DamageError for a queue that lost others.

    A record before the queue's last one is of a topic that was deleted and made again. One whose queue offset others
    before it have is passed over, as a broker does (ConsumeQueue#putMessagePositionInfo).
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
        NewUnits(
            records.places[missing],
            records.sizes[missing],
            records.tags_codes[missing],
            records.queue_offsets[missing],
            records.store_times[missing],
            None if (counts == 1).all() else counts,
        ),
    )


def _expected(records: RecordColumns, rows: NDArray[np.intp], begin: int) -> NDArray[np.int64]:
    """Return which queue offset follows the row before, `begin` for the first of the rows."""
    ends = records.queue_offsets[rows] + records.message_counts[rows]
    return np.concatenate([np.array([begin], np.int64), ends])[: len(rows)]


def _refuse_gap(
    store: StoreFiles, key: QueueKey, records: RecordColumns, rows: NDArray[np.intp], expected: NDArray[np.int64]
) -> None:
    """Raise DamageError for the first row that does not have the queue offset that is expected of it."""
    bad = np.flatnonzero(records.queue_offsets[rows] != expected)
    if not len(bad):
        return
    row, end = rows[bad[0]], int(expected[bad[0]])
    found, place = int(records.queue_offsets[row]), int(records.places[row])
    segment = store.log.segments.holding(place)
    raise DamageError(
        f"queue {key} ends at queue offset {end}, and the next message in the log has {found}",
        segment.path if segment else store.root,
        place - (segment.begin if segment else 0),
        end,
        found,
    )


def _put_keys(store: StoreFiles, records: RecordColumns) -> None:
    """Put the keys of records into the index, which passes over those that it has (IndexService#buildIndex)."""
    rows, hashes = records.key_rows, records.key_hashes
    is_rolled_back = records.sys_flags & TRANSACTION_MASK == TRANSACTION_ROLLBACK
    if is_rolled_back.any():
        kept = ~is_rolled_back[rows]
        rows, hashes = rows[kept], hashes[kept]
    store.index.put_many(hashes, records.places[rows], records.store_times[rows], skip_known=True)
