"""What administrators ask of a group, for the door: its offsets, its lag, and to set it back or forward."""

import difflib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.mounts import is_remote
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, OptionError, StoreChangedError, StoreError
from rmq_spark.store.format import filenames
from rmq_spark.store.group.claims import NOBODY, read_claims
from rmq_spark.store.group.group_name import BROKER_GROUP_PREFIX, check_consumer_group
from rmq_spark.store.group.group_paths import GroupPaths, GroupTurn, list_group_names
from rmq_spark.store.group.lag import GroupState, lag_table
from rmq_spark.store.group.liveness import Observer
from rmq_spark.store.group.offset_file import (
    OffsetFile,
    group_offsets_of,
    read_consumer_offsets,
    read_group_offsets,
    topics_by_group,
)
from rmq_spark.store.group.published import read_published
from rmq_spark.store.group.resets import add_reset, read_resets
from rmq_spark.store.group.seen_ends import SeenEnds, Stamp
from rmq_spark.store.group.suspended import forget_stopped
from rmq_spark.store.group.whole_number import as_ms, check_offset, check_whole
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.units import QueueKey, describe_unit, is_in_another_unit

EARLIEST, LATEST = "earliest", "latest"
_SHOWN_COUNT = 12
_QUEUE_ID_DIGITS = 10  # of a Java int

GroupOffsets = dict[str, dict[int, int]]  # topic -> queue id -> next queue offset
ResetTo = str | int | datetime | Mapping[str, Mapping[int | str, int]]


@dataclass(frozen=True, slots=True)
class _Settings:
    """How the store's lock is taken."""

    lock_timeout_ms: int
    allow_network_store: bool = True  # offsets and resets are small files that are replaced under the locks
    application: str = "rmq-spark"


def groups(path: str | PurePath, *, commit_log_path: str | None = None) -> list[str]:
    """Return the consumer groups of the store at `path`, sorted: those with offsets, and those with queries of ours.

    Changes nothing on disk. Raises StorePathError for a path that holds no store, DamageError.
    """
    return sorted(_known_groups(_store(path, commit_log_path)))


def group_offsets(path: str | PurePath, group: str, *, commit_log_path: str | None = None) -> GroupOffsets:
    """Return a group's next queue offsets by topic and queue id, {} for a group that has none. Changes nothing on disk.

    While a broker lives they are those of up to five seconds ago. Raises OptionError for what is no group's name,
    StorePathError for a path that holds no store, DamageError.
    """
    filenames.check_group_name(group)
    return _nested(read_group_offsets(_store(path, commit_log_path), group, time.sleep))


