"""A reader of a cluster whose brokers and name servers come and go, against servers in this process."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.queue_answers import DELETION_MS, LOWER_END_MS
from rmq_spark.store.cluster.requests import ClusterInfoRequest, Request, RouteRequest
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, OffsetRangeError, OptionError
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import Away, Forbidden, Gone, QueueAnswer, QueueBounds, QueueKey, QueueRange
from rmq_spark.store.testing.brokers import Answer, RunningCluster, faults

A, B = "broker-a", "broker-b"
releases = pytest.mark.parametrize("release", ["5.3", "4.9"])


@dataclass
class Reader:
    """A backend whose clock the test moves. `seconds` is the time since its begin."""

    cluster: RunningCluster
    options: dict[str, object] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        options = {"request_timeout_ms": 500, **self.options}
        self.address = ClusterAddress(parse_name_servers(self.cluster.address), **options)  # type: ignore[arg-type]
        self.backend = ClusterBackend(
            self.address, lambda: 1_700_000_000_000 + int(self.seconds * 1000), lambda: self.seconds * 1000
        )

    def answer(self, queue: QueueKey) -> QueueAnswer:
        return self.backend.bounds([queue])[queue]

    def look(self, queue: QueueKey, after_s: float = 1.0) -> QueueAnswer:
        self.seconds += after_s
        self.backend.refresh()
        return self.answer(queue)

    def look_until_back(self, queue: QueueKey, after_s: float = 1.0) -> QueueAnswer:
        """Look again and again, because nobody waits for a broker that was away. The clock stands still meanwhile."""
        answer = self.look(queue, after_s)
        for _ in range(500):
            if not isinstance(answer, Away):
                break
            answer = self.look(queue, 0.0)
        return answer


Start = Callable[..., Reader]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a cluster with the topic orders, two queues for each broker, and a reader."""
    with closing(_Started(tmp_path)) as started:
        yield started.start


class _Started:
    def __init__(self, folder: Path) -> None:
        self.folder, self.readers = folder, list[Reader]()
        self.clusters: list[RunningCluster] = []

    def start(self, release: str = "5.3", brokers: int = 2, name_servers: int = 1, **options: object) -> Reader:
        folder = self.folder / f"cluster{len(self.clusters)}"
        cluster = RunningCluster(folder, release=release, brokers=brokers, name_servers=name_servers)
        self.clusters.append(cluster)
        cluster.create_topic("orders", queues=2)
        self.readers.append(Reader(cluster, options))
        return self.readers[-1]

    def close(self) -> None:
        for reader in self.readers:
            reader.backend.close()
        for cluster in self.clusters:
            cluster.close()


def queue_of(broker: str = A, queue_id: int = 0, topic: str = "orders") -> QueueKey:
    return QueueKey(topic, queue_id, broker)


def send(reader: Reader, count: int, broker: str = A, queue_id: int = 0) -> None:
    reader.cluster.send("orders", *[b"%d" % n for n in range(count)], broker=broker, queue_id=queue_id)


# Routes, and requests.


def test_topics_leave_out_the_names_of_clusters_and_brokers(start: Start) -> None:
    topics = start().backend.topics()
    assert "orders" in topics
    assert not {"DefaultCluster", A, B} & set(topics)
    assert topics == sorted(topics)


def test_queues_of_all_brokers_are_found_with_any_name_server(start: Start) -> None:
    reader = start(name_servers=2)
    reader.cluster.name_servers[0].forget(A)
    expected = [queue_of(A, 0), queue_of(A, 1), queue_of(B, 0), queue_of(B, 1)]
    assert reader.backend.queues(["orders"]) == {"orders": expected}


def test_refresh_costs_one_request_for_each_broker_and_topic(start: Start) -> None:
    reader = start()
    reader.cluster.create_topic("payments", queues=3)
    queues = [queue for found in reader.backend.queues(["orders", "payments"]).values() for queue in found]
    assert len(reader.backend.bounds(queues)) == 10
    reader.backend.refresh()
    reader.cluster.clear_requests()
    assert not reader.backend.refresh()
    assert reader.cluster.clear_requests() == {name: {RequestCode.GET_TOPIC_STATS_INFO: 2} for name in (A, B)}


