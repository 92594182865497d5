"""The committed offsets of all groups, in the file `config/consumerOffset.json`.

Brokers and their tools use the same file. Reading it takes no lock. Writing it takes the store's lock, and is refused
while a broker holds the store. A broker would overwrite our offsets, because it reads the file only at its start, keeps
the offsets in memory, and writes them to the file every 5 s.

If the file is missing, empty or corrupt, the offsets may come from its `.bak`, the previous content:

| file | `.bak` | result |
| --- | --- | --- |
| valid | any | the offsets of the file |
| missing, empty or corrupt | valid | the offsets of `.bak` |
| missing | missing | no offsets |
| empty or corrupt | missing, empty or corrupt | DamageError |
| missing | empty or corrupt | DamageError |

A broker of 5.x overwrites the file in place, so a reader may see it half written. For that reason an empty or corrupt
file is read again several times before `.bak` is used. Using `.bak` instead of an empty or corrupt file logs a warning,
because its offsets may be older. If there is no valid `.bak`, RocketMQ continues without any offsets, and every group
starts again. Here this is a DamageError, because a power cut may have caused it.
Source: ConfigManager#load, #persist; ConsumerOffsetManager (4.9, 5.3).

`SeenEnds` protects against commits of offsets beyond the end of a queue. Such an offset would make the group skip
messages that are stored later. Reading the ends of all queues under the store's lock would take too long, so offsets
are compared with the queue ends long before they are committed. A repair in between may truncate the log. But each
repair runs a recovery, and each recovery replaces the registry of queues (`rmq/queues`). So if the registry is
unchanged, no queue has become shorter.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from rmq_spark.store.argument_checks import check_offset
from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, LockTimeoutError, OptionError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import (
    ConsumerOffsets,
    decode_consumer_offsets,
    encode_consumer_offsets,
    offset_key,
)
from rmq_spark.store.log.queue_registry import registry_path
from rmq_spark.store.log.rebuild import read_rebuild
from rmq_spark.store.log.store_lock import LockSettings, StoreLock
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import check_group_name

Stamp = tuple[int, int, int] | None  # the stamp of the registry of queues, or None if the registry does not exist


def stamp_of_ends(root: str) -> Stamp:
    """Return a stamp that changes whenever a queue may have become shorter.

    Call this before you read the queue ends. If the stamp is the same later, these queue ends are still valid.
    """
    return files.stamp(registry_path(root))


class SeenEnds:
    """The queue ends of the store at `root`, which the caller has read after it took `stamp`.

    Create one object for each commit. `corrected` contains the queues whose offset `within` lowered or removed.
    """

    def __init__(self, root: str, stamp: Stamp) -> None:
        self._root, self._stamp = root, stamp
        self.corrected: set[QueueKey] = set()

    def within(self, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return the offsets, each limited to the current end of its queue. The caller must hold the store's lock.

        If the end of a queue is unknown, its offset is removed unless it is 0. If the stamp is unchanged, all offsets
        are returned as they are, which costs one `stat`. The queues are read only if the stamp has changed.
        """
        self.corrected = set()
        if stamp_of_ends(self._root) == self._stamp:
            return dict(offsets)
        found: dict[QueueKey, int] = {}
        rebuild, table = read_rebuild(self._root), TopicTable(self._root)
        for key, offset in offsets.items():
            end = None if rebuild is not None and key in rebuild.queues else _end_of(table, key)
            if offset > 0 and (end is None or end < offset):
                self.corrected.add(key)
            if not offset or end is not None:
                found[key] = min(offset, end or 0)
        return found


def _end_of(table: TopicTable, key: QueueKey) -> int | None:
    """Return the next queue offset of a queue, or None if it cannot be found in the files of the queue."""
    queue = table.find(key)
    if queue is None or queue.run.is_damaged() or not queue.run.segments:
        return None
    try:
        end = queue.search_written_end()
        return queue.offset_of(end, end)
    finally:
        queue.run.close()


