"""The marks of a query, which outlive its ledger rows, and what a session may believe of rows and marks together.

Ledger rows expire with the broker's log. A query that runs once a week must know its last batch nevertheless. So each
query keeps three numbers, as the offsets of a consumer group of its own in the ledger topic:

| mark | queue | value |
| --- | --- | --- |
| from | 0 | the ledger offset of an intent or a `done` that is known to count; before the first, how far one has read |
| begun | 1 | the newest batch for which an intent may have been written, plus 1 |
| done | 2 | the newest batch that is done, plus 1 |

The queues 1 and 2 are empty; they only serve as keys. A mark may be older than the rows: a broker saves marks every
5 s, and a session that was frozen may store an older value. Therefore

- as long as no row from *from* on has expired, the rows decide, and an older *from* costs only reading;
- when one has expired, an intent that is left may be void, because the row that made it void may be gone. Then only
  "nothing is open" is believed, and only if *begun* agrees: no batch was begun after the last one that is done;
- a session that finds a mark older than the rows stores it again. So only a query that nobody looks at from the crash
  on until its rows have expired can be misled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from rmq_spark.store.cluster.address import DEFAULT_PULL_GROUP
from rmq_spark.store.cluster.exactly_once.ledger_rows import (
    Intent,
    LastBatch,
    LedgerState,
    PlacedRow,
    batch_of,
    query_digest,
)
from rmq_spark.store.errors import BatchConflictError, IntentStuckError
from rmq_spark.store.model import CommitKey

GROUP_PREFIX = "RMQ_SPARK_"
READING_GROUP = f"{GROUP_PREFIX}READER"  # pulls have it: a pull of a mark's group would end a reset without a notice
_GROUP_DIGITS = 32


class Mark(IntEnum):
    """A mark, by the id of the queue of the ledger topic that is its key."""

    FROM = 0
    BEGUN = 1
    DONE = 2


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a query. None: there is no such mark.

    A plain batch write keeps no marks, because nobody repeats it. Then `is_kept` is False, and `start` is how far the
    ledger was read when the write began, or None if that is not known.
    """

    start: int | None = None
    begun: int | None = None
    done: int | None = None
    is_kept: bool = True

    @classmethod
    def of_offsets(cls, offsets: Mapping[Mark, int | None]) -> "Marks":
        """Return the marks as brokers answer them. A broker of 4.9 answers 0 for "no offset" in an empty queue."""
        return cls(offsets[Mark.FROM], offsets[Mark.BEGUN] or None, offsets[Mark.DONE] or None)

    @property
    def is_new(self) -> bool:
        """Whether no batch of the query has begun, by the marks."""
        return self.begun is None and self.done is None

    @property
    def read_begin(self) -> int:
        """The ledger offset from which the query's rows are read.

        It is the beginning for a new query, even if there is a mark *from*. That costs only reading, and *from* alone
        may be what an administrator's reset has left.
        """
        return 0 if self.start is None or (self.is_kept and self.is_new) else self.start

    def with_mark(self, mark: Mark, value: int) -> "Marks":
        """Return the marks after one was stored."""
        if mark is Mark.FROM:
            return replace(self, start=value)
        return replace(self, begun=value) if mark is Mark.BEGUN else replace(self, done=value)


def marks_group(query_id: str) -> str:
    """Return the consumer group whose offsets are the marks of a query, without the namespace."""
    return GROUP_PREFIX + query_digest(query_id)[:_GROUP_DIGITS]


def reading_group(pull_group: str) -> str:
    """Return the group in whose name the sink pulls, without the namespace. `pull_group` is that of the address.

    The default group of other pulls means that none was chosen. The sink has a group of its own, so that rights on the
    groups RMQ_SPARK_* suffice for it.
    """
    return READING_GROUP if pull_group in ("", DEFAULT_PULL_GROUP) else pull_group


