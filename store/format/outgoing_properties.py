"""The properties of messages that are to be stored: from columns and maps of rows to the text in each record.

Five things stand in a text, in this order: UNIQ_KEY, which the encoder writes; TAGS, KEYS and __SHARDINGKEY, each from
its column or, where that is null, from the map; then the rest of the map.

What is left out: null and empty values, which RocketMQ's readers lose; and names that the engine owns
(`ENGINE_OWNED`). Those say what was done with a message where it was stored before. Left in, they would make a broker
or a client do it again, or take the copy for the original:

| names | what they would do in a copy |
| --- | --- |
| DELAY, TIMER_… | delay the message again as soon as anybody re-sends it |
| REAL_TOPIC, REAL_QID | name the queue that a delayed or half message is moved to |
| TRAN_MSG, PGROUP and others | make it a half of a transaction that nobody will finish |
| RETRY_TOPIC, ORIGIN_MESSAGE_ID and others | send a copy that is to be retried back to where the original was |
| POP_CK and others, CONSUME_START_TIME | acknowledge another message, or expire in the consumer at once |
| INNER_…, DUP_INFO, REDIRECT and others | be read as a batch, as a duplicate, or go to other queues |
| UNIQ_KEY, __BORNHOST and others | contradict the copy's own id, host and time |
| __CRC32#, __RMQ.TRANSIENT.… | be wrong: the checksum of other bytes, and what no store keeps |

All else stays, so that a copy is equal but for ids, hosts and times. So do WAIT, CLUSTER, MSG_REGION and TRACE_ON,
which a producer or broker adds: nothing in a store acts on them, and a reply to a request needs CLUSTER.

Source: MessageConst, MessageDecoder#messageProperties2String, MessageExtBrokerInner#tagsString2tagsCode (4.9, 5.3).
"""

import re
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.message_columns import Given, RowFault, Texts, join_rows
from rmq_spark.store.format.properties import KEYS, NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR, TAGS
from rmq_spark.store.format.text_hashes import Digests, TextHashes, scatter

SHARDING_KEY = "__SHARDINGKEY"
ENGINE_OWNED = frozenset({
    # When and where a delayed message is delivered.
    "DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELAY_LEVEL", "TIMER_DELIVER_MS", "TIMER_ENQUEUE_MS",
    "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "REAL_TOPIC", "REAL_QID",
    # Transactions.
    "TRAN_MSG", "PGROUP", "TRAN_PREPARED_QUEUE_OFFSET", "__transactionId__", "TRANSACTION_CHECK_TIMES",
    "CHECK_IMMUNITY_TIME_IN_SECONDS",
    # Retries.
    "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES",
    # What a client notes while it consumes.
    "CONSUME_START_TIME", "MIN_OFFSET", "MAX_OFFSET", "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME",
    # Batches in one record, further queues, duplicates.
    "INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "DUP_INFO",
    "PROPERTY_FORWARD_QUEUE_ID", "REDIRECT",
    # Id, host and time of the message itself, and the checksum of its record.
    "UNIQ_KEY", "EXTEND_UNIQ_INFO", "__BORNHOST", "BORN_TIMESTAMP", "__CRC32#",
})  # fmt: skip
TRANSIENT_PREFIX = "__RMQ.TRANSIENT."  # names that begin so are the engine's too
OWN_COLUMNS = {TAGS: "tags", KEYS: "keys", SHARDING_KEY: "shardingKey"}  # property -> the column that sets it

_PLAIN, _OWNED = 0, 1  # what becomes of a name in a map; above: the place of its column in OWN_COLUMNS
_FIRST_OWN_COLUMN = 2
_SHOWN_CHARS = 40
_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_NOT_UTF8 = "bytes that are not UTF-8; expected text. Encode it as UTF-8, or put it into the body"


class OutgoingProperties:
    """What the texts of a batch are made of, but for UNIQ_KEY. An empty text in a column here means: none.

    Raises RowFault for a name or value that a reader would not find again.
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
        """The bytes that each row's text takes."""
        total: NDArray[np.int64] | int = 0
        for name, texts in self._columns.items():
            total = total + texts.sizes + (len(name) + 2) * (texts.sizes > 0 if texts.some_empty else 1)
        return total if self._rest is None else total + self._rest.sizes

    def pieces(self) -> list[bytes | pa.BinaryArray]:
        """Return what each row's text is joined from: a column, or bytes that are the same in all rows."""
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
        """Return Java's hash of each sharding key; an empty one that its column gives counts too."""
        texts = self.sharding_keys
        if texts is None:
            return None
        given = np.ones(len(texts), np.bool_) if texts.given is None else texts.given
        return Given(texts.hashes.java(), given)

    def digests(self) -> Digests | np.uint64:
        """Return 64 bits for each row that tell its properties apart, whatever their order; 0 without any."""
        total: Digests | np.uint64 = np.uint64(0)
        for name, texts in self._columns.items():
            numbers = scatter(texts.hashes.digests() + name_digest(name))
            total = total + (numbers * (texts.sizes > 0) if texts.some_empty else numbers)
        return total if self._rest is None else total + self._rest_digests


