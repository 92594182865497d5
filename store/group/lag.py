"""The lag of a group in a store: how many messages, bytes and seconds it is behind in each queue.

`group_tables` describes the table and the states of an offset.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreChangedError
from rmq_spark.store.group_tables import GONE, LAG, QueueLag, lag_row, unread_range
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey

_TRIES = 3  # retention may delete files during a measurement


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of one group: its committed offsets, its last commit, and the owners of its queues.

    `published_ms` is the time of the last commit by a query of ours, in ms since the epoch, or None if there was none.
    `members` maps each queue to the id of the living member that owns it.
    """

    group: str
    offsets: Mapping[QueueKey, int]
    published_ms: int | None
    members: Mapping[QueueKey, str] = field(default_factory=dict)


def queue_lag(reader: StoreReader, queue: QueueKey, offset: int | None) -> QueueLag:
    """Return the lag of a group in one queue, as of the reader's last refresh.

    `offset` is the committed offset of the group in the queue, or None if it has none. If retention deletes files
    during the call, the reader is refreshed and the lag is measured again. Raises StoreChangedError or OffsetRangeError
    if that happens again and again, and DamageError if a file is damaged.
    """
    for attempt in range(_TRIES):
        try:
            return _measure(reader, queue, offset)
        except NotFoundError:
            return QueueLag(GONE)
        except (OffsetRangeError, StoreChangedError):
            if attempt == _TRIES - 1:
                raise
            reader.refresh()
    raise AssertionError("unreachable")


def lag_table(reader: StoreReader, groups: Sequence[GroupState], now_ms: int) -> pa.Table:
    """Return the lag of these groups as a table with the columns of `LAG`: one row for each group and queue.

    The queues of a group are all queues of the topics in which it has committed offsets. A queue that does not exist
    any more is included if the group has an offset in it. `secondsBehind` is measured up to the time `now_ms` (ms since
    the epoch). Raises the errors of `queue_lag`.
    """
    rows = [
        row
        for state in sorted(groups, key=lambda one: one.group)
        for queue in _queues_of(reader, state)
        for row in (_row(state, queue, queue_lag(reader, queue, state.offsets.get(queue)), now_ms),)
    ]
    return pa.Table.from_pylist(rows, LAG)


def _measure(reader: StoreReader, queue: QueueKey, offset: int | None) -> QueueLag:
    bounds = reader.bounds(queue)
    state, begin, end = unread_range(offset, bounds)
    has_last = offset is not None and bounds.min_offset < offset <= bounds.max_offset
    return QueueLag(
        state,
        bounds,
        messages=end - begin,
        bytes=reader.record_bytes(queue, begin, end),
        expired=max(0, bounds.min_offset - offset) if offset is not None else 0,
        next_stored_ms=reader.proof(queue, begin).store_time_ms if begin < end else None,
        last_stored_ms=reader.proof(queue, offset - 1).store_time_ms if offset is not None and has_last else None,
    )


def _queues_of(reader: StoreReader, state: GroupState) -> Iterator[QueueKey]:
    found = set(state.offsets)
    for topic in {queue.topic for queue in state.offsets} & set(reader.topics()):
        found.update(reader.queues(topic))
    yield from sorted(found)


def _row(state: GroupState, queue: QueueKey, lag: QueueLag, now_ms: int) -> dict[str, object]:
    row = lag_row(state.group, queue, state.offsets.get(queue), lag, now_ms)
    return {**row, "lastCommitTimestamp": state.published_ms, "member": state.members.get(queue)}
