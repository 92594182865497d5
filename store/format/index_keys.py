"""Index entries of many keys at once, the keys of records, and the tags code of a record.

Adding keys to an index file appends entries and changes the slots of the keys and the header. This module computes all
three, and the caller reads and writes the file. The result has the same bytes as if `index_file.IndexFileWriter` had
added the keys one by one. Source: IndexFile#putKey, IndexService#getAndCreateLastIndexFile (4.9, 5.3).

The tags code of a consume-queue entry is the Java hash of the TAGS property, or 0 if the message has no tags. In
SCHEDULE_TOPIC_XXXX it is the time (ms) at which the message is due. Source: MessageExtBrokerInner#tagsString2tagsCode,
CommitLog#checkMessageAndReturnSize, ScheduleMessageService#computeDeliverTimestamp (4.9, 5.3).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.index_file import INDEX_UNIT, MAX_SECONDS, IndexHeader
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Texts
from rmq_spark.store.format.properties import KEYS, TAGS, UNIQ_KEY, PropertyPairs, parse
from rmq_spark.store.format.property_encoder import UniformPairs
from rmq_spark.store.format.record import Record
from rmq_spark.store.names import SCHEDULE_TOPIC


class SlotGroups:
    """A batch of keys grouped by slot. `slots` contains the number of each slot of these keys once, ascending."""

    def __init__(self, key_hashes: NDArray[np.int32], slot_count: int) -> None:
        assert len(key_hashes), "no keys"
        slots = key_hashes % np.int32(slot_count)
        # The keys of a slot must keep the order of the log, so the sorts are stable. numpy uses a radix sort for 16-bit
        # numbers. Two such sorts take a fifth of the time of one sort by the 32-bit number.
        order = np.argsort(slots.astype(np.uint16), kind="stable")
        if slot_count > 1 << 16:
            order = order[np.argsort((slots >> 16).astype(np.uint16)[order], kind="stable")]
        ordered = slots[order]
        self._order, self._edges = order, group_edges(ordered[1:] != ordered[:-1])
        self.slots: NDArray[np.int32] = ordered[self._edges[:-1]]

    def link(self, newest: NDArray[np.int32], number: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Return how the keys are linked when their entries are appended.

        `newest` has the current value of each of `slots`, and `number` is the number of the first key's entry. The
        result has three parts: for each key the number of the previous entry in its slot (0 if there is none), the new
        value of each of `slots`, and how many of these slots had no entry before.
        """
        order, firsts = self._order, self._edges[:-1]
        numbers = order.astype(np.int32) + np.int32(number)
        # As in IndexFile#putKey, a slot is treated as empty if its number is greater than that of the entry to write.
        is_linked = (newest > 0) & (newest <= numbers[firsts])
        previous = np.empty(len(order), np.int32)
        previous[order[1:]] = numbers[:-1]
        previous[order[firsts]] = np.where(is_linked, newest, 0)
        return previous, numbers[self._edges[1:] - 1], int(np.count_nonzero(~is_linked))


def group_edges(is_other: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the index of the first element of each group, and then the end of the last group.

    A group is a run of equal elements. `is_other` has one item for each element except the first: whether the element
    differs from the one before it.
    """
    return np.concatenate(([0], is_other.nonzero()[0] + 1, [len(is_other) + 1]))


def encode_keys(
    header: IndexHeader,
    key_hashes: NDArray[np.int32],
    physical_offsets: NDArray[np.int64],
    store_times: NDArray[np.int64],
    previous: NDArray[np.int32],
    first_count: int,
) -> tuple[NDArray[np.void], IndexHeader]:
    """Return the entries that add keys to the index file with this header, and the file's header after adding them.

    The arrays have one element per key, in the order of the log. `previous` and `first_count` are the first and the
    third result of `SlotGroups.link`.
    """
    number = max(header.next_unit, 1)
    begin_physical_offset, begin_timestamp = header.begin_physical_offset, header.begin_timestamp
    if number == 1:
        begin_physical_offset, begin_timestamp = int(physical_offsets[0]), int(store_times[0])
    entries = np.empty(len(key_hashes), INDEX_UNIT)
    entries["key_hash"] = key_hashes
    entries["physical_offset"] = physical_offsets
    entries["seconds"] = _seconds_since(begin_timestamp, store_times)
    if number == 1:  # before the first key the header contains the end of the previous file (`index_file`)
        entries["seconds"][0] = _seconds_since(header.begin_timestamp, store_times[:1])[0]
    entries["previous_unit"] = previous
    return entries, IndexHeader(
        begin_timestamp,
        int(store_times[-1]),
        begin_physical_offset,
        int(physical_offsets[-1]),
        header.used_slot_count + first_count,
        number + len(entries),
    )


def _seconds_since(begin_ms: int, times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    if begin_ms <= 0:
        return np.zeros(len(times_ms), np.int64)
    return np.clip((times_ms - begin_ms) // 1000, 0, MAX_SECONDS)


def seeded_header(previous: IndexHeader) -> IndexHeader:
    """Return the header of a new index file without entries. `previous` is the header of the full file before it."""
    end_timestamp, end_physical_offset = max(previous.end_timestamp, 0), max(previous.end_physical_offset, 0)
    return IndexHeader(end_timestamp, end_timestamp, end_physical_offset, end_physical_offset)


def key_entries(
    pairs: UniformPairs | PropertyPairs, topics: Sequence[str], topic_numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the row and the key hash of each index entry, in the order in which a broker adds them.

    Rows are ascending. In a row UNIQ_KEY comes first, and then KEYS in their order. The topic of row `i` is
    `topics[topic_numbers[i]]`. Source: IndexService#buildIndex, IndexFile#indexKeyHashMethod (4.9, 5.3).
    """
    of_topic = np.array([string_hash(f"{topic}#") & 0xFFFFFFFF for topic in topics], np.uint32)[topic_numbers]
    ids, keys = Texts.of(pairs.column(UNIQ_KEY)), Texts.of(pairs.column(KEYS))
    hashes, rows = ids.hashes.java(before=of_topic), np.arange(len(topic_numbers))
    if ids.given is not None:
        rows, hashes = rows[ids.given], hashes[ids.given]
    key_rows, words = keys.words()
    if len(key_rows):
        rows = np.concatenate([rows, key_rows])
        # A stable sort by row puts each row's UNIQ_KEY before its KEYS.
        order = np.argsort(rows, kind="stable")
        rows, hashes = rows[order], np.concatenate([hashes, words.java(before=of_topic[key_rows])])[order]
    # The absolute value of -2^31 is negative in numpy, as in Java. The index uses 0 for it.
    return rows, np.maximum(np.abs(hashes.view(np.int32)), 0)


DELAY = "DELAY"


def tags_code_of(record: Record, levels: DelayLevels = DEFAULT_DELAY_LEVELS) -> int:
    """Return the tags code of the record's consume-queue entry. An invalid delay level is treated as no level."""
    properties = parse(record.properties)
    if record.topic.decode("utf-8", "replace") == SCHEDULE_TOPIC and DELAY in properties:
        level = levels.clamp(level_of(properties[DELAY]))
        if level > 0:
            return record.store_timestamp + levels.due_after_ms(level)
    tags = properties.get(TAGS)
    return string_hash(tags) if tags else 0


def level_of(text: str) -> int:
    """Return the delay level in the text of a DELAY property. Returns 0 if the text is not a valid number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
