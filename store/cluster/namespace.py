"""The namespace of a client, which is a prefix of the cluster's names of topics and groups: `ns%orders`.

In the names of retry topics and of dead letters the namespace follows their own prefix: `%RETRY%ns%billing`. RocketMQ's
internal topics and groups are in no namespace. With the namespace "" every name stays as it is.

Source: NamespaceUtil (4.9, 5.3).
"""

from rmq_spark.store.names import (
    BROKER_GROUP_PREFIX,
    DLQ_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    SINK_TOPICS,
    is_system_topic,
)

SEPARATOR = "%"
_DERIVED_PREFIXES = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)


def wrap_name(namespace: str, name: str) -> str:
    """Return the cluster's name of a topic or group (NamespaceUtil#wrapNamespace). A name that has it already stays."""
    if not namespace or not name or is_shared_name(name) or is_in_namespace(namespace, name):
        return name
    prefix, rest = _split_derived(name)
    return f"{prefix}{namespace}{SEPARATOR}{rest}"


def unwrap_name(namespace: str, name: str) -> str:
    """Return the client's name of a topic or group (NamespaceUtil#withoutNamespace). A foreign name stays."""
    if not namespace or not is_in_namespace(namespace, name):
        return name
    prefix, rest = _split_derived(name)
    return prefix + rest.removeprefix(namespace + SEPARATOR)


def is_in_namespace(namespace: str, name: str) -> bool:
    """Return whether the cluster's name of a topic or group has the namespace (NamespaceUtil#isAlreadyWithNamespace).

    Every name is in the namespace "".
    """
    if not namespace:
        return True
    return not is_shared_name(name) and _split_derived(name)[1].startswith(namespace + SEPARATOR)


def is_shared_name(name: str) -> bool:
    """Return whether a topic or group is RocketMQ's own, and in no namespace (NamespaceUtil#isSystemResource)."""
    if name.startswith(BROKER_GROUP_PREFIX):
        return True
    is_system = is_system_topic(name) and name not in SINK_TOPICS
    return is_system and SEPARATOR not in name and not name.endswith("_REPLY_TOPIC")


def _split_derived(name: str) -> tuple[str, str]:
    """Return the prefix of a retry topic or of a topic of dead letters, or "", and the rest of the name."""
    for prefix in _DERIVED_PREFIXES:
        if name.startswith(prefix):
            return prefix, name.removeprefix(prefix)
    return "", name
