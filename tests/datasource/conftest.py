"""A store that grows while a test looks, written by the appender as a broker would."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from rmq_spark.store.testing.appender import Appender, AppenderSettings
from rmq_spark.store.testing.appender_log import AppenderLog
from rmq_spark.store.testing.sample_message import SampleMessage

SEGMENT_BYTES = 4096


class GrowingStore:
    """A store with a living writer: the body of a message says topic, queue and queue offset."""

    def __init__(self, folder: Path, queues: int) -> None:
        self.path = folder / "growing"
        self._history = AppenderLog(folder / "growing-history")
        settings = AppenderSettings(segment_bytes=SEGMENT_BYTES, queues=queues, death_chance=0, pause_chance=0)
        self._appender = Appender(self.path, self._history, Random(1), settings)
        self._appender.open()
        self._next: dict[tuple[str, int], int] = {}

    def append(self, topic: str, queue_id: int = 0, count: int = 1, size: int = 0, **fields: str) -> None:
        """Append messages to one queue; `size` pads the body to so many bytes."""
        first = self._next.get((topic, queue_id), 0)
        offsets = range(first, first + count)
        bodies = [f"{topic}/{queue_id}/{offset}".encode().ljust(size, b".") for offset in offsets]
        self._appender.append([SampleMessage(topic, queue_id, body, **fields) for body in bodies])
        self._next[topic, queue_id] = first + count

    def expire_segment(self) -> None:
        """Delete the oldest segment of the commit log, as retention does."""
        oldest = min((self.path / "commitlog").iterdir())
        oldest.unlink()

    def close(self) -> None:
        """Let go of the store as a process that is killed does."""
        self._appender.drop()
        self._history.close()


@pytest.fixture
def grow(tmp_path: Path) -> Iterator[Callable[..., GrowingStore]]:
    """A function that makes an empty store with a writer; topics get `queues` queues."""
    stores: list[GrowingStore] = []

    def make(queues: int = 1) -> GrowingStore:
        stores.append(GrowingStore(tmp_path, queues))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
