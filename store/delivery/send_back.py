"""Sending back of messages that a group failed to consume: makes the copies for its retry topic or its dead letters.

A row of a failed message need not contain the body. It contains the physical offset of the original in the log, and the
copy is made from the original. A copy differs from its original in:

| field or property | in the copy |
| --- | --- |
| topic, queue | SCHEDULE_TOPIC_XXXX and the queue of the level at which the copy waits, or %DLQ%group |
| reconsumeTimes | one more; for a dead letter of an orderly listener, the number of its retries |
| RETRY_TOPIC | the topic from which the message was first consumed; further copies keep it |
| ORIGIN_MESSAGE_ID | the offsetMsgId of the first original; further copies keep it |
| WAIT | false |
| DELAY | the delay level; 0 for a dead letter |
| REAL_TOPIC, REAL_QID | %RETRY%group and its queue, if the copy waits; a dead letter keeps the old values |
| CONSUME_ERROR | why the message failed, if the row contains that |

Everything else stays the same, including body, born time and hosts. A broker makes the same copies, but without
CONSUME_ERROR.
Source: AbstractSendMessageProcessor#consumerSendMsgBack, HookUtils#handleScheduleMessage (5.3), CommitLog (4.9).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.batch_sink import EXPIRED_ORIGINALS, SendBackTerms
from rmq_spark.store.delivery.record_lookup import RecordLookup, read_originals
from rmq_spark.store.delivery.retry_policy import Decisions, decide, read_retry_topics
from rmq_spark.store.delivery.retry_record import Resender, copied_properties
from rmq_spark.store.disk.clock import random_bits
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format.failed_rows import FailedRows
from rmq_spark.store.format.message_columns import RowFault, Topics
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.properties import INNER_NUM, RETRY_TOPIC
from rmq_spark.store.format.record import INNER_BATCH
from rmq_spark.store.format.record_batch import WholeRecords
from rmq_spark.store.format.record_rewrite import rebuild_records
from rmq_spark.store.names import CLOSED_TOPICS, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC

PIECE_BYTES = 16 << 20  # bytes of originals in memory at a time; a longer original is a piece of its own
PIECE_ROWS = 1 << 15


@dataclass(frozen=True, slots=True)
class SentBack:
    """The copies made for some rows: the numbers of these `rows`, the `records`, and the decision for each row."""

    rows: NDArray[np.intp]
    records: EncodedRecords
    decisions: Decisions


class SendBacks:
    """Makes the copies for failed rows, from one store and for one group. Not thread-safe; call `close` at the end.

    The constructor raises OptionError if the group's name is invalid or the group has no retry queues, and
    StorePathError if there is no store at `root`.
    """

    def __init__(self, root: str, terms: SendBackTerms, *, commit_log_path: str | None = None) -> None:
        assert terms.expired_original in EXPIRED_ORIGINALS, terms.expired_original
        self._reader = RecordLookup(root, commit_log_path=commit_log_path)
        self.topics = read_retry_topics(root, terms.group, terms.max_reconsume_times)
        self._level_count = self._reader.level_count()
        self._next_queue = random_bits() % self.topics.retry_queues
        self._resender = None
        if terms.expired_original == "resend":
            self._resender = Resender(root, self.topics, commit_log_path)

    def __enter__(self) -> "SendBacks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def prepare(
        self,
        batch: pa.RecordBatch,
        delay_level: int = 0,
        first_row: int | None = 0,
        only: NDArray[np.intp] | None = None,
    ) -> Iterator[SentBack]:
        """Yield the copies for the rows of `batch`, in pieces of limited size. The digests of the records are 0.

        If `only` is given, yields copies only for the rows with these numbers. Pieces are in the order of the rows; of
        each piece, rows that are resent come last. `delay_level` applies to rows without a level of their own. Raises
        OptionError if a row does not identify a message of the store, and NotFoundError if its message has expired. The
        error text contains the number of the row; the first row has the number `first_row`. If `first_row` is None, the
        text contains no number.
        """
        try:
            rows = FailedRows.of(batch, delay_level)
            yield from self._prepare(batch, rows, np.arange(len(rows)) if only is None else only)
        except RowFault as fault:
            row = "" if first_row is None else f"row {first_row + fault.row}: "
            kind = NotFoundError if isinstance(fault, _ExpiredFault) else OptionError
            raise kind(f"{row}{fault.what}") from None

    def _prepare(self, batch: pa.RecordBatch, rows: FailedRows, chosen: NDArray[np.intp]) -> Iterator[SentBack]:
        if not len(chosen):
            return
        self._reader.refresh()
        physical_offsets = rows.physical_offsets[chosen]
        sizes = self._reader.sizes_at(physical_offsets)
        for first, last in _pieces(sizes):
            numbers = chosen[first:last]
            found = read_originals(self._reader.log, physical_offsets[first:last], sizes[first:last])
            whole = found.is_whole & (sizes[first:last] > 0)
            self._check_missing(rows, numbers[~whole])
            kept, resent = numbers[whole], numbers[~whole]
            positions, ends = found.positions[whole], found.ends[whole]
            if len(kept):
                originals = WholeRecords.of(found.data, positions, ends)
                batched = _check_originals(originals, rows.take(kept), rows, kept)
                if batched.any() and self._resender is None:
                    row = int(kept[batched][0])
                    raise RowFault(
                        row,
                        f"{rows.describe(row)} cannot be sent back: its record contains several messages (an inner "
                        f"batch), and a record is copied as a whole. {_SET_RESEND}.",
                    )
                resent = np.sort(np.concatenate([resent, kept[batched]]))
                kept, positions, ends = kept[~batched], positions[~batched], ends[~batched]
            if len(kept):
                yield self._copies(kept, rows.take(kept), WholeRecords.of(found.data, positions, ends), None)
            if len(resent):
                yield self._copies_of_rows(batch, rows, resent)

    def _check_missing(self, rows: FailedRows, missing: NDArray[np.intp]) -> None:
        """Raise RowFault if the original of a row in `missing` has never existed, or has expired.

        Does not raise for an expired original if it can be resent from the row.
        """
        if len(missing):
            self._reader.log.refresh()  # retention may have deleted segments during this call
        begin, end = self._reader.log_begin, self._reader.log_end
        for row in missing.tolist():
            if int(rows.physical_offsets[row]) >= begin:
                raise RowFault(
                    row,
                    f"{rows.describe(row)} was never in this store: no message begins at its physical offset, and the "
                    f"log has the offsets [{begin}, {end}). {_IS_ROW}",
                )
            if self._resender is None:
                raise _ExpiredFault(
                    row,
                    f"{rows.describe(row)} cannot be sent back: its original has expired, the log begins at physical "
                    f"offset {begin}. {_SET_RESEND}; or leave the row out.",
                )

    def _copies_of_rows(self, batch: pa.RecordBatch, rows: FailedRows, numbers: NDArray[np.intp]) -> SentBack:
        """Make the copies of rows without originals, as a client sends a message again that its broker does not have.

        `numbers` are the numbers of the rows.
        """
        assert self._resender is not None
        chosen = rows.take(numbers)
        try:
            resent = self._resender.encode(batch.take(pa.array(numbers)), chosen)
        except RowFault as fault:
            raise RowFault(int(numbers[fault.row]), fault.what) from None
        ends = np.cumsum(resent.records.sizes)
        originals = WholeRecords.of(resent.records.data, ends - resent.records.sizes, ends)
        return self._copies(numbers, chosen, originals, resent.texts)

    def _copies(
        self, numbers: NDArray[np.intp], rows: FailedRows, originals: WholeRecords, texts: pa.BinaryArray | None
    ) -> SentBack:
        """Make the copies of `originals`. If `texts` is given, use its properties instead of those of the originals.

        `rows` are the rows of the originals, and `numbers` the numbers of these rows.
        """
        decisions = decide(rows.reconsume_times, rows.asked_levels, self.topics.max_reconsume_times, self._level_count)
        queue_ids = (self._next_queue + np.arange(len(rows))) % self.topics.retry_queues
        self._next_queue = int(self._next_queue + len(rows)) % self.topics.retry_queues
        try:
            records = rebuild_records(
                originals.data,
                originals.positions,
                originals.ends,
                topics=Topics((SCHEDULE_TOPIC, self.topics.dead), decisions.are_dead.astype(np.int64)),
                queue_ids=np.where(decisions.are_dead, 0, decisions.levels - 1),
                properties=copied_properties(originals, texts, decisions, self.topics.retry, queue_ids, rows.errors),
                reconsume_times=rows.copy_times,
            )
        except RowFault as fault:
            raise RowFault(int(numbers[fault.row]), fault.what) from None
        if not decisions.are_dead.all():
            records = replace(records, real_topics={self.topics.retry: self.topics.retry_queues})
        return SentBack(numbers, records, decisions)


class _ExpiredFault(RowFault):
    """The error of a row whose original message is no longer in the log."""


_IS_ROW = (
    "Send back rows as the source returns them, with commitLogOffset, physicalTopic, queueId, queueOffset and "
    "reconsumeTimes unchanged, into the store that they were read from."
)
_SET_RESEND = (
    "Set expiredOriginal=resend to send it from the row, which then needs the column body (and tags, keys, properties "
    "to keep them)"
)


def _pieces(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Divide rows, whose originals have these `sizes` (bytes), into pieces [first, last) of limited size and number."""
    ends = np.cumsum(sizes)
    first, done = 0, 0
    while first < len(sizes):
        last = int(np.searchsorted(ends, done + PIECE_BYTES, side="right"))
        last = min(max(last, first + 1), first + PIECE_ROWS)
        yield first, last
        first, done = last, int(ends[last - 1])


