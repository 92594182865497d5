"""RocketMQ's allocation strategies, which determine the queues of a topic that each member of a group gets.

A strategy is a function of (group, client id, queues, client ids) that returns the queues of the member with that
client id. Each member computes its own share, without asking the others. The shares are disjoint, because all members
pass the same queues and ids in the same order (`model.sort_queues`, `model.sort_client_ids`). A user may also provide a
function with this signature; `allocation.py` imports it and checks its results.

Source: AllocateMessageQueueAveragely and its siblings in client.consumer.rebalance; ConsistentHashRouter, its MD5Hash
and VirtualNode (4.9, 5.3).
"""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey, java_order


def ring_hash(text: str) -> int:
    """Return the position of a text on the hash ring: the first four bytes of its MD5 hash as an unsigned integer."""
    # A lone surrogate becomes "?", as in String#getBytes.
    digest = hashlib.md5(text.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class HashRing:
    """A consistent-hash ring, which maps keys to nodes. It never changes, so any thread may use it.

    Each node has `virtual_node_count` positions on the ring: the hashes of `<node>-0`, `<node>-1` and so on. If the
    same node is given twice, the second one continues this numbering. If two nodes have the same position, it belongs
    to the later one. If the ring has no positions, every key is mapped to None.
    """

    def __init__(self, nodes: Iterable[str], virtual_node_count: int) -> None:
        assert virtual_node_count >= 0, virtual_node_count
        node_at: dict[int, str] = {}
        # The number of positions that a node still has, because later nodes may have taken some of them. If the node is
        # given again, its numbering continues at this number (getExistingReplicas).
        counts: Counter[str] = Counter()
        for node in nodes:
            first = counts[node]
            for number in range(first, first + virtual_node_count):
                position = ring_hash(f"{node}-{number}")
                if position in node_at:
                    counts[node_at[position]] -= 1
                node_at[position] = node
                counts[node] += 1
        self._positions = sorted(node_at)
        self._nodes = [node_at[position] for position in self._positions]

    def route(self, key: str) -> str | None:
        """Return the node at the key's position on the ring, or at the next position that has a node.

        After the last position of the ring, the first one follows. Returns None if the ring has no positions.
        """
        if not self._positions:
            return None
        number = bisect_left(self._positions, ring_hash(key))
        return self._nodes[number % len(self._nodes)]


VIRTUAL_NODE_COUNT = 10
# The broker name of a store directory, for strategies that use the name. All members of a group must use the same one.
DIRECTORY_BROKER = "broker"


def broker_name(queue: QueueKey) -> str:
    """Return the name of the queue's broker, which is never empty."""
    return queue.broker or DIRECTORY_BROKER


@dataclass(frozen=True, slots=True)
class MessageQueue:
    """A queue as strategies see it in RocketMQ: its broker always has a name. Source: MessageQueue (4.9, 5.3)."""

    topic: str
    broker_name: str
    queue_id: int

    @classmethod
    def of(cls, queue: QueueKey) -> "MessageQueue":
        """Return the queue with the name of its broker."""
        return cls(queue.topic, broker_name(queue), queue.queue_id)

    def __str__(self) -> str:
        """Return MessageQueue#toString, which consistent hashing hashes."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.queue_id}]"


class Strategy(Protocol):
    """The interface of a strategy.

    A strategy is pure, so the same arguments give the same result in every member. It raises OptionError where RocketMQ
    throws an IllegalArgumentException.
    """

    @property
    def name(self) -> str:
        """Return the strategy's name (AllocateMessageQueueStrategy#getName)."""

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return those of the sorted `queues` that the member with the id `client_id` gets."""


def is_member(client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str]) -> bool:
    """Say whether the client is a member of the group. If it has not joined yet, a strategy gives it no queues.

    Raises OptionError if `client_id`, `queues` or `client_ids` is empty. The texts of these errors begin with those of
    AbstractAllocateMessageQueueStrategy#check.
    """
    if not client_id:
        raise OptionError(f"currentCID is empty: a member's id is a text, found {client_id!r}")
    if not queues:
        raise OptionError(f"mqAll is null or mqAll empty: expected a queue, found {queues!r}")
    if not client_ids:
        raise OptionError(f"cidAll is null or cidAll empty: expected a member, found {client_ids!r}")
    return client_id in client_ids


@dataclass(frozen=True, slots=True)
class Average:
    """Each member gets a contiguous range of queues. If the division has a remainder, the first ones get one more."""

    name: str = field(default="AVG", init=False)

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return the client's range of queues, or [] if it is not a member."""
        if not is_member(client_id, queues, client_ids):
            return []
        number = client_ids.index(client_id)
        size, rest = divmod(len(queues), len(client_ids))
        begin = number * size + min(number, rest)
        return list(queues[begin : begin + size + (number < rest)])


@dataclass(frozen=True, slots=True)
class Circle:
    """Round robin: the first queue goes to the first member, the second queue to the second member, and so on."""

    name: str = field(default="AVG_BY_CIRCLE", init=False)

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return every n-th queue if the group has n members, beginning at the client's index among them.

        Returns [] if the client is not a member.
        """
        if not is_member(client_id, queues, client_ids):
            return []
        return list(queues[client_ids.index(client_id) :: len(client_ids)])


@dataclass(frozen=True, slots=True)
class Config:
    """A member gets a fixed list of queues, whatever queues and members exist. None means that there is no list."""

    queues: tuple[QueueKey, ...] | None = None
    name: str = field(default="CONFIG", init=False)

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return the fixed list, or [] if there is none. Java's class returns null then, which has the same effect."""
        return list(self.queues or ())


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Members share only the queues of brokers in certain machine rooms. The queues of other brokers belong to nobody.

    A broker's name contains its room, as `room@name`. Each member gets a contiguous range of the queues. If the
    division has a remainder, each of the first members gets one more queue, from the end of the list.
    """

    rooms: frozenset[str]
    name: str = field(default="MACHINE_ROOM", init=False)

    def holds(self, queue: QueueKey) -> bool:
        """Say whether the broker of the queue is in one of the rooms."""
        parts = broker_name(queue).split("@")
        while parts and not parts[-1]:
            parts.pop()  # Java's split drops trailing empty parts
        return len(parts) == 2 and parts[0] in self.rooms

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return the client's range of the queues in the rooms, and its queue of the remainder if there is one for it.

        Returns [] if the client is not a member.
        """
        if not is_member(client_id, queues, client_ids):
            return []
        kept = [queue for queue in queues if self.holds(queue)]
        number = client_ids.index(client_id)
        size, rest = divmod(len(kept), len(client_ids))
        share = kept[number * size : (number + 1) * size]
        if number < rest:
            share.append(kept[number + size * len(client_ids)])
        return share


def room_before_dash(name: str) -> str:
    """Return the machine room that a broker's name or a client's id contains: the part before the first `-`."""
    return name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """The queues of each machine room go to the members in that room. All members share the queues of other rooms.

    The strategy `inner` divides the queues among these members. `queue_room` returns the room of a queue, and
    `client_room` returns the room of a client id. If one of them returns None or "", OptionError is raised.
    """

    inner: Strategy = field(default_factory=Average)
    queue_room: Callable[[QueueKey], str | None] = lambda queue: room_before_dash(broker_name(queue))
    client_room: Callable[[str], str | None] = room_before_dash

    @property
    def name(self) -> str:
        """Return the strategy's name, which ends with the name of the inner strategy."""
        return f"MACHINE_ROOM_NEARBY-{self.inner.name}"

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return the client's share of the queues in its own room, and then of those in each room without a member.

        The rooms without a member are sorted by name. Returns [] if the client is not a member.
        """
        if not is_member(client_id, queues, client_ids):
            return []
        queues_of: dict[str, list[QueueKey]] = {}
        for queue in queues:
            queues_of.setdefault(_require_room(self.queue_room(queue), "mq", MessageQueue.of(queue)), []).append(queue)
        clients_of: dict[str, list[str]] = {}
        for client in client_ids:
            clients_of.setdefault(_require_room(self.client_room(client), "consumer id", client), []).append(client)
        own = _require_room(self.client_room(client_id), "consumer id", client_id)
        share = []
        if own in queues_of:
            share += self.inner(group, client_id, queues_of[own], clients_of[own])
        for room in sorted(queues_of.keys() - clients_of.keys(), key=java_order):
            share += self.inner(group, client_id, queues_of[room], client_ids)
        return share


def _require_room(room: str | None, kind: str, of: object) -> str:
    if not room:
        raise OptionError(f"Machine room is null for {kind} {of}: the function for rooms must return one for each")
    return room


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """Each queue goes to the member that follows it on a hash ring.

    So if a member joins or leaves, only few queues move to another member. But members may get very different numbers
    of queues. If `virtual_node_count` is 0, nobody gets a queue, as in Java.
    """

    virtual_node_count: int = VIRTUAL_NODE_COUNT
    name: str = field(default="CONSISTENT_HASH", init=False)

    def __post_init__(self) -> None:
        if self.virtual_node_count < 0:
            raise OptionError(f"illegal virtualNodeCnt: {self.virtual_node_count}; expected at least 0")

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return the queues whose next node on the hash ring is the client's; [] if it is not in `client_ids`."""
        if not is_member(client_id, queues, client_ids):
            return []
        ring = HashRing(client_ids, self.virtual_node_count)
        return [queue for queue in queues if ring.route(str(MessageQueue.of(queue))) == client_id]
