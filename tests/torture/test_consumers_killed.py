"""A driver whose listener fails is killed again and again: every message is processed or a dead letter, none is sent
back twice, and in order none comes before the one ahead of it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

import rmq_spark

if TYPE_CHECKING:
    from tests.torture.conftest import Life

pytestmark = pytest.mark.spark

Start = Callable[..., "Life"]
QUEUES = 2
LEVELS = " ".join(["1s"] * 18)
WITHIN_S = 600


def feed(path: Path, messages: int) -> set[str]:
    """Make the store; return the keys of its messages, of which each tenth always fails."""
    with rmq_spark.open_store(path, segment_bytes=1 << 22, message_delay_level=LEVELS) as store:
        store.create_topic("orders", QUEUES)
        for number in range(messages):
            store.send("orders", "bad" if number % 10 == 7 else "good", queue_id=number % QUEUES, keys=f"key-{number}")
    return {f"key-{number}" for number in range(messages)}


def read_keys(path: Path, topic: str) -> list[str]:
    """Return the keys of all messages of a topic."""
    with rmq_spark.open_reader(path) as store:
        store.refresh()
        if topic not in store.topics():
            return []
        return [
            key
            for queue in store.queues(topic)
            for batch in store.read(queue, 0, store.bounds(queue).max_offset, ["keys"])
            for key in batch["keys"].to_pylist()
        ]


def read_notes(path: Path) -> list[tuple[str, int, int, str, str]]:
    """Return what the listeners noted: word, queue id, queue offset, topic, key."""
    lines = path.read_text().splitlines() if path.exists() else []
    parts = [line.split() for line in lines]
    return [(word, int(queue_id), int(offset), topic, key) for word, queue_id, offset, topic, key in parts]


def check_order(notes: list[tuple[str, int, int, str, str]], dead: set[str]) -> None:
    """A row is given when all before it in its queue were done by then, or are dead letters in the end."""
    done: dict[int, int] = {}
    keys: dict[tuple[int, int], str] = {}
    finished: set[tuple[int, int]] = set()
    for word, queue_id, offset, _, key in notes:
        keys[queue_id, offset] = key
        if word == "done":
            finished.add((queue_id, offset))
            continue
        for before in range(done.get(queue_id, 0), offset):
            row = queue_id, before
            assert row in finished or keys.get(row) in dead, f"{queue_id}/{offset} came before {before} was done"
        done[queue_id] = max(done.get(queue_id, 0), offset)


def run_consumers(start: Start, folder: Path, seed: int, model: str, messages: int, kills: int) -> None:
    """Kill the driver so many times, and let the last one come to an end."""
    random, path = Random(seed), folder / "store"
    keys = feed(path, messages)
    notes, stop = folder / "notes", folder / "stop"
    arguments = [str(path), str(notes), str(folder / "checkpoint"), str(stop), model]

    def is_over() -> bool:
        return {note[4] for note in read_notes(notes) if note[0] == "done"} | set(read_keys(path, "%DLQ%crew")) == keys

    for _ in range(kills):
        life = start("consumer_life.py", "local[2]", *arguments)
        assert life.wait_for("started", WITHIN_S), life.log.read_text(errors="replace")
        seen = len(read_notes(notes))
        until = time.monotonic() + WITHIN_S
        while len(read_notes(notes)) < seen + random.randrange(1, messages // 4) and not is_over():
            assert time.monotonic() < until, life.log.read_text(errors="replace")
            time.sleep(0.01)
        time.sleep(random.random())
        life.end()
    life = start("consumer_life.py", "local[2]", *arguments)
    until = time.monotonic() + WITHIN_S
    while not is_over():
        assert time.monotonic() < until, life.log.read_text(errors="replace")
        time.sleep(0.1)
    stop.touch()
    assert life.wait_for("stopped", WITHIN_S), life.log.read_text(errors="replace")
    noted, dead = read_notes(notes), read_keys(path, "%DLQ%crew")
    done = [note[4] for note in noted if note[0] == "done"]
    retries = read_keys(path, "%RETRY%crew")
    print(
        f"seed {seed}, {model}: {messages} messages, {kills} kills: {len(set(done))} processed ({len(done)} times), "
        f"{len(dead)} dead letters, {len(retries)} retries, {sum(note[0] == 'given' for note in noted)} times given"
    )
    assert len(dead) == len(set(dead)), f"seed {seed}: a dead letter came twice"
    assert all(retries.count(key) <= 2 for key in set(retries)), f"seed {seed}: a row was sent back twice"
    bad = {f"key-{number}" for number in range(messages) if number % 10 == 7}
    assert bad <= set(dead)
    if model == "orderly":
        check_order(noted, set(dead))
        assert retries == []


@pytest.mark.kills
@pytest.mark.parametrize("model", ["concurrently", "orderly"])
def test_a_listener_that_fails_in_a_driver_that_is_killed(start: Start, tmp_path: Path, model: str) -> None:
    run_consumers(start, tmp_path, Random().randrange(2**32), model, 60, 2)


@pytest.mark.torture
@pytest.mark.parametrize("model", ["concurrently", "orderly"])
def test_a_listener_that_fails_in_a_driver_that_is_killed_ten_times(start: Start, tmp_path: Path, model: str) -> None:
    run_consumers(start, tmp_path, 1, model, 2_000, 10)
