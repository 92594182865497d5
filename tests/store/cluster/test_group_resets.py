"""Resets of a group's offsets, as one member counts them."""

from rmq_spark.store.cluster.group_resets import GroupResets
from rmq_spark.store.model import QueueKey

ONE, TWO = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 1, "broker-a")


def test_new_resets_get_the_next_number_once() -> None:
    resets = GroupResets()
    resets.note_applied(7)
    assert (resets.report([ONE, TWO]), resets.number) == ({}, 7)
    resets.note(ONE, 3)
    resets.note(TWO, 4)
    assert [(resets.report([ONE, TWO]), resets.number) for _ in range(2)] == [({ONE: 3, TWO: 4}, 8)] * 2
    resets.note(TWO, 5)
    assert (resets.report([ONE, TWO]), resets.number) == ({ONE: 3, TWO: 5}, 9)


def test_the_same_target_again_is_no_new_reset() -> None:
    resets = GroupResets()
    resets.note_applied(0)
    resets.note(ONE, 3)
    resets.report([ONE, TWO])
    resets.note(ONE, 3)
    resets.report([ONE, TWO])
    assert resets.number == 1
    resets.note_applied(1)
    resets.note(ONE, 3)
    assert resets.applied() == {ONE: 3}, "the broker tells of it until it is taken"


def test_a_reset_is_applied_when_the_checkpoint_has_its_number() -> None:
    resets = GroupResets()
    resets.note(ONE, 3)
    resets.note_applied(5)
    assert resets.applied() == {}, "the query was not told of it"
    assert resets.report([ONE, TWO]) == {ONE: 3}
    assert resets.number == 6
    resets.note(TWO, 4)
    resets.report([ONE, TWO])
    resets.note_applied(6)
    assert resets.applied() == {ONE: 3}
    assert resets.report([ONE, TWO]) == {TWO: 4}
    assert set(resets.queues) == {ONE, TWO}, "nobody commits there until it was taken"
    resets.forget([ONE])
    assert set(resets.queues) == {TWO}
    resets.forget([TWO, ONE])
    assert not resets.queues
    assert resets.number == 7


def test_a_query_without_a_number_ignores_what_is_known() -> None:
    resets = GroupResets()
    resets.note(ONE, 3)
    resets.note_applied(None)
    assert resets.applied() == {ONE: 3}
    assert (resets.report([ONE, TWO]), resets.number) == ({}, 0)
    resets.note(TWO, 1)
    assert resets.report([ONE, TWO]) == {TWO: 1}


def test_a_later_target_is_another_reset() -> None:
    resets = GroupResets()
    resets.note(ONE, 3)
    resets.report([ONE, TWO])
    resets.note_applied(1)
    resets.note(ONE, 9)
    assert resets.applied() == {}
    assert (resets.report([ONE, TWO]), resets.number) == ({ONE: 9}, 2)


def test_a_reset_in_a_queue_that_cannot_be_read_waits_without_a_number() -> None:
    resets = GroupResets()
    resets.note(ONE, 3)
    resets.note(TWO, 4)
    assert (resets.report([ONE]), resets.number) == ({ONE: 3}, 1)
    resets.note_applied(1)
    assert resets.applied() == {ONE: 3}, "the query has not seen the other one"
    resets.forget([ONE])
    assert (resets.report([TWO]), resets.number) == ({TWO: 4}, 2)
    assert (resets.report([]), resets.number) == ({}, 2), "its broker went away before the batch was planned"
    resets.note_applied(2)
    assert resets.applied() == {}
    assert (resets.report([TWO]), resets.number) == ({TWO: 4}, 3)


def test_a_reset_that_an_earlier_run_has_applied_is_not_reported() -> None:
    resets = GroupResets()
    resets.note_applied(7)
    resets.note(ONE, 3)
    resets.note(TWO, 4)
    resets.note_applied_before(lambda queue, target: target == 3, [ONE, TWO])
    assert resets.applied() == {ONE: 3}
    assert (resets.report([ONE, TWO]), resets.number) == ({TWO: 4}, 8)
    resets.note_applied_before(lambda queue, target: True, [ONE])
    assert resets.applied() == {ONE: 3}, "only in the queues of the call"
