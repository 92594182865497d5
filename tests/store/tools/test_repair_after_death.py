"""Tests of `repair` after a writer died during an append: it keeps what the next writer would keep, and no more."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark import plan_repair, repair
from rmq_spark.store import open_reader
from rmq_spark.store.disk import host
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.crash_image import Image
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.tools import repair as repairing

SIZES = FileSizes(1 << 14, 100, 10 * 46, IndexShape(7, 40))
SETTLED, ACKNOWLEDGED, MESSAGES = 6, 9, 15
KILLED, POWER_CUT = "killed", "power cut"
STEP_IN_DEFAULT_SUITE = 4

Rows = dict[QueueKey, list[tuple[object, ...]]]
CrashEverywhere = Callable[[CrashDisk, Iterable[int], int, Callable[[Path], None]], None]


@dataclass(frozen=True)
class Life:
    """A writer's messages: sizes of bodies and properties in bytes, and whether its clock is constant."""

    body_bytes: int
    property_bytes: int
    is_clock_still: bool

    def writer(self, root: Path, disk: Disk) -> StoreWriter:
        ticks = count(1_700_000_000_000, 0 if self.is_clock_still else 1)
        return StoreWriter(str(root), disk, WriterSettings(sizes=SIZES), lambda: next(ticks), time.sleep)

    def append(self, store: StoreWriter, first: int, last: int, *, settle: bool) -> None:
        messages = [
            SampleMessage(
                "T",
                number % 2,
                b"%05d" % number + b"b" * self.body_bytes,
                keys=f"k{number}",
                properties={"long": "p" * self.property_bytes},
            )
            for number in range(first, last)
        ]
        with store.section() as section:
            section.ensure_topic("T", 2)
            section.append(encode_samples(messages))
            if settle:
                section.settle()

    def run(self, path: Path) -> tuple[CrashDisk, int]:
        """Append with and without settling; return the disk, and the first effect after the last settling."""
        path.mkdir()
        disk = CrashDisk(path)
        store = self.writer(path / "s", disk)
        self.append(store, 0, SETTLED, settle=True)
        begin = disk.effect_count
        self.append(store, SETTLED, ACKNOWLEDGED, settle=False)
        self.append(store, ACKNOWLEDGED, MESSAGES, settle=False)
        return disk, begin

    def recovered(self, root: Path) -> Rows:
        """Let the next writer recover a store, and return what it kept."""
        with self.writer(root, Disk()) as store:
            store.close()
        return rows_of(root)


LIVES = {
    "properties are torn": Life(0, 1100, is_clock_still=False),
    "bodies are torn": Life(900, 700, is_clock_still=True),
}


def rows_of(root: Path) -> Rows:
    found: Rows = {}
    with open_reader(str(root)) as reader:
        reader.refresh()
        for key in reader.queues("T"):
            held = reader.bounds(key)
            columns = ["queueOffset", "commitLogOffset", "body", "keys"]
            batches = reader.read(key, held.min_offset, held.max_offset, columns, check_crc=True)
            found[key] = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    return found


def a_unit(root: Path) -> None:
    path = root / "consumequeue/T/0/00000000000000000000"
    data = bytearray(path.read_bytes())
    data[25] ^= 0x55
    path.write_bytes(data)


def a_queue(root: Path) -> None:
    shutil.rmtree(root / "consumequeue/T/1")


def a_slot(root: Path) -> None:
    """Corrupt a slot of the watermark that is not the newest one."""
    path = root / "rmq/watermark"
    data = bytearray(path.read_bytes())
    numbers = [int(data[at : at + 8192].partition(b'"number": ')[2].partition(b",")[0] or -1) for at in (0, 8192)]
    data[numbers.index(min(numbers)) * 8192 + 100] ^= 0x55
    path.write_bytes(data)


DAMAGES = (a_unit, a_queue, a_slot)


def images(disk: CrashDisk, begin: int, how: str, step: int) -> Iterator[Image]:
    for point in range(begin, disk.effect_count + 1, step):
        yield from (image for image in disk.images(point, 3, subset_count=6) if str(image).startswith(how))


def compare(life: Life, how: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Recover each image, and repair a damaged copy of it; return the numbers of messages that were kept."""
    disk, begin = life.run(tmp_path / "live")
    if how == POWER_CUT:
        monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
    seen = set()
    for number, image in enumerate(images(disk, begin, how, step)):
        recovered, repaired = tmp_path / "recovered", tmp_path / "repaired"
        for folder in (recovered, repaired):
            shutil.rmtree(folder, ignore_errors=True)
            image.write_to(folder)
        damage = DAMAGES[number % len(DAMAGES)]
        damage(repaired / "s")
        kept = life.recovered(recovered / "s")
        try:
            plan = plan_repair(repaired / "s")
            assert not plan.is_lossy, str(plan)
            report = repair(plan).report
            assert report.is_healthy, str(report)
            assert rows_of(repaired / "s") == kept
        except (AssertionError, Exception) as error:
            raise AssertionError(f"{damage.__name__}, {image}: {error!r}") from error
        seen.add(sum(map(len, kept.values())))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("how", [KILLED, POWER_CUT])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_repair_keeps_what_the_next_writer_would_have_kept(
    life: Life, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(compare(life, how, STEP_IN_DEFAULT_SUITE, tmp_path, monkeypatch)) > 2


@pytest.mark.torture
@pytest.mark.parametrize("how", [KILLED, POWER_CUT])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_repair_keeps_what_the_next_writer_would_have_kept_at_every_system_call(
    life: Life, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare(life, how, 1, tmp_path, monkeypatch) >= {SETTLED, ACKNOWLEDGED, MESSAGES}


def repair_of(image: Image, path: Path, monkeypatch: pytest.MonkeyPatch) -> CrashDisk:
    """Repair a damaged image on a recording disk."""
    image.write_to(path)
    a_unit(path / "s")
    disk = CrashDisk(path)
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "Disk", lambda: disk)
        assert repair(path / "s").report.is_healthy
    return disk


def image_of(disk: CrashDisk, begin: int, has_come: Callable[[str], bool]) -> Image:
    """Return the last image of a kill, at or after an effect, whose name matches."""
    return [image for image in images(disk, begin, KILLED, 1) if has_come(str(image))][-1]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["commitlog/00000000000000000000", "consumequeue/T/0/00000000000000000100"])
def test_repair_that_died_truncates_as_much_and_no_more(
    where: str, crash_everywhere: CrashEverywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer died while it wrote records, or after the sync of the log that precedes a new queue file."""
    life = LIVES["properties are torn"]
    disk, begin = life.run(tmp_path / "live")
    image = image_of(disk, begin, lambda name: f"s/{where}'" in name and "Sync" not in name)
    image.write_to(tmp_path / "recovered")
    kept = life.recovered(tmp_path / "recovered/s")
    second = repair_of(image, tmp_path / "second", monkeypatch)
    written = rows_of(tmp_path / "live/s")

    def go_on(root: Path) -> None:
        plan = plan_repair(root)
        assert not plan.is_lossy, str(plan)
        assert repair(plan).report.is_healthy
        found = rows_of(root)
        # After a power failure, recovery also keeps complete records that were not acknowledged.
        is_cut = host.boot_id() == "after the power cut"
        assert found == kept or (
            is_cut
            and all(
                kept[key] == rows[: len(kept[key])] and rows == written[key][: len(rows)] for key, rows in found.items()
            )
        )

    crash_everywhere(second, range(0, second.effect_count + 1, STEP_IN_DEFAULT_SUITE), 1, go_on)
