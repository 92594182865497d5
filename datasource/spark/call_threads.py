"""Threads that make the calls of a task's listener, like ConsumeMessageConcurrentlyService#consumeExecutor (4.9, 5.3).

- The task's own thread reads rows and takes the failures; it makes no calls. `ThreadStack` has the threads that do.
  They outlive the task, so what a listener keeps for each thread is still there in the next batch.
- A task whose calls may be given up has one more thread, the watcher. It looks when the first call is due, whatever the
  other threads wait for: rows, room, or whoever takes the failures.
- When `failures` ends, in whatever way, no call runs that was not given up, and none begins afterwards.
- A call that was given up runs on. Python cannot end a thread, and RocketMQ does not either. It keeps its thread until
  it returns, also in later batches, so a listener never has more threads in a process than it asked for. If that
  leaves no thread for 15 minutes, the task fails. Spark then ends the process, with these calls.
- A handler of the log may hang, also in a call of the listener. So a line is logged in a thread of its own, or, if none
  can start, in the task's; never under the lock.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue

from rmq_spark.datasource.spark.call_counts import count_text
from rmq_spark.datasource.spark.call_window import Call, CallWindow
from rmq_spark.datasource.spark.listener import Answer, Caller, Failure
from rmq_spark.store.errors import OptionError

_LOG = logging.getLogger("rmq_spark")

HUNG_S = 900.0  # so long a task waits for a thread if calls that were given up keep all of them
_LOOK_S = 1.0  # so often it looks for one
_IDLE_S = 600.0  # so long a thread waits for work before it ends
_Inbox = SimpleQueue[Callable[[], None]]


class ThreadStack:
    """Threads that wait for work. The one that worked last gets the next work. Thread-safe.

    A thread without work for `idle_s` ends. `kept` is the number of threads, for each listener, that calls keep which
    were given up.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[tuple[threading.Thread, _Inbox]] = []
        self._kept: Counter[str] = Counter()

    def run(self, work: Callable[[], None]) -> None:
        """Call `work`, which must not raise, in a thread. Raises RuntimeError if no thread can start."""
        with self._lock:
            inbox = None
            while self._idle and inbox is None:
                thread, found = self._idle.pop()
                inbox = found if thread.is_alive() else None  # a fork copies no other threads
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="rmq listener", daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: _Inbox) -> None:
        me = threading.current_thread(), inbox
        while True:
            try:
                work = inbox.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if me in self._idle:
                        del self._idle[self._idle.index(me)]
                        return
                work = inbox.get()  # `run` has taken this thread just now
            work()
            with self._lock:
                self._idle.append(me)

    def keep(self, listener_id: str, count: int) -> None:
        """Count `count` more threads as kept by calls of this listener; -1 for a call that returned."""
        with self._lock:
            self._kept[listener_id] += count

    def kept(self, listener_id: str) -> int:
        """Return the number of threads that calls of this listener keep, of this task and of earlier ones."""
        with self._lock:
            return self._kept[listener_id]


_STACK = ThreadStack()