_LOG = logging.getLogger("rmq_spark")
_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled with each try; a broker overwrites the file within milliseconds
Sleep = Callable[[float], None]
Offsets = Mapping[QueueKey, int]


class Outcome(Enum):
    """The outcome of a commit. The value of each member describes it."""

    WRITTEN = "the offsets are durable"
    UNCHANGED = "the file contained them already"
    BROKER = "a broker holds the store and overwrites the file: nothing was written"


@dataclass(frozen=True, slots=True)
class _Content:
    """The offsets that were read. `data` are the bytes of the file, or None if the offsets do not come from it."""

    offsets: ConsumerOffsets
    data: bytes | None


def read_consumer_offsets(root: str, sleep: Sleep) -> ConsumerOffsets:
    """Return the offsets of all groups of the store at `root`. Takes no lock and changes nothing on disk.

    `sleep` takes seconds, and is called between tries if the file is empty or corrupt. Raises DamageError if neither
    the file nor its `.bak` is valid, as the table of this module says.
    """
    return _read(root, sleep, None).offsets


def stamp_of_offsets(root: str) -> tuple[int, int, int] | None:
    """Return a stamp that changes with each write of consumerOffset.json, or None if the file does not exist."""
    return files.stamp(_path(root))


def read_group_offsets(root: str, group: str, sleep: Sleep) -> dict[QueueKey, int]:
    """Return the committed offsets of one group, or {} if it has none. Raises the errors of `read_consumer_offsets`."""
    return group_offsets_of(read_consumer_offsets(root, sleep), group)


def group_offsets_of(committed: ConsumerOffsets, group: str) -> dict[QueueKey, int]:
    """Return one group's committed offsets, sorted by queue. Leaves out negative offsets, because they mean "none"."""
    found = {}
    for topic in sorted(topics_by_group(committed).get(group, ())):
        for queue_id, offset in sorted(committed.of(topic, group).items()):
            if offset >= 0:
                found[QueueKey(topic, queue_id)] = offset
    return found


def topics_by_group(committed: ConsumerOffsets) -> dict[str, list[str]]:
    """Return for each group the topics in which it has offsets. Keys without a topic or a group are left out."""
    found: dict[str, list[str]] = {}
    for key in committed.offsets:
        topic, _, group = key.partition("@")
        if topic and group:
            found.setdefault(group, []).append(topic)
    return found


def refuse_commit(root: str, group: str) -> LockTimeoutError:
    """Return the error for a commit that is refused because a broker holds the store.

    A query that continues without the commit logs the text of this error as a warning.
    """
    return LockTimeoutError(
        f'the offsets of consumer group "{group}" cannot be written to {_path(root)}: a broker holds the store and '
        "overwrites that file with its own offsets. A query continues from its checkpoint anyway. Stop the broker "
        "(mqshutdown broker) to have the query's offsets committed, or set the broker's with mqadmin resetOffsetByTime."
    )


