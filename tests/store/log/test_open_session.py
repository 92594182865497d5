"""A write session that stays open between sends: others get the lock, and nothing is lost when its process ends."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.disk.locks import is_locked
from rmq_spark.store.errors import DiskFullError
from rmq_spark.store.format.own_files import Watermark
from rmq_spark.store.log.single_append import SingleAppender
from rmq_spark.store.log.store_lock import StoreLock
from rmq_spark.store.log.store_state import read_watermark
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.check import check
from rmq_spark.store.tools.finding import Severity

QUEUE = QueueKey("t", 0)
PATIENCE_S = 20  # ends a hang
BROKER = """
import os, sys
os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("loaded", flush=True)
sys.stdin.readline()
"""
SENDER = """
import os, signal, sys
import rmq_spark
store = rmq_spark.open_store(sys.argv[1])
for number in range(20):
    store.send("t", b"%05d" % number, queue_id=0, keys=f"k{number}")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session end only if somebody waits for the lock."""
    monkeypatch.setattr("rmq_spark.store.log.open_session.LINGER_S", 1e9)
    monkeypatch.setattr("rmq_spark.store.log.open_session.LONGEST_S", 1e9)


def send(store: Producer, number: int) -> int:
    return store.send("t", b"%05d" % number, queue_id=0, keys=f"k{number}").queue_offset


def is_session_open(root: Path) -> bool:
    return is_locked(str(root / "rmq/turn"), 1)


def watermark(root: Path) -> Watermark:
    found = read_watermark(str(root))
    assert found is not None
    return found


def bodies(root: Path) -> list[int]:
    with rmq_spark.open_reader(str(root)) as reader:
        reader.refresh()
        held = reader.bounds(QUEUE)
        batches = reader.read(QUEUE, held.min_offset, held.max_offset, ("body",), check_crc=True)
        return [int(row["body"]) for batch in batches for row in batch.to_pylist()]


def wait_until(is_done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < end_s
        time.sleep(0.002)


@pytest.mark.usefixtures("stays_open")
def test_send_leaves_its_session_open_and_readers_see_each_message(root: Path) -> None:
    store = rmq_spark.open_store(str(root))
    for number in range(10):
        assert send(store, number) == number
        assert is_session_open(root)
        assert bodies(root) == list(range(number + 1))
    holds = store._writer.lock._holds
    send(store, 10)
    assert store._writer.lock._holds == holds
    assert {one.severity for one in check(str(root)).findings} == {Severity.NOTE}  # a writer is running
    store.close()
    assert not is_session_open(root)
    assert not (root / "abort").exists()


def test_session_ends_by_itself(root: Path) -> None:
    store = rmq_spark.open_store(str(root))
    send(store, 0)
    send(store, 1)
    wait_until(lambda: not is_session_open(root))
    assert not watermark(root).is_open
    assert send(store, 2) == 2


@pytest.mark.usefixtures("stays_open")
def test_session_ends_when_a_writer_waits(root: Path) -> None:
    first, second = rmq_spark.open_store(str(root)), rmq_spark.open_store(str(root), lock_timeout_ms=PATIENCE_S * 1000)
    for number in range(0, 10, 2):
        assert send(first, number) == number
        assert send(second, number + 1) == number + 1
    assert bodies(root) == list(range(10))


@pytest.mark.usefixtures("stays_open")
def test_session_ends_when_a_writer_waits_while_messages_are_sent(root: Path) -> None:
    first, second = rmq_spark.open_store(str(root)), rmq_spark.open_store(str(root), lock_timeout_ms=PATIENCE_S * 1000)
    is_over = threading.Event()
    sent = [0, 0]

    def send_on() -> None:
        while not is_over.is_set():
            send(first, 0)
            sent[0] += 1

    sending = threading.Thread(target=send_on)
    sending.start()
    try:
        for _ in range(5):
            send(second, 1)
            second.topics()
            sent[1] += 1
    finally:
        is_over.set()
        sending.join()
    found = bodies(root)
    assert (found.count(0), found.count(1)) == tuple(sent)


@pytest.mark.usefixtures("stays_open")
@pytest.mark.parametrize("is_sending", [False, True])
def test_session_ends_when_a_broker_starts(root: Path, *, is_sending: bool) -> None:
    store = rmq_spark.open_store(str(root), lock_timeout_ms=1_000)
    send(store, 0)
    command = [sys.executable, "-c", BROKER, str(root / "lock")]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdout
        loaded = threading.Thread(target=broker.stdout.readline)
        loaded.start()
        number = 0
        try:
            while is_sending and loaded.is_alive():
                number += 1
                send(store, number)
        except rmq_spark.LockTimeoutError:
            number -= 1
        loaded.join()
        assert not is_session_open(root)
        assert not watermark(root).is_open
        assert bodies(root) == list(range(number + 1))
        with pytest.raises(rmq_spark.LockTimeoutError, match="by a broker that is starting"):
            send(store, 99)
        broker.communicate("\n")
    assert send(store, number + 1) == number + 1


def test_session_ends_after_each_send_if_brokers_would_not_wait(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreLock, "lets_brokers_wait", False)
    store = rmq_spark.open_store(str(root))
    for number in range(3):
        send(store, number)
        assert not is_session_open(root)


@pytest.mark.usefixtures("stays_open")
def test_other_methods_end_the_session(root: Path) -> None:
    with rmq_spark.open_store(str(root)) as store:
        for number, call in enumerate([lambda: store.create_topic("u"), store.settle, lambda: store.set_retention()]):
            send(store, number)
            call()
            assert not is_session_open(root)
        send(store, 3)
        assert store.send("t", b"00004", queue_id=0, delay_level=1).topic == "SCHEDULE_TOPIC_XXXX"
        assert not is_session_open(root)
    assert bodies(root) == [0, 1, 2, 3]


@pytest.mark.usefixtures("stays_open")
def test_session_ends_with_its_producer(root: Path) -> None:
    store = rmq_spark.open_store(str(root))
    send(store, 0)
    send(store, 1)
    del store
    gc.collect()
    wait_until(lambda: not is_session_open(root))
    assert (watermark(root).is_open, watermark(root).logged_end) == (False, 0)


def test_session_ends_under_its_lock_if_its_producer_is_collected_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = rmq_spark.open_store(str(root))
    store.cycle = store  # type: ignore[attr-defined]  # only the collector can free it
    lock, finish, held = store._writer.lock, SingleAppender.finish, list[bool]()

    def collect_and_finish(appender: SingleAppender) -> None:
        if threading.current_thread() is not threading.main_thread():
            gc.collect()
            held.append(lock.is_held)
        finish(appender)

    send(store, 0)
    send(store, 1)
    monkeypatch.setattr(SingleAppender, "finish", collect_and_finish)
    del store
    wait_until(lambda: bool(held) and not is_session_open(root))
    assert held == [True]
    assert not watermark(root).is_open


def test_interpreter_ends_although_a_thread_waits_for_the_store(root: Path) -> None:
    program = """
