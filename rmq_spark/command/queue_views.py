"""The queues of a store or a cluster, as `rmq cat` and `rmq count` read them.

Both views have the same methods. A store is one log, and an error ends the command. The brokers of a cluster have logs
of their own, and one of them may be away: then the view names on stderr what it cannot read, and reads the rest.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import click
import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark
from rmq_spark.command.output import cell, printable, say, typed
from rmq_spark.command.parameters import Moment
from rmq_spark.command.place import Place
from rmq_spark.store.model import Away, Forbidden, QueueAnswer, QueueBounds, QueueKey
from rmq_spark.store.names import is_system_topic

PHYSICAL_OFFSET, STORE_TIME, BROKER_NAME = "commitLogOffset", "storeTimestamp", "brokerName"
_TIME_SO_FAR = "time so far"  # a column that is not printed: the latest store time up to a message, in us
_MAX_LINES = 10  # if many brokers are away
_MAX_NAMES = 20  # of topics in an error
_IN_PATTERNS = re.compile(r"[*?\[]")
_POLL_S, _WAIT_MS = 0.1, 5_000
Tables = Iterator[pa.Table]


class Beginning(NamedTuple):
    """The first message to print: at most one field is set; if none is, the first stored message."""

    time_ms: int | None = None
    offset: int | None = None
    last: int | None = None  # this number of messages before the end, counted over all queues


def merge(sources: Mapping[object, Iterator[pa.RecordBatch | pa.Table]], order: str = PHYSICAL_OFFSET) -> Tables:
    """Yield the rows of all sources in ascending order of the column `order`, by which each source is sorted already.

    It buffers one batch per source, and the table that it yields.
    """
    buffered: dict[object, pa.Table] = {}
    unfinished = dict(sources)
    while True:
        for key in [key for key in unfinished if key not in buffered]:
            batch = next((batch for batch in unfinished[key] if batch.num_rows), None)
            if batch is None:
                del unfinished[key]
            else:
                buffered[key] = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
        if not buffered:
            return
        # A later batch of a source cannot contain a value below this one.
        end = min(table[order][-1].as_py() for table in buffered.values())
        parts = []
        for key, table in list(buffered.items()):
            count = pc.sum(pc.less_equal(table[order], end)).as_py() or 0
            parts.append(table.slice(0, count))
            if count < table.num_rows:
                buffered[key] = table.slice(count)
            else:
                del buffered[key]
        found = pa.concat_tables(parts)
        yield found.take(pc.sort_indices(found[order])) if len(parts) > 1 else found


def merge_brokers(sources: Mapping[QueueKey, Iterator[pa.RecordBatch]]) -> Tables:
    """Yield the rows of queues of several brokers: those of a broker in its stored order, and brokers by store time.

    A message whose store time is before that of an earlier one of its broker, as after a change of the clock, follows
    the earlier one.
    """
    brokers: dict[str, dict[object, Iterator[Any]]] = {}
    for queue, batches in sources.items():
        brokers.setdefault(queue.broker, {})[queue] = batches
    logs = {broker: merge(queues) for broker, queues in brokers.items()}
    if len(logs) < 2:
        return next(iter(logs.values()), iter(()))
    return merge({broker: _with_times(tables) for broker, tables in logs.items()}, _TIME_SO_FAR)


def _with_times(tables: Tables) -> Tables:
    """Yield the tables with the column `_TIME_SO_FAR`, which ascends."""
    latest: int | None = None
    for table in tables:
        times = pc.cumulative_max(table[STORE_TIME].combine_chunks().cast(pa.int64()), start=latest)
        latest = times[-1].as_py()
        yield table.append_column(_TIME_SO_FAR, times)


def expand_topics(
    words: Sequence[str],
    list_topics: Callable[[], Sequence[str]],
    readable: Callable[[Sequence[str]], Sequence[str]] = list,
) -> list[str]:
    """Return the topics that words name, each once. Words are names, lists with commas, and patterns of a shell.

    RocketMQ's own topics match only a pattern that begins with their first character. `readable` returns those of the
    topics that match which can be read. Raises NotFoundError for a pattern that no topic matches, and UsageError if
    there are words, but no name in them.
    """
    parts = split_topics(words)
    known = list_topics() if has_patterns(parts) else ()
    names: list[str] = []
    for word in parts:
        if not has_patterns([word]):
            names.append(word)
            continue
        found = matching_topics(word, known)
        if not found:
            raise rmq_spark.NotFoundError(
                f"pattern {word!r}: no topic matches it; expected one of the topics: {_first_of(known)}."
            )
        names += readable(found)
    return list(dict.fromkeys(names))


def split_topics(words: Sequence[str]) -> list[str]:
    """Return the names and patterns in words. Raises UsageError if there are words, but no name in them."""
    parts = [part for text in words for part in text.split(",") if part]
    if words and not parts:
        raise click.UsageError(
            f"TOPIC {' '.join(words)!r}: found no name; expected a topic, a list with commas, or a pattern. Give one."
        )
    return parts


def has_patterns(words: Sequence[str]) -> bool:
    """Return whether a word is a pattern."""
    return any(_IN_PATTERNS.search(word) for word in words)


def matching_topics(pattern: str, known: Sequence[str]) -> list[str]:
    """Return the topics that match a pattern."""
    return [
        topic
        for topic in known
        if fnmatchcase(topic, pattern) and (topic[0] == pattern[0] or not is_system_topic(topic))
    ]


def _first_of(topics: Sequence[str]) -> str:
    """Return the names of the first topics, without RocketMQ's own, and the number of the others."""
    own = [topic for topic in topics if not is_system_topic(topic)]
    more = f" and {len(own) - _MAX_NAMES:,} more" if len(own) > _MAX_NAMES else ""
    return (", ".join(own[:_MAX_NAMES]) or "none") + more


