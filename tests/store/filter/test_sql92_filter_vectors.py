"""The results of RocketMQ's own filter module for 390 expressions, compared with both evaluators."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.sql92_rows import EvaluationError, evaluate_row, matches_row

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.sql92_filter import compile_sql92
from rmq_spark.store.filter.sql92_lexer import JavaValue, Long

VECTORS = json.loads((Path(__file__).parent / "sql92_vectors.json").read_text(encoding="utf-8"))["vectors"]
PARSED = [vector for vector in VECTORS if vector["result"] != "PARSE_ERR"]
EVALUATED = [vector for vector in PARSED if "match" in vector]

# RocketMQ parses only the beginning of these: the position where it stops, and a word of the advice.
READ_IN_PART = {
    "a like 'x%'": (3, "LIKE"),
    "a + 1 = 2": (3, "Arithmetic"),
    "a > 01": (6, "leading zeros"),
    "a='1' -- comment": (7, "line end"),
    "a b": (3, "Join"),
    "a = 'x' b": (9, "Join"),
    "a = 'x')": (8, "parenthesis"),
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


def test_vectors_are_complete() -> None:
    assert len(VECTORS) == 390
    assert len(EVALUATED) > 300


@pytest.mark.parametrize("vector", EVALUATED, ids=title)
def test_matches_decides_as_rocketmq(vector: dict[str, Any]) -> None:
    wanted = compile_sql92(vector["expr"], strict_end=False)
    values = {name: typed(text) for name, text in vector["props"].items()}
    properties = {name: value for name, (value, _) in values.items()}
    columns = {name: pa.array([value, None, value], arrow_type) for name, (value, arrow_type) in values.items()}
    try:
        found = evaluate_row(wanted._tree, properties)
    except EvaluationError:
        found = "EVAL_ERR"
    assert found is vector["result"] or found == vector["result"] == "EVAL_ERR"
    assert matches_row(wanted, properties) is vector["match"]
    assert wanted.matches(columns, 3).tolist() == [vector["match"], matches_row(wanted, {}), vector["match"]]


@pytest.mark.parametrize(
    "text", sorted({vector["expr"] for vector in VECTORS if vector["result"] == "PARSE_ERR"}), ids=repr
)
@pytest.mark.parametrize("strict_end", [True, False])
def test_compile_sql92_refuses_what_rocketmq_does_not_parse(text: str, strict_end: bool) -> None:
    with pytest.raises(OptionError, match=r"^sql92, character"):
        compile_sql92(text, strict_end=strict_end)


@pytest.mark.parametrize("text", sorted({vector["expr"] for vector in PARSED}), ids=repr)
def test_compile_sql92_marks_where_rocketmq_stops_parsing(text: str) -> None:
    compile_sql92(text, strict_end=False)
    if text in READ_IN_PART:
        character, word = READ_IN_PART[text]
        with pytest.raises(OptionError, match=rf"(?s)character {character}:.*{word}.*RocketMQ itself ignores"):
            compile_sql92(text)
    else:
        compile_sql92(text)
