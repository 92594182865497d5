"""Messages that a consumer group failed to consume, made into what goes to its retry topic or its dead letters.

The body does not travel: a row says where the original lies in the log, and the copy is made from that. What is
different in a copy:

| what | in the copy |
| --- | --- |
| topic, queue | SCHEDULE_TOPIC_XXXX at the level at which it waits, or %DLQ%group |
| reconsumeTimes | one more; of a dead letter in order, how often it was tried anew |
| RETRY_TOPIC | the topic that it was first consumed from, kept from copy to copy |
| ORIGIN_MESSAGE_ID | the first original's offsetMsgId, kept from copy to copy |
| WAIT, DELAY | false; the level, 0 for a dead letter |
| REAL_TOPIC, REAL_QID | %RETRY%group and its queue, if it waits; a dead letter keeps those that it had |
| CONSUME_ERROR | why it failed, where the row says so |

All else, body, born time and hosts among it, stays. So do a broker's copies look, but for CONSUME_ERROR.
Source: AbstractSendMessageProcessor#consumerSendMsgBack, HookUtils#handleScheduleMessage (5.3), CommitLog (4.9).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.delivery.expired_originals import Resender
from rmq_spark.store.delivery.failed_rows import FailedRows
from rmq_spark.store.delivery.originals import read_originals
from rmq_spark.store.delivery.originals_reader import OriginalsReader
from rmq_spark.store.delivery.retry_decision import Decisions, decide
from rmq_spark.store.delivery.retry_properties import copied_properties
from rmq_spark.store.delivery.retry_topics import read_retry_topics
from rmq_spark.store.disk.chance import random_bits
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import CLOSED_TOPICS, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC
from rmq_spark.store.format.message_columns import RowFault, Topics
from rmq_spark.store.format.properties import INNER_NUM, RETRY_TOPIC
from rmq_spark.store.format.ragged import Bytes, Positions
from rmq_spark.store.format.rebuilt_records import rebuild_records
from rmq_spark.store.format.record import INNER_BATCH
from rmq_spark.store.format.whole_records import WholeRecords

EXPIRED_ORIGINALS = ("error", "resend")
PIECE_BYTES = 16 << 20  # of originals, in memory at a time; one that is longer goes alone
PIECE_ROWS = 1 << 15


@dataclass(frozen=True, slots=True)
class SendBackTerms:
    """How a group's messages go back. `max_reconsume_times` None: as the group may, 16 without a word about it.

    `expired_original` says what becomes of one whose original is not in the log any more: "error", or "resend" from the
    row, which needs its body.
    """

    group: str
    max_reconsume_times: int | None = None
    expired_original: str = "error"


@dataclass(frozen=True, slots=True)
class SentBack:
    """Records made of some rows, whose numbers are `rows`, and what was decided of each."""

    rows: NDArray[np.intp]
    records: EncodedRecords
    decisions: Decisions


class SendBacks:
    """Makes the records of failed rows, from one store and for one group. For one thread; `close` it.

    Raises OptionError for a group that has no retry queues or whose name is none, and StorePathError without a store.
    """

    def __init__(self, root: str, terms: SendBackTerms, *, commit_log_path: str | None = None) -> None:
        assert terms.expired_original in EXPIRED_ORIGINALS, terms.expired_original
        self._reader = OriginalsReader(root, commit_log_path=commit_log_path)
        self.topics = read_retry_topics(root, terms.group, terms.max_reconsume_times)
        self._level_count = self._reader.level_count()
        self._turn = random_bits() % self.topics.retry_queues
        self._resender = None
        if terms.expired_original == "resend":
            self._resender = Resender(root, self.topics, commit_log_path)

    def __enter__(self) -> "SendBacks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        self._reader.close()

    def prepare(
        self,
        batch: pa.RecordBatch,
        delay_level: int = 0,
        first_row: int | None = 0,
        only: NDArray[np.intp] | None = None,
    ) -> Iterator[SentBack]:
        """Yield the records of all rows, or of `only` some, a piece of them at a time, in order; digests are 0.

        `delay_level` is for rows that ask for none. Raises OptionError for a row that names no message of the store and
        NotFoundError for one whose message has expired; both name the row, of which the first is `first_row`.
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
        places = rows.physical_offsets[chosen]
        sizes = self._reader.sizes_at(places)
        for first, last in _pieces(sizes):
            numbers = chosen[first:last]
            found = read_originals(self._reader.log, places[first:last], sizes[first:last])
            whole = found.is_whole & (sizes[first:last] > 0)
            self._refuse_missing(rows, numbers[~whole])
            kept, again = numbers[whole], numbers[~whole]
            positions, ends = found.positions[whole], found.ends[whole]
            if len(kept):
                originals = WholeRecords.of(found.data, positions, ends)
                batched = _check_originals(originals, rows.take(kept), rows, kept)
                self._refuse_batched(rows, kept[batched])
                again = np.sort(np.concatenate([again, kept[batched]]))
                kept, positions, ends = kept[~batched], positions[~batched], ends[~batched]
            if len(kept):
                yield self._of_originals(rows, kept, found.data, positions, ends)
            if len(again):
                yield self._of_rows(batch, rows, again)

    def _of_originals(
        self, rows: FailedRows, kept: NDArray[np.intp], data: Bytes, positions: Positions, ends: Positions
    ) -> SentBack:
        originals = WholeRecords.of(data, positions, ends)
        chosen = rows.take(kept)
        return self._made(kept, chosen, originals, None)

    def _of_rows(self, batch: pa.RecordBatch, rows: FailedRows, again: NDArray[np.intp]) -> SentBack:
        """Make records of rows whose originals are gone: as a client sends a message anew that a broker has not."""
        assert self._resender is not None
        chosen = rows.take(again)
        try:
            resent = self._resender.encode(batch.take(pa.array(again)), chosen)
        except RowFault as fault:
            raise RowFault(int(again[fault.row]), fault.what) from None
        data, sizes = resent.records.data, resent.records.sizes
        ends = np.cumsum(sizes)
        originals = WholeRecords.of(data, ends - sizes, ends)
        return self._made(again, chosen, originals, resent.texts)

    def _made(
        self, numbers: NDArray[np.intp], rows: FailedRows, originals: WholeRecords, texts: pa.BinaryArray | None
    ) -> SentBack:
        """Make the copies. `texts` are properties to go by instead of those of the originals."""
        decisions = decide(rows.reconsume_times, rows.asked_levels, self.topics.max_reconsume_times, self._level_count)
        queue_ids = (self._turn + np.arange(len(rows))) % self.topics.retry_queues
        self._turn = int(self._turn + len(rows)) % self.topics.retry_queues
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

    def _refuse_missing(self, rows: FailedRows, missing: NDArray[np.intp]) -> None:
        """Raise for a row whose place holds no record: it has expired, unless that is to be overcome, or never was."""
        if len(missing):
            self._reader.log.look()  # retention may have been quicker than this call
        begin, end = self._reader.log_begin, self._reader.log_end
        for row in missing.tolist():
            place = int(rows.physical_offsets[row])
            if place >= begin:
                why = f"no message begins there, the log has the physical offsets [{begin}, {end})"
                raise RowFault(row, f"{rows.describe(row)} was never in this store: {why}. {_IS_ROW}")
            if self._resender is None:
                raise _ExpiredFault(
                    row,
                    f"{rows.describe(row)} cannot be sent back: its original has expired, the log begins at physical "
                    f"offset {begin} by now. Set expiredOriginal=resend to send it from the row, which then needs the "
                    "column body (and tags, keys, properties to keep them); or leave the row out.",
                )

    def _refuse_batched(self, rows: FailedRows, batched: NDArray[np.intp]) -> None:
        if len(batched) and self._resender is None:
            raise RowFault(
                int(batched[0]),
                f"{rows.describe(int(batched[0]))} is one of several messages in one record (an inner batch), and a "
                "record goes back as a whole. Set expiredOriginal=resend to send this one from the row, which then "
                "needs the column body (and tags, keys, properties to keep them).",
            )


