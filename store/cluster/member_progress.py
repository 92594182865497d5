"""The progress of one member of a group: what it has finished, published, and learnt of resets. For one thread.

The rules are in `published_offsets` and `group_resets`, and the requests in `member_offsets`. This module puts them
together: nothing is committed in a queue that an administrator has reset until the query has applied the reset, and the
answers of brokers to commits and reads show resets.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from rmq_spark.store.backend import GroupTerms, OffsetHistory
from rmq_spark.store.cluster.group_resets import GroupResets
from rmq_spark.store.cluster.member_offsets import MemberOffsets, Told
from rmq_spark.store.cluster.membership import Membership
from rmq_spark.store.cluster.offset_commits import Brokers, Outcome
from rmq_spark.store.cluster.published_offsets import PublishedOffsets
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.write_routes import V5_0_0
from rmq_spark.store.errors import BackendUnavailableError, RmqError, StoreError
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")

RESET_LOOK_MS = 5000.0  # between two looks for resets at brokers of 5.x
_LOOKED_QUEUES = 1000  # at one look; each takes a request


class MemberProgress:
    """The progress of the member that `terms` describe, in the queues that it owns.

    `names` are the cluster's names of group and queues. `monotonic_ms` returns a time that never runs back. If tasks
    have pullGroup set to the group, and so it `pulls_as_group`, they take resets, and leave the target as the group's
    offset: then each offset that others have set counts as a reset.
    """

    def __init__(
        self,
        brokers: Brokers,
        names: PullTerms,
        terms: GroupTerms,
        monotonic_ms: Callable[[], float],
        *,
        pulls_as_group: bool = False,
    ) -> None:
        self._pulls_as_group = pulls_as_group
        self._names, self._terms, self._monotonic_ms = names, terms, monotonic_ms
        self._offsets = MemberOffsets(brokers, names)
        self._finished: dict[QueueKey, int] = {}
        self._looked_ms, self._next_look = -float("inf"), 0
        self._warned = False
        self._has_kept_resets = False  # whether brokers have refused the last pulls that take resets
        self.resets, self.published = GroupResets(), PublishedOffsets()

    @property
    def _publishes(self) -> bool:
        return self._terms.commit != "off"

    def note_finished(self, finished: Mapping[QueueKey, int], owned: Collection[QueueKey]) -> None:
        """Note the next offset of each queue, below which the query has finished all messages."""
        self._finished = dict(finished)
        self.published.want({queue: at for queue, at in finished.items() if queue in owned})

    def forget(self, queues: Collection[QueueKey]) -> None:
        """Forget queues that the member does not own any more."""
        self.published.forget(queues)
        self.resets.forget(queues)

    def read(self, queues: Collection[QueueKey]) -> dict[QueueKey, Told]:
        """Return the group's offset in each queue. See `MemberOffsets.read`."""
        return self._offsets.read(queues)

    # Commits.

    def has_unpublished(self) -> bool:
        """Return whether offsets wait to be published, and may be by now."""
        is_due = self._publishes and self.published.is_due(self._monotonic_ms())
        return is_due and bool(self.published.unpublished(self.resets.queues))

    def publish(
        self, member: Membership, finished: Mapping[QueueKey, int], owned: Collection[QueueKey], *, is_urgent: bool
    ) -> bool:
        """Commit the offsets in `finished` of owned queues that moved, at most every 5 s unless it `is_urgent`.

        Return whether there were any. Raises StoreError with commitOffsets=required; else logs the first failure.
        """
        self.published.want({queue: at for queue, at in finished.items() if queue in owned})
        now_ms = self._monotonic_ms()
        if not self._publishes or not (is_urgent or self.published.is_due(now_ms)):
            return False
        moved = self.published.unpublished(self.resets.queues)
        if self._pulls_as_group:
            self._note_foreign(self.read(moved))
            moved = self.published.unpublished(self.resets.queues)
        if moved:
            self.published.note_published(now_ms)
            self._send(member, moved)
        return bool(moved)

    def publish_last(self, member: Membership, offsets: Mapping[QueueKey, int]) -> None:
        """Commit the last offsets in queues that the member gives up, unless others have set the group's offset."""
        if not self._publishes:
            return
        wanted = {queue: offset for queue, offset in offsets.items() if queue not in self.resets.queues}
        told = self.read(wanted)
        own = {
            queue: offset
            for queue, offset in wanted.items()
            if not isinstance(one := told[queue], RmqError) and one != offset and self.published.is_own(queue, one)
        }
        self._send(member, own, [one for one in told.values() if isinstance(one, RmqError)])

    def begin(
        self, member: Membership | None, beginnings: Mapping[QueueKey, int], owned: Collection[QueueKey]
    ) -> dict[QueueKey, int]:
        """Commit start offsets in those owned queues in which the group has none. Return the offsets of all queues."""
        told = self.read([queue for queue in beginnings if queue in owned])
        if member is not None and self._publishes:
            self._send(member, {queue: beginnings[queue] for queue, one in told.items() if one is None})
        return {**beginnings, **{queue: at for queue, at in told.items() if isinstance(at, int)}}

    def _send(self, member: Membership, offsets: Mapping[QueueKey, int], errors: Sequence[RmqError] = ()) -> None:
        """Commit offsets, and note what came of it, and of the reads before it, which had `errors`."""
        if not offsets and not errors:
            return
        outcomes = self._commit(member, offsets)
        errors = [*errors, *(outcome for outcome in outcomes.values() if isinstance(outcome, RmqError))]
        if errors and self._terms.commit == "required":
            if not isinstance(errors[0], BackendUnavailableError):
                raise errors[0]
            raise StoreError(  # a query waits for a broker that is unavailable, and must not wait here
                f'the offsets of consumer group "{self._terms.group}" cannot be published, as commitOffsets=required '
                f"demands: {errors[0]} Then start the query again, or set commitOffsets=auto: offsets that cannot be "
                "published stay in the checkpoint, and are published later."
            ) from errors[0]
        if errors and not self._warned:
            _LOG.warning(
                "rmq: offsets of consumer group %s are not published, they stay in the checkpoint: %s",
                *(self._terms.group, errors[0]),
            )
        self._warned = bool(errors)

    def _commit(self, member: Membership, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, Outcome | RmqError]:
        """Commit offsets, note those that a broker has accepted, and the resets because of which it has not.

        A queue with a pushed reset (4.9) is left out: the thread commits the target, so nothing else must be committed.
        """
        with member.exclusive():
            reset = member.news().resets
            wanted = {queue: at for queue, at in offsets.items() if self._names.stored_queue(queue) not in reset}
            outcomes = self._offsets.commit(wanted)
        for queue, outcome in outcomes.items():
            if outcome is Outcome.COMMITTED:
                self.published.note_acknowledged(queue, offsets[queue])
        self._note_resets({queue for queue, outcome in outcomes.items() if outcome is Outcome.IGNORED})
        return outcomes

    # Resets, and offsets that others have set.

    def note_told(self, told: Mapping[QueueKey, int]) -> None:
        """Note the group's offsets in queues that the member has gained."""
        for queue, at in told.items():
            self.published.note_acknowledged(queue, at)

    def note_pushed_resets(self, member: Membership, targets: Mapping[QueueKey, int]) -> None:
        """Note resets that a broker has pushed (4.9). The thread of the membership commits their targets.

        A broker pushes offsets of all queues of the topic, and for those that nobody has reset the offset of the group.
        So a target that the member has published last, or is about to publish, resets nothing.
        """
        last, ignored = self.published.last(), []
        for queue, target in targets.items():
            is_same = target == last.get(queue) or self.published.is_wanted(queue, target)
            if is_same and queue not in self.resets.queues:
                ignored.append(self._names.stored_queue(queue))
                continue
            self.resets.note(queue, target)
        member.drop_resets(ignored)

    def report_resets(self, readable: Collection[QueueKey]) -> Mapping[QueueKey, int]:
        """Return the resets that the query applies with the next batch. See `GroupResets.report`.

        From that batch on the group's offset that the query knows is the target.
        """
        found = self.resets.report(readable)
        for queue, target in found.items():
            self.published.note_acknowledged(queue, target)
        return found

    def look_in_gained(self, member: Membership, told: Mapping[QueueKey, int], history: OffsetHistory | None) -> None:
        """Find the resets that wait at brokers of 5.x in queues that the member has gained. `told` are their offsets.

        Those that an earlier run of the query has applied, by its `history`, only remain to be taken.
        """
        positions = {
            queue: self._finished[queue] if self._keeps_position(queue, at, history) else at
            for queue, at in told.items()
            if _keeps_resets(member, queue)
        }
        if positions:  # the answers to their commits show the resets
            self._commit(member, positions)
        if history is not None:
            self.resets.note_applied_before(history.has_applied, told)

    def _keeps_position(self, queue: QueueKey, told: int, history: OffsetHistory | None) -> bool:
        """Return whether the query stays at its position in a gained queue, and does not follow the group."""
        is_behind = self._publishes and told < self._finished.get(queue, told)
        return is_behind and history is not None and history.is_own(queue, told)

    def _note_resets(self, queues: Collection[QueueKey]) -> None:
        """Note the resets that wait at the brokers in `queues`. Their targets are the group's offsets."""
        for queue, target in self.read(sorted(queues)).items():
            if isinstance(target, int):
                self.resets.note(queue, target)

    def _note_foreign(self, told: Mapping[QueueKey, Told]) -> None:
        """Note the group's offsets that others have set as resets."""
        for queue, at in told.items():
            if isinstance(at, int) and not self.published.is_own(queue, at):
                self.resets.note(queue, at)

    def is_look_due(self) -> bool:
        """Return whether `look_for_resets` was not called for 5 s."""
        return self._monotonic_ms() - self._looked_ms >= RESET_LOOK_MS

    def look_for_resets(self, member: Membership, owned: Collection[QueueKey]) -> None:
        """Look at the brokers of 5.x for resets in the owned queues, because they do not tell of them.

        If there are more than 1000 queues, each call looks at the next 1000.
        """
        self._looked_ms = self._monotonic_ms()
        answering = member.registered({queue.broker for queue in owned})
        asked = [one for one in sorted(owned) if one.broker in answering and _keeps_resets(member, one)]
        begin = self._next_look if self._next_look < len(asked) else 0
        self._next_look = begin + _LOOKED_QUEUES
        told = self.read(asked[begin : self._next_look])
        found = {queue: one for queue, one in told.items() if isinstance(one, int)}
        known, last = set(self.resets.queues), self.published.last()
        self._note_foreign({queue: at for queue, at in found.items() if queue in known})
        strange = {
            queue: at
            for queue, at in found.items()
            if queue not in known and at not in (last.get(queue), self._finished.get(queue))
        }
        if self._pulls_as_group:
            self._note_foreign(strange)
            return
        positions = {queue: self._finished.get(queue, last.get(queue, at)) for queue, at in strange.items()}
        ahead = {queue for queue, at in strange.items() if at > positions[queue]}
        for queue in sorted(ahead):  # by a reset or by another member: the query continues there in both cases
            self.resets.note(queue, strange[queue])
        tested = {queue: positions[queue] for queue in strange if queue not in ahead}
        if tested:
            self._commit(member, tested)

    def take_resets(self, member: Membership, owned: Collection[QueueKey]) -> bool:
        """Take the resets that the query has applied from their brokers, so that these accept offsets again.

        Return whether all could be taken.
        """
        applied = {queue: target for queue, target in self.resets.applied().items() if queue in owned}
        positions = {queue: self._finished.get(queue, target) for queue, target in applied.items()}
        taken = self._offsets.take_resets({q: at for q, at in positions.items() if _keeps_resets(member, q)})
        errors: list[RmqError] = []
        for queue, target in applied.items():
            one = taken.get(queue)
            if isinstance(one, RmqError):
                errors.append(one)
                continue
            self.resets.forget([queue])
            self.published.note_acknowledged(queue, target)
            if one is not None and one != target:  # a later reset, which the broker does not keep any more
                self.resets.note(queue, one)
                self.published.note_acknowledged(queue, one)
        member.drop_resets([self._names.stored_queue(queue) for queue in applied])
        if errors and not self._has_kept_resets:
            _LOG.warning(
                "rmq: offsets of consumer group %s that an administrator has reset cannot be published until the "
                "broker takes a pull of the group, which is tried again every second: %s",
                *(self._terms.group, errors[0]),
            )
        self._has_kept_resets = bool(errors)
        return not errors

    def judge_doubt(self, queue: QueueKey, told: Told, *, was_cut_off: bool) -> bool:
        """Decide about a queue that others may have taken for a while, by the group's offset in it.

        Return whether another member has advanced it, so that the query must continue at the group's offset. If the
        member `was_cut_off` from a broker, an offset below all that it has published is a reset, and is noted. Without
        that, the broker has told of resets, and the offset comes from a member that was late to give up the queue.
        """
        if not isinstance(told, int) or self.published.is_own(queue, told):
            return False
        published, finished = self.published.last().get(queue), self._finished.get(queue)
        if finished is None or told > finished:
            _LOG.warning(
                "rmq: the consumer group %s: another member has read queue %s up to offset %d since this one "
                "has looked last; the query continues there",
                *(self._terms.group, queue, told),
            )
            return True
        if was_cut_off and (published is None or told < published):
            self.resets.note(queue, told)
            self.published.note_acknowledged(queue, told)
        return False


def _keeps_resets(member: Membership, queue: QueueKey) -> bool:
    """Return whether the broker of a queue keeps resets until the group pulls (5.x)."""
    return member.version_of(queue.broker) >= V5_0_0
