"""Threads of listener calls: side by side, bounded, ended with their task, and calls that take too long."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from rmq_spark.datasource.spark.call_counts import CallCounts
from rmq_spark.datasource.spark.call_threads import CallThreads, ThreadStack
from rmq_spark.datasource.spark.call_window import Call, CallWindow
from rmq_spark.datasource.spark.listener import (
    CONCURRENTLY,
    ORDERLY,
    TIMEOUT_LEVEL,
    Caller,
    ConsumeContext,
    Failure,
    ListenerTerms,
    Message,
    QueueOutcome,
)
from rmq_spark.datasource.spark.listener_calls import ConcurrentRules, ListenerCalls
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey

DONE = "CONSUME_SUCCESS"
WITHIN_S = 60  # ends a test that hangs
QUEUES = [QueueKey("orders", number) for number in range(4)]
Listen = Callable[[int], object]


class Row(NamedTuple):
    offset: int


class Task:
    """The calls of one task, each with one row, and a count of those that run."""

    def __init__(
        self,
        listen: Listen,
        threads: int = 4,
        *,
        most_rows: int = 100,
        timeout_s: float | None = None,
        stack: ThreadStack | None = None,
        hung_s: float = 900,
    ) -> None:
        self._listen, self._lock = listen, threading.Lock()
        self.running = self.most = self.begun = self.ended = self.read = 0
        caller = Caller(self._call, ListenerTerms(CONCURRENTLY, timeout_s=timeout_s), Row, time.monotonic)
        self.window = CallWindow(ConcurrentRules(), most_rows, threads, CallCounts(), timeout_s)
        self.stack = stack or ThreadStack()
        self.threads = CallThreads(caller, self.window, "listener", stack=self.stack, hung_s=hung_s)

    def _call(self, rows: list[Row], context: ConsumeContext) -> object:
        with self._lock:
            self.begun += 1
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return self._listen(rows[0].offset)
        finally:
            with self._lock:
                self.running -= 1
                self.ended += 1

    def calls(self, count: int) -> Iterator[Call]:
        for number in range(count):
            self.read += 1
            yield Call([Message((number,), QUEUES[0], number, 0)])

    def run(self, calls: int | Iterable[Call]) -> list[int]:
        """Return the offsets of the rows that failed."""
        given = self.calls(calls) if isinstance(calls, int) else calls
        return [failure.message.offset for failure in self.threads.failures(given)]


def test_calls_run_side_by_side() -> None:
    together = threading.Barrier(4)

    def listen(offset: int) -> str:
        together.wait(WITHIN_S)  # raises unless four calls are here at the same time
        return DONE

    task = Task(listen)
    assert task.run(8) == []
    assert task.window.counts.calls == 8


def test_no_more_calls_run_than_there_are_threads_and_all_are_made() -> None:
    def listen(offset: int) -> str | None:
        time.sleep(0.001)
        return None if offset % 7 == 3 else DONE

    task = Task(listen, 3)
    assert task.run(100) == list(range(3, 100, 7))
    assert (task.most <= 3, task.ended, task.running) == (True, 100, 0)


def test_rows_are_read_only_as_far_as_there_is_room() -> None:
    is_full = threading.Event()

    def listen(offset: int) -> str:
        assert is_full.wait(WITHIN_S)
        return DONE

    task = Task(listen, most_rows=10)

    def calls() -> Iterator[Call]:
        for one in task.calls(50):
            assert task.read <= task.ended + 11
            if task.read == 10:
                is_full.set()
            yield one

    assert task.run(calls()) == []
    assert (task.read, task.ended) == (50, 50)


def test_without_rows_there_is_no_thread() -> None:
    task = Task(lambda offset: DONE)
    assert task.run(0) == []
    assert task.stack._idle == []


def lingering(has_begun: threading.Event) -> Listen:
    """Return a listener whose first call returns nonsense when the second one has begun, and the second one lingers."""

    def listen(offset: int) -> str:
        if offset == 0:
            assert has_begun.wait(WITHIN_S)
            return "nonsense"
        if offset == 1:
            has_begun.set()
            time.sleep(0.2)
        return DONE

    return listen


def test_after_a_wrong_answer_no_call_begins_and_those_that_run_are_waited_for() -> None:
    task = Task(lingering(threading.Event()), 2)
    with pytest.raises(OptionError, match="the listener returned 'nonsense'"):
        task.run(1000)
    assert (task.running, task.begun, task.ended) == (0, 2, 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_what_ends_the_task_is_raised_in_the_tasks_own_thread(error: type[BaseException]) -> None:
    def listen(offset: int) -> str:
        if offset == 3:
            raise error
        return DONE

    with pytest.raises(error):
        Task(listen).run(1000)


def test_an_error_of_the_rows_waits_for_the_calls_that_run() -> None:
    has_begun = threading.Event()
    task = Task(lambda offset: has_begun.set() or time.sleep(0.2) or DONE)

    def calls() -> Iterator[Call]:
        yield from task.calls(1)
        assert has_begun.wait(WITHIN_S)
        raise OSError("no more rows")

    with pytest.raises(OSError, match="no more rows"):
        task.run(calls())
    assert (task.begun, task.running) == (1, 0)


def test_calls_end_before_the_failures_are_closed() -> None:
    has_begun = threading.Event()

    def listen(offset: int) -> str | None:
        if offset == 0:
            assert has_begun.wait(WITHIN_S)
            return None
        has_begun.set()
        time.sleep(0.2)
        return DONE

    task = Task(listen, 2, most_rows=1)
    failures: Any = task.threads.failures(task.calls(1000))
    with closing(failures):
        assert next(failures).message.offset == 0
    assert task.running == 0
    begun = task.begun
    time.sleep(0.01)
    assert task.begun == begun


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_a_call_that_takes_too_long_fails_and_is_not_waited_for_and_keeps_its_thread_until_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_return = threading.Event()

    def listen(offset: int) -> str:
        if offset == 1:
            assert may_return.wait(WITHIN_S)
        return DONE

    stack = ThreadStack()
    task = Task(listen, 2, timeout_s=0.1, stack=stack)
    [failure] = task.threads.failures(task.calls(20))
    assert (failure.message.offset, failure.delay_level) == (1, TIMEOUT_LEVEL)
    assert "has not ended, and timeout=0.1" in failure.error
    line = "for orders/0, queue offset 1 takes longer than timeout=0.1: its rows have failed"
    until(lambda: line in caplog.text)
    assert (task.window.counts.calls, task.window.counts.timed_out_calls, task.ended) == (20, 1, 19)
    next_batch = Task(lambda offset: time.sleep(0.001) or DONE, 2, stack=stack)
    next_batch.run(10)
    assert (next_batch.most, next_batch.ended) == (1, 10), "the other thread is not free"
    may_return.set()
    until(lambda: stack.kept("listener") == 0)
    assert task.ended == 20
    together = threading.Barrier(2)
    assert Task(lambda offset: (together.wait(WITHIN_S) and None) or DONE, 2, stack=stack).run(2) == []


def test_a_call_is_given_up_when_it_is_due_also_while_the_task_waits_for_rows() -> None:
    may_return, stack = threading.Event(), ThreadStack()
    task = Task(lambda offset: may_return.wait(WITHIN_S) and DONE, 2, timeout_s=0.01, stack=stack)

    def calls() -> Iterator[Call]:
        yield from task.calls(1)
        until(lambda: stack.kept("listener") == 1)  # as a source without new rows

    assert task.run(calls()) == [0]
    may_return.set()


def test_a_call_is_given_up_when_it_is_due_also_while_the_failures_are_not_taken() -> None:
    may_return, stack = threading.Event(), ThreadStack()
    task = Task(
        lambda offset: None if offset == 0 else may_return.wait(WITHIN_S) and DONE,
        2,
        most_rows=1,
        timeout_s=0.01,
        stack=stack,
    )
    failures: Any = task.threads.failures(task.calls(3))
    with closing(failures):
        assert next(failures).message.offset == 0
        until(lambda: stack.kept("listener") >= 1)
        assert next(failures).message.offset == 1
    may_return.set()


def test_a_task_that_waits_for_rows_fails_when_calls_keep_all_threads() -> None:
    may_return, stack = threading.Event(), ThreadStack()
    task = Task(lambda offset: may_return.wait(WITHIN_S) and DONE, 1, timeout_s=0.01, stack=stack, hung_s=0.05)

    def calls() -> Iterator[Call]:
        yield from task.calls(2)
        until(lambda: task.window.error is not None)
        yield from task.calls(1)

    with pytest.raises(OptionError, match=r"no free thread for 0\.05 s: found 1 call that ran longer than"):
        task.run(calls())
    may_return.set()


class Handler(logging.Handler):
    """A handler of the log that hangs until `may_end`. `was_left_alone` is whether it gave up waiting for that."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end, self.was_left_alone = threading.Event(), threading.Event(), False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_begun.set()
        self.was_left_alone = self.was_left_alone or not self.may_end.wait(WITHIN_S)


