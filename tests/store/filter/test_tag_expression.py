"""Tag expressions mean what they mean to RocketMQ; units and messages are told by them as brokers and clients do."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import (
    SQL92,
    TAG,
    Expression,
    RowFilter,
    compile_filter,
    is_filtered_by_default,
    make_expression,
)
from rmq_spark.store.filter.tag_expression import parse_tag_expression
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.unit_ext import MAX_ADDRESS, to_address


@pytest.mark.parametrize("text", ["*", "", None])
def test_nothing_and_a_star_want_all(text: str | None) -> None:
    assert parse_tag_expression(text).tags is None
    assert str(parse_tag_expression(text)) == "*"
    assert text is None or compile_filter(Expression(TAG, text)) is None


@pytest.mark.parametrize(
    ("text", "tags", "codes"),
    [
        ("A||B", "AB", {65, 66}),
        ("A || B", "AB", {65, 66}),
        ("A||B||", "AB", {65, 66}),
        (" A ", "A", {65}),
        ("A||", "A", {65}),
        ("||A", "A", {65}),
        ("A||A", "A", {65}),
        (" * ", ["*"], {42}),
        ("A || *", "A*", {65, 42}),
        ("|| ||", "", set()),
        ("   ", "", set()),
        ("中文 || TagA", ["中文", "TagA"], {646394, 2598919}),
        ("\tA\n||B", "AB", {65, 66}),
        ("A\u3000||B", ["A\u3000", "B"], {14303, 66}),
        ("A\x85||\x1cB", ["A\x85", "B"], {string_hash("A\x85"), 66}),
        ("order-created", ["order-created"], {-392709271}),
        ("😀", ["😀"], {1772899}),
    ],
)
def test_an_expression_has_the_tags_that_rocketmq_finds_in_it(text: str, tags: object, codes: set[int]) -> None:
    found = parse_tag_expression(text)
    assert found.tags == tuple(tags)  # type: ignore[arg-type]
    assert found.codes == codes


@pytest.mark.parametrize("text", ["||", "||||"])
def test_separators_alone_are_an_error_that_shows_what_is_accepted(text: str) -> None:
    with pytest.raises(OptionError, match=r'"\|\|.* has nothing between its separators\. Accepted: \*, or tags'):
        parse_tag_expression(text)


@pytest.mark.parametrize(
    ("text", "tag", "meant"),
    [
        ("a,b", "a,b", "a || b"),
        ("a, b || c", "a, b", "a || b || c"),
        ("a | b", "a | b", "a || b"),
        ("A|B", "A|B", "A || B"),
        ("A|||B", "|B", "A || B"),
        (",", ",", ""),
    ],
)
def test_a_comma_or_a_single_bar_in_a_tag_is_refused_with_what_was_meant(text: str, tag: str, meant: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_tag_expression(text)
    said = str(caught.value)
    assert f'the tag expression "{text}" has the tag "{tag}"' in said
    assert "TAGS IN (" in said
    assert f'"{meant}"' in said if meant else '"A || B"' in said


def test_a_half_of_a_character_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"'\\ud83d' is no text"):
        parse_tag_expression("A || \ud83d")


def test_expressions_that_want_the_same_tags_have_one_form() -> None:
    assert str(parse_tag_expression("B||A")) == str(parse_tag_expression(" A || B || A")) == "A || B"


def judge(text: str, tags: list[str | None], codes: list[int] | None = None) -> tuple[list[bool], list[bool]]:
    """Return what the filter says of units (by default with the hashes of the tags) and of messages."""
    wanted = tag_filter(text)
    codes = [string_hash(tag) if tag else 0 for tag in tags] if codes is None else codes
    units = wanted.may_match(np.array(codes, np.int64))
    return units.tolist(), wanted.matches({"TAGS": pa.array(tags, pa.string())}, len(tags)).tolist()


def tag_filter(text: str) -> RowFilter:
    found = compile_filter(Expression(TAG, text))
    assert found is not None
    return found


def test_a_collision_passes_the_unit_and_not_the_message() -> None:
    assert judge("Aa", ["Aa", "BB"]) == ([True, True], [True, False])
    collisions: list[str | None] = ["polygenelubricants", "GydZG_", "DESIGNING WORKHOUSES"]
    assert judge("GydZG_ || x", collisions) == ([True] * 3, [False, True, False])


def test_messages_with_other_tags_and_without_one_are_told_by_their_units() -> None:
    assert judge("A || B", ["C", None, "B"]) == ([False, False, True], [False, False, True])
    assert judge("order-created", ["order-created", None]) == ([True, False], [True, False])


def test_blanks_and_separators_match_nothing() -> None:
    assert judge("|| ||", ["A", None, " "]) == ([False] * 3, [False] * 3)


def test_only_the_low_32_bits_of_a_tags_code_count_and_they_are_signed() -> None:
    code = string_hash("order-created")
    assert code < 0
    assert judge("order-created", [None] * 3, [code, code & 0xFFFFFFFF, code + (1 << 32)])[0] == [True] * 3


def test_an_address_in_the_extension_says_nothing_so_the_message_is_asked() -> None:
    codes = [to_address(0), to_address(48), MAX_ADDRESS, MAX_ADDRESS + 1, 66]
    assert judge("A", ["A"] * 5, codes)[0] == [True, True, True, False, False]


def test_many_tags_are_found_like_few() -> None:
    tags: list[str | None] = [f"tag-{number}" for number in range(200)]
    text = " || ".join(f"tag-{number}" for number in range(0, 200, 7))
    expected = [number % 7 == 0 for number in range(200)]
    assert judge(text, tags) == (expected, expected)


def test_units_are_not_asked_where_they_hold_no_hash() -> None:
    wanted = tag_filter("A")
    assert wanted.asks_units_of("orders", are_batches=False)
    assert wanted.asks_units_of("%DLQ%billing", are_batches=False)
    assert not wanted.asks_units_of("orders", are_batches=True)
    assert not wanted.asks_units_of("SCHEDULE_TOPIC_XXXX", are_batches=False)


def test_an_expression_for_all_topics_is_not_for_retries() -> None:
    assert is_filtered_by_default("orders")
    assert not is_filtered_by_default("%RETRY%billing")


def test_a_subscription_has_one_kind_of_expression() -> None:
    assert make_expression() is None
    assert compile_filter(None) is None
    assert make_expression(tags="A") == Expression(TAG, "A")
    assert make_expression(sql92="a > 5") == Expression(SQL92, "a > 5")
    with pytest.raises(OptionError, match=r"tags and sql92 are both given.*TAGS IN"):
        make_expression(tags="A", sql92="a > 5")


def test_an_expression_travels() -> None:
    expression = Expression(TAG, "A || B")
    assert pickle.loads(pickle.dumps(expression)) == expression
    assert str(expression) == 'tags="A || B"'
