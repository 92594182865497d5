"""Resets of the offsets of a group in a cluster, by an administrator.

The offset of each queue is committed, and then the broker is asked to reset it (222), as `resetOffsetByQueueId` of
RocketMQ's tools does. The answer shows what kind of broker it is (`admin_requests`):

| answer | members | what follows |
| --- | --- | --- |
| the queue that was named | any | the broker has set the offset; the topic's other queues are asked for too |
| the queues of the whole topic | connected | it has sent these offsets to them. One that differs is committed again |
| nobody is online | none | the commit counts. It is read again |
| the group lacks offsets | none | the commit counts. It is read again |
| the group lacks offsets | connected | an error: the members were told nothing, and commit over it |

A member of Java takes the offsets that are sent to it after 10 s, during which it consumes nothing of these queues.
Members of Java at the second kind of broker go back to their committed offsets in the topic's other queues too.

Source: DefaultMQAdminExtImpl#resetOffsetByQueueId (5.3), Broker2Client#resetOffset, MQClientInstance#resetOffset
(4.9, 5.3).
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

from rmq_spark.store.cluster.admin_requests import ResetOffsetRequest, ResetResponse
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.group_progress import GroupProgress, describe_silent
from rmq_spark.store.cluster.group_requests import GroupConnectionsRequest, GroupMembersRequest
from rmq_spark.store.cluster.offset_commits import OffsetCommits
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    GroupConflictError,
    NotFoundError,
    OptionError,
    RmqError,
    StoreError,
)
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import retry_topic
from rmq_spark.store.reset_arguments import (
    EARLIEST,
    LATEST,
    ResetTo,
    check_reset_time,
    check_resettable,
    check_target,
    check_targets,
    check_topics,
)

_LOG = logging.getLogger("rmq_spark")

_TRIES = 3  # a member commits every 5 s, so it seldom commits between two requests
_PULLS = "CONSUME_ACTIVELY"
_Failed = dict[QueueKey, RmqError]


def reset_group(
    backend: ClusterBackend, group: str, to: ResetTo, topics: str | Sequence[str] | None = None
) -> dict[QueueKey, int]:
    """Reset the offsets of a group, and return the new ones.

    Before anything is changed it raises OptionError for an invalid argument, NotFoundError for a topic or queue that
    does not exist, OffsetRangeError for an offset outside of its queue, BackendUnavailableError if a broker does not
    answer, and NoPermissionError if one refuses to tell the offsets.

    If some queues could not be reset, it raises an error of the first failure's class, which names them and the others.
    Then call it again.
    """
    check_resettable(group)
    targets = find_targets(backend, group, to, topics)
    failed = _Resets(backend, group).apply(targets)
    if failed:
        raise _incomplete(group, backend.location.describe(), targets.keys() - failed.keys(), failed)
    return targets


def find_targets(
    backend: ClusterBackend, group: str, to: ResetTo, topics: str | Sequence[str] | None
) -> dict[QueueKey, int]:
    """Return the offsets to which the queues will be reset, sorted by queue. Changes nothing."""
    if isinstance(to, Mapping):
        targets = check_targets(to, topics, has_brokers=True)
        return _checked(backend, targets)
    time_ms = None if to in (EARLIEST, LATEST) else check_reset_time(to)
    names = check_topics(topics) if topics is not None else _topics_of(backend, group)
    queues = [queue for found in backend.queues(names).values() for queue in found]
    bounds = dict(sorted(backend.require_bounds(queues).items()))
    if time_ms is not None:
        found = backend.offsets_at(dict.fromkeys(bounds, time_ms))
        return {queue: max(found[queue], one.min_offset) for queue, one in bounds.items()}
    return {queue: one.min_offset if to == EARLIEST else one.max_offset for queue, one in bounds.items()}


def _topics_of(backend: ClusterBackend, group: str) -> list[str]:
    """Return the topics in which a group has offsets, without its retry topic."""
    asked = GroupProgress(backend)
    try:
        progress = asked.require(group)
    except NotFoundError as error:
        raise NotFoundError(f"{error} Name the topics to reset.") from None
    if progress.silent:
        raise BackendUnavailableError(
            f"cannot reset consumer group {group}: {describe_silent(progress.silent)}, so its topics are not all "
            "known; expected all brokers. Nothing was changed. Name the topics to reset, or wait for the brokers."
        )
    names = [topic for topic in progress.topics if topic != retry_topic(group)]
    others = sorted(asked.topics(group) - {*progress.topics, retry_topic(group)})
    left_out = [topic for topic, queues in backend.queues(others, missing_ok=others).items() if queues]
    if left_out:
        _LOG.warning(
            "rmq: the reset of consumer group %s leaves out topics to which no member subscribes, because brokers do "
            "not list them while the group has members: %s. Name them to reset them too",
            *(group, ", ".join(left_out)),
        )
    if not names:
        raise NotFoundError(
            f'consumer group "{group}" has no offsets in {backend.location.describe()}. Name the topics to reset.'
        )
    return names


def _checked(backend: ClusterBackend, targets: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
    """Return the targets with the names of their brokers. Raises the errors of `reset_group` about queues."""
    existing = backend.queues(sorted({queue.topic for queue in targets}))
    named: dict[QueueKey, int] = {}
    for given, offset in targets.items():
        queue = _with_broker(given, existing[given.topic])
        if queue in named:
            raise OptionError(f"reset_offsets: to[{queue.topic!r}] names the queue {queue.id_text} twice.")
        if queue not in existing[queue.topic]:
            known = ", ".join(one.id_text for one in existing[queue.topic])
            raise NotFoundError(f'topic "{queue.topic}" has no queue {queue.id_text}. Its queues are: {known}.')
        named[queue] = offset
    bounds: Mapping[QueueKey, QueueBounds] = backend.require_bounds(named.keys())
    for queue, offset in named.items():
        check_target(queue, offset, bounds[queue])
    return dict(sorted(named.items()))


def _with_broker(queue: QueueKey, existing: Collection[QueueKey]) -> QueueKey:
    """Return the queue with a broker's name, which may be left out if one broker has the whole topic."""
    brokers = sorted({one.broker for one in existing})
    if queue.broker or not brokers:
        return queue
    if len(brokers) > 1:
        raise OptionError(
            f'reset_offsets: found the queue id {queue.queue_id} of topic "{queue.topic}" without a broker; expected '
            f'one of the brokers {", ".join(brokers)} before it, as in "{brokers[0]}:{queue.queue_id}".'
        )
    return QueueKey(queue.topic, queue.queue_id, brokers[0])