def describe(answer: QueueAnswer) -> str | None:
    """Return why a queue cannot be read, None if it can."""
    if isinstance(answer, QueueBounds):
        return None
    reason = printable(typed(answer.reason))
    if isinstance(answer, Away):
        # The first look at the cluster is the first that this process knows.
        return f"away since {cell('', datetime.fromtimestamp(answer.since_ms / 1000, UTC))} or earlier: {reason}"
    if isinstance(answer, Forbidden) and not reason.endswith("."):
        return f"{reason}. Ask an administrator for the right: {answer.right}."
    return reason


def cause_of(problem: str) -> str:
    """Return the first part of the text of a problem, which is the same for all queues of a broker that is away."""
    return problem.partition(": ")[0]


def report_problems(problems: Mapping[QueueKey, str]) -> None:
    """Name queues on stderr with their problems: those of one broker with the same cause in one line."""
    alike: dict[tuple[str, str], list[QueueKey]] = {}
    for queue, problem in problems.items():
        alike.setdefault((queue.broker, cause_of(problem)), []).append(queue)
    lines = [f"{_names_of(queues)}: {problems[queues[0]]}" for queues in alike.values()]
    for line in lines[:_MAX_LINES]:
        say(line)
    if len(lines) > _MAX_LINES:
        say(f"… and {len(lines) - _MAX_LINES} more problems")


def _names_of(queues: Sequence[QueueKey]) -> str:
    if len(queues) == 1:
        return str(queues[0])
    return f"{queues[0]} and {len(queues) - 1} more queue{'s' * (len(queues) > 2)} of {queues[0].broker}"


