"""Membership in a consumer group: how a query joins a group, finds its other members, and leaves it.

Two queries that conflict are never members at the same time. A query that reads all queues must be the only one in its
group, and members that share queues must have the same subscription and the same strategy. RocketMQ accepts members
with different subscriptions, and then messages are lost. Here the second of them gets a GroupConflictError.

Members join and dead members are removed under the group's lock. So if two queries join at the same time, one of them
sees the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from rmq_spark.store.disk import files
from rmq_spark.store.disk.host import is_remote, this_process
from rmq_spark.store.disk.write import TEMPORARY_SUFFIX, Disk
from rmq_spark.store.errors import GroupConflictError, StoreError
from rmq_spark.store.group.group_files import GroupLock, GroupPaths
from rmq_spark.store.group.member_lease import FailureDetector, Kind, Lease, Member, new_member_id, read_member
from rmq_spark.store.model import sort_client_ids

LEASE_TIMEOUT_MS = 120_000  # as long as a broker waits for a silent client (ClientChannelInfo; BrokerConfig, 4.9, 5.3)
LEASE_HEARTBEAT_MS = 30_000  # ClientConfig#heartbeatBrokerInterval
DYING_MS = 5_000  # how long a joining query waits for a conflicting one on this machine to die, before it is refused
_POLL_S = 0.05
_MEMBER_SUFFIX = ".json"
_SUFFIXES = tuple(
    suffix + temporary
    for suffix in (_MEMBER_SUFFIX, ".finished", ".planned", ".lock")
    for temporary in (TEMPORARY_SUFFIX, "")
)


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """The properties of a query that joins a group. `Member` describes the fields."""

    application: str
    query_name: str
    assignment: Kind
    strategy: str
    subscription: str
    lease_timeout_ms: int = LEASE_TIMEOUT_MS
    lease_heartbeat_ms: int = LEASE_HEARTBEAT_MS


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of a membership."""

    now_ms: Callable[[], int]  # ms since the epoch, only for display
    monotonic: Callable[[], float]  # s, never runs backwards
    sleep: Callable[[float], None]  # s


