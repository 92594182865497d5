"""Arrow columns of the messages of one queue; only the requested columns are built.

The cost differs by column. The headers are copied once for all header fields, and the bodies are copied once. For
columns from properties, the properties strings are copied and split once, and the values of each column are copied. The
tests compare the columns with a simple decoder of single records, `record.decode_record` with `properties.parse`.

A message of an inner batch takes flag, body and properties from its item, and the other fields from its record.
Source: MessageDecoder#decode, #decodeMessage (5.3).
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format import properties
from rmq_spark.store.format.byte_ranges import Bytes, of_one_size, take_ranges
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.record_headers import RecordRun
from rmq_spark.store.format.rows import DecodeLimits, PropertyTest, Rows, choose_rows
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

_TIME = pa.timestamp("us", tz="UTC")

# All columns. `*` selects them in this order. The first ten are selected by default.
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


def refuse_unknown_columns(columns: Sequence[str], known: Collection[str]) -> None:
    """Raise OptionError if a column is not one of the `known` names, or if `columns` is one text."""
    if isinstance(columns, str):
        raise OptionError(f'columns="{columns}" is a text; expected a list of names, such as ["{columns}"].')
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise OptionError(f"no such column: {', '.join(unknown)}. Columns are: {', '.join(known)}.")


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
    """Return the messages of the run with queue offsets in [begin, end), and the queue offset where to continue.

    If `test` is given, only messages that match it are returned. Set `expects_all` if you expect that nearly all
    messages match. The second result is less than `end` only if the decompressed bodies reached their limit. Raises
    RecordFault if a record is damaged or differs from its consume-queue entry.
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
    """Return a batch with these columns and no rows."""
    return pa.RecordBatch.from_pylist([], schema=pa.schema([(name, COLUMNS[name]) for name in columns]))


def _header_field(name: str) -> Callable[[Rows], pa.Array]:
    return lambda rows: pa.array(rows.field(name))


def _reconsume_times(rows: Rows) -> pa.Array:
    """Return the column reconsumeTimes. Messages of an inner batch have 0 (MessageDecoder#decodeMessage sets none)."""
    times = rows.field("reconsume_times")
    return pa.array(times if rows.from_item is None else np.where(rows.from_item, np.int32(0), times))


def _timestamp(name: str) -> Callable[[Rows], pa.Array]:
    """Return a function that builds a time column. Times are stored in ms and become microseconds in the column."""
    return lambda rows: pa.array(rows.field(name) * 1000).view(_TIME)


def _repeated(text: str, count: int) -> pa.Array:
    """Return a column with the same text in `count` rows. Successive batches of a queue reuse one cached array."""
    return _power_of_two_times(text, max(count - 1, 0).bit_length()).slice(0, count)


@lru_cache(maxsize=4)  # a text may be long
def _power_of_two_times(text: str, power: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), 1 << power)


def _physical_topic(rows: Rows) -> pa.Array:
    return _repeated(rows.run.topic, len(rows))


def _topic(rows: Rows) -> pa.Array:
    """Return the column topic. For a message in a retry topic it is the original topic, the property RETRY_TOPIC.

    A message without this property has the retry topic.
    Source: DefaultMQPushConsumerImpl#resetRetryAndNamespace.
    """
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
    mask = rows.of_record(replaced)  # an inner batch is never compressed, so a decompressed body is one row
    return pc.replace_with_mask(bodies, mask, pa.array(rows.unpacked.values(), pa.binary()))


def _message_id(rows: Rows) -> pa.Array:
    """Return the column msgId: UNIQ_KEY, or if a message does not have it, offsetMsgId (MessageClientExt#getMsgId)."""
    unique = rows.pairs.column(properties.UNIQ_KEY)
    return unique if not unique.null_count else pc.coalesce(unique, _offset_message_id(rows))


