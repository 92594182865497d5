"""One streaming query as a member of its consumer group.

A `GroupSession` joins the group, rebalances the group's queues and commits the query's offsets. A rebalance runs these
steps in this order, so that no message is lost between members:

1. Read the resets. If a queue was reset, the query does not commit its own offset in it, because that would undo the
   reset.
2. Release the queues that now belong to other members, after committing the query's offsets in them. Claim the queues
   of the query's share that are free.
3. Read the committed offsets of the claimed queues. The previous owner of a queue committed its offset before it
   released the queue. A reset commits its offsets before it is recorded. So the resets are read before and after the
   committed offsets, until both reads return the same.
4. The caller then checks that its finished offsets still exist in the queues that it keeps, and calls `publish`.

A query can read a store even if it may not write there or if a broker holds the store. Then its offsets are not
committed, but stay in its checkpoint, and one warning is logged. With commitOffsets=required or shared queues this is
an error instead, because the next owner of a queue needs a committed offset: without one it would start at the end of
the queue, or read the whole queue again. A query without write permission stays outside the group. After a transient
failure (a full or failing disk, a lock timeout), the next rebalance tries again.

Threads: the reader's thread calls all methods except `hand_over`. If queues are shared, a second thread calls
`hand_over` (`handover.py`). One mutex keeps these two threads apart. The reader's thread holds it during each call, and
by `planning` also during a whole trigger. The handover thread does nothing while the reader's thread holds the mutex.
Both take the mutex first, then the group's lock, then the store's lock. A third thread sends heartbeats
(`member_lease.py`), and takes no lock that another thread holds for long.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from rmq_spark.store.backend import GroupAssignment, GroupTerms, OffsetHistory
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk, is_disk_trouble, is_forbidden
from rmq_spark.store.errors import DamageError, LockTimeoutError, StoreError
from rmq_spark.store.group.assignment import Assignment, Rebalanced
from rmq_spark.store.group.group_files import GroupPaths, read_finished_batch, write_commit_stamp, write_planned_batch
from rmq_spark.store.group.handover import Handover, start_handover_thread
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms
from rmq_spark.store.group.offset_file import OffsetFile, Outcome, SeenEnds, Stamp, read_group_offsets, refuse_commit
from rmq_spark.store.group.resets import Resets, read_resets, read_suspended
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.model import QueueKey, SuspendedQueues
from rmq_spark.store.names import check_consumer_group
from rmq_spark.store.rebalance.allocation import allocate, find_strategy, find_unowned, listed
from rmq_spark.store.rebalance.strategies import DIRECTORY_BROKER
from rmq_spark.store.synchronized import Synchronized

_LOG = logging.getLogger("rmq_spark")

_RETRY_S = 1.0  # the time after which an idle query repeats a failed commit; the check for a broker takes 15 ms
_PUBLISH_WAIT_MS = 10_000  # how long a commit waits for a writer of ours without progress; the next trigger tries again


class GroupSession(Synchronized):
    """The membership of one query in its group, from the first `rebalance` to `leave` or the end of the process.

    Call its methods from one thread. The object starts the heartbeat thread and the handover thread itself.
    """

    def __init__(self, path: str, terms: GroupTerms, ends_stamp: Callable[[], Stamp] | None = None) -> None:
        """`ends_stamp` returns the stamp (`stamp_of_ends`) that was taken before the queue ends were read last.

        The caller compares the offsets that it passes to `rebalance` with these ends. Without `ends_stamp`, the ends
        are read again when offsets are committed.
        """
        super().__init__()  # `_mutex` separates the reader's thread from the handover thread
        check_consumer_group(terms.group)
        self.root, self.terms = files.store_folder(path), terms
        self._strategy = find_strategy(terms.strategy)
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
        settings = WriterSettings(
            "rmq-spark", _PUBLISH_WAIT_MS, allow_network_store=True
        )  # it writes small files, no messages
        self._offset_file = OffsetFile(self.root, disk, settings, wall_clock_ms, time.sleep)
        self._assignment = Assignment(self._membership, self._share, self._commit)
        self._handover = Handover(
            self._assignment,
            terms.handover_timeout_ms / 1000,
            lambda: read_finished_batch(self.paths, self.member_id),
            clocks.monotonic,
        )
        self._stop_handover: threading.Event | None = None
        self._handover_warned = False
        self._has_joined = self._is_shut_out = self._has_failed_to_join = False
        # Queues that the query reads without a claim, because the store cannot be written.
        self._unclaimed: set[QueueKey] = set()
        self._unsettled: set[QueueKey] = set()  # queues gained since the last `settle`
        self._resets = Resets()
        self._warned = False
        self._unowned: list[QueueKey] = []  # queues without a reader, as of the last check
        self._ends_stamp = ends_stamp
        self._seen_ends_stamp: tuple[Stamp] | None = None  # that of the last rebalance; None is a valid stamp
        self._retry_at_s: float | None = None  # when to try a failed commit again

    @property
    def member_id(self) -> str:
        """The id of this query in the group."""
        return self._membership.id

    @property
    def is_outside(self) -> bool:
        """Whether this query reads queues without a claim, because the store cannot be written."""
        return self._has_failed_to_join or bool(self._unclaimed)

    @property
    def batches(self) -> int:
        """How many batches the query has planned as a member. This is also the number of the last planned batch."""
        return self._handover.batches

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Keep the handover thread from acting in the body of `with`. The reader plans a batch there."""
        with self._mutex:
            yield

    @property
    def _must_publish(self) -> bool:
        return self.terms.commit == "required" or self.terms.assignment == "shared"

    @property
    def epochs(self) -> dict[QueueKey, int]:
        """The epoch of this query's claim of each queue that it owns. Tasks check them (`assignment.check_epochs`)."""
        return self._assignment.epochs

    @property
    def published(self) -> Mapping[QueueKey, int]:
        """{}: the resets of a directory have numbers, so no committed offset is taken for one."""
        return {}

    def join(self) -> None:
        """Join the group, unless the query is a member already.

        If the store cannot be written, a query that reads all queues stays outside the group, and a warning is logged.
        A query without write permission stays outside forever. Otherwise it stays outside until a later call succeeds.
        Raises GroupConflictError if another member conflicts with this query.
        """
        with self._mutex:
            if self._has_joined or self._is_shut_out:
                return
            try:
                self._membership.join()
            except StoreError as error:
                if not self._may_continue_after(error):
                    raise
                self._is_shut_out = is_forbidden(error)
                self._has_failed_to_join = True
                self._warn(
                    f"the query does not join the consumer group {self.terms.group}: {self.root} cannot be written. "
                    f"Its offsets stay in its checkpoint: {error}"
                )
            else:
                self._has_joined, self._has_failed_to_join = True, False
                if self.terms.assignment == "shared":
                    self._stop_handover = start_handover_thread(self)

    def offsets(self) -> dict[QueueKey, int]:
        """Return the group's committed offsets. Raises DamageError if the offset file is damaged."""
        return read_group_offsets(self.root, self.terms.group, time.sleep)

    def suspended(self) -> SuspendedQueues:
        """Return the group's suspended queues. Raises DamageError if the file with them is damaged."""
        return read_suspended(self.root, self.terms.group)

    def has_changed(self) -> bool:
        """Say whether a rebalance or a commit may change anything. New messages do not matter here.

        Takes no lock on files, so a query may call this often.
        """
        with self._mutex:
            if read_resets(self.paths.resets) != self._resets:
                return True
            if self._retry_at_s is not None and self._membership.clocks.monotonic() >= self._retry_at_s:
                return True
            # A query that could not join tries again at its next trigger, but not while it waits for a message.
            return self._has_joined and not (self._assignment.is_settled() and self._assignment.is_published())

    def rebalance(
        self,
        queues: Sequence[QueueKey],
        finished: Mapping[QueueKey, int],
        applied_reset: int | None,
        history: OffsetHistory | None = None,
    ) -> GroupAssignment:
        """Claim this query's share of `queues`, and release the queues that belong to other members.

        The offsets of released queues are committed. `finished` maps each queue to its next queue offset, and all
        earlier messages of the queue must be done. In a suspended queue (`suspended`), this is the offset where the
        queue resumes. `applied_reset` is the number of the last reset that the query has applied. With None, all
        present resets are ignored. A query that stays outside the group owns all queues.

        Raises GroupConflictError if another query has taken the place of this one, and DamageError if a file of the
        group is damaged.
        """
        with self._mutex:
            self._handover.begin()
            self.join()
            if self._ends_stamp is not None:
                self._seen_ends_stamp = (self._ends_stamp(),)
            self._resets = read_resets(self.paths.resets)
            pending = {} if applied_reset is None else self._resets.since(applied_reset)
            done = {queue: offset for queue, offset in finished.items() if queue not in pending}
            if self._unsettled:
                # These queues were claimed for a batch that is repeated, and `settle` was not called since. Their
                # earlier owners may have committed a higher offset, which must stay.
                committed = self.offsets()
                done = {
                    queue: offset
                    for queue, offset in done.items()
                    if queue not in self._unsettled or offset >= committed.get(queue, 0)
                }
            moved = self._rebalance_or_continue(queues, done)
            self._warn_of_unowned(queues)
            self._unsettled = (self._unsettled | set(moved.gained)) & set(moved.owned)
            committed = {}
            if self._unsettled:
                committed, self._resets = self._read_committed()
                pending = {} if applied_reset is None else self._resets.since(applied_reset)
            gained = tuple(sorted(self._unsettled))
            return GroupAssignment(moved.owned, gained, committed, moved.lost, pending, self._resets.number)

    def settle(self, *, is_batch: bool = True) -> None:
        """Confirm that the query has planned an offset that contains the gained queues.

        Until this is called, each rebalance returns these queues as gained again. `is_batch` says whether a batch was
        planned. If it was, its number is recorded, so that nobody commits the end of an earlier batch any more. If it
        was not, no batch runs until the next rebalance, and all finished offsets are committed. If the store
        cannot be written, raises StoreError if queues are shared or commitOffsets=required.
        """
        with self._mutex:
            self._handover.plan(is_batch=is_batch)
            if is_batch and self._has_joined and self.terms.commit != "off":
                try:
                    write_planned_batch(self.paths, self._disk, self.member_id, self.batches)
                except StoreError as error:
                    self._continue_after(error)
            # Not cleared after an error above, because then nobody gets the planned offset.
            self._unsettled.clear()

    def hand_over(self) -> None:
        """Release the queues that other members are entitled to, between two triggers. For the handover thread.

        Does nothing while the reader's thread is in a call. An error is logged and not raised, and the next round tries
        again. If the error lasts, the next trigger raises it.
        """
        if not self._mutex.acquire(blocking=False):
            return
        try:
            released, fenced = self._handover.refresh()
        except Exception as error:  # also from a strategy of the user: the thread continues
            if not self._handover_warned:
                _LOG.warning("rmq: the consumer group %s: queues cannot be handed over: %s", self.terms.group, error)
            self._handover_warned = True
        else:
            self._handover_warned = False
            self._log_handover(released, fenced)
        finally:
            self._mutex.release()

    def _log_handover(self, released: Sequence[QueueKey], fenced: Sequence[QueueKey]) -> None:
        if released:
            names = listed([str(queue) for queue in released])
            _LOG.info("rmq: the consumer group %s: released %s for other members", self.terms.group, names)
        if fenced:
            _LOG.warning(
                "rmq: the consumer group %s: released %s after handoverTimeout (%g s), because other members wait for "
                "these queues and the batch that reads them has not ended. Another member reads the batch's messages "
                "of these queues again",
                self.terms.group,
                listed([str(queue) for queue in fenced]),
                self.terms.handover_timeout_ms / 1000,
            )

    def begin(self, beginnings: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Commit start offsets for the topics in which the group has no committed offset. Return all committed offsets.

        `beginnings` maps queues to their start offsets. The first member commits them for all queues of a topic at
        once, because another member, or a later call, could find other start offsets. If the offsets cannot or must
        not be written, the result contains the start offsets although they are not committed.
        """
        with self._mutex:
            if not self._has_joined:
                return {**beginnings, **self.offsets()}
            try:
                with self._membership.lock.hold():
                    committed = self.offsets()
                    topics = {queue.topic for queue in committed}
                    new = {queue: offset for queue, offset in beginnings.items() if queue.topic not in topics}
                    if new:
                        self._commit(new)
            except StoreError as error:
                self._continue_after(error)
                return {**beginnings, **self.offsets()}
            return {**new, **committed}

    def publish(self, finished: Mapping[QueueKey, int]) -> None:
        """Commit the offsets in `finished` of those queues that this query still owns.

        If the store cannot be written, or a broker holds it, the query continues without the commit. With
        commitOffsets=required or shared queues this is an error instead: LockTimeoutError if a broker holds the store,
        StoreError otherwise. DamageError is raised in any case if a file is damaged.
        """
        with self._mutex:
            if self._has_joined:
                try:
                    self._assignment.publish(finished)
                except StoreError as error:
                    self._continue_after(error)

    def leave(self, finished: Mapping[QueueKey, int]) -> None:
        """Commit the offsets in `finished`, release all queues and leave the group.

        If this is not called, the end of the process frees the queues, but nothing is committed.
        """
        with self._mutex:
            if self._has_joined:
                self._has_joined = False
                if self._stop_handover is not None:
                    self._stop_handover.set()
                self._assignment.leave(finished)

    def _rebalance_or_continue(self, queues: Sequence[QueueKey], done: Mapping[QueueKey, int]) -> Rebalanced:
        """Rebalance and return the result. If the query is not a member or cannot write, return all queues as owned."""
        if self._has_joined:
            try:
                moved = self._assignment.rebalance(queues, done)
            except StoreError as error:
                self._continue_after(error)
            else:
                # The query has read its unclaimed queues all the time, so it continues at its own offset in them, and
                # they are not gained.
                gained = tuple(queue for queue in moved.gained if queue not in self._unclaimed)
                self._unclaimed.clear()
                return moved._replace(gained=gained)
        known = self._assignment.epochs.keys() | self._unclaimed
        gained = tuple(queue for queue in queues if queue not in known)
        self._unclaimed.update(gained)
        return Rebalanced(tuple(queues), gained)

    def _read_committed(self) -> tuple[dict[QueueKey, int], Resets]:
        """Return (the committed offsets, the resets), such that the offsets include all of these resets."""
        resets = read_resets(self.paths.resets)
        while True:
            committed, before = self.offsets(), resets
            resets = read_resets(self.paths.resets)
            if resets == before:  # if they differ, the offsets may be older than the newest reset
                return committed, resets

    def _may_continue_after(self, error: StoreError) -> bool:
        """Say whether the query may continue although it could not write.

        It may if it has no permission to write, or if a later trigger may succeed. But it may not if queues are shared
        or commitOffsets is required.
        """
        is_transient = isinstance(error, LockTimeoutError) or is_disk_trouble(error)
        return not self._must_publish and (is_forbidden(error) or is_transient)

    def _continue_after(self, error: StoreError) -> None:
        """Log a warning (only once) and schedule a retry, or raise `error` if the query must not continue."""
        if not self._may_continue_after(error):
            raise error
        self._retry_later(error)

    def _retry_later(self, error: StoreError) -> None:
        self._retry_at_s = self._membership.clocks.monotonic() + _RETRY_S
        self._warn(f"group offsets are not published, they stay in the checkpoint: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            _LOG.warning("rmq: %s", text)
            self._warned = True

    def _share(self, group: str, queues: Sequence[QueueKey], living: Sequence[str]) -> Mapping[str, Sequence[QueueKey]]:
        return {self.member_id: allocate(self._strategy, group, self.member_id, queues, living)}

    def _warn_of_unowned(self, queues: Sequence[QueueKey]) -> None:
        """Log a warning that lists the queues that no member reads, whenever these change.

        RocketMQ does not warn of such queues.
        """
        if self.terms.assignment != "shared":
            return
        unowned = sorted(find_unowned(self._strategy, queues))
        if unowned and unowned != self._unowned:
            _LOG.warning(
                "rmq: allocateStrategy=%s of the consumer group %s gives these queues to nobody, so no member reads "
                'them: %s. The store is one broker with the name "%s", and the strategy assigns only queues of '
                "brokers named room@name. Set another one in all members, such as avg",
                self.terms.strategy,
                self.terms.group,
                listed([str(queue) for queue in unowned]),
                DIRECTORY_BROKER,
            )
        self._unowned = unowned

    def _commit(self, offsets: Mapping[QueueKey, int]) -> bool:
        """Commit offsets. Return whether they need not be committed again. The caller must hold the group's lock."""
        if self.terms.commit == "off":
            return True
        # A reset also takes the group's lock, so this read sees all resets that were made since the rebalance began.
        newly_reset = read_resets(self.paths.resets).since(self._resets.number)
        offsets = {queue: offset for queue, offset in offsets.items() if queue not in newly_reset}
        try:
            ends = None if self._seen_ends_stamp is None else SeenEnds(self.root, self._seen_ends_stamp[0])
            outcome = self._offset_file.commit(self.terms.group, offsets, ends)
            if outcome is Outcome.BROKER:
                raise refuse_commit(self.root, self.terms.group)
        except StoreError as error:
            if self._must_publish or isinstance(error, DamageError):
                raise
            self._retry_later(error)
            return False
        if outcome is Outcome.WRITTEN:
            write_commit_stamp(self.paths, self._disk, wall_clock_ms(), self.member_id)
        self._warned, self._retry_at_s = False, None
        return ends is None or not ends.corrected
