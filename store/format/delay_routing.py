"""Routing of delayed messages to RocketMQ's internal topics, with the properties for their later delivery.

The first row of this table that applies to a message:

| requested delay | topic and queue | added properties |
| --- | --- | --- |
| a delay level above 0 | SCHEDULE_TOPIC_XXXX, queue level - 1 | DELAY (at most the last level), REAL_TOPIC, REAL_QID |
| a delivery time in the future | rmq_sys_wheel_timer, queue 0 | TIMER_DELIVER_MS, TIMER_OUT_MS, REAL_TOPIC, REAL_QID |
| a delivery time in the past | unchanged | TIMER_DELIVER_MS |

Source: HookUtils#handleScheduleMessage, #transformDelayLevelMessage, #transformTimerMessage (5.3),
CommitLog#asyncPutMessage (4.9).
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.message_columns import Given, RowFault, Topics, join_rows
from rmq_spark.store.format.message_ids import Digests, scatter
from rmq_spark.store.format.own_files import TIMER_MAX_DELAY_S
from rmq_spark.store.format.queue_router import Routes, number_codes, number_queues
from rmq_spark.store.names import SCHEDULE_TOPIC, TIMER_TOPIC

TIMER_PRECISION_MS = 1000  # MessageStoreConfig#timerPrecisionMs (5.3)

_PER_MS = {"ms": 1, "us": 1000, "ns": 1_000_000}
# Factors for level and time of a row in its digest, so that exchanging them changes the digest. Their digits are those
# of the square roots of 3 and 5.
_LEVEL_FACTOR, _TIME_FACTOR = np.uint64(0xBB67AE8584CAA73B), np.uint64(0x3C6EF372FE94F82B)


@dataclass(frozen=True, slots=True)
class DelayRules:
    """The delays that a store accepts: its table of levels, and the maximum delay of a timed message (ms).

    If the store does not accept timed messages, `timer_refusal` is the reason, which becomes the text of the error.
    Otherwise it is None.
    """

    levels: DelayLevels = DEFAULT_DELAY_LEVELS
    timer_max_delay_ms: int = 1000 * TIMER_MAX_DELAY_S
    timer_refusal: str | None = None


@dataclass(frozen=True, slots=True)
class AskedDelays:
    """The delays that were requested for the rows of a batch. Each array has one element per row.

    `levels` are delay levels, at most the last one of the store's table; 0 means no level. `times_ms` are delivery
    times in ms since the epoch. `is_timed` marks the rows that have a time and no level. `is_ahead` marks those of the
    timed rows whose time is in the future.
    """

    levels: NDArray[np.int64]
    times_ms: NDArray[np.int64]
    is_timed: NDArray[np.bool_]
    is_ahead: NDArray[np.bool_]
    digests: Digests  # of level and time as requested, before the table of levels is applied; 0 if a row has neither

    @classmethod
    def of(
        cls, level_column: pa.Array | None, time_column: pa.Array | None, rules: DelayRules, now_ms: int
    ) -> "AskedDelays | None":
        """Return the delays in a column of levels and a column of times, or None if no row has a delay.

        Times are timestamps, or integers in ms. Either column may be None. Raises RowFault if a time is too far in the
        future, or if a time is in the future and the store does not accept timed messages.
        """
        asked = np.maximum(Given.of(level_column).values, 0) if level_column is not None else np.zeros(1, np.int64)
        times = _times_of(time_column) if time_column is not None else Given(asked, np.zeros(1, np.bool_))
        if not asked.any() and not times.mask.any():
            return None
        asked, times_ms, has_time = np.broadcast_arrays(asked, times.values, times.mask)
        is_timed = has_time & (asked == 0)
        numbers = asked.astype(np.uint64) * _LEVEL_FACTOR
        numbers += scatter(
            np.where(has_time, times_ms, 0).astype(np.uint64) * _TIME_FACTOR
            + has_time.astype(np.uint64) * _LEVEL_FACTOR
        )
        delays = cls(
            levels=np.minimum(asked, len(rules.levels)),
            times_ms=times_ms,
            is_timed=is_timed,
            is_ahead=is_timed & (times_ms > now_ms),
            digests=scatter(numbers),
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
                f"deliverTimestamp {time_ms} (ms since the epoch) is {(time_ms - now_ms) // 1000} s ahead; expected "
                f"at most {rules.timer_max_delay_ms // 1000} s (timerMaxDelaySec). Give an earlier time, "
                "or open the store with a longer timer_max_delay_sec and configure its brokers likewise",
            )


@dataclass(frozen=True, slots=True)
class DelayRouting:
    """The topics and queues where the records of a batch are stored, and the properties to add to delayed rows."""

    topics: Topics
    routes: Routes
    texts: list[pa.BinaryArray]  # properties to append to each row's properties string, column by column
    sizes: NDArray[np.int64]  # size of the added properties of each row (bytes)
    real_topics: dict[str, int]  # target topic of delayed messages -> largest queue id that they use, plus 1


def route_delays(asked: AskedDelays, topics: Topics, routes: Routes, level_count: int) -> DelayRouting:
    """Route the delayed rows to the internal topics. Other rows keep their topics and queues.

    `topics` and `routes` are the topics and queues to which the messages were sent. `level_count` is the number of
    delay levels in the store's table.
    """
    waits = (asked.levels > 0) | asked.is_ahead
    texts = []
    if asked.is_timed.any():
        texts.append(_time_texts(asked))
    real_topics: dict[str, int] = {}
    if waits.any():
        texts.append(_target_texts(asked.levels, waits, routes))
        for number in np.unique(routes.queue_numbers[waits]).tolist():
            key = routes.queues[number]
            real_topics[key.topic] = max(real_topics.get(key.topic, 0), key.queue_id + 1)
        topics, routes = _moved(asked, topics, routes, level_count)
    sizes = sum((np.diff(_offsets(text)) for text in texts), np.zeros(len(waits), np.int64))
    return DelayRouting(topics, routes, texts, sizes, real_topics)


def _moved(asked: AskedDelays, topics: Topics, routes: Routes, level_count: int) -> tuple[Topics, Routes]:
    """Return topics and queues of all rows after the delayed rows were moved to the internal topics."""
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


def _target_texts(levels: NDArray[np.int64], waits: NDArray[np.bool_], routes: Routes) -> pa.BinaryArray:
    """Return the properties DELAY, REAL_TOPIC and REAL_QID of each row. The text is empty if the row is not delayed.

    A delayed row without a level has no DELAY. Rows with the same level and target queue share a text that is built
    once.
    """
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
    """Return the properties TIMER_DELIVER_MS and TIMER_OUT_MS of each row. The text is empty if the row is not timed.

    Rows with a time in the past have no TIMER_OUT_MS.
    """
    ahead, passed = np.flatnonzero(asked.is_ahead), np.flatnonzero(asked.is_timed & ~asked.is_ahead)
    parts = [pa.array([b""], pa.binary())]
    for rows, is_ahead in ((ahead, True), (passed, False)):
        if len(rows):
            times_ms = asked.times_ms[rows]
            pieces: list[bytes | pa.BinaryArray] = [b"TIMER_DELIVER_MS\x01", _decimals(times_ms), b"\x02"]
            if is_ahead:
                # RocketMQ delivers the message after the end of the second `out_ms`, so not before its time.
                out_ms = (times_ms - 1) // TIMER_PRECISION_MS * TIMER_PRECISION_MS
                pieces += [b"TIMER_OUT_MS\x01", _decimals(out_ms), b"\x02"]
            parts.append(join_rows(*pieces))
    indices = np.zeros(len(asked.levels), np.int64)
    indices[np.concatenate([ahead, passed])] = 1 + np.arange(len(ahead) + len(passed))
    return pa.concat_arrays(parts).take(pa.array(indices))


def _times_of(column: pa.Array) -> Given:
    """Return the times of a column of timestamps or ms, in ms. They are rounded up, so that no delivery is early."""
    given = Given.of(column)
    if not pa.types.is_timestamp(column.type) or column.type.unit == "ms":
        return given
    if column.type.unit == "s":
        limit = np.iinfo(np.int64).max // 1000
        return Given(np.clip(given.values, -limit, limit) * 1000, given.mask)
    return Given(-(-given.values // _PER_MS[column.type.unit]), given.mask)


def _decimals(numbers: NDArray[np.int64]) -> pa.BinaryArray:
    return pa.array(numbers).cast(pa.string()).cast(pa.binary())


def _offsets(texts: pa.BinaryArray) -> NDArray[np.int64]:
    _, offsets, _ = texts.buffers()
    return np.frombuffer(offsets, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
