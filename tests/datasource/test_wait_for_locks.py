"""LockWait: a pause of a second each, until the time is over."""

import pytest

from rmq_spark.datasource.spark.lock_wait import LockWait
from rmq_spark.store.model import QueueKey

A0, A1 = QueueKey("a", 0, "broker-a"), QueueKey("a", 1, "broker-a")


class Clock:
    def __init__(self) -> None:
        self.now_ms = 5.0
        self.is_over = False

    def sleep(self, duration_s: float) -> None:
        self.now_ms += duration_s * 1000

    def wait(self) -> LockWait:
        return LockWait(lambda: self.now_ms, self.sleep, lambda: self.is_over)


def test_pause_is_a_second_until_70_s_are_over_in_all(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    wait = clock.wait()
    pauses = 0
    while wait.pause([A0, A1]):
        pauses += 1
    assert (pauses, clock.now_ms) == (70, 70_005)
    assert not wait.pause([A1])
    assert clock.now_ms == 70_005
    assert caplog.messages == [
        "rmq: 2 queues, such as a/broker-a:0, are locked by another member, or by an earlier run of this query, whose "
        "locks expire 60 s after its end. The query waits for them, at most 70 s",
        "rmq: 2 queues, such as a/broker-a:0, stay locked by another member",
    ]


def test_messages_about_one_queue_name_it(caplog: pytest.LogCaptureFixture) -> None:
    wait = Clock().wait()
    while wait.pause([A1]):
        pass
    first, last = caplog.messages
    assert first.startswith("rmq: queue a/broker-a:1 is locked by another member, or by an earlier run")
    assert last == "rmq: queue a/broker-a:1 stays locked by another member"


def test_pause_ends_when_nobody_needs_the_result() -> None:
    clock = Clock()
    wait = clock.wait()
    assert wait.pause([A0])
    clock.is_over = True
    assert not wait.pause([A0])
    assert clock.now_ms == 1005