def group_lag(
    path: str | PurePath,
    group: str | None = None,
    *,
    now_ms: int | None = None,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
) -> pa.Table:
    """Return how far a group, or each one, is behind: a row for each queue of its topics. Changes nothing on disk.

    The columns, and what `state` says, are those of `lag.LAG`; `secondsBehind` counts from `now_ms` (ms since the
    epoch), by default from now. A group without offsets that a query of ours is in has no rows. Raises OptionError for
    what is no group's name, NotFoundError, which names others, for a group that the store knows nothing of,
    StorePathError, DamageError.
    """
    if group is not None:
        filenames.check_group_name(group)
    root = files.absolute(path)
    with StoreReader(root, commit_log_path=commit_log_path, read_mode=read_mode) as reader:
        # Before the store: a queue's end is then no earlier than any offset of a group that reads it.
        held = read_consumer_offsets(root, time.sleep)
        reader.refresh()
        known = topics_by_group(held)
        if group is not None and group not in known and not files.is_folder(GroupPaths(root, group).folder):
            raise _no_group(root, group, {*known, *list_group_names(root)})
        states = [
            GroupState(name, group_offsets_of(held, name), _published_ms(root, name), _owners(root, name))
            for name in sorted(known)
            if group is None or name == group
        ]
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
    """Have a group go on elsewhere, running queries too; return where to, by topic and queue id.

    `to` is "earliest", "latest", a time (ms since the epoch, or a datetime with a time zone: the first message stored
    at or after it) or offsets by topic and queue id. `topics` are by default those that the group has offsets of, but
    not its retry topic. When this returns the offsets stand in consumerOffset.json and the reset in the group's
    folder, both for good: a query applies it at its next trigger, one that is stopped when it starts again, whatever
    its checkpoint says. After an error nothing was changed, or, if the store failed between the two, the group stands
    there, and queries of ours do not hear of it: call it again.

    Raises OptionError, NotFoundError for a topic or queue that is not there, OffsetRangeError for an offset outside
    what a queue holds, LockTimeoutError while a broker holds the store, StorePathError, StoreChangedError if a repair
    cut the log meanwhile, DamageError.
    """
    _check_resettable(group)
    root, disk, settings = files.absolute(path), Disk(), _Settings(lock_timeout_ms)
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        reader.refresh()
        targets = find_targets(reader, group, to, topics)
        stamp = reader.registry_stamp
    offsets = OffsetFile(root, disk, settings, wall_clock_ms, time.sleep)
    paths = GroupPaths(root, group)
    turn = GroupTurn(paths, disk, time.sleep, lock_timeout_ms)
    try:
        with turn.hold(), offsets.hold(group):
            _refuse_beyond(root, stamp, targets)
            # Read before anything is written: a damaged file is found out while all is as it was.
            read_resets(paths.resets)
            # In this order: who sees the reset sees the group's offset go there, or what a member has made of it since.
            # No query publishes over the offset meanwhile, for this has the turn. What is known of stopped queues is
            # forgotten last: a crash before that leaves dead letters that their queue passes over once more.
            offsets.commit_held(group, targets)
            add_reset(paths, disk, turn, targets, wall_clock_ms())
            forget_stopped(root, group, targets)
    finally:  # an interrupt may have kept `with` from this
        try:
            offsets.release()
        finally:
            turn.release()
    return _nested(targets)


def _refuse_beyond(root: str, stamp: Stamp, targets: Mapping[QueueKey, int]) -> None:
    """Raise StoreChangedError for targets beyond the ends of their queues, which were seen with this stamp."""
    ends = SeenEnds(root, stamp)
    ends.within(targets)
    if ends.corrected:
        raise StoreChangedError(
            f"reset_offsets of the store at {root}: a repair or a recovery has moved the end of "
            f"{', '.join(map(str, sorted(ends.corrected)))} back since the queues were looked at; expected the same "
            "ends. Nothing was changed. Call it again."
        )


def _check_resettable(group: str) -> None:
    """Raise OptionError for a name that no consumer has; of a broker's own it says what can be done."""
    if isinstance(group, str) and group.startswith(BROKER_GROUP_PREFIX):
        raise OptionError(
            f"consumer group {group!r} is a broker's own, and goes nowhere by a reset: the broker keeps by it how far "
            "it is with transactions and the like. Where it stands beyond the end of its queue, close the broker, and "
            "set the offset in config/consumerOffset.json to that end."
        )
    check_consumer_group(group)


def find_targets(
    reader: StoreReader, group: str, to: ResetTo, topics: str | Sequence[str] | None = None
) -> dict[QueueKey, int]:
    """Return the queue offsets that `reset_offsets` would go to. Changes nothing. Raises what it raises."""
    if isinstance(to, Mapping):
        if topics is not None:
            raise OptionError("reset_offsets: the offsets in `to` name their topics. Leave `topics` out.")
        return _mapped(reader, to)
    return {queue: _offset(reader, queue, to) for topic in _topics(reader, group, topics) for queue in topic}


def _offset(reader: StoreReader, queue: QueueKey, to: object) -> int:
    held = reader.bounds(queue)
    if to == EARLIEST:
        return held.min_offset
    if to == LATEST:
        return held.max_offset
    time_ms = _time_ms(to)
    return min(max(reader.offset_at_time(queue, time_ms, "lower"), held.min_offset), held.max_offset)


def _time_ms(to: object) -> int:
    moment = as_ms("reset_offsets: to", to)
    try:
        time_ms = check_whole("to", moment, 0)
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
        names = sorted(own & set(reader.topics()) - {filenames.retry_topic(group)})
        if not names:
            raise _nothing_to_reset(reader.path, group)
    else:
        listed = [topics] if isinstance(topics, str) or not isinstance(topics, Iterable) else list(topics)
        if not all(isinstance(name, str) for name in listed):
            raise OptionError(f"reset_offsets: topics={topics!r} is no topic's name, and no list of them.")
        names = sorted(set(listed))
        if not names:
            raise OptionError("reset_offsets: `topics` names none.")
    return [reader.queues(name) for name in names]


