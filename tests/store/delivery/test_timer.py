"""The timer: when and in which order messages are delivered, deletions, and the files on disk."""

import gzip
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.timer_rig import SECOND, START_MS, TimerRig, properties_of, waiting
from support.timer_twin import TimerTwin, TwinMessage

from rmq_spark.store.delivery import timer_files, timer_intake
from rmq_spark.store.delivery import timer_state as timer_chains
from rmq_spark.store.delivery.delay_source import Outlook
from rmq_spark.store.delivery.timer import TimerStore
from rmq_spark.store.delivery.timer_files import TimerCheckFile, TimerLog, TimerWheel
from rmq_spark.store.delivery.timer_state import read_chains
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.timer import TIMER_UNIT, TIMER_UNIT_BYTES, WHEEL_BYTES, WINDOW_MS, are_entries, due_times
from rmq_spark.store.testing.sample_message import SampleMessage

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "timer"
DAY = 86_400 * SECOND
TIMER_TOPIC = "rmq_sys_wheel_timer"
usual = settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight entries and a filler in each file of the timer log."""
    monkeypatch.setattr(timer_files, "TIMER_FILE_BYTES", 436)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TimerRig]:
    made = TimerRig(tmp_path / "store")
    yield made
    made.writer.release()


def at(rig: TimerRig, offset_ms: int) -> None:
    rig.clock.now_ms = START_MS + offset_ms
    rig.tick()


def test_timer_delivers_in_the_due_second_and_not_before(rig: TimerRig) -> None:
    rig.append(waiting(1, START_MS + 3000), waiting(2, START_MS + 3001), waiting(3, START_MS + 2999))
    for offset_ms, expected in ((0, []), (2999, []), (3000, [3, 1]), (3999, [3, 1]), (4000, [3, 1, 2])):
        at(rig, offset_ms)
        assert sorted(rig.delivered()) == sorted(expected), offset_ms
    assert rig.timer.refresh(START_MS + 4000, rig.note).next_due_ms is None


def test_timer_keeps_the_order_within_a_second(rig: TimerRig) -> None:
    rig.append(*(waiting(number, START_MS + 5000, queue_id=number % 2) for number in range(30)))
    at(rig, 0)
    rig.append(*(waiting(number, START_MS + 5000, queue_id=number % 2) for number in range(30, 40)))
    at(rig, 5000)
    assert rig.delivered() == list(range(0, 40, 2))
    assert rig.delivered(queue_id=1) == list(range(1, 40, 2))


def test_timer_adds_two_times_to_the_properties(rig: TimerRig) -> None:
    rig.append(waiting(1, START_MS + 3000, TAGS="t", TIMER_ENQUEUE_MS="1", a="b"))
    at(rig, 500)
    at(rig, 4321)
    original, made = rig.records(TIMER_TOPIC)[0], rig.records()[0]
    times = {"TIMER_ENQUEUE_MS": str(START_MS), "TIMER_DEQUEUE_MS": str(START_MS + 4321)}
    assert properties_of(made) == properties_of(original) | times
    assert (made.body, made.born_timestamp) == (original.body, original.born_timestamp)


def test_timer_delivers_an_overdue_message_with_the_next_second(rig: TimerRig) -> None:
    rig.append(waiting(1, START_MS + 2000))
    at(rig, 8500)
    assert rig.delivered() == [1]
    rig.append(waiting(2, START_MS + 1000), waiting(3, START_MS + 8000))
    at(rig, 9000)
    assert rig.delivered() == [1, 2, 3]


@pytest.mark.parametrize("jump_days", [3, 400])
def test_timer_days_ahead_of_the_clock(rig: TimerRig, caplog: pytest.LogCaptureFixture, jump_days: int) -> None:
    rig.append(waiting(1, START_MS + 2000))
    at(rig, 5000)
    at(rig, jump_days * DAY)
    rig.append(waiting(2, START_MS + jump_days * DAY + 2000))
    at(rig, jump_days * DAY)
    at(rig, 6000)
    rig.append(waiting(3, START_MS + 10_000), waiting(4, START_MS + (jump_days + 1) * DAY))
    rig.reopen()
    at(rig, 20_000)
    assert f"is {jump_days * DAY // SECOND - 21} s ahead of this clock" in caplog.text
    for part in range(1, jump_days * 2):
        at(rig, part * DAY // 2)
    assert rig.delivered() == [1]
    at(rig, jump_days * DAY)
    assert rig.delivered() == [1, 3]
    at(rig, jump_days * DAY + 2000)
    assert rig.delivered() == [1, 3, 2]
    at(rig, (jump_days + 1) * DAY)
    assert rig.delivered() == [1, 3, 2, 4]
    assert len(rig.records(TIMER_TOPIC)) == 4


def test_timer_rolls_a_message_beyond_the_window(rig: TimerRig) -> None:
    due_ms = START_MS + WINDOW_MS + DAY
    rig.append(waiting(1, due_ms), waiting(2, START_MS + WINDOW_MS + 3600 * SECOND))
    for offset_ms in range(0, WINDOW_MS + DAY, DAY // 4):
        at(rig, offset_ms)
    assert rig.delivered() == [2]
    rolled = [properties_of(record) for record in rig.records(TIMER_TOPIC)[2:]]
    assert [(one["UNIQ_KEY"], one["TIMER_ROLL_TIMES"]) for one in rolled] == [("K00002", "1"), ("K00001", "1")]
    at(rig, WINDOW_MS + DAY - 1)
    assert rig.delivered() == [2]
    at(rig, WINDOW_MS + DAY)
    assert rig.delivered() == [2, 1]
    assert "TIMER_ROLL_TIMES" in properties_of(rig.records()[1])


@pytest.mark.parametrize("key", ["T+K00001", "K00001"])
def test_timer_deletes_by_topic_and_key_or_by_key(rig: TimerRig, key: str) -> None:
    rig.append(waiting(1, START_MS + 3000), waiting(2, START_MS + 3000), waiting(4, START_MS + 9000))
    rig.append(waiting(3, START_MS + 3000, TIMER_DEL_UNIQKEY=key))
    rig.append(waiting(5, START_MS + 3000, TIMER_DEL_UNIQKEY="K00004"))
    at(rig, 10_000)
    assert rig.delivered() == [2, 4]  # the last one deletes nothing: only one of its own second could be deleted


def test_timer_skips_and_logs_what_cannot_be_delivered(rig: TimerRig, caplog: pytest.LogCaptureFixture) -> None:
    odd = [
        SampleMessage(TIMER_TOPIC, 0, b"00001", properties={"REAL_TOPIC": "T", "REAL_QID": "0"}),
        SampleMessage(TIMER_TOPIC, 0, b"00002", properties={"TIMER_OUT_MS": "x", "REAL_TOPIC": "T", "REAL_QID": "0"}),
        SampleMessage(TIMER_TOPIC, 0, b"00003", properties={"TIMER_OUT_MS": str(START_MS)}),
        waiting(4, START_MS + 2000, topic="no/topic"),
        waiting(5, START_MS + 2000, topic=TIMER_TOPIC),
        waiting(6, START_MS + 2000, REAL_QID="-1"),
    ]
    rig.append(*odd, waiting(7, START_MS + 2000))
    with caplog.at_level(logging.WARNING):
        at(rig, 5000)
    assert rig.delivered() == [7]
    assert "TIMER_OUT_MS" in caplog.text
    assert "REAL_TOPIC" in caplog.text
    assert not rig.timer.refresh(START_MS + 5000, rig.note).has_work


def test_timer_skips_an_entry_of_a_replaced_message(rig: TimerRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.append(waiting(1, START_MS + 3000), waiting(2, START_MS + 9000))
    at(rig, 0)
    file = rig.root / "timerlog" / ("0" * 20)
    units = np.frombuffer(file.read_bytes()[: 2 * TIMER_UNIT_BYTES], TIMER_UNIT).copy()
    units["physical_offset"][0] = units["physical_offset"][1]
    with file.open("r+b") as opened:
        opened.write(units.tobytes())
    at(rig, 8999)
    assert rig.delivered() == []
    assert (
        "1 due messages of rmq_sys_wheel_timer are not delivered: they wait elsewhere, or for a later second"
        in caplog.text
    )
    at(rig, 9000)
    assert rig.delivered() == [2]


@pytest.mark.parametrize("place", [0, 1])
def test_timer_skips_a_queue_entry_of_another_message(
    rig: TimerRig, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    other = waiting(7, START_MS + 3000)
    rig.append(waiting(0, START_MS + 3000), SampleMessage("U", 0, other.body, properties=other.properties))
    rig.append(waiting(1, START_MS + 3000))
    file = rig.root / "consumequeue" / TIMER_TOPIC / "0" / ("0" * 20)
    units = bytearray(file.read_bytes())
    source = [units[:20], (rig.root / "consumequeue/U/0" / ("0" * 20)).read_bytes()[:20]][place]
    units[20:40] = source  # the first message again, or one of another queue
    file.write_bytes(units)
    at(rig, 5000)
    assert rig.delivered() == [0]
    assert "it belongs to another queue or queue offset" in caplog.text
    assert not rig.timer.refresh(rig.clock.now_ms, rig.note).has_work


def test_timer_delivers_full_properties_unchanged(rig: TimerRig) -> None:
    made = waiting(1, START_MS + 2000)
    full = waiting(1, START_MS + 2000, filler="f" * (32767 - len(made.properties_text) - len("filler") - 2))
    assert len(full.properties_text) == 32767
    rig.append(full)
    at(rig, 5000)
    assert rig.records()[0].properties == full.properties_text


def test_timer_delivers_a_second_in_parts(rig: TimerRig) -> None:
    rig.append(*(waiting(number, START_MS + 2000) for number in range(100)))
    rig.clock.now_ms = START_MS
    rig.prepare()
    rig.clock.now_ms = START_MS + 3000
    rig.prepare()
    due = rig.timer.take(rig.clock.now_ms, 1 << 24, 37)
    assert sum(map(len, due.records)) == 37
    with rig.writer.section() as section:
        section.append(due.records[0])
    rig.note.update(due.metadata)
    rig.prepare()
    log, wheel = TimerLog(str(rig.root), Disk()), TimerWheel(str(rig.root), Disk())
    left = read_chains(log, wheel.slots_from(START_MS - 9 * SECOND))
    assert len(left) == 63
    assert int(left.entries["previous_position"][0]) == -1
    rig.reopen()
    assert rig.tick(room_count=10) == 7
    assert rig.delivered() == list(range(100))


def test_timer_eleven_days_without_a_round(rig: TimerRig) -> None:
    rig.append(*(waiting(number, START_MS + (number + 2) * SECOND) for number in range(20)))
    rig.prepare()
    rig.clock.now_ms += 13 * DAY
    rig.append(waiting(20, START_MS + 14 * DAY), waiting(21, START_MS + DAY))
    rig.tick(room_count=7)
    assert rig.delivered() == [*range(20), 21]
    at(rig, 14 * DAY)
    assert rig.delivered()[-1] == 20


def test_timer_reads_little_and_writes_nothing_while_idle(rig: TimerRig) -> None:
    rig.append(*(waiting(number, START_MS + 60_000 + number * SECOND) for number in range(50)))
    at(rig, 0)
    before = (rig.root / "config" / "timercheck").read_bytes()
    at(rig, 30_000)
    assert (rig.root / "config" / "timercheck").read_bytes() == before
    assert rig.timer.refresh(START_MS + 30_000, rig.note).next_due_ms == START_MS + 60_000


def test_timer_creates_no_files_without_messages(rig: TimerRig) -> None:
    rig.append(SampleMessage("T", 0, b"1"))
    at(rig, 1000)
    rig.prepare()
    assert not (rig.root / "timerwheel").exists()
    assert not (rig.root / "config" / "timercheck").exists()


def test_timer_log_files_expire_with_their_messages(rig: TimerRig) -> None:
    rig.append(*(waiting(number, START_MS + 2000, body=b"%05d" % number) for number in range(300)))
    at(rig, 5000)
    before = len(list((rig.root / "timerlog").iterdir()))
    with rig.writer.section() as section:
        section.expire(max_bytes=0)
    rig.append(waiting(301, START_MS + 20_000))
    at(rig, 6000)
    assert len(list((rig.root / "timerlog").iterdir())) < before
    at(rig, 20_000)
    assert rig.delivered()[-1] == 301


def test_timer_reads_a_brokers_files() -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        shutil.copytree(GOLDEN, root)
        (root / "timerwheel").write_bytes(gzip.decompress((root / "timerwheel.gz").read_bytes()))
        assert (root / "timerwheel").stat().st_size == WHEEL_BYTES
        check = TimerCheckFile(str(root), Disk()).read()
        assert check is not None
        log, wheel = TimerLog(str(root), Disk()), TimerWheel(str(root), Disk())
        parts = list(log.scan(0))
        assert sum(len(units) for _, units in parts) == check.queue_offset == 12
        assert int(parts[-1][0][-1]) + TIMER_UNIT_BYTES == check.log_position
        everything = wheel.slots_from(0)
        chains = read_chains(log, everything)
        assert sorted(chains.positions.tolist()) == sorted(p for part, _ in parts for p in part.tolist())
        assert are_entries(chains.entries).all()
        assert (due_times(chains.entries) == chains.times).all()


SENT = st.lists(
    st.tuples(
        # Seconds from now: mostly a few, some far away.
        st.integers(0, 3).flatmap(lambda kind: st.integers(-5, 12) if kind else st.integers(-40, 300_000)),
        st.sampled_from([0, 0, 0, 1, 2, 5]),  # how many messages earlier the one that it deletes is, if any
    ),
    max_size=12,
)
PASSED_MS = st.sampled_from([0, 300, 1000, 2500, 7000, 3_600_000, DAY])


class Pair:
    """The timer and its twin, with the same messages."""

    def __init__(self, root: Path, room_count: int) -> None:
        self.rig, self.twin, self.room_count = TimerRig(root), TimerTwin(), room_count
        self.count, self.expected = 0, list[TwinMessage]()

    def send(self, sent: list[tuple[int, int]]) -> None:
        """Have messages in the queue of both, and tick."""
        samples, new = [], []
        for seconds, before in sent:
            deliver_ms = self.rig.clock.now_ms + seconds * SECOND + 500
            deletes = f"T+K{max(self.count - before, 0):05d}" if before else None
            samples.append(
                waiting(self.count, deliver_ms, **({} if deletes is None else {"TIMER_DEL_UNIQKEY": deletes}))
            )
            out_ms = (deliver_ms - 1) // SECOND * SECOND
            new.append(TwinMessage(self.count, out_ms, f"T+K{self.count:05d}", deletes))
            self.count += 1
        if samples:
            self.rig.append(*samples)
        self.tick(new)

    def tick(self, new: list[TwinMessage]) -> None:
        """Have both deliver what is due; the twin takes `new` first."""
        self.rig.tick(room_count=self.room_count)
        while True:
            for message in new:
                self.twin.take(message, self.rig.clock.now_ms)
            self.expected += self.twin.due(self.rig.clock.now_ms)
            new, self.twin.put_back = self.twin.put_back, []
            if not new:
                return

    def check(self) -> None:
        """Compare what came, in which order, how often it was put back, and when the next one comes."""
        records = self.rig.records()
        assert [int(record.body) for record in records] == [message.number for message in self.expected]
        rolls = [int(properties_of(record).get("TIMER_ROLL_TIMES", 0)) for record in records]
        assert rolls == [message.rolls for message in self.expected]
        outlook = self.rig.timer.refresh(self.rig.clock.now_ms, self.rig.note)
        assert outlook.next_due_ms == min((second + SECOND for second in self.twin.seconds), default=None)


@pytest.mark.slow
@usual
@given(
    steps=st.lists(st.tuples(SENT, PASSED_MS), min_size=1, max_size=7),
    room_count=st.integers(1, 9),
    follows=st.sampled_from([None, 0, 1, 16]),  # None: spans are read
    reopens=st.booleans(),
)
def test_timer_agrees_with_the_twin(
    steps: list[tuple[list[tuple[int, int]], int]], room_count: int, follows: int | None, reopens: bool
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer_files, "TIMER_FILE_BYTES", 436)
        patch.setattr(timer_intake, "_BATCH_ENTRIES", 5)
        if follows is not None:
            patch.setattr(timer_chains, "_SMALL_SPAN_BYTES", -(1 << 30))
            patch.setattr(timer_chains, "_FEW_CHAINS", follows)
        pair = Pair(Path(folder) / "store", room_count)
        for sent, passed_ms in steps:
            pair.send(sent)
            pair.rig.clock.now_ms += passed_ms
            if reopens:
                pair.rig.reopen()
            pair.tick([])
        pair.check()


def test_wheel_cache_follows_others_without_reading_the_whole_wheel(
    rig: TimerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.append(waiting(1, START_MS + 2000), waiting(2, START_MS + WINDOW_MS + DAY), waiting(3, START_MS + DAY))
    at(rig, 0)
    other = TimerStore(str(rig.root), (str(rig.root / "commitlog"),), rig.disk)
    assert other.refresh(rig.clock.now_ms, rig.note).next_due_ms == START_MS + 2000
    asked: list[int | None] = []
    slots_from = TimerWheel.slots_from

    def see(wheel: TimerWheel, begin_ms: int, end_ms: int | None = None) -> object:
        asked.append(None if end_ms is None else end_ms - begin_ms)
        return slots_from(wheel, begin_ms, end_ms)

    at(rig, 2000)
    rig.append(waiting(4, START_MS + 7000), waiting(5, START_MS + 2000 + WINDOW_MS))
    at(rig, 3000)
    monkeypatch.setattr(TimerWheel, "slots_from", see)
    assert other.refresh(rig.clock.now_ms, rig.note).next_due_ms == START_MS + 7000
    assert all(one is not None and one < WINDOW_MS + DAY for one in asked)
    monkeypatch.setattr(TimerWheel, "slots_from", slots_from)
    fresh = TimerStore(str(rig.root), (str(rig.root / "commitlog"),), rig.disk)
    assert fresh.refresh(rig.clock.now_ms, rig.note) == other.refresh(rig.clock.now_ms, rig.note)
    known = [store._wheel_cache._cached for store in (fresh, other)]
    assert known[0] is not None
    assert known[1] is not None
    assert known[0][1].tolist() == known[1][1].tolist()


def test_timer_continues_after_another_process_deleted_log_files(rig: TimerRig) -> None:
    numbers = range(30)
    rig.append(*(waiting(number, START_MS + 3_600_000 + number * SECOND) for number in numbers))
    at(rig, 0)
    other = TimerStore(str(rig.root), (str(rig.root / "commitlog"),), rig.disk)
    assert not other.refresh(rig.clock.now_ms, rig.note).has_work
    at(rig, 3_615_000)
    for _ in range(4):
        rig.append(*(SampleMessage("U", 0, b"x" * 900) for _ in range(60)))
    for path in sorted((rig.root / "commitlog").iterdir())[:2]:
        path.unlink()
    rig.append(waiting(99, START_MS + 3_617_000))
    at(rig, 3_615_000)
    assert not (rig.root / "timerlog" / ("0" * 20)).exists()
    rig.timer = other
    at(rig, 3_640_000)
    assert rig.delivered()[-1] == 99


def test_timer_skips_a_second_without_entries(rig: TimerRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.append(waiting(1, START_MS + 3000), waiting(2, START_MS + 60_000))
    at(rig, 0)
    file = rig.root / "timerlog" / ("0" * 20)
    with file.open("r+b") as opened:
        opened.write(bytes(TIMER_UNIT_BYTES))
    at(rig, 5000)
    assert rig.note["timer.read"] == START_MS + 3000
    assert "1 by the wheel's count, are not delivered" in caplog.text
    rig.reopen()
    assert rig.timer.refresh(rig.clock.now_ms, rig.note) == Outlook(next_due_ms=START_MS + 60_000)
    at(rig, 60_000)
    assert rig.delivered() == [2]
