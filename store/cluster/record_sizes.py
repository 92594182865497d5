"""Estimates of the sizes of records, because brokers do not tell them: a moving average for each topic.

The average is over about the last 256 records of a topic that the driver has seen. Every record that is pulled to
prove a position (`RecordLooks`) counts. Besides, a sample is pulled before a topic is measured for the first time, and
again when the last one is older than 10 s: up to 32 messages from the beginning of each of two ranges, the longest.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import PullStatus
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, NotFoundError
from rmq_spark.store.model import QueueKey, QueueRange

_LOG = logging.getLogger("rmq_spark")

_WINDOW_RECORDS = 256
_SAMPLE_MESSAGES = 32  # a broker returns no more by default
_SAMPLE_RANGES = 2
_SAMPLE_AGE_MS = 10_000
_PULLS_MAX = 64  # at once: each may bring 256 KiB, or a single message of 4 MiB
_UNKNOWN_BYTES = 1024  # of a record of a topic of which no record was seen


@dataclass(slots=True)
class MovingAverage:
    """The average size in bytes of the last records, of about 256 or of all if they are fewer."""

    count: float = 0
    total_bytes: float = 0

    def add(self, count: int, size_bytes: int) -> None:
        """Add records with `size_bytes` in all."""
        self.count += count
        self.total_bytes += size_bytes
        if self.count > _WINDOW_RECORDS:
            self.total_bytes *= _WINDOW_RECORDS / self.count
            self.count = _WINDOW_RECORDS

    @property
    def value(self) -> float:
        """The average, which is at least 1. 1024 if no record was added."""
        return max(self.total_bytes / self.count, 1) if self.count else _UNKNOWN_BYTES


def count_records(records: bytes | memoryview) -> int:
    """Return the number of whole records in the body of a pull's answer. Each begins with its size (4 bytes)."""
    count = position = 0
    while position + 4 <= len(records):
        size = int.from_bytes(records[position : position + 4], "big")
        if size < 4 or position + size > len(records):
            break
        count, position = count + 1, position + size
    return count


class RecordSizes:
    """The estimated sizes of the records of one reader's topics. It implements `SizeEstimates`. For one thread.

    `address_of` returns the address of a broker, None if it is unknown. `stored_name` returns the cluster's name of a
    topic, and `group` is the cluster's name of the group that pulls. `monotonic_ms` is a time that never runs back.
    """

    def __init__(
        self,
        client: ClusterClient,
        group: str,
        address_of: Callable[[str], str | None],
        stored_name: Callable[[str], str],
        monotonic_ms: Callable[[], float],
    ) -> None:
        self._client, self._group = client, group
        self._address_of, self._stored_name = address_of, stored_name
        self._monotonic_ms = monotonic_ms
        self._averages: dict[str, MovingAverage] = {}
        self._sampled_ms: dict[str, float] = {}

    def note(self, topic: str, records: bytes | memoryview) -> None:
        """Add the records of a topic that a pull returned to the topic's average."""
        count = count_records(records)
        if count:
            self._averages.setdefault(topic, MovingAverage()).add(count, len(records))

    def average_bytes(self, topic: str) -> float | None:
        """Return the average size of the records of a topic that were seen, in bytes. None if none was seen."""
        average = self._averages.get(topic)
        return average.value if average is not None and average.count else None

    def measure(self, parts: Collection[QueueRange]) -> dict[QueueRange, int]:
        """Estimate the size of the records of each range in bytes. Raises NoPermissionError if pulls are refused."""
        self._sample(parts)
        return {part: round(part.count * self._average(part)) for part in parts}

    def fit(self, max_bytes: Mapping[QueueRange, int]) -> dict[QueueRange, int]:
        """Estimate the end of the longest prefix of each range whose records have at most that size in bytes."""
        self._sample(max_bytes.keys())
        return {part: part.begin + min(part.count, int(most / self._average(part))) for part, most in max_bytes.items()}

    def _average(self, part: QueueRange) -> float:
        return self._averages.setdefault(part.queue.topic, MovingAverage()).value

    def _sample(self, parts: Collection[QueueRange]) -> None:
        """Pull messages of the topics whose last sample is old. Topics whose brokers do not answer keep their value."""
        if not self._sampled_ms and parts:
            _LOG.warning(
                "rmq: a cluster does not tell the sizes of messages, so batches are limited by an estimate: the "
                "average size of the topic's last records"
            )
        now_ms = self._monotonic_ms()
        due: dict[str, list[QueueRange]] = {}
        for part in parts:
            if now_ms - self._sampled_ms.get(part.queue.topic, -_SAMPLE_AGE_MS) >= _SAMPLE_AGE_MS and part.count:
                due.setdefault(part.queue.topic, []).append(part)
        self._sampled_ms.update(dict.fromkeys(due, now_ms))
        chosen = [part for of in due.values() for part in sorted(of, key=lambda one: -one.count)[:_SAMPLE_RANGES]]
        for begin in range(0, len(chosen), _PULLS_MAX):
            some = chosen[begin : begin + _PULLS_MAX]
            for part, outcome in zip(some, self._pull(some), strict=True):
                if isinstance(outcome, PullResponse):
                    if outcome.status is PullStatus.FOUND:
                        self.note(part.queue.topic, outcome.records)
                elif not isinstance(outcome, BackendUnavailableError | NotFoundError | BrokerError):
                    raise outcome

    def _pull(self, parts: Sequence[QueueRange]) -> list[Any]:
        calls = []
        for part in parts:
            queue = QueueKey(self._stored_name(part.queue.topic), part.queue.queue_id, part.queue.broker)
            request = PullRequest(queue, part.begin, _SAMPLE_MESSAGES, self._group)
            calls.append((self._address_of(part.queue.broker) or "", request))
        return self._client.call_all(calls)