def test_refresh_asks_for_routes_every_30_seconds(start: Start) -> None:
    reader = start()
    reader.backend.topics()
    reader.answer(queue_of())
    reader.cluster.clear_requests()
    reader.look(queue_of(), 29.0)
    assert "name servers" not in reader.cluster.clear_requests()
    reader.cluster.create_topic("orders", queues=3)
    reader.cluster.create_topic("payments")
    reader.seconds += 1.5
    assert reader.backend.refresh()
    assert len(reader.backend.queues(["orders"])["orders"]) == 6
    assert "payments" in reader.backend.topics()


def test_queues_of_many_topics_need_one_request_for_each(start: Start) -> None:
    reader = start(brokers=1)
    names = [f"topic{number}" for number in range(30)]
    for name in names:
        reader.cluster.create_topic(name, queues=1)
    reader.backend.topics()
    reader.cluster.clear_requests()
    assert len(reader.backend.queues(names)) == 30
    assert reader.cluster.clear_requests()["name servers"][RequestCode.GET_ROUTEINFO_BY_TOPIC] == 30


def test_unknown_topic_is_not_found_by_queues(start: Start) -> None:
    reader = start()
    with pytest.raises(NotFoundError, match='no name server has a route of topic "absent"'):
        reader.backend.queues(["absent"])
    assert reader.backend.queues(["absent"], missing_ok=["absent"]) == {}


def test_topic_with_a_namespace_is_shown_without_it(start: Start) -> None:
    reader = start(namespace="shop")
    reader.cluster.create_topic("shop%orders", queues=1, brokers=[A])
    reader.cluster.send("shop%orders", b"x", broker=A, queue_id=0)
    assert reader.backend.topics()[-1] == "orders" or "orders" in reader.backend.topics()
    assert reader.backend.queues(["orders"])["orders"] == [queue_of(A, 0)]
    assert reader.answer(queue_of()) == QueueBounds(0, 1)
    assert len(reader.backend.positions([(queue_of(), 0)])) == 1


# What cannot be read.


def test_static_topics_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = start()
    with pytest.raises(OptionError, match="light message queue"):
        reader.backend.queues(["%LMQ%orders"])
    reader.cluster.create_topic("compacted", attributes={"cleanup.policy": "COMPACTION"})
    with pytest.raises(OptionError, match="topic compacted has cleanup"):
        reader.backend.bounds(reader.backend.queues(["compacted"])["compacted"])


def test_topic_without_read_permission_is_forbidden(start: Start) -> None:
    reader = start()
    reader.cluster.brokers[A].set_topic("orders", perm=2)
    assert isinstance(reader.answer(queue_of(A)), Forbidden)
    assert reader.answer(queue_of(B)) == QueueBounds(0, 0)


@pytest.mark.parametrize("code", [3, 16])
def test_bounds_come_from_pulls_without_the_right_to_ask_for_them(start: Start, code: int) -> None:
    reader = start()
    send(reader, 5, queue_id=1)
    remark = "User:reader has no permission to access Topic:orders" if code == 16 else "not supported"
    for broker in reader.cluster.brokers.values():
        broker.fail(RequestCode.GET_TOPIC_STATS_INFO, faults.with_code(code, remark))
    assert (reader.answer(queue_of(A, 0)), reader.answer(queue_of(A, 1))) == (QueueBounds(0, 0), QueueBounds(0, 5))
    send(reader, 3, queue_id=1)
    reader.cluster.clear_requests()
    assert reader.look(queue_of(A, 1)) == QueueBounds(0, 8)
    assert reader.cluster.clear_requests()[A] == {RequestCode.PULL_MESSAGE: 2}, "one pull for each queue"
    reader.cluster.brokers[A].fail(RequestCode.PULL_MESSAGE, faults.with_code(16, "has no permission to access"))
    assert isinstance(reader.look(queue_of(A, 1)), Forbidden)


def test_broker_that_is_asked_by_pulls_is_found_again(start: Start) -> None:
    reader = start()
    broker = reader.cluster.brokers[A]
    broker.fail(RequestCode.GET_TOPIC_STATS_INFO, faults.with_code(3, "not supported"))
    assert reader.answer(queue_of(A)) == QueueBounds(0, 0)
    broker.kill()
    assert isinstance(reader.look(queue_of(A)), Away)
    broker.restart()
    assert reader.look_until_back(queue_of(A)) == QueueBounds(0, 0)


# Brokers that go away.


