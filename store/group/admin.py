"""Administration of consumer groups: functions that list groups and members, show offsets and lag, and reset offsets.

Only `reset_offsets` changes files or takes locks. In this folder, "a query of ours" is a streaming query of rmq-spark
with the option `consumerGroup`.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from urllib.parse import unquote

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.host import is_remote
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import NotFoundError, StoreChangedError, StoreError
from rmq_spark.store.group.claims import NOBODY, read_claims
from rmq_spark.store.group.group_files import GroupLock, GroupPaths, list_group_names, read_commit_stamp
from rmq_spark.store.group.lag import GroupState, lag_table
from rmq_spark.store.group.member_lease import FailureDetector, Member
from rmq_spark.store.group.offset_file import (
    OffsetFile,
    SeenEnds,
    Stamp,
    group_offsets_of,
    offsets_by_topic,
    read_consumer_offsets,
    read_group_offsets,
    topics_by_group,
)
from rmq_spark.store.group.resets import add_reset, forget_suspended, read_resets
from rmq_spark.store.group.start_offsets import correct_offset
from rmq_spark.store.group_tables import MEMBERS
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_state import commit_log_folders
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import check_group_name, list_other_groups, retry_topic
from rmq_spark.store.reset_arguments import (
    EARLIEST,
    LATEST,
    ResetTo,
    check_reset_time,
    check_resettable,
    check_target,
    check_targets,
    check_topics,
)

GroupOffsets = dict[str, dict[int, int]]  # topic -> queue id -> next queue offset


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings with which a reset takes the store's lock."""

    lock_timeout_ms: int
    allow_network_store: bool = True  # offsets and resets are small files that are replaced under the locks
    application: str = "rmq-spark"


def groups(path: str | PurePath, *, commit_log_path: str | None = None) -> list[str]:
    """Return the names of the consumer groups in the store at `path`, sorted.

    These are all groups that have committed offsets or had a query of ours. Changes nothing on disk. Raises
    StorePathError if `path` is not a store, and DamageError if the offset file is damaged.
    """
    return sorted(_known_groups(_store(path, commit_log_path)))


def group_offsets(path: str | PurePath, group: str, *, commit_log_path: str | None = None) -> GroupOffsets:
    """Return the committed offsets of a group as {topic: {queue id: queue offset of the next message}}.

    Returns {} if the group has no committed offsets. While a broker runs, the offsets may be up to five seconds old,
    because the broker writes them every five seconds. Changes nothing on disk. Raises OptionError for an invalid group
    name, StorePathError if `path` is not a store, and DamageError if the offset file is damaged.
    """
    check_group_name(group)
    return offsets_by_topic(read_group_offsets(_store(path, commit_log_path), group, time.sleep))


def group_lag(
    path: str | PurePath,
    group: str | None = None,
    *,
    now_ms: int | None = None,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
) -> pa.Table:
    """Return a table with the lag of one group, or of all groups if `group` is None.

    The table has one row for each group and each queue of the topics in which the group has committed offsets.
    `group_tables.LAG` describes the columns, and that module the values of the column `state`. `secondsBehind`
    is the time from the next unread message to `now_ms` (ms since the epoch), which is the current time by default. A
    group that has a query of ours but no committed offsets has no rows. Changes nothing on disk.

    Raises OptionError for an invalid group name, NotFoundError for an unknown group (the error lists the groups),
    StorePathError if `path` is not a store, and DamageError if a file is damaged.
    """
    if group is not None:
        check_group_name(group)
    root = files.store_folder(path)
    with StoreReader(root, commit_log_path=commit_log_path, read_mode=read_mode) as reader:
        # The offsets are read before the queues. In the other order, a group that reads at the same time could have
        # committed an offset beyond the end that was read for the queue.
        committed = read_consumer_offsets(root, time.sleep)
        reader.refresh()
        known = topics_by_group(committed)
        if group is not None and group not in known and not files.is_folder(GroupPaths(root, group).folder):
            raise NotFoundError(
                f'no consumer group "{group}" in the store at "{root}": it has neither committed offsets nor queries '
                "of ours; expected one of them. Queries with messageModel=broadcasting do not count. "
                f"{list_other_groups(group, {*known, *list_group_names(root)})}"
            )
        states = []
        for name in sorted(known):
            if group is None or name == group:
                stamp = read_commit_stamp(GroupPaths(root, name).published)
                published_ms = stamp.time_ms if stamp is not None else None
                states.append(GroupState(name, group_offsets_of(committed, name), published_ms, _owners(root, name)))
        return lag_table(reader, states, wall_clock_ms() if now_ms is None else now_ms)


