"""Evaluation by column and row by row: equal states for random expressions and messages."""

import random

import pyarrow as pa
import pytest
from support.sql92_rows import EvaluationError, evaluate_row
from support.sql92_samples import Sql92Samples

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter import sql92_filter, sql92_values
from rmq_spark.store.filter.sql92_filter import ERROR, FALSE, NULL, TRUE, Rows, evaluate_columns
from rmq_spark.store.filter.sql92_lexer import Node
from rmq_spark.store.filter.sql92_parser import parse_sql92

NAMES = ("a", "b", "c", "_d$1")


def state_of_row(tree: Node, message: dict[str, str]) -> int:
    try:
        answer = evaluate_row(tree, message)
    except EvaluationError:
        return int(ERROR)
    return int(NULL if answer is None else TRUE if answer is True else FALSE)


def columns_of(messages: list[dict[str, str]], chance: random.Random) -> dict[str, pa.Array]:
    columns = {}
    for name in NAMES:
        array = pa.array([message.get(name) for message in messages], chance.choice((pa.string(), pa.large_string())))
        columns[name] = array.dictionary_encode() if chance.random() < 0.3 else array
    return columns


def compare(seed: str, expressions: int, messages: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Check that both evaluators agree. Return how often each state was found."""
    samples, chance = Sql92Samples(seed), random.Random(seed)
    found = dict.fromkeys(map(int, (FALSE, TRUE, NULL, ERROR)), 0)
    compiled = 0
    while compiled < expressions:
        if compiled % 50 == 0:
            rows = [samples.message() for _ in range(messages)]
            columns = Rows(columns_of(rows, chance), messages)  # its numbers are parsed once for all these expressions
            # Small blocks, and picking of open rows, as in columns of many thousand rows.
            monkeypatch.setattr(sql92_filter, "_PICKED_ROWS_MIN", chance.choice((0, 1024)))
            monkeypatch.setattr(sql92_values, "_BLOCK_ROWS", chance.choice((3, 16384, 16384)))
        text = samples.expression()
        try:
            tree = parse_sql92(text, strict_end=True)
        except OptionError:  # such as a BETWEEN of numbers in the wrong order
            continue
        compiled += 1
        by_row = [state_of_row(tree, row) for row in rows]
        by_column = evaluate_columns(tree, columns).tolist()
        for row, one, other in zip(rows, by_row, by_column, strict=True):
            assert one == other, f"seed {seed}: {text!r} of {row}: by row {one}, by column {other}"
            found[one] += 1
    return found


def test_evaluate_columns_agrees_with_its_twin_on_2000_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare("few", 2000, 12, monkeypatch)
    assert min(found.values()) > 1000, "each answer has been seen"


@pytest.mark.torture(minutes=1)
@pytest.mark.parametrize("seed", range(10))
def test_evaluate_columns_agrees_with_its_twin_on_100000_expressions(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(f"many {seed}", 10_000, 25, monkeypatch)
