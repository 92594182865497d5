"""Tests of `repair` after a tick with a clock ahead: waiting messages come at their time, and only once."""

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples
from support.timer_rig import waiting

from rmq_spark import LockTimeoutError, check, plan_repair, repair
from rmq_spark.store.delivery import scheduler as ticker
from rmq_spark.store.delivery import timer as timer_store
from rmq_spark.store.delivery import timer_files
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.delivery.timer_files import TimerCheckFile
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format import timer as timer_wheel
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import TIMER_TOPIC
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.tools import check_timer as timer_findings
from rmq_spark.store.tools import repair as repairing
from rmq_spark.store.transaction.roll_forward import IntentRollForward

SIZES = FileSizes(1 << 14, 400, 460, IndexShape(7, 200))
SETTINGS = WriterSettings(sizes=SIZES)
SECOND, HOUR_MS = 1000, 3_600_000
AHEAD_MS = 30 * 24 * HOUR_MS
SLOTS = 180_000  # slightly more than two days, the longest wait in the wheel
POINTS_IN_DEFAULT_SUITE = 5
PARTS = 10  # of all points: limits the time of a test
DELIVERED, EARLY = [1], [2, 3]  # with the right clock, and with the one that was ahead
OVERDUE, SOON, NOT_TAKEN, LATER = [4], [5, 6], [9], [10]
TAKEN_BACK, TAKES_BACK = 7, 8


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wheel and the timer log files small: several are deleted, and copied for each crash."""
    monkeypatch.setattr(timer_files, "TIMER_FILE_BYTES", 436)
    for module in (timer_wheel, timer_files, timer_store, timer_findings):
        monkeypatch.setattr(module, "SLOT_COUNT", SLOTS)
    monkeypatch.setattr(timer_files, "WHEEL_BYTES", SLOTS * timer_wheel.TIMER_SLOT_BYTES)


@dataclass
class Store:
    """A store with messages that wait for a time."""

    root: Path
    begin_ms: int = field(default_factory=lambda: wall_clock_ms() // SECOND * SECOND)

    def put(self, store_ms: int, *messages: SampleMessage) -> None:
        """Append waiting messages, with any clock."""
        with StoreWriter(str(self.root), Disk(), SETTINGS, lambda: store_ms, time.sleep) as writer:
            with writer.section() as section:
                section.ensure_topic("T", 1)
                section.ensure_topic(TIMER_TOPIC, 1)
                section.append(encode_samples(messages))
            writer.close()

    def tick(self, now_ms: int) -> None:
        """Deliver due messages, with any clock."""
        with DeliveryScheduler(str(self.root), SETTINGS, clock_ms=lambda: now_ms) as ticks:
            while True:
                ticked = ticks.tick(now_ms)
                assert ticked.problem is None, ticked.problem
                if ticked.next_due_ms is None or ticked.next_due_ms > now_ms:
                    return

    def fill(self) -> None:
        """Deliver with a right clock and with one that is ahead, then send and tick with the right one."""
        begin = self.begin_ms
        self.put(begin, *(waiting(number, begin + SECOND, body=b"%d" % number) for number in DELIVERED))
        self.tick(begin + 3 * SECOND)
        self.put(begin, *(waiting(number, begin + 2 * HOUR_MS, body=b"%d" % number) for number in EARLY))
        self.tick(begin + AHEAD_MS)
        soon = begin + HOUR_MS
        deletion = waiting(TAKES_BACK, soon, body=b"8", TIMER_DEL_UNIQKEY=f"T+K{TAKEN_BACK:05d}")
        self.put(
            begin,
            *(waiting(number, begin - HOUR_MS, body=b"%d" % number) for number in OVERDUE),
            *(waiting(number, soon, body=b"%d" % number) for number in SOON),
            waiting(TAKEN_BACK, soon, body=b"7"),
            deletion,
            *(waiting(number, begin + 72 * HOUR_MS, body=b"%d" % number) for number in LATER),
        )
        self.tick(begin + 5 * SECOND)
        self.put(begin, *(waiting(number, begin + HOUR_MS, body=b"%d" % number) for number in NOT_TAKEN))

    def delivered(self) -> list[int]:
        """Return the numbers of the messages that were delivered, in order."""
        with StoreReader(str(self.root)) as reader:
            reader.refresh()
            key = QueueKey("T", 0)
            held = reader.bounds(key)
            batches = reader.read(key, held.min_offset, held.max_offset, ["body"])
            return [int(body) for batch in batches for body in batch.column("body").to_pylist()]

    def deliver_all(self) -> list[int]:
        """Tick at the due times; assert that each message comes at its time, and once."""
        now_ms = wall_clock_ms() + 60 * SECOND
        self.tick(now_ms)
        self.tick(now_ms + 2 * SECOND)
        assert Counter(self.delivered()) == Counter(DELIVERED + EARLY + OVERDUE)
        self.tick(self.begin_ms + HOUR_MS + 600 * SECOND)
        assert Counter(self.delivered()) == Counter(DELIVERED + EARLY + OVERDUE + SOON + NOT_TAKEN)
        for hours in (47, 49, 71, 74):
            assert set(LATER).isdisjoint(self.delivered()), "before its time"
            self.tick(self.begin_ms + hours * HOUR_MS)
            self.tick(self.begin_ms + hours * HOUR_MS + 2 * SECOND)
        found = self.delivered()
        assert Counter(found) == Counter(DELIVERED + EARLY + OVERDUE + SOON + NOT_TAKEN + LATER)
        return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store whose timer is 30 days ahead."""
    made = Store(tmp_path / "s")
    made.fill()
    return made


