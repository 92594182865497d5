"""One pull from a queue: status, next offset and messages, as a broker's store answers it.

Messages are chosen over whole columns of units (`pull_limits`), and only those that the result has are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError, StoreChangedError
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
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
) -> PullResult:
    """Pull up to `max_messages` from a queue offset on, as of the reader's last refresh.

    `limits` are a broker's if none are given; `accept` None wants every message. Of a record with several messages
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
        answer, units = _choose(reader, queue, offset, max_messages, limits, accept)
        try:
            batches = list(reader.messages_of(queue, units, offset, columns, decode_limits))
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


def has_wanted(reader: PullReader, queue: QueueKey, begin: int, end: int, accept: Accept | None) -> bool:
    """Say whether a message in the queue offsets [begin, end) may be wanted, as of the reader's last refresh.

    True, too, where it cannot be told: their file is gone, or the range goes on in the next one.
    """
    units = None if accept is None else reader.units_in_file(queue, begin, end - begin)
    if accept is None or units is None or not len(units):
        return True
    return end_of(units) < end or bool(np.any(accept(units.tags_codes)))


def _result(answer: Answer, offset: int, bounds: QueueBounds, messages: pa.Table) -> PullResult:
    said = pull_status.pull_status(answer.status, offset)
    return PullResult(answer.status, said, answer.next_begin_offset, bounds.min_offset, bounds.max_offset, messages)


_NOTHING = np.zeros(0, np.int64)
_NO_UNITS = Units(_NOTHING, _NOTHING, _NOTHING, _NOTHING, None)


def _choose(
    reader: PullReader, queue: QueueKey, offset: int, max_messages: int, limits: PullLimits, accept: Accept | None
) -> tuple[Answer, Units]:
    """Return the answer to a pull from an offset within the queue's bounds, and the units of its messages."""
    lies = reader.queue_files(queue)
    scanned = limits.max_scanned_messages(max_messages, lies.unit_bytes, are_batches=lies.are_batches)
    units = reader.units_in_file(queue, offset, scanned)
    if units is None:
        return pull_status.answer_without_file(offset, None if lies.are_batches else lies.file_units), _NO_UNITS
    wanted = np.ones(len(units), np.bool_) if accept is None else np.asarray(accept(units.tags_codes), np.bool_)
    assert len(wanted) == len(units), (len(wanted), len(units))  # the filter's promise
    candidates = Candidates(
        units.physical_offsets, units.sizes, wanted, reader.are_gone(units.physical_offsets), units.message_counts
    )
    found = scan(candidates, max_messages, limits, log_end=reader.log_end, segment_bytes=reader.segment_bytes)
    next_offset = offset
    if found.scanned:
        next_offset = end_of(units.part(0, found.scanned))
    answer = pull_status.answer_of_scan(next_offset, found_count=len(found.found), was_removed=found.was_removed)
    counts = units.message_counts
    chosen = Units(
        units.physical_offsets[found.found],
        units.sizes[found.found],
        units.tags_codes[found.found],
        units.queue_offsets[found.found],
        None if counts is None else counts[found.found],
    )
    return answer, chosen
