"""What an administrator sees of a cluster: its brokers, the route of a topic, and the rates of topics and groups.

| function | asks |
| --- | --- |
| `list_brokers` | all name servers for their brokers, and each master and slave for its state |
| `list_routes` | all name servers for the route of a topic |
| `list_rates` | the masters of each topic for its groups, and for what they have counted |

Name servers do not know each other, so their answers are joined. A server that does not answer is named in a row.

Source: ClusterListSubCommand, TopicRouteSubCommand, StatsAllSubCommand (4.9, 5.3).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.group_requests import GroupStatsRequest
from rmq_spark.store.cluster.namespace import unwrap_name
from rmq_spark.store.cluster.requests import ClusterInfoRequest, RouteRequest
from rmq_spark.store.cluster.responses import (
    BrokerData,
    ClusterInfoResponse,
    GroupStatsResponse,
    RouteResponse,
)
from rmq_spark.store.cluster.routes import MASTER_ID, join_brokers, join_queues
from rmq_spark.store.cluster.statistics_requests import (
    GROUP_GET_NUMS,
    TOPIC_PUT_NUMS,
    TOPIC_PUT_SIZE,
    BrokerRuntimeRequest,
    BrokerRuntimeResponse,
    StatisticRequest,
    StatisticResponse,
    TopicGroupsRequest,
    TopicGroupsResponse,
)
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, OptionError, RmqError
from rmq_spark.store.names import check_topic_name

_LAST_MS = 253_402_300_800_000  # the year 10000: a broker without messages tells a time after it
# The names of the rate of messages that were pulled: that of 5.x, and that of 4.9.
_PULL_RATES = ("getTransferredTps", "getTransferedTps")
_VERSION_NAME = re.compile(r"V(\d+)_(\d+)_(\d+)(_SNAPSHOT)?")  # of a constant of MQVersion


class BrokerState(NamedTuple):
    """One master (`broker_id` 0) or slave, as it answered. Values that are not known are None.

    Rates are messages per second in the last 10 s. `in_today` and `out_today` count since midnight. `disk_used` is the
    used share of the commit log's disk, from 0 to 1. `version` is such as "5.3.3". `earliest_ms` is the store time of
    the first message and `boot_ms` the time of the broker's start, both in ms since the epoch. `problem` is why the
    broker did not answer.
    """

    cluster: str
    broker: str
    broker_id: int
    address: str
    version: str | None = None
    in_rate: float | None = None
    out_rate: float | None = None
    in_today: int | None = None
    out_today: int | None = None
    disk_used: float | None = None
    earliest_ms: int | None = None
    boot_ms: int | None = None
    is_active: bool | None = None
    problem: str | None = None


class RouteEntry(NamedTuple):
    """The queues of a topic on one broker. `perm` is a sum of the constants PERM_* of `config_json`.

    `master` is None while no master is listed. `slaves` are the addresses of slaves by their ids.
    """

    topic: str
    broker: str
    cluster: str
    perm: int
    read_queues: int
    write_queues: int
    master: str | None
    slaves: Mapping[int, str]


class TopicRate(NamedTuple):
    """What the masters have counted of a topic, and of one group in it, or of no group.

    Rates are those of the last minute. `in_day` and `out_day` are messages of the last day. `lag` is the number of
    messages that the group has not consumed, without regard to what has expired. `problem` is why the topic, or one of
    its masters, is not counted. The numbers are those of the other masters, and None if there are none.
    """

    topic: str
    group: str | None
    in_rate: float | None = None
    in_bytes_rate: float | None = None
    in_day: int | None = None
    out_rate: float | None = None
    out_day: int | None = None
    lag: int | None = None
    problem: str | None = None


def list_brokers(backend: ClusterBackend) -> list[BrokerState]:
    """Return all brokers that name servers list, sorted by cluster, name and id.

    One that does not answer has a problem. Raises BackendUnavailableError if no name server answers, and
    NoPermissionError if all brokers refuse.
    """
    client = backend.client
    outcomes = client.call_all([(to, ClusterInfoRequest()) for to in client.name_servers()])
    lists = _require_some(outcomes, ClusterInfoResponse)
    brokers = join_brokers(one.brokers.values() for one in lists)
    overrides = dict(client.address.broker_addresses)
    listed = [
        (data.cluster, name, number, overrides.get(name, at) if number == MASTER_ID else at)
        for name, data in brokers.items()
        for number, at in data.addresses.items()
    ]
    listed.sort()
    client.name_brokers({address: name for _, name, number, address in listed if number == MASTER_ID})
    outcomes = client.call_all([(address, BrokerRuntimeRequest(name)) for _, name, _, address in listed])
    errors = [one for one in outcomes if isinstance(one, RmqError)]
    if errors and len(errors) == len(outcomes) and not any(isinstance(e, BackendUnavailableError) for e in errors):
        raise errors[0]
    return [_broker_state(*place, outcome) for place, outcome in zip(listed, outcomes, strict=True)]


def _broker_state(cluster: str, broker: str, broker_id: int, address: str, outcome: Any) -> BrokerState:
    if not isinstance(outcome, BrokerRuntimeResponse):
        return BrokerState(cluster, broker, broker_id, address, problem=str(outcome))
    values = outcome.values
    return BrokerState(
        cluster,
        broker,
        broker_id,
        address,
        _version(values.get("brokerVersionDesc")),
        _first_rate(values, "putTps"),
        next((rate for name in _PULL_RATES if (rate := _first_rate(values, name)) is not None), None),
        _difference(values, "msgPutTotalTodayNow", "msgPutTotalTodayMorning"),
        _difference(values, "msgGetTotalTodayNow", "msgGetTotalTodayMorning"),
        _number(values.get("commitLogDiskRatio")),
        _time(values.get("earliestMessageTimeStamp")),
        _time(values.get("bootTimestamp")),
        {"true": True, "false": False}.get(values.get("brokerActive", "")),
    )


def _version(name: str | None) -> str | None:
    """Return a version as `describe_version` spells it, from its name in MQVersion, such as V5_3_3."""
    found = None if name is None else _VERSION_NAME.fullmatch(name)
    return name if found is None else f"{found[1]}.{found[2]}.{found[3]}{'-SNAPSHOT' if found[4] else ''}"


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _first_rate(values: Mapping[str, str], name: str) -> float | None:
    """Return the rate of the last 10 s from a text with the rates of 10 s, 1 min and 10 min.

    None if the broker started less than 10 s ago: then the first of them is empty.
    """
    return _number(values.get(name, "").split(" ")[0])


def _difference(values: Mapping[str, str], now: str, before: str) -> int | None:
    one, other = _number(values.get(now)), _number(values.get(before))
    return None if one is None or other is None else round(one - other)


def _time(text: str | None) -> int | None:
    time_ms = _number(text)
    return round(time_ms) if time_ms is not None and 0 < time_ms < _LAST_MS else None


def list_routes(backend: ClusterBackend, topic: str) -> list[RouteEntry]:
    """Return the queues of a topic by broker, as the name servers list them now.

    Raises NotFoundError if none lists the topic, and BackendUnavailableError if none answers.
    """
    found = _read_routes(backend, [topic])[topic]
    if isinstance(found, RmqError):
        raise found
    return found


def _read_routes(backend: ClusterBackend, topics: Sequence[str]) -> dict[str, list[RouteEntry] | RmqError]:
    """Return the queues of each topic by broker, or the error of a topic, by requests that are sent together."""
    servers = backend.client.name_servers()
    found: dict[str, list[RouteEntry] | RmqError] = {}
    requests: dict[str, RouteRequest] = {}
    for topic in topics:
        try:
            requests[topic] = RouteRequest(backend.catalog.topic_of(check_topic_name(topic)))
        except OptionError as error:
            found[topic] = error
    outcomes = iter(backend.client.call_all([(to, request) for request in requests.values() for to in servers]))
    for topic in requests:
        try:
            routes = _require_some([next(outcomes) for _ in servers], RouteResponse)
        except RmqError as error:
            found[topic] = error
        else:
            found[topic] = _join_routes(topic, routes)
    return found


def _join_routes(topic: str, routes: Sequence[RouteResponse]) -> list[RouteEntry]:
    brokers = join_brokers(route.brokers for route in routes)
    entries = []
    for name, one in sorted(join_queues(routes).items()):
        data = brokers.get(name, BrokerData(name, "", {}))
        slaves = {number: at for number, at in data.addresses.items() if number != MASTER_ID}
        master = data.addresses.get(MASTER_ID)
        counts = one.perm, one.read_queue_count, one.write_queue_count
        entries.append(RouteEntry(topic, name, data.cluster, *counts, master, slaves))
    return entries


@dataclass(slots=True)
class _Counted:
    """What the masters have told about one topic so far. `masters` are the addresses of those that answer, by name."""

    topic: str
    masters: dict[str, str] = field(default_factory=dict)
    errors: dict[str, RmqError] = field(default_factory=dict)  # by broker; "" is the topic as a whole
    sums: dict[tuple[str, str], StatisticResponse] = field(default_factory=dict)  # by statistic and its key
    groups: set[str] = field(default_factory=set)
    lags: dict[str, int] = field(default_factory=dict)

    def add_groups(self, one: TopicGroupsResponse) -> None:
        """Add the groups that one master knows."""
        self.groups.update(one.groups)

    def add(self, kind: tuple[str, str], one: StatisticResponse) -> None:
        """Add the numbers of one master."""
        known = self.sums.get(kind, StatisticResponse())
        self.sums[kind] = StatisticResponse(known.per_second + one.per_second, known.day_sum + one.day_sum)

    def add_lag(self, group: str, one: GroupStatsResponse) -> None:
        """Add the unread messages of the queues of one master."""
        for queue in one.queues.values():
            unread = max(queue.broker_offset - max(queue.consumer_offset, 0), 0)
            self.lags[group] = self.lags.get(group, 0) + unread

    def rates(self, stored: str, namespace: str) -> "list[TopicRate]":
        """Return the rows of the topic, whose name in the cluster is `stored`."""
        problem = "; ".join(map(str, self.errors.values())) or None
        if not self.masters:
            return [TopicRate(self.topic, None, problem=problem)]
        put, size = (self.sums.get((one, stored), StatisticResponse()) for one in (TOPIC_PUT_NUMS, TOPIC_PUT_SIZE))
        incoming = put.per_second, size.per_second, put.day_sum
        if not self.groups:
            return [TopicRate(self.topic, None, *incoming, problem=problem)]
        rows = []
        for group in sorted(self.groups):
            out = self.sums.get((GROUP_GET_NUMS, f"{stored}@{group}"), StatisticResponse())
            outgoing = out.per_second, out.day_sum, self.lags.get(group)
            rows.append(TopicRate(self.topic, unwrap_name(namespace, group), *incoming, *outgoing, problem))
        return rows


class _Call(NamedTuple):
    """A request to a master about a topic, and what takes its answer."""

    of: _Counted
    broker: str
    request: Any
    take: Callable[[Any], None]


def list_rates(backend: ClusterBackend, topics: Sequence[str]) -> list[TopicRate]:
    """Return the rates of topics and of the groups in each of them, sorted. A topic without groups has one row.

    A topic that is not known, or of which a master does not answer, has a problem. Raises the error of the first topic
    if no master answers for any topic.
    """
    stored = {topic: backend.catalog.topic_of(topic) for topic in topics}
    counted = [_begin_count(backend, topic, routes) for topic, routes in _read_routes(backend, topics).items()]
    backend.client.name_brokers({address: name for one in counted for name, address in one.masters.items()})
    calls = [
        _Call(one, name, TopicGroupsRequest(stored[one.topic], name), one.add_groups)
        for one in counted
        for name in one.masters
    ]
    _ask(backend, calls)
    _ask(backend, [call for one in counted for name in one.masters for call in _calls(one, name, stored[one.topic])])
    if counted and not any(one.masters for one in counted):
        raise next(error for one in counted for error in one.errors.values())
    return [row for one in counted for row in one.rates(stored[one.topic], backend.client.address.namespace)]


def _begin_count(backend: ClusterBackend, topic: str, routes: list[RouteEntry] | RmqError) -> _Counted:
    """Return a topic with its masters, before any of them is asked."""
    found = _Counted(topic)
    if isinstance(routes, RmqError):
        found.errors[""] = routes
        return found
    overrides = dict(backend.client.address.broker_addresses)
    for entry in routes:
        address = overrides.get(entry.broker, entry.master)
        if address is None:
            found.errors[entry.broker] = BackendUnavailableError(
                f"broker {entry.broker} is not counted: no name server lists its master; expected an address. Check "
                "whether the master runs."
            )
        else:
            found.masters[entry.broker] = address
    return found


def _calls(one: _Counted, broker: str, stored: str) -> Iterator[_Call]:
    """Yield the requests to a master for the numbers of a topic and its groups."""
    kinds = [(TOPIC_PUT_NUMS, stored), (TOPIC_PUT_SIZE, stored)]
    kinds += [(GROUP_GET_NUMS, f"{stored}@{group}") for group in sorted(one.groups)]
    for kind in kinds:
        yield _Call(one, broker, StatisticRequest(*kind, broker), partial(one.add, kind))
    for group in sorted(one.groups):
        yield _Call(one, broker, GroupStatsRequest(group, broker, stored), partial(one.add_lag, group))


def _ask(backend: ClusterBackend, calls: Sequence[_Call]) -> None:
    """Send requests together, and take their answers. A master that does not answer is not asked about the topic again.

    A group without offsets at a master is not an error.
    """
    outcomes = backend.client.call_all([(call.of.masters[call.broker], call.request) for call in calls])
    for call, outcome in zip(calls, outcomes, strict=True):
        if not isinstance(outcome, RmqError):
            call.take(outcome)
        elif not (isinstance(call.request, GroupStatsRequest) and isinstance(outcome, NotFoundError)):
            call.of.errors.setdefault(call.broker, outcome)
            call.of.masters.pop(call.broker, None)


def _require_some(outcomes: Sequence[Any], kind: type[Any]) -> list[Any]:
    """Return the answers of the name servers that gave one. Raises an error if none did, a refusal before a silence."""
    found = [one for one in outcomes if isinstance(one, kind)]
    if not found:
        raise min(outcomes, key=lambda one: isinstance(one, BackendUnavailableError))
    return found
