"""The calls of a task's listener in the two models: which rows they have, in what order they are made.

| | concurrently | orderly |
| --- | --- | --- |
| calls side by side | any | those of different queues |
| after a failed call | its rows are sent back, and the next call is made | its queue is suspended: no more calls |
| a call that takes too long | is given up, and runs on while others are made | fails when it returns |

With one thread the task's own thread makes the calls, one after the other. It cannot give a call up, so there too a
call that takes too long fails when it returns. A listener for one thread is thus never called twice at the same time.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rmq_spark.datasource.spark.call_counts import CallCounts
from rmq_spark.datasource.spark.call_threads import CallThreads
from rmq_spark.datasource.spark.call_window import Call, CallRules, CallWindow
from rmq_spark.datasource.spark.listener import (
    Answer,
    Caller,
    Failure,
    History,
    ListenerTerms,
    Message,
    QueueOutcome,
)
from rmq_spark.datasource.spark.orderly_queues import OrderlyQueues
from rmq_spark.store.model import QueueKey

# The number of rows that are read and not finished, as DefaultMQPushConsumer#consumeConcurrentlyMaxSpan (4.9, 5.3). In
# order it is higher, because queues come one after the other, and only queues whose rows are read run side by side.
CONCURRENT_ROWS, ORDERLY_ROWS = 2_000, 10_000


def cut_calls(messages: Iterable[Message], batch_size: int) -> Iterator[list[Message]]:
    """Yield lists of at most `batch_size` consecutive messages, each of one queue."""
    call: list[Message] = []
    for message in messages:
        if call and message.queue != call[0].queue:
            yield call
            call = []
        call.append(message)
        if len(call) == batch_size:
            yield call
            call = []
    if call:
        yield call


class ConcurrentRules:
    """The rules of the model "concurrently"."""

    def without_call(self, call: Call) -> None:
        """Return None: every call is made."""
        return

    def judge(self, call: Call, answer: Answer) -> Sequence[Failure]:
        """Return the rows after those that are done."""
        return [Failure(message, answer.delay_level, answer.error) for message in call.messages[answer.done :]]


@dataclass(frozen=True, slots=True)
class ListenerCalls:
    """The calls of one task. `counts` counts them. `listener_id` is a name of the listener in this process."""

    caller: Caller
    terms: ListenerTerms
    counts: CallCounts = field(default_factory=CallCounts)
    listener_id: str = ""
    monotonic_s: Callable[[], float] = time.monotonic

    def concurrently(self, messages: Iterable[Message], *, is_in_order: bool = False) -> Iterator[Failure]:
        """Call the listener with all messages. Yield those that failed, in their order.

        If `is_in_order`, a queue has one call at a time. Raises OptionError for an invalid answer, and every error of
        `messages`. When it has ended or was closed, no call runs any more that was not given up.
        """
        cut = cut_calls(messages, self.terms.batch_size)
        calls = (Call(rows, rows[0].queue if is_in_order else None) for rows in cut)
        return self._made(calls, ConcurrentRules(), is_in_order=is_in_order)

    def orderly(
        self, messages: Iterable[Message], histories: Mapping[QueueKey, History], times_at: int
    ) -> Generator[Failure | QueueOutcome]:
        """Call the listener with the messages of each queue, until a call of the queue fails.

        Yields a Failure for each dead letter, in the order of the messages. At the end yields a QueueOutcome for each
        queue that is suspended now or was suspended before. `histories` and `times_at` are those of `OrderlyQueues`.
        Raises the same as `concurrently`.
        """
        queues = OrderlyQueues(self.terms, histories, times_at)
        yield from self._made(queues.calls(messages), queues, is_in_order=True)
        yield from queues.outcomes()

    def _made(self, calls: Iterable[Call], rules: CallRules, *, is_in_order: bool) -> Iterator[Failure]:
        if self.terms.threads == 1:
            return self._made_here(calls, rules)
        rows, timeout_s = (ORDERLY_ROWS, None) if is_in_order else (CONCURRENT_ROWS, self.terms.timeout_s)
        window = CallWindow(rules, rows, self.terms.threads, self.counts, timeout_s)
        return CallThreads(self.caller, window, self.listener_id, self.monotonic_s).failures(calls)

    def _made_here(self, calls: Iterable[Call], rules: CallRules) -> Iterator[Failure]:
        for call in calls:
            failures = rules.without_call(call)
            if failures is None:
                answer = self.caller.call(call.messages)
                self.counts.add(len(call.messages), answer)
                failures = rules.judge(call, answer)
            yield from failures
