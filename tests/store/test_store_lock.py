"""The store's lock: one writer at a time, in turn, and whoever does not get it is told by whom it is held."""

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

from rmq_spark.store.disk import mounts
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.disk.host import this_process
from rmq_spark.store.disk.lock_probe import is_locked
from rmq_spark.store.errors import LockTimeoutError, StoreError, StorePathError
from rmq_spark.store.format.holder_file import Holder, decode_holder, encode_holder
from rmq_spark.store.log import store_lock
from rmq_spark.store.log.store_lock import StoreLock
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.failing_disk import FailingDisk

START_MS = 1_769_860_800_000  # 2026-01-31T12:00:00Z

# A broker: holds the lock of the whole process on byte 0 until its input ends.
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
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.log.store_lock import StoreLock
settings = SimpleNamespace(application="another", lock_timeout_ms=60_000, allow_network_store=False)
lock = StoreLock(sys.argv[1], Disk(), settings, lambda: time.time_ns() // 1_000_000, time.sleep)
with lock.hold():
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""
# Adds one to a number in a file, again and again: two at once would lose some.
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
    """A clock that only sleeping moves. `during` happens in each sleep."""

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


def test_the_holder_is_named_while_it_holds_and_not_after(root: Path) -> None:
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


def test_a_store_that_is_not_there_is_made(tmp_path: Path) -> None:
    with make_lock(tmp_path / "a" / "b").hold():
        assert (tmp_path / "a/b/lock").read_bytes() == b"lock"


@pytest.mark.parametrize("content", [b"", b"lo", b"lock", b"something"])
def test_the_file_of_the_lock_ends_up_as_a_broker_writes_it(root: Path, content: bytes) -> None:
    (root / "lock").write_bytes(content)
    with make_lock(root).hold():
        assert (root / "lock").read_bytes() == (content if len(content) >= 4 else b"lock")


def test_whatever_happens_in_the_body_the_lock_is_released(root: Path) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), make_lock(root).hold():
            raise error
        assert is_free(root)
        assert not (root / "rmq" / "holder.json").exists()


def test_another_writer_is_waited_for(root: Path) -> None:
    with holding(WRITER, root) as child:
        waits = 0

        def during() -> None:
            nonlocal waits
            waits += 1
            if waits == 100:
                child.communicate("go\n")

        with make_lock(root, FakeTime(during)).hold():
            assert waits == 100


def test_processes_never_hold_it_at_once(root: Path) -> None:
    (root / "count").write_text("0")
    children = [
        subprocess.Popen([sys.executable, "-c", COUNTER, str(root), "25"], env={"PYTHONPATH": ":".join(sys.path)})
        for _ in range(3)
    ]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert (root / "count").read_text() == "75"


def test_a_killed_holder_is_followed_at_once_and_its_name_means_nothing(root: Path) -> None:
    with holding(WRITER, root) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert (root / "rmq" / "holder.json").exists()
        with make_lock(root).hold():
            holder = decode_holder((root / "rmq" / "holder.json").read_bytes())
            assert holder is not None
            assert holder.pid == os.getpid()
    assert not (root / "rmq" / "holder.json").exists()


def test_a_holder_without_progress_is_named_when_time_is_up(root: Path) -> None:
    time = FakeTime()
    with make_lock(root, application="the other").hold():
        with pytest.raises(LockTimeoutError) as error, make_lock(root, time, lock_timeout_ms=90_000).hold():
            pytest.fail("two hold it")
        assert 90_000 <= time.slept_ms <= 90_100
        host = this_process().host
        assert str(error.value) == (
            f'{root} is being written by the application "the other" (process {os.getpid()} on host {host}, since '
            "2026-01-31T12:00:00+00:00), which has made no progress for 90 s. Nothing was written. Stop that process "
            "if it hangs; the next writer finishes what it began. To wait longer set lockTimeout, now 90s."
        )
        assert not is_locked(str(root / "rmq" / "turn"))
    assert is_free(root)


def test_a_holder_that_makes_progress_is_waited_for_however_long_it_takes(root: Path) -> None:
    time = FakeTime()
    other = make_lock(root, time)
    section = other.hold()
    section.__enter__()

    def during() -> None:
        if time.ms - START_MS > 60_000:
            if other.is_held:
                section.__exit__(None, None, None)
        elif time.ms // 4_000 != (time.ms - 30) // 4_000:
            other.note_progress()

    time.during = during
    with make_lock(root, time, lock_timeout_ms=5_000).hold():
        assert 60_000 < time.slept_ms < 61_000


