"""A listener, called on messages as RocketMQ's push consumer calls one, and what its answers mean. Pure.

| answer | concurrently | orderly |
| --- | --- | --- |
| CONSUME_SUCCESS, SUCCESS | rows behind `ack_index` failed, the others are done | all are done |
| COMMIT, ROLLBACK | | as SUCCESS, with a warning: the batch is the transaction |
| RECONSUME_LATER, SUSPEND_CURRENT_QUEUE_A_MOMENT, None, an exception | all rows of the call failed | the same |
| anything else | OptionError, which fails the query | the same |
| whatever, but after the timeout | all rows of the call failed | the same |

Concurrently, a failed row is sent back, and the next rows are given to the listener. Orderly, the queue stops: the
rows that were tried often enough become dead letters, and the queue goes on later from the first that was not. Rows
behind a failed call are not given to the listener before that.

Source: ConsumeMessageConcurrentlyService#processConsumeResult, ConsumeMessageOrderlyService#processConsumeResult and
#checkReconsumeTimes (4.9, 5.3).
"""

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rmq_spark.store.errors import OptionError
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")

CONCURRENTLY, ORDERLY = "concurrently", "orderly"
ALL_ACKNOWLEDGED = 2**31 - 1  # ack_index unless the listener sets it
DEAD_LETTER_LEVEL = -1
SUSPEND_MS, MIN_SUSPEND_MS, MAX_SUSPEND_MS = 1_000, 10, 30_000
MAX_ERROR_CHARS = 1_000  # of what is kept of an error: it travels with the message, which has 32 KiB for properties
_SHOWN_CHARS = 200  # of an answer that is none
_MOST_LEVELS = 2**31 - 1  # Java's int; a level beyond the table's last one is the last one


class ConsumeConcurrentlyStatus(StrEnum):
    """What a listener of the model "concurrently" returns; the names as texts will do."""

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


class ConsumeOrderlyStatus(StrEnum):
    """What a listener of the model "orderly" returns; the names as texts will do."""

    SUCCESS = "SUCCESS"
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "SUSPEND_CURRENT_QUEUE_A_MOMENT"
    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"


_STATUSES: dict[str, type[StrEnum]] = {CONCURRENTLY: ConsumeConcurrentlyStatus, ORDERLY: ConsumeOrderlyStatus}
_DONE = {"CONSUME_SUCCESS", "SUCCESS", "COMMIT", "ROLLBACK"}


@dataclass(slots=True)
class ConsumeContext:
    """What a listener learns of a call beside its rows, and may set in it.

    `topic` and `queue_id` name the queue (for a retried message %RETRY%group; its row says the first topic).
    `ack_index` is the index of the last row that is done (concurrently). `delay_level_when_next_consume` says when
    failed rows come again (concurrently): 0 later each time, more than 0 that delay level, -1 never: they are dead
    letters. `suspend_ms` is how long the queue waits after a failed call (orderly), from 10 to 30,000.
    """

    topic: str
    queue_id: int
    ack_index: int = ALL_ACKNOWLEDGED
    delay_level_when_next_consume: int = 0
    suspend_ms: int = SUSPEND_MS


Listener = Callable[[list[Any], ConsumeContext], object]


