"""Tests of `repair` after a clock was ahead: right store times; no message is lost, duplicated or late."""

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from support.encoded_samples import encode_samples

import rmq_spark
from rmq_spark import StoreError, check, plan_repair, repair
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.tools import repair as repairing

SIZES = FileSizes(4096, 400, 460, IndexShape(7, 40))
HOUR_MS = 3_600_000
AHEAD_MS = 30 * 24 * HOUR_MS
LEVEL_3_MS = 10_000
POINTS_IN_DEFAULT_SUITE = 8
PARTS = 4  # of all points: limits the time of a test
COLUMNS = ["queueOffset", "commitLogOffset", "body", "keys", "storeTimestamp", "bornTimestamp"]

Rows = dict[QueueKey, list[dict[str, object]]]
CrashEverywhere = Callable[[CrashDisk, Iterable[int], int, Callable[[Path], None]], None]


@dataclass
class Store:
    """A store that is written with any clock."""

    root: Path
    count: int = 0

    def put(self, store_ms: int, born_ms: int, number: int = 1, *, has_late: bool = True, **more: str) -> None:
        """Append messages to two queues, and one to a delay level."""
        with StoreWriter(str(self.root), Disk(), WriterSettings(sizes=SIZES), lambda: store_ms, time.sleep) as writer:
            messages = [self._message(born_ms, **more) for _ in range(number)]
            late = {"UNIQ_KEY": f"late{self.count}", "DELAY": "3", "REAL_TOPIC": "T", "REAL_QID": "0"}
            name = f"late{self.count}".encode()
            waiting = [SampleMessage(SCHEDULE_TOPIC, 2, name, properties=late, born_timestamp=born_ms)]
            with writer.section() as section:
                section.ensure_topic("T", 2)
                section.ensure_topic(SCHEDULE_TOPIC, 18)
                section.append(encode_samples([*messages, *(waiting if has_late else [])]))
            writer.close()

    def _message(self, born_ms: int, **more: str) -> SampleMessage:
        self.count += 1
        return SampleMessage(
            "T",
            self.count % 2,
            b"%05d" % self.count * 9,
            keys=f"k{self.count}",
            properties={"UNIQ_KEY": f"u{self.count}", **more},
            born_timestamp=born_ms,
        )


def fill(root: Path, now_ms: int, number: int = 20) -> Store:
    """Write a store with one writer whose clock is wrong, between writers with right clocks."""
    store = Store(root)
    store.put(now_ms - 3 * HOUR_MS, now_ms - 3 * HOUR_MS, number)
    store.put(now_ms + AHEAD_MS, now_ms + AHEAD_MS, number)
    store.put(now_ms - 2 * HOUR_MS, now_ms - 2 * HOUR_MS, number)
    store.put(now_ms - HOUR_MS, now_ms - HOUR_MS, number)
    return store


def rows_of(root: Path, columns: list[str] = COLUMNS) -> Rows:
    with StoreReader(str(root)) as reader:
        reader.refresh()
        found: Rows = {}
        for topic in reader.topics():
            for key in reader.queues(topic):
                held = reader.bounds(key)
                batches = reader.read(key, held.min_offset, held.max_offset, columns)
                found[key] = [row for batch in batches for row in batch.to_pylist()]
    return {key: rows for key, rows in found.items() if rows}


def times_of(root: Path) -> list[int]:
    """Return the store times of all messages, in the order of the log."""
    rows = [row for held in rows_of(root).values() for row in held]
    rows.sort(key=lambda row: int(str(row["commitLogOffset"])))
    return [round(row["storeTimestamp"].timestamp() * 1000) for row in rows]  # type: ignore[attr-defined]


def without_times(rows: Rows) -> Rows:
    return {
        key: [{name: value for name, value in row.items() if name != "storeTimestamp"} for row in held]
        for key, held in rows.items()
    }


