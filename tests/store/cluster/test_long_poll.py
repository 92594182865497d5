"""Held pulls against the tests' brokers."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.long_poll import HeldPulls
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.filter.row_filter import TAG, Expression
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Answer, RunningCluster, faults

RunCluster = Callable[..., RunningCluster]
PULL = RequestCode.PULL_MESSAGE
QUEUES = [QueueKey("orders", number, "broker-a") for number in range(4)]
SOON_MS, LONG_MS = 300.0, 30_000.0


class Driver:
    """Held pulls of a running cluster with the topic `orders`, whose queues are empty."""

    def __init__(self, cluster: RunningCluster, hold_ms: int = 20_000) -> None:
        self.cluster = cluster
        cluster.create_topic("orders")
        self.client = ClusterClient(ClusterAddress(tuple(cluster.address.split(";"))))
        self.held = HeldPulls(self.client, self.address_of, PullTerms("reader"), hold_ms=hold_ms)

    def address_of(self, broker: str) -> str:
        found = self.cluster.brokers[broker]
        if not found.is_running:
            raise BackendUnavailableError(f"no route to {broker}")
        address: str = found.address
        return address

    def send(self, queue_id: int, tags: str = "red", **columns: Any) -> None:
        self.cluster.broker.send("orders", b"body", queue_id=queue_id, tags=tags, **columns)

    def pulls(self) -> list[int]:
        """Return the queue ids of the pulls that the broker has got so far."""
        return [int(one.fields["queueId"]) for one in self.cluster.broker.seen_requests(PULL)]


@pytest.fixture
def start(run_cluster: RunCluster) -> Iterator[Callable[..., Driver]]:
    drivers = []

    def begin(release: str = "5.3", **settings: Any) -> Driver:
        drivers.append(Driver(run_cluster(release=release), **settings))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.held.close()
        driver.client.close()


@pytest.mark.parametrize("release", ["4.9", "5.3"])
def test_wait_ends_when_a_message_arrives(start: Callable[..., Driver], release: str) -> None:
    driver = start(release)
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(SOON_MS) == []
    timer = threading.Timer(0.05, driver.send, (2,))
    timer.start()
    assert driver.held.wait(LONG_MS) == [QUEUES[2]]
    timer.join()


def test_each_queue_has_one_pull_that_is_kept(start: Callable[..., Driver]) -> None:
    driver = start()
    for _ in range(5):
        driver.held.watch(dict.fromkeys(QUEUES, 0))
        assert driver.held.wait(50) == []
    assert sorted(driver.pulls()) == [0, 1, 2, 3]


def test_queue_has_news_until_its_end_is_known(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.send(1)
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(LONG_MS) == [QUEUES[1]]
    assert driver.held.wait(LONG_MS) == [QUEUES[1]]
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(LONG_MS) == [QUEUES[1]]
    driver.held.watch({**dict.fromkeys(QUEUES, 0), QUEUES[1]: 1})
    assert driver.held.wait(SOON_MS) == []
    assert sorted(driver.pulls()) == [0, 1, 1, 1, 2, 3]


def test_an_end_that_the_driver_knows_already_is_no_news(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.held.watch({QUEUES[0]: 0})
    assert driver.held.wait(50) == []
    driver.send(0)
    driver.held.watch({QUEUES[0]: 1})
    assert driver.held.wait(SOON_MS) == []
    assert driver.pulls() == [0, 0]


def test_pulls_are_sent_again_when_their_time_is_over(start: Callable[..., Driver]) -> None:
    driver = start(hold_ms=100)
    driver.held.watch({QUEUES[0]: 0})
    assert driver.held.wait(900) == []
    assert len(driver.pulls()) >= 2
    driver.send(0)
    assert driver.held.wait(LONG_MS) == [QUEUES[0]]


def test_broker_that_does_not_hold_pulls_is_not_asked_without_pause(start: Callable[..., Driver]) -> None:
    driver = start()
    empty = {"suggestWhichBrokerId": "0", "nextBeginOffset": "0", "minOffset": "0", "maxOffset": "0"}
    answer = Answer(ResponseCode.PULL_NOT_FOUND, empty, remark="OFFSET_OVERFLOW_ONE")
    driver.cluster.broker.fail(PULL, lambda call, serve: call.answer(answer))
    driver.held.watch({QUEUES[0]: 0})
    assert driver.held.wait(SOON_MS) == []
    assert driver.pulls() == [0]


def test_messages_that_do_not_match_are_no_news(start: Callable[..., Driver]) -> None:
    driver = start(hold_ms=100)
    driver.held.watch(dict.fromkeys(QUEUES, 0), {"orders": Expression(TAG, "red")})
    assert driver.held.wait(50) == []
    for _ in range(3):
        driver.send(0, "green")
    assert driver.held.wait(1000) == []
    offsets = {one.fields["queueOffset"] for one in driver.cluster.broker.seen_requests(PULL)}
    assert "3" in offsets, "what did not match is not searched again"
    driver.send(0, "red")
    assert driver.held.wait(LONG_MS) == [QUEUES[0]]


@pytest.mark.parametrize("new_port", [False, True])
def test_pulls_survive_a_restart_of_the_broker(start: Callable[..., Driver], new_port: bool) -> None:
    driver = start()
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(50) == []
    driver.cluster.broker.kill()
    assert driver.held.wait(50) == []
    driver.cluster.broker.restart(new_port=new_port)
    driver.send(3)
    assert driver.held.wait(LONG_MS) == [QUEUES[3]]


def test_lost_connections_are_replaced(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(50) == []
    driver.cluster.broker.close_connections()
    driver.send(3)
    assert driver.held.wait(LONG_MS) == [QUEUES[3]]


def test_queues_that_are_watched_no_more_have_no_news(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(50) == []
    driver.held.watch({QUEUES[0]: 0})
    driver.send(3)
    assert driver.held.wait(SOON_MS) == []
    driver.send(0)
    assert driver.held.wait(LONG_MS) == [QUEUES[0]]


def test_a_queue_that_is_shorter_is_news(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.send(0)
    driver.held.watch({QUEUES[0]: 5})
    assert driver.held.wait(LONG_MS) == [QUEUES[0]]


def test_errors_of_the_broker_are_news(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.cluster.broker.settings.is_readable = False
    for _ in range(2):
        driver.held.watch({QUEUES[0]: 0})
        assert driver.held.wait(LONG_MS) == [QUEUES[0]]
        driver.held.watch({QUEUES[0]: 0})
        assert driver.held.wait(SOON_MS) == [], "the next pull is sent after a pause"
    assert len(driver.pulls()) == 2


def test_brokers_that_are_away_are_looked_up_once_for_all_their_queues(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.cluster.broker.kill()
    lookups = []
    address_of = driver.held._broker_address
    driver.held._broker_address = lambda broker: lookups.append(broker) or address_of(broker)
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(SOON_MS) == []
    assert lookups == ["broker-a"]


def test_the_same_ends_again_cost_no_look_at_all_queues(start: Callable[..., Driver]) -> None:
    driver = start()
    ends = CountedEnds(dict.fromkeys(QUEUES, 0))
    for _ in range(3):
        driver.held.watch(ends)
        assert driver.held.wait(1.0) == []
    assert ends.looks == 1
    driver.send(2)
    assert driver.held.wait(LONG_MS) == [QUEUES[2]]
    driver.held.watch(ends)  # nobody has read the message: its queue is looked at again
    assert driver.held.wait(LONG_MS) == [QUEUES[2]]


class CountedEnds(dict[QueueKey, int]):
    """A mapping that counts how often all of its items are looked at."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_a_pull_that_has_ended_after_its_queue_was_left_is_ignored(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.held.watch(dict.fromkeys(QUEUES, 0))
    assert driver.held.wait(1.0) == []
    driver.send(0)
    while not any(ticket.is_done for ticket in driver.held._tickets):
        driver.client.wait(list(driver.held._tickets), SOON_MS)
    driver.held.watch({QUEUES[1]: 0})
    assert driver.held.wait(SOON_MS) == []


def test_nothing_is_watched(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.held.watch({})
    assert driver.held.wait(20) == []


def test_a_reset_is_stored_and_is_news(start: Callable[..., Driver]) -> None:
    driver = start()
    fields = {"suggestWhichBrokerId": "0", "nextBeginOffset": "7", "maxOffset": "0", "minOffset": "0"}
    reset = Answer(ResponseCode.PULL_OFFSET_MOVED, fields, b"", "OFFSET_RESET")
    driver.send(0)
    driver.cluster.broker.fail(PULL, faults.changed(lambda _: reset), times=1)
    driver.held.watch({QUEUES[0]: 0})
    assert driver.held.wait(LONG_MS) == [QUEUES[0]]
    (commit,) = driver.cluster.broker.seen_requests(RequestCode.UPDATE_CONSUMER_OFFSET)
    assert (commit.fields["commitOffset"], commit.fields["consumerGroup"]) == ("7", "reader")