class _Resets:
    """The requests that reset a group."""

    def __init__(self, backend: ClusterBackend, group: str) -> None:
        self._backend, self._group = backend, group
        self._terms = PullTerms(group, backend.location.namespace)
        self._commits = OffsetCommits(backend, self._terms)

    def apply(self, targets: Mapping[QueueKey, int]) -> _Failed:
        """Reset queues. Return the error for each queue that was not reset."""
        failed: _Failed = {}
        for _ in range(_TRIES):
            targets, errors = self._try(targets)
            failed |= errors
            if not targets:
                return failed
        return failed | {
            queue: GroupConflictError(
                f"members of consumer group {self._group} commit other offsets at the same time; expected none"
            )
            for queue in targets
        }

    def _try(self, targets: Mapping[QueueKey, int]) -> tuple[dict[QueueKey, int], _Failed]:
        """Reset queues once. Return the targets of the queues that must be reset again, and the failures."""
        outcomes = self._commits.send(targets)
        failed: _Failed = {queue: one for queue, one in outcomes.items() if isinstance(one, RmqError)}
        again: dict[QueueKey, int] = {}
        parts = [
            {queue: targets[queue] for queue in queues}
            for _, queues in groupby(sorted(targets.keys() - failed.keys()), key=lambda one: (one.topic, one.broker))
        ]
        firsts = self._ask({queue: part[queue] for part in parts for queue in list(part)[:1]})
        rest: dict[QueueKey, int] = {}
        for part, (first, answer) in zip(parts, firsts.items(), strict=True):
            if isinstance(answer, ResetResponse) and answer.offsets.keys() == {self._terms.stored_queue(first)}:
                rest |= {queue: offset for queue, offset in part.items() if queue != first}
                part = {first: part[first]}
            changed, errors = self._judge(part, answer)
            again, failed = again | changed, failed | errors
        for queue, answer in self._ask(rest).items():
            changed, errors = self._judge({queue: rest[queue]}, answer)
            again, failed = again | changed, failed | errors
        return again, failed

    def _ask(self, targets: Mapping[QueueKey, int]) -> dict[QueueKey, ResetResponse | RmqError]:
        """Ask the brokers to reset queues, all at the same time."""
        found: dict[QueueKey, ResetResponse | RmqError] = {}
        calls = {}
        for queue, offset in targets.items():
            request = ResetOffsetRequest(self._terms.stored_group, self._terms.stored_queue(queue), offset)
            try:
                calls[queue] = self._backend.find_address(queue), request
            except BackendUnavailableError as error:
                found[queue] = error
        found |= zip(calls, self._backend.client.call_all(list(calls.values())), strict=True)
        return {queue: found[queue] for queue in targets}

    def _judge(
        self, part: Mapping[QueueKey, int], answer: ResetResponse | RmqError
    ) -> tuple[dict[QueueKey, int], _Failed]:
        """Compare targets with what a broker has set or sent, or with what is committed if it did neither.

        Return the targets that must be reset again, and the failures.
        """
        if isinstance(answer, RmqError):
            return {}, dict.fromkeys(part, answer)
        if answer.offsets:
            self._warn_of_members(part, answer)
            found = {queue: answer.offsets.get(self._terms.stored_queue(queue)) for queue in part}
            return (
                {queue: offset for queue, offset in part.items() if found[queue] not in (None, offset)},
                {queue: self._unsent(queue) for queue in part if found[queue] is None},
            )
        try:
            if answer.lacks_offsets and (members := self._members(next(iter(part)))):
                return {}, dict.fromkeys(part, self._untold(members))
            committed = self._backend.catalog.groups.committed(self._group, part.keys())
        except RmqError as error:
            return {}, dict.fromkeys(part, error)
        return {queue: offset for queue, offset in part.items() if committed.get(queue) != offset}, {}

    def _unsent(self, queue: QueueKey) -> RmqError:
        return StoreError(
            f"the broker sends the members of consumer group {self._group} no offset of queue {queue}, because nothing "
            "is written to the queue any more (writeQueueNums). Stop the members first"
        )

    def _untold(self, members: Sequence[str]) -> RmqError:
        return GroupConflictError(
            f"consumer group {self._group} has the member {members[0]}, and lacks an offset in some queues of the "
            "topic, so the broker does not tell its members of a reset; expected an offset in every queue. Reset the "
            "whole topic, or stop the members first"
        )

    def _members(self, queue: QueueKey) -> Sequence[str]:
        """Return the client ids of the members at the broker of a queue."""
        request = GroupMembersRequest(self._terms.stored_group, queue.broker)
        return self._backend.client.call(self._backend.find_address(queue), request).client_ids

    def _warn_of_members(self, part: Mapping[QueueKey, int], answer: ResetResponse) -> None:
        """Log what a broker that sends offsets to the members does besides, and what it cannot do."""
        queue = next(iter(part))
        if answer.offsets.keys() == {self._terms.stored_queue(queue)}:
            return
        others = len(answer.offsets.keys() - {self._terms.stored_queue(one) for one in part})
        if others:
            _LOG.warning(
                "rmq: the members of consumer group %s also return to their committed offsets in %d other queues of "
                "topic %s on broker %s, and consume again what they have consumed since",
                *(self._group, others, queue.topic, queue.broker),
            )
        request = GroupConnectionsRequest(self._terms.stored_group, queue.broker)
        (found,) = self._backend.client.call_all([(self._backend.find_address(queue), request)])
        if not isinstance(found, RmqError) and found.consume_type == _PULLS:
            _LOG.warning(
                "rmq: the members of consumer group %s pull, so they ignore the reset, and commit over it: %s. Stop "
                "them, and reset the group again",
                self._group,
                ", ".join(one.client_id for one in found.connections),
            )


