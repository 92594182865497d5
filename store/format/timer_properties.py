"""What the timer reads from a message's properties, and what it puts there, by columns.

| property | what |
| --- | --- |
| `TIMER_OUT_MS` | the second of the wheel that the message waits for, ms since the epoch |
| `REAL_TOPIC`, `REAL_QID` | where it is to be delivered |
| `TIMER_DEL_UNIQKEY` | no message: takes back the one of `topic+UNIQ_KEY` (5.3.2 and later) or UNIQ_KEY (before) |
| `TIMER_ROLL_TIMES` | how often it was put back into the queue, because it was due beyond the wheel's window |
| `TIMER_ENQUEUE_MS`, `TIMER_DEQUEUE_MS` | when it was taken into the timer, when it was delivered or put back |

Source: TimerMessageStore#convert, #convertMessage, #buildDeleteKey, MessageConst (5.3).
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.encoding import MAX_PROPERTIES_BYTES
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import UNIQ_KEY
from rmq_spark.store.format.property_edits import Put, edit_properties
from rmq_spark.store.format.whole_records import WholeRecords, pairs_of

TIMER_OUT_MS = "TIMER_OUT_MS"
TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"
REAL_TOPIC, REAL_QID = "REAL_TOPIC", "REAL_QID"
_RECORD_CRC = "__CRC32#"  # of the record that it was in

_MAX_DIGITS = 18  # of a number that surely fits into a long
_MAX_ROLLS = 1 << 30


@dataclass(frozen=True, slots=True)
class TimerRequests:
    """What messages that wait for a time say of themselves; one element each. Missing numbers are -1, texts null."""

    texts: pa.BinaryArray
    out_ms: NDArray[np.int64]
    topics: pa.StringArray
    queue_ids: NDArray[np.int64]
    unique_keys: pa.StringArray
    deleted_keys: pa.StringArray
    rolls: NDArray[np.int64]

    @classmethod
    def of(cls, records: WholeRecords) -> "TimerRequests":
        """Read them from whole records."""
        texts = records.texts()
        pairs = pairs_of(texts)
        return cls(
            texts,
            _numbers(pairs.column(TIMER_OUT_MS)),
            pairs.column(REAL_TOPIC),
            _numbers(pairs.column(REAL_QID)),
            pairs.column(UNIQ_KEY),
            pairs.column(TIMER_DEL_UNIQKEY),
            _numbers(pairs.column(TIMER_ROLL_TIMES)),
        )

    @property
    def are_deletions(self) -> NDArray[np.bool_]:
        """Say of each whether it takes another one back."""
        given: NDArray[np.bool_] = self.deleted_keys.is_valid().to_numpy(zero_copy_only=False)
        return given

    def topic_hashes(self) -> NDArray[np.int64]:
        """Return Java's hash of each REAL_TOPIC, 0 without (TimerMessageStore#hashTopicForMetrics)."""
        encoded = self.topics.dictionary_encode()
        hashes = np.array([*(string_hash(name) for name in encoded.dictionary.to_pylist()), 0], np.int64)
        of_each: NDArray[np.int64] = hashes[
            pc.fill_null(encoded.indices, len(hashes) - 1).to_numpy(zero_copy_only=False)
        ]
        return of_each

    def delivered_texts(
        self, enqueued_ms: NDArray[np.int64], rolling: NDArray[np.bool_], now_ms: int
    ) -> pa.BinaryArray:
        """Return the properties that the messages are delivered, or put back into the queue, with.

        A text that would not fit into a record stays as it was: RocketMQ drops such a message.
        """
        put: dict[str, Put] = {
            TIMER_ENQUEUE_MS: pa.array(enqueued_ms).cast(pa.string()).cast(pa.binary()),
            TIMER_DEQUEUE_MS: str(now_ms).encode(),
        }
        if rolling.any():
            times = np.clip(self.rolls, 0, _MAX_ROLLS) + 1
            put[TIMER_ROLL_TIMES] = pa.array(times, mask=~rolling).cast(pa.string()).cast(pa.binary())
        made = edit_properties(self.texts, (_RECORD_CRC,), put)
        fits = pc.less_equal(pc.binary_length(made), MAX_PROPERTIES_BYTES)
        return made if pc.all(fits).as_py() in (True, None) else pc.if_else(fits, made, self.texts)


def _numbers(column: pa.StringArray) -> NDArray[np.int64]:
    """Return the numbers that a column of texts holds, -1 for null and for what is none, or negative."""
    good = pc.match_substring_regex(column, rf"^[0-9]{{1,{_MAX_DIGITS}}}$")
    numbers = pc.if_else(pc.fill_null(good, False), column, pa.scalar(None, pa.string())).cast(pa.int64())
    found: NDArray[np.int64] = pc.fill_null(numbers, -1).to_numpy(zero_copy_only=False)
    return found
