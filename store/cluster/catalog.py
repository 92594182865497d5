"""What a reader knows about a cluster: topics, queues and the answers about them, as of its last look.

Routes are asked for when a topic is used first, then every 30 s, and when a broker does not reply or does not know a
topic. The first time all name servers are asked, because they do not know each other, and one of them may just have
started. Later one is enough: a broker that it does not list is still asked at its last address. Bounds are asked for
at each `refresh`, by one request for each broker and topic. The rules for what the replies mean are in `queue_answers`.

Source: MQClientInstance#updateTopicRouteInfoFromNameServer, DefaultMQAdminExtImpl#examineTopicStats (4.9, 5.3).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import ClusterClient, Ticket
from rmq_spark.store.cluster.group_starts import GroupOffsetRequests
from rmq_spark.store.cluster.namespace import is_in_namespace, is_shared_name, unwrap_name, wrap_name
from rmq_spark.store.cluster.positions import BoundsQuestion, BoundsRequests, RecordLooks, describe_missing
from rmq_spark.store.cluster.queue_answers import Found, NoTopic, Reply, Silent, TopicOnBroker
from rmq_spark.store.cluster.record_sizes import RecordSizes
from rmq_spark.store.cluster.requests import ClusterInfoRequest, RouteRequest, TopicConfigRequest, TopicListRequest
from rmq_spark.store.cluster.responses import (
    ClusterInfoResponse,
    RouteResponse,
    TopicConfigResponse,
    TopicListResponse,
)
from rmq_spark.store.cluster.routes import Listing, RouteBook, refuse_config, refuse_light_queue, refuse_route
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, RmqError
from rmq_spark.store.model import QueueAnswer, QueueKey, RecordProof

_LOG = logging.getLogger("rmq_spark")

# Intervals between two looks at the name servers (ms): usually, while a broker is away, and after something unexpected.
_ROUTES_MS, _AWAY_ROUTES_MS, _ROUTES_MIN_MS = 30_000, 5_000, 1_000
_Pair = tuple[str, str]  # a topic and a broker


class ClusterCatalog:
    """The topics and queues of a cluster, and the answers about them. For one thread.

    `group` is the cluster's name of the group in whose name messages are pulled. `now_ms` returns ms since the epoch.
    """

    def __init__(
        self,
        client: ClusterClient,
        address: ClusterAddress,
        group: str,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], float],
    ) -> None:
        self._client, self._namespace = client, address.namespace
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        masters = dict(address.known_addresses)
        self.book = RouteBook(dict(address.broker_addresses), address.retired_brokers, masters)
        self._knows_addresses = bool(masters)
        self._requests = BoundsRequests(client, group)
        self.sizes = RecordSizes(client, group, self.book.address, self.topic_of, monotonic_ms)
        self.looks = RecordLooks(client, group, self.book.address, self.topic_of, self.sizes.note)
        self.groups = GroupOffsetRequests(client, self.book.address, self.topic_of)
        self._known: dict[_Pair, TopicOnBroker] = {}
        self._connections: dict[_Pair, tuple[str, int]] = {}  # address and connection of the last reply
        self._replies: dict[_Pair, Reply] = {}  # the last reply, for a broker whose next one is still awaited
        self._looked: set[_Pair] = set()  # looked at since the last `forget`
        self._watched: dict[str, None] = {}  # topics whose routes were asked for since then
        self._topics: list[str] | None = None
        self._own_names: frozenset[str] = frozenset()  # of clusters and brokers, which are topics too
        self._configured: set[_Pair] = set()  # whose settings were looked at
        self._name_server: str | None = None  # the one that replied last
        self._routes_ms: float | None = None  # when routes were asked for last
        self._needs_routes = False
        self._is_deaf = False  # whether no name server replied last time
        self._named = {
            "brokerAddresses": [name for name, _ in address.broker_addresses],
            "retiredBrokers": list(address.retired_brokers),
        }
        # Name servers that did not reply, and an open question to each: nobody waits to learn that it replies again.
        self._silent: dict[str, Ticket[ClusterInfoResponse]] = {}

    def topic_of(self, topic: str) -> str:
        """Return the cluster's name of a topic."""
        return wrap_name(self._namespace, topic)

    def forget(self) -> None:
        """Look at everything again at the next call. What is remembered about queues stays."""
        self._looked.clear()
        self._watched.clear()
        self._configured.clear()
        self._topics = None
        self._requests.forget()

    # Name servers.

    def topics(self) -> list[str]:
        """Return the sorted names of all topics, without those that are named after clusters and brokers."""
        if self._topics is None:
            self._topics = self._list_topics(self._client.name_servers())
            self._note_routes_asked()
        return self._topics

    def queues(self, topics: Collection[str]) -> dict[str, list[QueueKey]]:
        """Return the sorted queues of each topic, [] for a topic that no name server lists and none of ours did."""
        self._watch(topics)
        return {topic: self.book.queues(topic) for topic in topics}

    def brokers(self) -> list[Listing]:
        """Ask the name servers for all brokers. Return what is known of each, also of those seen earlier, by name.

        A proxy knows no brokers: then only those of topics that were used are known. Raises BackendUnavailableError if
        no name server answers.
        """
        outcomes = self._client.call_all([(to, ClusterInfoRequest()) for to in self._client.name_servers()])
        self._note_brokers(outcomes)
        if all(isinstance(one, BackendUnavailableError) for one in outcomes):
            raise _worst(outcomes)
        self._client.name_brokers(self.book.names())
        return [self.book.listing("", broker) for broker in self.book.known_brokers()]

    def shared_queues(self, topics: Collection[str]) -> dict[str, list[QueueKey]]:
        """Return the queues of each topic that the members of a group share (`RouteBook.shared_queues`)."""
        self._watch(topics)
        return {topic: self.book.shared_queues(topic) for topic in topics}

    def refresh(self) -> bool:
        """Look at all known topics again. Return whether topics, queues or answers have changed."""
        changed = self._fetch_routes_again(is_away=self._is_any_away) if self._are_routes_due() else False
        return self._look([pair for topic in self._watched for pair in self._pairs(topic)]) or changed

    def warn_of_unlisted_brokers(self) -> None:
        """Warn, once, of brokers in options that no name server lists: their names may be wrong."""
        if not self._own_names:
            return  # no name server has listed its brokers
        named, self._named = self._named, {}
        known = self.book.known_brokers()
        for option, names in named.items():
            unlisted = sorted(set(names) - set(known))
            if unlisted:
                reason = "was removed" if option == "retiredBrokers" else "is away"
                _LOG.warning(
                    "rmq: %s names %s, which no name server lists; they list the brokers %s. Correct the name, unless "
                    "the broker %s",
                    *(option, ", ".join(unlisted), ", ".join(known), reason),
                )

    def _watch(self, topics: Iterable[str]) -> None:
        """Ask all name servers for the routes of topics that were not asked for.

        Raises BackendUnavailableError if none replies, unless the addresses of brokers are known without them.
        """
        new = [topic for topic in dict.fromkeys(topics) if topic not in self._watched]
        if not new:
            return
        for topic in new:
            refuse_light_queue(topic)
        servers = self._client.name_servers()
        # Together with the routes, so that name servers that do not answer cost one deadline and not two.
        lists = [] if self._watched else [(server, ClusterInfoRequest()) for server in servers]
        outcomes = self._client.call_all([*lists, *self._route_calls(new, servers)])
        if lists:
            self._note_brokers(outcomes[: len(lists)])
        try:
            self._note_routes(new, outcomes[len(lists) :], len(servers))
        except BackendUnavailableError:
            if not self._knows_addresses:
                raise
        self._watched.update(dict.fromkeys(new))
        self._note_routes_asked()

    def _note_routes_asked(self) -> None:
        if self._routes_ms is None:
            self._routes_ms = self._monotonic_ms()

    def _are_routes_due(self) -> bool:
        if self._routes_ms is None:
            return False  # nothing was asked for yet
        age_ms = self._monotonic_ms() - self._routes_ms
        is_old = age_ms >= (_AWAY_ROUTES_MS if self._is_any_away else _ROUTES_MS)
        return is_old or (self._needs_routes and age_ms >= _ROUTES_MIN_MS)

    @property
    def _is_any_away(self) -> bool:
        return any(known.is_away for known in self._known.values())

    def _fetch_routes_again(self, *, is_away: bool) -> bool:
        """Ask one name server for all routes, the next one if it does not reply. Return whether a route has changed.

        If a broker `is_away`, begin with another one than last time: a name server may have an old route.
        """
        self._routes_ms, self._needs_routes = self._monotonic_ms(), False
        topics = list(self._watched)
        servers = self._order_name_servers(is_away=is_away)
        for server in servers:
            outcomes = self._ask_for_routes(topics, [server])
            if not any(isinstance(one, BackendUnavailableError) for one in outcomes):
                self._name_server, self._is_deaf = server, False
                changed = self._note_routes(topics, outcomes, 1)
                if any(not self.book.listing(*pair).has_topic for topic in topics for pair in self._pairs(topic)):
                    self._fetch_brokers([server])
                if self._topics is not None:
                    before, self._topics = self._topics, self._list_topics([server])
                    changed = changed or before != self._topics
                return changed
            self._silent[server] = self._client.submit(server, ClusterInfoRequest())
        if not self._is_deaf:
            self._is_deaf = True
            _LOG.warning("rmq: no name server replies (%s); reading goes by the last routes", ", ".join(servers))
        return False

    def _order_name_servers(self, *, is_away: bool) -> list[str]:
        """Return all name servers in the order in which to ask them: at the end those that did not reply before."""
        servers = list(self._client.name_servers())
        if self._name_server in servers:
            begin = servers.index(self._name_server) + is_away
            servers = servers[begin:] + servers[:begin]
        for server, ticket in list(self._silent.items()):
            if ticket.is_answered or server not in servers:
                del self._silent[server]
            elif ticket.is_done:
                self._silent[server] = self._client.submit(server, ClusterInfoRequest())
        return sorted(servers, key=self._silent.__contains__)

    def _ask_for_routes(self, topics: Sequence[str], servers: Sequence[str]) -> list[Any]:
        """Return the outcome for each topic and server, in this order."""
        return self._client.call_all(self._route_calls(topics, servers))

    def _route_calls(self, topics: Sequence[str], servers: Sequence[str]) -> list[tuple[str, RouteRequest]]:
        return [(server, RouteRequest(self.topic_of(topic))) for topic in topics for server in servers]

    def _note_routes(self, topics: Sequence[str], outcomes: Sequence[Any], count: int) -> bool:
        """Note the routes of topics from `count` servers each. Return whether one has changed.

        Raises OptionError for a topic of a kind that cannot be read, and the error of a name server if all had one.
        """
        changed = False
        for number, topic in enumerate(topics):
            found = outcomes[number * count : (number + 1) * count]
            routes = [one for one in found if isinstance(one, RouteResponse)]
            if not routes and not any(isinstance(one, NotFoundError) for one in found):
                raise _worst(found)
            for route in routes:
                refuse_route(topic, route)
            changed = self.book.note_routes(topic, routes) or changed
        self._client.name_brokers(self.book.names())
        return changed

    def _fetch_brokers(self, servers: Sequence[str]) -> None:
        """Ask name servers for all brokers. A proxy does not know this request; then only routes have brokers."""
        self._note_brokers(self._client.call_all([(server, ClusterInfoRequest()) for server in servers]))

    def _note_brokers(self, outcomes: Sequence[Any]) -> None:
        lists = [one for one in outcomes if isinstance(one, ClusterInfoResponse)]
        self.book.note_brokers([one.brokers for one in lists])
        self._own_names |= {name for one in lists for name in (*one.clusters, *one.brokers)}

    def _list_topics(self, servers: Sequence[str]) -> list[str]:
        outcomes = self._client.call_all([(server, TopicListRequest()) for server in servers])
        lists = [one.topics for one in outcomes if isinstance(one, TopicListResponse)]
        if not lists:
            if self._topics is not None:
                return self._topics  # as of the last time that a name server replied
            raise _worst(outcomes)
        if not self._own_names:
            self._fetch_brokers(servers)
        names = {name for topics in lists for name in topics} - self._own_names
        space = self._namespace
        return sorted(
            unwrap_name(space, name) for name in names if is_in_namespace(space, name) or is_shared_name(name)
        )

    # Brokers.

    def answers(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueAnswer]:
        """Return the answer for each queue, as of the last look. A queue that was not looked at is looked at now."""
        self._watch({queue.topic for queue in queues})
        unknown: dict[_Pair, None] = {}
        for queue in queues:
            pair = queue.topic, queue.broker
            known = self._known.get(pair)
            if pair in self._looked and known is not None and queue.queue_id in known.answers:
                continue
            self.book.expect(*pair)
            self._known_of(pair).expect(queue.queue_id)
            unknown[pair] = None
        if unknown:
            self._look(list(unknown))
        return {queue: self._known[queue.topic, queue.broker].answers[queue.queue_id] for queue in queues}

    def find_address(self, topic: str, broker: str, *, renews: bool) -> str:
        """Return where to pull from a broker. If `renews`, ask for routes again, at most once a second.

        Raises BackendUnavailableError if no master of the broker was ever listed, or only slaves are listed now.
        """
        self._watch([topic])
        if renews and (self._routes_ms is None or self._monotonic_ms() - self._routes_ms >= _ROUTES_MIN_MS):
            self._fetch_routes_again(is_away=True)
        listing = self.book.listing(topic, broker)
        if listing.address is None or not listing.has_master:
            raise BackendUnavailableError(f"cannot pull from broker {broker}: {describe_missing(listing)}.")
        return listing.address

    def is_missing(self, queue: QueueKey) -> bool:
        """Return whether the broker of a queue replied, and said that the queue does not exist."""
        known = self._known.get((queue.topic, queue.broker))
        return known is not None and known.is_missing(queue.queue_id)

    def is_deleted(self, topic: str) -> bool:
        """Return whether a topic was deleted: all brokers that have had it replied that its queues do not exist."""
        queues = self.book.queues(topic)
        return all(self.is_missing(queue) for queue in queues) if queues else not self.book.has_route(topic)

    def note_read(self, queue: QueueKey, offset: int, proof: RecordProof) -> None:
        """Remember a record, to recognise the queue by it when its broker comes back."""
        self._known_of((queue.topic, queue.broker)).note_read(queue.queue_id, offset, proof)

    def note_earlier_read(self, queue: QueueKey, offset: int, proof: RecordProof) -> None:
        """Remember a record that an earlier run of the query has read, and compare it at the next look."""
        self._known_of((queue.topic, queue.broker)).note_earlier_read(queue.queue_id, offset, proof)

    def note_expired(self, queue: QueueKey, first: int) -> None:
        """Remember that no message of a queue below the queue offset `first` exists."""
        self._known_of((queue.topic, queue.broker)).note_expired(queue.queue_id, first, self._now_ms())

    def look_again(self, queue: QueueKey, *, is_urgent: bool = False) -> QueueAnswer:
        """Ask for the bounds of a queue again, and return its answer.

        If it `is_urgent`, wait for a broker that did not reply the last time as long as for any other.
        """
        self._look([(queue.topic, queue.broker)], is_urgent=is_urgent)
        return self.answers([queue])[queue]

    def is_doubtful(self, queue: QueueKey) -> bool:
        """Return whether a record that was noted must be compared after a read of a queue.

        It is the record of the queue, or if none was noted, those of the other queues of the topic on the broker. It
        must be compared if it was not compared yet, or if the broker has another connection since it replied with the
        topic's bounds. False if no record was noted.
        """
        pair = queue.topic, queue.broker
        known = self._known.get(pair)
        if known is None or not known.has_read:
            return False
        address = self.book.address(queue.broker) or ""
        is_same = self._connections.get(pair) == (address, self._client.connection_number(address))
        return known.must_compare(queue.queue_id) or not is_same

    def compare_again(self, queue: QueueKey) -> None:
        """Compare the record that `is_doubtful` is about with the broker's at the next look."""
        self._known_of((queue.topic, queue.broker)).doubt(queue.queue_id)

    def _pairs(self, topic: str) -> list[_Pair]:
        return [(topic, broker) for broker in self.book.brokers(topic)]

    def _known_of(self, pair: _Pair) -> TopicOnBroker:
        if pair not in self._known:
            self._known[pair] = TopicOnBroker(*pair)
        return self._known[pair]

    def _look(self, pairs: Sequence[_Pair], *, is_urgent: bool = False) -> bool:
        """Ask brokers for the bounds of topics. Return whether an answer has changed."""
        before = {pair: self._known_of(pair).answers for pair in pairs}
        listings = {pair: self.book.listing(*pair) for pair in pairs}
        questions = {}
        for pair, listing in listings.items():
            known = self._known[pair]
            ids = sorted({*range(listing.read_count), *known.queue_ids})
            questions[pair] = BoundsQuestion(self.topic_of(pair[0]), listing, ids, known.is_away and not is_urgent)
        replies = self._requests.ask(questions.values(), self._now_ms())
        now_ms = self._now_ms()
        for pair, question in questions.items():
            reply = replies.get(question.key) or self._replies.get(pair)
            if reply is None or (question.key not in replies and not isinstance(reply, Silent)):
                reply = Silent("no reply yet")  # an older reply says nothing about this time
            self._replies[pair] = reply
            if isinstance(reply, Silent | NoTopic) and not self._known[pair].is_away:
                self._needs_routes = True
            if isinstance(reply, Found):
                self._note_connection(pair, listings[pair].address or "")
            self._known[pair].look(listings[pair], reply, now_ms)
        self._check_settings([pair for pair in pairs if isinstance(self._replies[pair], Found)])
        self._looked.update(pairs)
        self._compare_records(pairs)
        self._find_first_records(pairs)
        return any(
            self._known[pair].answers is not answers and self._known[pair].answers != answers
            for pair, answers in before.items()
        )

    def _note_connection(self, pair: _Pair, address: str) -> None:
        """Note on which connection a broker replied. On another one than before it may have another store."""
        before = self._connections.get(pair)
        self._connections[pair] = now = address, self._client.connection_number(address)
        if before not in (None, now):
            self._known[pair].note_new_connection()

    def _check_settings(self, pairs: Sequence[_Pair]) -> None:
        """Raise OptionError for a topic that cannot be read, as its settings show. Only brokers of 5.x have them."""
        new = [pair for pair in pairs if pair not in self._configured]
        calls = [
            (self.book.address(pair[1]) or "", TopicConfigRequest(self.topic_of(pair[0]), pair[1])) for pair in new
        ]
        for pair, outcome in zip(new, self._client.call_all(calls), strict=True):
            if isinstance(outcome, TopicConfigResponse):
                refuse_config(pair[0], outcome.config)
            if not isinstance(outcome, BackendUnavailableError):
                self._configured.add(pair)

    def _compare_records(self, pairs: Sequence[_Pair]) -> None:
        """Compare the last records that were read of queues whose brokers were away."""
        for _ in range(2):  # a record that differs makes the others doubtful
            expected = {
                QueueKey(topic, queue_id, broker): offset
                for topic, broker in pairs
                for queue_id, (offset, _) in self._known[topic, broker].to_compare().items()
            }
            for (queue, offset), look in self.looks.look(expected.items()).items():
                proof = look.proof if look.first == offset else None
                self._known[queue.topic, queue.broker].compared(queue.queue_id, proof, self._now_ms())

    def _find_first_records(self, pairs: Sequence[_Pair]) -> None:
        """Find the first messages of queues whose min offset may name an expired one."""
        doubtful = {
            QueueKey(topic, queue_id, broker): offset
            for topic, broker in pairs
            for queue_id, offset in self._known[topic, broker].to_check().items()
        }
        for (queue, _), look in self.looks.look(doubtful.items()).items():
            known = self._known[queue.topic, queue.broker]
            known.checked(queue.queue_id, look.first, self._now_ms(), is_seen=look.proof is not None)


def _worst(outcomes: Sequence[Any]) -> RmqError:
    """Return the error to raise if all name servers had one: the first that will not pass by itself, or the first."""
    errors: Mapping[bool, RmqError] = {
        isinstance(one, BackendUnavailableError): one for one in reversed(outcomes) if isinstance(one, RmqError)
    }
    return errors[False] if False in errors else errors[True]