class StoreView:
    """The queues of a store."""

    order_columns: Sequence[str] = (PHYSICAL_OFFSET,)  # by which messages are ordered over all queues
    merge = staticmethod(merge)
    is_incomplete = False

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def refresh(self) -> None:
        """Look at the store again."""
        self._reader.refresh()

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        found: list[str] = self._reader.topics()
        return found

    def readable(self, topics: Sequence[str]) -> Sequence[str]:
        """Return those of the topics that can be read, which are all of a store."""
        return topics

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the queues of a topic. Raises NotFoundError if it does not exist."""
        found: list[QueueKey] = self._reader.queues(topic)
        return found

    def bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
        """Return the offsets that each queue has."""
        return {queue: self._reader.bounds(queue) for queue in queues}

    def offsets_at(self, queues: Collection[QueueKey], time_ms: int) -> dict[QueueKey, int]:
        """Return for each queue the offset of the first message stored at or after a time."""
        return {queue: self._reader.offset_at_time(queue, time_ms) for queue in queues}

    def late_beginning(self, begin: Beginning) -> Beginning:
        """Return where to begin in a queue that appears later."""
        return Beginning()

    def read(self, queue: QueueKey, begin: int, end: int, columns: Sequence[str], **filters: str | None) -> Any:
        """Return an iterator over the batches of a queue."""
        return self._reader.read(queue, begin, end, columns, **filters)

    def bytes_of(self, ranges: Mapping[QueueKey, tuple[int, int]]) -> dict[str, int | None]:
        """Return the size of the records with queue offsets [begin, end) in the log, by topic."""
        found: dict[str, int | None] = {}
        for queue, (begin, end) in ranges.items():
            found[queue.topic] = (found.get(queue.topic) or 0) + self._reader.record_bytes(queue, begin, end)
        return found

    def wait(self, after: Mapping[QueueKey, int]) -> bool:
        """Wait a moment; return whether anything may have changed."""
        if self._reader.refresh():
            return True
        time.sleep(_POLL_S)
        return False

    def note_failure(self, queue: QueueKey, error: Exception) -> None:
        """Raise the error of a read that ended before its end."""
        raise error


class ClusterView:
    """The queues of a cluster. With `is_strict` an error of one queue ends the command, as in a store.

    `now_ms` is the time in ms since the epoch.
    """

    order_columns: Sequence[str] = (STORE_TIME, PHYSICAL_OFFSET)
    merge = staticmethod(merge_brokers)

    def __init__(self, reader: Any, now_ms: int, *, is_strict: bool) -> None:
        self._reader, self._now_ms, self._is_strict = reader, now_ms, is_strict
        self._problems: dict[QueueKey, str] = {}
        self._refused: set[str] = set()  # topics that cannot be read
        self._looked_at: set[str] = set()  # topics that matched a pattern

    @property
    def is_incomplete(self) -> bool:
        """Whether something cannot be read."""
        return bool(self._problems or self._refused)

    def refresh(self) -> None:
        """Look at the cluster again."""
        self._reader.refresh()

    def topics(self) -> list[str]:
        """Return the names of all topics that have queues. Those that cannot be read are named on stderr, each once."""
        listed = look_at(self._reader, self._reader.topics())
        refused = {topic.name: topic.problem for topic in listed if topic.problem is not None}
        for name, problem in refused.items():
            if name not in self._refused:
                say(f"{name}: {problem}")
        self._refused |= refused.keys()
        return [topic.name for topic in listed if topic.answers]

    def readable(self, topics: Sequence[str]) -> list[str]:
        """Return those of the topics that can be read. The others are named on stderr, each once.

        Raises the error of a topic that cannot be read if all topics have one, and none was seen before.
        """
        new = [topic for topic in topics if topic not in self._looked_at]
        if new and not self._looked_at:
            listed = look_at(self._reader, new)
        else:
            listed = [_look_at_one(self._reader, topic) for topic in new]
        for topic in listed:
            self._looked_at.add(topic.name)
            if topic.problem is not None:
                self._refused.add(topic.name)
                say(f"{topic.name}: {topic.problem}")
        return [topic for topic in topics if topic not in self._refused]

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the queues of a topic, also those that cannot be read. Raises NotFoundError if it does not exist."""
        found: list[QueueKey] = self._reader.queues(topic)
        return found

    def bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
        """Return the offsets that each queue has. Queues that cannot be read are left out, and named on stderr."""
        if self._is_strict:
            found: dict[QueueKey, QueueBounds] = self._reader.all_bounds(queues)
            return found
        answers: dict[QueueKey, QueueAnswer] = self._reader.answers(queues)
        problems = {queue: text for queue, answer in answers.items() if (text := describe(answer)) is not None}
        report_problems({queue: text for queue, text in problems.items() if queue not in self._problems})
        back = [queue for queue in self._problems if queue in answers and queue not in problems]
        if back:
            say(f"{_names_of(back)}: back")
        self._problems = {queue: text for queue, text in self._problems.items() if queue not in answers} | problems
        return {queue: answer for queue, answer in answers.items() if isinstance(answer, QueueBounds)}

    def offsets_at(self, queues: Collection[QueueKey], time_ms: int) -> dict[QueueKey, int]:
        """Return for each queue the offset of the first message stored at or after a time."""
        found: dict[QueueKey, int] = self._reader.offsets_at(dict.fromkeys(queues, time_ms))
        return found

    def late_beginning(self, begin: Beginning) -> Beginning:
        """Return where to begin in a queue that appears later. It may be an old one, whose broker was away."""
        return begin if begin.last is None else Beginning(time_ms=self._now_ms)

    def read(self, queue: QueueKey, begin: int, end: int, columns: Sequence[str], **filters: str | None) -> Any:
        """Return an iterator over the batches of a queue."""
        return self._reader.read(queue, begin, end, columns, **filters)

    def bytes_of(self, ranges: Mapping[QueueKey, tuple[int, int]]) -> dict[str, int | None]:
        """Return an estimate of the size of records, by topic. None if the account may not read the topic."""
        try:
            found: dict[str, int | None] = self._reader.estimate_bytes(ranges)
        except rmq_spark.NoPermissionError:
            return {queue.topic: None for queue in ranges}
        return found

    def wait(self, after: Mapping[QueueKey, int]) -> bool:
        """Wait for messages, or for a change of the cluster; return whether anything may have changed."""
        readable = {queue: offset for queue, offset in after.items() if queue not in self._problems}
        changed: bool = self._reader.wait_for_messages(readable, _WAIT_MS)
        return changed or bool(self._problems)  # a read that failed is tried again

    def note_failure(self, queue: QueueKey, error: Exception) -> None:
        """Name a queue whose broker went away during a read. With `is_strict` raise the error."""
        if self._is_strict or not isinstance(error, rmq_spark.BackendUnavailableError):
            raise error
        if queue not in self._problems:
            self._problems[queue] = printable(typed(str(error)))
            report_problems({queue: self._problems[queue]})


