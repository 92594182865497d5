"""One streaming query in its consumer group: what of the queues is its own, where they go on, and saying how far it is.

The order of one step is the promise that nothing is lost between members:

1. resets are read, so that what is finished in a queue that was told to go elsewhere is not published over it;
2. what is another's share is published as finished and let go, what is free and this query's share is claimed;
3. where a claimed queue goes on is read after it was claimed: its last owner published before it let go. Resets are
   read again with it: who resets writes the group's offset first, so an offset that was read counts all that were read;
4. what is finished in the queues that stay is published, by who has looked whether they still reach so far.

A store that cannot be written, or on which a broker lives, is read all the same: then the offsets stay in the query's
checkpoint, and a warning says so once. With commitOffsets=required that fails, and where queues are shared: who gets a
queue whose offset is not published would begin at its end, or read it all again. Who may not write at all stays outside
the group; what passes (a full or failing disk, a lock that is not to be had) is tried again at each step.

Threads: the reader's calls come from one thread. A member that shares queues has a second one, which calls `hand_over`
(`handover.py`). One lock keeps the two apart: the reader's thread has it within each call, and for the whole of a
trigger by `planning`; the other thread does nothing while it cannot have the lock. Both take the group's turn and the
store's lock only after it. A third thread beats (`lease.py`) and takes no lock that anybody holds for long.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk, is_disk_trouble, is_forbidden
from rmq_spark.store.disk.synchronized import Synchronized
from rmq_spark.store.errors import DamageError, LockTimeoutError, StoreError
from rmq_spark.store.group.allocation import allocate, find_strategy, find_unowned, listed
from rmq_spark.store.group.assignment import Assignment, Rebalanced
from rmq_spark.store.group.finished_batch import read_finished_batch, write_planned_batch
from rmq_spark.store.group.group_name import check_consumer_group
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.group.handover import HANDOVER_TIMEOUT_MS, Handover, start_looking
from rmq_spark.store.group.member_file import Kind
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms
from rmq_spark.store.group.message_queue import MessageQueue
from rmq_spark.store.group.offset_file import OffsetFile, Outcome, read_group_offsets, refuse_commit
from rmq_spark.store.group.published import write_published
from rmq_spark.store.group.resets import Resets, read_resets
from rmq_spark.store.group.seen_ends import SeenEnds, Stamp
from rmq_spark.store.group.suspended import Suspended, read_suspended
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")

# A store is one broker's, whatever that is called; it counts for consistentHash, and must be the same for all members.
_BROKER_NAME = "broker"
_RETRY_S = 1.0  # an idle query tries no more often to publish what could not be: a look for a broker takes 15 ms
_PUBLISH_WAIT_MS = 10_000  # for writers of ours that make no progress; offsets are published again by the next trigger


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
    handover_timeout_ms: int = HANDOVER_TIMEOUT_MS
    allow_network_store: bool = True  # one small file under the store's lock; messages are another matter


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What a step found.

    `owned` are the queues that are this query's now, `gained` those that were not when a step was settled last, `held`
    are the group's offsets as they stand since, of all its queues; {} where nothing was gained. `resets` are the
    offsets to go to, in queues of others too.
    """

    owned: tuple[QueueKey, ...]
    gained: tuple[QueueKey, ...]
    held: Mapping[QueueKey, int]
    lost: tuple[QueueKey, ...]
    resets: Mapping[QueueKey, int]
    reset_number: int


