"""The locks that a member holds, by time."""

from math import inf

from rmq_spark.store.cluster.queue_locks import LIFE_S, RENEWAL_S, QueueLocks
from rmq_spark.store.model import QueueKey

ONE, TWO, THREE = (QueueKey("orders", number, "broker-a") for number in range(3))


def locked(*queues: QueueKey) -> QueueLocks:
    locks = QueueLocks()
    locks.add(queues, 0.0)
    return locks


def test_locks_are_renewed_every_20_s() -> None:
    locks = locked(ONE, TWO)
    assert locks.next_s() == RENEWAL_S
    locks.add([THREE], 5.0)
    assert locks.next_s() == RENEWAL_S, "all together, when the first is due"
    assert locks.note_renewal([ONE, TWO, THREE], [], 20.0, 20.1) == set()
    assert locks.next_s() == 40.0
    assert [locks.renewed_ago_s(queue, 25.0) for queue in (ONE, THREE)] == [5.0, 5.0]


def test_a_refused_lock_is_lost_at_once() -> None:
    locks = locked(ONE, TWO)
    assert locks.note_renewal([ONE], [TWO, THREE], 20.0, 20.1) == {TWO}
    assert set(locks.queues) == {ONE}
    assert locks.renewed_ago_s(TWO, 20.1) is None


def test_a_lock_without_an_answer_is_asked_for_again_and_lost_after_60_s() -> None:
    locks = locked(ONE, TWO)
    assert locks.note_renewal([TWO], [], 20.0, 23.0) == set()
    assert locks.next_s() == 25.0
    assert locks.expired(LIFE_S) == set()
    assert locks.expired(LIFE_S + 0.1) == {ONE}
    assert locks.note_renewal([TWO], [], 58.0, LIFE_S + 0.1) == {ONE}
    assert locks.next_s() == 58.0 + RENEWAL_S, "the rest is complete"


def test_locks_that_were_given_up_are_not_renewed() -> None:
    locks = locked(ONE, TWO)
    locks.drop([ONE])
    assert locks.note_renewal([ONE, TWO], [], 20.0, 20.1) == set()
    assert set(locks.queues) == {TWO}
    locks.drop([TWO])
    assert locks.next_s() == inf
    locks.add([], 30.0)
    assert locks.next_s() == inf