class OffsetFile:
    """The offset file of the store at `root`, open for reading and writing.

    For one thread at a time. Any number of our processes may have such an object for the same store. `settings`
    configure the store's lock, `now_ms` returns ms since the epoch, and `sleep` takes seconds.
    """

    def __init__(self, root: str, disk: Disk, settings: LockSettings, now_ms: Callable[[], int], sleep: Sleep) -> None:
        self._root, self._disk, self._now_ms, self._sleep = root, disk, now_ms, sleep
        self._path = _path(root)
        self._lock = StoreLock(root, disk, settings, now_ms, sleep)
        self._content: _Content | None = None  # as last read or written, so that it need not be decoded again
        self._synced: bytes | None = None  # the content of the file that is known to be durable

    def read(self, group: str) -> dict[QueueKey, int]:
        """Return a group's committed offsets, or {} if it has none. Takes no lock.

        Raises the errors of `read_consumer_offsets`.
        """
        return group_offsets_of(self._refresh().offsets, group)

    def commit(self, group: str, offsets: Offsets, ends: SeenEnds | None = None) -> Outcome:
        """Set the committed offsets of a group in these queues. All other offsets in the file stay as they are.

        An offset is set even if it is lower than the committed one (ConsumerOffsetManager#commitOffset). With `ends`,
        each offset is limited to the current end of its queue, and `ends.corrected` then contains the queues whose
        offset was lowered or removed. If the file has all these offsets already, nothing is locked or written. If a
        writer of ours holds the store, this waits for it. If a broker holds the store, this does not wait, but returns
        Outcome.BROKER. After an error or a crash, either all of the offsets are set or none.

        Raises OptionError for an invalid offset, LockTimeoutError if another writer keeps the lock for too long,
        StorePathError if this user may not write, DiskFullError if the disk is full, and DamageError if the offset file
        is damaged.
        """
        if self._has_all(self._refresh(), group, offsets):
            return Outcome.UNCHANGED
        if self._lock.has_broker():
            return Outcome.BROKER
        try:
            with self._lock.hold():
                return self.commit_held(group, ends.within(offsets) if ends is not None else offsets)
        except LockTimeoutError:
            if self._lock.has_broker():  # it started after the check above
                return Outcome.BROKER
            raise

    @contextlib.contextmanager
    def hold(self, group: str) -> Iterator[None]:
        """Hold the store's lock in the body of `with`, where the caller may check offsets and call `commit_held`.

        If a broker holds the store, raises LockTimeoutError immediately. Raises also the errors of `StoreLock.hold`.
        """
        if self._lock.has_broker():
            raise refuse_commit(self._root, group)
        with self._lock.hold():
            yield

    def release(self) -> None:
        """Release the store's lock if an interrupt prevented `hold` or `commit` from doing so."""
        self._lock.release()

    def commit_held(self, group: str, offsets: Offsets) -> Outcome:
        """Commit offsets like `commit`, inside the body of `hold`."""
        assert self._lock.is_held, "the store's lock is not held"
        for queue, offset in offsets.items():
            check_offset(f"commit of queue {queue}", offset)
        check_group_name(group)
        content = self._refresh()  # read under the lock, so it contains all commits of other processes
        if self._has_all(content, group, offsets):
            return Outcome.UNCHANGED
        table = dict(content.offsets.offsets)
        for topic, changed in offsets_by_topic(offsets).items():
            table[offset_key(topic, group)] = {**content.offsets.of(topic, group), **changed}
        version = content.offsets.data_version
        if version is not None:  # 5.x; DataVersion#nextVersion
            version = replace(version, counter=version.counter + 1, timestamp=self._now_ms())
        self._write(content, replace(content.offsets, offsets=table, data_version=version))
        return Outcome.WRITTEN

    def _write(self, content: _Content, offsets: ConsumerOffsets) -> None:
        data = encode_consumer_offsets(offsets, bare_numbers=True)
        _refuse_unreadable(self._path, data, offsets)
        if content.data is None:
            # The file is missing or corrupt. If there are valid offsets, they are in `.bak`, so `.bak` is not replaced.
            self._disk.make_folder(files.parent(self._path))
            self._disk.sync_folder(self._root)
        else:
            if content.data != self._synced:
                # A broker does not sync the file, so no version of it may be durable yet. The old file must be durable
                # under its name until the new one replaces it.
                self._disk.make_durable(self._path, content.data)
            # `.bak` is for readers that later find the file corrupt. It needs no sync, because after a power cut at
            # this point the file itself is valid.
            self._disk.replace_unsynced(self._path + filenames.BACKUP_SUFFIX, content.data)
        # A crash here leaves the old file or the new one, and both are valid. Afterwards the new offsets are durable.
        self._disk.replace(self._path, data)
        self._content, self._synced = _Content(offsets, data), data

    def _refresh(self) -> _Content:
        self._content = _read(self._root, self._sleep, self._content)
        return self._content

    def _has_all(self, content: _Content, group: str, offsets: Offsets) -> bool:
        return all(
            changed.items() <= content.offsets.of(topic, group).items()
            for topic, changed in offsets_by_topic(offsets).items()
        )


