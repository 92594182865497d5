"""Records of any topics and queues, one behind the other, as columns: what recovery makes units and keys of.

`record.decode_record`, `tags_code.tags_code_of` and `batch_body.message_count` are the slow twins.
"""

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.heads import gather
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Texts
from rmq_spark.store.format.properties import INNER_NUM, KEYS, TAGS, UNIQ_KEY, PropertyPairs
from rmq_spark.store.format.ragged import Bytes, Positions, take_ranges
from rmq_spark.store.format.record import (
    HEADS,
    HOST_BITS,
    INNER_BATCH,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
)
from rmq_spark.store.format.shaped_properties import ShapedPairs
from rmq_spark.store.format.tags_code import DELAY, level_of

_SIZE_AND_MAGIC = struct.Struct(">iI")
_FIELDS = ("queue_id", "queue_offset", "physical_offset", "store_timestamp", "body_size")


class NotWholeError(ValueError):
    """Record number `row` is none that `record.decode_record` would take, or is another place's."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """What units and index entries need of records; one element a record, but for keys."""

    places: NDArray[np.int64]  # physical offsets
    sizes: NDArray[np.int64]  # bytes
    store_times: NDArray[np.int64]  # ms
    sys_flags: NDArray[np.int64]
    queue_ids: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    topics: tuple[str, ...]  # distinct
    topic_numbers: NDArray[np.int64]  # into `topics`
    tags_codes: NDArray[np.int64]
    message_counts: NDArray[np.int64]
    key_rows: NDArray[np.int64]  # one element for each index entry, ascending: which record it is of
    key_hashes: NDArray[np.int32]  # of a record first UNIQ_KEY, then KEYS in order

    def __len__(self) -> int:
        return len(self.places)


def walk_records(data: bytes) -> tuple[Positions, int]:
    """Return where records begin that lie whole in `data`, each where the one before ends; and where the last ends.

    Only lengths and magics are looked at.
    """
    positions: list[int] = []
    position, last = 0, len(data) - MIN_RECORD_BYTES
    unpack = _SIZE_AND_MAGIC.unpack_from
    while position <= last:
        size, magic = unpack(data, position)
        if (magic != MAGIC_V1 and magic != MAGIC_V2) or not MIN_RECORD_BYTES <= size <= len(data) - position:
            break
        positions.append(position)
        position += size
    return np.array(positions, np.int64), position


def split_records(
    data: bytes,
    positions: Positions,
    end: int,
    physical_offset: int,
    levels: DelayLevels = DEFAULT_DELAY_LEVELS,
) -> RecordColumns:
    """Return the columns of the records at `positions`, the last of which ends at `end`, as `walk_records` says.

    `physical_offset` is that of the first byte of `data`, `levels` the store's table of delay levels. Raises
    NotWholeError for the first record of a kind of fault.
    """
    buffer = np.frombuffer(data, np.uint8)
    ends = np.append(positions[1:], end)
    heads = gather(buffer, positions, RECORD_HEAD)
    flags = heads["sys_flag"].astype(np.int64)
    found, bodies = _heads(buffer, positions, ends, heads, flags)
    _refuse(found["physical_offset"] != positions + physical_offset)
    tails = bodies + found["body_size"]
    wide = np.where(heads["magic"] == MAGIC_V1, 1, 2)
    _refuse((found["body_size"] < 0) | (tails + wide + 2 > ends))
    first, second = buffer[tails].astype(np.int64), buffer[tails + 1].astype(np.int64)
    topic_begins = tails + wide
    topic_ends = topic_begins + np.where(wide == 1, (first ^ 0x80) - 0x80, (first << 8 ^ 0x8000) - 0x8000 + second)
    _refuse((topic_ends < topic_begins) | (topic_ends + 2 > ends))
    text_sizes = (buffer[topic_ends].astype(np.int64) << 8) + buffer[topic_ends + 1]
    _refuse((text_sizes >= 1 << 15) | (topic_ends + 2 + text_sizes != ends))
    topics, topic_numbers = _topics(take_ranges(buffer, topic_begins, topic_ends))
    texts = take_ranges(buffer, topic_ends + 2, ends)
    shaped = ShapedPairs.of(texts)
    pairs = PropertyPairs.split(texts) if shaped is None else shaped
    tags_codes = Texts.of(pairs.column(TAGS)).hashes.java().view(np.int32).astype(np.int64)
    if SCHEDULE_TOPIC in topics:
        waiting = np.flatnonzero(topic_numbers == topics.index(SCHEDULE_TOPIC))
        delays_ms = _delays_ms(pairs, waiting, levels)
        waiting, delays_ms = waiting[delays_ms >= 0], delays_ms[delays_ms >= 0]
        tags_codes[waiting] = found["store_timestamp"][waiting] + delays_ms
    key_rows, key_hashes = _keys(pairs, topics, topic_numbers)
    return RecordColumns(
        places=found["physical_offset"],
        sizes=ends - positions,
        store_times=found["store_timestamp"],
        sys_flags=flags,
        queue_ids=found["queue_id"],
        queue_offsets=found["queue_offset"],
        topics=topics,
        topic_numbers=topic_numbers,
        tags_codes=tags_codes,
        message_counts=_message_counts(pairs, flags),
        key_rows=key_rows,
        key_hashes=key_hashes,
    )


def _heads(
    buffer: Bytes, positions: Positions, ends: Positions, heads: NDArray[np.void], flags: NDArray[np.int64]
) -> tuple[dict[str, NDArray[np.int64]], Positions]:
    """Return fields of all heads, and where their bodies begin: hosts of IPv6 make a head longer."""
    bits = flags & HOST_BITS
    if not bits.any():
        return {name: heads[name].astype(np.int64) for name in _FIELDS}, positions + RECORD_HEAD.itemsize
    found = {name: np.empty(len(positions), np.int64) for name in _FIELDS}
    bodies = np.empty(len(positions), np.int64)
    for kind, layout in HEADS.items():
        rows = np.flatnonzero(bits == kind)
        bodies[rows] = positions[rows] + layout.itemsize
        _refuse((bits == kind) & (positions + layout.itemsize + 3 > ends))
        some = gather(buffer, positions[rows], layout)
        for name in _FIELDS:
            found[name][rows] = some[name]
    return found, bodies


def _refuse(is_bad: NDArray[np.bool_]) -> None:
    if is_bad.any():
        raise NotWholeError(int(np.argmax(is_bad)))


def _topics(names: pa.BinaryArray) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    encoded = names.dictionary_encode()
    read = [name.decode("utf-8", "replace") for name in encoded.dictionary.to_pylist()]
    numbers: dict[str, int] = {}  # two names may read alike, where they are no UTF-8
    by_name = np.array([numbers.setdefault(name, len(numbers)) for name in read], np.int64)
    return tuple(numbers), by_name[encoded.indices.to_numpy()]


def _delays_ms(pairs: ShapedPairs | PropertyPairs, rows: NDArray[np.intp], levels: DelayLevels) -> NDArray[np.int64]:
    """Return after how long messages of some rows are due; -1 for one that names no delay level."""
    texts = pairs.column(DELAY).take(pa.array(rows)).fill_null("").dictionary_encode()
    named = [levels.clamp(level_of(text)) for text in texts.dictionary.to_pylist()]
    delays_ms = np.array([levels.due_after_ms(level) if level else -1 for level in named], np.int64)
    of_rows: NDArray[np.int64] = delays_ms[texts.indices.to_numpy()]
    return of_rows


def _keys(
    pairs: ShapedPairs | PropertyPairs, topics: tuple[str, ...], topic_numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return row and hash of what the key index gets, in a broker's order (IndexService#buildIndex)."""
    of_topic = np.array([string_hash(f"{topic}#") & 0xFFFFFFFF for topic in topics], np.uint32)[topic_numbers]
    ids, keys = Texts.of(pairs.column(UNIQ_KEY)), Texts.of(pairs.column(KEYS))
    hashes, rows = ids.hashes.java(before=of_topic), np.arange(len(topic_numbers))
    if ids.given is not None:
        rows, hashes = rows[ids.given], hashes[ids.given]
    key_rows, words = keys.words()
    if len(key_rows):
        rows = np.concatenate([rows, key_rows])
        # UNIQ_KEY first: a stable order by row of all of the one kind, then all of the other.
        order = np.argsort(rows, kind="stable")
        rows, hashes = rows[order], np.concatenate([hashes, words.java(before=of_topic[key_rows])])[order]
    # |-2^31| stays negative in numpy as in Java; the index takes 0 for it.
    return rows, np.maximum(np.abs(hashes.view(np.int32)), 0)


def _message_counts(pairs: ShapedPairs | PropertyPairs, flags: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.ones(len(flags), np.int64)
    batches = np.flatnonzero(flags & INNER_BATCH)
    if len(batches):
        texts = pairs.column(INNER_NUM).take(pa.array(batches)).to_pylist()
        counts[batches] = [int(text) if text and text.isascii() and text.isdigit() else 1 for text in texts]
    return counts
