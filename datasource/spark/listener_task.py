"""Task of `rmq_spark.consume`: calls the listener with the rows of a partition, and yields the rows to send back.

Invariants:

- The calls begin in the order of the rows. With the model "orderly" a queue has one call at a time.
- Memory depends on the limits in `listener_calls`, not on the number of rows or failures.
- The failed rows come in the order of the rows, whichever call ended first.
- A row is sent back as the source delivered it, without changes that the listener made to it.

`values_of` converts Arrow columns to Python values for the listener, and never fails. Arrow's own conversion fails for
a time that Python's datetime cannot represent, which a producer may have written as the born time. It also fails for
time zones that Python does not know; Spark has the zone names of Java.
"""

import contextlib
import re
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.datasource.spark.call_counts import CallCounts
from rmq_spark.datasource.spark.clocks import wall_clock_ms
from rmq_spark.datasource.spark.listener import (
    ORDERLY,
    Caller,
    Failure,
    History,
    Listener,
    ListenerTerms,
    Message,
    QueueOutcome,
)
from rmq_spark.datasource.spark.listener_calls import ListenerCalls
from rmq_spark.datasource.spark.log_lines import configure_from_environment
from rmq_spark.store.backend import BROKER_NAME, COPY_TIMES
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import is_system_topic

configure_from_environment()  # a task may load no other module of ours before this one

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = _EPOCH.date().toordinal()
_DAY_US = 86_400_000_000
# Limits of times in microseconds since the epoch. They are a day within the limits of datetime, so that such a time is
# valid in every zone.
_FIRST_US = (date.min.toordinal() + 1 - _EPOCH_DAY) * _DAY_US
_LAST_US = (date.max.toordinal() - _EPOCH_DAY) * _DAY_US
_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
# The names of Java's zones that have a fixed offset: +8, +08:00 or +080000, also with GMT, UTC or UT before it.
_OFFSET = re.compile(r"(?:GMT|UTC|UT)?([+-])(\d{1,2})(?::?(\d{2})(?::?(\d{2}))?)?")


def values_of(column: pa.Array) -> list[Any]:
    """Return the values of a column as Python values. Maps become dicts, times become datetimes in the column's zone.

    A time outside of the years 1 to 9999 becomes None. If Python does not know the zone, the datetime is the same
    moment in UTC.
    """
    kind = column.type
    if pa.types.is_map(kind):
        return [None if value is None else dict(value) for value in column.to_pylist()]
    convert = _converter(kind)
    return column.to_pylist() if convert is None else convert(column)


def _converter(kind: pa.DataType) -> Callable[[pa.Array], list[Any]] | None:
    """Return the function that converts columns of a type that contains times or dates. Return None for other types."""
    if pa.types.is_timestamp(kind):
        return _times
    if pa.types.is_date32(kind):
        return _dates
    if pa.types.is_struct(kind) and any(_converter(field.type) for field in kind):
        return _structs
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _converter(kind.value_type):
        return _lists
    return None


