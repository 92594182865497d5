"""The result of a pull, whatever place the messages are in: a store directory or a live cluster.

Offsets are queue offsets, which count messages. Source: PullResult, GetMessageStatus, PullStatus (4.9, 5.3).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError

PULL_MESSAGES = 32
HOLD_MS = 20_000  # DefaultMQPullConsumer#brokerSuspendMaxTimeMillis


class GetMessageStatus(StrEnum):
    """The status with which the store of a broker answers a pull. The names are RocketMQ's.

    RocketMQ's status for a queue that does not exist is left out, because a broker creates such a queue and answers
    NO_MESSAGE_IN_QUEUE (findConsumeQueue, 4.9 and 5.3). Here such a queue causes a NotFoundError.
    """

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"  # messages were skipped, and none matched
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"  # the queue has entries of messages that were deleted from the log
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"  # the queue's file that would contain the offset is gone
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"  # the offset is above the queue's end
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"  # the offset is the queue's end: the next message will get it
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"  # the offset is below the queue's minimum
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"  # the queue never had a message
    OFFSET_RESET = "OFFSET_RESET"  # an administrator has reset the group's offset; only brokers of 5.x answer so


class PullStatus(StrEnum):
    """The status of a pull as a RocketMQ client sees it, in its PullResult."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


# A filter by tags codes. It gets an array with the tags code of each message (Java's hash of its tag, or 0 if it has no
# tag), and returns an array of the same length that says for each of them whether the message is wanted.
Accept = Callable[[NDArray[np.int64]], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of a pull.

    `status` is the status in a broker's store, and `pull_status` is the one that a RocketMQ client sees. `messages` is
    a table with the requested columns and one row for each message, in the order of the queue. The next pull must begin
    at `next_begin_offset`, whatever the status is. The queue has the offsets from `min_offset` to before `max_offset`.
    """

    status: GetMessageStatus
    pull_status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: pa.Table


def check_columns(columns: Sequence[str], known: Collection[str]) -> None:
    """Raise OptionError if a column is not one of the `known` names, or if `columns` is not a list of names."""
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise OptionError(f'columns={columns!r}; expected a list of names. Give one, as columns=["body"].')
    unknown = [name for name in columns if not isinstance(name, str) or name not in known]
    if unknown:
        raise OptionError(f"no such column: {', '.join(map(str, unknown))}. Columns are: {', '.join(known)}.")
