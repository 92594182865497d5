"""Handover between two triggers: its decisions by simulated clocks, and its effect on claims."""

import contextlib
import errno
import gc
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.backend import GroupTerms
from rmq_spark.store.disk.locks import is_locked
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.group.assignment import Rebalanced, check_epochs, lost_queues
from rmq_spark.store.group.claims import NOBODY, Claim, read_claims
from rmq_spark.store.group.final_commit import commit_final_offsets
from rmq_spark.store.group.group_files import read_finished_batch, write_finished_batch
from rmq_spark.store.group.group_session import GroupSession
from rmq_spark.store.group.handover import LOOK_EVERY_S, Handover, HandoverTimer
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.failing_disk import FailingDisk
from tests.store.group.test_assignment import Group, bury, die

Q = [QueueKey("T", number) for number in range(4)]
TIMEOUT_S = 60.0


class Crew(Group):
    """A group whose members live until the test ends."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.members: list[Member] = []


@pytest.fixture
def group(tmp_path: Path) -> Crew:
    return Crew(tmp_path)


class Member:
    """A member, its handover, and the number of the batch whose end was recorded last."""

    def __init__(self, group: Crew, disk: Disk | None = None) -> None:
        group.members.append(self)
        self.group, self.assignment, self.recorded = group, group.member(disk=disk), 0
        self.handover = Handover(self.assignment, TIMEOUT_S, lambda: self.recorded, lambda: group.seconds)

    def trigger(self, *, is_batch: bool) -> Rebalanced:
        self.handover.begin()
        moved = self.assignment.rebalance(Q, {})
        self.handover.plan(is_batch=is_batch)
        return moved

    def owned(self) -> list[QueueKey]:
        me = self.assignment._membership.id
        return [queue for queue, claim in read_claims(self.group.paths.claims).queues.items() if claim.owner == me]


def test_timer_counts_from_when_others_became_entitled() -> None:
    timer = HandoverTimer(60.0)
    timer.note([Q[1]], 100.0)
    timer.note([Q[1], Q[0]], 130.0)
    assert timer.overdue(159.9) == []
    assert timer.overdue(160.0) == [Q[1]]
    assert timer.overdue(190.0) == [Q[0], Q[1]]


def test_timer_begins_again_for_a_queue_that_was_its_own_meanwhile() -> None:
    timer = HandoverTimer(60.0)
    timer.note([Q[0]], 0.0)
    timer.note([], 30.0)
    timer.note([Q[0]], 31.0)
    assert timer.overdue(90.0) == []
    assert timer.overdue(91.0) == [Q[0]]


def test_refresh_releases_queues_at_once_while_nothing_is_in_flight(group: Crew) -> None:
    one = Member(group)
    one.trigger(is_batch=False)
    assert one.handover.refresh() == ((), ())
    two = Member(group)
    assert two.trigger(is_batch=False).waiting == (Q[1], Q[3])
    assert one.handover.refresh() == ((Q[1], Q[3]), ())
    claims = read_claims(group.paths.claims).queues
    assert [claims[queue] for queue in (Q[1], Q[3])] == [Claim(NOBODY, 1)] * 2, "the epochs stay"
    assert two.trigger(is_batch=False).gained == (Q[1], Q[3])
    assert one.handover.refresh() == ((), ())
    assert one.trigger(is_batch=False) == Rebalanced((Q[0], Q[2]), lost=(Q[1], Q[3]), taken=(Q[1], Q[3]))
    assert group.commits == [], "offsets are published by triggers and by the driver's listener"


def test_refresh_distinguishes_recorded_batches_from_the_one_in_flight(group: Crew) -> None:
    one = Member(group)
    for number in (1, 2):
        one.trigger(is_batch=True)
        one.recorded = number - 1
    Member(group)
    assert one.handover.refresh() == ((), ())
    one.recorded = 2
    assert one.handover.refresh() == ((Q[1], Q[3]), ())


def test_refresh_fences_queues_only_after_the_timeout(group: Crew) -> None:
    one = Member(group)
    one.trigger(is_batch=True)
    held, me = one.assignment.epochs, one.assignment._membership.id
    group.seconds += 1_000  # the batch is an old one when the other member comes
    Member(group)
    assert one.handover.refresh() == ((), ())
    group.seconds += TIMEOUT_S - 0.1
    assert one.handover.refresh() == ((), ())
    check_epochs(group.paths.root, "g", me, held)
    group.seconds += 0.1
    assert one.handover.refresh() == ((), (Q[1], Q[3]))
    assert lost_queues(group.paths.root, "g", me, held) == (Q[1], Q[3])
    claims = read_claims(group.paths.claims).queues
    assert [claims[queue] for queue in (Q[1], Q[3])] == [Claim(NOBODY, 2)] * 2, "the epochs count up"
    assert one.trigger(is_batch=True).taken == (Q[1], Q[3])


def test_refresh_waits_for_the_timeout_after_a_failed_plan(group: Crew) -> None:
    one = Member(group)
    one.trigger(is_batch=False)
    one.handover.begin()  # and no plan
    Member(group)
    assert one.handover.refresh() == ((), ())
    group.seconds += TIMEOUT_S
    assert one.handover.refresh() == ((), (Q[1], Q[3]))


def test_refresh_keeps_all_queues_after_the_death_of_the_other_member(group: Crew) -> None:
    one = Member(group)
    one.trigger(is_batch=True)
    two = Member(group)
    one.handover.refresh()
    die(two.assignment)
    group.seconds += TIMEOUT_S
    assert one.handover.refresh() == ((), ())
    assert one.owned() == Q


def test_refresh_of_a_member_presumed_dead_releases_nothing(group: Crew) -> None:
    one = Member(group)
    one.trigger(is_batch=False)
    Member(group)
    bury(one.assignment)
    assert one.handover.refresh() == ((), ())


def test_refresh_releases_queues_after_the_death_of_a_third_member(group: Crew) -> None:
    one, two, three = (Member(group) for _ in range(3))
    for member in (one, two, three):
        member.trigger(is_batch=False)
    assert (one.owned(), two.owned(), three.owned()) == ([Q[0], Q[3]], [Q[1]], [Q[2]])
    die(one.assignment)
    group.seconds += 1
    two.trigger(is_batch=False)
    assert three.handover.refresh() == ((Q[2],), ()), "two has 0 and 2 now, and three has 1 and 3"


def test_give_up_that_fails_changes_nothing_and_is_tried_again(group: Crew) -> None:
    disk = FailingDisk(10**9, errno.ENOSPC)
    one = Member(group, disk)
    one.trigger(is_batch=False)
    Member(group)
    disk._failing._numbers = range(disk.effect_count, disk.effect_count + 1)
    with pytest.raises(StoreError):
        one.handover.refresh()
    assert one.owned() == Q
    assert one.handover.refresh() == ((Q[1], Q[3]), ())


def test_surplus_reads_no_claims_and_asks_no_strategy_while_nothing_changes(
    group: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Member(group)
    one.trigger(is_batch=True)
    Member(group)
    assert one.assignment.surplus() == (Q[1], Q[3])
    monkeypatch.setattr("rmq_spark.store.group.assignment.read_claims", _fail)
    one.assignment._share = _fail
    for _ in range(3):
        assert one.assignment.surplus() == (Q[1], Q[3])


def _fail(*_: object) -> None:
    raise AssertionError("called")


def test_surplus_names_damaged_claims(group: Crew) -> None:
    one = Member(group)
    one.trigger(is_batch=True)
    Member(group)
    Path(group.paths.claims).write_text("{")
    with pytest.raises(DamageError, match=r"claims\.json"):
        one.assignment.surplus()


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with ten messages in each of the four queues of the topic T."""
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 16) as messages:
        messages.create_topic("T", 4)
        for number in range(40):
            messages.send("T", "x", queue_id=number % 4)
    return str(tmp_path / "store")