def _mapped(reader: StoreReader, to: Mapping[str, Mapping[int | str, int]]) -> dict[QueueKey, int]:
    targets: dict[QueueKey, int] = {}
    for topic, queues in to.items():
        if topic == "@":  # ours, in offsets that were copied from a query's progress
            continue
        if not isinstance(topic, str):
            raise OptionError(f"reset_offsets: to has {topic!r}, which is no topic's name.")
        if not isinstance(queues, Mapping):
            raise OptionError(f"reset_offsets: to[{topic!r}] is {queues!r}. Give offsets by queue id, as {{0: 12}}.")
        reader.queues(topic)  # names others where there is no such topic
        for queue_id, at in queues.items():
            queue = QueueKey(topic, _queue_id(topic, queue_id))
            offset = check_offset(f"reset_offsets: to[{topic!r}][{queue_id!r}]", at)
            held = reader.bounds(queue)
            if not held.min_offset <= offset <= held.max_offset:
                ends = f'"{EARLIEST}" is {held.min_offset} and "{LATEST}" is {held.max_offset} now'
                step = f"reset_offsets goes to offsets from the first message there to behind the last: {ends}."
                raise OffsetRangeError(str(queue), offset, offset, held.min_offset, held.max_offset, step)
            if queue in targets:
                raise OptionError(f"reset_offsets: to[{topic!r}] names the queue {queue.queue_id} twice.")
            targets[queue] = offset
    if not targets:
        raise OptionError("reset_offsets: `to` names no queue.")
    return targets


def _queue_id(topic: str, value: object) -> int:
    """Return a queue's id from a key of a map, which in JSON is a text."""
    if isinstance(value, str):
        is_number = value.isascii() and value.isdigit() and len(value) <= _QUEUE_ID_DIGITS
        value = int(value) if is_number else value
    try:
        return check_whole("queue id", value, 0)
    except OptionError:
        raise OptionError(f"reset_offsets: to[{topic!r}] has {value!r}, which is no queue id.") from None


def _no_group(root: str, group: str, known: Collection[str]) -> NotFoundError:
    return NotFoundError(
        f'no consumer group "{group}" in the store at "{root}": it has no offsets, and no query of ours left a trace '
        f"of it (one with messageModel=broadcasting never does). {_others(group, known)}"
    )


def _nothing_to_reset(root: str, group: str) -> NotFoundError:
    known = _known_groups(root)
    others = "" if group in known else f" {_others(group, known)}"
    return NotFoundError(
        f'consumer group "{group}" has no offsets in the store at "{root}". Name the topics to reset.{others}'
    )


def _others(group: str, known: Collection[str]) -> str:
    """Return a sentence or two that name the groups that there are."""
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


def _published_ms(root: str, group: str) -> int | None:
    noted = read_published(GroupPaths(root, group).published)
    return noted.time_ms if noted is not None else None


def _owners(root: str, group: str) -> dict[QueueKey, str]:
    """Return the ids of the living members that have queues, as far as it can be told from here, and by one look."""
    paths = GroupPaths(root, group)
    # Nothing expires within one look, so that a member of another host lives as long as its file is there.
    observer = Observer(paths, 0, time.monotonic, is_shared=is_remote(root))
    try:
        claims = read_claims(paths.claims).queues
        living = {owner for owner in {claim.owner for claim in claims.values()} - {NOBODY} if observer.is_alive(owner)}
    except StoreError:  # damaged, or not to be read: who is to read queues says so
        return {}
    return {queue: claim.owner for queue, claim in claims.items() if claim.owner in living}


def _store(path: str | PurePath, commit_log_path: str | None) -> str:
    """Return the store's folder, absolute. Raises StorePathError where there is no store."""
    root = files.absolute(path)
    commit_log_folders(root, commit_log_path)
    return root


def _nested(offsets: Mapping[QueueKey, int]) -> GroupOffsets:
    found: GroupOffsets = {}
    for queue, offset in sorted(offsets.items()):
        found.setdefault(queue.topic, {})[queue.queue_id] = offset
    return found
