"""A range of one queue -> Arrow record batches: units, their records, the asked columns.

Believes nothing but units that agree with their records, so it needs no log end and no lock: a plan made
elsewhere says how far to read. Memory is bounded by the rows and bytes of one batch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rmq_spark.store.errors import DamageError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.columns import decode, empty_batch
from rmq_spark.store.format.heads import RecordFault, RecordRun
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.log.unit_scan import BATCH_BYTES, asks_units, messages_within, next_units
from rmq_spark.store.units import QueueKey


class Read(NamedTuple):
    """Messages, be it none, and the queue offset up to which all was read that is wanted."""

    batch: pa.RecordBatch
    next_offset: int


def read_range(
    log: CommitLog,
    queue: ConsumeQueue,
    begin: int,
    end: int,
    units_end: int,
    columns: Sequence[str],
    limits: DecodeLimits,
    wanted: RowFilter | None = None,
) -> Iterator[Read]:
    """Yield the messages with queue offsets [begin, end) in order, at most BATCH_ROWS records a batch.

    With a filter those that it wants: of others the unit is read and, where that cannot tell, head and properties.
    `units_end` is the number after the queue's last unit. Raises DamageError for a unit that does not agree
    with its record or a record that does not decode, StoreChangedError for files that go while they are read;
    everything yielded before is right.
    """
    # Freeing a block as large as a batch teaches the allocator to keep what the columns of a batch are made of:
    # else every batch gives its pages back to the kernel and the next one faults them in again.
    np.empty(BATCH_BYTES, np.uint8)
    passed = 0
    unit = queue.unit_of(begin, units_end)
    last_unit = queue.unit_of(end - 1, units_end) + 1
    while unit < last_unit:
        units, next_unit = next_units(queue, unit, last_unit, wanted)
        passed += messages_within(queue, units, begin, end, looked_at=next_unit - unit)
        unit, until = next_unit, min(queue.offset_behind(units, next_unit), end)
        if not len(units):
            yield Read(empty_batch(columns), until)
        is_scattered = asks_units(queue, wanted)
        yield from decode_units(log, queue.key, units, begin, until, columns, limits, wanted, is_scattered=is_scattered)
    if passed != end - begin:
        path, position = queue.run.path_of(unit)
        what = f"units of queue {queue.key} for the queue offsets [{begin}, {end})"
        raise DamageError(what, path, position, f"{end - begin} messages", passed)


def decode_units(
    log: CommitLog,
    queue: QueueKey,
    units: Units,
    begin: int,
    end: int,
    columns: Sequence[str],
    limits: DecodeLimits,
    wanted: RowFilter | None = None,
    *,
    is_scattered: bool = False,
) -> Iterator[Read]:
    """Yield the messages of these units, ascending, with queue offsets in [begin, end), as batches of the columns.

    With a filter those that it wants. `is_scattered` says that the units are some of many. Raises DamageError for a
    unit that does not agree with its record or a record that does not decode, StoreChangedError for files that are
    gone.
    """
    for stretch in log.stretches(units.physical_offsets, units.sizes, are_scattered=is_scattered):
        first, next_offset = stretch.first, begin
        while first < stretch.last and next_offset < end:
            part = units.part(first, stretch.last)
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
            stretch.check()  # only now is the batch to be believed
            first += int(np.searchsorted(part.queue_offsets, next_offset))
            if next_offset == end and first < len(units):
                next_offset = int(units.queue_offsets[first])
            yield Read(batch, next_offset)


def _damage(log: CommitLog, queue: QueueKey, units: Units, fault: RecordFault) -> DamageError:
    place = int(units.physical_offsets[fault.row])
    segment = log.segments.holding(place)
    assert segment is not None  # the stretch came from it
    return DamageError(
        f"{fault.what}, message {int(units.queue_offsets[fault.row])} of queue {queue} at physical offset {place}",
        segment.path,
        place - segment.begin,
        fault.expected,
        fault.found,
    )
