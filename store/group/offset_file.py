"""config/consumerOffset.json: how far every group has come, where a broker and its tools look for it.

Read by anybody, without a lock. Written under the store's lock, and only while no broker holds the store: a broker
keeps the offsets in memory, reads the file when it starts and overwrites it every five seconds.

| what is there | what is read |
| --- | --- |
| the file, whole | the file |
| no file, or one that stays empty or broken | `.bak`, which is what the file held before |
| neither | no offsets |
| one that is empty or broken, and nothing whole beside it | DamageError |

A broker of 5.x overwrites the file in place, so one that is empty or broken is read again before `.bak` is taken; and
that is a warning, for its offsets may be older.
Source: ConfigManager#load, #persist; ConsumerOffsetManager (4.9, 5.3). RocketMQ takes an empty or broken file without
`.bak` for one without offsets, and every group would begin anew; here that is damage: a power cut leaves such files.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, LockTimeoutError, OptionError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import (
    ConsumerOffsets,
    decode_consumer_offsets,
    encode_consumer_offsets,
    offset_key,
)
from rmq_spark.store.group.seen_ends import SeenEnds
from rmq_spark.store.group.whole_number import check_offset
from rmq_spark.store.log.store_lock import LockSettings, StoreLock
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")

_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled each time: a broker overwrites the file within milliseconds

Sleep = Callable[[float], None]
Offsets = Mapping[QueueKey, int]


class Outcome(Enum):
    """What became of a commit."""

    WRITTEN = "the offsets are on disk for good"
    UNCHANGED = "the file had them already"
    BROKER = "a broker holds the store, and the file is its own: nothing was written"


@dataclass(frozen=True, slots=True)
class _Held:
    """What was read: the offsets, and the file's bytes if they come from the file itself, whole."""

    offsets: ConsumerOffsets
    data: bytes | None


def read_consumer_offsets(root: str, sleep: Sleep) -> ConsumerOffsets:
    """Return the offsets of all groups of the store at `root`. Changes nothing on disk; anybody may, at any time.

    `sleep` takes seconds. Raises DamageError.
    """
    return _read(root, sleep, None).offsets


def stamp_of_offsets(root: str) -> tuple[int, int, int] | None:
    """Return what differs once anybody wrote consumerOffset.json of the store at `root`, None without the file."""
    return files.stamp(_path(root))


def read_group_offsets(root: str, group: str, sleep: Sleep) -> dict[QueueKey, int]:
    """Return the next queue offsets of one group, {} for a group without any. Raises DamageError."""
    return group_offsets_of(read_consumer_offsets(root, sleep), group)


def group_offsets_of(held: ConsumerOffsets, group: str) -> dict[QueueKey, int]:
    """Return one group's next queue offsets, sorted by queue. Negative ones, which mean none, are left out."""
    found = {}
    for topic in sorted(topics_by_group(held).get(group, ())):
        for queue_id, offset in sorted(held.of(topic, group).items()):
            if offset >= 0:
                found[QueueKey(topic, queue_id)] = offset
    return found


def topics_by_group(held: ConsumerOffsets) -> dict[str, list[str]]:
    """Return the topics in which each group has offsets. Keys that name no group are passed over."""
    found: dict[str, list[str]] = {}
    for key in held.offsets:
        topic, _, group = key.partition("@")
        if topic and group:
            found.setdefault(group, []).append(topic)
    return found


def refuse_commit(root: str, group: str) -> LockTimeoutError:
    """Return the error, which is also the text of a warning, for offsets that cannot be set beside a broker."""
    return LockTimeoutError(
        f'the offsets of consumer group "{group}" cannot be written to {_path(root)}: a broker holds the store and '
        "overwrites that file with what it knows. The offsets there are the broker's. A query goes on from its "
        "checkpoint all the same. Stop the broker (mqshutdown broker) to have our offsets published, or set its own "
        "with mqadmin resetOffsetByTime."
    )