class Membership:
    """The membership of one query in one group, from `join` to `leave`. For one thread at a time.

    `unique` must be different for every membership, past or present. `is_shared` says whether other machines may use
    the store's file system but not see the locks of this machine. With None, this depends on the type of the file
    system.
    """

    def __init__(
        self,
        paths: GroupPaths,
        disk: Disk,
        terms: MemberTerms,
        clocks: Clocks,
        unique: str,
        *,
        is_shared: bool | None = None,
    ) -> None:
        process = this_process()
        self.paths, self.disk, self.clocks = paths, disk, clocks
        self.id = new_member_id(process, unique)
        self.lock = GroupLock(paths, disk, clocks.sleep)
        self.member = Member(
            process,
            terms.application,
            terms.query_name,
            terms.assignment,
            terms.strategy,
            terms.subscription,
            clocks.now_ms(),
            lease_timeout_ms=terms.lease_timeout_ms,
            lease_heartbeat_ms=terms.lease_heartbeat_ms,
        )
        self.lease = Lease(paths, disk, self.id, self.member, terms.lease_heartbeat_ms)
        shared = is_remote(paths.root) if is_shared is None else is_shared
        self._detector = FailureDetector(paths, terms.lease_timeout_ms, clocks.monotonic, is_shared=shared)

    def join(self) -> None:
        """Join the group, and remove the files of dead members.

        If another member conflicts with this query, this waits until that member is dead. Raises GroupConflictError if
        that member runs on this machine and is not dead after DYING_MS, or if it runs on another machine and sends a
        heartbeat. A member on another machine that sends no heartbeat is dead after `leaseTimeout`.
        """
        begin, other = self.clocks.monotonic(), self._try_join()
        while other is not None:
            if self._detector.is_by_lock(other):
                is_over = (self.clocks.monotonic() - begin) * 1000 >= DYING_MS
            else:
                is_over = self._detector.has_beaten(other)
            if is_over:
                raise self._conflict_error(other)
            self.clocks.sleep(_POLL_S)
            other = self._try_join()

    def rejoin(self) -> bool:
        """Join the group again if others presumed this member dead. Return whether they did.

        The caller must hold the group's lock. Raises GroupConflictError if a conflicting query has joined in between,
        and StoreError if this is a forked child.
        """
        if self.lease.is_held:
            return False
        if self.member.process.pid != files.process_id():
            raise StoreError(
                f"process {files.process_id()} was forked from a member of the consumer group {self.paths.group} and "
                "is not a member itself. Join the group in the process that reads."
            )
        other = self._find_conflicting(self.living())
        if other is not None:
            raise self._conflict_error(other)
        self.lease.take()
        return True

    def leave(self) -> None:
        """Leave the group, so that others may claim this member's queues. Does nothing if this is not a member."""
        self.lease.release()

    def list_ids(self) -> tuple[str, ...]:
        """Return the ids of all members that have a member file, sorted by file name. Dead members are included.

        Lists the folder once.
        """
        names = (name for name, _ in files.list_folder(self.paths.members))
        return tuple(unquote(name.removesuffix(_MEMBER_SUFFIX)) for name in names if name.endswith(_MEMBER_SUFFIX))

    def is_alive(self, member_id: str) -> bool:
        """Say whether a member is alive, as far as this process can find out."""
        return self.lease.is_held if member_id == self.id else self._detector.is_alive(member_id)

    def living(self) -> dict[str, Member | None]:
        """Remove the files of dead members. Return the living members by id, sorted by id.

        The caller must hold the group's lock. If a member's file is damaged, its value is None; the next heartbeat of
        that member writes the file again.
        """
        names = [name for name, _ in files.list_folder(self.paths.members)]
        found: dict[str, list[str]] = {}
        for name in names:
            suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
            if suffix:
                found.setdefault(unquote(name.removesuffix(suffix)), []).append(name)
        living: dict[str, Member | None] = {}
        for member_id in sort_client_ids(found):
            if self.is_alive(member_id):
                living[member_id] = self.member if member_id == self.id else self._detector.member(member_id)
            else:
                # A sync is not needed. If the file reappears after a power cut, it belongs to a dead member again.
                for name in found[member_id]:
                    self.disk.remove(files.join(self.paths.members, name))
                self._detector.forget(member_id)
        return living

    def poll_sharing(self, member_ids: Sequence[str]) -> list[str]:
        """Return those of `member_ids` that are alive and share the queues, sorted.

        Takes no lock and changes nothing.
        """
        return [
            member_id
            for member_id in sort_client_ids(member_ids)
            if self.is_alive(member_id) and (member_id == self.id or _takes_queues(self._detector.member(member_id)))
        ]

    def sharing(self) -> list[str]:
        """Remove the files of dead members. Return the sorted ids of the living members that share the queues.

        These are all members except the broadcasting ones. The caller must hold the group's lock.
        """
        return [member_id for member_id, member in self.living().items() if _takes_queues(member)]

    def _try_join(self) -> str | None:
        """Join the group and return None. If a living member conflicts with this query, return its id instead."""
        with self.lock.hold():
            other = self._find_conflicting(self.living())
            if other is None and not self.lease.is_held:
                self.lease.take()
            return other

    def _find_conflicting(self, living: Mapping[str, Member | None]) -> str | None:
        others = (member_id for member_id in living if member_id != self.id)
        return next((each for each in others if conflict(self.member, living[each])), None)

    def _conflict_error(self, other: str) -> StoreError:
        path = self.paths.member(other)
        member = self._detector.member(other) or read_member(path)  # raises DamageError for a damaged file
        if member is None:
            return GroupConflictError(f"{path} is gone: the member {other} has just left. Restart the query.")
        return GroupConflictError(
            f"{self.member} cannot join the consumer group {self.paths.group} of the store {self.paths.root}: "
            f"{conflict(self.member, member)}. The other member is {member}, its file {path}. Nothing was read."
        )


def _takes_queues(member: Member | None) -> bool:
    return member is None or member.assignment != "broadcasting"


def conflict(me: Member, other: Member | None) -> str:
    """Return the reason why two queries cannot be members of one group at the same time, and some advice.

    Returns "" if they can. `other` is None if the file of that member is damaged. Then only a broadcasting query `me`
    can join.
    """
    if "broadcasting" in (me.assignment, other.assignment if other else ""):
        return ""
    if other is None:
        return "the file of a living member is damaged"
    if me.assignment != "shared" or other.assignment != "shared":
        return (
            f"this query has assignment={me.assignment}, the other one assignment={other.assignment}, and a query that "
            "reads all queues must be alone in its group. Stop the other one, give this one a consumerGroup of its "
            "own, or set assignment=shared in both. (Two loads in one query are two of them: read all topics in one "
            "load, or give each load its own consumerGroup)"
        )
    if me.subscription != other.subscription:
        return (
            f"this query's subscription is {me.subscription}, the other one's {other.subscription}, and members that "
            "share queues must subscribe to the same topics and filters, or messages would be missed. Make both the "
            "same, or give this one a consumerGroup of its own"
        )
    # With config each member lists its own queues. Members with overlapping lists wait for each other.
    list_their_own = me.strategy.startswith("config:") and other.strategy.startswith("config:")
    if me.strategy != other.strategy and not list_their_own:
        return (
            f"this query has allocateStrategy={me.strategy}, the other one allocateStrategy={other.strategy}, and "
            "queues could belong to nobody under two strategies. Make both the same"
        )
    return ""
