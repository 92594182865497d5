"""The timer after a broker was stopped or killed: every message is delivered, none twice."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.timer_rig import SECOND, START_MS, TimerRig, properties_of, waiting

from rmq_spark.store.delivery import timer_files
from rmq_spark.store.delivery.timer_files import TimerCheckFile, TimerLog, TimerWheel
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.timer import TIMER_SLOT, TIMER_UNIT_BYTES, slot_numbers
from rmq_spark.store.testing.sample_message import SampleMessage

UNITS = 436


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight entries and a filler in each file of the timer log."""
    monkeypatch.setattr(timer_files, "TIMER_FILE_BYTES", UNITS)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TimerRig]:
    made = TimerRig(tmp_path / "store")
    yield made
    made.writer.release()


def left_by_a_broker(rig: TimerRig, **changed: int) -> None:
    """Write the check as a broker does: with another version, and the `changed` fields."""
    file = TimerCheckFile(str(rig.root), rig.disk)
    check = file.read()
    assert check is not None
    broker = {"version_timestamp": rig.clock.now_ms, "version_counter": check.version_counter + 3}
    file.write(replace(check, **{**broker, **changed}))
    rig.note.clear()  # it is older than the check, or empty
    rig.reopen()


def copy_of(message: SampleMessage) -> SampleMessage:
    """Return what a broker delivers of a message that waited."""
    assert isinstance(message.properties, dict)
    properties = message.properties
    times = {"TIMER_ENQUEUE_MS": str(START_MS), "TIMER_DEQUEUE_MS": str(START_MS + 7)}
    return replace(
        message,
        topic=properties["REAL_TOPIC"],
        queue_id=int(properties["REAL_QID"]),
        properties={**properties, **times},
    )


def sent(count: int, seconds: int = 4) -> list[SampleMessage]:
    return [waiting(number, START_MS + seconds * SECOND) for number in range(count)]


def taken(rig: TimerRig, messages: list[SampleMessage]) -> None:
    rig.append(*messages)
    rig.prepare()


def test_timer_does_not_redeliver_what_a_killed_broker_delivered(rig: TimerRig) -> None:
    messages = sent(10)
    taken(rig, messages)
    rig.clock.now_ms += 5 * SECOND
    rig.append(*(copy_of(message) for message in messages[:4]), SampleMessage("T", 0, b"99"))
    left_by_a_broker(rig)
    rig.clock.now_ms += 2 * SECOND
    rig.tick()
    assert rig.delivered() == [0, 1, 2, 3, 99, 4, 5, 6, 7, 8, 9]


def test_timer_ignores_an_equal_message_before_the_original(rig: TimerRig) -> None:
    messages = sent(3)
    rig.clock.now_ms += 30 * SECOND
    rig.append(copy_of(messages[0]))
    rig.clock.now_ms += 30 * SECOND
    rig.append(*messages)
    rig.tick()
    assert rig.delivered() == [0, 0, 1, 2]


def test_timer_does_not_roll_again_what_a_broker_rolled(rig: TimerRig) -> None:
    message = waiting(1, START_MS + 200_000 * SECOND)
    taken(rig, [message])
    rig.clock.now_ms += 90_000 * SECOND
    assert isinstance(message.properties, dict)
    rig.append(replace(message, properties={**message.properties, "TIMER_ROLL_TIMES": "1"}))
    left_by_a_broker(rig)
    rig.tick()
    assert len(rig.records("rmq_sys_wheel_timer")) == 2
    rig.clock.now_ms = START_MS + 200_001 * SECOND
    rig.tick()
    assert [properties_of(record)["TIMER_ROLL_TIMES"] for record in rig.records()] == ["1"]


