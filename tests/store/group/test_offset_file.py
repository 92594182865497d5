"""The offset file: reading damaged files, and what a commit changes."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, LockTimeoutError, OptionError, StorePathError
from rmq_spark.store.format.config_json import decode_consumer_offsets
from rmq_spark.store.group.offset_file import (
    OffsetFile,
    Outcome,
    read_consumer_offsets,
    read_group_offsets,
    refuse_commit,
)
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

GOLDEN = Path(__file__).parents[2] / "golden"
NOW_MS = 1_800_000_000_000
QUEUE = QueueKey("T", 0)

OLD = b'{"offsetTable":{"T@g":{0:5,1:7}}}'
NEW = b'{"offsetTable":{"T@g":{0:6,1:9}}}'
BROKEN = NEW[:-4]
OLD_OFFSETS = {QueueKey("T", 0): 5, QueueKey("T", 1): 7}
NEW_OFFSETS = {QueueKey("T", 0): 6, QueueKey("T", 1): 9}

# A broker: holds the lock of the whole process on byte 0 until its input ends. One that starts only opens the file.
BROKER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1] + "/lock", os.O_RDWR | os.O_CREAT)
if sys.argv[2] == "lives":
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""
# Another process that commits to its own group, and after every commit reads what it wrote.
COMMITTER = """
import sys, time
from types import SimpleNamespace
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.group.offset_file import OffsetFile, Outcome
from rmq_spark.store.model import QueueKey
root, group, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
settings = SimpleNamespace(application=group, lock_timeout_ms=60_000, allow_network_store=False)
offsets = OffsetFile(root, Disk(), settings, lambda: time.time_ns() // 1_000_000, time.sleep)
for number in range(1, count + 1):
    wanted = {QueueKey("T", number % 3): number}
    assert offsets.commit(group, wanted) is Outcome.WRITTEN
    assert offsets.read(group)[QueueKey("T", number % 3)] == number
"""


@dataclass(frozen=True)
class Settings:
    application: str = "nightly"
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False


def no_sleep(seconds: float) -> None:
    pytest.fail(f"sleeps {seconds} s")


def make_file(root: Path, disk: Disk | None = None, sleep: Callable[[float], None] = no_sleep) -> OffsetFile:
    return OffsetFile(str(root), disk or Disk(), Settings(), lambda: NOW_MS, sleep)


def has_broker(root: Path, sleep: Callable[[float], None] = no_sleep) -> bool:
    return make_file(root, sleep=sleep)._lock.has_broker()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store" / "config").mkdir(parents=True)
    return tmp_path / "store"


def path_of(root: Path, suffix: str = "") -> Path:
    return root / "config" / f"consumerOffset.json{suffix}"


def put(root: Path, main: bytes | None, backup: bytes | None, temporary: bytes | None = None) -> None:
    for suffix, data in (("", main), (".bak", backup), (".tmp", temporary)):
        if data is not None:
            path_of(root, suffix).write_bytes(data)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@contextmanager
def broker(root: Path, how: str = "lives") -> Iterator[None]:
    command = [sys.executable, "-c", BROKER, str(root), how]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            yield
        finally:
            child.kill()


class Sleeps:
    """A sleep that takes no time, and in which something may happen."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.seconds: list[float] = []
        self.during = during

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.during()


@pytest.mark.parametrize(
    ("main", "backup", "temporary", "expected", "is_broken"),
    [
        (NEW, OLD, None, NEW_OFFSETS, False),
        (NEW, b"garbage", None, NEW_OFFSETS, False),
        (b"", OLD, None, OLD_OFFSETS, True),
        (None, OLD, NEW, OLD_OFFSETS, False),
        (b"garbage", OLD, None, OLD_OFFSETS, True),
        (BROKEN, OLD, None, OLD_OFFSETS, True),
        (b"\0" * 40, OLD, None, OLD_OFFSETS, True),
        (b"\xff\xfe{}", OLD, None, OLD_OFFSETS, True),
        (None, None, None, {}, False),
        (None, None, NEW, {}, False),
        (b"{}", OLD, None, {}, False),
    ],
)
def test_read_falls_back_to_the_backup(
    root: Path,
    main: bytes | None,
    backup: bytes | None,
    temporary: bytes | None,
    expected: dict[QueueKey, int],
    is_broken: bool,
) -> None:
    put(root, main, backup, temporary)
    before, sleep = contents(root), Sleeps()
    assert read_group_offsets(str(root), "g", sleep) == expected
    assert sleep.seconds == ([0.02, 0.04, 0.08] if is_broken else []), "a broken one is read again"
    assert contents(root) == before, "reading changes nothing"


@pytest.mark.parametrize(
    ("main", "backup", "named"),
    [
        (b"garbage", b"garbage", ".bak"),
        (b"garbage", None, ""),
        (b"garbage", b"", ""),
        (None, b"garbage", ".bak"),
        (b"", b"garbage", ".bak"),
        (b'{"offsetTable":{"T@g":{0:"x"}}}', None, ""),
        (b'{"offsetTable":[]}', None, ""),
        (b"", None, ""),
        (b"", b"", ""),
        (None, b"", ".bak"),
    ],
)
def test_read_raises_for_damage_and_commit_does_not_overwrite_it(
    root: Path, main: bytes | None, backup: bytes | None, named: str
) -> None:
    put(root, main, backup)
    before = contents(root)
    with pytest.raises(DamageError) as caught:
        read_consumer_offsets(str(root), Sleeps())
    assert caught.value.path == str(path_of(root, named))
    assert f"Restore {path_of(root)} from a copy. If that may be so, remove it and its .bak" in str(caught.value)
    with pytest.raises(DamageError):
        make_file(root, sleep=Sleeps()).commit("g", {QUEUE: 8})
    assert contents(root) == before


def test_read_repeats_until_a_broker_has_written_the_file(root: Path) -> None:
    put(root, NEW[:9], OLD)
    sleep = Sleeps(lambda: path_of(root).write_bytes(NEW if len(sleep.seconds) == 2 else b""))
    assert read_group_offsets(str(root), "g", sleep) == NEW_OFFSETS
    assert len(sleep.seconds) == 2


def test_read_skips_keys_without_a_group_and_negative_offsets(root: Path) -> None:
    put(root, b'{"offsetTable":{"odd":{0:1},"T@g":{0:-1,1:0},"@g":{0:4},"T@":{0:4},"T@gg":{0:8}}}', None)
    assert read_group_offsets(str(root), "g", no_sleep) == {QueueKey("T", 1): 0}


def test_commit_increments_the_data_version_of_5_x(root: Path) -> None:
    shutil.copy(GOLDEN / "json" / "consumerOffset.json", path_of(root))
    text = path_of(root).read_bytes()
    wanted = {QueueKey("TopicA", 1): 40, QueueKey("TopicB", 0): 3}
    assert make_file(root).commit("GroupA", wanted) is Outcome.WRITTEN
    expected = text.replace(b'"counter":0', b'"counter":1').replace(b"1795224173936", str(NOW_MS).encode())
    expected = expected.replace(b'["TopicA"]', b'["TopicA","TopicB"]').replace(b"1:34", b"1:40")
    expected = expected.replace(b"1:40\n\t\t}", b'1:40\n\t\t},\n\t\t"TopicB@GroupA":{0:3\n\t\t}')
    assert path_of(root).read_bytes() == expected
    assert path_of(root, ".bak").read_bytes() == text
    assert not path_of(root, ".tmp").exists()


@pytest.mark.parametrize("store", ["broker497", "livekill533", "demo"])
def test_commit_keeps_the_offsets_of_a_broker(root: Path, store: str) -> None:
    shutil.copy(GOLDEN / store / "config" / "consumerOffset.json", path_of(root))
    before = decode_consumer_offsets(path_of(root).read_bytes())
    assert make_file(root).commit("mine", {QueueKey("orders", 2): 77}) is Outcome.WRITTEN
    after = decode_consumer_offsets(path_of(root).read_bytes())
    assert after.offsets == {**before.offsets, "orders@mine": {2: 77}}
    assert (after.data_version is None) == (store == "broker497"), "4.9 has no version"
    if before.data_version is not None:
        assert after.data_version == replace(before.data_version, counter=1, timestamp=NOW_MS)


def test_commit_creates_the_file_in_the_format_of_4_9(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    assert make_file(root).commit("g", OLD_OFFSETS) is Outcome.WRITTEN
    assert path_of(root).read_bytes() == b'{\n\t"offsetTable":{\n\t\t"T@g":{0:5,1:7\n\t\t}\n\t}\n}'
    assert sorted(path.name for path in (root / "config").iterdir()) == ["consumerOffset.json"]


def test_commit_keeps_unknown_fields(root: Path) -> None:
    put(root, b'{"pullOffsetTable":{"T@g":{0:3}},"offsetTable":{"T@g":{0:5}}}', None)
    make_file(root).commit("g", {QUEUE: 6})
    assert decode_consumer_offsets(path_of(root).read_bytes()).unknown == {"pullOffsetTable": {"T@g": {"0": 3}}}


def test_commit_accepts_a_lower_offset(root: Path) -> None:
    offsets = make_file(root)
    for offset in (100, 90, 0):
        assert offsets.commit("g", {QUEUE: offset}) is Outcome.WRITTEN
        assert read_group_offsets(str(root), "g", no_sleep) == {QUEUE: offset}
    assert offsets.read("unknown") == {}


def test_commit_of_unchanged_offsets_takes_no_lock_and_writes_nothing(root: Path) -> None:
    put(root, NEW, None)
    disk = CrashDisk(root)
    offsets = make_file(root, disk)
    assert offsets.commit("g", {QUEUE: 6}) is Outcome.UNCHANGED
    assert offsets.commit("g", {}) is Outcome.UNCHANGED
    assert disk.effect_count == 0
    assert offsets.commit("g", {QUEUE: 6, QueueKey("T", 2): 0}) is Outcome.WRITTEN


def test_commit_keeps_writes_of_others_between_two_commits(root: Path) -> None:
    mine, theirs = make_file(root), make_file(root)
    for number in range(1, 6):
        mine.commit("mine", {QUEUE: number})
        theirs.commit("theirs", {QueueKey("T", number): number})
        put(root, path_of(root).read_bytes().replace(b'"offsetTable"', b'"x":1,"offsetTable"'), None)
    held = decode_consumer_offsets(path_of(root).read_bytes())
    assert held.offsets == {"T@mine": {0: 5}, "T@theirs": {number: number for number in range(1, 6)}}
    assert held.unknown == {"x": 1}


def test_commit_keeps_writes_of_others_during_the_wait_for_the_lock(root: Path) -> None:
    theirs = make_file(root)
    theirs.commit("mine", {QUEUE: 1})
    with ExitStack() as held:
        held.enter_context(theirs.hold("theirs"))

        def finish() -> None:
            if theirs.read("theirs") == {}:
                theirs.commit_held("theirs", {QUEUE: 2})
                held.close()

        assert make_file(root, sleep=Sleeps(finish)).commit("mine", {QUEUE: 4}) is Outcome.WRITTEN
    assert decode_consumer_offsets(path_of(root).read_bytes()).offsets == {"T@mine": {0: 4}, "T@theirs": {0: 2}}


@pytest.mark.parametrize("backup", [OLD, None])
def test_commit_does_not_replace_the_backup_by_a_corrupt_file(root: Path, backup: bytes | None) -> None:
    put(root, BROKEN if backup else None, backup)
    assert make_file(root, sleep=Sleeps()).commit("mine", {QUEUE: 1}) is Outcome.WRITTEN
    assert (path_of(root, ".bak").read_bytes() if path_of(root, ".bak").exists() else None) == backup
    expected = {"T@mine": {0: 1}, **({"T@g": {0: 5, 1: 7}} if backup else {})}
    assert decode_consumer_offsets(path_of(root).read_bytes()).offsets == expected


@pytest.mark.parametrize("how", ["lives", "starts"])
def test_commit_writes_nothing_while_a_broker_runs(root: Path, how: str) -> None:
    put(root, NEW, None)
    (root / "lock").write_bytes(b"lock")
    offsets = make_file(root, sleep=Sleeps())
    assert not has_broker(root)
    with broker(root, how):
        before = contents(root)
        assert has_broker(root, Sleeps())
        assert offsets.commit("g", {QUEUE: 8}) is Outcome.BROKER
        assert offsets.commit("g", {QUEUE: 6}) is Outcome.UNCHANGED
        with pytest.raises(LockTimeoutError, match=r'consumer group "g".*broker.*mqshutdown'), offsets.hold("g"):
            pytest.fail("holds the lock")
        assert contents(root) == before
    assert not has_broker(root)
    assert offsets.commit("g", {QUEUE: 8}) is Outcome.WRITTEN
    assert isinstance(refuse_commit(str(root), "g"), LockTimeoutError)


def test_commit_detects_a_broker_that_starts_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr("rmq_spark.store.log.store_lock.StoreLock.has_broker", lambda self: next(answers))
    (root / "lock").write_bytes(b"lock")
    clock = iter(range(NOW_MS, NOW_MS + 10**9, 500))
    with broker(root):
        offsets = OffsetFile(str(root), Disk(), Settings(), clock.__next__, Sleeps())
        assert offsets.commit("g", {QUEUE: 8}) is Outcome.BROKER


def test_commit_does_not_mistake_our_writer_for_a_broker(root: Path) -> None:
    one = make_file(root)
    with one.hold("g"):
        assert not has_broker(root)
    assert not has_broker(root / "missing")


def test_commit_does_not_mistake_our_lock_file_for_a_broker(root: Path) -> None:
    (root / "lock").write_bytes(bytes(4))
    with Disk().open(str(root / "lock")) as making:
        assert make_file(root, sleep=Sleeps(making.close)).commit("g", {QUEUE: 1}) is Outcome.WRITTEN


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all stores on a network file system, which answers a request for a lease like NFS and SMB."""
    real: Callable[..., Any] = fcntl.fcntl

    def refusing(descriptor: int, command: int, *rest: object) -> object:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(descriptor, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    monkeypatch.setattr("rmq_spark.store.log.store_lock.is_remote", lambda path: True)


@pytest.mark.usefixtures("network")
def test_commit_detects_only_brokers_on_a_network_file_system(root: Path) -> None:
    settings = replace(Settings(), allow_network_store=True)
    sleep = Sleeps()
    offsets, other = (OffsetFile(str(root), Disk(), settings, lambda: NOW_MS, sleep) for _ in range(2))
    assert offsets.commit("g", {QUEUE: 1}) is Outcome.WRITTEN
    with other.hold("g"):
        assert not has_broker(root), "a writer of ours, which locks as exclusively there"
    with broker(root):
        assert has_broker(root, Sleeps())
        assert offsets.commit("g", {QUEUE: 2}) is Outcome.BROKER
    assert offsets.commit("g", {QUEUE: 3}) is Outcome.WRITTEN
    assert sleep.seconds == [0.005] * 3, "beside the broker"


@pytest.mark.usefixtures("network")
def test_commit_and_reset_offsets_work_on_a_network_file_system(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_store(path, [SampleMessage("T", 0, b"x")])
    (path / "lock").write_bytes(b"lock")
    with rmq_spark.open_consumer(path, "g") as consumer:
        consumer.update_consume_offset(QUEUE, 1)
        assert consumer.commit() == {QUEUE: 1}
    with pytest.raises(StorePathError, match="allowNetworkStore"):
        rmq_spark.open_store(path).send("T", "x")
    assert rmq_spark.reset_offsets(path, "g", "earliest") == {"T": {0: 0}}


def test_commit_takes_no_lock_to_detect_a_broker_without_leases(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = fcntl.fcntl
    (root / "lock").write_bytes(b"lock")

    def asking(descriptor: int, command: int, *rest: object) -> object:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        assert command != fcntl.F_OFD_SETLK, "a broker that starts in this moment would give up"
        return real(descriptor, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", asking)
    assert not has_broker(root)
    with broker(root):
        assert has_broker(root, Sleeps())


def test_commit_refuses_an_invalid_group_name(root: Path) -> None:
    with pytest.raises(OptionError, match="a@b"):
        make_file(root).commit("a@b", {QUEUE: 1})
    assert not path_of(root).exists()


@pytest.mark.parametrize("offset", [1.0, True, 1 << 63, "1"])
def test_commit_refuses_an_invalid_offset(root: Path, offset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, OLD, None)
    with pytest.raises(OptionError, match="commit of queue T/0: offset="):
        make_file(root).commit("g", {QUEUE: offset})
    monkeypatch.setattr("rmq_spark.store.group.offset_file.check_offset", lambda call, value: value)
    with pytest.raises(OptionError, match=r"could not be read again.*Nothing was written"):
        make_file(root).commit("other", {QUEUE: offset if offset != "1" else 1 << 64})
    assert contents(root)["config/consumerOffset.json"] == OLD


def test_commit_refuses_a_network_file_system(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.store.log.store_lock.is_remote", lambda path: True)
    with pytest.raises(StorePathError, match="allowNetworkStore"):
        make_file(root).commit("g", {QUEUE: 1})
    assert not path_of(root).exists()


def test_commit_by_concurrent_processes_loses_nothing(root: Path) -> None:
    put(root, b'{"offsetTable":{"T@old":{0:5}}}', None)
    count, groups = 40, ("one", "two", "three")
    environment = {"PYTHONPATH": ":".join(sys.path)}
    children = [
        subprocess.Popen([sys.executable, "-c", COMMITTER, str(root), group, str(count)], env=environment)
        for group in groups
    ]
    seen = 0
    while any(child.poll() is None for child in children):
        held = read_consumer_offsets(str(root), no_sleep).offsets  # whole at every moment
        assert held["T@old"] == {0: 5}
        now = sum(max(held.get(f"T@{group}", {0: 0}).values()) for group in groups)
        assert now >= seen
        seen = now
    assert [child.returncode for child in children] == [0, 0, 0]
    held = read_consumer_offsets(str(root), no_sleep).offsets
    assert held == {"T@old": {0: 5}} | {f"T@{group}": {0: 39, 1: 40, 2: 38} for group in groups}


@pytest.mark.parametrize("main", [BROKEN, b""])
def test_read_warns_once_of_a_backup_in_place_of_a_damaged_file(
    root: Path, main: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    put(root, main, OLD)
    for _ in range(3):
        assert read_group_offsets(str(root), "g", lambda seconds: None) == OLD_OFFSETS
    (warning,) = caplog.messages
    assert f"{path_of(root)} is empty or broken" in warning
    assert "up to one publication old" in warning


def test_read_does_not_warn_of_a_backup_without_a_file(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(root, None, OLD)
    assert read_group_offsets(str(root), "g", lambda seconds: None) == OLD_OFFSETS
    assert not caplog.messages
