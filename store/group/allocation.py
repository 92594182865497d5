"""Which queues a member is to have: the strategy that an option names, asked topic by topic, and checked where needed.

RocketMQ's strategies (`strategies.py`) are right by construction. A user's callable is asked for all members together,
and an answer that loses a queue or gives it twice stops the query before it costs a message.
"""

import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rmq_spark.store.errors import OptionError
from rmq_spark.store.group.message_queue import MessageQueue, java_order, sort_client_ids, sort_queues
from rmq_spark.store.group.strategies import (
    Average,
    Circle,
    Config,
    ConsistentHash,
    MachineRoom,
    MachineRoomNearby,
    Strategy,
)

DEFAULT_STRATEGY = "avg"
ACCEPTED_STRATEGIES = (
    "avg (neighbours together), circle (in turns), consistentHash or consistentHash:<virtual nodes>, "
    'config:<queues of this member, as {"topic": [0, 1]}>, machineRoom:<room>,<room> (of brokers named room@name), '
    "machineRoomNearby or machineRoomNearby:<avg, circle or consistentHash>, or package.module:name for a callable "
    "(group, client_id, queues, client_ids) -> list of queues"
)
MAX_VIRTUAL_NODES = 10_000  # bounds the ring's making, which comes with every look at the members
_SHOWN_COUNT = 10  # an error names that many queues or members


@dataclass(frozen=True, slots=True)
class Imported:
    """A user's callable as a strategy. Whatever goes wrong in it is an OptionError that names it.

    The ids are plain texts. The queues are `MessageQueue`s, and those of its arguments are what it has to return.
    """

    name: str
    function: Callable[..., Any]

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> list[MessageQueue]:
        """Return the callable's answer; None is no queue, as in RebalanceImpl."""
        try:
            answer = self.function(group, client_id, list(queues), list(client_ids))
            share = [] if answer is None else list(answer)
        except Exception as error:
            raise OptionError(
                f"allocateStrategy {self.name} failed for member {client_id!r} of group {group!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        strange = [one for one in share if not isinstance(one, MessageQueue)]
        if strange:
            raise OptionError(
                f"allocateStrategy {self.name} gave member {client_id!r} of group {group!r} {strange[0]!r}, which is "
                "no queue: return a list of those that it is called with"
            )
        return share


def find_strategy(text: str, broker_name: str = "") -> Strategy:
    """Return the strategy that the option `allocateStrategy` names.

    `broker_name` is the store's, for queues that `config:` lists. Raises OptionError that lists what is accepted.
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
            return Config(_parse_queues(queues, text, broker_name))
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
    strategy: Strategy, group: str, client_id: str, queues: Iterable[MessageQueue], client_ids: Iterable[str]
) -> list[MessageQueue]:
    """Return the queues that the member `client_id` is to have, sorted; in whatever order the arguments come.

    The strategy is asked for each topic by itself, as RebalanceImpl#rebalanceByTopic does. Raises OptionError where it
    gives a queue that is not there, and where a user's callable does not give each queue to one member.
    """
    members = sort_client_ids(client_ids)
    share: list[MessageQueue] = []
    for topic, group_of_topic in groupby(sort_queues(queues), key=lambda queue: queue.topic):
        of_topic = list(group_of_topic)
        if isinstance(strategy, Imported):
            share += check_allocation(strategy, group, of_topic, members).get(client_id, [])
            continue
        given = strategy(group, client_id, of_topic, members)
        mine = [queue for queue in given if queue.topic == topic]  # CONFIG answers for all topics at once
        unknown = [queue for queue in mine if queue not in of_topic]
        if unknown:
            raise _disagreement(strategy, group, "lists what is not there", unknown, of_topic, members)
        share += mine
    return sort_queues(share)


def find_unowned(strategy: Strategy, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Return the queues that the strategy gives to nobody, whoever the members are.

    Only MACHINE_ROOM passes over any. Of CONFIG nobody can say: what this member does not list, another may.
    """
    if not isinstance(strategy, MachineRoom):
        return []
    return [queue for queue in queues if not strategy.holds(queue.broker_name)]


def check_allocation(
    strategy: Strategy, group: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> dict[str, list[MessageQueue]]:
    """Return what each member gets of the sorted `queues` of a topic.

    Raises OptionError, which names strategy, queues and members, unless all answers together hold every queue once and
    no other. CONFIG and MACHINE_ROOM may fail this by their nature.
    """
    shares = {client_id: strategy(group, client_id, queues, client_ids) for client_id in client_ids}
    known = set(queues)
    owner: dict[MessageQueue, str] = {}
    for client_id, share in shares.items():
        for queue in share:
            if queue not in known:
                why = f"gave member {client_id!r} a queue that is not there"
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
    wrong: Sequence[MessageQueue],
    queues: Sequence[MessageQueue],
    client_ids: Sequence[str],
) -> OptionError:
    return OptionError(
        f"allocateStrategy {strategy.name} of group {group!r} {why}: {listed([str(queue.key) for queue in wrong])}. "
        f"There are the queues {listed([str(queue.key) for queue in queues])} and the members {listed(client_ids)}; "
        "each queue must go to exactly one member"
    )


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
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
        raise _refusal(text, "no room is named")
    return rooms


def _parse_queues(content: str, text: str, broker_name: str) -> tuple[MessageQueue, ...]:
    try:
        pairs = json.loads(content, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise _refusal(text, f"the queues are no JSON ({error})") from error
    shape = 'the queues are a JSON object of topics and lists of queue ids, as {"topic": [0, 1]}'
    if not isinstance(pairs, list) or not pairs or not all(isinstance(pair, tuple) for pair in pairs):
        raise _refusal(text, shape)
    queues = []
    for topic, ids in pairs:
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise _refusal(text, f"{shape}; for {topic!r} there is {ids!r}")
        queues += [MessageQueue(topic, broker_name, one) for one in ids]
    if len(set(queues)) < len(queues):
        raise _refusal(text, "a queue is named twice")
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
        raise _refusal(path, f"found {found!r}, which is no function (group, client_id, queues, client_ids)")
    return Imported(path, found)
