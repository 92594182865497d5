"""docs/FORMAT.md and the dtypes in store/format: the same fields, and neither has more than the other."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "FORMAT.md"
Rows = list[tuple[int, int, str, str]]  # position, bytes, field, type


def documented() -> dict[str, tuple[int, Rows]]:
    """Return for each `module.NAME` of the page its length in bytes and the rows of its table."""
    found = {}
    for part in re.split(r"^Dtype ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = re.match(r"`([\w.]+)`, (\d+) bytes:\n\n\| position \| bytes \| field \| type \| meaning \|\n", part)
        assert title is not None, f"FORMAT.md: no table follows {part[:60]!r}"
        table = part[title.end() :].split("\n\n")[0]
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
        assert title[1] not in found, f"FORMAT.md has two tables of {title[1]}"
        found[title[1]] = int(title[2]), [(int(row[0]), int(row[1]), row[2], row[3]) for row in cells]
    return found


def declared() -> dict[str, np.dtype[np.void]]:
    """Return every structured dtype that a module of store/format declares, as `module.NAME`."""
    found = {}
    for path in sorted((ROOT / "store" / "format").glob("*.py")):
        source = path.read_text()
        module = importlib.import_module(f"rmq_spark.store.format.{path.stem}")
        for name, value in vars(module).items():
            here = re.search(rf"^{name}\b.* = ", source, re.MULTILINE)  # not one that is imported
            if isinstance(value, np.dtype) and value.names and here:
                found[f"{path.stem}.{name}"] = value
    return found


def laid_out(layout: np.dtype[np.void]) -> Rows:
    rows = []
    assert layout.fields is not None
    for name in layout.names or ():
        kind, position = layout.fields[name][:2]
        rows.append((position, kind.itemsize, name, kind.str.replace("|", "")))
    return rows


def test_format_doc_has_a_table_for_each_dtype() -> None:
    assert set(documented()) == set(declared())
    assert len(declared()) >= 14


@pytest.mark.parametrize("name", sorted(declared()))
def test_format_doc_table_equals_its_dtype(name: str) -> None:
    layout = declared()[name]
    assert documented()[name] == (layout.itemsize, laid_out(layout))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(declared()))
def test_dtypes_have_no_holes_and_are_big_endian(name: str) -> None:
    end = 0
    for position, size, field, kind in laid_out(declared()[name]):
        assert position == end, field
        assert kind[0] in ">V", field
        end += size
    assert end == declared()[name].itemsize


def test_format_docstring_lists_every_module() -> None:
    described = importlib.import_module("rmq_spark.store.format").__doc__ or ""
    for path in (ROOT / "store" / "format").glob("*.py"):
        assert path.stem == "__init__" or f"`{path.stem}`" in described, path.name