def reset_offsets(
    path: str | PurePath,
    group: str,
    to: ResetTo,
    topics: str | Sequence[str] | None = None,
    *,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
) -> GroupOffsets:
    """Set the committed offsets of a group, and make its queries seek to them. Return the new offsets.

    `to` says where the group continues. It is one of:

    - "earliest" or "latest": the beginning or the end of each queue;
    - a time, in ms since the epoch or as a datetime with a time zone: the first message stored at or after that time;
    - queue offsets, as {topic: {queue id: offset}}.

    `topics` are the topics to reset. By default these are all topics in which the group has committed offsets, except
    its retry topic. Do not pass `topics` if `to` contains queue offsets. The result has the form
    {topic: {queue id: offset}}.

    A running query applies the reset at its next trigger. A stopped query applies it when it starts again, whatever its
    checkpoint contains. The call writes the offsets to consumerOffset.json and then the reset to the group's folder,
    and both are durable when it returns. If an error is raised, usually nothing has changed. But if the store failed
    between these two writes, the offsets are committed while our queries do not see the reset. In that case call this
    function again.

    Raises OptionError for an invalid argument, NotFoundError for a topic or queue that does not exist, OffsetRangeError
    for an offset outside its queue, LockTimeoutError while a broker holds the store, StorePathError if `path` is not a
    store or may not be written, StoreChangedError if a repair truncated the log during the call, and DamageError if a
    file is damaged.
    """
    check_resettable(group)
    root, disk, settings = files.store_folder(path), Disk(), _Settings(lock_timeout_ms)
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        reader.refresh()
        targets = find_targets(reader, group, to, topics)
        stamp = reader.registry_stamp
    offsets = OffsetFile(root, disk, settings, wall_clock_ms, time.sleep)
    paths = GroupPaths(root, group)
    lock = GroupLock(paths, disk, time.sleep, lock_timeout_ms)
    try:
        with lock.hold(), offsets.hold(group):
            _refuse_beyond(root, stamp, targets)
            # The file is read before the first write, so that a damaged file is detected while nothing has changed.
            read_resets(paths.resets)
            # The offsets are committed before the reset is recorded. So a query that reads the reset finds the reset's
            # offset committed, or a later offset by a member that has applied the reset. The group's lock keeps queries
            # from committing meanwhile. Suspensions are removed last. If a crash prevents that, their queues skip the
            # rows again that became dead letters.
            offsets.commit_held(group, targets)
            add_reset(paths, disk, lock, targets, wall_clock_ms())
            forget_suspended(root, group, targets)
    finally:  # an interrupt may have prevented `with` from releasing
        try:
            offsets.release()
        finally:
            lock.release()
    return offsets_by_topic(dict(sorted(targets.items())))


def _refuse_beyond(root: str, stamp: Stamp, targets: Mapping[QueueKey, int]) -> None:
    """Raise StoreChangedError if a queue changed after `stamp` was taken and now ends before its target."""
    ends = SeenEnds(root, stamp)
    ends.within(targets)
    if ends.corrected:
        raise StoreChangedError(
            f"reset_offsets of the store at {root}: a repair or a recovery has lowered the end of "
            f"{', '.join(map(str, sorted(ends.corrected)))} since the queues were read; expected the same ends. "
            "Nothing was changed. Call it again."
        )


def find_targets(
    reader: StoreReader, group: str, to: ResetTo, topics: str | Sequence[str] | None = None
) -> dict[QueueKey, int]:
    """Return the offsets that `reset_offsets` would commit for each queue. Changes nothing.

    Raises the errors of `reset_offsets` that concern its arguments.
    """
    if isinstance(to, Mapping):
        return _checked(reader, check_targets(to, topics, has_brokers=False))
    return {queue: _offset(reader, queue, to) for topic in _topics(reader, group, topics) for queue in topic}