def test_timer_finds_entries_that_the_wheel_lacks(rig: TimerRig) -> None:
    taken(rig, sent(5))
    check = TimerCheckFile(str(rig.root), rig.disk).read()
    wheel = TimerWheel(str(rig.root), rig.disk)
    before = wheel.slots_from(START_MS)
    taken(rig, [waiting(number, START_MS + 4 * SECOND) for number in range(5, 20)])
    wheel.write_slots(slot_numbers(before["second"].astype(np.int64) * SECOND), before)  # as the last flush left it
    assert check is not None
    left_by_a_broker(rig, log_position=check.log_position, queue_offset=5, master_queue_offset=5, version_counter=9)
    rig.clock.now_ms += 9 * SECOND
    rig.tick()
    assert rig.delivered() == list(range(20))
    assert sum(len(units) for _, units in TimerLog(str(rig.root), Disk()).scan(0)) == 20


def test_timer_delivers_overdue_messages_without_entries_once(rig: TimerRig) -> None:
    early = sent(3, 60)
    taken(rig, early)
    rig.clock.now_ms += 10 * SECOND
    overdue = [waiting(number, START_MS + 5 * SECOND) for number in range(10, 16)]
    rig.append(*overdue)
    rig.append(*(copy_of(message) for message in overdue[:4]))
    left_by_a_broker(rig, queue_offset=7, master_queue_offset=7, read_time=START_MS + 9 * SECOND)
    rig.clock.now_ms += 2 * SECOND
    rig.tick()
    assert rig.delivered() == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("lost", ["timerwheel", "config/timercheck", "timerlog", "all", "rmq/delivery/timer.json"])
def test_timer_rebuilds_missing_files(rig: TimerRig, lost: str) -> None:
    taken(rig, [*sent(4, 2), *(waiting(number, START_MS + 30 * SECOND) for number in range(4, 20))])
    rig.clock.now_ms += 3 * SECOND
    rig.tick()
    assert rig.delivered() == [0, 1, 2, 3]
    for name in ("timerwheel", "config/timercheck", "timerlog") if lost == "all" else (lost,):
        path = rig.root / name
        for file in path.iterdir() if path.is_dir() else [path]:
            file.unlink()
    rig.reopen()
    rig.tick()
    rig.clock.now_ms += 40 * SECOND
    rig.tick()
    assert sorted(rig.delivered()) == list(range(20))


def test_timer_repairs_slots_beyond_the_logs_end(rig: TimerRig) -> None:
    taken(rig, sent(6))
    log, wheel = TimerLog(str(rig.root), rig.disk), TimerWheel(str(rig.root), rig.disk)
    log.clear_from(3 * TIMER_UNIT_BYTES)  # as a power cut may, under a disk that lies
    stray = np.zeros(1, TIMER_SLOT)
    stray["second"], stray["first_position"], stray["last_position"] = START_MS // SECOND + 50, 5000, 6000
    wheel.write_slots(stray["second"].astype(np.int64) % timer_files.SLOT_COUNT, stray)
    left_by_a_broker(rig)
    rig.clock.now_ms += 9 * SECOND
    rig.tick()
    assert rig.delivered() == list(range(6))
    assert rig.timer.refresh(rig.clock.now_ms, rig.note).next_due_ms is None


def test_timer_takes_a_torn_entrys_message_again(rig: TimerRig) -> None:
    taken(rig, sent(3))
    path = next((rig.root / "timerlog").iterdir())
    data = bytearray(path.read_bytes())
    torn = bytearray(data[2 * TIMER_UNIT_BYTES : 3 * TIMER_UNIT_BYTES])
    torn[28:] = bytes(24)  # no record yet
    data[3 * TIMER_UNIT_BYTES : 7 * TIMER_UNIT_BYTES] = torn * 4
    path.write_bytes(data)
    rig.append(*sent(5)[3:])
    rig.prepare()
    assert sum(len(units) for _, units in TimerLog(str(rig.root), Disk()).scan(0)) == 5
    rig.clock.now_ms += 9 * SECOND
    rig.tick()
    assert rig.delivered() == list(range(5))


def test_timer_wheel_of_another_length_is_damage(rig: TimerRig) -> None:
    taken(rig, sent(3))
    (rig.root / "timerwheel").write_bytes(b"\0" * 100)
    with pytest.raises(DamageError, match="rebuilt from the timer log"):
        rig.tick()
