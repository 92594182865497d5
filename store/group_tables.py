"""The tables about consumer groups: the lag of a group, queue by queue, and the members of groups.

The column `state` of the lag describes the committed offset of the group in the queue:

| state | meaning | lagMessages |
| --- | --- | --- |
| ok | the offset is within the queue's bounds | the messages from the offset to the queue's end |
| none | the group has no offset in this queue, but in other queues of the topic | all messages of the queue |
| expired | the offset is below the queue's minimum, because unread messages were deleted | the remaining messages |
| ahead | the offset is above the queue's maximum, because the store was truncated or rebuilt | 0 |
| gone | the queue does not exist any more | null |
| away | the queue's broker does not answer, so nothing is known (only in a cluster) | null |

A running consumer may already have read messages after its committed offset.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from rmq_spark.store.backend import BROKER_NAME
from rmq_spark.store.errors import RmqError
from rmq_spark.store.model import QueueBounds, QueueKey

OK, NONE, EXPIRED, AHEAD, GONE, AWAY = "ok", "none", "expired", "ahead", "gone", "away"

_TIME = pa.timestamp("ms", tz="UTC")

# The columns of the lag in a store. There is one row for each group and queue, sorted by group, topic and queue id.
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
        ("lagBytes", pa.int64()),  # the size of their records in the commit log, in a cluster an estimate
        ("expiredMessages", pa.int64()),  # the number of unread messages that retention deleted
        ("secondsBehind", pa.float64()),  # the age of the next unread message, 0 if there is none
        ("lastConsumedTimestamp", _TIME),  # store time of the last consumed message (consumerProgress: LastTime)
        ("lastCommitTimestamp", _TIME),  # the time of the last commit by a query of ours, null in a cluster
        ("member", pa.string()),  # the living member that owns the queue, else null (consumerProgress: Client IP)
    ]
)
# The same in a cluster, sorted by group, topic, broker and queue id.
CLUSTER_LAG = LAG.insert(2, pa.field(BROKER_NAME, pa.string()))

# The columns of the members of groups in a store. There is one row for each living member, sorted by group and member.
# If the file of a member is damaged, all columns from queryName to since are null in its row.
MEMBERS = pa.schema(
    [
        ("group", pa.string()),
        ("member", pa.string()),
        ("queues", pa.int32()),  # the number of queues that the member owns, null in a cluster
        ("queryName", pa.string()),
        ("application", pa.string()),
        ("host", pa.string()),
        ("processId", pa.int32()),
        ("assignment", pa.string()),
        ("allocateStrategy", pa.string()),
        ("subscription", pa.string()),
        ("since", _TIME),
    ]
)
# The same in a cluster, where `member` is the client id. Columns that need files are null.
CLUSTER_MEMBERS = pa.schema(
    [
        *MEMBERS,
        pa.field("address", pa.string()),  # of its connection, as a broker sees it
        pa.field("language", pa.string()),
        pa.field("version", pa.string()),  # of the client
        pa.field("consumeType", pa.string()),  # CONSUME_PASSIVELY (push), CONSUME_ACTIVELY (pull) or CONSUME_POP
        pa.field("messageModel", pa.string()),  # CLUSTERING or BROADCASTING
        pa.field("brokers", pa.list_(pa.string())),  # which list the member
    ]
)


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The lag of a group in one queue. The values of `state` are described in the module. Times are ms since the epoch.

    What is not known is None. If the queue does not exist any more, all other fields are None.
    """

    state: str
    bounds: QueueBounds | None = None
    messages: int | None = None
    bytes: int | None = None
    expired: int | None = None
    next_stored_ms: int | None = None  # store time of the next unread message
    last_stored_ms: int | None = None  # store time of the last consumed message


@dataclass(frozen=True, slots=True)
class GroupLags:
    """The lag of some groups as a table, the errors of the others, and the brokers that answered ("" in a store)."""

    table: pa.Table
    errors: Mapping[str, RmqError]
    answering: frozenset[str] = frozenset({""})


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


def lag_row(group: str, queue: QueueKey, offset: int | None, lag: QueueLag, now_ms: int) -> dict[str, Any]:
    """Return the row of a queue in which the group has the committed offset `offset`, or None.

    `secondsBehind` is measured up to `now_ms` (ms since the epoch). Columns that are not in the row are null.
    """
    behind = 0.0 if lag.messages == 0 else None
    if lag.messages and lag.next_stored_ms is not None:
        behind = max(0, now_ms - lag.next_stored_ms) / 1000
    return {
        "group": group,
        "topic": queue.topic,
        BROKER_NAME: queue.broker,
        "queueId": queue.queue_id,
        "state": lag.state,
        "groupOffset": offset,
        "minOffset": lag.bounds.min_offset if lag.bounds else None,
        "maxOffset": lag.bounds.max_offset if lag.bounds else None,
        "lagMessages": lag.messages,
        "lagBytes": lag.bytes,
        "expiredMessages": lag.expired,
        "secondsBehind": behind,
        "lastConsumedTimestamp": lag.last_stored_ms,
    }


class LagSum(NamedTuple):
    """The lag over several queues: sums of messages and bytes, and the longest time. None is known of no queue.

    `unknown_queues` is the number of queues whose lag is not known, because their broker is away. If it is not 0, the
    other numbers are lower bounds.
    """

    messages: int | None
    bytes: int | None
    seconds_behind: float | None
    unknown_queues: int


def sum_lag(rows: Iterable[Mapping[str, Any]]) -> LagSum:
    """Return the sum over rows of the table. A queue that does not exist any more has no unread messages."""
    rows = list(rows)

    def known(column: str) -> list[Any]:
        values = [0 if row["state"] == GONE else row[column] for row in rows]
        return [value for value in values if value is not None]

    messages, sizes, seconds = known("lagMessages"), known("lagBytes"), known("secondsBehind")
    return LagSum(
        sum(messages) if messages else None,
        sum(sizes) if sizes else None,
        max(seconds, default=None),
        len(rows) - len(messages),
    )


def queue_of(row: Mapping[str, Any]) -> QueueKey:
    """Return the queue of a row of a table."""
    return QueueKey(row["topic"], row["queueId"], row.get(BROKER_NAME) or "")
