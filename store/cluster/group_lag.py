"""The lag of groups in a cluster, as a table with the columns of `group_tables.CLUSTER_LAG`.

| column | comes from |
| --- | --- |
| groupOffset, lastConsumedTimestamp | the brokers' answers about the group (`group_progress`) |
| minOffset, maxOffset | the bounds of all queues of a topic. They are asked for after the group's offsets |
| secondsBehind | the next unread message, which is pulled. One pull for each queue with unread messages |
| lagBytes | an estimate: unread messages times the average size of the topic's messages that were pulled for this |
| lastCommitTimestamp, member | null: no broker knows them |

A queue whose broker does not answer has the state away. Where the account may not read a topic, its bounds are not
known: then the queue's end is that of the answer about the group, and expired messages count as unread.

Source: ConsumerProgressSubCommand (4.9, 5.3).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.group_progress import GroupProgress, Progress, describe_silent
from rmq_spark.store.cluster.positions import Look
from rmq_spark.store.errors import NoPermissionError, OptionError, RmqError
from rmq_spark.store.group_tables import AWAY, CLUSTER_LAG, GONE, NONE, GroupLags, QueueLag, lag_row, unread_range
from rmq_spark.store.model import Away, Gone, QueueAnswer, QueueBounds, QueueKey

_LOG = logging.getLogger("rmq_spark")


def measure_lag(backend: ClusterBackend, group: str | None, now_ms: int) -> pa.Table:
    """Return the lag of one group, or of all groups: one row for each group and queue.

    A group's queues are those of the topics in which it has committed offsets. `secondsBehind` is measured up to
    `now_ms` (ms since the epoch). Raises NotFoundError for an unknown group, NoPermissionError if a broker refuses, and
    BackendUnavailableError if none answers. With `group` None, groups and topics that cannot be read are left out with
    a warning.
    """
    measured = measure_lags(backend, None if group is None else [group], now_ms, is_strict=group is not None)
    for error in measured.errors.values():
        raise error
    return measured.table


def measure_lags(
    backend: ClusterBackend, groups: Sequence[str] | None, now_ms: int, *, is_strict: bool = False
) -> GroupLags:
    """Return the lag of groups as `measure_lag` does. Each broker is asked for all of them at the same time.

    A group that is unknown or that a broker refuses has an error in the result. Unless it `is_strict`, topics that
    cannot be read are left out with a warning. Raises BackendUnavailableError if no broker answers.
    """
    progress = GroupProgress(backend)
    answered = _read_all(progress) if groups is None else progress.find(groups)
    found = {group: one for group, one in answered.items() if isinstance(one, Progress)}
    errors = {group: one for group, one in answered.items() if not isinstance(one, Progress)}
    silent = {broker: reason for one in found.values() for broker, reason in one.silent.items()}
    if silent:
        _LOG.warning("rmq: the lag in queues of some brokers is not known: %s", describe_silent(silent))
    topics = sorted({topic for one in found.values() for topic in one.topics})
    answers: dict[str, dict[QueueKey, QueueAnswer]] = {}
    for queue, answer in _ask_for_bounds(backend, topics, silent, is_strict=is_strict).items():
        answers.setdefault(queue.topic, {})[queue] = answer
    rows = {
        (name, queue): _measure(queue, answer, one)
        for name, one in found.items()
        for topic in one.topics
        for queue, answer in answers.get(topic, {}).items()
    }
    looks = _look(backend, {(queue, begin) for (_, queue), (_, begin) in rows.items() if begin is not None})
    sizes = backend.catalog.sizes
    table = []
    for (name, queue), (lag, begin) in sorted(rows.items(), key=lambda one: one[0]):
        if begin is not None and (look := looks.get((queue, begin))) is not None:
            average = sizes.average_bytes(queue.topic)
            lag = replace(
                lag,
                next_stored_ms=None if look.proof is None else look.proof.store_time_ms,
                bytes=None if average is None or lag.messages is None else round(lag.messages * average),
            )
        one = found[name]
        row = lag_row(name, queue, one.offsets.get(queue), lag, now_ms)
        if lag.bounds is None and lag.messages is not None:
            row["maxOffset"] = one.stats[queue].broker_offset
        table.append(row)
    return GroupLags(pa.Table.from_pylist(table, CLUSTER_LAG), errors, progress.answering)


def _read_all(progress: GroupProgress) -> Mapping[str, Progress | RmqError]:
    """Return the progress of all groups, without those for which the account lacks a right."""
    answers = progress.read(progress.names())
    found = {group: one for group, one in answers.items() if isinstance(one, Progress)}
    refused = {group: one for group, one in answers.items() if isinstance(one, NoPermissionError)}
    if refused:
        error = next(iter(refused.values()))
        if not found:
            raise error
        _LOG.warning("rmq: the lag of %d of %d groups is not known: %s", len(refused), len(answers), error)
    return found


def _ask_for_bounds(
    backend: ClusterBackend, topics: list[str], silent: Mapping[str, str], *, is_strict: bool
) -> dict[QueueKey, QueueAnswer]:
    """Return the answer about each queue of the topics. Unless it `is_strict`, leave out topics of an odd kind."""
    try:
        return _ask_together(backend, topics, silent)
    except OptionError:
        if is_strict:
            raise
    found: dict[QueueKey, QueueAnswer] = {}
    for topic in topics:
        try:
            found |= _ask_together(backend, [topic], silent)
        except OptionError as error:
            _LOG.warning("rmq: the lag in topic %s is not known: %s", topic, error)
    return found


def _ask_together(backend: ClusterBackend, topics: list[str], silent: Mapping[str, str]) -> dict[QueueKey, QueueAnswer]:
    """Return the answer about each queue of the topics, without asking brokers again that did not answer just now."""
    queues = [queue for some in backend.queues(topics, missing_ok=topics).values() for queue in some]
    answers: dict[QueueKey, QueueAnswer] = {
        queue: Away(queue.broker, 0, silent[queue.broker]) for queue in queues if queue.broker in silent
    }
    asked = [queue for queue in queues if queue not in answers]
    try:
        return answers | dict(backend.bounds(asked))
    except NoPermissionError:
        # The brokers have answered, and refuse the pulls that prove where queues begin.
        return answers | dict(backend.bounds(asked))


def _measure(queue: QueueKey, answer: QueueAnswer, progress: Progress) -> tuple[QueueLag, int | None]:
    """Return the lag of a group in a queue, without what messages tell, and the offset of the next unread message."""
    offset, stats = progress.offsets.get(queue), progress.stats.get(queue)
    if isinstance(answer, QueueBounds):
        state, begin, end = unread_range(offset, answer)
        has_last = stats is not None and offset is not None and answer.min_offset < offset <= answer.max_offset
        lag = QueueLag(
            state,
            answer,
            messages=end - begin,
            bytes=0 if begin == end else None,
            expired=0 if offset is None else max(0, answer.min_offset - offset),
            last_stored_ms=stats.last_time_ms or None if stats is not None and has_last else None,
        )
        return lag, begin if begin < end else None
    if isinstance(answer, Gone):
        return QueueLag(GONE), None
    if isinstance(answer, Away) or stats is None:
        return QueueLag(AWAY if isinstance(answer, Away) else NONE), None
    state, begin, end = unread_range(offset, QueueBounds(0, stats.broker_offset))
    return QueueLag(state, messages=end - begin, last_stored_ms=stats.last_time_ms or None), None


def _look(backend: ClusterBackend, places: set[tuple[QueueKey, int]]) -> Mapping[tuple[QueueKey, int], Look]:
    """Return the messages at queue offsets. There are none if the account may not pull."""
    try:
        return backend.catalog.looks.look(sorted(places))
    except NoPermissionError as error:
        _LOG.warning("rmq: secondsBehind and lagBytes are not known: %s", error)
        return {}
