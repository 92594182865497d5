"""Resets of a group's offsets, as one member counts them."""

from rmq_spark.store.cluster.group_resets import GroupResets
from rmq_spark.store.model import QueueKey

ONE, TWO = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 1, "broker-a")


def test_new_resets_get_the_next_number_once() -> None:
    resets = GroupResets()
    resets.note_applied(7)
    assert (resets.report(), resets.number, resets.has_news()) == ({}, 7, False)
    resets.note(ONE, 3)
    resets.note(TWO, 4)
    assert resets.has_news()
    assert [(resets.report(), resets.number) for _ in range(2)] == [({ONE: 3, TWO: 4}, 8)] * 2
    resets.note(TWO, 5)
    assert (resets.report(), resets.number) == ({ONE: 3, TWO: 5}, 9)


def test_the_same_target_again_is_no_new_reset() -> None:
    resets = GroupResets()
    resets.note_applied(0)
    resets.note(ONE, 3)
    resets.report()
    resets.note(ONE, 3)
    resets.report()
    assert resets.number == 1
    resets.note_applied(1)
    resets.note(ONE, 3)
    assert resets.applied() == {ONE: 3}, "the broker tells of it until it is taken"


def test_a_reset_is_applied_when_the_checkpoint_has_its_number() -> None:
    resets = GroupResets()
    resets.note(ONE, 3)
    resets.note_applied(5)
    assert resets.applied() == {}, "the query was not told of it"
    assert resets.report() == {ONE: 3}
    assert resets.number == 6
    resets.note(TWO, 4)
    resets.report()
    resets.note_applied(6)
    assert resets.applied() == {ONE: 3}
    assert resets.report() == {TWO: 4}
    assert set(resets.queues) == {ONE, TWO}, "nobody commits there until it was taken"
    resets.forget([ONE])
    assert set(resets.queues) == {TWO}
    assert resets.has_news()
    resets.forget([TWO, ONE])
    assert not resets.has_news()
    assert resets.number == 7


def test_a_query_without_a_number_ignores_what_is_known() -> None:
    resets = GroupResets()
    resets.note(ONE, 3)
    resets.note_applied(None)
    assert resets.applied() == {ONE: 3}
    assert (resets.report(), resets.number) == ({}, 0)
    resets.note(TWO, 1)
    assert resets.report() == {TWO: 1}


def test_a_later_target_is_another_reset() -> None:
    resets = GroupResets()
    resets.note(ONE, 3)
    resets.report()
    resets.note_applied(1)
    resets.note(ONE, 9)
    assert resets.applied() == {}
    assert (resets.report(), resets.number) == ({ONE: 9}, 2)
