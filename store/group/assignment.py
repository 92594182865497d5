"""Which queues of its group a query reads now, and the right to say how far it came in them.

A query asks for `rebalance` when everything that it began is finished. Then it lets go what is another's share, with
the offset up to which it is finished published before, so that the other goes on from there, and takes what is its
share and free. A share that another still has, it gets when that one asks, or dies.

Offsets are published under the group's turn after a look at the claims: a query that was thought dead, and whose
queues others have taken, publishes nothing of them.

Between two triggers the query gives up queues by `surplus` and `give_up` (`handover.py`), which claim and publish
nothing. The next `rebalance` learns of it from the claims.
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
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.group.membership import Membership
from rmq_spark.store.group.offset_file import stamp_of_offsets
from rmq_spark.store.units import QueueKey

# (group, the sorted queues of one topic, the sorted ids of the members) -> queues by member; only this member's count.
# The answers that members get must fit: each queue is one member's. Topic by topic, as RebalanceImpl#doRebalance (5.3).
Share = Callable[[str, Sequence[QueueKey], Sequence[str]], Mapping[str, Collection[QueueKey]]]

# Writes these next queue offsets as the group's; says whether they are written. Called with the group's turn held.
Commit = Callable[[Mapping[QueueKey, int]], bool]

# A member that is killed is noticed no later. To ask for a lock takes some 10 µs, and a query may ask in a tight loop.
_PROBE_EVERY_S = 0.2


class Rebalanced(NamedTuple):
    """What is a query's own from now on; all sorted.

    The position of a `gained` queue is the group's offset, also if the query had it before: somebody else may have had
    it meanwhile. A `lost` one is another's. `taken` are those, lost or gained again, that were taken while this query
    was thought dead: what was finished in them is not published. `waiting` are its share, but another's still.
    """

    owned: tuple[QueueKey, ...]
    gained: tuple[QueueKey, ...] = ()
    lost: tuple[QueueKey, ...] = ()
    taken: tuple[QueueKey, ...] = ()
    waiting: tuple[QueueKey, ...] = ()


class Assignment:
    """The queues of one member, which has joined with assignment=all or shared. For one thread at a time.

    After any error the next `rebalance` finds out what holds, and reports it.
    """

    def __init__(self, membership: Membership, share: Share, commit: Commit) -> None:
        assert membership.member.assignment != "broadcasting", "there nobody owns a queue"
        self._membership, self._share, self._commit = membership, share, commit
        self._path = membership.paths.claims
        self._claims, self._head = NO_CLAIMS, b""  # as they were read last, by whatever method
        self._epochs: dict[QueueKey, int] = {}
        self._published: dict[QueueKey, int] = {}
        self._stamp: tuple[int, int, int] | None = None  # of the file that `_published` is in
        self._rebalanced: Rebalanced | None = None  # as of the last whole look; None when that is not to be relied on
        self._queues: tuple[QueueKey, ...] = ()
        self._listed: tuple[str, ...] = ()
        self._settled_head = b""  # as of the last whole look; publishing may have seen newer claims since
        self._probed = 0.0
        self._surplus: tuple[QueueKey, ...] = ()
        self._surplus_of: object = None  # what `_surplus` was found for

    @property
    def epochs(self) -> dict[QueueKey, int]:
        """Return the epochs of the queues that are this query's, as of the last rebalance."""
        return dict(self._epochs)

    def rebalance(self, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int]) -> Rebalanced:
        """Return what is this query's of `queues`, which are all that the group subscribes to now.

        `finished` has the next queue offset of each queue of this query: everything before is done, and nothing behind
        is begun. Publishes those of queues that it lets go. When nothing changed this takes no lock, and writes
        nothing; give the same list then, and it is quick.

        Raises GroupConflictError if the group went on without this query and has no place for it now, OptionError where
        the strategy does not share the queues out.
        """
        wanted = tuple(queues)
        if self._rebalanced is not None and wanted == self._queues and self.is_settled():
            return Rebalanced(self._rebalanced.owned, waiting=self._rebalanced.waiting)
        self._rebalanced = None
        membership = self._membership
        with membership.turn.hold():
            membership.rejoin()
            living = membership.sharing()
            # Probed now, and listed before anybody else can come: who comes later is seen by the next look.
            self._probed = membership.clocks.monotonic()
            self._listed, self._queues = membership.listed(), wanted
            self._rebalanced = self._move(self._own_share(wanted, living), living, finished)
            self._settled_head = self._head
        return self._rebalanced

    def is_settled(self) -> bool:
        """Say whether a rebalance of the same queues would change nothing. Takes no lock, writes nothing."""
        membership = self._membership
        if (
            self._rebalanced is None
            or not membership.lease.is_held
            or read_claims_head(self._path) != self._settled_head
            or membership.listed() != self._listed
        ):
            return False
        now = membership.clocks.monotonic()
        if now - self._probed < _PROBE_EVERY_S:
            return True
        self._probed = now
        if not all(membership.is_alive(member_id) for member_id in self._listed):
            self._rebalanced = None  # whoever asks again within the pause must not be told otherwise
        return self._rebalanced is not None

    def publish(self, offsets: Mapping[QueueKey, int]) -> tuple[QueueKey, ...]:
        """Publish next queue offsets as the group's; return the queues, sorted, that are not this query's any more.

        Of those nothing is published. Offsets that were published last are not written again, unless somebody wrote
        the file since: a broker that ends writes what it knows once more, after it let the store go.
        """
        self._notice_others()
        changed = {queue: offset for queue, offset in offsets.items() if self._published.get(queue) != offset}
        if not changed:
            return ()
        with self._membership.turn.hold():
            claims = self._read_claims().queues
            lost = sorted(queue for queue in changed if not self._is_mine(queue, claims))
            for queue in lost:
                del changed[queue]
            self._publish(changed)
        return tuple(lost)

    def is_published(self) -> bool:
        """Say whether nobody wrote the offsets since this query looked at them or did itself. Takes no lock."""
        return stamp_of_offsets(self._membership.paths.root) == self._stamp

    def surplus(self) -> tuple[QueueKey, ...]:
        """Return those of the query's queues, sorted, to which other living members are entitled now.

        Takes no lock, writes nothing, and is cheap while neither members nor claims change. The queues are those of the
        last rebalance. Raises OptionError where the strategy does not share the queues out, DamageError.
        """
        membership = self._membership
        if not membership.lease.is_held:
            return ()
        sharing = membership.seen_sharing(membership.listed())  # also without queues: who is silent shows only in time
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
        """Let go those of the queues to which others are entitled still; return them, sorted. Publishes nothing.

        With `is_fenced` their epochs count up, so that all tasks of the query's batch are fenced, also if the query is
        the next owner itself. Raises what `rebalance` raises, and then nothing has changed.
        """
        membership = self._membership
        with membership.turn.hold():
            if not membership.lease.is_held:
                return ()
            wanted, claims = self._own_share(self._queues, membership.sharing()), self._read_claims()
            gone = sorted(queue for queue in queues if queue not in wanted and self._is_mine(queue, claims.queues))
            if gone:
                # `_settled_head` stays: the next rebalance looks at the claims, and finds these queues gone.
                freed = {queue: Claim(NOBODY, claims.queues[queue].epoch + is_fenced) for queue in gone}
                self._write_claims(Claims(claims.change + 1, membership.id, {**claims.queues, **freed}))
        return tuple(gone)

    def leave(self, finished: Mapping[QueueKey, int]) -> None:
        """Publish what is finished, let all queues go and leave the group. It is left, whatever fails."""
        self._rebalanced = None
        try:
            if self._membership.lease.is_held:
                with self._membership.turn.hold():
                    self._move((), [self._membership.id], finished)
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

    def _move(
        self, wanted: Collection[QueueKey], living: Collection[str], finished: Mapping[QueueKey, int]
    ) -> Rebalanced:
        me, claims = self._membership.id, self._read_claims()
        plan = plan_claims(claims.queues, me, living, wanted)
        taken = sorted(queue for queue in self._epochs if not self._is_mine(queue, claims.queues))
        # First the offsets, then the claims: whoever claims a queue next goes on from there. A crash between the two
        # leaves the queues to a member that is dead, and so free.
        self._publish(
            {queue: finished[queue] for queue in plan.lost if queue in finished and self._is_mine(queue, claims.queues)}
        )
        if plan.gained or plan.lost:
            self._write_claims(Claims(claims.change + 1, me, plan.claims))
        # Not what the plan says alone: an error may have kept an earlier plan from being reported.
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

    def _notice_others(self) -> None:
        """Believe nothing of what was published once somebody else wrote the file."""
        stamp = stamp_of_offsets(self._membership.paths.root)
        if stamp != self._stamp:
            self._published.clear()
            self._stamp = stamp

    def _publish(self, offsets: Mapping[QueueKey, int]) -> None:
        self._notice_others()
        changed = {queue: offset for queue, offset in offsets.items() if self._published.get(queue) != offset}
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
    """Return those of the queues, sorted, that are not the member's any more with these epochs. Takes no lock."""
    claims = read_claims(GroupPaths(root, group).claims).queues
    return tuple(sorted(queue for queue, epoch in epochs.items() if claims.get(queue) != (member_id, epoch)))


def check_epochs(root: str, group: str, member_id: str, epochs: Mapping[QueueKey, int]) -> None:
    """Raise GroupConflictError if one of the queues is not the member's any more with these epochs.

    For tasks, on any machine that sees the store: it needs nothing but its arguments, and takes no lock.
    """
    lost = lost_queues(root, group, member_id, epochs)
    if lost:
        path = GroupPaths(root, group).claims
        owner, epoch = read_claims(path).queues.get(lost[0], Claim(NOBODY, 0))
        raise GroupConflictError(
            f"{', '.join(map(str, lost))}: not the member {member_id}'s any more in the consumer group {group}. "
            f"{lost[0]} was its with epoch {epochs[lost[0]]}, and {path} has epoch {epoch}, owner "
            f"{owner or 'nobody'}. This batch took longer than handoverTimeout while another member waited for its "
            "queues, or the query was stopped for longer than leaseTimeout. Start the query again; if it fails so "
            "again, give it a new checkpointLocation: then it begins where the group stands. What this batch read of "
            "these queues is read by the other member too. For longer batches raise handoverTimeout."
        )
