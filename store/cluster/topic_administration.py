"""Topics of a cluster that an administrator creates, alters and deletes.

Each master has settings of its own for a topic, and tells the name servers about them. So every change is sent to each
master, after all of them have been asked what they have. An older broker (4.9) does not tell the settings of a topic;
then they are those of the topic's route.

A topic is deleted at the masters first, and at the name servers when all masters have deleted it, because a master that
still has the topic registers it again within 30 s.

Source: UpdateTopicSubCommand, DeleteTopicSubCommand, AdminBrokerProcessor#updateAndCreateTopic, #deleteTopic (4.9,
5.3).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.requests import (
    ClusterInfoRequest,
    CreateTopicRequest,
    DeleteRouteRequest,
    DeleteTopicRequest,
    Request,
    RouteRequest,
    TopicConfigRequest,
    TopicStatsRequest,
)
from rmq_spark.store.cluster.responses import (
    ClusterInfoResponse,
    DoneResponse,
    QueueData,
    RouteResponse,
    TopicConfigResponse,
    TopicStatsResponse,
)
from rmq_spark.store.cluster.routes import MASTER_ID, join_brokers, join_queues
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, NotFoundError, OptionError, RmqError
from rmq_spark.store.format.config_json import PERM_INHERIT, PERM_READ, PERM_WRITE, TopicConfig
from rmq_spark.store.names import (
    DLQ_TOPIC_PREFIX,
    MAX_QUEUES,
    RETRY_TOPIC_PREFIX,
    SINK_TOPICS,
    check_sent_topic,
    check_topic_name,
    is_system_topic,
)

_NEW_QUEUES = 4  # of a topic that is created without a number


@dataclass(frozen=True, slots=True)
class TopicChanges:
    """The settings of a topic that are given. The others keep their values, or have those of a new topic.

    `perm` is a sum of 4 (read), 2 (write) and 1 (PERM_INHERIT of `config_json`). `attributes` are those of brokers of
    5.x, such as message.type. Brokers check none of the numbers, so OptionError is raised for impossible ones. As in
    RocketMQ, 0 is possible: it closes the topic for readers or writers.
    """

    read_queues: int | None = None
    write_queues: int | None = None
    perm: int | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, count in (("read_queues", self.read_queues), ("write_queues", self.write_queues)):
            if count is not None:
                check_setting(name, count, 0, MAX_QUEUES)
        if self.perm is not None:
            check_setting("perm", self.perm, 0, PERM_READ | PERM_WRITE | PERM_INHERIT)

    def apply(self, known: TopicConfig) -> TopicConfig:
        """Return the settings after the changes. Its attributes are only those that are given."""
        return replace(
            known,
            read_queue_count=known.read_queue_count if self.read_queues is None else self.read_queues,
            write_queue_count=known.write_queue_count if self.write_queues is None else self.write_queues,
            perm=known.perm if self.perm is None else self.perm,
            attributes=dict(self.attributes),
        )


class ChangedTopic(NamedTuple):
    """A topic on one broker. `before` is None if it was created, and equal to `after` if nothing was changed."""

    broker: str
    before: TopicConfig | None
    after: TopicConfig


class DeletedTopic(NamedTuple):
    """Where a topic was deleted: names of brokers, and addresses of name servers. `away` are brokers without a master.

    Such a broker registers the topic again when it is back.
    """

    topic: str
    brokers: tuple[str, ...]
    name_servers: tuple[str, ...]
    away: tuple[str, ...]


def create_topic(
    backend: ClusterBackend,
    topic: str,
    changes: TopicChanges,
    *,
    cluster: str | None = None,
    brokers: Collection[str] = (),
    alters: bool = False,
) -> list[ChangedTopic]:
    """Create a topic on each master that lacks it, and if it `alters`, change it where it exists. Return what was done.

    `cluster` and `brokers` name the masters. By default they are all. Raises OptionError for a name that only RocketMQ
    uses, for a static topic and for attributes that a broker does not know, NotFoundError for an unknown cluster or
    broker, BackendUnavailableError if a server does not answer, and NoPermissionError if the account lacks a right.
    If a later master fails, the earlier ones have the topic; repeat the call.
    """
    check_sent_topic(topic)
    _refuse_system(topic, "created or altered")
    masters = _choose(_find_masters(backend, f"create topic {topic}"), cluster, brokers)
    before = _read_settings(backend, topic, masters)
    if changes.attributes and (older := [name for name, one in before.items() if one.is_older]):
        raise OptionError(
            f"topic {topic} cannot have attributes on broker {older[0]}: it has RocketMQ 4.9; expected 5.x. Leave the "
            "attributes out, or name other brokers."
        )
    new = TopicConfig(backend.catalog.topic_of(topic), _NEW_QUEUES, _NEW_QUEUES)
    done, calls = [], []
    for name, address in masters.items():
        known = before[name].config
        if known is not None and not alters:
            done.append(ChangedTopic(name, known, known))
            continue
        wanted = changes.apply(new if known is None else known)
        calls.append((address, CreateTopicRequest(wanted)))
        shown = replace(wanted, attributes={**(known.attributes if known else {}), **wanted.attributes})
        done.append(ChangedTopic(name, known, shown))
    _send(backend, calls, f"topic {topic} was not created or altered on every broker")
    return done


def delete_topic(backend: ClusterBackend, topic: str) -> DeletedTopic:
    """Delete a topic from all masters, and then its route from all name servers.

    Its messages are removed by the brokers. The offsets of groups are removed with it. Raises OptionError for an
    invalid name and for a topic that only RocketMQ uses, NotFoundError if no name server lists the topic,
    BackendUnavailableError if a server does not answer, and NoPermissionError if the account lacks a right. Repeat the
    call after such an error.
    """
    _refuse_system(check_topic_name(topic), "deleted")
    stored, client = backend.catalog.topic_of(topic), backend.client
    servers = client.name_servers()
    masters = _find_masters(backend, f"delete topic {topic}")
    listed = _find_routes(backend, stored)
    if not listed:
        raise NotFoundError(
            f"topic {topic} cannot be deleted: no name server lists it; expected a topic of the cluster. Check its "
            "name with `rmq topics --all`."
        )
    _send(
        backend,
        [(master.address, DeleteTopicRequest(stored)) for master in masters.values()],
        f"topic {topic} was not deleted from every broker, so the name servers keep its route",
    )
    _send(
        backend,
        [(server, DeleteRouteRequest(stored)) for server in servers],
        f"the route of topic {topic} was not deleted from every name server",
    )
    away = tuple(sorted(listed.keys() - masters.keys()))
    return DeletedTopic(topic, tuple(sorted(listed.keys() & masters.keys())), servers, away)


class _Known(NamedTuple):
    """What a broker has of a topic: its settings or None. A broker that `is_older` does not tell them."""

    config: TopicConfig | None
    is_older: bool


def _read_settings(backend: ClusterBackend, topic: str, masters: Mapping[str, str]) -> dict[str, _Known]:
    """Return what each master has of a topic. Raises OptionError for a static topic."""
    stored, client = backend.catalog.topic_of(topic), backend.client
    outcomes = client.call_all([(to, TopicConfigRequest(stored, name)) for name, to in masters.items()])
    found: dict[str, _Known] = {}
    older: dict[str, str] = {}
    for (name, to), one in zip(masters.items(), outcomes, strict=True):
        if isinstance(one, TopicConfigResponse):
            found[name] = _Known(replace(one.config, name=stored), False)
        elif isinstance(one, NotFoundError):
            found[name] = _Known(None, False)
        elif isinstance(one, BrokerError) and one.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            older[name] = to
        else:
            raise one
    routes = _find_routes(backend, stored)
    stats = client.call_all([(to, TopicStatsRequest(stored, name)) for name, to in older.items()])
    for name, one in zip(older, stats, strict=True):
        if isinstance(one, TopicStatsResponse):
            found[name] = _Known(_config_of(stored, routes.get(name), one), True)
        elif isinstance(one, NotFoundError):
            found[name] = _Known(None, True)
        else:
            raise one
    return found


def _config_of(stored: str, listed: "_Listed | None", stats: TopicStatsResponse) -> TopicConfig:
    """Return the settings of a topic as its route has them. Without a route its queues are counted."""
    if listed is None:
        return TopicConfig(stored, len(stats.queues), len(stats.queues))
    one = listed.queues
    counts = one.read_queue_count, one.write_queue_count
    return TopicConfig(stored, *counts, one.perm, listed.is_ordered, topic_sys_flag=one.topic_sys_flag)


class _Listed(NamedTuple):
    """The queues of a topic on one broker, as a name server lists them."""

    queues: QueueData
    is_ordered: bool


def _find_routes(backend: ClusterBackend, stored: str) -> dict[str, _Listed]:
    """Return the queues of a topic by broker, as all name servers list them. Raises OptionError for a static topic."""
    request = RouteRequest(stored)
    outcomes = backend.client.call_all([(server, request) for server in backend.client.name_servers()])
    routes: list[RouteResponse] = []
    for one in outcomes:
        if isinstance(one, NotFoundError):
            continue
        if not isinstance(one, RouteResponse):
            raise one
        if one.is_static:
            raise OptionError(
                f"topic {stored} is a static topic, whose queues move between brokers; expected an ordinary topic. Use "
                "mqadmin updateStaticTopic."
            )
        routes.append(one)
    ordered = {queues.broker for one in routes if one.order_config for queues in one.queues}
    return {broker: _Listed(queues, broker in ordered) for broker, queues in join_queues(routes).items()}


def _refuse_system(topic: str, verb: str) -> None:
    """Raise OptionError for a topic of RocketMQ itself, or of the exactly-once sink. Those of groups are allowed."""
    if topic in SINK_TOPICS:
        raise OptionError(
            f"topic {topic} cannot be {verb}: it belongs to exactly-once writes; expected another topic. `rmq "
            "prepare-sink` creates it. Without it the last batches of all queries are unknown."
        )
    is_of_group = topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    if is_system_topic(topic) and not is_of_group:
        raise OptionError(
            f"topic {topic} cannot be {verb}: it is a topic of RocketMQ itself; expected a topic of users. Leave it as "
            "it is."
        )


class _Master(NamedTuple):
    cluster: str
    address: str


def _find_masters(backend: ClusterBackend, what: str) -> dict[str, _Master]:
    """Return all masters by the names of their brokers, from all name servers, sorted.

    Raises the error of a name server that does not answer: it may know other brokers.
    """
    client = backend.client
    outcomes = client.call_all([(server, ClusterInfoRequest()) for server in client.name_servers()])
    overrides = dict(client.address.broker_addresses)
    lists: list[ClusterInfoResponse] = []
    for one in outcomes:
        if not isinstance(one, ClusterInfoResponse):
            raise _because(f"cannot {what}, and nothing was changed", one)
        lists.append(one)
    found = {
        name: _Master(data.cluster, overrides.get(name, data.addresses[MASTER_ID]))
        for name, data in join_brokers(one.brokers.values() for one in lists).items()
        if MASTER_ID in data.addresses
    }
    if not found:
        raise BackendUnavailableError(
            f"cannot {what}: the name servers list no master; expected at least one. Check whether the brokers run, "
            "and wait 30 s after a restart of the name servers."
        )
    client.name_brokers({master.address: name for name, master in found.items()})
    return dict(sorted(found.items()))


def _choose(masters: Mapping[str, _Master], cluster: str | None, brokers: Collection[str]) -> dict[str, str]:
    """Return the addresses of the masters that are named. Raises NotFoundError if one is unknown."""
    clusters = sorted({master.cluster for master in masters.values()})
    if cluster is not None and cluster not in clusters:
        raise NotFoundError(
            f"cluster {cluster} was not found: the name servers list {', '.join(clusters)}; expected one of them. "
            "Correct the name."
        )
    if unknown := sorted(set(brokers) - masters.keys()):
        raise NotFoundError(
            f"broker {unknown[0]} was not found: the name servers list masters of {', '.join(masters)}; expected one "
            "of them. Correct the name, or start the broker."
        )
    for name in sorted(set(brokers)) if cluster is not None else ():
        if masters[name].cluster != cluster:
            raise NotFoundError(
                f"broker {name} was not found in cluster {cluster}: it belongs to cluster {masters[name].cluster}; "
                "expected a broker of the named cluster. Correct one of the names, or leave the cluster out."
            )
    return {
        name: master.address
        for name, master in masters.items()
        if cluster in (None, master.cluster) and (not brokers or name in brokers)
    }


def _send(backend: ClusterBackend, calls: Sequence[tuple[str, Request[Any]]], failed: str) -> None:
    """Send requests that change something, and raise the first error, with what it means."""
    for outcome in backend.client.call_all(calls):
        if not isinstance(outcome, DoneResponse):
            raise _because(failed, outcome)


def _because(what: str, error: RmqError) -> RmqError:
    """Return an error of the same class that says what has failed."""
    text = f"{what}: {error}"
    return BrokerError(error.code, text) if isinstance(error, BrokerError) else type(error)(text)
