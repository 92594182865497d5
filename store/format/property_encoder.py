"""Properties of many messages: encoded from columns and maps, and read fast if they are uniform.

A properties string begins with UNIQ_KEY, which `message_encoder` writes. Then TAGS, KEYS and __SHARDINGKEY follow in
this order. Their values are from their own columns, or from the map if the column is null. The other properties of the
map follow at the end.

Null and empty values are omitted, because RocketMQ's readers ignore them. The properties in `ENGINE_OWNED` are omitted
too. They describe what was done with a message in another store. A broker or client that finds them in a copy would do
the same again, or would confuse the copy with the original:

| names | effect if they were copied |
| --- | --- |
| DELAY, TIMER_… | the message is delayed again when it is resent |
| REAL_TOPIC, REAL_QID | a delayed or half message is moved to this queue |
| TRAN_MSG, PGROUP and others | the message becomes the half message of a transaction that never ends |
| RETRY_TOPIC, ORIGIN_MESSAGE_ID and others | a retry goes to the topic of the original |
| POP_CK and others, CONSUME_START_TIME | the consumer acknowledges another message, or drops this one as expired |
| INNER_…, DUP_INFO, REDIRECT and others | the message is read as a batch or a duplicate, or goes to other queues |
| UNIQ_KEY, __BORNHOST and others | they contradict the copy's own id, host and time |
| __CRC32#, __RMQ.TRANSIENT.… | the checksum is wrong; transient properties are never stored |

All other properties are copied, so a copy differs from the original only in ids, hosts and times. WAIT, CLUSTER,
MSG_REGION and TRACE_ON are copied too. They have no effect in a store, and a reply to a request needs CLUSTER.

Properties strings are uniform if they have the same names at the same positions, and values of the same sizes. The
strings of one producer are mostly uniform, because ids and tags have fixed sizes. For uniform strings, `UniformPairs`
searches only the first row for the positions. `properties.PropertyPairs` reads all other strings.

Source: MessageConst, MessageDecoder#messageProperties2String, MessageExtBrokerInner#tagsString2tagsCode (4.9, 5.3).
"""

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.byte_ranges import Bytes, as_text, is_text, of_one_size
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, join_rows
from rmq_spark.store.format.message_ids import Digests, TextHashes, scatter
from rmq_spark.store.format.properties import KEYS, NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR, TAGS, tiled_names

SHARDING_KEY = "__SHARDINGKEY"
ENGINE_OWNED = frozenset({
    # Time and queue of a delayed delivery.
    "DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELAY_LEVEL", "TIMER_DELIVER_MS", "TIMER_ENQUEUE_MS",
    "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "REAL_TOPIC", "REAL_QID",
    # Transactions.
    "TRAN_MSG", "PGROUP", "TRAN_PREPARED_QUEUE_OFFSET", "__transactionId__", "TRANSACTION_CHECK_TIMES",
    "CHECK_IMMUNITY_TIME_IN_SECONDS",
    # Retries.
    "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES",
    # Set by clients while they consume.
    "CONSUME_START_TIME", "MIN_OFFSET", "MAX_OFFSET", "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME",
    # Batches in one record, further queues, duplicates.
    "INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "DUP_INFO",
    "PROPERTY_FORWARD_QUEUE_ID", "REDIRECT",
    # Id, host and time of the message, and the checksum of its record.
    "UNIQ_KEY", "EXTEND_UNIQ_INFO", "__BORNHOST", "BORN_TIMESTAMP", "__CRC32#",
})  # fmt: skip
TRANSIENT_PREFIX = "__RMQ.TRANSIENT."  # names with this prefix are engine-owned too
OWN_COLUMNS = {TAGS: "tags", KEYS: "keys", SHARDING_KEY: "shardingKey"}  # property -> the column that sets it
# The kind of a name in a map. _PLAIN names are copied, and _OWNED names are engine-owned. If a name has its own column,
# its kind is _FIRST_OWN_COLUMN plus the index of the name in OWN_COLUMNS.
_PLAIN, _OWNED, _FIRST_OWN_COLUMN = 0, 1, 2
_SHOWN_CHARS = 40
_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_NOT_UTF8 = "bytes that are not UTF-8; expected text. Encode it as UTF-8, or put it into the body"


