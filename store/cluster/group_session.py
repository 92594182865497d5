"""One streaming query as a member of its consumer group in a live cluster. It implements `GroupSession`.

The query shares the queues of its topics with all other members, queries and RocketMQ's own clients alike. Each member
allocates by itself, by the members that brokers list. Nobody records who owns a queue, so two members may own one for a
moment, and then both deliver its messages.

A rebalance runs these steps in this order:

1. Note what has happened to the membership (`membership`): members that joined or left, lost connections, resets, lost
   locks.
2. List the members at the brokers of all topics, and allocate (`queue_shares`).
3. Publish the finished offsets of queues that are lost, unless another member has advanced them, and unlock them.
4. Lock the gained queues if the query is orderly. Then read the group's offsets in them.
5. Read the offsets of doubtful queues, too: those that others may have taken since the last rebalance, because brokers
   did not know the member, or because members have joined or left. If another member has advanced one, it counts as
   gained, so that the query continues there.
6. Take the resets that the query has applied from their brokers (`group_resets`), and look for new ones.

Between two batches a query gives up queues and gains others, never while a batch runs. A rebalance asks only brokers
whose queues the caller can read, because others would not answer. Their queues stay as they are till then.

Threads: methods are for the thread of the query, and run one at a time. The thread of the membership only notes what
happens.

Source: RebalanceImpl, RebalancePushImpl, RemoteBrokerOffsetStore (4.9, 5.3).
"""

import contextlib
import logging
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from rmq_spark.store.backend import GroupAssignment, GroupTerms, OffsetHistory
from rmq_spark.store.cluster.broker_requests import MemberStatus, QueueStatus
from rmq_spark.store.cluster.client import process_id
from rmq_spark.store.cluster.connection import find_own_ip
from rmq_spark.store.cluster.member_lists import MemberLists
from rmq_spark.store.cluster.member_locks import MemberLocks
from rmq_spark.store.cluster.member_progress import MemberProgress
from rmq_spark.store.cluster.member_requests import make_client_id
from rmq_spark.store.cluster.membership import BrokerOfGroup, MemberNews, Membership
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.offset_commits import GroupPlace
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.queue_doubts import QueueDoubts
from rmq_spark.store.cluster.queue_shares import (
    ShareRule,
    TopicShares,
    compare_shares,
    join_lists,
)
from rmq_spark.store.cluster.responses import Subscription
from rmq_spark.store.cluster.write_routes import V5_0_0
from rmq_spark.store.errors import BackendUnavailableError, OptionError, RmqError
from rmq_spark.store.filter.row_filter import ALL
from rmq_spark.store.model import QueueKey, SuspendedQueues
from rmq_spark.store.names import check_consumer_group, retry_topic
from rmq_spark.store.rebalance.allocation import find_strategy, find_unowned, listed
from rmq_spark.store.synchronized import Synchronized

_LOG = logging.getLogger("rmq_spark")

_LOOK_MS = 20_000  # the longest time between two looks at the members (RebalanceService, waitInterval)
_RETRY_MS = 1000  # after a rebalance that could not do everything


