"""Ticks over the timer that die at any system call: every message that is due comes once, none is lost.

Messages are taken from the queue, delivered in several commits, some in parts of a second, and the check is written.
Each state that a crash could have left is ticked on by another process.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rmq_spark.store.delivery import timer_files, timer_store
from rmq_spark.store.delivery.ticker import Ticker
from rmq_spark.store.delivery.timer_files import TimerCheckFile, TimerLog
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.format import timer_wheel
from rmq_spark.store.format.filenames import TIMER_TOPIC
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.crash_image import Image
from rmq_spark.store.testing.timer_rig import SECOND, waiting

if TYPE_CHECKING:
    from tests.store.delivery.conftest import Kit

MakeKit = Callable[..., "Kit"]
ANOTHER_BOOT = "another boot"
SLOTS = 1024
EARLY = [0, 1]  # delivered before the tick that dies
TAKEN = [2, 3, 4]  # in the timer log before it
NEW = [5, 6, 7, 8, 9, 10, 11, 12]  # taken by it; five of them in one second
PENDING = [13, 14]
LATER = [21, 22, 23]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the wheel and the files of the timer log be small: all of it is copied for each crash."""
    monkeypatch.setattr(timer_files, "TIMER_FILE_BYTES", 436)
    for module in (timer_wheel, timer_files, timer_store):
        monkeypatch.setattr(module, "SLOT_COUNT", SLOTS)
    monkeypatch.setattr(timer_files, "WHEEL_BYTES", SLOTS * timer_wheel.TIMER_SLOT_BYTES)


@dataclass
class Life:
    """What happened on the disk: the tick took place in the effects [begun, done)."""

    kit: "Kit"
    disk: CrashDisk
    begun: int
    done: int


def put(kit: "Kit", begin_ms: int, numbers: Sequence[int], seconds: Sequence[int]) -> None:
    messages = [waiting(number, begin_ms + second * SECOND) for number, second in zip(numbers, seconds, strict=True)]
    kit.put(*messages)
    kit.settle()


def small(ticker: Ticker) -> Ticker:
    """Return the ticker, made to need several commits."""
    ticker.commit_messages = 3
    return ticker


def prepared(make_kit: MakeKit, root: Path) -> tuple["Kit", CrashDisk]:
    root.mkdir()
    disk = CrashDisk(root)
    kit = make_kit(str(root / "store"), disk)
    start = kit.now_ms
    put(kit, start, EARLY, [1, 1])
    kit.now_ms = start + 2 * SECOND
    assert kit.tick().delivered == 2
    put(kit, start, TAKEN, [4, 5, 5])
    assert kit.tick().delivered == 0
    put(kit, start, NEW, [5, 6, 7, 7, 7, 7, 7, 8])
    put(kit, start, PENDING, [90, 90])
    kit.now_ms = start + 20 * SECOND
    return kit, disk


def live(make_kit: MakeKit, root: Path) -> Life:
    kit, disk = prepared(make_kit, root)
    begun = disk.effect_count
    assert kit.tick(small(kit.ticker())).delivered == 11
    return Life(kit, disk, begun, disk.effect_count)


def check(kit: "Kit", *, comes_by: bool) -> None:
    """Tick on, and compare what is there with what must be."""
    if comes_by:
        kit.settle()
    came = [int(name) for name in kit.messages().get(0, [])]
    assert came == (EARLY + TAKEN + NEW)[: len(came)]
    noted = TimerCheckFile(kit.root, Disk()).read()
    assert noted is not None
    kit.tick(small(kit.ticker()))
    assert [int(name) for name in kit.messages()[0]] == EARLY + TAKEN + NEW
    assert kit.tick().delivered == 0
    units = [unit for _, part in TimerLog(kit.root, Disk()).scan(0) for unit in part]
    assert len(np.unique([int(unit["physical_offset"]) for unit in units])) == len(units) == 15
    kit.now_ms += 90 * SECOND
    assert kit.tick().delivered == 2
    assert [int(name) for name in kit.messages()[0]] == EARLY + TAKEN + NEW + PENDING


def revived(make_kit: MakeKit, image: Image, folder: Path, now_ms: int) -> "Kit":
    shutil.rmtree(folder, ignore_errors=True)
    image.write_to(folder)
    kit = make_kit(str(folder / "store"))
    kit.now_ms = now_ms
    return kit


def check_images(
    make_kit: MakeKit, life: Life, folder: Path, points: Sequence[int], seed: int, subset_count: int
) -> int:
    count = 0
    for point in points:
        for image in life.disk.images(point, seed, subset_count=subset_count):
            count += 1
            with pytest.MonkeyPatch.context() as patch:
                if "power cut" in str(image):
                    patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
                try:
                    check(revived(make_kit, image, folder, life.kit.now_ms), comes_by=bool((point + count) % 2))
                except (AssertionError, Exception) as error:
                    raise AssertionError(f"{image}: {error!r}") from error
    return count


