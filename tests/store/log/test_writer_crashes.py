"""Tests of a writer that dies, or loses power, at any system call: it loses nothing that it acknowledged."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.encoded_samples import encode_samples
from support.single_samples import single_record

from rmq_spark.store import open_reader
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DiskFullError
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.record import Record, encode_blank
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queue_registry import read_registry
from rmq_spark.store.log.retention import expire
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.failing_disk import FailingDisk
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.tools.check import check as look_at

SIZES = FileSizes(2048, 200, 10 * 46, IndexShape(7, 40))
QUEUES = 2
ANOTHER_BOOT = "after the power cut"
POINTS_IN_DEFAULT_SUITE = 40
SHORT = pytest.mark.torture(minutes=0.2)


@dataclass
class Promise:
    """What was acknowledged after a number of effects: message numbers, and those settled or expired."""

    point: int
    appended: int
    settled: int
    may_be_gone_below: int = 0


@dataclass
class Workload:
    """The life of a writer on a disk that records its effects, and its promises on the way."""

    disk: CrashDisk
    promises: list[Promise] = field(default_factory=lambda: [Promise(0, 0, 0)])

    def note(self, appended: int, settled: int, gone: int = 0) -> None:
        self.promises.append(Promise(self.disk.effect_count, appended, settled, gone))

    def at(self, point: int) -> Promise:
        return [promise for promise in self.promises if promise.point <= point][-1]

    def begun_at(self, point: int) -> int:
        """Return the maximum number of stored messages: those acknowledged by the next promise."""
        later = [promise for promise in self.promises if promise.point >= point]
        return later[0].appended if later else self.promises[-1].appended

    def expiring_at(self, point: int) -> int:
        later = [promise for promise in self.promises if promise.point >= point]
        return later[0].may_be_gone_below if later else self.promises[-1].may_be_gone_below


def clock() -> Callable[[], int]:
    ticks = count(1_700_000_000_000)
    return lambda: next(ticks)


def writer(root: Path | str, disk: Disk | None = None) -> StoreWriter:
    return StoreWriter(str(root), disk or Disk(), WriterSettings(sizes=SIZES), clock(), time.sleep)


def sample(number: int) -> SampleMessage:
    return SampleMessage(
        "T", number % QUEUES, b"%05d" % number + b"b" * (number * 13 % 50), tags="t", keys=f"k{number}"
    )


def append(store: StoreWriter, first: int, last: int, *, settle: bool) -> None:
    with store.section() as section:
        section.ensure_topic("T", QUEUES)
        section.append(encode_samples([sample(number) for number in range(first, last)]))
        if settle:
            section.settle()


def live(root: Path) -> Workload:
    """Create a store, append with and without settling over several segments, expire, and close."""
    root.mkdir()
    work = Workload(CrashDisk(root))
    store = writer(root / "s", work.disk)
    done = settled = 0
    for size, settle in ((3, True), (5, False), (1, False), (9, True), (14, True), (2, False), (4, True), (1, True)):
        append(store, done, done + size, settle=settle)
        done += size
        settled = done if settle else settled
        work.note(done, settled)
    with store.section() as section:
        work.note(done, settled)
        kept = expire(section._store, max_bytes=2048)
        assert kept.segments
    gone = min(numbers(root / "s"))
    work.promises[-1].may_be_gone_below = 0
    work.note(done, settled, gone)
    append(store, done, done + 4, settle=False)
    work.note(done + 4, settled, gone)
    store.close()
    work.note(done + 4, done + 4, gone)
    return work


def live_singly(root: Path) -> Workload:
    """Create a store, and append messages one by one in sessions that stay open, over several segments, and close."""
    root.mkdir()
    work = Workload(CrashDisk(root))
    store = writer(root / "s", work.disk)
    done = settled = 0
    for size, settle in ((14, False), (9, True), (2, False)):
        with store.section() as section:
            section.ensure_topic("T", QUEUES)
            appender = store.single_appender(section)
            for number in range(done, done + size):
                appender.append(single_record("T", number, number % QUEUES, keys=1, padding=number * 13 % 50))
                done = number + 1
                work.note(done, settled)
            appender.finish()
            appender.close()
            if settle:
                section.settle()
                settled = done
                work.note(done, settled)
    store.close()
    work.note(done, done)
    return work


def numbers(root: Path) -> list[int]:
    """Return the numbers of all messages, queue by queue, and check that each queue has its own in order, each once."""
    found = []
    with open_reader(str(root)) as reader:
        reader.refresh()
        for queue in range(QUEUES):
            key = QueueKey("T", queue)
            if "T" not in reader.topics() or key not in reader.queues("T"):
                continue
            held = reader.bounds(key)
            seen = [
                (row["queueOffset"], int(row["body"][:5]))
                for batch in reader.read(key, held.min_offset, held.max_offset, ("queueOffset", "body"), check_crc=True)
                for row in batch.to_pylist()
            ]
            assert [offset for offset, _ in seen] == list(range(held.min_offset, held.max_offset))
            assert [number for _, number in seen] == [offset * QUEUES + queue for offset, _ in seen], seen
            found += [number for _, number in seen]
    return found


def queue_files(root: Path) -> list[list[NDArray[np.void]]]:
    """Return the entries in each file of each queue, the files of a queue in order."""
    folders = sorted(root.glob("consumequeue/*/*"))
    return [
        [np.frombuffer(path.read_bytes(), QUEUE_UNIT) for path in sorted(folder.iterdir())]
        for folder in folders
        if any(folder.iterdir())
    ]


def check_registered_ends(root: Path) -> None:
    """Check that the registry lists exactly the newest file of each queue that has several."""
    held = read_registry(str(root))
    assert held is not None
    newest = {
        QueueKey("T", int(folder.name)): int(max(file.name for file in folder.iterdir())) // QUEUE_UNIT.itemsize
        for folder in root.glob("consumequeue/T/*")
        if any(folder.iterdir())
    }
    assert {key: unit for key, (unit, _) in held.rolls.items() if unit} == {k: v for k, v in newest.items() if v}


def check(root: Path, work: Workload, point: int, *, is_power_cut: bool) -> None:
    """Recover the store, and check that it has everything that was promised, and nothing else."""
    promise = work.at(point)
    kept = promise.settled if is_power_cut else promise.appended
    gone = max(promise.may_be_gone_below, work.expiring_at(point))
    if not is_power_cut and (root / "commitlog").is_dir():
        assert set(range(gone, kept)) <= set(numbers(root)), "before recovery"
    store = writer(root)
    with store.section() as section:
        section.ensure_topic("T", QUEUES)
    store.close()
    assert not (root / "abort").exists()
    assert {int(units["record_size"][0]) > 0 for of_queue in queue_files(root) for units in of_queue} <= {True}
    after = set(numbers(root))
    check_registered_ends(root)
    assert set(range(gone, kept)) <= after
    assert after <= set(range(work.begun_at(point)))
    with open_reader(str(root)) as reader:
        reader.refresh()
        for number in sorted(after)[-6:]:
            assert reader.find_key("T", f"k{number}") == [(QueueKey("T", number % QUEUES), number // QUEUES)]
    fresh = max(after, default=-1) + 1
    append(store, fresh, fresh + 3, settle=True)
    assert set(numbers(root)) == after | set(range(fresh, fresh + 3))


def crash_everywhere(
    work: Workload, folder: Path, points: Iterator[int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Check every image of a crash at every point. Return how many points and images there were."""
    point_count = image_count = 0
    for point in points:
        point_count += 1
        for image in work.disk.images(point, seed):
            image_count += 1
            is_power_cut = "power cut" in str(image)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            image.write_to(folder)
            with monkeypatch.context() as patch:
                if is_power_cut:
                    patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
                try:
                    check(folder / "s", work, point, is_power_cut=is_power_cut)
                except (AssertionError, Exception) as error:
                    raise AssertionError(f"{image}: {error!r}") from error
    return point_count, image_count


