"""The fixtures of the tests of a backend (`rmq_spark.store.testing.backend_suite`), for a dict and a store directory.

They are in classes without tests, so that several files can run the suite with them.
"""

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from support.dict_backend import PLACES, DictBackend, DictPlace

import rmq_spark
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.message_table import MESSAGE_TYPES
from rmq_spark.store.group.admin import reset_offsets
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_fixtures import Append, Expire, FailNextCall, Message, Reset

SEGMENT_BYTES = 1024  # three messages of the suite
COLUMNS = ("body", "tags", "keys", "properties", "queueId")


def rows_of(messages: Iterable[Message], queue_id: int) -> pa.Table:
    rows = [(one.body, one.tags, one.keys, list(one.properties.items()), queue_id) for one in messages]
    schema = pa.schema([(name, MESSAGE_TYPES[name]) for name in COLUMNS])
    return pa.Table.from_pylist([dict(zip(COLUMNS, row, strict=True)) for row in rows], schema=schema)


class LocalFixtures:
    """A store directory. Its segments are small, so that messages expire in steps of three."""

    @pytest.fixture(autouse=True)
    def _no_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A query that joins waits for a conflicting one to die; here both live."""
        monkeypatch.setattr("rmq_spark.store.group.membership.DYING_MS", 0)

    @pytest.fixture
    def location(self, tmp_path: Path) -> StoreDirectory:
        return StoreDirectory(str(tmp_path / "store"))

    @pytest.fixture
    def missing_location(self, tmp_path: Path) -> StoreDirectory:
        return StoreDirectory(str(tmp_path / "missing"))

    @pytest.fixture
    def other_location(self, tmp_path: Path) -> StoreDirectory:
        with rmq_spark.open_store(tmp_path / "other") as messages:
            messages.send("orders", "x")
        return StoreDirectory(str(tmp_path / "other"))

    @pytest.fixture
    def producer(self, location: StoreDirectory) -> Iterator[Producer]:
        with rmq_spark.open_store(location.path, segment_bytes=SEGMENT_BYTES) as producer:
            yield producer

    @pytest.fixture
    def append(self, producer: Producer, monkeypatch: pytest.MonkeyPatch) -> Append:
        def append(topic: str, queue_id: int, messages: Sequence[Message]) -> list[int]:
            offsets: list[int] = []
            for time_ms, group in itertools.groupby(messages, lambda message: message.store_time_ms):
                monkeypatch.setattr(producer._writer, "now_ms", lambda time_ms=time_ms: time_ms)
                sent = producer.send_many(rows_of(group, queue_id), topic=topic)
                offsets += sent.column("queueOffset").to_pylist()
            return offsets

        return append

    @pytest.fixture
    def expire(self, location: StoreDirectory, producer: Producer) -> Expire:
        def expire(queue: QueueKey, before: int) -> int:
            with rmq_spark.open_reader(location.path) as reader:
                reader.refresh()
                begin = reader.proof(queue, before).physical_offset // SEGMENT_BYTES * SEGMENT_BYTES
                log_end = reader.log_end
            producer.expire(max_bytes=log_end - begin)
            return producer.bounds(queue.topic)[queue.queue_id].min_offset

        return expire

    @pytest.fixture
    def fail_next_call(self, location: StoreDirectory, monkeypatch: pytest.MonkeyPatch) -> FailNextCall:
        def fail_next_call() -> None:
            read_folder = os.scandir

            def fail(path: str) -> object:
                if not path.startswith(location.path):
                    return read_folder(path)
                monkeypatch.setattr(os, "scandir", read_folder)
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)

            monkeypatch.setattr(os, "scandir", fail)

        return fail_next_call

    @pytest.fixture
    def reset(self, location: StoreDirectory) -> Reset:
        def reset(group: str, offsets: Mapping[QueueKey, int]) -> None:
            targets: dict[str, dict[int, int]] = {}
            for queue, offset in offsets.items():
                targets.setdefault(queue.topic, {})[queue.queue_id] = offset
            reset_offsets(location.path, group, targets)

        return reset

    @pytest.fixture
    def close_topic(self, location: StoreDirectory) -> Callable[[str], None]:
        def close_topic(topic: str) -> None:
            path = Path(location.path) / "config" / "topics.json"
            held = json.loads(path.read_text())
            held["topicConfigTable"][topic]["perm"] = 2  # write
            path.write_text(json.dumps(held))

        return close_topic


class DictFixtures:
    """A dict with four queues in each topic."""

    @pytest.fixture
    def location(self) -> Iterator[DictPlace]:
        """A dict without messages."""
        PLACES["main"] = {}
        yield DictPlace("main")
        PLACES.clear()

    @pytest.fixture
    def missing_location(self) -> DictPlace:
        """The name of a dict that does not exist."""
        return DictPlace("missing")

    @pytest.fixture
    def other_location(self, location: DictPlace) -> DictPlace:
        """Another dict."""
        PLACES["other"] = {}
        return DictPlace("other")

    @pytest.fixture
    def append(self, location: DictPlace) -> Append:
        """A function that adds messages to a queue of the dict."""

        def append(topic: str, queue_id: int, messages: Sequence[Message]) -> list[int]:
            queues = PLACES[location.name]
            for number in range(4):
                queues.setdefault(QueueKey(topic, number), [])
            queue = queues[QueueKey(topic, queue_id)]
            first = queue[-1]["queueOffset"] + 1 if queue else 0
            queue += [
                values_of(message, topic, queue_id, offset) for offset, message in enumerate(messages, start=first)
            ]
            return list(range(first, first + len(messages)))

        return append

    @pytest.fixture
    def expire(self, location: DictPlace) -> Expire:
        """A function that removes the messages below an offset."""

        def expire(queue: QueueKey, before: int) -> int:
            messages = PLACES[location.name][queue]
            messages[:] = [message for message in messages if message["queueOffset"] >= before]
            return before

        return expire

    @pytest.fixture
    def fail_next_call(self, monkeypatch: pytest.MonkeyPatch) -> FailNextCall:
        """A function that makes the next look at the dict fail."""

        def fail_next_call() -> None:
            look = DictBackend._look

            def fail(backend: DictBackend) -> NoReturn:
                monkeypatch.setattr(DictBackend, "_look", look)
                raise StoreChangedError("a planted fault")

            monkeypatch.setattr(DictBackend, "_look", fail)

        return fail_next_call


def values_of(message: Message, topic: str, queue_id: int, offset: int) -> dict[str, Any]:
    """Return the values of the columns of a message."""
    named = {"TAGS": message.tags, "KEYS": message.keys, **message.properties}
    return {
        "topic": topic,
        "physicalTopic": topic,
        "queueId": queue_id,
        "queueOffset": offset,
        "commitLogOffset": offset * 100,
        "tags": message.tags,
        "keys": message.keys,
        "body": message.body,
        "storeTimestamp": message.store_time_ms * 1000,
        "reconsumeTimes": 0,
        "properties": {name: value for name, value in named.items() if value is not None},
    }
