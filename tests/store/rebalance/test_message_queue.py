"""Queues and clients are sorted like in RocketMQ's clients before queues are assigned."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.model import QueueKey, java_order, sort_client_ids, sort_queues
from rmq_spark.store.rebalance.strategies import MessageQueue


def test_queues_stand_by_topic_then_broker_then_number() -> None:
    rows = [("T", 2, "b"), ("T", 10, "a"), ("T", 2, "a"), ("S", 0, "z")]
    ordered = [QueueKey(*row) for row in (("S", 0, "z"), ("T", 2, "a"), ("T", 10, "a"), ("T", 2, "b"))]
    assert sort_queues(QueueKey(*row) for row in rows) == ordered
    assert sorted(QueueKey(*row) for row in rows) == ordered


@pytest.mark.parametrize(("first", "second"), [("c10", "c2"), ("192.168.0.1@100", "192.168.0.2@200"), ("B", "a")])
def test_clients_stand_in_plain_order_of_texts(first: str, second: str) -> None:
    assert sort_client_ids([second, first]) == [first, second]


def test_beyond_the_basic_plane_the_order_is_javas() -> None:
    assert sort_client_ids(["\uff5e", "😀"]) == ["😀", "\uff5e"]
    assert sort_queues([QueueKey("t", 0, "\uff5e"), QueueKey("t", 0, "😀")])[0].broker == "😀"


@given(st.text(), st.text())
def test_the_order_compares_as_string_compare_to(one: str, other: str) -> None:
    def units(text: str) -> list[int]:
        data = text.encode("utf-16-le", "surrogatepass")
        return [data[at] | data[at + 1] << 8 for at in range(0, len(data), 2)]

    assert (java_order(one) < java_order(other)) is (units(one) < units(other))


def test_a_queue_names_itself_as_in_java_and_by_key() -> None:
    queue = QueueKey("topic_test", 0, "brokerName")
    assert str(MessageQueue.of(queue)) == "MessageQueue [topic=topic_test, brokerName=brokerName, queueId=0]"
    assert str(queue) == "topic_test/brokerName:0"
    assert pickle.loads(pickle.dumps(queue)) == queue