def _times(column: pa.Array) -> list[Any]:
    per_s = _PER_S[column.type.unit]
    micros = [None if value is None else value * 1_000_000 // per_s for value in column.view(pa.int64()).to_pylist()]
    zone = None if column.type.tz is None else _zone(column.type.tz)
    epoch = _EPOCH.replace(tzinfo=None) if zone is None else _EPOCH
    times = [
        epoch + timedelta(microseconds=value) if value is not None and _FIRST_US <= value <= _LAST_US else None
        for value in micros
    ]
    return times if zone is None else [None if time is None else time.astimezone(zone) for time in times]


def _dates(column: pa.Array) -> list[Any]:
    days = column.view(pa.int32()).to_pylist()
    first, last = date.min.toordinal() - _EPOCH_DAY, date.max.toordinal() - _EPOCH_DAY
    return [date.fromordinal(_EPOCH_DAY + day) if day is not None and first <= day <= last else None for day in days]


def _structs(column: pa.StructArray) -> list[Any]:
    names = [field.name for field in column.type]
    rows = zip(*map(values_of, column.flatten()), strict=True)
    return [
        dict(zip(names, row, strict=True)) if is_valid else None
        for row, is_valid in zip(rows, column.is_valid().to_pylist(), strict=True)
    ]


def _lists(column: pa.ListArray) -> list[Any]:
    values, made, begin = values_of(column.flatten()), [], 0
    for count in column.value_lengths().to_pylist():
        made.append(None if count is None else values[begin : begin + count])
        begin += count or 0
    return made


def _zone(name: str) -> tzinfo:
    found = _OFFSET.fullmatch(name)
    if found is not None:
        sign, *parts = found.groups()
        hours, minutes, seconds = (int(part or 0) for part in parts)
        offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if offset < timedelta(days=1):
            return timezone(-offset if sign == "-" else offset)
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # ZoneInfoNotFoundError is a KeyError
        return UTC


PIECE_ROWS = 1_024  # the number of rows that are Python objects at the same time; bodies may be large
PLACE_COLUMNS = ("commitLogOffset", "queueId", "queueOffset", "reconsumeTimes")
TOPIC_COLUMNS = ("physicalTopic", "topic")
# The columns from which a message is sent again if its original has expired from the log.
RESENT_COLUMNS = ("body", "tags", "keys", "properties", "flag", "bornTimestamp", "msgId", "offsetMsgId")
_MOST_TIMES = 2**31 - 1  # the maximum of Java's int
Failed = tuple[Failure, pa.RecordBatch, int]


class ListenerTask:
    """The calls of the listener in one task. Iterate `failed_batches` to make them.

    After that, `outcomes` has the orderly queues that were suspended or resumed, `rows` is the number of all rows,
    `failures` is the number of rows to send back, and `counts` has the counts and times of the calls. `make_row` gets
    the names of the columns, and returns a function that makes a row from the values of these columns. `drops` is
    whether failed rows are dropped; then no queue is suspended. `resends` is whether
    failed rows keep RESENT_COLUMNS. `retry_topic` is the group's retry topic, or None if the query does not read it.
    `listener_id` is a name of the listener, the same in all tasks. `monotonic_s` and `now_ms` are clocks.
    """

    def __init__(
        self,
        listener: Listener,
        terms: ListenerTerms,
        make_row: Callable[[Sequence[str]], Callable[..., Any]],
        histories: Mapping[QueueKey, History],
        *,
        drops: bool = False,
        resends: bool = False,
        retry_topic: str | None = None,
        listener_id: str = "",
        monotonic_s: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._listener, self._terms, self._make_row = listener, terms, make_row
        self._histories, self._drops, self._monotonic_s, self._now_ms = histories, drops, monotonic_s, now_ms
        self._retry_topic, self._listener_id = retry_topic, listener_id
        # Columns that are not sent are left out: unless `resends`, the query may have replaced them by its own.
        self._kept = {*PLACE_COLUMNS, *TOPIC_COLUMNS, BROKER_NAME, *(RESENT_COLUMNS if resends else ())}
        self.outcomes: list[QueueOutcome] = []
        self.rows = self.failures = 0
        self.counts = CallCounts()
        self.errors: list[str] = []  # the first errors, for the log

    def failed_batches(self, batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """Call the listener with all rows. Yield the failed rows, with the columns that `mode=sendBack` accepts.

        Raises OptionError for an invalid answer of the listener, and for a row that does not identify a message. When
        it has ended or was closed, no call runs any more that was not given up.
        """
        pending: list[Failed] = []
        with contextlib.closing(self._failures(batches)) as failures:
            for failure in failures:
                self.failures += 1
                if len(self.errors) < 3:
                    where = f"{failure.message.queue}, queue offset {failure.message.offset}"
                    self.errors.append(f"{where}: {failure.error}")
                piece, row = failure.message.source
                if pending and pending[0][1] is not piece:
                    yield _batch_of(pending, self._kept)
                    pending = []
                pending.append((failure, piece, row))
        if pending:
            yield _batch_of(pending, self._kept)

    def _failures(self, batches: Iterable[pa.RecordBatch]) -> Generator[Failure]:
        batches = iter(batches)
        first = next(batches, None)
        if first is None:
            return
        names = first.schema.names
        caller = Caller(self._listener, self._terms, self._make_row(names), self._monotonic_s)
        calls = ListenerCalls(caller, self._terms, self.counts, self._listener_id, self._monotonic_s)
        messages = self._messages(_chained(first, batches))
        self.counts.begin_ms = self._now_ms()
        if self._terms.model != ORDERLY or self._drops:
            yield from calls.concurrently(messages, is_in_order=self._terms.model == ORDERLY)
        else:
            yield from self._orderly(calls, _in_order(messages), names.index("reconsumeTimes"))
        self.counts.end_ms = self._now_ms()

    def _orderly(self, calls: ListenerCalls, messages: Iterable[Message], times_at: int) -> Iterator[Failure]:
        with contextlib.closing(calls.orderly(messages, self._histories, times_at)) as found:
            for one in found:
                if isinstance(one, QueueOutcome):
                    self.outcomes.append(one)
                else:
                    yield one

    def _messages(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Message]:
        queue: QueueKey | None = None
        for batch in batches:
            for first in range(0, batch.num_rows, PIECE_ROWS):
                piece = batch.slice(first, PIECE_ROWS)
                _check_identified(piece)
                columns = [values_of(column) for column in piece.columns]
                named = dict(zip(piece.schema.names, columns, strict=True))
                size_bytes = piece.nbytes // piece.num_rows
                topics = _physical_topics(piece, self._retry_topic)
                brokers = [name or "" for name in named.get(BROKER_NAME, [""] * piece.num_rows)]
                places = zip(
                    topics, brokers, named["queueId"], named["queueOffset"], named["reconsumeTimes"], strict=True
                )
                for row, (values, (topic, broker, queue_id, offset, times)) in enumerate(
                    zip(zip(*columns, strict=True), places, strict=True)
                ):
                    if queue is None or (queue.topic, queue.queue_id, queue.broker) != (topic, queue_id, broker):
                        queue = QueueKey(topic, queue_id, broker)
                    self.rows += 1
                    yield Message(values, queue, offset, times, (piece, row), size_bytes)


def _topic_column(piece: pa.RecordBatch) -> str:
    return next(name for name in TOPIC_COLUMNS if name in piece.schema.names)


def _physical_topics(piece: pa.RecordBatch, retry_topic: str | None) -> list[str]:
    """Return, for each row, the topic of the queue from which it was read.

    If the column physicalTopic is missing, it is found from the column topic, which has the topic to which the message
    was first sent. This differs from the queue's topic only for messages in the retry topic. These have a
    reconsumeTimes above 0, and all other messages have 0 (SendMessageProcessor, 4.9 and 5.3).
    """
    column = _topic_column(piece)
    topics: list[str] = piece.column(column).to_pylist()
    if column == "physicalTopic" or retry_topic is None:
        return topics
    are_copies = pc.greater(piece.column("reconsumeTimes"), 0).to_pylist()
    return [
        retry_topic if is_copy and not is_system_topic(topic) else topic
        for topic, is_copy in zip(topics, are_copies, strict=True)
    ]


def _check_identified(piece: pa.RecordBatch) -> None:
    """Raise OptionError if a row does not identify a message, because its topic or one of PLACE_COLUMNS is null."""
    missing = [name for name in (_topic_column(piece), *PLACE_COLUMNS) if piece.column(name).null_count]
    if missing:
        raise OptionError(
            f"a row has no {' and no '.join(missing)}; expected a message of the source. Give consume() unchanged rows "
            "of the source, or leave the others out."
        )


def _in_order(messages: Iterable[Message]) -> Iterator[Message]:
    last: dict[QueueKey, int] = {}
    for message in messages:
        if message.offset <= last.get(message.queue, -1):
            raise OptionError(
                f"rows of queue {message.queue} come out of order: found {message.offset} after {last[message.queue]}. "
                'With model="orderly" give consume() the rows in the order of the source: select, filter and '
                "withColumn keep it; do not sort, join or shuffle."
            )
        last[message.queue] = message.offset
        yield message


def _batch_of(failed: Sequence[Failed], kept: Collection[str]) -> pa.RecordBatch:
    """Return the rows to send back for failed rows, which are all of one piece.

    They have the columns `kept` of the piece, delayLevel, error, and COPY_TIMES if a failure sets it.
    """
    piece = failed[0][1]
    rows = pa.array([row for _, _, row in failed], pa.int64())
    columns = {
        name: column.take(rows) for name, column in zip(piece.schema.names, piece.columns, strict=True) if name in kept
    }
    columns["delayLevel"] = pa.array([failure.delay_level for failure, _, _ in failed], pa.int32())
    columns["error"] = pa.array([failure.error for failure, _, _ in failed], pa.string())
    times = [failure.copy_times for failure, _, _ in failed]
    if any(one is not None for one in times):
        columns[COPY_TIMES] = pa.array([None if one is None else min(one, _MOST_TIMES) for one in times], pa.int32())
    return pa.RecordBatch.from_pydict(columns)


def _chained(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others
