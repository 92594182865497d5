"""docs/OPTIONS.md says what the table of options says, and the README names no option that is not in it."""

import re
from pathlib import Path

import pytest

from rmq_spark.datasource.option_table import OPTIONS, Option
from rmq_spark.datasource.options import parse_options
from rmq_spark.datasource.schema import DEFAULT_COLUMNS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = (ROOT / "docs" / "OPTIONS.md").read_text()


def row(option: Option) -> str:
    """Return the option's line in the document's table."""
    name = f"`{option.name}`" + (f" (or `{option.alias}`)" if option.alias else "")
    cells = [name, option.kind, option.default, " and ".join(option.where), option.meaning, f"`{option.example}`"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_the_document_has_the_table_line_by_line() -> None:
    lines = [line for line in DOCUMENT.splitlines() if line.startswith("| `")]
    assert lines == [row(option) for option in OPTIONS]


# Options whose default is a value, not a word for people such as "required".
WITH_DEFAULT = [
    option
    for option in OPTIONS
    if option.kind in ("word", "true or false", "size", "duration") and option.default != "none"
]


@pytest.mark.parametrize("option", WITH_DEFAULT, ids=lambda option: option.name)
def test_a_default_that_can_be_given_is_what_holds_without_it(option: Option) -> None:
    assert len(WITH_DEFAULT) == 6
    assert parse_options({option.name: option.default}, 0) == parse_options({}, 0)


def test_the_document_lists_the_default_columns() -> None:
    listed = DOCUMENT.split("## Which columns")[1].split(": ", 1)[1].split(".", 1)[0]
    assert tuple(listed.replace("\n", " ").split(", ")) == DEFAULT_COLUMNS


def test_the_readme_names_only_options_that_exist() -> None:
    section = (ROOT / "README.md").read_text().split("## Options")[1].split("\n## ")[0]
    named = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line[: line.index(" | ")])
    }
    assert named <= {option.name for option in OPTIONS}
    assert len(named) > 10
