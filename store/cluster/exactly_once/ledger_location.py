"""Where the ledger is: the one broker that has the topic, by the routes of all name servers and by its own word."""

from collections.abc import Mapping
from dataclasses import dataclass

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.requests import RouteRequest, TopicStatsRequest
from rmq_spark.store.cluster.responses import RouteResponse
from rmq_spark.store.cluster.routes import RouteBook, refuse_route
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, NoPermissionError, NotFoundError, RmqError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE


@dataclass(frozen=True, slots=True)
class LedgerLocation:
    """The broker that has the ledger, and the address of its master."""

    broker: str
    address: str


def find_ledger(client: ClusterClient, topic: str, known_broker: str | None = None) -> LedgerLocation:
    """Return where the ledger `topic` is, by the routes of all name servers that answer.

    Each name server knows only the brokers that reach it, so the answer of one would not show a second ledger. It would
    also hide a ledger that moved, so `known_broker`, where the caller found it before, counts too. Raises
    BackendUnavailableError if the ledger is nowhere or has no master, BrokerError if it is on two brokers, and
    NoPermissionError if it cannot be read and written.
    """
    stored = wrap_name(client.address.namespace, topic)
    servers = client.name_servers()
    outcomes = client.call_all([(server, RouteRequest(stored)) for server in servers])
    routes = [one for one in outcomes if isinstance(one, RouteResponse)]
    for route in routes:
        refuse_route(topic, route)
    names = sorted({one.broker for route in routes for one in route.queues})
    if not names:
        raise _no_route(topic, [one for one in outcomes if isinstance(one, RmqError)])
    brokers = sorted({*names, *([] if known_broker is None else [known_broker])})
    if len(brokers) > 1:
        raise BrokerError(
            0,
            f"there are two ledgers: topic {topic} is on the brokers {', '.join(brokers)}; expected one broker. "
            "Nothing was written. Stop all queries that write exactly once, keep the ledger that has their rows "
            "(rmq intents), and remove the topic from the other broker: stop it, take the topic out of its "
            "config/topics.json, and start it again. mqadmin deleteTopic would delete both ledgers.",
        )
    book = RouteBook(dict(client.address.broker_addresses))
    book.note_routes(topic, routes)
    client.name_brokers(book.names())
    (broker,) = names
    listing = book.listing(topic, broker)
    if listing.address is None or not listing.has_master or listing.is_acting:
        found = "has no master at present"
        if listing.is_acting:  # in such a cluster the route of a topic without write permission looks the same
            found = "has an acting master only, or the topic has no write permission"
        raise BackendUnavailableError(
            f"the ledger {topic} is not available: its broker {broker} {found}; expected its master, and perm 6. Check "
            "whether the master runs, and the permission of the topic (mqadmin updateTopicPerm)."
        )
    perms = [one.perm for route in routes for one in route.queues]
    if not any(perm & PERM_READ and perm & PERM_WRITE for perm in perms):  # a broker accepts sends without permission
        raise NoPermissionError(
            f"the ledger {topic} at broker {broker} has perm {perms[0]}; expected 6, to read and write. Set it with "
            "mqadmin updateTopicPerm."
        )
    return LedgerLocation(broker, listing.address)


def prove_broker(client: ClusterClient, stored_topic: str, location: LedgerLocation) -> Mapping[int, int]:
    """Ask for the max offsets of the ledger's queues, and return them by queue id.

    The answer has the name of the broker. An old route, or a connection that was made again, may lead to another
    broker that has the address now. Raises BackendUnavailableError if so.
    """
    try:
        stats = client.call(location.address, TopicStatsRequest(stored_topic, location.broker)).queues
    except NotFoundError as error:
        raise BackendUnavailableError(
            f"the ledger is not at broker {location.broker}, where the name servers list it: {error} If the topic was "
            "deleted there, its rows are lost: compare the target topics with the checkpoints first, and then run rmq "
            "prepare-sink --replace-ledger."
        ) from None
    others = {queue.broker for queue in stats} - {location.broker}
    if others:
        raise BackendUnavailableError(
            f"the ledger is not at {location.address}: found the broker {', '.join(sorted(others))} there; expected "
            f"{location.broker}. Wait until the name servers have the new address. If it stays so, correct brokerIP1 "
            "of the broker, or the option brokerAddresses."
        )
    return {queue.queue_id: one.max_offset for queue, one in stats.items()}


def _no_route(topic: str, errors: list[RmqError]) -> RmqError:
    """Return the error for a ledger that no name server lists."""
    for error in errors:
        if not isinstance(error, NotFoundError | BackendUnavailableError):
            return error  # such as a wrong account
    silent = " ".join(str(error) for error in errors if not isinstance(error, NotFoundError))
    found = f" ({silent})" if silent else ""
    return BackendUnavailableError(
        f"the ledger {topic} is nowhere: no name server has a route of the topic{found}; expected it on one broker. "
        "Start its broker, and wait 30 s after a restart of the name servers. If there never was a ledger, create it: "
        "rmq prepare-sink -n NAMESERVER --ledger-broker BROKER."
    )
