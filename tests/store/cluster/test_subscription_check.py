"""Whether members of a group agree with a query."""

import pytest

from rmq_spark.store.cluster.responses import GroupConnectionsResponse, MemberConnection, Subscription
from rmq_spark.store.cluster.subscription_check import find_disagreement

OURS = (Subscription("%RETRY%billing", "*"), Subscription("orders", "A || B"))
RETRY = Subscription("%RETRY%billing", "*")


def group(
    *subscriptions: Subscription,
    members: tuple[str, ...] = ("192.0.2.2@7",),
    kind: str = "CONSUME_PASSIVELY",
    model: str = "CLUSTERING",
) -> GroupConnectionsResponse:
    connections = tuple(MemberConnection(one, "192.0.2.2:5", "JAVA", 479) for one in members)
    return GroupConnectionsResponse(connections, kind, model, "", {one.topic: one for one in subscriptions})


def check(found: GroupConnectionsResponse) -> str | None:
    one = find_disagreement(OURS, found, "broker-a", "me")
    return None if one is None else one.text


@pytest.mark.parametrize(
    "found",
    [
        GroupConnectionsResponse(),
        group(Subscription("other", "*"), members=()),
        group(Subscription("other", "*"), members=("me",)),
        group(*OURS),
        group(Subscription("orders", " B||A")),
        group(Subscription("orders", "A || B", ""), RETRY),
        group(Subscription("orders", "A||B||A"), kind="CONSUME_ACTIVELY"),
        group(Subscription("orders", "B || A"), Subscription("%RETRY%billing", "A")),
    ],
)
def test_members_agree(found: GroupConnectionsResponse) -> None:
    assert check(found) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (group(RETRY), "no topic"),
        (group(Subscription("orders", "*")), "subscribes to orders,"),
        (group(Subscription("orders", "A")), 'orders (tags="A")'),
        (group(Subscription("orders", "a,b")), 'orders (tags="a,b")'),
        (group(Subscription("orders", "A || B", "SQL92")), 'orders (sql92="A || B")'),
        (group(*OURS, Subscription("payments", "*")), "payments"),
        (group(*OURS, model="BROADCASTING"), "messageModel=BROADCASTING"),
    ],
)
def test_members_disagree(found: GroupConnectionsResponse, words: str) -> None:
    text = check(found)
    assert text is not None
    assert words in text
    assert "the member 192.0.2.2@7 at broker broker-a" in text
    if "subscribes" in text:
        assert 'this query to orders (tags="A || B")' in text


def test_many_members_are_not_all_named() -> None:
    text = check(group(members=("me", "five", "one", "two", "three", "four")))
    assert text is not None
    assert "the members five, four, one and 2 more at broker broker-a" in text


def test_the_same_sql_is_equal() -> None:
    sql = Subscription("orders", "a > 1", "SQL92")
    assert find_disagreement([sql], group(sql), "broker-a", "me") is None
    assert find_disagreement([sql], group(Subscription("orders", "a > 2", "SQL92")), "broker-a", "me") is not None


@pytest.mark.parametrize(
    ("subscriptions", "may_pass"),
    [
        ((Subscription("orders", "A || B"), Subscription("payments", "*")), True),
        ((Subscription("orders", "B || A"), Subscription("refunds", "A"), Subscription("payments", "*")), True),
        ((Subscription("orders", "A"), Subscription("payments", "*")), False),
        ((Subscription("refunds", "*"),), False),
    ],
)
def test_with_a_pattern_other_topics_may_pass(subscriptions: tuple[Subscription, ...], may_pass: bool) -> None:
    ours = (*OURS, Subscription("refunds", "A"))
    for has_pattern in (False, True):
        one = find_disagreement(ours, group(*subscriptions), "broker-a", "me", has_pattern=has_pattern)
        assert one is not None
        assert one.may_pass == (has_pattern and may_pass)