@pytest.fixture
def handler() -> Iterator[Handler]:
    made, root = Handler(), logging.getLogger()
    root.addHandler(made)
    yield made
    made.may_end.set()
    root.removeHandler(made)


def test_a_log_that_hangs_holds_up_no_calls_and_no_call_that_ended_in_time_is_given_up(handler: Handler) -> None:
    may_return = threading.Event()

    task = Task(lambda offset: (offset > 0 or may_return.wait(WITHIN_S)) and DONE, 4, timeout_s=0.5)

    def calls() -> Iterator[Call]:
        for one in task.calls(50):
            yield one
            assert handler.has_begun.wait(WITHIN_S)

    assert task.run(calls()) == [0]
    assert task.window.counts.timed_out_calls == 1
    assert not handler.was_left_alone
    may_return.set()


def test_a_call_that_hangs_in_a_handler_of_the_log_is_given_up(handler: Handler) -> None:
    def listen(offset: int) -> str:
        if offset == 0:
            logging.getLogger("application").error("hangs")
        return DONE

    task = Task(listen, timeout_s=0.5)
    assert task.run(100) == [0]
    assert not handler.was_left_alone


def test_an_answer_that_could_not_be_noted_yet_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the call has ended it, and waits for the lock, when the watcher looks."""
    has_ended, may_note, looked_s = threading.Event(), threading.Event(), [0.0]
    task = Task(lambda offset: DONE, 2, timeout_s=0.5)
    note, late = task.threads._next, task.window.late
    monkeypatch.setattr(task.window, "late", lambda now_s: looked_s.append(now_s) or late(now_s))

    def late_next(*ended: Any) -> Any:
        if ended and ended[0].number == 0:
            has_ended.set()
            assert may_note.wait(WITHIN_S)
        return note(*ended)

    monkeypatch.setattr(task.threads, "_next", late_next)

    def calls() -> Iterator[Call]:
        yield from task.calls(1)
        assert has_ended.wait(WITHIN_S)
        [ended] = task.window._running.values()
        until(lambda: ended.begin_s + 0.5 < looked_s[-1])
        may_note.set()

    assert task.run(calls()) == []
    assert task.window.counts.timed_out_calls == 0


def test_an_error_is_logged_while_the_task_waits_for_calls_that_run(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def listen(offset: int) -> str:
        if offset == 0:
            until(lambda: "a listener fails when 1 call of it ended or timed out: OptionError(" in caplog.text)
            seen.append(offset)
        else:
            until(lambda: task.begun == 2)
        return DONE if offset == 0 else "nonsense"

    task = Task(listen, 2)
    with pytest.raises(OptionError, match="the listener returned 'nonsense'"):
        task.run(2)
    assert seen == [0]


def test_a_thread_without_work_ends_and_the_next_task_has_new_ones() -> None:
    stack, together = ThreadStack(idle_s=0.01), threading.Barrier(4)
    before = set(threading.enumerate())
    assert Task(lambda offset: (together.wait(WITHIN_S) and None) or DONE, stack=stack).run(4) == []
    until(lambda: stack._idle == [] and set(threading.enumerate()) <= before)
    assert Task(lambda offset: DONE, stack=stack).run(100) == []


def test_work_that_comes_just_when_a_thread_ends_is_done() -> None:
    stack, done = ThreadStack(idle_s=0.0005), list[int]()
    for number in range(200):
        stack.run(functools.partial(done.append, number))
        until(lambda: len(done) == number + 1)  # noqa: B023  called at once
    assert done == list(range(200))


def test_when_a_call_that_was_given_up_returns_a_task_that_waits_for_a_thread_goes_on() -> None:
    may_return, stack = threading.Event(), ThreadStack()
    assert Task(lambda offset: may_return.wait(WITHIN_S) and DONE, 1, timeout_s=0.01, stack=stack).run(1) == [0]
    assert stack.kept("listener") == 1

    def calls(task: Task) -> Iterator[Call]:
        yield from task.calls(2)
        may_return.set()

    second = Task(lambda offset: DONE, 1, stack=stack)
    assert second.run(calls(second)) == []
    assert second.ended == 2


def test_when_calls_that_do_not_return_keep_all_threads_the_task_fails() -> None:
    may_return, stack = threading.Event(), ThreadStack()
    task = Task(lambda offset: may_return.wait(WITHIN_S) and DONE, 2, timeout_s=0.01, stack=stack, hung_s=0.05)
    with pytest.raises(OptionError, match=r"no free thread for 0\.05 s: found 2 calls that ran longer than timeout=0"):
        task.run(3)
    assert task.begun == 2
    may_return.set()
    until(lambda: stack.kept("listener") == 0)


def test_the_next_task_gets_the_thread_that_worked_last() -> None:
    stack, together, seen = ThreadStack(), threading.Barrier(3), list[int]()
    Task(lambda offset: (together.wait(WITHIN_S) and None) or DONE, stack=stack).run(3)
    for _ in range(5):
        until(lambda: len(stack._idle) == 3)
        Task(lambda offset: seen.append(threading.get_ident()) or DONE, stack=stack).run(1)
    assert len(set(seen)) == 1


def test_a_thread_that_a_fork_did_not_copy_gets_no_work() -> None:
    stack = ThreadStack()
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    stack._idle.append((dead, SimpleQueue()))
    task = Task(lambda offset: DONE, stack=stack)
    assert task.run(3) == []
    assert task.ended == 3


class ShortStack(ThreadStack):
    """No more than `count` threads can start."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def run(self, work: Callable[[], None]) -> None:
        if not self.left:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        super().run(work)


