"""A name server: the routes that brokers registered, and the requests about them.

Source: RouteInfoManager, ClientRequestProcessor, DefaultRequestProcessor (4.9, 5.3). Brokers register by a call, not by
the wire.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.format.config_json import PERM_WRITE
from rmq_spark.store.testing.brokers.event_loop import EventLoop
from rmq_spark.store.testing.brokers.releases import STANDARD_JSON_VERSION, Release
from rmq_spark.store.testing.brokers.server import HandlerTable, Server, in_loop
from rmq_spark.store.testing.brokers.topics import Topic
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal, loose_json

HANDLERS = HandlerTable()
MASTER_ID = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """What a broker says to a name server (RegisterBrokerRequestHeader and its body)."""

    cluster: str
    broker: str
    broker_id: int
    address: str
    topics: tuple[Topic, ...]
    acts_as_master: bool = False  # enableActingMaster: without a master, the first slave is shown as one


@dataclass(slots=True)
class BrokerEntry:
    """A broker name with the addresses of its master and slaves, by broker id (BrokerData)."""

    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    has_acting_master: bool = False


class RouteTable:
    """What a name server knows (RouteInfoManager). `additions` has further fields for the routes of topics."""

    def __init__(self) -> None:
        self.brokers: dict[str, BrokerEntry] = {}
        self.topics: dict[str, dict[str, Topic]] = {}  # the settings by broker name, for each topic
        self.additions: dict[str, dict[str, Any]] = {}

    def register(self, registration: Registration) -> None:
        """Take a registration. Topics that it does not name stay (RouteInfoManager#registerBroker)."""
        entry = self.brokers.setdefault(registration.broker, BrokerEntry(registration.cluster))
        entry.addresses[registration.broker_id] = registration.address
        entry.has_acting_master |= registration.acts_as_master
        is_first_slave = min(entry.addresses) == registration.broker_id
        if registration.broker_id == MASTER_ID or (entry.has_acting_master and is_first_slave):
            for topic in registration.topics:
                if registration.broker_id != MASTER_ID:
                    topic = replace(topic, perm=topic.perm & ~PERM_WRITE)
                self.topics.setdefault(topic.name, {})[registration.broker] = topic

    def remove(self, broker: str, broker_id: int) -> None:
        """Take away one address of a broker. With its last one, all its queues go (#onChannelDestroy)."""
        entry = self.brokers.get(broker)
        if entry is None:
            return
        entry.addresses.pop(broker_id, None)
        if not entry.addresses:
            del self.brokers[broker]
            for name in [name for name, topics in self.topics.items() if topics.pop(broker, None) and not topics]:
                del self.topics[name]
        elif MASTER_ID not in entry.addresses and entry.has_acting_master:
            for topics in self.topics.values():
                if broker in topics:
                    topics[broker] = replace(topics[broker], perm=topics[broker].perm & ~PERM_WRITE)

    def delete_topic(self, topic: str) -> None:
        """Forget a topic, until a broker registers it again (DELETE_TOPIC_IN_NAMESRV)."""
        self.topics.pop(topic, None)

    def route(self, topic: str) -> tuple[list[Topic], list[str], dict[str, BrokerEntry]] | None:
        """Return the topic's settings, the names of the brokers that have it, and these brokers. None if unknown.

        Source: RouteInfoManager#pickupTopicRouteData.
        """
        queues = self.topics.get(topic)
        brokers = {name: self.brokers[name] for name in queues or () if name in self.brokers}
        if not queues or not brokers:
            return None
        return list(queues.values()), list(queues), brokers

    def shown_addresses(self, entry: BrokerEntry) -> dict[int, str]:
        """Return the addresses of a broker by id. An acting master is shown with the id 0."""
        addresses = dict(sorted(entry.addresses.items()))
        if entry.has_acting_master and addresses and MASTER_ID not in addresses:
            addresses[MASTER_ID] = addresses.pop(min(addresses))
        return addresses


class NameServer(Server):
    """A name server. `routes` is what it knows."""

    def __init__(self, loop: EventLoop, release: Release) -> None:
        super().__init__(loop, release, HANDLERS)
        self.routes = RouteTable()
        self.is_ready = True
        self._call_count = 0

    def on_stopped(self) -> None:
        """Lose all routes, as the process does."""
        self.routes = RouteTable()

    @in_loop
    def restart(self, port: int | None = None) -> None:
        """Stop and start again: with empty routes until brokers register."""
        if self.is_running:
            self.kill()
        self.start(port)

    @in_loop
    def forget(self, broker: str, broker_id: int = MASTER_ID) -> None:
        """Drop a broker that has not registered for 120 s (RouteInfoManager#scanNotActiveBroker)."""
        self.routes.remove(broker, broker_id)

    @in_loop
    def add_to_route(self, topic: str, **fields: Any) -> None:
        """Add fields to the route of a topic: `orderTopicConf`, or `topicQueueMappingByBroker` of a static topic."""
        self.routes.additions.setdefault(topic, {}).update(fields)

    @in_loop
    def set_ready(self, is_ready: bool) -> None:
        """Answer routes, or refuse them as a name server of 5.x does after its start (needWaitForService)."""
        self.is_ready = is_ready

    def handle(self, call: Call) -> Answer | None:
        """Count the calls, and let the handler answer."""
        self._call_count += 1
        return super().handle(call)

    def answer_unknown(self, call: Call) -> Answer | None:
        """Return the answer to a request with an unknown code. A name server of 4.9 never answers one."""
        return super().answer_unknown(call) if self.release.is_5 else None

    def shuffle(self, items: Iterable[Any]) -> list[Any]:
        """Return the items in an order that changes from call to call, as in a hash table that changes."""
        found = list(items)
        return found if self._call_count % 2 else found[::-1]

    def broker_data(self, name: str, entry: BrokerEntry, *, quotes_keys: bool) -> dict[str, Any]:
        """Return a broker's object in a body (BrokerData)."""
        addresses = self.routes.shown_addresses(entry)
        shown: dict[Any, str] = {str(one): addresses[one] for one in addresses} if quotes_keys else {**addresses}
        data: dict[str, Any] = {"brokerAddrs": shown, "brokerName": name, "cluster": entry.cluster}
        return {**data, "enableActingMaster": entry.has_acting_master} if self.release.is_5 else data


@HANDLERS.on(RequestCode.GET_ROUTEINFO_BY_TOPIC)
def get_route(server: NameServer, call: Call) -> Answer:
    """Answer with the route of a topic (ClientRequestProcessor#getRouteInfoByTopic)."""
    topic = call.command.fields.get("topic", "")
    if not server.is_ready:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "name server not ready")
    found = server.routes.route(topic)
    if found is None:
        remark = server.release.with_faq(f"No topic route info in name server for the topic: {topic}")
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST, remark)
    settings, names, brokers = found
    is_standard = call.flag("acceptStandardJsonOnly", default=False) or call.command.version >= STANDARD_JSON_VERSION
    body: dict[str, Any] = {
        "brokerDatas": [
            server.broker_data(name, brokers[name], quotes_keys=is_standard) for name in server.shuffle(brokers)
        ],
        "filterServerTable": {},
        "queueDatas": [
            {
                "brokerName": name,
                "perm": topic_of.perm,
                "readQueueNums": topic_of.read_queues,
                "topicSysFlag": topic_of.sys_flag,
                "writeQueueNums": topic_of.write_queues,
            }
            for name, topic_of in server.shuffle(zip(names, settings, strict=True))
        ],
    }
    body |= server.routes.additions.get(topic, {})
    return Answer(body=loose_json(body, is_ascii=is_standard).encode())