def every(work: Workload, step: int, offset: int) -> Iterator[int]:
    return iter(range(offset % step, work.disk.effect_count + 1, step))


@pytest.mark.slow
def test_append_survives_a_crash_at_some_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = live(tmp_path / "live")
    step = max(work.disk.effect_count // POINTS_IN_DEFAULT_SUITE, 1)
    tried = crash_everywhere(work, tmp_path / "image", every(work, step, 0), 1, monkeypatch)
    print(f"{tried[0]} points of {work.disk.effect_count}, {tried[1]} images")


@pytest.mark.slow
def test_append_one_survives_a_crash_at_some_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = live_singly(tmp_path / "live")
    step = max(work.disk.effect_count // POINTS_IN_DEFAULT_SUITE, 1)
    tried = crash_everywhere(work, tmp_path / "image", every(work, step, 0), 1, monkeypatch)
    print(f"{tried[0]} points of {work.disk.effect_count}, {tried[1]} images")


def fill_up_to(store: StoreWriter, end: int) -> int:
    """Append messages and settle, until the log ends at a position. Return how many."""
    sizes = [len(encode_samples([replace(sample(number), body=b"%05d" % number)]).data) for number in range(4)]
    messages, rest = [], end - sum(sizes)
    for number in range(4):
        padding = rest // 4 + (rest % 4 if number == 3 else 0)
        messages.append(replace(sample(number), body=b"%05d" % number + b"b" * padding))
    with store.section() as section:
        section.ensure_topic("T", QUEUES)
        section.append(encode_samples(messages))
        section.settle()
        assert section.end == end
    return len(messages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end_in_sector",
    [505, 508, 511, *(pytest.param(end, marks=SHORT) for end in (506, 507, 509, 510))],
)
def test_append_survives_a_power_cut_that_tears_a_filler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end_in_sector: int
) -> None:
    """The log ends so close to a sector boundary that the boundary is within the 8 bytes of the next filler."""
    (tmp_path / "live").mkdir()
    work, place = Workload(CrashDisk(tmp_path / "live")), 2 * 512 + end_in_sector
    store = writer(tmp_path / "live" / "s", work.disk)
    done = fill_up_to(store, place)
    work.note(done, done)
    begin = work.disk.effect_count
    with store.section() as section:
        large = [replace(sample(number), body=b"%05d" % number + b"b" * 600) for number in range(done, done + 2)]
        assert section.append(encode_samples(large)).physical_offsets[0] == SIZES.segment_bytes
    work.note(done + 2, done)
    filler, torn = encode_blank(SIZES.segment_bytes - place), set()
    for point in range(begin, work.disk.effect_count + 1):
        for image in work.disk.images(point, 1):
            data = image.contents[f"s/commitlog/{0:020d}"]
            assert data is not None
            torn.add(data[place : place + len(filler)])
    edge = 512 - end_in_sector
    assert torn >= {bytes(edge) + filler[edge:], filler[:edge] + bytes(8 - edge)}
    crash_everywhere(work, tmp_path / "image", iter(range(begin, work.disk.effect_count + 1)), 1, monkeypatch)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(4))
