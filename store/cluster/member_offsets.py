"""The group's offsets in the queues of one member: reads, commits, and resets by administrators. For one thread.

A broker of 5.x keeps a reset until the group pulls from the queue. Till then it answers the target of the reset for the
group's offset, and accepts no commit (`Outcome.IGNORED`). So a commit shows whether a reset waits. It must be one of an
offset that the member may commit in any case, its own position, because without a reset the broker accepts it. A pull
in the name of the group takes the reset.

Source: ConsumerOffsetManager#assignResetOffset, PullMessageProcessor (5.3).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from rmq_spark.store.cluster.codes import GetMessageStatus
from rmq_spark.store.cluster.group_requests import CommittedOffsetRequest
from rmq_spark.store.cluster.offset_commits import Brokers, OffsetCommits, Outcome
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.requests import PullRequest, Request
from rmq_spark.store.errors import BackendUnavailableError, RmqError
from rmq_spark.store.model import QueueKey

Told: TypeAlias = int | RmqError | None


class MemberOffsets:
    """Requests about the offsets of the group in `terms`."""

    def __init__(self, brokers: Brokers, terms: PullTerms) -> None:
        self._brokers, self._terms = brokers, terms
        self._commits = OffsetCommits(brokers, terms)

    def read(self, queues: Collection[QueueKey]) -> dict[QueueKey, Told]:
        """Return the group's offset in each queue, None if it has none, or the error of the broker.

        A broker of 4.9 may answer 0 for none.
        """
        group = self._terms.stored_group
        answers = self._ask(queues, lambda queue: CommittedOffsetRequest(group, self._terms.stored_queue(queue)))
        return {queue: one if isinstance(one, RmqError) else one.offset for queue, one in answers.items()}

    def commit(self, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, Outcome | RmqError]:
        """Commit offsets. Return the outcome for each queue. See `OffsetCommits.send`."""
        return self._commits.send(offsets)

    def take_resets(self, positions: Mapping[QueueKey, int]) -> dict[QueueKey, Told]:
        """Pull in the name of the group, so that resets end. Return the target of each, None if none waited.

        `positions` are offsets within the queues.
        """
        group = self._terms.stored_group
        answers = self._ask(
            positions, lambda queue: PullRequest(self._terms.stored_queue(queue), positions[queue], 1, group)
        )
        return {
            queue: one
            if isinstance(one, RmqError)
            else (one.next_offset if one.reason == GetMessageStatus.OFFSET_RESET else None)
            for queue, one in answers.items()
        }

    def _ask(self, queues: Collection[QueueKey], make: Callable[[QueueKey], Request[Any]]) -> dict[QueueKey, Any]:
        """Send a request for each queue to its broker. Return the responses and errors."""
        outcomes: dict[QueueKey, Any] = {}
        calls: dict[QueueKey, tuple[str, Request[Any]]] = {}
        for queue in queues:
            try:
                calls[queue] = self._brokers.find_address(queue), make(queue)
            except BackendUnavailableError as error:
                outcomes[queue] = error
        answers = self._brokers.client.call_all(list(calls.values()))
        return outcomes | dict(zip(calls, answers, strict=True))
