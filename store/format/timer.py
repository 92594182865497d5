"""The timer's files of 5.x, `timerlog`, `timerwheel` and `config/timercheck`, and the timer's properties.

A timed message has a delivery time. Until then it is kept in the queue of the topic `rmq_sys_wheel_timer`. A broker
reads this queue into the timer log and uses the timer wheel to find the messages that are due.

The timer log, `timerlog/<20 digits>`, has an entry of 52 bytes for each message, in the order in which the messages
were read from that queue. The entries that are due in the same second form a chain, from the newest to the oldest. An
entry never crosses the end of its file. If the rest of a file has no room for an entry and a filler of 16 bytes after
it, the rest becomes filler. Source: TimerLog, TimerMessageStore#doEnqueue, #recoverAndRevise (5.3).

The timer wheel, `timerwheel`, has a slot of 32 bytes for each second of fourteen days, 1,209,600 slots. A slot contains
the positions of the newest and the oldest entry of the second's chain. The slot of a second is its number since the
epoch modulo the number of slots. If a slot contains another second, it was written in an earlier round, and no message
is due in this second. A message is in the wheel for at most two days. If it is due later, the broker then puts it into
the queue again and reads it again. Such a message is "rolled".
Source: TimerWheel, Slot, TimerMessageStore#doEnqueue (5.3, default timerPrecisionMs and timerRollWindowSlot).

The timer check, `config/timercheck`, records how far the queue was read into the timer log, and up to which second
messages were delivered. It is one page of 4096 bytes: seven longs, then zeros. A running broker overwrites it in place
every second. Its values are from before the last flush of log and wheel.
Source: TimerCheckpoint, TimerMessageStore#prepareTimerCheckPoint (5.3).

| property | meaning |
| --- | --- |
| `TIMER_OUT_MS` | the second of the wheel in which the message is due, in ms since the epoch |
| `REAL_TOPIC`, `REAL_QID` | the topic and queue id to which the message will be delivered |
| `TIMER_DEL_UNIQKEY` | makes the message cancel another one: `topic+UNIQ_KEY` of that one (UNIQ_KEY before 5.3.2) |
| `TIMER_ROLL_TIMES` | how often the message was rolled |
| `TIMER_ENQUEUE_MS` | when the timer read the message |
| `TIMER_DEQUEUE_MS` | when the message was delivered or rolled |

Source: TimerMessageStore#convert, #convertMessage, #buildDeleteKey, MessageConst (5.3).
"""

from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import MAX_PROPERTIES_BYTES, RECORD_CRC, UNIQ_KEY, Put, edit_properties
from rmq_spark.store.format.record_batch import WholeRecords, pairs_of

TIMER_CHECK = np.dtype(
    [
        ("read_time", ">i8"),  # ms, a full second; messages that were due in earlier seconds were delivered
        ("log_position", ">i8"),  # the position up to which the timer log was flushed
        ("queue_offset", ">i8"),  # in rmq_sys_wheel_timer; earlier messages are in the timer log, or were delivered
        ("master_queue_offset", ">i8"),  # a starting broker limits queue_offset to this; rmq-spark writes both equal
        ("state_version", ">i8"),  # the state version of the data version; 0 if the broker has no controller
        ("version_timestamp", ">i8"),  # the time of the data version, in ms
        ("version_counter", ">i8"),  # the counter of the data version
    ]
)


assert TIMER_CHECK.itemsize == 56
TIMER_CHECK_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TimerCheck:
    """The fields of the timer check. The dtype TIMER_CHECK describes them."""

    read_time: int = 0
    log_position: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    version_timestamp: int = 0
    version_counter: int = 0


def decode_timer_check(page: bytes) -> TimerCheck:
    """Decode the content of `config/timercheck`.

    Never raises. If the content is too short, the missing fields are 0, as a broker reads them.
    """
    fields = np.frombuffer(page[: TIMER_CHECK.itemsize].ljust(TIMER_CHECK.itemsize, b"\0"), TIMER_CHECK)[0]
    return TimerCheck(*(int(fields[name]) for name in TIMER_CHECK.names or ()))


def encode_timer_check(check: TimerCheck) -> bytes:
    """Return the 56 bytes of the fields. The zeros that fill the rest of the page are not included."""
    return np.array(tuple(asdict(check).values()), TIMER_CHECK).tobytes()


