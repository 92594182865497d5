"""What a query of a group takes from its checkpoint when it starts again: its offsets, and which resets it has applied."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark

GROUP = {"consumerGroup": "billing"}
EARLIEST = GROUP | {"startingOffsets": "earliest"}


class Life:
    """A store of the topic orders, of one queue, and the runs of its queries, of which one lives at a time."""

    def __init__(self, query_on: Callable[..., Any], path: Path, count: int) -> None:
        self._query_on, self.path = query_on, path
        self.store = rmq_spark.open_store(path, segment_bytes=1 << 20)
        self.store.create_topic("orders", 1)
        self.append(count)
        self._living: Any = None

    def append(self, count: int) -> None:
        for _ in range(count):
            self.store.send("orders", "x", queue_id=0)

    def start(self, checkpoint: str | None = None, **options: str) -> Any:
        """Start a query after the death of the one before."""
        self.end()
        query = self._query_on(self.path, checkpoint, **options)
        self._living = query if options.get("messageModel") != "broadcasting" and "consumerGroup" in options else None
        return query

    def end(self) -> None:
        """Let the query's process die, as far as others see it."""
        if self._living is not None:
            self._living.reader._group.query._membership.lease._lock.release()
            self._living = None
            time.sleep(0.25)  # for so long it may count as living

    def reset(self, offset: int) -> None:
        rmq_spark.reset_offsets(self.path, "billing", {"orders": {0: offset}})

    def set_behind_the_back(self, offset: int) -> None:
        """Set the group's offset as a RocketMQ tool or consumer does, of which our queries hear nothing."""
        path = self.path / "config" / "consumerOffset.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"offsetTable": {"orders@billing": {"0": offset}}}))

    def offset(self) -> int | None:
        """Return where the group stands."""
        return rmq_spark.group_offsets(self.path, "billing").get("orders", {}).get(0)


@pytest.fixture
def live(query_on, tmp_path: Path) -> Iterator[Callable[[int], Life]]:
    """A function that makes a life with so many messages in its store."""
    lives: list[Life] = []

    def make(count: int) -> Life:
        lives.append(Life(query_on, tmp_path / "store", count))
        return lives[-1]

    yield make
    for life in lives:
        life.end()
        life.store.close()


def flat(batches: list[list[tuple[int, int]]]) -> list[int]:
    return [offset for batch in batches for _, offset in batch]


@pytest.mark.parametrize("before", [{}, {"consumerGroup": "audit"}, GROUP | {"messageModel": "broadcasting"}])
def test_a_checkpoint_of_no_member_of_the_group_knows_its_resets_as_past(live, before) -> None:
    life = live(3)
    rmq_spark.reset_offsets(life.path, "billing", "latest", topics="orders")
    first = life.start(**before, startingOffsets="earliest", maxOffsetsPerQueue="1")
    assert first.trigger() == [(0, 0)]
    query = life.start(first.committed, **GROUP)
    assert flat(query.drain()) == [1, 2]
    assert (query.offset().group, query.offset().reset) == ("billing", 1)
    life.reset(0)
    assert flat(query.drain()) == [0, 1, 2]


@pytest.mark.parametrize("between", [{}, GROUP | {"messageModel": "broadcasting"}])
def test_a_run_outside_of_the_group_keeps_in_mind_which_resets_were_applied(live, between) -> None:
    life = live(3)
    query = life.start(**EARLIEST)
    query.drain()
    life.reset(1)
    assert flat(query.drain()) == [1, 2]
    other = life.start(query.committed, **between)
    life.append(1)
    assert flat(other.drain()) == [3]
    again = life.start(other.committed, **GROUP)
    assert flat(again.drain()) == []
    life.reset(2)
    assert flat(again.drain()) == [2, 3]
