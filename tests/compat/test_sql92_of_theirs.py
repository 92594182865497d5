"""SQL92: the real filter module and ours accept the same expressions, with the same result for every message."""

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from compat_kit.build import VERSIONS, UnavailableError, class_path, java_program
from support.sql92_rows import EvaluationError, evaluate_row
from support.sql92_samples import ODD_TEXTS, Sql92Samples

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.sql92_filter import Rows, evaluate_columns
from rmq_spark.store.filter.sql92_lexer import read_double
from rmq_spark.store.filter.sql92_parser import parse_sql92

pytestmark = pytest.mark.compat

Message = dict[str, str]
NAMES = ("a", "b", "c", "_d$1")
EXPRESSIONS = 6000
ROUND = 100  # expressions that are tried on the same messages
ONLY_IN_5 = re.compile("contains|startswith|endswith", re.IGNORECASE)  # in 4.9 a name like any other


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    text = str(request.param)
    try:
        java_program("java")
        class_path(text)
    except UnavailableError as error:
        pytest.skip(str(error))
    return text


def ask(version: str, requests: list[dict[str, object]], folder: Path) -> Iterator[str]:
    """Return the answers of the real module: a line for each expression among the requests."""
    asked, answered = folder / "asked", folder / "answered"
    asked.write_text("".join(json.dumps(request) + "\n" for request in requests))
    with asked.open() as lines, answered.open("w") as answers:
        command = [java_program("java"), "-Xmx512m", "-XX:+UseSerialGC", "-cp", class_path(version), "Sql92"]
        subprocess.run(command, stdin=lines, stdout=answers, check=True)
    return iter(answered.read_text().splitlines())


def of_ours(text: str, messages: list[Message], columns: Rows) -> str:
    """Return the same line as the real module, from both evaluators if they agree."""
    try:
        tree = parse_sql92(text, strict_end=False)
    except OptionError:
        return "P"
    by_column = "".join("FTNE"[state] for state in evaluate_columns(tree, columns))
    by_row = ""
    for message in messages:
        try:
            by_row += {True: "T", False: "F", None: "N"}[evaluate_row(tree, message)]  # type: ignore[index]
        except EvaluationError:
            by_row += "E"
    assert by_column == by_row, text
    return by_column


def columns_of(messages: list[Message]) -> Rows:
    columns = {name: pa.array([message.get(name) for message in messages], pa.string()) for name in NAMES}
    return Rows(columns, len(messages))


def test_random_expressions_are_parsed_and_evaluated_alike(version: str, tmp_path: Path) -> None:
    samples = Sql92Samples("theirs")
    rounds = []
    for _ in range(EXPRESSIONS // ROUND):
        messages = [samples.message() for _ in range(20)]
        texts = [samples.expression(wrong_share=0.4) for _ in range(ROUND)]
        if not version.startswith("5."):
            texts = [text for text in texts if not ONLY_IN_5.search(text)]
        rounds.append((messages, texts))
    requests: list[dict[str, object]] = []
    for messages, texts in rounds:
        requests += [{"messages": messages}, *({"text": text} for text in texts)]
    answers = ask(version, requests, tmp_path)
    refused = 0
    for messages, texts in rounds:
        columns = columns_of(messages)
        for text in texts:
            theirs = next(answers)
            ours = of_ours(text, messages, columns)
            assert ours == theirs, f"{text!r} of {messages}: theirs {theirs}, ours {ours}"
            refused += theirs == "P"
    assert 0.1 < refused / sum(len(texts) for _, texts in rounds) < 0.5


def test_texts_are_read_as_the_same_numbers(version: str, tmp_path: Path) -> None:
    samples = Sql92Samples("numbers of theirs")
    messages = []
    for text in (*ODD_TEXTS, *(samples.text() for _ in range(20_000))):
        value = read_double(text)
        written = "none" if value is None else "NaN" if math.isnan(value) else repr(value).replace("inf", "Infinity")
        messages.append({"a": text, "b": written, "c": text.strip()})
    texts = [
        "a BETWEEN b AND b",
        "a = 5",
        "a = 3000000000",
        "a > 0",
        "a < 3000000000",
        "a < 1.5",
        "a >= 1e-300",
        "a > c",
    ]
    check(version, texts, messages, tmp_path)


def test_the_same_characters_are_digits_blanks_and_letters_of_true(version: str, tmp_path: Path) -> None:
    characters = [chr(point) for point in (*range(0xD800), *range(0xE000, 0x10000), *range(0x1D7CE, 0x1D800))]
    messages = [{"a": one, "b": f"{one}7{one}", "c": f"tru{one}"} for one in characters]
    check(
        version,
        [*(f"a = {digit}" for digit in range(10)), "b > 5.5", "b = 777", "c = TRUE", "a = 9.5"],
        messages,
        tmp_path,
    )


def check(version: str, texts: list[str], messages: list[Message], folder: Path) -> None:
    answers = ask(version, [{"messages": messages}, *({"text": text} for text in texts)], folder)
    columns = columns_of(messages)
    for text in texts:
        theirs, ours = next(answers), of_ours(text, messages, columns)
        if ours != theirs:
            differing = [
                (message, one, other)
                for message, one, other in zip(messages, theirs, ours, strict=True)
                if one != other
            ]
            pytest.fail(f"{text!r}: {len(differing)} messages, theirs and ours: {differing[:5]}")
