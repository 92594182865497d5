"""Records of one queue -> the columns of a row, as Arrow arrays, and only the columns that were asked for.

Everything works on whole columns. Three groups cost differently: fields of the head (one gather for all of
them), the body (one take), and what stands in the properties (a take, a split, a take for each). The slow
and obvious twin is `record.decode_record` with `properties.parse`; the tests hold both against each other.

Source of the rows: MessageDecoder#decode and, for an inner batch, #decodeMessage (5.3): every message of the
batch takes flag, body and properties from its item and all else from the outer record.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format import properties
from rmq_spark.store.format.chosen_rows import PropertyTest, choose_rows
from rmq_spark.store.format.filenames import RETRY_TOPIC_PREFIX
from rmq_spark.store.format.heads import RecordRun
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.ragged import Bytes, of_one_size, take_ranges
from rmq_spark.store.format.rows import DecodeLimits, Rows

_TIME = pa.timestamp("us", tz="UTC")

# Every column that a row can have, in the order in which `*` shows them; the first ten are the default.
COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "queueId": pa.int32(),
    "queueOffset": pa.int64(),
    "commitLogOffset": pa.int64(),
    "tags": pa.string(),
    "keys": pa.string(),
    "body": pa.binary(),
    "bornTimestamp": _TIME,
    "storeTimestamp": _TIME,
    "reconsumeTimes": pa.int32(),
    "properties": pa.map_(pa.string(), pa.string()),
    "msgId": pa.string(),
    "offsetMsgId": pa.string(),
    "bornHost": pa.string(),
    "storeHost": pa.string(),
    "flag": pa.int32(),
    "sysFlag": pa.int32(),
    "physicalTopic": pa.string(),
}

_FROM_PROPERTIES = ("tags", "keys", "properties", "msgId")


def decode(
    run: RecordRun,
    columns: Sequence[str],
    begin: int,
    end: int,
    limits: DecodeLimits,
    test: PropertyTest | None = None,
    *,
    expects_all: bool = False,
) -> tuple[pa.RecordBatch, int]:
    """Return the messages of the run with queue offsets in [begin, end), and the next queue offset.

    With a `test` only those that it wants, which may be expected to be nearly all. The next offset lies before `end`
    when decompressed bodies would have grown beyond their limit: go on from there. Raises RecordFault for a record that
    is not what its unit promised.
    """
    asked = set(columns)
    want_bodies, want_properties = "body" in asked, not asked.isdisjoint(_FROM_PROPERTIES)
    rows: Rows | None
    if test is None:
        rows = Rows(run, begin, end, limits, want_bodies=want_bodies, want_properties=want_properties)
    else:
        rows = choose_rows(
            run,
            begin,
            end,
            limits,
            test,
            want_bodies=want_bodies,
            want_properties=want_properties,
            expects_all=expects_all,
        )
        if rows is None:
            return empty_batch(columns), end
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.nulls(len(rows), pa.struct([]))), rows.next_offset
    arrays = [_BUILDERS[name](rows) for name in columns]
    schema = pa.schema([(name, COLUMNS[name]) for name in columns])
    return pa.RecordBatch.from_arrays(arrays, schema=schema), rows.next_offset


def empty_batch(columns: Sequence[str]) -> pa.RecordBatch:
    """Return a batch of these columns without a message."""
    return pa.RecordBatch.from_pylist([], schema=pa.schema([(name, COLUMNS[name]) for name in columns]))


def _head_field(name: str) -> Callable[[Rows], pa.Array]:
    return lambda rows: pa.array(rows.field(name))


def _reconsume_times(rows: Rows) -> pa.Array:
    """A message of an inner batch was never retried by itself (MessageDecoder#decodeMessage sets none)."""
    times = rows.field("reconsume_times")
    return pa.array(times if rows.from_item is None else np.where(rows.from_item, np.int32(0), times))


def _timestamp(name: str) -> Callable[[Rows], pa.Array]:
    """Return a builder of a time column: ms on disk, microseconds in the row."""
    return lambda rows: pa.array(rows.field(name) * 1000).view(_TIME)


def _repeated(text: str, count: int) -> pa.Array:
    """Return one text `count` times; batches of a queue mostly ask for the same again."""
    return _power_of_two_times(text, max(count - 1, 0).bit_length()).slice(0, count)


@lru_cache(maxsize=4)  # a text may be long
def _power_of_two_times(text: str, power: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), 1 << power)


def _physical_topic(rows: Rows) -> pa.Array:
    return _repeated(rows.run.topic, len(rows))


def _topic(rows: Rows) -> pa.Array:
    """A retried message shows the topic it was first sent to (DefaultMQPushConsumerImpl#resetRetryAndNamespace)"""
    topic = _physical_topic(rows)
    if not rows.run.topic.startswith(RETRY_TOPIC_PREFIX):
        return topic
    return pc.coalesce(rows.pairs.column(properties.RETRY_TOPIC), topic)


def _body(rows: Rows) -> pa.Array:
    if rows.parts is not None:
        return of_one_size(rows.parts.bodies)
    bodies = take_ranges(rows.run.buffer, rows.body_begins, rows.body_ends)
    if not rows.unpacked:
        return bodies
    replaced = np.zeros(len(rows.run), np.bool_)
    replaced[list(rows.unpacked)] = True
    mask = rows.of_record(replaced)  # an inner batch is never compressed: one value a record is enough
    return pc.replace_with_mask(bodies, mask, pa.array(rows.unpacked.values(), pa.binary()))


def _sys_flag(rows: Rows) -> pa.Array:
    """The stored flags, those of a body that is returned decompressed as well."""
    return pa.array(rows.field("sys_flag"))


