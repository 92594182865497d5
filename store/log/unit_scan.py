"""The units of a range, as many as make a batch: all of them, or those whose messages may be wanted.

Units cost 20 bytes a message, and a filter over tags is asked of them alone. So a few wanted messages among many are
found without a look at the commit log. Units that are read together are each held against the one before, wanted or
not: a queue that was damaged is mostly not taken for one in which nothing is wanted.
"""

import numpy as np

from rmq_spark.store.errors import DamageError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.log.queues import ConsumeQueue, Units

BATCH_ROWS = 32_768
BATCH_BYTES = 16 << 20  # of records as stored
_LOOKED_AT_UNITS = 1 << 20  # in search of wanted ones: after so many the reader says how far it came
_MAX_PLACE = 1 << 62  # no log is as long; beyond it sums of offsets and sizes would wrap around


def asks_units(queue: ConsumeQueue, wanted: RowFilter | None) -> bool:
    """Say whether a filter is asked of the queue's units, so that some of them are left out."""
    return wanted is not None and wanted.asks_units_of(queue.key.topic, are_batches=queue.are_batches)


def messages_within(queue: ConsumeQueue, units: Units, begin: int, end: int, *, looked_at: int) -> int:
    """Return how many messages with queue offsets in [begin, end) so many units hold, of which `units` were chosen."""
    if units.message_counts is None:
        return looked_at  # units that are messages are looked at within the range only
    ends = np.minimum(units.queue_offsets + units.message_counts, end)
    return int(np.maximum(ends - np.maximum(units.queue_offsets, begin), 0).sum())


def next_units(queue: ConsumeQueue, unit: int, last_unit: int, wanted: RowFilter | None) -> tuple[Units, int]:
    """Return the units of the next batch, from number `unit` on, and the number after the last one looked at.

    At most BATCH_ROWS, and BATCH_BYTES of records, but at least one if any may be wanted. Raises DamageError for units
    that are not there or whose records do not ascend, StoreChangedError.
    """
    if wanted is not None and asks_units(queue, wanted):
        return _next_wanted(queue, unit, last_unit, wanted)
    units = _read(queue, unit, last_unit)
    if int(units.sizes.sum()) > BATCH_BYTES:
        fitting = int(np.searchsorted(np.cumsum(units.sizes), BATCH_BYTES, side="right"))
        units = units.part(0, max(fitting, 1))
    fault = _disorder(queue, unit, units)
    if fault is not None:
        raise fault
    return units, unit + len(units)


def _next_wanted(queue: ConsumeQueue, unit: int, last_unit: int, wanted: RowFilter) -> tuple[Units, int]:
    parts: list[Units] = []
    count, size, end, stop = 0, 0, 0, min(last_unit, unit + _LOOKED_AT_UNITS)
    while unit < stop and count < BATCH_ROWS and size < BATCH_BYTES:
        units = _read(queue, unit, stop)
        fault = _disorder(queue, unit, units)
        if fault is not None and not parts:
            raise fault
        if fault is not None or int(units.physical_offsets[0]) < end:
            break  # what was found before is right; the next call meets the rest by itself
        end = int(units.physical_offsets[-1] + units.sizes[-1])
        found = units.take(np.flatnonzero(wanted.may_match(units.tags_codes)))
        fitting = min(BATCH_ROWS - count, int(np.searchsorted(np.cumsum(found.sizes), BATCH_BYTES - size, "right")))
        fitting = fitting if count else max(fitting, 1)
        unit = int(found.queue_offsets[fitting]) if fitting < len(found) else unit + len(units)
        parts.append(found.part(0, fitting))
        count += len(parts[-1])
        size += int(parts[-1].sizes.sum())
        if fitting < len(found):
            break
    return Units.joined(parts), unit


def _read(queue: ConsumeQueue, unit: int, last_unit: int) -> Units:
    units = queue.read(unit, min(unit + BATCH_ROWS, last_unit))
    if not len(units):
        path, position = queue.run.path_of(unit)
        raise DamageError(f"no unit number {unit} of {queue.key}", path, position)
    return units


def _disorder(queue: ConsumeQueue, first: int, units: Units) -> DamageError | None:
    """Return what is wrong with units from number `first` on, None if records ascend as they do in every queue."""
    ends = units.physical_offsets + units.sizes
    if (
        units.message_counts is None
        and int(units.sizes.min()) > 0
        and units.physical_offsets[0] >= 0
        and int(units.physical_offsets.max()) <= _MAX_PLACE
        and (units.physical_offsets[1:] >= ends[:-1]).all()
    ):
        return None  # nothing to name
    beyond = units.physical_offsets > _MAX_PLACE
    bad = np.flatnonzero(beyond | (units.sizes <= 0) | (np.diff(units.physical_offsets, prepend=-1) <= 0))
    overlapping = np.flatnonzero(units.physical_offsets[1:] < ends[:-1])
    if units.message_counts is not None and not len(bad) and not len(overlapping):
        next_offsets = units.queue_offsets + units.message_counts
        overlapping = np.flatnonzero(units.queue_offsets[1:] != next_offsets[:-1])
    if not len(bad) and not len(overlapping):
        return None
    at = int(bad[0]) if len(bad) else int(overlapping[0]) + 1
    path, position = queue.run.path_of(first + at)
    return DamageError(
        f"the unit of queue offset {units.queue_offsets[at]} of {queue.key}",
        path,
        position,
        f"a record after physical offset {ends[at - 1] if at else 0}",
        f"({units.physical_offsets[at]}, {units.sizes[at]})",
    )
