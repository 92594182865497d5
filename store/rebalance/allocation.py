"""The allocation of a group's queues to its members, by the strategy that the option `allocateStrategy` names.

RocketMQ's own strategies (`strategies.py`) are correct by construction. A strategy that a user provides may be wrong.
So each member calls it for all members, and if a queue goes to no member or to two members, an OptionError stops the
query.
"""

import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey, java_order, sort_client_ids, sort_queues
from rmq_spark.store.rebalance.strategies import (
    DIRECTORY_BROKER,
    Average,
    Circle,
    Config,
    ConsistentHash,
    MachineRoom,
    MachineRoomNearby,
    MessageQueue,
    Strategy,
)

DEFAULT_STRATEGY = "avg"
ACCEPTED_STRATEGIES = (
    "avg (contiguous queues), circle (round robin), consistentHash or consistentHash:<virtual nodes>, "
    'config:<queues of this member, as {"topic": [0, 1]}>, machineRoom:<room>,<room> (of brokers named room@name), '
    "machineRoomNearby or machineRoomNearby:<avg, circle or consistentHash>, or package.module:name for a callable "
    "(group, client_id, queues, client_ids) -> list of queues"
)
MAX_VIRTUAL_NODES = 10_000  # bounds the time to build the hash ring, which each rebalance does
_SHOWN_COUNT = 10  # how many queues or members an error lists