@dataclass(frozen=True, slots=True)
class ListenerTerms:
    """How a listener is called. `timeout_s` None: it may take as long as it likes."""

    model: str = CONCURRENTLY
    batch_size: int = 1
    max_reconsume_times: int = 16
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One row, as `make_row` takes it, and what has to be known of it: its place, and how often it was tried.

    `source` is for whoever made the message.
    """

    values: tuple[Any, ...]
    queue: QueueKey
    offset: int
    times: int
    source: Any = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that is to be sent back, when (a delay level, 0 for later each time, -1 for never), and why.

    `copy_times` is what the copy's reconsumeTimes is to be, None for one more than the row's.
    """

    message: Message
    delay_level: int
    error: str
    copy_times: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What earlier batches left of a queue, which was to go on at `resume`: failures by queue offset, and dead letters.

    Those in `sent` are in the store. Those in `pending` may not be: an earlier try of the batch, or somebody who died,
    decided on them, and they are made again. What was decided stays decided: the queue may go on behind them.

    With `counts_from_resume` that holds for a batch that begins at `resume` or behind it. One that begins before is no
    continuation: somebody sent the group back, or reads it anew, and asks for all the rows again.

    `is_repeated`: an earlier try of the same batch left it, and what this one says replaces it. `is_foreign`: another
    query of the group left it. `number` is the number of its change.
    """

    resume: int = 0
    attempts: Mapping[int, int] = field(default_factory=dict)
    sent: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    counts_from_resume: bool = False
    is_repeated: bool = False
    is_foreign: bool = False
    number: int = 0

    def of_batch(self, begin: int) -> "History":
        """Return what counts for a batch that begins at the queue offset `begin`."""
        return History(self.resume) if self.counts_from_resume and begin < self.resume else self

    def says_something(self) -> bool:
        """Say whether anything is known but where the queue was to go on."""
        return bool(self.attempts or self.sent or self.pending)


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """Where an orderly queue goes on, after `suspend_ms`, and what to remember of it; `resume` None: all was done.

    `dead` are the dead letters of the batch, `sent` earlier ones behind where it began. `error` is why it was stopped.
    `known` is the number of the change that the batch knew of the queue, 0 for none.
    """

    queue: QueueKey
    resume: int | None = None
    suspend_ms: int = 0
    attempts: Mapping[int, int] = field(default_factory=dict)
    sent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    error: str = field(default="", compare=False)
    known: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call came to: how many rows from the first on are done, and for the others why not."""

    done: int
    delay_level: int = 0
    error: str = ""
    suspend_ms: int = SUSPEND_MS


class Caller:
    """Calls a listener. `make_row` makes what it gets of a row's values, `monotonic_s` is a clock."""

    def __init__(
        self,
        listener: Listener,
        terms: ListenerTerms,
        make_row: Callable[..., Any],
        monotonic_s: Callable[[], float],
    ) -> None:
        self._listener, self._terms, self._make_row, self._monotonic_s = listener, terms, make_row, monotonic_s

    def call(self, messages: Sequence[Message]) -> Answer:
        """Give messages of one queue to the listener; raise OptionError for an answer that means nothing."""
        terms, queue = self._terms, messages[0].queue
        context = ConsumeContext(queue.topic, queue.queue_id)
        rows = [self._make_row(*message.values) for message in messages]
        begin_s = self._monotonic_s()
        try:
            status: object = self._listener(rows, context)
            problem = "it returned None" if status is None else ""
        except (KeyboardInterrupt, GeneratorExit):
            raise  # of whoever ends the task
        except BaseException as error:  # the listener's own, sys.exit too: that is how it says that it failed
            status, problem = None, _described(error)
        took_s = self._monotonic_s() - begin_s
        if status is not None:
            check_status(status, terms.model)
        acked = _number(context, "ack_index", -1)
        delay_level = min(_number(context, "delay_level_when_next_consume", -1), _MOST_LEVELS)
        suspend_ms = min(max(_number(context, "suspend_ms", 0), MIN_SUSPEND_MS), MAX_SUSPEND_MS)
        done = 0 if status is None else acknowledged(str(status), acked, len(messages))
        if terms.timeout_s is not None and took_s > terms.timeout_s:
            done, problem = 0, f"it took {took_s:.3f} s, and timeout={terms.timeout_s:g}" + (problem and f"; {problem}")
        if done < len(messages) and not problem:
            is_partial = str(status) in _DONE
            problem = f"ack_index={acked} of {len(messages)} rows" if is_partial else f"it returned {status}"
        return Answer(done, delay_level, problem[:MAX_ERROR_CHARS], suspend_ms)


