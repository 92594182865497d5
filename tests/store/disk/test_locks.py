"""Locks on files: other processes, Java, forks, and probes."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from support.interrupts import Interrupt, interrupted

from rmq_spark.store.disk.locks import BrokerLock, FileLock, is_locked, is_open_to_write, seems_locked
from rmq_spark.store.errors import StoreChangedError, StoreError, StorePathError

# Python 3.12 warns of a fork beside threads that other tests left running; the children here only exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

# A process-wide lock, as FileChannel#tryLock(0, 1, false) takes it.
JAVA = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
except OSError:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
"""
OURS = """
import sys
from rmq_spark.store.disk.locks import FileLock
lock = FileLock(sys.argv[1])
print("held" if lock.try_take() else "refused", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that tries the lock, prints "held" or "refused", and exits when its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def answer(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.write_bytes(b"lock")
    return path


def test_file_lock_excludes_another_one_in_the_same_process(path: Path) -> None:
    first, second = FileLock(str(path)), FileLock(str(path))
    assert first.try_take()
    assert first.is_held
    assert not second.try_take()
    assert not second.is_held
    first.release()
    first.release()
    assert second.try_take()
    second.release()


@pytest.mark.parametrize("code", [JAVA, OURS], ids=["java", "ours"])
def test_file_lock_excludes_other_processes_both_ways(path: Path, code: str) -> None:
    lock = FileLock(str(path))
    with process(code, path) as child:
        assert answer(child) == "held"
        assert is_locked(str(path))
        assert not lock.try_take()
        child.communicate()  # ends its input, and so the process
        assert lock.try_take()
    with process(code, path) as child:
        assert answer(child) == "refused"
    lock.release()


@pytest.mark.parametrize("code", [JAVA, OURS], ids=["java", "ours"])
def test_file_lock_is_free_after_its_holder_was_killed(path: Path, code: str) -> None:
    lock = FileLock(str(path))
    with process(code, path) as child:
        assert answer(child) == "held"
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert lock.try_take()
        lock.release()


def test_file_lock_survives_closing_another_descriptor_of_the_file(path: Path) -> None:
    lock = FileLock(str(path))
    assert lock.try_take()
    os.close(os.open(path, os.O_RDWR))  # a process-wide lock would be lost now
    with process(JAVA, path) as child:
        assert answer(child) == "refused"
    lock.release()


def test_file_lock_is_released_when_collected(path: Path) -> None:
    lock = FileLock(str(path))
    assert lock.try_take()
    del lock
    assert not is_locked(str(path))


def test_file_lock_closes_a_file_collected_first_without_a_warning(path: Path) -> None:
    lock = FileLock(str(path))
    assert lock.try_take()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lock._file = None  # the collector may do so first if both are part of a cycle
    assert not is_locked(str(path))


def test_is_locked_distinguishes_bytes_and_kinds_of_locks(path: Path) -> None:
    class Shared(FileLock):  # a BrokerLock also has a lease, and an open for writing would wait 45 s for it
        _kind, _access = fcntl.F_RDLCK, os.O_RDONLY

    shared, exclusive = Shared(str(path)), FileLock(str(path), 1)
    assert shared.try_take()
    assert exclusive.try_take()
    assert is_locked(str(path))
    assert not is_locked(str(path), exclusively=True)
    assert is_locked(str(path), 1, exclusively=True)
    assert not is_locked(str(path), 2)
    shared.release()
    exclusive.release()
    broker = BrokerLock(str(path))
    assert broker.try_take()
    assert is_locked(str(path))
    assert not is_locked(str(path), exclusively=True), "a broker's lock is one of the shared ones"
    broker.release()


def test_is_locked_raises_if_the_file_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    for ask in (is_locked, is_open_to_write):
        with pytest.raises(StoreError, match=f"{path}.*Too many open files.*ulimit"):
            ask(str(path))
    with pytest.raises(StoreError, match="ulimit"):
        FileLock(str(path)).try_take()
    with pytest.raises(StoreError, match="ulimit"):
        seems_locked(str(path))
    monkeypatch.undo()
    assert not is_locked(str(path) + "x")
    assert not is_open_to_write(str(path) + "x")


def test_is_open_to_write_detects_writers_and_not_readers(path: Path) -> None:
    with path.open("rb"):
        assert not is_open_to_write(str(path))
    with path.open("r+b"):
        assert is_open_to_write(str(path))


def fork(act) -> int:
    """Run `act` in a forked child; return its process id. The child ends with 0 if `act` returned True."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if act() else 1
        finally:
            os._exit(code)
    return pid


def test_file_lock_is_not_held_by_a_forked_child(path: Path) -> None:
    lock = FileLock(str(path))
    assert lock.try_take()

    def child() -> bool:
        held = lock.is_held
        lock.release()
        return not held and not lock.try_take()

    _, status = os.waitpid(fork(child), 0)
    assert status == 0
    assert lock.is_held
    assert not FileLock(str(path)).try_take()
    lock.release()