class OffsetFile:
    """The offsets of all groups of the store at `root`, for writing. One thread; any number of processes of ours.

    `settings` are how the store's lock is taken, `now_ms` is the clock, `sleep` takes seconds.
    """

    def __init__(self, root: str, disk: Disk, settings: LockSettings, now_ms: Callable[[], int], sleep: Sleep) -> None:
        self._root, self._disk, self._now_ms, self._sleep = root, disk, now_ms, sleep
        self._path = _path(root)
        self._lock = StoreLock(root, disk, settings, now_ms, sleep)
        self._known: _Held | None = None  # as last read or written: most often it still is
        self._synced: bytes | None = None  # what of the file is known to survive a power cut

    def read(self, group: str) -> dict[QueueKey, int]:
        """Return a group's offsets as they are now. Takes no lock. Raises DamageError."""
        return group_offsets_of(self._look().offsets, group)

    def commit(self, group: str, offsets: Offsets, ends: SeenEnds | None = None) -> Outcome:
        """Set a group's next queue offsets, in these queues; whatever else the file holds stays.

        A smaller offset than there is counts like any other (ConsumerOffsetManager#commitOffset). With `ends` no offset
        is written that is beyond the end of its queue by now; `ends.corrected` names the queues concerned.
        Nothing is locked or written where all are there already. Waits for writers of ours, not for a broker. After an
        error or a crash either all or none of them are there. Raises OptionError for what is no queue offset,
        LockTimeoutError, StorePathError, DiskFullError, DamageError.
        """
        if self._has_all(self._look(), group, offsets):
            return Outcome.UNCHANGED
        if self._lock.has_broker():
            return Outcome.BROKER
        try:
            with self._lock.hold():
                return self.commit_held(group, ends.within(offsets) if ends is not None else offsets)
        except LockTimeoutError:
            if self._lock.has_broker():  # it started between the two
                return Outcome.BROKER
            raise

    @contextlib.contextmanager
    def hold(self, group: str) -> Iterator[None]:
        """Hold the store's lock in the body of `with`, for `commit_held` and what must come before it.

        Raises LockTimeoutError, at once where a broker holds the store, and what StoreLock#hold raises.
        """
        if self._lock.has_broker():
            raise refuse_commit(self._root, group)
        with self._lock.hold():
            yield

    def release(self) -> None:
        """Release the store's lock if an interrupt kept `hold` or `commit` from that; else nothing happens."""
        self._lock.release()

    def commit_held(self, group: str, offsets: Offsets) -> Outcome:
        """Do what `commit` does, for who holds the lock by `hold`."""
        assert self._lock.is_held, "the store's lock is not held"
        for queue, offset in offsets.items():
            check_offset(f"commit of queue {queue}", offset)
        filenames.check_group_name(group)
        held = self._look()  # again: what others wrote until now must stay
        if self._has_all(held, group, offsets):
            return Outcome.UNCHANGED
        table = dict(held.offsets.offsets)
        for topic, changed in _by_topic(offsets).items():
            table[offset_key(topic, group)] = {**held.offsets.of(topic, group), **changed}
        version = held.offsets.data_version
        if version is not None:  # 5.x; DataVersion#nextVersion
            version = replace(version, counter=version.counter + 1, timestamp=self._now_ms())
        self._write(held, replace(held.offsets, offsets=table, data_version=version))
        return Outcome.WRITTEN

    def _write(self, held: _Held, offsets: ConsumerOffsets) -> None:
        data = encode_consumer_offsets(offsets, bare_numbers=True)
        _refuse_unreadable(self._path, data, offsets)
        if held.data is None:
            # A file that is missing or broken: what counts is in `.bak`, if anywhere, and stays there untouched.
            self._disk.make_folder(files.parent(self._path))
            self._disk.sync_folder(self._root)
        else:
            if held.data != self._synced:
                # A broker waits for no disk. Until the new file has its name, this one must survive a power cut, and
                # under its name: those that the broker wrote before may have been synced no more than this one.
                self._disk.make_durable(self._path, held.data)
            # For who finds the file broken later. Not synced: whatever a power cut leaves of it, the file is whole.
            self._disk.replace_unsynced(self._path + filenames.BACKUP_SUFFIX, held.data)
        # A crash in here leaves the file as it was, or the new one, both whole. After it the new offsets are there for
        # everybody and for good.
        self._disk.replace(self._path, data)
        self._known, self._synced = _Held(offsets, data), data

    def _look(self) -> _Held:
        self._known = _read(self._root, self._sleep, self._known)
        return self._known

    def _has_all(self, held: _Held, group: str, offsets: Offsets) -> bool:
        return all(
            changed.items() <= held.offsets.of(topic, group).items() for topic, changed in _by_topic(offsets).items()
        )


