"""Where a group's side files lie, and the group's turn: who has it may change them.

    rmq/groups/<group>/turn                    locked by whoever changes what follows
                       members/<id>.lock       locked by a living member
                       members/<id>.json       who the member is
                       members/<id>.finished   the last batch that the member finished; written by its driver
                       members/<id>.planned    the last batch that the member planned
                       claims.json             whose each queue is
                       resets.json             offsets that queries are to go to
                       published.json          when the group's offsets were last published
                       suspended.json          queues that an orderly listener stopped; written under the store's lock

The turn is held for milliseconds. Order of locks: the group's turn, then the store's lock; never the other way round.
Readers need no turn: every file is replaced as a whole.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from rmq_spark.store.commit.keys import safe_name, side_path
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.errors import LockTimeoutError

GROUPS = "groups"
TURN_TIMEOUT_MS = 60_000  # who has the turn may wait for the store's lock: no less than that takes by default

_POLL_MS, _LONG_POLL_MS = 2, 20
_LONG_AFTER_MS = 1_000
_CUT_MARK = "+"  # in a name that `safe_name` cut


@dataclass(frozen=True, slots=True)
class GroupPaths:
    """The paths of one group's files in the store at `root`. A group's name is one that brokers take."""

    root: str
    group: str

    @property
    def folder(self) -> str:
        """The folder of all of them."""
        return side_path(self.root, GROUPS, safe_name(self.group))

    @property
    def turn(self) -> str:
        """The file that is locked by whoever changes the others."""
        return files.join(self.folder, "turn")

    @property
    def members(self) -> str:
        """The folder of the members' files."""
        return files.join(self.folder, "members")

    def member_lock(self, member_id: str) -> str:
        """Return the file that a member locks for its life."""
        return files.join(self.members, f"{safe_name(member_id)}.lock")

    def member(self, member_id: str) -> str:
        """Return the file that says who a member is."""
        return files.join(self.members, f"{safe_name(member_id)}.json")

    def finished_batch(self, member_id: str) -> str:
        """Return the file in which a member's driver records the last batch that the member finished."""
        return files.join(self.members, f"{safe_name(member_id)}.finished")

    def planned_batch(self, member_id: str) -> str:
        """Return the file in which a member records the last batch that it planned."""
        return files.join(self.members, f"{safe_name(member_id)}.planned")

    @property
    def claims(self) -> str:
        """The file that says whose each queue is."""
        return files.join(self.folder, "claims.json")

    @property
    def resets(self) -> str:
        """The file of the offsets that queries of the group are to go to."""
        return files.join(self.folder, "resets.json")

    @property
    def published(self) -> str:
        """The file that says when the group's offsets were last published."""
        return files.join(self.folder, "published.json")

    @property
    def suspended(self) -> str:
        """The file of the queues that an orderly listener stopped."""
        return files.join(self.folder, "suspended.json")


def list_group_names(root: str) -> list[str]:
    """Return the groups that have side files, sorted, but for those with a name too long for a folder's."""
    folders = [name for name, is_folder in files.list_folder(side_path(root, GROUPS)) if is_folder]
    return sorted(unquote(name) for name in folders if _CUT_MARK not in name)


def make_group_folder(paths: GroupPaths, disk: Disk) -> None:
    """Make a group's folder, for good. Needs no lock: whoever comes second finds it."""
    if files.file_size(paths.turn) >= 0:
        return
    disk.make_folder(paths.folder)
    # What the folder is to hold must not be lost with a name above it. Whoever made those may have died before it
    # synced them. `turn` comes last: where it is, all names are safe.
    for folder in (side_path(paths.root, GROUPS), side_path(paths.root), paths.root):
        disk.sync_folder(folder)
    with contextlib.suppress(FileExistsError):  # another process was as quick
        disk.create_lock(paths.turn)


class GroupTurn:
    """The turn of one group. For one thread; two objects exclude each other even in one process.

    `sleep` takes seconds. Do not fork while it is held.
    """

    def __init__(
        self, paths: GroupPaths, disk: Disk, sleep: Callable[[float], None], timeout_ms: int = TURN_TIMEOUT_MS
    ) -> None:
        self._paths, self._disk, self._sleep, self._timeout_ms = paths, disk, sleep, timeout_ms
        self._lock = FileLock(paths.turn, only_writers=True)
        self._holds = 0  # begun so far

    @property
    def is_held(self) -> bool:
        """Say whether this object has the turn."""
        return self._lock.is_held

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Have the turn in the body of `with`; waits for it. The group's folder is there then, for good.

        Raises LockTimeoutError, which names the group, when somebody keeps it for the timeout, and StorePathError for
        folders that cannot be written. Nothing is held after an error.
        """
        make_group_folder(self._paths, self._disk)
        self._holds += 1
        number = self._holds
        try:
            self._wait()
            yield
        finally:
            # An interrupted `with` may be finalized late, when the same object holds the lock for another one.
            if number == self._holds:
                self._lock.release()

    def release(self) -> None:
        """Release the lock if an interrupt kept `hold` from that; nothing happens if it is not held."""
        self._lock.release()

    def _wait(self) -> None:
        waited_ms = 0
        while not self._lock.try_take():
            if waited_ms >= self._timeout_ms:
                raise LockTimeoutError(
                    f'consumer group "{self._paths.group}" of the store at {self._paths.root}: another process keeps '
                    f"{self._paths.turn} locked for {self._timeout_ms / 1000:g} s, which takes milliseconds as a rule. "
                    "It waits for the store's lock, or it hangs: then stop it, and its lock goes with it "
                    "(lslocks names it). Nothing of the group was changed."
                )
            pause_ms = _POLL_MS if waited_ms < _LONG_AFTER_MS else _LONG_POLL_MS
            pause_ms = max(1, min(pause_ms, self._timeout_ms - waited_ms))
            self._sleep(pause_ms / 1000)
            waited_ms += pause_ms
