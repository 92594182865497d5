"""One pull from a queue. The result has the status, the next offset and the messages that a broker would return.

Messages are selected by their consume-queue entries, with operations on whole columns (`pull_limits`). Only the
selected messages are read from the log. Offsets are queue offsets, which count messages. A broker that is a slave does
not correct offsets outside a queue; here offsets are always corrected, as by a master.

Source: DefaultMessageStore#getMessage, PullMessageProcessor#processRequest, MQClientAPIImpl#processPullResponse (4.9.8;
DefaultMessageStore as of 4.9.4 for offsets beyond the end).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError, StoreChangedError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.group.pull_limits import Candidates, PullLimits, scan
from rmq_spark.store.group.pull_reader import PullReader, end_of
from rmq_spark.store.log.consume_queue import Entries
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, QueueBounds, QueueKey
from rmq_spark.store.pull_result import PULL_MESSAGES, Accept, GetMessageStatus, PullResult, PullStatus, check_columns


class ResponseCode(IntEnum):
    """The response code with which a broker answers a pull."""

    SUCCESS = 0
    PULL_NOT_FOUND = 19  # no new message; only before this answer does a broker wait (long polling)
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21


@dataclass(frozen=True, slots=True)
class Answer:
    """The store's answer to a pull: a status, and the queue offset where the next pull must begin."""

    status: GetMessageStatus
    next_begin_offset: int


def answer_by_bounds(bounds: QueueBounds, offset: int) -> Answer | None:
    """Return the answer to a pull from `offset` if that is outside the queue's bounds.

    Returns None if `offset` is within the bounds, because then the queue must be read to find the answer.
    """
    if bounds.max_offset == 0:
        return Answer(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0)
    if offset < bounds.min_offset:
        return Answer(GetMessageStatus.OFFSET_TOO_SMALL, bounds.min_offset)
    if offset == bounds.max_offset:
        return Answer(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset)
    if offset > bounds.max_offset:
        return Answer(GetMessageStatus.OFFSET_OVERFLOW_BADLY, bounds.max_offset)
    return None


def answer_without_file(offset: int, file_entries: int | None) -> Answer:
    """Return the answer to a pull if the queue's file that would contain `offset` is gone.

    `file_entries` is the number of entries in each file of the queue. It is None if an entry may have several messages.
    Then the first offset of the next file is unknown, so the next pull must begin at 0, and its answer contains the
    queue's minimum (BatchConsumeQueue#rollNextFile, 5.3).
    """
    next_begin_offset = 0 if file_entries is None else next_file_offset(offset, file_entries)
    return Answer(GetMessageStatus.OFFSET_FOUND_NULL, next_begin_offset)


def answer_of_scan(next_begin_offset: int, *, found_count: int, was_removed: bool) -> Answer:
    """Return the answer to a pull whose scan of the entries ended before `next_begin_offset`.

    `found_count` is the number of entries that the scan took. `was_removed` says whether the message of the last
    examined entry was wanted but is gone. It matters only if nothing was found.
    """
    if found_count:
        return Answer(GetMessageStatus.FOUND, next_begin_offset)
    if was_removed:
        return Answer(GetMessageStatus.MESSAGE_WAS_REMOVING, next_begin_offset)
    return Answer(GetMessageStatus.NO_MATCHED_MESSAGE, next_begin_offset)


def next_file_offset(offset: int, file_entries: int) -> int:
    """Return the first queue offset of the file that follows the file with `offset` (ConsumeQueue#rollNextFile).

    `file_entries` is the number of entries in each file of the queue.
    """
    return offset + file_entries - offset % file_entries


def response_code(status: GetMessageStatus, offset: int) -> ResponseCode:
    """Return the response code that a broker sends for a pull from `offset` with this status of the store."""
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
    """Return the status that a client sees for a pull from `offset` that the store answered with `status`."""
    return _OF_CODE[response_code(status, offset)]


# The columns that a pull returns by default, which are also those of the data source.
DEFAULT_COLUMNS = tuple(COLUMNS)[:10]

_FIRST_MATCHED = 64  # the number of records that the first round compares with an SQL92 expression
_TRIES = 3  # each further try lists the segments of the log again


