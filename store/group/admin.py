"""Administration of consumer groups: functions that list groups and members, show offsets and lag, and reset offsets.

Only `reset_offsets` changes files or takes locks. In this folder, "a query of ours" is a streaming query of rmq-spark
with the option `consumerGroup`.
"""

import difflib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from urllib.parse import unquote

import pyarrow as pa

from rmq_spark.store.argument_checks import as_ms, check_integer, check_offset
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.host import is_remote
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, OptionError, StoreChangedError, StoreError
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
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_state import commit_log_folders
from rmq_spark.store.model import QueueKey, describe_unit, is_in_another_unit
from rmq_spark.store.names import BROKER_GROUP_PREFIX, check_consumer_group, check_group_name, retry_topic

EARLIEST, LATEST = "earliest", "latest"
_SHOWN_COUNT = 12
_QUEUE_ID_DIGITS = 10  # the most digits that a Java int has
GroupOffsets = dict[str, dict[int, int]]  # topic -> queue id -> next queue offset
ResetTo = str | int | datetime | Mapping[str, Mapping[int | str, int]]


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
    `lag.LAG` describes the columns, and the module `lag` describes the values of the column `state`. `secondsBehind`
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
                f"{_others(group, {*known, *list_group_names(root)})}"
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
    _check_resettable(group)
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


def _check_resettable(group: str) -> None:
    """Raise OptionError if `group` is not a valid name for a group of consumers.

    If it is one of a broker's own groups, the error has special advice.
    """
    if isinstance(group, str) and group.startswith(BROKER_GROUP_PREFIX):
        raise OptionError(
            f"reset_offsets: consumer group {group!r} is a broker's own and contains its progress with transactions "
            "and the like; expected a group of consumers. If its offset is beyond the end of its queue, stop the "
            "broker and set the offset in config/consumerOffset.json to that end."
        )
    check_consumer_group(group)


def find_targets(
    reader: StoreReader, group: str, to: ResetTo, topics: str | Sequence[str] | None = None
) -> dict[QueueKey, int]:
    """Return the offsets that `reset_offsets` would commit for each queue. Changes nothing.

    Raises the errors of `reset_offsets` that concern its arguments.
    """
    if isinstance(to, Mapping):
        if topics is not None:
            raise OptionError("reset_offsets: found `topics` and offsets in `to`; expected one. Leave `topics` out.")
        return _mapped(reader, to)
    return {queue: _offset(reader, queue, to) for topic in _topics(reader, group, topics) for queue in topic}


def _offset(reader: StoreReader, queue: QueueKey, to: object) -> int:
    bounds = reader.bounds(queue)
    if to == EARLIEST:
        return bounds.min_offset
    if to == LATEST:
        return bounds.max_offset
    time_ms = _time_ms(to)
    return correct_offset(reader.offset_at_time(queue, time_ms, "lower"), bounds)


def _time_ms(to: object) -> int:
    moment = as_ms("reset_offsets: to", to)
    try:
        time_ms = check_integer("to", moment, 0)
    except OptionError:
        raise OptionError(
            f'reset_offsets: to={to!r} is none of: "{EARLIEST}", "{LATEST}", ms since the epoch, a datetime, offsets '
            'as {"topic": {0: 12}}.'
        ) from None
    if is_in_another_unit(time_ms) and not isinstance(to, datetime):
        raise OptionError(f"reset_offsets: to={time_ms} {describe_unit(time_ms)}.")
    return time_ms


def _topics(reader: StoreReader, group: str, topics: str | Sequence[str] | None) -> list[list[QueueKey]]:
    if topics is None:
        own = {queue.topic for queue in read_group_offsets(reader.path, group, time.sleep)}
        names = sorted(own & set(reader.topics()) - {retry_topic(group)})
        if not names:
            known = _known_groups(reader.path)
            others = "" if group in known else f" {_others(group, known)}"
            raise NotFoundError(
                f'consumer group "{group}" has no offsets in the store at "{reader.path}". Name the topics to '
                f"reset.{others}"
            )
    else:
        listed = [topics] if isinstance(topics, str) or not isinstance(topics, Iterable) else list(topics)
        if not all(isinstance(name, str) for name in listed):
            raise OptionError(f"reset_offsets: found topics={topics!r}; expected a topic name or a list of them.")
        names = sorted(set(listed))
        if not names:
            raise OptionError("reset_offsets: found an empty list of `topics`; expected at least one.")
    return [reader.queues(name) for name in names]