def test_where_fewer_threads_can_start_they_make_all_calls(caplog: pytest.LogCaptureFixture) -> None:
    task = Task(lambda offset: time.sleep(0.001) or DONE, stack=ShortStack(2))
    assert task.run(20) == []
    assert (task.ended, task.most <= 2) == (20, True)
    line = "the listener has 2 threads, and no more can start: can't start new thread"
    until(lambda: line in caplog.text)
    assert caplog.text.count(line) == 1


def test_where_no_thread_can_start_the_task_fails() -> None:
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Task(lambda offset: DONE, stack=ShortStack(0)).run(3)


def test_an_error_in_judging_an_answer_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: ConcurrentRules, call: Call, answer: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(ConcurrentRules, "judge", judge)
    task = Task(lambda offset: DONE)
    with pytest.raises(ZeroDivisionError):
        task.run(20)
    assert task.running == 0


def messages(count: int) -> list[Message]:
    """Return messages of all queues, queue after queue."""
    return [Message((number,), queue, number, 0) for queue in QUEUES for number in range(count)]


@pytest.mark.parametrize("threads", [2, 20])
def test_in_order_queues_run_side_by_side_and_a_queue_has_one_call_at_a_time(threads: int) -> None:
    together = threading.Barrier(2)
    lock, running, most, seen = threading.Lock(), set[int](), 0, list[tuple[int, int]]()

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        nonlocal most
        with lock:
            assert context.queue_id not in running
            running.add(context.queue_id)
            most = max(most, len(running))
            seen.append((context.queue_id, rows[0].offset))
        if rows[0].offset == 0:
            together.wait(WITHIN_S)
        time.sleep(0.0005)
        with lock:
            running.remove(context.queue_id)
        return "SUCCESS"

    terms = ListenerTerms(ORDERLY, max_reconsume_times=-1, threads=threads)
    calls = ListenerCalls(Caller(listen, terms, Row, time.monotonic), terms)
    assert list(calls.orderly(messages(20), {}, 0)) == []
    for queue in QUEUES:
        assert [offset for queue_id, offset in seen if queue_id == queue.queue_id] == list(range(20))
    assert 2 <= most <= threads


