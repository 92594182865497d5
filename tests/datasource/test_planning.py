"""planning: start offsets, end offsets and losses from bounds of queues."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.options.option_parsers import EARLIEST, LATEST, Positions
from rmq_spark.datasource.options.read_options import Limits
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.plan.planning import (
    Loss,
    check_progress,
    clip_ranges,
    count_new,
    is_same,
    plan_batch,
    ranges_between,
    require_no_losses,
    require_subscribed,
    resolve_positions,
)
from rmq_spark.store.errors import DataLossError, NotFoundError, OffsetRangeError, OptionError
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange

# No deadline, as the machine may be busy. The same examples every time.
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
def test_resolve_positions_prefers_a_queue_to_the_word_and_the_word_to_the_default(wanted, default, positions) -> None:
    assert resolve(wanted, default=default) == (dict(zip((A0, A1, B0), positions, strict=True)), [])


def test_resolve_positions_prefers_a_time_to_the_word() -> None:
    assert resolve(Positions(EARLIEST), {A1: 9})[0] == {A0: 0, A1: 9, B0: 7}


def test_resolve_positions_reports_an_expired_offset_as_a_loss_and_takes_the_minimum() -> None:
    positions, losses = resolve(Positions(None, {A1: 2}))
    assert positions[A1] == 5
    assert [(loss.queue, loss.begin, loss.end) for loss in losses] == [(A1, 2, 5)]


def test_resolve_positions_refuses_an_offset_beyond_the_end_unless_it_clips() -> None:
    with pytest.raises(OffsetRangeError, match=r"queue offsets \[0, 10\), not offset 11\.\n") as caught:
        resolve(Positions(None, {A0: 11}))
    assert "The offset is from startingOffsets" in caught.value.__notes__[0]
    assert "failOnDataLoss=false" in caught.value.__notes__[0]
    assert resolve(Positions(None, {A0: 11}), clip=True) == ({A0: 10, A1: 20, B0: 7}, [])


def test_resolve_positions_refuses_a_missing_queue_and_lists_the_others() -> None:
    with pytest.raises(NotFoundError, match=r'the queue a/7 is not in the store.*Queues of topic "a": 0, 1\.'):
        resolve(Positions(None, {QueueKey("a", 7): 1}))
    with pytest.raises(NotFoundError, match='The topic "c" does not exist'):
        resolve(Positions(None, {QueueKey("c", 7): 1}))


def test_check_progress_resumes_known_queues_and_begins_new_ones_at_their_minimum() -> None:
    progress = check_progress(StreamOffset({A0: 3}), BOUNDS, {})
    assert progress.begins == {A0: 3, A1: 5, B0: 7}
    assert progress.starts == {A1: 5, B0: 7}
    assert progress.losses == []


def test_check_progress_begins_the_first_batch_at_the_resolved_starts() -> None:
    progress = check_progress(StreamOffset({}), BOUNDS, {A0: 10, A1: 12})
    assert progress.begins == progress.starts == {A0: 10, A1: 12, B0: 7}


def test_check_progress_reports_expired_messages_as_a_loss() -> None:
    progress = check_progress(StreamOffset({A0: 3, A1: 2, B0: 7}), BOUNDS, {})
    assert progress.begins[A1] == 5
    assert [(loss.queue, loss.begin, loss.end) for loss in progress.losses] == [(A1, 2, 5)]
    assert "now begins at 5" in progress.losses[0].why


def test_check_progress_resumes_at_the_end_of_a_truncated_queue() -> None:
    progress = check_progress(StreamOffset({A0: 15, A1: 6, B0: 7}), BOUNDS, {})
    assert progress.begins[A0] == 10
    assert [(loss.queue, loss.begin, loss.end) for loss in progress.losses] == [(A0, 10, 15)]
    assert "ends at 10" in progress.losses[0].why


def test_check_progress_omits_a_queue_that_vanished() -> None:
    progress = check_progress(StreamOffset({A0: 0, QueueKey("c", 1): 4}), BOUNDS, {})
    assert QueueKey("c", 1) not in progress.begins
    assert [(str(loss.queue), loss.count) for loss in progress.losses] == [("c/1", 0)]
    assert "the queue does not exist any more" in progress.losses[0].why


def test_check_progress_omits_an_unsubscribed_queue_without_a_loss() -> None:
    gone = QueueKey("c", 1)
    progress = check_progress(StreamOffset({gone: 4}), BOUNDS, {}, {gone})
    assert progress.losses == []
    assert gone not in progress.begins


def test_require_subscribed_names_a_few_topics_and_queues() -> None:
    require_subscribed((), "x")
    queues = [QueueKey(f"t{topic}", queue_id) for topic in range(7) for queue_id in range(20)]
    with pytest.raises(OptionError) as caught:
        require_subscribed(queues, 'subscribe="orders"')
    message = str(caught.value)
    assert "t0 (queues 0, 1, 2, 3, 4, 5, 6, 7 …)" in message
    assert "and 2 more topics" in message
    assert "t5" not in message


def test_require_no_losses_names_the_largest_and_counts_the_others() -> None:
    require_no_losses([])
    with pytest.raises(DataLossError, match="and 1 more queues") as caught:
        require_no_losses([Loss(A0, 0, 3, "why"), Loss(A1, 0, 5, "why")])
    assert (caught.value.topic, caught.value.queue_id, caught.value.begin, caught.value.end) == ("a", 1, 0, 5)
    assert "5 messages, queue offsets [0, 5)" in str(caught.value)


def never(*_):
    raise AssertionError("bytes were asked for without a limit of bytes")


def plan(before, bounds, targets=None, **limits):
    progress = check_progress(before, bounds, {})
    if targets is None:
        targets = {queue: there.max_offset for queue, there in bounds.items()}
    return plan_batch(before, progress, targets, Limits(**limits), None)


def test_plan_batch_ends_at_the_targets() -> None:
    after = plan(StreamOffset({A0: 3, A1: 6}), BOUNDS)
    assert after.positions == {A0: 10, A1: 20, B0: 7}
    assert after.starts == {}, "a queue without rows begins at its own position"


def test_plan_batch_keeps_the_start_of_a_new_queue_only_if_it_has_rows() -> None:
    after = plan(StreamOffset({A0: 3}), BOUNDS, {A0: 10, A1: 20, B0: 7})
    assert after.starts == {A1: 5}
    assert ranges_between(StreamOffset({A0: 3}), after) == [QueueRange(A0, 3, 10), QueueRange(A1, 5, 20)]
    waits = plan(StreamOffset({A0: 3}), BOUNDS, max_offsets=1)  # A1 and B0 are not served
    assert waits.positions[A1] == 5
    assert waits.starts == {}


def test_plan_batch_does_not_move_a_queue_without_a_target_ahead() -> None:
    after = plan(StreamOffset({A0: 3, A1: 6, B0: 7}), BOUNDS, {A0: 2})
    assert after.positions == {A0: 3, A1: 6, B0: 7}


def test_plan_batch_adds_to_the_counted_losses() -> None:
    before = StreamOffset({A0: 3, A1: 2, B0: 7}, lost={A1: 10, QueueKey("z", 0): 1})
    assert plan(before, BOUNDS).lost == {A1: 13, QueueKey("z", 0): 1}


def test_is_same_ignores_starts_and_cursor() -> None:
    before = StreamOffset({A0: 10}, starts={A0: 0}, cursor=A0)
    assert is_same(before, StreamOffset({A0: 10}))
    assert not is_same(before, StreamOffset({A0: 11}))
    assert not is_same(before, StreamOffset({A0: 10}, lost={A0: 1}))
    assert not is_same(before, StreamOffset({A0: 10}, ending=True))
    assert not is_same(StreamOffset({}), StreamOffset({}, starts={}))  # the initial offset is never repeated
    assert is_same(StreamOffset({}, starts={}), StreamOffset({}, starts={}))


def test_ranges_between_are_those_from_one_offset_to_the_next() -> None:
    before = StreamOffset({A0: 3, B0: 9})
    after = StreamOffset({A0: 10, A1: 20, B0: 7}, starts={A1: 5})
    assert ranges_between(before, after) == [QueueRange(A0, 3, 10), QueueRange(A1, 5, 20)]


def test_ranges_between_omits_a_queue_without_a_start() -> None:
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
def test_clip_ranges_clips_to_the_bounds(begin, end, kept, lost) -> None:
    ranges, losses = clip_ranges([QueueRange(A1, begin, end)], BOUNDS)
    assert ranges == ([QueueRange(A1, *kept)] if kept else [])
    assert [(loss.begin, loss.end) for loss in losses] == lost


def test_clip_ranges_reports_all_of_a_vanished_queue_as_lost() -> None:
    gone = QueueKey("c", 0)
    assert clip_ranges([QueueRange(gone, 1, 4)], BOUNDS)[1][0].count == 3


@usual
@given(
    st.dictionaries(st.sampled_from([A0, A1, B0]), st.integers(0, 30)),
    st.dictionaries(st.sampled_from([A0, A1, B0]), st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1),
    st.none() | st.integers(1, 40),
)
def test_plan_batch_and_clip_ranges_read_each_available_message_once(positions, spans, limit) -> None:
    """From any offset until idle, the ranges of all batches join without gap or overlap."""
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
        pytest.fail("is not idle after 200 batches")
    for queue, there in bounds.items():
        assert read[queue] == list(range(first[queue], there.max_offset))


def test_count_new_counts_up_to_the_targets() -> None:
    progress = check_progress(StreamOffset({A0: 3}), BOUNDS, {})
    assert count_new(progress, {A0: 10, A1: 4}) == 7
