"""Routes: which brokers have the queues of a topic, and at which addresses, as the name servers say.

A name server forgets a broker as soon as its connections close, and learns about it again within a second after it is
back. So a broker that is missing in a route is away and not removed: `RouteBook` keeps each queue that it ever saw.
Addresses change and names stay, so queues are known by the names of their brokers.

Source: TopicRouteData, ClusterInfo, RouteInfoManager#pickupTopicRouteData (4.9, 5.3).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rmq_spark.store.cluster.address import join_address, split_address
from rmq_spark.store.cluster.responses import MAX_QUEUE_COUNT, BrokerData, QueueData, RouteResponse
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE, TopicConfig
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import LIGHT_QUEUE_PREFIX

MASTER_ID = 0  # MixAll.MASTER_ID
_ORDINARY = "expected an ordinary topic. Leave the topic out, or copy its messages to an ordinary one."


def refuse_route(topic: str, route: RouteResponse) -> None:
    """Raise OptionError if rmq-spark cannot read the topic, as its route shows."""
    if route.is_static:
        raise OptionError(
            f"topic {topic} is a static topic, whose logical queues move between brokers; {_ORDINARY} rmq-spark does "
            "not follow such queues."
        )
    for one in route.queues:
        if not one.is_possible:
            raise OptionError(
                f"topic {topic} has {one.read_queue_count} read queues and {one.write_queue_count} write queues on "
                f"broker {one.broker}; expected from 0 to {MAX_QUEUE_COUNT}. Correct the numbers with `rmq create "
                "--alter --read-queues N --write-queues N`, or delete the topic."
            )


def refuse_light_queue(topic: str) -> None:
    """Raise OptionError if the name is that of a light message queue (LMQ), whose entries belong to other topics."""
    if topic.startswith(LIGHT_QUEUE_PREFIX):
        raise OptionError(
            f"topic {topic} is a light message queue; expected an ordinary topic. Read the topic to which its messages "
            "were sent."
        )


def refuse_config(topic: str, config: TopicConfig) -> None:
    """Raise OptionError if rmq-spark cannot read the topic from a broker, as its settings show (5.x)."""
    if config.is_batch_queue:
        raise OptionError(f"topic {topic} has queue.type=BatchCQ, which stores several messages as one; {_ORDINARY}")
    policy = config.attributes.get("cleanup.policy", "DELETE")
    if policy.upper() != "DELETE":
        raise OptionError(f"topic {topic} has cleanup.policy={policy}, so its queue offsets have gaps; {_ORDINARY}")


@dataclass(frozen=True, slots=True)
class Listing:
    """What the name servers say about a topic on one broker.

    `address` is where the broker is asked: its master's address, the last one that was known, or None if none ever was.
    `has_broker` says that a name server lists the broker now, and `has_topic` that it lists the topic there.
    `has_master` is false while only slaves are listed. An acting master is a slave that answers for a missing master.
    `read_count` and `write_count` are the numbers of queues that can be read and written, as they were listed last.
    """

    broker: str
    address: str | None = None
    has_broker: bool = False
    has_topic: bool = False
    has_master: bool = False
    is_acting: bool = False
    is_readable: bool = True
    read_count: int = 0
    write_count: int = 0


class RouteBook:
    """All routes that a reader has seen. Pure: the caller asks the name servers and notes their answers.

    `overrides` are the addresses that replace those in the routes, by broker name (brokerAddresses). `retired` are
    brokers whose queues are not read any more (retiredBrokers). `masters` are addresses of masters as another reader
    has seen them last.
    """

    def __init__(
        self,
        overrides: Mapping[str, str] | None = None,
        retired: Iterable[str] = (),
        masters: Mapping[str, str] | None = None,
    ) -> None:
        self._overrides = dict(overrides or {})
        self._retired = frozenset(retired)
        self._queues: dict[str, dict[str, QueueData]] = {}  # as listed last, by topic and broker
        self._counts: dict[str, dict[str, int]] = {}  # how many queues of a topic each broker has had at most
        self._listed: dict[str, frozenset[str]] = {}  # the brokers in the newest route of a topic
        self._shared: dict[str, list[QueueKey]] = {}  # the queues in the newest route of a topic that has any
        self._acting: dict[str, frozenset[str]] = {}  # those of them that have an acting master
        self._masters = dict(masters or {})  # the address of each broker's master, as listed last
        self._slaves_only: frozenset[str] = frozenset()  # brokers that are listed now without a master
        self._registered: frozenset[str] = frozenset()  # the brokers in the newest list of brokers

    def note_routes(self, topic: str, routes: Sequence[RouteResponse]) -> bool:
        """Note what name servers say about a topic now: [] if none of those that answered has a route for it.

        Routes of several name servers are joined. Brokers with impossible numbers of queues are left out. Returns
        whether anything has changed.
        """
        listed = {name: one for name, one in join_queues(routes).items() if one.is_possible}
        known = self._queues.get(topic, {})
        before = known, self._listed.get(topic), dict(self._masters), self._slaves_only
        brokers = self._note_brokers(route.brokers for route in routes)
        self._queues[topic] = known | listed
        if listed:
            self._shared[topic] = [
                QueueKey(topic, queue_id, name)
                for name, one in sorted(listed.items())
                if one.perm & PERM_READ
                for queue_id in range(one.read_queue_count)
            ]
        self._listed[topic] = frozenset(listed)
        self._acting[topic] = frozenset(
            name
            for name, one in listed.items()
            if name in brokers and brokers[name].enables_acting_master and not one.perm & PERM_WRITE
        )
        counts = self._counts.setdefault(topic, {})
        for name, one in listed.items():
            counts[name] = max(counts.get(name, 0), one.read_queue_count)
        return before != (self._queues[topic], self._listed[topic], self._masters, self._slaves_only)

    def note_brokers(self, lists: Sequence[Mapping[str, BrokerData]]) -> None:
        """Note the brokers that name servers list now, by broker name, whatever their topics."""
        self._registered = frozenset(self._note_brokers(one.values() for one in lists))

    def expect(self, topic: str, broker: str) -> None:
        """Remember that a broker has had queues of a topic, as the caller knows, even if no name server lists it."""
        self._counts.setdefault(topic, {}).setdefault(broker, 0)

    def brokers(self, topic: str) -> list[str]:
        """Return the brokers that have or had queues of the topic, sorted. Retired ones are left out."""
        return sorted(broker for broker in self._counts.get(topic, {}) if broker not in self._retired)

    def queues(self, topic: str) -> list[QueueKey]:
        """Return all queues of the topic that were ever listed for reading, sorted. Retired brokers are left out."""
        counts = self._counts.get(topic, {})
        return [
            QueueKey(topic, queue_id, broker) for broker in self.brokers(topic) for queue_id in range(counts[broker])
        ]

    def shared_queues(self, topic: str) -> list[QueueKey]:
        """Return the queues that the members of a group share: those in the newest route that has queues at all.

        Unlike `queues`, they are without the queues of brokers that the name servers do not list now. Retired brokers
        are among them, because other members do not know which are retired. Follows
        MQClientInstance#topicRouteData2TopicSubscribeInfo.
        """
        return list(self._shared.get(topic, ()))

    def names(self) -> dict[str, str]:
        """Return the names of all brokers with a known address, by address."""
        return {address: name for name, address in {**self._masters, **self._overrides}.items()}

    def masters(self) -> dict[str, str]:
        """Return the address of each broker's master, as it was listed last, by broker name."""
        return dict(self._masters)

    def known_brokers(self) -> list[str]:
        """Return the names of all brokers that were ever listed, sorted."""
        return sorted({*self._masters, *self._registered, *self._slaves_only})

    def has_route(self, topic: str) -> bool:
        """Return whether a name server lists the topic now."""
        return bool(self._listed.get(topic))

    def address(self, broker: str) -> str | None:
        """Return where the broker is asked: its override, or its master's address as it was listed last."""
        return self._overrides.get(broker) or self._masters.get(broker)

    def listing(self, topic: str, broker: str) -> Listing:
        """Return what the name servers say about the topic on the broker."""
        one = self._queues.get(topic, {}).get(broker)
        has_topic = broker in self._listed.get(topic, frozenset())
        return Listing(
            broker,
            self.address(broker),
            has_broker=has_topic or broker in self._registered,
            has_topic=has_topic,
            has_master=broker not in self._slaves_only,
            is_acting=broker in self._acting.get(topic, frozenset()),
            is_readable=one is None or bool(one.perm & PERM_READ),
            read_count=self._counts.get(topic, {}).get(broker, 0) if one is None else one.read_queue_count,
            write_count=0 if one is None or not one.perm & PERM_WRITE else one.write_queue_count,
        )

    def _note_brokers(self, lists: Iterable[Iterable[BrokerData]]) -> dict[str, BrokerData]:
        """Note the addresses in several lists. Return one entry for each broker."""
        brokers = join_brokers(lists)
        for name, data in brokers.items():
            if address := _normal(data.addresses.get(MASTER_ID, "")):
                self._masters[name] = address
        with_master = {name for name, data in brokers.items() if MASTER_ID in data.addresses}
        self._slaves_only = (self._slaves_only | brokers.keys()) - with_master
        return brokers