def _refuse_unreadable(path: str, data: bytes, offsets: ConsumerOffsets) -> None:
    """Raise OptionError unless the bytes say what they are to say: all groups of the store depend on this one file."""
    try:
        read = decode_consumer_offsets(data).offsets
        problem = "" if read == offsets.offsets else "other offsets would be read"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise OptionError(
            f"the offsets to be written to {path} could not be read again ({problem}). Nothing was written. Queue "
            "offsets are whole numbers from 0 to 2**63 - 1."
        )


def _by_topic(offsets: Offsets) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for queue, offset in offsets.items():
        found.setdefault(queue.topic, {})[queue.queue_id] = offset
    return found


def _path(root: str) -> str:
    return files.join(root, filenames.CONFIG, filenames.CONSUMER_OFFSET_JSON)


def _read(root: str, sleep: Sleep, known: _Held | None) -> _Held:
    """Read the file or `.bak`; `known` is returned again where the file is byte by byte the same."""
    path, problem, data = _path(root), None, None
    for attempt in range(_TRIES):
        data = files.read_small(path)
        if data is None:
            break
        if known is not None and data == known.data:
            return known
        try:
            if data:
                return _Held(decode_consumer_offsets(data), data)
        except ValueError as error:
            problem = error
        if attempt < _TRIES - 1:
            sleep(_WAIT_SECONDS * 2**attempt)
    return _read_backup(path, data, problem)


def _read_backup(path: str, data: bytes | None, problem: ValueError | None) -> _Held:
    """Read `.bak` in place of the file, which is gone (`data` is None), empty or broken (`problem`)."""
    backup = files.read_small(path + filenames.BACKUP_SUFFIX)
    if backup:
        try:
            held = _Held(decode_consumer_offsets(backup), None)
            if data is not None:
                _warn_of_backup(path, files.stamp(path))
            return held
        except ValueError as error:
            what = "not the JSON of consumer offsets, and the file that it stands in for cannot be read either"
            raise _damage(path, filenames.BACKUP_SUFFIX, what, str(error)) from error
    beside = "nothing in the .bak beside it" if backup is not None else "there is no .bak beside it"
    if problem is not None:
        raise _damage(path, "", f"not the JSON of consumer offsets, and {beside}", str(problem)) from problem
    if data is not None:
        raise _damage(path, "", f"empty, and {beside}", "nothing")
    if backup is not None:
        raise _damage(path, filenames.BACKUP_SUFFIX, "empty, and the file that it stands in for is gone", "nothing")
    return _Held(ConsumerOffsets(), None)


@functools.lru_cache(maxsize=64)  # once in a process, until the file is another one
def _warn_of_backup(path: str, _: tuple[int, int, int] | None) -> None:
    _LOG.warning(
        "rmq: %s is empty or broken, so the offsets of all groups are taken from the .bak beside it, where they are up "
        "to one publication old: the messages since then may come again. Nothing is to be done, the next publication "
        "makes the file whole",
        path,
    )


def _damage(path: str, suffix: str, what: str, found: str) -> DamageError:
    return DamageError(
        f"{what}; without it every group begins anew",
        path + suffix,
        0,
        "JSON",
        found,
        f"Restore {path} from a copy. If that may be so, remove it and its {filenames.BACKUP_SUFFIX}: then no group "
        "has an offset, and queries of ours go on from their checkpoints.",
    )
