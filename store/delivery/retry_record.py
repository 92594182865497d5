"""Retry records: the properties of the copies that go to a retry topic or to the dead letters, as Arrow columns.

If the original has expired, its record is made from the row that was sent back, as a client sends a message again that
its broker cannot read. This record is a new message. It has body, flag, tags, keys and properties of the row, and also
its message id and born time if the row has these columns. Properties whose names the engine owns are left out, as in
any message. RECONSUME_TIME and MAX_RECONSUME_TIMES are set as a client sets them.
Source: DefaultMQPushConsumerImpl#sendMessageBackAsNormalMessage, SendMessageProcessor#handleRetryAndDLQ (5.3; with 4.9
a message becomes a dead letter one failure earlier here).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.delivery.retry_policy import Decisions, RetryTopics
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.byte_ranges import of_one_size
from rmq_spark.store.format.failed_rows import FailedRows
from rmq_spark.store.format.index_keys import DELAY
from rmq_spark.store.format.message_columns import RowFault, Texts
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.properties import (
    MAX_PROPERTIES_BYTES,
    RECORD_CRC,
    RETRY_TOPIC,
    UNIQ_KEY,
    WAIT,
    Put,
    edit_properties,
)
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.record_batch import WholeRecords, field_shift, pairs_of, unaligned
from rmq_spark.store.format.timer import REAL_QID, REAL_TOPIC
from rmq_spark.store.names import RETRY_TOPIC_PREFIX
from rmq_spark.store.transaction.sink import RecordBuilder, RecordBuilderSettings

ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
CONSUME_ERROR = "CONSUME_ERROR"
MAX_ERROR_CHARS = 1024

# Properties that ask for the timer. They are removed from a copy that waits at a delay level, because a broker of 5.x
# removes them if it delays by level (HookUtils#checkIfTimerMessage).
_TIMER_WISHES = ("TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS")
_FIELDS: Any = RECORD_HEAD.fields
_STORE_HOST_END = _FIELDS["reconsume_times"][1]
_SEPARATORS = "[\x01\x02]"
_HEX = np.frombuffer("".join(f"{byte:02X}" for byte in range(256)).encode(), "V2")


def copied_properties(
    originals: WholeRecords,
    texts: pa.BinaryArray | None,
    decisions: Decisions,
    retry_topic: str,
    queue_ids: NDArray[np.int64],
    errors: pa.StringArray | None,
) -> pa.BinaryArray:
    """Return the encoded properties of the copies, in the order of `originals`.

    If `texts` is given, its properties are used instead of those of the originals. `queue_ids` are the queues of
    `retry_topic` to which the copies go after they have waited. `errors` says why each message failed; null keeps the
    error that an earlier copy has recorded.
    """
    texts = originals.texts() if texts is None else texts
    pairs = pairs_of(texts)
    waits = ~decisions.are_dead
    put: dict[str, Put] = {
        RETRY_TOPIC: pc.coalesce(pairs.column(RETRY_TOPIC).cast(pa.binary()), originals.topics()),
        ORIGIN_MESSAGE_ID: _origins(originals, pairs.column(ORIGIN_MESSAGE_ID)),
        WAIT: b"false",
        DELAY: _digits(decisions.levels),
    }
    if waits.any():
        put[REAL_TOPIC] = _where(waits, pa.repeat(pa.scalar(retry_topic.encode(), pa.binary()), len(waits)))
        put[REAL_QID] = _where(waits, _digits(queue_ids))
    edited = edit_properties(texts, (RECORD_CRC,), put, dict.fromkeys(_TIMER_WISHES, waits))
    if errors is None or errors.null_count == len(errors):
        return edited
    return edit_properties(edited, (), {CONSUME_ERROR: _fitting(errors, edited)})


def offset_message_ids(originals: WholeRecords) -> pa.BinaryArray:
    """Return the offsetMsgId of each record: its store host and physical offset in upper-case hex.

    Source: MessageDecoder#createMessageId.
    """
    offsets = originals.field("physical_offset").astype(">i8").view(np.uint8).reshape(-1, 8)
    shifts = np.broadcast_to(field_shift("store_host", originals.sys_flags), len(originals))
    begins = originals.positions + _FIELDS["store_host"][1] + shifts
    widths = originals.body_begins - begins - (RECORD_HEAD.itemsize - _STORE_HOST_END)
    parts, order = [], []
    for width in np.unique(widths).tolist():
        rows = np.flatnonzero(widths == width)
        hosts = originals.data[begins[rows][:, None] + np.arange(width)]
        text = _HEX[np.concatenate([hosts, offsets[rows]], axis=1)]
        parts.append(of_one_size(np.ascontiguousarray(text).view(f"V{2 * (width + 8)}").ravel()))
        order.append(rows)
    ranks = np.empty(len(originals), np.int64)
    ranks[np.concatenate(order)] = np.arange(len(originals))
    return pa.concat_arrays(parts).take(pa.array(ranks))


def _origins(originals: WholeRecords, known: pa.StringArray) -> pa.BinaryArray:
    """Return the id of each message's first original: the `known` one or, if that is blank, the record's own.

    Blank means null, empty or only white space (UtilAll#isBlank).
    """
    blank = pc.equal(pc.utf8_trim_whitespace(known), "")
    known = pc.if_else(pc.fill_null(blank, True), pa.scalar(None, pa.string()), known).cast(pa.binary())
    return known if not known.null_count else pc.coalesce(known, offset_message_ids(originals))


def _digits(numbers: NDArray[np.int64]) -> pa.BinaryArray:
    return pa.array(numbers).cast(pa.string()).cast(pa.binary())


def _where(chosen: NDArray[np.bool_], values: pa.BinaryArray) -> pa.BinaryArray:
    return values if chosen.all() else pc.if_else(pa.array(chosen), values, pa.scalar(None, pa.binary()))


def _fitting(errors: pa.StringArray, texts: pa.BinaryArray) -> pa.BinaryArray:
    """Return the errors without separators, each cut to MAX_ERROR_CHARS and to the room left beside `texts`.

    `texts` are the other properties of each record. An empty error becomes null.
    """
    cut = pc.utf8_slice_codeunits(pc.replace_substring_regex(errors, _SEPARATORS, " "), 0, MAX_ERROR_CHARS)
    sizes = pc.fill_null(pc.binary_length(cut), 0).to_numpy()
    room = MAX_PROPERTIES_BYTES - Texts.of(texts).sizes - len(CONSUME_ERROR) - 2
    values = cut.cast(pa.binary())
    tight = np.flatnonzero(sizes > room)
    if len(tight):  # rare, because it needs a record that is almost filled by its properties
        # Decoding drops the last character of UTF-8 if it was cut in the middle.
        shorter = [
            values[row].as_py()[: max(int(room[row]), 0)].decode("utf-8", "ignore").encode() for row in tight.tolist()
        ]
        mask = np.zeros(len(sizes), np.bool_)
        mask[tight] = True
        values = pc.replace_with_mask(values, pa.array(mask), pa.array(shorter, pa.binary()))
    return pc.if_else(pc.equal(pc.binary_length(values), 0), pa.scalar(None, pa.binary()), values)


RECONSUME_TIME, MAX_RECONSUME_TIMES = "RECONSUME_TIME", "MAX_RECONSUME_TIMES"
_TAKEN = ("body", "tags", "keys", "properties", "flag")
_NONE = pa.scalar(None, pa.string())


@dataclass(frozen=True, slots=True)
class Resent:
    """Records made from rows, and the properties from which the properties of their copies are made."""

    records: EncodedRecords
    texts: pa.BinaryArray


class Resender:
    """Makes records for the retry topic of a group from rows whose originals cannot be used. Not thread-safe."""

    def __init__(self, root: str, topics: RetryTopics, commit_log_path: str | None) -> None:
        self._topics = topics
        self._builder = RecordBuilder(root, RecordBuilderSettings(commit_log_path, queue_count=topics.retry_queues))

    def encode(self, batch: pa.RecordBatch, rows: FailedRows) -> Resent:
        """Return the rows of `batch`, at least one, as records.

        `rows` are the same rows as FailedRows. Raises RowFault if a row has no body or cannot be encoded.
        """
        columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
        body = columns.get("body")
        if body is None or body.null_count:
            row = 0 if body is None else body.is_null().index(True).as_py()
            raise RowFault(
                row,
                f"{rows.describe(row)} cannot be sent back: its original cannot be used, and the row has no body. "
                "Select the column body too (and tags, keys, properties to keep them).",
            )
        taken = {name: columns[name] for name in _TAKEN if name in columns}
        retry = pa.repeat(pa.scalar(self._topics.retry), batch.num_rows)
        try:
            records = self._builder.encode(pa.RecordBatch.from_pydict({"topic": retry, **taken}), None)
        except OptionError as error:
            raise RowFault(0, f"in this row or a later one: {error}") from None
        ends = np.cumsum(records.sizes)
        if "bornTimestamp" in columns:
            layout, at = _FIELDS["born_timestamp"][:2]
            born_ms = columns["bornTimestamp"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
            known = born_ms.is_valid().to_numpy(zero_copy_only=False)
            data = records.data if records.data.flags.writeable else records.data.copy()
            positions = (ends - records.sizes + at)[known]
            unaligned(data, layout)[positions] = pc.fill_null(born_ms, 0).to_numpy()[known] // 1000
            records = replace(records, data=data)
        texts = WholeRecords.of(records.data, ends - records.sizes, ends).texts()
        return Resent(records, edit_properties(texts, (), self._trail(columns, rows)))

    def _trail(self, columns: dict[str, Any], rows: FailedRows) -> dict[str, Put]:
        """Return the properties that link each message with its original and its earlier copies."""
        properties = columns.get("properties")

        def existing(name: str) -> pa.Array:
            if properties is None:
                return pa.nulls(len(rows), pa.string())
            return _without_blanks(pc.map_lookup(properties, name, "last").cast(pa.string()))

        message_ids = _without_blanks(columns["msgId"]) if "msgId" in columns else pa.nulls(len(rows), pa.string())
        unique = pc.coalesce(existing(UNIQ_KEY), message_ids)
        first = pc.coalesce(existing(ORIGIN_MESSAGE_ID), unique)
        if "offsetMsgId" in columns:
            first = pc.coalesce(first, _without_blanks(columns["offsetMsgId"]))
        seen = [existing(RETRY_TOPIC)]
        for topics in (rows.topics, rows.physical_topics):
            if topics is not None:
                seen.append(pc.if_else(pc.starts_with(topics, RETRY_TOPIC_PREFIX), _NONE, topics))
        put: dict[str, Put] = {
            UNIQ_KEY: unique.cast(pa.binary()),
            ORIGIN_MESSAGE_ID: first.cast(pa.binary()),
            RETRY_TOPIC: pc.coalesce(*seen).cast(pa.binary()),
            RECONSUME_TIME: pa.array(rows.copy_times).cast(pa.string()).cast(pa.binary()),
            MAX_RECONSUME_TIMES: str(self._topics.max_reconsume_times).encode(),
        }
        return put


def _without_blanks(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True), _NONE, texts)