def check_status(status: object, model: str) -> None:
    """Raise OptionError unless `status` is one of the model's, or the name of one."""
    known = _STATUSES[model]
    if not isinstance(status, str) or status not in set(known):
        raise OptionError(
            f"the listener returned {_shown(status)} ({type(status).__name__}). Accepted with "
            f'model="{model}": {", ".join(known)}, as text or of rmq_spark.{known.__name__}; None and an exception '
            "mean that all rows of the call failed."
        )
    if status in (ConsumeOrderlyStatus.COMMIT, ConsumeOrderlyStatus.ROLLBACK):
        _LOG.warning("rmq: the listener returned %s, which is taken for SUCCESS", status)


def acknowledged(status: str, ack_index: int, count: int) -> int:
    """Return how many of a call's rows are done, counted from the first; the others failed."""
    if status not in _DONE:
        return 0
    if status != ConsumeConcurrentlyStatus.CONSUME_SUCCESS:  # a queue in order has no gaps
        return count
    return min(ack_index, count - 1) + 1


def exhausted(times: Sequence[int], max_reconsume_times: int) -> list[bool]:
    """Say of each row of a failed orderly call whether it was tried often enough; negative: never."""
    return [0 <= max_reconsume_times <= tried for tried in times]


def cut_calls(messages: Iterable[Message], batch_size: int) -> Iterator[list[Message]]:
    """Yield messages as they come in lists of at most `batch_size`, each of one queue."""
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


def consume_concurrently(messages: Iterable[Message], caller: Caller, terms: ListenerTerms) -> Iterator[Failure]:
    """Give all messages to the listener, and yield those that failed as it goes."""
    for call in cut_calls(messages, terms.batch_size):
        answer = caller.call(call)
        for message in call[answer.done :]:
            yield Failure(message, answer.delay_level, answer.error)


def consume_orderly(
    messages: Iterable[Message],
    caller: Caller,
    terms: ListenerTerms,
    histories: Mapping[QueueKey, History],
    times_at: int,
) -> Iterator[Failure | QueueOutcome]:
    """Give messages to the listener, of each queue up to the first call that fails.

    Yields the dead letters as it goes; at the end an outcome for each queue that stopped, or that a history says was
    stopped before. `times_at` is where a row's values have reconsumeTimes: they count what the history knows, too.
    """
    runs: dict[QueueKey, _QueueRun] = {}
    call: list[Message] = []

    def end_call() -> Iterator[Failure]:
        if call:
            taken = call.copy()
            call.clear()
            yield from runs[taken[0].queue].take(taken, caller.call(taken), terms.max_reconsume_times)

    for message in messages:
        queue, offset = message.queue, message.offset
        if call and call[0].queue != queue:
            yield from end_call()
        if queue not in runs:
            runs[queue] = _QueueRun(queue, histories.get(queue), offset)
        run = runs[queue]
        run.end = offset + 1
        if offset in run.history.sent:
            continue
        if offset in run.history.pending:
            yield from end_call()
            yield run.send_again(message, terms.max_reconsume_times)
        elif run.resume is None:
            tried = run.history.attempts.get(offset, 0)
            call.append(_tried(message, tried, times_at) if tried else message)
            if len(call) == terms.batch_size:
                yield from end_call()
    yield from end_call()
    yield from (outcome for queue in sorted(runs) if (outcome := runs[queue].outcome()) is not None)