def due_times(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return when the messages of the delay level are due, and when they were stored."""
    key = QueueKey(SCHEDULE_TOPIC, 2)
    queue = ConsumeQueue(key, str(root / "consumequeue" / SCHEDULE_TOPIC / "2"))
    units = queue.read(0, queue.search_written_end())
    stored = [row["storeTimestamp"].timestamp() * 1000 for row in rows_of(root)[key]]  # type: ignore[attr-defined]
    return units.tags_codes, np.rint(np.array(stored)).astype(np.int64)


def test_repair_sets_store_times_back_to_born_times(tmp_path: Path) -> None:
    now_ms = wall_clock_ms()
    store = fill(tmp_path / "s", now_ms)
    before = rows_of(store.root)
    right = times_of(store.root)[:21]
    assert times_of(store.root)[21:] == [now_ms + AHEAD_MS] * 63
    report = check(store.root)
    found = [one for one in report.findings if "clock" in one.what]
    assert [(one.severity, one.action) for one in found] == [("repairable", "clock")]
    plan = plan_repair(store.root)
    assert [(step.action, step.messages_lost) for step in plan.steps] == [("clock", 0)]
    assert "63 messages" in plan.steps[0].what

    repaired = repair(plan)

    assert repaired.report.is_healthy, str(repaired.report)
    assert not repaired.report.findings
    assert plan_repair(store.root).is_empty
    assert without_times(rows_of(store.root)) == without_times(before)
    times = times_of(store.root)
    assert times[:21] == right
    assert all(now_ms <= one <= wall_clock_ms() for one in times[21:]), "a born time in the future becomes now"
    assert times == sorted(times)
    due, stored = due_times(store.root)
    assert (due == stored + LEVEL_3_MS).all()


def test_repair_uses_born_times_if_only_the_storing_clock_was_ahead(tmp_path: Path) -> None:
    now_ms, store = wall_clock_ms(), Store(tmp_path / "s")
    store.put(now_ms - 3 * HOUR_MS, now_ms - 3 * HOUR_MS, 2)
    store.put(now_ms + AHEAD_MS, now_ms - 2 * HOUR_MS, 2)
    store.put(now_ms - HOUR_MS, now_ms - 5 * HOUR_MS, 2)  # was sent long before
    store.put(now_ms, now_ms - HOUR_MS, 2)
    repair(store.root)
    hours = [(time_ms - now_ms) // HOUR_MS for time_ms in times_of(store.root)]
    assert hours == [-3] * 3 + [-2] * 6 + [-1] * 3
    with StoreReader(str(store.root)) as reader:
        reader.refresh()
        key = QueueKey("T", 0)
        at = reader.offset_at_time(key, now_ms - HOUR_MS)
        assert at == reader.bounds(key).max_offset - 1, "the search by time finds later messages"
        for number in range(1, 9):
            found = reader.find_key("T", f"k{number}", now_ms - 4 * HOUR_MS, wall_clock_ms())
            assert len(found) == 1, "the key index has the new times"


def test_repair_lets_new_messages_have_the_time_of_the_clock(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", wall_clock_ms())
    repair(store.root)
    sent_ms = wall_clock_ms()
    store.put(sent_ms, sent_ms)
    assert times_of(store.root)[-2:] == [sent_ms] * 2
    assert check(store.root).is_healthy


def test_repair_lets_retention_by_age_delete_messages_stored_ahead(tmp_path: Path) -> None:
    now_ms, store = wall_clock_ms(), Store(tmp_path / "s")
    store.put(now_ms - 10 * HOUR_MS, now_ms - 10 * HOUR_MS, 60, has_late=False)
    store.put(now_ms + AHEAD_MS, now_ms - 9 * HOUR_MS, 60, has_late=False)
    store.put(now_ms, now_ms, 60, has_late=False)

    def expire() -> list[int]:
        writer = StoreWriter(str(store.root), Disk(), WriterSettings(sizes=SIZES), wall_clock_ms, time.sleep)
        with writer, writer.section() as section:
            section.expire(max_age_ms=2 * HOUR_MS)
        return times_of(store.root)

    held = expire()
    assert held.count(now_ms + AHEAD_MS) == 120
    repair(store.root)
    held = expire()
    assert held.count(now_ms - 9 * HOUR_MS) < 30, "only the last old segment remains"
    assert held.count(now_ms) == 60


def test_repair_lets_an_open_reader_see_every_message_once(tmp_path: Path) -> None:
    now_ms = wall_clock_ms()
    store = fill(tmp_path / "s", now_ms)
    key = QueueKey("T", 1)

    def read(reader: StoreReader, begin: int) -> list[object]:
        reader.refresh()
        batches = reader.read(key, begin, reader.bounds(key).max_offset, ["body"])
        return [body for batch in batches for body in batch.column("body").to_pylist()]

    with StoreReader(str(store.root)) as reader:
        seen = read(reader, 0)
        repair(store.root)
        assert read(reader, len(seen)) == []
        store.put(wall_clock_ms(), now_ms, 4)
        seen += read(reader, len(seen))
    assert seen == [row["body"] for row in rows_of(store.root)[key]]
    assert len(set(seen)) == len(seen)


def test_plan_repair_leaves_records_with_a_checksum_of_their_time(tmp_path: Path) -> None:
    now_ms, store = wall_clock_ms(), Store(tmp_path / "s")
    store.put(now_ms, now_ms)
    store.put(now_ms + AHEAD_MS, now_ms, 3, **{"__CRC32#": "0000000042"})
    before = rows_of(store.root)
    plan = plan_repair(store.root)
    assert [step.action for step in plan.steps] == ["leave"]
    assert "__CRC32#" in plan.steps[0].what
    assert plan.is_empty
    repair(plan)
    assert rows_of(store.root) == before


def test_repair_refuses_a_store_that_was_written_to_since_the_plan(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", wall_clock_ms())
    plan = plan_repair(store.root)
    store.put(wall_clock_ms(), wall_clock_ms())
    with pytest.raises(rmq_spark.StoreChangedError, match="Plan again"):
        repair(plan)


def test_plan_repair_leaves_store_times_if_the_clock_was_never_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fill(tmp_path / "s", wall_clock_ms())
    for module in ("repair_plan", "check_side_files"):
        monkeypatch.setattr(f"rmq_spark.store.tools.{module}.wall_clock_ms", lambda: 1000)
    plan = plan_repair(store.root)
    assert [step.action for step in plan.steps] == ["leave"]
    assert "before 2001" in plan.steps[0].what


def test_plan_repair_of_a_damaged_log_sets_no_clock_back(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", wall_clock_ms())
    path = store.root / "commitlog/00000000000000000000"
    data = bytearray(path.read_bytes())
    data[1000] ^= 0x55
    path.write_bytes(data)
    assert "clock" not in [step.action for step in plan_repair(store.root).steps]


def repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CrashDisk, Callable[[Path], None]]:
    """Repair a store; return the disk, and the check to run after a crash."""
    root = tmp_path / "live/s"
    store = fill(root, wall_clock_ms(), 8)
    disk = CrashDisk(root.parent)
    before, turns = without_times(rows_of(root)), count()
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "Disk", lambda: disk)
        assert repair(root).report.is_healthy

    def go_on(image: Path) -> None:
        assert without_times(rows_of(image)) == before, "a reader, before the store is recovered"
        other = Store(image, store.count)
        if next(turns) % 2:  # every other image is written to before the repair
            other.put(wall_clock_ms(), wall_clock_ms())
        expected = without_times(rows_of(image))
        assert all(held == expected[key][: len(held)] for key, held in before.items())
        repair(image)
        report = check(image)
        assert report.is_healthy, str(report)
        assert not [one for one in report.findings if "clock" in one.what]
        assert without_times(rows_of(image)) == expected
        times = times_of(image)
        assert times == sorted(times)
        assert times[-1] <= wall_clock_ms()
        due, stored = due_times(image)
        assert (due == stored + LEVEL_3_MS).all()

    return disk, go_on


@pytest.mark.slow
def test_repair_survives_a_crash_at_some_system_calls(
    crash_everywhere: CrashEverywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, go_on = repaired(tmp_path, monkeypatch)
    step = max(disk.effect_count // POINTS_IN_DEFAULT_SUITE, 1)
    crash_everywhere(disk, range(0, disk.effect_count + 1, step), 1, go_on)


@pytest.mark.torture
@pytest.mark.parametrize("part", range(PARTS))
def test_repair_survives_a_crash_at_every_system_call(
    part: int, crash_everywhere: CrashEverywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, go_on = repaired(tmp_path, monkeypatch)
    crash_everywhere(disk, range(part, disk.effect_count + 1, PARTS), 2, go_on)


def fail_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> bool:
    """Fail sync `number` of a repair, repair again, and cut the power; return whether the repair has that sync."""
    root = tmp_path / f"failed-{number}" / "s"
    fill(root, wall_clock_ms(), 6)
    disk = CrashDisk(root.parent)
    before = without_times(rows_of(root))
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "Disk", lambda: disk)
        disk.fail_syncs({disk.sync_count + number})
        try:
            repair(root)
        except StoreError:
            disk.fail_syncs(())
            repair(root)
        else:
            return False
    for image in disk.images(disk.effect_count, number, subset_count=3):
        target = tmp_path / "image"
        shutil.rmtree(target, ignore_errors=True)
        image.write_to(target)
        with monkeypatch.context() as patch:
            patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
            assert without_times(rows_of(target / "s")) == before, f"sync {number}: {image}"
            times = times_of(target / "s")
            assert times == sorted(times), f"sync {number}: {image}"
            assert times[-1] <= wall_clock_ms(), f"sync {number}: {image}"
    return True


def test_repair_after_some_failed_syncs_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all([fail_a_sync(tmp_path, monkeypatch, number) for number in range(3, 19, 3)])


@pytest.mark.torture
def test_repair_after_each_failed_sync_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 0
    while fail_a_sync(tmp_path, monkeypatch, number):
        number += 1
    assert number > 15
