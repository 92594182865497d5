"""Ownership of files written in another user's store, and locks of users who may only read."""

import contextlib
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.locks import FileLock, is_locked
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StorePathError

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it runs as several users"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
BROKER, SPARK, STRANGER, TEAM = 61_001, 61_002, 61_003, 61_100
MODE, UMASK = 0o640, 0o022


def run_as(user: int, groups: list[int], act: Callable[[], Any]) -> Any:
    """Return what `act` returns, or the error that it raises, in a child process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups(groups)
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.umask(UMASK)
            answer = act()
        except BaseException as error:
            answer = error
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike those of pytest."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def use(path: Path) -> None:
    """Write every kind of file."""
    with rmq_spark.open_store(path, flush="sync", segment_bytes=1 << 16) as store:
        store.create_topic(f"new{os.getpid()}", 2)
        for number in range(40):
            store.send("orders", b"x" * 4000, keys=f"k{number}")
        store.send("orders", "later", delay_level=1)
        store.send("orders", "much later", deliver_at_ms=wall_clock_ms() + 10_000_000)
    with rmq_spark.open_consumer(path, "g") as consumer:
        for queue in consumer.queues("orders"):
            consumer.pull(queue, 0)
            consumer.update_consume_offset(queue, 1)
        consumer.commit()
    rmq_spark.close(path)


def entries(path: Path) -> dict[str, os.stat_result]:
    return {str(one.relative_to(path)): one.stat() for one in [path, *path.rglob("*")]}


def not_writable(path: Path) -> list[str]:
    return [name for name in entries(path) if not os.access(path / name, os.W_OK)]


@pytest.fixture
def brokers(folder: Path) -> Path:
    """A store that the broker's user created and used. Also imports all that a child process needs."""
    path = folder / "s"
    use(folder / "warm")
    rmq_spark.check(folder / "warm")
    folder.chmod(0o777)
    assert run_as(BROKER, [TEAM], lambda: use(path)) is None
    folder.chmod(0o755)
    for name in ("checkpoint", "config/topics.json", "config/consumerOffset.json", "rmq/settings.json"):
        (path / name).chmod(MODE)
    return path


def test_ownership_of_a_new_store_is_its_creators(brokers: Path) -> None:
    assert {found.st_uid for found in entries(brokers).values()} == {BROKER}
    assert run_as(BROKER, [], lambda: not_writable(brokers)) == []


def test_ownership_of_files_written_by_root_is_the_store_owners(brokers: Path) -> None:
    before = entries(brokers)
    use(brokers)
    after = entries(brokers)
    assert {(found.st_uid, found.st_gid) for found in after.values()} == {(BROKER, BROKER)}
    assert len(after) > len(before), "segments and queue files are new"
    changed = {name for name in before.keys() & after.keys() if before[name].st_mode != after[name].st_mode}
    assert not changed
    assert run_as(BROKER, [], lambda: not_writable(brokers)) == []
    assert run_as(BROKER, [], lambda: use(brokers)) is None
    assert rmq_spark.check(brokers).is_healthy


def test_ownership_after_a_repair_by_root_is_the_store_owners(brokers: Path) -> None:
    (brokers / "config" / "topics.json").write_bytes(b"{")
    assert (brokers / "config" / "topics.json.bak").exists()
    rmq_spark.repair(rmq_spark.plan_repair(brokers))
    assert {found.st_uid for found in entries(brokers).values()} == {BROKER}
    assert rmq_spark.check(brokers).is_healthy


def share(path: Path, mode: int = 0o2775) -> None:
    """Give the store to the group, as the administrator of a shared store does."""
    for one in [path, *path.rglob("*")]:
        os.chown(one, BROKER, TEAM)
        one.chmod(mode if one.is_dir() else 0o664)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o2775, 0o775])
def test_ownership_of_files_written_by_a_group_member_is_the_groups(brokers: Path, mode: int) -> None:
    share(brokers, mode)
    assert run_as(SPARK, [TEAM], lambda: use(brokers)) is None
    assert {found.st_gid for found in entries(brokers).values()} == {TEAM}
    assert SPARK in {found.st_uid for found in entries(brokers).values()}
    for user in (BROKER, SPARK):
        assert run_as(user, [TEAM], lambda: not_writable(brokers)) == []
    assert run_as(SPARK, [TEAM], lambda: use(brokers)) is None
    use(brokers)
    assert run_as(BROKER, [TEAM], lambda: not_writable(brokers)) == []
    assert not [name for name, found in entries(brokers).items() if found.st_mode & stat.S_IWOTH]
    assert rmq_spark.check(brokers).is_healthy


