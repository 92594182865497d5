"""own_offsets: where a group may be if only this query has moved it, in offsets and while the query runs."""

from dataclasses import replace

import pytest

from rmq_spark.datasource.plan.batch_assignment import BatchAssignment
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.plan.own_offsets import OwnOffsets, QueryHistory, published_of
from rmq_spark.store.model import QueueBounds, QueueKey

A0, A1, B0 = QueueKey("a", 0, "broker-a"), QueueKey("a", 1, "broker-a"), QueueKey("a", 0, "broker-b")
BOUNDS = {queue: QueueBounds(0, 100) for queue in (A0, A1, B0)}


@pytest.mark.parametrize(
    ("known", "begin", "end", "expected"),
    [
        (40, 55, 70, (40, 55)),
        (55, 55, 70, (55,)),
        (None, 55, 70, (55,)),
        (40, 70, 70, (40, 70)),
        (70, 55, 70, (70, 55)),
        (70, 70, 70, None),
        (None, 70, 70, None),
    ],
)
def test_published_of_one_queue(known, begin, end, expected) -> None:
    published = {} if known is None else {A0: known}
    assert published_of(published, {A0: begin}, {A0: end}, {}).get(A0) == expected


def test_published_of_leaves_out_queues_without_an_end() -> None:
    assert published_of({A1: 3}, {A1: 4}, {A0: 5}, {}) == {}


def test_published_of_keeps_the_offset_before_as_long_as_nothing_is_acknowledged() -> None:
    begins, ends = {A0: 4, A1: 4}, {A0: 6, A1: 6}
    found = published_of({A1: 3}, begins, ends, {A0: (0, 2), A1: (0, 2)})
    assert found == {A0: (0, 4), A1: (3, 4)}
    assert published_of({}, ends, {A0: 8}, found) == {A0: (0, 6)}


def test_marked_has_the_own_offsets_of_the_queues_of_the_query_only() -> None:
    assignment = BatchAssignment(frozenset({A0}), group="billing", reset=2)
    before = StreamOffset({A0: 55, A1: 8})
    end = assignment.marked(before, StreamOffset({A0: 70}), {A0: 55}, BOUNDS, {A0: 40, A1: 3})
    assert end.published == {A0: (40, 55)}
    assert (end.positions, end.group, end.reset) == ({A0: 70, A1: 8}, "billing", 2)
    assert assignment.marked(before, StreamOffset({A0: 70}), {A0: 55}, BOUNDS).published == {}


def test_marked_that_only_moves_queues_has_the_own_offsets_at_the_moved_positions() -> None:
    assignment = BatchAssignment(frozenset({A0}), seeks={A0: 5}, group="billing", reset=1)
    first = assignment.marked(StreamOffset({A0: 20}, group="billing"), StreamOffset({A0: 9}), {A0: 5}, BOUNDS, {A0: 9})
    assert (first.positions, first.seeks, first.published) == ({A0: 9}, {A0: 5}, {A0: (9, 5)})
    second = assignment.marked(first, replace(first, seeks={}, published={}), {A0: 5}, BOUNDS, {A0: 9})
    assert (second.positions, second.seeks, second.published) == ({A0: 5}, {A0: 5}, {A0: (9, 5)})


def test_marked_keeps_what_is_known_of_queues_that_no_other_member_has() -> None:
    assignment = BatchAssignment(frozenset({A0}), group="billing", reset=2, others=frozenset({A1}))
    known = {A0: (0, 5), A1: (3, 5), B0: (2, 5)}
    before = StreamOffset({A0: 8, A1: 8, B0: 8}, group="billing", published=known)
    after, bounds = StreamOffset({A0: 9, B0: 8}), {A0: BOUNDS[A0], A1: BOUNDS[A1]}
    end = assignment.marked(before, after, {A0: 8, B0: 8}, bounds, {})
    assert end.published == {A0: (0, 8), B0: (2, 5)}, "another member has A1, and may set any offset"
    waiting = replace(assignment, others=frozenset())
    assert waiting.marked(before, after, {A0: 8, B0: 8}, bounds, {}).published == {A0: (0, 8), A1: (3, 5), B0: (2, 5)}
    moved = replace(waiting, moves={A1: 2})
    assert A1 not in moved.marked(before, after, {A0: 8, B0: 8}, bounds, {}).published
    end = assignment.marked(before, after, {A0: 7, B0: 8}, bounds, {})
    assert end.published[A0] == (7,), "a queue that was moved"
    end = assignment.marked(replace(before, group="another"), after, {A0: 8}, bounds, {})
    assert end.published == {A0: (8,)}


def test_marked_outside_the_group_gives_up_its_offsets_in_a_cluster_only() -> None:
    before = StreamOffset({A0: 55}, group="billing", reset=3, published={A0: (40, 50)})
    end = BatchAssignment().marked(before, StreamOffset({A0: 70}), {A0: 55}, BOUNDS)
    assert (end.group, end.reset, end.published) == ("", 0, {})
    plain = QueueKey("a", 0)
    before = StreamOffset({plain: 55}, group="billing", reset=3)
    end = BatchAssignment().marked(before, StreamOffset({plain: 70}), {plain: 55}, {plain: QueueBounds(0, 100)})
    assert (end.group, end.reset) == ("billing", 3)


def test_OwnOffsets_remembers_the_last_positions_of_each_queue() -> None:
    own = OwnOffsets()
    assert own.of(A0) is None
    for position in (3, 3, 5):
        own.note({A0: position, A1: 7})
    assert (own.of(A0), own.of(A1), own.of(B0)) == ((3, 5), (7,), None)
    for position in range(5, 1000):
        own.note({A0: position})
    assert own.of(A0) == tuple(range(872, 1000))
    assert own.of(A1) == (7,), "a queue that was lost"


def test_OwnOffsets_forgets_what_is_beyond_a_reset() -> None:
    own = OwnOffsets()
    for position in (3, 8, 5, 6):
        own.note({A0: position})
    assert own.of(A0) == (5, 6)


def test_OwnOffsets_forgets_queues_of_other_members() -> None:
    own = OwnOffsets()
    own.note({A0: 3, A1: 7})
    own.forget([A0, B0])
    assert (own.of(A0), own.of(A1)) == (None, (7,))


def test_history_of_a_restarted_query_is_that_of_its_checkpoint() -> None:
    before = StreamOffset({A0: 10, A1: 10}, seeks={A1: 2}, published={A0: (4, 6)})
    history = QueryHistory(before, OwnOffsets(), [], is_first=True)
    assert [history.is_own(A0, at) for at in (3, 4, 5, 6, 9, 10, 11)] == [False, True, True, True, False, True, False]
    assert [history.is_own(A1, at) for at in (9, 10)] == [False, True]
    assert not history.is_own(B0, 0), "it never read this one"
    assert [history.has_applied(A1, at) for at in (2, 3)] == [True, False]
    assert not QueryHistory(before, OwnOffsets(), []).has_applied(A1, 2), "a batch of this run has begun there"


def test_history_of_a_running_query_has_only_what_it_has_set_itself() -> None:
    run = OwnOffsets()
    for position in (4, 8):
        run.note({A0: position})
    history = QueryHistory(StreamOffset({A0: 10, A1: 10}, published={A0: (2, 4), A1: (2, 4)}), run, [A0, A1])
    assert [history.is_own(A0, at) for at in (2, 4, 6, 8, 9, 10)] == [False, True, False, True, False, True]
    assert [history.is_own(A1, at) for at in (4, 10)] == [False, True], "another member had it"
