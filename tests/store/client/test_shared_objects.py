"""Objects shared by threads: Producer, PullConsumer and DeliveryScheduler run one call at a time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.errors import StoreError
from rmq_spark.store.log import write_session as section
from rmq_spark.store.model import QueueKey
from rmq_spark.store.synchronized import Synchronized, synchronized

THREADS, SENDS = 6, 40


def in_threads(work: Callable[[int], None], count: int = THREADS) -> list[BaseException]:
    """Run `work` in threads at once, each with its number; return what they raised."""
    raised: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def bodies(store: Path) -> list[str]:
    with rmq_spark.open_reader(store) as reader:
        reader.refresh()
        found: list[str] = []
        for queue in reader.queues("orders"):
            bounds = reader.bounds(queue)
            for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, ["body"]):
                found += [bytes(body).decode() for body in batch.column("body").to_pylist()]
        return found


def test_producer_shared_by_threads_keeps_every_acknowledged_message(tmp_path: Path) -> None:
    store, acknowledged = rmq_spark.open_store(tmp_path / "s"), []

    def send(number: int) -> None:
        for at in range(SENDS):
            store.send("orders", f"{number}.{at}")
            acknowledged.append(f"{number}.{at}")

    assert in_threads(send) == []
    store.close()
    assert len(acknowledged) == THREADS * SENDS
    assert sorted(bodies(tmp_path / "s")) == sorted(acknowledged)
    assert rmq_spark.check(tmp_path / "s").is_healthy


def test_producer_shared_by_threads_is_closed_between_two_calls(tmp_path: Path) -> None:
    store, acknowledged = rmq_spark.open_store(tmp_path / "s"), []

    def send_all(number: int) -> None:
        for at in range(10_000):
            store.send("orders", f"{number}.{at}")
            acknowledged.append(f"{number}.{at}")

    def send(number: int) -> None:
        if number == 0:
            while len(acknowledged) < THREADS:
                time.sleep(0.001)
            store.close()
            return
        with pytest.raises(StoreError, match="was closed"):
            send_all(number)

    assert in_threads(send) == []
    assert sorted(bodies(tmp_path / "s")) == sorted(acknowledged)
    assert rmq_spark.check(tmp_path / "s").is_healthy


def test_pull_consumer_shared_by_threads_pulls_sends_and_commits(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "s") as store:
        for at in range(SENDS):
            store.send("orders", str(at), queue_id=at % 4)
    consumer = rmq_spark.open_consumer(tmp_path / "s", "billing")
    pulled: list[str] = []

    def consume(number: int) -> None:
        if number >= 4:
            for at in range(SENDS):
                consumer.send("others", f"{number}.{at}")
            return
        queue, offset = QueueKey("orders", number), 0
        while offset < SENDS // 4:
            found = consumer.pull(queue, offset, 1)
            pulled.extend(bytes(body).decode() for body in found.messages.column("body").to_pylist())
            offset = found.next_begin_offset
            consumer.update_consume_offset(queue, offset)
            consumer.commit()

    assert in_threads(consume) == []
    consumer.close()
    assert sorted(pulled) == sorted(map(str, range(SENDS)))
    assert set(rmq_spark.group_offsets(tmp_path / "s", "billing")["orders"].values()) == {SENDS // 4}
    assert rmq_spark.check(tmp_path / "s").is_healthy


def test_pull_block_if_not_found_allows_other_calls_while_it_waits(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "s") as store:
        store.send("orders", "first", queue_id=0)
    consumer, answers = rmq_spark.open_consumer(tmp_path / "s", "billing"), []

    def use(number: int) -> None:
        if number == 0:
            found = consumer.pull_block_if_not_found(QueueKey("orders", 0), 1, timeout_ms=60_000)
            answers.append(bytes(found.messages.column("body")[0].as_py()).decode())
        else:
            consumer.send("orders", "second", queue_id=0)  # without this the other thread waits for its time-out

    assert in_threads(use, 2) == []
    assert answers == ["second"]
    consumer.close()


def test_delivery_scheduler_shared_by_threads_delivers_each_message_once(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "s") as store:
        for at in range(SENDS):
            store.send("orders", str(at), delay_level=1)
    later_ms = time.time_ns() // 1_000_000 + 60_000  # noqa: TID251
    delivered: list[int] = []
    with DeliveryScheduler(str(tmp_path / "s")) as ticker:
        assert in_threads(lambda _: delivered.append(ticker.tick(later_ms).delivered)) == []
    assert sum(delivered) == SENDS
    assert sorted(bodies(tmp_path / "s")) == sorted(map(str, range(SENDS)))


class Probe(Synchronized):
    """Counts the threads inside, and the times that locks were released."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.most = self.released = 0

    @synchronized
    def call(self, pause_s: float) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(pause_s)
        self.inside -= 1

    def _release_locks(self) -> None:
        self.released += 1


def test_synchronized_lets_one_thread_in_at_a_time() -> None:
    probe = Probe()
    assert in_threads(lambda _: probe.call(0.01)) == []
    assert (probe.most, probe.released) == (1, THREADS)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_synchronized_does_not_hang_in_a_child_forked_meanwhile() -> None:
    probe = Probe()
    thread = threading.Thread(target=probe.call, args=(0.5,))
    thread.start()
    while not probe.inside:
        time.sleep(0.001)
    child = os.fork()
    if not child:
        probe.call(0)
        os._exit(0)
    thread.join()
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    assert ended[1] == 0


@pytest.mark.parametrize("name", ["send", "settle", "close"])
def test_synchronized_refuses_a_signal_handler_inside_a_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, refused = rmq_spark.open_store(tmp_path / "s"), []
    store.send("orders", "first")

    def handle(*_: object) -> None:
        with pytest.raises(StoreError, match="this thread is inside another call of the same object") as raised:
            getattr(store, name)(*(("orders", "from the handler") if name == "send" else ()))
        refused.append(raised)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        append = section.WriteSession.append
        with monkeypatch.context() as patch:
            patch.setattr(
                section.WriteSession, "append", lambda *given: (signal.raise_signal(signal.SIGUSR1), append(*given))[1]
            )
            store.send("orders", "second")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    store.send("orders", "third")
    store.close()
    assert sorted(bodies(tmp_path / "s")) == ["first", "second", "third"]
    assert rmq_spark.check(tmp_path / "s").is_healthy