def _refuse_unreadable(path: str, data: bytes, offsets: ConsumerOffsets) -> None:
    """Raise OptionError unless `data` decodes to `offsets`.

    All groups of the store depend on this one file, so it must never be replaced by one that cannot be read.
    """
    try:
        read = decode_consumer_offsets(data).offsets
        problem = "" if read == offsets.offsets else "other offsets would be read"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise OptionError(
            f"offsets for {path} could not be read again after encoding ({problem}); expected the same offsets. "
            "Nothing was written. Give queue offsets as integers from 0 to 2**63 - 1."
        )


def offsets_by_topic(offsets: Offsets) -> dict[str, dict[int, int]]:
    """Return the offsets as {topic: {queue id: queue offset}}, in the given order."""
    found: dict[str, dict[int, int]] = {}
    for queue, offset in offsets.items():
        found.setdefault(queue.topic, {})[queue.queue_id] = offset
    return found


def _path(root: str) -> str:
    return files.join(root, filenames.CONFIG, filenames.CONSUMER_OFFSET_JSON)


def _read(root: str, sleep: Sleep, known: _Content | None) -> _Content:
    """Return the offsets from the file, or from `.bak` if the file is missing, empty or corrupt.

    Returns `known`, which was read earlier, if the file still has the same bytes.
    """
    path, problem, data = _path(root), None, None
    for attempt in range(_TRIES):
        data = files.read_small(path)
        if data is None:
            break
        if known is not None and data == known.data:
            return known
        try:
            if data:
                return _Content(decode_consumer_offsets(data), data)
        except ValueError as error:
            problem = error
        if attempt < _TRIES - 1:
            sleep(_WAIT_SECONDS * 2**attempt)
    return _read_backup(path, data, problem)


def _read_backup(path: str, data: bytes | None, problem: ValueError | None) -> _Content:
    """Return the offsets from `.bak`, because the file is missing, empty or corrupt.

    `data` are the bytes of the file, or None if the file is missing. `problem` says why the file cannot be decoded.
    """
    backup = files.read_small(path + filenames.BACKUP_SUFFIX)
    if backup:
        try:
            content = _Content(decode_consumer_offsets(backup), None)
            if data is not None:
                _warn_of_backup(path, files.stamp(path))
            return content
        except ValueError as error:
            what = "not the JSON of consumer offsets, and the file that it replaces is not readable either"
            raise _damage(path, filenames.BACKUP_SUFFIX, what, str(error)) from error
    beside = "nothing in the .bak beside it" if backup is not None else "there is no .bak beside it"
    if problem is not None:
        raise _damage(path, "", f"not the JSON of consumer offsets, and {beside}", str(problem)) from problem
    if data is not None:
        raise _damage(path, "", f"empty, and {beside}", "nothing")
    if backup is not None:
        raise _damage(path, filenames.BACKUP_SUFFIX, "empty, and the file that it replaces is missing", "nothing")
    return _Content(ConsumerOffsets(), None)


@functools.lru_cache(maxsize=64)  # so that each process warns only once about each version of the file
def _warn_of_backup(path: str, _: tuple[int, int, int] | None) -> None:
    _LOG.warning(
        "rmq: %s is empty or broken, so the offsets of all groups come from the .bak beside it. They are up to one "
        "publication old: later messages may be read again. No action is needed, the next commit writes the file again",
        path,
    )


def _damage(path: str, suffix: str, what: str, found: str) -> DamageError:
    return DamageError(
        f"{what}; without it every group starts again",
        path + suffix,
        0,
        "JSON",
        found,
        f"Restore {path} from a copy. If that may be so, remove it and its {filenames.BACKUP_SUFFIX}: then no group "
        "has an offset, and our queries continue from their checkpoints.",
    )
