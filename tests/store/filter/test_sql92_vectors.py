"""What RocketMQ's own filter module said of 390 expressions, both evaluators say too."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.sql92_filter import compile_sql92
from rmq_spark.store.filter.sql92_rows import EvaluationError
from rmq_spark.store.filter.sql92_tree import JavaValue, Long

VECTORS = json.loads((Path(__file__).parent / "sql92_vectors.json").read_text(encoding="utf-8"))["vectors"]
PARSED = [vector for vector in VECTORS if vector["result"] != "PARSE_ERR"]
EVALUATED = [vector for vector in PARSED if "match" in vector]

# RocketMQ reads only the beginning of these: where it stops, and the word of the advice that says why.
READ_IN_PART = {
    "a like 'x%'": (3, "LIKE"),
    "a + 1 = 2": (3, "arithmetic"),
    "a > 01": (6, "leading zeros"),
    "a='1' -- comment": (7, "line end"),
    "a b": (3, "Join"),
    "a = 'x' b": (9, "Join"),
    "a = 'x')": (8, "bracket"),
}


def title(vector: dict[str, Any]) -> str:
    return f"{vector['expr']} {vector.get('props', '')}"


def typed(text: str) -> tuple[JavaValue, pa.DataType]:
    match text[:2]:
        case "i:":
            return int(text[2:]), pa.int32()
        case "l:":
            return Long(text[2:]), pa.int64()
        case "d:":
            return float(text[2:]), pa.float64()
        case "b:":
            return text == "b:true", pa.bool_()
    return text, pa.string()


def test_all_vectors_are_there() -> None:
    assert len(VECTORS) == 390
    assert len(EVALUATED) > 300


@pytest.mark.parametrize("vector", EVALUATED, ids=title)
def test_both_evaluators_decide_as_rocketmq(vector: dict[str, Any]) -> None:
    wanted = compile_sql92(vector["expr"], strict_end=False)
    values = {name: typed(text) for name, text in vector["props"].items()}
    properties = {name: value for name, (value, _) in values.items()}
    columns = {name: pa.array([value, None, value], arrow_type) for name, (value, arrow_type) in values.items()}
    try:
        found = wanted.evaluate_row(properties)
    except EvaluationError:
        found = "EVAL_ERR"
    assert found is vector["result"] or found == vector["result"] == "EVAL_ERR"
    assert wanted.matches_row(properties) is vector["match"]
    assert wanted.matches(columns, 3).tolist() == [vector["match"], wanted.matches_row({}), vector["match"]]


@pytest.mark.parametrize(
    "text", sorted({vector["expr"] for vector in VECTORS if vector["result"] == "PARSE_ERR"}), ids=repr
)
@pytest.mark.parametrize("strict_end", [True, False])
def test_what_rocketmq_does_not_parse_is_an_error(text: str, strict_end: bool) -> None:
    with pytest.raises(OptionError, match=r"^sql92, character"):
        compile_sql92(text, strict_end=strict_end)


@pytest.mark.parametrize("text", sorted({vector["expr"] for vector in PARSED}), ids=repr)
def test_what_rocketmq_reads_only_in_part_is_an_error_that_shows_where_it_stops(text: str) -> None:
    compile_sql92(text, strict_end=False)
    if text in READ_IN_PART:
        character, word = READ_IN_PART[text]
        with pytest.raises(OptionError, match=rf"(?s)character {character}:.*{word}.*RocketMQ itself ignores"):
            compile_sql92(text)
    else:
        compile_sql92(text)