class _Pairs:
    """The pairs of a map column that are to be stored. A value that is null or empty is none."""

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
        self._fates = np.array([self._fate(number, name) for number, name in enumerate(self._names)], np.int64)
        self._fate_of = self._fates[self._name_of]

    def _fate(self, number: int, name: bytes) -> int:
        text = name.decode("utf-8", "replace")
        if text in OWN_COLUMNS:
            return _FIRST_OWN_COLUMN + list(OWN_COLUMNS).index(text)
        if not name or NAME_VALUE_SEPARATOR in name or PROPERTY_SEPARATOR in name:
            row = int(self._rows[np.argmax(self._name_of == number)])
            raise RowFault(
                row,
                f"{_shown(text)} is no name of a property: accepted are names of at least one character that hold "
                "neither \\x01 nor \\x02, which separate properties",
            )
        if _CONTROLS.search(name) or text.encode() != name:
            row = int(self._rows[np.argmax(self._name_of == number)])
            raise RowFault(
                row,
                f"the property name {_shown(text)} has a control character or is not UTF-8; expected UTF-8 text "
                "without control characters. Such a name reads as damage in the store: rename the property",
            )
        return _OWNED if text in ENGINE_OWNED or text.startswith(TRANSIENT_PREFIX) else _PLAIN

    def under_column(self, name: str, column: Texts | None) -> Texts | None:
        """Return the column of that name's values, where it is null with the map's values in it."""
        fate = _FIRST_OWN_COLUMN + list(OWN_COLUMNS).index(name)
        if fate not in self._fates or (column is not None and column.given is None):
            return column
        chosen = self._kept & (self._fate_of == fate)
        if not chosen.any():
            return column
        if column is None:
            column = Texts(np.zeros(0, np.uint8), np.zeros(self._row_count + 1, np.int64))
        given = np.zeros(self._row_count, np.bool_) if column.given is None else column.given.copy()
        pairs = np.flatnonzero(chosen & ~given[self._rows])
        if not len(pairs):
            return column
        values, places, rows = column.array(), np.arange(self._row_count), self._rows[pairs]
        places[rows] = len(values) + np.arange(len(pairs))  # of equal names numpy keeps the last, as readers do
        given[rows] = True
        both = pa.concat_arrays([values, self._values.array().take(pa.array(pairs))])
        merged = Texts.of(both.take(pa.array(places)))
        _check_values(merged, f"the property {name!r} holds")
        return Texts(merged.data, merged.bounds, given)

    def rest(self) -> tuple[Texts, Digests]:
        """Return the text of all other pairs, joined row by row, and each row's digest of them."""
        kept = self._kept & (self._fate_of == _PLAIN)
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
    invalid = texts.first_invalid()
    if invalid is not None:
        raise RowFault(invalid, f"{what} {_NOT_UTF8}")
    for row in texts.rows_with(PROPERTY_SEPARATOR).tolist()[:1]:
        raise RowFault(row, f"{what} {_NO_SEPARATOR}")


def _shown(name: str) -> str:
    return repr(name) if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]!r}… of {len(name)} characters"


def _distinct(names: Texts, counts: NDArray[np.int64]) -> tuple[list[bytes], NDArray[np.intp]]:
    """Return the distinct names, and for each pair which of them it has; `counts` are the pairs of each row.

    Rows mostly have the same names in the same order: then those of the first row stand for all.
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
    """Return the digest of one name, of which few make up the whole batch."""
    data = np.frombuffer(name if isinstance(name, bytes) else name.encode(), np.uint8)
    number: np.uint64 = scatter(TextHashes(data, np.zeros(1, np.int64), np.array([len(data)])).digests())[0]
    return number


def _where(present: NDArray[np.bool_], text: bytes) -> pa.BinaryArray:
    """Return the text in the rows where it is present, an empty one elsewhere."""
    offsets = np.zeros(len(present) + 1, np.int32)
    np.cumsum(present * len(text), out=offsets[1:])
    parts = [None, pa.py_buffer(offsets), pa.py_buffer(text * int(present.sum()))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(present), parts)
