"""The calls of a task that have been read and have not ended, and those whose failures wait for an earlier call. Pure.

- Calls begin in the order in which they are added. Calls of one queue that is in order do not overlap: one begins when
  the one before it has ended. Other calls may overlap.
- Failures come out in the order of the calls, whichever call ended first. So what a task reports is the same in each
  run in which the listener answers alike.
- If calls raise errors, the error of the first of them counts. As calls begin in order, it does not depend on which
  call ended first.
- `has_room` bounds the memory. Rows that have not ended, and failures that wait, count together. If the rows are so
  large or so many that they leave a thread without a call, a call of each thread is allowed in addition. Failures that
  wait never exceed the limits, so the reading ends if an earlier call does not end.

Not thread-safe: `CallThreads` calls it under a lock. Only `Call.has_ended` is set without.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rmq_spark.datasource.spark.call_counts import CallCounts
from rmq_spark.datasource.spark.listener import TIMEOUT_LEVEL, Answer, Failure, Message
from rmq_spark.store.model import QueueKey

MOST_BYTES = 64 << 20  # of rows that are held; as Spark's spark.sql.execution.arrow.maxBytesPerBatch


@dataclass(slots=True, eq=False)
class Call:
    """A call of the listener with rows of one queue.

    `queue` is None unless the calls of the queue must be in order. `has_ended` is set by the thread of the call when
    the listener has returned. The other fields belong to the window.
    """

    messages: Sequence[Message]
    queue: QueueKey | None = None
    has_ended: bool = False
    number: int = -1
    size_bytes: int = 0
    read_bytes: int = 0  # of the calls before this one
    begin_s: float = 0.0
    failures: Sequence[Failure] | None = None  # None until the call has ended


class CallRules(Protocol):
    """What the calls of a model mean for their rows. The methods are called in the order of a queue's calls."""

    def without_call(self, call: Call) -> Sequence[Failure] | None:
        """Return the failed rows of a call if the listener need not be called, else None."""

    def judge(self, call: Call, answer: Answer) -> Sequence[Failure]:
        """Return the failed rows of a call that the listener answered."""


