"""What a pull answers, and where the next one is to begin: the store's statuses and what clients make of them.

Pure: what the queue holds is told. Offsets are queue offsets, in messages. There are no slaves here, so every
correction of an offset is made. Source: DefaultMessageStore#getMessage, PullMessageProcessor#processRequest,
MQClientAPIImpl#processPullResponse (4.9.8; DefaultMessageStore as of 4.9.4 for offsets beyond the end).
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from rmq_spark.store.units import QueueBounds


class GetMessageStatus(StrEnum):
    """How a store answers a pull; RocketMQ's names.

    RocketMQ's word for a missing queue is not among them: a broker makes the queue that it is asked for and answers
    NO_MESSAGE_IN_QUEUE (findConsumeQueue, 4.9 and 5.3), and here that is an error.
    """

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"  # messages were passed over, and none is wanted
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"  # the queue still names messages that the log has lost
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"  # the queue's file for the offset is gone
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"  # beyond the next message to come
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"  # the next message to come
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"  # before the first message that is still there
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"  # nothing was ever stored in it


class ResponseCode(IntEnum):
    """How a broker answers a pull."""

    SUCCESS = 0
    PULL_NOT_FOUND = 19  # wait and try again: the one answer that a broker holds back
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21


class PullStatus(StrEnum):
    """What a client's PullResult says."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and the queue offset at which the next pull is to begin."""

    status: GetMessageStatus
    next_begin_offset: int


def answer_by_bounds(bounds: QueueBounds, offset: int) -> Answer | None:
    """Return the answer to a pull from `offset` if the bounds alone give it, None if the queue is to be read."""
    if bounds.max_offset == 0:
        return Answer(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0)
    if offset < bounds.min_offset:
        return Answer(GetMessageStatus.OFFSET_TOO_SMALL, bounds.min_offset)
    if offset == bounds.max_offset:
        return Answer(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset)
    if offset > bounds.max_offset:
        return Answer(GetMessageStatus.OFFSET_OVERFLOW_BADLY, bounds.max_offset)
    return None


def answer_without_file(offset: int, file_units: int | None) -> Answer:
    """Return the answer where the queue's file for `offset` is gone; files hold `file_units` units each.

    None: units of several messages, where nobody knows what the next file begins with. The next pull, from 0, is told
    the queue's min offset then (BatchConsumeQueue#rollNextFile, 5.3).
    """
    next_begin_offset = 0 if file_units is None else next_file_offset(offset, file_units)
    return Answer(GetMessageStatus.OFFSET_FOUND_NULL, next_begin_offset)


def answer_of_scan(next_begin_offset: int, *, found_count: int, was_removed: bool) -> Answer:
    """Return the answer after units were scanned up to `next_begin_offset`.

    `was_removed` says that the last unit looked at, where nothing was found, is wanted and its message gone.
    """
    if found_count:
        return Answer(GetMessageStatus.FOUND, next_begin_offset)
    if was_removed:
        return Answer(GetMessageStatus.MESSAGE_WAS_REMOVING, next_begin_offset)
    return Answer(GetMessageStatus.NO_MATCHED_MESSAGE, next_begin_offset)


def next_file_offset(offset: int, file_units: int) -> int:
    """Return the first queue offset of the file after the one that holds `offset` (ConsumeQueue#rollNextFile)."""
    return offset + file_units - offset % file_units


def response_code(status: GetMessageStatus, offset: int) -> ResponseCode:
    """Return the code with which a broker answers a pull from `offset`."""
    match status:
        case GetMessageStatus.FOUND:
            return ResponseCode.SUCCESS
        case GetMessageStatus.MESSAGE_WAS_REMOVING | GetMessageStatus.NO_MATCHED_MESSAGE:
            return ResponseCode.PULL_RETRY_IMMEDIATELY
        case GetMessageStatus.OFFSET_FOUND_NULL | GetMessageStatus.OFFSET_OVERFLOW_ONE:
            return ResponseCode.PULL_NOT_FOUND
        case GetMessageStatus.NO_MESSAGE_IN_QUEUE if offset == 0:
            return ResponseCode.PULL_NOT_FOUND
    return ResponseCode.PULL_OFFSET_MOVED


_OF_CODE = {
    ResponseCode.SUCCESS: PullStatus.FOUND,
    ResponseCode.PULL_NOT_FOUND: PullStatus.NO_NEW_MSG,
    ResponseCode.PULL_RETRY_IMMEDIATELY: PullStatus.NO_MATCHED_MSG,
    ResponseCode.PULL_OFFSET_MOVED: PullStatus.OFFSET_ILLEGAL,
}


def pull_status(status: GetMessageStatus, offset: int) -> PullStatus:
    """Return what a client says of a pull from `offset` that the store answered with `status`."""
    return _OF_CODE[response_code(status, offset)]
