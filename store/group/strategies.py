"""How the queues of a topic are shared by the members of a group: RocketMQ's strategies, answer by answer.

A strategy is a function of (group, client id, queues, client ids) that returns the queues of that client. Nobody is
asked to agree: each member computes its own share, and the shares fit because all of them sort the same queues and
ids first (`message_queue.py`). What a user writes has the same signature; `allocation.py` finds and checks it.

Source: AllocateMessageQueueAveragely and its neighbours in client.consumer.rebalance (4.9, 5.3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rmq_spark.store.errors import OptionError
from rmq_spark.store.group.hash_ring import HashRing
from rmq_spark.store.group.message_queue import MessageQueue, java_order

VIRTUAL_NODE_COUNT = 10


class Strategy(Protocol):
    """What every strategy can do. Pure: the same arguments give the same answer in every member.

    Raises OptionError where RocketMQ throws an IllegalArgumentException.
    """

    @property
    def name(self) -> str:
        """Return the strategy's name (AllocateMessageQueueStrategy#getName)."""

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return which of the sorted queues the client is to have."""


def is_member(client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> bool:
    """Say whether the client is one of the group. Raises OptionError when there is nothing to share or nobody to.

    As AbstractAllocateMessageQueueStrategy#check, with its words. A client that is no member yet gets nothing.
    """
    if not client_id:
        raise OptionError(f"currentCID is empty: a member's id is a text, found {client_id!r}")
    if not queues:
        raise OptionError(f"mqAll is null or mqAll empty: no queue to share, found {queues!r}")
    if not client_ids:
        raise OptionError(f"cidAll is null or cidAll empty: no member to share queues, found {client_ids!r}")
    return client_id in client_ids


@dataclass(frozen=True, slots=True)
class Average:
    """Neighbours together, and the first members get one more where it does not come out even."""

    name: str = field(default="AVG", init=False)

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return the client's run of queues."""
        if not is_member(client_id, queues, client_ids):
            return []
        number = client_ids.index(client_id)
        size, rest = divmod(len(queues), len(client_ids))
        begin = number * size + min(number, rest)
        return list(queues[begin : begin + size + (number < rest)])


@dataclass(frozen=True, slots=True)
class Circle:
    """One after the other in turns, as cards are dealt."""

    name: str = field(default="AVG_BY_CIRCLE", init=False)

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return every so-many-th queue."""
        if not is_member(client_id, queues, client_ids):
            return []
        return list(queues[client_ids.index(client_id) :: len(client_ids)])


@dataclass(frozen=True, slots=True)
class Config:
    """The queues that this member was told, whatever there is and whoever else is there. None: it was told nothing."""

    queues: tuple[MessageQueue, ...] | None = None
    name: str = field(default="CONFIG", init=False)

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return what it was told; without that nothing, where Java's returns null, which counts as nothing."""
        return list(self.queues or ())


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Queues of brokers in some machine rooms, averaged; what does not come out even is dealt from the front.

    A broker says its room in its name, `room@name`. Queues of all others are nobody's.
    """

    rooms: frozenset[str]
    name: str = field(default="MACHINE_ROOM", init=False)

    def holds(self, broker_name: str) -> bool:
        """Say whether the broker stands in one of the rooms."""
        parts = broker_name.split("@")
        while parts and not parts[-1]:
            parts.pop()  # Java's split leaves out empty parts at the end
        return len(parts) == 2 and parts[0] in self.rooms

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return a run of the rooms' queues, and perhaps one from behind the runs."""
        if not is_member(client_id, queues, client_ids):
            return []
        kept = [queue for queue in queues if self.holds(queue.broker_name)]
        number = client_ids.index(client_id)
        size, rest = divmod(len(kept), len(client_ids))
        share = kept[number * size : (number + 1) * size]
        if number < rest:
            share.append(kept[number + size * len(client_ids)])
        return share


def room_before_dash(name: str) -> str:
    """Return the machine room in a broker's name or a client's id: what stands before the first `-`."""
    return name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """Each room's queues to the members in it, by another strategy; queues of rooms without a member to all of them.

    `queue_room` and `client_room` say who stands where, and must know for everybody.
    """

    inner: Strategy = field(default_factory=Average)
    queue_room: Callable[[MessageQueue], str | None] = lambda queue: room_before_dash(queue.broker_name)
    client_room: Callable[[str], str | None] = room_before_dash

    @property
    def name(self) -> str:
        """Return the name, with that of the strategy inside."""
        return f"MACHINE_ROOM_NEARBY-{self.inner.name}"

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return the client's share of its room, then of each room without a member, by the rooms' names."""
        if not is_member(client_id, queues, client_ids):
            return []
        queues_of: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            queues_of.setdefault(_known(self.queue_room(queue), "mq", queue), []).append(queue)
        clients_of: dict[str, list[str]] = {}
        for client in client_ids:
            clients_of.setdefault(_known(self.client_room(client), "consumer id", client), []).append(client)
        own = _known(self.client_room(client_id), "consumer id", client_id)
        share = []
        if own in queues_of:
            share += self.inner(group, client_id, queues_of[own], clients_of[own])
        for room in sorted(queues_of.keys() - clients_of.keys(), key=java_order):
            share += self.inner(group, client_id, queues_of[room], client_ids)
        return share


def _known(room: str | None, kind: str, of: object) -> str:
    if not room:
        raise OptionError(f"Machine room is null for {kind} {of}: what says the rooms must know all of them")
    return room


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """By place on a ring, so that a member who comes or goes moves few queues. Shares are uneven.

    Without virtual nodes nobody gets anything, as in Java.
    """

    virtual_node_count: int = VIRTUAL_NODE_COUNT
    name: str = field(default="CONSISTENT_HASH", init=False)

    def __post_init__(self) -> None:
        if self.virtual_node_count < 0:
            raise OptionError(f"illegal virtualNodeCnt: {self.virtual_node_count}; accepted are 0 and more")

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return the queues for which the client stands next on the ring."""
        if not is_member(client_id, queues, client_ids):
            return []
        ring = HashRing(client_ids, self.virtual_node_count)
        return [queue for queue in queues if ring.route(str(queue)) == client_id]
