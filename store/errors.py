"""The exceptions of this project: what happened, and what the caller can do.

    RmqError
    ├── OptionError            an option, column or argument is invalid: correct the call
    ├── DataLossError          messages to be read no longer exist: skip them (failOnDataLoss=false), or stop
    └── StoreError             the store on disk does not allow the operation
        ├── StorePathError         no store at the path, an unsupported kind of store, or missing rights
        ├── NotFoundError          the topic or queue is not in the store
        ├── NoPermissionError      the topic or group is closed to consumers: ask an administrator to open it
        ├── OffsetRangeError       the queue does not hold the offset
        ├── DamageError            bytes on disk break the format: the message describes the damage
        ├── StoreChangedError      a file vanished, shrank or was replaced during a read: plan the read again
        ├── LockTimeoutError       another process holds the store: wait, or stop that process
        ├── DiskFullError          the disk is full, nothing was lost: free space and write again
        ├── BatchConflictError     a batch does not follow what its query wrote earlier: see onBatchConflict, onBatchGap
        ├── IntentStuckError       a batch for a cluster was begun and cannot be finished: repair the cause, or skip it
        ├── GroupConflictError     two members of a consumer group conflict: stop one of them
        ├── BackendUnavailableError  no broker or name server answered: start it, or check the address, and repeat
        ├── UnknownOutcomeError    a request may have been executed or not: find out before you repeat it
        └── BrokerError            a broker or name server refused a request: the message has its answer

There are two classes only where a caller would act differently. The message is for people: it says what failed, what
was found, what was expected and what to do next. Every error can be pickled, because Spark passes errors between
processes. Stack traces show every class as `rmq_spark.<name>`, because users import it from there.
"""

from pathlib import PurePath


class RmqError(Exception):
    """The base class of every error that this project raises deliberately. Any other exception is probably a bug."""

    def __init_subclass__(cls) -> None:
        cls.__module__ = "rmq_spark"  # what a stack trace shows, and where users import it from


RmqError.__module__ = "rmq_spark"


class OptionError(RmqError, ValueError):
    """An option, column or argument is not valid. Nothing was read or changed."""


class DataLossError(RmqError):
    """Messages in the requested range no longer exist. No message of the batch was delivered.

    `topic` and `queue_id` name the queue, in a cluster with its `broker`. The queue offsets `[begin, end)` are lost; if
    `begin` equals `end`, the number of lost messages is unknown. With `failOnDataLoss=false` a query skips lost
    messages and logs their number.
    """

    def __init__(self, topic: str, queue_id: int, begin: int, end: int, why: str, broker: str = "") -> None:
        super().__init__(topic, queue_id, begin, end, why, broker)  # pickling needs the arguments in `args`
        self.topic, self.queue_id, self.begin, self.end, self.why = topic, queue_id, begin, end, why
        self.broker = broker

    def __str__(self) -> str:
        count = self.end - self.begin
        lost = (
            f"{count} messages, queue offsets [{self.begin}, {self.end})," if count else f"messages from {self.begin}"
        )
        queue_id = f"{self.broker}:{self.queue_id}" if self.broker else self.queue_id
        logged = "and logs their number" if count else "and logs it; their number is unknown"
        return (
            f"data loss in queue {self.topic}/{queue_id}: {lost} can no longer be read: {self.why}. To continue "
            f"without them set failOnDataLoss=false: the query skips them {logged}."
        )


class StoreError(RmqError):
    """The store on disk does not allow the operation. If the operation was a read, nothing on disk was changed.

    An error of exactly this class, not of a subclass, usually means that the system failed: a disk error, too many open
    files, or no memory. The same call may succeed later.
    """


class StorePathError(StoreError):
    """There is no store at the path, the store is of an unsupported kind, or this user may not read or write it."""


class NotFoundError(StoreError, LookupError):
    """The topic or queue is not in the store. The message lists the topics or queues that are."""


class NoPermissionError(StoreError):
    """The store's configuration forbids a consumer group to read (RocketMQ's NO_PERMISSION).

    Either the topic's `perm` does not include read, or the group has consumeEnable=false, or it broadcasts and has
    consumeBroadcastEnable=false. A reader without a consumer group may read every topic.
    """


class OffsetRangeError(StoreError, LookupError):
    """A requested queue offset is outside the queue.

    The queue `queue` holds the offsets `[min_offset, max_offset)`. The request was for `[begin, end)`, or for the
    single offset `begin` if `begin` equals `end`. Messages below `min_offset` were deleted by retention. Messages at
    and above `max_offset` are not stored yet, or the store was truncated or rebuilt. `next_step` is advice for the
    user, or empty.
    """

    def __init__(self, queue: str, begin: int, end: int, min_offset: int, max_offset: int, next_step: str = "") -> None:
        super().__init__(queue, begin, end, min_offset, max_offset, next_step)
        self.queue, self.begin, self.end = queue, begin, end
        self.min_offset, self.max_offset, self.next_step = min_offset, max_offset, next_step

    def __str__(self) -> str:
        missing = f"offset {self.begin}" if self.begin == self.end else f"all of [{self.begin}, {self.end})"
        text = f"queue {self.queue} holds the queue offsets [{self.min_offset}, {self.max_offset}), not {missing}."
        return f"{text} {self.next_step}" if self.next_step else text


