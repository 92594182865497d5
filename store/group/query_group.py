"""One streaming query in its consumer group: what of the queues is its own, where they go on, and saying how far it is.

The order of one step is the promise that nothing is lost between members:

1. resets are read, so that what is finished in a queue that was told to go elsewhere is not published over it;
2. what is another's share is published as finished and let go, what is free and this query's share is claimed;
3. where a claimed queue goes on is read after it was claimed: its last owner published before it let go;
4. what is finished in the queues that stay is published.

A store that cannot be written, or on which a broker lives, is read all the same: then the offsets stay in the query's
checkpoint, and a warning says so once. With commitOffsets=required that fails, and where queues are shared: who gets a
queue whose offset is not published would begin at its end, or read it all again.
"""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import LockTimeoutError, StorePathError
from rmq_spark.store.group.allocation import allocate, find_strategy, find_unowned, listed
from rmq_spark.store.group.assignment import Assignment, Rebalanced
from rmq_spark.store.group.group_name import check_consumer_group
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.group.member_file import Kind
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms
from rmq_spark.store.group.message_queue import MessageQueue
from rmq_spark.store.group.offset_file import OffsetFile, Outcome, read_group_offsets, refuse_commit
from rmq_spark.store.group.published import write_published
from rmq_spark.store.group.resets import Resets, read_resets
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")

# A store is one broker's, whatever that is called; it counts for consistentHash, and must be the same for all members.
_BROKER_NAME = "broker"
_PUBLISH_WAIT_MS = 10_000  # for writers of ours that make no progress; offsets are published again by the next trigger
_NO_STEP = Rebalanced(())


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """How a query takes part in its group. `commit` is auto, required or off; times are ms."""

    group: str
    assignment: Kind = "all"
    strategy: str = "avg"
    subscription: str = ""
    query_name: str = ""
    commit: str = "auto"
    lease_timeout_ms: int = 120_000
    lease_heartbeat_ms: int = 30_000
    allow_network_store: bool = True  # one small file under the store's lock; messages are another matter


@dataclass(frozen=True, slots=True)
class Step:
    """What a step found.

    `owned` are the queues that are this query's now, `gained` those that were not before it: for each the group's
    offset as it stands since, None where it has none. `resets` are the offsets to go to, in queues of others too.
    """

    owned: tuple[QueueKey, ...]
    gained: Mapping[QueueKey, int | None]
    lost: tuple[QueueKey, ...]
    resets: Mapping[QueueKey, int]
    reset_number: int


