"""Commits of group offsets that die at any system call: the file reads as before or after, and others lose nothing.

A commit is recorded on a disk that remembers. Each state that a crash could have left is read, and committed to again.
"""

import contextlib
import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import RmqError
from rmq_spark.store.format.config_json import ConsumerOffsets, decode_consumer_offsets
from rmq_spark.store.group.group_files import GroupLock, GroupPaths
from rmq_spark.store.group.offset_file import OffsetFile, Outcome, read_consumer_offsets
from rmq_spark.store.group.resets import add_reset, read_resets
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.failing_disk import FailingDisk

NOW_MS = 1_800_000_000_000
# More than a sector, so that it can be torn.
OTHERS = {f"topic{number}@others": {queue: number * queue for queue in range(8)} for number in range(12)}
BEFORE = ",".join(f'"{key}":{{{",".join(f"{q}:{o}" for q, o in queues.items())}}}' for key, queues in OTHERS.items())
VERSION = '"dataVersion":{"counter":7,"stateVersion":0,"timestamp":1}'
OLD = f'{{{VERSION},"offsetTable":{{{BEFORE},"T@g":{{0:5}}}}}}'.encode()
FIRST, SECOND = {QueueKey("T", 0): 6}, {QueueKey("T", 0): 7, QueueKey("T", 1): 1}


@dataclass(frozen=True)
class Settings:
    application: str = "nightly"
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False


def no_sleep(seconds: float) -> None:
    pytest.fail(f"sleeps {seconds} s")


def short_sleep(seconds: float) -> None:
    """Take no time: what is broken stays broken here."""


def make_file(root: Path, disk: Disk | None = None) -> OffsetFile:
    return OffsetFile(str(root), disk or Disk(), Settings(), lambda: NOW_MS, short_sleep)


def make_root(tmp_path: Path, main: bytes | None, backup: bytes | None) -> Path:
    root = tmp_path / "store"
    (root / "config").mkdir(parents=True)
    for suffix, data in (("", main), (".bak", backup)):
        if data is not None:
            (root / "config" / f"consumerOffset.json{suffix}").write_bytes(data)
    return root


def mine(held: ConsumerOffsets) -> dict[int, int]:
    return dict(held.of("T", "g"))


def others(held: ConsumerOffsets) -> dict[str, dict[int, int]]:
    return {key: dict(queues) for key, queues in held.offsets.items() if not key.endswith("@g")}


def check_images(disk: CrashDisk, folder: Path, points: range, check: Callable[[Path, int, bool], None]) -> int:
    count = 0
    for point in points:
        for image in disk.images(point, 5, subset_count=4):
            count += 1
            shutil.rmtree(folder, ignore_errors=True)
            image.write_to(folder)
            try:
                check(folder / "store", point, "power cut" in str(image))
            except (AssertionError, RmqError) as error:
                raise AssertionError(f"{image}: {error!r}") from error
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "backup"),
    [(OLD, None), (OLD, OLD.replace(b"5", b"4")), (OLD[:-9], OLD), (b"", OLD), (None, OLD)],
)
def test_commit_leaves_old_or_new_offsets_after_any_crash(
    tmp_path: Path, main: bytes | None, backup: bytes | None
) -> None:
    root = make_root(tmp_path / "live", main, backup)
    disk = CrashDisk(tmp_path / "live")
    offsets = make_file(root, disk)
    offsets.commit("g", FIRST)
    first_done = disk.effect_count
    offsets.commit("g", SECOND)
    second_done = disk.effect_count
    allowed = [{0: 5}, {0: 6}, {0: 7, 1: 1}]

    def check(copy: Path, point: int, is_power_cut: bool) -> None:
        held = read_consumer_offsets(str(copy), short_sleep)
        assert mine(held) in allowed[(point >= first_done) + (point >= second_done) :]
        assert mine(held) in allowed[: 2 + (point > first_done)], "not before it was committed"
        assert others(held) == OTHERS
        assert held.data_version is not None
        assert held.data_version.counter == 7 + allowed.index(mine(held))
        # The next process continues from there, whatever temporary files are left.
        assert make_file(copy).commit("g", {QueueKey("T", 2): 9}) is Outcome.WRITTEN
        after = decode_consumer_offsets((copy / "config" / "consumerOffset.json").read_bytes())
        assert mine(after) == {**mine(held), 2: 9}
        assert others(after) == OTHERS

    assert check_images(disk, tmp_path / "image", range(second_done + 1), check) > 60