def test_append_survives_a_crash_at_every_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    work = live(tmp_path / "live")
    tried = crash_everywhere(work, tmp_path / "image", every(work, 1, 0), seed, monkeypatch)
    print(f"seed {seed}: {tried[0]} points, {tried[1]} images")


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(4))
def test_append_one_survives_a_crash_at_every_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    work = live_singly(tmp_path / "live")
    tried = crash_everywhere(work, tmp_path / "image", every(work, 1, 0), seed, monkeypatch)
    print(f"seed {seed}: {tried[0]} points, {tried[1]} images")


def test_append_syncs_records_before_a_full_queue_file(
    tmp_path: Path,
) -> None:
    """The compatibility tests show what a broker does with such images: a permanent hole, or truncated queues."""
    work, folder = live(tmp_path / "live"), tmp_path / "image"
    file_count = full_count = 0
    for point in range(0, work.disk.effect_count + 1, 3):
        for image in work.disk.images(point, 5):
            if "power cut" not in str(image):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            image.write_to(folder)
            log = CommitLog((str(folder / "s" / "commitlog"),), mapped=False)
            for of_queue in queue_files(folder / "s"):
                for units in of_queue:
                    assert units["record_size"][0] > 0, image
                    file_count += 1
                for units in of_queue[:-1]:
                    assert (units["record_size"] > 0).all(), image
                    for place in units["physical_offset"].tolist():
                        has_expired = place < log.segments.begin
                        assert has_expired or isinstance(log.record_at(place), Record), f"{place} in {image}"
                    full_count += 1
            log.close()
    print(f"{file_count} files, {full_count} full ones")
    assert full_count > 100


