"""Records copied to another topic or queue, many at once.

Copies are made of messages that are delivered after a delay, sent back by a consumer, or republished. A copy keeps
body, body CRC, flag, sysFlag, born time and both hosts. Bodies are copied as stored, without decompression. The caller
gives topic, queue, properties and reconsumeTimes. The prepared transaction offset of a copy is 0. Queue offset,
physical offset and store time are 0 too, as in `message_encoder`, because the appender sets them later. The tests
compare the result with copies that are made record by record.

Source: ScheduleMessageService#messageTimeup, TimerMessageStore#convertMessage, AbstractSendMessageProcessor
#consumerSendMsgBack (4.9, 5.3).
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.byte_ranges import Bytes, Positions, of_one_size, take_ranges
from rmq_spark.store.format.index_keys import key_entries
from rmq_spark.store.format.message_columns import RowFault, Texts, Topics, join_rows
from rmq_spark.store.format.message_encoder import (
    EncodedRecords,
    magic_for,
    topic_field,
)
from rmq_spark.store.format.properties import MAX_PROPERTIES_BYTES, RECORD_CRC, TAGS, edit_properties
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.record_batch import WholeRecords, field_shift, pairs_of, unaligned
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import MAX_DERIVED_TOPIC_CHARS

_FIELDS: Any = RECORD_HEAD.fields
_LENGTH = np.dtype(">i2")  # the length field before the properties
_MAX_BYTES = 1 << 31  # limit of Arrow's 32-bit offsets


def rebuild_records(
    data: Bytes,
    positions: Positions,
    ends: Positions,
    *,
    topics: Topics,
    queue_ids: NDArray[np.int64],
    properties: pa.BinaryArray | None = None,
    reconsume_times: NDArray[np.int64] | None = None,
) -> EncodedRecords:
    """Return copies of the records in the ranges [positions, ends) of `data` (bytes), in the order of the ranges.

    Copy `i` goes to topic `topics.name(i)` and queue `queue_ids[i]`. `properties` are the new properties strings. If
    they are None, a copy keeps the properties of its record, except the CRC of the record. If `reconsume_times` is
    None, a copy keeps the value of its record. Ranges may be in any order, and a range may occur several times. The
    copies must take less than 2 GiB together. They are in new, writable memory, and their digest is 0.

    Raises NotWholeError if a range is not one complete record, and RowFault if a topic or a properties string is too
    long.
    """
    count = len(positions)
    if not count:
        return EncodedRecords.empty()
    found = WholeRecords.of(data, positions, ends)
    texts = _without_crc(found.texts()) if properties is None else properties
    assert len(texts) == len(queue_ids) == count, (len(texts), len(queue_ids), count)
    text_sizes = Texts.of(texts).sizes
    _check_sizes(topics, text_sizes)
    fields = [topic_field(name) for name in topics.names]
    sizes = found.body_ends - found.positions + text_sizes + _LENGTH.itemsize
    sizes += topics.per_row([len(field) for field in fields], np.int64)
    total = int(sizes.sum())
    assert total < _MAX_BYTES, f"{total} bytes of records: copy fewer at once"
    joined = join_rows(
        take_ranges(data, found.positions, found.body_ends),
        fields[0] if topics.numbers is None else pa.array(fields, pa.binary()).take(pa.array(topics.numbers)),
        of_one_size(text_sizes.astype(_LENGTH).view(f"V{_LENGTH.itemsize}")),
        texts,
    )
    copies = np.frombuffer(joined.buffers()[2], np.uint8, total)
    magics = topics.per_row([magic_for(name) for name in topics.names], np.uint32)
    _write_headers(copies, sizes, found.sys_flags, magics, queue_ids, reconsume_times)
    numbers = np.zeros(count, np.int64) if topics.numbers is None else topics.numbers
    pairs = pairs_of(texts)
    key_rows, key_hashes = key_entries(pairs, topics.names, numbers)
    queues, queue_numbers = _distinct_queues(topics.names, numbers, queue_ids)
    return EncodedRecords(
        data=copies,
        sizes=sizes,
        queues=queues,
        queue_numbers=queue_numbers,
        tags_codes=Texts.of(pairs.column(TAGS)).java_hashes(),
        key_rows=key_rows,
        key_hashes=key_hashes,
        digest=0,
    )


def _without_crc(texts: pa.BinaryArray) -> pa.BinaryArray:
    """Return the properties strings without the property RECORD_CRC, which would be wrong in a copy.

    Strings that do not have this property are returned unchanged, byte by byte.
    Source: CommitLog, MessageConst#PROPERTY_CRC32 (5.3).
    """
    has_crc = pc.match_substring(texts, RECORD_CRC.encode() + b"\x01")
    if not pc.any(has_crc).as_py():
        return texts
    return pc.if_else(has_crc, edit_properties(texts, (RECORD_CRC,), {}), texts)


def _check_sizes(topics: Topics, text_sizes: NDArray[np.int64]) -> None:
    """Raise RowFault if a topic or a properties string is too long for a record."""
    for number, name in enumerate(topics.names):
        has_row = topics.numbers is None or bool((topics.numbers == number).any())
        if has_row and len(name.encode()) > MAX_DERIVED_TOPIC_CHARS:
            raise RowFault(
                topics.first_row(number),
                f"topic {name[:40]!r}… takes {len(name.encode())} bytes; expected at most {MAX_DERIVED_TOPIC_CHARS}",
            )
    for row in np.flatnonzero(text_sizes > MAX_PROPERTIES_BYTES)[:1].tolist():
        raise RowFault(row, f"properties take {text_sizes[row]} bytes; expected at most {MAX_PROPERTIES_BYTES}")


def _write_headers(
    copies: Bytes,
    sizes: NDArray[np.int64],
    sys_flags: NDArray[np.int64],
    magics: NDArray[np.uint32],
    queue_ids: NDArray[np.int64],
    reconsume_times: NDArray[np.int64] | None,
) -> None:
    """Set the header fields that differ from the original's. Fields that the appender sets later become 0."""
    positions = np.cumsum(sizes) - sizes
    new: dict[str, NDArray[np.int64] | NDArray[np.uint32] | int] = {
        "total_size": sizes,
        "magic": magics,
        "queue_id": queue_ids,
        "queue_offset": 0,
        "physical_offset": 0,
        "store_timestamp": 0,
        "prepared_transaction_offset": 0,
    }
    if reconsume_times is not None:
        new["reconsume_times"] = reconsume_times
    for name, values in new.items():
        layout, at = _FIELDS[name][:2]
        unaligned(copies, layout)[positions + at + field_shift(name, sys_flags)] = values


def _distinct_queues(
    names: tuple[str, ...], topic_numbers: NDArray[np.int64], queue_ids: NDArray[np.int64]
) -> tuple[tuple[QueueKey, ...], NDArray[np.int32]]:
    """Return each queue of the records once, and for each record the index of its queue in that tuple."""
    assert int(queue_ids.min()) >= 0, queue_ids.min()
    width = int(queue_ids.max()) + 1
    used, numbers = np.unique(topic_numbers * width + queue_ids, return_inverse=True)
    queues = tuple(QueueKey(names[code // width], code % width) for code in used.tolist())
    return queues, numbers.astype(np.int32)