def test_refuse_foreign_refuses_a_stranger_before_any_write(brokers: Path) -> None:
    for one in [brokers, *brokers.rglob("*")]:
        one.chmod(0o777)
    before = {name: (found.st_ino, found.st_mtime_ns) for name, found in entries(brokers).items()}
    error = run_as(STRANGER, [], lambda: use(brokers))
    assert isinstance(error, StorePathError), error
    for text in (str(BROKER), str(STRANGER), "chgrp", "Nothing was written"):
        assert text in str(error)
    assert {name: (found.st_ino, found.st_mtime_ns) for name, found in entries(brokers).items()} == before


def test_replace_works_on_a_file_that_root_left(brokers: Path) -> None:
    os.chown(brokers / "checkpoint", 0, 0)
    (brokers / "checkpoint").chmod(0o644)
    assert run_as(BROKER, [], lambda: use(brokers)) is None


def test_ownership_of_an_export_is_the_exporting_users(brokers: Path) -> None:
    shared = brokers.parent / "exports"
    shared.mkdir()
    os.chown(shared, BROKER, BROKER)
    rmq_spark.export_parquet(brokers, shared / "x.parquet")
    assert (shared / "x.parquet").stat().st_uid == 0


def test_ownership_of_a_new_store_in_a_foreign_folder_is_its_creators(folder: Path) -> None:
    os.chown(folder, BROKER, BROKER)
    with rmq_spark.open_store(folder / "s") as store:
        store.send("orders", "x")
    assert {found.st_uid for found in entries(folder / "s").values()} == {0}


def test_replace_keeps_owner_and_mode(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"1")
    os.chown(path, BROKER, TEAM)
    path.chmod(0o646)
    for replace in (Disk().replace, Disk().replace_unsynced):
        replace(str(path), b"2")
        found = path.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (BROKER, TEAM, 0o646)
    assert path.read_bytes() == b"2"


# Users who may lock a file.


def hold_read_lock(path: Path) -> str:
    """Hold a shared lock on the first bytes of a file until this process exits, as any reader may."""
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 8)
    return "locked"


@contextlib.contextmanager
def locked_by_reader(path: Path) -> Iterator[bool]:
    """Let a user who may only read lock a file. Yield whether that was possible."""
    ready, tell = os.pipe()
    stop, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.setgroups([])
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
        try:
            answer = hold_read_lock(path)
        except OSError:
            answer = "refused"
        os.write(tell, answer.encode())
        os.read(stop, 1)
        os._exit(0)
    try:
        yield os.read(ready, 100) == b"locked"
    finally:
        os.close(end)
        os.waitpid(child, 0)
        for one in (ready, tell, stop):
            os.close(one)


LOCKS = ("rmq/turn", "rmq/delivery/turn", "rmq/groups/g/turn")


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCKS)
def test_only_writers_prevents_a_reader_from_locking_out_writers(brokers: Path, name: str) -> None:
    assert (brokers / name).exists()
    with locked_by_reader(brokers / name) as is_locked_now:
        assert not is_locked_now
        assert run_as(BROKER, [], lambda: use(brokers)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCKS)
def test_only_writers_closes_lock_files_of_earlier_releases(brokers: Path, name: str) -> None:
    (brokers / name).chmod(0o664)
    assert run_as(BROKER, [], lambda: use(brokers)) is None
    assert (brokers / name).stat().st_mode & 0o777 == 0o660


def test_only_writers_lets_readers_read_and_check_the_store(brokers: Path) -> None:
    for name in ("checkpoint", "config/topics.json", "config/consumerOffset.json", "rmq/settings.json"):
        (brokers / name).chmod(0o644)

    def look() -> tuple[list[str], bool]:
        with rmq_spark.open_reader(brokers) as reader:
            topics = reader.topics()
        rmq_spark.groups(brokers)
        rmq_spark.group_lag(brokers, "g")
        return topics, rmq_spark.check(brokers).is_healthy

    topics, is_healthy = run_as(STRANGER, [], look)
    assert "orders" in topics
    assert is_healthy


def test_is_locked_exclusively_ignores_the_lock_of_a_reader(folder: Path) -> None:
    path = folder / "m.lock"
    path.write_bytes(b"")
    with locked_by_reader(path) as is_locked_now:
        assert is_locked_now
        assert is_locked(str(path))
        assert not is_locked(str(path), exclusively=True)


def test_file_lock_leaves_the_brokers_lock_file_readable(folder: Path) -> None:
    path = folder / "lock"
    path.write_bytes(b"lock")
    path.chmod(0o644)
    lock = FileLock(str(path))
    assert lock.try_take()
    lock.release()
    assert path.stat().st_mode & 0o777 == 0o644
