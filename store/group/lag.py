"""How far a group is behind: per queue in messages, bytes and time, as a table.

| state | the group's offset | lagMessages |
| --- | --- | --- |
| ok | lies in what the queue holds | what is left to read |
| none | there is none; the group would begin somewhere else in the queue | all that the queue holds |
| expired | below the queue's min offset: retention deleted unread messages | what can still be read |
| ahead | beyond the queue's max offset: the store was cut or rebuilt | 0 |
| gone | of a queue that is not in the store any more | null |

The offsets are those that the group has published; a query that runs may be further.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreChangedError
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.units import QueueBounds, QueueKey

OK, NONE, EXPIRED, AHEAD, GONE = "ok", "none", "expired", "ahead", "gone"

_TIME = pa.timestamp("ms", tz="UTC")
_TRIES = 3  # retention may take what was to be measured

# What `lag_table` returns, a row for each group and queue, sorted by group, topic and queue id.
LAG = pa.schema(
    [
        ("group", pa.string()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("state", pa.string()),
        ("groupOffset", pa.int64()),  # the next one to consume; null without one
        ("minOffset", pa.int64()),
        ("maxOffset", pa.int64()),
        ("lagMessages", pa.int64()),  # unread, and still there
        ("lagBytes", pa.int64()),  # of their records, as they lie in the log
        ("expiredMessages", pa.int64()),  # unread, and deleted
        ("secondsBehind", pa.float64()),  # how long ago the next unread message was stored; 0 without one
        ("lastConsumedTimestamp", _TIME),  # when the last consumed message was stored (consumerProgress: LastTime)
        ("lastCommitTimestamp", _TIME),  # when a query of ours last published offsets of the group
        (
            "member",
            pa.string(),
        ),  # who of our queries has the queue now; null if none (consumerProgress: Client IP)
    ]
)


@dataclass(frozen=True, slots=True)
class GroupState:
    """What is known of a group: its offsets, and when they were last published (ms), None if no query of ours did.

    `members` are the ids of those that have queues.
    """

    group: str
    offsets: Mapping[QueueKey, int]
    published_ms: int | None
    members: Mapping[QueueKey, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueLag:
    """How far a group is behind in one queue. Times are ms since the epoch; see the module for `state`."""

    state: str
    bounds: QueueBounds | None = None
    messages: int | None = None
    bytes: int | None = None
    expired: int | None = None
    next_stored_ms: int | None = None  # of the next unread message
    last_stored_ms: int | None = None  # of the last consumed one


def unread_range(offset: int | None, bounds: QueueBounds) -> tuple[str, int, int]:
    """Return the state of an offset, None for none, and the range that is left to read. Pure."""
    if offset is None:
        return NONE, bounds.min_offset, bounds.max_offset
    if offset > bounds.max_offset:
        return AHEAD, bounds.max_offset, bounds.max_offset
    if offset < bounds.min_offset:
        return EXPIRED, bounds.min_offset, bounds.max_offset
    return OK, offset, bounds.max_offset


def queue_lag(reader: StoreReader, queue: QueueKey, offset: int | None) -> QueueLag:
    """Return how far an offset, None for none, is behind in a queue, as of the reader's last refresh.

    Refreshes the reader where retention deletes meanwhile. Raises DamageError, StoreChangedError.
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
    """Return the lag of these groups, a row a queue, with the columns of LAG.

    A group's queues are those it has an offset of, and the others of the same topics. `now_ms` is what secondsBehind
    counts from. Raises what `queue_lag` raises.
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
    there = set(reader.topics())
    for topic in {queue.topic for queue in state.offsets} & there:
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
