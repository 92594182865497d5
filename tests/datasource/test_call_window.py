"""The window of a task's calls: their order, limits and results, without threads and with a fake clock."""

from collections.abc import Sequence
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.datasource.spark.call_counts import CallCounts
from rmq_spark.datasource.spark.call_window import Call, CallWindow
from rmq_spark.datasource.spark.listener import (
    ORDERLY,
    TIMEOUT_LEVEL,
    Answer,
    Failure,
    History,
    ListenerTerms,
    Message,
    QueueOutcome,
)
from rmq_spark.datasource.spark.orderly_queues import OrderlyQueues
from rmq_spark.store.model import QueueKey

ONE, OTHER = QueueKey("orders", 0), QueueKey("orders", 1)
DONE, FAILED = Answer(1), Answer(0, error="E")


class Rules:
    """All rows of a failed call have failed; a queue in `skipped` gets no more calls."""

    def __init__(self) -> None:
        self.skipped: set[QueueKey] = set()

    def without_call(self, call: Call) -> Sequence[Failure] | None:
        return () if call.queue in self.skipped else None

    def judge(self, call: Call, answer: Answer) -> Sequence[Failure]:
        if answer.done < len(call.messages) and call.queue is not None:
            self.skipped.add(call.queue)
        return [Failure(message, answer.delay_level, answer.error) for message in call.messages[answer.done :]]


def call(offset: int, rows: int = 1, queue: QueueKey | None = None, size_bytes: int = 0) -> Call:
    numbers = range(offset, offset + rows)
    return Call([Message((), queue or ONE, number, 0, None, size_bytes) for number in numbers], queue)


def window_of(*calls: Call, most_rows: int = 100, threads: int = 4, **given: float) -> CallWindow:
    window = CallWindow(Rules(), most_rows, threads, CallCounts(), **given)  # type: ignore[arg-type]
    for one in calls:
        window.add(one)
    return window


def take_all(window: CallWindow, now_s: float = 0.0) -> list[Call]:
    found = []
    while (one := window.take(now_s)) is not None:
        found.append(one)
    return found


def give_up(window: CallWindow, now_s: float) -> list[Call]:
    late = window.late(now_s)
    for one in late:
        window.give_up(one, now_s)
    return late


def out(window: CallWindow) -> list[int]:
    return [failure.message.offset for failure in window.pop()]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_failures_come_in_the_order_of_the_calls_whichever_ended_first(order: Sequence[int]) -> None:
    window = window_of(*(call(number) for number in range(4)))
    calls = take_all(window)
    assert [one.number for one in calls] == [0, 1, 2, 3]
    found = []
    for number in order:
        window.finish(calls[number], DONE if number == 2 else FAILED)
        found += out(window)
        assert found == sorted(found)
    assert found == [0, 1, 3]
    assert window.is_empty


@pytest.mark.parametrize("order", list(permutations([1, 2, 3])))
def test_the_error_of_the_first_call_counts_and_no_call_begins_after_one(order: Sequence[int]) -> None:
    window = window_of(*(call(number) for number in range(5)))
    calls = [window.take(0.0) for _ in range(4)]
    for number in order:
        window.fail(calls[number], ValueError(number))  # type: ignore[arg-type]
        assert (window.take(0.0), window.ready) == (None, 0)
    assert str(window.error) == "1"
    window.stop(OSError())
    assert str(window.error) == "1", "the error of a call comes first"


def test_calls_of_a_queue_in_order_begin_one_after_the_other_and_those_of_others_meanwhile() -> None:
    window = window_of(call(0, queue=ONE), call(1, queue=ONE), call(0, queue=OTHER), call(2, queue=ONE))
    first, other = take_all(window)
    assert (first.number, other.number) == (0, 2)
    window.finish(first, DONE)
    [second] = take_all(window)
    assert second.number == 1
    window.finish(other, DONE)
    assert window.take(0.0) is None
    window.finish(second, FAILED)
    assert window.is_empty, "the queue is suspended, so its last call is not made"
    assert out(window) == [1]
    window.add(call(3, queue=ONE))
    window.add(call(1, queue=OTHER))
    assert [one.queue for one in take_all(window)] == [OTHER]


