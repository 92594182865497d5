"""The committed offsets of a consumer group, read from and written to the masters of the queues' brokers.

A broker accepts any offset, and executes requests in any order. So one commit is in flight for each queue. It keeps
offsets in memory and writes them to its disk every 5 s.

For each topic and group a broker has a map of offsets. It creates the map with the group's first offset in the topic.
If two such commits come at the same time, each creates a map, and the offset in one of them is lost, though both are
answered with success. So one queue of a topic is committed before the others.

Source: RemoteBrokerOffsetStore, ConsumerManageProcessor, ConsumerOffsetManager#commitOffset (4.9, 5.3).
"""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Protocol, TypeAlias

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.catalog import ClusterCatalog
from rmq_spark.store.cluster.client import ClusterClient, ask_master
from rmq_spark.store.cluster.group_requests import CommitOffsetRequest, CommittedOffsetRequest
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError, RmqError
from rmq_spark.store.model import QueueKey


class Outcome(Enum):
    """What a broker did with an offset."""

    COMMITTED = "it is the group's offset"
    IGNORED = "an administrator has reset the group's offset, and the group has not pulled since (5.x)"


_Address: TypeAlias = str | BackendUnavailableError


class Brokers(Protocol):
    """The part of a backend that reads and commits need."""

    @property
    def client(self) -> ClusterClient:
        """The client that asks."""

    def find_address(self, queue: QueueKey, *, renews: bool = False) -> str:
        """Return where to ask the broker of a queue, by new routes if it `renews`. See `ClusterBackend`."""


class GroupPlace(Brokers, Protocol):
    """The part of a backend that a member of a group needs."""

    @property
    def location(self) -> ClusterAddress:
        """Where the cluster is."""

    @property
    def catalog(self) -> ClusterCatalog:
        """The topics and brokers that the backend knows."""


class OffsetCommits:
    """Reads and commits the offsets of the group in `terms`. For one thread."""

    def __init__(self, backend: Brokers, terms: PullTerms) -> None:
        self._backend, self._terms = backend, terms

    def read(self, queue: QueueKey) -> int | None:
        """Return the committed offset, or None if the group has none. A broker of 4.9 may answer 0 for none."""
        request = CommittedOffsetRequest(self._terms.stored_group, self._terms.stored_queue(queue))
        client = self._backend.client
        return ask_master(
            lambda renews: self._backend.find_address(queue, renews=renews), lambda to: client.call(to, request).offset
        )

    def send(self, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, Outcome | RmqError]:
        """Commit offsets, one request for each queue. Return the outcome for each queue.

        At each broker one queue of a topic comes first, and the others at the same time. If the first one fails, the
        others are not sent, and have its error.
        """
        of_map: dict[tuple[str, str], list[QueueKey]] = {}
        for queue in offsets:
            of_map.setdefault((queue.broker, queue.topic), []).append(queue)
        outcomes = self._commit({first: offsets[first] for first, *_ in of_map.values()})
        others: dict[QueueKey, int] = {}
        for first, *rest in of_map.values():
            outcome = outcomes[first]
            if isinstance(outcome, RmqError):
                outcomes |= dict.fromkeys(rest, outcome)
            else:
                others |= {queue: offsets[queue] for queue in rest}
        outcomes |= self._commit(others)
        return {queue: outcomes[queue] for queue in offsets}

    def _commit(self, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, Outcome | RmqError]:
        """Commit offsets at the same time, and again at an address or for a group that the broker did not know."""
        addresses = self._addresses(offsets, renews=False)
        outcomes = self._send(addresses, offsets)
        away = [queue for queue, outcome in outcomes.items() if isinstance(outcome, BackendUnavailableError)]
        renewed = self._addresses(away, renews=True)
        moved = {queue: to for queue, to in renewed.items() if isinstance(to, str) and to != addresses[queue]}
        addresses |= moved
        outcomes |= self._send(moved, offsets)
        unknown = [queue for queue, outcome in outcomes.items() if isinstance(outcome, NoPermissionError)]
        refused = self._introduce(unknown, addresses)
        return (
            outcomes
            | refused
            | self._send({queue: addresses[queue] for queue in unknown if queue not in refused}, offsets)
        )

    def _send(
        self, addresses: Mapping[QueueKey, _Address], offsets: Mapping[QueueKey, int]
    ) -> dict[QueueKey, Outcome | RmqError]:
        """Send offsets to known addresses. Where the address is an error, this is the outcome."""
        known = {queue: to for queue, to in addresses.items() if isinstance(to, str)}
        group = self._terms.stored_group
        calls = [
            (to, CommitOffsetRequest(group, self._terms.stored_queue(queue), offsets[queue]))
            for queue, to in known.items()
        ]
        outcomes: dict[QueueKey, Outcome | RmqError] = {
            queue: error for queue, error in addresses.items() if not isinstance(error, str)
        }
        for queue, answer in zip(known, self._backend.client.call_all(calls), strict=True):
            if isinstance(answer, RmqError):
                outcomes[queue] = answer
            else:
                outcomes[queue] = Outcome.IGNORED if answer.is_reset else Outcome.COMMITTED
        return {queue: outcomes[queue] for queue in addresses}

    def _addresses(self, queues: Collection[QueueKey], *, renews: bool) -> dict[QueueKey, _Address]:
        """Return where to ask the broker of each queue, or the error if that is unknown."""
        found: dict[QueueKey, _Address] = {}
        for queue in queues:
            try:
                found[queue] = self._backend.find_address(queue, renews=renews)
            except BackendUnavailableError as error:
                found[queue] = error
        return found

    def _introduce(
        self, queues: Collection[QueueKey], addresses: Mapping[QueueKey, _Address]
    ) -> dict[QueueKey, RmqError]:
        """Pull a message of each queue, which adds the group to those that its broker knows. Return the errors.

        A broker of 5.x accepts no offset of a group that it does not know. If the group was refused for another reason,
        the pull is refused too.
        """
        group = self._terms.stored_group
        calls = [(str(addresses[queue]), PullRequest(self._terms.stored_queue(queue), 0, 1, group)) for queue in queues]
        outcomes = zip(queues, self._backend.client.call_all(calls), strict=True)
        return {queue: outcome for queue, outcome in outcomes if isinstance(outcome, RmqError)}
