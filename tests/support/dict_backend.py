"""A backend that only reads, and keeps its messages in a dict of this process. The example of docs/BACKENDS.md."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import pyarrow as pa

from rmq_spark.store.backend import COLUMNS, Barrier, Capability, DecodeLimits, ReadBatch
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StorePathError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange, RecordProof

# The places by their names. A message is a dict with the values of its columns; a time is in µs since the epoch.
PLACES: dict[str, dict[QueueKey, list[dict[str, Any]]]] = {}
NO_BARRIERS: Mapping[QueueKey, Barrier] = {}


@dataclass(frozen=True, slots=True)
class DictPlace:
    """The dict with this name."""

    name: str
    capabilities = frozenset[Capability]()

    def describe(self) -> str:
        return f"the dict {self.name}"

    def sharing_advice(self) -> str:
        return "Only the process that has the dict can read it."

    def without_secrets(self) -> "DictPlace":
        return self

    def with_secrets_of(self, source: "DictPlace") -> "DictPlace":
        return self

    def mark(self) -> dict[str, str]:
        return {"dict": self.name}

    def open(self) -> "DictBackend":
        return DictBackend(self)


class DictBackend:
    """A dict that is open for reading."""

    sizes = size_estimates = keys = None  # it lacks SIZES, SIZE_ESTIMATES and KEY_SEARCH

    def __init__(self, location: DictPlace) -> None:
        self.location = location
        self._seen: dict[QueueKey, Sequence[dict[str, Any]]] | None = None

    def _look(self) -> dict[QueueKey, Sequence[dict[str, Any]]]:
        if self.location.name not in PLACES:
            raise StorePathError(f"{self.location.describe()} does not exist; expected one of {sorted(PLACES)}.")
        return {queue: tuple(messages) for queue, messages in PLACES[self.location.name].items()}

    @property
    def _queues(self) -> dict[QueueKey, Sequence[dict[str, Any]]]:
        if self._seen is None:
            self._seen = self._look()
        return self._seen

    def _messages(self, queue: QueueKey) -> Sequence[dict[str, Any]]:
        if queue not in self._queues:
            raise NotFoundError(f"{self.location.describe()} has no queue {queue}; expected one of {self.topics()}.")
        return self._queues[queue]

    def identity(self) -> str | None:
        return self.location.name

    def refresh(self) -> bool:
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def wait_for_messages(self, after: Mapping[QueueKey, int], timeout_ms: float) -> bool:
        return self.refresh()  # nobody adds messages meanwhile, because the caller's thread is the only one

    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self._queues})

    def queues(self, topics: Collection[str], *, missing_ok: Collection[str] = ()) -> dict[str, list[QueueKey]]:
        known = self.topics()
        if missing := set(topics) - set(known) - set(missing_ok):
            raise NotFoundError(f"{self.location.describe()} has no topic {sorted(missing)}; expected one of {known}.")
        return {topic: sorted(one for one in self._queues if one.topic == topic) for topic in topics if topic in known}

    def bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
        offsets = {queue: [message["queueOffset"] for message in self._messages(queue)] or [0] for queue in queues}
        return {queue: QueueBounds(of[0], of[0] + len(self._messages(queue))) for queue, of in offsets.items()}

    def offsets_at(self, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        return {
            queue: bounds.max_offset
            - sum(one["storeTimestamp"] >= times_ms[queue] * 1000 for one in self._messages(queue))
            for queue, bounds in self.bounds(times_ms).items()
        }

    def positions(self, at: Collection[tuple[QueueKey, int]]) -> dict[tuple[QueueKey, int], RecordProof]:
        return {
            (queue, message["queueOffset"]): RecordProof(message["commitLogOffset"], message["storeTimestamp"] // 1000)
            for queue in {queue for queue, _ in at}
            for message in self._messages(queue)
            if (queue, message["queueOffset"]) in at
        }

    def read(
        self, part: QueueRange, columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> Iterator[ReadBatch]:
        bounds = self.bounds([part.queue])[part.queue]
        if part.begin < bounds.min_offset or part.end > bounds.max_offset:
            raise OffsetRangeError(str(part.queue), part.begin, part.end, bounds.min_offset, bounds.max_offset)
        messages = self._messages(part.queue)[part.begin - bounds.min_offset : part.end - bounds.min_offset]
        if wanted is not None:
            names = wanted.property_names
            values = {name: pa.array([one["properties"].get(name) for one in messages], pa.string()) for name in names}
            messages = list(compress(messages, wanted.matches(values, len(messages))))
        rows = [{**message, "properties": list(message["properties"].items())} for message in messages]
        yield ReadBatch(pa.RecordBatch.from_pylist(rows, schema=pa.schema(COLUMNS)).select(columns), part.end)

    def read_together(
        self, parts: Sequence[QueueRange], columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> pa.RecordBatch | None:
        return None

    def barriers(
        self, queues: Collection[QueueKey], group: str | None, *, is_broadcasting: bool
    ) -> Mapping[QueueKey, Barrier]:
        return NO_BARRIERS

    def deliver_due(self, now_ms: int) -> int | None:
        return None

    def reopen(self) -> None:
        self._seen = None

    close = reopen