def test_there_is_room_for_as_many_rows_as_given_or_for_a_call_of_each_thread() -> None:
    window = window_of(call(0, 5), call(5, 5), most_rows=10, threads=2)
    assert (window.has_room, window.is_half_empty) == (False, False)
    window.finish(window.take(0.0), DONE)  # type: ignore[arg-type]
    assert window.has_room
    window = window_of(call(0, 50), most_rows=10, threads=2)
    assert window.has_room
    window.add(call(50, 50))
    assert not window.has_room


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_that_are_done_behind_a_slow_call_take_no_room_and_those_that_failed_do(threads: int) -> None:
    window = window_of(*(call(number) for number in range(4)), most_rows=4, threads=threads)
    slow, *others = take_all(window)
    for one in others:
        window.finish(one, DONE)
    assert window.has_room
    for number in range(4, 8):
        assert window.has_room == (number < 7 or threads > 1)
        window.add(call(number))
        window.finish(window.take(0.0), FAILED)  # type: ignore[arg-type]
    assert (window.has_room, window.is_half_empty) == (False, False), "four rows wait for the slow call"
    window.finish(slow, DONE)
    assert (window.has_room, window.is_half_empty) == (True, True)
    assert out(window) == [4, 5, 6, 7]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size_bytes", [1, 30])
def test_behind_a_call_that_does_not_end_no_more_is_held_than_the_limits_and_a_call_of_each_thread(
    rows: int, size_bytes: int
) -> None:
    window = window_of(call(0, size_bytes=size_bytes), most_rows=40, threads=4, most_bytes=600)
    window.take(0.0)
    for number in range(1, 1_000):
        if not window.has_room:
            break
        window.add(call(number * rows, rows, size_bytes=size_bytes))
        window.finish(window.take(0.0), FAILED)  # type: ignore[arg-type]
    assert not window.has_room
    read = number * rows
    assert read <= 40 + 4 * rows
    assert read * size_bytes <= 600 + 4 * rows * size_bytes
    assert min(40 - read, 600 - read * size_bytes) <= rows * size_bytes, "there was room for these"


def test_large_rows_that_failed_leave_room_for_a_call_of_each_thread() -> None:
    window = window_of(*(call(number, size_bytes=60) for number in range(4)), most_bytes=100)
    slow, failed, *_ = take_all(window)
    window.finish(failed, FAILED)
    assert window.has_room, "the bytes of calls that run are not those of failures"
    window.add(call(4, size_bytes=60))
    assert not window.has_room
    window.finish(window.take(0.0), DONE)  # type: ignore[arg-type]
    assert not window.has_room, "the failed call and the one after it have more than 100 bytes"
    window.finish(slow, DONE)
    assert window.has_room


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failure_keeps_the_bytes_that_were_read_after_it(threads: int) -> None:
    window = window_of(call(0, size_bytes=1), threads=threads, most_bytes=100)
    slow = window.take(0.0)
    assert slow is not None
    window.add(call(1, size_bytes=10))
    window.finish(window.take(0.0), FAILED)  # type: ignore[arg-type]
    for number in range(2, 12):
        assert window.has_room == (number < 11)
        window.add(call(number, size_bytes=10))
        window.finish(window.take(0.0), DONE)  # type: ignore[arg-type]
    assert not window.has_room
    window.finish(slow, DONE)
    assert window.has_room
    assert out(window) == [1]


def test_large_rows_fill_the_room() -> None:
    window = window_of(call(0, size_bytes=60), threads=1, most_bytes=100)
    assert (window.has_room, window.is_half_empty) == (True, False)
    window.add(call(1, size_bytes=60))
    assert not window.has_room


