"""Tests of `LockWait`: when a wait for the store's lock ends, and how often it polls."""

import pytest

from rmq_spark.store.log.store_lock import LockWait


def looked(wait: LockWait, total_ms: int, note: bytes | None = b"a", *, is_locked: bool = True) -> LockWait:
    wait.refresh(0, note, is_locked=is_locked)
    for _ in range(total_ms // 10):
        wait.refresh(10, note, is_locked=is_locked)
    return wait


def test_is_over_counts_time_only_while_holder_json_is_unchanged() -> None:
    wait = looked(LockWait(60_000), 59_000)
    assert not wait.is_over
    wait.refresh(10, b"b", is_locked=True)
    assert not looked(wait, 59_990, b"b").is_over
    assert looked(wait, 10, b"b").is_over


def test_is_over_counts_a_new_or_removed_holder_json_as_progress() -> None:
    wait = looked(LockWait(1_000), 900, None)
    wait = looked(looked(wait, 900, b"a"), 900, None)
    assert not wait.is_over
    assert looked(wait, 200, None).is_over


def test_pause_ms_is_shortest_for_the_longest_waiter() -> None:
    wait = LockWait(60_000)
    pauses = []
    for _ in range(50):
        pauses.append(wait.pause_ms(has_turn=False))
        looked(wait, 100)
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[0] >= 10 * pauses[-1]


def test_pause_ms_is_shortest_with_the_lock_of_turn() -> None:
    old, new = looked(LockWait(60_000), 900), LockWait(60_000)
    assert old.pause_ms(has_turn=True) < old.pause_ms(has_turn=False)
    assert new.pause_ms(has_turn=True) < looked(LockWait(60_000), 50_000).pause_ms(has_turn=False)


def test_pause_ms_is_shorter_at_the_front_of_the_line() -> None:
    wait = LockWait(60_000)
    pauses = [wait.pause_ms(has_turn=False, place=place) for place in range(8)]
    assert [wait.pause_ms(has_turn=True), *pauses] == list(range(2, 20, 2))
    assert wait.pause_ms(has_turn=False) > pauses[-1]


@pytest.mark.parametrize("has_turn", [True, False])
def test_pause_ms_ends_at_the_timeout(has_turn: bool) -> None:
    wait = looked(LockWait(1_000), 990)
    assert wait.pause_ms(has_turn=has_turn) <= 10
    assert LockWait(0).pause_ms(has_turn=has_turn) == 1


def test_is_nameless_is_sooner_with_the_lock_of_turn() -> None:
    wait = looked(LockWait(60_000), 990, None)
    assert not wait.is_nameless(has_turn=True)
    looked(wait, 20, None)
    assert wait.is_nameless(has_turn=True)
    assert not wait.is_nameless(has_turn=False)
    assert looked(wait, 10_000, None).is_nameless(has_turn=False)


def test_is_turn_abandoned_after_a_lock_stayed_free() -> None:
    wait = looked(LockWait(60_000), 1_990, is_locked=False)
    assert not wait.is_turn_abandoned
    assert looked(wait, 10, is_locked=False).is_turn_abandoned
    assert not looked(wait, 10, is_locked=True).is_turn_abandoned
    # Free at every poll, but other processes take and release it in between.
    for number in range(1_000):
        wait.refresh(10, str(number).encode(), is_locked=False)
    assert not wait.is_turn_abandoned
