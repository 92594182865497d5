"""How a message listener is called, as RocketMQ's push consumer does it, and what its answers mean. No I/O.

A *call* passes one or more rows of one queue to the listener. There are two models, "concurrently" and "orderly":

| answer | concurrently | orderly |
| --- | --- | --- |
| CONSUME_SUCCESS, SUCCESS | rows after `ack_index` failed, the others are done | all rows are done |
| COMMIT, ROLLBACK | | as SUCCESS, with a warning, because Spark commits a whole batch |
| RECONSUME_LATER, SUSPEND_CURRENT_QUEUE_A_MOMENT, None, an exception | all rows of the call failed | the same |
| anything else | OptionError, which fails the query | the same |
| any answer after the timeout | all rows of the call failed | the same |

In the model "concurrently" a failed row is sent back, and the listener gets the next rows. In the model "orderly" a
failed call suspends its queue, so that the listener does not get the rows after the failed ones. Rows of the call that
have reached the maximum number of attempts become dead letters. Later the queue resumes at the first of the other rows.

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
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")

CONCURRENTLY, ORDERLY = "concurrently", "orderly"
ALL_ACKNOWLEDGED = 2**31 - 1  # the ack_index of a context in which the listener has not set it
DEAD_LETTER_LEVEL = -1
SUSPEND_MS, MIN_SUSPEND_MS, MAX_SUSPEND_MS = 1_000, 10, 30_000
MAX_ERROR_CHARS = 1_000  # of a stored error; it becomes a property of the message, and all properties have 32 KiB
_SHOWN_CHARS = 200  # of an invalid answer in an error message
_MOST_LEVELS = 2**31 - 1  # the maximum of Java's int; a level above the table's last one means the last one


class ConsumeConcurrentlyStatus(StrEnum):
    """The answers of a listener with `model="concurrently"`. The names as strings are valid answers too."""

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


class ConsumeOrderlyStatus(StrEnum):
    """The answers of a listener with `model="orderly"`. The names as strings are valid answers too."""

    SUCCESS = "SUCCESS"
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "SUSPEND_CURRENT_QUEUE_A_MOMENT"
    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"


_STATUSES: dict[str, type[StrEnum]] = {CONCURRENTLY: ConsumeConcurrentlyStatus, ORDERLY: ConsumeOrderlyStatus}
_DONE = {"CONSUME_SUCCESS", "SUCCESS", "COMMIT", "ROLLBACK"}


@dataclass(slots=True)
class ConsumeContext:
    """The second argument of a listener: the queue of the rows, and three fields that the listener may set.

    `topic` and `queue_id` name the queue of the rows. For retried messages the topic is the retry topic %RETRY%group,
    although the rows have the topic to which the messages were first sent. The fields that may be set:

    - `ack_index` (model "concurrently"): the index of the last row that is done; the rows after it have failed.
    - `delay_level_when_next_consume` (model "concurrently"): the delay level with which failed rows are sent back. With
      0 the delay grows with each attempt; with -1 the rows become dead letters at once.
    - `suspend_ms` (model "orderly"): the pause of the queue after a failed call, from 10 to 30,000 ms.

    `broker_name` is the broker of the queue in a cluster, and empty in a store directory.
    """

    topic: str
    queue_id: int
    ack_index: int = ALL_ACKNOWLEDGED
    delay_level_when_next_consume: int = 0
    suspend_ms: int = SUSPEND_MS
    broker_name: str = ""


Listener = Callable[[list[Any], ConsumeContext], object]


@dataclass(frozen=True, slots=True)
class ListenerTerms:
    """The settings for the calls of a listener: `batch_size` rows per call at most; `timeout_s` None for no timeout."""

    model: str = CONCURRENTLY
    batch_size: int = 1
    max_reconsume_times: int = 16
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One row: its column values, its queue and queue offset, and the number of its earlier attempts (`times`).

    `source` may be anything; the code that created the message uses it to find the row again.
    """

    values: tuple[Any, ...]
    queue: QueueKey
    offset: int
    times: int
    source: Any = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that failed and is sent back, with the error.

    `delay_level` is 0 if the delay grows with each attempt, and -1 for a dead letter. `copy_times` is the
    reconsumeTimes of the copy that is sent back; None means one more than that of the row.
    """

    message: Message
    delay_level: int
    error: str
    copy_times: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """The record that earlier batches left of a suspended queue, which resumes at the queue offset `resume`.

    `attempts` maps queue offsets to the number of failed attempts. `sent` and `pending` are the queue offsets of rows
    that became dead letters. The dead letters in `sent` are in the store. Those in `pending` may not be, because it is
    not certain that their batch was committed; so they are sent again, and the queue may resume after them.

    If `counts_from_resume` is True, the record applies only to a batch that begins at `resume` or later. A batch that
    begins earlier does not continue the suspended one: the group was reset, or the queue is read again, so the listener
    must get all rows.

    `is_repeated` is whether the record was made by an earlier attempt of the same batch; this attempt replaces it.
    `is_foreign` is whether it was made by another query of the group. Every change of a group's suspended queues has a
    number, and `number` is that of this record.
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
        """Return this record if it applies to a batch that begins at the queue offset `begin`, else an empty one."""
        return History(self.resume) if self.counts_from_resume and begin < self.resume else self

    def has_entries(self) -> bool:
        """Return whether the record contains attempts or dead letters."""
        return bool(self.attempts or self.sent or self.pending)


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """The record that a batch leaves of an orderly queue.

    If the queue is suspended, it resumes at the queue offset `resume` after `suspend_ms`. If `resume` is None, all rows
    are done and the queue is not suspended. `attempts` maps queue offsets to the number of failed attempts. `dead` has
    the queue offsets of the rows that became dead letters in this batch. `sent` has those that became dead letters in
    earlier batches, if they are not before the batch's first row. `error` is the reason for the suspension. `known` is
    the number of the record that the batch found (`History.number`), or 0 if there was none.
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
    """The result of one call: the first `done` rows are done, and the others have failed with `error`.

    `delay_level` is the delay level with which failed rows are sent back. `suspend_ms` is the pause of an orderly
    queue.
    """

    done: int
    delay_level: int = 0
    error: str = ""
    suspend_ms: int = SUSPEND_MS


class Caller:
    """Calls a listener. `make_row` makes a row for the listener from its values; `monotonic_s` is a clock (seconds)."""

    def __init__(
        self,
        listener: Listener,
        terms: ListenerTerms,
        make_row: Callable[..., Any],
        monotonic_s: Callable[[], float],
    ) -> None:
        self._listener, self._terms, self._make_row, self._monotonic_s = listener, terms, make_row, monotonic_s

    def call(self, messages: Sequence[Message]) -> Answer:
        """Call the listener with messages of one queue, and return the result.

        Raises OptionError if the listener returns, or sets in the context, something that is not valid.
        """
        terms, queue = self._terms, messages[0].queue
        context = ConsumeContext(queue.topic, queue.queue_id, broker_name=queue.broker)
        rows = [self._make_row(*message.values) for message in messages]
        begin_s = self._monotonic_s()
        try:
            status: object = self._listener(rows, context)
            problem = "it returned None" if status is None else ""
        except (KeyboardInterrupt, GeneratorExit):
            raise  # Spark or the user ends the task
        except BaseException as error:  # whatever the listener raises, also by sys.exit: the rows failed
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
    """Raise OptionError unless `status` is a valid answer of the model, or its name as a string."""
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
    """Return the number of rows of a call that are done. These are the first rows; the others failed.

    `count` is the number of all rows of the call.
    """
    if status not in _DONE:
        return 0
    if status != ConsumeConcurrentlyStatus.CONSUME_SUCCESS:  # an orderly queue has no gaps
        return count
    return min(ack_index, count - 1) + 1


def exhausted(times: Sequence[int], max_reconsume_times: int) -> list[bool]:
    """Return, for each row of a failed orderly call, whether it becomes a dead letter.

    `times` are the numbers of earlier attempts of the rows. If `max_reconsume_times` is negative, none does.
    """
    return [0 <= max_reconsume_times <= tried for tried in times]


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


def consume_concurrently(messages: Iterable[Message], caller: Caller, terms: ListenerTerms) -> Iterator[Failure]:
    """Call the listener with all messages. After each call, yield the messages that failed."""
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
    """Call the listener with the messages of each queue, until a call of the queue fails.

    Yields a Failure for each dead letter, after the call that made it one. At the end yields a QueueOutcome for each
    queue that is suspended now or was suspended before. `histories` has the records of suspended queues. `times_at` is
    the index of reconsumeTimes among the values of a row; the listener gets a row with the failed attempts of earlier
    batches added to it.
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

    def take(self, call: Sequence[Message], answer: Answer, max_reconsume_times: int) -> Iterator[Failure]:
        """Apply the listener's answer to the messages of one call.

        If some of them failed, suspend the queue, and yield those that become dead letters.
        """
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


def _number(context: ConsumeContext, name: str, least: int) -> int:
    """Return the context's field `name`, which a listener may set. Raises OptionError unless it is an int ≥ `least`."""
    value: Any = getattr(context, name, None)
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # accepts numpy's integers
    except TypeError:
        number = least - 1
    if number < least:
        raise OptionError(
            f"the listener set context.{name} to {_shown(value)}; expected an integer ≥ {least}. Correct the listener."
        )
    return number


def _described(error: BaseException) -> str:
    """Return the class and the message of an error as text that can be stored."""
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
    """Return the text in a form that can be encoded in UTF-8: half surrogate pairs, as in file names, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