def test_calls_are_given_up_when_they_have_run_longer_than_the_timeout() -> None:
    window = window_of(*(call(number, 2) for number in range(3)), timeout_s=10.0)
    assert window.deadline_s(90.0) == 100.0, "a call may begin at once"
    first, second = window.take(100.0), window.take(103.0)
    assert first is not None
    assert second is not None
    assert window.deadline_s(105.0) == 110.0
    assert give_up(window, 110.0) == []
    assert give_up(window, 110.5) == [first]
    assert (window.is_running(first), window.is_running(second)) == (False, True)
    assert window.deadline_s(112.0) == 113.0
    text = "it has run for 10.500 s and has not ended, and timeout=10"
    assert [(one.delay_level, one.error) for one in window.pop()] == [(TIMEOUT_LEVEL, text)] * 2
    window.finish(second, Answer(2, took_s=9.0))
    counts = window.counts
    assert (counts.calls, counts.rows, counts.failed_rows, counts.timed_out_calls) == (2, 4, 2, 1)
    assert counts.max_ms == 10_500


def test_a_call_that_has_ended_is_not_given_up_though_its_answer_is_not_noted_yet() -> None:
    window = window_of(*(call(number) for number in range(3)), timeout_s=10.0)
    first, second, third = take_all(window, 100.0)
    first.has_ended = True
    assert give_up(window, 111.0) == [second, third]
    assert window.is_running(first)
    assert window.deadline_s(111.0) == 121.0, "the deadline of a call that has ended means nothing"
    window.finish(first, Answer(1, took_s=9.0))
    assert (window.is_empty, window.counts.timed_out_calls) == (True, 2)


def test_without_a_timeout_no_call_is_given_up() -> None:
    window = window_of(call(0))
    window.take(0.0)
    assert (give_up(window, 1e9), window.deadline_s(1.0)) == ([], None)


def orderly_result(
    messages: Sequence[Message], histories: dict[QueueKey, History], batch_size: int, random: Random, threads: int
) -> tuple[list[tuple[str, int, int | None]], list[QueueOutcome], list[list[int]]]:
    """Return failures, outcomes and the calls of each queue, of calls that end in a random order."""
    terms = ListenerTerms(ORDERLY, batch_size, 2)
    queues = OrderlyQueues(terms, histories, 0)
    window = CallWindow(queues, 7, threads, CallCounts())
    calls, running, failures = queues.calls(messages), [], []
    made: dict[QueueKey, list[int]] = {}
    is_read = False
    while not (is_read and window.is_empty):
        if not is_read and window.has_room and random.random() < 0.5:
            one = next(calls, None)
            is_read = one is None
            if one is not None:
                window.add(one)
        elif len(running) < threads and window.ready:
            taken = window.take(0.0)
            assert taken is not None
            assert taken.queue not in {other.queue for other in running}, "two calls of a queue at the same time"
            assert taken.queue is not None
            made.setdefault(taken.queue, []).append(taken.messages[0].offset)
            running.append(taken)
        elif running:
            ended = running.pop(random.randrange(len(running)))
            # The same answer for the same rows, whatever the order of the calls.
            is_good = Random(f"{ended.queue} {[message.offset for message in ended.messages]}").random() < 0.8
            window.finish(ended, Answer(len(ended.messages)) if is_good else Answer(0, error="E", suspend_ms=9))
        failures += [(str(one.message.queue), one.message.offset, one.copy_times) for one in window.pop()]
    return failures, list(queues.outcomes()), [made[queue] for queue in sorted(made)]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 6))
def test_orderly_calls_side_by_side_leave_what_calls_one_after_the_other_leave(
    seed: int, batch_size: int, threads: int
) -> None:
    random = Random(seed)
    queues = [QueueKey("orders", number) for number in range(random.randrange(1, 5))]
    messages = []
    ends = dict.fromkeys(queues, 0)
    for _ in range(random.randrange(1, 6)):  # runs of a queue's rows, as merged partitions have them
        queue = random.choice(queues)
        for _ in range(random.randrange(1, 8)):
            times = random.choice([0, 0, 2])
            messages.append(Message((times,), queue, ends[queue], times))
            ends[queue] += 1
    some = {queue: frozenset(offset for offset in range(40) if random.random() < 0.1) for queue in queues}
    histories = {
        queue: History(random.randrange(3), {2: 1}, frozenset({0}) & some[queue], some[queue] - {0})
        for queue in queues
        if random.random() < 0.5
    }
    expected = orderly_result(messages, histories, batch_size, random, 1)
    assert orderly_result(messages, histories, batch_size, random, threads) == expected
