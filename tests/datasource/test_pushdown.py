"""Conditions as Spark passes them: the rows that remain to be read, and conditions that Spark need not repeat."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.plan.pushdown import (
    ALL,
    MAX_LOOK_UPS,
    Predicate,
    Pushdown,
    complement,
    holds,
    intersect,
    offsets_where,
    plan_pushdown,
    times_where,
)
from rmq_spark.store.model import QueueKey, QueueRange

usual = settings(deadline=None, derandomize=True)

ORDERS, RETRY = QueueKey("orders", 0), QueueKey("%RETRY%g", 0)
NUMBERS = st.none() | st.integers(-3, 12)
COMPARING = st.sampled_from(
    ["EqualTo", "EqualNullSafe", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual"]
)
PREDICATES = st.one_of(
    st.builds(Predicate, st.just("queueOffset"), COMPARING, NUMBERS, st.booleans()),
    st.builds(Predicate, st.just("queueOffset"), st.just("In"), st.lists(NUMBERS, max_size=5), st.booleans()),
    st.builds(Predicate, st.just("queueOffset"), st.sampled_from(["IsNull", "IsNotNull"]), st.none(), st.booleans()),
)


def sql_says(one: Predicate, value: int) -> bool:
    """Three-valued logic, spelt out."""
    compared = {
        "EqualTo": lambda a, b: a == b,
        "GreaterThan": lambda a, b: a > b,
        "GreaterThanOrEqual": lambda a, b: a >= b,
        "LessThan": lambda a, b: a < b,
        "LessThanOrEqual": lambda a, b: a <= b,
    }
    if one.op in compared:
        truth = None if one.value is None else compared[one.op](value, one.value)
    elif one.op == "EqualNullSafe":
        truth = value == one.value
    elif one.op == "In":
        truth = value in one.value or (None if None in one.value else False)
    else:
        truth = one.op == "IsNotNull"
    return truth is not None and truth != one.is_negated


@usual
@given(PREDICATES)
def test_a_number_passes_as_sql_says(one) -> None:
    passing = [n for n in range(15) if sql_says(one, n)]
    assert [n for n in range(15) if holds(one, n)] == passing
    assert [n for n in range(15) if any(begin <= n < end for begin, end in offsets_where(one))] == passing


SETS = st.sets(st.integers(0, 12), max_size=8)


@usual
@given(SETS, SETS)
def test_intervals_are_sets(one, other) -> None:
    a, b = ([(n, n + 1) for n in sorted(numbers)] for numbers in (one, other))
    both = intersect(a, b)
    assert {n for begin, end in both for n in range(begin, end)} == one & other
    assert all(x[1] < y[0] for x, y in pairwise(both))
    rest = intersect([(0, 20)], complement(a))
    assert {n for begin, end in rest for n in range(begin, end)} == set(range(20)) - one


@usual
@given(st.lists(PREDICATES, max_size=4))
def test_ranges_are_cut_to_the_offsets_for_which_all_hold(some) -> None:
    left = plan_pushdown(some).cut([QueueRange(ORDERS, 1, 10)])
    read = [n for part in left for n in range(part.begin, part.end)]
    assert read == [n for n in range(1, 10) if all(sql_says(one, n) for one in some)]


AT = datetime(2026, 1, 1, tzinfo=UTC)
MS = int(AT.timestamp() * 1000)


@usual
@given(
    COMPARING,
    st.integers(-2500, 2500),
    st.integers(-5, 5),
)
def test_times_are_cut_to_the_millisecond_that_is_stored(op, micros, row_ms) -> None:
    one = Predicate("storeTimestamp", op, AT + timedelta(microseconds=micros))
    first, last = times_where(one)
    is_in = (first is None or first <= MS + row_ms) and (last is None or MS + row_ms <= last)
    assert is_in == sql_says(Predicate("t", op, micros), row_ms * 1000)


def test_times_of_a_list_are_cut_at_both_ends_and_what_says_nothing_cuts_nothing() -> None:
    many = Predicate("storeTimestamp", "In", [AT + timedelta(seconds=1), None, AT])
    assert times_where(many) == (MS, MS + 1000)
    for one in (many._replace(is_negated=True), Predicate("t", "IsNull"), Predicate("t", "In", [None])):
        assert times_where(one) == (None, None)
    assert times_where(Predicate("t", "EqualTo", AT + timedelta(microseconds=1))) == (MS + 1, MS), "no ms is that"


def test_of_several_conditions_on_time_the_narrowest_count() -> None:
    later = AT + timedelta(seconds=1)
    bounds = [("storeTimestamp", "GreaterThanOrEqual", at) for at in (AT, later, AT)] + [
        ("storeTimestamp", "LessThan", at + timedelta(hours=1)) for at in (later, AT, later)
    ]
    pushdown = plan(*bounds)
    assert (pushdown.first_ms, pushdown.last_ms) == (MS + 1000, MS + 3_600_000 - 1)


def plan(*some) -> Pushdown:
    return plan_pushdown([Predicate(*one) if one else None for one in some])


def test_only_what_is_answered_exactly_need_not_be_asked_again() -> None:
    pushdown = plan(
        ("queueId", "EqualTo", 1),
        ("topic", "EqualTo", "orders"),
        ("queueOffset", "IsNotNull"),
        ("physicalTopic", "StringStartsWith", "o"),
        ("storeTimestamp", "LessThan", AT),
        ("keys", "EqualTo", "k"),
        ("queueOffset", "LessThan", True),  # no number
        None,
        ("body", "EqualTo", b"x"),
        ("queueId", "StringStartsWith", "1"),
        ("msgId", "IsNotNull"),
        ("tags", "IsNotNull"),
        ("tags", "In", ["A", None]),
        ("tags", "EqualTo", "B", True),
    )
    assert pushdown.exact == {0, 2, 3}
    assert [one.column for one in pushdown.used] == [
        "queueId",
        "topic",
        "physicalTopic",
        "storeTimestamp",
        "keys",
        "tags",
    ]
    assert pushdown.tags == ("A",)


def test_retry_queues_hold_messages_of_any_topic() -> None:
    pushdown = plan(("topic", "EqualTo", "orders"))
    assert [pushdown.wants(queue) for queue in (ORDERS, RETRY, QueueKey("other", 0))] == [True, True, False]
    assert not plan(("physicalTopic", "EqualTo", "orders")).wants(RETRY)
    assert plan(("topic", "EqualTo", "orders", True)).wants(RETRY)
    assert not plan(("topic", "In", ["orders", None], True)).wants(QueueKey("other", 0)), "null is in the list"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("EqualTo", "a"), ("a",)),
        (("EqualTo", "a bcd e"), ("bcd",)),
        (("In", ["a", None, "a b", "bb a"]), ("a", "bb")),
        (("In", [None]), ()),
        (("EqualTo", ""), None),
        (("EqualTo", "  "), None),
        (("In", ["a", " "]), None),
        (("EqualTo", "a", True), None),
        (("EqualNullSafe", None), None),
        (("EqualNullSafe", "a"), ("a",)),
        (("StringContains", "a"), None),
        (("EqualTo", "a\ufffd"), None),
        (("In", [str(n) for n in range(MAX_LOOK_UPS + 1)]), None),
    ],
)
def test_keys_are_looked_up_by_a_word_of_each(keys, words) -> None:
    assert plan(("keys", *keys)).keys == words


def test_ids_go_before_keys_and_short_lists_before_long_ones() -> None:
    pushdown = plan(
        ("msgId", "In", ["a", "b"]), ("keys", "EqualTo", "k"), ("msgId", "EqualTo", "a"), ("msgId", "In", ["a", "c"])
    )
    assert (pushdown.keys, pushdown.message_ids) == (None, ("a",))


def test_a_condition_that_nobody_understands_changes_nothing() -> None:
    assert plan(None, ("tags", "IsNull"), ("storeTimestamp", "LessThan", AT.replace(tzinfo=None))) == Pushdown()
    assert plan().cut([QueueRange(ORDERS, 1, 2)]) == [QueueRange(ORDERS, 1, 2)]
    assert ALL == [(0, 1 << 63)]


def test_conditions_are_shown_as_they_were_typed() -> None:
    assert str(Predicate("queueId", "In", list(range(9)))) == "queueId in [0, 1, 2, 3, 4, '…']"
    assert str(Predicate("keys", "EqualTo", "a", True)) == "not keys = 'a'"
    assert str(Predicate("keys", "IsNull")) == "keys is null"
