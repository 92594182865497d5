"""The line of processes that wait for the store: nobody overtakes, and nobody who left or died is waited for."""

from pathlib import Path

import pytest

from rmq_spark.store.log.waiting_line import PLACES, WaitingLine


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "turn").touch()
    return str(tmp_path / "turn")


def lines(path: str, count: int) -> list[WaitingLine]:
    return [WaitingLine(path) for _ in range(count)]


def test_move_up_joins_behind_all_others(path: str) -> None:
    found = lines(path, PLACES)
    assert [one.move_up() for one in found] == [True] + [False] * (PLACES - 1)
    assert [one.place for one in found] == list(range(PLACES))


def test_move_up_lets_nobody_overtake(path: str) -> None:
    first, second, third, newcomer = lines(path, 4)
    for one in (first, second, third):
        one.move_up()
    first.leave()
    assert not newcomer.move_up()
    assert not third.move_up()
    assert second.move_up()
    assert not third.move_up()
    assert not newcomer.move_up()
    assert [one.place for one in (first, second, third, newcomer)] == [None, 0, 1, 2]


def test_move_up_waits_outside_of_a_full_line(path: str) -> None:
    found, late = lines(path, PLACES), WaitingLine(path)
    for one in found:
        one.move_up()
    assert not late.move_up()
    assert late.place is None
    for one in found:
        one.leave()
    assert late.move_up()


def test_leave_can_be_repeated_and_releases_the_place(path: str) -> None:
    first, second = lines(path, 2)
    assert first.move_up()
    first.leave()
    first.leave()
    assert second.move_up()