def pull(
    reader: PullReader,
    queue: QueueKey,
    offset: int,
    max_messages: int = PULL_MESSAGES,
    limits: PullLimits | None = None,
    accept: Accept | None = None,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    *,
    wanted: RowFilter | None = None,
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
) -> PullResult:
    """Pull up to `max_messages` messages, starting at the queue offset `offset`, as of the reader's last refresh.

    `limits` are further limits, by default those of a broker. `accept` is a filter by tags codes; None accepts every
    message. `wanted` is the filter of a subscription, by tags or by an SQL92 expression. Tags are matched as a broker
    does it: first by the hash of the tag in the consume-queue entry. Messages that have another tag with the same hash
    are then removed from the result, so a result with the status FOUND may be empty. With SQL92, the status is FOUND
    only if a message matches the expression. If a record contains several messages, all of them from `offset` are
    returned, even if these are more than `max_messages`.

    Raises OptionError for a `max_messages` below 1 or an unknown column, NotFoundError if the queue does not exist,
    DamageError if an entry or a record is damaged, and StoreChangedError if files are deleted faster than they can be
    read. Source: DefaultMessageStore#getMessage (4.9.8; for batches 5.3).
    """
    if max_messages < 1:
        raise OptionError(f"max_messages={max_messages}; expected at least 1.")
    check_columns(columns, COLUMNS)
    bounds = reader.bounds(queue)
    empty = pa.schema([(name, COLUMNS[name]) for name in columns]).empty_table()
    outside = answer_by_bounds(bounds, offset)
    if outside is not None:
        return _result(outside, offset, bounds, empty)
    limits = limits or PullLimits()
    decode_limits = DecodeLimits(check_crc, max_decompressed_bytes)
    tries_left = _TRIES
    while True:
        try:
            answer, entries = _choose(reader, queue, offset, max_messages, limits, accept, wanted)
            batches = list(reader.messages_of(queue, entries, offset, columns, decode_limits, wanted))
        except StoreChangedError:
            tries_left -= 1
            if not tries_left:
                raise
            reader.look_at_log()
        else:
            break
    messages = pa.Table.from_batches(batches, empty.schema).combine_chunks()
    return _result(answer, offset, bounds, messages)


def has_wanted(
    reader: PullReader,
    queue: QueueKey,
    begin: int,
    end: int,
    accept: Accept | None,
    wanted: RowFilter | None = None,
) -> bool:
    """Say whether a message with a queue offset in [begin, end) may be wanted, as of the reader's last refresh.

    Returns True also if this is unknown: if the file with these entries is gone, or if the range continues in the next
    file.
    """
    if accept is None and wanted is None:
        return True
    try:
        entries = reader.entries_in_file(queue, begin, end - begin)
    except StoreChangedError:
        return True
    if entries is None or not len(entries) or end_of(entries) < end:
        return True
    may_be = _match_entries(reader, queue, entries, accept, wanted)
    if may_be.any() and wanted is not None and wanted.codes is None:
        try:
            return bool(reader.which_match(queue, entries.take(may_be), wanted, DecodeLimits()).any())
        except StoreChangedError:
            return True
    return bool(may_be.any())


def _match_entries(
    reader: PullReader, queue: QueueKey, entries: Entries, accept: Accept | None, wanted: RowFilter | None
) -> NDArray[np.bool_]:
    """Return for each entry whether it may have a wanted message, judged by its tags code."""
    found = np.ones(len(entries), np.bool_) if accept is None else np.array(accept(entries.tags_codes), np.bool_)
    assert len(found) == len(entries), (len(found), len(entries))  # the contract of `accept`
    are_batches = reader.queue_files(queue).are_batches
    if wanted is not None and wanted.asks_units_of(queue.topic, are_batches=are_batches):
        found = found & wanted.may_match(entries.tags_codes)
    return found


def _result(answer: Answer, offset: int, bounds: QueueBounds, messages: pa.Table) -> PullResult:
    of_client = pull_status(answer.status, offset)
    return PullResult(
        answer.status, of_client, answer.next_begin_offset, bounds.min_offset, bounds.max_offset, messages
    )


_NOTHING = np.zeros(0, np.int64)
_NO_ENTRIES = Entries(_NOTHING, _NOTHING, _NOTHING, _NOTHING, None)


def _choose(
    reader: PullReader,
    queue: QueueKey,
    offset: int,
    max_messages: int,
    limits: PullLimits,
    accept: Accept | None,
    wanted: RowFilter | None,
) -> tuple[Answer, Entries]:
    """Return the answer to a pull from an offset within the queue's bounds, and the entries of the chosen messages."""
    layout = reader.queue_files(queue)
    scanned = limits.max_scanned_messages(max_messages, layout.entry_bytes, are_batches=layout.are_batches)
    entries = reader.entries_in_file(queue, offset, scanned)
    if entries is None:
        return answer_without_file(offset, None if layout.are_batches else layout.file_entries), _NO_ENTRIES
    are_wanted = _match_entries(reader, queue, entries, accept, wanted)
    are_gone = reader.are_gone(entries.physical_offsets)
    matched = 0
    while True:
        # SQL92 expressions need the records, so only as many records are compared as fill the batch, as in a broker.
        examined = len(entries)
        if wanted is not None and wanted.codes is None:
            examined = min(max(matched * 4, _FIRST_MATCHED), len(entries))
            present = matched + np.flatnonzero((are_wanted & ~are_gone)[matched:examined])
            are_wanted[present] = reader.which_match(queue, entries.take(present), wanted, DecodeLimits())
        part = entries.part(0, examined)
        candidates = Candidates(
            part.physical_offsets, part.sizes, are_wanted[:examined], are_gone[:examined], part.message_counts
        )
        found = scan(candidates, max_messages, limits, log_end=reader.log_end, segment_bytes=reader.segment_bytes)
        if found.scanned < examined or examined == len(entries):
            break
        matched = examined
    next_offset = offset
    if found.scanned:
        next_offset = end_of(entries.part(0, found.scanned))
    answer = answer_of_scan(next_offset, found_count=len(found.found), was_removed=found.was_removed)
    return answer, entries.take(found.found)