def test_in_order_a_call_that_takes_too_long_fails_when_it_returns() -> None:
    seen = []

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        if context.queue_id == 1:
            time.sleep(0.2)
        seen.append(context.queue_id)
        return "SUCCESS"

    terms = ListenerTerms(ORDERLY, max_reconsume_times=-1, timeout_s=0.1, threads=4)
    [outcome] = ListenerCalls(Caller(listen, terms, Row, time.monotonic), terms).orderly(messages(1), {}, 0)
    assert isinstance(outcome, QueueOutcome)
    assert (outcome.queue.queue_id, outcome.resume, outcome.error[:8]) == (1, 0, "it took ")
    assert sorted(seen) == [0, 1, 2, 3], "it is waited for"


@pytest.mark.parametrize("model", [CONCURRENTLY, ORDERLY])
def test_the_result_is_the_same_with_any_number_of_threads(model: str) -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> str | None:
        time.sleep((rows[0].offset * 7 + context.queue_id * 3) % 5 / 5000)
        if (rows[0].offset + context.queue_id) % 6 == 4:
            return None
        return "SUCCESS" if model == ORDERLY else DONE

    results = []
    for threads in (1, 3, 20):
        terms = ListenerTerms(model, 2, max_reconsume_times=0 if model == ORDERLY else 16, threads=threads)
        calls = ListenerCalls(Caller(listen, terms, Row, time.monotonic), terms)
        given = messages(24)
        found = calls.orderly(given, {}, 0) if model == ORDERLY else calls.concurrently(given)
        results.append(
            (
                [(str(one.message.queue), one.message.offset) for one in found if isinstance(one, Failure)]
                if model == CONCURRENTLY
                else [
                    one if isinstance(one, QueueOutcome) else (str(one.message.queue), one.message.offset)
                    for one in found
                ],
                calls.counts.rows,
                calls.counts.calls,
                calls.counts.failed_rows,
            )
        )
    assert results[0] == results[1] == results[2]
    assert results[0][0]
