"""A range of one queue -> Arrow record batches: units, their records, the asked columns.

Believes nothing but units that agree with their records, so it needs no log end and no lock: a plan made
elsewhere says how far to read. Memory is bounded by the rows and bytes of one batch.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.columns import decode
from rmq_spark.store.format.heads import RecordFault, RecordRun
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.units import QueueKey

BATCH_ROWS = 32_768
_MAX_PLACE = 1 << 62  # no log is as long; beyond it sums of offsets and sizes would wrap around
BATCH_BYTES = 16 << 20  # of records as stored


def read_range(
    log: CommitLog,
    queue: ConsumeQueue,
    begin: int,
    end: int,
    units_end: int,
    columns: Sequence[str],
    limits: DecodeLimits,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages with queue offsets [begin, end) in order, at most BATCH_ROWS records a batch.

    `units_end` is the number after the queue's last unit. Raises DamageError for a unit that does not agree
    with its record or a record that does not decode, StoreChangedError for files that go while they are read;
    everything yielded before is right.
    """
    # Freeing a block as large as a batch teaches the allocator to keep what the columns of a batch are made of:
    # else every batch gives its pages back to the kernel and the next one faults them in again.
    np.empty(BATCH_BYTES, np.uint8)
    yielded = 0
    unit = queue.unit_of(begin, units_end)
    last_unit = queue.unit_of(end - 1, units_end) + 1
    while unit < last_unit:
        units = queue.read(unit, min(unit + BATCH_ROWS, last_unit))
        if not len(units):
            path, position = queue.run.path_of(unit)
            raise DamageError(f"no unit for queue offset {begin} of {queue.key}", path, position)
        if int(units.sizes.sum()) > BATCH_BYTES:
            fitting = int(np.searchsorted(np.cumsum(units.sizes), BATCH_BYTES, side="right"))
            units = units.part(0, max(fitting, 1))
        _refuse_disorder(queue, unit, units)
        for batch in decode_units(log, queue.key, units, begin, end, columns, limits):
            yielded += batch.num_rows
            yield batch
        unit += len(units)
    if yielded != end - begin:
        path, position = queue.run.path_of(unit)
        what = f"units of queue {queue.key} for the queue offsets [{begin}, {end})"
        raise DamageError(what, path, position, f"{end - begin} messages", yielded)


def _refuse_disorder(queue: ConsumeQueue, first: int, units: Units) -> None:
    """Raise DamageError unless records ascend as they do in every queue."""
    ends = units.physical_offsets + units.sizes
    if (
        units.message_counts is None
        and int(units.sizes.min()) > 0
        and units.physical_offsets[0] >= 0
        and int(units.physical_offsets.max()) <= _MAX_PLACE
        and (units.physical_offsets[1:] >= ends[:-1]).all()
    ):
        return  # nothing to name
    beyond = units.physical_offsets > _MAX_PLACE
    bad = np.flatnonzero(beyond | (units.sizes <= 0) | (np.diff(units.physical_offsets, prepend=-1) <= 0))
    overlapping = np.flatnonzero(units.physical_offsets[1:] < ends[:-1])
    if units.message_counts is not None and not len(bad) and not len(overlapping):
        next_offsets = units.queue_offsets + units.message_counts
        overlapping = np.flatnonzero(units.queue_offsets[1:] != next_offsets[:-1])
    if not len(bad) and not len(overlapping):
        return
    at = int(bad[0]) if len(bad) else int(overlapping[0]) + 1
    path, position = queue.run.path_of(first + at)
    raise DamageError(
        f"the unit of queue offset {units.queue_offsets[at]} of {queue.key}",
        path,
        position,
        f"a record after physical offset {ends[at - 1] if at else 0}",
        f"({units.physical_offsets[at]}, {units.sizes[at]})",
    )


def decode_units(
    log: CommitLog,
    queue: QueueKey,
    units: Units,
    begin: int,
    end: int,
    columns: Sequence[str],
    limits: DecodeLimits,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of these units, ascending, with queue offsets in [begin, end), as batches of the columns.

    Raises DamageError for a unit that does not agree with its record or a record that does not decode,
    StoreChangedError for files that are gone.
    """
    for stretch in log.stretches(units.physical_offsets, units.sizes):
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
                batch, next_offset = decode(run, columns, begin, end, limits)
            except RecordFault as fault:
                stretch.check()
                raise _damage(log, queue, part, fault) from fault
            stretch.check()  # only now is the batch to be believed
            if batch.num_rows:
                yield batch
            first += int(np.searchsorted(part.queue_offsets, next_offset))


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
