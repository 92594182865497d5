"""The functions for programs that administrate a live cluster: brokers, routes, rates and topics.

They are the counterparts of RocketMQ's tools clusterList, topicRoute, statsAll, updateTopic and deleteTopic. All take
the arguments of `open_reader` for a cluster, and raise OptionError for an invalid one. Each call opens the cluster and
closes it. The modules of the engine are imported when a function needs them, so that importing this module is cheap.
"""

from contextlib import closing
from typing import TYPE_CHECKING, Any

from rmq_spark.store.argument_checks import check_name_list

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rmq_spark.store.cluster.backend import ClusterBackend
    from rmq_spark.store.cluster.broker_statistics import BrokerState, RouteEntry, TopicRate
    from rmq_spark.store.cluster.topic_administration import ChangedTopic, DeletedTopic


def cluster_brokers(name_server: str, **cluster_options: "Any") -> "list[BrokerState]":
    """Return the masters and slaves of a cluster with their state. Changes nothing (ClusterListSubCommand).

    One that does not answer has a problem. Raises BackendUnavailableError if no name server answers, and
    NoPermissionError if the brokers refuse.
    """
    from rmq_spark.store.cluster.broker_statistics import list_brokers

    with _opened(name_server, cluster_options) as backend:
        return list_brokers(backend)


def cluster_routes(name_server: str, topic: str, **cluster_options: "Any") -> "list[RouteEntry]":
    """Return the queues of a topic by broker, as the name servers list them. Changes nothing (TopicRouteSubCommand).

    Raises NotFoundError if none lists the topic, and BackendUnavailableError if none answers.
    """
    from rmq_spark.store.cluster.broker_statistics import list_routes

    with _opened(name_server, cluster_options) as backend:
        return list_routes(backend, topic)


def cluster_rates(name_server: str, topics: "Sequence[str]", **cluster_options: "Any") -> "list[TopicRate]":
    """Return what the masters have counted of topics and of their groups. Changes nothing (StatsAllSubCommand).

    A topic that is not known, or of which a master does not answer, has a `problem`, and the other masters are
    counted. If no master can be asked about any of the topics, the error of the first one is raised: NotFoundError,
    NoPermissionError or BackendUnavailableError.
    """
    from rmq_spark.store.cluster.broker_statistics import list_rates

    check_name_list("cluster_rates", "topics", topics)
    with _opened(name_server, cluster_options) as backend:
        return list_rates(backend, topics)


def create_cluster_topic(
    name_server: str,
    topic: str,
    *,
    read_queues: int | None = None,
    write_queues: int | None = None,
    perm: int | None = None,
    attributes: "Mapping[str, str] | None" = None,
    cluster: str | None = None,
    brokers: "Collection[str]" = (),
    alters: bool = False,
    **cluster_options: "Any",
) -> "list[ChangedTopic]":
    """Create a topic on each master that lacks it, and if it `alters`, change it where it exists.

    Only the settings that are given are changed. For arguments and errors see `topic_administration.create_topic`.
    Follows UpdateTopicSubCommand.
    """
    from rmq_spark.store.cluster.topic_administration import TopicChanges, create_topic

    check_name_list("create_cluster_topic", "brokers", brokers)
    changes = TopicChanges(read_queues, write_queues, perm, attributes or {})
    with _opened(name_server, cluster_options) as backend:
        return create_topic(backend, topic, changes, cluster=cluster, brokers=brokers, alters=alters)


def delete_cluster_topic(name_server: str, topic: str, **cluster_options: "Any") -> "DeletedTopic":
    """Delete a topic from all masters and then from all name servers (DeleteTopicSubCommand).

    For errors see `topic_administration.delete_topic`. Repeat the call after an error.
    """
    from rmq_spark.store.cluster.topic_administration import delete_topic

    with _opened(name_server, cluster_options) as backend:
        return delete_topic(backend, topic)


def _opened(name_server: str, cluster_options: "Mapping[str, Any]") -> "closing[ClusterBackend]":
    """Open the cluster that a program names, and close it afterwards. Raises OptionError for an invalid argument."""
    from rmq_spark.store.cluster.backend import ClusterBackend
    from rmq_spark.store.places import locate_cluster

    return closing(ClusterBackend(locate_cluster(name_server, cluster_options)))