def _offset_message_id(rows: Rows) -> pa.Array:
    """Return the column offsetMsgId: store host and physical offset in upper-case hex digits.

    Source: MessageDecoder#createMessageId.
    """
    offsets = rows.run.physical_offsets.astype(">i8").view("<u2").reshape(-1, 4)
    host = rows.headers.common_host("store_host")
    if host is not None:
        ids = _fixed_text(_ids_of_one_host(host, offsets))
        return ids if rows.record_of is None else ids.take(pa.array(rows.record_of))
    parts = []
    for chosen, hosts in rows.headers.hosts("store_host"):
        words = hosts.view("<u2")
        text = np.empty((len(hosts), words.shape[1] + 4), "<u4")
        text[:, :-4] = _HEX[words[:1] if _all_alike(hosts) else words]
        group_offsets = offsets if chosen is None else offsets[chosen]
        for column in range(4):  # mostly the upper digits of all offsets are the same
            values = group_offsets[:, column]
            text[:, column - 4] = _HEX[values[0] if (values == values[0]).all() else values]
        parts.append((chosen, _fixed_text(text.view(np.uint8))))
    return _by_record(rows, parts)


def _ids_of_one_host(host: bytes, offsets: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return the characters of the ids of records with the same store host, as an array of (rows, characters).

    All ids begin as copies of the first id. Then digits that are not the same in all ids are overwritten; mostly these
    are only the lower digits of the offsets.
    """
    template = np.concatenate([_HEX[np.frombuffer(host, "<u2")], _HEX[offsets[0]]])
    text = np.empty(len(offsets), f"V{template.nbytes}")
    text[:] = template.view(text.dtype)
    digits = text.view("<u4").reshape(len(offsets), -1)
    for column in range(4):
        values = offsets[:, column]
        if not (values == values[0]).all():
            digits[:, column - 4] = _HEX[values]
    return text.view(np.uint8).reshape(len(offsets), -1)


def _host(name: str) -> Callable[[Rows], pa.Array]:
    """Return a function that builds a column of hosts, as `ip:port` or, for IPv6, `[ip]:port`.

    A host that occurs in many rows is formatted only once.
    """

    def build(rows: Rows) -> pa.Array:
        common = rows.headers.common_host(name)
        if common is not None:
            return _repeated(str(decode_host(common)), len(rows))
        parts = []
        for chosen, hosts in rows.headers.hosts(name):
            if _all_alike(hosts):
                text = _repeated(str(decode_host(hosts[0].tobytes())), len(hosts))
            else:
                fields = hosts.view(f"V{hosts.shape[1]}").ravel()
                distinct, numbers = np.unique(fields, return_inverse=True)
                names = pa.array([str(decode_host(host.tobytes())) for host in distinct], pa.string())
                text = names.take(pa.array(numbers))
            parts.append((chosen, text))
        return _by_record(rows, parts)

    return build


def _all_alike(hosts: Bytes) -> bool:
    """Return whether all rows have the same host. There must be at least one row."""
    words = hosts.view(np.uint32).reshape(len(hosts), -1)
    return all(bool((words[:, column] == words[0, column]).all()) for column in range(words.shape[1]))


# Two bytes as a little-endian number -> their four upper-case hex digits. Built with numpy to keep the import fast.
_HEX_OF_BYTE = np.frombuffer(bytes(range(256)).hex().upper().encode(), "<u2").astype(np.uint32)
_HEX = (_HEX_OF_BYTE[None, :] | _HEX_OF_BYTE[:, None] << 16).ravel()


def _fixed_text(characters: NDArray[np.uint8]) -> pa.StringArray:
    """Return an array of ASCII characters with the shape (rows, width) as a column of strings."""
    count, width = characters.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    data = np.ascontiguousarray(characters)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(data))


def _by_record(rows: Rows, parts: list[tuple[NDArray[np.intp] | None, pa.Array]]) -> pa.Array:
    """Return a column with the value of each message's record, in the order of the messages.

    `parts` has a pair for each group of records: the indices of the records (None for all), and their values.
    """
    groups = [chosen for chosen, _ in parts if chosen is not None]
    if not groups and rows.record_of is None:
        return parts[0][1]
    indices = np.arange(len(rows.run))
    if groups:
        indices[np.concatenate(groups)] = np.arange(len(rows.run))
    return pa.concat_arrays([text for _, text in parts]).take(pa.array(rows.of_record(indices)))


_BUILDERS: dict[str, Callable[[Rows], pa.Array]] = {
    "topic": _topic,
    "queueId": _header_field("queue_id"),
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
    "flag": _header_field("flag"),
    "sysFlag": _header_field("sys_flag"),  # as stored, even if the body is returned decompressed
    "physicalTopic": _physical_topic,
}
assert list(_BUILDERS) == list(COLUMNS)
