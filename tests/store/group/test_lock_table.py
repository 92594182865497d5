"""A queue is its owner's until that one lets go or has been silent for more than a minute."""

import pytest

from rmq_spark.store.group.lock_table import CLIENT_LIVE_MS, LOCK_LIVE_MS, RENEW_INTERVAL_MS, LockTable
from rmq_spark.store.units import QueueKey

Q, Q2 = QueueKey("t", 0), QueueKey("t", 1)


def test_the_life_of_a_lock() -> None:
    table = LockTable()
    assert table.try_lock("g", Q, "A", 0) == 1
    assert table.try_lock("g", Q, "A", 20_000) == 1, "renewed"
    assert table.try_lock("g", Q, "B", 50_000) is None
    assert table.try_lock("g", Q, "B", 80_000) is None, "exactly 60 s old is not older than 60 s"
    assert table.try_lock("g", Q, "B", 80_001) == 2
    assert not table.unlock("g", Q, "A"), "it is B's"
    assert table.try_lock_batch("g", [Q, Q2], "A", 82_000) == {Q2: 1}
    assert table.unlock("g", Q, "B")
    assert table.try_lock("g", Q, "A", 83_000) == 3


def test_another_group_has_locks_of_its_own() -> None:
    table = LockTable()
    table.try_lock("g1", Q, "A", 0)
    assert table.try_lock("g2", Q, "B", 0) == 1
    assert not table.unlock("g2", Q, "A")
    assert table.try_lock("g1", Q, "A", 1) == 1


@pytest.mark.parametrize("taker", ["A", "B"])
def test_who_locks_after_the_lock_expired_has_a_new_epoch_even_the_owner(taker: str) -> None:
    table = LockTable()
    table.try_lock("g", Q, "A", 0)
    assert table.try_lock("g", Q, taker, 60_001) == 2
    assert table.try_lock("g", Q, taker, 120_001) == 2


def test_an_epoch_never_goes_back() -> None:
    table = LockTable()
    epochs = []
    for owner in "ABAAB":
        epochs.append(table.try_lock("g", Q, owner, 0))
        table.unlock("g", Q, owner)
    assert epochs == [1, 2, 3, 4, 5]


def test_a_queue_that_was_let_go_is_nobodys_and_keeps_its_epoch() -> None:
    table = LockTable()
    assert table.find("g", Q) is None
    assert not table.unlock("g", Q, "A")
    table.try_lock("g", Q, "A", 5)
    table.unlock("g", Q, "A")
    lock = table.find("g", Q)
    assert lock is not None
    assert (lock.owner, lock.epoch) == ("", 1)
    assert not table.unlock("g", Q, "")
    assert not lock.is_held_by("", 5)
    assert not lock.is_held_by("A", 5)


def test_a_lock_says_whose_it_is_until_it_expires() -> None:
    table = LockTable()
    table.try_lock("g", Q, "A", 1000)
    lock = table.find("g", Q)
    assert lock is not None
    assert lock.is_held_by("A", 61_000)
    assert not lock.is_held_by("A", 61_001)
    assert not lock.is_held_by("B", 1000)


def test_unlocking_many_leaves_those_of_others() -> None:
    table = LockTable()
    table.try_lock("g", Q, "A", 0)
    table.try_lock("g", Q2, "B", 0)
    table.unlock_batch("g", [Q, Q2], "A")
    assert table.try_lock_batch("g", [Q, Q2], "C", 0) == {Q: 2}


def test_how_long_a_lock_lives_is_settable() -> None:
    table = LockTable(live_ms=10)
    table.try_lock("g", Q, "A", 0)
    assert table.try_lock("g", Q, "B", 10) is None
    assert table.try_lock("g", Q, "B", 11) == 2


def test_a_client_renews_before_it_stops_and_stops_before_another_can_begin() -> None:
    assert (RENEW_INTERVAL_MS, CLIENT_LIVE_MS, LOCK_LIVE_MS) == (20_000, 30_000, 60_000)
