"""Tests of many processes that append to one store, some of them killed: acknowledged messages are stored once."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rmq_spark.store import StoreReader, open_reader, open_store
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.busy_writer import TOPIC

QUEUES = 4
LIMIT_SECONDS = 240  # ends a hang


def start(root: Path, name: str, count: int, each: int, first: int = 0) -> subprocess.Popen[bytes]:
    arguments = [str(root / "s"), "--name", name, "--count", str(count), "--each", str(each), "--first", str(first)]
    return subprocess.Popen(
        [sys.executable, "-m", "rmq_spark.store.testing.busy_writer", *arguments, "--notes", str(root / name)]
    )


def read_new(reader: StoreReader, seen: dict[QueueKey, int], found: dict[int, list[tuple[str, int]]]) -> None:
    """Add the new messages of every queue to `found`."""
    reader.refresh()
    if TOPIC not in reader.topics():
        return
    for queue in reader.queues(TOPIC):
        held = reader.bounds(queue)
        begin = seen.get(queue, 0)
        for batch in reader.read(queue, begin, held.max_offset, ("queueOffset", "body"), check_crc=True):
            for row in batch.to_pylist():
                assert row["queueOffset"] == seen.get(queue, 0)
                seen[queue] = row["queueOffset"] + 1
                name, number = row["body"].decode().split()
                found.setdefault(queue.queue_id, []).append((name, int(number)))


def acknowledged(root: Path, name: str) -> set[int]:
    """Return the numbers that a writer recorded, without a truncated last line."""
    numbers: set[int] = set()
    path = root / name
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            first, last = line.split()
            numbers.update(range(int(first), int(last)))
    return numbers


def by_writer(found: dict[int, list[tuple[str, int]]], name: str) -> list[int]:
    """Return the numbers of one writer, after a check of their order in each queue."""
    everything = []
    for messages in found.values():
        numbers = [number for writer, number in messages if writer == name]
        assert numbers == sorted(set(numbers)), f"{name}: not in order, or twice"
        everything += numbers
    return everything


def run_side_by_side(root: Path, writers: int, count: int) -> None:
    """Let writers append and two readers follow. All messages must arrive once, in order, without a gap."""
    running = [start(root, f"w{number}", count, 50 + 37 * number) for number in range(writers)]
    readers: list[tuple[StoreReader, dict[QueueKey, int], dict[int, list[tuple[str, int]]]]] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        if not readers and (root / "s" / "commitlog").is_dir():
            readers = [(open_reader(str(root / "s"), read_mode=mode), {}, {}) for mode in ("mmap", "pread")]
        for reader, seen, found in readers:
            read_new(reader, seen, found)
    assert [process.wait(LIMIT_SECONDS) for process in running] == [0] * writers
    for reader, seen, found in readers:
        read_new(reader, seen, found)
        for number in range(writers):
            assert sorted(by_writer(found, f"w{number}")) == list(range(count))
        reader.close()
    assert not (root / "s" / "abort").exists()


@pytest.mark.slow
def test_append_of_four_processes_with_two_readers(tmp_path: Path) -> None:
    run_side_by_side(tmp_path, 4, 10_000)


@pytest.mark.torture
def test_append_of_four_processes_with_100_000_messages_each(tmp_path: Path) -> None:
    run_side_by_side(tmp_path, 4, 100_000)


def wait_for_notes(path: Path, first: int) -> None:
    """Return when the call that begins with this number was acknowledged."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (path.exists() and f"{first} " in path.read_text()):
        assert time.monotonic() < deadline, "nothing was acknowledged"
        time.sleep(0.01)


def kill_writers(root: Path, kills: int, seed: int) -> None:
    """Kill one of two writers repeatedly. Acknowledged messages are stored once, others at most once."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    nexts = {"a": 0, "b": 0}
    other = start(root, "b", 10**9, 7)
    for _ in range(kills):
        process = start(root, "a", 10**9, chance.choice((1, 20, 300)), nexts["a"])
        wait_for_notes(root / "a", nexts["a"])
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        nexts["a"] = max(acknowledged(root, "a"), default=-1) + 1_000
    other.kill()
    other.wait()
    open_store(str(root / "s")).close()
    seen: dict[QueueKey, int] = {}
    found: dict[int, list[tuple[str, int]]] = {}
    with open_reader(str(root / "s")) as reader:
        read_new(reader, seen, found)
        for name in nexts:
            there, noted = by_writer(found, name), acknowledged(root, name)
            assert noted
            assert noted <= set(there)
            assert len(there) == len(set(there))
        last = max(acknowledged(root, "a"))
        assert len(reader.find_key(TOPIC, f"a{last}")) == 1


@pytest.mark.slow
def test_append_of_killed_writers_keeps_acknowledged_messages(tmp_path: Path) -> None:
    kill_writers(tmp_path, 10, int.from_bytes(os.urandom(4), "big"))


@pytest.mark.torture
@pytest.mark.parametrize("run", range(4))
def test_append_of_writers_killed_200_times_keeps_acknowledged_messages(tmp_path: Path, run: int) -> None:
    kill_writers(tmp_path, 50, int.from_bytes(os.urandom(4), "big"))