def _incomplete(group: str, where: str, done: Iterable[QueueKey], failed: Mapping[QueueKey, RmqError]) -> RmqError:
    """Return the error for a reset that did not reach all queues, of the class of the first failure."""
    cause = next(iter(failed.values()))
    reset = name_queues(done)
    text = (
        f"reset_offsets of consumer group {group} in {where} is incomplete: found the queues {name_queues(failed)} not "
        f"reset, or only until a member commits; expected all. Reset were {reset or 'none'}. Call it again. The cause: "
        f"{cause}"
    )
    if isinstance(cause, BrokerError):
        return BrokerError(cause.code, text)
    return type(cause)(text) if isinstance(cause, StoreError) else StoreError(text)


def name_queues(queues: Iterable[QueueKey]) -> str:
    """Return the names of queues as a short text: "orders/broker-a:0-3, orders/broker-b:1"."""
    names = []
    for (topic, broker), some in groupby(sorted(queues), key=lambda one: (one.topic, one.broker)):
        ids = [queue.queue_id for queue in some]
        for _, run in groupby(enumerate(ids), key=lambda one: one[1] - one[0]):
            numbers = [number for _, number in run]
            last = f"-{numbers[-1]}" if len(numbers) > 1 else ""
            names.append(f"{QueueKey(topic, numbers[0], broker)}{last}")
    return ", ".join(names)
