"""Wait until a broker has dispatched messages: it acknowledges a send earlier than that."""

import time
from pathlib import Path

import rmq_spark

LIMIT_SECONDS = 60


def queue_ends(store: Path, topic: str) -> dict[int, int]:
    """Return the max offsets of the queues of a topic, as our reader sees them now."""
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        return {queue.queue_id: reader.bounds(queue).max_offset for queue in reader.queues(topic)}


def await_units(store: Path, topic: str, count: int) -> None:
    """Wait until the queues of a topic have `count` entries in all.

    Raises:
        AssertionError: they have fewer after a minute, or more.
    """
    give_up = time.monotonic() + LIMIT_SECONDS
    while (found := sum(queue_ends(store, topic).values())) < count and time.monotonic() < give_up:
        time.sleep(0.01)
    assert found == count, f"{found} units in the queues of {topic}, not {count}"