TIMER_UNIT = np.dtype(
    [
        ("unit_size", ">i4"),  # 52
        ("previous_position", ">i8"),  # position of the chain's previous entry in the timer log; -1 if there is none
        ("magic", ">i4"),  # DEFAULT, combined with ROLL and DELETE
        ("write_time", ">i8"),  # ms, a full second: when the message was read from the queue
        ("delay", ">i4"),  # ms from write_time to the second whose chain this entry is in
        ("physical_offset", ">i8"),  # of the message's record in the commit log
        ("record_size", ">i4"),  # TOTALSIZE of that record
        ("topic_hash", ">i4"),  # Java's hash of REAL_TOPIC, 0 if that is missing; brokers only use it to count messages
        ("reserved", ">i8"),  # 0
    ]
)


assert TIMER_UNIT.itemsize == 52
TIMER_UNIT_BYTES = TIMER_UNIT.itemsize
TIMER_BLANK = np.dtype(
    [
        ("remaining_size", ">i4"),  # bytes up to the file's end
        ("previous_position", ">i8"),  # 0
        ("magic", ">i4"),  # BLANK_MAGIC
    ]
)


assert TIMER_BLANK.itemsize == 16
DEFAULT, ROLL, DELETE = 1, 2, 4
MAX_MAGIC = 0xF  # the largest magic of a valid entry
BLANK_MAGIC = 0xCBD43194 - (1 << 32)  # the same magic as that of a filler in the commit log, as a signed number
TIMER_FILE_BYTES = 100 << 20  # a broker's default of mappedFileSizeTimerLog


@dataclass(frozen=True, slots=True)
class EntryPlaces:
    """Positions in the timer log (bytes) of new entries, and of the fillers to write where a file has no more room."""

    positions: NDArray[np.int64]
    blanks: NDArray[np.int64]
    end: int  # the end of the last new entry


