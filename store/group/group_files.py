"""The side files of one consumer group: their paths, the group's lock, and the smallest files.

    rmq/groups/<group>/turn                    the lock file: locked by the process that changes the other files
                       members/<id>.lock       locked by the member as long as it lives
                       members/<id>.json       the properties of the member
                       members/<id>.planned    the last batch that the member planned; written by its reader
                       members/<id>.finished   the last batch that the member finished; written by its driver
                       claims.json             the owner of each queue
                       resets.json             the offsets that queries must seek to
                       published.json          the time of the last commit by a query; only for display
                       suspended.json          the suspended queues; written under the store's lock

The group's lock is held for milliseconds. A process that needs both locks takes the group's lock first and the store's
lock second. Readers need no lock, because every file is replaced atomically.

A query has two processes, which exchange data by the files `.planned` and `.finished`. Spark calls the reader's process
to plan a batch, and tells the driver's process when a batch has ended. The driver then commits the batch's offsets and
records the number of the batch in `.finished`, where the reader finds it. Spark may tell the driver so late that the
reader has planned a later batch already. The driver notices this by the number in `.planned`. The numbers count the
batches of the member, beginning at 1. Both files are written without a sync, because a power cut ends the member too.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from rmq_spark.store.disk import files
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import LockTimeoutError, StoreError
from rmq_spark.store.format.side_file import encode_side_file, number_of, safe_name, text_of
from rmq_spark.store.log.store_state import read_side_file, side_path

GROUPS = "groups"
TURN_TIMEOUT_MS = 60_000  # as long as the default timeout of the store's lock, for which the holder may wait
_POLL_MS, _LONG_POLL_MS = 2, 20
_LONG_AFTER_MS = 1_000
_CUT_MARK = "+"  # `safe_name` puts this into a name that it shortens


@dataclass(frozen=True, slots=True)
class GroupPaths:
    """The paths of one group's files in the store at `root`. A broker must accept the group's name."""

    root: str
    group: str

    @property
    def folder(self) -> str:
        """The folder that contains all other paths."""
        return side_path(self.root, GROUPS, safe_name(self.group))

    @property
    def turn(self) -> str:
        """The lock file of the group."""
        return files.join(self.folder, "turn")

    @property
    def members(self) -> str:
        """The folder of the members' files."""
        return files.join(self.folder, "members")

    def member_lock(self, member_id: str) -> str:
        """Return the path of the file that a member locks while it lives."""
        return files.join(self.members, f"{safe_name(member_id)}.lock")

    def member(self, member_id: str) -> str:
        """Return the path of the file that describes a member."""
        return files.join(self.members, f"{safe_name(member_id)}.json")

    def finished_batch(self, member_id: str) -> str:
        """Return the path of the file with the number of the last batch that a member finished."""
        return files.join(self.members, f"{safe_name(member_id)}.finished")

    def planned_batch(self, member_id: str) -> str:
        """Return the path of the file with the number of the last batch that a member planned."""
        return files.join(self.members, f"{safe_name(member_id)}.planned")

    @property
    def claims(self) -> str:
        """The file of the claims."""
        return files.join(self.folder, "claims.json")

    @property
    def resets(self) -> str:
        """The file of the resets."""
        return files.join(self.folder, "resets.json")

    @property
    def published(self) -> str:
        """The file with the time of the last commit."""
        return files.join(self.folder, "published.json")

    @property
    def suspended(self) -> str:
        """The file of the suspended queues."""
        return files.join(self.folder, "suspended.json")


def list_group_names(root: str) -> list[str]:
    """Return the names of the groups that have side files, sorted.

    A group whose name is too long for the name of a folder is left out.
    """
    folders = [name for name, is_folder in files.list_folder(side_path(root, GROUPS)) if is_folder]
    return sorted(unquote(name) for name in folders if _CUT_MARK not in name)


def make_group_folder(paths: GroupPaths, disk: Disk) -> None:
    """Create a group's folder and its lock file, if they do not exist. They are durable. Needs no lock."""
    if files.file_size(paths.turn) >= 0:
        return
    disk.make_folder(paths.folder)
    # All parent folders are synced, because the process that created them may have died before it synced them. `turn`
    # is created last, so if it exists, the folders are durable.
    for folder in (side_path(paths.root, GROUPS), side_path(paths.root), paths.root):
        disk.sync_folder(folder)
    with contextlib.suppress(FileExistsError):  # another process created it meanwhile
        disk.create_lock(paths.turn)


