"""docs/LOGGING.md: its examples run, and its loggers, folders, levels and fields are those of the code."""

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark.datasource.spark import log_lines

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "LOGGING.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _the_loggers_as_before() -> Iterator[None]:
    """Keep the loggers of this process as they are."""
    loggers = logging.getLogger(), logging.getLogger("rmq_spark")
    before = [(one, list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


def test_the_examples_of_LOGGING_run(capsys: pytest.CaptureFixture[str]) -> None:
    for code in BLOCK.findall(PAGE.read_text()):
        exec(compile(code, PAGE.name, "exec"), {"__name__": "logging_page"})
    printed = ast.literal_eval(capsys.readouterr().out)
    assert (printed["group"], printed["level"]) == ("billing", "WARNING")


def modules() -> Iterator[Path]:
    """Yield the modules that have a logger."""
    for folder in ("rmq_spark", "store", "datasource"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "getLogger(" in path.read_text():
                yield path.relative_to(ROOT)


def test_every_logger_has_the_name_on_the_page() -> None:
    assert "to one logger: `rmq_spark`" in PAGE.read_text()
    for path in modules():
        names = re.findall(r"getLogger\((.*?)\)", (ROOT / path).read_text())
        assert set(names) <= {'"rmq_spark"', "LOGGER"}, path
    assert log_lines.LOGGER == "rmq_spark"


def test_the_page_lists_every_folder_that_logs() -> None:
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", PAGE.read_text(), re.MULTILINE))
    logging_modules = {str(path.parent) for path in modules()} - {"rmq_spark/command", "store/testing"}
    assert logging_modules == listed


def test_data_that_a_query_skips_is_a_warning_and_no_error() -> None:
    rows = dict(re.findall(r"^\| `([A-Z]+)` \| (.*?) \|$", PAGE.read_text(), re.MULTILINE))
    assert [level for level, text in rows.items() if "skip" in text] == ["WARNING"]
    of_queries = [path for path in modules() if path.parts[0] != "store"]
    assert of_queries
    assert not [
        path for path in of_queries if re.search(r"_LOG\.(error|exception|critical)\(", (ROOT / path).read_text())
    ]


def test_the_page_has_the_values_of_the_variables() -> None:
    text = PAGE.read_text()
    for name, values in ((log_lines.LEVEL_VARIABLE, log_lines.LEVELS), (log_lines.FORMAT_VARIABLE, log_lines.FORMATS)):
        (row,) = re.findall(rf"^\| `{name}` \| (.*?)\.", text, re.MULTILINE)
        assert tuple(re.findall(r"`(\w+)`", row)) == values


def test_the_page_has_every_field() -> None:
    section = PAGE.read_text().split("| field | value |")[1]
    listed = {
        name for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    stream = io.StringIO()
    log_lines.json_logging("info", stream)
    logging.getLogger("rmq_spark").info("rmq: x")
    usual = set(json.loads(stream.getvalue()))
    fields = set(log_lines._FIELDS.values())
    assert listed == usual | fields | {"query", "batch", "error", "stack", "lagMessages", "lagBytes", "secondsBehind"}
