"""Tests of `rmq/turn` removed or replaced under a live writer: two writers never write at the same time."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import LockTimeoutError, StoreChangedError
from rmq_spark.store.log.store_lock import StoreLock


@dataclass(frozen=True)
class Settings:
    application: str = "first"
    lock_timeout_ms: int = 200
    allow_network_store: bool = False


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with rmq_spark.open_store(tmp_path / "s") as opened:
        opened.send("orders", "x")
    return tmp_path / "s"


def lock_of(store: Path, application: str) -> StoreLock:
    return StoreLock(str(store), Disk(), Settings(application), wall_clock_ms, time.sleep)


def remove(turn: Path) -> None:
    turn.unlink()


def replace(turn: Path) -> None:
    (turn.parent / "other").write_bytes(b"")
    os.rename(turn.parent / "other", turn)


@pytest.mark.parametrize("change", [remove, replace])
def test_hold_without_turn_waits_for_the_first_writer(store: Path, change: Callable[[Path], None]) -> None:
    first, second = lock_of(store, "first"), lock_of(store, "second")
    with first.hold():
        change(store / "rmq" / "turn")
        with pytest.raises(LockTimeoutError, match="first"), second.hold():
            pytest.fail("two writers at once")
    with second.hold():
        second.heartbeat()


@pytest.mark.parametrize("change", [remove, replace])
def test_heartbeat_without_turn_stops_the_first_writer(store: Path, change: Callable[[Path], None]) -> None:
    first = lock_of(store, "first")
    with first.hold():
        first.heartbeat()
        change(store / "rmq" / "turn")
        with pytest.raises(StoreChangedError, match=r"rmq/turn was removed or replaced"):
            first.heartbeat()
    with first.hold():
        first.heartbeat()


def test_hold_ignores_holder_json_without_a_locked_lock(store: Path) -> None:
    first, second = lock_of(store, "first"), lock_of(store, "second")
    with first.hold():
        note = (store / "rmq" / "holder.json").read_bytes()
    (store / "rmq" / "holder.json").write_bytes(note)  # of a process that lives: this one
    with second.hold():
        second.heartbeat()
