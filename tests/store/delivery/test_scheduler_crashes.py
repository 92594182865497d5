"""Delivery rounds that die at any system call: each due message once, delayOffset.json never ahead.

A round is recorded on a disk that remembers. Then another process continues from each state that a crash could have
left, or a writer only recovers it.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.crash_image import Image
from rmq_spark.store.testing.sample_message import SampleMessage

if TYPE_CHECKING:
    from tests.store.delivery.conftest import Kit

MakeKit = Callable[..., "Kit"]
Wait = Callable[..., SampleMessage]
ANOTHER_BOOT = "another boot"
FIRST = ["a0", "a1"]  # delivered before the round that dies
DUE = {1: [f"b{number}" + "x" * 50 for number in range(5)], 2: [f"c{number}" for number in range(4)]}
PENDING = ["d0", "d1"]


@dataclass
class Life:
    """The recorded effects on the disk; those of the round are [begun, done)."""

    kit: "Kit"
    disk: CrashDisk
    begun: int
    done: int


def small(ticker: DeliveryScheduler) -> DeliveryScheduler:
    """Return the scheduler, limited so that it needs several commits."""
    ticker.commit_messages = 4
    return ticker


def waiting(make_kit: MakeKit, wait: Wait, root: Path) -> tuple["Kit", CrashDisk]:
    """Return a store in which some were delivered, more are due and some are not."""
    root.mkdir()
    disk = CrashDisk(root)
    kit = make_kit(str(root / "store"), disk)
    kit.put(*(wait(1, name) for name in FIRST))
    kit.now_ms += 1000
    assert kit.tick().delivered == 2
    kit.put(*(wait(level, name, queue_id=level - 1) for level, names in DUE.items() for name in names))
    kit.put(wait(1, "bad", topic=None), *(wait(5, name) for name in PENDING))
    kit.settle()  # the round need not preserve what was never synced
    kit.now_ms += 5000
    return kit, disk


def live(make_kit: MakeKit, wait: Wait, root: Path) -> Life:
    kit, disk = waiting(make_kit, wait, root)
    begun = disk.effect_count
    assert kit.tick(small(kit.ticker())).delivered == 9
    return Life(kit, disk, begun, disk.effect_count)


def revived(make_kit: MakeKit, image: Image, folder: Path, now_ms: int) -> "Kit":
    """Return the store as the crash left it."""
    shutil.rmtree(folder, ignore_errors=True)
    image.write_to(folder)
    kit = make_kit(str(folder / "store"))
    kit.now_ms = now_ms
    return kit


def check_file(kit: "Kit") -> None:
    """Assert that delayOffset.json is not ahead of what was delivered."""
    found, offsets = kit.messages(), kit.offsets()
    ones = [name for name in found.get(0, []) if name[0] in "ab"]
    twos = found.get(1, [])
    assert offsets.get(1, 0) <= len(ones) + (len(ones) == 7), (offsets, found)  # the bad one comes after them
    assert offsets.get(2, 0) <= len(twos), (offsets, found)
    assert offsets.get(5, 0) == 0


def check(kit: "Kit", *, comes_by: bool) -> None:
    """Run a round, maybe after a writer has recovered the store, and compare the messages with the expected ones."""
    if comes_by:
        kit.settle()
    check_file(kit)
    kit.tick(small(kit.ticker()))
    assert kit.messages() == {0: FIRST + DUE[1], 1: DUE[2]}
    assert kit.offsets() == {1: 8, 2: 4}
    assert kit.tick().delivered == 0
    kit.now_ms += 60_000
    assert kit.tick().delivered == 2
    assert kit.messages()[0][-2:] == PENDING
    side = Path(kit.root, "rmq/intents")
    assert not [path for path in side.iterdir() if path.suffix == ".json"]


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


def crash(make_kit: MakeKit, wait: Wait, tmp_path: Path, seed: int, every: int, subset_count: int = 1) -> int:
    """Check the states after crashes at every `every`-th effect of a round; return their number."""
    life = live(make_kit, wait, tmp_path / "live")
    points = range(life.begun, life.done + 1)[seed % every :: every]
    return check_images(make_kit, life, tmp_path / "image", points, seed, subset_count)


def test_tick_that_dies_at_some_effects(make_kit: MakeKit, wait: Wait, tmp_path: Path) -> None:
    assert crash(make_kit, wait, tmp_path, 3, 24) > 20


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(8))
def test_tick_that_dies_at_any_effect(make_kit: MakeKit, wait: Wait, tmp_path: Path, seed: int) -> None:
    print(f"{crash(make_kit, wait, tmp_path, seed, 8, 2)} images")


def die_and_go_on(make_kit: MakeKit, wait: Wait, root: Path, after: int) -> Life:
    """Die `after` effects after the round began; run a round of another process on the same disk."""
    kit, disk = waiting(make_kit, wait, root)
    disk.die_at(disk.effect_count + after)
    with pytest.raises(ProcessDeathError):
        kit.tick(small(kit.ticker()))
    disk.revive()
    begun = disk.effect_count
    kit.tick(small(kit.ticker()))
    return Life(kit, disk, begun, disk.effect_count)


def crash_twice(make_kit: MakeKit, wait: Wait, tmp_path: Path, deaths: Sequence[int], every: int) -> int:
    """Die in a round, then in the one that continues, and continue in a third; return the number of crashes."""
    count = 0
    for death in deaths:
        shutil.rmtree(tmp_path / "live", ignore_errors=True)
        life = die_and_go_on(make_kit, wait, tmp_path / "live", death)
        points = range(life.begun, life.done + 1)[death % every :: every]
        count += check_images(make_kit, life, tmp_path / "image", points, death, 1)
    return count


def test_tick_that_continues_may_die_too(make_kit: MakeKit, wait: Wait, tmp_path: Path) -> None:
    assert crash_twice(make_kit, wait, tmp_path, (30, 110), 40) > 10


@pytest.mark.torture
@pytest.mark.parametrize("first", range(16))
def test_tick_that_continues_may_die_at_any_effect(make_kit: MakeKit, wait: Wait, tmp_path: Path, first: int) -> None:
    print(f"{crash_twice(make_kit, wait, tmp_path, range(first, 120, 16), 17)} images")