def interpret(query_id: str, marks: Marks, rows: Iterable[PlacedRow], *, has_expired: bool) -> LedgerState:
    """Return what a session may believe that has read the `rows` of a query from `marks.read_begin` on.

    `has_expired` says that a row of the ledger, of any query, at or above that offset has expired, or that it is not
    known. Raises IntentStuckError if rows that are missing may be those of an unfinished batch, and BatchConflictError
    if marks and rows contradict each other.
    """
    if not has_expired or (marks.start is None and marks.is_new):
        # Without any mark the query has never begun, or the broker has lost marks of the last seconds; the rows are
        # not older than the marks.
        state = LedgerState().apply_all(rows)
        if marks.is_kept and marks.done is not None and state.last is None and state.open is None:
            raise BatchConflictError(
                f"the ledger contradicts the marks of query {query_id}: batch {marks.done - 1} is done, and from "
                f"ledger offset {marks.read_begin} on there is no row of the query; expected the row of its intent. "
                f"Somebody has reset the offsets of group {marks_group(query_id)}, or the ledger was replaced. Compare "
                "the target topics with the checkpoint; then start the query with a new checkpoint. Nothing was "
                "written."
            )
        return state
    state = read_from_done(marks, rows)
    if marks.is_kept and state.open is None and (marks.begun or 0) == _next_batch(state):
        return replace(state, counted=None)  # that it counts is not proved, and it may be older than it seems
    what = f"the last batch of query {query_id}" if marks.is_kept else f"the write {query_id}"
    reason = _describe_loss(marks, state)
    raise IntentStuckError(what, None, reason, batch_id=lost_batch(marks, state) if marks.is_kept else None)


def read_from_done(marks: Marks, rows: Iterable[PlacedRow]) -> LedgerState:
    """Return what rows would mean after the batch of the mark *done*, if none had expired. See `interpret`.

    An intent for no rows, which is its own end if it counts, is taken for an open one: an earlier one may count.
    """
    state = LedgerState(None if marks.done is None else LastBatch(marks.done - 1))
    for offset, row in rows:
        state = state.apply(replace(row, rows=1) if isinstance(row, Intent) and not row.rows else row, offset)
    return state


def lost_batch(marks: Marks, state: LedgerState) -> int:
    """Return the batch that an operator skips next, after `interpret` has raised IntentStuckError for expired rows.

    `state` is what `read_from_done` returns. A row `done` of this batch, with an unknown digest, and the marks *begun*
    and *done* after it let the query continue, or show the next batch to skip.
    """
    return state.open.batch if state.open is not None else max(marks.begun or 0, _next_batch(state)) - 1


def check_first_batch(state: LedgerState, marks: Marks, key: CommitKey, *, accepts_gap: bool) -> None:
    """Raise BatchConflictError for a batch above 0 of a query of which the ledger knows no batch.

    It is accepted if it has begun before, because then it was accepted before. `accepts_gap` is true for transactions,
    whose versions have gaps, and for onBatchGap=continue.
    """
    batch = batch_of(key)
    if state.last is not None or state.open is not None or batch == 0 or marks.begun == batch + 1 or accepts_gap:
        return
    raise BatchConflictError(
        f"{key} cannot be written: the ledger has no batch of this query; expected batch {batch - 1} to be done. The "
        "ledger was lost or replaced, or the checkpoint was used with another cluster. Compare the target topics with "
        "the checkpoint, then start the query once with onBatchGap=continue. Nothing was written."
    )


def find_old_marks(state: LedgerState, marks: Marks) -> dict[Mark, int]:
    """Return the marks to store again, because the believed rows are newer, with their values.

    Marks only move forward here. A session that stores them late may set one back, and the next look repairs it.
    """
    if not marks.is_kept:
        return {}
    done = _next_batch(state)
    newest = {
        Mark.FROM: -1 if state.counted is None else state.counted,
        Mark.BEGUN: done if state.open is None else state.open.batch + 1,
        Mark.DONE: done,
    }
    known = {
        Mark.FROM: -1 if marks.start is None else marks.start,
        Mark.BEGUN: marks.begun or 0,
        Mark.DONE: marks.done or 0,
    }
    return {mark: value for mark, value in newest.items() if value > known[mark]}


def _next_batch(state: LedgerState) -> int:
    return 0 if state.last is None else state.last.batch_id + 1


def _describe_loss(marks: Marks, state: LedgerState) -> str:
    """Return the reason for rows that have expired while they were needed."""
    if not marks.is_kept:
        return (
            f"it has begun before the oldest ledger row: rows from ledger offset {marks.read_begin} on have expired, "
            "because the write has lasted longer than the retention of the ledger's broker; expected all of its rows"
        )
    if state.open is not None:
        found = f"an intent for batch {state.open.batch} is left, and whether it counts cannot be known any more"
    else:
        last = "none" if state.last is None else f"batch {state.last.batch_id}"
        found = f"the batch that began last is {(marks.begun or 0) - 1}, and the last one that is done is {last}"
    return (
        f"it has begun before the oldest ledger row: rows from ledger offset {marks.read_begin} on have expired, and "
        f"{found}; expected that the last batch that began is done. Whether rows of it are missing cannot be found "
        "out. Compare the target topics with the source"
    )