class GroupLock:
    """The lock of one group. For one thread at a time. Two objects exclude each other even within one process.

    `sleep` takes seconds. Do not fork while the lock is held.
    """

    def __init__(
        self, paths: GroupPaths, disk: Disk, sleep: Callable[[float], None], timeout_ms: int = TURN_TIMEOUT_MS
    ) -> None:
        self._paths, self._disk, self._sleep, self._timeout_ms = paths, disk, sleep, timeout_ms
        self._lock = FileLock(paths.turn, only_writers=True)
        self._holds = 0  # how many times `hold` was entered

    @property
    def is_held(self) -> bool:
        """Say whether this object holds the lock."""
        return self._lock.is_held

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock in the body of `with`. If the group has no folder, create it first.

        Raises LockTimeoutError if another process holds the lock for longer than the timeout, and StorePathError if the
        folders may not be written. After an error the lock is not held.
        """
        make_group_folder(self._paths, self._disk)
        self._holds += 1
        number = self._holds
        try:
            self._wait()
            yield
        finally:
            # If an interrupt ends a `with`, this may run late, when the object already holds the lock for a later one.
            if number == self._holds:
                self._lock.release()

    def release(self) -> None:
        """Release the lock if an interrupt prevented `hold` from doing so."""
        self._lock.release()

    def _wait(self) -> None:
        waited_ms = 0
        while not self._lock.try_take():
            if waited_ms >= self._timeout_ms:
                raise LockTimeoutError(
                    f'consumer group "{self._paths.group}" of the store at {self._paths.root}: another process keeps '
                    f"{self._paths.turn} locked for {self._timeout_ms / 1000:g} s; expected milliseconds. It waits for "
                    "the store's lock, or it hangs. Find it with lslocks and stop it if it hangs, which releases the "
                    "lock. Nothing of the group was changed."
                )
            pause_ms = _POLL_MS if waited_ms < _LONG_AFTER_MS else _LONG_POLL_MS
            pause_ms = max(1, min(pause_ms, self._timeout_ms - waited_ms))
            self._sleep(pause_ms / 1000)
            waited_ms += pause_ms


@dataclass(frozen=True, slots=True)
class CommitStamp:
    """The time of a group's last commit (ms since the epoch), and `by` whom it was made. Only for display."""

    group: str
    time_ms: int
    by: str


_STAMP_NEXT_STEP = "Remove the file: the next commit writes it again."


def write_commit_stamp(paths: GroupPaths, disk: Disk, time_ms: int, by: str) -> None:
    """Record the time of a commit. The caller must hold the group's lock.

    The offsets are committed already, so an error of this write is ignored. A power cut may lose the record.
    """
    fields = {"group": paths.group, "timeMs": time_ms, "by": by}
    with contextlib.suppress(StoreError):
        disk.replace_unsynced(paths.published, encode_side_file(fields))


def read_commit_stamp(path: str) -> CommitStamp | None:
    """Return the content of the file at `path` (`GroupPaths.published`).

    Returns None if the file does not exist, is corrupt, was written by a newer version, or cannot be read.
    """
    try:
        return read_side_file(path, "the time of a group's last commit", _STAMP_NEXT_STEP, _build_stamp)
    except StoreError:
        return None


def _build_stamp(fields: dict[str, Any]) -> CommitStamp:
    return CommitStamp(text_of(fields, "group"), number_of(fields, "timeMs"), text_of(fields, "by"))


_FINISHED_NEXT_STEP = "Remove the file: the member's driver writes it again after the next batch."
_PLANNED_NEXT_STEP = "Remove the file: the member's reader writes it again with the next batch."


def write_finished_batch(paths: GroupPaths, disk: Disk, member_id: str, batch: int) -> None:
    """Record that a member has finished the batch with the number `batch`.

    The batch's offsets must be committed already, and the caller must hold the group's lock. Raises the errors of
    `Disk`.
    """
    disk.replace_unsynced(paths.finished_batch(member_id), encode_side_file({"batch": batch}))


def write_planned_batch(paths: GroupPaths, disk: Disk, member_id: str, batch: int) -> None:
    """Record that a member has planned the batch with the number `batch`. Raises the errors of `Disk`."""
    disk.replace_unsynced(paths.planned_batch(member_id), encode_side_file({"batch": batch}))


def read_planned_batch(paths: GroupPaths, member_id: str) -> int:
    """Return the number of the last batch that a member has planned, or 0 if it has planned none.

    Takes no lock. Raises DamageError if the file is damaged.
    """
    path = paths.planned_batch(member_id)
    return read_side_file(path, "the number of a member's last planned batch", _PLANNED_NEXT_STEP, _build_batch) or 0


def read_finished_batch(paths: GroupPaths, member_id: str) -> int:
    """Return the number of the last batch that a member has finished.

    Returns 0 if it has finished none, and also if the file is damaged or cannot be read. Takes no lock.
    """
    try:
        return (
            read_side_file(
                paths.finished_batch(member_id), "a member's last finished batch", _FINISHED_NEXT_STEP, _build_batch
            )
            or 0
        )
    except StoreError:
        return 0


def _build_batch(fields: dict[str, Any]) -> int:
    return number_of(fields, "batch", least=1)
