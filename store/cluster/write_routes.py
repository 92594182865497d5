"""The queues to which messages of a topic are sent, and the addresses of their brokers.

The list of a topic is fixed once it was asked for, until `forget`: a sharding key then leads to one queue. It is sorted
by broker and queue id, as Java's producer sorts it. A topic with an order configuration (orderTopicConf) has the queues
that this names, in its order, also while a broker of them is away. Brokers do not check the write permission, so it is
checked here.

A topic that no name server knows can be created on every master. A master that has the topic nevertheless, because it
has not registered yet, keeps it unchanged. A broker that is away is not taken for a topic that does not exist: nothing
is created while a name server does not answer, nor if this client has seen a route of the topic before.

Source: MQClientInstance#topicRouteData2TopicPublishInfo, DefaultMQAdminExtImpl#createAndUpdateTopicConfig (4.9, 5.3).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.requests import (
    ClusterInfoRequest,
    CreateTopicRequest,
    RouteRequest,
    TopicStatsRequest,
)
from rmq_spark.store.cluster.responses import ClusterInfoResponse, DoneResponse, RouteResponse, TopicStatsResponse
from rmq_spark.store.cluster.routes import RouteBook, refuse_route
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, NoPermissionError, NotFoundError, RmqError
from rmq_spark.store.format.config_json import PERM_WRITE, TopicConfig
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")
V5_0_0 = 413  # MQVersion
_CREATE = "rmq create -n NAMESERVER"
_RENEW_MS = 1000.0  # the shortest time between two requests for the routes of a topic


@dataclass(frozen=True, slots=True)
class NewTopics:
    """Whether a topic that does not exist is created, and with how many queues on each master."""

    is_allowed: bool = True
    queue_count: int = 4


class WriteRoutes:
    """What a sender knows about topics and brokers. For one thread.

    Topics are named without the namespace. `fixed` are lists of queues that another process has asked for, by topic.
    `masters` are addresses of masters as it has seen them. `overrides` are the addresses of brokerAddresses.
    """

    def __init__(
        self,
        client: ClusterClient,
        monotonic_ms: Callable[[], float],
        new_topics: NewTopics,
        fixed: Mapping[str, tuple[QueueKey, ...]] | None = None,
        masters: Mapping[str, str] | None = None,
    ) -> None:
        self._client, self._monotonic_ms, self._new_topics = client, monotonic_ms, new_topics
        self._namespace = client.address.namespace
        self.book = RouteBook(dict(client.address.broker_addresses), masters=masters)
        self._queues = dict(fixed or {})
        self._asked_ms: dict[str, float] = {}  # when the route of a topic was asked for last

    def topic_of(self, topic: str) -> str:
        """Return the cluster's name of a topic."""
        return wrap_name(self._namespace, topic)

    def forget(self) -> None:
        """Ask for the queues of each topic again when they are needed next."""
        self._queues.clear()

    def queues(self, topic: str) -> tuple[QueueKey, ...]:
        """Return the queues to which messages of a topic are sent (`list_write_queues`). A missing one may be created.

        Raises NotFoundError if the topic is missing and must not be created, NoPermissionError if no broker of it
        accepts messages, OptionError for a kind of topic that is not supported, and the errors of name servers.
        """
        if topic not in self._queues:
            self._queues[topic] = self._find_queues(topic)
        return self._queues[topic]

    def address(self, broker: str) -> str:
        """Return where a broker's master is, as it was listed last. Raises BackendUnavailableError if it never was."""
        address = self.book.address(broker)
        if address is None:
            raise BackendUnavailableError(
                f"cannot send to broker {broker}: no name server lists its master; expected its address. Check whether "
                "the master runs."
            )
        return address

    def renew(self, topic: str) -> None:
        """Ask for the addresses of a topic's brokers again, at most once a second. The list of queues stays."""
        now_ms = self._monotonic_ms()
        if now_ms - self._asked_ms.get(topic, -_RENEW_MS) < _RENEW_MS:
            return
        self._asked_ms[topic] = now_ms
        try:
            self._note(topic, self._client.ask_name_server(RouteRequest(self.topic_of(topic))))
        except RmqError:  # also a refusal: requests in flight must get their outcomes
            return  # the brokers are asked at their last addresses

    def join(self, topic: str) -> None:
        """Ask all name servers for the addresses of a topic's brokers, and join their answers.

        A name server lists only the brokers that reach it. Errors are ignored, as by `renew`.
        """
        request = RouteRequest(self.topic_of(topic))
        outcomes = self._client.call_all([(server, request) for server in self._client.name_servers()])
        self._note(topic, *(one for one in outcomes if isinstance(one, RouteResponse)))

    def is_listed(self, topic: str, broker: str) -> bool:
        """Return whether name servers list the topic on a broker with a master of its own, as of the last route."""
        listing = self.book.listing(topic, broker)
        return listing.has_topic and listing.has_master and not listing.is_acting

    def create(self, config: TopicConfig, brokers: Collection[str] | None = None) -> list[str]:
        """Create a topic on every master that does not have it, or only on those of `brokers`.

        `config` has its name without the namespace. Return the names of the brokers that have it then. Raises
        BackendUnavailableError if a name server does not answer or none lists a master, and the error of a master that
        refuses.
        """
        stored = self.topic_of(config.name)
        masters = self.find_masters(config.name)
        if brokers is not None:
            masters = {name: to for name, to in masters.items() if name in brokers}
        checks = self._client.call_all([(to, TopicStatsRequest(stored, name)) for name, to in masters.items()])
        missing = {}
        for (name, to), found in zip(masters.items(), checks, strict=True):
            if isinstance(found, NotFoundError):
                missing[name] = to
            elif not isinstance(found, TopicStatsResponse):
                raise _not_created(config.name, found)
        settings = TopicConfig(
            stored, config.read_queue_count, config.write_queue_count, config.perm, attributes=config.attributes
        )
        for outcome in self._client.call_all([(to, CreateTopicRequest(settings)) for to in missing.values()]):
            if not isinstance(outcome, DoneResponse):
                raise _not_created(config.name, outcome)
        if missing:
            brokers = f"{'each of the brokers' if len(missing) > 1 else 'the broker'} {', '.join(missing)}"
            _LOG.info("rmq: created topic %s with %d queues on %s", config.name, config.write_queue_count, brokers)
        return list(masters)

    def find_masters(self, topic: str) -> dict[str, str]:
        """Return the addresses of all masters, by the names of their brokers, from all name servers.

        `topic` will be created there. Raises BackendUnavailableError if a name server does not answer, or if no master
        is listed.
        """
        servers = self._client.name_servers()
        outcomes = self._client.call_all([(server, ClusterInfoRequest()) for server in servers])
        for outcome in outcomes:
            if not isinstance(outcome, ClusterInfoResponse):
                raise _not_created(topic, outcome)
        lists = [one for one in outcomes if isinstance(one, ClusterInfoResponse)]
        self.book.note_brokers([one.brokers for one in lists])
        self._client.name_brokers(self.book.names())
        names = {name for one in lists for name, data in one.brokers.items() if 0 in data.addresses}
        masters = {name: self.address(name) for name in sorted(names)}
        if not masters:
            raise BackendUnavailableError(
                f"cannot create topic {topic}: the name servers list no master; expected at least one. Check whether "
                "the brokers run, and wait 30 s after a restart of the name servers."
            )
        return masters

    def wait_for(self, topic: str, brokers: Collection[str]) -> tuple[QueueKey, ...]:
        """Return the queues of a topic that was just created, as soon as a name server lists it on all `brokers`.

        After the request timeout, return those that are listed. Raises NotFoundError if there are none.
        """
        until_ms = self._monotonic_ms() + self._client.address.request_timeout_ms
        while True:
            is_late = self._monotonic_ms() >= until_ms
            try:
                queues = self._ask(topic)
                if is_late or {queue.broker for queue in queues}.issuperset(brokers):
                    return queues
            except NotFoundError:
                if is_late:
                    raise
            self._client.take_done([], 20)

    def fetch_versions(self, topic: str) -> dict[str, int]:
        """Return the number of each broker's version (MQVersion), by broker name, for the queues of a topic.

        A broker of 5.x that refuses the request is left out; 4.9 does not refuse it. Raises BackendUnavailableError if
        a broker does not answer.
        """
        brokers = sorted({queue.broker for queue in self.queues(topic)})
        known = {broker: at for broker in brokers if (at := self.book.address(broker)) is not None}
        stored = self.topic_of(topic)
        outcomes = self._client.call_all([(to, TopicStatsRequest(stored, name)) for name, to in known.items()])
        for outcome in outcomes:
            if not isinstance(outcome, TopicStatsResponse | NoPermissionError):
                raise BackendUnavailableError(f"the version of a broker of topic {topic} is not known: {outcome}")
        return {
            name: one.server_version
            for name, one in zip(known, outcomes, strict=True)
            if isinstance(one, TopicStatsResponse)
        }

    def _find_queues(self, topic: str) -> tuple[QueueKey, ...]:
        try:
            return self._ask(topic)
        except NotFoundError:
            self._check_is_new(topic)
            if not self._new_topics.is_allowed:
                raise NotFoundError(
                    f"topic {topic} does not exist: no name server has a route of it; expected an existing topic. "
                    f"Create it: {_CREATE} {self.topic_of(topic)}. Or let it be created: create_topic=True "
                    "(createTopic=true in Spark). After a restart of the name servers wait 30 s."
                ) from None
        count = self._new_topics.queue_count
        return self.wait_for(topic, self.create(TopicConfig(topic, count, count)))

    def _check_is_new(self, topic: str) -> None:
        """Raise BackendUnavailableError if the topic may exist although no name server has answered with a route."""
        for server, found in self._client.name_server_faults.items():
            raise BackendUnavailableError(
                f"no route of topic {topic} is known, and name server {server} does not answer: {found} Nothing was "
                "created, because it may know the topic."
            )
        if self.topic_of(topic) in self._client.routed_topics:
            raise BackendUnavailableError(
                f"no name server lists topic {topic} any more: its brokers are away, or it was deleted; expected its "
                f"route. Start its brokers. If it was deleted, create it: {_CREATE} {self.topic_of(topic)}."
            )

    def _ask(self, topic: str) -> tuple[QueueKey, ...]:
        route = self._client.ask_name_server(RouteRequest(self.topic_of(topic)))
        self._asked_ms[topic] = self._monotonic_ms()
        refuse_route(topic, route)
        self._client.routed_topics.add(self.topic_of(topic))
        self._note(topic, route)
        queues = list_write_queues(topic, route)
        if not queues:
            masters = {data.broker for data in route.brokers if 0 in data.addresses}
            acting = {one.broker for one in route.queues if self.book.listing(topic, one.broker).is_acting}
            if acting or any(one.perm & PERM_WRITE and one.broker not in masters for one in route.queues):
                raise BackendUnavailableError(
                    f"topic {topic} has no master now ({_describe(route)}); expected one with write permission. Check "
                    "whether the masters of these brokers run, and the permission of the topic (mqadmin "
                    "updateTopicPerm)."
                )
            raise NoPermissionError(
                f"topic {topic} accepts no messages: no broker that has it is a master and allows writing "
                f"({_describe(route)}); expected a master with perm 6 or 2 and write queues. Set the permission with "
                "mqadmin updateTopicPerm."
            )
        return queues

    def _note(self, topic: str, *routes: RouteResponse) -> None:
        self.book.note_routes(topic, routes)
        self._client.name_brokers(self.book.names())


