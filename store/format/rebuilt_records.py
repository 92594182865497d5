"""Records made again for another topic or queue, by columns: delivered, sent back, republished.

Body, its CRC, flag, sysFlag, born time and both hosts stay as they are: nothing is decompressed, no body is looked at.
Topic, queue, properties and reconsumeTimes are the caller's; the offset of a half message is gone. What only the store
decides is zero, as the encoder leaves it.

`store/testing/rebuild_twin.py` does the same record by record.
Source: ScheduleMessageService#messageTimeup, TimerMessageStore#convertMessage, AbstractSendMessageProcessor
#consumerSendMsgBack (4.9, 5.3).
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.encoding import MAX_PROPERTIES_BYTES, EncodedRecords
from rmq_spark.store.format.filenames import MAX_DERIVED_TOPIC_CHARS, MAX_TOPIC_CHARS
from rmq_spark.store.format.message_columns import RowFault, Texts, Topics, join_rows
from rmq_spark.store.format.properties import TAGS
from rmq_spark.store.format.property_edits import edit_properties
from rmq_spark.store.format.ragged import Bytes, Positions, of_one_size, take_ranges
from rmq_spark.store.format.record import MAGIC_V1, MAGIC_V2, RECORD_HEAD
from rmq_spark.store.format.record_keys import key_entries
from rmq_spark.store.format.whole_records import WholeRecords, field_shift, pairs_of, unaligned
from rmq_spark.store.units import QueueKey

_FIELDS: Any = RECORD_HEAD.fields
_LENGTH = np.dtype(">i2")  # of the properties
_CRC = "__CRC32#"  # of the bytes of the record that it is in, so of no other
_MAX_BYTES = 1 << 31  # of one array of Arrow's


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
    """Return the records [positions, ends) of `data` made anew, one for each row, in that order; their digest is 0.

    Row `i` goes to topic `topics.name(i)`, queue `queue_ids[i]`. `properties` are whole texts of properties, None for
    those that the records have, byte by byte but for the CRC of the record that they were in; `reconsume_times` None
    for those that they have. Ranges may lie in any order and come twice; all records made together take less than
    2 GiB. The memory is new and may be changed.
    Raises NotWholeError for a range that is no record, RowFault for a topic or properties that no record has room for.
    """
    count = len(positions)
    if not count:
        return _nothing()
    found = WholeRecords.of(data, positions, ends)
    texts = _without_crc(found.texts()) if properties is None else properties
    assert len(texts) == len(queue_ids) == count, (len(texts), len(queue_ids), count)
    text_sizes = Texts.of(texts).sizes
    _refuse_oversize(topics, text_sizes)
    fields = [_topic_field(name) for name in topics.names]
    heads_and_bodies = found.body_ends - found.positions
    sizes = heads_and_bodies + text_sizes + _LENGTH.itemsize + topics.per_row([len(one) for one in fields], np.int64)
    total = int(sizes.sum())
    assert total < _MAX_BYTES, f"{total} bytes of records: make fewer anew at once"
    joined = join_rows(
        take_ranges(data, found.positions, found.body_ends),
        fields[0] if topics.numbers is None else pa.array(fields, pa.binary()).take(pa.array(topics.numbers)),
        of_one_size(text_sizes.astype(_LENGTH).view(f"V{_LENGTH.itemsize}")),
        texts,
    )
    made = np.frombuffer(joined.buffers()[2], np.uint8, total)
    magics = topics.per_row([MAGIC_V2 if _is_long(name) else MAGIC_V1 for name in topics.names], np.uint32)
    _fill_heads(made, sizes, found.sys_flags, magics, queue_ids, reconsume_times)
    numbers = np.zeros(count, np.int64) if topics.numbers is None else topics.numbers
    pairs = pairs_of(texts)
    key_rows, key_hashes = key_entries(pairs, topics.names, numbers)
    queues, queue_numbers = _queues(topics.names, numbers, queue_ids)
    return EncodedRecords(
        data=made,
        sizes=sizes,
        queues=queues,
        queue_numbers=queue_numbers,
        tags_codes=Texts.of(pairs.column(TAGS)).hashes.java().view(np.int32).astype(np.int64),
        key_rows=key_rows,
        key_hashes=key_hashes,
        digest=0,
    )


def _without_crc(texts: pa.BinaryArray) -> pa.BinaryArray:
    """Return the texts without the CRC of a record: a broker that checks it would take the new one for damaged.

    Only texts that hold the name are changed. Source: CommitLog, MessageConst#PROPERTY_CRC32 (5.3).
    """
    has_crc = pc.match_substring(texts, _CRC.encode() + b"\x01")
    if not pc.any(has_crc).as_py():
        return texts
    return pc.if_else(has_crc, edit_properties(texts, (_CRC,), {}), texts)


def _is_long(topic: str) -> bool:
    """Say whether a record with this topic is of version 2 (MessageVersion, 5.1), which has room for it."""
    return len(topic.encode()) > MAX_TOPIC_CHARS


def _topic_field(topic: str) -> bytes:
    name = topic.encode()
    return len(name).to_bytes(2 if _is_long(topic) else 1, "big") + name


def _refuse_oversize(topics: Topics, text_sizes: NDArray[np.int64]) -> None:
    for number, name in enumerate(topics.names):
        has_row = topics.numbers is None or bool((topics.numbers == number).any())
        if has_row and len(name.encode()) > MAX_DERIVED_TOPIC_CHARS:
            raise RowFault(
                topics.first_row(number),
                f"its topic {name[:40]!r}… takes {len(name.encode())} bytes, a record has room for "
                f"{MAX_DERIVED_TOPIC_CHARS}",
            )
    for row in np.flatnonzero(text_sizes > MAX_PROPERTIES_BYTES)[:1].tolist():
        raise RowFault(
            row, f"its properties take {text_sizes[row]} bytes, a record has room for {MAX_PROPERTIES_BYTES}"
        )


def _fill_heads(
    made: Bytes,
    sizes: NDArray[np.int64],
    sys_flags: NDArray[np.int64],
    magics: NDArray[np.uint32],
    queue_ids: NDArray[np.int64],
    reconsume_times: NDArray[np.int64] | None,
) -> None:
    """Write into every head what is new in it, and zeros for what is the store's."""
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
        unaligned(made, layout)[positions + at + field_shift(name, sys_flags)] = values


def _queues(
    names: tuple[str, ...], topic_numbers: NDArray[np.int64], queue_ids: NDArray[np.int64]
) -> tuple[tuple[QueueKey, ...], NDArray[np.int32]]:
    """Return the queues that have records, distinct, and the number of each record's among them."""
    assert int(queue_ids.min()) >= 0, queue_ids.min()
    width = int(queue_ids.max()) + 1
    used, numbers = np.unique(topic_numbers * width + queue_ids, return_inverse=True)
    queues = tuple(QueueKey(names[code // width], code % width) for code in used.tolist())
    return queues, numbers.astype(np.int32)


def _nothing() -> EncodedRecords:
    none = np.zeros(0, np.int64)
    return EncodedRecords(
        np.zeros(0, np.uint8), none, (), none.astype(np.int32), none, none, none.astype(np.int32), digest=0
    )
