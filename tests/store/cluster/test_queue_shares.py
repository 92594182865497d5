"""Which queues belong to a member, by the lists of brokers."""

import pytest

from rmq_spark.store.cluster.queue_shares import (
    Moves,
    ShareRule,
    TopicMembers,
    compare_shares,
    join_lists,
    share_topic,
)
from rmq_spark.store.model import QueueKey
from rmq_spark.store.rebalance.strategies import Average

QUEUES = [QueueKey("orders", number, broker) for broker in ("broker-a", "broker-b") for number in range(2)]
RULE = ShareRule(Average(), "billing", "one")


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([], TopicMembers(None, False)),
        ([None, None], TopicMembers(None, False)),
        ([("one",), None], TopicMembers(frozenset({"one"}), True)),
        ([("one", "two"), ("one", "three")], TopicMembers(frozenset({"one", "two", "three"}), True)),
        ([("one",), ("two",)], TopicMembers(frozenset({"one", "two"}), False)),
        ([("one",), ()], TopicMembers(frozenset({"one"}), False)),
    ],
)
def test_members_of_a_topic_are_those_of_all_its_brokers(
    lists: list[tuple[str, ...] | None], expected: TopicMembers
) -> None:
    assert join_lists("one", lists) == expected


def test_a_topic_is_shared_among_its_members() -> None:
    members = TopicMembers(frozenset({"two", "one"}), True)
    assert share_topic(RULE, QUEUES[::-1], members, []) == set(QUEUES[:2])
    other = ShareRule(Average(), "billing", "two")
    assert share_topic(other, QUEUES, members, QUEUES) == set(QUEUES[2:])


def test_queues_stay_while_no_broker_answers() -> None:
    gone = QueueKey("orders", 9, "broker-c")
    assert share_topic(RULE, QUEUES, TopicMembers(None, False), [QUEUES[3], gone]) == {QUEUES[3]}


def test_a_member_that_a_broker_does_not_list_owns_nothing() -> None:
    assert share_topic(RULE, QUEUES, TopicMembers(frozenset({"one", "two"}), False), QUEUES) == frozenset()


def test_moves_are_sorted_and_only_readable_queues_are_gained() -> None:
    one, two, three, four = QUEUES
    assert compare_shares({three, one}, {four, two, three}, {four, one, three}) == Moves((one,), (four,))
    assert compare_shares({one}, {one}, ()) == Moves((), ()), "its broker is away"