class CallThreads:
    """The calls of one task, in `window.threads` threads at most. `failures` may be called once.

    `listener_id` is a name of the listener, the same in each task of its query. `monotonic_s` is a clock in seconds.
    """

    def __init__(
        self,
        caller: Caller,
        window: CallWindow,
        listener_id: str,
        monotonic_s: Callable[[], float] = time.monotonic,
        stack: ThreadStack = _STACK,
        hung_s: float = HUNG_S,
    ) -> None:
        self._caller, self._window, self._listener_id = caller, window, listener_id
        self._monotonic_s, self._stack, self._hung_s = monotonic_s, stack, hung_s
        self._lock = threading.Lock()
        self._has_call = threading.Condition(self._lock)  # or the end has come
        self._has_changed = threading.Condition(self._lock)  # for the task's own thread
        self._has_ended = threading.Condition(self._lock)  # for the watcher
        self._awaited: Callable[[], bool] | None = None
        self._is_closed = self._is_short = self._is_watched = False
        self._threads = 0
        self._idle = self._coming = 0  # of these: those that wait for a call; those that were woken or started for one
        self._hung_since_s: float | None = None
        self._lines: list[str] = []  # for the log

    def failures(self, calls: Iterable[Call]) -> Iterator[Failure]:
        """Make the calls, and yield the failures in their order.

        Raises the error of the first call that raised one, and errors of `calls`. Raises OptionError if calls that were
        given up keep all threads for 15 minutes.
        """
        window = self._window
        try:
            for call in calls:
                with self._lock:
                    window.add(call)
                    self._watch()
                    self._call_threads()
                    if not window.has_room:
                        self._wait(lambda: window.is_half_empty)
                    found = window.pop()
                self._log_rest()
                yield from found
                if window.error is not None:
                    break
            with self._lock:
                self._wait(lambda: window.is_empty)
                found = window.pop()
            yield from found
        except Exception as error:
            self._close(error)
            raise
        finally:
            self._close(window.error)
            self._log_rest()
        if window.error is not None:
            raise window.error

    def _wait(self, awaited: Callable[[], bool]) -> None:
        """Wait until `awaited` or an error."""
        self._awaited = awaited
        while self._window.error is None and not awaited():
            self._has_changed.wait()
        self._awaited = None

    def _close(self, error: BaseException | None) -> None:
        """Let no more call begin, and wait for those that run, until they end or are given up."""
        with self._lock:
            self._is_closed = True
            self._has_call.notify_all()
            if error is not None and self._window.running:
                calls = count_text(self._window.running, "call")
                self._log(f"rmq: the task of a listener fails when {calls} of it ended or timed out: {error!r}")
            self._note_change()
            while self._threads:
                self._has_changed.wait()

    def _watch(self) -> None:
        """Start the watcher, once, if it has anything to do. Without a watcher no call is made."""
        if self._is_watched or (self._window.timeout_s is None and not self._stack.kept(self._listener_id)):
            return
        try:
            threading.Thread(target=self._watched, name="rmq listener watcher", daemon=True).start()
            self._is_watched = True
        except RuntimeError as error:
            self._window.stop(error)

    def _watched(self) -> None:
        """Until the end, give up the calls that are due, and look whether calls have a thread."""
        with self._lock:
            while not self._is_closed or self._threads:
                self._give_up()
                self._call_threads()
                self._check_hung()
                self._note_change()
                self._has_ended.wait(self._watch_s())

    def _watch_s(self) -> float | None:
        """Return the seconds after which the watcher must look again."""
        now_s = self._monotonic_s()
        deadline_s = self._window.deadline_s(now_s)
        waits = [] if deadline_s is None else [max(deadline_s - now_s, 0.001)]
        if self._stack.kept(self._listener_id):
            waits.append(_LOOK_S)
        return min(waits, default=None)

    def _give_up(self) -> None:
        now_s, lines = self._monotonic_s(), []
        for call in self._window.late(now_s):
            first = call.messages[0]
            lines.append(
                f"rmq: a call of the listener for {first.queue}, queue offset {first.offset} takes longer than "
                f"timeout={self._window.timeout_s:g}: its rows have failed. It runs on and keeps its thread until it "
                "returns; its answer will not count"
            )
            self._threads -= 1
            self._stack.keep(self._listener_id, 1)
            try:
                self._window.give_up(call, now_s)
            except Exception as error:  # or the task would wait forever
                self._window.stop(error, call.number)
        if lines:
            self._log(*lines)

    def _check_hung(self) -> None:
        """Let the task fail if no thread has been free for its calls for too long."""
        now_s = self._monotonic_s()
        if self._threads or not self._window.ready:
            self._hung_since_s = None
        elif self._hung_since_s is None:
            self._hung_since_s = now_s
        elif now_s - self._hung_since_s > self._hung_s:
            self._window.stop(self._hung_error())

    def _hung_error(self) -> OptionError:
        count = self._stack.kept(self._listener_id)
        return OptionError(
            f"the listener has had no free thread for {self._hung_s:g} s: found {count_text(count, 'call')} that ran "
            f"longer than timeout={self._window.timeout_s:g} and did not return; expected calls that return. Give what "
            "the listener waits for a time limit of its own, such as that of a connection."
        )

    def _call_threads(self) -> None:
        """Wake or start threads for the calls that are ready."""
        wanted = self._window.ready - self._coming
        if self._is_closed or wanted <= 0:
            return
        woken = min(wanted, self._idle)
        self._has_call.notify(woken)
        self._idle -= woken
        self._coming += woken
        free = self._window.threads - self._threads - self._stack.kept(self._listener_id)
        for _ in range(min(wanted - woken, free)):
            self._threads += 1
            self._coming += 1
            try:
                self._stack.run(self._work)
            except RuntimeError as error:
                self._threads -= 1
                self._coming -= 1
                if not self._threads:
                    self._window.stop(error)
                elif not self._is_short:
                    threads = count_text(self._threads, "thread")
                    self._log(f"rmq: the listener has {threads}, and no more can start: {error}")
                self._is_short = True
                return

    def _work(self) -> None:
        """Make calls until the end. Each is made without the lock."""
        call = self._next()
        while call is not None:
            answer: Answer | None = None
            error: BaseException | None = None
            try:
                answer = self._caller.call(call.messages)
            except BaseException as raised:  # also KeyboardInterrupt: the task's thread raises it
                error = raised
            call.has_ended = True
            call = self._next(call, answer, error)

    def _next(
        self, ended: Call | None = None, answer: Answer | None = None, error: BaseException | None = None
    ) -> Call | None:
        """Note how a call ended. Return the next one, or None if this thread has nothing more to do."""
        window = self._window
        with self._lock:
            if ended is None:
                self._coming -= 1
            elif not window.is_running(ended):
                self._stack.keep(self._listener_id, -1)  # from now on there may be another thread in its place
                self._call_threads()
                return None
            else:
                self._note(ended, answer, error)
            while not self._is_closed:
                call = window.take(self._monotonic_s())
                if call is not None:
                    return call
                self._idle += 1
                self._has_call.wait()
                self._coming -= 1
            self._threads -= 1
            self._note_change()
            return None

    def _note(self, call: Call, answer: Answer | None, error: BaseException | None) -> None:
        try:
            if answer is None:
                assert error is not None
                self._window.fail(call, error)
            else:
                self._window.finish(call, answer)
        except Exception as raised:  # or the task would wait for this thread forever
            self._window.stop(raised, call.number)
        self._note_change()

    def _note_change(self) -> None:
        """Wake the task's own thread if what it waits for has come, and the watcher at the end."""
        is_over = self._is_closed and not self._threads
        if is_over:
            self._has_ended.notify()
        if is_over or (self._awaited is not None and (self._window.error is not None or self._awaited())):
            self._has_changed.notify()

    def _log(self, *lines: str) -> None:
        """Log warnings in a thread of their own. If none can start, the task's own thread logs them later."""
        try:
            threading.Thread(target=_log_all, args=(lines,), name="rmq listener log", daemon=True).start()
        except RuntimeError:
            self._lines += lines

    def _log_rest(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        _log_all(lines)


def _log_all(lines: Iterable[str]) -> None:
    for line in lines:
        _LOG.warning("%s", line)