def test_repair_lets_waiting_messages_come_at_their_time(store: Store) -> None:
    assert store.delivered() == DELIVERED + EARLY
    plan = plan_repair(store.root)
    assert [step.action for step in plan.steps] == ["clock", "clock"], plan
    assert sorted(step.path.rpartition("/")[2] for step in plan.steps) == ["commitlog", "timercheck"]

    repaired = repair(plan)

    assert repaired.report.is_healthy, str(repaired.report)
    assert not [one for one in repaired.report.findings if "clock" in one.what]
    assert plan_repair(store.root).is_empty
    assert store.delivered() == DELIVERED + EARLY, "the repair itself delivers nothing"
    store.deliver_all()
    assert check(store.root).count("damage") == 0


def test_tick_without_a_repair_delivers_no_waiting_message(store: Store) -> None:
    store.tick(store.begin_ms + 2 * HOUR_MS)
    assert store.delivered() == DELIVERED + EARLY


def test_repair_puts_many_messages_back_in_several_commits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticker, "COMMIT_MESSAGES", 2)
    assert repair(store.root).report.is_healthy
    store.deliver_all()


def test_repair_beside_a_running_scheduler_lets_it_deliver(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    with DeliveryScheduler(str(store.root), SETTINGS) as ticks:
        store.fill()
        ticks.tick(wall_clock_ms())
        repair(store.root)
        now_ms = wall_clock_ms() + 5 * SECOND
        for _ in range(4):
            now_ms += SECOND
            ticked = ticks.tick(now_ms)
            assert ticked.problem is None, ticked.problem
        assert Counter(store.delivered()) == Counter(DELIVERED + EARLY + OVERDUE)
        assert ticked.next_due_ms is not None
        assert now_ms < ticked.next_due_ms <= store.begin_ms + HOUR_MS + SECOND
    store.deliver_all()


def test_repair_times_out_while_a_scheduler_delivers(store: Store) -> None:
    before = TimerCheckFile(str(store.root), Disk()).read()
    turn = FileLock(str(store.root / "rmq/delivery/turn"), only_writers=True)
    assert turn.try_take()
    try:
        with pytest.raises(LockTimeoutError, match="another program delivers"):
            repair(store.root)
    finally:
        turn.release()
    assert TimerCheckFile(str(store.root), Disk()).read() == before
    assert repair(store.root).report.is_healthy
    store.deliver_all()


def test_plan_repair_leaves_a_damaged_timer(store: Store) -> None:
    path = next((store.root / "timerlog").iterdir())
    data = bytearray(path.read_bytes())
    data[4:12] = b"\x7f" * 8  # the position of the previous entry
    path.write_bytes(data)
    steps = {step.path.rpartition("/")[2]: step.action for step in plan_repair(store.root).steps}
    assert steps["timercheck"] == "leave"


def crash_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, points: int, begin: int = 0) -> None:
    """Set a timer back, and repair again from each state that a crash could have left."""
    monkeypatch.setattr(ticker, "COMMIT_MESSAGES", 3)
    store = Store(tmp_path / "live/s")
    store.fill()
    repair_times(store.root)
    disk = CrashDisk(store.root.parent)
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "Disk", lambda: disk)
        assert repair(store.root).report.is_healthy
    step = max(disk.effect_count // points, 1) if points else PARTS
    for point in range(begin, disk.effect_count + 1, step):
        for number, image in enumerate(disk.images(point, seed, subset_count=1)):
            target = tmp_path / "image"
            shutil.rmtree(target, ignore_errors=True)
            image.write_to(target)
            left = Store(target / "s", store.begin_ms)
            with monkeypatch.context() as patch:
                if "power cut" in str(image):
                    patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
                try:
                    if number % 2:  # a scheduler ticks before the repair
                        left.tick(wall_clock_ms() + 2 * SECOND)
                    elif (left.root / "abort").exists():  # a commit is incomplete: a writer completes it
                        finisher = IntentRollForward(str(left.root), Disk(), wall_clock_ms)
                        StoreWriter(str(left.root), Disk(), SETTINGS, wall_clock_ms, time.sleep, [finisher]).close()
                    repair(left.root)
                    report = check(left.root)
                    assert not [one for one in report.findings if "clock" in one.what], str(report)
                    assert report.count("damage") == 0, str(report)
                    left.deliver_all()
                except (AssertionError, Exception) as error:
                    raise AssertionError(f"{image}: {error!r}") from error


def repair_times(root: Path) -> None:
    """Set only the store times back: `test_repair_clock.py` tests crashes of that."""
    plan = plan_repair(root)
    only = tuple(step for step in plan.steps if step.path.endswith("commitlog"))
    repair(type(plan)(plan.path, plan.commit_log_path, plan.report, only, plan.stamp))


@pytest.mark.slow
def test_repair_survives_a_crash_at_some_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_everywhere(tmp_path, monkeypatch, 1, POINTS_IN_DEFAULT_SUITE)


@pytest.mark.torture
@pytest.mark.parametrize("part", range(PARTS))
def test_repair_survives_a_crash_at_every_system_call(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_everywhere(tmp_path, monkeypatch, 2, 0, part)