@releases
def test_broker_that_dies_is_away_until_it_is_back(start: Start, release: str) -> None:
    reader = start(release)
    send(reader, 5)
    queues = reader.backend.queues(["orders"])["orders"]
    assert reader.answer(queue_of(A)) == QueueBounds(0, 5)
    reader.cluster.brokers[A].kill()
    away = reader.look(queue_of(A))
    assert isinstance(away, Away)
    assert (away.broker, away.since_ms) == (A, 1_700_000_001_000)
    assert A in away.reason
    assert reader.answer(queue_of(B)) == QueueBounds(0, 0), "the others go on"
    assert reader.backend.queues(["orders"])["orders"] == queues
    assert reader.look(queue_of(A), 100.0) == away
    reader.cluster.brokers[A].restart(new_port=True)
    assert reader.look_until_back(queue_of(A), 6.0) == QueueBounds(0, 5)


def test_broker_that_is_frozen_delays_only_the_first_look(start: Start) -> None:
    reader = start()
    reader.answer(queue_of(A))
    reader.cluster.brokers[A].freeze()
    assert isinstance(reader.look(queue_of(A)), Away)
    assert reader.backend.catalog._requests._open == {}, "this look waited for the deadline"
    reader.look(queue_of(A))
    assert len(reader.backend.catalog._requests._open) == 1, "this one did not"
    assert isinstance(reader.answer(queue_of(A)), Away)
    reader.cluster.brokers[A].thaw()
    assert reader.look_until_back(queue_of(A)) == QueueBounds(0, 0)


def test_broker_that_no_name_server_lists_is_still_asked(start: Start) -> None:
    reader = start()
    reader.answer(queue_of(A))
    reader.cluster.name_servers[0].restart()
    send(reader, 2)
    assert reader.look(queue_of(A), 31.0) == QueueBounds(0, 2)
    assert reader.backend.queues(["orders"])["orders"][0] == queue_of(A)


