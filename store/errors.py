"""Every error that a user of this project can meet.

    RmqError
    ├── OptionError            an option, a column or an argument is wrong: mend the call
    ├── DataLossError          messages that were promised are gone: decide (failOnDataLoss)
    └── StoreError             the store on disk does not allow what was asked
        ├── StorePathError         no store there, a kind that is not supported, or no right to read or write a path
        ├── NotFoundError          no such topic or queue
        ├── NoPermissionError      a topic or a group is closed to consumers: have an administrator open it
        ├── OffsetRangeError       the queue exists, the offset asked for does not
        ├── DamageError            bytes on disk break the format: evidence in the message
        ├── StoreChangedError      a file vanished, shrank or was replaced under the reader: plan again
        ├── LockTimeoutError       somebody else holds the store: wait, or stop the holder
        ├── DiskFullError          no room: nothing was lost, make room and write again
        ├── BatchConflictError     a batch does not follow what its query wrote before: decide
        └── GroupConflictError     another member of the consumer group is in the way: stop one of the two

Classes differ where a caller would act differently; the message is for people and says which thing,
what was found, what is accepted and what to do next. All of them survive pickling, because Spark
carries them between processes, and all say `rmq_spark.` before their name, where users find them.
"""

from pathlib import PurePath


class RmqError(Exception):
    """The root: whatever this project raises on purpose. Catch it to tell our errors from bugs."""

    def __init_subclass__(cls) -> None:
        cls.__module__ = "rmq_spark"  # where users import it from, and what a stack trace shows


RmqError.__module__ = "rmq_spark"


class OptionError(RmqError, ValueError):
    """An option, a column or an argument is not acceptable. Nothing was read or changed."""


class DataLossError(RmqError):
    """Messages in the wanted range no longer exist.

    `topic`, `queue_id` name the queue, `[begin, end)` the lost queue offsets. Nothing of the batch was
    delivered. `failOnDataLoss=false` skips what is gone and logs how many.
    """

    def __init__(self, topic: str, queue_id: int, begin: int, end: int, why: str) -> None:
        super().__init__(topic, queue_id, begin, end, why)  # args: so that it pickles
        self.topic, self.queue_id, self.begin, self.end, self.why = topic, queue_id, begin, end, why

    def __str__(self) -> str:
        count = self.end - self.begin
        what = (
            f"{count} messages, queue offsets [{self.begin}, {self.end})" if count else f"messages from {self.begin} on"
        )
        return (
            f"data loss in queue {self.topic}/{self.queue_id}: {what}, cannot be read any more: {self.why}. To go on "
            "without them set failOnDataLoss=false: they are skipped, and the log says "
            + ("how many." if count else "so; how many is not known.")
        )


class StoreError(RmqError):
    """The store on disk does not allow what was asked. Reading has changed nothing on disk.

    As itself, of none of the classes below, it mostly says that the system failed: an error of the disk, too many open
    files, no memory. The same call may succeed later.
    """


class StorePathError(StoreError):
    """There is no store at the path, or one of a kind that is not supported, or a path may not be read or written."""


class NotFoundError(StoreError, LookupError):
    """The topic or queue is not in the store. The message lists what is."""


class NoPermissionError(StoreError):
    """The store's configuration does not let a consumer group read: RocketMQ's NO_PERMISSION.

    The topic's `perm` lacks read, or the group has consumeEnable=false. A reader without a group is not refused.
    """


class OffsetRangeError(StoreError, LookupError):
    """A queue offset lies outside what the queue holds.

    `[begin, end)` of the queue `queue` was asked for, or the one offset `begin` where `end` is the same, and
    `[min_offset, max_offset)` is there. Below `min_offset` retention has deleted
    the messages; from `max_offset` on nothing was stored yet, or the store was cut or rebuilt.
    """

    def __init__(self, queue: str, begin: int, end: int, min_offset: int, max_offset: int, next_step: str = "") -> None:
        super().__init__(queue, begin, end, min_offset, max_offset, next_step)
        self.queue, self.begin, self.end = queue, begin, end
        self.min_offset, self.max_offset, self.next_step = min_offset, max_offset, next_step

    def __str__(self) -> str:
        is_place = self.begin == self.end
        asked = f"was the offset {self.begin}" if is_place else f"were [{self.begin}, {self.end})"
        held = f"queue {self.queue} holds the queue offsets [{self.min_offset}, {self.max_offset}), asked for {asked}"
        return f"{held}. {self.next_step}" if self.next_step else held


_READ_AROUND = "Read around the place with startingOffsets and endingOffsets, or restore the file from a copy."


class DamageError(StoreError):
    """Bytes on disk break the format.

    They are left as they are. Reading changes nothing else either; recovery may have mended other places before.
    `path` is the file, `position` the place in it (bytes), `expected` and `found` the two that disagree, `next_step`
    what can be done: a file beside the messages is not read around.
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
            f"damaged store: {self.path}, position {self.position}: {self.what}{detail}. The damage was left "
            f"as it is. {self.next_step}"
        )


class StoreChangedError(StoreError):
    """A file vanished, shrank or was replaced while it was being read: plan the read again."""


class LockTimeoutError(StoreError):
    """The store's lock was not to be had: a broker has it, or a writer that makes no progress. Nothing was written."""


class DiskFullError(StoreError):
    """The file system has no room, or the user's quota is used up.

    What was begun stays invisible or is finished by the next writer once there is room; nothing acknowledged is lost.
    """


class BatchConflictError(StoreError):
    """A batch of a query does not follow what the store knows of that query. Nothing of it was written.

    The same batch with other rows (a checkpoint that was copied or rolled back; `onBatchConflict`), or one beyond the
    next (the store was restored from a backup; `onBatchGap`).
    """


class GroupConflictError(StoreError):
    """Two queries cannot be members of one consumer group as they are, or one reads a queue that is another's now.

    The message names both, and where each runs. Nothing was read, and no offset of the group was changed.
    """
