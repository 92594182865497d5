"""What one task of `rmq_spark.consume` does: rows into calls of the listener, and what failed into rows to send back.

Invariants:
- the listener gets the rows of a queue in the order in which they come;
- memory depends on the size of a piece of rows, not on how many there are or fail;
- a row that is sent back is the one that came: what the listener did to it, or a column that was added, counts nothing.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.datasource.listening import (
    ORDERLY,
    Caller,
    Failure,
    History,
    Listener,
    ListenerTerms,
    Message,
    QueueOutcome,
    consume_concurrently,
    consume_orderly,
)
from rmq_spark.datasource.listening_values import values_of
from rmq_spark.store import COPY_TIMES, is_system_topic
from rmq_spark.store.errors import OptionError
from rmq_spark.store.units import QueueKey

PIECE_ROWS = 1_024  # as Python objects at a time: bodies may be large
PLACE_COLUMNS = ("commitLogOffset", "queueId", "queueOffset", "reconsumeTimes")
TOPIC_COLUMNS = ("physicalTopic", "topic")
# What a row is sent anew from, where its original is gone.
RESENT_COLUMNS = ("body", "tags", "keys", "properties", "flag", "bornTimestamp", "msgId", "offsetMsgId")
_MOST_TIMES = 2**31 - 1  # Java's int

Failed = tuple[Failure, pa.RecordBatch, int]


class ListenerTask:
    """One task's calls. `make_row` takes column names and returns what makes a row of their values.

    When `failed_batches` is at its end, `outcomes` has the orderly queues that were stopped or went on, `rows` and
    `failures` count rows: given to the listener or not, and failed. `resends`: rows bring what is needed to send them
    anew. `retry_topic` is the one that the query reads, None for a query that reads none.
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
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._terms, self._make_row = listener, terms, make_row
        self._histories, self._drops, self._monotonic_s = histories, drops, monotonic_s
        self._retry_topic = retry_topic
        # Of a column that only a row made anew needs, the query may have made something else.
        self._kept = {*PLACE_COLUMNS, *TOPIC_COLUMNS, *(RESENT_COLUMNS if resends else ())}
        self.outcomes: list[QueueOutcome] = []
        self.rows = self.failures = 0
        self.errors: list[str] = []  # a few of them, for the log

    def failed_batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what failed, as rows to send back; their columns are those of `mode=sendBack`.

        Raises OptionError for an answer of the listener that means nothing, and for rows that name no message.
        """
        pending: list[Failed] = []
        for failure in self._failures(batches):
            self.failures += 1
            if len(self.errors) < 3:
                self.errors.append(f"{failure.message.queue}, queue offset {failure.message.offset}: {failure.error}")
            piece, row = failure.message.source
            if pending and pending[0][1] is not piece:
                yield _batch_of(pending, self._kept)
                pending = []
            pending.append((failure, piece, row))
        if pending:
            yield _batch_of(pending, self._kept)

    def _failures(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Failure]:
        batches = iter(batches)
        first = next(batches, None)
        if first is None:
            return
        names = first.schema.names
        caller = Caller(self._listener, self._terms, self._make_row(names), self._monotonic_s)
        messages = self._messages(_chained(first, batches))
        if self._terms.model != ORDERLY or self._drops:
            yield from consume_concurrently(messages, caller, self._terms)
            return
        times_at = names.index("reconsumeTimes")
        found = consume_orderly(_in_order(messages), caller, self._terms, self._histories, times_at)
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
                _refuse_nameless(piece)
                columns = [values_of(column) for column in piece.columns]
                named = dict(zip(piece.schema.names, columns, strict=True))
                topics = _physical_topics(piece, self._retry_topic)
                places = zip(topics, named["queueId"], named["queueOffset"], named["reconsumeTimes"], strict=True)
                for row, (values, (topic, queue_id, offset, times)) in enumerate(
                    zip(zip(*columns, strict=True), places, strict=True)
                ):
                    if queue is None or (queue.topic, queue.queue_id) != (topic, queue_id):
                        queue = QueueKey(topic, queue_id)
                    self.rows += 1
                    yield Message(values, queue, offset, times, (piece, row))


def _topic_column(piece: pa.RecordBatch) -> str:
    return next(name for name in TOPIC_COLUMNS if name in piece.schema.names)


def _physical_topics(piece: pa.RecordBatch, retry_topic: str | None) -> list[str]:
    """Return the topic of each row's queue, also where the rows show only the topic to which they were first sent.

    Only a retry topic has messages that are consumed again under their first topic: RocketMQ counts reconsumeTimes in
    copies that it puts there, and other topics get 0 (SendMessageProcessor, 4.9 and 5.3).
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


def _refuse_nameless(piece: pa.RecordBatch) -> None:
    """Raise OptionError for rows that do not say which messages they are."""
    missing = [name for name in (_topic_column(piece), *PLACE_COLUMNS) if piece.column(name).null_count]
    if missing:
        raise OptionError(
            f"a row has no {' and no '.join(missing)}, so it is no message of the source. Give consume() the rows as "
            "the source has them, or leave out those that something else made."
        )


def _in_order(messages: Iterable[Message]) -> Iterator[Message]:
    last: dict[QueueKey, int] = {}
    for message in messages:
        if message.offset <= last.get(message.queue, -1):
            raise OptionError(
                f"rows of queue {message.queue} come out of order: {message.offset} behind {last[message.queue]}. With "
                'model="orderly" give consume() the rows as the source has them: select, filter and withColumn are '
                "fine, what sorts, joins or shuffles is not."
            )
        last[message.queue] = message.offset
        yield message


def _batch_of(failed: Sequence[Failed], kept: Collection[str]) -> pa.RecordBatch:
    """Return failed rows of one piece as the rows to send back."""
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
