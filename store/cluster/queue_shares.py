"""Which queues belong to a member of a consumer group, by what brokers and name servers say. Pure.

All members allocate by themselves, and get disjoint shares if they know the same members and queues. So the queues are
those in the newest route of a topic, whether their brokers answer or not, as in Java. The members are those of all
brokers of the topic together: each broker knows only the members that are connected to it.

Source: RebalanceImpl#rebalanceByTopic (4.9, 5.3).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rmq_spark.store.model import QueueKey
from rmq_spark.store.rebalance.allocation import allocate
from rmq_spark.store.rebalance.strategies import Strategy


@dataclass(frozen=True, slots=True)
class ShareRule:
    """How a member allocates: the `strategy` for the `group`, and the `client_id` of the member."""

    strategy: Strategy
    group: str
    client_id: str


@dataclass(frozen=True, slots=True)
class TopicMembers:
    """The members of a group that read a topic, as its brokers list them.

    `client_ids` is None if no broker has answered. `is_complete` is whether each broker that has answered lists the
    member itself: if one does not, another member that asks this broker takes the queues of the member.
    """

    client_ids: frozenset[str] | None
    is_complete: bool


def join_lists(client_id: str, lists: Collection[Collection[str] | None]) -> TopicMembers:
    """Return the members of a topic by the lists of its brokers. A list is None if the broker has not answered."""
    answered = [one for one in lists if one is not None]
    if not answered:
        return TopicMembers(None, False)
    return TopicMembers(frozenset().union(*answered), all(client_id in one for one in answered))


def share_topic(
    rule: ShareRule, queues: Sequence[QueueKey], members: TopicMembers, before: Collection[QueueKey]
) -> frozenset[QueueKey]:
    """Return the member's share of the `queues` of a topic, which have the cluster's names.

    `before` are the queues that it owns. If no broker has answered, its queues stay. A member that a broker does not
    list owns nothing. Raises OptionError if a strategy of the user is wrong.
    """
    if members.client_ids is None:
        return frozenset(queues).intersection(before)
    if not members.is_complete:
        return frozenset()
    return frozenset(allocate(rule.strategy, rule.group, rule.client_id, queues, members.client_ids))


class TopicShares:
    """The member's share of each topic, which is computed again when its queues or members change. For one thread.

    `stored_queue` returns the cluster's name of a queue.
    """

    def __init__(self, rule: ShareRule, stored_queue: Callable[[QueueKey], QueueKey]) -> None:
        self._rule, self._stored_queue = rule, stored_queue
        self._shares: dict[str, tuple[Sequence[QueueKey], TopicMembers, frozenset[QueueKey]]] = {}

    def keep(self, topics: Collection[str]) -> None:
        """Forget all topics but these."""
        self._shares = {topic: one for topic, one in self._shares.items() if topic in topics}

    def have_members_changed(self, topic: str, members: TopicMembers) -> bool:
        """Return whether the members of a topic are others than at the last call of `find`."""
        return topic in self._shares and self._shares[topic][1] != members

    def find(
        self, topic: str, queues: Sequence[QueueKey], members: TopicMembers, owned: Collection[QueueKey]
    ) -> frozenset[QueueKey]:
        """Return the share of the queues of a topic. `owned` are those that the member owns. See `share_topic`."""
        last = self._shares.get(topic)
        if last is None or members.client_ids is None or last[:2] != (queues, members):
            stored = {self._stored_queue(queue): queue for queue in queues}
            before = [name for name, queue in stored.items() if queue in owned]
            found = share_topic(self._rule, list(stored), members, before)
            last = self._shares[topic] = queues, members, frozenset(stored[name] for name in found)
        return last[2]

    def of_others(self) -> frozenset[QueueKey]:
        """Return the queues that other members have. Where a broker does not list this member, nobody knows."""
        return frozenset(
            queue
            for queues, members, share in self._shares.values()
            if members.client_ids is not None and members.is_complete
            for queue in queues
            if queue not in share
        )


@dataclass(frozen=True, slots=True)
class Moves:
    """The changes of a rebalance: the queues that the member loses and gains, sorted."""

    lost: tuple[QueueKey, ...]
    gained: tuple[QueueKey, ...]


def compare_shares(before: Collection[QueueKey], share: Collection[QueueKey], readable: Collection[QueueKey]) -> Moves:
    """Return the moves from the queues that a member owns to its new `share`.

    A queue can be gained only if it is `readable`, that is, if the caller knows its bounds. A queue that the member
    owns stays while its broker is away.
    """
    return Moves(
        tuple(sorted(queue for queue in before if queue not in share)),
        tuple(sorted(queue for queue in share if queue not in before and queue in readable)),
    )