def query_of(store: str, **terms: int) -> GroupSession:
    query = GroupSession(store, GroupTerms("g", "shared", **terms))  # type: ignore[arg-type]
    query.rebalance(Q, {}, None)
    return query


def wait_until_released(query: GroupSession, count: int) -> None:
    until = time.monotonic() + 60
    path = query.paths.claims
    while len([1 for claim in read_claims(path).queues.values() if claim.owner == query.member_id]) != count:
        assert time.monotonic() < until, read_claims(path)
        time.sleep(0.02)


def test_commit_final_offsets_records_the_end_of_a_members_batch(store: str) -> None:
    one = query_of(store)
    one.settle(is_batch=True)
    other = query_of(store)
    assert commit_final_offsets(store, "g", one.member_id, dict.fromkeys(Q, 7), 0, finished_batch=one.batches)
    assert read_finished_batch(one.paths, one.member_id) == 1
    wait_until_released(one, 2)
    assert rmq_spark.group_offsets(store, "g") == {"T": dict.fromkeys(range(4), 7)}
    one.leave({})
    assert read_finished_batch(one.paths, one.member_id) == 0, "the record goes with the member"
    assert not commit_final_offsets(store, "g", one.member_id, dict.fromkeys(Q, 9), 0, finished_batch=2), "too late"
    assert read_finished_batch(one.paths, one.member_id) == 0
    other.leave({})