def open_view(place: Place, reader: Any, *, is_strict: bool = False) -> StoreView | ClusterView:
    """Return a view of the place that the reader reads; for `is_strict` see `ClusterView`."""
    if place.is_cluster:
        return ClusterView(reader, Moment().convert("now", None, None), is_strict=is_strict)
    return StoreView(reader)


class ListedTopic(NamedTuple):
    """A topic of a cluster with the answers for its queues. `problem` is why the topic as a whole cannot be read."""

    name: str
    answers: Mapping[QueueKey, QueueAnswer]
    problem: str | None = None

    @property
    def messages(self) -> int:
        """Number of messages in the queues that can be read."""
        bounds = [answer for answer in self.answers.values() if isinstance(answer, QueueBounds)]
        return sum(one.max_offset - one.min_offset for one in bounds)

    @property
    def problems(self) -> dict[QueueKey, str]:
        """Why queues cannot be read."""
        return {queue: text for queue, answer in self.answers.items() if (text := describe(answer)) is not None}


def look_at(reader: Any, topics: Sequence[str]) -> list[ListedTopic]:
    """Return topics of a cluster with the answers for all of their queues; topics without a route have none.

    Raises the error of a topic that cannot be read if all topics have one, as with a wrong account.
    """
    try:
        queues = reader.all_queues(topics)
        answers = reader.answers([queue for found in queues.values() for queue in found])
    except rmq_spark.OptionError:
        found = [_look_at_one(reader, topic) for topic in topics]
        if all(one.problem is not None for one in found):
            raise
        return found
    return [ListedTopic(topic, {queue: answers[queue] for queue in queues.get(topic, ())}) for topic in topics]


def _look_at_one(reader: Any, topic: str) -> ListedTopic:
    try:
        return ListedTopic(topic, reader.answers(reader.all_queues([topic]).get(topic, ())))
    except rmq_spark.OptionError as error:
        return ListedTopic(topic, {}, printable(typed(str(error))))