class EncodedProperties:
    """The parts of the properties strings of a batch, without UNIQ_KEY. An empty value in a column is omitted.

    The constructor raises RowFault if a name or value is such that a reader could not parse it back.
    """

    def __init__(
        self,
        tags: Texts | None = None,
        keys: Texts | None = None,
        sharding_keys: Texts | None = None,
        properties: pa.MapArray | None = None,
    ) -> None:
        columns = {TAGS: tags, KEYS: keys, SHARDING_KEY: sharding_keys}
        for name, texts in columns.items():
            if texts is not None:
                _check_values(texts, f"{OWN_COLUMNS[name]} holds")
        pairs = None if properties is None else _Pairs(properties)
        if pairs is not None:
            columns = {name: pairs.under_column(name, texts) for name, texts in columns.items()}
        self.tags, self.keys, self.sharding_keys = columns.values()
        self._columns = {name: texts for name, texts in columns.items() if texts is not None and len(texts.data)}
        self._rest: Texts | None = None
        if pairs is not None:
            self._rest, self._rest_digests = pairs.rest()

    @property
    def sizes(self) -> NDArray[np.int64] | int:
        """The size of each row's properties string, without UNIQ_KEY (bytes). A single number if all are equal."""
        total: NDArray[np.int64] | int = 0
        for name, texts in self._columns.items():
            total = total + texts.sizes + (len(name) + 2) * (texts.sizes > 0 if texts.some_empty else 1)
        return total if self._rest is None else total + self._rest.sizes

    def pieces(self) -> list[bytes | pa.BinaryArray]:
        """Return the pieces of the properties strings, in order, for `join_rows`.

        A piece is a column, or bytes that are the same in all rows.
        """
        pieces: list[bytes | pa.BinaryArray] = []
        for name, texts in self._columns.items():
            before, after = f"{name}\x01".encode(), b"\x02"
            if texts.some_empty:
                present = texts.sizes > 0
                pieces += [_where(present, before), texts.array(), _where(present, after)]
            else:
                pieces += [before, texts.array(), after]
        return pieces if self._rest is None else [*pieces, self._rest.array()]

    def sharding_hashes(self) -> Given | None:
        """Return Java's hash of each sharding key, with a mask of the rows that have a key.

        An empty key in the column is a key too. Returns None if no sharding keys were given.
        """
        texts = self.sharding_keys
        if texts is None:
            return None
        given = np.ones(len(texts), np.bool_) if texts.given is None else texts.given
        return Given(texts.hashes.java(), given)

    def digests(self) -> Digests | np.uint64:
        """Return a 64-bit digest of each row's properties. It does not depend on their order.

        The digest of a row without properties is 0. If no row has properties, the result is the single number 0.
        """
        total: Digests | np.uint64 = np.uint64(0)
        for name, texts in self._columns.items():
            numbers = scatter(texts.hashes.digests() + name_digest(name))
            total = total + (numbers * (texts.sizes > 0) if texts.some_empty else numbers)
        return total if self._rest is None else total + self._rest_digests


