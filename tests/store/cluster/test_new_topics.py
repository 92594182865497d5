"""A broker or name server that is away is not taken for a topic that does not exist: nothing is created then."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sent_messages import address_of

import rmq_spark
from rmq_spark.store.backend import CommitTerms, Guarantee, SinkTerms
from rmq_spark.store.cluster.client import ClusterClient, monotonic_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.sink import refuse_timers
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import BackendUnavailableError, OptionError
from rmq_spark.store.testing.brokers import RunningCluster, faults


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", name_servers=2, brokers=2) as cluster:
        yield cluster


def test_send_creates_nothing_while_the_only_broker_of_a_topic_is_away(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=2, brokers=["broker-a"])
    with rmq_spark.open_store(name_server=cluster.address, broker_down_timeout_ms=200) as producer:
        producer.send("orders", "one")
        cluster.brokers["broker-a"].kill()
        for _ in range(3):
            with pytest.raises(BackendUnavailableError):
                producer.send("orders", "two")
        cluster.brokers["broker-a"].restart()
        assert producer.send("orders", "three").broker == "broker-a"
    assert "orders" not in cluster.brokers["broker-b"].topics


def test_prepare_creates_nothing_while_the_only_broker_of_a_topic_is_away(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=2, brokers=["broker-a"])
    sink = address_of(cluster).sink(SinkTerms("orders", guarantee=Guarantee.AT_LEAST_ONCE), CommitTerms())
    sink.prepare()
    cluster.brokers["broker-a"].kill()
    with pytest.raises(BackendUnavailableError, match=r"or it was deleted; .* create it: rmq create"):
        sink.prepare()
    assert "orders" not in cluster.brokers["broker-b"].topics


def test_send_creates_nothing_while_a_name_server_does_not_answer(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=2, brokers=["broker-a"])
    first, second = cluster.name_servers
    first.kill()
    second.restart()
    cluster.brokers["broker-b"].register()
    with (
        rmq_spark.open_store(name_server=cluster.address) as producer,
        pytest.raises(BackendUnavailableError, match="may know the topic"),
    ):
        producer.send("orders", "one")
    assert "orders" not in cluster.brokers["broker-b"].topics


def test_a_topic_whose_masters_are_away_is_unavailable_and_not_forbidden(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=2, brokers=["broker-a"])
    cluster.add_slave("broker-a")
    cluster.brokers["broker-a"].kill()
    with (
        rmq_spark.open_store(name_server=cluster.address) as producer,
        pytest.raises(BackendUnavailableError, match="no master now"),
    ):
        producer.send("orders", "one")


def test_create_topic_returns_the_queues_of_all_masters(cluster: RunningCluster) -> None:
    with rmq_spark.open_store(name_server=cluster.address) as producer:
        assert producer.create_topic("new", 3) == 6


def test_timers_wait_for_the_version_of_each_broker(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=2)
    client = ClusterClient(address_of(cluster, request_timeout_ms=1000))
    routes = WriteRoutes(client, monotonic_ms, NewTopics())
    assert refuse_timers(routes, ["orders"]) is None
    cluster.brokers["broker-b"].fail(RequestCode.GET_TOPIC_STATS_INFO, faults.busy())
    with pytest.raises(BackendUnavailableError, match="the version of a broker"):
        refuse_timers(routes, ["orders"])
    client.close()


def test_bodies_over_the_size_of_a_request_are_refused_by_name(cluster: RunningCluster) -> None:
    with pytest.raises(OptionError, match="max_message_size"):
        rmq_spark.open_store(name_server=cluster.address, max_message_size=32 << 20)
