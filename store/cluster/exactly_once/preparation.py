"""Creates and checks what the exactly-once sink needs: the stage on every master, the ledger on one, and a group.

There must never be two ledgers: a commit that reads another one than the commits before it would not know what they
have promised. So only an administrator creates the ledger, and only if every broker of the cluster has told that it has
none. The stage of a broker that was added later is created by the next batch that goes there.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.answer_rule import UnknownGroupError
from rmq_spark.store.cluster.client import ClusterClient, borrowed_client, monotonic_ms
from rmq_spark.store.cluster.exactly_once.ledger_location import find_ledger
from rmq_spark.store.cluster.exactly_once.marks import READING_GROUP, reading_group
from rmq_spark.store.cluster.group_requests import CreateGroupRequest
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.requests import ClusterInfoRequest, CreateTopicRequest, PullRequest, TopicStatsRequest
from rmq_spark.store.cluster.responses import ClusterInfoResponse, TopicStatsResponse
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, OptionError, RmqError
from rmq_spark.store.format.config_json import GroupConfig, TopicConfig
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import LEDGER_TOPIC, STAGE_TOPIC, check_sent_topic

_LOG = logging.getLogger("rmq_spark")
LEDGER_QUEUES = 3  # queue 0 has the rows; the offsets of groups in the others are marks
STAGE_QUEUES = 4  # of each broker


@dataclass(frozen=True, slots=True)
class PreparedSink:
    """What `prepare_sink` has found or made: the broker of the ledger, and the brokers of the stage.

    `is_new` says whether the ledger was created by this call. `group` is the consumer group in whose name the sink
    pulls, and `refusals` says by the name of a broker why it cannot be used there. Most brokers create it by themselves
    at the first pull.
    """

    ledger_broker: str
    is_new: bool
    stage_brokers: tuple[str, ...]
    group: str
    refusals: Mapping[str, str]


def prepare_sink(
    address: ClusterAddress,
    ledger_broker: str,
    stage_topic: str = STAGE_TOPIC,
    ledger_topic: str = LEDGER_TOPIC,
    *,
    replaces_ledger: bool = False,
) -> PreparedSink:
    """Create the stage on every master that lacks it, and the ledger on `ledger_broker`.

    Name servers forget a broker that is down. So a cluster with a stage and without a ledger has lost its ledger for a
    while, or for ever: a new one is created only if the caller says so with `replaces_ledger`.

    The consumer group in whose name the sink pulls is created on every master that lacks it, unless the address names
    another group than the default one. An account that must not do so still gets the topics.

    A repeated call changes nothing. Raises OptionError if the broker is unknown or another broker has the ledger,
    BackendUnavailableError if a name server, a broker or the broker of the ledger does not answer, and the errors of
    brokers that refuse.
    """
    check_sent_topic(stage_topic)
    check_sent_topic(ledger_topic)
    with borrowed_client(address) as client:
        routes = _routes(client)
        masters = routes.find_masters(ledger_topic)
        silent = [name for name in routes.book.known_brokers() if name not in masters]
        if silent:
            raise BackendUnavailableError(
                f"the ledger cannot be created: broker {', '.join(silent)} has no master now; expected all brokers, "
                "because one of them may have a ledger. Start its master, or remove the broker from the cluster."
            )
        if ledger_broker not in masters:
            raise OptionError(
                f"broker {ledger_broker} is not in the cluster; expected one of {', '.join(masters)}. Give the name of "
                "the broker that is to keep the ledger."
            )
        holders = _brokers_with(client, routes, ledger_topic, masters)
        others = [name for name in holders if name != ledger_broker]
        if others:
            advice = f"Use that ledger: --ledger-broker {others[0]}."
            if len(holders) > 1:
                advice = (
                    "Stop all queries, keep the ledger that has their rows, and remove the topic from the others as "
                    "the documentation says (two ledgers)."
                )
            raise OptionError(
                f"topic {ledger_topic} is on broker {', '.join(holders)} already; expected no ledger, or only the one "
                f"on {ledger_broker}. {advice}"
            )
        staging = [] if holders or replaces_ledger else _brokers_with(client, routes, stage_topic, masters)
        if staging:
            raise BackendUnavailableError(
                f"no ledger was created: broker {', '.join(staging)} has the topic {stage_topic}, so the cluster was "
                f"prepared before, and no broker that runs has the ledger {ledger_topic}; expected both. Start the "
                "broker of the ledger. If its disk is lost for good, or the topic was deleted, no query knows its last "
                "batch any more: compare the target topics with the checkpoints, and then call rmq prepare-sink with "
                "--replace-ledger."
            )
        if not holders:
            config = TopicConfig(routes.topic_of(ledger_topic), LEDGER_QUEUES, LEDGER_QUEUES)
            client.call(masters[ledger_broker], CreateTopicRequest(config))
        routes.wait_for(ledger_topic, [ledger_broker])
        stage_brokers = routes.create(TopicConfig(stage_topic, STAGE_QUEUES, STAGE_QUEUES))
        routes.wait_for(stage_topic, stage_brokers)
        group = reading_group(address.pull_group)
        refusals = _create_group(client, routes, stage_topic, stage_brokers)
        return PreparedSink(ledger_broker, not holders, tuple(stage_brokers), group, refusals)


def _create_group(
    client: ClusterClient, routes: WriteRoutes, stage_topic: str, brokers: Collection[str]
) -> dict[str, str]:
    """Create the group of the sink's pulls on brokers that lack it. Return why it cannot be used, by name of a broker.

    A pull from the stage tells whether a broker has the group, and lets most brokers create it.
    """
    if reading_group(client.address.pull_group) != READING_GROUP:
        return {}
    group, stored = wrap_name(client.address.namespace, READING_GROUP), routes.topic_of(stage_topic)
    addresses = {name: routes.address(name) for name in brokers}
    pulls = [(to, PullRequest(QueueKey(stored, 0, name), 0, 1, group)) for name, to in addresses.items()]
    outcomes = dict(zip(addresses, client.call_all(pulls), strict=True))
    lacking = [name for name, one in outcomes.items() if isinstance(one, UnknownGroupError)]
    creations = [(addresses[name], CreateGroupRequest(GroupConfig(group))) for name in lacking]
    outcomes |= zip(lacking, client.call_all(creations), strict=True)
    return {name: str(one) for name, one in outcomes.items() if isinstance(one, RmqError)}


def check_prepared(
    address: ClusterAddress, stage_topic: str = STAGE_TOPIC, ledger_topic: str = LEDGER_TOPIC
) -> frozenset[str]:
    """Check before a batch that the stage and the ledger exist. Return the brokers that have the stage.

    If only the ledger is not available, its broker may be away: the commit waits for it.

    Raises NotFoundError if a broker is listed and neither of the topics is, BrokerError if there are two ledgers,
    NoPermissionError if the account must not use them, and BackendUnavailableError if a name server does not answer, or
    if those that do list no broker, as after their start.
    """
    with borrowed_client(address) as client:
        routes = _routes(client)
        try:
            staging = frozenset(queue.broker for queue in routes.queues(stage_topic))
        except NotFoundError:
            staging = frozenset()
        try:
            find_ledger(client, ledger_topic)
        except BackendUnavailableError as error:
            if not staging:
                _require_brokers(client)
                where = f" in the namespace {address.namespace}" if address.namespace else ""
                raise NotFoundError(
                    f"the topics {stage_topic} (stageTopic) and {ledger_topic} (ledgerTopic), which exactly-once "
                    f"delivery needs, do not exist{where}: no name server has a route of them; expected existing "
                    "topics. If the cluster was prepared before, start its brokers, and wait 30 s after a restart of "
                    "the name servers: a second ledger would double rows. Otherwise create them: "
                    f"{how_to_prepare(address.namespace)}. Or set delivery=atLeastOnce."
                ) from None
            found = str(error).partition("; expected")[0]  # its advice is to create a ledger if there never was one
            _LOG.warning("rmq: commits will wait: %s. Start the broker of the ledger.", found)
        return staging


def _require_brokers(client: ClusterClient) -> None:
    """Raise BackendUnavailableError if name servers answer, and none lists a master, as after their start."""
    outcomes = client.call_all([(server, ClusterInfoRequest()) for server in client.name_servers()])
    lists = [one.brokers for one in outcomes if isinstance(one, ClusterInfoResponse)]
    if lists and not any(0 in data.addresses for brokers in lists for data in brokers.values()):
        raise BackendUnavailableError(
            "the topics of exactly-once delivery cannot be found: the name servers list no master; expected at least "
            "one. Check whether the brokers run, and wait 30 s after a restart of the name servers."
        )


def how_to_prepare(namespace: str) -> str:
    """Return the command that creates the topics of the sink."""
    option = f" --namespace {namespace}" if namespace else ""
    return f"rmq prepare-sink -n NAMESERVER --ledger-broker BROKER{option}"


def add_stage(address: ClusterAddress, stage_topic: str, brokers: Collection[str]) -> None:
    """Create the stage before a batch, as `extend_stage`, with a client of its own."""
    with borrowed_client(address) as client:
        extend_stage(client, _routes(client), stage_topic, sorted(brokers))


def extend_stage(client: ClusterClient, routes: WriteRoutes, stage_topic: str, brokers: Collection[str]) -> None:
    """Create the stage on those of these brokers that lack it, and the group of the pulls. A refused group is logged.

    Raises BackendUnavailableError if a name server or a broker does not answer, and the errors of brokers that refuse.
    """
    created = routes.create(TopicConfig(stage_topic, STAGE_QUEUES, STAGE_QUEUES), brokers)
    routes.wait_for(stage_topic, created)
    for broker, reason in _create_group(client, routes, stage_topic, created).items():
        _LOG.warning("rmq: group %s cannot be used on broker %s: %s", READING_GROUP, broker, reason)


def _routes(client: ClusterClient) -> WriteRoutes:
    return WriteRoutes(client, monotonic_ms, NewTopics(is_allowed=False))


def _brokers_with(client: ClusterClient, routes: WriteRoutes, topic: str, masters: dict[str, str]) -> list[str]:
    """Return the brokers that have a topic. Raises the error of a broker that does not tell."""
    stored = routes.topic_of(topic)
    found = []
    outcomes = client.call_all([(to, TopicStatsRequest(stored, name)) for name, to in masters.items()])
    for name, outcome in zip(masters, outcomes, strict=True):
        if isinstance(outcome, TopicStatsResponse):
            found.append(name)
        elif not isinstance(outcome, NotFoundError):
            raise outcome
    return found
