"""Messages that are to wait: they go to a topic of RocketMQ's own, with what it takes to deliver them from there.

| asked for | goes to | properties that are added |
| --- | --- | --- |
| a delay level above 0 | SCHEDULE_TOPIC_XXXX, queue level - 1 | DELAY (at most the last level), REAL_TOPIC, REAL_QID |
| else a time to come | rmq_sys_wheel_timer, queue 0 | TIMER_DELIVER_MS, TIMER_OUT_MS, REAL_TOPIC, REAL_QID |
| a time that has passed | its own queue | TIMER_DELIVER_MS |

Source: HookUtils#handleScheduleMessage, #transformDelayLevelMessage, #transformTimerMessage (5.3),
CommitLog#asyncPutMessage (4.9).
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC, TIMER_TOPIC
from rmq_spark.store.format.message_columns import Given, RowFault, Topics, join_rows
from rmq_spark.store.format.routing import Routes, number_codes, number_queues
from rmq_spark.store.format.store_settings import TIMER_MAX_DELAY_S
from rmq_spark.store.format.text_hashes import Digests, scatter

TIMER_PRECISION_MS = 1000  # MessageStoreConfig#timerPrecisionMs (5.3)

_PER_MS = {"ms": 1, "us": 1000, "ns": 1_000_000}
# Keep level and time of a row apart in its digest: digits of the square roots of 3 and 5.
_OF_LEVEL, _OF_TIME = np.uint64(0xBB67AE8584CAA73B), np.uint64(0x3C6EF372FE94F82B)


@dataclass(frozen=True, slots=True)
class DelayRules:
    """What a store takes: its table of levels, and how far ahead a time may lie (ms).

    `timer_refusal` says why no message may wait for a time, None where it may.
    """

    levels: DelayLevels = DEFAULT_DELAY_LEVELS
    timer_max_delay_ms: int = 1000 * TIMER_MAX_DELAY_S
    timer_refusal: str | None = None


@dataclass(frozen=True, slots=True)
class AskedDelays:
    """What the rows ask for: `levels` as they stand in the store, 0 for none; `times_ms` since the epoch.

    `is_timed` marks rows with a time and no level, `is_ahead` those of them whose time is to come.
    """

    levels: NDArray[np.int64]
    times_ms: NDArray[np.int64]
    is_timed: NDArray[np.bool_]
    is_ahead: NDArray[np.bool_]
    digests: Digests  # of what was asked for, whatever the table says; 0 for nothing

    @classmethod
    def of(
        cls, level_column: pa.Array | None, time_column: pa.Array | None, rules: DelayRules, now_ms: int
    ) -> "AskedDelays | None":
        """Read columns of levels and of times (timestamps, or ms), either may be missing; None if no row asks.

        Raises RowFault for a time that is too far ahead, and for one to come where no message may wait for one.
        """
        asked = np.maximum(Given.of(level_column).values, 0) if level_column is not None else np.zeros(1, np.int64)
        times = _times_of(time_column) if time_column is not None else Given(asked, np.zeros(1, np.bool_))
        if not asked.any() and not times.mask.any():
            return None
        asked, times_ms, has_time = np.broadcast_arrays(asked, times.values, times.mask)
        is_timed = has_time & (asked == 0)
        delays = cls(
            levels=np.minimum(asked, len(rules.levels)),
            times_ms=times_ms,
            is_timed=is_timed,
            is_ahead=is_timed & (times_ms > now_ms),
            digests=_digests(asked, times_ms, has_time),
        )
        delays._check_times(rules, now_ms)
        return delays

    def _check_times(self, rules: DelayRules, now_ms: int) -> None:
        if rules.timer_refusal is not None and self.is_ahead.any():
            raise RowFault(int(np.argmax(self.is_ahead)), rules.timer_refusal)
        is_late = self.is_ahead & (self.times_ms - rules.timer_max_delay_ms > now_ms)
        if is_late.any():
            row = int(np.argmax(is_late))
            time_ms = int(self.times_ms[row])
            raise RowFault(
                row,
                f"deliverTimestamp {time_ms} (ms since the epoch) is {(time_ms - now_ms) // 1000} s ahead, and this "
                f"store takes at most {rules.timer_max_delay_ms // 1000} s (timerMaxDelaySec): give an earlier time, "
                "or open the store with a longer timer_max_delay_sec and give its brokers the same",
            )


@dataclass(frozen=True, slots=True)
class Diversion:
    """Where the records of a batch go when delays are obeyed, and the texts that their properties gain, row by row."""

    topics: Topics
    routes: Routes
    texts: list[pa.BinaryArray]
    sizes: NDArray[np.int64]  # bytes of those texts
    real_topics: dict[str, int]  # of the records that wait: topic -> largest queue id, plus one


def divert(asked: AskedDelays, topics: Topics, routes: Routes, level_count: int) -> Diversion:
    """Send the rows that are to wait to where they wait; `topics` and `routes` are those of their messages."""
    waits = (asked.levels > 0) | asked.is_ahead
    texts = []
    if asked.is_timed.any():
        texts.append(_time_texts(asked))
    real_topics: dict[str, int] = {}
    if waits.any():
        texts.append(_place_texts(asked.levels, waits, routes))
        for number in np.unique(routes.queue_numbers[waits]).tolist():
            key = routes.queues[number]
            real_topics[key.topic] = max(real_topics.get(key.topic, 0), key.queue_id + 1)
        topics, routes = _moved(asked, topics, routes, level_count)
    sizes = sum((np.diff(_offsets(text)) for text in texts), np.zeros(len(waits), np.int64))
    return Diversion(topics, routes, texts, sizes, real_topics)


def _moved(asked: AskedDelays, topics: Topics, routes: Routes, level_count: int) -> tuple[Topics, Routes]:
    """Return topics and queues of the records."""
    is_leveled = asked.levels > 0
    queue_ids = np.where(is_leveled, asked.levels - 1, np.where(asked.is_ahead, 0, routes.queue_ids))
    if is_leveled.all():
        moved, counts = Topics((SCHEDULE_TOPIC,), None), [level_count]
    elif asked.is_ahead.all():
        moved, counts = Topics((TIMER_TOPIC,), None), [1]
    else:
        numbers = np.zeros(len(queue_ids), np.int64) if topics.numbers is None else topics.numbers
        schedule, timer = len(topics.names), len(topics.names) + 1
        numbers = np.where(is_leveled, schedule, np.where(asked.is_ahead, timer, numbers))
        moved = Topics((*topics.names, SCHEDULE_TOPIC, TIMER_TOPIC), numbers)
        widths = dict.fromkeys(topics.names, 1)
        for key in routes.queues:
            widths[key.topic] = max(widths[key.topic], key.queue_id + 1)
        counts = [*widths.values(), level_count, 1]
    return moved, number_queues(moved, counts, queue_ids)


def _place_texts(levels: NDArray[np.int64], waits: NDArray[np.bool_], routes: Routes) -> pa.BinaryArray:
    """Return level and real queue of each row that waits, as properties: few are distinct, all others are copies."""
    width = len(routes.queues)
    codes = np.where(waits, levels * width + routes.queue_numbers + 1, 0)
    used, numbers = number_codes(codes, int(codes.max()) + 1)
    texts = []
    for code in used.tolist():
        level, queue = divmod(code - 1, width)
        key = routes.queues[queue]
        text = f"REAL_TOPIC\x01{key.topic}\x02REAL_QID\x01{key.queue_id}\x02"
        texts.append(b"" if not code else (f"DELAY\x01{level}\x02{text}" if level else text).encode())
    return pa.array(texts, pa.binary()).take(pa.array(numbers))


def _time_texts(asked: AskedDelays) -> pa.BinaryArray:
    """Return the time of each row that has one, as properties."""
    ahead, passed = np.flatnonzero(asked.is_ahead), np.flatnonzero(asked.is_timed & ~asked.is_ahead)
    parts = [pa.array([b""], pa.binary())]
    for rows, is_ahead in ((ahead, True), (passed, False)):
        if len(rows):
            times_ms = asked.times_ms[rows]
            pieces: list[bytes | pa.BinaryArray] = [b"TIMER_DELIVER_MS\x01", _decimals(times_ms), b"\x02"]
            if is_ahead:
                pieces += [b"TIMER_OUT_MS\x01", _decimals(timer_out_ms(times_ms)), b"\x02"]
            parts.append(join_rows(*pieces))
    places = np.zeros(len(asked.levels), np.int64)
    places[np.concatenate([ahead, passed])] = 1 + np.arange(len(ahead) + len(passed))
    return pa.concat_arrays(parts).take(pa.array(places))


def timer_out_ms(times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return TIMER_OUT_MS of messages for these times: whole seconds, from whose end on they are delivered."""
    return (times_ms - 1) // TIMER_PRECISION_MS * TIMER_PRECISION_MS


def _times_of(column: pa.Array) -> Given:
    """Take a column of timestamps or of ms, as ms; a fraction of one counts up, so that nothing comes too early."""
    given = Given.of(column)
    if not pa.types.is_timestamp(column.type) or column.type.unit == "ms":
        return given
    if column.type.unit == "s":
        most = np.iinfo(np.int64).max // 1000
        return Given(np.clip(given.values, -most, most) * 1000, given.mask)
    return Given(-(-given.values // _PER_MS[column.type.unit]), given.mask)


def _digests(levels: NDArray[np.int64], times_ms: NDArray[np.int64], has_time: NDArray[np.bool_]) -> Digests:
    numbers = levels.astype(np.uint64) * _OF_LEVEL
    numbers += scatter(np.where(has_time, times_ms, 0).astype(np.uint64) * _OF_TIME + has_time * _OF_LEVEL)
    return scatter(numbers)


def _decimals(numbers: NDArray[np.int64]) -> pa.BinaryArray:
    return pa.array(numbers).cast(pa.string()).cast(pa.binary())


def _offsets(texts: pa.BinaryArray) -> NDArray[np.int64]:
    _, offsets, _ = texts.buffers()
    return np.frombuffer(offsets, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
