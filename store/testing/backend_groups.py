"""Tests of the group half of the contract (`store.backend`): members, offsets, fences, resets and start offsets."""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

import pytest

from rmq_spark.store.backend import (
    Backend,
    Capability,
    Fence,
    FinalCommit,
    GroupAssignment,
    GroupSession,
    GroupTerms,
    Location,
)
from rmq_spark.store.errors import GroupConflictError, NoPermissionError, RmqError
from rmq_spark.store.filter.row_filter import ALL, TAG, Expression
from rmq_spark.store.model import QueueKey, SuspendedQueues
from rmq_spark.store.testing.backend_fixtures import (
    FIRST_MS,
    Append,
    BackendFixtures,
    Expire,
    Message,
    Reset,
    bounds_of,
    require,
)

GROUP = "billing"
COUNT = 12
MESSAGES = [Message(b"." * 200, store_time_ms=FIRST_MS + number * 1000) for number in range(COUNT)]


class Member:
    """A member of the group, with a backend of its own, which remembers the last reset that it has applied."""

    def __init__(self, backend: Backend, terms: GroupTerms) -> None:
        self.backend, self.session, self.applied_reset = backend, self._session_of(backend, terms), 0

    @staticmethod
    def _session_of(backend: Backend, terms: GroupTerms) -> GroupSession:
        session = backend.group(terms)
        session.join()
        return session

    @property
    def id(self) -> str:
        """The id of the member."""
        return self.session.member_id

    def rebalance(
        self, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int] | None = None, *, is_batch: bool = False
    ) -> GroupAssignment:
        """Rebalance, apply the resets and settle. `is_batch` says whether a batch was planned."""
        with self.session.planning():
            found = self.rebalance_only(queues, finished)
            self.applied_reset = found.reset_number
            self.session.settle(is_batch=is_batch)
        return found

    def rebalance_only(
        self, queues: Sequence[QueueKey], finished: Mapping[QueueKey, int] | None = None
    ) -> GroupAssignment:
        """Rebalance as a query that fails before it has planned."""
        self.backend.refresh()
        self.backend.bounds(queues)
        return self.session.rebalance(queues, finished or {}, self.applied_reset)

    def settle(self, queues: Sequence[QueueKey]) -> None:
        """Rebalance and publish until nothing changes any more. Brokers tell members of themselves, too."""
        self.rebalance(queues)
        self.session.publish({})
        while self.session.has_changed():
            self.rebalance(queues)
            self.session.publish({})

    def final(self, offsets: Mapping[QueueKey, int], begin: int = 0, finished_batch: int | None = None) -> FinalCommit:
        """Return what the driver commits after a batch from the offset `begin` in all queues of `offsets`."""
        expected = {queue: (self.session.published.get(queue, begin), begin) for queue in offsets}
        final = FinalCommit(GROUP, self.id, offsets, self.applied_reset, finished_batch=finished_batch)
        return replace(final, expected=expected)

    def fence(self, queue: QueueKey) -> Fence:
        """Return the fence of the member's tasks that read the queue."""
        return Fence(GROUP, self.id, self.session.epochs[queue])


Join = Callable[..., Member]


def _share_out(members: Sequence[Member], queues: Sequence[QueueKey]) -> dict[str, set[QueueKey]]:
    """Let the members rebalance in turn until nobody waits. Return the queues of each member."""
    owned: dict[str, set[QueueKey]] = {}
    for _ in range(len(members) + 1):
        for member in members:
            owned[member.id] = set(member.rebalance(queues).owned)
    return owned


def eventually(condition: Callable[[], bool], within_s: float = 10) -> bool:
    """Wait until a condition holds, because news from servers take a moment. Return False after that time."""
    for _ in range(round(within_s * 100)):
        if condition():
            return True
        time.sleep(0.01)
    return False