def _check_originals(
    originals: WholeRecords, chosen: FailedRows, rows: FailedRows, numbers: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Return, for each row of `chosen`, whether its record contains several messages (an inner batch).

    `originals` are the records of these rows, and `numbers` their numbers in `rows`. Raises RowFault if a row does not
    agree with its record, or if its topic is one of RocketMQ's own.
    """
    topics = originals.topics()
    pairs = originals.pairs()
    batched: NDArray[np.bool_] = (originals.sys_flags & INNER_BATCH) != 0
    queue_offsets = originals.field("queue_offset").astype(np.int64)
    offsets_agree = queue_offsets == chosen.queue_offsets
    if batched.any():
        counts = pc.fill_null(pairs.column(INNER_NUM), "0").to_pylist()
        counts = np.array([int(count) if count.isdecimal() else 0 for count in counts], np.int64)
        in_batch = chosen.queue_offsets - queue_offsets
        offsets_agree |= batched & (in_batch >= 0) & (in_batch < counts)
    for what, agree in (
        ("queueId", originals.field("queue_id") == chosen.queue_ids),
        ("queueOffset", offsets_agree),
        ("reconsumeTimes", (originals.field("reconsume_times") == chosen.reconsume_times) | batched),
        ("topic", _topics_agree(chosen, topics, pairs.column(RETRY_TOPIC))),
    ):
        for at in np.flatnonzero(~np.asarray(agree, np.bool_))[:1].tolist():
            name = topics[at].as_py().decode("utf-8", "replace")
            raise RowFault(
                int(numbers[at]),
                f"{rows.describe(int(numbers[at]))} was never in this store: the record at its physical offset has "
                f"another {what}; found {name}/{originals.field('queue_id')[at]} at queue offset {queue_offsets[at]}, "
                f"reconsumeTimes {originals.field('reconsume_times')[at]}. {_IS_ROW}",
            )
    own = pc.is_in(topics, pa.array([name.encode() for name in sorted(CLOSED_TOPICS)], pa.binary()))
    for at in np.flatnonzero(own.to_numpy(zero_copy_only=False))[:1].tolist():
        raise RowFault(
            int(numbers[at]),
            f"{rows.describe(int(numbers[at]))} cannot be sent back: its topic is RocketMQ's own, and no group "
            "consumes that. Leave the row out.",
        )
    return batched


def _topics_agree(chosen: FailedRows, topics: pa.BinaryArray, retried: pa.StringArray) -> NDArray[np.bool_]:
    """Return, for each row, whether its topic is that of its record.

    If the row has a physical topic, this must be the record's topic. Otherwise the row's topic must be the one that a
    consumer sees, which for a retry is the topic in RETRY_TOPIC (`retried`).
    """
    is_retry = pc.starts_with(topics, RETRY_TOPIC_PREFIX.encode())
    seen = pc.if_else(pc.and_(is_retry, retried.is_valid()), retried.cast(pa.binary()), topics)
    agree = pa.scalar(None, pa.bool_())
    if chosen.physical_topics is not None:
        agree = pc.equal(chosen.physical_topics.cast(pa.binary()), topics)
    if chosen.topics is not None:
        agree = pc.coalesce(agree, pc.equal(chosen.topics.cast(pa.binary()), seen))
    return np.asarray(pc.fill_null(agree, False).to_numpy(zero_copy_only=False), np.bool_)