class _ExpiredFault(RowFault):
    """A row whose original has expired."""


_IS_ROW = (
    "Send back rows as the source gives them, with commitLogOffset, physicalTopic, queueId, queueOffset and "
    "reconsumeTimes unchanged, into the store that they were read from."
)


def _pieces(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut rows whose originals have these sizes into pieces [first, last) that fit into memory."""
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
    """Return which rows are of a record that holds several messages; raise RowFault unless all are what they say."""
    topics = originals.topics()
    pairs = originals.pairs()
    batched: NDArray[np.bool_] = (originals.sys_flags & INNER_BATCH) != 0
    queue_offsets = originals.field("queue_offset").astype(np.int64)
    are_theirs = queue_offsets == chosen.queue_offsets
    if batched.any():
        counts = pc.fill_null(pairs.column(INNER_NUM), "0").to_pylist()
        counts = np.array([int(count) if count.isdecimal() else 0 for count in counts], np.int64)
        behind = chosen.queue_offsets - queue_offsets
        are_theirs |= batched & (behind >= 0) & (behind < counts)
    for what, agree in (
        ("queueId", originals.field("queue_id") == chosen.queue_ids),
        ("queueOffset", are_theirs),
        ("reconsumeTimes", (originals.field("reconsume_times") == chosen.reconsume_times) | batched),
        ("topic", _have_topics(chosen, topics, pairs.column(RETRY_TOPIC))),
    ):
        for at in np.flatnonzero(~np.asarray(agree, np.bool_))[:1].tolist():
            name = topics[at].as_py().decode("utf-8", "replace")
            raise RowFault(
                int(numbers[at]),
                f"{rows.describe(int(numbers[at]))} was never in this store: at this place lies another message, or "
                f"{what} is not its own. There lies {name}/{originals.field('queue_id')[at]} at queue offset "
                f"{queue_offsets[at]}, reconsumeTimes {originals.field('reconsume_times')[at]}. {_IS_ROW}",
            )
    own = pc.is_in(topics, pa.array([name.encode() for name in sorted(CLOSED_TOPICS)], pa.binary()))
    for at in np.flatnonzero(own.to_numpy(zero_copy_only=False))[:1].tolist():
        raise RowFault(
            int(numbers[at]), f"{rows.describe(int(numbers[at]))} is RocketMQ's own: no group consumes that topic"
        )
    return batched


def _have_topics(chosen: FailedRows, topics: pa.BinaryArray, retried: pa.StringArray) -> NDArray[np.bool_]:
    """Say of each row whether its topic is the record's: the physical one, or else the one that a consumer sees."""
    is_retry = pc.starts_with(topics, RETRY_TOPIC_PREFIX.encode())
    seen = pc.if_else(pc.and_(is_retry, retried.is_valid()), retried.cast(pa.binary()), topics)
    agree = pa.scalar(None, pa.bool_())
    if chosen.physical_topics is not None:
        agree = pc.equal(chosen.physical_topics.cast(pa.binary()), topics)
    if chosen.topics is not None:
        agree = pc.coalesce(agree, pc.equal(chosen.topics.cast(pa.binary()), seen))
    return np.asarray(pc.fill_null(agree, False).to_numpy(zero_copy_only=False), np.bool_)
