"""The pull consumer of a live cluster: what it asks of brokers, and what it does when they are away or refuse.

What it has in common with the consumer of a store directory is in `client/test_pull_consumers.py`.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import rmq_spark
from rmq_spark.store.cluster.address import ClusterAddress, Credentials
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.consumer import ClusterConsumer
from rmq_spark.store.errors import (
    BackendUnavailableError,
    DamageError,
    NoPermissionError,
    NotFoundError,
    OptionError,
    StoreError,
)
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import GetMessageStatus, PullStatus
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import Account, AccountTable, Answer, RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import Call

RunCluster = Callable[..., RunningCluster]
A, B = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 0, "broker-b")
PULL, COMMIT = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET
HEART_BEAT = 34
SHORT_MS, LONG_MS = 300, 60_000
both = pytest.mark.parametrize("release", ["4.9", "5.3"])


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for new routes as often as a call wants to."""
    monkeypatch.setattr("rmq_spark.store.cluster.catalog._ROUTES_MIN_MS", 0)


@pytest.fixture
def start(run_cluster: RunCluster) -> Callable[..., RunningCluster]:
    """A function that starts a cluster with the topic orders, whose queue 0 has ten messages at each broker."""

    def begin(release: str = "5.3", **terms: Any) -> RunningCluster:
        cluster = run_cluster(release=release, **terms)
        cluster.create_topic("orders", queues=2)
        for name in cluster.brokers:
            cluster.send("orders", *[b"%d" % number for number in range(10)], broker=name, queue_id=0, tags="red")
        return cluster

    return begin


@pytest.fixture
def open_at() -> Iterator[Callable[..., ClusterConsumer]]:
    """A function that opens a consumer, which is closed without a commit after the test."""
    opened: list[ClusterConsumer] = []

    def begin(cluster: RunningCluster, group: str | None = "G", **arguments: Any) -> ClusterConsumer:
        opened.append(rmq_spark.open_consumer(name_server=cluster.address, group=group, **arguments))
        return opened[-1]

    yield begin
    for consumer in opened:
        consumer.__exit__(RuntimeError, RuntimeError(), None)


OpenAt = Callable[..., ClusterConsumer]
Start = Callable[..., RunningCluster]


def bodies(found: Any) -> list[bytes]:
    listed: list[bytes] = found.messages.column("body").to_pylist()
    return listed


def set_reset(cluster: RunningCluster, offset: int, group: str = "G") -> None:
    """Let an administrator reset the group's offset in the first queue."""
    cluster.loop.run(cluster.broker.offsets.reset, group, QueueKey("orders", 0), offset)


# Pulls.


@both
def test_pull_sends_one_request_in_the_name_of_the_group(start: Start, open_at: OpenAt, release: str) -> None:
    cluster = start(release)
    consumer = open_at(cluster)
    consumer.pull(A, 0)
    cluster.clear_requests()
    found = consumer.pull(A, 2, 3)
    assert bodies(found) == [b"2", b"3", b"4"]
    (request,) = cluster.broker.seen_requests(PULL)
    names = ("consumerGroup", "queueOffset", "maxMsgNums", "suspendTimeoutMillis", "subscription")
    assert [request.fields[name] for name in names] == ["G", "2", "3", "0", "*"]
    assert cluster.clear_requests() == {"broker-a": {PULL: 1}}


