"""The place to which the sessions of one commit write: a client, routes, and the terms of the commit.

Sends to target queues do not use this client. Each session has connections of its own for them (`registration`).
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rmq_spark.store.backend import CommitTerms
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import ClusterClient, borrowed_client, monotonic_ms
from rmq_spark.store.cluster.exactly_once.marks import reading_group
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.model import QueueKey

PATIENCE = 10  # times the request timeout: how long a broker may take to show what it has stored
_NO_TOPICS = NewTopics(is_allowed=False)


@dataclass(frozen=True, slots=True)
class SinkPlace:
    """A cluster to which one commit writes. For one thread. `monotonic_ms` returns a time that never runs back."""

    address: ClusterAddress
    terms: CommitTerms
    client: ClusterClient
    routes: WriteRoutes
    monotonic_ms: Callable[[], float] = monotonic_ms
    sleep: Callable[[float], None] = time.sleep

    @property
    def pull_terms(self) -> PullTerms:
        """How blobs and target queues are pulled."""
        address = self.address
        timeout_ms = 0 if math.isinf(address.write_wait_ms) else int(address.write_wait_ms)
        return PullTerms(reading_group(address.pull_group), address.namespace, address.pulls_in_flight, timeout_ms)

    @property
    def patience_ms(self) -> int:
        """How long a broker may take to show what it has stored (ms)."""
        return PATIENCE * self.address.request_timeout_ms

    def find_masters(self, topics: Mapping[str, Collection[str]]) -> dict[str, str]:
        """Return the addresses of the masters of brokers, by the names of the brokers.

        `topics` are the topics that each broker must have, by the name of the broker. Raises BackendUnavailableError
        for a broker without master, or a broker that the name servers do not list with one of its topics.
        """
        for topic in sorted({topic for names in topics.values() for topic in names}):
            self.routes.renew(topic)
        for broker, names in topics.items():
            for topic in sorted(names):
                if not self.routes.is_listed(topic, broker):
                    self.routes.join(topic)
                if not self.routes.is_listed(topic, broker):
                    raise BackendUnavailableError(
                        f"topic {topic} is not listed on broker {broker} with a master; expected all brokers that the "
                        "batch is for. Start the master; after a restart of the name servers wait 30 s. If the broker "
                        "runs and does not have the topic, create it: rmq prepare-sink."
                    )
        return {broker: self.routes.address(broker) for broker in topics}

    def find_blob_brokers(self, runs: Iterable[StagedRun]) -> dict[str, str]:
        """Return the addresses of the brokers that have the blobs of runs, by name. Errors as in `find_masters`."""
        topics: dict[str, set[str]] = {}
        for run in runs:
            topics.setdefault(run.stage.broker, set()).add(run.stage.topic)
        return self.find_masters(topics)

    def barrier_queues(self, brokers: Collection[str]) -> list[QueueKey]:
        """Return one queue of the stage topic for each broker, with the cluster's name of the topic."""
        return [QueueKey(self.routes.topic_of(self.terms.stage_topic), 0, broker) for broker in brokers]


@contextmanager
def open_place(address: ClusterAddress, terms: CommitTerms) -> Iterator[SinkPlace]:
    """Return a context manager with a place."""
    with borrowed_client(address) as client:
        yield SinkPlace(address, terms, client, WriteRoutes(client, monotonic_ms, _NO_TOPICS))
