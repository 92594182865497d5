"""docs/OPTIONS.md says what the tables of options say. Other pages: tests/test_guides.py."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.datasource.filters import NO_FILTERS
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
        if option.kind in ("word", "strategy") or (option.kind in sized and option.default[0] in "tf0123456789")
    ]


def parse_source(given: dict[str, str]) -> Any:
    return parse_options(given, 0)


def parse_sink(given: dict[str, str]) -> Any:
    return parse_sink_options(given)


PARSED = ((parse_source, OPTIONS), (parse_sink, SINK_OPTIONS))


@pytest.mark.parametrize("option", with_default(OPTIONS), ids=lambda option: option.name)
def test_a_default_that_can_be_given_is_what_holds_without_it(option: Option) -> None:
    assert len(with_default(OPTIONS)) == 19
    others = {"consumerGroup": "g"} if option.name in GROUP_FIELDS else {}
    assert parse_options({option.name: option.default} | others, 0) == parse_options(others, 0)


@pytest.mark.parametrize("option", with_default(SINK_OPTIONS), ids=lambda option: option.name)
def test_a_default_of_the_sink_that_can_be_given_is_what_holds_without_it(option: Option) -> None:
    assert len(with_default(SINK_OPTIONS)) == 12
    others = {"mode": "sendBack", "consumerGroup": "g"} if option.name == "expiredOriginal" else {}
    assert parse_sink_options({option.name: option.default} | others) == parse_sink_options(others)


# What has to be given beside an option whose default is "none".
BESIDE = {"txnAppId": {"txnVersion": "1"}, "txnVersion": {"txnAppId": "a"}}
WITHOUT = [
    (parse, option)
    for parse, options in PARSED
    for option in options
    if option.default == "none" and option.kind != "word"
]


@pytest.mark.parametrize(("parse", "option"), WITHOUT, ids=lambda one: getattr(one, "name", ""))
def test_where_the_default_is_none_nothing_holds_without_it(parse: Callable[..., Any], option: Option) -> None:
    others = BESIDE.get(option.name, {})
    if option.name == "consumerGroup" and parse is parse_sink:
        others = {"mode": "sendBack"}
    given, without = held_by(parse({option.name: option.example} | others)), held_by(parse({}))
    changed = {name for name in given if given[name] != without[name]} - {"mode"}
    assert changed
    assert not {name: without[name] for name in changed if without[name] is not None and without[name] != NO_FILTERS}


def held_by(options: Any) -> dict[str, Any]:
    """Return the values of options, those of its limits among them."""
    found = {field.name: getattr(options, field.name) for field in fields(options)}
    limits = found.pop("limits", None)
    return found | ({} if limits is None else held_by(limits))


def test_the_document_lists_the_columns_that_are_written_with_their_types() -> None:
    rows = [line.strip("| ").split(" | ")[:2] for line in COLUMNS.splitlines() if line.startswith("| `")]
    unquoted = {name.strip("`"): types.replace("&lt;", "<").replace("&gt;", ">") for name, types in rows}
    assert unquoted == {name: " or ".join(types) for name, types in SINK_COLUMNS.items()}


def test_the_document_lists_the_default_columns() -> None:
    listed = DOCUMENT.split("## Which columns")[1].split(": ", 1)[1].split(".", 1)[0]
    assert tuple(listed.replace("\n", " ").split(", ")) == DEFAULT_COLUMNS