@pytest.mark.slow
def test_prepare_survives_a_crash_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die in an append, then at every effect of the recovery, and recover again."""
    work = live(tmp_path / "live")
    deaths = [point for point in range(0, work.disk.effect_count, 37)]
    tried = 0
    for death in deaths:
        image = next(work.disk.images(death, 1))
        again = tmp_path / f"again{death}"
        again.mkdir()
        image.write_to(again)
        second = Workload(CrashDisk(again), [Promise(-1, work.at(death).appended, 0, work.expiring_at(death))])
        second.promises.append(Promise(1 << 30, work.begun_at(death), 0, work.expiring_at(death)))
        store = writer(again / "s", second.disk)
        store.close()
        for point in range(0, second.disk.effect_count, 3):
            for cut in second.disk.images(point, death, subset_count=1):
                if "power cut" in str(cut):
                    continue  # what the first life did not sync counts as synced here
                tried += 1
                folder = tmp_path / "image"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                cut.write_to(folder)
                check(folder / "s", second, point, is_power_cut=False)
    assert tried > 20
    print(f"{len(deaths)} deaths, {tried} images of their recovery")


@pytest.mark.parametrize("is_power_cut", [True, False])
def test_prepare_keeps_all_keys_of_a_broker_after_our_crash(
    is_power_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "live/s"
    store = writer(root)
    with store.section() as section:
        section.ensure_topic("T", QUEUES)
    append(store, 0, 30, settle=True)
    store.close()
    shutil.rmtree(root / "rmq")  # as in a store that a broker wrote and closed
    before = len(list((root / "index").iterdir()))
    disk = CrashDisk(root.parent)
    store = writer(root, disk)
    begin = disk.effect_count
    append(store, 30, 32, settle=False)
    seen = set()
    for point in range(begin, disk.effect_count + 1):
        for image in disk.images(point, 5):
            if ("power cut" in str(image)) is not is_power_cut:
                continue
            folder = tmp_path / "image"
            shutil.rmtree(folder, ignore_errors=True)
            image.write_to(folder)
            with monkeypatch.context() as patch:
                if is_power_cut:
                    patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
                again = writer(folder / "s")
                with again.section():
                    pass
                again.close()
                missing = [one.what for one in look_at(str(folder / "s")).findings if one.area == "index"]
                assert not missing, str(image)
            seen.add(len(list((folder / "s/index").iterdir())))
    assert min(seen) >= before


def test_append_swallows_no_death_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    work = Workload(CrashDisk(tmp_path / "live"))
    store = writer(tmp_path / "live" / "s", work.disk)
    append(store, 0, 3, settle=False)
    work.disk.die_at(work.disk.effect_count + 4)
    with pytest.raises(ProcessDeathError):
        append(store, 3, 6, settle=False)


def test_append_on_a_full_disk_loses_nothing_and_continues_with_space(
    tmp_path: Path,
) -> None:
    """Fill the disk at every effect of an append, then free space and continue."""
    failures = 0
    for point in range(200):
        root = tmp_path / str(point) / "s"
        append(writer(root), 0, 5, settle=False)
        disk = FailingDisk(point)
        try:
            append(writer(root, disk), 5, 12, settle=True)
        except DiskFullError:
            failures += 1
        if not disk.has_failed:
            break
        assert set(range(5)) <= set(numbers(root))
        before = set(numbers(root))
        store = writer(root)
        with store.section() as section:
            pass
        assert set(numbers(root)) in (set(range(5)), set(range(12)))
        assert before <= set(numbers(root))
        begin = len(numbers(root))
        append(store, begin, begin + 3, settle=True)
        assert set(numbers(root)) == set(range(begin + 3))
        assert section
        shutil.rmtree(root.parent)
    assert failures > 15
    print(f"{failures} times full")