def join_queues(routes: Iterable[RouteResponse]) -> dict[str, QueueData]:
    """Return the queues of a topic by broker, from its routes at several name servers: the more of each number."""
    found: dict[str, QueueData] = {}
    for route in routes:
        for one in route.queues:
            found[one.broker] = _join(found[one.broker], one) if one.broker in found else one
    return found


def join_brokers(lists: Iterable[Iterable[BrokerData]]) -> dict[str, BrokerData]:
    """Return the brokers that several name servers list, by name, each with all of its addresses.

    If the name servers do not agree, the first one that lists a master of the broker counts.
    """
    found: dict[str, BrokerData] = {}
    for listed in lists:
        for data in listed:
            first, second = data, found.get(data.broker, data)
            if MASTER_ID in second.addresses:
                first, second = second, first
            addresses = {**second.addresses, **first.addresses}
            found[data.broker] = replace(first, addresses=dict(sorted(addresses.items())))
    return found


def _join(one: QueueData, other: QueueData) -> QueueData:
    """Return what two name servers say together about a topic on a broker: the more of each."""
    return replace(
        one,
        perm=one.perm | other.perm,
        read_queue_count=max(one.read_queue_count, other.read_queue_count),
        write_queue_count=max(one.write_queue_count, other.write_queue_count),
    )


def _normal(address: str) -> str | None:
    """Return "host:port", with brackets around an IPv6 address. Return None if the text is not an address."""
    try:
        return join_address(*split_address(address))
    except ValueError:
        return None
