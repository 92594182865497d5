"""Whether other members of a group live, as seen from this process.

On one machine their locks say so, at once. Where several machines share a file system their locks may not be seen, and
there a member lives if its file changed within `leaseTimeout`, by the clock of whoever looks: within its own or the
observer's, whichever is longer, for who beats seldom is not dead to one that beats often. No two machines' clocks are
compared, and no clock that anybody can set is asked.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rmq_spark.store.disk import files
from rmq_spark.store.disk.host import this_process
from rmq_spark.store.disk.lock_probe import is_locked
from rmq_spark.store.errors import DamageError
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.group.member_file import Member, read_member

# host.boot_id where a container hides the kernel's: the second of the start, which two machines may have in common.
_WEAK_BOOT_ID = "btime"


@dataclass(slots=True)
class _Beat:
    data: bytes
    seen: float  # s, of the observer's clock
    has_changed: bool  # since the first look


class Observer:
    """Looks after the other members of one group. For one thread.

    `monotonic` is a clock in seconds that only runs forward; `is_shared` says whether other machines may use this file
    system and not see this one's locks.
    """

    def __init__(
        self, paths: GroupPaths, lease_timeout_ms: int, monotonic: Callable[[], float], *, is_shared: bool
    ) -> None:
        self._paths, self._timeout_ms, self._monotonic = paths, lease_timeout_ms, monotonic
        self._is_shared, self._here = is_shared, this_process()
        self._members: dict[str, Member] = {}
        self._beats: dict[str, _Beat] = {}

    def member(self, member_id: str) -> Member | None:
        """Return who a member is, None if its file is gone or damaged. What it says is remembered, but for the beat."""
        known = self._members.get(member_id)
        if known is None:
            try:
                known = read_member(self._paths.member(member_id))
            except DamageError:
                return None  # a living one writes it again; of a dead one it is taken away
            if known is not None:
                self._members[member_id] = known
        return known

    def is_by_lock(self, member_id: str) -> bool:
        """Say whether the member's lock can be seen from here: then its death shows at once."""
        member = self.member(member_id)
        if not self._is_shared:
            # Another host, started at another time: another machine, whatever the file system calls itself. The same
            # host started again has none of the locks that it had before.
            return member is None or self._here.host == member.process.host or self._has_our_boot_id(member)
        if member is None or not member.process.boot_id or member.process.boot_id != self._here.boot_id:
            return False
        # The containers of one machine have different names and one kernel, which has all their locks.
        return member.process.host == self._here.host or not self._here.boot_id.startswith(_WEAK_BOOT_ID)

    def _has_our_boot_id(self, member: Member) -> bool:
        """Say whether a member's machine may be this one, as far as the systems say when they were started."""
        return not member.process.boot_id or member.process.boot_id == self._here.boot_id

    def is_alive(self, member_id: str) -> bool:
        """Say whether a member lives. One whose lock cannot be seen lives at first sight, and as long as it beats."""
        if self.is_by_lock(member_id):
            # Exclusively: a user who may only read could lock the file of a dead member, and so keep it alive.
            return is_locked(self._paths.member_lock(member_id), exclusively=True)
        data = files.read_small(self._paths.member(member_id))
        now = self._monotonic()  # after the look: a pause between the two must not count against the member
        if data is None:
            return False
        beat = self._beats.get(member_id)
        if beat is None or beat.data != data:
            self._beats[member_id] = _Beat(data, now, beat is not None)
            return True
        member = self.member(member_id)
        timeout_ms = max(self._timeout_ms, member.lease_timeout_ms if member is not None else 0)
        return (now - beat.seen) * 1000 < timeout_ms

    def has_beaten(self, member_id: str) -> bool:
        """Say whether the member gave a sign of life since it was seen first."""
        return member_id in self._beats and self._beats[member_id].has_changed

    def forget(self, member_id: str) -> None:
        """Forget a member that is dead."""
        self._members.pop(member_id, None)
        self._beats.pop(member_id, None)
