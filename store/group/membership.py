"""Joining a consumer group, knowing who else is in it, and leaving.

Two queries that would get in each other's way never are members at the same time: one that reads all queues is alone,
and those that share the queues have the same subscription and the same strategy. RocketMQ lets members differ, and then
messages are lost to those who do not want them; here the second one is refused, by name.

Members join, leave and are buried by whoever has the group's turn, so that of two that join at once one sees the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import TEMPORARY_SUFFIX, Disk
from rmq_spark.store.disk.host import this_process
from rmq_spark.store.disk.mounts import is_remote
from rmq_spark.store.errors import GroupConflictError, StoreError
from rmq_spark.store.group.group_paths import GroupPaths, GroupTurn
from rmq_spark.store.group.lease import Lease
from rmq_spark.store.group.liveness import Observer
from rmq_spark.store.group.member_file import Kind, Member, new_member_id, read_member
from rmq_spark.store.group.message_queue import sort_client_ids

LEASE_TIMEOUT_MS = 120_000  # as a broker that hears nothing (ClientChannelInfo; BrokerConfig, 4.9 and 5.3)
LEASE_HEARTBEAT_MS = 30_000  # ClientConfig#heartbeatBrokerInterval
DYING_MS = 5_000  # how long a process of this machine may take to die before a second query of its group is refused
_POLL_S = 0.05
_MEMBER_SUFFIX = ".json"
_SUFFIXES = tuple(
    suffix + temporary
    for suffix in (_MEMBER_SUFFIX, ".finished", ".planned", ".lock")
    for temporary in (TEMPORARY_SUFFIX, "")
)


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """What a query brings into a group; see `Member` for the fields."""

    application: str
    query_name: str
    assignment: Kind
    strategy: str
    subscription: str
    lease_timeout_ms: int = LEASE_TIMEOUT_MS
    lease_heartbeat_ms: int = LEASE_HEARTBEAT_MS


@dataclass(frozen=True, slots=True)
class Clocks:
    """What a membership knows of time."""

    now_ms: Callable[[], int]  # ms since the epoch: for people only
    monotonic: Callable[[], float]  # s, only runs forward
    sleep: Callable[[float], None]  # s


class Membership:
    """One query in one group, from `join` to `leave`. For one thread at a time.

    `unique` is a text that no other membership ever has. `is_shared` says whether other machines may use the store's
    file system and not see this one's locks; None: as the file system's kind says.
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
        self.turn = GroupTurn(paths, disk, clocks.sleep)
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
        self._observer = Observer(paths, terms.lease_timeout_ms, clocks.monotonic, is_shared=shared)

    def join(self) -> None:
        """Become a member, in place of dead ones.

        Raises GroupConflictError when a living member is in the way: one of this machine that does not die within
        DYING_MS, or one of another machine that gives a sign of life; without one, it is dead after `leaseTimeout`.
        """
        begin, others = self.clocks.monotonic(), self._try_join()
        while others is not None:
            if self._is_over(others, self.clocks.monotonic() - begin):
                raise self._refusal(others)
            self.clocks.sleep(_POLL_S)
            others = self._try_join()

    def rejoin(self) -> bool:
        """Become a member again if others thought this one dead; say whether they did. For who has the turn.

        Raises GroupConflictError if one is there by now that it would be in the way of, StoreError in a forked child.
        """
        if self.lease.is_held:
            return False
        if self.member.process.pid != files.process_id():
            raise StoreError(
                f"process {files.process_id()} was forked from a member of the group {self.paths.group}, and is none "
                "itself. Join in the process that reads."
            )
        in_the_way = self._find_in_the_way(self.living())
        if in_the_way is not None:
            raise self._refusal(in_the_way)
        self.lease.take()
        return True

    def leave(self) -> None:
        """Be a member no more; nothing happens to one that is none. What it claimed is free from then on."""
        self.lease.release()

    def listed(self) -> tuple[str, ...]:
        """Return the ids of all members that have a file, dead ones too, sorted by name. One look at the folder."""
        names = (name for name, _ in files.list_folder(self.paths.members))
        return tuple(unquote(name.removesuffix(_MEMBER_SUFFIX)) for name in names if name.endswith(_MEMBER_SUFFIX))

    def is_alive(self, member_id: str) -> bool:
        """Say whether a member lives, as far as it can be known from here."""
        return self.lease.is_held if member_id == self.id else self._observer.is_alive(member_id)

    def living(self) -> dict[str, Member | None]:
        """Return the living members, sorted by id, after burying the dead. For who has the turn.

        None stands for one whose file is damaged; it writes it again with its next beat.
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
                living[member_id] = self.member if member_id == self.id else self._observer.member(member_id)
            else:
                # Not synced: what comes back after a power cut is a dead member's again.
                for name in found[member_id]:
                    self.disk.remove(files.join(self.paths.members, name))
                self._observer.forget(member_id)
        return living

    def seen_sharing(self, listed: Sequence[str]) -> list[str]:
        """Return those of the `listed` members that `sharing` would return now. Needs no turn and changes nothing."""
        return [
            member_id
            for member_id in sort_client_ids(listed)
            if self.is_alive(member_id) and (member_id == self.id or _takes_queues(self._observer.member(member_id)))
        ]

    def sharing(self) -> list[str]:
        """Return the sorted ids of the living members among whom queues are shared. For who has the turn."""
        return [member_id for member_id, member in self.living().items() if _takes_queues(member)]

    def _try_join(self) -> str | None:
        """Join; return the id of who is in the way if somebody is."""
        with self.turn.hold():
            in_the_way = self._find_in_the_way(self.living())
            if in_the_way is None and not self.lease.is_held:
                self.lease.take()
            return in_the_way

    def _find_in_the_way(self, living: Mapping[str, Member | None]) -> str | None:
        others = (member_id for member_id in living if member_id != self.id)
        return next((each for each in others if conflict(self.member, living[each])), None)

    def _is_over(self, other: str, waited: float) -> bool:
        """Say whether there is nothing left to wait for."""
        if self._observer.is_by_lock(other):
            return waited * 1000 >= DYING_MS
        return self._observer.has_beaten(other)

    def _refusal(self, other: str) -> StoreError:
        path = self.paths.member(other)
        member = self._observer.member(other) or read_member(path)  # a damaged file says so itself
        if member is None:
            return GroupConflictError(f"{path} is gone: the member {other} has just left. Start the query again.")
        return GroupConflictError(
            f"{self.member} cannot join the consumer group {self.paths.group} of the store {self.paths.root}: "
            f"{conflict(self.member, member)}. The other member is {member}, its file {path}. Nothing was read."
        )


def _takes_queues(member: Member | None) -> bool:
    return member is None or member.assignment != "broadcasting"


def conflict(me: Member, other: Member | None) -> str:
    """Return why two queries cannot be members of one group at a time, and what to do; "" if they can.

    None is a member of whom nothing is known: nobody but a broadcasting one can be sure to fit it.
    """
    if "broadcasting" in (me.assignment, other.assignment if other else ""):
        return ""
    if other is None:
        return "the file of a living member is damaged"
    if me.assignment != "shared" or other.assignment != "shared":
        return (
            f"this query has assignment={me.assignment}, the other one assignment={other.assignment}, and a query that "
            "reads all queues is alone in its group. Stop the other one, give this one a consumerGroup of its own, or "
            "set assignment=shared in both. (Two loads in one query are two of them: read all topics in one load, or "
            "give each a consumerGroup)"
        )
    if me.subscription != other.subscription:
        return (
            f"this query's subscription is {me.subscription}, the other one's {other.subscription}, and members that "
            "share queues must subscribe to the same, or messages would be missed. Make both the same, or give this "
            "one a consumerGroup of its own"
        )
    # With config each member lists its own queues; whose lists overlap wait for each other.
    list_their_own = me.strategy.startswith("config:") and other.strategy.startswith("config:")
    if me.strategy != other.strategy and not list_their_own:
        return (
            f"this query has allocateStrategy={me.strategy}, the other one allocateStrategy={other.strategy}, and "
            "between two strategies queues would be nobody's. Make both the same"
        )
    return ""
