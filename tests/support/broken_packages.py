"""Packages that are installed, and whose own import fails."""

import sys
from pathlib import Path

import pytest

GONE = "No module named 'a_dependency_that_is_gone'"


def break_package(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str) -> None:
    """Replace a package by one that imports a module that does not exist, with the error GONE."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("import a_dependency_that_is_gone")
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
