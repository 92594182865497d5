"""The unit of a batch consume queue (5.x, topics with `queue.type=BatchCQ`): one record of one or many messages.

Where the unit of a queue offset stands does not follow from the offset: search by `base_offset`. The queue's end
is base plus count of its last unit. Source: BatchConsumeQueue#putBatchMessagePositionInfo (5.3).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

BATCH_UNIT = np.dtype(
    [
        ("physical_offset", ">i8"),  # where the record starts in the commit log, in bytes
        ("record_size", ">i4"),  # the whole record, TOTALSIZE
        ("tags_code", ">i8"),  # Java hash of the TAGS property, sign-extended; 0 without one
        ("store_timestamp", ">i8"),  # ms, as in the record
        ("base_offset", ">i8"),  # queue offset of the record's first message
        ("message_count", ">i2"),  # INNER_NUM, 1 for a record that is no batch
        ("compacted_offset", ">i4"),  # -1: unused outside compaction
        ("reserved", ">i4"),  # 0
    ]
)
assert BATCH_UNIT.itemsize == 46

NOT_COMPACTED = -1


def decode_batch_units(data: bytes | memoryview | NDArray[np.uint8]) -> NDArray[np.void]:
    """Return the whole units of `data` as a view of it; a cut one at the end is left out."""
    return np.frombuffer(data, BATCH_UNIT, len(data) // BATCH_UNIT.itemsize)


def is_written(units: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return for each unit whether recovery would take it (BatchConsumeQueue#recover, 5.3)."""
    written: NDArray[np.bool_] = (
        (units["physical_offset"] >= 0)
        & (units["record_size"] > 0)
        & (units["base_offset"] >= 0)
        & (units["message_count"] > 0)
    )
    return written


def encode_batch_units(
    physical_offsets: ArrayLike,
    record_sizes: ArrayLike,
    tags_codes: ArrayLike,
    store_timestamps: ArrayLike,
    base_offsets: ArrayLike,
    message_counts: ArrayLike,
) -> bytes:
    """Write units from arrays of one length. Counts are from 1 to 32767."""
    offsets = np.asarray(physical_offsets, np.int64)
    counts = np.asarray(message_counts, np.int64)
    assert not len(counts) or (counts.min() >= 1 and counts.max() <= 32767), counts
    units = np.zeros(len(offsets), BATCH_UNIT)
    units["physical_offset"] = offsets
    units["record_size"] = record_sizes
    units["tags_code"] = tags_codes
    units["store_timestamp"] = store_timestamps
    units["base_offset"] = base_offsets
    units["message_count"] = counts
    units["compacted_offset"] = NOT_COMPACTED
    return units.tobytes()
