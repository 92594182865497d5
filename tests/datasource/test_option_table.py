"""Option tables of docs/OPTIONS.md and docs/GUIDE.md against `option_table`; run as a script, it rewrites them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.parsed_options import parse_options, parse_sink_options

from rmq_spark.datasource.options.filters import NO_FILTERS
from rmq_spark.datasource.options.option_table import (
    CONNECTION_OPTIONS,
    OPTIONS,
    SINK_OPTIONS,
    Option,
    document_row,
    guide_row,
)
from rmq_spark.datasource.options.schema import DEFAULT_COLUMNS
from rmq_spark.datasource.options.sink_schema import SINK_COLUMNS

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
# Each page, the heading under which the sink's options are, and how a row is made.
PAGES: dict[str, tuple[str, Callable[[Option], str]]] = {
    "OPTIONS.md": ("\n## Writing\n", document_row),
    "GUIDE.md": ("\n## Writing data to a store\n", guide_row),
}
HEADS = ("| option | type |", "| Option | value |")


def rewrite_tables(page: str) -> tuple[str, list[list[str]]]:
    """Return the page with its option rows as the code has them, and the options that each part of it lists."""
    heading, make_row = PAGES[page]
    parts, listed = [], []
    for part, options in zip((DOCS / page).read_text().split(heading), (OPTIONS, SINK_OPTIONS), strict=True):
        rows = {option.name: make_row(option) for option in options}
        lines, is_option_table = [], False
        listed.append([])
        for line in part.split("\n"):
            is_option_table = line.startswith(HEADS) or (is_option_table and line.startswith("|"))
            found = re.match(r"\| `(\w+)`", line) if is_option_table else None
            if found:
                listed[-1].append(found[1])
                line = rows[found[1]]
            lines.append(line)
        parts.append("\n".join(lines))
    return heading.join(parts), listed


@pytest.mark.parametrize("page", PAGES)
def test_document_row_and_guide_row_are_the_rows_of_the_pages(page: str) -> None:
    text, listed = rewrite_tables(page)
    assert (DOCS / page).read_text() == text, f"run .venv/bin/python {__file__}"
    # The sink's part leads to the source's tables for the other options that connect to a cluster.
    tables = OPTIONS, [option for option in SINK_OPTIONS if option not in CONNECTION_OPTIONS[1:]]
    assert [sorted(names) for names in listed] == [sorted(option.name for option in table) for table in tables]


def with_default(options: Iterable[Option]) -> list[Option]:
    return [option for option in options if option.default is not None]


def parse_source(given: dict[str, str]) -> Any:
    return parse_options(given, 0)


def parse_sink(given: dict[str, str]) -> Any:
    return parse_sink_options(given)


PARSED = ((parse_source, OPTIONS), (parse_sink, SINK_OPTIONS))


@pytest.mark.parametrize("option", with_default(OPTIONS), ids=lambda option: option.name)
def test_default_of_a_source_option_is_the_value_of_an_omitted_one(option: Option) -> None:
    assert len(with_default(OPTIONS)) == 22
    others = {"consumerGroup": "g"} if option.requires == "consumerGroup" else {}
    assert parse_options({option.name: option.default or ""} | others, 0) == parse_options(others, 0)


@pytest.mark.parametrize("option", with_default(SINK_OPTIONS), ids=lambda option: option.name)
def test_default_of_a_sink_option_is_the_value_of_an_omitted_one(option: Option) -> None:
    assert len(with_default(SINK_OPTIONS)) == 21
    others = {"mode": "sendBack", "consumerGroup": "g"} if option.requires == "mode=sendBack" else {}
    assert parse_sink_options({option.name: option.default or ""} | others) == parse_sink_options(others)


# Options that other options without a default require.
BESIDE = {"txnAppId": {"txnVersion": "1"}, "txnVersion": {"txnAppId": "a"}}
WITHOUT = [
    (parse, option)
    for parse, options in PARSED
    for option in options
    if option.default is None and option.default_words == "none"
]


@pytest.mark.parametrize(("parse", "option"), WITHOUT, ids=lambda one: getattr(one, "name", ""))
def test_default_words_none_means_that_an_omitted_option_has_no_value(
    parse: Callable[..., Any], option: Option
) -> None:
    others = BESIDE.get(option.name, {})
    if option.name == "consumerGroup" and parse is parse_sink:
        others = {"mode": "sendBack"}
    given, without = values_of(parse({option.name: option.example} | others)), values_of(parse({}))
    changed = {name for name in given if given[name] != without.get(name)}
    assert changed
    assert not {name: without.get(name) for name in changed if without.get(name) not in (None, NO_FILTERS)}


def values_of(options: Any) -> dict[str, Any]:
    """Return the values of options by field, with those of its limits."""
    found = {field.name: getattr(options, field.name) for field in fields(options)}
    limits = found.pop("limits", None)
    return found | ({} if limits is None else values_of(limits))


def test_sink_columns_are_those_of_the_document_with_their_types() -> None:
    columns = (DOCS / "OPTIONS.md").read_text().split("\n## Writing\n")[1].split("\n### ")[1]
    rows = [line.strip("| ").split(" | ")[:2] for line in columns.splitlines() if line.startswith("| `")]
    unquoted = {name.strip("`"): types.replace("&lt;", "<").replace("&gt;", ">") for name, types in rows}
    assert unquoted == {name: " or ".join(types) for name, types in SINK_COLUMNS.items()}


def test_default_columns_are_those_of_the_document() -> None:
    listed = (DOCS / "OPTIONS.md").read_text().split("The default columns are: ")[1].split(".", 1)[0]
    assert tuple(listed.replace("\n", " ").split(", ")) == DEFAULT_COLUMNS


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(rewrite_tables(name)[0])