def test_name_servers_that_are_away_do_not_stop_a_reader(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    reader = start()
    reader.answer(queue_of(A))
    reader.cluster.name_servers[0].kill()
    send(reader, 2)
    with caplog.at_level(logging.WARNING, "rmq_spark"):
        assert reader.look(queue_of(A), 31.0) == QueueBounds(0, 2)
        assert reader.look(queue_of(A), 31.0) == QueueBounds(0, 2)
    assert len([one for one in caplog.messages if "no name server" in one]) == 1


def test_name_servers_that_are_away_at_first_are_an_error(start: Start) -> None:
    reader = start()
    reader.cluster.name_servers[0].kill()
    with pytest.raises(BackendUnavailableError, match="name server"):
        reader.backend.queues(["orders"])


def test_queue_of_a_broker_that_was_never_seen_is_away(start: Start) -> None:
    answer = start().answer(queue_of("broker-x", 3))
    assert isinstance(answer, Away)
    assert "broker-x" in answer.reason


def test_retired_broker_is_left_out_and_asked_only_for_its_last_bounds(start: Start) -> None:
    reader = start(retired_brokers=(B,))
    send(reader, 3, B)
    assert {queue.broker for queue in reader.backend.queues(["orders"])["orders"]} == {A}
    reader.answer(queue_of(A))
    reader.cluster.clear_requests()
    reader.backend.refresh()
    assert B not in reader.cluster.clear_requests()
    assert reader.answer(queue_of(B)) == QueueBounds(0, 3)


def test_broker_address_replaces_the_one_in_the_route(start: Start) -> None:
    reader = start()
    broker = reader.cluster.brokers[A]
    broker.advertise("192.0.2.1:10911")
    reader.backend.close()
    reader.options["broker_addresses"] = ((A, broker.address),)
    reader.__post_init__()
    assert reader.answer(queue_of(A)) == QueueBounds(0, 0)


def test_address_that_another_broker_has_taken_is_not_believed(start: Start) -> None:
    reader = start()
    send(reader, 3, B)
    reader.cluster.brokers[A].advertise(reader.cluster.brokers[B].address)
    answer = reader.answer(queue_of(A))
    assert isinstance(answer, Away)
    assert B in answer.reason


# Deletion, loss, failover.


def test_deleted_topic_is_gone_after_a_second_reply(start: Start) -> None:
    reader = start()
    reader.answer(queue_of(A))
    reader.cluster.delete_topic("orders")
    assert isinstance(reader.look(queue_of(A)), Away)
    assert isinstance(reader.look(queue_of(A), DELETION_MS / 1000), Gone)


@releases
def test_broker_with_an_older_store_has_lost_messages(start: Start, release: str, tmp_path: Path) -> None:
    reader = start(release)
    send(reader, 3)
    older = reader.cluster.brokers[A].copy_store(tmp_path / "older")
    send(reader, 2)
    assert reader.answer(queue_of(A)) == QueueBounds(0, 5)
    reader.cluster.brokers[A].replace_store(older)
    assert isinstance(reader.look(queue_of(A)), Away)
    assert reader.look(queue_of(A), LOWER_END_MS / 1000) == QueueBounds(0, 3)


@releases
def test_broker_with_another_store_has_replaced_its_queues(start: Start, release: str, tmp_path: Path) -> None:
    reader = start(release)
    send(reader, 5)
    assert len(reader.backend.positions([(queue_of(A), 4)])) == 1
    broker = reader.cluster.brokers[A]
    broker.stop()
    assert isinstance(reader.look(queue_of(A)), Away)
    broker.replace_store(tmp_path / "new")
    broker.restart()
    send(reader, 9)
    gone = reader.look_until_back(queue_of(A))
    assert isinstance(gone, Gone)
    assert "replaced" in gone.reason


@releases
def test_broker_that_is_back_has_the_same_records(start: Start, release: str) -> None:
    reader = start(release)
    send(reader, 5)
    reader.backend.positions([(queue_of(A), 4)])
    reader.cluster.brokers[A].kill()
    assert isinstance(reader.look(queue_of(A)), Away)
    reader.cluster.brokers[A].restart()
    assert reader.look_until_back(queue_of(A)) == QueueBounds(0, 5)


def test_acting_master_lags_and_loses_nothing(start: Start) -> None:
    reader = start()
    send(reader, 3)
    reader.answer(queue_of(A))
    slave = reader.cluster.add_slave(A)
    send(reader, 2)
    assert reader.look(queue_of(A)) == QueueBounds(0, 5)
    reader.cluster.brokers[A].stop()
    slave.act_as_master()
    reader.look_until_back(queue_of(A), 6.0)
    for _ in range(3):
        assert reader.look(queue_of(A), 20.0) == QueueBounds(0, 5)


@releases
def test_shrunk_queue_is_frozen_at_its_end(start: Start, release: str) -> None:
    reader = start(release)
    send(reader, 4, queue_id=1)
    assert reader.answer(queue_of(A, 1)) == QueueBounds(0, 4)
    reader.cluster.brokers[A].set_topic("orders", read_queues=1)
    assert reader.look(queue_of(A, 1), 31.0) == QueueBounds(4, 4)
    assert queue_of(A, 1) in reader.backend.queues(["orders"])["orders"]


# Expiry.


@releases
def test_expired_queue_begins_at_its_end(start: Start, release: str) -> None:
    """A broker of 4.9 goes on replying with the old minimum."""
    reader = start(release)
    send(reader, 6)
    assert reader.answer(queue_of(A)) == QueueBounds(0, 6)
    reader.cluster.brokers[A].expire("orders", 0, 6, keeps_minimum=release == "4.9")
    assert reader.look(queue_of(A)) == QueueBounds(6, 6)
    assert reader.look(queue_of(A)) == QueueBounds(6, 6)


def test_expired_message_of_which_a_broker_answers_any_bytes_is_expired(start: Start) -> None:
    """As a broker of 4.9 does for the first message of its log."""
    reader = start("4.9", brokers=1)
    send(reader, 6)
    assert reader.answer(queue_of()) == QueueBounds(0, 6)
    broker = reader.cluster.broker
    broker.expire("orders", 0, 6, keeps_minimum=True)
    fields = {"suggestWhichBrokerId": "0", "nextBeginOffset": "1", "minOffset": "0", "maxOffset": "6"}
    found = Answer(0, fields, bytes(200), remark="FOUND")
    broker.fail(RequestCode.PULL_MESSAGE, faults.changed(lambda answer: found))
    with pytest.raises(OffsetRangeError) as error:
        list(reader.backend.read(QueueRange(queue_of(), 0, 6), ["queueOffset"], DecodeLimits(), None))
    assert error.value.min_offset == 6
    assert reader.answer(queue_of()) == QueueBounds(6, 6)


def test_name_server_with_an_old_route_is_not_the_only_one_that_is_asked(start: Start) -> None:
    reader = start(brokers=1, name_servers=2)
    send(reader, 3)
    assert reader.answer(queue_of()) == QueueBounds(0, 3)
    first = reader.cluster.name_servers[0]
    reader.cluster.broker.kill()
    first.freeze()  # it does not see that the broker comes back
    reader.cluster.broker.restart(new_port=True)
    first.thaw()
    answers = [reader.look(queue_of(), 6.0) for _ in range(4)]
    assert answers[-1] == QueueBounds(0, 3)


def test_deletion_is_not_believed_because_of_an_old_reply(start: Start) -> None:
    reader = start(brokers=1)
    send(reader, 3)
    assert reader.answer(queue_of()) == QueueBounds(0, 3)
    reader.cluster.broker.fail(RequestCode.GET_TOPIC_STATS_INFO, faults.with_code(17), times=1)
    assert isinstance(reader.look(queue_of()), Away)
    reader.cluster.broker.freeze()
    for _ in range(4):
        assert isinstance(reader.look(queue_of()), Away)
    reader.cluster.broker.thaw()
    assert reader.look_until_back(queue_of()) == QueueBounds(0, 3)


def test_broker_that_is_replaced_between_two_looks_is_noticed(start: Start, tmp_path: Path) -> None:
    reader = start()
    for queue_id in (0, 1):
        send(reader, 5, queue_id=queue_id)
        reader.look(queue_of(A))
        assert reader.backend.positions([(queue_of(A, queue_id), 4)])
    assert reader.look(queue_of(A)) == QueueBounds(0, 5)
    broker = reader.cluster.brokers[A]
    broker.kill()
    broker.replace_store(tmp_path / "new")
    broker.restart()
    for queue_id in (0, 1):
        send(reader, 9, queue_id=queue_id)
    reader.look(queue_of(A))
    for queue_id in (0, 1):
        gone = reader.answer(queue_of(A, queue_id))
        assert isinstance(gone, Gone)
        assert "replaced" in gone.reason


def test_new_connection_to_the_same_broker_costs_one_look_for_all_queues(start: Start) -> None:
    reader = start(brokers=1)
    for queue_id in (0, 1):
        send(reader, 5, queue_id=queue_id)
        reader.look(queue_of(A))
        assert reader.backend.positions([(queue_of(A, queue_id), 4)])
    reader.look(queue_of(A))
    reader.cluster.broker.close_connections()
    reader.cluster.clear_requests()
    assert reader.look(queue_of(A)) == QueueBounds(0, 5)
    assert reader.cluster.clear_requests()[A] == {RequestCode.GET_TOPIC_STATS_INFO: 1, RequestCode.PULL_MESSAGE: 1}


def test_first_look_asks_name_servers_for_brokers_and_routes_together(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = start()
    asked: list[list[type]] = []
    call_all = ClusterClient.call_all

    def record(client: ClusterClient, calls: Sequence[tuple[str, Request[Any]]]) -> list[Any]:
        asked.append([type(request) for _, request in calls])
        return call_all(client, calls)

    monkeypatch.setattr(ClusterClient, "call_all", record)
    reader.backend.queues(["orders"])
    assert asked == [[ClusterInfoRequest, RouteRequest]], "or a silent name server would cost two deadlines"


def test_name_server_that_is_silent_is_asked_aside(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = start(name_servers=2)
    first, second = (server.address for server in reader.cluster.name_servers)
    reader.answer(queue_of(A))
    reader.cluster.brokers[A].kill()
    reader.cluster.name_servers[1].freeze()
    waited: list[str] = []
    call_all = ClusterClient.call_all

    def record(client: ClusterClient, calls: Sequence[tuple[str, Request[Any]]]) -> list[Any]:
        waited.extend(to for to, request in calls if isinstance(request, RouteRequest))
        return call_all(client, calls)

    monkeypatch.setattr(ClusterClient, "call_all", record)
    for _ in range(5):
        reader.look(queue_of(A), 6.0)
    assert waited.count(second) == 1
    assert waited[-3:] == [first] * 3
    reader.cluster.name_servers[1].thaw()
    for _ in range(100):
        reader.look(queue_of(A), 6.0)
        if waited.count(second) > 1:
            return
    raise AssertionError("it replies again, and is not asked")
