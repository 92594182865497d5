"""Timer messages in one store, under our ticks and a real broker alternately: each arrives once, not early."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from compat_kit import our_stores
from compat_kit.rocketmq import Broker, Client, Java

import rmq_spark
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.format.timer import TIMER_FILE_BYTES

pytestmark = pytest.mark.compat

TOPIC, QUEUES = "timed", 3
CONF = our_stores.broker_conf() | {"timerWheelEnable": True, "mappedFileSizeTimerLog": TIMER_FILE_BYTES}
STEP_MS, BURST = 200, 8  # BURST messages every STEP_MS: each crash falls among the messages of one second
now_ms = wall_clock_ms


def wait_until(moment_ms: int) -> None:
    time.sleep(max(moment_ms - now_ms(), 0) / 1000)


class Shared:
    """A store, and the due time of each message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.due_ms: dict[str, int] = {}
        with our_stores.open_small(path) as writer:
            writer.create_topic(TOPIC, QUEUES)

    def _next(self, begin_ms: int, end_ms: int, step_ms: int, name: str) -> list[tuple[str, int]]:
        new = [
            (f"{name} {moment} {number}", moment)
            for moment in range(begin_ms, end_ms, step_ms)
            for number in range(BURST)
        ]
        self.due_ms.update(new)
        return new

    def we_send(self, begin_ms: int, end_ms: int) -> None:
        """Have messages wait for moments in a span, by our writer."""
        with our_stores.open_small(self.path) as writer:
            for number, (text, moment) in enumerate(self._next(begin_ms, end_ms, STEP_MS, "ours")):
                writer.send(TOPIC, text, queue_id=number % QUEUES, deliver_at_ms=moment)

    def they_send(self, client: Client, begin_ms: int, end_ms: int) -> None:
        """Have messages wait for moments in a span, by a producer."""
        for number, (text, moment) in enumerate(self._next(begin_ms, end_ms, 5 * STEP_MS, "theirs")):
            client("produce", topic=TOPIC, text=text, queueId=number % QUEUES, deliverTimeMs=moment)

    def we_tick_until(self, moment_ms: int) -> int:
        """Deliver due messages with our scheduler; return their number."""
        count = 0
        with DeliveryScheduler(str(self.path)) as ticker:
            while True:
                tick = ticker.tick(now_ms())
                assert tick.problem is None
                count += tick.delivered
                if now_ms() > moment_ms:
                    return count
                time.sleep(0.1)

    def delivered(self) -> list[tuple[str, int]]:
        """Return text and store time (ms) of the delivered messages."""
        found = []
        with rmq_spark.open_reader(str(self.path)) as reader:
            reader.refresh()
            for queue in reader.queues(TOPIC):
                bounds = reader.bounds(queue)
                columns = ["body", "storeTimestamp"]
                for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, columns):
                    found += [
                        (bytes(row["body"]).decode(), int(row["storeTimestamp"].timestamp() * 1000))
                        for row in batch.to_pylist()
                    ]
        return found

    def check(self, until_ms: int) -> None:
        """Assert that the messages due by `until_ms` arrived once and not early, and no others."""
        found = self.delivered()
        counts = Counter(text for text, _ in found)
        assert [text for text, count in counts.items() if count > 1] == []
        assert {text for text, moment in self.due_ms.items() if moment < until_ms} - counts.keys() == set()
        assert counts.keys() - self.due_ms.keys() == set()
        assert [text for text, stored in found if stored < self.due_ms[text]] == []


def broker_until(shared: Shared, java: Java, end: str, act: Callable[[Client], int]) -> None:
    """Have a broker on the store until the moment that `act` gives; then it stops, or is killed."""
    with Broker(java, shared.path, **CONF) as broker, Client(broker) as client:
        wait_until(act(client))
        if end == "kill":
            broker.kill()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_waits_is_delivered_once_by_us_then_a_broker_then_us(
    end: str, run_java: Callable[[str], Java], tmp_path: Path
) -> None:
    java, shared = run_java("5.3.3"), Shared(tmp_path / "store")
    start = now_ms() + 3_000
    shared.we_send(start, start + 60_000)
    assert shared.we_tick_until(start + 3_500) > 0
    shared.check(start + 2_000)

    ours = len(shared.delivered())

    def act(client: Client) -> int:
        shared.they_send(client, now_ms() + 3_000, now_ms() + 25_000)
        return now_ms() + 3_700

    broker_until(shared, java, end, act)
    theirs = len(shared.delivered())
    shared.check(0)
    shared.we_tick_until(max(shared.due_ms.values()) + 2_000)
    assert ours < theirs < len(shared.due_ms)
    shared.check(now_ms())
