"""docs/OPTIONS.md says what the tables of options say. Other pages: tests/test_guides.py."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from rmq_spark.datasource.group_options import GROUP_FIELDS
from rmq_spark.datasource.option_table import OPTIONS, Option
from rmq_spark.datasource.options import parse_options
from rmq_spark.datasource.schema import DEFAULT_COLUMNS
from rmq_spark.datasource.sink_option_table import SINK_OPTIONS
from rmq_spark.datasource.sink_options import parse_sink_options
from rmq_spark.datasource.sink_schema import SINK_COLUMNS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT, WRITING = (ROOT / "docs" / "OPTIONS.md").read_text().split("\n## Writing\n")
WRITING, COLUMNS, *_ = WRITING.split("\n### ")


def row(option: Option) -> str:
    """Return the option's line in the document's table."""
    name = f"`{option.name}`" + (f" (or `{option.alias}`)" if option.alias else "")
    cells = [name, option.kind, option.default, " and ".join(option.where), option.meaning, f"`{option.example}`"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_the_document_has_the_table_line_by_line() -> None:
    for text, options in ((DOCUMENT, OPTIONS), (WRITING, SINK_OPTIONS)):
        lines = [line for line in text.splitlines() if line.startswith("| `")]
        assert lines == [row(option) for option in options]


def with_default(options: Iterable[Option]) -> list[Option]:
    """Return the options whose default is a value, not a word for people such as "required"."""
    sized = ("true or false", "size", "duration", "count")
    return [
        option
        for option in options
        if option.kind == "word" or (option.kind in sized and option.default[0] in "tf0123456789")
    ]


@pytest.mark.parametrize("option", with_default(OPTIONS), ids=lambda option: option.name)
def test_a_default_that_can_be_given_is_what_holds_without_it(option: Option) -> None:
    assert len(with_default(OPTIONS)) == 17
    others = {"consumerGroup": "g"} if option.name in GROUP_FIELDS else {}
    assert parse_options({option.name: option.default} | others, 0) == parse_options(others, 0)


@pytest.mark.parametrize("option", with_default(SINK_OPTIONS), ids=lambda option: option.name)
def test_a_default_of_the_sink_that_can_be_given_is_what_holds_without_it(option: Option) -> None:
    assert len(with_default(SINK_OPTIONS)) == 12
    others = {"mode": "sendBack", "consumerGroup": "g"} if option.name == "expiredOriginal" else {}
    assert parse_sink_options({option.name: option.default} | others) == parse_sink_options(others)


def test_the_document_lists_the_columns_that_are_written_with_their_types() -> None:
    rows = [line.strip("| ").split(" | ")[:2] for line in COLUMNS.splitlines() if line.startswith("| `")]
    unquoted = {name.strip("`"): types.replace("&lt;", "<").replace("&gt;", ">") for name, types in rows}
    assert unquoted == {name: " or ".join(types) for name, types in SINK_COLUMNS.items()}


def test_the_document_lists_the_default_columns() -> None:
    listed = DOCUMENT.split("## Which columns")[1].split(": ", 1)[1].split(".", 1)[0]
    assert tuple(listed.replace("\n", " ").split(", ")) == DEFAULT_COLUMNS
