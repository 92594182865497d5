"""What a cluster's answers say about whether a query can read it: findings, and the rights that a query needs.

Pure: `doctor` asks the servers. An outcome is what `ClusterClient.call_all` returns: a response, or an RmqError.
docs/CLUSTER.md has the table of `RIGHTS`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import (
    CheckFilterResponse,
    ClusterInfoResponse,
    QueueData,
    RouteResponse,
    TopicConfigResponse,
    TopicListResponse,
    TopicStatsResponse,
)
from rmq_spark.store.cluster.routes import refuse_config
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
    RmqError,
)
from rmq_spark.store.format.config_json import PERM_READ

_V4_0_0, _V4_9_4, _V5_9_9 = 213, 401, 611  # MQVersion: each release has two numbers, the first one for its snapshot
_CLOCK_MS = 5_000  # a smaller difference between two clocks is not worth a warning
_SHOWN_NAMES = 12


class State(StrEnum):
    """What was found: all is well, a query runs but something is worse than it could be, or a query cannot run."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """One finding: about what, its state, what was found, and what to do next ("" if nothing needs to be done)."""

    what: str
    state: State
    why: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Right:
    """The rights that a feature needs of an account, in both generations of access control."""

    feature: str
    acl_1: str
    acl_2: str

    def __str__(self) -> str:
        if self.acl_2 == _NOTHING_MORE:
            return str(READ)
        return (
            f"{self.acl_2} (ACL 2.0)" if self.acl_1 == _NOTHING_MORE else f"{self.acl_1} (ACL 1.0), {self.acl_2} (2.0)"
        )


_NOTHING_MORE = "nothing more"
READ = Right("read a topic", "topic SUB, group SUB", "topic Sub, group Sub")
BOUNDS = Right("bounds of all queues in one request", _NOTHING_MORE, "topic Get")
TIMES = Right("startingTimestamp, endingTimestamp", _NOTHING_MORE, "topic Get")
KINDS = Right("notice compacted topics and batch queues (5.x)", _NOTHING_MORE, "topic Get")
SQL92 = Right("sql92", _NOTHING_MORE, _NOTHING_MORE)
COMMITTED = Right("committed offsets of a group", _NOTHING_MORE, "topic Sub, group Sub, of that group")
MEMBER = Right(
    "be a member of a group",
    "group SUB, of that group",
    "group Sub and Get, of that group",
)
KEYS = Right("search by key or id", _NOTHING_MORE, _NOTHING_MORE)
PATTERNS = Right("subscribePattern", _NOTHING_MORE, _NOTHING_MORE)
RIGHTS = (READ, BOUNDS, TIMES, KINDS, SQL92, COMMITTED, MEMBER, KEYS, PATTERNS)


def describe_version(number: int) -> str:
    """Return RocketMQ's version with the number that a server sends (MQVersion), such as "5.3.3"."""
    if not _V4_0_0 - 1 <= number <= _V5_9_9:
        return f"version number {number}"
    digits = 400 + (number + 1 - _V4_0_0) // 2
    snapshot = "" if number % 2 else "-SNAPSHOT"
    return f"{digits // 100}.{digits // 10 % 10}.{digits % 10}{snapshot}"


def list_names(names: Collection[str]) -> str:
    """Return the first names of a collection, sorted, as a text."""
    shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


def split_error(error: RmqError) -> tuple[str, str]:
    """Return what an error says was found, and its next step: the sentences after the expectation."""
    text = str(error)
    expected = text.find("; expected ")
    end = text.find(". ", max(expected, 0))
    return (text, "") if end < 0 else (text[: end + 1], text[end + 2 :])


def of_error(what: str, error: RmqError, state: State = State.MISSING) -> ClusterFinding:
    """Return the finding of an error."""
    return ClusterFinding(what, state, *split_error(error))


def _not_supported(outcome: Any) -> bool:
    return isinstance(outcome, BrokerError) and outcome.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@dataclass(frozen=True, slots=True)