class ClusterGroupSession(Synchronized):
    """The membership of one query in its group, from `join` to `leave` or the end of the process.

    `now_ms` returns ms since the epoch, and `monotonic_ms` a time that never runs back.
    """

    def __init__(
        self, place: GroupPlace, terms: GroupTerms, now_ms: Callable[[], int], monotonic_ms: Callable[[], float]
    ) -> None:
        super().__init__()
        check_consumer_group(terms.group)
        if terms.assignment != "shared":
            raise OptionError(
                f"assignment={terms.assignment} of consumer group {terms.group}: expected assignment=shared in a "
                "cluster, where the members of a group share its queues. Remove the option."
            )
        address = place.location
        self.terms = terms
        self.member_id = make_client_id(
            find_own_ip(address.name_servers[0]), process_id(), terms.query_name, uuid.uuid4().hex[:8]
        )
        self.batches = 0
        self._place, self._now_ms, self._monotonic_ms = place, now_ms, monotonic_ms
        self._monotonic_s = lambda: monotonic_ms() / 1000  # without this object, which the thread must not keep
        self._names = PullTerms(terms.group, address.namespace)
        self._rule = ShareRule(find_strategy(terms.strategy), self._names.stored_group, self.member_id)
        self._progress = MemberProgress(
            place, self._names, terms, monotonic_ms, pulls_as_group=address.pull_group == terms.group
        )
        self._member: Membership | None = None
        self._lists: MemberLists | None = None
        self._locks = MemberLocks(place, self._names, self.member_id, self._monotonic_s)
        self._topics: set[str] = set(terms.topics)
        self._retries = retry_topic(terms.group)
        self._brokers: dict[str, BrokerOfGroup] = {}
        self._owned: dict[QueueKey, int] = {}  # and when the member got each queue, in ms
        self._shares = TopicShares(self._rule, self._names.stored_queue)
        self._unsettled: set[QueueKey] = set()  # gained since the last `settle`
        self._doubts = QueueDoubts()
        self._readable: frozenset[QueueKey] = frozenset()  # at the last rebalance: queues whose brokers answered
        self._answering: set[str] = set()  # these brokers
        self._is_urgent = False  # whether members have joined or left since the last `publish`
        self._looked_ms: float | None = None
        self._again_ms: float | None = None  # when to try again what could not be done
        self._unowned: list[QueueKey] = []

    @property
    def is_outside(self) -> bool:
        """False: a query that cannot join fails, or tries again."""
        return False

    @property
    def epochs(self) -> Mapping[QueueKey, int]:
        """0 for each owned queue: a cluster does not number owners. A fence tells them apart by the lock."""
        return dict.fromkeys(self._owned, 0)

    @property
    def published(self) -> dict[QueueKey, int]:
        """The last offset of each owned queue that its broker has accepted or told as the group's."""
        return {queue: offset for queue, offset in self._progress.published.last().items() if queue in self._owned}

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Return a context without effect: queues are given up only in `rebalance` and `leave`."""
        yield

    def suspended(self) -> SuspendedQueues:
        """Return no queue: a cluster has no place for suspended queues."""
        return SuspendedQueues()

    # Joining.

    def join(self) -> None:
        """Register at the brokers of the topics that the query names, unless the query is a member already.

        A query with a pattern, and one whose topics do not exist yet, joins with the first `rebalance`. Raises
        GroupConflictError if members of the group have other topics, filters or another message model, or consume by
        POP; NoPermissionError if the group does not exist and is not created; and BackendUnavailableError if no broker
        answers.
        """
        with self._mutex:
            if self._member is not None:
                self._member.check()
            elif self._topics:
                self._enter()

    def _note_topics(self, readable: Collection[str]) -> None:
        """Note the topics to subscribe to. A query with a pattern gets new ones, and drops those that were deleted."""
        self._topics |= set(readable)
        if not self.terms.topics:
            is_deleted = self._place.catalog.is_deleted
            self._topics -= {topic for topic in self._topics.difference(readable) if is_deleted(topic)}

    def _enter(self) -> Membership | None:
        """Register at all brokers of the topics, and of the group's retry topic. Return None if there are none yet."""
        routed = self._place.catalog.shared_queues(sorted({*self._topics, self._retries}))
        address_of = self._place.catalog.book.address
        brokers = {
            queue.broker: BrokerOfGroup(topic, address_of(queue.broker) or "")
            for topic, queues in sorted(routed.items())
            for queue in queues
        }
        if self._member is not None:
            self._member.check()
            self._member.register(brokers, self._subscriptions())
        elif brokers:
            self._member = self._begin(brokers)
        self._brokers = brokers
        return self._member

    def _begin(self, brokers: Mapping[str, BrokerOfGroup]) -> Membership:
        """Join the group: compare, register, and look whether the brokers list the member."""
        subscriptions = self._subscriptions()
        address = self._place.location
        has_pattern = not self.terms.topics
        self._lists = MemberLists(self._place.client, self._names.stored_group, self.member_id, has_pattern=has_pattern)
        addresses = {name: one.address for name, one in brokers.items() if one.address}
        self._lists.require_agreement(subscriptions, addresses)
        status = MemberStatus(
            self.member_id,
            self._names.stored_group,
            subscriptions,
            self._now_ms(),
            ";".join(address.name_servers),
            self.terms.is_orderly,
            self.terms.fallback,
        )
        member = Membership(address, status, self._monotonic_s)
        try:
            member.register(brokers, subscriptions)
            errors = [error for error in member.beat(brokers).values() if error is not None]
            lasting = [error for error in errors if not isinstance(error, BackendUnavailableError)]
            if lasting or len(errors) == len(brokers):
                raise (lasting or errors)[0]
            addresses = {name: addresses[name] for name in member.registered(addresses)}
            self._lists.require_agreement(subscriptions, addresses)  # another one may have joined at the same time
            self._lists.find(member, addresses)
        except BaseException:
            member.close()
            raise
        weakref.finalize(self, member.close).atexit = False
        return member

    def _subscriptions(self) -> tuple[Subscription, ...]:
        """Return the subscriptions of the group: all topics, and its retry topic."""
        namespace = self._names.namespace
        found = [Subscription(wrap_name(namespace, self._retries), ALL)]
        for topic in self._topics - {self._retries}:
            expression = self.terms.expression_of(topic)
            found.append(Subscription(wrap_name(namespace, topic), expression.text, expression.kind))
        return tuple(sorted(found, key=lambda one: one.topic))

    # Queues.

    def has_changed(self) -> bool:
        """Say whether a rebalance or a commit may change anything. New messages do not matter here. Asks no broker.

        While no batch runs, a rebalance is due every 5 s if a broker of 5.x may keep resets.
        """
        with self._mutex:
            if self._member is None:
                return False
            self._member.check()
            news, now_ms = self._member.news(), self._monotonic_ms()
            if news.has_notice or news.lost_brokers or news.resets or news.lost_locks:
                return True
            if self._again_ms is not None:
                return now_ms >= self._again_ms
            if self._looked_ms is None or now_ms - self._looked_ms >= _LOOK_MS:
                return True
            if any(queue in self._readable for queue in self._progress.resets.queues):
                return True
            return self._progress.has_unpublished() or self._is_look_due(self._member)

    def _is_look_due(self, member: Membership) -> bool:
        """Return whether brokers that keep resets (5.x) must be asked for them."""
        brokers = (
            {queue.broker for queue in self._owned.keys() & self._readable} if self._progress.is_look_due() else set()
        )
        return any(member.version_of(broker) >= V5_0_0 for broker in brokers)

    def rebalance(
        self,
        queues: Sequence[QueueKey],
        finished: Mapping[QueueKey, int],
        applied_reset: int | None,
        history: OffsetHistory | None = None,
    ) -> GroupAssignment:
        """Take this query's share of the queues, and give up the queues that belong to other members.

        See `GroupSession.rebalance` and the module. A queue whose offset cannot be read is not owned until it can.
        Raises the errors of `join`.
        """
        with self._mutex:
            self._note_topics({queue.topic for queue in queues})
            member = self._enter() if self._topics or self._member is not None else None
            self._progress.resets.note_applied(applied_reset)
            if member is None:
                return GroupAssignment((), (), {}, (), {}, self._progress.resets.number)
            self._readable, self._answering = frozenset(queues), {queue.broker for queue in queues}
            try:
                return self._rebalance(member, queues, finished, applied_reset, history)
            finally:
                self._locks.keep(member, self._owned, self._answering)

    def _rebalance(
        self,
        member: Membership,
        queues: Sequence[QueueKey],
        finished: Mapping[QueueKey, int],
        applied_reset: int | None,
        history: OffsetHistory | None,
    ) -> GroupAssignment:
        """Rebalance as a member. Whatever happens, locks of queues that are not owned afterwards must be released."""
        progress = self._progress
        self._again_ms = None
        progress.note_finished(finished, self._owned)
        routed = self._place.catalog.shared_queues(sorted(self._topics))
        self._note_news(member)
        self._forget(self._unsettled - self._readable)  # no offset has them yet, so they are gained again
        share = self._find_share(member, routed, self._answering)
        unlocked = self._owned.keys() - self._locks.held if self.terms.is_orderly else set()
        moves = compare_shares(self._owned.keys() - unlocked, share, self._readable)
        lost = tuple(sorted({*moves.lost, *unlocked}))
        self._give_up(member, lost, finished)
        gained = self._locks.lock(member, moves.gained) if self.terms.is_orderly else set(moves.gained)
        if len(gained) < len(moves.gained):
            self._try_again()
        held = self._claim(member, gained, history)
        if progress.is_look_due():
            progress.look_for_resets(member, (self._owned.keys() & self._readable) - self._doubts.queues)
        if applied_reset is None:
            progress.resets.note_applied(None)
        if not progress.take_resets(member, self._owned.keys() & self._readable):
            self._try_again()
        if lost or gained:
            self._tell(member)
        self._looked_ms = self._monotonic_ms()
        owned = tuple(queue for queue in queues if queue in self._owned and queue not in self._doubts.queues)
        gained_now, gone = tuple(sorted(self._unsettled)), tuple(one for one in lost if one not in self._owned)
        resets, waiting = progress.report_resets(queues), tuple(one for one in moves.gained if one not in gained)
        others = self._shares.of_others()
        return GroupAssignment(owned, gained_now, held, gone, resets, progress.resets.number, waiting, others)

    def settle(self, *, is_batch: bool = True) -> None:
        """Confirm that the query has planned an offset that contains the gained queues, and whether as a batch."""
        with self._mutex:
            self._unsettled.clear()
            self.batches += is_batch

    def _try_again(self) -> None:
        """Rebalance again soon, even if nothing happens."""
        self._again_ms = self._monotonic_ms() + _RETRY_MS

    def _note_news(self, member: Membership) -> None:
        """Note what has happened to the membership, and register again where a broker has forgotten the member.

        Nobody waits for a broker that does not answer. When it does, the thread registers there, and this is news.
        """
        self._note(member, member.take_news())
        lapsed = member.lapsed(self._answering)
        if lapsed:
            member.beat(lapsed)
            self._note(member, member.take_news())

    def _note(self, member: Membership, news: MemberNews) -> None:
        if news.has_notice:  # others may have joined, read on, and left
            self._is_urgent = True
            self._doubts.note_members(self._owned)
        if news.lost_brokers:
            self._doubts.note_losses(self._owned, self._place.catalog.book.brokers, news.lost_brokers)
        if not (news.lost_locks or news.resets):
            return
        plain = {self._names.stored_queue(queue): queue for queue in self._owned}
        self._locks.note_lost({plain[queue] for queue in news.lost_locks if queue in plain})
        resets = {plain[queue]: at for queue, at in news.resets.items() if queue in plain}
        self._progress.note_pushed_resets(member, resets)

    def _find_share(
        self, member: Membership, routed: Mapping[str, Sequence[QueueKey]], answering: Collection[str]
    ) -> set[QueueKey]:
        """Return the queues that the query is entitled to, as the `answering` brokers list the members now."""
        address_of = self._place.catalog.book.address
        asked = self._brokers.keys() & answering
        assert self._lists is not None
        lists = self._lists.find(member, {name: at for name in sorted(asked) if (at := address_of(name)) is not None})
        self._lists.warn_of_disagreement(self._subscriptions(), lists, address_of)
        share: set[QueueKey] = set()
        self._shares.keep(routed)
        for topic, queues in routed.items():
            members = join_lists(self.member_id, [lists.get(broker) for broker in {queue.broker for queue in queues}])
            if members.client_ids is not None and not members.is_complete:
                self._try_again()
            if self._shares.have_members_changed(topic, members):
                self._doubts.note_members([queue for queue in queues if queue in self._owned])
            share |= self._shares.find(topic, queues, members, self._owned)
        self._warn_of_unowned([queue for queues in routed.values() for queue in queues])
        return share

    def _give_up(self, member: Membership, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int]) -> None:
        """Publish the finished offsets of queues, and release them.

        A queue that was not settled has no offset to publish, and one that others have advanced has a later one.
        """
        if not queues:
            return
        self._progress.publish_last(
            member, {queue: finished[queue] for queue in queues if queue in finished and queue not in self._unsettled}
        )
        self._forget(queues)
        self._locks.keep(member, self._owned, self._answering)

    def _forget(self, queues: Collection[QueueKey]) -> None:
        """Forget queues that the query does not own any more."""
        self._unsettled.difference_update(queues)
        self._doubts.settle(queues)
        self._progress.forget(queues)
        for queue in queues:
            self._owned.pop(queue, None)

    def _claim(
        self, member: Membership, gained: Collection[QueueKey], history: OffsetHistory | None
    ) -> dict[QueueKey, int]:
        """Own the gained queues, and settle doubts about others. Return the group's offsets in all unsettled queues.

        The doubt about a queue whose broker does not answer stays, and the queue is not planned meanwhile.
        """
        self._unsettled |= set(gained)
        told = self._progress.read(sorted((self._unsettled | self._doubts.queues) & self._readable))
        failed = {queue for queue, one in told.items() if isinstance(one, RmqError)}
        for one in told.values():
            if isinstance(one, RmqError) and not isinstance(one, BackendUnavailableError):
                raise one
        if failed:
            self._try_again()
            self._forget(failed & self._unsettled)
        new = {queue for queue in gained if queue not in failed}
        self._owned |= dict.fromkeys(new, self._now_ms())
        certain = told.keys() - failed
        advanced = {
            queue
            for queue in sorted((self._doubts.queues & certain) - self._unsettled)
            if self._progress.judge_doubt(queue, told[queue], was_cut_off=self._doubts.was_cut_off(queue))
        }
        self._unsettled |= advanced
        self._doubts.settle(certain)
        held = {queue: at for queue in sorted(self._unsettled) if isinstance(at := told.get(queue), int)}
        self._progress.note_told(held)
        looked = {queue: at for queue, at in held.items() if queue in new or queue in advanced}
        self._progress.look_in_gained(member, looked, history)
        return held

    def _warn_of_unowned(self, queues: Sequence[QueueKey]) -> None:
        """Log a warning that lists the queues that no member reads, whenever these change. RocketMQ does not."""
        unowned = sorted(find_unowned(self._rule.strategy, queues))
        if unowned and unowned != self._unowned:
            _LOG.warning(
                "rmq: allocateStrategy=%s of the consumer group %s gives these queues to nobody, so no member reads "
                "them: %s. It assigns only queues of brokers named room@name. Set another one in all members, such as "
                "avg",
                *(self.terms.strategy, self.terms.group, listed([str(queue) for queue in unowned])),
            )
        self._unowned = unowned

    # Offsets.

    def begin(self, beginnings: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Commit start offsets in those owned queues in which the group has none. Return the offsets of all queues.

        Queues of other members are left to them. For these, and for queues whose broker is away, the start offset is
        returned.
        """
        with self._mutex:
            return self._progress.begin(self._member, beginnings, self._owned)

    def publish(self, finished: Mapping[QueueKey, int]) -> None:
        """Commit the offsets in `finished` of owned queues: those that moved, at most every 5 s.

        While members join or leave, they are committed at once. If they have done so since the rebalance, this leaves
        out the queues in which the group is not at an offset of this query any more. Failures are logged once and tried
        again later. With commitOffsets=required they are raised.
        """
        with self._mutex:
            member, progress = self._member, self._progress
            if member is None:
                return
            is_urgent, self._is_urgent = self._is_urgent, False
            if member.news().has_notice:
                progress.publish_last(member, {queue: at for queue, at in finished.items() if queue in self._owned})
            elif not progress.publish(member, finished, self._owned, is_urgent=is_urgent):
                return
            self._tell(member)

    def leave(self, finished: Mapping[QueueKey, int]) -> None:
        """Commit the offsets in `finished`, release all queues and leave the group.

        If this is not called, the end of the process does it without the commit.
        """
        with self._mutex:
            member, self._member = self._member, None
            if member is None:
                return
            try:
                self._give_up(member, sorted(self._owned), {q: at for q, at in finished.items() if q in self._owned})
            finally:
                self._forget(list(self._owned))
                self._locks.keep(member, (), self._answering)
                member.leave()

    def close(self) -> None:
        """End the membership without a commit. A second call does nothing."""
        with self._mutex:
            member, self._member = self._member, None
            if member is not None:
                self._forget(list(self._owned))
                self._locks.note_lost(list(self._locks.held))
                member.close()

    def _tell(self, member: Membership) -> None:
        """Update what the member tells brokers of itself."""
        published, now_ms = self._progress.published.last(), self._now_ms()
        queues = {}
        for queue, begun_ms in self._owned.items():
            stored = self._names.stored_queue(queue)
            age_s = member.lock_age_s(stored)
            locked_ms = 0 if age_s is None else now_ms - round(age_s * 1000)
            queues[stored] = QueueStatus(published.get(queue, -1), begun_ms, locked_ms)
        member.tell(queues)
