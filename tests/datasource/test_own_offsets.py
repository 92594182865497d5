"""own_offsets: where a group may be if only this query has moved it, in offsets and while the query runs."""

from dataclasses import replace

import pytest

from rmq_spark.datasource.plan.batch_assignment import BatchAssignment
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.plan.own_offsets import OwnOffsets, published_of
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
    assert published_of(published, {A0: begin}, {A0: end}).get(A0) == expected


def test_published_of_leaves_out_queues_without_an_end() -> None:
    assert published_of({A1: 3}, {A1: 4}, {A0: 5}) == {}


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