class NameServerAnswers:
    """The outcomes of the requests to one name server: all brokers, all topics, and the route of each topic."""

    address: str
    info: Any
    topics: Any
    routes: Mapping[str, Any]

    @property
    def brokers(self) -> Collection[str]:
        """The names of the brokers that it lists."""
        return self.info.brokers.keys() if isinstance(self.info, ClusterInfoResponse) else ()

    @property
    def is_broker(self) -> bool:
        """Whether it does not know routes, as a broker."""
        return bool(self.routes) and all(map(_not_supported, self.routes.values()))

    @property
    def is_proxy(self) -> bool:
        """Whether it knows routes and not the list of brokers, as a proxy."""
        return not self.is_broker and _not_supported(self.info)

    @property
    def is_usable(self) -> bool:
        """Whether a query can ask it for routes."""
        return any(isinstance(one, RouteResponse | NotFoundError) for one in self.routes.values())


def examine_name_servers(servers: Sequence[NameServerAnswers]) -> Iterator[ClusterFinding]:
    """Yield what the answers of all name servers say about them. One of them is enough for a query."""
    failed = State.WARNING if any(one.is_usable for one in servers) else State.MISSING
    for one in servers:
        what = f"name server {one.address}"
        if one.is_broker:
            step = "Set nameServer to the name servers of the cluster (default port 9876)."
            yield ClusterFinding(what, failed, "it does not answer for routes, so it is a broker.", step)
        elif one.is_proxy:
            step = "Nothing, if the proxy is meant; else set nameServer to the name servers (default port 9876)."
            why = "it answers for routes and not for the list of brokers, so it is a proxy: only routes name brokers."
            yield ClusterFinding(what, State.WARNING if one.is_usable else failed, why, step)
        elif not one.is_usable or not isinstance(one.info, ClusterInfoResponse):
            bad = next((each for each in (one.info, *one.routes.values()) if isinstance(each, RmqError)), None)
            assert bad is not None, one
            yield of_error(what, bad, failed)
        elif not one.brokers:
            step = "Check namesrvAddr of the brokers; after a restart of the name server wait 30 s."
            yield ClusterFinding(what, failed, "it lists no broker.", step)
        else:
            version = describe_version(one.info.server_version)
            yield ClusterFinding(what, State.OK, f"RocketMQ {version} lists the brokers {list_names(one.brokers)}.")
            yield _examine_topic_list(what, one)
    yield from _examine_differences(servers)


def _examine_topic_list(what: str, server: NameServerAnswers) -> ClusterFinding:
    what = f"{what}: {PATTERNS.feature}"
    if isinstance(server.topics, TopicListResponse):
        return ClusterFinding(what, State.OK, f"it lists {len(server.topics.topics)} topics.")
    return of_error(what, server.topics, State.WARNING)


def _examine_differences(servers: Sequence[NameServerAnswers]) -> Iterator[ClusterFinding]:
    """Yield the brokers, and the brokers of topics, that only some name servers list."""
    lists = {"brokers": {one.address: frozenset(one.brokers) for one in servers if one.brokers}}
    for topic in dict.fromkeys(topic for one in servers for topic in one.routes):
        lists[f"brokers of topic {topic}"] = {
            one.address: frozenset(data.broker for data in one.routes[topic].queues)
            if isinstance(one.routes[topic], RouteResponse)
            else frozenset()
            for one in servers
            if isinstance(one.routes.get(topic), RouteResponse | NotFoundError)
        }
    for what, listed in lists.items():
        everything = frozenset().union(*listed.values())
        missing = {address: everything - names for address, names in listed.items() if everything - names}
        if missing:
            found = "; ".join(f"{address} does not list {list_names(names)}" for address, names in missing.items())
            step = "Check that namesrvAddr of each broker has all name servers; a broker registers every 30 s."
            yield ClusterFinding(f"name servers: {what}", State.WARNING, f"{found}.", step)


def examine_unknown_topic(
    topic: str, wanted: str, servers: Sequence[NameServerAnswers], namespace: str
) -> ClusterFinding:
    """Return the finding about a topic of which no name server has a route. `wanted` is the cluster's name of it."""
    names = {name for one in servers if isinstance(one.topics, TopicListResponse) for name in one.topics.topics}
    step = "Check the name of the topic (option subscribe); after a restart of name servers or brokers wait 30 s."
    others = sorted(name.partition("%")[0] for name in names if name.endswith(f"%{topic}") and name[0] != "%")
    if namespace and topic in names:
        step = f"The topic {topic} exists without a namespace: leave out namespace={namespace}."
    elif others:
        step = f"The topic exists in the namespace {list_names(others)}: correct the option namespace."
    return ClusterFinding(f"topic {topic}", State.MISSING, f"no name server has a route of the topic {wanted}.", step)


