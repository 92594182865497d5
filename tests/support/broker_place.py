"""A place with broker names in a dict of this process, whose brokers answer what a test says."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from support.dict_backend import PLACES, DictBackend, DictPlace

from rmq_spark.store.backend import Capability
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.model import Away, Gone, QueueAnswer, QueueBounds, QueueKey, RecordProof

FIRST_MS = 1_700_000_000_000  # store time of the message with the queue offset 0; each later one is 1 s younger

# What a broker answers for its queues in place of their bounds: Away, Gone or Forbidden, by its name.
ANSWERS: dict[str, QueueAnswer] = {}
UNLISTED: set[str] = set()  # brokers that are not in the routes
LEAVING: set[str] = set()  # brokers that go away when they are asked for the offset of a time
SILENT: list[bool] = []  # not empty: no name server answers


def fill(broker: str, queue_id: int, count: int, topic: str = "orders") -> QueueKey:
    """Append messages to a queue."""
    queue = QueueKey(topic, queue_id, broker)
    messages = PLACES.setdefault("main", {}).setdefault(queue, [])
    for offset in range(len(messages), len(messages) + count):
        messages.append(_message(queue, offset))
    return queue


def _message(queue: QueueKey, offset: int) -> dict[str, Any]:
    return {
        "topic": queue.topic,
        "physicalTopic": queue.topic,
        "brokerName": queue.broker,
        "queueId": queue.queue_id,
        "queueOffset": offset,
        "commitLogOffset": offset * 100,
        "storeTimestamp": (FIRST_MS + offset * 1000) * 1000,
        "properties": {},
    }


@dataclass(frozen=True, slots=True)
class BrokerPlace(DictPlace):
    """The dict with this name, as a cluster. Without its secret it refuses to open."""

    secret: str = "planted"
    capabilities = frozenset({Capability.BROKERS, Capability.NAME_SERVERS})

    def without_secrets(self) -> "BrokerPlace":
        return replace(self, secret="")

    def with_secrets_of(self, source: "BrokerPlace") -> "BrokerPlace":
        return replace(self, secret=source.secret)

    def open(self) -> "BrokerBackend":
        assert self.secret, "a task takes the secret from its settings"
        return BrokerBackend(self)


class BrokerBackend(DictBackend):
    """A dict whose brokers go away and come back. It remembers no route."""

    def __init__(self, location: DictPlace) -> None:
        super().__init__(location)
        self._answers: tuple[object, ...] = ()
        self.waits: list[Mapping[QueueKey, int]] = []
        self.noted: list[Mapping[tuple[QueueKey, int], RecordProof]] = []

    def refresh(self) -> bool:
        if SILENT:
            raise BackendUnavailableError("no name server answered; expected one of ns1:9876.")
        before, self._answers = self._answers, (dict(ANSWERS), set(UNLISTED))
        return super().refresh() or before != self._answers

    def wait_for_messages(self, after: Mapping[QueueKey, int], timeout_ms: float) -> bool:
        self.waits.append(after)
        return self.refresh()

    def queues(self, topics: Collection[str], *, missing_ok: Collection[str] = ()) -> dict[str, list[QueueKey]]:
        found = super().queues(topics, missing_ok=missing_ok)
        return {topic: [one for one in queues if one.broker not in UNLISTED] for topic, queues in found.items()}

    def bounds(self, queues: Collection[QueueKey]) -> Mapping[QueueKey, QueueAnswer]:
        found: dict[QueueKey, QueueAnswer] = {}
        for queue in queues:
            if queue.broker in ANSWERS:
                found[queue] = ANSWERS[queue.broker]
            else:
                found[queue] = super().bounds([queue])[queue] if queue in self._queues else Gone("it was deleted")
        return found

    def note_read(self, records: Mapping[tuple[QueueKey, int], RecordProof]) -> None:
        self.noted.append(records)

    def offsets_at(self, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        assert not any(queue.broker in ANSWERS for queue in times_ms), "only queues that answer are asked"
        for queue in times_ms:
            if queue.broker in LEAVING:
                LEAVING.discard(queue.broker)
                ANSWERS[queue.broker] = away(queue.broker)
                raise BackendUnavailableError(f"the broker {queue.broker} does not answer; expected an offset.")
        return {
            queue: sum(one["storeTimestamp"] < time_ms * 1000 for one in self._messages(queue))
            for queue, time_ms in times_ms.items()
        }


def away(broker: str, since_ms: int = FIRST_MS) -> Away:
    """Return the answer of a broker that is away."""
    return Away(broker, since_ms, "the connection was refused")


__all__ = ["ANSWERS", "FIRST_MS", "LEAVING", "SILENT", "UNLISTED", "BrokerPlace", "QueueBounds", "away", "fill"]