@HANDLERS.on(RequestCode.GET_BROKER_CLUSTER_INFO)
def get_cluster(server: NameServer, call: Call) -> Answer:
    """Answer with all brokers and clusters (DefaultRequestProcessor#getBrokerClusterInfo)."""
    clusters: dict[str, list[str]] = {}
    for name, entry in server.routes.brokers.items():
        clusters.setdefault(entry.cluster, []).append(name)
    brokers: Mapping[str, Any] = {
        name: server.broker_data(name, entry, quotes_keys=False) for name, entry in server.routes.brokers.items()
    }
    return Answer(body=loose_json({"brokerAddrTable": brokers, "clusterAddrTable": clusters}).encode())


@HANDLERS.on(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
def get_topics(server: NameServer, call: Call) -> Answer:
    """Answer with the names of all topics (DefaultRequestProcessor#getAllTopicListFromNameserver)."""
    return Answer(body=loose_json({"topicList": server.shuffle(server.routes.topics)}).encode())


@HANDLERS.on(RequestCode.DELETE_TOPIC_IN_NAMESRV)
def delete_topic(server: NameServer, call: Call) -> Answer:
    """Forget a topic (DefaultRequestProcessor#deleteTopicInNamesrv)."""
    server.routes.delete_topic(call.text("topic"))
    return Answer()
