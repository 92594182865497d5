"""What the tests of a backend share: their fixtures, their messages, and the reading of whole queues.

The tests are in `backend_reading`, `backend_groups` and `backend_sinks`; `backend_suite` puts them together.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import pytest

from rmq_spark.store.backend import Backend, Capability, DecodeLimits, Guarantee, Location, ReadBatch
from rmq_spark.store.filter.row_filter import SQL92, TAG, Expression, RowFilter, compile_filter
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, QueueBounds, QueueKey, QueueRange

FIRST_MS = 1_700_000_000_000  # store time of the first message that asks for a time, ms since the epoch
LIMITS = DecodeLimits(check_crc=True, max_decompressed_bytes=MAX_DECOMPRESSED_BYTES)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a test stores.

    `keys` are words separated by blanks. `store_time_ms` is the wanted store time in ms since the epoch. A place that
    sets the time itself ignores it: the tests read the actual times from the column storeTimestamp.
    """

    body: bytes
    tags: str | None = None
    keys: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    store_time_ms: int = FIRST_MS


COUNT = 12
TAGS = ("red", "green", "Aa", "BB", None, "red")  # "Aa" and "BB" have the same hash
MESSAGES = [
    Message(
        b"body %d " % number + b"." * 200,
        TAGS[number % len(TAGS)],
        f"key{number} all" if number % 4 else None,
        {"number": str(number)},
        FIRST_MS + number // 2 * 1000,  # two messages have the same time
    )
    for number in range(COUNT)
]


class Append(Protocol):
    """The fixture `append`: it stores messages at the end of a queue."""

    def __call__(self, topic: str, queue_id: int, messages: Sequence[Message]) -> list[int]:
        """Store the messages in their order, and return their queue offsets. A missing topic is created."""


Expire: TypeAlias = Callable[[QueueKey, int], int]
FailNextCall: TypeAlias = Callable[[], None]
Switch: TypeAlias = Callable[[QueueKey], None]
GrowTopic: TypeAlias = Callable[[str, int], None]
Reset: TypeAlias = Callable[[str, Mapping[QueueKey, int]], None]


class BackendFixtures:
    """The fixtures of the tests. A subclass must give the first four, as fixtures of pytest.

    - `location` is a `Location` of a place without messages. The place may be created by the first message.
    - `append` is an `Append`, a function of (topic, queue id, messages). The topic has at least `QUEUES` queues then.
    - `expire` is a function of (queue, offset). It removes messages below the offset as far as the place can remove
      them, and returns the min offset of the queue then. It must remove at least one message if half of the messages of
      a queue are below the offset, and never a message at or above the offset.
    - `fail_next_call` is a function that makes the next call of a backend that was just opened or reopened meet a fault
      of the place, such as a failing disk or network. After one fault the place works again.

    Tests that need one of the following are skipped unless the subclass gives it:

    - `missing_location` is a `Location` of the same kind where no place exists.
    - `other_location` is a `Location` of another place of the same kind, into which somebody has written.
    - `close_topic` is a function of a topic. It forbids consumer groups to read the topic.
    - `reset` is a function of (group, offsets by queue). It resets the group's offsets, as an administrator does.
    - `take_away` is a function of a queue. The server that has the queue stops to answer, and keeps its messages.
    - `bring_back` is a function of a queue. The server answers again.
    - `grow_topic` is a function of a topic and a number. The topic has this many queues then, on each server.

    `GUARANTEE` is how often the sink for new messages stores each row. `secrets` are the texts in the location that
    must not appear in errors, logs and checkpoints.
    """

    QUEUES: ClassVar[int] = 4
    GUARANTEE: ClassVar[Guarantee] = Guarantee.EXACTLY_ONCE
    TELLS_ZERO_FROM_NONE: ClassVar[bool] = True  # a broker of 4.9 answers 0 for a group without an offset
    secrets: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture
    def missing_location(self) -> Location:
        """Skip the test, because the subclass has no such location."""
        return pytest.skip("the subclass gives no fixture missing_location")

    @pytest.fixture
    def other_location(self) -> Location:
        """Skip the test, because the subclass has no such location."""
        return pytest.skip("the subclass gives no fixture other_location")

    @pytest.fixture
    def close_topic(self) -> Callable[[str], None]:
        """Skip the test, because the subclass cannot close a topic."""
        return pytest.skip("the subclass gives no fixture close_topic")

    @pytest.fixture
    def reset(self) -> Reset:
        """Skip the test, because the subclass cannot reset offsets."""
        return pytest.skip("the subclass gives no fixture reset")

    @pytest.fixture
    def take_away(self) -> Switch:
        """Skip the test, because the place has no servers."""
        return pytest.skip("the subclass gives no fixture take_away")

    @pytest.fixture
    def bring_back(self) -> Switch:
        """Skip the test, because the place has no servers."""
        return pytest.skip("the subclass gives no fixture bring_back")

    @pytest.fixture
    def grow_topic(self) -> GrowTopic:
        """Skip the test, because the subclass cannot add queues to a topic."""
        return pytest.skip("the subclass gives no fixture grow_topic")

    @pytest.fixture
    def backend(self, location: Location) -> Iterator[Backend]:
        """A backend of the location. It is closed after the test."""
        with closing(location.open()) as backend:
            yield backend


