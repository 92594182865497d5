"""SQL92 filters over columns of every shape that a reader produces."""

import pickle
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from support.sql92_rows import EvaluationError, evaluate_row, matches_row

from rmq_spark.store.filter import sql92_filter
from rmq_spark.store.filter.sql92_filter import (
    ERROR,
    FALSE,
    NULL,
    TRUE,
    Rows,
    Sql92Filter,
    compile_sql92,
    evaluate_columns,
)
from rmq_spark.store.filter.sql92_lexer import JavaValue, Long
from rmq_spark.store.filter.sql92_parser import parse_sql92

REGIONS = ["eu", "us", None, "apac", "eu", ""]
PRICES = ["1", "5", "2", None, "x", "3"]
WANTED = "region IN ('eu', 'us') AND price BETWEEN 0 AND 3"


def shaped(values: list[str | None], shape: str) -> pa.Array:
    match shape:
        case "large_string":
            return pa.array(values, pa.large_string())
        case "dictionary":
            return pa.array(values).dictionary_encode()
        case "dictionary of a null":
            codes = [0 if value is None else place for place, value in enumerate(values, start=1)]
            return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array([None, *values]))
        case "large dictionary":
            return pa.array(values, pa.large_string()).dictionary_encode()
        case "slice":
            return pa.array(["us", *values, "eu"]).slice(1, len(values))
        case "sliced dictionary":
            return pa.array(["us", *values, "eu"]).dictionary_encode().slice(1, len(values))
        case "chunked":
            return pa.chunked_array([pa.array(values[:2], pa.string()), pa.array(values[2:], pa.string())])
    return pa.array(values, pa.string())


