"""Tests of `StoreLock`: one writer at a time, in a fair order, and an error that names the holder."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rmq_spark.store.disk import host as mounts
from rmq_spark.store.disk.host import this_process
from rmq_spark.store.disk.locks import FileLock, is_locked
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import LockTimeoutError, StoreError, StorePathError
from rmq_spark.store.format.own_files import Holder, decode_holder, encode_holder
from rmq_spark.store.log import store_lock
from rmq_spark.store.log.store_lock import StoreLock
from rmq_spark.store.log.waiting_line import WaitingLine
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.failing_disk import FailingDisk

START_MS = 1_769_860_800_000  # 2026-01-31T12:00:00Z

# A broker: locks byte 0 for the whole process until its input ends.
BROKER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1] + "/lock", os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""
WRITER = """
import sys, time
from types import SimpleNamespace
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.log.store_lock import StoreLock
settings = SimpleNamespace(application="another", lock_timeout_ms=60_000, allow_network_store=False)
lock = StoreLock(sys.argv[1], Disk(), settings, lambda: time.time_ns() // 1_000_000, time.sleep)
with lock.hold():
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""
# Increments a number in a file repeatedly: two processes at the same time would lose increments.
COUNTER = (
    WRITER.split("with lock")[0]
    + """
for _ in range(int(sys.argv[2])):
    with lock.hold(), open(sys.argv[1] + "/count", "r+") as file:
        number = int(file.read())
        time.sleep(0.0005)
        file.seek(0)
        file.write(str(number + 1))
"""
)


@dataclass(frozen=True)
class Settings:
    application: str = "nightly"
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False


class FakeTime:
    """A clock that only `sleep` advances. `during` is called in each sleep."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.ms, self.slept_ms, self.during = START_MS, 0.0, during

    def now_ms(self) -> int:
        return self.ms

    def sleep(self, seconds: float) -> None:
        self.slept_ms += seconds * 1000
        self.ms += round(seconds * 1000)
        self.during()


def make_lock(root: Path, time: FakeTime | None = None, disk: Disk | None = None, **settings: object) -> StoreLock:
    time = time or FakeTime(lambda: pytest.fail("waits"))
    return StoreLock(str(root), disk or Disk(), Settings(**settings), time.now_ms, time.sleep)  # type: ignore[arg-type]


@contextmanager
def process(code: str, root: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root), *arguments],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def holding(code: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    with process(code, root) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


def is_free(root: Path) -> bool:
    return not is_locked(str(root / "lock")) and not is_locked(str(root / "rmq" / "turn"))


def test_hold_names_the_holder_only_while_it_holds(root: Path) -> None:
    lock = make_lock(root)
    for _ in range(2):
        with lock.hold():
            assert lock.is_held
            assert not is_free(root)
            assert not is_locked(str(root / "rmq" / "turn"))
            holder = decode_holder((root / "rmq" / "holder.json").read_bytes())
            assert holder is not None
            assert (holder.pid, holder.application, holder.since_ms) == (os.getpid(), "nightly", START_MS)
        assert not lock.is_held
        assert is_free(root)
        assert sorted(path.name for path in root.rglob("*")) == ["lock", "rmq", "turn"]
    assert (root / "lock").read_bytes() == b"lock"


def test_hold_creates_a_missing_store(tmp_path: Path) -> None:
    with make_lock(tmp_path / "a" / "b").hold():
        assert (tmp_path / "a/b/lock").read_bytes() == b"lock"


@pytest.mark.parametrize("content", [b"", b"lo", b"lock", b"something"])
def test_hold_writes_the_lock_file_of_a_broker(root: Path, content: bytes) -> None:
    (root / "lock").write_bytes(content)
    with make_lock(root).hold():
        assert (root / "lock").read_bytes() == (content if len(content) >= 4 else b"lock")


def test_hold_releases_the_lock_after_any_error(root: Path) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), make_lock(root).hold():
            raise error
        assert is_free(root)
        assert not (root / "rmq" / "holder.json").exists()


def test_hold_waits_for_another_writer(root: Path) -> None:
    with holding(WRITER, root) as child:
        waits = 0

        def during() -> None:
            nonlocal waits
            waits += 1
            if waits == 100:
                child.communicate("go\n")

        with make_lock(root, FakeTime(during)).hold():
            assert waits == 100


def test_hold_excludes_other_processes(root: Path) -> None:
    (root / "count").write_text("0")
    children = [
        subprocess.Popen([sys.executable, "-c", COUNTER, str(root), "25"], env={"PYTHONPATH": ":".join(sys.path)})
        for _ in range(3)
    ]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert (root / "count").read_text() == "75"


def test_hold_takes_the_lock_of_a_killed_holder_immediately(root: Path) -> None:
    with holding(WRITER, root) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert (root / "rmq" / "holder.json").exists()
        with make_lock(root).hold():
            holder = decode_holder((root / "rmq" / "holder.json").read_bytes())
            assert holder is not None
            assert holder.pid == os.getpid()
    assert not (root / "rmq" / "holder.json").exists()


def test_hold_names_a_holder_without_progress_after_the_timeout(root: Path) -> None:
    time = FakeTime()
    with make_lock(root, application="the other").hold():
        with pytest.raises(LockTimeoutError) as error, make_lock(root, time, lock_timeout_ms=90_000).hold():
            pytest.fail("two hold it")
        assert 90_000 <= time.slept_ms <= 90_100
        host = this_process().host
        assert str(error.value) == (
            f'{root} is being written by the application "the other" (process {os.getpid()} on host {host}, since '
            "2026-01-31T12:00:00+00:00), which has made no progress for 90 s. Nothing was written. Stop that process "
            "if it hangs; the next writer completes its work. To wait longer set lockTimeout, now 90s."
        )
        assert not is_locked(str(root / "rmq" / "turn"))
    assert is_free(root)


def test_hold_waits_without_limit_for_a_holder_with_progress(root: Path) -> None:
    time = FakeTime()
    other = make_lock(root, time)
    section = other.hold()
    section.__enter__()

    def during() -> None:
        if time.ms - START_MS > 60_000:
            if other.is_held:
                section.__exit__(None, None, None)
        elif time.ms // 4_000 != (time.ms - 30) // 4_000:
            other.heartbeat()

    time.during = during
    with make_lock(root, time, lock_timeout_ms=5_000).hold():
        assert 60_000 < time.slept_ms < 61_000


def test_heartbeat_limits_how_often_progress_is_written(root: Path) -> None:
    time = FakeTime()
    disk = CrashDisk(root)
    lock = make_lock(root, time, disk)
    with lock.hold():
        before = disk.effect_count
        for _ in range(100):
            lock.heartbeat()
        assert disk.effect_count == before
        time.ms += 1_000
        lock.heartbeat()
        assert disk.effect_count > before
        holder = decode_holder((root / "rmq" / "holder.json").read_bytes())
        assert holder is not None
        assert (holder.progress, holder.since_ms) == (1, START_MS)


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
def test_hold_ignores_a_clock_that_is_set_during_the_wait(root: Path, jump_ms: int) -> None:
    time = FakeTime()

    def during() -> None:
        if 10_000 < time.slept_ms < 10_030:
            time.ms += jump_ms

    time.during = during
    with make_lock(root).hold(), pytest.raises(LockTimeoutError), make_lock(root, time).hold():
        pytest.fail("two hold it")
    assert 57_000 <= time.slept_ms <= 60_100


def test_lock_timeout_of_zero_waits_only_for_an_idle_session_to_end(root: Path) -> None:
    time = FakeTime()
    first, second = make_lock(root), make_lock(root, time, lock_timeout_ms=0)
    with first.hold(), pytest.raises(LockTimeoutError, match="no progress for 0 s"), second.hold():
        pytest.fail("two hold it")
    assert 0 < time.slept_ms < 30
    assert is_free(root)
    holding, time = first.hold(), FakeTime()
    holding.__enter__()
    time.during = lambda: time.slept_ms > 10 and first.release()
    second = make_lock(root, time, lock_timeout_ms=0)
    with second.hold():
        assert second.is_held


def test_hold_goes_past_a_stopped_process_in_the_line(root: Path) -> None:
    make_lock(root)._make_files()
    stopped, time = WaitingLine(str(root / "rmq/turn")), FakeTime()
    while not stopped.move_up():
        pass
    with make_lock(root, time).hold():
        assert 100 < time.slept_ms < 1000


class WaitsError(Exception):
    """Raised where a wait would begin."""


def waits() -> None:
    raise WaitsError


def test_hold_again_waits_after_earlier_waiters(root: Path) -> None:
    first = make_lock(root, FakeTime(waits))
    section = first.hold()
    section.__enter__()
    barged = []

    def during() -> None:
        # The second one is waiting. The first one releases now and immediately wants the lock again.
        if first.is_held:
            section.__exit__(None, None, None)
            try:
                with first.hold():
                    barged.append(True)
            except WaitsError:
                barged.append(False)

    with make_lock(root, FakeTime(during)).hold():
        assert barged == [False]
    with first.hold():
        pass


def test_hold_takes_a_free_store_from_a_stopped_turn_owner(root: Path) -> None:
    with make_lock(root).hold():
        pass
    stopped = FileLock(str(root / "rmq" / "turn"))
    assert stopped.try_take()
    time = FakeTime()
    with make_lock(root, time).hold():
        assert 2_000 <= time.slept_ms < 3_000
    time = FakeTime()
    with make_lock(root, time, lock_timeout_ms=500).hold():
        assert 500 <= time.slept_ms < 600
    stopped.release()


def refusal(root: Path, **settings: object) -> tuple[str, float]:
    """Return the error of a writer that does not get the lock, and after how many ms."""
    time = FakeTime()
    with pytest.raises(LockTimeoutError) as error, make_lock(root, time, **settings).hold():
        pytest.fail("two hold it")
    return str(error.value), time.slept_ms


@contextmanager
def java(tmp_path: Path) -> Iterator[int]:
    """A process that looks like a Java process from outside."""
    command = shutil.copy(str(shutil.which("sleep")), tmp_path / "java")
    with subprocess.Popen([str(command), "1000"]) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def test_hold_names_a_broker_from_abort_without_a_wait(root: Path, tmp_path: Path) -> None:
    with holding(BROKER, root), java(tmp_path) as pid:
        (root / "abort").write_text(str(pid))
        message, slept_ms = refusal(root)
        assert message == (
            f"{root} belongs to a broker (process {pid}, 5.x), which holds {root}/lock while it runs. Nothing was "
            "written. Reading works next to a broker. To append here stop it (mqshutdown broker), or send the messages "
            "to it."
        )
        assert 1_000 <= slept_ms < 1_100


@pytest.mark.parametrize(
    "abort", [None, b"", b"1", pytest.param(str(os.getpid()).encode(), id="of this process"), b"4194305", b"junk"]
)
def test_hold_finds_a_broker_without_its_pid_in_abort(root: Path, abort: bytes | None) -> None:
    if abort is not None:
        (root / "abort").write_bytes(abort)
    with holding(BROKER, root):
        assert f"{root} belongs to a broker, which holds" in refusal(root)[0]


def note(**changes: object) -> bytes:
    process = this_process()
    holder = Holder(
        process.host, process.boot_id, process.pid_space, process.pid, process.start_ticks, "earlier", START_MS
    )
    return encode_holder(Holder(**{**{name: getattr(holder, name) for name in Holder.__slots__}, **changes}))


def test_hold_finds_a_broker_despite_a_dead_writers_name(root: Path) -> None:
    (root / "rmq").mkdir()
    (root / "rmq" / "holder.json").write_bytes(note(start_ticks=1))
    with holding(BROKER, root):
        message, slept_ms = refusal(root)
        assert "belongs to a broker" in message
        assert slept_ms < 1_100


def test_hold_waits_the_timeout_for_a_writer_on_another_host(root: Path) -> None:
    (root / "rmq").mkdir()
    (root / "rmq" / "holder.json").write_bytes(note(host="far", application="remote"))
    with holding(BROKER, root):
        message, slept_ms = refusal(root)
        assert 'the application "remote"' in message
        assert "on host far" in message
        assert slept_ms >= 60_000


def test_hold_names_the_broker_also_while_it_waits_for_turn(root: Path) -> None:
    with make_lock(root).hold():
        pass
    turn = FileLock(str(root / "rmq" / "turn"))
    assert turn.try_take()
    with holding(BROKER, root):
        message, slept_ms = refusal(root)
        assert "belongs to a broker" in message
        assert 10_000 <= slept_ms < 11_000
    turn.release()


def test_hold_waits_the_timeout_for_a_process_with_the_file_open(root: Path) -> None:
    with make_lock(root).hold():
        pass
    with (root / "lock").open("r+b"):
        message, slept_ms = refusal(root, lock_timeout_ms=8_000)
        assert message == (
            f"{root}/lock is not locked, but was open for writing for 8 s: by a broker that is starting, or by another "
            f"process. Meanwhile a broker may be reading the store. Nothing was written to {root}. See which process "
            f"it is with `fuser -v {root}/lock` (as root if it belongs to another user). Let a starting broker come "
            "up, and send the messages to it; have any other process close the file. To wait longer set lockTimeout, "
            "now 8s."
        )
        assert 8_000 <= slept_ms < 8_100
        turn = FileLock(str(root / "rmq" / "turn"))
        assert turn.try_take()
        message, slept_ms = refusal(root, lock_timeout_ms=15_000)
        assert "is not locked, but was open for writing for 15 s" in message
        assert 15_000 <= slept_ms < 15_100
        turn.release()
    with make_lock(root).hold():
        pass


def test_hold_waits_until_another_process_closes_the_file(root: Path) -> None:
    with make_lock(root).hold():
        pass
    opened = (root / "lock").open("r+b")
    time = FakeTime()

    def during() -> None:
        if time.slept_ms > 5_000:
            opened.close()

    time.during = during
    with make_lock(root, time).hold():
        assert 5_000 < time.slept_ms < 5_100


def test_hold_does_not_guess_the_holder_in_a_short_timeout(root: Path) -> None:
    with holding(BROKER, root):
        message, slept_ms = refusal(root, lock_timeout_ms=300)
        assert f"{root}/lock was not released within 0.3 s: an unknown process holds it" in message
        assert "To wait longer set lockTimeout, now 0.3s" in message
        assert 300 <= slept_ms < 400


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_hold_is_not_inherited_by_a_forked_child(root: Path) -> None:
    lock = make_lock(root)
    pid = -1
    try:
        with lock.hold():
            pid = os.fork()
            if not pid:
                with pytest.raises(StoreError, match=r"this process does not hold .*, because it was forked"):
                    lock.heartbeat()
                assert not lock.is_held
        # The child leaves the body too, like a child that was forked in the middle of the work.
        if not pid:
            os._exit(0)
    finally:
        if not pid:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_release_in_a_forked_child_keeps_the_parents_name_and_lock(root: Path) -> None:
    lock = make_lock(root)
    section = lock.hold()
    section.__enter__()
    pid = os.fork()
    if not pid:
        section.__exit__(None, None, None)
        os._exit(0)
    os.waitpid(pid, 0)
    assert lock.is_held
    assert is_locked(str(root / "lock"))
    assert (root / "rmq" / "holder.json").exists()
    section.__exit__(None, None, None)
    assert is_free(root)


def test_hold_refuses_a_network_file_system_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "file_system", lambda path: "nfs4" if path == str(tmp_path) else "")
    monkeypatch.setattr(store_lock, "file_system", mounts.file_system)
    with (
        pytest.raises(StorePathError, match=r"network file system \(nfs4\); .*allowNetworkStore=true"),
        make_lock(tmp_path / "not" / "there").hold(),
    ):
        pytest.fail("taken")
    assert os.listdir(tmp_path) == []
    with make_lock(tmp_path / "not" / "there", allow_network_store=True).hold():
        pass


@pytest.mark.parametrize("name", ["store", "store/rmq", "store/lock", "store/rmq/turn"])
def test_hold_names_a_file_or_folder_in_the_way(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(("lock", "turn")):
        path.mkdir()
    else:
        path.write_bytes(b"")
    with pytest.raises(StorePathError, match=name), make_lock(tmp_path / "store").hold():
        pytest.fail("taken")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_hold_without_write_permission_holds_no_lock(root: Path, number: int) -> None:
    effects = CrashDisk(root)
    with make_lock(root, disk=effects).hold():
        count = effects.effect_count
    for fail_at in range(count):
        shutil.rmtree(root)
        root.mkdir()
        disk = FailingDisk(fail_at, number, times=1000)
        with pytest.raises(StorePathError, match="cannot be written"), make_lock(root, disk=disk).hold():
            pytest.fail("taken")
        for name in ("lock", "rmq/turn"):
            assert not is_locked(str(root / name))


def test_hold_works_on_a_full_disk(root: Path) -> None:
    with make_lock(root).hold():
        pass
    time = FakeTime()
    disk = FailingDisk(0, times=1000)
    lock = make_lock(root, time, disk)
    with lock.hold():
        time.ms += 10_000
        lock.heartbeat()
        assert disk.has_failed
        assert is_locked(str(root / "lock"))
    assert is_free(root)


def test_release_works_if_the_name_cannot_be_removed(root: Path) -> None:
    with make_lock(root).hold():
        pass
    disk = FailingDisk(3, errno.EIO)  # create, write, rename: the name; then its removal
    with make_lock(root, disk=disk).hold():
        assert not disk.has_failed
    assert disk.has_failed
    assert is_free(root)
    assert json.loads((root / "rmq" / "holder.json").read_bytes())["pid"] == os.getpid()


def test_hold_works_after_a_crash_at_any_moment_and_turn_has_a_durable_folder(root: Path, tmp_path: Path) -> None:
    disk = CrashDisk(root)
    lock = make_lock(root, disk=disk)
    for _ in range(2):
        with lock.hold():
            pass
    number = 0
    for point in range(disk.effect_count + 1):
        for image in disk.images(point, seed=1):
            number += 1
            path = tmp_path / str(number)
            image.write_to(path)
            was_made = (path / "rmq" / "turn").exists()
            after = CrashDisk(path)
            with make_lock(path, disk=after).hold():
                pass
            for left in after.images(after.effect_count, seed=1):
                assert was_made or "rmq" in left.contents, image
            shutil.rmtree(path)


def test_hold_finalized_late_does_not_release_a_later_hold(tmp_path: Path) -> None:
    lock = make_lock(tmp_path / "s")
    interrupted = lock.hold()
    interrupted.__enter__()
    lock.release()  # the interrupt came before the body of `with`, and a traceback keeps the generator
    with lock.hold():
        interrupted.__exit__(None, None, None)
        assert lock.is_held
        assert is_locked(str(tmp_path / "s" / "rmq" / "turn"), 1)
    assert not lock.is_held
