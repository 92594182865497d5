"""The judge of group drills finds each kind of fault, and says who consumed twice and how long members overlapped."""

from collections.abc import Mapping, Sequence

from compat_kit.group_judge import (
    Change,
    GroupVerdict,
    Overlap,
    batch_spans,
    cut_out,
    find_overlaps,
    judge_group,
    owned_spans,
)
from compat_kit.members import Consumed, Owned, Place

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


def test_killed_consumer_has_its_queues_until_it_died() -> None:
    owned = [Owned(0, frozenset([QUEUE])), Owned(500, frozenset([QUEUE]))]  # the second process began at 500
    assert owned_spans(owned, [200, 700]) == {QUEUE: [(0, 200), (500, 700)]}