def crash(make_kit: MakeKit, tmp_path: Path, seed: int, every: int, subset_count: int = 1) -> int:
    life = live(make_kit, tmp_path / "live")
    points = range(life.begun, life.done + 1)[seed % every :: every]
    return check_images(make_kit, life, tmp_path / "image", points, seed, subset_count)


def test_a_tick_over_the_timer_that_dies_somewhere(make_kit: MakeKit, tmp_path: Path) -> None:
    assert crash(make_kit, tmp_path, 3, 30) > 20


def check_without_power(kit: "Kit", start: int) -> None:
    """Send other messages of the same size behind what is left, due later, and see that each comes in its time."""
    kit.settle()
    left = [int(name) for name in kit.messages(TIMER_TOPIC).get(0, [])]
    put(kit, start, LATER, [60] * len(LATER))
    for second, due in ((20, left), (59, left), (60, left + LATER)):
        kit.now_ms = start + second * SECOND
        kit.tick()
        assert [int(name) for name in kit.messages()[0]] == due, second
    assert kit.tick().delivered == 0


def test_messages_that_a_power_cut_took_leave_no_units_to_those_that_lie_there_next(
    make_kit: MakeKit, tmp_path: Path
) -> None:
    root = tmp_path / "live"
    root.mkdir()
    disk = CrashDisk(root)
    kit = make_kit(str(root / "store"), disk)
    start = kit.now_ms
    put(kit, start, EARLY, [1, 1])
    kit.now_ms = start + 2 * SECOND
    assert kit.tick().delivered == 2
    kit.settle()
    kit.put(*(waiting(number, start + 10 * SECOND) for number in TAKEN))  # not synced
    begun = disk.effect_count
    assert kit.tick().delivered == 0
    for point in range(begun, disk.effect_count + 1, 5):
        for image in disk.images(point, point, subset_count=1):
            if "power cut" not in str(image):
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
                try:
                    check_without_power(revived(make_kit, image, tmp_path / "image", start + 3 * SECOND), start)
                except (AssertionError, Exception) as error:
                    raise AssertionError(f"{image}: {error!r}") from error


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(8))
def test_a_tick_over_the_timer_that_dies_anywhere(make_kit: MakeKit, tmp_path: Path, seed: int) -> None:
    print(f"{crash(make_kit, tmp_path, seed, 8, 2)} images")


@pytest.mark.torture
@pytest.mark.parametrize("after", range(3, 120, 9))
def test_who_goes_on_with_the_timer_may_die_too(make_kit: MakeKit, tmp_path: Path, after: int) -> None:
    kit, disk = prepared(make_kit, tmp_path / "live")
    disk.die_at(disk.effect_count + after)
    with pytest.raises(ProcessDeathError):
        kit.tick(small(kit.ticker()))
    disk.revive()
    begun = disk.effect_count
    kit.tick(small(kit.ticker()))
    life = Life(kit, disk, begun, disk.effect_count)
    points = range(life.begun, life.done + 1)[after % 17 :: 17]
    print(f"{check_images(make_kit, life, tmp_path / 'image', points, after, 1)} images")


def fail_syncs(make_kit: MakeKit, tmp_path: Path, failing: range) -> int:
    """Fail one sync of a tick, tick again with another ticker, and cut the power; return how many failed."""
    failures = 0
    for number in failing:
        kit, disk = prepared(make_kit, tmp_path / f"live{number}")
        begun = disk.sync_count
        disk.fail_syncs({begun + number})
        kit.tick(small(kit.ticker()))
        if disk.sync_count <= begun + number:
            break
        failures += 1
        for _ in range(3):
            kit.tick(small(kit.ticker()))
        kit.settle()
        images = list(disk.images(disk.effect_count, number, subset_count=1))
        # Nobody syncs the mark. With it what is before the position that the check names is not looked at again.
        mark = "store/rmq/delivery/timer.json"
        kept = {mark: images[0].contents[mark]}
        images += [Image(f"{image}, with the mark", {**image.contents, **kept}) for image in images[1:]]
        for image in images[1:]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
                try:
                    again = revived(make_kit, image, tmp_path / "image", kit.now_ms)
                    assert [int(name) for name in again.messages()[0]] == EARLY + TAKEN + NEW
                    check(again, comes_by=False)
                except (AssertionError, Exception) as error:
                    raise AssertionError(f"sync {number}: {image}: {error!r}") from error
        shutil.rmtree(tmp_path / f"live{number}")
    return failures


def test_a_tick_whose_sync_failed_once_loses_and_doubles_nothing_after_a_power_cut(
    make_kit: MakeKit, tmp_path: Path
) -> None:
    assert fail_syncs(make_kit, tmp_path, range(0, 100, 5)) > 3


@pytest.mark.torture
def test_any_sync_of_a_tick_may_fail(make_kit: MakeKit, tmp_path: Path) -> None:
    assert fail_syncs(make_kit, tmp_path, range(100)) > 20
