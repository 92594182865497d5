"""OffsetMemory: RocketMQ's rules of updating, and the offsets that are not committed yet."""

from rmq_spark.store.model import QueueKey
from rmq_spark.store.offset_memory import OffsetMemory

QUEUE, OTHER = QueueKey("T", 0), QueueKey("T", 1)


def test_update_with_increase_only_keeps_a_larger_offset() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10, increase_only=True)
    memory.update(QUEUE, 5, increase_only=True)
    assert memory.get(QUEUE) == 10
    memory.update(QUEUE, 11, increase_only=True)
    assert memory.get(QUEUE) == 11


def test_update_may_decrease_an_offset() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10, increase_only=True)
    memory.update(QUEUE, 5)
    assert memory.get(QUEUE) == 5


def test_get_is_none_for_a_queue_without_an_update() -> None:
    assert OffsetMemory().get(QUEUE) is None


def test_update_accepts_offset_0() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 0, increase_only=True)
    assert (memory.get(QUEUE), memory.uncommitted()) == (0, {QUEUE: 0})


def test_uncommitted_has_an_update_until_it_is_committed() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10)
    memory.update(OTHER, 3)
    assert memory.uncommitted([OTHER]) == {OTHER: 3}
    memory.mark_committed({OTHER: 3})
    assert memory.uncommitted() == {QUEUE: 10}
    memory.update(QUEUE, 11)
    memory.mark_committed({QUEUE: 10})
    assert memory.uncommitted() == {QUEUE: 11}, "it moved on while the older one was written"


def test_set_committed_is_not_uncommitted() -> None:
    memory = OffsetMemory()
    memory.update(QUEUE, 10)
    memory.set_committed(QUEUE, 4)
    assert (memory.get(QUEUE), memory.uncommitted()) == (4, {})
