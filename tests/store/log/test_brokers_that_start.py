"""Tests of a starting broker: it reads a store before it locks it, and would overwrite what is appended meanwhile."""

import contextlib
import errno
import fcntl
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.disk import host as mounts
from rmq_spark.store.disk.locks import BrokerLock, is_locked
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.log.commit_log_writer import CommitLogWriter, DirtyFiles
from rmq_spark.store.log.consume_queue_writer import ConsumeQueueWriter
from rmq_spark.store.log.store_files import StoreFiles

# DefaultMessageStore opens the file in its constructor, then loads the store, and locks the file in #start.
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
    """A process that opens the store's lock file as a broker does. Each line of input lets it continue one step."""
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


@pytest.fixture
def refuse_leases(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the kernel refuse every lease from now on, with this error number."""

    def refuse(why: int) -> None:
        real: Callable[..., Any] = fcntl.fcntl

        def refusing(descriptor: int, command: int, *rest: object) -> object:
            if command == fcntl.F_SETLEASE:
                raise OSError(why, os.strerror(why))
            return real(descriptor, command, *rest)

        monkeypatch.setattr(fcntl, "fcntl", refusing)

    return refuse


def test_hold_is_refused_while_a_broker_loads_the_store(store: Path) -> None:
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


def test_hold_lets_a_starting_broker_wait_before_it_loads(store: Path, lock: BrokerLock) -> None:
    assert lock.try_take()
    with starting_broker(store) as broker:
        answers: list[str] = []
        reading = threading.Thread(target=lambda: answers.append(line(broker)))
        reading.start()
        while not broker_is_waiting(store / "lock"):
            assert reading.is_alive()
            os.sched_yield()
        assert not answers
        lock.release()
        reading.join()
        assert answers == ["loaded"]
        assert not lock.try_take()
        go_on(broker)
        assert line(broker) == "locked"


def broker_is_waiting(path: Path) -> bool:
    """Say whether a process waits for the release of the lease on the file."""
    leases = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "LEASE" in line]
    return any(f":{path.stat().st_ino}" in " ".join(line) and "BREAKING" in line for line in leases)


def test_open_reader_neither_waits_for_a_broker_nor_delays_it(store: Path, lock: BrokerLock) -> None:
    with (store / "lock").open("rb") as held:
        assert lock.try_take()
        assert held.read() == (store / "lock").read_bytes()
        assert is_locked(str(store / "lock"))
    lock.release()
    assert not is_locked(str(store / "lock"))


@pytest.mark.parametrize("kind", ["nfs4", "cifs"])
def test_hold_on_a_network_file_system_is_exclusive_without_a_lease(
    store: Path, monkeypatch: pytest.MonkeyPatch, refuse_leases: Callable[[int], None], kind: str
) -> None:
    """NFSv4 without a delegation and SMB without an oplock answer EAGAIN, as if a broker had the file open."""
    refuse_leases(errno.EAGAIN)
    monkeypatch.setattr(mounts, "file_system", lambda path: kind)
    writer = rmq_spark.open_store(str(store), allow_network_store=True, lock_timeout_ms=0)
    with writer._writer.section(), (store / "lock").open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    assert writer.send("t", b"second", queue_id=0).queue_offset == 1


@pytest.mark.parametrize("why", [errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP])
def test_hold_without_leases_excludes_by_the_lock(
    lock: BrokerLock, refuse_leases: Callable[[int], None], why: int
) -> None:
    refuse_leases(why)
    assert lock.try_take()
    assert is_locked(lock.path)


class LateClock:
    """A clock that is as late as a test sets it."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def __call__(self) -> float:
        return self.late_s


def test_lease_seconds_left_counts_from_the_last_unbroken_check(store: Path) -> None:
    clock = LateClock()
    lock = BrokerLock(str(store / "lock"), monotonic_s=clock, break_s=lambda: 45)
    assert lock.try_take()
    clock.late_s = 1000
    assert (lock.broker_is_waiting, lock.lease_seconds_left()) == (False, math.inf), (
        "a lease that is whole is safe, however old"
    )
    with starting_broker(store) as broker:
        broker_waits(broker, store)
        clock.late_s = 1030
        assert (lock.broker_is_waiting, lock.lease_seconds_left()) == (True, 15)
        clock.late_s = 1050
        assert lock.lease_seconds_left() == -5
        lock.release()
        assert not lock.broker_is_waiting


def test_lease_seconds_left_is_infinite_without_a_break_time(store: Path) -> None:
    lock = BrokerLock(str(store / "lock"), monotonic_s=LateClock(), break_s=lambda: 0)
    assert lock.try_take()
    with starting_broker(store) as broker:
        broker_waits(broker, store)
        assert (lock.broker_is_waiting, lock.lease_seconds_left()) == (True, math.inf)
        lock.release()


def has_waited(writer: Producer, clock: LateClock) -> None:
    """Let the writer's lock use a test clock, and the kernel's defaults."""
    lock = writer._writer.lock._lock
    assert isinstance(lock, BrokerLock)
    lock._monotonic_s, lock._break_s = clock, lambda: 45


def records_of(writer: Producer, body: bytes) -> EncodedRecords:
    return writer._record_builder.encode(pa.record_batch({"topic": ["t"], "body": [body], "queueId": [0]}), None)


def bodies(store: Path) -> list[bytes]:
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        (queue,) = [queue for queue in reader.queues("t") if queue.queue_id == 0]
        end = reader.bounds(queue).max_offset
        return [row["body"] for batch in reader.read(queue, 0, end, ("body",)) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("late_s", "is_refused"), [(30, False), (40, True), (60, True)], ids=["in time", "late", "when it looks"]
)
def test_heartbeat_refuses_shortly_before_a_broker_reads(store: Path, late_s: float, is_refused: bool) -> None:
    clock = LateClock()
    with rmq_spark.open_store(str(store)) as writer:
        records = records_of(writer, b"second")
        has_waited(writer, clock)
        with starting_broker(store) as broker, contextlib.ExitStack() as outcome:
            if is_refused:
                outcome.enter_context(pytest.raises(rmq_spark.LockTimeoutError, match="a broker is starting in"))
            with writer._writer.section() as section:
                broker_waits(broker, store)
                clock.late_s = late_s
                assert section.broker_is_waiting
                section.append(records)
    assert bodies(store) == [b"first"] if is_refused else [b"first", b"second"]


def broker_waits(broker: subprocess.Popen[str], store: Path) -> None:
    while not broker_is_waiting(store / "lock"):
        assert broker.poll() is None
        os.sched_yield()


@pytest.mark.parametrize("slow", ["write", "note_logged", "put", "settle"])
def test_append_that_a_broker_overtook_is_not_reported_and_abort_stays(
    store: Path, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write takes so long that the broker has loaded the store meanwhile: it overwrites what was written."""
    clock = LateClock()
    writer = rmq_spark.open_store(str(store))
    records = records_of(writer, b"second")
    has_waited(writer, clock)
    checkpoint = (store / "checkpoint").read_bytes()
    with starting_broker(store) as broker:
        owner = {"write": CommitLogWriter, "note_logged": StoreFiles, "put": ConsumeQueueWriter, "settle": DirtyFiles}[
            slow
        ]
        name = "sync" if slow == "settle" else slow
        real = getattr(owner, name)

        def take_long(self: object, *arguments: object) -> object:
            broker_waits(broker, store)
            clock.late_s = 60
            return real(self, *arguments)

        def write() -> None:
            with writer._writer.section() as section:
                if slow == "settle":
                    section.append(records)
                monkeypatch.setattr(owner, name, take_long)
                section.settle() if slow == "settle" else section.append(records)

        with pytest.raises(rmq_spark.LockTimeoutError, match=r"a broker is starting in .* the store is left as after"):
            write()
        assert line(broker) == "loaded", "the section has ended"
        assert (store / "abort").exists()
        assert (store / "checkpoint").read_bytes() == checkpoint, "a broker has it mapped by then"
        monkeypatch.undo()
    clock.late_s = 0
    writer.send("t", b"third", queue_id=0)
    writer.close()
    assert bodies(store) in ([b"first", b"third"], [b"first", b"second", b"third"]), "whole, whatever was given up"
