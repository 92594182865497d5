"""The judge of group drills finds each kind of fault, and says who consumed twice and how long members overlapped."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from compat_kit.group_drill import DrillPlan, GroupDrill, judge_again
from compat_kit.group_judge import (
    Change,
    GroupVerdict,
    MemberLives,
    Overlap,
    batch_spans,
    cut_out,
    find_overlaps,
    judge_group,
    judge_overlaps,
    judge_turns,
    longest_span_ms,
    owned_spans,
)
from compat_kit.members import Consumed, JavaMember, Member, Owned, Place, QueryMember, end_line, read_lines

QUEUE, OTHER = Place("broker-a", 0), Place("broker-b", 0)
STORED = {QUEUE: {0: "a", 1: "b", 2: "c"}}


def row(offset: int, body: str, at_ms: int, place: Place = QUEUE) -> Consumed:
    return Consumed(place, offset, body, at_ms, at_ms)


def judged(
    consumed: Mapping[str, Sequence[Consumed]], *changes: Change, is_orderly: bool = False, unknown: str = ""
) -> GroupVerdict:
    return judge_group(STORED, {QUEUE: set(unknown)}, consumed, changes, is_orderly=is_orderly)


def test_messages_that_two_members_consume_once_are_no_fault() -> None:
    verdict = judged({"java": [row(0, "a", 10), row(2, "c", 30)], "query": [row(1, "b", 20)]}, is_orderly=True)
    assert (verdict.stored, verdict.deliveries, verdict.doubled, verdict.faults) == (3, 3, 0, [])


def test_message_that_nobody_consumed_is_missing() -> None:
    verdict = judged({"java": [row(0, "a", 10), row(2, "c", 30)]})
    assert verdict.missing == 1
    assert verdict.faults == [f"MISSING {QUEUE}: 1 offsets, 1 to 1"]
    assert judged({}).missing == 3


def test_other_body_and_message_that_was_not_sent_are_foreign_and_one_of_unknown_outcome_is_not() -> None:
    rows = [row(0, "a", 1), row(1, "x", 2), row(2, "c", 3), row(3, "d", 4)]
    verdict = judged({"java": rows}, unknown="d")
    assert (verdict.foreign, verdict.missing) == (1, 1)
    assert judged({"java": rows}).foreign == 2
    assert judged({"java": [row(0, "a", 1, OTHER)]}).foreign == 1


def test_second_delivery_is_counted_by_members_and_by_the_change_before_it() -> None:
    changes = Change(5, "join", "query"), Change(15, "kill -9", "java"), Change(30, "stop", "query")
    rows = {
        "java": [row(0, "a", 10), row(1, "b", 11)],
        "query": [row(1, "b", 20), row(2, "c", 21), row(0, "a", 30)],
    }
    verdict = judged(rows, *changes)
    assert (verdict.doubled, verdict.missing, verdict.foreign) == (2, 0, 0)
    assert verdict.causes == {
        "java, then query; after kill -9 of java": 1,
        "java, then query; after stop of query": 1,
    }
    assert judged({"java": [row(0, "a", 1)] * 2}, *changes).causes == {"java, then java; after the start": 1}


def test_first_delivery_after_a_later_message_is_an_inversion_in_an_orderly_group_only() -> None:
    rows = {"java": [row(0, "a", 10), row(2, "c", 20)], "query": [row(1, "b", 30)]}
    verdict = judged(rows, is_orderly=True)
    assert verdict.inversions == 1
    assert verdict.faults[0].startswith("INVERSION")
    assert judged(rows).faults == []
    again = {"java": [row(0, "a", 10), row(1, "b", 20)], "query": [row(0, "a", 30), row(1, "b", 31), row(2, "c", 32)]}
    assert judged(again, is_orderly=True).inversions == 0, "messages that come again begin anew"


def test_time_in_which_two_members_work_on_a_queue_is_measured_without_frozen_times() -> None:
    owned = [Owned(0, frozenset([QUEUE])), Owned(100, frozenset([QUEUE, OTHER])), Owned(300, frozenset())]
    java = owned_spans(owned, [400])
    assert java == {QUEUE: [(0, 100), (100, 300)], OTHER: [(100, 300)]}
    query = batch_spans([Consumed(QUEUE, n, "", 250, 350) for n in range(3)] + [Consumed(OTHER, 0, "", 300, 350)])
    assert query == {QUEUE: [(250, 350)], OTHER: [(300, 350)]}
    assert find_overlaps({"java": java, "query": query}) == [Overlap(QUEUE, ("java", "query"), 250, 50)]
    thawed = cut_out(java, [(260, 290)])
    assert [one.ms for one in find_overlaps({"java": thawed, "query": query})] == [10, 10]
    assert find_overlaps({"java": java, "query": {QUEUE: [(300, 400)]}}) == []
    batches = {QUEUE: [(0, 10), (5, 20)]}
    assert find_overlaps({"query": batches}) == [], "a member does not overlap with itself"
    third = find_overlaps({"java": {QUEUE: [(0, 9)]}, "query": {QUEUE: [(2, 12)]}, "other": {QUEUE: [(4, 15)]}})
    assert third == [Overlap(QUEUE, ("java", "other", "query"), 2, 10)]


def test_side_that_consumed_nothing_is_a_fault() -> None:
    rows = [row(n, body, n) for n, body in enumerate("abc")]
    assert judged({"java-1": rows, "java-2": [], "query-1": [row(0, "a", 9)], "query-2": []}).faults == []
    assert judged({"java-1": [], "java-2": rows, "query-1": [], "query-2": []}).faults == [
        "IDLE query: none of its members consumed a message"
    ]


def test_overlap_may_take_the_longest_batch_and_a_minute_or_two_after_a_freeze() -> None:
    lives = {"java": MemberLives(frozen=[(0, 1_000)]), "query": MemberLives()}

    def faults(from_ms: int, ms: int) -> list[str]:
        verdict = GroupVerdict(overlaps=[Overlap(QUEUE, ("java", "query"), from_ms, ms)])
        judge_overlaps(verdict, 5_000, lives)
        return verdict.faults

    assert faults(500_000, 65_000) == []
    assert faults(500_000, 65_001)[0].startswith("OVERLAP ")
    assert faults(1_000, 119_999) == []
    assert faults(1_000, 121_000)[0].endswith("expected at most 65000 ms"), "it was frozen 121 s before"
    assert faults(0, 121_000) == []
    lives["query"].frozen.append((100_000, 110_000))
    assert faults(1_000, 125_000) == []
    assert faults(1_000, 125_001)[0].endswith("expected at most 125000 ms")


def turns(
    consumed: Mapping[str, Sequence[Consumed]],
    frozen: Mapping[str, list[tuple[int, int]]] | None = None,
    ends_ms: Mapping[str, list[int]] | None = None,
    owned: Mapping[str, list[tuple[int, int]]] | None = None,
) -> list[str]:
    """Return the faults of turns, of queries unless `owned` has when a Java consumer had the queue."""
    verdict = GroupVerdict()
    lives = {
        name: MemberLives(
            {QUEUE: (owned or {})[name]} if name in (owned or {}) else batch_spans(rows),
            (frozen or {}).get(name, []),
            (ends_ms or {}).get(name, []),
        )
        for name, rows in consumed.items()
    }
    judge_turns(verdict, consumed, lives)
    assert len(verdict.faults) == verdict.inversions
    return verdict.faults


def test_member_that_goes_on_where_another_one_is_ahead_is_an_inversion() -> None:
    java = [row(n, "", 1_000 + 10 * n) for n in range(100, 110)]  # 2000 to 2090
    behind = [row(n, "", 1_945 + 10 * n) for n in range(10)]  # 1945 to 2035: another repeats, and both continue
    assert len(turns({"java": java, "query": behind})) == 4
    batch = [Consumed(QUEUE, n, "", 1_990, 2_050) for n in range(50, 60)]
    assert len(turns({"java": java, "query": batch})) == 10, "its batch runs while the other one consumes"
    assert turns({"java": java, "query": [Consumed(QUEUE, n, "", 2_100, 2_150) for n in range(50, 60)]}) == []
    assert turns({"java": java, "query": [Consumed(QUEUE, n, "", 1_950, 1_990) for n in range(50, 105)]}) == []
    assert turns({"java": java, "query": batch}, {"query": [(1_995, 2_040)]}) == []
    assert turns({"java": java, "query": batch}, {"query": [(-200_000, -119_000)]}) != [], "long ago"
    late = [Consumed(QUEUE, n, "", 1_990, 61_991) for n in range(50, 60)]
    assert turns({"java": java, "query": late}) == [], "its lock has expired"
    assert turns({"java": java[5:], "query": java[:5]}) == []


def test_java_consumer_that_goes_on_in_its_turn_is_an_inversion_and_one_that_got_the_queue_again_is_not() -> None:
    java = [row(0, "", 10), row(1, "", 20), row(2, "", 40)]
    query = [Consumed(QUEUE, 5, "", 25, 30)]
    both = {"java": java, "query": query}
    assert len(turns(both, owned={"java": [(0, 50)]})) == 1
    assert len(turns(both, owned={"java": [(0, 22), (35, 50)]})) == 1, "it continues with the next message"
    assert turns({**both, "java": [*java[:2], row(1, "", 40)]}, owned={"java": [(0, 22), (35, 50)]}) == []
    assert turns(both, owned={"java": [(0, 22), (35, 50)]}, ends_ms={"query": [33]}) == [], "what it did was lost"


def test_longest_batch_is_that_without_frozen_times() -> None:
    spans = {QUEUE: [(0, 150_000), (200_000, 203_000)]}
    assert longest_span_ms(spans, [(1_000, 149_000)]) == 3_000
    assert longest_span_ms(spans, []) == 150_000
    assert longest_span_ms({}, []) == 0


def test_part_of_a_line_is_left_out_where_a_life_ended_and_is_an_error_elsewhere(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    assert read_lines(ledger) == []
    end_line(ledger)
    ledger.write_text('{"a": 1}\n{"a": 2')
    assert read_lines(ledger) == [{"a": 1}]
    end_line(ledger)
    end_line(ledger)
    with ledger.open("a") as file:
        file.write('{"a": 3}\n')
    assert read_lines(ledger) == [{"a": 1}, {"a": 3}]
    ledger.write_text('{"a": 1}\n{"a": 2{"a": 3}\n{"a": 4}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*ledger is damaged"):
        read_lines(ledger)


def test_ledgers_of_an_earlier_drill_are_judged_again(tmp_path: Path) -> None:
    begin_ms = int(time.mktime((2026, 11, 27, 23, 59, 0, 0, 0, -1))) * 1000
    (tmp_path / "sent.ledger").write_text("".join(f"broker-a 0 {n} {begin_ms} {n}\n" for n in range(4)))

    def java(offset: int, at_ms: int) -> dict[str, Any]:
        one = {"event": "message", "atMs": at_ms, "topic": "drill", "broker": "broker-a", "queueId": 0}
        return {**one, "offset": offset, "body": f"broker-a/0/{offset} filler"}

    owned = {"event": "queues", "atMs": begin_ms, "queues": ["drill:broker-a:0"]}
    lines = [owned, java(0, begin_ms + 1), java(1, begin_ms + 400_000)]
    (tmp_path / "java-1.ledger").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = [["broker-a", 0, n, f"broker-a/0/{n}"] for n in range(1, 4)]
    batch = {"event": "batch", "number": 0, "fromMs": begin_ms + 100_000, "atMs": begin_ms + 390_000, "rows": rows}
    (tmp_path / "query-1.ledger").write_text(f"{json.dumps(batch)}\n")
    said = ["23:59:10 1: freeze of query-1; 9 messages sent", "00:05:00 1: thaw of query-1; 9 messages sent"]
    verdict, report = judge_again(tmp_path, [*said, "seed 3, orderly"])
    assert (verdict.stored, verdict.missing, verdict.doubled, verdict.inversions) == (4, 0, 1, 1)
    assert verdict.faults[0].startswith("INVERSION ")
    assert report[0] == "changes: {'freeze': 1, 'thaw': 1}"
    assert "the longest batch took 30000 ms" in report[3]
    assert judge_again(tmp_path, said)[0].faults == [], "in a group without order it is none"


@pytest.mark.parametrize("kind", [JavaMember, QueryMember])
@pytest.mark.parametrize("status", [-9, 0])
def test_member_that_died_unasked_ends_the_drill(tmp_path: Path, kind: type[Member], status: int) -> None:
    plan = DrillPlan(changes=0, messages=0, pause_s=(0.0, 0.0), freeze_s=0.0)
    drill = GroupDrill(Mock(), tmp_path, Random(1), plan, print)
    member = Mock(spec=kind)
    member.name, member.exit_status.return_value, member.error = "one", None, lambda: None
    drill.members = [member]
    drill._check()
    member.exit_status.return_value = status
    with pytest.raises(RuntimeError, match=f"one ended unasked, with status {status}"):
        drill._check()
    drill._away.append(member)
    drill._check()


def test_killed_consumer_has_its_queues_until_it_died() -> None:
    owned = [Owned(0, frozenset([QUEUE])), Owned(500, frozenset([QUEUE]))]  # the second process began at 500
    assert owned_spans(owned, [200, 700]) == {QUEUE: [(0, 200), (500, 700)]}
