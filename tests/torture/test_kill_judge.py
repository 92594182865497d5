"""The judge of kill rounds sees what is lost, doubled, early, partial or beyond the end; and excuses what expired."""

import importlib
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def kill_judge(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the judge."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("kill_judge")


def words(
    kill_judge: ModuleType, facts: dict[str, list[Any]], rows: list[tuple[str, str, int, int]], **more: Any
) -> set[str]:
    """Return the kinds of faults in a store with these rows: topic, body, place, stored at."""
    seen = kill_judge.Seen(
        [kill_judge.Stored(*row) for row in rows],
        more.pop("log_begin", 0),
        {row[0] for row in rows},
        more.pop("offsets", {}),
        more.pop("ends", {}),
        [],
        "closed",
    )
    judge = more.pop("judge", None) or kill_judge.Judge()
    return {fault.split()[0] for fault in judge.faults(defaultdict(list, facts), seen, **more)}


def test_an_acknowledged_message_is_there_once_unless_it_expired(kill_judge: ModuleType) -> None:
    facts = {"sent": [("a", 100)], "sent many": [("m", 2, 200)]}
    many = [("orders", "m.0", 200, 1), ("orders", "m.1", 210, 1)]
    assert words(kill_judge, facts, [("orders", "a", 100, 1), *many]) == set()
    assert words(kill_judge, facts, many) == {"LOST"}
    assert words(kill_judge, facts, [("orders", "a", 100, 1), many[0]]) == {"LOST"}
    assert words(kill_judge, facts, [("orders", "a", 100, 1), ("orders", "a", 300, 1), *many]) == {"DOUBLE", "LOST"}
    assert words(kill_judge, facts, many, log_begin=150) == set()


def test_a_batch_is_whole_or_missing(kill_judge: ModuleType) -> None:
    rows = [("sink0", f"bquery1.7.0.{row}", row, 1) for row in range(3)]
    begun = {"batch": [("query1", 7, 3)]}
    committed = begun | {"committed": [("query1", 7)]}
    assert words(kill_judge, committed, rows, is_final=True) == set()
    assert words(kill_judge, committed, rows[:2], is_final=True) == {"LOST"}
    assert words(kill_judge, begun, [], is_final=True) == set()
    assert words(kill_judge, begun, rows[:2], is_final=True) == {"PART"}
    judge = kill_judge.Judge()
    assert words(kill_judge, committed, rows, judge=judge) == set()
    assert words(kill_judge, committed, rows[:2], judge=judge) == set(), "retention deleted a part"


def test_a_delayed_message_comes_once_and_in_time(kill_judge: ModuleType) -> None:
    facts = {"delayed": [("d", 5000)]}
    assert words(kill_judge, facts, [("late", "d", 1, 5000)], is_ticked=True) == set()
    assert words(kill_judge, facts, [("late", "d", 1, 4000)]) == {"EARLY"}
    assert words(kill_judge, facts, [], is_ticked=True) == {"LOST"}
    assert words(kill_judge, facts, []) == set(), "nobody has delivered it yet"
    assert words(kill_judge, facts, [("late", "d", 1, 5000), ("late", "d", 2, 5000)]) == {"DOUBLE"}


def test_topics_imports_and_offsets_stay(kill_judge: ModuleType) -> None:
    assert words(kill_judge, {"topic": [("made1",)]}, []) == {"LOST"}
    assert words(kill_judge, {"imported": [(0,)]}, []) == {"LOST"}
    groups: dict[str, dict[int, int]] = {"puller0": {0: 5}}
    offset = {"offset": [("puller0", 0, 5)]}
    assert words(kill_judge, offset, [], offsets=groups, ends={0: 9}) == set()
    assert words(kill_judge, offset, [], offsets=groups, ends={0: 4}) == {"OFFSET"}
    assert words(kill_judge, {"offset": [("puller0", 0, 6)]}, [], offsets=groups, ends={0: 9}) == {"LOST"}


def test_what_workers_saw_is_told_once(kill_judge: ModuleType) -> None:
    judge = kill_judge.Judge()
    facts = {"damage": [("damage: commitlog/0",)], "gap": [("orders/0", 7, 5)]}
    assert words(kill_judge, facts, [], judge=judge) == {"DAMAGE", "GAP"}
    assert words(kill_judge, facts, [], judge=judge) == set()
