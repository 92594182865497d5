"""Where a consumer group begins in the queues of a cluster: at its committed offset, or else where RocketMQ begins.

The offsets are asked for with QUERY_CONSUMER_OFFSET, one request for each queue, which changes nothing at the broker. A
group without an offset in a queue begins at 0 if the queue is *young*, as a Java consumer does: the broker decides
this. A queue is young if it has its first message, and that is so new that it should be in memory. In other queues the
fallback decides, the ConsumeFromWhere of a Java consumer. Each queue is treated by itself.

A broker of 4.9 does not tell a group without an offset in a young queue from one with the offset 0. Both begin at 0.

Source: ConsumerManageProcessor#queryConsumerOffset, RebalancePushImpl#computePullFromWhere (4.9, 5.3).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.group_requests import CommittedOffsetRequest
from rmq_spark.store.errors import RmqError
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

EARLIEST, LATEST, TIMESTAMP = "earliest", "latest", "timestamp"


class GroupOffsetRequests:
    """Questions about the committed offsets of groups. For one thread.

    `address_of` returns the address of a broker, None if it is unknown. `stored_name` returns the cluster's name of a
    topic or a group.
    """

    def __init__(
        self, client: ClusterClient, address_of: Callable[[str], str | None], stored_name: Callable[[str], str]
    ) -> None:
        self._client, self._address_of, self._stored_name = client, address_of, stored_name

    def committed(self, group: str, queues: Collection[QueueKey]) -> dict[QueueKey, int]:
        """Return the committed offsets of a group. A queue without one is left out.

        Raises BackendUnavailableError if a broker does not answer, and NoPermissionError if it refuses.
        """
        return self._ask(group, queues, takes_zero=False)

    def beginnings(self, group: str, queues: Collection[QueueKey]) -> dict[QueueKey, int]:
        """Return where brokers let a group begin that has no offset: at 0 in young queues. Others are left out.

        If the group has committed an offset meanwhile, it begins there. Raises the same errors as `committed`.
        """
        return self._ask(group, queues, takes_zero=True)

    def _ask(self, group: str, queues: Collection[QueueKey], *, takes_zero: bool) -> dict[QueueKey, int]:
        stored_group = self._stored_name(group)
        calls = []
        for queue in queues:
            stored = QueueKey(self._stored_name(queue.topic), queue.queue_id, queue.broker)
            request = CommittedOffsetRequest(stored_group, stored, takes_zero)
            calls.append((self._address_of(queue.broker) or "", request))
        outcomes: list[Any] = self._client.call_all(calls)
        for outcome in outcomes:
            if isinstance(outcome, RmqError):
                raise outcome
        return {
            queue: outcome.offset
            for queue, outcome in zip(queues, outcomes, strict=True)
            if outcome.offset is not None and outcome.offset >= 0
        }


def place_new_group(
    bounds: Mapping[QueueKey, QueueBounds], fallback: str, by_time: Mapping[QueueKey, int]
) -> dict[QueueKey, int]:
    """Return where a group without an offset begins in queues that are not young: within the bounds of each. Pure.

    `by_time` has the offset of the wanted time, for `fallback` timestamp; a queue without one begins at its end. In a
    retry topic a group begins at the first message, so that no failed message is lost. But with timestamp it begins at
    the end, because a time has no meaning there.
    """
    found = {}
    for queue, available in bounds.items():
        is_retry = queue.topic.startswith(RETRY_TOPIC_PREFIX)
        if fallback == EARLIEST or (is_retry and fallback == LATEST):
            begin = available.min_offset
        elif fallback == TIMESTAMP and not is_retry:
            begin = by_time.get(queue, available.max_offset)
        else:
            begin = available.max_offset
        found[queue] = max(available.min_offset, min(begin, available.max_offset))
    return found
