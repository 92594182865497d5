"""Where a query begins and ends, and what is gone: numbers in, offsets out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.offsets import StreamOffset
from rmq_spark.datasource.options import Limits
from rmq_spark.datasource.planning import (
    Loss,
    check_progress,
    clip_ranges,
    count_new,
    is_same,
    plan_batch,
    ranges_between,
    refuse_losses,
    refuse_unsubscribed,
    resolve_positions,
)
from rmq_spark.datasource.values import EARLIEST, LATEST, Positions
from rmq_spark.store.errors import DataLossError, NotFoundError, OffsetRangeError, OptionError
from rmq_spark.store.units import QueueBounds, QueueKey

# No deadline: a busy machine is no bug. The same examples every time.
usual = settings(deadline=None, derandomize=True)

A0, A1, B0 = QueueKey("a", 0), QueueKey("a", 1), QueueKey("b", 0)
BOUNDS = {A0: QueueBounds(0, 10), A1: QueueBounds(5, 20), B0: QueueBounds(7, 7)}


def resolve(wanted=None, by_time=None, default=LATEST, clip=False):
    return resolve_positions(BOUNDS, wanted, by_time or {}, default, "startingOffsets", clip)


@pytest.mark.parametrize(
    ("wanted", "default", "positions"),
    [
        (None, LATEST, (10, 20, 7)),
        (None, EARLIEST, (0, 5, 7)),
        (Positions(EARLIEST), LATEST, (0, 5, 7)),
        (Positions(LATEST), EARLIEST, (10, 20, 7)),
        (Positions(None, {A1: 12}), LATEST, (10, 12, 7)),
        (Positions(None, {A1: 12}), EARLIEST, (0, 12, 7)),
        (Positions(None, {A0: -1, A1: -2}), EARLIEST, (10, 5, 7)),
        (Positions(None, {A0: 10, A1: 5, B0: 7}), EARLIEST, (10, 5, 7)),
    ],
)
def test_a_named_queue_goes_before_the_word_and_that_before_the_default(wanted, default, positions) -> None:
    assert resolve(wanted, default=default) == (dict(zip((A0, A1, B0), positions, strict=True)), [])


def test_a_time_goes_before_the_word() -> None:
    assert resolve(Positions(EARLIEST), {A1: 9})[0] == {A0: 0, A1: 9, B0: 7}


def test_an_offset_that_retention_deleted_is_a_loss_and_the_first_one_left_is_taken() -> None:
    positions, losses = resolve(Positions(None, {A1: 2}))
    assert positions[A1] == 5
    assert [(loss.queue, loss.begin, loss.end) for loss in losses] == [(A1, 2, 5)]


def test_an_offset_beyond_the_end_was_never_there() -> None:
    with pytest.raises(OffsetRangeError, match=r"queue offsets \[0, 10\), asked for was the offset 11\n") as caught:
        resolve(Positions(None, {A0: 11}))
    assert "startingOffsets names that offset" in caught.value.__notes__[0]
    assert "failOnDataLoss=false" in caught.value.__notes__[0]
    assert resolve(Positions(None, {A0: 11}), clip=True) == ({A0: 10, A1: 20, B0: 7}, [])


def test_a_named_queue_that_is_not_there_is_an_error_that_lists_the_others() -> None:
    with pytest.raises(NotFoundError, match=r'names the queue a/7.*Queues of topic "a": 0, 1\.'):
        resolve(Positions(None, {QueueKey("a", 7): 1}))
    with pytest.raises(NotFoundError, match='There is no topic "c"'):
        resolve(Positions(None, {QueueKey("c", 7): 1}))


def test_a_queue_goes_on_where_it_stood_and_a_new_one_begins_at_its_earliest() -> None:
    progress = check_progress(StreamOffset({A0: 3}), BOUNDS, {})
    assert progress.begins == {A0: 3, A1: 5, B0: 7}
    assert progress.starts == {A1: 5, B0: 7}
    assert progress.losses == []


def test_the_first_batch_begins_where_the_start_was_resolved() -> None:
    progress = check_progress(StreamOffset({}), BOUNDS, {A0: 10, A1: 12})
    assert progress.begins == progress.starts == {A0: 10, A1: 12, B0: 7}


def test_retention_that_overtook_a_queue_is_a_loss() -> None:
    progress = check_progress(StreamOffset({A0: 3, A1: 2, B0: 7}), BOUNDS, {})
    assert progress.begins[A1] == 5
    assert [(loss.queue, loss.begin, loss.end) for loss in progress.losses] == [(A1, 2, 5)]
    assert "now begins at 5" in progress.losses[0].why


def test_a_queue_that_ends_before_the_position_goes_on_at_its_end() -> None:
    progress = check_progress(StreamOffset({A0: 15, A1: 6, B0: 7}), BOUNDS, {})
    assert progress.begins[A0] == 10
    assert [(loss.queue, loss.begin, loss.end) for loss in progress.losses] == [(A0, 10, 15)]
    assert "ends at 10" in progress.losses[0].why


def test_a_queue_that_vanished_is_left_out() -> None:
    progress = check_progress(StreamOffset({A0: 0, QueueKey("c", 1): 4}), BOUNDS, {})
    assert QueueKey("c", 1) not in progress.begins
    assert [(str(loss.queue), loss.count) for loss in progress.losses] == [("c/1", 0)]
    assert "no such queue any more" in progress.losses[0].why


def test_a_queue_that_the_query_does_not_subscribe_to_any_more_is_no_loss_but_is_left_out() -> None:
    gone = QueueKey("c", 1)
    progress = check_progress(StreamOffset({gone: 4}), BOUNDS, {}, {gone})
    assert progress.losses == []
    assert gone not in progress.begins


def test_an_error_about_a_checkpoint_names_a_few_topics_and_queues() -> None:
    refuse_unsubscribed((), "x")
    queues = [QueueKey(f"t{topic}", queue_id) for topic in range(7) for queue_id in range(20)]
    with pytest.raises(OptionError) as caught:
        refuse_unsubscribed(queues, 'subscribe="orders"')
    said = str(caught.value)
    assert "t0 (queues 0, 1, 2, 3, 4, 5, 6, 7 …)" in said
    assert "and 2 more topics" in said
    assert "t5" not in said


def test_losses_are_refused_with_the_largest_and_how_many_more() -> None:
    refuse_losses([])
    with pytest.raises(DataLossError, match="and 1 more queues") as caught:
        refuse_losses([Loss(A0, 0, 3, "why"), Loss(A1, 0, 5, "why")])
    assert (caught.value.topic, caught.value.queue_id, caught.value.begin, caught.value.end) == ("a", 1, 0, 5)
    assert "5 messages, queue offsets [0, 5)" in str(caught.value)


def never(*_):
    raise AssertionError("bytes were asked for without a limit of bytes")


def plan(before, bounds, targets=None, **limits):
    progress = check_progress(before, bounds, {})
    if targets is None:
        targets = {queue: there.max_offset for queue, there in bounds.items()}
    return plan_batch(before, progress, targets, Limits(**limits), never, never)


def test_a_batch_ends_at_the_targets() -> None:
    after = plan(StreamOffset({A0: 3, A1: 6}), BOUNDS)
    assert after.positions == {A0: 10, A1: 20, B0: 7}
    assert after.starts == {}, "a queue without rows begins at its own position"


def test_where_a_new_queue_began_is_kept_only_if_it_has_rows() -> None:
    after = plan(StreamOffset({A0: 3}), BOUNDS, {A0: 10, A1: 20, B0: 7})
    assert after.starts == {A1: 5}
    assert ranges_between(StreamOffset({A0: 3}), after) == [QueueRange(A0, 3, 10), QueueRange(A1, 5, 20)]
    waits = plan(StreamOffset({A0: 3}), BOUNDS, max_offsets=1)  # A1 and B0 have no turn
    assert waits.positions[A1] == 5
    assert waits.starts == {}


def test_a_queue_without_target_or_with_one_behind_stays() -> None:
    after = plan(StreamOffset({A0: 3, A1: 6, B0: 7}), BOUNDS, {A0: 2})
    assert after.positions == {A0: 3, A1: 6, B0: 7}


def test_losses_are_counted_on_and_on() -> None:
    before = StreamOffset({A0: 3, A1: 2, B0: 7}, lost={A1: 10, QueueKey("z", 0): 1})
    assert plan(before, BOUNDS).lost == {A1: 13, QueueKey("z", 0): 1}


def test_what_did_not_move_is_the_same_whatever_its_starts_and_turn() -> None:
    before = StreamOffset({A0: 10}, starts={A0: 0}, turn=A0)
    assert is_same(before, StreamOffset({A0: 10}))
    assert not is_same(before, StreamOffset({A0: 11}))
    assert not is_same(before, StreamOffset({A0: 10}, lost={A0: 1}))
    assert not is_same(before, StreamOffset({A0: 10}, ending=True))
    assert not is_same(StreamOffset({}), StreamOffset({}, starts={}))  # the initial offset is never repeated
    assert is_same(StreamOffset({}, starts={}), StreamOffset({}, starts={}))


def test_a_batch_reads_from_one_offset_to_the_next() -> None:
    before = StreamOffset({A0: 3, B0: 9})
    after = StreamOffset({A0: 10, A1: 20, B0: 7}, starts={A1: 5})
    assert ranges_between(before, after) == [QueueRange(A0, 3, 10), QueueRange(A1, 5, 20)]


def test_a_queue_that_neither_offset_gives_a_start_is_not_read() -> None:
    assert ranges_between(StreamOffset({}), StreamOffset({A0: 10})) == []


@pytest.mark.parametrize(
    ("begin", "end", "kept", "lost"),
    [
        (5, 20, (5, 20), []),
        (3, 9, (5, 9), [(3, 5)]),
        (1, 4, None, [(1, 4)]),
        (15, 25, (15, 20), [(20, 25)]),
        (22, 25, None, [(22, 25)]),
        (1, 30, (5, 20), [(1, 5), (20, 30)]),
    ],
)
def test_a_range_is_clipped_to_what_is_there(begin, end, kept, lost) -> None:
    ranges, losses = clip_ranges([QueueRange(A1, begin, end)], BOUNDS)
    assert ranges == ([QueueRange(A1, *kept)] if kept else [])
    assert [(loss.begin, loss.end) for loss in losses] == lost


def test_a_range_of_a_queue_that_vanished_is_all_lost() -> None:
    gone = QueueKey("c", 0)
    assert clip_ranges([QueueRange(gone, 1, 4)], BOUNDS)[1][0].count == 3


@usual
@given(
    st.dictionaries(st.sampled_from([A0, A1, B0]), st.integers(0, 30)),
    st.dictionaries(st.sampled_from([A0, A1, B0]), st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1),
    st.none() | st.integers(1, 40),
)
def test_batch_after_batch_reads_each_message_that_is_there_once(positions, spans, limit) -> None:
    """From any offset to idle: the ranges of all batches join without gap or overlap, and it ends."""
    bounds = {queue: QueueBounds(min(span), max(span)) for queue, span in sorted(spans.items())}
    before = StreamOffset(positions, starts={})
    read = {queue: [] for queue in bounds}
    first = check_progress(before, bounds, {}).begins
    for _ in range(200):
        after = plan(before, bounds, max_offsets=limit)
        if is_same(before, after):
            break
        kept, losses = clip_ranges(ranges_between(before, after), bounds)
        assert all(loss.begin < bounds[loss.queue].min_offset for loss in losses)
        assert limit is None or sum(part.count for part in kept) <= limit
        for part in kept:
            read[part.queue] += range(part.begin, part.end)
        before = after
    else:
        pytest.fail("does not come to rest")
    for queue, there in bounds.items():
        assert read[queue] == list(range(first[queue], there.max_offset))


def test_new_messages_are_counted_up_to_the_targets() -> None:
    progress = check_progress(StreamOffset({A0: 3}), BOUNDS, {})
    assert count_new(progress, {A0: 10, A1: 4}) == 7
