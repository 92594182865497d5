"""What a consumer has in mind of its offsets: RocketMQ's rules of updating, and what is still to be written."""

from rmq_spark.store.group.offset_memory import OffsetMemory
from rmq_spark.store.units import QueueKey

QUEUE, OTHER = QueueKey("T", 0), QueueKey("T", 1)


def test_an_update_that_only_increases_leaves_a_larger_offset() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10, increase_only=True)
    memory.update(QUEUE, 5, increase_only=True)
    assert memory.get(QUEUE) == 10
    memory.update(QUEUE, 11, increase_only=True)
    assert memory.get(QUEUE) == 11


def test_a_plain_update_may_go_back() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10, increase_only=True)
    memory.update(QUEUE, 5)
    assert memory.get(QUEUE) == 5


def test_a_queue_that_nobody_updated_has_no_offset() -> None:
    assert OffsetMemory().get(QUEUE) is None


def test_an_offset_of_0_is_one() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 0, increase_only=True)
    assert (memory.get(QUEUE), memory.unwritten()) == (0, {QUEUE: 0})


def test_what_was_updated_is_to_be_written_once() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10)
    memory.update(OTHER, 3)
    assert memory.unwritten([OTHER]) == {OTHER: 3}
    memory.mark_written({OTHER: 3})
    assert memory.unwritten() == {QUEUE: 10}
    memory.update(QUEUE, 11)
    memory.mark_written({QUEUE: 10})
    assert memory.unwritten() == {QUEUE: 11}, "it moved on while the older one was written"


def test_what_was_read_is_not_to_be_written() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10)
    memory.learn(QUEUE, 4)
    assert (memory.get(QUEUE), memory.unwritten()) == (4, {})
