"""The part of the contract (`store.backend`) that is about consumer groups: one query as a member of its group.

`store.backend` has these names too, and the other modules import them from there.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from rmq_spark.store.filter.row_filter import ALL, TAG, Expression, is_filtered_by_default
from rmq_spark.store.model import CommitKey, QueueKey, SuspendedQueues

Sharing: TypeAlias = Literal["all", "shared"]


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """The options of a query that concern its group. `commit` is auto, required or off. All times are in ms.

    With the `assignment` "all" the query reads all queues and is alone in its group; with "shared" the members of the
    group share them.
    `subscription` describes topics and filters, and must be the same text in all members.

    `expressions` says the same in RocketMQ's terms: pairs of a topic that the query names, and the expression of the
    subscription to it. The topic "" stands for all topics that are not named. Only a query with a pattern has it; it
    subscribes to the topics of the queues that it passes to `GroupSession.rebalance`. The group's retry topic is not
    among the topics. `is_orderly` is whether the query reads each queue only while it owns the queue, and in one task.
    `fallback` is where the query begins in a queue in which the group has no offset: latest, earliest or timestamp.
    Members only show it to each other.
    """

    group: str
    assignment: Sharing = "all"
    strategy: str = "avg"
    subscription: str = ""
    query_name: str = ""
    commit: str = "auto"
    lease_timeout_ms: int = 120_000
    lease_heartbeat_ms: int = 30_000
    handover_timeout_ms: int = 60_000
    expressions: tuple[tuple[str, Expression], ...] = ()
    is_orderly: bool = False
    fallback: str = "latest"

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that the query names, without the group's retry topic. () if it has a pattern."""
        topics = tuple(topic for topic, _ in self.expressions)
        return () if "" in topics else topics

    def expression_of(self, topic: str) -> Expression:
        """Return the expression of the subscription to `topic`. Without a filter, and in retry topics, this is "*"."""
        of_topic = dict(self.expressions)
        found = of_topic.get(topic)
        if found is None and is_filtered_by_default(topic):
            found = of_topic.get("")
        return Expression(TAG, ALL) if found is None else found


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The result of one rebalance.

    `owned` are the queues that this query owns now, `lost` those that it no longer owns, and `gained` the owned ones
    that it did not own when `settle` was called last. A queue is also gained again if another member may have read it
    meanwhile, because the query could not show that it was alive. `held` are the group's committed offsets, read after
    the queues were claimed: at least those of the gained queues, or {} if `gained` is empty. A queue without an offset
    is left out. `resets` maps each queue, of any member, to the offset of a reset that this query has not applied yet.
    `reset_number` is the number of the last reset. A place whose resets have no numbers counts those that the session
    has seen, from the number on that the query has applied before; it tells only the resets of owned queues. `waiting`
    are the queues of the query's share that it does not own yet, because an earlier owner has a lock on them that has
    not expired. `others` are the queues that other members have, which may set any offset there; only a place whose
    resets have no numbers tells them.
    """

    owned: tuple[QueueKey, ...]
    gained: tuple[QueueKey, ...]
    held: Mapping[QueueKey, int]
    lost: tuple[QueueKey, ...]
    resets: Mapping[QueueKey, int]
    reset_number: int
    waiting: tuple[QueueKey, ...] = ()
    others: frozenset[QueueKey] = frozenset()


class OffsetHistory(Protocol):
    """What a query knows of its own offsets when it rebalances, for places whose resets have no numbers."""

    def is_own(self, queue: QueueKey, committed: int) -> bool:
        """Return whether only this query may have set the group's offset, so that it stays at its own position."""

    def has_applied(self, queue: QueueKey, target: int) -> bool:
        """Return whether an earlier run of the query has begun its last batch at the target of a reset.

        Then a reset to this target that the place still keeps is applied already.
        """


class GroupSession(Protocol):
    """The membership of one query in its group, on the driver. It keeps itself alive between calls."""

    @property
    def terms(self) -> GroupTerms:
        """The options of the query that concern its group."""

    @property
    def member_id(self) -> str:
        """The id of this query in the group."""

    @property
    def is_outside(self) -> bool:
        """Whether the query reads queues without a claim, because the place does not let it join."""

    @property
    def batches(self) -> int:
        """How many batches the query has planned as a member. This is also the number of the last planned batch."""

    @property
    def epochs(self) -> Mapping[QueueKey, int]:
        """The epoch of the query's claim of each queue that it owns, for fences."""

    @property
    def published(self) -> Mapping[QueueKey, int]:
        """The group's offset of each owned queue, as the place has last told or acknowledged it to this session.

        It is the offset that the group had when the query gained the queue, or the last one that the query has
        published since. A queue whose offset is unknown is left out. A query keeps these offsets in its checkpoint, to
        tell after a restart whether the group's offset is still its own. {} in a place whose resets have numbers, which
        needs no such comparison.
        """

    def join(self) -> None:
        """Join the group, unless the query is a member already. Raises GroupConflictError if a member conflicts."""

    def planning(self) -> AbstractContextManager[None]:
        """Return a context manager in which a batch is planned: no queue is handed over meanwhile."""

    def has_changed(self) -> bool:
        """Return whether a rebalance may change anything. Cheap. New messages do not matter here."""

    def rebalance(
        self,
        queues: Sequence[QueueKey],
        finished: Mapping[QueueKey, int],
        applied_reset: int | None,
        history: OffsetHistory | None = None,
    ) -> GroupAssignment:
        """Claim this query's share of `queues`, and release the queues that belong to other members.

        `finished` maps each queue to its next queue offset, and all earlier messages of the queue must be done. The
        offsets of released queues are committed. `applied_reset` is the number of the last reset that the query has
        applied; with None all present resets are ignored. The caller must have compared `finished` with the bounds
        that the backend returned last. `queues` are those that the query can read now. RocketMQ's consumers share all
        queues that the place lists, so a place with such members does that too. The query then owns those queues of its
        share that are in `queues`, and is told only the resets of these. `history` is None if the query knows nothing;
        a place whose resets have numbers ignores it.
        """

    def begin(self, beginnings: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Commit start offsets for topics in which the group has no offset. Return all committed offsets."""

    def publish(self, finished: Mapping[QueueKey, int]) -> None:
        """Commit the offsets in `finished` of those queues that this query still owns."""

    def settle(self, *, is_batch: bool = True) -> None:
        """Confirm that the query has planned an offset that contains the gained queues, and whether as a batch."""

    def suspended(self) -> SuspendedQueues:
        """Return the group's suspended queues."""

    def leave(self, finished: Mapping[QueueKey, int]) -> None:
        """Commit the offsets in `finished`, release all queues and leave the group."""


@dataclass(frozen=True, slots=True)
class FinalCommit:
    """The offsets of a member at the end of `last_batch`, for `Backend.commit_final`.

    `applied_reset` and `applied_suspension` are the numbers of the last reset and of the last change of the suspended
    queues that the query has applied. `finished_batch` is the member's number of the batch, None if it is unknown:
    nothing is committed if the member has planned a later batch.

    `expected` has the offsets at which the group may be in each queue if nobody but the query has set them. A place
    whose resets have no numbers commits a queue only if the group is at one of them, and leaves out a queue that is not
    in `expected`. Other places ignore it.
    """

    group: str
    member_id: str
    offsets: Mapping[QueueKey, int]
    applied_reset: int
    applied_suspension: int = 0
    last_batch: CommitKey | None = None
    finished_batch: int | None = None
    expected: Mapping[QueueKey, tuple[int, ...]] = field(default_factory=dict)