@dataclass(slots=True)
class BrokerAnswers:
    """What is known about one broker: where it was asked, and the outcomes by topic ("": none) and request."""

    name: str
    address: str
    outcomes: dict[tuple[str, RequestCode], Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """The broker, for findings."""
        return f"broker {self.name} at {self.address}"

    def note(self, topic: str, request: Request[Any], outcome: Any) -> None:
        """Note the outcome of a request about a topic."""
        self.outcomes[topic, request.code] = outcome

    @property
    def failure(self) -> RmqError | None:
        """The error that makes all else about the broker meaningless: it is away, or refuses the account."""
        for kind in (BackendUnavailableError, OptionError):
            for one in self.outcomes.values():
                if isinstance(one, kind):
                    return one
        return None

    @property
    def stats(self) -> list[TopicStatsResponse]:
        """The answers with bounds."""
        return [one for one in self.outcomes.values() if isinstance(one, TopicStatsResponse)]


def examine_broker(broker: BrokerAnswers, now_ms: int) -> Iterator[ClusterFinding]:
    """Yield what the answers of a broker say about itself."""
    if broker.failure is not None:
        yield of_error(broker.what, broker.failure)
        return
    others = {queue.broker for one in broker.stats for queue in one.queues} - {broker.name}
    if others:
        step = f"Correct the option brokerAddresses={broker.name}=host:port, or brokerIP1 of the broker."
        yield ClusterFinding(
            broker.what, State.MISSING, f"the broker {list_names(others)} answers at this address.", step
        )
        return
    versions = {one.server_version for one in broker.stats}
    if any(number < _V4_9_4 for number in versions):
        why = f"it is RocketMQ {describe_version(min(versions))}; expected 4.9.4 or later."
        yield ClusterFinding(
            broker.what, State.WARNING, why, "Upgrade the broker, or compare what is read with its own client."
        )
    else:
        version = f" as RocketMQ {describe_version(min(versions))}" if versions else ""
        yield ClusterFinding(broker.what, State.OK, f"it answers{version}.")
    newest_ms = max((each.last_update_ms for one in broker.stats for each in one.queues.values()), default=0)
    if newest_ms > now_ms + _CLOCK_MS:
        why = f"its newest message was stored {(newest_ms - now_ms) / 1000:.0f} s ahead of this machine's clock."
        step = "Set the clocks of both machines, or give absolute times in startingTimestamp."
        yield ClusterFinding(f"{broker.what}: clock", State.WARNING, why, step)


def examine_topic(
    broker: BrokerAnswers, topic: str, data: QueueData, groups: tuple[str, str | None]
) -> Iterator[ClusterFinding]:
    """Yield what the answers of a broker say about reading a topic.

    `data` is what the route says. `groups` are the group that pulls, and the one with committed offsets or None.
    """
    what = f"topic {topic} on {broker.name}"
    if not data.perm & PERM_READ:
        why = f"it has no read permission (perm={data.perm})."
        step = f"Let an administrator allow reading (mqadmin updateTopicPerm -t {topic} -p 6)."
        yield ClusterFinding(what, State.MISSING, why, step)
        return

    def outcome(code: RequestCode) -> Any:  # None if it was not asked for
        return broker.outcomes.get((topic, code))

    config = outcome(RequestCode.GET_TOPIC_CONFIG)
    if isinstance(config, TopicConfigResponse):
        try:
            refuse_config(topic, config.config)
        except OptionError as error:
            yield of_error(what, error)
            return
    yield _examine_reading(what, broker, topic, data, groups[0])
    yield from _examine_queues(what, data, outcome(RequestCode.GET_TOPIC_STATS_INFO))
    features = [
        (BOUNDS, RequestCode.GET_TOPIC_STATS_INFO, "the source pulls one message of each queue to learn its bounds"),
        (TIMES, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, "the source finds times by pulls, which takes longer"),
        (KEYS, RequestCode.QUERY_MESSAGE, "messages cannot be found by key"),
        (SQL92, RequestCode.CHECK_CLIENT_CONFIG, "the source receives all messages and filters them itself"),
        (COMMITTED, RequestCode.QUERY_CONSUMER_OFFSET, f"the offsets of the group {groups[1]} cannot be used"),
        (MEMBER, RequestCode.GET_CONSUMER_CONNECTION_LIST, f"a stream cannot join the group {groups[1]}"),
    ]
    for right, code, effect in features:
        if outcome(code) is not None:
            yield examine_feature(f"{what}: {right.feature}", right, outcome(code), effect)
    if isinstance(config, NoPermissionError):
        effect = "a topic of such a kind would be read wrongly"
        yield examine_feature(f"{what}: {KINDS.feature}", KINDS, config, effect)


def examine_feature(what: str, right: Right, outcome: Any, effect: str) -> ClusterFinding:
    """Return the finding about a feature without which a query can run. `effect` is what happens without it."""
    if isinstance(outcome, NoPermissionError):
        step = f"Ask an administrator for the right: {right}."
        return ClusterFinding(what, State.WARNING, f"the account lacks the right; {effect}.", step)
    if isinstance(outcome, CheckFilterResponse) and not outcome.is_supported:
        why = f"the broker does not evaluate SQL92 (enablePropertyFilter=false); {effect}."
        return ClusterFinding(what, State.WARNING, why, "Set enablePropertyFilter=true at the broker.")
    if isinstance(outcome, RmqError):
        return of_error(what, outcome, State.WARNING)
    return ClusterFinding(what, State.OK, "the broker answers it.")


def _examine_reading(what: str, broker: BrokerAnswers, topic: str, data: QueueData, group: str) -> ClusterFinding:
    """Return the finding about pulling. The rights are tried by requests that add no group to the broker's list."""
    what = f"{what}: {READ.feature}"
    for code in (RequestCode.QUERY_MESSAGE, RequestCode.GET_CONSUMER_LIST_BY_GROUP):
        if isinstance(broker.outcomes.get((topic, code)), NoPermissionError):
            of = f"the group {group}" if code is RequestCode.GET_CONSUMER_LIST_BY_GROUP else f"the topic {topic}"
            step = f"Ask an administrator for the rights: {READ}. The group is {group} (option pullGroup)."
            return ClusterFinding(what, State.MISSING, f"the account lacks the right to subscribe to {of}.", step)
    for code in (RequestCode.GET_TOPIC_STATS_INFO, RequestCode.PULL_MESSAGE):
        found = broker.outcomes.get((topic, code))
        is_refused = code is RequestCode.PULL_MESSAGE and isinstance(found, NoPermissionError)
        is_wrong = isinstance(found, NotFoundError | BrokerError) and not _not_supported(found)
        if isinstance(found, RmqError) and (is_refused or is_wrong):
            return of_error(what, found)
    why = (
        f"{data.read_queue_count} queues; a query pulls in the name of the group {group}. Whether the broker has this "
        "group, or creates it, was not tried."
    )
    return ClusterFinding(what, State.OK, why)


def _examine_queues(what: str, data: QueueData, stats: Any) -> Iterator[ClusterFinding]:
    """Yield the queues that have messages, or get them, and cannot be read."""
    if data.write_queue_count > data.read_queue_count:
        hidden = 0
        if isinstance(stats, TopicStatsResponse):
            beyond = (one for queue, one in stats.queues.items() if queue.queue_id >= data.read_queue_count)
            hidden = sum(one.max_offset - one.min_offset for one in beyond)
        why = (
            f"readQueueNums={data.read_queue_count} is less than writeQueueNums={data.write_queue_count}: messages of "
            f"the queues from {data.read_queue_count} on are not read ({hidden} messages at present)."
        )
        step = "Raise readQueueNums (mqadmin updateTopic -r), unless the topic is being made smaller."
        yield ClusterFinding(f"{what}: queues", State.WARNING, why, step)
