"""A broker looks at a store before it locks it. Who appends in between would be written over: nobody may."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.disk.file_lock import BrokerLock
from rmq_spark.store.disk.lock_probe import is_locked

# DefaultMessageStore opens the file when it is made, then loads the store, and locks the file in #start.
BROKER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("loaded", flush=True)
sys.stdin.readline()
fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("locked", flush=True)
sys.stdin.readline()
"""


@contextmanager
def starting_broker(store: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that opens the store's lock file as a broker does; each line of input lets it go a step further."""
    command = [sys.executable, "-c", BROKER, str(store / "lock")]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        try:
            yield broker
        finally:
            broker.kill()


def line(broker: subprocess.Popen[str]) -> str:
    assert broker.stdout
    return broker.stdout.readline().strip()


def go_on(broker: subprocess.Popen[str]) -> None:
    assert broker.stdin
    broker.stdin.write("\n")
    broker.stdin.flush()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one message."""
    path = tmp_path / "store"
    with rmq_spark.open_store(str(path), segment_bytes=1 << 20) as writer:
        writer.send("t", b"first", queue_id=0)
    return path


@pytest.fixture
def lock(store: Path) -> Iterator[BrokerLock]:
    found = BrokerLock(str(store / "lock"))
    yield found
    found.release()


def test_nobody_appends_while_a_broker_loads_the_store(store: Path) -> None:
    writer = rmq_spark.open_store(str(store), lock_timeout_ms=1_500)
    with starting_broker(store) as broker:
        assert line(broker) == "loaded"
        with pytest.raises(rmq_spark.LockTimeoutError, match="by a broker that is starting"):
            writer.send("t", b"into what the broker has looked at", queue_id=0)
        go_on(broker)
        assert line(broker) == "locked"
        with pytest.raises(rmq_spark.LockTimeoutError, match="belongs to a broker"):
            writer.send("t", b"no", queue_id=0)
    assert writer.send("t", b"second", queue_id=0).queue_offset == 1


def test_a_broker_that_starts_while_somebody_appends_waits_before_it_loads(store: Path, lock: BrokerLock) -> None:
    assert lock.try_take()
    with starting_broker(store) as broker:
        answers: list[str] = []
        reading = threading.Thread(target=lambda: answers.append(line(broker)))
        reading.start()
        while not is_waited_for(store / "lock"):
            assert reading.is_alive()
            os.sched_yield()
        assert not answers
        lock.release()
        reading.join()
        assert answers == ["loaded"]
        assert not lock.try_take()
        go_on(broker)
        assert line(broker) == "locked"


def is_waited_for(path: Path) -> bool:
    """Say whether somebody waits for the lease on the file to be given up."""
    leases = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "LEASE" in line]
    return any(f":{path.stat().st_ino}" in " ".join(line) and "BREAKING" in line for line in leases)


def test_readers_neither_wait_nor_hinder(store: Path, lock: BrokerLock) -> None:
    with (store / "lock").open("rb") as held:
        assert lock.try_take()
        assert held.read() == (store / "lock").read_bytes()
        assert is_locked(str(store / "lock"))
    lock.release()
    assert not is_locked(str(store / "lock"))


@pytest.mark.parametrize("why", [errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP])
def test_where_the_kernel_grants_no_lease_the_lock_alone_excludes(
    lock: BrokerLock, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    real: Callable[..., Any] = fcntl.fcntl

    def refusing(descriptor: int, command: int, *rest: object) -> object:
        if command == fcntl.F_SETLEASE:
            raise OSError(why, os.strerror(why))
        return real(descriptor, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    assert lock.try_take()
    assert is_locked(lock.path)