def _message_id(rows: Rows) -> pa.Array:
    """UNIQ_KEY, or the offsetMsgId of a message that has none (MessageClientExt#getMsgId)."""
    unique = rows.pairs.column(properties.UNIQ_KEY)
    return unique if not unique.null_count else pc.coalesce(unique, _offset_message_id(rows))


def _offset_message_id(rows: Rows) -> pa.Array:
    """Store host and physical offset in upper-case hex (MessageDecoder#createMessageId)."""
    offsets = rows.run.physical_offsets.astype(">i8").view("<u2").reshape(-1, 4)
    host = rows.heads.common_host("store_host")
    if host is not None:
        return _of_records(rows, _fixed_text(_ids_of_one_host(host, offsets)))
    parts = []
    for chosen, hosts in rows.heads.hosts("store_host"):
        words = hosts.view("<u2")
        text = np.empty((len(hosts), words.shape[1] + 4), "<u4")
        text[:, :-4] = _HEX[words[:1] if _all_alike(hosts) else words]
        places = offsets if chosen is None else offsets[chosen]
        for column in range(4):  # the upper half hardly ever changes from record to record
            values = places[:, column]
            text[:, column - 4] = _HEX[values[0] if (values == values[0]).all() else values]
        parts.append((chosen, _fixed_text(text.view(np.uint8))))
    return _by_record(rows, parts)


def _ids_of_one_host(host: bytes, offsets: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return the ids' characters: mostly only the lower half of an offset differs from the first one's."""
    like_first = np.concatenate([_HEX[np.frombuffer(host, "<u2")], _HEX[offsets[0]]])
    text = np.empty(len(offsets), f"V{like_first.nbytes}")
    text[:] = like_first.view(text.dtype)
    digits = text.view("<u4").reshape(len(offsets), -1)
    for column in range(4):
        values = offsets[:, column]
        if not (values == values[0]).all():
            digits[:, column - 4] = _HEX[values]
    return text.view(np.uint8).reshape(len(offsets), -1)


def _host(name: str) -> Callable[[Rows], pa.Array]:
    """Return a builder of `ip:port`, `[ip]:port` for IPv6; each distinct host is spelt once."""

    def build(rows: Rows) -> pa.Array:
        common = rows.heads.common_host(name)
        if common is not None:
            return _repeated(str(decode_host(common)), len(rows))
        parts = []
        for chosen, hosts in rows.heads.hosts(name):
            if _all_alike(hosts):
                text = _repeated(str(decode_host(hosts[0].tobytes())), len(hosts))
            else:
                whole = hosts.view(f"V{hosts.shape[1]}").ravel()
                distinct, which = np.unique(whole, return_inverse=True)
                spelt = pa.array([str(decode_host(host.tobytes())) for host in distinct], pa.string())
                text = spelt.take(pa.array(which))
            parts.append((chosen, text))
        return _by_record(rows, parts)

    return build


def _all_alike(hosts: Bytes) -> bool:
    """Say whether all rows, at least one, are the same host."""
    words = hosts.view(np.uint32).reshape(len(hosts), -1)
    return all(bool((words[:, column] == words[0, column]).all()) for column in range(words.shape[1]))


# A byte -> its two upper-case hex digits; two bytes, read as a little-endian number -> their four. By columns: every
# process that reads waits for it.
_HEX_OF_BYTE = np.frombuffer(bytes(range(256)).hex().upper().encode(), "<u2").astype(np.uint32)
_HEX = (_HEX_OF_BYTE[None, :] | _HEX_OF_BYTE[:, None] << 16).ravel()


def _fixed_text(characters: NDArray[np.uint8]) -> pa.StringArray:
    """Return (rows, width) ASCII characters as strings."""
    count, width = characters.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    data = np.ascontiguousarray(characters)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(data))


def _of_records(rows: Rows, values: pa.Array) -> pa.Array:
    """Repeat a value of each record for each of its messages."""
    return values if rows.record_of is None else values.take(pa.array(rows.record_of))


def _by_record(rows: Rows, parts: list[tuple[NDArray[np.intp] | None, pa.Array]]) -> pa.Array:
    """Put values computed for groups of records back in order, one for each message."""
    groups = [chosen for chosen, _ in parts if chosen is not None]
    if not groups and rows.record_of is None:
        return parts[0][1]
    place = np.arange(len(rows.run))
    if groups:
        place[np.concatenate(groups)] = np.arange(len(rows.run))
    return pa.concat_arrays([text for _, text in parts]).take(pa.array(rows.of_record(place)))


_BUILDERS: dict[str, Callable[[Rows], pa.Array]] = {
    "topic": _topic,
    "queueId": _head_field("queue_id"),
    "queueOffset": lambda rows: pa.array(rows.queue_offsets),
    "commitLogOffset": lambda rows: pa.array(rows.of_record(rows.run.physical_offsets)),
    "tags": lambda rows: rows.pairs.column(properties.TAGS),
    "keys": lambda rows: rows.pairs.column(properties.KEYS),
    "body": _body,
    "bornTimestamp": _timestamp("born_timestamp"),
    "storeTimestamp": _timestamp("store_timestamp"),
    "reconsumeTimes": _reconsume_times,
    "properties": lambda rows: rows.pairs.maps(),
    "msgId": _message_id,
    "offsetMsgId": _offset_message_id,
    "bornHost": _host("born_host"),
    "storeHost": _host("store_host"),
    "flag": _head_field("flag"),
    "sysFlag": _sys_flag,
    "physicalTopic": _physical_topic,
}
assert list(_BUILDERS) == list(COLUMNS)
