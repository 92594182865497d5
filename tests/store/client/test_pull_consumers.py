"""What the pull consumers of a store directory and of a live cluster have in common, as one suite for both."""

import inspect
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

import rmq_spark
from rmq_spark.store.client.pull_consumer import PullConsumer
from rmq_spark.store.cluster.consumer import ClusterConsumer
from rmq_spark.store.errors import NotFoundError, OptionError, StoreError
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import Accept, GetMessageStatus, PullStatus
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

FIRST_MS = 1_700_000_000_000
LONG_MS = 60_000
ODD: Accept = lambda codes: codes == string_hash("odd")  # noqa: E731


class Place(Protocol):
    """A place with ten messages in queue 0 of the topic T, a second apart, with the tags even and odd.

    Queue 1 is empty.
    """

    def open(self, group: str | None = "G", **arguments: Any) -> Any: ...
    def queue(self, queue_id: int, topic: str = "T") -> QueueKey: ...
    def send(self, queue_id: int, tags: str = "even") -> None: ...


class Directory:
    """A store directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, group: str | None = "G", **arguments: Any) -> PullConsumer:
        return rmq_spark.open_consumer(self._path, group, **arguments)

    def queue(self, queue_id: int, topic: str = "T") -> QueueKey:
        return QueueKey(topic, queue_id)

    def send(self, queue_id: int, tags: str = "even") -> None:
        with rmq_spark.open_store(self._path) as store:
            store.send("T", b"late", queue_id=queue_id, tags=tags)


class Cluster:
    """A broker with the store."""

    def __init__(self, cluster: RunningCluster, path: Path) -> None:
        self._cluster = cluster
        cluster.create_topic("T", queues=2)
        cluster.broker.replace_store(path)

    def open(self, group: str | None = "G", **arguments: Any) -> ClusterConsumer:
        return rmq_spark.open_consumer(name_server=self._cluster.address, group=group, **arguments)

    def queue(self, queue_id: int, topic: str = "T") -> QueueKey:
        return QueueKey(topic, queue_id, "broker-a")

    def send(self, queue_id: int, tags: str = "even") -> None:
        self._cluster.broker.send("T", b"late", queue_id=queue_id, tags=tags)


@pytest.fixture(params=["directory", "4.9", "5.3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, run_cluster: Callable[..., RunningCluster]) -> Place:
    messages = [
        SampleMessage(
            "T",
            0,
            b"%d" % number,
            tags="odd" if number % 2 else "even",
            store_timestamp=FIRST_MS + 1000 * number,
            properties={"n": str(number)},
        )
        for number in range(10)
    ]
    path = build_store(tmp_path / "store", messages, segment_bytes=8 << 20, empty_topics={"T": 2}).path
    return Directory(path) if request.param == "directory" else Cluster(run_cluster(release=request.param), path)


@pytest.fixture
def queue(place: Place) -> QueueKey:
    return place.queue(0)


@pytest.fixture
def other(place: Place) -> QueueKey:
    return place.queue(1)


@pytest.fixture
def consumer(place: Place) -> Iterator[Any]:
    with place.open() as consumer:
        yield consumer


def committed(place: Place, queue: QueueKey, group: str = "G") -> int | None:
    """Return the committed offset as another consumer reads it."""
    with place.open(group) as consumer:
        offset: int | None = consumer.fetch_consume_offset(queue, from_store=True)
        return offset


def bodies(found: Any) -> list[bytes]:
    listed: list[bytes] = found.messages.column("body").to_pylist()
    return listed


def test_queues_and_offsets_are_those_of_the_place(consumer: Any, queue: QueueKey, other: QueueKey) -> None:
    assert "T" in consumer.topics()
    assert consumer.queues("T") == [queue, other]
    assert (consumer.min_offset(queue), consumer.max_offset(queue)) == (0, 10)
    assert (consumer.min_offset(other), consumer.max_offset(other)) == (0, 0)


def test_max_offset_counts_messages_that_came_later(place: Place, consumer: Any, other: QueueKey) -> None:
    assert consumer.max_offset(other) == 0
    place.send(1)
    assert consumer.max_offset(other) == 1


@pytest.mark.parametrize(
    ("at", "rule", "offset"),
    [
        (FIRST_MS + 2_400, "lower", 3),
        (FIRST_MS + 3_000, "lower", 3),
        (FIRST_MS + 2_400, "upper", 2),
        (FIRST_MS + 3_000, "upper", 3),
        (FIRST_MS - 1, "lower", 0),
        (FIRST_MS - 1, "upper", 0),
        (FIRST_MS + 99_000, "lower", 10),
        (FIRST_MS + 99_000, "upper", 9),
        (0, "lower", 0),
        (datetime.fromtimestamp(FIRST_MS / 1000 + 4, UTC), "lower", 4),
    ],
)
def test_search_offset_finds_a_time(
    consumer: Any, queue: QueueKey, other: QueueKey, at: int | datetime, rule: str, offset: int
) -> None:
    assert consumer.search_offset(queue, at, rule) == offset
    assert consumer.search_offset(other, at, rule) == 0


def test_pull_that_follows_the_next_offset_gets_everything(consumer: Any, queue: QueueKey) -> None:
    pulled, offset = [], 0
    while (found := consumer.pull(queue, offset, 3)).pull_status is PullStatus.FOUND:
        assert (found.min_offset, found.max_offset) == (0, 10)
        pulled += bodies(found)
        offset = found.next_begin_offset
    assert pulled == [b"%d" % number for number in range(10)]
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.OFFSET_OVERFLOW_ONE, 10)
    assert (found.min_offset, found.max_offset, found.messages.num_rows) == (0, 10, 0)


@pytest.mark.parametrize("given", [np.int64(3), np.uint8(3)])
def test_pull_takes_every_whole_number(consumer: Any, queue: QueueKey, given: int) -> None:
    assert bodies(consumer.pull(queue, given, given)) == [b"3", b"4", b"5"]


@pytest.mark.parametrize(
    ("queue_id", "offset", "status", "pull_status", "next_offset"),
    [
        (0, 10, "OFFSET_OVERFLOW_ONE", "NO_NEW_MSG", 10),
        (0, 11, "OFFSET_OVERFLOW_BADLY", "OFFSET_ILLEGAL", 10),
        (1, 0, "NO_MESSAGE_IN_QUEUE", "NO_NEW_MSG", 0),
        (1, 7, "NO_MESSAGE_IN_QUEUE", "OFFSET_ILLEGAL", 0),
    ],
)
def test_pull_describes_an_offset_outside_of_the_queue(
    place: Place, consumer: Any, queue_id: int, offset: int, status: str, pull_status: str, next_offset: int
) -> None:
    found = consumer.pull(place.queue(queue_id), offset)
    assert (found.status, found.pull_status, found.next_begin_offset) == (status, pull_status, next_offset)
    assert found.messages.num_rows == 0


def test_pull_that_waits_answers_an_offset_outside_of_the_queue_at_once(consumer: Any, queue: QueueKey) -> None:
    found = consumer.pull_block_if_not_found(queue, 11, timeout_ms=LONG_MS)
    assert (found.pull_status, found.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, 10)
    assert bodies(consumer.pull_block_if_not_found(queue, 8, timeout_ms=LONG_MS)) == [b"8", b"9"]


def test_pull_returns_the_columns_of_the_consumer(place: Place, queue: QueueKey) -> None:
    with place.open(columns=["queueOffset", "tags"]) as consumer:
        found = consumer.pull(queue, 4, 2).messages
        assert found.to_pylist() == [{"queueOffset": 4, "tags": "even"}, {"queueOffset": 5, "tags": "odd"}]
        assert consumer.pull(queue, 10).messages.schema == found.schema


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"tags": "odd"}, [1, 3, 5, 7, 9]),
        ({"tags": "odd || even"}, [*range(10)]),
        ({"sql92": "n > 6"}, [7, 8, 9]),
        ({}, [*range(10)]),
    ],
)
def test_subscribe_filters_the_pulls_of_its_topic(
    consumer: Any, queue: QueueKey, filters: dict[str, str], expected: list[int]
) -> None:
    consumer.subscribe("T", "nothing")
    consumer.subscribe("T", **filters)
    found = consumer.pull(queue, 0)
    assert bodies(found) == [b"%d" % number for number in expected]
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.FOUND, 10)


@pytest.mark.parametrize(
    ("filters", "accept"), [({"tags": "nothing"}, None), ({"sql92": "n > 99"}, None), ({}, lambda codes: codes == 1)]
)
def test_pull_without_a_match_skips_the_messages(
    consumer: Any, queue: QueueKey, filters: dict[str, str], accept: Accept | None
) -> None:
    consumer.subscribe("T", **filters)
    found = consumer.pull(queue, 2, accept=accept)
    assert (found.status, found.pull_status) == (GetMessageStatus.NO_MATCHED_MESSAGE, PullStatus.NO_MATCHED_MSG)
    assert (found.next_begin_offset, found.messages.num_rows) == (10, 0)


def test_pull_accepts_by_the_codes_of_tags(place: Place, queue: QueueKey) -> None:
    for columns in (["body"], ["tags", "body"]):
        with place.open(columns=columns) as consumer:
            found = consumer.pull(queue, 0, accept=ODD)
            assert (bodies(found), found.messages.column_names) == ([b"1", b"3", b"5", b"7", b"9"], columns)


@pytest.mark.parametrize(("subscribed", "accept"), [(None, None), ("odd", None), (None, ODD)])
def test_pull_that_waits_ends_when_a_message_comes(
    place: Place, consumer: Any, other: QueueKey, subscribed: str | None, accept: Accept | None
) -> None:
    consumer.subscribe("T", subscribed)
    timer = threading.Timer(0.1, place.send, (1, "odd"))
    timer.start()
    found = consumer.pull_block_if_not_found(other, 0, timeout_ms=LONG_MS, accept=accept)
    timer.join()
    assert (found.pull_status, found.next_begin_offset, bodies(found)) == (PullStatus.FOUND, 1, [b"late"])


@pytest.mark.parametrize("arguments", [{"timeout_ms": 300}, {"timeout_ms": 0}])
def test_pull_that_waits_ends_without_a_message(consumer: Any, queue: QueueKey, arguments: dict[str, Any]) -> None:
    found = consumer.pull_block_if_not_found(queue, 10, **arguments)
    assert (found.pull_status, found.next_begin_offset) == (PullStatus.NO_NEW_MSG, 10)


def test_other_methods_run_while_a_pull_waits(place: Place, consumer: Any, queue: QueueKey, other: QueueKey) -> None:
    found: list[Any] = []
    waiting = threading.Thread(
        target=lambda: found.append(consumer.pull_block_if_not_found(other, 0, timeout_ms=LONG_MS))
    )
    waiting.start()
    for _ in range(20):
        assert consumer.pull(queue, 0).messages.num_rows == 10
    assert not found
    place.send(1)
    waiting.join()
    assert bodies(found[0]) == [b"late"]


def test_close_ends_a_pull_that_waits(place: Place, queue: QueueKey) -> None:
    raised: list[str] = []
    consumer = place.open()
    consumer.pull(queue, 10)

    def wait() -> None:
        with pytest.raises(StoreError, match="was closed") as caught:
            consumer.pull_block_if_not_found(queue, 10, timeout_ms=LONG_MS)
        raised.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    consumer.close()
    waiting.join()
    assert len(raised) == 1


# The offsets of a group.


def test_offset_is_in_mind_until_it_is_committed(place: Place, queue: QueueKey) -> None:
    with place.open() as one, place.open() as two:
        one.update_consume_offset(queue, 4)
        assert one.fetch_consume_offset(queue) == 4
        assert not one.fetch_consume_offset(queue, from_store=True)  # 4.9 answers 0
        assert not two.fetch_consume_offset(queue)
        one.update_consume_offset(queue, 4)
        assert one.commit() == {queue: 4}
        assert one.commit() == {}
        assert two.fetch_consume_offset(queue, from_store=True) == 4


def test_committed_offset_that_was_read_replaces_the_updated_one(place: Place, queue: QueueKey) -> None:
    with place.open() as one, place.open() as two:
        one.update_consume_offset(queue, 9)
        two.update_consume_offset(queue, 3)
        two.commit()
        assert one.fetch_consume_offset(queue) == 9
        assert one.fetch_consume_offset(queue, from_store=True) == 3
        assert one.fetch_consume_offset(queue) == 3
        assert one.commit() == {}


def test_commit_replaces_a_larger_offset(place: Place, consumer: Any, queue: QueueKey) -> None:
    for offset in (10, 9):
        consumer.update_consume_offset(queue, offset)
        consumer.commit()
        assert committed(place, queue) == offset
    consumer.update_consume_offset(queue, 2, increase_only=True)
    assert consumer.commit() == {}


def test_commit_takes_the_queues_named_and_close_the_rest(place: Place, queue: QueueKey, other: QueueKey) -> None:
    with place.open() as consumer:
        consumer.update_consume_offset(queue, 5)
        consumer.update_consume_offset(other, 1)
        assert consumer.commit([other]) == {other: 1}
        assert committed(place, other) == 1
        assert committed(place, queue) != 5
        assert consumer.commit(other) == {}
    assert committed(place, queue) == 5


def test_commit_leaves_the_offsets_of_other_groups(place: Place, queue: QueueKey) -> None:
    for group, offset in (("G", 3), ("H", 8)):
        with place.open(group) as consumer:
            consumer.update_consume_offset(queue, offset)
    assert (committed(place, queue, "G"), committed(place, queue, "H")) == (3, 8)


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_body_that_fails_commits_nothing(place: Place, queue: QueueKey, raised: type[BaseException]) -> None:
    def fail(consumer: Any) -> None:
        with consumer:
            consumer.update_consume_offset(queue, 3)
            consumer.commit()
            consumer.update_consume_offset(queue, 7)
            raise raised

    opened = place.open()
    with pytest.raises(raised):
        fail(opened)
    assert committed(place, queue) == 3
    with pytest.raises(StoreError, match="was closed"):
        opened.pull(queue, 0)


# What is refused.


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda one, queue: one.pull(queue, -1), OptionError, "pull: offset=-1 is not a queue offset"),
        (lambda one, queue: one.pull(queue, "0"), OptionError, "pull: offset='0' is not a queue offset"),
        (
            lambda one, queue: one.pull_block_if_not_found(queue, 1.0),
            OptionError,
            "not_found: offset=1.0",
        ),
        (lambda one, queue: one.pull(queue, 0, 0), OptionError, "max_messages=0 must be an integer ≥ 1"),
        (
            lambda one, queue: one.pull_block_if_not_found(queue, 0, timeout_ms=-1),
            OptionError,
            "timeout_ms=-1 must be an integer",
        ),
        (lambda one, queue: one.search_offset(queue, 1_700_000_000), OptionError, "the unit is milliseconds"),
        (
            lambda one, queue: one.search_offset(queue, "noon"),
            OptionError,
            "at='noon' must be an integer",
        ),
        (lambda one, queue: one.search_offset(queue, datetime(2026, 1, 31)), OptionError, "has no time zone"),
        (lambda one, queue: one.search_offset(queue, 0, "closest"), OptionError, 'rule="closest" is none of'),
        (
            lambda one, queue: one.update_consume_offset(queue, -1),
            OptionError,
            "offset=-1 is no",
        ),
        (lambda one, queue: one.subscribe("T", sql92="a >"), OptionError, "a >"),
        (lambda one, queue: one.subscribe("T", "a", sql92="a > 5"), OptionError, "sql92"),
        (lambda one, queue: one.subscribe("Tt", "a"), NotFoundError, "Tt"),
        (lambda one, queue: one.queues("Tt"), NotFoundError, "Tt"),
    ],
)
def test_call_that_cannot_mean_anything_is_refused(
    consumer: Any, queue: QueueKey, ask: Callable[[Any, QueueKey], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(consumer, queue)


@pytest.mark.parametrize(
    "ask",
    [
        lambda one, queue: one.pull(queue, 0),
        lambda one, queue: one.pull_block_if_not_found(queue, 0),
        lambda one, queue: one.min_offset(queue),
        lambda one, queue: one.max_offset(queue),
        lambda one, queue: one.search_offset(queue, 0),
        lambda one, queue: one.update_consume_offset(queue, 1),
        lambda one, queue: one.fetch_consume_offset(queue),
    ],
)
@pytest.mark.parametrize(("topic", "queue_id"), [("T", 2), ("U", 0)])
def test_queue_that_does_not_exist_is_refused(
    place: Place, consumer: Any, topic: str, queue_id: int, ask: Callable[[Any, QueueKey], object]
) -> None:
    with pytest.raises(NotFoundError, match=topic):
        ask(consumer, place.queue(queue_id, topic))


@pytest.mark.parametrize(
    "ask",
    [
        lambda one, queue: one.fetch_consume_offset(queue),
        lambda one, queue: one.update_consume_offset(queue, 1),
        lambda one, queue: one.commit(),
    ],
)
def test_offsets_without_a_group_are_refused(place: Place, ask: Callable[[Any, QueueKey], object]) -> None:
    with (
        place.open(None) as consumer,
        pytest.raises(OptionError, match="offsets need a consumer group: open the consumer"),
    ):
        ask(consumer, place.queue(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"long_polling": 1}, "long_polling=1 must be True or False"),
        ({"check_crc": None}, "check_crc=None must be True or False"),
        ({"max_decompressed_bytes": 0}, "max_decompressed_bytes=0 must be an integer"),
        ({"columns": "body"}, r"columns='body'; expected a list of names\. Give one, as columns=\[\"body\"\]"),
        ({"columns": ["bdy"]}, "no such column: bdy"),
        ({"group": 5}, "a consumer group's name is a text, found 5"),
        ({"group": "a group"}, "is not a group's name"),
    ],
)
def test_consumer_is_not_opened_with_what_means_nothing(place: Place, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        place.open(**given)


def test_consumer_that_is_closed_says_so(place: Place, queue: QueueKey) -> None:
    consumer = place.open()
    consumer.close()
    consumer.close()
    for ask in (
        lambda: consumer.topics(),
        lambda: consumer.pull(queue, 0),
        lambda: consumer.pull_block_if_not_found(queue, 0),
        lambda: consumer.queues("T"),
        lambda: consumer.max_offset(queue),
        consumer.commit,
        consumer.__enter__,
    ):
        with pytest.raises(StoreError, match=r"was closed\. Open it again"):
            ask()


def test_consumers_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, dict[str, Any]]:
        return {
            name: {one.name: one.default for one in inspect.signature(method).parameters.values()}
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(ClusterConsumer) == methods(PullConsumer)