def place_entries(end: int, count: int, file_bytes: int) -> EntryPlaces:
    """Return where `count` new entries are written to a timer log that ends at position `end` (bytes).

    `file_bytes` is the size of the log's files.
    """
    room = file_bytes - TIMER_BLANK.itemsize
    assert room >= TIMER_UNIT_BYTES, file_bytes
    first_file, at = divmod(end, file_bytes)
    per_file = room // TIMER_UNIT_BYTES
    here = max((room - at) // TIMER_UNIT_BYTES, 0)  # entries that fit into the last file
    numbers = np.arange(count, dtype=np.int64)
    later = numbers - here
    files = first_file + 1 + later // per_file
    positions = np.where(
        later < 0, end + numbers * TIMER_UNIT_BYTES, files * file_bytes + later % per_file * TIMER_UNIT_BYTES
    )
    firsts = np.flatnonzero(positions % file_bytes == 0)  # the first entries of files
    previous_ends = np.where(firsts > 0, positions[firsts - 1] + TIMER_UNIT_BYTES, end)
    blanks = previous_ends[previous_ends % file_bytes > 0]
    return EntryPlaces(positions, blanks, int(positions[-1]) + TIMER_UNIT_BYTES if count else end)


def encode_timer_blank(position: int, file_bytes: int) -> bytes:
    """Return the first 16 bytes of a filler at `position` in the timer log."""
    return np.array((file_bytes - position % file_bytes, 0, BLANK_MAGIC), TIMER_BLANK).tobytes()


def are_entries(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return for each entry of the timer log whether a broker accepts it (TimerMessageStore#isMagicOK)."""
    has_magic = (entries["magic"] | MAX_MAGIC) == MAX_MAGIC
    valid: NDArray[np.bool_] = (entries["unit_size"] == TIMER_UNIT_BYTES) & has_magic
    return valid


def due_times(entries: NDArray[np.void]) -> NDArray[np.int64]:
    """Return for each entry the second of the wheel in which it is due, in ms since the epoch."""
    times: NDArray[np.int64] = (entries["write_time"].astype(np.int64) + entries["delay"]) // 1000 * 1000
    return times


TIMER_OUT_MS = "TIMER_OUT_MS"
TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"
REAL_TOPIC, REAL_QID = "REAL_TOPIC", "REAL_QID"
_MAX_DIGITS = 18  # a number with more digits may not fit into a long
_MAX_ROLLS = 1 << 30


@dataclass(frozen=True, slots=True)
class TimerRequests:
    """The timer properties of timed messages. Each column has one element per message.

    If a property is missing or invalid, a number is -1. If a text is missing, it is null.
    """

    texts: pa.BinaryArray
    out_ms: NDArray[np.int64]
    topics: pa.StringArray
    queue_ids: NDArray[np.int64]
    unique_keys: pa.StringArray
    deleted_keys: pa.StringArray
    rolls: NDArray[np.int64]

    @classmethod
    def of(cls, records: WholeRecords) -> "TimerRequests":
        """Return the timer properties of the messages in these records."""
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
        """Return for each message whether it cancels another one."""
        given: NDArray[np.bool_] = self.deleted_keys.is_valid().to_numpy(zero_copy_only=False)
        return given

    def topic_hashes(self) -> NDArray[np.int64]:
        """Return Java's hash of each message's REAL_TOPIC. If that is missing, the hash is 0.

        Source: TimerMessageStore#hashTopicForMetrics.
        """
        encoded = self.topics.dictionary_encode()
        hashes = np.array([*(string_hash(name) for name in encoded.dictionary.to_pylist()), 0], np.int64)
        indices = pc.fill_null(encoded.indices, len(hashes) - 1).to_numpy(zero_copy_only=False)
        of_messages: NDArray[np.int64] = hashes[indices]
        return of_messages

    def delivered_texts(
        self, enqueued_ms: NDArray[np.int64], rolling: NDArray[np.bool_], now_ms: int
    ) -> pa.BinaryArray:
        """Return the properties strings that the messages have after they are delivered or rolled.

        `rolling` marks the messages that are rolled. `enqueued_ms` is for each message when the timer read it. If the
        new string would be too long for a record, the result is the old string. RocketMQ drops such a message.
        """
        put: dict[str, Put] = {
            TIMER_ENQUEUE_MS: pa.array(enqueued_ms).cast(pa.string()).cast(pa.binary()),
            TIMER_DEQUEUE_MS: str(now_ms).encode(),
        }
        if rolling.any():
            times = np.clip(self.rolls, 0, _MAX_ROLLS) + 1
            put[TIMER_ROLL_TIMES] = pa.array(times, mask=~rolling).cast(pa.string()).cast(pa.binary())
        edited = edit_properties(self.texts, (RECORD_CRC,), put)
        fits = pc.less_equal(pc.binary_length(edited), MAX_PROPERTIES_BYTES)
        return edited if pc.all(fits).as_py() in (True, None) else pc.if_else(fits, edited, self.texts)


def _numbers(column: pa.StringArray) -> NDArray[np.int64]:
    """Return the texts of a column as numbers. If a text is null or not a number >= 0, the result is -1."""
    valid = pc.match_substring_regex(column, rf"^[0-9]{{1,{_MAX_DIGITS}}}$")
    numbers = pc.if_else(pc.fill_null(valid, False), column, pa.scalar(None, pa.string())).cast(pa.int64())
    found: NDArray[np.int64] = pc.fill_null(numbers, -1).to_numpy(zero_copy_only=False)
    return found


TIMER_SLOT = np.dtype(
    [
        ("second", ">i8"),  # since the epoch
        ("first_position", ">i8"),  # position of the chain's oldest entry in the timer log
        ("last_position", ">i8"),  # position of the chain's newest entry, where reading begins
        ("message_count", ">i4"),  # messages minus deletions in the chain; for flow control only, so it may be wrong
        ("magic", ">i4"),  # 0
    ]
)


assert TIMER_SLOT.itemsize == 32
TIMER_SLOT_BYTES = TIMER_SLOT.itemsize
SECOND_MS = 1000
SLOT_COUNT = 2 * 7 * 24 * 3600
WHEEL_BYTES = SLOT_COUNT * TIMER_SLOT_BYTES
WINDOW_MS = 2 * 24 * 3600 * SECOND_MS  # timerRollWindowSlot: the longest time that a message is in the wheel


def floor_second(time_ms: int) -> int:
    """Return a time (ms), rounded down to a full second."""
    return time_ms // SECOND_MS * SECOND_MS


def slot_numbers(times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each time the number of its slot in the wheel."""
    return times_ms // SECOND_MS % SLOT_COUNT


def wheel_times(out_ms: NDArray[np.int64], write_ms: int, read_ms: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return for each message the second (ms) of its slot in the timer wheel, and whether it is rolled at that second.

    A rolled message is not delivered: it is put into the wheel again, because its delivery time is too far ahead.

    `out_ms` are the messages' TIMER_OUT_MS. `read_ms` is the first second whose messages were not delivered yet.
    `write_ms` is the current second, or `read_ms` if `read_ms` is later because a clock was wrong. Overdue messages get
    the second `read_ms`, so that they are delivered next. RocketMQ delivers overdue messages without an entry in the
    timer log, so it may deliver them again after a restart.
    """
    assert write_ms >= read_ms, (write_ms, read_ms)
    times = np.maximum(out_ms // SECOND_MS * SECOND_MS, read_ms)
    beyond = times - write_ms - WINDOW_MS
    rolls = beyond >= 0
    # If little time is left after the window, the message is rolled after half a window. Then its last stay in the
    # wheel is not too short.
    ahead = np.where(beyond < WINDOW_MS // 3, WINDOW_MS // 2, WINDOW_MS)
    return np.where(rolls, write_ms + ahead, times), rolls
