"""The writing half of the contract of `store.backend`: how a batch of rows is written in tasks and committed.

Other modules import these names from `store.backend`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import pyarrow as pa

from rmq_spark.store.argument_checks import check_setting, check_word
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import CommitKey, QueueKey, Suspension
from rmq_spark.store.names import LEDGER_TOPIC, STAGE_TOPIC, check_retrying_group


class Guarantee(StrEnum):
    """How often a sink stores each row of a batch that Spark repeats."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"


@dataclass(frozen=True, slots=True)
class CommitTerms:
    """How a batch is committed. They mean the same as the sink's options of these names. Durations are in ms."""

    on_conflict: str = "fail"  # or "skip"
    on_gap: str = "fail"  # or "continue"
    is_transaction: bool = False
    flush: str = "sync"
    staging_retention_ms: int = 24 * 3_600_000
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False
    stage_topic: str = STAGE_TOPIC
    ledger_topic: str = LEDGER_TOPIC
    settle_ms: int = 5_000
    fence_timeout_ms: int = 150_000


@dataclass(frozen=True, slots=True)
class SinkTerms:
    """How new messages are written.

    Every row has a column topic; `topic` is the topic of all rows, or None if they differ. If `creates_topics`, a
    missing topic gets `queue_count` queues. Bodies of at least `compress_over_bytes` are compressed with `compression`
    (zlib, lz4, zstd; None for no compression). A stored body has at most `max_message_bytes`. `guarantee` is how often
    each row is stored, which the place must be able to promise.
    """

    topic: str | None = None
    queue_count: int = 4
    creates_topics: bool = True
    compression: str | None = None
    compress_over_bytes: int = 4096
    max_message_bytes: int = 4 << 20
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE


EXPIRED_ORIGINALS = ("error", "resend")


@dataclass(frozen=True, slots=True)
class RepeatedBatch:
    """A batch of a query that an earlier run has planned and may have committed, so that Spark repeats it.

    It was first planned at `planned_ms` (ms since the epoch, by the clock of the driver), before its tasks ran.
    """

    batch_id: int
    planned_ms: int


@dataclass(frozen=True, slots=True)
class SendBackTerms:
    """How the failed messages of a `group` are sent back.

    After `max_reconsume_times` retries a message becomes a dead letter. None means the group's own limit, by default
    16. `expired_original` says what to do if the original is no longer in the log: "error" raises an error, and
    "resend" makes the copy from the row, which must contain the body then. `repeated` is the batch of which an earlier
    run may have sent messages back, if it is known. A place that records what it has sent back does not need it.
    """

    group: str
    max_reconsume_times: int | None = None
    expired_original: str = "error"
    repeated: RepeatedBatch | None = None


def check_send_back(
    group: object, delay_level: object, max_reconsume_times: object, expired_original: object
) -> SendBackTerms:
    """Return the checked arguments of `send_back`. Raises OptionError if one is invalid."""
    if not isinstance(group, str):
        raise OptionError(f"group={group!r} is not a str: the name of the consumer group that failed.")
    check_retrying_group(group)
    if type(delay_level) is not int or not -(2**31) <= delay_level < 2**31:
        raise OptionError(
            f"delay_level={delay_level!r} must be a delay level: 0 for 3 + reconsumeTimes, below 0 for dead letters."
        )
    if max_reconsume_times is not None:
        check_setting("max_reconsume_times", max_reconsume_times, 0, 2**31 - 1)
    check_word("expired_original", expired_original, EXPIRED_ORIGINALS)
    return SendBackTerms(group, max_reconsume_times, str(expired_original))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class CommitTotals:
    """The totals of one commit: its rows, their bytes in the log, and the number of queues that got rows.

    If the batch was `skipped`, the three numbers are 0.
    """

    rows: int = 0
    bytes: int = 0
    queues: int = 0
    skipped: bool = False


Receipt: TypeAlias = object  # what a task's writer returns for the commit: picklable, and opaque to all but its sink


class TaskWriter(Protocol):
    """Writes the rows of one attempt of one task."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows, in the columns of the sink. Raises OptionError for a row that is not valid, with its number."""

    def finish(self) -> Receipt:
        """End the writing, so that the commit can rely on it. Return the receipt for the commit."""

    def discard(self) -> None:
        """Remove what a failed task has written, as far as that is possible."""


class BatchSink(Protocol):
    """Writes batches of rows. Picklable: driver and tasks have copies, which share only keys, tokens and receipts."""

    @property
    def guarantee(self) -> Guarantee:
        """How often each row of a repeated batch is stored."""

    def prepare(self) -> str | None:
        """Check on the driver, before any task runs, that rows can be written. Return the token for `open_task`.

        The token is small and travels to the tasks, which detect by it that they write to another place.
        """

    def open_task(self, token: str | None, key: CommitKey, task: str, partition: int) -> TaskWriter:
        """Return the writer of an attempt of a task, which has the unique name `task`.

        `partition` is the number of the task's partition in the batch. All attempts of a task have the same number.

        Raises StoreChangedError if this process does not see the place that the driver prepared.
        """

    def commit(
        self, key: CommitKey, receipts: Sequence[Receipt], before_commit: Callable[[], None] | None = None
    ) -> CommitTotals:
        """Make the rows of all receipts visible, once, even if the call is repeated with the same key.

        If the batch is new, `before_commit` is called when nothing can refuse the batch any more, before its first row
        is stored. Raises BatchConflictError if the batch does not follow the earlier ones of its query.
        """

    def abort(self, key: CommitKey, receipts: Sequence[Receipt]) -> None:
        """Remove what the tasks of an aborted batch have written. A commit that has begun is not undone."""


class SendBackSink(BatchSink, Protocol):
    """A sink for messages that a group failed to consume, with the record of the queues that its listeners suspend."""

    def suspended(self, key: CommitKey) -> Mapping[QueueKey, tuple[Suspension, bool]]:
        """Return each suspended queue of the group: its suspension, and whether that is settled.

        A suspension is settled if all its dead letters are certainly stored, and `key` is not the batch that made it.
        """

    def record(
        self, key: CommitKey, outcomes: Mapping[QueueKey, Suspension | None], known: Mapping[QueueKey, int]
    ) -> None:
        """Record the outcomes of a batch: the suspension of each queue, or None if it resumes.

        For `before_commit`. `known` has the number of the last change that the task knew, by queue; a suspension by
        another query after that stays.
        """
