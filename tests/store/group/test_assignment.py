"""The assignment of queues to members: only the owner commits, and no queue is lost."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, GroupConflictError, StoreError
from rmq_spark.store.group.assignment import Assignment, Rebalanced, check_epochs, lost_queues
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.failing_disk import FailingDisk

Q = [QueueKey("T", number) for number in range(12)]


def round_robin(_: str, queues: Sequence[QueueKey], ids: Sequence[str]) -> Mapping[str, Sequence[QueueKey]]:
    return {member_id: queues[place :: len(ids)] for place, member_id in enumerate(ids)}


class CountingCalls(SystemCalls):
    """Real system calls, counted as far as they change something."""

    count = 0

    def create(self, path: str, size_bytes: int, **owner: Any) -> None:
        self.count += 1
        super().create(path, size_bytes, **owner)


class Group:
    """A group whose members are objects of this process, and its published offsets."""

    def __init__(self, root: Path) -> None:
        self.paths = GroupPaths(str(root), "g")
        self.seconds, self.names = 0.0, count()
        self.offsets: dict[QueueKey, int] = {}
        self.commits: list[dict[QueueKey, int]] = []
        self.is_writable = True

    def member(self, assignment: str = "shared", disk: Disk | None = None) -> Assignment:
        """Return a new member; later ones sort behind earlier ones."""
        clocks = Clocks(lambda: 0, lambda: self.seconds, self._sleep)
        terms = MemberTerms("app", "q", assignment, "avg", "T")
        membership = Membership(self.paths, disk or Disk(), terms, clocks, f"{next(self.names):04d}", is_shared=False)
        membership.join()
        return Assignment(membership, round_robin, self.commit)

    def _sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def commit(self, offsets: Mapping[QueueKey, int]) -> bool:
        if not self.is_writable:
            return False
        self.commits.append(dict(offsets))
        self.offsets.update(offsets)
        return True


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


def die(member: Assignment) -> None:
    """End as a process does that is killed."""
    member._membership.lease._end_thread()
    member._membership.lease._lock.release()


def bury(member: Assignment) -> None:
    """Do to a living member what others do that take it for dead."""
    os.remove(member._membership.paths.member(member._membership.id))
    os.remove(member._membership.paths.member_lock(member._membership.id))


def test_rebalance_of_a_single_query_claims_all_queues(group: Group) -> None:
    one = group.member()
    assert one.rebalance(Q[:3], {}) == Rebalanced((*Q[:3],), gained=(*Q[:3],))
    assert one.rebalance(Q[:3], {}) == Rebalanced((*Q[:3],))
    assert one.epochs == dict.fromkeys(Q[:3], 1)


def test_rebalance_hands_queues_over_with_their_offsets(group: Group) -> None:
    one, two = group.member(), None
    one.rebalance(Q[:4], {})
    two = group.member()
    assert two.rebalance(Q[:4], {}) == Rebalanced((), waiting=(Q[1], Q[3]))
    assert group.commits == []
    moved = one.rebalance(Q[:4], {queue: 10 + queue.queue_id for queue in Q[:4]})
    assert moved == Rebalanced((Q[0], Q[2]), lost=(Q[1], Q[3]))
    assert group.commits == [{Q[1]: 11, Q[3]: 13}]
    assert two.rebalance(Q[:4], {}) == Rebalanced((Q[1], Q[3]), gained=(Q[1], Q[3]))
    assert two.epochs == {Q[1]: 2, Q[3]: 2}


def test_rebalance_commits_offsets_before_it_releases_claims(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    two = group.member()
    owners = []
    one._commit = lambda _: owners.append(read_claims(group.paths.claims).queues[Q[1]].owner) or True
    one.rebalance(Q[:2], {Q[0]: 1, Q[1]: 1})
    assert owners == [one._membership.id]
    assert two.rebalance(Q[:2], {}).owned == (Q[1],)


def test_rebalance_commits_overwritten_offsets_again(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    one.publish({Q[0]: 5, Q[1]: 7})
    one.publish({Q[0]: 5, Q[1]: 7})
    assert group.commits == [{Q[0]: 5, Q[1]: 7}]
    assert one.is_published()
    file = Path(group.paths.root, "config", "consumerOffset.json")
    file.parent.mkdir()
    file.write_text("{}")
    assert not one.is_published()
    two = group.member()
    assert one.rebalance(Q[:2], {Q[0]: 5, Q[1]: 7}).lost == (Q[1],)
    assert two.rebalance(Q[:2], {}).gained == (Q[1],)
    assert group.commits[1:] == [{Q[1]: 7}]


def test_rebalance_releases_nothing_after_a_failed_commit(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    two = group.member()

    def fail(offsets: Mapping[QueueKey, int]) -> bool:
        raise StoreError("full")

    one._commit = fail
    with pytest.raises(StoreError, match="full"):
        one.rebalance(Q[:2], {Q[1]: 5})
    assert two.rebalance(Q[:2], {}).waiting == (Q[1],)
    one._commit = group.commit
    assert one.rebalance(Q[:2], {Q[1]: 5}).lost == (Q[1],)
    assert group.offsets == {Q[1]: 5}


def test_rebalance_claims_queues_of_a_killed_member_after_the_probe_interval(group: Group) -> None:
    one, two = group.member(), group.member()
    one.rebalance(Q[:4], {})
    two.rebalance(Q[:4], {})
    assert two.rebalance(Q[:4], {}).owned == (Q[1], Q[3])
    die(one)
    assert two.rebalance(Q[:4], {}).gained == ()
    group.seconds += 0.2
    assert not two.is_settled()
    assert not two.is_settled(), "asked again within the pause"
    assert two.rebalance(Q[:4], {}).gained == (Q[0], Q[2])


def test_rebalance_follows_the_number_of_queues(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:8], {})
    assert one.rebalance(Q, {}).gained == (*Q[8:],)
    assert one.rebalance(Q[:2], {Q[5]: 7}).lost == (*Q[2:],)
    assert group.offsets == {Q[5]: 7}
    assert one.rebalance(Q[:4], {}).gained == (Q[2], Q[3])
    assert one.epochs == {Q[0]: 1, Q[1]: 1, Q[2]: 2, Q[3]: 2}


def test_publish_does_not_hide_a_change_from_rebalance(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:4], {})
    two = group.member()
    two.rebalance(Q[:4], {})
    one.rebalance(Q[:3], {})  # lets go 1 and 3
    two.publish({Q[0]: 1})
    assert two.rebalance(Q[:4], {}).gained == (Q[1], Q[3])


def test_rebalance_shares_each_topic_separately(group: Group) -> None:
    one, two = group.member(), group.member()
    queues = [QueueKey(topic, 0) for topic in ("B", "A", "C")]
    assert two.rebalance(queues, {}).owned == ()
    assert one.rebalance(queues, {}).owned == tuple(sorted(queues))


def test_publish_omits_queues_claimed_while_presumed_dead(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:4], {})
    two = group.member()
    bury(one)
    assert two.rebalance(Q[:4], {}).gained == (*Q[:4],)
    assert one.publish(dict.fromkeys(Q[:4], 9)) == (*Q[:4],)
    assert group.commits == []
    assert lost_queues(group.paths.root, "g", one._membership.id, one.epochs) == (*Q[:4],)
    assert one.rebalance(Q[:4], dict.fromkeys(Q[:4], 9)) == Rebalanced(
        (), lost=(*Q[:4],), taken=(*Q[:4],), waiting=(Q[0], Q[2])
    )
    assert group.commits == []
    assert two.rebalance(Q[:4], {}).lost == (Q[0], Q[2])
    assert one.rebalance(Q[:4], {}).gained == (Q[0], Q[2])


def test_rebalance_gains_a_queue_again_that_was_lost_in_between(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    two = group.member()
    bury(one)
    two.rebalance(Q[:2], {})
    two.leave({Q[0]: 77})
    assert one.rebalance(Q[:2], {Q[0]: 5}) == Rebalanced((Q[0], Q[1]), gained=(Q[0], Q[1]), taken=(Q[0], Q[1]))
    assert group.offsets == {Q[0]: 77}
    assert one.publish({Q[0]: 78}) == ()


def test_rebalance_after_a_removal_without_lost_queues_changes_nothing(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    bury(one)
    assert one.publish({Q[0]: 3}) == ()
    assert one.rebalance(Q[:2], {}) == Rebalanced((Q[0], Q[1]))
    assert one.epochs == {Q[0]: 1, Q[1]: 1}


def test_rebalance_raises_if_another_query_with_assignment_all_has_joined(group: Group) -> None:
    one = group.member("all")
    assert one.rebalance(Q[:4], {}).owned == (*Q[:4],)
    bury(one)
    two = group.member("all")
    assert two.rebalance(Q[:4], {}).owned == (*Q[:4],)
    assert one.publish({Q[0]: 9}) == (Q[0],)
    with pytest.raises(GroupConflictError, match="assignment=all"):
        one.rebalance(Q[:4], {})


def test_rebalance_creates_a_missing_lock_file_again(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    os.remove(group.paths.member_lock(one._membership.id))
    assert not one.is_settled()
    assert one.rebalance(Q[:2], {}) == Rebalanced((Q[0], Q[1]))
    assert one.is_settled()


def test_rebalance_with_assignment_all_does_not_call_the_strategy(group: Group) -> None:
    one = group.member("all")
    one._share = lambda *_: {}
    assert one.rebalance(Q[:4], {}).owned == (*Q[:4],)


def test_publish_writes_an_offset_again_after_another_owner(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:1], {})
    one.publish({Q[0]: 5})
    two = group.member()
    bury(one)
    two.rebalance(Q[:1], {})
    two.leave({Q[0]: 9})
    assert one.rebalance(Q[:1], {}).taken == (Q[0],)
    one.publish({Q[0]: 5})
    assert group.commits == [{Q[0]: 5}, {Q[0]: 9}, {Q[0]: 5}]


def test_lost_queues_contains_earlier_claims_of_the_same_member(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:1], {})
    before = one.epochs
    one.rebalance([], {})
    one.rebalance(Q[:1], {})
    assert lost_queues(group.paths.root, "g", one._membership.id, before) == (Q[0],)
    assert lost_queues(group.paths.root, "g", one._membership.id, one.epochs) == ()


def test_publish_writes_changed_offsets_only(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    one.publish({Q[0]: 5, Q[1]: 6})
    one.publish({Q[0]: 5, Q[1]: 7})
    one.publish({Q[0]: 5, Q[1]: 7})
    one.publish({Q[0]: 2})
    assert group.commits == [{Q[0]: 5, Q[1]: 6}, {Q[1]: 7}, {Q[0]: 2}]


def test_publish_retries_offsets_that_were_not_written(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:1], {})
    group.is_writable = False
    assert one.publish({Q[0]: 5}) == ()
    group.is_writable = True
    one.publish({Q[0]: 5})
    assert group.commits == [{Q[0]: 5}]


def test_leave_commits_offsets_and_releases_queues(group: Group) -> None:
    one = group.member("all")
    one.rebalance(Q[:2], {})
    one.leave({Q[0]: 5, Q[1]: 6})
    one.leave({Q[0]: 9})
    assert group.offsets == {Q[0]: 5, Q[1]: 6}
    assert {claim.owner for claim in read_claims(group.paths.claims).queues.values()} == {""}
    two = group.member("all")
    assert two.rebalance(Q[:2], {}).gained == (Q[0], Q[1])
    assert two.epochs == {Q[0]: 2, Q[1]: 2}


def test_check_epochs_raises_if_another_member_owns_the_queue(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    me, held = one._membership.id, one.epochs
    check_epochs(group.paths.root, "g", me, held)
    two = group.member()
    one.rebalance(Q[:2], {})
    check_epochs(group.paths.root, "g", me, {Q[0]: held[Q[0]]})
    two.rebalance(Q[:2], {})
    with pytest.raises(GroupConflictError) as caught:
        check_epochs(group.paths.root, "g", me, held)
    words = ["T/1:", me, two._membership.id, "epoch 1", "epoch 2", group.paths.claims]
    assert [word for word in words if word not in str(caught.value)] == []
    with pytest.raises(GroupConflictError, match="owner nobody"):
        check_epochs(group.paths.root, "another group", me, held)


def test_rebalance_without_changes_writes_and_locks_nothing(group: Group) -> None:
    calls = CountingCalls()
    one = group.member(disk=Disk(calls))
    one.rebalance(Q, {})
    before, stamp = calls.count, os.stat(group.paths.claims)
    with one._membership.lock.hold():
        for step in range(50):
            group.seconds = step
            assert one.is_settled()
            assert one.rebalance(Q, {queue: step for queue in Q}).owned == (*Q,)
    assert calls.count == before
    assert os.stat(group.paths.claims) == stamp


@pytest.mark.parametrize("text", ["", "{", '{"v": 1, "change": 3}'])
def test_rebalance_names_damaged_claims_and_works_after_their_removal(group: Group, text: str) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    Path(group.paths.claims).write_text(text)
    with pytest.raises(DamageError, match=r"claims\.json"):
        one.rebalance(Q[:2], {})
    with pytest.raises(DamageError, match="remove the file"):
        one.publish({Q[0]: 1})
    os.remove(group.paths.claims)
    assert one.publish({Q[0]: 1}) == (Q[0],)
    assert set(one.rebalance(Q[:2], {}).owned) == set(Q[:2])
    assert one.publish({Q[0]: 1}) == ()


def live_through_an_error(group: Group, disk: Disk) -> Assignment:
    """Have a second member join and take its share, trying again after errors; return it."""
    old = group.member()
    old.rebalance(Q[:4], {})
    new, known = None, set()
    for _ in range(6):
        try:
            new = new or group.member(disk=disk)
            moved = new.rebalance(Q[:4], dict.fromkeys(known, 1))
        except StoreError:
            continue
        known = (known - set(moved.lost)) | set(moved.gained)
        assert known == set(moved.owned), "what is reported adds up"
        old.rebalance(Q[:4], {})
    assert known == {Q[1], Q[3]}
    assert old.epochs.keys() == {Q[0], Q[2]}
    return new


def test_rebalance_recovers_from_any_failed_write(tmp_path: Path) -> None:
    for fail_at in count():
        group, disk = Group(tmp_path / str(fail_at)), FailingDisk(fail_at)
        new = live_through_an_error(group, disk)
        with contextlib.suppress(StoreError):
            new.leave({})
        if not disk.has_failed:
            break
    assert fail_at > 10, "it was one write after the other that failed"


def test_claims_file_has_owners_and_epochs(group: Group) -> None:
    one = group.member()
    one.rebalance(Q[:2], {})
    text = json.loads(Path(group.paths.claims).read_text())
    assert text["owners"] == [one._membership.id]
    assert text["queues"] == {"T": {"0": [0, 1], "1": [0, 1]}}