def test_pull_without_a_group_has_the_readers_name(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    assert open_at(cluster, None).pull(A, 8).messages.num_rows == 2
    assert {one.fields["consumerGroup"] for one in cluster.broker.seen_requests(PULL)} == {"rmq-spark-reader"}


def test_pull_has_the_default_columns_and_the_name_of_the_broker(start: Start, open_at: OpenAt) -> None:
    found = open_at(start()).pull(A, 9)
    names = found.messages.column_names
    assert (len(names), names[-1]) == (11, "brokerName")
    assert found.messages.column("brokerName").to_pylist() == ["broker-a"]
    assert found.messages.column("queueOffset").to_pylist() == [9]


def test_pull_of_more_messages_than_an_int_counts_is_a_pull_of_many(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    assert open_at(cluster).pull(A, 0, 1 << 40).messages.num_rows == 10
    assert cluster.broker.seen_requests(PULL)[-1].fields["maxMsgNums"] == str((1 << 31) - 1)


@both
@pytest.mark.parametrize("keeps_minimum", [True, False])
def test_pull_below_the_first_message_says_where_to_go_on(
    start: Start, open_at: OpenAt, release: str, keeps_minimum: bool
) -> None:
    cluster = start(release)
    consumer = open_at(cluster)
    cluster.broker.expire("orders", 0, 4, keeps_minimum=keeps_minimum)
    found = consumer.pull(A, 0)
    if found.pull_status is not PullStatus.FOUND:  # a broker may skip the entries of expired messages
        assert found.next_begin_offset == 4
        found = consumer.pull(A, found.next_begin_offset)
    assert bodies(found) == [b"%d" % number for number in range(4, 10)]
    assert consumer.min_offset(A) == (0 if keeps_minimum else 4)


def test_pull_of_other_bytes_for_an_expired_message_says_where_to_go_on(start: Start, open_at: OpenAt) -> None:
    cluster = start("4.9")
    consumer = open_at(cluster)

    def change(answer: Answer) -> Answer:
        cluster.broker.store.expire(QueueKey("orders", 0), 4)
        return replace(answer, body=answer.body.replace(b"orders", b"0rders"))

    cluster.broker.fail(PULL, faults.changed(change), times=1)
    found = consumer.pull(A, 2)
    assert (found.status, found.pull_status) == (GetMessageStatus.OFFSET_TOO_SMALL, PullStatus.OFFSET_ILLEGAL)
    assert (found.next_begin_offset, found.min_offset, found.max_offset) == (4, 4, 10)
    cluster.broker.fail(PULL, faults.changed(change), times=1)
    with pytest.raises(DamageError, match="topic"):
        consumer.pull(A, 4)


@both
def test_pull_is_repeated_while_the_broker_limits_the_flow(start: Start, open_at: OpenAt, release: str) -> None:
    cluster = start(release)
    cluster.broker.fail(PULL, faults.busy(), times=2)
    assert open_at(cluster).pull(A, 0).messages.num_rows == 10


def test_pull_raises_if_the_flow_is_limited_for_too_long(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    cluster.broker.fail(PULL, faults.busy())
    with pytest.raises(BackendUnavailableError, match="overloaded"):
        open_at(cluster, request_timeout_ms=SHORT_MS).pull(A, 0)


@both
def test_pull_goes_on_where_the_broker_does_not_evaluate_sql92(start: Start, open_at: OpenAt, release: str) -> None:
    cluster = start(release)
    cluster.send("orders", b"blue", queue_id=0, properties={"n": "7"})
    cluster.broker.settings.filters_by_properties = False
    consumer = open_at(cluster)
    consumer.subscribe("orders", sql92="n = 7")
    assert bodies(consumer.pull(A, 0)) == [b"blue"]
    found = consumer.pull(A, 0, 5)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 5)


@both
def test_pull_with_a_filter_lets_the_broker_filter(start: Start, open_at: OpenAt, release: str) -> None:
    cluster = start(release)
    consumer = open_at(cluster)
    for filters, sent in (({"tags": "blue"}, ("blue", "TAG")), ({"sql92": "a > 5"}, ("a > 5", "SQL92"))):
        consumer.subscribe("orders", **filters)  # type: ignore[arg-type]
        cluster.clear_requests()
        assert consumer.pull(A, 0).pull_status is PullStatus.NO_MATCHED_MSG
        fields = cluster.broker.seen_requests(PULL)[0].fields
        assert (fields["subscription"], fields["expressionType"]) == sent


def test_pull_of_a_slave_that_refers_to_its_master_is_refused(start: Start, open_at: OpenAt) -> None:
    cluster = start("4.9")
    slave = cluster.add_slave("broker-a")
    consumer = open_at(cluster, broker_addresses=f"broker-a={slave.address}")
    with pytest.raises(BackendUnavailableError, match=f"broker-a at {slave.address}.*FOUND.*expected.*a master"):
        consumer.pull(A, 0)


def test_pull_of_topics_in_a_namespace_shows_names_without_it(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    cluster.create_topic("ns%orders", queues=1)
    cluster.send("ns%orders", b"x", queue_id=0)
    consumer = open_at(cluster, namespace="ns")
    assert consumer.queues("orders") == [A]
    assert consumer.pull(A, 0).messages.column("topic").to_pylist() == ["orders"]
    consumer.update_consume_offset(A, 1)
    assert consumer.commit() == {A: 1}
    assert cluster.broker.offsets.committed == {("ns%G", QueueKey("ns%orders", 0)): 1}


# Waiting.


def test_pull_that_waits_is_held_by_the_broker(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    consumer = open_at(cluster)
    timer = threading.Timer(0.2, cluster.send, ("orders", b"late"), {"queue_id": 0})
    timer.start()
    assert bodies(consumer.pull_block_if_not_found(A, 10, timeout_ms=LONG_MS)) == [b"late"]
    timer.join()
    (request,) = cluster.broker.seen_requests(PULL)
    assert (request.fields["suspendTimeoutMillis"], int(request.fields["sysFlag"]) & 2) == (str(LONG_MS), 2)


def test_pull_that_waits_without_long_polling_pulls_twice(start: Start) -> None:
    cluster, slept = start(), []
    address = ClusterAddress((cluster.address,))
    with ClusterConsumer(address, "G", long_polling=False, sleep=slept.append) as consumer:
        assert consumer.pull_block_if_not_found(A, 10, timeout_ms=LONG_MS).pull_status is PullStatus.NO_NEW_MSG
        assert slept == [1.0]
        assert consumer.pull_block_if_not_found(A, 9, timeout_ms=LONG_MS).pull_status is PullStatus.FOUND
        assert slept == [1.0]
    assert [one.fields["suspendTimeoutMillis"] for one in cluster.broker.seen_requests(PULL)] == ["0", "0", "0"]


@both
def test_pull_that_waits_raises_if_the_broker_dies(start: Start, open_at: OpenAt, release: str) -> None:
    cluster = start(release)
    consumer = open_at(cluster)
    timer = threading.Timer(0.2, cluster.broker.kill)
    timer.start()
    with pytest.raises(BackendUnavailableError, match=f"broker broker-a at {cluster.broker.address}"):
        consumer.pull_block_if_not_found(A, 10, timeout_ms=LONG_MS)
    timer.join()
    cluster.broker.restart(new_port=True)
    assert bodies(consumer.pull_block_if_not_found(A, 9, timeout_ms=LONG_MS)) == [b"9"]


def test_consumer_that_is_shared_by_threads_gives_each_its_messages(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    consumer = open_at(cluster)
    found: list[tuple[int, list[bytes]]] = []

    def pull(offset: int) -> None:
        for _ in range(5):
            found.append((offset, bodies(consumer.pull(A, offset, 1))))
            consumer.update_consume_offset(A, offset)
            found.append((offset, bodies(consumer.pull_block_if_not_found(A, offset, 1))))

    threads = [threading.Thread(target=pull, args=(offset,)) for offset in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(messages == [b"%d" % offset] for offset, messages in found)


@both
def test_consumer_sends_no_heartbeat(start: Start, release: str) -> None:
    cluster = start(release)
    with rmq_spark.open_consumer(name_server=cluster.address, group="G") as consumer:
        consumer.subscribe("orders", "red")
        consumer.pull(A, 0)
        consumer.pull_block_if_not_found(A, 10, timeout_ms=1)
        consumer.update_consume_offset(A, 10)
    assert HEART_BEAT not in cluster.clear_requests()["broker-a"]


# Brokers that are away.


ASKS: list[Callable[[ClusterConsumer], object]] = [
    lambda one: one.pull(B, 0),
    lambda one: one.pull_block_if_not_found(B, 0),
    lambda one: one.max_offset(B),
    lambda one: one.min_offset(B),
    lambda one: one.search_offset(B, 0),
    lambda one: one.fetch_consume_offset(B, from_store=True),
    lambda one: one.commit(),
]


@both
@pytest.mark.parametrize("ask", ASKS)
def test_broker_that_was_killed_is_named_until_it_is_back(
    start: Start, open_at: OpenAt, release: str, ask: Callable[[ClusterConsumer], object]
) -> None:
    cluster = start(release, brokers=2)
    consumer, away = open_at(cluster), cluster.brokers["broker-b"]
    consumer.update_consume_offset(B, 4)
    address = away.address
    away.kill()
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match=f"broker-b at {address}"):
            ask(consumer)
    assert (consumer.pull(A, 0).messages.num_rows, consumer.max_offset(A)) == (10, 10)
    away.restart(new_port=True)
    ask(consumer)


def test_broker_that_does_not_answer_is_waited_for_until_the_request_timeout(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    consumer = open_at(cluster, request_timeout_ms=SHORT_MS)
    consumer.pull(A, 0)
    cluster.broker.freeze()
    with pytest.raises(
        BackendUnavailableError, match=rf"broker-a at {cluster.broker.address} did not .* {SHORT_MS} ms"
    ):
        consumer.pull(A, 0)
    cluster.broker.thaw()
    assert consumer.pull(A, 0).messages.num_rows == 10


def test_broker_that_was_never_seen_is_named(start: Start, open_at: OpenAt) -> None:
    consumer = open_at(start())
    for ask in (consumer.max_offset, consumer.fetch_consume_offset):
        with pytest.raises(BackendUnavailableError, match="no name server lists the broker broker-z"):
            ask(QueueKey("orders", 0, "broker-z"))
    with pytest.raises(NotFoundError, match="the name of its broker is missing"):
        consumer.pull(QueueKey("orders", 0), 0)


def test_queue_that_is_added_later_is_found(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    consumer = open_at(cluster)
    added = QueueKey("orders", 2, "broker-a")
    with pytest.raises(NotFoundError, match="orders"):
        consumer.pull(added, 0)
    cluster.create_topic("orders", queues=3)
    cluster.send("orders", b"x", queue_id=2)
    assert (bodies(consumer.pull(added, 0)), consumer.max_offset(added)) == ([b"x"], 1)
    assert added in consumer.queues("orders")
    cluster.create_topic("later", queues=1)
    assert "later" in consumer.topics()


# The offsets of a group.


def stored_offsets(cluster: RunningCluster) -> dict[QueueKey, int]:
    """Return the committed offsets of all groups at all brokers."""
    return {
        QueueKey(queue.topic, queue.queue_id, name): offset
        for name, broker in cluster.brokers.items()
        for (_, queue), offset in broker.offsets.committed.items()
    }


def test_commit_sends_one_request_for_each_queue(start: Start, open_at: OpenAt) -> None:
    cluster = start(brokers=2)
    consumer = open_at(cluster)
    offsets = {queue: number for number, queue in enumerate(consumer.queues("orders"))}
    for queue, offset in offsets.items():
        consumer.pull(queue, 0)
        consumer.update_consume_offset(queue, offset)
    cluster.clear_requests()
    assert consumer.commit() == offsets
    assert cluster.clear_requests() == {name: {COMMIT: 2} for name in cluster.brokers}
    assert stored_offsets(cluster) == offsets


def test_commit_of_the_first_offsets_of_a_group_keeps_each(start: Start, open_at: OpenAt) -> None:
    cluster = start(brokers=2)
    consumer = open_at(cluster)

    def race(call: Call, serve: Callable[[], None]) -> None:
        """Create the map of a group with a delay; a map that another request has created meanwhile is lost."""
        committed = cluster.brokers["broker-a"].offsets.committed

        def replace_map() -> None:
            committed.clear()
            serve()

        if committed:
            serve()
        else:
            call.server.loop.call_later(0.05, replace_map)

    cluster.brokers["broker-a"].fail(COMMIT, race)
    offsets = {queue: number for number, queue in enumerate(consumer.queues("orders"), 1)}
    for queue, offset in offsets.items():
        consumer.pull(queue, 0)
        consumer.update_consume_offset(queue, offset)
    assert consumer.commit() == offsets
    assert stored_offsets(cluster) == offsets


@both
def test_commit_goes_to_the_brokers_that_answer(start: Start, open_at: OpenAt, release: str) -> None:
    cluster = start(release, brokers=2)
    consumer, away = open_at(cluster), cluster.brokers["broker-b"]
    for queue in (A, B):
        consumer.update_consume_offset(queue, 4)
    away.kill()
    with pytest.raises(BackendUnavailableError, match=f"broker-b at {away.address}"):
        consumer.commit()
    assert cluster.brokers["broker-a"].offsets.committed == {("G", QueueKey("orders", 0)): 4}
    away.restart(new_port=True)
    assert consumer.commit() == {B: 4}
    assert away.offsets.committed == {("G", QueueKey("orders", 0)): 4}


def test_commit_of_a_group_that_the_broker_does_not_know_introduces_it(start: Start, open_at: OpenAt) -> None:
    cluster = start("5.3")
    consumer = open_at(cluster)
    consumer.update_consume_offset(A, 4)
    assert consumer.commit() == {A: 4}
    refused = open_at(cluster, "H")
    refused.update_consume_offset(A, 4)
    cluster.broker.settings.creates_groups = False
    with pytest.raises(NoPermissionError, match=r"SUBSCRIPTION_GROUP_NOT_EXIST.*autoCreateSubscriptionGroup"):
        refused.commit()


def test_commit_in_a_topic_that_was_deleted_is_refused(start: Start, open_at: OpenAt) -> None:
    cluster = start("5.3")
    consumer = open_at(cluster)
    consumer.pull(A, 0)
    consumer.update_consume_offset(A, 4)
    cluster.delete_topic("orders")
    with pytest.raises(NotFoundError, match="orders"):
        consumer.commit()


def test_close_releases_connections_if_the_commit_fails(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    consumer = open_at(cluster)
    consumer.update_consume_offset(A, 4)
    cluster.broker.kill()
    with pytest.raises(BackendUnavailableError):
        consumer.close()
    consumer.close()
    with pytest.raises(StoreError, match="was closed"):
        consumer.pull(A, 0)


def test_reset_of_an_administrator_is_the_answer_to_the_next_pull(start: Start, open_at: OpenAt) -> None:
    cluster = start("5.3")
    consumer = open_at(cluster)
    consumer.pull(A, 0)
    set_reset(cluster, 2)
    assert consumer.max_offset(A) == 10
    assert consumer.search_offset(A, 0) == 0, "it pulls in the name of another group"
    found = consumer.pull(A, 8)
    assert (found.status, found.pull_status) == (GetMessageStatus.OFFSET_RESET, PullStatus.OFFSET_ILLEGAL)
    assert (found.next_begin_offset, found.messages.num_rows) == (2, 0)
    assert consumer.pull(A, 8).pull_status is PullStatus.FOUND


def test_reset_of_an_administrator_replaces_a_commit(
    start: Start, open_at: OpenAt, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start("5.3")
    consumer = open_at(cluster)
    consumer.pull(A, 0)
    set_reset(cluster, 2)
    consumer.update_consume_offset(A, 9)
    with caplog.at_level(logging.WARNING, "rmq_spark"):
        assert consumer.commit() == {A: 2}
    assert "reset the offset of consumer group G in queue orders" in caplog.text
    assert consumer.fetch_consume_offset(A) == 2
    assert consumer.commit() == {}
    assert consumer.pull(A, 9).next_begin_offset == 2
    consumer.update_consume_offset(A, 5)
    assert consumer.commit() == {A: 5}


@pytest.mark.parametrize("waits", [False, True])
def test_reset_that_a_pull_has_taken_replaces_an_offset_that_is_not_committed(
    start: Start, open_at: OpenAt, waits: bool
) -> None:
    cluster = start("5.3")
    consumer = open_at(cluster)
    consumer.pull(A, 0)
    consumer.update_consume_offset(A, 8)
    set_reset(cluster, 2)
    found = consumer.pull_block_if_not_found(A, 8) if waits else consumer.pull(A, 8)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.OFFSET_RESET, 2)
    assert consumer.fetch_consume_offset(A) == 2
    assert consumer.commit() == {A: 2}
    set_reset(cluster, 5)
    assert consumer.pull(A, 8).next_begin_offset == 5
    assert (consumer.fetch_consume_offset(A), consumer.commit()) == (5, {})


# Accounts.


@both
def test_account_that_may_subscribe_with_the_group_pulls_and_commits(
    start: Start, open_at: OpenAt, release: str
) -> None:
    cluster = start(release)
    cluster.broker.accounts = AccountTable(Account("key", "secret", topics={"orders": "SUB"}, groups={"G": "SUB"}))
    consumer = open_at(cluster, access_key="key", secret_key="secret")
    assert consumer.pull(A, 0).messages.num_rows == 10
    assert consumer.pull_block_if_not_found(A, 10, timeout_ms=1).pull_status is PullStatus.NO_NEW_MSG
    consumer.update_consume_offset(A, 4)
    assert consumer.commit() == {A: 4}
    cluster.clear_requests()
    assert consumer.fetch_consume_offset(A, from_store=True) == 4
    assert consumer.pull(A, 9).messages.num_rows == 1
    assert sum(cluster.clear_requests()["broker-a"].values()) == 2
    with pytest.raises(NoPermissionError, match="H"):
        open_at(cluster, "H", access_key="key", secret_key="secret").pull(A, 0)


# What is refused.


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda one: one.send("orders", b"x"), "send: the consumer of a cluster sends no new messages"),
        (lambda one: one.send_many(None), "send_many: the consumer of a cluster sends no new messages"),
        (lambda one: one.send_back([], delay_level="x"), "delay_level='x' must be a delay level"),
        (lambda one: one.search_offset(A, 0, "nearest"), 'rule="nearest".*expected "lower" or "upper"'),
    ],
)
def test_call_that_only_a_directory_answers_is_refused(
    start: Start, open_at: OpenAt, ask: Callable[[ClusterConsumer], object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        ask(open_at(start()))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, "neither path nor name_server was given"),
        ({"path": "x", "name_server": "ns:1"}, "path and name_server were both given"),
        ({"path": "x", "tls": True}, "tls is for a cluster"),
        ({"name_server": "ns:1", "read_mode": "mmap"}, "read_mode is for a store directory"),
        (
            {"name_server": "ns:1", "lock_timeout_ms": 1, "max_transfer_count_on_message_in_disk": 9},
            "max_transfer_count_on_message_in_disk, lock_timeout_ms are for a store directory; .* Leave them out",
        ),
        ({"name_server": "ns:1", "broker_down_timeout_ms": 5}, "expected request_timeout_ms"),
        ({"name_server": "ns"}, "nameServer"),
        ({"name_server": "ns:1", "acces_key": "x"}, "unknown argument acces_key"),
        ({"name_server": "ns:1", "request_timeout_ms": 0}, "request_timeout_ms"),
    ],
)
def test_open_consumer_refuses_invalid_arguments(arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(OptionError, match=found):
        rmq_spark.open_consumer(**arguments)


def test_interrupt_leaves_the_consumer_usable(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    consumer = open_at(cluster)
    consumer.pull(A, 0)
    for ask in (consumer.pull, consumer.pull_block_if_not_found):
        with mock.patch.object(ClusterClient, "_work", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            ask(A, 1)
        assert bodies(consumer.pull(A, 9)) == [b"9"]
    assert eventually(lambda: cluster.broker.open_connections == 1), "those of the interrupted calls were closed"


def test_repr_has_no_secret() -> None:
    address = ClusterAddress(("ns:9876",), credentials=Credentials("key", "planted-secret"))
    assert "planted-secret" not in repr(ClusterConsumer(address))
    assert "ns:9876" in repr(ClusterConsumer(address))


def test_answer_with_an_unknown_status_of_the_store_is_understood(start: Start, open_at: OpenAt) -> None:
    cluster = start()
    consumer = open_at(cluster)
    consumer.pull(A, 0)
    cluster.broker.fail(PULL, faults.changed(lambda answer: replace(answer, remark=None)))
    cluster.broker.expire("orders", 0, 4)
    for offset, status in [
        (4, "FOUND"),
        (10, "OFFSET_OVERFLOW_ONE"),
        (99, "OFFSET_OVERFLOW_BADLY"),
        (0, "OFFSET_TOO_SMALL"),
    ]:
        assert consumer.pull(A, offset).status == status
    assert consumer.pull(QueueKey("orders", 1, "broker-a"), 0).status == "NO_MESSAGE_IN_QUEUE"
