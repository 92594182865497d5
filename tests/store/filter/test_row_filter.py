"""Tag expressions and their filters of entries and messages, as in RocketMQ's brokers and clients."""

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
    parse_tag_expression,
)
from rmq_spark.store.format.consume_queue_entry import MAX_ADDRESS, to_address
from rmq_spark.store.format.java import string_hash


@pytest.mark.parametrize("text", ["*", "", None])
def test_parse_tag_expression_matches_all_for_none_empty_and_star(text: str | None) -> None:
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
def test_parse_tag_expression_finds_the_tags_of_rocketmq(text: str, tags: object, codes: set[int]) -> None:
    found = parse_tag_expression(text)
    assert found.tags == tuple(tags)  # type: ignore[arg-type]
    assert found.codes == codes


@pytest.mark.parametrize("text", ["||", "||||"])
def test_parse_tag_expression_refuses_separators_alone(text: str) -> None:
    with pytest.raises(OptionError, match=r'"\|\|.* has nothing between its separators; expected \*, or tags'):
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
def test_parse_tag_expression_refuses_a_comma_or_bar_in_a_tag(text: str, tag: str, meant: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_tag_expression(text)
    said = str(caught.value)
    assert f'the tag expression "{text}" has the tag "{tag}"' in said
    assert "TAGS IN (" in said
    assert f'"{meant}"' in said if meant else '"A || B"' in said


def test_parse_tag_expression_refuses_half_a_surrogate_pair() -> None:
    with pytest.raises(OptionError, match=r"'\\ud83d' is not valid Unicode"):
        parse_tag_expression("A || \ud83d")


def test_tag_expression_has_one_form_for_equal_tags() -> None:
    assert str(parse_tag_expression("B||A")) == str(parse_tag_expression(" A || B || A")) == "A || B"


def judge(text: str, tags: list[str | None], codes: list[int] | None = None) -> tuple[list[bool], list[bool]]:
    """Return which entries (by default with the hashes of the tags) and which messages match."""
    wanted = tag_filter(text)
    codes = [string_hash(tag) if tag else 0 for tag in tags] if codes is None else codes
    units = wanted.may_match(np.array(codes, np.int64))
    return units.tolist(), wanted.matches({"TAGS": pa.array(tags, pa.string())}, len(tags)).tolist()


def tag_filter(text: str) -> RowFilter:
    found = compile_filter(Expression(TAG, text))
    assert found is not None
    return found


def test_may_match_accepts_a_collision_and_matches_does_not() -> None:
    assert judge("Aa", ["Aa", "BB"]) == ([True, True], [True, False])
    collisions: list[str | None] = ["polygenelubricants", "GydZG_", "DESIGNING WORKHOUSES"]
    assert judge("GydZG_ || x", collisions) == ([True] * 3, [False, True, False])


def test_may_match_refuses_other_tags_and_no_tag() -> None:
    assert judge("A || B", ["C", None, "B"]) == ([False, False, True], [False, False, True])
    assert judge("order-created", ["order-created", None]) == ([True, False], [True, False])


def test_may_match_and_matches_refuse_all_for_blanks() -> None:
    assert judge("|| ||", ["A", None, " "]) == ([False] * 3, [False] * 3)


def test_may_match_compares_the_signed_low_32_bits_of_a_tags_code() -> None:
    code = string_hash("order-created")
    assert code < 0
    assert judge("order-created", [None] * 3, [code, code & 0xFFFFFFFF, code + (1 << 32)])[0] == [True] * 3


def test_may_match_accepts_an_address_in_the_extension() -> None:
    codes = [to_address(0), to_address(48), MAX_ADDRESS, MAX_ADDRESS + 1, 66]
    assert judge("A", ["A"] * 5, codes)[0] == [True, True, True, False, False]


def test_may_match_and_matches_accept_many_tags() -> None:
    tags: list[str | None] = [f"tag-{number}" for number in range(200)]
    text = " || ".join(f"tag-{number}" for number in range(0, 200, 7))
    expected = [number % 7 == 0 for number in range(200)]
    assert judge(text, tags) == (expected, expected)


def test_asks_units_of_is_false_for_entries_without_a_hash() -> None:
    wanted = tag_filter("A")
    assert wanted.asks_units_of("orders", are_batches=False)
    assert wanted.asks_units_of("%DLQ%billing", are_batches=False)
    assert not wanted.asks_units_of("orders", are_batches=True)
    assert not wanted.asks_units_of("SCHEDULE_TOPIC_XXXX", are_batches=False)


def test_is_filtered_by_default_is_false_for_retry_topics() -> None:
    assert is_filtered_by_default("orders")
    assert not is_filtered_by_default("%RETRY%billing")


def test_make_expression_refuses_two_kinds_of_expression() -> None:
    assert make_expression() is None
    assert compile_filter(None) is None
    assert make_expression(tags="A") == Expression(TAG, "A")
    assert make_expression(sql92="a > 5") == Expression(SQL92, "a > 5")
    with pytest.raises(OptionError, match=r"tags and sql92 are both given.*TAGS IN"):
        make_expression(tags="A", sql92="a > 5")


def test_expression_can_be_pickled() -> None:
    expression = Expression(TAG, "A || B")
    assert pickle.loads(pickle.dumps(expression)) == expression
    assert str(expression) == 'tags="A || B"'
