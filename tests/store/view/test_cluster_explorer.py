"""The reader of a cluster that answers for many queues, waits for messages, and shows one message."""

from collections.abc import Callable

import pytest

import rmq_spark
from rmq_spark.store.errors import BackendUnavailableError, OptionError
from rmq_spark.store.model import Away, QueueBounds, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

QUEUE, OTHER = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 0, "broker-b")


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", "one", "two", broker="broker-a", keys="k")
    return cluster


def test_explorer_answers_for_all_queues(cluster: RunningCluster) -> None:
    with rmq_spark.open_reader(name_server=cluster.address, request_timeout_ms=300) as reader:
        assert reader.all_queues(["orders", "absent"]) == {"orders": [QUEUE, OTHER]}
        assert reader.answers([QUEUE, OTHER]) == {QUEUE: QueueBounds(0, 2), OTHER: QueueBounds(0, 0)}
        assert reader.offsets_at({QUEUE: 0, OTHER: 0}) == {QUEUE: 0, OTHER: 0}
        cluster.brokers["broker-b"].freeze()
        reader.refresh()
        found = reader.answers([QUEUE, OTHER])
        assert found[QUEUE] == QueueBounds(0, 2)
        assert isinstance(found[OTHER], Away)
        with pytest.raises(BackendUnavailableError, match="broker-b"):
            reader.all_bounds([QUEUE, OTHER])


def test_explorer_waits_for_messages(cluster: RunningCluster) -> None:
    with rmq_spark.open_reader(name_server=cluster.address) as reader:
        assert reader.answers([QUEUE])[QUEUE] == QueueBounds(0, 2)
        reader.refresh()
        assert not reader.wait_for_messages({QUEUE: 2}, 1)
        cluster.send("orders", "three", broker="broker-a")
        assert reader.wait_for_messages({QUEUE: 2}, 60_000)
        assert reader.bounds(QUEUE) == QueueBounds(0, 3)


def test_explorer_shows_a_message(cluster: RunningCluster) -> None:
    with rmq_spark.open_reader(name_server=cluster.address) as reader:
        message = reader.message(QUEUE, 1)
        assert (message.text(), message.keys, message.broker_name, message.queue_offset) == ("two", "k", "broker-a", 1)
        assert message.to_arrow().column_names == [*rmq_spark.COLUMNS, "brokerName"]
        assert "in orders/broker-a:0, queue offset 1" in repr(message)
        with pytest.raises(OptionError, match="must be an integer"):
            reader.message(QUEUE, True)


def test_explorer_knows_topics_of_rocketmq(cluster: RunningCluster) -> None:
    with rmq_spark.open_reader(name_server=cluster.address) as reader:
        assert reader.is_system("SCHEDULE_TOPIC_XXXX")
        assert not reader.is_system("orders")