def test_progress_is_written_no_more_often_than_anybody_looks(root: Path) -> None:
    time = FakeTime()
    disk = CrashDisk(root)
    lock = make_lock(root, time, disk)
    with lock.hold():
        before = disk.effect_count
        for _ in range(100):
            lock.note_progress()
        assert disk.effect_count == before
        time.ms += 1_000
        lock.note_progress()
        assert disk.effect_count > before
        holder = decode_holder((root / "rmq" / "holder.json").read_bytes())
        assert holder is not None
        assert (holder.progress, holder.since_ms) == (1, START_MS)


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
def test_a_clock_that_is_set_neither_ends_a_wait_nor_prolongs_it(root: Path, jump_ms: int) -> None:
    time = FakeTime()

    def during() -> None:
        if 10_000 < time.slept_ms < 10_030:
            time.ms += jump_ms

    time.during = during
    with make_lock(root).hold(), pytest.raises(LockTimeoutError), make_lock(root, time).hold():
        pytest.fail("two hold it")
    assert 57_000 <= time.slept_ms <= 60_100


def test_a_timeout_of_zero_tries_once(root: Path) -> None:
    first, second = (make_lock(root, lock_timeout_ms=0) for _ in range(2))
    with first.hold(), pytest.raises(LockTimeoutError, match="no progress for 0 s"), second.hold():
        pytest.fail("two hold it")
    assert is_free(root)


class WaitsError(Exception):
    """Raised where a wait would begin."""


def waits() -> None:
    raise WaitsError


def test_who_releases_and_wants_again_comes_behind_who_waits(root: Path) -> None:
    first = make_lock(root, FakeTime(waits))
    section = first.hold()
    section.__enter__()
    barged = []

    def during() -> None:
        # The second waits already. The first releases now and at once wants again.
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


def test_a_turn_whose_owner_was_stopped_does_not_keep_a_free_store_from_others(root: Path) -> None:
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
    """Return what a writer says who does not get the lock, and after how many ms."""
    time = FakeTime()
    with pytest.raises(LockTimeoutError) as error, make_lock(root, time, **settings).hold():
        pytest.fail("two hold it")
    return str(error.value), time.slept_ms


@contextmanager
def java(tmp_path: Path) -> Iterator[int]:
    """A process that looks like a Java one from outside."""
    command = shutil.copy(str(shutil.which("sleep")), tmp_path / "java")
    with subprocess.Popen([str(command), "1000"]) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def test_a_broker_is_named_from_abort_and_not_waited_for(root: Path, tmp_path: Path) -> None:
    with holding(BROKER, root), java(tmp_path) as pid:
        (root / "abort").write_text(str(pid))
        message, slept_ms = refusal(root)
        assert message == (
            f"{root} belongs to a broker (process {pid}, 5.x), which holds {root}/lock as long as it lives. Nothing "
            "was written. Reading works beside it. To append here stop it (mqshutdown broker), or send the messages "
            "to it instead."
        )
        assert 1_000 <= slept_ms < 1_100


@pytest.mark.parametrize(
    "abort", [None, b"", b"1", pytest.param(str(os.getpid()).encode(), id="of this process"), b"4194305", b"junk"]
)
def test_a_broker_that_abort_does_not_name_is_a_broker(root: Path, abort: bytes | None) -> None:
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


def test_a_broker_behind_a_dead_writers_name_is_a_broker(root: Path) -> None:
    (root / "rmq").mkdir()
    (root / "rmq" / "holder.json").write_bytes(note(start_ticks=1))
    with holding(BROKER, root):
        message, slept_ms = refusal(root)
        assert "belongs to a broker" in message
        assert slept_ms < 1_100


def test_a_writer_on_another_host_may_live_and_gets_its_time(root: Path) -> None:
    (root / "rmq").mkdir()
    (root / "rmq" / "holder.json").write_bytes(note(host="far", application="remote"))
    with holding(BROKER, root):
        message, slept_ms = refusal(root)
        assert 'the application "remote"' in message
        assert "on host far" in message
        assert slept_ms >= 60_000


def test_who_waits_for_the_turn_learns_of_the_broker_too(root: Path) -> None:
    with make_lock(root).hold():
        pass
    turn = FileLock(str(root / "rmq" / "turn"))
    assert turn.try_take()
    with holding(BROKER, root):
        message, slept_ms = refusal(root)
        assert "belongs to a broker" in message
        assert 10_000 <= slept_ms < 11_000
    turn.release()


