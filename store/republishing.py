"""`republish_dead_letters` for programs: in a store directory, or in a live cluster."""

from typing import TYPE_CHECKING, Any, Unpack, overload

from rmq_spark.store.argument_checks import (
    check_place,
    check_setting,
    refuse_cluster_options,
    refuse_store_options,
)
from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePath

    from rmq_spark.store.cluster.dead_letters import ClusterRepublished
    from rmq_spark.store.delivery.dead_letters import Republished
    from rmq_spark.store.format.letter_choice import LetterFilter
    from rmq_spark.store.places import ClusterArguments

_FOR_CLUSTERS = frozenset({"topic", "begin", "progress"})


@overload
def republish_dead_letters(
    path: "str | PurePath",
    group: str,
    filter: "LetterFilter" = None,
    *,
    topic: str | None = None,
    begin: int | None = None,
    progress: str | None = "default",
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> "Republished":
    """Republish in a store directory."""


@overload
def republish_dead_letters(
    *,
    name_server: str,
    group: str,
    filter: "LetterFilter" = None,
    topic: str | None = None,
    begin: "Mapping[str, int] | None" = None,
    progress: str | None = "default",
    **cluster_options: "Unpack[ClusterArguments]",
) -> "ClusterRepublished":
    """Republish in a live cluster."""


def republish_dead_letters(
    path: "str | PurePath | None" = None,
    group: str | None = None,
    filter: "LetterFilter" = None,
    *,
    topic: str | None = None,
    begin: "int | Mapping[str, int] | None" = None,
    progress: str | None = "default",
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "Republished | ClusterRepublished":
    """Send dead letters of a consumer group back to the topics that they came from, so that they are consumed again.

    `filter` selects the dead letters: an Arrow expression over the source's columns, or a function that gets a
    RecordBatch of dead letters and returns a mask. None selects all. If `topic` is given, they are sent to that topic
    instead. Every group that subscribes to the topic gets the messages, not only `group`.

    `progress` is a name under which the call records where it ended; with `progress=None` nothing is recorded. The call
    processes the dead letters that exist when it starts. It starts at the queue offset `begin` or, if that is None,
    where the last call with the same `progress` ended. Calls with the same `progress` and without `begin` together send
    each dead letter once in a store, even if a process dies. In a cluster they send it at least once: after a death
    some are sent again, with the same message ids. There the progress is the committed offsets of the group
    GROUP-republish-PROGRESS, and `begin` has a queue offset for each broker name. The other arguments are those of
    `open_reader` for a cluster.

    Raises OptionError if the group, the filter or a topic is invalid, NotFoundError if the topic of a dead letter no
    longer exists, and any error that the filter raises. In a store it raises BatchConflictError if another call with
    the same `progress` is running, StorePathError if the store is missing or not writable, and LockTimeoutError if
    another process holds the store; in a cluster BackendUnavailableError if a broker does not answer, and the errors of
    brokers that refuse. Messages that were sent before an error remain sent, and the next call begins after them.
    """
    check_place("republish_dead_letters", path, name_server, "republish in", cluster_options, republish_dead_letters)
    if name_server is not None:
        given = locals()
        refuse_store_options("republish_dead_letters", republish_dead_letters, given, _FOR_CLUSTERS)
        return _republish_in_cluster(name_server, cluster_options, given)
    refuse_cluster_options("republish_dead_letters", cluster_options)
    from rmq_spark.store.delivery.dead_letters import republish_dead_letters as republish_in_store

    return republish_in_store(
        str(path),
        group,  # type: ignore[arg-type]  # checked there
        filter,
        topic=topic,
        begin=begin,  # type: ignore[arg-type]  # checked there
        progress=progress,
        commit_log_path=commit_log_path,
        lock_timeout_ms=lock_timeout_ms,
        allow_network_store=allow_network_store,
    )


def _republish_in_cluster(
    name_server: str, cluster_options: "Mapping[str, Any]", given: "Mapping[str, Any]"
) -> "ClusterRepublished":
    """Check the arguments of a call, and republish in a cluster."""
    from rmq_spark.store.cluster.dead_letters import RepublishTerms, republish
    from rmq_spark.store.format.letter_choice import make_chooser
    from rmq_spark.store.format.message_table import check_topic
    from rmq_spark.store.names import check_retrying_group, check_sent_topic
    from rmq_spark.store.places import locate_cluster

    check_retrying_group(given["group"])
    topic, begin, progress = given["topic"], given["begin"], given["progress"]
    if topic is not None:
        check_sent_topic(check_topic(topic))
    if begin is not None:
        if not isinstance(begin, dict):
            raise OptionError(
                f"begin={begin!r}; expected a dict with a queue offset for each broker name, such as "
                "{'broker-a': 0}, because each broker has dead letters of its own."
            )
        for broker, offset in begin.items():
            check_setting(f"begin[{broker!r}]", offset, 0)
    if progress is not None and (not isinstance(progress, str) or not progress):
        raise OptionError(
            f"progress={progress!r} is not a name; expected a non-empty text, or None to record no progress."
        )
    terms = RepublishTerms(given["group"], make_chooser(given["filter"]), topic, begin, progress)
    return republish(locate_cluster(name_server, cluster_options), terms)