class QueryGroup(Synchronized):
    """A query's membership, from its first `step` to the end of its process. For one thread, beside its own two."""

    def __init__(self, path: str, terms: GroupTerms) -> None:
        super().__init__()  # its lock is that of the reader's thread and the handover thread
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
        self._handover = Handover(
            self._assignment,
            terms.handover_timeout_ms / 1000,
            lambda: read_finished_batch(self.paths, self.member_id),
            clocks.monotonic,
        )
        self._stop_looking: threading.Event | None = None
        self._handover_warned = False
        self._has_joined = self._is_shut_out = self._has_failed_to_join = False
        self._unclaimed: set[QueueKey] = set()  # read all the same, for the store cannot be written
        self._fresh: set[QueueKey] = set()  # gained since a step was settled
        self._resets = Resets()
        self._warned = False
        self._unowned: list[QueueKey] = []  # that the strategy gave to nobody when that was said last
        self._ends_stamp: Stamp = None
        self._has_looked = False  # at the ends of the queues
        self._retry_at_s: float | None = None  # when to publish again what could not be

    @property
    def member_id(self) -> str:
        """The name by which others know this query."""
        return self._membership.id

    @property
    def is_outside(self) -> bool:
        """Whether this query reads what it has no claim to, as the store cannot be written: by now, or at all."""
        return self._has_failed_to_join or bool(self._unclaimed)

    @property
    def batches(self) -> int:
        """How many batches the query has planned as a member: the number of the last one."""
        return self._handover.batches

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Keep the handover thread away in the body of `with`, in which the reader plans a batch."""
        with self._mutex:
            yield

    @property
    def _must_publish(self) -> bool:
        return self.terms.commit == "required" or self.terms.assignment == "shared"

    @property
    def epochs(self) -> dict[QueueKey, int]:
        """The epochs of the queues that are this query's: what a task shows to read them."""
        return self._assignment.epochs

    def join(self) -> None:
        """Become a member, once. Raises GroupConflictError where another query is in the way.

        In a store that cannot be written a query that reads all queues stays outside, with a warning: for good if it
        may not write there, else until a later call.
        """
        with self._mutex:
            if not (self._has_joined or self._is_shut_out):
                self._join()

    def _join(self) -> None:
        try:
            self._membership.join()
        except StoreError as error:
            if self._must_publish or not (is_forbidden(error) or _is_passing(error)):
                raise
            self._is_shut_out = is_forbidden(error)
            self._has_failed_to_join = True
            self._warn(
                f"{self.root} cannot be written, so this query is no member of the consumer group {self.terms.group}, "
                f"and its offsets stay in its checkpoint: {error}"
            )
        else:
            self._has_joined, self._has_failed_to_join = True, False
            if self.terms.assignment == "shared":
                self._stop_looking = start_looking(self)

    def offsets(self) -> dict[QueueKey, int]:
        """Return the group's next queue offsets as they stand. Raises DamageError."""
        return read_group_offsets(self.root, self.terms.group, time.sleep)

    def suspended(self) -> Suspended:
        """Return the group's queues that an orderly listener stopped. Raises DamageError."""
        return read_suspended(self.root, self.terms.group)

    def has_news(self) -> bool:
        """Say whether a step may find something new, beside messages. Cheap; takes no lock of other processes."""
        with self._mutex:
            if self._look_at_resets() != self._resets:
                return True
            if self._retry_at_s is not None and self._membership.clocks.monotonic() >= self._retry_at_s:
                return True
            # Who could not join tries again when it is asked to, at the next trigger: not while one waits for a
            # message.
            return self._has_joined and not (self._assignment.is_settled() and self._assignment.is_published())

    def note_look(self, stamp: Stamp) -> None:
        """Take note of the look at the queues from which what is finished comes, by its stamp (`seen_ends.py`)."""
        with self._mutex:
            self._ends_stamp, self._has_looked = stamp, True

    def step(
        self, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int], applied_reset: int | None
    ) -> GroupStep:
        """Take what is this query's of `queues`, and publish what is finished in those that it lets go.

        `finished` has the next queue offset of each queue: all before it is done, so a queue that an orderly listener
        stopped (`suspended`) is finished where it goes on. `applied_reset` is the number of the last reset that the
        query has applied, None for one that knows none: to it they are all past. Outside of the group all queues are
        its own. Raises GroupConflictError, DamageError.
        """
        with self._mutex:
            self._handover.begin()
            return self._step(queues, finished, applied_reset)

    def _step(
        self, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int], applied_reset: int | None
    ) -> GroupStep:
        self.join()
        self._resets = self._look_at_resets()
        pending = {} if applied_reset is None else self._resets.since(applied_reset)
        done = {queue: offset for queue, offset in finished.items() if queue not in pending}
        if self._fresh:
            # Claimed for a repeated batch, and not settled: others may have gone further before.
            held = self.offsets()
            done = {q: offset for q, offset in done.items() if q not in self._fresh or offset >= held.get(q, 0)}
        moved = self._rebalance(queues, done)
        self._tell_of_unowned(queues)
        self._fresh = (self._fresh | set(moved.gained)) & set(moved.owned)
        if not self._fresh:
            return GroupStep(moved.owned, (), {}, moved.lost, pending, self._resets.number)
        held, self._resets = self._stand()
        pending = {} if applied_reset is None else self._resets.since(applied_reset)
        return GroupStep(moved.owned, tuple(sorted(self._fresh)), held, moved.lost, pending, self._resets.number)

    def settle(self, *, is_batch: bool = True) -> None:
        """Take note that what the last step gained stands in an offset of the query. Until then it is gained again.

        `is_batch` says whether a batch was planned. Without one nothing is in flight until the next step, and what was
        finished is published. The batch's number is recorded, so that nobody publishes an earlier end from now on.
        Raises StoreError for a query that shares queues, in a store that cannot be written.
        """
        with self._mutex:
            self._handover.plan(is_batch=is_batch)
            if is_batch and self._has_joined and self.terms.commit != "off":
                try:
                    write_planned_batch(self.paths, self._disk, self.member_id, self.batches)
                except StoreError as error:
                    self._bear(error)
            self._fresh.clear()  # not before: after an error the offset is given to nobody

    def hand_over(self) -> None:
        """Give queues up between two triggers, if others are entitled to them. For the handover thread.

        Does nothing while the reader is within a call. What fails is tried again at the next look; the next trigger
        raises it, if it lasts.
        """
        if not self._mutex.acquire(blocking=False):
            return
        try:
            released, fenced = self._handover.look()
        except Exception as error:  # also what a strategy of the user's raises: the thread goes on
            if not self._handover_warned:
                _LOG.warning("rmq: the consumer group %s: queues cannot be handed over: %s", self.terms.group, error)
            self._handover_warned = True
        else:
            self._handover_warned = False
            self._report_handover(released, fenced)
        finally:
            self._mutex.release()

    def _report_handover(self, released: Sequence[QueueKey], fenced: Sequence[QueueKey]) -> None:
        if released:
            names = listed([str(queue) for queue in released])
            _LOG.info("rmq: the consumer group %s: %s released, for other members", self.terms.group, names)
        if fenced:
            _LOG.warning(
                "rmq: the consumer group %s: other members have waited for %g s (handoverTimeout) for %s, and the "
                "batch that reads these queues has not ended. The queues are given up; the batch's messages of them "
                "come again at another member",
                self.terms.group,
                self.terms.handover_timeout_ms / 1000,
                listed([str(queue) for queue in fenced]),
            )

    def begin(self, beginnings: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Have the group begin there in topics in which it has no offset; return all its offsets then.

        The first of its members that comes settles it, for all queues of a topic: who has more messages by then, or
        asks another day, would find another place. Where offsets cannot be written, or are not to be, they are returned
        all the same.
        """
        with self._mutex:
            return self._begin(beginnings)

    def _begin(self, beginnings: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        if not self._has_joined:
            return {**beginnings, **self.offsets()}
        try:
            with self._membership.turn.hold():
                held = self.offsets()
                topics = {queue.topic for queue in held}
                new = {queue: offset for queue, offset in beginnings.items() if queue.topic not in topics}
                if new:
                    self._commit(new)
        except StoreError as error:
            self._bear(error)
            return {**beginnings, **self.offsets()}
        return {**new, **held}

    def publish(self, finished: Mapping[QueueKey, int]) -> None:
        """Make these the group's next queue offsets, as far as the queues are this query's.

        Raises LockTimeoutError where that cannot be, and commitOffsets=required or the queues are shared.
        """
        with self._mutex:
            if self._has_joined:
                try:
                    self._assignment.publish(finished)
                except StoreError as error:
                    self._bear(error)

    def leave(self, finished: Mapping[QueueKey, int]) -> None:
        """Publish, let all queues go, and leave. A process that ends without it is as good as gone, too."""
        with self._mutex:
            if self._has_joined:
                self._has_joined = False
                if self._stop_looking is not None:
                    self._stop_looking.set()
                self._assignment.leave(finished)

    def _rebalance(self, queues: Sequence[QueueKey], done: Mapping[QueueKey, int]) -> Rebalanced:
        """Return what is this query's: what it claims, or without a claim all."""
        if self._has_joined:
            try:
                moved = self._assignment.rebalance(queues, done)
            except StoreError as error:
                self._bear(error)
            else:
                # Where it went on in the others it knows: it read them all the time.
                gained = tuple(queue for queue in moved.gained if queue not in self._unclaimed)
                self._unclaimed.clear()
                return moved._replace(gained=gained)
        known = self._assignment.epochs.keys() | self._unclaimed
        gained = tuple(queue for queue in queues if queue not in known)
        self._unclaimed.update(gained)
        return Rebalanced(tuple(queues), gained)

    def _stand(self) -> tuple[dict[QueueKey, int], Resets]:
        """Return the group's offsets, and the resets that they count."""
        resets = self._look_at_resets()
        while True:
            held, before = self.offsets(), resets
            resets = self._look_at_resets()
            if resets == before:  # else the offsets may be older than the newest reset
                return held, resets

    def _bear(self, error: StoreError) -> None:
        """Go on without what failed, with one warning; raise the error where the query is not to go on."""
        if self._must_publish or not (is_forbidden(error) or _is_passing(error)):
            raise error
        self._keep_back(error)

    def _keep_back(self, error: StoreError) -> None:
        self._retry_at_s = self._membership.clocks.monotonic() + _RETRY_S
        self._warn(f"group offsets are not published, they stay in the checkpoint: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            _LOG.warning("rmq: %s", text)
            self._warned = True

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
        """Write offsets, and say whether they are there, all as they were given. Called with the group's turn held."""
        if self.terms.commit == "off":
            return True
        # Who resets has the turn, too: a reset that came since this step began is not published over.
        sent_elsewhere = self._look_at_resets().since(self._resets.number)
        offsets = {queue: offset for queue, offset in offsets.items() if queue not in sent_elsewhere}
        try:
            ends = SeenEnds(self.root, self._ends_stamp) if self._has_looked else None
            outcome = self._offset_file.commit(self.terms.group, offsets, ends)
            if outcome is Outcome.BROKER:
                raise refuse_commit(self.root, self.terms.group)
        except StoreError as error:
            if self._must_publish or isinstance(error, DamageError):
                raise
            self._keep_back(error)
            return False
        if outcome is Outcome.WRITTEN:
            write_published(self.paths, self._disk, wall_clock_ms(), self.member_id)
        self._warned, self._retry_at_s = False, None
        return ends is None or not ends.corrected


def _is_passing(error: StoreError) -> bool:
    """Say whether what kept the store from being written may be over at the next trigger."""
    return isinstance(error, LockTimeoutError) or is_disk_trouble(error)