@dataclass(frozen=True, slots=True)
class Imported:
    """A strategy that calls a function of the user. An error of the function becomes an OptionError with its name.

    The function gets (group, client id, list of `MessageQueue`, list of client ids), with ids as plain texts. It must
    return some of these queues.
    """

    name: str
    function: Callable[..., Any]

    def __call__(
        self, group: str, client_id: str, queues: Sequence[QueueKey], client_ids: Sequence[str], /
    ) -> list[QueueKey]:
        """Return the queues that the function returns. None means no queues, as in RebalanceImpl."""
        given = {MessageQueue.of(queue): queue for queue in queues}
        try:
            answer = self.function(group, client_id, list(given), list(client_ids))
            share = [] if answer is None else list(answer)
        except Exception as error:
            raise OptionError(
                f"allocateStrategy {self.name} failed for member {client_id!r} of group {group!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        strange = [one for one in share if not isinstance(one, MessageQueue)]
        if strange:
            raise OptionError(
                f"allocateStrategy {self.name} gave member {client_id!r} of group {group!r} {strange[0]!r}; expected "
                "a MessageQueue. Return a list of some of the given queues"
            )
        return [given.get(one) or QueueKey(one.topic, one.queue_id, _broker_of(one)) for one in share]


def _broker_of(queue: MessageQueue) -> str:
    return "" if queue.broker_name == DIRECTORY_BROKER else queue.broker_name


def find_strategy(text: str) -> Strategy:
    """Return the strategy for the value `text` of the option `allocateStrategy`.

    Raises OptionError if the value is invalid. The error lists the accepted values.
    """
    kind, _, rest = text.partition(":")
    match kind.strip().lower(), rest.strip():
        case ("avg", ""):
            return Average()
        case ("circle", ""):
            return Circle()
        case ("consistenthash", ""):
            return ConsistentHash()
        case ("consistenthash", digits):
            return ConsistentHash(_parse_virtual_nodes(digits, text))
        case ("config", queues):
            return Config(_parse_queues(queues, text))
        case ("machineroom", rooms):
            return MachineRoom(_parse_rooms(rooms, text))
        case ("machineroomnearby", inner):
            strategy = find_strategy(inner or DEFAULT_STRATEGY)
            if not isinstance(strategy, Average | Circle | ConsistentHash):
                raise _refusal(text, "the strategy within a room is avg, circle or consistentHash")
            return MachineRoomNearby(strategy)
        case (_, ""):
            raise _refusal(text, "no strategy of that name")
        case _:
            return _import(text.strip())


def allocate(
    strategy: Strategy, group: str, client_id: str, queues: Iterable[QueueKey], client_ids: Iterable[str]
) -> list[QueueKey]:
    """Return the queues of the member `client_id`, sorted. `queues` and `client_ids` may be in any order.

    The strategy is called for each topic, as in RebalanceImpl#rebalanceByTopic. Raises OptionError if the strategy
    returns a queue that is not in `queues`. Raises OptionError also if a strategy that the user provides does not give
    each queue to exactly one member.
    """
    members = sort_client_ids(client_ids)
    share: list[QueueKey] = []
    for topic, group_of_topic in groupby(sort_queues(queues), key=lambda queue: queue.topic):
        of_topic = list(group_of_topic)
        if isinstance(strategy, Imported):
            share += check_allocation(strategy, group, of_topic, members).get(client_id, [])
            continue
        given = strategy(group, client_id, of_topic, members)
        mine = [queue for queue in given if queue.topic == topic]  # CONFIG returns the queues of all topics at once
        unknown = [queue for queue in mine if queue not in of_topic]
        if unknown:
            raise _disagreement(strategy, group, "lists unknown queues", unknown, of_topic, members)
        share += mine
    return sort_queues(share)


def find_unowned(strategy: Strategy, queues: Iterable[QueueKey]) -> list[QueueKey]:
    """Return the queues that the strategy gives to nobody, whatever members the group has.

    Only MACHINE_ROOM has such queues. For all other strategies the result is [], even for CONFIG: there each member has
    its own list, so it is unknown which queues no member has in its list.
    """
    if not isinstance(strategy, MachineRoom):
        return []
    return [queue for queue in queues if not strategy.holds(queue)]


def check_allocation(
    strategy: Strategy, group: str, queues: Sequence[QueueKey], client_ids: Sequence[str]
) -> dict[str, list[QueueKey]]:
    """Return for each member which of the sorted `queues` of a topic the strategy gives it.

    Raises OptionError unless the strategy gives each queue to exactly one member. The error names the strategy, the
    queues and the members. Do not check CONFIG and MACHINE_ROOM with this, because they may leave out queues.
    """
    shares = {client_id: strategy(group, client_id, queues, client_ids) for client_id in client_ids}
    known = set(queues)
    owner: dict[QueueKey, str] = {}
    for client_id, share in shares.items():
        for queue in share:
            if queue not in known:
                why = f"gave member {client_id!r} an unknown queue"
                raise _disagreement(strategy, group, why, [queue], queues, client_ids)
            if queue in owner:
                both = f"members {owner[queue]!r} and {client_id!r}" if owner[queue] != client_id else f"{client_id!r}"
                raise _disagreement(strategy, group, f"gave a queue twice, to {both}", [queue], queues, client_ids)
            owner[queue] = client_id
    lost = [queue for queue in queues if queue not in owner]
    if lost:
        raise _disagreement(strategy, group, f"gave {len(lost)} queue(s) to nobody", lost, queues, client_ids)
    return shares


def _disagreement(
    strategy: Strategy,
    group: str,
    why: str,
    wrong: Sequence[QueueKey],
    queues: Sequence[QueueKey],
    client_ids: Sequence[str],
) -> OptionError:
    return OptionError(
        f"allocateStrategy {strategy.name} of group {group!r} {why}: {listed([str(queue) for queue in wrong])}. "
        f"There are the queues {listed([str(queue) for queue in queues])} and the members {listed(client_ids)}; "
        "each queue must go to exactly one member"
    )


def listed(names: Sequence[str]) -> str:
    """Return a text for a message: the first names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN_COUNT])
    return shown if len(names) <= _SHOWN_COUNT else f"{shown} and {len(names) - _SHOWN_COUNT} more"


def _refusal(text: str, why: str) -> OptionError:
    return OptionError(f"allocateStrategy {text!r}: {why}; accepted are {ACCEPTED_STRATEGIES}")


def _parse_virtual_nodes(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9 and 1 <= int(digits) <= MAX_VIRTUAL_NODES):
        raise _refusal(text, f"virtual nodes are a number from 1 to {MAX_VIRTUAL_NODES}, found {digits!r}")
    return int(digits)


def _parse_rooms(names: str, text: str) -> frozenset[str]:
    rooms = frozenset(room.strip() for room in names.split(",")) - {""}
    if not rooms:
        raise _refusal(text, "found an empty list of rooms")
    return rooms


def _parse_queues(content: str, text: str) -> tuple[QueueKey, ...]:
    try:
        pairs = json.loads(content, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise _refusal(text, f"the queues are not valid JSON ({error})") from error
    shape = 'the queues are a JSON object of topics and lists of queue ids, as {"topic": [0, 1]}'
    if not isinstance(pairs, list) or not pairs or not all(isinstance(pair, tuple) for pair in pairs):
        raise _refusal(text, shape)
    queues = []
    for topic, ids in pairs:
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise _refusal(text, f"{shape}; found {ids!r} for {topic!r}")
        queues += [QueueKey(topic, one) for one in ids]
    if len(set(queues)) < len(queues):
        raise _refusal(text, "found a queue twice")
    return tuple(sorted(queues, key=lambda queue: (java_order(queue.topic), queue.queue_id)))


def _import(path: str) -> Imported:
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the user's module, which may raise anything
        raise _refusal(
            path, f"neither a strategy nor importable in the driver's Python ({type(error).__name__}: {error})"
        ) from error
    if not callable(found) or isinstance(found, type):
        raise _refusal(path, f"found {found!r}, which is not a function (group, client_id, queues, client_ids)")
    return Imported(path, found)