_READ_AROUND = "Read around the position with startingOffsets and endingOffsets, or restore the file from a copy."


class DamageError(StoreError):
    """Bytes on disk break the format.

    The damaged bytes were not changed, although recovery may have repaired other positions earlier. `path` is the
    file, `position` is in bytes from its beginning, and `what` describes the damage. `expected` and `found` are the two
    values that disagree, or None. `next_step` is advice for the user; the default is for the commit log, so errors in
    other files have their own.
    """

    def __init__(
        self,
        what: str,
        path: str | PurePath,
        position: int,
        expected: object = None,
        found: object = None,
        next_step: str = _READ_AROUND,
    ) -> None:
        super().__init__(what, str(path), position, expected, found, next_step)
        self.what, self.path, self.position = what, str(path), position
        self.expected, self.found, self.next_step = expected, found, next_step

    def __str__(self) -> str:
        detail = "" if self.expected is None else f": expected {self.expected}, found {self.found}"
        return (
            f"damaged store: {self.path}, position {self.position}: {self.what}{detail}. The damage was not repaired. "
            f"{self.next_step}"
        )


class StoreChangedError(StoreError):
    """A file vanished, shrank or was replaced during a read. Plan the read again."""


class LockTimeoutError(StoreError):
    """The store's lock is held by a broker, or by a writer that makes no progress. Nothing was written."""


class DiskFullError(StoreError):
    """The file system is full, or the user's quota is used up. No acknowledged message is lost.

    The messages of the unfinished write either stay invisible, or the next writer completes the write once the file
    system has room.
    """


class BatchConflictError(StoreError):
    """A batch does not follow the batches that its query wrote to the store before. No row of the batch was written.

    There are two causes. The store has the batch with other rows, because a checkpoint was copied or rolled back; see
    the option `onBatchConflict`. Or the store lacks the batches before it, because the store was restored from a
    backup; see the option `onBatchGap`.
    """


class IntentStuckError(StoreError):
    """A batch for a cluster was begun, and cannot be finished. A part of its rows may be stored.

    `batch` and `queue` name them, and `reason` says what prevents it. `queue` is None if no single queue does.
    `written` and `missing` are how many rows of the batch are stored and how many are not; None if that is not known.
    `batch_id` is the number of the batch, None for a plain batch write.
    The batch stays begun: the query writes no later batch, and each further commit tries again to finish this one.
    """

    def __init__(
        self,
        batch: str,
        queue: str | None,
        reason: str,
        written: int | None = None,
        missing: int | None = None,
        batch_id: int | None = None,
    ) -> None:
        super().__init__(batch, queue, reason, written, missing, batch_id)
        self.batch, self.queue, self.reason = batch, queue, reason
        self.written, self.missing, self.batch_id = written, missing, batch_id

    def __str__(self) -> str:
        counts = "" if self.missing is None else f" {self.written} of its rows are written, {self.missing} are missing."
        reason = self.reason if self.reason.endswith(".") else f"{self.reason}."
        where = "" if self.queue is None else f", because of queue {self.queue}"
        again = "start the query again" if self.batch_id is not None else "call rmq intents finish"
        accepted = "unknown" if self.missing is None else self.missing
        remedy = f"Repair the cause and {again}, or give the missing rows up: rmq intents skip ID --yes {accepted}"
        if self.missing is None and self.batch_id is None:
            remedy = "If its intent is left, rmq intents finish ID stores the rest of it"
        return f"{self.batch} was begun and cannot be finished{where}: {reason}{counts} {remedy}."


class GroupConflictError(StoreError):
    """Two members of a consumer group conflict: their settings differ, or both read the same queue.

    The message names both members and where each runs. Nothing was read, and no offset of the group was changed.
    """


class BackendUnavailableError(StoreError):
    """No broker or name server of the cluster answered in time. Nothing was changed, and the call can be repeated."""


class UnknownOutcomeError(StoreError):
    """A request that must not be repeated was sent, and no usable answer came. The broker has executed it or not.

    `message_ids` are the ids (UNIQ_KEY) of the messages in the request, to look for; empty if it had none.
    """

    def __init__(self, text: str, message_ids: tuple[str, ...] = ()) -> None:
        super().__init__(text, message_ids)
        self.text, self.message_ids = text, message_ids

    def __str__(self) -> str:
        return self.text


class BrokerError(StoreError):
    """A broker or name server answered a request with an error that has no class of its own (MQBrokerException).

    `code` is the number of the answer (ResponseCode), and `text` the whole message. The request was not executed.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return self.text