class _Pairs:
    """The name-value pairs of a column of maps. Pairs whose value is null or empty are omitted."""

    def __init__(self, maps: pa.MapArray) -> None:
        self._row_count = len(maps)
        offsets = maps.offsets.to_numpy().astype(np.int64)
        begin, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        self._rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
        self._values = Texts.of(maps.items.slice(begin, count))
        invalid = self._values.first_invalid()
        if invalid is not None:
            name = Texts.of(maps.keys.slice(begin + invalid, 1)).bytes(0).decode("utf-8", "replace")
            raise RowFault(int(self._rows[invalid]), f"the property {_shown(name)} {_NOT_UTF8}")
        self._kept = self._values.sizes > 0
        if maps.null_count:
            self._kept &= maps.is_valid().to_numpy(zero_copy_only=False)[self._rows]
        self._names, self._name_of = _distinct(Texts.of(maps.keys.slice(begin, count)), np.diff(offsets))
        self._kinds = np.array([self._kind(number, name) for number, name in enumerate(self._names)], np.int64)
        self._kind_of = self._kinds[self._name_of]

    def _kind(self, number: int, name: bytes) -> int:
        """Return the kind of the name with index `number`. Raises RowFault if the name is invalid."""
        text = name.decode("utf-8", "replace")
        if text in OWN_COLUMNS:
            return _FIRST_OWN_COLUMN + list(OWN_COLUMNS).index(text)
        if not name or NAME_VALUE_SEPARATOR in name or PROPERTY_SEPARATOR in name:
            row = int(self._rows[np.argmax(self._name_of == number)])
            raise RowFault(
                row,
                f"{_shown(text)} is not a property name; expected at least one character, and neither \\x01 nor "
                "\\x02, which separate properties",
            )
        if _CONTROLS.search(name) or text.encode() != name:
            row = int(self._rows[np.argmax(self._name_of == number)])
            raise RowFault(
                row,
                f"the property name {_shown(text)} has a control character or is not UTF-8; expected UTF-8 text "
                "without control characters, since others look like damage in the store. Rename the property",
            )
        return _OWNED if text in ENGINE_OWNED or text.startswith(TRANSIENT_PREFIX) else _PLAIN

    def under_column(self, name: str, column: Texts | None) -> Texts | None:
        """Return the values of the property `name`: those of `column`, and those of the map in rows where it is null.

        Returns None if `column` is None and no map has the property.
        """
        kind = _FIRST_OWN_COLUMN + list(OWN_COLUMNS).index(name)
        if kind not in self._kinds or (column is not None and column.given is None):
            return column
        chosen = self._kept & (self._kind_of == kind)
        if not chosen.any():
            return column
        if column is None:
            column = Texts(np.zeros(0, np.uint8), np.zeros(self._row_count + 1, np.int64))
        given = np.zeros(self._row_count, np.bool_) if column.given is None else column.given.copy()
        pairs = np.flatnonzero(chosen & ~given[self._rows])
        if not len(pairs):
            return column
        values, indices, rows = column.array(), np.arange(self._row_count), self._rows[pairs]
        indices[rows] = len(values) + np.arange(len(pairs))  # if a row is repeated, numpy keeps the last, as readers do
        given[rows] = True
        both = pa.concat_arrays([values, self._values.array().take(pa.array(pairs))])
        merged = Texts.of(both.take(pa.array(indices)))
        _check_values(merged, f"the property {name!r} holds")
        return Texts(merged.data, merged.bounds, given)

    def rest(self) -> tuple[Texts, Digests]:
        """Return for each row the properties string of the pairs that are copied unchanged, and their digest."""
        kept = self._kept & (self._kind_of == _PLAIN)
        names, values, rows = self._name_of, self._values, self._rows
        if not kept.all():
            names, rows = names[kept], rows[kept]
            values = Texts.of(values.array().filter(pa.array(kept)))
        for pair in values.rows_with(PROPERTY_SEPARATOR).tolist()[:1]:
            name = self._names[names[pair]].decode("utf-8", "replace")
            raise RowFault(int(rows[pair]), f"the property {_shown(name)} holds {_NO_SEPARATOR}")
        before = pa.array([name + b"\x01" for name in self._names], pa.binary()).take(pa.array(names))
        joined = Texts.of(join_rows(before, values.array(), b"\x02"))
        counts = np.bincount(rows, minlength=self._row_count)
        pair_bounds = np.zeros(self._row_count + 1, np.int64)
        np.cumsum(counts, out=pair_bounds[1:])
        name_numbers = np.array([name_digest(name) for name in self._names], np.uint64)
        sums = np.zeros(len(names) + 1, np.uint64)
        np.cumsum(scatter(values.hashes.digests() + name_numbers[names]), out=sums[1:])
        digests_of_rows = sums[pair_bounds[1:]] - sums[pair_bounds[:-1]]  # both modulo 2^64
        return Texts(joined.data, joined.bounds[pair_bounds]), digests_of_rows


_NO_SEPARATOR = "the character \\x02, which ends a property: take it out"


def _check_values(texts: Texts, what: str) -> None:
    """Raise RowFault if a value is not valid UTF-8 or contains 0x02. The error's text begins with `what`."""
    invalid = texts.first_invalid()
    if invalid is not None:
        raise RowFault(invalid, f"{what} {_NOT_UTF8}")
    for row in texts.rows_with(PROPERTY_SEPARATOR).tolist()[:1]:
        raise RowFault(row, f"{what} {_NO_SEPARATOR}")


@lru_cache(maxsize=1 << 10)
def is_plain_name(name: str) -> bool:
    """Say whether a property of this name is valid, has no column of its own, and is copied unchanged."""
    try:
        data = name.encode()
    except UnicodeEncodeError:
        return False
    is_owned = name in OWN_COLUMNS or name in ENGINE_OWNED or name.startswith(TRANSIENT_PREFIX)
    return bool(name) and not is_owned and not _CONTROLS.search(data)


def _shown(name: str) -> str:
    return repr(name) if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]!r}… of {len(name)} characters"


