"""Many keys for a file of the key index at once: the fast twin of `index_file.IndexFileWriter`, byte for byte.

Putting keys changes three things: a run of units, the slots that the keys fall into, the header. Here they are
computed; who reads and writes them, and in which order, is the caller's business.
Source: IndexFile#putKey, IndexService#getAndCreateLastIndexFile (4.9, 5.3).
"""

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.index_file import INDEX_UNIT, MAX_SECONDS, IndexHeader


class SlotGroups:
    """Keys that are put together, brought together by slot. `slots` are those they fall into, ascending."""

    def __init__(self, key_hashes: NDArray[np.int32], slot_count: int) -> None:
        assert len(key_hashes), "no keys"
        slots = key_hashes % np.int32(slot_count)
        # Keys of a slot stay in the order of the log. numpy sorts by digits where these have 16 bits: two rounds of
        # that take a fifth of the time of sorting by the whole number.
        order = np.argsort(slots.astype(np.uint16), kind="stable")
        if slot_count > 1 << 16:
            order = order[np.argsort((slots >> 16).astype(np.uint16)[order], kind="stable")]
        ordered = slots[order]
        self._order, self._edges = order, group_edges(ordered[1:] != ordered[:-1])
        self.slots: NDArray[np.int32] = ordered[self._edges[:-1]]

    def link(self, newest: NDArray[np.int32], number: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Return each key's previous unit, each slot's new value, and how many slots get their first unit.

        `newest` are the values that `slots` have, `number` is that of the first key's unit.
        """
        order, firsts = self._order, self._edges[:-1]
        numbers = order.astype(np.int32) + np.int32(number)
        # As IndexFile#putKey: what points behind the unit being written counts as nothing.
        is_linked = (newest > 0) & (newest <= numbers[firsts])
        previous = np.empty(len(order), np.int32)
        previous[order[1:]] = numbers[:-1]
        previous[order[firsts]] = np.where(is_linked, newest, 0)
        return previous, numbers[self._edges[1:] - 1], int(np.count_nonzero(~is_linked))


def group_edges(is_other: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return where groups of a run of elements begin, and where the last ends; `is_other` than the one before it."""
    return np.concatenate(([0], is_other.nonzero()[0] + 1, [len(is_other) + 1]))


def encode_keys(
    header: IndexHeader,
    key_hashes: NDArray[np.int32],
    physical_offsets: NDArray[np.int64],
    store_times: NDArray[np.int64],
    previous: NDArray[np.int32],
    first_count: int,
) -> tuple[NDArray[np.void], IndexHeader]:
    """Return the units of keys that follow what the header counts, and the header after them.

    `previous` and `first_count` are what `SlotGroups.link` says.
    """
    number = max(header.next_unit, 1)
    begin_physical_offset, begin_timestamp = header.begin_physical_offset, header.begin_timestamp
    if number == 1:
        begin_physical_offset, begin_timestamp = int(physical_offsets[0]), int(store_times[0])
    units = np.empty(len(key_hashes), INDEX_UNIT)
    units["key_hash"] = key_hashes
    units["physical_offset"] = physical_offsets
    units["seconds"] = _seconds_since(begin_timestamp, store_times)
    if number == 1:  # before the first key the header has the previous file's end: the quirk above
        units["seconds"][0] = _seconds_since(header.begin_timestamp, store_times[:1])[0]
    units["previous_unit"] = previous
    return units, IndexHeader(
        begin_timestamp,
        int(store_times[-1]),
        begin_physical_offset,
        int(physical_offsets[-1]),
        header.used_slot_count + first_count,
        number + len(units),
    )


def _seconds_since(begin_ms: int, times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    if begin_ms <= 0:
        return np.zeros(len(times_ms), np.int64)
    return np.clip((times_ms - begin_ms) // 1000, 0, MAX_SECONDS)


def seeded_header(previous: IndexHeader) -> IndexHeader:
    """Return the header that a new file starts with when it follows one with the header `previous`."""
    end_timestamp, end_physical_offset = max(previous.end_timestamp, 0), max(previous.end_physical_offset, 0)
    return IndexHeader(end_timestamp, end_timestamp, end_physical_offset, end_physical_offset)
