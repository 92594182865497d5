"""Which queues of a member others may have taken meanwhile."""

from rmq_spark.store.cluster.queue_doubts import QueueDoubts
from rmq_spark.store.model import QueueKey

ORDERS = [QueueKey("orders", 0, "broker-a"), QueueKey("orders", 0, "broker-b")]
OTHER = QueueKey("payments", 0, "broker-a")
BROKERS = {"orders": ["broker-a", "broker-b"], "payments": ["broker-a"]}


def test_all_queues_of_a_topic_are_doubtful_if_one_of_its_brokers_forgot_the_member() -> None:
    for forgetful, found in (("broker-b", {*ORDERS}), ("broker-a", {*ORDERS, OTHER}), ("broker-c", set())):
        doubts = QueueDoubts()
        doubts.note_losses([*ORDERS, OTHER], BROKERS.__getitem__, [forgetful])
        assert doubts.queues == found
        assert {queue for queue in (*ORDERS, OTHER) if doubts.was_cut_off(queue)} == found


def test_other_members_make_queues_doubtful_and_hide_no_reset() -> None:
    doubts = QueueDoubts()
    doubts.note_members(ORDERS)
    assert doubts.queues == {*ORDERS}
    assert not doubts.was_cut_off(ORDERS[0])


def test_a_queue_that_is_settled_is_as_if_nothing_had_happened() -> None:
    doubts = QueueDoubts()
    doubts.note_losses(ORDERS, BROKERS.__getitem__, ["broker-a"])
    doubts.settle([ORDERS[0], OTHER])
    assert doubts.queues == {ORDERS[1]}
    doubts.note_members(ORDERS)
    assert [doubts.was_cut_off(queue) for queue in ORDERS] == [False, True]