def _offset(reader: StoreReader, queue: QueueKey, to: object) -> int:
    bounds = reader.bounds(queue)
    if to == EARLIEST:
        return bounds.min_offset
    if to == LATEST:
        return bounds.max_offset
    return correct_offset(reader.offset_at_time(queue, check_reset_time(to), "lower"), bounds)


def _topics(reader: StoreReader, group: str, topics: str | Sequence[str] | None) -> list[list[QueueKey]]:
    if topics is not None:
        return [reader.queues(name) for name in check_topics(topics)]
    own = {queue.topic for queue in read_group_offsets(reader.path, group, time.sleep)}
    names = sorted(own & set(reader.topics()) - {retry_topic(group)})
    if not names:
        known = _known_groups(reader.path)
        others = "" if group in known else f" {list_other_groups(group, known)}"
        raise NotFoundError(
            f'consumer group "{group}" has no offsets in the store at "{reader.path}". Name the topics to '
            f"reset.{others}"
        )
    return [reader.queues(name) for name in names]


def _checked(reader: StoreReader, targets: dict[QueueKey, int]) -> dict[QueueKey, int]:
    """Return the targets. Raises NotFoundError or OffsetRangeError for one that its queue does not have."""
    for queue, offset in targets.items():
        reader.queues(queue.topic)  # raises NotFoundError, which lists topics
        check_target(queue, offset, reader.bounds(queue))
    return targets


def _known_groups(root: str) -> set[str]:
    return {*list_group_names(root), *topics_by_group(read_consumer_offsets(root, time.sleep))}


def _owners(root: str, group: str) -> dict[QueueKey, str]:
    """Return the id of the member that owns each queue, if that member seems to be alive. Omits all other queues."""
    paths = GroupPaths(root, group)
    # A single poll detects no timeouts, so a member on another host is considered alive as long as its file exists.
    detector = FailureDetector(paths, 0, time.monotonic, is_shared=is_remote(root))
    try:
        claims = read_claims(paths.claims).queues
        living = {owner for owner in {claim.owner for claim in claims.values()} - {NOBODY} if detector.is_alive(owner)}
    except StoreError:  # the file is damaged or not readable, which the queries themselves report
        return {}
    return {queue: claim.owner for queue, claim in claims.items() if claim.owner in living}


def _store(path: str | PurePath, commit_log_path: str | None) -> str:
    """Return the absolute path of the store at `path`. Raises StorePathError if there is no store."""
    root = files.store_folder(path)
    commit_log_folders(root, commit_log_path)
    return root


_SUFFIX = ".json"


def group_members(path: str | PurePath, group: str | None = None, *, commit_log_path: str | None = None) -> pa.Table:
    """Return a table of the living members of one group, or of all groups if `group` is None.

    Members are queries of ours with the option `consumerGroup`, except those with messageModel=broadcasting. The table
    has one row for each member, with the columns of `group_tables.MEMBERS`, among them the number of queues that it
    owns. A member on another host may be listed for some time after it has ended. Changes nothing on disk. Raises
    OptionError for an invalid group name, StorePathError if `path` is not a store, and DamageError if a file is
    damaged.
    """
    if group is not None:
        check_group_name(group)
    root = _store(path, commit_log_path)
    names = list_group_names(root) if group is None else [group]
    return pa.Table.from_pylist([row for name in names for row in _rows(root, name)], MEMBERS)


def _rows(root: str, group: str) -> list[dict[str, object]]:
    paths = GroupPaths(root, group)
    # A single poll detects no timeouts, so a member on another host is considered alive as long as its file exists.
    detector = FailureDetector(paths, 0, time.monotonic, is_shared=is_remote(paths.root))
    owned = Counter(claim.owner for claim in read_claims(paths.claims).queues.values())
    listed = (name.removesuffix(_SUFFIX) for name, _ in files.list_folder(paths.members) if name.endswith(_SUFFIX))
    return [
        {"group": group, "member": member_id, "queues": owned[member_id], **_described(detector.member(member_id))}
        for member_id in sorted(map(unquote, listed))
        if detector.is_alive(member_id)
    ]


def _described(member: Member | None) -> dict[str, object]:
    if member is None:
        return {}
    return {
        "queryName": member.query_name,
        "application": member.application,
        "host": member.process.host,
        "processId": member.process.pid,
        "assignment": member.assignment,
        "allocateStrategy": member.strategy,
        "subscription": member.subscription,
        "since": member.since_ms,
    }