def _distinct(names: Texts, counts: NDArray[np.int64]) -> tuple[list[bytes], NDArray[np.intp]]:
    """Return each name once, and for each pair the index of its name. `counts` are the numbers of pairs in the rows.

    Mostly all rows have the same names in the same order. Then only the names of the first row are read.
    """
    width = int(counts[0])
    if width and (counts == width).all():
        period, sizes = int(names.bounds[width]), names.sizes
        if (sizes[width:] == sizes[:-width]).all() and (names.data[period:] == names.data[:-period]).all():
            firsts = [names.bytes(pair) for pair in range(width)]
            distinct = list(dict.fromkeys(firsts))
            return distinct, np.tile([distinct.index(name) for name in firsts], len(counts))
    encoded = names.array().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.intp)


@lru_cache(maxsize=1 << 10)
def name_digest(name: str | bytes) -> np.uint64:
    """Return the digest of one name. Digests are cached, because a batch has only a few different names."""
    data = np.frombuffer(name if isinstance(name, bytes) else name.encode(), np.uint8)
    number: np.uint64 = scatter(TextHashes(data, np.zeros(1, np.int64), np.array([len(data)])).digests())[0]
    return number


def _where(present: NDArray[np.bool_], text: bytes) -> pa.BinaryArray:
    """Return a column that has `text` in the rows marked in `present`, and an empty value in all other rows."""
    offsets = np.zeros(len(present) + 1, np.int32)
    np.cumsum(present * len(text), out=offsets[1:])
    parts = [None, pa.py_buffer(offsets), pa.py_buffer(text * int(present.sum()))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(present), parts)


_ROWS_TOGETHER = 8  # rows are compared in words of eight bytes, and eight rows always fill a whole number of words
_BLOCK_BYTES = 128 << 10  # rows are compared in blocks of this size, which fits into the processor's caches


@dataclass(frozen=True, slots=True)
class UniformPairs:
    """All name-value pairs of uniform properties strings. Each row takes `row_bytes` bytes of `text`.

    Other bytes may precede the properties string in each row.
    """

    text: Bytes
    row_bytes: int
    names: tuple[bytes, ...]  # the names in each row; no name occurs twice
    values: tuple[tuple[int, int], ...]  # [begin, end) of each name's value in a row (bytes)
    is_text: bool  # whether all properties strings are valid UTF-8

    @classmethod
    def of(cls, texts: pa.BinaryArray) -> "UniformPairs | None":
        """Return the pairs of all rows. Returns None if the strings are not uniform, or if there are fewer than eight.

        `texts` must not contain nulls.
        """
        count = len(texts)
        _, offsets, data = texts.buffers()
        if count < _ROWS_TOGETHER or data is None:
            return None
        bounds = np.frombuffer(offsets, np.int32, count + 1, texts.offset * 4)
        begin, size = int(bounds[0]), int(bounds[1] - bounds[0])
        if not size or not np.array_equal(bounds, np.arange(begin, begin + (count + 1) * size, size, dtype=np.int32)):
            return None
        return cls._of_rows(np.frombuffer(data, np.uint8)[begin : begin + count * size], size, 0)

    @classmethod
    def after_topic(cls, tails: NDArray[np.void], topic: bytes) -> "UniformPairs | None":
        """Return the pairs of records whose bytes after the body are `tails`.

        `topic` has the bytes of the topic and its length field. Returns None if the properties strings are not uniform,
        if there are fewer than eight records, or if a record has another topic or another length of properties.
        """
        text, size = tails.view(np.uint8), tails.dtype.itemsize
        before = topic + max(size - len(topic) - 2, 0).to_bytes(2, "big")
        if len(tails) < _ROWS_TOGETHER or size <= len(before) or text[: len(before)].tobytes() != before:
            return None
        return cls._of_rows(text, size, len(before))

    @classmethod
    def _of_rows(cls, text: Bytes, size: int, skipped: int) -> "UniformPairs | None":
        """Return the pairs of rows that take `size` bytes each. The first `skipped` bytes of a row are not properties.

        Returns None if the rows are not uniform.
        """
        first = text[:size].tobytes()
        parts = _parts(first[skipped:])
        if parts is None:
            return None
        values = tuple((skipped + end - length, skipped + end) for _, length, end in parts)
        largest = _largest_byte(text, first, values)
        if largest is None:
            return None
        good = largest < 0x80 or is_text(np.ascontiguousarray(text.reshape(-1, size)[:, skipped:]).ravel())
        return cls(text, size, tuple(name for name, _, _ in parts), values, good)

    def __len__(self) -> int:
        return len(self.text) // self.row_bytes

    def column(self, name: str) -> pa.StringArray:
        """Return the value of the property `name` in every row, as text. It is null if no row has the property."""
        wanted = name.encode()
        if wanted not in self.names:
            return pa.nulls(len(self), pa.string())
        begin, end = self.values[self.names.index(wanted)]
        return as_text(of_one_size(self._bytes(begin, end).copy()), checked=self.is_text)

    def maps(self) -> pa.MapArray:
        """Return all properties of every row as map<string, string>."""
        sizes = tuple(end - begin for begin, end in self.values)
        data = np.empty(len(self) * sum(sizes), np.uint8)
        at = 0
        for (begin, end), size in zip(self.values, sizes, strict=True):
            np.ndarray(len(self), f"V{size}", data, at, sum(sizes))[:] = self._bytes(begin, end)
            at += size
        count = len(self) * len(sizes)
        offsets = _repeated_offsets(sizes, max(len(self) - 1, 0).bit_length())[: count + 1]
        values = pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
        rows = np.arange(0, count + 1, len(sizes), dtype=np.int32)
        names = tiled_names(self.names, len(self))
        return pa.MapArray.from_arrays(pa.array(rows), names, as_text(values, checked=self.is_text))

    def _bytes(self, begin: int, end: int) -> NDArray[np.void]:
        """Return the bytes [begin, end) of every row, as a view."""
        return np.ndarray(len(self), f"V{end - begin}", self.text, begin, self.row_bytes)