def test_commit_keeps_the_file_valid_at_every_moment(tmp_path: Path) -> None:
    root = make_root(tmp_path / "live", OLD, None)
    disk = CrashDisk(tmp_path / "live")
    make_file(root, disk).commit("g", FIRST)

    def check(copy: Path, point: int, is_power_cut: bool) -> None:
        assert decode_consumer_offsets((copy / "config" / "consumerOffset.json").read_bytes()).of("T", "g")
        backup = copy / "config" / "consumerOffset.json.bak"
        assert is_power_cut or not backup.exists() or backup.read_bytes() == OLD

    check_images(disk, tmp_path / "image", range(disk.effect_count + 1), check)


def test_commit_syncs_the_file_of_a_broker_before_replacing_it(tmp_path: Path) -> None:
    root = make_root(tmp_path / "live", OLD, OLD)
    disk = CrashDisk(tmp_path / "live")
    path = str(root / "config" / "consumerOffset.json")
    for number in (8, 9):  # the file and .bak, as the broker's process left them
        disk.replace_unsynced(path + ".bak", Path(path).read_bytes())
        disk.replace_unsynced(path, OLD.replace(b'"counter":7', f'"counter":{number}'.encode()))
    stopped = disk.effect_count
    make_file(root, disk).commit("g", FIRST)
    created = [place for place, effect in enumerate(disk.effects) if "bak.tmp" in str(effect) and place >= stopped]

    def check(copy: Path, point: int, is_power_cut: bool) -> None:
        data = (copy / "config" / "consumerOffset.json").read_bytes()
        assert others(decode_consumer_offsets(data)) == OTHERS

    points = range(created[0], disk.effect_count + 1)
    assert check_images(disk, tmp_path / "image", points, check) > 20


def test_commit_leaves_old_or_new_offsets_on_a_failing_disk(tmp_path: Path) -> None:
    for number in range(60):
        root = make_root(tmp_path / str(number), OLD, None)
        disk = FailingDisk(number, errno.ENOSPC if number % 2 else errno.EIO)
        offsets = make_file(root, disk)
        with contextlib.suppress(RmqError):
            offsets.commit("g", FIRST)
        assert mine(read_consumer_offsets(str(root), no_sleep)) in ({0: 5}, {0: 6})
        if not disk.has_failed:
            break
        # The same object, on a disk that works again.
        assert offsets.commit("g", SECOND) is Outcome.WRITTEN
        held = read_consumer_offsets(str(root), no_sleep)
        assert (mine(held), others(held)) == ({0: 7, 1: 1}, OTHERS)
    assert 12 < number < 59


def test_reset_offsets_is_atomic_and_its_number_never_decreases(tmp_path: Path) -> None:
    root = make_root(tmp_path / "live", OLD, None)
    disk = CrashDisk(tmp_path / "live")
    paths = GroupPaths(str(root), "g")
    turn = GroupLock(paths, disk, no_sleep)
    done = []
    for offset in (3, 4):
        with turn.hold():
            add_reset(paths, disk, turn, {QueueKey("T", 0): offset, QueueKey("T", offset): offset}, NOW_MS)
        done.append(disk.effect_count)

    def check(copy: Path, point: int, is_power_cut: bool) -> None:
        held = read_resets(GroupPaths(str(copy), "g").resets)
        made = [0, NOW_MS, NOW_MS + 1].index(held.number)
        assert made >= sum(point >= one for one in done)
        assert (
            held.since(0)
            == [
                {},
                {QueueKey("T", 0): 3, QueueKey("T", 3): 3},
                {QueueKey("T", 0): 4, QueueKey("T", 3): 3, QueueKey("T", 4): 4},
            ][made]
        )
        again = GroupPaths(str(copy), "g")
        own = GroupLock(again, Disk(), no_sleep)
        with own.hold():
            made_now = add_reset(again, Disk(), own, {QueueKey("T", 0): 1}, NOW_MS).number
        assert made_now == max(held.number + 1, NOW_MS)

    assert check_images(disk, tmp_path / "image", range(disk.effect_count + 1), check) > 30