def test_who_only_has_the_file_open_for_writing_is_no_broker_and_gets_the_whole_time(root: Path) -> None:
    with make_lock(root).hold():
        pass
    with (root / "lock").open("r+b"):
        message, slept_ms = refusal(root, lock_timeout_ms=8_000)
        assert message == (
            f"{root}/lock is not locked, but was open for writing for 8 s: by a broker that is starting, or by another "
            f"process, and while it is open a broker may be reading the store. Nothing was written to {root}. See who "
            f"has it open with `fuser -v {root}/lock` (as root, where it belongs to another user). Let a broker that "
            "starts come up, and send the messages to it; have any other process close the file. To wait longer set "
            "lockTimeout, now 8s."
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


def test_who_closes_the_file_in_time_is_waited_for(root: Path) -> None:
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


def test_a_short_timeout_does_not_guess_who_the_holder_is(root: Path) -> None:
    with holding(BROKER, root):
        message, slept_ms = refusal(root, lock_timeout_ms=300)
        assert f"{root}/lock was not to be had within 0.3 s: another process holds it" in message
        assert "To wait longer set lockTimeout, now 0.3s" in message
        assert 300 <= slept_ms < 400


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_forked_while_the_lock_is_held_neither_holds_nor_harms_it(root: Path) -> None:
    lock = make_lock(root)
    pid = -1
    try:
        with lock.hold():
            pid = os.fork()
            if not pid:
                with pytest.raises(StoreError, match="not held by this process, which was forked"):
                    lock.note_progress()
                assert not lock.is_held
        # The child comes out of the body too, as a child does that was forked in the middle of something.
        if not pid:
            os._exit(0)
    finally:
        if not pid:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_name_and_lock_alone(root: Path) -> None:
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


def test_a_network_file_system_is_refused_and_nothing_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "file_system", lambda path: "nfs4" if path == str(tmp_path) else "")
    monkeypatch.setattr(store_lock, "file_system", mounts.file_system)
    with (
        pytest.raises(StorePathError, match=r"network file system \(nfs4\)\. .*allowNetworkStore=true"),
        make_lock(tmp_path / "not" / "there").hold(),
    ):
        pytest.fail("taken")
    assert os.listdir(tmp_path) == []
    with make_lock(tmp_path / "not" / "there", allow_network_store=True).hold():
        pass


@pytest.mark.parametrize("name", ["store", "store/rmq", "store/lock", "store/rmq/turn"])
def test_something_else_in_the_way_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(("lock", "turn")):
        path.mkdir()
    else:
        path.write_bytes(b"")
    with pytest.raises(StorePathError, match=name), make_lock(tmp_path / "store").hold():
        pytest.fail("taken")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_without_the_right_to_write_nothing_is_held(root: Path, number: int) -> None:
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


def test_a_full_disk_does_not_keep_from_the_lock_who_may_make_room(root: Path) -> None:
    with make_lock(root).hold():
        pass
    time = FakeTime()
    disk = FailingDisk(0, times=1000)
    lock = make_lock(root, time, disk)
    with lock.hold():
        time.ms += 10_000
        lock.note_progress()
        assert disk.has_failed
        assert is_locked(str(root / "lock"))
    assert is_free(root)


def test_a_name_that_cannot_be_taken_away_does_not_keep_the_lock(root: Path) -> None:
    with make_lock(root).hold():
        pass
    disk = FailingDisk(3, errno.EIO)  # create, write, rename: the name; then its removal
    with make_lock(root, disk=disk).hold():
        assert not disk.has_failed
    assert disk.has_failed
    assert is_free(root)
    assert json.loads((root / "rmq" / "holder.json").read_bytes())["pid"] == os.getpid()


def test_after_a_crash_at_any_moment_the_lock_can_be_taken_and_the_turn_stands_in_a_folder_that_stays(
    root: Path, tmp_path: Path
) -> None:
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


def test_an_interrupted_hold_that_ends_late_does_not_release_a_later_one(tmp_path: Path) -> None:
    lock = make_lock(tmp_path / "s")
    interrupted = lock.hold()
    interrupted.__enter__()
    lock.release()  # the interrupt came before the body of `with`, and a traceback keeps the generator
    with lock.hold():
        interrupted.__exit__(None, None, None)
        assert lock.is_held
        assert is_locked(str(tmp_path / "s" / "rmq" / "turn"), 1)
    assert not lock.is_held