def _parts(text: bytes) -> list[tuple[bytes, int, int]] | None:
    """Return the pairs of one properties string, each as name, size of the value, and end of the value (bytes).

    Returns None if the string has a pair without name or value, a value with 0x01, or a name that occurs twice.
    """
    found, at = [], 0
    for part in text.removesuffix(b"\x02").split(b"\x02"):
        name, _, value = part.partition(b"\x01")
        if not name or not value or b"\x01" in value:
            return None
        at += len(part) + 1
        found.append((name, len(value), at - 1))
    distinct = {name.decode("utf-8", "replace") for name, _, _ in found}  # readers compare decoded names
    return found if len(distinct) == len(found) else None


def _largest_byte(text: Bytes, first: bytes, values: tuple[tuple[int, int], ...]) -> int | None:
    """Return the largest byte in all rows, or None if the rows are not uniform.

    The bytes outside the values must be the same in all rows, so each row has the same separators as the first one. If
    all rows together have no more separators than these, then no value contains a separator.
    """
    size, separators = len(first), first.count(b"\x01") + first.count(b"\x02")
    mask = np.full(size, 0xFF, np.uint8)
    for begin, end in values:
        mask[begin:end] = 0
    masks = np.tile(mask, _ROWS_TOGETHER).view(np.uint64)
    wanted = np.tile(np.frombuffer(first, np.uint8), _ROWS_TOGETHER).view(np.uint64) & masks
    together = size * _ROWS_TOGETHER
    step = max(_BLOCK_BYTES // together, 1) * together
    largest = 0
    for at in range(0, len(text), step):
        part = text[at : at + step]
        if len(part) % together:
            begin = at + len(part) - len(part) % together
            part = text[at:begin]
            rest = text[-together:]  # overlaps with `part`; the text has at least this many bytes
            parts = [part, rest] if len(part) else [rest]
        else:
            parts = [part]
        for rows in parts:
            words = rows.view(np.uint64).reshape(-1, size)
            if ((words & masks) != wanted).any():
                return None
            if np.count_nonzero((rows - 1) < 2) != separators * (len(rows) // size):  # 0 wraps to 255
                return None
            largest = max(largest, int(rows.max()))
    return largest


@lru_cache(maxsize=2)  # batches of one producer have the same sizes
def _repeated_offsets(sizes: tuple[int, ...], power: int) -> NDArray[np.int32]:
    """Return the offsets of the values in 2**power rows. Each row has one value of each of these sizes."""
    count = 1 << power
    offsets = np.zeros(len(sizes) * count + 1, np.int64)
    ends = np.cumsum(sizes)
    for column, end in enumerate(ends.tolist()):
        offsets[1 + column :: len(sizes)] = np.arange(end, end + count * int(ends[-1]), int(ends[-1]))
    return offsets.astype(np.int32)  # only offsets after the rows of the caller can overflow
