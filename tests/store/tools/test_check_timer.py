"""`check` of the timer's files beside a writer that sends and delivers messages while they are read."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark import check
from rmq_spark.store import DeliveryScheduler
from rmq_spark.store.delivery.timer_files import TimerLog, TimerWheel
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.tools import check as checking
from rmq_spark.store.tools import check_timer as timer_findings


class TimerWriter:
    """An open store and its scheduler; each `act` sends a message for a later second and delivers due messages."""

    def __init__(self, path: Path) -> None:
        self.now_ms, self.acts = wall_clock_ms(), 0
        self._store = rmq_spark.open_store(path, segment_bytes=1 << 16)
        self._ticker = DeliveryScheduler(str(path))
        self._is_at_it = False

    def act(self) -> None:
        if self._is_at_it:
            return  # the writer calls the patched functions, too
        self._is_at_it = True
        try:
            self.now_ms += 700
            self._store.send("late", b"x" * 3000, deliver_at_ms=self.now_ms + 60_000 + self.acts % 3 * 1000)
            self._ticker.tick(self.now_ms)
            self._store.send("other", b"unsettled")  # a tick marks the shutdown as clean
            self.acts += 1
        finally:
            self._is_at_it = False

    def close(self) -> None:
        self._ticker.close()
        self._store.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TimerWriter]:
    made = TimerWriter(tmp_path / "s")
    for _ in range(3):
        made.act()
    yield made
    made.close()


def after(call: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    """Return `call`, followed by `act` in this thread. The writer has a thread of its own, which calls too."""
    checker = threading.get_ident()

    def called(*values: Any, **named: Any) -> Any:
        answer = call(*values, **named)
        answer = iter(list(answer)) if isinstance(answer, Iterator) else answer
        if threading.get_ident() == checker:
            act()
        return answer

    return called


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (checking, "check_configs"),
        (timer_findings.files, "read_small"),
        (TimerLog, "__init__"),
        (TimerLog, "scan"),
        (TimerLog, "units_at"),
        (TimerWheel, "slots_from"),
    ],
)
def test_check_timer_beside_a_writer_that_acts_after_each_step_is_healthy(
    owner: Any, name: str, writer: TimerWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = writer.acts
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, after(getattr(owner, name), writer.act))
        report = check(tmp_path / "s", sleep=lambda seconds: None)
    assert writer.acts > before, "the writer must act during the check"
    assert [str(one) for one in report.findings if one.severity != "note"] == []
    assert report.state == "live"
