"""The queues of a task of an orderly listener: their calls, and where each of them is suspended. Pure.

Source: ConsumeMessageOrderlyService#processConsumeResult and #checkReconsumeTimes (4.9, 5.3).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rmq_spark.datasource.spark.call_window import Call
from rmq_spark.datasource.spark.listener import (
    DEAD_LETTER_LEVEL,
    Answer,
    Failure,
    History,
    ListenerTerms,
    Message,
    QueueOutcome,
)
from rmq_spark.store.model import QueueKey


def exhausted(times: Sequence[int], max_reconsume_times: int) -> list[bool]:
    """Return, for each row of a failed orderly call, whether it becomes a dead letter.

    `times` are the numbers of earlier attempts of the rows. If `max_reconsume_times` is negative, none does.
    """
    return [0 <= max_reconsume_times <= tried for tried in times]


class OrderlyQueues:
    """The rules of the calls, and the queues that were suspended or resumed.

    `histories` has the records of suspended queues. `times_at` is the index of reconsumeTimes among the values of a
    row; the listener gets a row with the failed attempts of earlier batches added to it.
    """

    def __init__(self, terms: ListenerTerms, histories: Mapping[QueueKey, History], times_at: int) -> None:
        self._terms, self._histories, self._times_at = terms, histories, times_at
        self._runs: dict[QueueKey, QueueRun] = {}

    def calls(self, messages: Iterable[Message]) -> Iterator[Call]:
        """Yield the calls with the messages, which are in the order of each queue.

        Other threads may apply answers meanwhile: they change only where a queue is suspended.
        """
        rows: list[Message] = []
        for message in messages:
            queue, offset = message.queue, message.offset
            if rows and rows[0].queue != queue:
                yield Call(rows, rows[0].queue)
                rows = []
            if queue not in self._runs:
                self._runs[queue] = QueueRun(queue, self._histories.get(queue), offset)
            run = self._runs[queue]
            run.end = offset + 1
            if offset in run.history.sent:
                continue
            if offset in run.history.pending:
                if rows:
                    yield Call(rows, queue)
                    rows = []
                yield Call([message], queue)
            elif run.resume is None:
                tried = run.history.attempts.get(offset, 0)
                rows.append(_tried(message, tried, self._times_at) if tried else message)
                if len(rows) == self._terms.batch_size:
                    yield Call(rows, queue)
                    rows = []
        if rows:
            yield Call(rows, rows[0].queue)

    def without_call(self, call: Call) -> Sequence[Failure] | None:
        """Return the dead letter of an earlier attempt of the batch, or nothing for a call of a suspended queue."""
        run = self._runs[call.messages[0].queue]
        if call.messages[0].offset in run.history.pending:
            return [run.send_again(call.messages[0], self._terms.max_reconsume_times)]
        return None if run.resume is None else ()

    def judge(self, call: Call, answer: Answer) -> Sequence[Failure]:
        """Suspend the queue if rows failed. Return those that become dead letters."""
        return self._runs[call.messages[0].queue].take(call.messages, answer, self._terms.max_reconsume_times)

    def outcomes(self) -> Iterator[QueueOutcome]:
        """Yield an outcome for each queue that is suspended now or was suspended before."""
        for queue in sorted(self._runs):
            outcome = self._runs[queue].outcome()
            if outcome is not None:
                yield outcome


class QueueRun:
    """The state of one queue during one attempt of a batch.

    `resume` is None until the queue is suspended, and then the queue offset at which it resumes.
    """

    def __init__(self, queue: QueueKey, history: History | None, begin: int) -> None:
        self.queue, self.history, self._begin = queue, (history or History()).of_batch(begin), begin
        self.was_stopped = history is not None
        self._is_foreign = history is not None and history.is_foreign
        self._known = 0 if history is None else history.number
        # The batch begins before the position in the record, so the listener gets all rows again. A later batch of this
        # query may begin at that position and must get all rows too, so the record is then replaced by an empty one.
        self._is_reread = history is not None and history.has_entries() and not self.history.has_entries()
        self.resume: int | None = None
        self.end = 0
        self._suspend_ms = 0
        self._attempts: dict[int, int] = {}
        self._dead: set[int] = set()
        self._error = ""

    def take(self, call: Sequence[Message], answer: Answer, max_reconsume_times: int) -> list[Failure]:
        """Apply the listener's answer to the messages of one call.

        If some of them failed, suspend the queue, and return those that become dead letters.
        """
        if answer.done == len(call):
            return []
        dead = []
        are_dead = exhausted([message.times for message in call], max_reconsume_times)
        for message, is_dead in zip(call, are_dead, strict=True):
            if is_dead:
                self._dead.add(message.offset)
                dead.append(Failure(message, DEAD_LETTER_LEVEL, answer.error, message.times))
            else:
                self._attempts[message.offset] = self.history.attempts.get(message.offset, 0) + 1
        self.resume = min(self._attempts, default=call[-1].offset + 1)
        self._suspend_ms = answer.suspend_ms if self._attempts else 0
        self._error = answer.error if self._attempts else ""
        return dead

    def send_again(self, message: Message, max_reconsume_times: int) -> Failure:
        """Return a message of the history's `pending` as a dead letter again, and suspend the queue.

        The batch in which it became a dead letter may not have been committed. The queue is suspended until the dead
        letter is in the store.
        """
        self._dead.add(message.offset)
        if self.resume is None:
            self.resume = message.offset + 1
        times = max(message.times, max_reconsume_times)  # the number of attempts at which it became a dead letter
        return Failure(message, DEAD_LETTER_LEVEL, "it failed too often, as an earlier try of its batch found", times)

    def outcome(self) -> QueueOutcome | None:
        """Return what the batch records about the queue, or None if nothing must be recorded."""
        found = self._outcome()
        return None if found is None else replace(found, known=self._known)

    def _outcome(self) -> QueueOutcome | None:
        # This batch skips these rows, and must skip them again if it is repeated.
        skipped = frozenset(offset for offset in self.history.sent if offset >= self._begin)
        if self.resume is not None:
            known = {offset: count for offset, count in self.history.attempts.items() if offset >= self.resume}
            attempts, dead = known | self._attempts, frozenset(self._dead)
            return QueueOutcome(self.queue, self.resume, self._suspend_ms, attempts, skipped, dead, self._error)
        is_before = self.end <= self.history.resume
        if is_before and (self._is_reread or (self.history.is_repeated and not skipped)):
            # The recorded position is kept, because the query that suspended the queue may return to it.
            return QueueOutcome(self.queue, self.history.resume)
        if not self.was_stopped or (is_before and not self.history.is_repeated):
            return None
        # Another query may own the queue now, and may have suspended it. So this batch does not delete the record. It
        # replaces it by one whose position is the end of this batch, which this query's next batch deletes.
        if skipped or self._is_foreign:
            return QueueOutcome(self.queue, self.end, sent=skipped)
        return QueueOutcome(self.queue)


def _tried(message: Message, tried: int, times_at: int) -> Message:
    times = message.times + tried
    values = (*message.values[:times_at], times, *message.values[times_at + 1 :])
    return replace(message, values=values, times=times)