class QueryGroup:
    """A query's membership, from its first `step` to the end of its process. For one thread."""

    def __init__(self, path: str, terms: GroupTerms) -> None:
        check_consumer_group(terms.group)
        self.root, self.terms = files.absolute(path), terms
        self._strategy = find_strategy(terms.strategy, _BROKER_NAME)
        self.paths = GroupPaths(self.root, terms.group)
        disk = self._disk = Disk()
        clocks = Clocks(wall_clock_ms, time.monotonic, time.sleep)
        member = MemberTerms(
            "rmq-spark",
            terms.query_name,
            terms.assignment,
            terms.strategy,
            terms.subscription,
            terms.lease_timeout_ms,
            terms.lease_heartbeat_ms,
        )
        self._membership = Membership(self.paths, disk, member, clocks, uuid.uuid4().hex)
        settings = WriterSettings("rmq-spark", _PUBLISH_WAIT_MS, terms.allow_network_store)
        self._offset_file = OffsetFile(self.root, disk, settings, wall_clock_ms, time.sleep)
        self._assignment = Assignment(self._membership, self._share, self._commit)
        self._has_joined = self.is_outside = False  # outside: no member, for the store cannot be written
        self._resets = Resets()
        self._warned = False
        self._unowned: list[QueueKey] = []  # that the strategy gave to nobody when that was said last

    @property
    def member_id(self) -> str:
        """The name by which others know this query."""
        return self._membership.id

    @property
    def _must_publish(self) -> bool:
        return self.terms.commit == "required" or self.terms.assignment == "shared"

    @property
    def epochs(self) -> dict[QueueKey, int]:
        """The epochs of the queues that are this query's: what a task shows to read them."""
        return self._assignment.epochs

    def join(self) -> None:
        """Become a member, once. Raises GroupConflictError where another query is in the way.

        In a store that cannot be written a query that reads all queues stays outside, with a warning.
        """
        if self._has_joined or self.is_outside:
            return
        try:
            self._membership.join()
            self._has_joined = True
        except StorePathError as error:
            if self._must_publish:
                raise
            self.is_outside = True
            _LOG.warning(
                "rmq: %s cannot be written, so this query is no member of the consumer group %s, and its offsets stay "
                "in its checkpoint: %s",
                self.root,
                self.terms.group,
                error,
            )

    def offsets(self) -> dict[QueueKey, int]:
        """Return the group's next queue offsets as they stand. Raises DamageError."""
        return read_group_offsets(self.root, self.terms.group, time.sleep)

    def has_news(self) -> bool:
        """Say whether a step may find something new, beside messages. Cheap; takes no lock."""
        if self.is_outside:
            return False
        return not self._has_joined or not self._assignment.is_settled() or self._look_at_resets() != self._resets

    def step(self, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int], applied_reset: int | None) -> Step:
        """Take what is this query's of `queues`, and publish what is finished in them.

        `finished` has the next queue offset of each queue: all before it is done. `applied_reset` is the number of the
        last reset that the query has applied, None for one that begins. Raises GroupConflictError, DamageError.
        """
        self.join()
        if self.is_outside:
            return Step(tuple(queues), {}, (), {}, 0)
        resets = self._resets = self._look_at_resets()
        pending = {} if applied_reset is None else resets.since(applied_reset)
        done = {queue: offset for queue, offset in finished.items() if queue not in pending}
        moved = self._assignment.rebalance(queues, done)
        self._tell_of_unowned(queues)
        gained: dict[QueueKey, int | None] = {}
        if moved.gained:
            held = self.offsets()
            gained = {queue: held.get(queue) for queue in moved.gained}
        return Step(moved.owned, gained, moved.lost, pending, resets.number)

    def publish(self, finished: Mapping[QueueKey, int]) -> None:
        """Make these the group's next queue offsets, as far as the queues are this query's.

        Raises LockTimeoutError where that cannot be, and commitOffsets=required or the queues are shared.
        """
        if self._has_joined:
            self._assignment.publish(finished)

    def leave(self, finished: Mapping[QueueKey, int]) -> None:
        """Publish, let all queues go, and leave. A process that ends without it is as good as gone, too."""
        if self._has_joined:
            self._has_joined = False
            self._assignment.leave(finished)

    def _look_at_resets(self) -> Resets:
        return read_resets(self.paths.resets)

    def _share(self, group: str, queues: Sequence[QueueKey], living: Sequence[str]) -> Mapping[str, Sequence[QueueKey]]:
        named = [MessageQueue.of(queue, _BROKER_NAME) for queue in queues]
        mine = allocate(self._strategy, group, self.member_id, named, living)
        return {self.member_id: [queue.key for queue in mine]}

    def _tell_of_unowned(self, queues: Sequence[QueueKey]) -> None:
        """Warn of queues that no member reads, each time that they have changed. RocketMQ leaves them in silence."""
        if self.terms.assignment != "shared":
            return
        named = (MessageQueue.of(queue, _BROKER_NAME) for queue in queues)  # asked for at each trigger: maybe for none
        unowned = sorted(queue.key for queue in find_unowned(self._strategy, named))
        if unowned and unowned != self._unowned:
            _LOG.warning(
                "rmq: allocateStrategy=%s of the consumer group %s gives these queues to nobody, so no member reads "
                'them: %s. A store counts as one broker that is called "%s", and the strategy gives out those of '
                "brokers named room@name. Set another one in all members, such as avg",
                self.terms.strategy,
                self.terms.group,
                listed([str(queue) for queue in unowned]),
                _BROKER_NAME,
            )
        self._unowned = unowned

    def _commit(self, offsets: Mapping[QueueKey, int]) -> bool:
        """Write offsets, and say whether they are there. Called with the group's turn held."""
        if self.terms.commit == "off":
            return True
        # Who resets has the turn, too: a reset that came since this step began is not published over.
        sent_elsewhere = self._look_at_resets().since(self._resets.number)
        offsets = {queue: offset for queue, offset in offsets.items() if queue not in sent_elsewhere}
        try:
            outcome = self._offset_file.commit(self.terms.group, offsets)
            if outcome is Outcome.BROKER:
                raise refuse_commit(self.root, self.terms.group)
        except (LockTimeoutError, StorePathError) as error:
            if self._must_publish:
                raise
            if not self._warned:
                _LOG.warning("rmq: group offsets are not published, they stay in the checkpoint: %s", error)
                self._warned = True
            return False
        if outcome is Outcome.WRITTEN:
            write_published(self.paths, self._disk, wall_clock_ms(), self.member_id)
        self._warned = False
        return True
