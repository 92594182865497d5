"""The judge of a drill finds each kind of fault, and no other."""

import json
from pathlib import Path

import pytest
from compat_kit.drill_judge import Batches, Row, Sent, Truth, judge, losses_in, read_ledger

PLACE = ("broker-a", 3)


def truth() -> Truth:
    """Return three acknowledged messages; the one of number 1 was not acknowledged, and is stored at offset 1."""
    found = Truth()
    found.stored[PLACE] = {0: Sent("a/3/0", 10), 2: Sent("a/3/2", 12), 3: Sent("a/3/3", 13)}
    found.unknown[PLACE] = {"a/3/1", "a/3/9"}
    return found


def rows(*offsets_and_numbers: tuple[int, int]) -> list[Row]:
    return [Row(PLACE, offset, f"a/3/{number}") for offset, number in offsets_and_numbers]


ALL = rows((0, 0), (1, 1), (2, 2), (3, 3))


def counts(found: list[Row], **given: object) -> tuple[int, int, int, int, int]:
    verdict = judge(found, truth(), **{"begins": {}, **given})  # type: ignore[arg-type]
    kinds = verdict.missing, verdict.doubled, verdict.out_of_order, verdict.foreign
    assert bool(verdict.faults) == any(kinds)
    return (*kinds, verdict.lost)


def test_judge_finds_no_fault_in_all_messages_in_order() -> None:
    assert counts(ALL) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ALL[:3], (1, 0, 0, 0, 0)),
        (ALL[1:], (1, 0, 0, 0, 0)),
        ([ALL[0], ALL[1], ALL[3]], (1, 0, 0, 0, 0)),
        ([], (4, 0, 0, 0, 0)),
        ([*ALL, ALL[2]], (0, 1, 0, 0, 0)),
        ([ALL[0], ALL[2], ALL[1], ALL[3]], (1, 0, 1, 0, 0)),
        ([*ALL, *rows((4, 2))], (0, 1, 0, 0, 0)),
        ([*ALL[:2], *rows((2, 9)), ALL[3]], (0, 0, 0, 1, 0)),
        ([*ALL, *rows((4, 7))], (0, 0, 0, 1, 0)),
    ],
)
def test_judge_counts_each_fault(found: list[Row], expected: tuple[int, ...]) -> None:
    assert counts(found) == expected


def test_judge_begins_where_the_stream_began() -> None:
    assert counts(ALL[2:], begins={PLACE: 2}) == (0, 0, 0, 0, 0)
    assert counts(ALL[2:], begins=None) == (0, 0, 0, 0, 0)
    assert counts(ALL[3:], begins={PLACE: 2}) == (1, 0, 0, 0, 0)


def test_judge_misses_nothing_that_the_query_called_lost() -> None:
    assert counts(ALL[2:], lost={PLACE: [(0, 2)]}) == (0, 0, 0, 0, 2)
    assert counts(ALL[2:], lost={PLACE: [(0, 1)]}) == (1, 0, 0, 0, 1)


def test_losses_are_taken_from_what_the_query_says() -> None:
    line = "rmq: data loss: 5 messages of queue drill/broker-a:3, queue offsets [4, 9): retention has deleted them"
    assert losses_in([line, line, "rmq: other"]) == {PLACE: [(4, 9)]}


def test_ledger_is_read_from_a_line_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text("broker-a 3 0 10 0\nbroker-a 3 1 11 \nbroker-a 3 2 12 2\nbroker-a 3 3 13")
    whole = read_ledger(path)
    assert whole.stored == {PLACE: {0: Sent("broker-a/3/0", 10), 2: Sent("broker-a/3/2", 12)}}
    assert whole.unknown == {PLACE: {"broker-a/3/1"}}
    assert whole.ends() == {PLACE: 3}
    assert read_ledger(path, 2).stored == {PLACE: {2: Sent("broker-a/3/2", 12)}}


def write(folder: Path, name: str, *rows: tuple[int, str]) -> None:
    table = [(*PLACE, offset, f"{body} filler") for offset, body in rows]
    (folder / f"{name}.json").write_text(json.dumps(table))


def test_batches_that_are_repeated_are_compared(tmp_path: Path) -> None:
    batches = Batches(tmp_path)
    write(tmp_path, "00000000-1", (0, "x"))
    write(tmp_path, "00000001-2", (1, "y"))
    batches.read()
    write(tmp_path, "00000001-3", (1, "y"))
    batches.read()
    assert batches.repeated == {1}
    assert batches.unequal == []
    assert list(batches.rows_after(-1)) == [Row(PLACE, 0, "x"), Row(PLACE, 1, "y")]
    write(tmp_path, "00000001-4", (1, "y"), (2, "z"))
    batches.read()
    assert batches.unequal == [1]
    assert batches.ends == {PLACE: 3}
    assert batches.last_number() == 1
    assert list(batches.rows_after(0)) == [Row(PLACE, 1, "y"), Row(PLACE, 2, "z")]
