"""The members of groups in a cluster, as a table with the columns of `group_tables.CLUSTER_MEMBERS`.

A broker shows for each member its client id, address, language and version. The subscription belongs to the group.
The client ids of Java's clients contain their process, and those of our queries also the name of the query.

Source: ConsumerConnectionSubCommand, ClientConfig#buildMQClientId (4.9, 5.3).
"""

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.diagnosis import describe_version
from rmq_spark.store.cluster.group_progress import GroupProgress
from rmq_spark.store.cluster.namespace import unwrap_name
from rmq_spark.store.cluster.responses import GroupConnectionsResponse, MemberConnection, Subscription
from rmq_spark.store.group_tables import CLUSTER_MEMBERS
from rmq_spark.store.names import retry_topic

# address@process#time of Java's clients, and address@process#rmq-spark#query#digits of ours.
_CLIENT_ID = re.compile(r"[^@]*@(?P<process>\d{1,9})#(?:\d+|(?P<application>rmq-spark)#(?P<query>.*)#[0-9a-f]+)")


def list_members(backend: ClusterBackend, group: str | None) -> pa.Table:
    """Return the members of one group, or of all groups: one row for each, sorted by group and client id.

    Raises NoPermissionError if a broker refuses even the client ids, and BackendUnavailableError if none answers.
    """
    progress = GroupProgress(backend)
    groups = progress.names() if group is None else [group]
    rows = [
        row
        for name, answers in progress.connections(groups).items()
        for row in _rows(name, answers, backend.location.namespace)
    ]
    return pa.Table.from_pylist(rows, CLUSTER_MEMBERS)


def _rows(group: str, answers: Mapping[str, GroupConnectionsResponse], namespace: str) -> list[dict[str, Any]]:
    """Return the rows of a group, from what each broker says."""
    seen: dict[str, tuple[MemberConnection, GroupConnectionsResponse]] = {}
    brokers: dict[str, list[str]] = {}
    for broker, answer in sorted(answers.items()):
        for member in answer.connections:
            seen.setdefault(member.client_id, (member, answer))
            brokers.setdefault(member.client_id, []).append(broker)
    return [
        {
            "group": group,
            "member": client_id,
            **_process_of(client_id),
            "host": member.address.rpartition(":")[0].strip("[]") or None,
            "subscription": _describe(group, answer.subscriptions.values(), namespace) or None,
            "address": member.address or None,
            "language": member.language or None,
            "version": describe_version(member.version) if member.language else None,
            "consumeType": answer.consume_type or None,
            "messageModel": answer.message_model or None,
            "brokers": brokers[client_id],
        }
        for client_id, (member, answer) in sorted(seen.items())
    ]


def _process_of(client_id: str) -> dict[str, Any]:
    """Return what a client id says about its process."""
    found = _CLIENT_ID.fullmatch(client_id)
    if found is None:
        return {}
    query = found["query"]
    return {
        "processId": int(found["process"]),
        "application": found["application"],
        "queryName": query if query not in (None, "-") else None,
    }


def _describe(group: str, subscriptions: Any, namespace: str) -> str:
    """Return the topics and filters of a group as a text, without its retry topic: "orders: a || b; payments: *"."""
    topics = {unwrap_name(namespace, one.topic): one for one in subscriptions}
    topics.pop(retry_topic(group), None)
    return "; ".join(f"{topic}: {_filter(one)}" for topic, one in sorted(topics.items()))


def _filter(one: Subscription) -> str:
    return one.expression if one.expression_type == "TAG" else f"{one.expression_type} {one.expression}"
