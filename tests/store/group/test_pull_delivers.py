"""A pull delivers the messages that are due, before it reads and while it waits."""

import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.client.pull_consumer import PullConsumer
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import PullStatus

QUEUE = QueueKey("T", 0)
LEVELS = "0s 10s 1h"


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with the topic T, and a table in which level 1 does not wait at all."""
    with rmq_spark.open_store(
        tmp_path / "store", segment_bytes=1 << 20, queues=1, message_delay_level=LEVELS
    ) as opened:
        opened.create_topic("T", 1)
        opened.send("T", "first")
    return str(tmp_path / "store")


def send(store: str, body: str, level: int) -> None:
    with rmq_spark.open_store(store) as opened:
        opened.send("T", body, delay_level=level)


def bodies(found: object) -> list[bytes]:
    return [row["body"] for row in found.messages.to_pylist()]  # type: ignore[attr-defined]


def test_a_pull_finds_what_is_due(store: str) -> None:
    send(store, "due", 1)
    send(store, "not yet", 3)
    with rmq_spark.open_consumer(store) as consumer:
        assert bodies(consumer.pull(QUEUE, 0)) == [b"first", b"due"]


def test_looking_at_queues_delivers_nothing(store: str) -> None:
    send(store, "due", 1)
    with rmq_spark.open_consumer(store) as consumer:
        assert consumer.max_offset(QUEUE) == 1
        assert consumer.topics()
        assert consumer.queues("T") == [QUEUE]


def test_a_pull_that_waits_ends_when_something_is_due(store: str) -> None:
    """The clock advances only while sleeping, and messages become due by it."""
    send(store, "ten seconds late", 2)
    begun_ms = wall_clock_ms()
    napped: list[float] = []

    def now_ms() -> float:
        return sum(napped)

    def nap(seconds: float) -> None:
        napped.append(seconds * 1000)

    ticker = DeliveryScheduler(store, sleep=time.sleep, clock_ms=lambda: begun_ms + int(now_ms()))
    with PullConsumer(store, scheduler=ticker, now_ms=now_ms, sleep=nap) as consumer:
        found = consumer.pull_block_if_not_found(QUEUE, 1, timeout_ms=20_000)
    assert bodies(found) == [b"ten seconds late"]
    assert 5_000 < now_ms() < 10_200


def test_what_is_sent_to_a_pull_that_waits_is_due_before_what_was_there(store: str) -> None:
    """The ticker is asked again when something came: what came may be due first."""
    answers, asked = iter([60_000.0, None]), count()
    slept: list[float] = []

    class Asked:
        def tick_now(self) -> float | None:
            next(asked)
            return next(answers, None)

        def close(self) -> None:
            pass

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            with rmq_spark.open_store(store) as opened:
                opened.send("other", "x")
        if len(slept) > 50:
            with Producer.__enter__(rmq_spark.open_store(store)) as opened:
                opened.send("T", "end", queue_id=0)

    with PullConsumer(store, scheduler=Asked(), now_ms=lambda: 0.0, sleep=sleep) as consumer:
        found = consumer.pull_block_if_not_found(QUEUE, 1, timeout_ms=1000)
    assert found.pull_status is PullStatus.FOUND
    assert next(asked) == 3, "before the wait, and each time that something came"


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_consumer_that_is_closed_closes_what_delivers(
    store: str, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(DeliveryScheduler, "close", lambda ticker: closed.append(ticker.path))
    with nullcontext() if error is None else pytest.raises(error), rmq_spark.open_consumer(store) as consumer:
        consumer.pull(QUEUE, 0)
        assert closed == []
        if error is not None:
            raise error
    assert closed == [store]
