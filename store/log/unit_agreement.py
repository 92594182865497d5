"""Units held against the heads of their records, by the thousand: which of them agree.

Only heads are compared, so no topic: see `unit_judge` for what is left to be told one by one.
"""

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.heads import gather
from rmq_spark.store.format.ragged import Bytes
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    MAGIC_V1,
    MAGIC_V2,
    MAX_RECORD_BYTES,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    RECORD_HEAD_BORN_V6,
)
from rmq_spark.store.log.commit_log import CommitLog

_BLOCK_RECORDS = 1 << 13  # whose heads stay in the processor's cache while they are compared


def compare_heads(
    log: CommitLog,
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    queue_ids: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which units (ascending by record) agree with their records, and the records' store times (ms)."""
    agree = np.zeros(len(places), np.bool_)
    times = np.zeros(len(places), np.int64)
    begins = np.array([segment.begin for segment in log.segments.segments], np.int64)
    if not len(begins) or not len(places):
        return agree, times
    holding = np.searchsorted(begins, places, side="right") - 1
    segment_ends = np.where(holding >= 0, begins[holding] + log.segments.size, 0)
    possible = (sizes >= MIN_RECORD_BYTES) & (sizes <= MAX_RECORD_BYTES) & (holding >= 0)
    possible &= sizes <= segment_ends - places  # a sum could pass the largest number
    rows = np.flatnonzero(possible)
    # Stale units may overlap live ones: then records do not end in the order in which they begin.
    for chosen in _split_disordered(places[rows] + sizes[rows], rows):
        for stretch in log.stretches(places[chosen], sizes[chosen]):
            part = chosen[stretch.first : stretch.last]
            for at in range(0, len(part), _BLOCK_RECORDS):
                block = part[at : at + _BLOCK_RECORDS]
                run = (places[block], sizes[block], offsets[block], queue_ids[block])
                agree[block], times[block] = _heads_agree(
                    stretch.buffer, stretch.positions[at : at + _BLOCK_RECORDS], *run
                )
            stretch.check()
    return agree, times


def _heads_agree(
    buffer: Bytes,
    positions: NDArray[np.int64],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    queue_ids: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which records are what their units say, and the store times (ms) of those."""
    heads = gather(buffer, positions, RECORD_HEAD)
    good = (
        (heads["physical_offset"] == places)
        & (heads["total_size"] == sizes)
        & (heads["queue_offset"] == offsets)
        & (heads["queue_id"] == queue_ids)
        & ((heads["magic"] == MAGIC_V1) | (heads["magic"] == MAGIC_V2))
    )
    times = heads["store_timestamp"].astype(np.int64)
    v6 = np.flatnonzero(good & (heads["sys_flag"] & BORN_HOST_V6 != 0))
    if len(v6):
        good[v6] = sizes[v6] >= RECORD_HEAD_BORN_V6.itemsize + 3
        v6 = v6[good[v6]]
        times[v6] = gather(buffer, positions[v6], RECORD_HEAD_BORN_V6)["store_timestamp"]
    return good, times


def _split_disordered(ends: NDArray[np.int64], rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Cut rows into pieces whose `ends` never step back."""
    steps = np.flatnonzero(ends[1:] < ends[:-1]) + 1
    return [piece for piece in np.split(rows, steps) if len(piece)]