def test_file_lock_of_a_dead_process_is_free_while_its_child_lives(path: Path) -> None:
    reader, writer = os.pipe()

    def parent() -> bool:
        os.close(writer)
        lock = FileLock(str(path))
        took = lock.try_take()
        fork(lambda: os.read(reader, 1))  # it exits when the test closes the other end
        os.kill(os.getpid(), signal.SIGKILL)
        return took

    _, status = os.waitpid(fork(parent), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    lock = FileLock(str(path))
    # The child closes its descriptor first, so this waits only for its first time slice.
    while not lock.try_take():
        os.sched_yield()
    lock.release()
    os.close(writer)
    os.close(reader)


def test_file_lock_is_not_inherited_by_a_started_program(path: Path) -> None:
    lock = FileLock(str(path))
    assert lock.try_take()
    command = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, close_fds=False, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert answer(child) == "up"
        lock.release()
        assert lock.try_take()
        lock.release()
        child.kill()


def test_try_take_locks_the_new_file_if_it_was_replaced(path: Path) -> None:
    class Unlucky(FileLock):
        tries = 0

        def _try_lock(self, descriptor: int) -> bool:
            self.tries += 1
            if self.tries == 1:
                path.unlink()
                path.write_bytes(b"lock")
            return super()._try_lock(descriptor)

    lock = Unlucky(str(path))
    assert lock.try_take()
    assert lock.tries == 2
    with process(JAVA, path) as child:
        assert answer(child) == "refused"
    lock.release()


def test_try_take_raises_for_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StoreChangedError, match="lock is gone"):
        FileLock(str(tmp_path / "lock")).try_take()


def test_try_take_names_the_missing_right(tmp_path: Path) -> None:
    with pytest.raises(StorePathError, match=r"cannot be locked: Is a directory\. .*Give the user who runs Spark"):
        FileLock(str(tmp_path)).try_take()


def test_try_take_raises_without_locks_and_leaves_no_open_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    before = os.listdir("/proc/self/fd")
    lock = FileLock(str(path))
    with pytest.raises(StorePathError, match=r"No locks available\. Its file system has no working locks"):
        lock.try_take()
    assert not lock.is_held
    assert os.listdir("/proc/self/fd") == before


MODULES = ("locks", "files", "kernel_errors", "ownership", "contextlib")


def hold(lock: FileLock) -> None:
    try:
        lock.try_take()
    finally:
        lock.release()


LOCKING_CALLS = {
    "is_locked": is_locked,
    "seems_locked": seems_locked,
    "is_open_to_write": is_open_to_write,
    "file_lock": lambda path: hold(FileLock(path, only_writers=True)),
    "broker_lock": lambda path: hold(BrokerLock(path)),
}


def descriptors(path: Path) -> list[str]:
    """Return the descriptors of this process that are open at a path."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the list itself
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                found.append(name)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts of finalizers
@pytest.mark.parametrize("name", LOCKING_CALLS)
def test_interrupted_calls_leave_no_descriptor_open(path: Path, name: str) -> None:
    LOCKING_CALLS[name](str(path))  # the first call also does what the others find done
    count = interrupted(lambda: LOCKING_CALLS[name](str(path)), 0, MODULES)[0].seen
    assert count
    for at in range(1, count + 1):
        interrupt, error = interrupted(lambda: LOCKING_CALLS[name](str(path)), at, MODULES)
        del error  # its traceback keeps the lock, which is released at last when it is collected
        assert interrupt.place
        assert not descriptors(path), interrupt.place


def test_forked_child_that_is_interrupted_holds_no_lock(path: Path) -> None:
    gc.collect()  # a child handles every lock that exists, those of earlier tests too
    lock = FileLock(str(path))
    assert lock.try_take()
    parent = os.getpid()

    def fork_interrupted(at: int) -> int:
        """Fork with an interrupt of the child at place `at`; return 0 if there was none, 1, or 2 if a lock was left."""
        interrupt = Interrupt(at, ("locks",))

        def trace(frame: FrameType, event: str, argument: object) -> Interrupt | None:
            return None if os.getpid() == parent else interrupt(frame, event, argument)

        before = sys.gettrace()
        sys.settrace(trace)
        pid = os.fork()
        if not pid:
            sys.settrace(None)
            os._exit(2 if descriptors(path) else 1 if interrupt.place else 0)
        sys.settrace(before)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    ends = [1]
    while ends[-1] == 1:
        ends.append(fork_interrupted(len(ends)))
    assert ends[-1] == 0, f"the child holds the lock after an interrupt at place {len(ends) - 1}"
    assert len(ends) > 3
    lock.release()