class BackendGroupTests(BackendFixtures):
    """The tests of the group half. See `BackendFixtures` for the fixtures that a subclass gives."""

    @pytest.fixture(autouse=True)
    def _requires_groups(self, location: Location, request: pytest.FixtureRequest) -> None:
        if request.function.__module__ == __name__:  # not the tests of other halves in the same class
            require(location, Capability.GROUPS)

    @pytest.fixture
    def queues(self, backend: Backend, append: Append) -> list[QueueKey]:
        """The queues of the topic orders, with 12 messages each. `backend` knows them."""
        for queue_id in range(self.QUEUES):
            append("orders", queue_id, MESSAGES)
        backend.refresh()
        found = backend.queues(["orders"])["orders"]
        backend.bounds(found)
        return found

    @pytest.fixture
    def join(self, location: Location) -> Iterator[Join]:
        """A function of options of GroupTerms. It returns a new member, which leaves after the test."""
        with ExitStack() as stack:

            def join(**options: Any) -> Member:
                subscription = options.get("subscription", "orders")
                expressions = ((subscription, Expression(TAG, ALL)),)
                defaults = {"assignment": "shared", "subscription": subscription, "expressions": expressions}
                terms = GroupTerms(GROUP, **{**defaults, **options})
                member = Member(stack.enter_context(closing(location.open())), terms)
                stack.callback(_leave, member)
                return member

            yield join

    def committed(self, backend: Backend, queues: Sequence[QueueKey]) -> dict[QueueKey, int]:
        """Return the group's committed offsets. 0 is left out if the place does not tell it from none."""
        found = backend.committed_offsets(GROUP, queues)
        return {queue: at for queue, at in found.items() if at or self.TELLS_ZERO_FROM_NONE}

    # Members.

    def test_join_twice_is_one_membership(self, queues: list[QueueKey], join: Join) -> None:
        member = join()
        before = member.id
        member.session.join()
        assert member.id == before != join().id
        assert not member.session.is_outside
        assert member.session.terms.group == GROUP

    def test_rebalance_alone_owns_all_queues(self, queues: list[QueueKey], join: Join) -> None:
        found = join().rebalance(queues)
        assert (list(found.owned), list(found.gained), list(found.lost)) == (queues, queues, [])

    def test_rebalance_gains_queues_until_settle(self, queues: list[QueueKey], join: Join) -> None:
        member = join()
        assert [list(member.rebalance_only(queues).gained) for _ in range(2)] == [queues, queues]
        assert list(member.rebalance(queues).gained) == queues
        assert list(member.rebalance(queues).gained) == []

    @pytest.mark.parametrize("count", [2, 3, 5])
    def test_rebalance_shares_each_queue_to_one_member(self, queues: list[QueueKey], join: Join, count: int) -> None:
        owned = _share_out([join() for _ in range(count)], queues)
        assert len(owned) == count
        assert sorted(queue for of_member in owned.values() for queue in of_member) == queues
        sizes = sorted(map(len, owned.values()))
        assert sizes[-1] - sizes[0] <= 1

    def test_leave_frees_the_queues(self, queues: list[QueueKey], join: Join) -> None:
        one, two = join(), join()
        _share_out([one, two], queues)
        one.session.leave({})
        assert list(two.rebalance(queues).owned) == queues

    def test_leave_commits_the_finished_offsets(self, queues: list[QueueKey], join: Join, backend: Backend) -> None:
        member = join()
        member.rebalance(queues)
        member.session.leave({queues[0]: 3, queues[1]: 4})
        assert self.committed(backend, queues) == {queues[0]: 3, queues[1]: 4}

    def test_join_of_a_second_query_that_reads_all_queues_is_a_conflict(
        self, location: Location, queues: list[QueueKey], join: Join
    ) -> None:
        require(location, Capability.LEASES)
        member = join(assignment="all")
        with pytest.raises(GroupConflictError):
            join(assignment="all")
        assert list(member.rebalance(queues).owned) == queues

    @pytest.mark.parametrize("options", [{"subscription": "payments"}, {"strategy": "circle"}, {"assignment": "all"}])
    def test_join_with_other_terms_is_a_conflict(
        self, location: Location, queues: list[QueueKey], join: Join, append: Append, options: dict[str, str]
    ) -> None:
        append("payments", 0, MESSAGES[:1])
        if "subscription" not in options:  # members without leases tell others only what they subscribe to
            require(location, Capability.LEASES)
        join()
        with pytest.raises(GroupConflictError):
            join(**options)

    def test_has_changed_after_another_member_has_joined(self, queues: list[QueueKey], join: Join) -> None:
        member = join()
        member.settle(queues)
        assert not member.session.has_changed()
        join()
        assert eventually(member.session.has_changed)

    def test_batches_counts_planned_batches(self, queues: list[QueueKey], join: Join) -> None:
        member = join()
        for is_batch in (True, False, True):
            member.rebalance(queues, is_batch=is_batch)
        assert member.session.batches == 2

    # Handover and offsets.

    def test_handover_commits_before_the_next_owner_reads_the_offsets(
        self, location: Location, queues: list[QueueKey], join: Join
    ) -> None:
        one = join()
        one.rebalance(queues, is_batch=True)  # the batch runs, so no queue is handed over before the next rebalance
        two = join()
        if Capability.LEASES in location.capabilities:
            assert two.rebalance(queues).owned == ()
        finished = dict.fromkeys(queues, 7)
        lost = one.rebalance(queues, finished, is_batch=True).lost
        found = two.rebalance(queues)
        assert set(found.gained) == set(lost) != set()
        assert {queue: found.held[queue] for queue in found.gained} == dict.fromkeys(lost, 7)

    def test_publish_commits_the_offsets_of_owned_queues(
        self, queues: list[QueueKey], join: Join, backend: Backend
    ) -> None:
        one, two = join(), join()
        owned = _share_out([one, two], queues)
        one.session.publish(dict.fromkeys(queues, 5))
        assert self.committed(backend, queues) == dict.fromkeys(owned[one.id], 5)
        two.session.publish(dict.fromkeys(queues, 6))
        expected = dict.fromkeys(owned[one.id], 5) | dict.fromkeys(owned[two.id], 6)
        assert self.committed(backend, queues) == expected

    def test_committed_offsets_of_a_group_without_any(self, queues: list[QueueKey], backend: Backend) -> None:
        assert self.committed(backend, queues) == {}

    def test_begin_commits_only_where_the_topic_has_no_offset(
        self, queues: list[QueueKey], join: Join, backend: Backend
    ) -> None:
        member = join()
        member.rebalance(queues)
        first = dict.fromkeys(queues, 2 if self.TELLS_ZERO_FROM_NONE else 0)
        assert member.session.begin(first) == first
        assert member.session.begin(dict.fromkeys(queues, 9)) == first
        assert backend.committed_offsets(GROUP, queues) == first

    # Epochs and fences.

    def test_epochs_increase_when_a_queue_changes_its_owner(
        self, location: Location, queues: list[QueueKey], join: Join
    ) -> None:
        require(location, Capability.LEASES)
        one = join()
        one.rebalance(queues)
        first = dict(one.session.epochs)
        two = join()
        moved = _share_out([one, two], queues)[two.id]
        second = dict(two.session.epochs)
        assert set(second) == moved
        two.session.leave({})
        one.rebalance(queues)
        assert all(first[queue] < second[queue] < one.session.epochs[queue] for queue in moved)
        assert all(first[queue] == one.session.epochs[queue] for queue in set(queues) - moved)

    def test_check_fence_of_the_owner_passes(self, queues: list[QueueKey], join: Join, backend: Backend) -> None:
        require(backend.location, Capability.FENCES)
        member = join(is_orderly=True)
        member.rebalance(queues)
        for queue in queues:
            backend.check_fence(pickle.loads(pickle.dumps(member.fence(queue))), queue)

    def test_check_fence_of_a_former_owner_is_a_conflict(
        self, queues: list[QueueKey], join: Join, backend: Backend
    ) -> None:
        require(backend.location, Capability.FENCES)
        one = join(is_orderly=True)
        one.rebalance(queues)
        fences = {queue: one.fence(queue) for queue in queues}
        two = join(is_orderly=True)
        moved = _share_out([one, two], queues)[two.id]
        for queue, fence in fences.items():
            if queue not in moved:
                backend.check_fence(fence, queue)
                continue
            with pytest.raises(GroupConflictError):
                backend.check_fence(fence, queue)
            backend.check_fence(two.fence(queue), queue)

    @pytest.mark.parametrize(
        "change", [lambda fence: fence._replace(epoch=fence.epoch + 1), lambda fence: fence._replace(member_id="other")]
    )
    def test_check_fence_of_another_epoch_or_member_is_a_conflict(
        self, queues: list[QueueKey], join: Join, backend: Backend, change: Callable[[Fence], Fence]
    ) -> None:
        require(backend.location, Capability.FENCES)
        member = join(is_orderly=True)
        member.rebalance(queues)
        if change(member.fence(queues[0])).epoch != member.fence(queues[0]).epoch:
            require(backend.location, Capability.LEASES)  # other places do not number owners
        with pytest.raises(GroupConflictError):
            backend.check_fence(change(member.fence(queues[0])), queues[0])

    # The commit after the last batch.

    def test_commit_final_commits_offsets_of_the_owner(
        self, queues: list[QueueKey], join: Join, backend: Backend
    ) -> None:
        member = join()
        member.rebalance(queues, is_batch=True)
        final = member.final(dict.fromkeys(queues, 5), finished_batch=1)
        assert backend.commit_final(pickle.loads(pickle.dumps(final)))
        assert self.committed(backend, queues) == dict.fromkeys(queues, 5)

    def test_commit_final_never_moves_offsets_back(self, queues: list[QueueKey], join: Join, backend: Backend) -> None:
        member = join()
        member.rebalance(queues)
        member.session.publish(dict.fromkeys(queues, 6))
        assert not backend.commit_final(member.final(dict.fromkeys(queues, 4)))
        assert self.committed(backend, queues) == dict.fromkeys(queues, 6)

    def test_commit_final_of_a_former_owner_commits_nothing(
        self, queues: list[QueueKey], join: Join, backend: Backend
    ) -> None:
        one = join()
        one.rebalance(queues)
        one.session.leave({})
        two = join()
        two.rebalance(queues)
        two.session.publish(dict.fromkeys(queues, 2))
        assert not backend.commit_final(one.final(dict.fromkeys(queues, 5)))
        assert self.committed(backend, queues) == dict.fromkeys(queues, 2)

    def test_commit_final_of_an_earlier_batch_commits_nothing(
        self, queues: list[QueueKey], join: Join, backend: Backend
    ) -> None:
        member = join()
        for _ in range(2):
            member.rebalance(queues, is_batch=True)
        first = member.final(dict.fromkeys(queues, 5), finished_batch=1)
        # Without leases nobody can know of the second batch. The end of the first one does no harm then.
        assert backend.commit_final(first) == (Capability.LEASES not in backend.location.capabilities)
        assert backend.commit_final(member.final(dict.fromkeys(queues, 6), 5, finished_batch=2))
        assert self.committed(backend, queues) == dict.fromkeys(queues, 6)

    def test_commit_final_leaves_out_queues_that_were_reset(
        self, queues: list[QueueKey], join: Join, backend: Backend, reset: Reset
    ) -> None:
        member = join()
        member.rebalance(queues)
        reset(GROUP, {queues[0]: 1})
        assert backend.commit_final(member.final(dict.fromkeys(queues, 8)))
        assert self.committed(backend, queues) == dict.fromkeys(queues, 8) | {queues[0]: 1}

    # Resets.

    def test_reset_is_applied_once(self, queues: list[QueueKey], join: Join, reset: Reset) -> None:
        member = join()
        before = member.rebalance(queues)
        assert before.resets == {}
        reset(GROUP, {queues[0]: 3})
        assert eventually(member.session.has_changed)
        found = member.rebalance(queues, {queues[0]: 9})
        assert found.resets == {queues[0]: 3}
        assert found.reset_number > before.reset_number
        assert member.rebalance(queues, {queues[0]: 3}).resets == {}

    def test_resets_are_ordered(self, queues: list[QueueKey], join: Join, reset: Reset, backend: Backend) -> None:
        member = join()
        member.rebalance(queues)
        reset(GROUP, {queues[0]: 3, queues[1]: 3})
        first = member.rebalance_only(queues)
        reset(GROUP, {queues[0]: 8})
        reset(GROUP, {queues[0]: 5})
        both = member.rebalance_only(queues)
        assert both.resets == {queues[0]: 5, queues[1]: 3}, "the last one of each queue"
        member.applied_reset = first.reset_number
        assert member.rebalance(queues).resets == {queues[0]: 5}
        assert self.committed(backend, queues) == {queues[0]: 5, queues[1]: 3}

    def test_reset_is_not_undone_by_finished_offsets(
        self, queues: list[QueueKey], join: Join, reset: Reset, backend: Backend
    ) -> None:
        one = join()
        one.rebalance(queues, is_batch=True)
        reset(GROUP, dict.fromkeys(queues, 2))
        two = join()
        one.rebalance(queues, dict.fromkeys(queues, 9), is_batch=True)
        assert backend.committed_offsets(GROUP, queues) == dict.fromkeys(queues, 2)
        found = two.rebalance(queues)
        assert found.gained
        assert {found.held[queue] for queue in found.gained} == {2}

    def test_rebalance_without_a_reset_number_ignores_present_resets(
        self, queues: list[QueueKey], join: Join, reset: Reset
    ) -> None:
        reset(GROUP, {queues[0]: 3})
        member = join()
        found = member.session.rebalance(queues, {}, None)
        assert found.resets == {}
        assert {queue: at for queue, at in found.held.items() if at or self.TELLS_ZERO_FROM_NONE} == {queues[0]: 3}
        assert member.session.rebalance(queues, {}, found.reset_number).resets == {}

    def test_suspended_is_empty_in_a_new_group(self, queues: list[QueueKey], join: Join) -> None:
        assert join().session.suspended() == SuspendedQueues()

    # Start offsets and permissions.

    @pytest.mark.parametrize("fallback", ["latest", "earliest", "timestamp"])
    def test_start_offsets_of_a_young_queue_are_its_begin(
        self, queues: list[QueueKey], backend: Backend, fallback: str
    ) -> None:
        found = backend.start_offsets(GROUP, bounds_of(backend, queues), {}, fallback, {})
        assert found == dict.fromkeys(queues, 0)

    def test_start_offsets_are_committed_ones_or_the_begin_of_a_new_queue(
        self, queues: list[QueueKey], backend: Backend
    ) -> None:
        committed = {queues[0]: 7, queues[1]: 99}
        found = backend.start_offsets(GROUP, bounds_of(backend, queues), committed, "latest", {})
        assert found == dict.fromkeys(queues, 0) | committed

    @pytest.mark.parametrize(
        ("fallback", "time_ms", "expected"),
        [
            ("earliest", None, None),
            ("latest", None, COUNT),
            ("timestamp", FIRST_MS * 2, COUNT),
            ("timestamp", 0, None),
            ("timestamp", None, COUNT),
        ],
    )
    def test_start_offsets_of_a_queue_whose_first_messages_expired(
        self,
        queues: list[QueueKey],
        backend: Backend,
        expire: Expire,
        fallback: str,
        time_ms: int | None,
        expected: int | None,
    ) -> None:
        begin = expire(queues[0], COUNT // 2)
        backend.reopen()
        backend.refresh()
        times_ms = {} if time_ms is None else {queues[0]: time_ms}
        found = backend.start_offsets(GROUP, bounds_of(backend, queues[:1]), {}, fallback, times_ms)
        assert found == {queues[0]: begin if expected is None else expected}

    def test_barriers_of_a_closed_topic(
        self, queues: list[QueueKey], backend: Backend, close_topic: Callable[[str], None]
    ) -> None:
        close_topic("orders")
        backend.reopen()
        backend.refresh()
        found = backend.barriers(queues, GROUP, is_broadcasting=False)
        assert set(found) == set(queues)
        assert all(barrier.is_topic and barrier.reason for barrier in found.values())
        assert all(isinstance(barrier.error, NoPermissionError) for barrier in found.values())
        without = backend.barriers(list(queues), None, is_broadcasting=False)
        assert {barrier.error for barrier in without.values()} == {None}


def _leave(member: Member) -> None:
    with suppress(RmqError):
        member.session.leave({})
