"""How a message listener is called, as RocketMQ's push consumer does it, and what its answers mean. No I/O.

A *call* passes one or more rows of one queue to the listener. There are two models, "concurrently" and "orderly":

| answer | concurrently | orderly |
| --- | --- | --- |
| CONSUME_SUCCESS, SUCCESS | rows after `ack_index` failed, the others are done | all rows are done |
| COMMIT, ROLLBACK | | as SUCCESS, with a warning, because Spark commits a whole batch |
| RECONSUME_LATER, SUSPEND_CURRENT_QUEUE_A_MOMENT, None, an exception | all rows of the call failed | the same |
| anything else | OptionError, which fails the query | the same |
| any answer after the timeout | all rows of the call failed, with delay level 3 | all rows of the call failed |

In the model "concurrently" a failed row is sent back, and the listener gets the next rows. In the model "orderly" a
failed call suspends its queue, so that the listener does not get the rows after the failed ones. Rows of the call that
have reached the maximum number of attempts become dead letters. Later the queue resumes at the first of the other rows.

Source: ConsumeMessageConcurrentlyService#processConsumeResult, ConsumeMessageOrderlyService#processConsumeResult and
#checkReconsumeTimes, ProcessQueue#cleanExpiredMsg (4.9, 5.3).
"""

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")

CONCURRENTLY, ORDERLY = "concurrently", "orderly"
ALL_ACKNOWLEDGED = 2**31 - 1  # the ack_index of a context in which the listener has not set it
DEAD_LETTER_LEVEL = -1
TIMEOUT_LEVEL = 3  # ProcessQueue#cleanExpiredMsg: the delay level of rows whose call took too long
THREADS = 20  # DefaultMQPushConsumer#consumeThreadMin and #consumeThreadMax
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
    """The settings for the calls of a listener.

    A call has at most `batch_size` rows. It has failed if it takes longer than `timeout_s`; None for no limit. At most
    `threads` calls of a task run at the same time.
    """

    model: str = CONCURRENTLY
    batch_size: int = 1
    max_reconsume_times: int = 16
    timeout_s: float | None = None
    threads: int = THREADS


@dataclass(frozen=True, slots=True)
class Message:
    """One row: its column values, its queue and queue offset, and the number of its earlier attempts (`times`).

    `source` may be anything; the code that created the message uses it to find the row again. `size_bytes` is about the
    memory of the row.
    """

    values: tuple[Any, ...]
    queue: QueueKey
    offset: int
    times: int
    source: Any = None
    size_bytes: int = 0


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
    queue. The call took `took_s` seconds. `is_late` is whether that is longer than the timeout.
    """

    done: int
    delay_level: int = 0
    error: str = ""
    suspend_ms: int = SUSPEND_MS
    took_s: float = 0.0
    is_late: bool = False


class Caller:
    """Calls a listener. `make_row` makes a row for the listener from its values; `monotonic_s` is a clock (seconds).

    Thread-safe if the listener, `make_row` and the clock are.
    """

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
        is_late = terms.timeout_s is not None and took_s > terms.timeout_s
        if is_late:
            done, delay_level = 0, TIMEOUT_LEVEL
            problem = f"it took {took_s:.3f} s, and timeout={terms.timeout_s:g}" + (problem and f"; {problem}")
        if done < len(messages) and not problem:
            is_partial = str(status) in _DONE
            problem = f"ack_index={acked} of {len(messages)} rows" if is_partial else f"it returned {status}"
        return Answer(done, delay_level, problem[:MAX_ERROR_CHARS], suspend_ms, took_s, is_late)


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
