"""One pull from a queue: status, next offset and messages, as a broker's store answers it.

Messages are chosen over whole columns of units (`pull_limits`), and only those that the result has are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError, StoreChangedError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.group import pull_status
from rmq_spark.store.group.pull_limits import Candidates, PullLimits, scan
from rmq_spark.store.group.pull_reader import PullReader, end_of
from rmq_spark.store.group.pull_status import Answer, GetMessageStatus, PullStatus
from rmq_spark.store.log.queues import Units
from rmq_spark.store.options import MAX_DECOMPRESSED_BYTES
from rmq_spark.store.units import QueueBounds, QueueKey

# Those that a reader of the source gets by default.
DEFAULT_COLUMNS = tuple(COLUMNS)[:10]

# Says of each tags code (Java's hash of the tag, 0 without one) whether the message is wanted.
Accept = Callable[[NDArray[np.int64]], NDArray[np.bool_]]

_FIRST_ASKED = 64  # records, of which SQL92 is asked first
_TRIES = 3  # each knows of the segments that were gone when the one before met them


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull found. `status` is the store's word, `pull_status` that of a RocketMQ client.

    `messages` has the columns asked for, in queue order; `next_begin_offset` is where the next pull is to begin,
    whatever the status; `[min_offset, max_offset)` is what the queue held.
    """

    status: GetMessageStatus
    pull_status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: pa.Table


def pull(
    reader: PullReader,
    queue: QueueKey,
    offset: int,
    max_messages: int = 32,
    limits: PullLimits | None = None,
    accept: Accept | None = None,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    *,
    wanted: RowFilter | None = None,
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
) -> PullResult:
    """Pull up to `max_messages` from a queue offset on, as of the reader's last refresh.

    `limits` are a broker's if none are given; `accept` None wants every message. `wanted` is a subscription: as with a
    broker, tags are asked of units here, and messages whose tag has only the hash of a wanted one are then left out of
    the result, which may be FOUND and empty; SQL92 decides what counts as found. Of a record with several messages
    all from `offset` on are taken, be they more than `max_messages`. Raises OptionError for `max_messages` below 1 and
    unknown columns, NotFoundError for a queue that is not there, DamageError, and StoreChangedError if files go
    faster than they can be read. Source: DefaultMessageStore#getMessage (4.9.8; for batches 5.3).
    """
    if max_messages < 1:
        raise OptionError(f"max_messages={max_messages} is not above 0.")
    check_columns(columns)
    bounds = reader.bounds(queue)
    empty = pa.schema([(name, COLUMNS[name]) for name in columns]).empty_table()
    outside = pull_status.answer_by_bounds(bounds, offset)
    if outside is not None:
        return _result(outside, offset, bounds, empty)
    limits = limits or PullLimits()
    decode_limits = DecodeLimits(check_crc, max_decompressed_bytes)
    tries_left = _TRIES
    while True:
        try:
            answer, units = _choose(reader, queue, offset, max_messages, limits, accept, wanted)
            batches = list(reader.messages_of(queue, units, offset, columns, decode_limits, wanted))
        except StoreChangedError:
            tries_left -= 1
            if not tries_left:
                raise
            reader.look_at_log()
        else:
            break
    messages = pa.Table.from_batches(batches, empty.schema).combine_chunks()
    return _result(answer, offset, bounds, messages)


def check_columns(columns: Sequence[str]) -> None:
    """Raise OptionError for columns that no message has, and for a text, which is no list of columns."""
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise OptionError(f'columns={columns!r} is no list. Give the names in one, as columns=["body"].')
    unknown = [name for name in columns if not isinstance(name, str) or name not in COLUMNS]
    if unknown:
        raise OptionError(f"no such column: {', '.join(map(str, unknown))}. Columns are: {', '.join(COLUMNS)}.")


def has_wanted(
    reader: PullReader,
    queue: QueueKey,
    begin: int,
    end: int,
    accept: Accept | None,
    wanted: RowFilter | None = None,
) -> bool:
    """Say whether a message in the queue offsets [begin, end) may be wanted, as of the reader's last refresh.

    True, too, where it cannot be told: their file is gone, or the range goes on in the next one.
    """
    if accept is None and wanted is None:
        return True
    try:
        units = reader.units_in_file(queue, begin, end - begin)
    except StoreChangedError:
        return True
    if units is None or not len(units) or end_of(units) < end:
        return True
    may_be = _ask_units(reader, queue, units, accept, wanted)
    if may_be.any() and wanted is not None and wanted.codes is None:
        try:
            return bool(reader.which_match(queue, units.take(may_be), wanted, DecodeLimits()).any())
        except StoreChangedError:
            return True
    return bool(may_be.any())


def _ask_units(
    reader: PullReader, queue: QueueKey, units: Units, accept: Accept | None, wanted: RowFilter | None
) -> NDArray[np.bool_]:
    """Return which units may hold a message that is wanted, by their tags codes."""
    found = np.ones(len(units), np.bool_) if accept is None else np.array(accept(units.tags_codes), np.bool_)
    assert len(found) == len(units), (len(found), len(units))  # the filter's promise
    are_batches = reader.queue_files(queue).are_batches
    if wanted is not None and wanted.asks_units_of(queue.topic, are_batches=are_batches):
        found = found & wanted.may_match(units.tags_codes)
    return found


def _result(answer: Answer, offset: int, bounds: QueueBounds, messages: pa.Table) -> PullResult:
    said = pull_status.pull_status(answer.status, offset)
    return PullResult(answer.status, said, answer.next_begin_offset, bounds.min_offset, bounds.max_offset, messages)


_NOTHING = np.zeros(0, np.int64)
_NO_UNITS = Units(_NOTHING, _NOTHING, _NOTHING, _NOTHING, None)


def _choose(
    reader: PullReader,
    queue: QueueKey,
    offset: int,
    max_messages: int,
    limits: PullLimits,
    accept: Accept | None,
    wanted: RowFilter | None,
) -> tuple[Answer, Units]:
    """Return the answer to a pull from an offset within the queue's bounds, and the units of its messages."""
    lies = reader.queue_files(queue)
    scanned = limits.max_scanned_messages(max_messages, lies.unit_bytes, are_batches=lies.are_batches)
    units = reader.units_in_file(queue, offset, scanned)
    if units is None:
        return pull_status.answer_without_file(offset, None if lies.are_batches else lies.file_units), _NO_UNITS
    are_wanted = _ask_units(reader, queue, units, accept, wanted)
    are_gone = reader.are_gone(units.physical_offsets)
    asked = 0
    while True:
        # SQL92 is asked of records, and of no more than it takes to fill the batch: a broker looks no further either.
        looked_at = len(units)
        if wanted is not None and wanted.codes is None:
            looked_at = min(max(asked * 4, _FIRST_ASKED), len(units))
            there = asked + np.flatnonzero((are_wanted & ~are_gone)[asked:looked_at])
            are_wanted[there] = reader.which_match(queue, units.take(there), wanted, DecodeLimits())
        part = units.part(0, looked_at)
        candidates = Candidates(
            part.physical_offsets, part.sizes, are_wanted[:looked_at], are_gone[:looked_at], part.message_counts
        )
        found = scan(candidates, max_messages, limits, log_end=reader.log_end, segment_bytes=reader.segment_bytes)
        if found.scanned < looked_at or looked_at == len(units):
            break
        asked = looked_at
    next_offset = offset
    if found.scanned:
        next_offset = end_of(units.part(0, found.scanned))
    answer = pull_status.answer_of_scan(next_offset, found_count=len(found.found), was_removed=found.was_removed)
    return answer, units.take(found.found)
