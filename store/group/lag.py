"""The lag of a group: a table that says for each queue how many messages, bytes and seconds the group is behind.

The column `state` describes the committed offset of the group in the queue:

| state | meaning | lagMessages |
| --- | --- | --- |
| ok | the offset is within the queue's bounds | the messages from the offset to the queue's end |
| none | the group has no offset in this queue, but in other queues of the topic | all messages of the queue |
| expired | the offset is below the queue's minimum, because unread messages were deleted | the remaining messages |
| ahead | the offset is above the queue's maximum, because the store was truncated or rebuilt | 0 |
| gone | the queue does not exist any more | null |

A running query may already have read messages after its committed offset.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreChangedError
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueBounds, QueueKey

OK, NONE, EXPIRED, AHEAD, GONE = "ok", "none", "expired", "ahead", "gone"

_TIME = pa.timestamp("ms", tz="UTC")
_TRIES = 3  # retention may delete files during a measurement

# The columns of the table that `lag_table` returns. It has one row for each group and queue, sorted by group, topic and
# queue id.
LAG = pa.schema(
    [
        ("group", pa.string()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("state", pa.string()),
        ("groupOffset", pa.int64()),  # the committed offset, null if missing
        ("minOffset", pa.int64()),
        ("maxOffset", pa.int64()),
        ("lagMessages", pa.int64()),  # the number of unread messages that are not deleted
        ("lagBytes", pa.int64()),  # the size of their records in the commit log
        ("expiredMessages", pa.int64()),  # the number of unread messages that retention deleted
        ("secondsBehind", pa.float64()),  # the age of the next unread message, 0 if there is none
        ("lastConsumedTimestamp", _TIME),  # store time of the last consumed message (consumerProgress: LastTime)
        ("lastCommitTimestamp", _TIME),  # the time of the last commit by a query of ours
        ("member", pa.string()),  # the living member that owns the queue, else null (consumerProgress: Client IP)
    ]
)


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


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The lag of a group in one queue. The values of `state` are described in the module. Times are ms since the epoch.

    If the queue does not exist any more, all other fields are None.
    """

    state: str
    bounds: QueueBounds | None = None
    messages: int | None = None
    bytes: int | None = None
    expired: int | None = None
    next_stored_ms: int | None = None  # store time of the next unread message
    last_stored_ms: int | None = None  # store time of the last consumed message


def unread_range(offset: int | None, bounds: QueueBounds) -> tuple[str, int, int]:
    """Return (state, begin, end): the state of a committed offset, and the range [begin, end) of unread queue offsets.

    `offset` is None if the group has no committed offset in the queue.
    """
    if offset is None:
        return NONE, bounds.min_offset, bounds.max_offset
    if offset > bounds.max_offset:
        return AHEAD, bounds.max_offset, bounds.max_offset
    if offset < bounds.min_offset:
        return EXPIRED, bounds.min_offset, bounds.max_offset
    return OK, offset, bounds.max_offset


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
    behind = None
    if lag.messages is not None:
        behind = 0.0 if lag.next_stored_ms is None else max(0, now_ms - lag.next_stored_ms) / 1000
    return {
        "group": state.group,
        "topic": queue.topic,
        "queueId": queue.queue_id,
        "state": lag.state,
        "groupOffset": state.offsets.get(queue),
        "minOffset": lag.bounds.min_offset if lag.bounds else None,
        "maxOffset": lag.bounds.max_offset if lag.bounds else None,
        "lagMessages": lag.messages,
        "lagBytes": lag.bytes,
        "expiredMessages": lag.expired,
        "secondsBehind": behind,
        "lastConsumedTimestamp": lag.last_stored_ms,
        "lastCommitTimestamp": state.published_ms,
        "member": state.members.get(queue),
    }
