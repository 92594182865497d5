"""The assignment of one member: the queues that it owns, and its right to commit offsets in them.

A query calls `rebalance` when it has finished everything that it began. The rebalance commits the query's offsets in
the queues that now belong to other members, and releases these queues. Their next owners continue at the committed
offsets. Then it claims the free queues of the query's share. If another member still owns a queue of the share, that
queue becomes free when the other member rebalances or dies.

Offsets are committed under the group's lock, after a check of the claims. So if a query was presumed dead and others
have claimed its queues, it does not commit offsets in these queues.

Between two triggers the query releases queues by `surplus` and `give_up` (`handover.py`). This claims no queues and
commits no offsets. The next `rebalance` sees in the claims which queues were released.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rmq_spark.store.errors import GroupConflictError
from rmq_spark.store.group.claims import (
    NO_CLAIMS,
    NOBODY,
    Claim,
    Claims,
    plan_claims,
    read_claims,
    read_claims_head,
    write_claims,
)
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.membership import Membership
from rmq_spark.store.group.offset_file import stamp_of_offsets
from rmq_spark.store.model import QueueKey

# A function of (group, sorted queues of one topic, sorted member ids) that returns the queues of each member. Only the
# entry of this member is used. The results in different members must be disjoint. It is called for each topic, as in
# RebalanceImpl#doRebalance (5.3).
Share = Callable[[str, Sequence[QueueKey], Sequence[str]], Mapping[str, Collection[QueueKey]]]

# A function that commits the given next queue offsets of the group, and returns whether they need not be committed
# again. It is called while the group's lock is held.
Commit = Callable[[Mapping[QueueKey, int]], bool]

# A member checks the locks of the others at most this often, so a killed member is detected with this delay. One check
# takes some 10 µs, and a query may poll in a tight loop.
_PROBE_EVERY_S = 0.2


class Rebalanced(NamedTuple):
    """The result of one rebalance. Each field is sorted.

    - `owned` are all queues that the query owns now.
    - `gained` are the queues that it owns newly. It must start to read them at the committed offset, even if it owned
      them before, because another member may have owned them in between.
    - `lost` are the queues that it no longer owns.
    - `taken` are queues that others claimed while this query was presumed dead. They are also in `lost`, or in `gained`
      if the query has claimed them again. The query's finished offsets in them are not committed.
    - `waiting` are the queues of its share that another member still owns.
    """

    owned: tuple[QueueKey, ...]
    gained: tuple[QueueKey, ...] = ()
    lost: tuple[QueueKey, ...] = ()
    taken: tuple[QueueKey, ...] = ()
    waiting: tuple[QueueKey, ...] = ()


class Assignment:
    """The queues of one member with assignment=all or assignment=shared. For one thread at a time.

    After any error, the next `rebalance` reads the actual state from the files, and returns what has changed.
    """

    def __init__(self, membership: Membership, share: Share, commit: Commit) -> None:
        assert membership.member.assignment != "broadcasting", "broadcasting members do not own queues"
        self._membership, self._share, self._commit = membership, share, commit
        self._path = membership.paths.claims
        self._claims, self._head = NO_CLAIMS, b""  # as any method read them last
        self._epochs: dict[QueueKey, int] = {}
        self._published: dict[QueueKey, int] = {}
        self._stamp: tuple[int, int, int] | None = None  # stamp of the offset file that contains `_published`
        self._rebalanced: Rebalanced | None = None  # the last result; None when it is not valid any more
        self._queues: tuple[QueueKey, ...] = ()
        self._member_ids: tuple[str, ...] = ()
        self._settled_head = b""  # as of the last rebalance; `publish` may have read newer claims since
        self._probed = 0.0
        self._surplus: tuple[QueueKey, ...] = ()
        self._surplus_of: object = None  # the inputs from which `_surplus` was computed

    @property
    def epochs(self) -> dict[QueueKey, int]:
        """The epoch of this query's claim of each queue that it owns, as of the last rebalance."""
        return dict(self._epochs)

    def rebalance(self, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int]) -> Rebalanced:
        """Claim the free queues of this query's share, and release the queues that are not in its share.

        `queues` are all queues that the group subscribes to. `finished` maps each queue of this query to its next queue
        offset. All earlier messages of the queue must be done, and no later one may have been begun. The offsets of
        released queues are committed. If nothing has changed since the last call, including `queues`, no lock is taken
        and nothing is written, which is fast.

        Raises GroupConflictError if a conflicting query has joined while this one was presumed dead, and OptionError if
        the strategy returns an invalid assignment (`allocation.allocate`).
        """
        wanted = tuple(queues)
        if self._rebalanced is not None and wanted == self._queues and self.is_settled():
            return Rebalanced(self._rebalanced.owned, waiting=self._rebalanced.waiting)
        self._rebalanced = None
        membership = self._membership
        with membership.lock.hold():
            membership.rejoin()
            living = membership.sharing()
            # The members are listed under the lock, so the next `is_settled` notices every member that joins later.
            self._probed = membership.clocks.monotonic()
            self._member_ids, self._queues = membership.list_ids(), wanted
            self._rebalanced = self._apply_plan(self._own_share(wanted, living), living, finished)
            self._settled_head = self._head
        return self._rebalanced

    def is_settled(self) -> bool:
        """Say whether a rebalance of the same queues would change nothing. Takes no lock and writes nothing.

        A member that was killed is noticed with a short delay.
        """
        membership = self._membership
        if (
            self._rebalanced is None
            or not membership.lease.is_held
            or read_claims_head(self._path) != self._settled_head
            or membership.list_ids() != self._member_ids
        ):
            return False
        now = membership.clocks.monotonic()
        if now - self._probed < _PROBE_EVERY_S:
            return True
        self._probed = now
        if not all(membership.is_alive(member_id) for member_id in self._member_ids):
            self._rebalanced = None  # so that a call before the next check of the locks returns False too
        return self._rebalanced is not None

    def publish(self, offsets: Mapping[QueueKey, int]) -> tuple[QueueKey, ...]:
        """Commit the next queue offset of each queue in `offsets`. Return the queues that the query no longer owns.

        The returned queues are sorted, and their offsets are not committed. Offsets that this object has committed
        before are written again only if another process has written the offset file in between. This is necessary
        because a broker that stops writes its own offsets once more after it has released the store.
        """
        changed = self._unpublished(offsets)
        if not changed:
            return ()
        with self._membership.lock.hold():
            claims = self._read_claims().queues
            lost = sorted(queue for queue in changed if not self._is_mine(queue, claims))
            for queue in lost:
                del changed[queue]
            self._publish(changed)
        return tuple(lost)

    def is_published(self) -> bool:
        """Say whether no other process has written the offset file since this query read or wrote it. Takes no lock."""
        return stamp_of_offsets(self._membership.paths.root) == self._stamp

    def surplus(self) -> tuple[QueueKey, ...]:
        """Return the queues, sorted, that this query owns but other living members are entitled to now.

        The shares are computed from the list of queues that was passed to the last rebalance. Takes no lock and writes
        nothing. Cheap while members and claims do not change. Raises OptionError if the strategy returns an
        invalid assignment, and DamageError if the claims are damaged.
        """
        membership = self._membership
        if not membership.lease.is_held:
            return ()
        # Polled even if this query owns no queues, because a stopped member is detected only after several polls.
        sharing = membership.poll_sharing(membership.list_ids())
        if not self._epochs:
            return ()
        head = read_claims_head(self._path)
        if self._surplus_of != (sharing, head, self._queues):
            wanted, claims = self._own_share(self._queues, sharing), self._read_claims().queues
            self._surplus = tuple(
                sorted(queue for queue in self._epochs if queue not in wanted and self._is_mine(queue, claims))
            )
            self._surplus_of = sharing, head, self._queues
        return self._surplus

    def give_up(self, queues: Collection[QueueKey], *, is_fenced: bool) -> tuple[QueueKey, ...]:
        """Release those of `queues` that other members are still entitled to. Return the released queues, sorted.

        Commits no offsets. With `is_fenced`, the epochs of the released queues are incremented. Then all tasks of the
        query's running batch fail when they check their epochs, even if this query itself is the next owner. Raises the
        errors of `rebalance`; after an error nothing has changed.
        """
        membership = self._membership
        with membership.lock.hold():
            if not membership.lease.is_held:
                return ()
            wanted, claims = self._own_share(self._queues, membership.sharing()), self._read_claims()
            released = sorted(queue for queue in queues if queue not in wanted and self._is_mine(queue, claims.queues))
            if released:
                # `_settled_head` is not updated, so the next rebalance reads the claims and reports these queues.
                freed = {queue: Claim(NOBODY, claims.queues[queue].epoch + is_fenced) for queue in released}
                self._write_claims(Claims(claims.change + 1, membership.id, {**claims.queues, **freed}))
        return tuple(released)

    def leave(self, finished: Mapping[QueueKey, int]) -> None:
        """Commit the finished offsets, release all queues and leave the group.

        If committing or releasing fails, this leaves the group nevertheless, and raises the error.
        """
        self._rebalanced = None
        try:
            if self._membership.lease.is_held:
                with self._membership.lock.hold():
                    self._apply_plan((), [self._membership.id], finished)
        finally:
            self._membership.leave()

    def _own_share(self, queues: Sequence[QueueKey], living: Sequence[str]) -> Collection[QueueKey]:
        membership = self._membership
        if membership.member.assignment == "all":
            return frozenset(queues)
        wanted: set[QueueKey] = set()
        for _, of_topic in groupby(sorted(queues), lambda queue: queue.topic):
            shares = self._share(membership.paths.group, list(of_topic), living)
            wanted.update(shares.get(membership.id, ()))
        return wanted

    def _apply_plan(
        self, wanted: Collection[QueueKey], living: Collection[str], finished: Mapping[QueueKey, int]
    ) -> Rebalanced:
        """Claim the `wanted` queues that are free. Commit the offsets of all other owned queues and release them.

        The caller must hold the group's lock.
        """
        me, claims = self._membership.id, self._read_claims()
        plan = plan_claims(claims.queues, me, living, wanted)
        taken = sorted(queue for queue in self._epochs if not self._is_mine(queue, claims.queues))
        # The offsets are committed before the claims are written, because the next owner starts at the committed
        # offset. After a crash between these two writes, the claims belong to a dead member, so the queues are free.
        self._publish(
            {queue: finished[queue] for queue in plan.lost if queue in finished and self._is_mine(queue, claims.queues)}
        )
        if plan.gained or plan.lost:
            self._write_claims(Claims(claims.change + 1, me, plan.claims))
        # Gained and lost queues are found by comparing epochs instead of taking them from the plan, because an error
        # may have prevented the caller from seeing the result of an earlier plan.
        epochs = {queue: claim.epoch for queue, claim in plan.claims.items() if claim.owner == me}
        gained = sorted(queue for queue, epoch in epochs.items() if self._epochs.get(queue) != epoch)
        lost = sorted(queue for queue in self._epochs if queue not in epochs)
        for queue in (*gained, *lost):
            self._published.pop(queue, None)
        self._epochs = epochs
        return Rebalanced(tuple(sorted(epochs)), tuple(gained), tuple(lost), tuple(taken), plan.waiting)

    def _is_mine(self, queue: QueueKey, claims: Mapping[QueueKey, Claim]) -> bool:
        epoch = self._epochs.get(queue)
        return epoch is not None and claims.get(queue) == (self._membership.id, epoch)

    def _unpublished(self, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return the offsets that this object has not committed yet.

        These are all offsets if another process has written the offset file since the last commit.
        """
        stamp = stamp_of_offsets(self._membership.paths.root)
        if stamp != self._stamp:
            self._published.clear()
            self._stamp = stamp
        return {queue: offset for queue, offset in offsets.items() if self._published.get(queue) != offset}

    def _publish(self, offsets: Mapping[QueueKey, int]) -> None:
        changed = self._unpublished(offsets)
        if changed and self._commit(changed):
            self._published.update(changed)
            self._stamp = stamp_of_offsets(self._membership.paths.root)

    def _read_claims(self) -> Claims:
        head = read_claims_head(self._path)
        if head != self._head or not head:
            self._claims, self._head = read_claims(self._path), head
        return self._claims

    def _write_claims(self, claims: Claims) -> None:
        write_claims(self._path, self._membership.disk, claims)
        self._claims, self._head = claims, read_claims_head(self._path)


def lost_queues(root: str, group: str, member_id: str, epochs: Mapping[QueueKey, int]) -> tuple[QueueKey, ...]:
    """Return the queues, sorted, that the member no longer owns with the epochs in `epochs`. Takes no lock."""
    claims = read_claims(GroupPaths(root, group).claims).queues
    return tuple(sorted(queue for queue, epoch in epochs.items() if claims.get(queue) != (member_id, epoch)))


def check_epochs(root: str, group: str, member_id: str, epochs: Mapping[QueueKey, int]) -> None:
    """Raise GroupConflictError if the member no longer owns one of the queues with its epoch in `epochs`.

    Tasks call this, on any machine that can read the store. Takes no lock.
    """
    lost = lost_queues(root, group, member_id, epochs)
    if lost:
        path = GroupPaths(root, group).claims
        owner, epoch = read_claims(path).queues.get(lost[0], Claim(NOBODY, 0))
        raise GroupConflictError(
            f"{', '.join(map(str, lost))}: not the member {member_id}'s any more in the consumer group {group}. "
            f"{path}: {lost[0]} has epoch {epoch} and owner {owner or 'nobody'}; expected epoch {epochs[lost[0]]} of "
            "this member. Either the batch took longer than handoverTimeout while another member waited for the "
            "queues, or the query was stopped for longer than leaseTimeout. Restart the query. If the error comes "
            "again, give the query a new checkpointLocation: it then starts at the group's committed offsets. The "
            "other member also reads the messages that this batch read. Raise handoverTimeout for longer batches."
        )
