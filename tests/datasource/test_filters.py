"""filters: the options tags and sql92 by topic, their errors, and the text that group members compare."""

import json
import pickle

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options.filters import Filters
from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.spark.group_planner import group_terms
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
def test_tags_as_text_apply_to_all_topics_except_retry_topics(name: str) -> None:
    filters = parse({name: "A || B"}).filters
    expected = Expression(TAG, "A || B")
    assert [filters.of(topic) for topic in ("orders", "payments", "%DLQ%g")] == [expected] * 3
    assert filters.of("%RETRY%g") is None
    assert pickle.loads(pickle.dumps(filters)) == filters
    assert parse({}).filters == Filters()


def test_tags_with_a_topic_twice_in_json_are_refused() -> None:
    assert 'found "orders" twice' in refusal({"tags": '{"orders": "A", "orders": "B"}'})
    assert 'found "0" twice' in refusal({"startingOffsets": '{"orders": {"0": 1, "0": 2}}'})


def test_tags_and_sql92_in_json_apply_by_topic() -> None:
    filters = parse({"tags": '{"orders": "A || B", "payments": "*"}'}).filters
    assert filters.of("orders") == Expression(TAG, "A || B")
    assert filters.of("payments") == Expression(TAG, "*")
    both = parse({"tags": ' {"orders": "A"}', "sql92": '{"payments": "a > 5"}'}).filters
    assert (both.of("orders"), both.of("payments")) == (Expression(TAG, "A"), Expression(SQL92, "a > 5"))
    retried = parse({"sql92": '{"%RETRY%g": "a > 5"}'}, consumerGroup="g").filters
    assert retried.of("%RETRY%g") == Expression(SQL92, "a > 5"), "an explicit name includes the retry topic"


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tags": "A", "sql92": "a > 5"}, "both given, one of them for all topics"),
        ({"tags": '{"orders": "A"}', "sql92": '{"orders": "a > 5"}'}, "both given for orders"),
        ({"tags": "A", "sql92": '{"orders": "a > 5"}'}, "both given, one of them for all topics"),
        ({"tags": "*", "sql92": "a > 5"}, "both given, one of them for all topics"),
    ],
)
def test_make_filters_refuses_two_expressions_for_one_topic(given: dict[str, str], where: str) -> None:
    message = refusal(given)
    assert where in message
    assert "TAGS IN" in message, "the next step"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tags": "A", "subExpression": "B"}, "tags and its alias subExpression are both given"),
        ({"tags": "||"}, 'tags="||": expected a tag expression: '),
        ({"tags": '{"orders": "||"}'}, "expected a tag expression for topic orders: "),
        ({"tags": "|| ||"}, "found no tag, which matches no message"),
        ({"tags": "{}"}, "found no topic"),
        ({"tags": '{"orders": 5}'}, "found no text for topic orders"),
        ({"tags": '{"orders": "A"'}, "found invalid JSON"),
        ({"tags": '{"or ders": "A"}'}, "found the topic name"),
        (
            {"tags": '{"elsewhere": "A"}'},
            'tags: found topic elsewhere; expected one that subscribe="orders,payments" covers',
        ),
        ({"sql92": '{"elsewhere": "a = 1"}'}, "sql92: found topic elsewhere"),
        ({"sql92": '{"payments": "a >"}'}, "topic payments: sql92"),
        ({"sql92": "a = 'x') "}, "sql92"),
        ({"sql92": "a like 'x%'"}, "sql92"),
        ({"sql92": "'x'"}, "sql92"),
    ],
)
def test_parse_tags_and_parse_sql92_name_the_fault(given: dict[str, str], why: str) -> None:
    assert why in refusal(given)


def test_parse_sql92_marks_the_fault() -> None:
    lines = refusal({"sql92": "amount > 5 AND region == 'EU'"}).split("\n")
    at = next(number for number, line in enumerate(lines) if line.strip() == "^")
    assert lines[at - 1][lines[at].index("^") :].startswith("= 'EU'")


def test_tags_by_topic_work_with_a_pattern_and_with_assign() -> None:
    given = {"tags": '{"orders-eu": "A"}'}
    assert parse(given, subscribePattern="orders-.*").filters.of("orders-eu") == Expression(TAG, "A")
    assert "expected one that" in refusal(given, subscribePattern="payments-.*")
    assert parse(given, assign='{"orders-eu": [0]}').filters.topics == (("orders-eu", Expression(TAG, "A")),)
    assert "expected one that" in refusal(given, assign='{"orders": [0]}')


def subscription_of(given: dict[str, str], **more: str) -> str:
    options = parse(given, consumerGroup="g", **more).for_stream()
    assert options.group is not None
    return group_terms(options, options.group).subscription


def test_describe_is_equal_for_filters_that_select_the_same() -> None:
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
