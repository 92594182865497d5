"""The functions for programs that administrate consumer groups, in a store directory or in a live cluster.

Only `reset_offsets` changes anything. The modules of the engine are imported when a function needs them, so that
importing this module is cheap.
"""

from contextlib import closing
from typing import TYPE_CHECKING, Any, Unpack, overload

from rmq_spark.store.argument_checks import check_place, refuse_cluster_options, refuse_store_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import PurePath

    import pyarrow as pa

    from rmq_spark.store.backend import Location
    from rmq_spark.store.cluster.address import ClusterAddress
    from rmq_spark.store.cluster.backend import ClusterBackend
    from rmq_spark.store.group_tables import GroupLags
    from rmq_spark.store.model import QueueKey
    from rmq_spark.store.places import ClusterArguments
    from rmq_spark.store.reset_arguments import ResetTo
    from rmq_spark.store.view.summary import GroupLag


@overload
def groups(path: "str | PurePath", *, commit_log_path: str | None = None) -> list[str]:
    """List the groups of a store directory."""


@overload
def groups(*, name_server: str, **cluster_options: "Unpack[ClusterArguments]") -> list[str]:
    """List the groups of a live cluster."""


def groups(
    path: "str | PurePath | None" = None,
    *,
    commit_log_path: str | None = None,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> list[str]:
    """Return the names of the consumer groups in the store at `path`, or the cluster of `name_server`, sorted.

    In a store these are all groups that have committed offsets or had a query of ours. Raises StorePathError if `path`
    is not a store, and DamageError if the offset file is damaged.

    In a cluster these are all groups that have committed offsets. Where a broker refuses to list them (5.3 needs the
    right Get of the cluster) or does not answer, the groups with a retry topic are added, and a warning is logged. The
    other arguments are those of `open_reader` for a cluster. Raises BackendUnavailableError if no broker answers.

    Changes nothing. Source: AdminBrokerProcessor#getAllConsumerOffset (4.9, 5.3).
    """
    given = dict(locals())
    check_place("groups", path, name_server, "list the groups of", cluster_options, groups)
    if name_server is None:
        from rmq_spark.store.group import admin

        refuse_cluster_options("groups", cluster_options)
        assert path is not None
        return admin.groups(path, commit_log_path=commit_log_path)
    from rmq_spark.store.cluster.group_progress import GroupProgress

    refuse_store_options("groups", groups, given, ())
    with _opened(name_server, cluster_options) as backend:
        return GroupProgress(backend).names()


@overload
def group_offsets(
    path: "str | PurePath", group: str, *, commit_log_path: str | None = None
) -> dict[str, dict[int, int]]:
    """Read the offsets of a group in a store directory."""


@overload
def group_offsets(
    *, name_server: str, group: str, **cluster_options: "Unpack[ClusterArguments]"
) -> dict[str, dict[str, int]]:
    """Read the offsets of a group in a live cluster."""


def group_offsets(
    path: "str | PurePath | None" = None,
    group: str | None = None,
    *,
    commit_log_path: str | None = None,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> dict[str, dict[int, int]] | dict[str, dict[str, int]]:
    """Return the committed offsets of a group as {topic: {queue id: queue offset of the next message}}.

    In a cluster the queue ids have the names of their brokers: {"orders": {"broker-a:0": 12}}. Returns {} if the group
    has no committed offsets.

    In a store on which a broker runs, the offsets may be up to five seconds old, because the broker writes them every
    five seconds. Raises StorePathError if `path` is not a store, and DamageError if the offset file is damaged.

    In a cluster, a broker of 4.9 may answer 0 for a queue in which the group has no offset. While the group has
    members, topics to which they do not subscribe are missing. Raises BackendUnavailableError if a broker does not
    answer, and NoPermissionError if one refuses (5.3 needs the right Get of the group). The other arguments are those
    of `open_reader` for a cluster.

    Raises OptionError for an invalid group name. Changes nothing. Source: AdminBrokerProcessor#getConsumeStats (4.9,
    5.3).
    """
    given = dict(locals())
    check_place("group_offsets", path, name_server, "read offsets of", cluster_options, group_offsets)
    if name_server is None:
        from rmq_spark.store.group import admin

        refuse_cluster_options("group_offsets", cluster_options)
        assert path is not None
        return admin.group_offsets(path, group, commit_log_path=commit_log_path)  # type: ignore[arg-type]  # checked
    from rmq_spark.store.cluster.group_progress import GroupProgress
    from rmq_spark.store.names import check_group_name

    refuse_store_options("group_offsets", group_offsets, given, {"group"})
    checked = check_group_name(group)  # type: ignore[arg-type]  # checked there
    with _opened(name_server, cluster_options) as backend:
        return _by_topic(GroupProgress(backend).committed(checked))


@overload
def group_lag(
    path: "str | PurePath",
    group: str | None = None,
    *,
    now_ms: int | None = None,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
) -> "GroupLag":
    """Measure the lag in a store directory."""


@overload
def group_lag(
    *,
    name_server: str,
    group: str | None = None,
    now_ms: int | None = None,
    **cluster_options: "Unpack[ClusterArguments]",
) -> "GroupLag":
    """Measure the lag in a live cluster."""


def group_lag(
    path: "str | PurePath | None" = None,
    group: str | None = None,
    *,
    now_ms: int | None = None,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "GroupLag":
    """Return the lag of one group, or of all groups if `group` is None, as a table that a notebook displays.

    The result can be used like an Arrow table, and `to_arrow()` returns one. It has one row for each group and each
    queue of the topics in which the group has committed offsets. The module `group_tables` describes the columns and
    the values of the column `state`. `secondsBehind` is the time from the next unread message to `now_ms` (ms since
    the epoch), which is the current time by default. Changes nothing.

    In a store, a group that has a query of ours but no committed offsets has no rows. Raises StorePathError if `path`
    is not a store, and DamageError if a file is damaged.

    In a cluster the table also has the column `brokerName`. `lagBytes` is an estimate, and `lastCommitTimestamp` and
    `member` are null. A queue whose broker does not answer has the state "away"; a broker that no name server lists is
    not known. A group that has a retry topic but no committed offsets has no rows. With `group` None, groups that the
    brokers refuse to tell about are left out, and a warning is logged. The messages are pulled in the name of
    `pull_group`; if a broker refuses that, `secondsBehind` and `lagBytes` are null. The other arguments are those of
    `open_reader` for a cluster. Raises BackendUnavailableError if no broker answers, and NoPermissionError if a broker
    refuses to tell about `group` (5.3 needs the right Get of the group).

    Raises OptionError for an invalid group name, and NotFoundError for an unknown group; the error lists the groups.
    Source: ConsumerProgressSubCommand (4.9, 5.3).
    """
    given = dict(locals())
    check_place("group_lag", path, name_server, "measure the lag of", cluster_options, group_lag)
    from rmq_spark.store.disk.clock import wall_clock_ms
    from rmq_spark.store.view.summary import GroupLag

    at_ms = wall_clock_ms() if now_ms is None else now_ms
    if name_server is None:
        from rmq_spark.store.group import admin

        refuse_cluster_options("group_lag", cluster_options)
        assert path is not None
        table = admin.group_lag(path, group, now_ms=at_ms, commit_log_path=commit_log_path, read_mode=read_mode)
        return GroupLag(str(path), group, at_ms, table)
    from rmq_spark.store.cluster.group_lag import measure_lag
    from rmq_spark.store.names import check_group_name

    refuse_store_options("group_lag", group_lag, given, {"group", "now_ms"})
    if group is not None:
        check_group_name(group)
    with _opened(name_server, cluster_options) as backend:
        return GroupLag(backend.location.describe(), group, at_ms, measure_lag(backend, group, at_ms))


def lag_at(location: "Location", group: str) -> "pa.Table":
    """Return the lag of a group in the place of a query, as the table of `group_lag`."""
    from rmq_spark.store.cluster.address import ClusterAddress

    if not isinstance(location, ClusterAddress):
        mark = location.mark()
        return group_lag(mark["path"], group, commit_log_path=mark.get("commitLogPath")).table
    from rmq_spark.store.cluster.group_lag import measure_lag
    from rmq_spark.store.disk.clock import wall_clock_ms

    with _backend_of(location) as backend:
        return measure_lag(backend, group, wall_clock_ms())


def lags_at(location: "Location", groups: "Sequence[str] | None") -> "GroupLags":
    """Return the lag of groups in a place, all groups if `groups` is None, as the table of `group_lag`.

    A cluster is asked for all of them at the same time. A group that is unknown or that a broker refuses has an error
    in the result. Raises BackendUnavailableError if no broker answers.
    """
    from rmq_spark.store.cluster.address import ClusterAddress
    from rmq_spark.store.group_tables import GroupLags

    if isinstance(location, ClusterAddress):
        from rmq_spark.store.cluster.group_lag import measure_lags
        from rmq_spark.store.disk.clock import wall_clock_ms

        with _backend_of(location) as backend:
            return measure_lags(backend, groups, wall_clock_ms())
    from pyarrow import concat_tables

    from rmq_spark.store.errors import NotFoundError
    from rmq_spark.store.group import admin
    from rmq_spark.store.group_tables import LAG

    mark, tables, errors = location.mark(), [LAG.empty_table()], {}
    for group in (None,) if groups is None else groups:
        try:
            tables.append(admin.group_lag(mark["path"], group, commit_log_path=mark.get("commitLogPath")))
        except NotFoundError as error:
            errors[str(group)] = error
    return GroupLags(concat_tables(tables), errors)


@overload
def group_members(
    path: "str | PurePath", group: str | None = None, *, commit_log_path: str | None = None
) -> "pa.Table":
    """List the members of groups in a store directory."""


@overload
def group_members(
    *, name_server: str, group: str | None = None, **cluster_options: "Unpack[ClusterArguments]"
) -> "pa.Table":
    """List the members of groups in a live cluster."""


def group_members(
    path: "str | PurePath | None" = None,
    group: str | None = None,
    *,
    commit_log_path: str | None = None,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "pa.Table":
    """Return a table of the living members of one group, or of all groups if `group` is None.

    The table has one row for each member, with the columns of `group_tables.MEMBERS`, in a cluster with those of
    `group_tables.CLUSTER_MEMBERS`. Changes nothing.

    In a store, members are queries of ours with the option `consumerGroup`, except those with
    messageModel=broadcasting. A member on another host may be listed for some time after it has ended. Raises
    StorePathError if `path` is not a store, and DamageError if a file is damaged.

    In a cluster, members are the clients of all kinds that send heartbeats to the brokers, except those of a gRPC
    proxy. `member` is the client id, and `queues` is null. If a broker refuses the list (5.3 needs the
    right Get of the group), only the client ids are known, and a warning is logged. The other arguments are those of
    `open_reader` for a cluster. Raises BackendUnavailableError if no broker answers, and NoPermissionError if a broker
    refuses the client ids too.

    Raises OptionError for an invalid group name. Source: ConsumerConnectionSubCommand (4.9, 5.3).
    """
    given = dict(locals())
    check_place("group_members", path, name_server, "list the members of", cluster_options, group_members)
    if name_server is None:
        from rmq_spark.store.group import admin

        refuse_cluster_options("group_members", cluster_options)
        assert path is not None
        return admin.group_members(path, group, commit_log_path=commit_log_path)
    from rmq_spark.store.cluster.group_listing import list_members
    from rmq_spark.store.names import check_group_name

    refuse_store_options("group_members", group_members, given, {"group"})
    if group is not None:
        check_group_name(group)
    with _opened(name_server, cluster_options) as backend:
        return list_members(backend, group)


@overload
def reset_offsets(
    path: "str | PurePath",
    group: str,
    to: "ResetTo",
    topics: "str | Sequence[str] | None" = None,
    *,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
) -> dict[str, dict[int, int]]:
    """Reset a group in a store directory."""


@overload
def reset_offsets(
    *,
    name_server: str,
    group: str,
    to: "ResetTo",
    topics: "str | Sequence[str] | None" = None,
    **cluster_options: "Unpack[ClusterArguments]",
) -> dict[str, dict[str, int]]:
    """Reset a group in a live cluster."""


def reset_offsets(
    path: "str | PurePath | None" = None,
    group: str | None = None,
    to: "ResetTo | None" = None,
    topics: "str | Sequence[str] | None" = None,
    *,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> dict[str, dict[int, int]] | dict[str, dict[str, int]]:
    """Set the committed offsets of a group, and make its consumers seek to them. Return the new offsets.

    `to` says where the group continues. It is one of:

    - "earliest" or "latest": the beginning or the end of each queue;
    - a time, in ms since the epoch or as a datetime with a time zone: the first message stored at or after that time;
    - queue offsets, as {topic: {queue id: offset}}; in a cluster as {topic: {"broker-a:0": offset}}, where the broker
      may be left out if it has the whole topic.

    `topics` are the topics to reset. By default these are all topics in which the group has committed offsets, except
    its retry topic. Do not pass `topics` if `to` contains queue offsets. The result has the form of the queue offsets.

    In a store, a running query applies the reset at its next trigger. A stopped query applies it when it starts again,
    whatever its checkpoint contains. The call writes the offsets to consumerOffset.json and then the reset to the
    group's folder, and both are durable when it returns. If an error is raised, usually nothing has changed. But if the
    store failed between these two writes, the offsets are committed while our queries do not see the reset. In that
    case call this function again. Raises LockTimeoutError while a broker holds the store, StorePathError if `path` is
    not a store or may not be written, StoreChangedError if a repair truncated the log during the call, and DamageError
    if a file is damaged.

    In a cluster, the masters of the topics are asked to reset the group. With 5.3 a member takes its reset with its
    next pull. With 4.9, or with useServerSideResetOffset=false, the brokers send the offsets to the members: a member
    of Java takes them after 10 s, and members that do not push ignore them. There members also return to their
    committed offsets in the topic's other queues, if not all were reset. Messages are pulled in the name of
    `pull_group` to find a time. The other arguments are those of `open_reader` for a cluster. Before anything is
    changed it raises BackendUnavailableError if a broker does not answer, and NoPermissionError if one refuses. If some
    queues could not be reset, it raises an error of the first cause, which names the queues that were reset and the
    others; then call it again. A broker that no name server lists is not known, and its queues stay as they are.

    Raises OptionError for an invalid argument, NotFoundError for a topic or queue that does not exist, and
    OffsetRangeError for an offset outside its queue. Source: DefaultMQAdminExtImpl#resetOffsetByQueueId (5.3),
    #resetOffsetNew (4.9).
    """
    given = dict(locals())
    check_place("reset_offsets", path, name_server, "reset groups of", cluster_options, reset_offsets)
    if name_server is None:
        from rmq_spark.store.group import admin

        refuse_cluster_options("reset_offsets", cluster_options)
        assert path is not None
        return admin.reset_offsets(
            path,
            group,  # type: ignore[arg-type]  # checked there
            to,  # type: ignore[arg-type]  # checked there
            topics,
            commit_log_path=commit_log_path,
            lock_timeout_ms=lock_timeout_ms,
        )
    from rmq_spark.store.cluster.offset_resets import reset_group

    refuse_store_options("reset_offsets", reset_offsets, given, {"group", "to", "topics"})
    with _opened(name_server, cluster_options) as backend:
        return _by_topic(reset_group(backend, group, to, topics))  # type: ignore[arg-type]  # checked there


def _opened(name_server: str, cluster_options: "Mapping[str, Any]") -> "closing[ClusterBackend]":
    """Open the cluster that a program names, and close it afterwards. Raises OptionError for an invalid argument."""
    from rmq_spark.store.places import locate_cluster

    return _backend_of(locate_cluster(name_server, cluster_options))


def _backend_of(location: "ClusterAddress") -> "closing[ClusterBackend]":
    from rmq_spark.store.cluster.backend import ClusterBackend

    return closing(ClusterBackend(location))


def _by_topic(offsets: "Mapping[QueueKey, int]") -> dict[str, dict[str, int]]:
    """Return offsets as {topic: {"broker-a:0": offset}}, sorted."""
    found: dict[str, dict[str, int]] = {}
    for queue, offset in sorted(offsets.items()):
        found.setdefault(queue.topic, {})[queue.id_text] = offset
    return found