import sys, threading, time, rmq_spark
store = rmq_spark.open_store(sys.argv[1], lock_timeout_ms=10**9)
threading.Thread(target=store.send, args=("t", b"x"), daemon=True).start()
while store._writer.lock._line.place is None and not store._writer.lock._turn.is_held:
    time.sleep(0.01)
"""
    with rmq_spark.open_store(str(root))._writer.section():
        child = subprocess.Popen([sys.executable, "-c", program, root], env={"PYTHONPATH": ":".join(sys.path)})
        try:
            assert child.wait(PATIENCE_S) == 0
        finally:
            child.kill()


@pytest.mark.usefixtures("stays_open")
def test_topic_that_was_removed_meanwhile_is_created_again(root: Path) -> None:
    store = rmq_spark.open_store(str(root))
    send(store, 0)
    send(store, 1)
    (root / "config/topics.json").write_bytes(b'{"topicConfigTable":{},"dataVersion":{}}')
    send(store, 2)
    assert store.topics() == ["t"]
    assert b'"t"' in (root / "config/topics.json").read_bytes()


@pytest.mark.usefixtures("stays_open")
def test_error_ends_the_session_and_the_next_one_recovers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = rmq_spark.open_store(str(root))
    send(store, 0)
    send(store, 1)

    def fail(*_: object) -> None:
        raise DiskFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr("rmq_spark.store.log.consume_queue_writer.ConsumeQueueWriter.put_one", fail)
        with pytest.raises(DiskFullError):
            send(store, 2)
    assert not is_session_open(root)
    # The log had the record, so recovery makes its entry: as after a death at this point.
    assert send(store, 3) == 3
    assert bodies(root) == [0, 1, 2, 3]


@pytest.mark.usefixtures("stays_open")
def test_interrupted_send_leaves_no_session(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = rmq_spark.open_store(str(root))
    send(store, 0)
    real = SingleAppender.append

    def interrupt(appender: SingleAppender, record: object) -> None:
        real(appender, record)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SingleAppender, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            send(store, 1)
    assert not is_session_open(root)
    assert send(store, 2) == 2


def run(code: str, root: Path) -> int:
    return subprocess.run([sys.executable, "-c", code, str(root)], timeout=PATIENCE_S * 3, check=False).returncode


def test_session_ends_with_the_interpreter(root: Path) -> None:
    assert run(SENDER, root) == 0
    assert not watermark(root).is_open
    assert bodies(root) == list(range(20))


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(9)"])
def test_killed_sender_loses_nothing(root: Path, end: str) -> None:
    assert run(SENDER + end, root) in (-signal.SIGKILL, 9)
    assert watermark(root).is_open
    assert bodies(root) == list(range(20))
    assert Severity.DAMAGE not in {one.severity for one in check(str(root)).findings}
    with rmq_spark.open_store(str(root)) as store:
        assert send(store, 20) == 20
    assert bodies(root) == list(range(21))
    assert not check(str(root)).findings
    with rmq_spark.open_reader(str(root)) as reader:
        reader.refresh()
        for number in range(21):
            assert reader.find_key("t", f"k{number}") == [(QUEUE, number)]


@pytest.fixture
def forked() -> Callable[[Callable[[], object]], int]:
    """A function that calls another one in a forked child, and returns the child's status."""

    def call(function: Callable[[], object]) -> int:
        child = os.fork()
        if not child:
            try:
                function()
            except BaseException:  # the child must not return into pytest
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return call


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_has_a_session_of_its_own(root: Path, forked: Callable[[Callable[[], object]], int]) -> None:
    store = rmq_spark.open_store(str(root))
    send(store, 0)
    assert forked(lambda: send(store, 1)) == 0
    assert send(store, 2) == 2
    assert forked(store.close) == 0
    assert send(store, 3) == 3
    assert bodies(root) == [0, 1, 2, 3]