def require(location: Location, capability: Capability) -> None:
    """Skip the test if the place lacks the capability."""
    if capability not in location.capabilities:
        pytest.skip(f"the place cannot {capability}")


def tags_filter(expression: str) -> RowFilter:
    """Return the filter of a tag expression, such as "A || B"."""
    wanted = compile_filter(Expression(TAG, expression))
    assert wanted is not None
    return wanted


def sql92_filter(expression: str) -> RowFilter:
    """Return the filter of an SQL92 expression, such as "a > 5"."""
    wanted = compile_filter(Expression(SQL92, expression))
    assert wanted is not None
    return wanted


def bounds_of(backend: Backend, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
    """Return the bounds of queues, each of which must be there."""
    found = {queue: one for queue, one in backend.bounds(queues).items() if isinstance(one, QueueBounds)}
    assert found.keys() == set(queues)
    return found


def whole(queue: QueueKey, bounds: QueueBounds) -> QueueRange:
    """Return the range of all messages of a queue."""
    return QueueRange(queue, bounds.min_offset, bounds.max_offset)


def read_batches(
    backend: Backend, part: QueueRange, columns: Sequence[str], wanted: RowFilter | None = None
) -> list[ReadBatch]:
    """Return all batches that the backend yields for a range."""
    return list(backend.read(part, columns, LIMITS, wanted))


def read_rows(
    backend: Backend, part: QueueRange, columns: Sequence[str], wanted: RowFilter | None = None
) -> list[dict[str, Any]]:
    """Return the messages of a range, each as a mapping from column to value."""
    return [row for found in read_batches(backend, part, columns, wanted) for row in found.batch.to_pylist()]


def stored_rows(location: Location, topic: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return all messages of a topic, queue after queue, as a new reader sees them. A missing topic has none."""
    with closing(location.open()) as backend:
        backend.refresh()
        queues = backend.queues([topic], missing_ok=[topic]).get(topic, [])
        parts = [whole(queue, bounds) for queue, bounds in sorted(bounds_of(backend, queues).items())]
        return [row for part in parts for row in read_rows(backend, part, columns)]


def stored_bodies(location: Location, topic: str) -> list[bytes]:
    """Return the sorted bodies of all messages of a topic, as a new reader sees them. A missing topic has none."""
    return sorted(row["body"] for row in stored_rows(location, topic, ["body"]))


def times_ms(backend: Backend, queue: QueueKey) -> list[int]:
    """Return the store times of all messages of the queue, in ms."""
    (bounds,) = bounds_of(backend, [queue]).values()
    return [
        round(row["storeTimestamp"].timestamp() * 1000)
        for row in read_rows(backend, whole(queue, bounds), ["storeTimestamp"])
    ]