SHAPES = (
    *("string", "large_string", "dictionary", "dictionary of a null", "large dictionary", "slice"),
    *("sliced dictionary", "chunked"),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_does_not_depend_on_the_shape_of_a_column(shape: str) -> None:
    columns = {"region": shaped(REGIONS, shape), "price": shaped(PRICES, shape)}
    for text, expected in {
        WANTED: [True, False, False, False, False, False],
        "region = 'eu'": [True, False, False, False, True, False],
        "region <> 'eu'": [False, True, False, True, False, True],
        "region IS NULL": [False, False, True, False, False, False],
        "region = price": [False] * 6,
        "region = region": [True] * 6,
        "region NOT CONTAINS 'u'": [False, False, False, True, False, True],
        "price > price": [False] * 6,
        "price > 2.5": [False, True, False, False, False, True],
        "region = FALSE": [True, True, False, True, True, True],
    }.items():
        assert compile_sql92(text).matches(columns, 6).tolist() == expected, text


@pytest.mark.parametrize("other", SHAPES)
def test_matches_compares_columns_of_two_shapes(other: str) -> None:
    columns = {"a": pa.array(REGIONS), "b": shaped(["eu", None, None, "eu", "EU", ""], other)}
    assert compile_sql92("a = b").matches(columns, 6).tolist() == [True, False, True, False, False, True]


def test_matches_takes_a_missing_property_for_null() -> None:
    for columns in ({}, {"a": pa.nulls(3, pa.string())}, {"a": pa.nulls(3)}, {"b": pa.array(["1", "1", "1"])}):
        assert compile_sql92("a IS NULL").matches(columns, 3).tolist() == [True] * 3
        assert compile_sql92("a = '1' OR a > 0 OR a").matches(columns, 3).tolist() == [False] * 3


@pytest.mark.parametrize(("text", "expected"), [("TRUE", True), ("FALSE", False), ("NULL", False), ("1 = '1'", True)])
def test_matches_is_equal_for_all_rows_without_properties(text: str, expected: bool) -> None:
    found = compile_sql92(text).matches({}, 4)
    assert found.dtype == np.bool_
    assert found.tolist() == [expected] * 4


@pytest.mark.parametrize("text", ["TRUE", "a > 5", "a = 'x' OR NOT b", "a CONTAINS 'x'"])
def test_matches_returns_an_empty_array_for_no_messages(text: str) -> None:
    assert compile_sql92(text).matches({"a": pa.array([], pa.string())}, 0).tolist() == []


def test_property_names_are_in_order_and_unique() -> None:
    text = "b > 1 AND (NOT c OR b = d) AND a IN ('x') AND e CONTAINS 'a' AND f IS NULL AND -g = 1 AND h BETWEEN i AND j"
    assert compile_sql92(text).property_names == tuple("bcdaefghij")
    assert compile_sql92("TRUE").property_names == ()


def test_sql92_filter_can_be_pickled() -> None:
    wanted = compile_sql92(WANTED)
    copied: Sql92Filter = pickle.loads(pickle.dumps(wanted))
    assert (copied.text, copied.property_names) == (WANTED, ("region", "price"))
    assert matches_row(copied, {"region": "us", "price": "3"})
    assert repr(copied) == f"Sql92Filter({WANTED!r})"


@pytest.mark.parametrize("kept", [0, 1, 50, 2000, 5000])
def test_matches_is_the_same_if_few_undecided_rows_are_picked(kept: int) -> None:
    """Later parts are evaluated for the undecided rows only once these are few, and again for fewer of them."""
    count = 5000
    columns = {
        "a": pa.array(["x" if row % (count // max(kept, 1) or 1) == 0 and kept else "y" for row in range(count)]),
        "b": pa.array([None if row % 7 == 0 else str(row) for row in range(count)]),
        "c": pa.array(["wrong" if row % 5 == 0 else str(row % 10) for row in range(count)]).dictionary_encode(),
    }
    rows = [
        {name: text for name, text in zip(columns, texts, strict=True) if text is not None}
        for texts in zip(*(column.to_pylist() for column in columns.values()), strict=True)
    ]
    for text in (
        "a = 'x' AND b > 100 AND c < 7",
        "a = 'y' OR (b IS NOT NULL AND c <> 3)",
        "NOT (a = 'x' AND b BETWEEN 10 AND 4000) AND c = 1",
        "a = 'x' AND (b = '1000' OR c > 5.5) OR a = 'x' AND b IS NULL",
    ):
        wanted = compile_sql92(text)
        assert wanted.matches(columns, count).tolist() == [matches_row(wanted, row) for row in rows], text


def test_rows_pick_selects_from_picked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql92_filter, "_PICKED_ROWS_MIN", 0)
    columns = {
        "a": pa.array(["x" if row % 4 == 3 else "y" for row in range(64)]),
        "b": pa.array(["x" if row % 16 == 15 else "y" for row in range(64)]),
        "c": pa.array(["x" if row == 31 else "1" for row in range(64)]),
    }
    found = compile_sql92("a = 'x' AND b = 'x' AND c = 'x'").matches(columns, 64)
    assert np.flatnonzero(found).tolist() == [31]
    found = compile_sql92("a = 'y' OR b = 'y' OR c > 5").matches(columns, 64)
    assert np.flatnonzero(~found).tolist() == [15, 31, 47, 63]


@pytest.mark.parametrize(
    ("text", "states"),  # of a message whose a is not a number, and of one without a
    [
        ("a > 1", [ERROR, NULL]),
        ("(a > 1) IS NULL", [ERROR, TRUE]),
        ("NOT ((a > 1) IS NOT NULL)", [ERROR, TRUE]),
        ("(a > 1) CONTAINS 'x'", [ERROR, FALSE]),
        ("(a > 1) CONTAINS ''", [FALSE, FALSE]),
        ("b < -(a > 1)", [NULL, NULL]),  # b is null, so its right side is not evaluated
        ("-(a > 1) > b", [ERROR, NULL]),
        ("b = (a > 1)", [ERROR, TRUE]),
        ("(a > 1) = 'true'", [ERROR, NULL]),
        ("b IS NOT NULL AND a > 1", [FALSE, FALSE]),
        ("a > 1 AND b IS NOT NULL", [ERROR, FALSE]),
        ("b IS NULL OR a > 1", [TRUE, TRUE]),
        ("a > 1 OR b IS NULL", [ERROR, TRUE]),
        ("b AND a > 1", [ERROR, NULL]),
        ("a = '' OR a > 1", [ERROR, NULL]),
    ],
)
def test_evaluate_columns_has_an_error_only_where_rocketmq_evaluates(text: str, states: list[np.uint8]) -> None:
    found = evaluate_columns(parse_sql92(text, strict_end=True), Rows({"a": pa.array(["wrong", None])}, 2))
    assert found.tolist() == states


def test_evaluate_columns_compares_typed_values_as_java_widens_them() -> None:
    """A broker has texts only, but RocketMQ's own tests use typed values."""
    ints = [0, 1, -1, 2**31 - 1, -(2**31), None]
    doubles = [0.0, -0.0, 1.0, float("nan"), -float("nan"), float("inf"), 2.0**31, None]
    kinds: list[tuple[list[JavaValue], pa.DataType]] = [
        (["1", "-0.0", "true", "NaN", "", "2147483648", None], pa.string()),
        ([*ints], pa.int32()),
        ([None if value is None else Long(value) for value in [*ints, 2**63 - 1, -(2**63), 2**53 + 1]], pa.int64()),
        ([*doubles, 2.0**53, 2.0**63], pa.float64()),
        ([True, False, None], pa.bool_()),
    ]
    texts = [f"{minus}a {sign} b" for minus in ("", "-") for sign in ("=", "<>", "<", "<=", ">", ">=")]
    texts += [
        "a",
        "NOT a",
        "a = 1",
        "a < 1.5",
        "a >= 3000000000",
        "a IN ('1')",
        "a NOT CONTAINS 'x'",
        "a = TRUE",
        "a = '1'",
    ]
    for (lefts, left_type), (rights, right_type) in product(kinds, kinds):
        pairs = list(product(lefts, rights))
        columns = {
            "a": pa.array([left for left, _ in pairs], left_type),
            "b": pa.array([right for _, right in pairs], right_type),
        }
        for text in texts:
            wanted = compile_sql92(text)
            found = evaluate_columns(parse_sql92(text, strict_end=True), Rows(columns, len(pairs))).tolist()
            for (left, right), state in zip(pairs, found, strict=True):
                try:
                    answer = evaluate_row(wanted._tree, {"a": left, "b": right})
                except EvaluationError:
                    expected = ERROR
                else:
                    expected = NULL if answer is None else TRUE if answer is True else FALSE
                assert state == expected, (text, left, right)