@dataclass
class CallWindow:
    """See the docstring of the module.

    There is room for calls with `most_rows` rows and `most_bytes`, or else for `threads` calls, which is the number of
    those that may run at once. A call that has run for `timeout_s` can be given up; None for no limit. `counts` counts
    the calls that ended.
    """

    rules: CallRules
    most_rows: int
    threads: int
    counts: CallCounts = field(default_factory=CallCounts)
    timeout_s: float | None = None
    most_bytes: int = MOST_BYTES

    def __post_init__(self) -> None:
        self._open: dict[int, Call] = {}  # in order: not ended, or with failures that are not out yet
        self._ready: list[int] = []  # a heap
        self._running: dict[int, Call] = {}  # in the order of their begin
        self._behind: dict[QueueKey, deque[Call]] = {}  # for each queue with a call that is ready or runs
        self._kept: list[int] = []  # a heap of calls with failures; may have some that are out
        self._out: list[Failure] = []
        self._added = self._read_bytes = 0
        self._unended = self._unended_rows = self._unended_bytes = 0
        self._failed_rows = 0  # that wait for an earlier call
        self._error: tuple[int, BaseException] | None = None

    @property
    def ready(self) -> int:
        """The number of calls that may begin now."""
        return 0 if self._error else len(self._ready)

    @property
    def running(self) -> int:
        """The number of calls that have begun, have not ended, and were not given up."""
        return len(self._running)

    @property
    def error(self) -> BaseException | None:
        """The error of the first call that raised one. After an error no call begins."""
        return None if self._error is None else self._error[1]

    @property
    def is_empty(self) -> bool:
        """Whether all calls have ended, and their failures are out."""
        return not self._open

    @property
    def has_room(self) -> bool:
        """Whether more calls may be added."""
        return self._is_below(self.most_rows, self.most_bytes) or self._lacks_calls

    @property
    def is_half_empty(self) -> bool:
        """Whether it is worthwhile to add more calls."""
        return self._is_below(self.most_rows // 2, self.most_bytes // 2) or self._lacks_calls

    @property
    def _lacks_calls(self) -> bool:
        """Whether a thread may have no call, and the failures that wait allow to add one."""
        if self._unended >= self.threads or self._failed_rows >= self.most_rows:
            return False
        if not self._kept:
            return True
        before = itertools.takewhile(lambda call: call.number < self._kept[0], self._open.values())
        ended_bytes = self._failed_bytes - self._unended_bytes + sum(call.size_bytes for call in before)
        return ended_bytes < self.most_bytes

    @property
    def _failed_bytes(self) -> int:
        """The bytes that were read since the first failure that waits: it keeps the rows that were read with it."""
        return self._read_bytes - self._open[self._kept[0]].read_bytes if self._kept else 0

    def deadline_s(self, now_s: float) -> float | None:
        """Return a time before which no call can be given up, None if none ever can."""
        if self.timeout_s is None:
            return None
        begins = (call.begin_s for call in self._running.values() if not call.has_ended)
        return next(begins, now_s) + self.timeout_s

    def add(self, call: Call) -> None:
        """Add the next call."""
        call.number, call.read_bytes = self._added, self._read_bytes
        call.size_bytes = sum(message.size_bytes for message in call.messages)
        self._added += 1
        self._read_bytes += call.size_bytes
        self._open[call.number] = call
        self._unended += 1
        self._unended_rows += len(call.messages)
        self._unended_bytes += call.size_bytes
        if call.queue is None:
            self._prepare(call)
        elif call.queue in self._behind:
            self._behind[call.queue].append(call)
        else:
            self._behind[call.queue] = deque([call])
            self._go_on(call.queue)

    def take(self, now_s: float) -> Call | None:
        """Begin the next call that may begin. Return it, or None if there is none."""
        if not self.ready:
            return None
        call = self._open[heapq.heappop(self._ready)]
        call.begin_s = now_s
        self._running[call.number] = call
        return call

    def is_running(self, call: Call) -> bool:
        """Return whether a call that has begun was neither noted as ended nor given up."""
        return call.number in self._running

    def finish(self, call: Call, answer: Answer) -> None:
        """Note the answer to a call that runs."""
        del self._running[call.number]
        self.counts.add(len(call.messages), answer)
        self._end(call, self.rules.judge(call, answer))
        if call.queue is not None:
            self._go_on(call.queue)

    def fail(self, call: Call, error: BaseException) -> None:
        """Note the error of a call that runs."""
        del self._running[call.number]
        self.stop(error, call.number)

    def stop(self, error: BaseException, number: int | None = None) -> None:
        """Let no more call begin, because of an error; it is that of call `number`, or comes after all calls."""
        found = (self._added if number is None else number, error)
        if self._error is None or found[0] < self._error[0]:
            self._error = found

    def late(self, now_s: float) -> list[Call]:
        """Return the calls that have run for longer than `timeout_s`.

        A call whose listener has returned is not one of them: its own thread brings the answer.
        """
        timeout_s = math.inf if self.timeout_s is None else self.timeout_s
        found = itertools.takewhile(lambda call: now_s - call.begin_s > timeout_s, self._running.values())
        return [call for call in found if not call.has_ended]

    def give_up(self, call: Call, now_s: float) -> None:
        """End a call that is late: all of its rows have failed."""
        took_s = now_s - call.begin_s
        error = f"it has run for {took_s:.3f} s and has not ended, and timeout={self.timeout_s:g}"
        self.finish(call, Answer(0, TIMEOUT_LEVEL, error, took_s=took_s, is_late=True))

    def pop(self) -> list[Failure]:
        """Return the failures that have come out since the last call."""
        found, self._out = self._out, []
        return found

    def _is_below(self, rows: int, size_bytes: int) -> bool:
        held_rows = self._unended_rows + self._failed_rows
        return held_rows < rows and self._unended_bytes + self._failed_bytes < size_bytes

    def _prepare(self, call: Call) -> bool:
        """Let a call begin, or end it if the listener need not be called. Return whether it has ended."""
        failures = self.rules.without_call(call)
        if failures is None:
            heapq.heappush(self._ready, call.number)
            return False
        self._end(call, failures)
        return True

    def _go_on(self, queue: QueueKey) -> None:
        """Prepare the next calls of a queue, up to one at which the listener must be called."""
        behind = self._behind[queue]
        while behind:
            if not self._prepare(behind.popleft()):
                return
        del self._behind[queue]

    def _end(self, call: Call, failures: Sequence[Failure]) -> None:
        self._unended -= 1
        self._unended_bytes -= call.size_bytes
        self._unended_rows -= len(call.messages)
        self._failed_rows += len(failures)
        call.failures, call.messages = failures, ()
        if failures:
            heapq.heappush(self._kept, call.number)
        else:
            del self._open[call.number]
        while self._open and (first := next(iter(self._open.values()))).failures is not None:
            self._out += first.failures
            self._failed_rows -= len(first.failures)
            del self._open[first.number]
        while self._kept and self._kept[0] not in self._open:
            heapq.heappop(self._kept)
