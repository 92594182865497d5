"""Asks a cluster everything that a query would, and returns what is missing. It changes nothing in the cluster.

Only the examination of an exactly-once sink leaves traces (`exactly_once.sink_doctor`).

A pull adds its group to the broker's list of groups, if the group is new. So the doctor pulls in the name of a group
that every broker has, and only where a message exists: a broker of 4.9 stores a message for each pull outside of a
queue. The rights on the topic and on the group of the query are tried by other requests that need the same rights. A
broker that creates no groups (autoCreateSubscriptionGroup=false), or forbids this one (consumeEnable=false), may still
refuse the query.

Source: PullMessageProcessor, SubscriptionGroupManager#init, PlainAccessResource#parse (4.9),
DefaultAuthorizationContextBuilder#build (5.3).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rmq_spark.store.cluster.address import DEFAULT_PULL_GROUP, ClusterAddress
from rmq_spark.store.cluster.answer_rule import MISSING_RIGHT
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.diagnosis import (
    BrokerAnswers,
    ClusterFinding,
    NameServerAnswers,
    State,
    examine_broker,
    examine_name_servers,
    examine_topic,
    examine_unknown_topic,
    list_names,
    of_error,
)
from rmq_spark.store.cluster.exactly_once.sink_doctor import examine_sink
from rmq_spark.store.cluster.exactly_once.target_topics import OwnTopics
from rmq_spark.store.cluster.group_requests import CommittedOffsetRequest, GroupConnectionsRequest, GroupMembersRequest
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.requests import (
    CheckFilterRequest,
    ClusterInfoRequest,
    KeySearchRequest,
    OffsetAtRequest,
    PullRequest,
    Request,
    RouteRequest,
    TopicConfigRequest,
    TopicListRequest,
    TopicStatsRequest,
)
from rmq_spark.store.cluster.responses import ClusterInfoResponse, QueueData, RouteResponse, TopicStatsResponse
from rmq_spark.store.cluster.routes import RouteBook, refuse_light_queue, refuse_route
from rmq_spark.store.errors import NoPermissionError, OptionError
from rmq_spark.store.model import QueueKey

_EVERY_BROKER = "SELF_TEST_TOPIC"  # TopicValidator: a topic that every broker has
_EVERY_GROUP = "TOOLS_CONSUMER"  # MixAll.TOOLS_CONSUMER_GROUP: a group that every broker has
_EXPRESSION, _KEY = "a IS NOT NULL", "rmq-spark-doctor"


def diagnose_cluster(
    address: ClusterAddress,
    topics: Sequence[str] = (),
    group: str | None = None,
    *,
    now_ms: int,
    sinks: Sequence[str] = (),
    own_topics: OwnTopics | None = None,
) -> list[ClusterFinding]:
    """Return the findings about name servers, brokers, the reading of `topics`, and exactly-once writes to `sinks`.

    All servers are asked in parallel, each for at most the deadline of a request. `group` is the consumer group whose
    committed offsets the query uses. `own_topics` are the sink's stage and ledger. Raises OptionError if the account or
    the files of TLS cannot be used.
    """
    client = ClusterClient(address)
    try:
        findings = list(_Examination(client, address, topics, group, now_ms).findings())
        for topic in dict.fromkeys(sinks):
            findings += examine_sink(client, topic, own_topics or OwnTopics())
        return list(dict.fromkeys(findings))
    finally:
        client.close()


class _Examination:
    """One examination of a cluster. `topics` are the names that the user gives."""

    def __init__(
        self, client: ClusterClient, address: ClusterAddress, topics: Sequence[str], group: str | None, now_ms: int
    ) -> None:
        self._client, self._address, self._now_ms = client, address, now_ms
        self._names = {wrap_name(address.namespace, topic): topic for topic in dict.fromkeys(topics)}
        self._group = None if group is None else wrap_name(address.namespace, group)
        self._pull_group = wrap_name(address.namespace, address.pull_group or DEFAULT_PULL_GROUP)
        self._book = RouteBook(dict(address.broker_addresses), address.retired_brokers)
        self._brokers: dict[str, BrokerAnswers] = {}
        self._queues: dict[str, dict[str, QueueData]] = {}  # by topic and broker, as the routes say

    def findings(self) -> Iterator[ClusterFinding]:
        """Ask everything, and yield the findings."""
        servers = self._ask_name_servers()
        yield from examine_name_servers(servers)
        if not any(one.is_usable for one in servers):
            return
        yield from self._note_brokers(servers)
        refused = list(self._note_topics(servers))
        self._ask_brokers()
        for broker in self._brokers.values():
            yield from examine_broker(broker, self._now_ms)
        yield from refused
        self._pull()
        for topic, by_broker in self._queues.items():
            for name, data in sorted(by_broker.items()):
                asked = self._brokers.get(name)
                if asked is not None and asked.failure is None:
                    yield from examine_topic(asked, topic, data, (self._pull_group, self._group))

    def _ask_name_servers(self) -> list[NameServerAnswers]:
        servers = self._client.name_servers()
        routes = [RouteRequest(topic) for topic in self._names] or [RouteRequest(_EVERY_BROKER)]
        requests: list[Request[Any]] = [ClusterInfoRequest(), TopicListRequest(), *routes]
        outcomes = self._client.call_all([(server, request) for server in servers for request in requests])
        answers = []
        for number, server in enumerate(servers):
            info, topics, *found = outcomes[number * len(requests) : (number + 1) * len(requests)]
            by_topic = {route.topic: outcome for route, outcome in zip(routes, found, strict=True)}
            answers.append(NameServerAnswers(server, info, topics, by_topic))
        return answers

    def _note_brokers(self, servers: Sequence[NameServerAnswers]) -> Iterator[ClusterFinding]:
        """Note where each broker is. Yield those without a usable address."""
        self._book.note_brokers([one.info.brokers for one in servers if isinstance(one.info, ClusterInfoResponse)])
        for topic in servers[0].routes:
            routes = [one.routes[topic] for one in servers if isinstance(one.routes[topic], RouteResponse)]
            self._book.note_routes(topic, routes)
            if topic in self._names:
                self._queues[topic] = {data.broker: data for route in routes for data in route.queues}
        self._client.name_brokers(self._book.names())
        known = set(self._book.known_brokers())
        for option, names in (
            ("brokerAddresses", {name for name, _ in self._address.broker_addresses}),
            ("retiredBrokers", set(self._address.retired_brokers)),
        ):
            if option == "brokerAddresses" and names - known:
                why = f"no name server lists the broker {list_names(names - known)}, only {list_names(known)}."
                yield ClusterFinding(f"option {option}", State.WARNING, why, "Correct the name, or start the broker.")
        for name in sorted(known - set(self._address.retired_brokers)):
            at = self._book.address(name)
            if at is None:
                why = "no name server lists a master of it, only slaves."
                yield ClusterFinding(f"broker {name}", State.MISSING, why, "Start the master of the broker.")
            else:
                self._brokers[name] = BrokerAnswers(name, at)

    def _note_topics(self, servers: Sequence[NameServerAnswers]) -> Iterator[ClusterFinding]:
        """Yield the topics that do not exist or are of a kind that cannot be read, and forget them."""
        for topic, given in self._names.items():
            try:
                refuse_light_queue(topic)
                for one in servers:
                    if isinstance(one.routes[topic], RouteResponse):
                        refuse_route(topic, one.routes[topic])
            except OptionError as error:
                self._queues.pop(topic, None)
                yield of_error(f"topic {topic}", error)
                continue
            if not self._queues.get(topic):
                yield examine_unknown_topic(given, topic, servers, self._address.namespace)

    def _ask_brokers(self) -> None:
        places: list[tuple[BrokerAnswers, str, Request[Any]]] = []
        for name, broker in self._brokers.items():
            places.append((broker, "", TopicStatsRequest(_EVERY_BROKER, name)))
            for topic, by_broker in self._queues.items():
                if name in by_broker:
                    places += [(broker, topic, request) for request in self._requests(topic, name)]
        outcomes = self._client.call_all([(broker.address, request) for broker, _, request in places])
        for (broker, topic, request), outcome in zip(places, outcomes, strict=True):
            broker.note(topic, request, outcome)

    def _requests(self, topic: str, broker: str) -> Iterator[Request[Any]]:
        queue = QueueKey(topic, 0, broker)
        yield TopicStatsRequest(topic, broker)
        yield TopicConfigRequest(topic, broker)
        yield OffsetAtRequest(queue, self._now_ms)
        yield KeySearchRequest(topic, broker, _KEY, max_messages=1)
        yield CheckFilterRequest(topic, self._pull_group, _EXPRESSION)
        yield GroupMembersRequest(self._pull_group, broker)
        if self._group is not None:
            yield CommittedOffsetRequest(self._group, queue)
            yield GroupConnectionsRequest(self._group, broker)

    def _pull(self) -> None:
        """Pull one message of each topic from each broker, where there is one."""
        places: list[tuple[BrokerAnswers, str, Request[Any]]] = []
        for broker in self._brokers.values():
            for (topic, _), outcome in broker.outcomes.items():
                if topic and isinstance(outcome, TopicStatsResponse) and broker.failure is None:
                    count = self._queues[topic][broker.name].read_queue_count
                    queue = _filled(outcome, count)
                    if queue is not None:
                        offset = outcome.queues[queue].min_offset
                        places.append((broker, topic, PullRequest(queue, offset, 1, _EVERY_GROUP)))
        outcomes = self._client.call_all([(broker.address, request) for broker, _, request in places])
        for (broker, topic, request), outcome in zip(places, outcomes, strict=True):
            # The account may lack the right on this group, which no query uses.
            if not (isinstance(outcome, NoPermissionError) and MISSING_RIGHT in str(outcome)):
                broker.note(topic, request, outcome)


def _filled(stats: TopicStatsResponse, read_count: int) -> QueueKey | None:
    """Return a queue that can be read and has a message, None if there is none."""
    filled = (queue for queue, one in stats.queues.items() if one.min_offset < one.max_offset)
    return next((queue for queue in sorted(filled) if queue.queue_id < read_count), None)