def test_finished_batch_of_a_dead_member_is_removed(store: str) -> None:
    one, other = query_of(store), query_of(store)
    other.leave({})
    write_finished_batch(one.paths, Disk(), other.member_id, 3)
    assert one._membership.sharing() == [one.member_id]
    assert read_finished_batch(one.paths, other.member_id) == 0
    one.leave({})


def test_read_finished_batch_returns_0_for_a_corrupt_file(store: str) -> None:
    one = query_of(store)
    for text in ("", "{", '{"v": 1}', '{"v": 1, "batch": "2"}', '{"v": 2, "batch": 2}'):
        Path(one.paths.finished_batch(one.member_id)).write_text(text)
        assert read_finished_batch(one.paths, one.member_id) == 0
    one.leave({})


def test_hand_over_does_nothing_while_the_reader_plans(store: str) -> None:
    one = query_of(store)
    one.settle(is_batch=False)
    with one.planning():
        other = query_of(store)
        looks = []
        thread = threading.Thread(target=lambda: looks.append(one.hand_over()))
        thread.start()
        thread.join(60)
        assert looks == [None]
        assert len(other.epochs) == 0
        assert all(claim.owner == one.member_id for claim in read_claims(one.paths.claims).queues.values())
    wait_until_released(one, 2)
    one.leave({})
    other.leave({})


def test_hand_over_logs_an_error_once_and_continues(store: str, caplog: pytest.LogCaptureFixture) -> None:
    one = query_of(store)
    one.settle(is_batch=False)
    share = one._assignment._share
    one._assignment._share = lambda *_: 1 / 0  # type: ignore[assignment,return-value]
    other = query_of(store)
    for _ in range(2):
        one.hand_over()
    assert caplog.text.count("queues cannot be handed over: division by zero") == 1
    one._assignment._share = share
    wait_until_released(one, 2)
    one.leave({})
    other.leave({})


def test_hand_over_after_the_timeout_is_a_warning(store: str, caplog: pytest.LogCaptureFixture) -> None:
    one = query_of(store, handover_timeout_ms=1)
    one.settle(is_batch=True)
    other = query_of(store)
    with caplog.at_level(logging.WARNING):
        wait_until_released(one, 2)
        until = time.monotonic() + 60
        while "handoverTimeout" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.02)
    assert "handoverTimeout (0.001 s)" in caplog.text
    one.leave({})
    other.leave({})


def test_handover_thread_ends_with_its_query(store: str) -> None:
    def count() -> int:
        return sum(thread.name == "rmq-spark handover" for thread in threading.enumerate())

    before = count()
    one, other = query_of(store), query_of(store)
    alone = GroupSession(store, GroupTerms("alone"))
    alone.rebalance(Q, {}, None)
    assert count() == before + 2, "a query that reads all queues needs none"
    one.leave({})
    lock = other.paths.member_lock(other.member_id)
    del other
    until = time.monotonic() + 60
    while count() > before or is_locked(lock):
        gc.collect()
        assert time.monotonic() < until
        time.sleep(LOOK_EVERY_S / 5)
    alone.leave({})


def test_handover_thread_does_not_block_a_forked_child(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_inside, go_on = threading.Event(), threading.Event()
    look = Handover.refresh

    def stay(self: Handover) -> object:
        is_inside.set()
        go_on.wait(60)
        return look(self)

    one = query_of(store)
    monkeypatch.setattr(Handover, "refresh", stay)
    assert is_inside.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a hang
        with contextlib.suppress(BaseException):
            one.has_changed()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    one.leave({})
