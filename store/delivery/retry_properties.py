"""The properties of a message's copy that is consumed again, or was given up, by columns."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.delivery.retry_decision import Decisions
from rmq_spark.store.format.encoding import MAX_PROPERTIES_BYTES
from rmq_spark.store.format.message_columns import Texts
from rmq_spark.store.format.properties import RETRY_TOPIC, WAIT
from rmq_spark.store.format.property_edits import Put, edit_properties
from rmq_spark.store.format.ragged import of_one_size
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.whole_records import WholeRecords, field_shift, pairs_of

DELAY, REAL_TOPIC, REAL_QID = "DELAY", "REAL_TOPIC", "REAL_QID"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
CONSUME_ERROR = "CONSUME_ERROR"
MAX_ERROR_CHARS = 1024

# A level goes before a time: a broker of 5.x drops these where it delays by level (HookUtils#checkIfTimerMessage).
_TIMER_WISHES = ("TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS")
_CRC = "__CRC32#"  # of the bytes of the record that this one is a copy of

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
    """Return the texts of the copies. `texts` are properties to go by instead of the originals' own.

    `queue_ids` are those of the retry topic; `errors` says why a message failed, null: as an earlier copy has it.
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
    made = edit_properties(texts, (_CRC,), put, dict.fromkeys(_TIMER_WISHES, waits))
    if errors is None or errors.null_count == len(errors):
        return made
    return edit_properties(made, (), {CONSUME_ERROR: _fitting(errors, made)})


def offset_message_ids(originals: WholeRecords) -> pa.BinaryArray:
    """Return each record's offsetMsgId: store host and physical offset in hex (MessageDecoder#createMessageId)."""
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
    places = np.empty(len(originals), np.int64)
    places[np.concatenate(order)] = np.arange(len(originals))
    return pa.concat_arrays(parts).take(pa.array(places))


def _origins(originals: WholeRecords, known: pa.StringArray) -> pa.BinaryArray:
    """Return the id of the first original: what is known of it, unless that is blank (UtilAll#isBlank)."""
    blank = pc.equal(pc.utf8_trim_whitespace(known), "")
    known = pc.if_else(pc.fill_null(blank, True), pa.scalar(None, pa.string()), known).cast(pa.binary())
    return known if not known.null_count else pc.coalesce(known, offset_message_ids(originals))


def _digits(numbers: NDArray[np.int64]) -> pa.BinaryArray:
    return pa.array(numbers).cast(pa.string()).cast(pa.binary())


def _where(chosen: NDArray[np.bool_], values: pa.BinaryArray) -> pa.BinaryArray:
    return values if chosen.all() else pc.if_else(pa.array(chosen), values, pa.scalar(None, pa.binary()))


def _fitting(errors: pa.StringArray, texts: pa.BinaryArray) -> pa.BinaryArray:
    """Return what failed, in one piece without separators, and cut where the record has no more room; "" is null."""
    cut = pc.utf8_slice_codeunits(pc.replace_substring_regex(errors, _SEPARATORS, " "), 0, MAX_ERROR_CHARS)
    sizes = pc.fill_null(pc.binary_length(cut), 0).to_numpy()
    room = MAX_PROPERTIES_BYTES - Texts.of(texts).sizes - len(CONSUME_ERROR) - 2
    values = cut.cast(pa.binary())
    tight = np.flatnonzero(sizes > room)
    if len(tight):  # hardly ever: the properties fill their record
        shorter = [_cut(values[row].as_py(), int(room[row])) for row in tight.tolist()]
        mask = np.zeros(len(sizes), np.bool_)
        mask[tight] = True
        values = pc.replace_with_mask(values, pa.array(mask), pa.array(shorter, pa.binary()))
    return pc.if_else(pc.equal(pc.binary_length(values), 0), pa.scalar(None, pa.binary()), values)


def _cut(text: bytes, room: int) -> bytes:
    """Return as much of a text in UTF-8 as takes so many bytes."""
    return text[: max(room, 0)].decode("utf-8", "ignore").encode()
