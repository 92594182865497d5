"""Retention keeps waiting messages until they are delivered or a day overdue, and logs their loss."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.timer_rig import waiting

from rmq_spark.store.delivery.scheduler import DeliveryRound
from rmq_spark.store.errors import DamageError, RmqError, StoreError, StorePathError
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.retention import Expired, RetentionHold
from rmq_spark.store.names import TIMER_TOPIC
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.tools.repair import repair

if TYPE_CHECKING:
    from tests.store.delivery.conftest import Kit

Wait = Callable[..., SampleMessage]
EachFailure = Callable[..., Iterator[tuple[str, object]]]
DAY_MS = 86_400_000
HOUR_MS = 3_600_000


def fill(kit: "Kit") -> None:
    """Append seven segments of messages that are not delayed."""
    kit.put(*(SampleMessage("U", 0, b"x" * 500) for _ in range(90)))


def expire(kit: "Kit") -> Expired:
    """Expire all segments but the last, as far as retention allows."""
    with kit.writer() as writer, writer.section() as section:
        return section.expire(max_bytes=1)


def test_retention_keeps_messages_of_a_level_until_delivered(kit: "Kit", wait: Wait) -> None:
    fill(kit)
    kit.put(wait(18, "two hours"))
    fill(kit)
    gone = expire(kit)
    assert gone.segments > 0
    assert gone.held_bytes > 0
    assert gone.held_by == str(Path(kit.root, "config/delayOffset.json"))
    assert expire(kit).segments == 0
    kit.now_ms += 2 * HOUR_MS
    assert kit.tick() == DeliveryRound(1, None)
    assert kit.messages() == {0: ["two hours"]}
    assert expire(kit).held_by is None


@pytest.mark.parametrize("is_taken", [False, True])
def test_retention_keeps_messages_of_the_timer_until_delivered(kit: "Kit", is_taken: bool) -> None:
    fill(kit)
    kit.put(waiting(7, kit.now_ms + DAY_MS))
    if is_taken:
        assert kit.tick().delivered == 0
    fill(kit)
    kit.now_ms += DAY_MS // 2
    gone = expire(kit)
    assert gone.segments > 0
    assert gone.held_by == str(Path(kit.root, "config/timercheck"))
    kit.now_ms += DAY_MS // 2
    assert kit.tick().delivered == 1
    assert kit.messages() == {0: ["00007"]}
    fill(kit)
    assert expire(kit).held_by is None


def test_retention_keeps_a_rolled_message(kit: "Kit") -> None:
    """Three days ahead: it is put back into its queue meanwhile."""
    kit.put(waiting(7, kit.now_ms + 3 * DAY_MS))
    for _ in range(6):
        kit.tick()
        fill(kit)
        expire(kit)
        kit.now_ms += DAY_MS // 2
    assert kit.messages() == {}
    assert kit.tick().delivered == 1
    assert kit.messages() == {0: ["00007"]}


def test_retention_deletes_what_is_overdue_for_a_day_and_logs_it(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    kit.put(wait(1, "a"), wait(1, "b"), waiting(1, kit.now_ms + 1000))
    assert kit.tick().delivered == 0
    fill(kit)
    kit.now_ms += DAY_MS
    assert expire(kit).segments == 0
    kit.now_ms += 2000
    assert expire(kit).held_by is None
    assert kit.tick().delivered == 0
    assert "delay level 1: 2 messages of SCHEDULE_TOPIC_XXXX/0 that were not delivered are no longer in" in caplog.text
    assert "1 due messages of rmq_sys_wheel_timer are not delivered: they have expired or cannot be read" in caplog.text


def test_retention_deletes_timer_messages_not_taken_for_days(kit: "Kit", caplog: pytest.LogCaptureFixture) -> None:
    kit.put(*(waiting(1, kit.now_ms + 1000) for _ in range(160)))
    fill(kit)
    kit.now_ms += 4 * DAY_MS
    assert expire(kit).segments == 0
    kit.now_ms += 1000
    gone = expire(kit)
    assert gone.segments > 0
    assert gone.held_by is None
    assert kit.tick().delivered == 0
    assert "100 messages of rmq_sys_wheel_timer/0 that were not delivered are no longer in the log" in caplog.text
    assert "60 messages of rmq_sys_wheel_timer/0, which wait for a time, cannot be delivered" in caplog.text


def lose(path: Path) -> None:
    """Remove a folder."""
    shutil.rmtree(path)


def empty(path: Path) -> None:
    """Remove the files of a queue, or of all queues of a topic; folders stay."""
    for found in path.rglob("0*"):
        if found.is_file():
            found.unlink()


def spoil(path: Path, fill: bytes = b"\xff") -> None:
    """Write over the first unit of the first file in a folder."""
    with next(found for found in sorted(path.rglob("0*")) if found.is_file()).open("r+b") as file:
        file.write(fill * 52 if path.name == "timerlog" else fill * 20)


def blank(path: Path) -> None:
    """Write zeros over the first unit."""
    spoil(path, b"\0")


LEVELS, TIMER, LOG = "consumequeue/SCHEDULE_TOPIC_XXXX", "consumequeue/rmq_sys_wheel_timer", "timerlog"
HARMS = [lose, empty, spoil, blank]


def waits(kit: "Kit", wait: Wait, where: str, count: int) -> None:
    """Have messages wait in the queue of a level, in that of the timer, or in the timer log; fill segments."""
    with kit.writer() as writer, writer.section() as section:
        section.ensure_topic(TIMER_TOPIC, 1)
    kit.put(*((wait(18, "two hours") if where == LEVELS else waiting(1, kit.now_ms + DAY_MS)) for _ in range(count)))
    if where == LOG:
        assert kit.tick().delivered == 0
    fill(kit)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("where", [LEVELS, TIMER, LOG])
def test_retention_deletes_nothing_if_files_are_lost_or_damaged(
    kit: "Kit", wait: Wait, where: str, harm: Callable[[Path], None], count: int
) -> None:
    waits(kit, wait, where, count)
    harm(Path(kit.root, where))
    segments = os.listdir(f"{kit.root}/commitlog")
    with pytest.raises(DamageError, match=r"Retention deletes nothing before .* `rmq (repair|check)`"):
        expire(kit)
    assert os.listdir(f"{kit.root}/commitlog") == segments


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("where", [LEVELS, TIMER])
def test_retention_after_a_repair(kit: "Kit", wait: Wait, where: str, harm: Callable[[Path], None]) -> None:
    waits(kit, wait, where, 3)
    harm(Path(kit.root, where))
    assert repair(kit.root).report.is_healthy
    assert expire(kit).held_bytes > 0
    kit.now_ms += DAY_MS
    assert kit.tick().delivered == 3


@pytest.mark.parametrize("where", [LEVELS, TIMER])
def test_retention_finds_a_lost_queue_in_the_log(kit: "Kit", wait: Wait, where: str) -> None:
    waits(kit, wait, where, 1)
    lose(Path(kit.root, where))
    Path(kit.root, "rmq/queues").unlink()
    with pytest.raises(DamageError, match="has had messages, and its files are missing"):
        expire(kit)


def test_retention_with_a_lost_wheel(kit: "Kit", wait: Wait) -> None:
    waits(kit, wait, LOG, 1)
    Path(kit.root, "timerwheel").unlink()
    assert expire(kit).held_by == f"{kit.root}/config/timercheck"


def test_retention_with_a_timer_check_that_is_ahead(kit: "Kit", wait: Wait) -> None:
    waits(kit, wait, LOG, 1)
    path = Path(kit.root, "config/timercheck")
    page = path.read_bytes()
    path.write_bytes((kit.now_ms + 9 * DAY_MS).to_bytes(8, "big") + page[8:])
    assert expire(kit).held_by == str(path)
    path.write_bytes(page[:16] + (2).to_bytes(8, "big") + page[24:])
    with pytest.raises(DamageError, match="queue offset of the timer beyond the end of its queue"):
        expire(kit)
    path.write_bytes(page)
    assert expire(kit).held_by == str(path)


def test_retention_accepts_a_torn_timer_entry(kit: "Kit", wait: Wait) -> None:
    waits(kit, wait, LOG, 1)
    with next(Path(kit.root, LOG).iterdir()).open("r+b") as file:
        file.seek(52)
        file.write(b"\0\0\0\x34\xff")
    assert expire(kit).held_by == f"{kit.root}/config/timercheck"
    kit.now_ms += DAY_MS + 1000
    assert kit.tick().delivered == 1
    assert expire(kit).held_by is None


def test_retention_compares_overdue_entries_with_their_messages(kit: "Kit", wait: Wait) -> None:
    waits(kit, wait, LEVELS, 1)
    with Path(kit.root, LEVELS, "17", "0" * 20).open("r+b") as file:
        file.seek(12)
        file.write((1).to_bytes(8, "big"))
    with pytest.raises(DamageError, match="a time after its message was stored"):
        expire(kit)


def test_retention_ignores_damage_after_everything_was_delivered(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "a"))
    kit.now_ms += 2000
    assert kit.tick().delivered == 1
    fill(kit)
    assert expire(kit).segments > 0


def test_retention_by_settings_logs_damage_once(kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    waits(kit, wait, LEVELS, 1)
    with kit.writer() as writer:
        writer.set_retention(None, 1)
        spoil(Path(kit.root, LEVELS))
        for _ in range(3):
            with writer.section() as section:
                kit.append(section, [SampleMessage("U", 0, b"x")])
            kit.now_ms += HOUR_MS
    told = [record.message for record in caplog.records if "entry of queue SCHEDULE_TOPIC_XXXX/17" in record.message]
    assert len(told) == 1
    assert "Run `rmq repair`" in told[0]


def test_retention_stops_at_a_stray_file_in_the_timer_log(kit: "Kit") -> None:
    kit.put(waiting(1, kit.now_ms + DAY_MS))
    kit.tick()
    fill(kit)
    Path(kit.root, "timerlog", "garbage").write_bytes(b"x")
    with pytest.raises(DamageError, match="Retention deletes nothing before"):
        expire(kit)


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", ["level", "timer", "taken"])
def test_retention_does_not_take_unreadable_files_for_empty(
    kit: "Kit", wait: Wait, each_failure: EachFailure, kind: str, error: int
) -> None:
    kit.put(wait(18, "two hours") if kind == "level" else waiting(1, kit.now_ms + DAY_MS))
    if kind == "taken":
        assert kit.tick().delivered == 0
    fill(kit)

    def ask() -> object:
        return RetentionHold(kit.root, CommitLog((f"{kit.root}/commitlog",), mapped=False), kit.clock).needed_from()

    needed = ask()
    assert needed is not None
    for hit, outcome in each_failure(kit.root, error, ask):
        if isinstance(outcome, RmqError):
            assert isinstance(outcome, StoreError), hit
            assert kit.root in str(outcome), hit
        else:
            assert outcome == needed, hit


def test_retention_deletes_nothing_while_a_folder_cannot_be_read(
    kit: "Kit", wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.put(wait(18, "two hours"))
    fill(kit)
    folder, real = f"{kit.root}/consumequeue/SCHEDULE_TOPIC_XXXX/17", os.scandir
    segments = os.listdir(f"{kit.root}/commitlog")

    def refuse(path: str) -> object:
        if path == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorePathError, match=f"{folder} cannot be listed: Permission denied"):
        expire(kit)
    assert os.listdir(f"{kit.root}/commitlog") == segments
    monkeypatch.undo()
    assert expire(kit).held_by == f"{kit.root}/config/delayOffset.json"
    kit.now_ms += 2 * HOUR_MS
    assert kit.tick().delivered == 1


def test_retention_hold_is_cached_while_nothing_is_delivered(kit: "Kit", monkeypatch: pytest.MonkeyPatch) -> None:
    kit.put(waiting(1, kit.now_ms + DAY_MS))
    kit.tick()
    fill(kit)
    asked = []
    with kit.writer() as writer:
        taken = writer._retention_hold._in_timer_log
        monkeypatch.setattr(writer._retention_hold, "_in_timer_log", lambda *given: asked.append(1) or taken(*given))
        for _ in range(3):
            with writer.section() as section:
                assert section.expire(max_bytes=1).held_bytes > 0
    assert asked == [1]