def _mapped(reader: StoreReader, to: Mapping[str, Mapping[int | str, int]]) -> dict[QueueKey, int]:
    targets: dict[QueueKey, int] = {}
    for topic, queues in to.items():
        if topic == "@":  # not a topic, but our metadata if the offsets were copied from a query's progress
            continue
        if not isinstance(topic, str):
            raise OptionError(f"reset_offsets: found the topic {topic!r} in `to`; expected a topic name.")
        if not isinstance(queues, Mapping):
            raise OptionError(f"reset_offsets: to[{topic!r}] is {queues!r}; expected offsets by queue id: {{0: 12}}.")
        reader.queues(topic)  # raises NotFoundError, which lists topics
        for queue_id, at in queues.items():
            queue = QueueKey(topic, _queue_id(topic, queue_id))
            offset = check_offset(f"reset_offsets: to[{topic!r}][{queue_id!r}]", at)
            bounds = reader.bounds(queue)
            low, high = bounds.min_offset, bounds.max_offset
            if not low <= offset <= high:
                step = f'reset_offsets accepts these offsets: "{EARLIEST}" is {low} and "{LATEST}" is {high} now.'
                raise OffsetRangeError(str(queue), offset, offset, low, high, step)
            if queue in targets:
                raise OptionError(f"reset_offsets: to[{topic!r}] names the queue {queue.queue_id} twice.")
            targets[queue] = offset
    if not targets:
        raise OptionError("reset_offsets: found no queue in `to`; expected offsets by topic and queue id.")
    return targets


def _queue_id(topic: str, value: object) -> int:
    """Return the queue id for a key of a mapping. The key may be a text, because keys in JSON are texts."""
    if isinstance(value, str):
        is_number = value.isascii() and value.isdigit() and len(value) <= _QUEUE_ID_DIGITS
        value = int(value) if is_number else value
    try:
        return check_integer("queue id", value, 0)
    except OptionError:
        raise OptionError(f"reset_offsets: to[{topic!r}] has the key {value!r}; expected a queue id.") from None


def _others(group: str, known: Collection[str]) -> str:
    """Return a text for an error: the known groups, after a question with those whose names are similar to `group`."""
    shown = sorted(known)[:_SHOWN_COUNT]
    there = (
        f"Groups there: {', '.join(shown)}{' …' if len(known) > len(shown) else ''}."
        if shown
        else "The store has no groups."
    )
    near = difflib.get_close_matches(group, known, 3)
    return f"Did you mean {' or '.join(near)}? {there}" if near else there


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

# The columns of the table that `group_members` returns. The table has one row for each living member, sorted by group
# and member. If the file of a member is damaged, all columns from queryName to since are null in its row.
MEMBERS = pa.schema(
    [
        ("group", pa.string()),
        ("member", pa.string()),
        ("queues", pa.int32()),  # the number of queues that the member owns
        ("queryName", pa.string()),
        ("application", pa.string()),
        ("host", pa.string()),
        ("processId", pa.int32()),
        ("assignment", pa.string()),
        ("allocateStrategy", pa.string()),
        ("subscription", pa.string()),
        ("since", pa.timestamp("ms", tz="UTC")),
    ]
)


def group_members(path: str | PurePath, group: str | None = None, *, commit_log_path: str | None = None) -> pa.Table:
    """Return a table of the living members of one group, or of all groups if `group` is None.

    Members are queries of ours with the option `consumerGroup`, except those with messageModel=broadcasting. The table
    has one row for each member, with the columns of `MEMBERS`, among them the number of queues that it owns. A member
    on another host may be listed for some time after it has ended. Changes nothing on disk. Raises OptionError for an
    invalid group name, StorePathError if `path` is not a store, and DamageError if a file is damaged.
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