def list_write_queues(topic: str, route: RouteResponse) -> tuple[QueueKey, ...]:
    """Return the queues to which messages are sent by a route.

    These are the queues of orderTopicConf in its order, as in Java. Without it they are the write queues of all masters
    with write permission, sorted by broker and queue id.
    """
    if route.order_config:
        return tuple(_ordered_queues(topic, route.order_config))
    with_master = {data.broker for data in route.brokers if 0 in data.addresses}
    return tuple(
        QueueKey(topic, queue_id, one.broker)
        for one in route.queues
        if one.perm & PERM_WRITE and one.broker in with_master
        for queue_id in range(one.write_queue_count)
    )


def _ordered_queues(topic: str, text: str) -> Iterable[QueueKey]:
    """Return the queues in a text such as "broker-a:8;broker-b:4"."""
    counts = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        broker, _, count = part.partition(":")
        if not (count.isascii() and count.isdigit() and len(count) < 8):
            raise BrokerError(
                0,
                f"the order configuration of topic {topic} is {text!r}; expected broker:queues, separated by "
                "semicolons. Correct it with mqadmin updateOrderConf.",
            )
        counts[broker] = int(count)
    return (QueueKey(topic, number, broker) for broker, count in counts.items() for number in range(count))


def _describe(route: RouteResponse) -> str:
    masters = {data.broker for data in route.brokers if 0 in data.addresses}
    return ", ".join(
        f"{one.broker} has perm {one.perm}, {one.write_queue_count} write queues and "
        f"{'a' if one.broker in masters else 'no'} master"
        for one in route.queues
    )


def _not_created(topic: str, error: Any) -> RmqError:
    """Return the error of a server with the way to create the topic."""
    assert isinstance(error, RmqError), error
    text = f"topic {topic} does not exist and cannot be created: {error} Create it: {_CREATE} {topic}."
    return BrokerError(error.code, text) if isinstance(error, BrokerError) else type(error)(text)