class _QueueRun:
    """One queue in one try of one batch. `resume` is where it was stopped, None as long as it goes on."""

    def __init__(self, queue: QueueKey, history: History | None, begin: int) -> None:
        self.queue, self.history, self._begin = queue, (history or History()).of_batch(begin), begin
        self.was_stopped = history is not None
        self._is_foreign = history is not None and history.is_foreign
        self._known = 0 if history is None else history.number
        # Rows that are asked for again are, too, where a later batch of this query begins at the other one's place.
        self._is_anew = history is not None and history.says_something() and not self.history.says_something()
        self.resume: int | None = None
        self.end = 0
        self._suspend_ms = 0
        self._attempts: dict[int, int] = {}
        self._dead: set[int] = set()
        self._error = ""

    def take(self, call: Sequence[Message], answer: Answer, max_reconsume_times: int) -> Iterator[Failure]:
        """Take the answer to a call; yield the dead letters if it failed."""
        if answer.done == len(call):
            return
        are_dead = exhausted([message.times for message in call], max_reconsume_times)
        for message, is_dead in zip(call, are_dead, strict=True):
            if is_dead:
                self._dead.add(message.offset)
                yield Failure(message, DEAD_LETTER_LEVEL, answer.error, message.times)
            else:
                self._attempts[message.offset] = self.history.attempts.get(message.offset, 0) + 1
        self.resume = min(self._attempts, default=call[-1].offset + 1)
        self._suspend_ms = answer.suspend_ms if self._attempts else 0
        self._error = answer.error if self._attempts else ""

    def send_again(self, message: Message, max_reconsume_times: int) -> Failure:
        """Return the dead letter that an earlier try made of a message, and stop there until it is in the store."""
        self._dead.add(message.offset)
        if self.resume is None:
            self.resume = message.offset + 1
        times = max(message.times, max_reconsume_times)  # it was given up when it had come to that
        return Failure(message, DEAD_LETTER_LEVEL, "it failed too often, as an earlier try of its batch found", times)

    def outcome(self) -> QueueOutcome | None:
        """Return what became of the queue, None if there is nothing to say."""
        found = self._outcome()
        return None if found is None else replace(found, known=self._known)

    def _outcome(self) -> QueueOutcome | None:
        # Those that this batch passes over too: it may be repeated, and has to pass over them again.
        gone = frozenset(offset for offset in self.history.sent if offset >= self._begin)
        if self.resume is not None:
            known = {offset: count for offset, count in self.history.attempts.items() if offset >= self.resume}
            attempts, dead = known | self._attempts, frozenset(self._dead)
            return QueueOutcome(self.queue, self.resume, self._suspend_ms, attempts, gone, dead, self._error)
        is_before = self.end <= self.history.resume
        if is_before and (self._is_anew or (self.history.is_repeated and not gone)):
            # The place stays: who stopped there may come back, and goes back to it. Another try says the same again.
            return QueueOutcome(self.queue, self.history.resume)
        if not self.was_stopped or (is_before and not self.history.is_repeated):
            return None
        # Another query may have the queue by now, and the stop may be its own. So this batch does not delete the stop:
        # it moves the place to its own end, and the next batch of this query deletes that.
        return QueueOutcome(self.queue, self.end, sent=gone) if gone or self._is_foreign else QueueOutcome(self.queue)


def _tried(message: Message, tried: int, times_at: int) -> Message:
    times = message.times + tried
    values = (*message.values[:times_at], times, *message.values[times_at + 1 :])
    return replace(message, values=values, times=times)


def _number(context: ConsumeContext, name: str, least: int) -> int:
    """Return what a listener set in its context. Raises OptionError for what is no whole number, or too small."""
    value: Any = getattr(context, name, None)
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # numpy's numbers are some, too
    except TypeError:
        number = least - 1
    if number < least:
        raise OptionError(
            f"the listener set context.{name} to {_shown(value)}. Accepted: a whole number from {least} on."
        )
    return number


def _described(error: BaseException) -> str:
    """Return kind and text of an error, as text that can be stored, whatever the error is made of."""
    try:
        text = str(error)
    except Exception as trouble:  # of its own __str__
        text = f"(its text cannot be had: {type(trouble).__name__})"
    return _storable(f"{type(error).__name__}: {text}"[:MAX_ERROR_CHARS])


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as trouble:  # of its own __repr__
        text = f"something whose repr() raises {type(trouble).__name__}"
    return _storable(text[:_SHOWN_CHARS])


def _storable(text: str) -> str:
    """Return a text with escapes for what UTF-8 cannot say, as in names of files that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
