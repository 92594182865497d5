"""The options tags and sql92: what they say of each topic, what is refused at once, and what groups compare."""

import json
import pickle

import pytest

from rmq_spark.datasource.filters import Filters
from rmq_spark.datasource.group_share import group_terms
from rmq_spark.datasource.options import ReadOptions, parse_options
from rmq_spark.store import SQL92, TAG, Expression
from rmq_spark.store.errors import OptionError

NEEDED = {"path": "/s", "subscribe": "orders,payments"}


def parse(given: dict[str, str], **more: str) -> ReadOptions:
    base = NEEDED | more
    if {"assign", "subscribePattern"} & more.keys():
        del base["subscribe"]
    return parse_options(base | given, 0)


def refusal(given: dict[str, str], **more: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse(given, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tags", "subExpression", "subexpression", "TAGS"])
def test_a_text_is_for_all_topics_but_those_of_retries(name: str) -> None:
    filters = parse({name: "A || B"}).filters
    expected = Expression(TAG, "A || B")
    assert [filters.of(topic) for topic in ("orders", "payments", "%DLQ%g")] == [expected] * 3
    assert filters.of("%RETRY%g") is None
    assert pickle.loads(pickle.dumps(filters)) == filters
    assert parse({}).filters == Filters()


def test_a_topic_that_json_names_twice_is_refused() -> None:
    assert 'names "orders" twice.' in refusal({"tags": '{"orders": "A", "orders": "B"}'})
    assert 'names "0" twice.' in refusal({"startingOffsets": '{"orders": {"0": 1, "0": 2}}'})


def test_json_is_by_topic() -> None:
    filters = parse({"tags": '{"orders": "A || B", "payments": "*"}'}).filters
    assert filters.of("orders") == Expression(TAG, "A || B")
    assert filters.of("payments") == Expression(TAG, "*")
    both = parse({"tags": ' {"orders": "A"}', "sql92": '{"payments": "a > 5"}'}).filters
    assert (both.of("orders"), both.of("payments")) == (Expression(TAG, "A"), Expression(SQL92, "a > 5"))
    retried = parse({"sql92": '{"%RETRY%g": "a > 5"}'}, consumerGroup="g").filters
    assert retried.of("%RETRY%g") == Expression(SQL92, "a > 5"), "who names it means it"


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tags": "A", "sql92": "a > 5"}, "both given, one of them for all topics"),
        ({"tags": '{"orders": "A"}', "sql92": '{"orders": "a > 5"}'}, "both given for orders"),
        ({"tags": "A", "sql92": '{"orders": "a > 5"}'}, "both given, one of them for all topics"),
        ({"tags": "*", "sql92": "a > 5"}, "both given, one of them for all topics"),
    ],
)
def test_a_topic_has_one_expression(given: dict[str, str], where: str) -> None:
    message = refusal(given)
    assert where in message
    assert "TAGS IN" in message, "what to do instead"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tags": "A", "subExpression": "B"}, "tags and its alias subExpression are both given"),
        ({"tags": "||"}, 'tags="||" is no expression'),
        ({"tags": '{"orders": "||"}'}, "is no expression for orders"),
        ({"tags": "|| ||"}, "names no tag, so that nothing would be read"),
        ({"tags": "{}"}, "names no topic"),
        ({"tags": '{"orders": 5}'}, "gives orders no text"),
        ({"tags": '{"orders": "A"'}, "is no JSON"),
        ({"tags": '{"or ders": "A"}'}, "which no topic can be called"),
        ({"tags": '{"elsewhere": "A"}'}, 'tags names the topic elsewhere, which subscribe="orders,payments" does not'),
        ({"sql92": '{"elsewhere": "a = 1"}'}, "sql92 names the topic elsewhere"),
        ({"sql92": '{"payments": "a >"}'}, "For the topic payments: sql92"),
        ({"sql92": "a = 'x') "}, "sql92"),
        ({"sql92": "a like 'x%'"}, "sql92"),
        ({"sql92": "'x'"}, "sql92"),
    ],
)
def test_what_is_wrong_is_said_before_a_query_starts(given: dict[str, str], why: str) -> None:
    assert why in refusal(given)


def test_the_place_is_marked() -> None:
    lines = refusal({"sql92": "amount > 5 AND region == 'EU'"}).split("\n")
    at = next(number for number, line in enumerate(lines) if line.strip() == "^")
    assert lines[at - 1][lines[at].index("^") :].startswith("= 'EU'")


def test_topics_of_a_pattern_and_of_queues_are_known_by_name_too() -> None:
    given = {"tags": '{"orders-eu": "A"}'}
    assert parse(given, subscribePattern="orders-.*").filters.of("orders-eu") == Expression(TAG, "A")
    assert "does not cover" in refusal(given, subscribePattern="payments-.*")
    assert parse(given, assign='{"orders-eu": [0]}').filters.topic_names == ("orders-eu",)
    assert "does not cover" in refusal(given, assign='{"orders": [0]}')


def subscription_of(given: dict[str, str], **more: str) -> str:
    options = parse(given, consumerGroup="g", **more).for_stream()
    assert options.group is not None
    return group_terms(options, options.group).subscription


def test_members_of_a_group_compare_their_filters() -> None:
    plain = subscription_of({})
    assert subscription_of({"tags": "*"}) == plain
    assert subscription_of({"tags": json.dumps({"orders": "*"})}) == plain
    of_tags = subscription_of({"tags": "B||A"})
    assert of_tags == plain + ', tags="A || B"'
    assert subscription_of({"subExpression": " A || B || A"}) == of_tags
    assert subscription_of({"tags": json.dumps({"payments": "A||B", "orders": "B||A"})}) == of_tags
    assert subscription_of({"tags": json.dumps({"orders": "A||B"})}) == plain + ', tags="A || B" for orders'
    assert subscription_of({"sql92": "a > 5"}) == plain + ', sql92="a > 5"'
    pattern = subscription_of({"tags": "A"}, subscribePattern="o.*")
    assert pattern == subscription_of({}, subscribePattern="o.*") + ', tags="A"'
