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
from rmq_spark.store.format.message_columns import Texts
from rmq_spark.store.format.properties import INNER_NUM, TAGS, PropertyPairs
from rmq_spark.store.format.ragged import Positions
from rmq_spark.store.format.record import INNER_BATCH, MAGIC_V1, MAGIC_V2, MIN_RECORD_BYTES
from rmq_spark.store.format.record_keys import key_entries
from rmq_spark.store.format.shaped_properties import ShapedPairs
from rmq_spark.store.format.tags_code import DELAY, level_of
from rmq_spark.store.format.whole_records import NotWholeError, WholeRecords

_SIZE_AND_MAGIC = struct.Struct(">iI")


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
    ends = np.append(positions[1:], end)
    whole = WholeRecords.of(np.frombuffer(data, np.uint8), positions, ends)
    places = whole.field("physical_offset").astype(np.int64)
    is_elsewhere = places != positions + physical_offset
    if is_elsewhere.any():
        raise NotWholeError(int(np.argmax(is_elsewhere)))
    store_times = whole.field("store_timestamp").astype(np.int64)
    topics, topic_numbers = _topics(whole.topics())
    pairs = whole.pairs()
    tags_codes = Texts.of(pairs.column(TAGS)).hashes.java().view(np.int32).astype(np.int64)
    if SCHEDULE_TOPIC in topics:
        waiting = np.flatnonzero(topic_numbers == topics.index(SCHEDULE_TOPIC))
        delays_ms = _delays_ms(pairs, waiting, levels)
        waiting, delays_ms = waiting[delays_ms >= 0], delays_ms[delays_ms >= 0]
        tags_codes[waiting] = store_times[waiting] + delays_ms
    key_rows, key_hashes = key_entries(pairs, topics, topic_numbers)
    return RecordColumns(
        places=places,
        sizes=ends - positions,
        store_times=store_times,
        sys_flags=whole.sys_flags,
        queue_ids=whole.field("queue_id").astype(np.int64),
        queue_offsets=whole.field("queue_offset").astype(np.int64),
        topics=topics,
        topic_numbers=topic_numbers,
        tags_codes=tags_codes,
        message_counts=_message_counts(pairs, whole.sys_flags),
        key_rows=key_rows,
        key_hashes=key_hashes,
    )


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


def _message_counts(pairs: ShapedPairs | PropertyPairs, flags: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.ones(len(flags), np.int64)
    batches = np.flatnonzero(flags & INNER_BATCH)
    if len(batches):
        texts = pairs.column(INNER_NUM).take(pa.array(batches)).to_pylist()
        counts[batches] = [int(text) if text and text.isascii() and text.isdigit() else 1 for text in texts]
    return counts
