"""setup.cfg lists every package on disk: one left out still imports here, not from the wheel."""

import configparser
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_setup_cfg() -> configparser.ConfigParser:
    cfg = configparser.ConfigParser(interpolation=None)
    cfg.read(ROOT / "setup.cfg")
    return cfg


def test_setup_cfg_lists_every_package() -> None:
    options = read_setup_cfg()["options"]
    homes = dict(line.split(" = ") for line in options["package_dir"].split("\n") if line)
    on_disk = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for name, folder in homes.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert on_disk == set(options["packages"].split())


def test_setup_cfg_ships_every_file_that_is_not_python() -> None:
    listed = {
        name.strip() for name in read_setup_cfg()["options.package_data"]["rmq_spark"].replace("\n", ",").split(",")
    }
    on_disk = {path.name for path in (ROOT / "rmq_spark").iterdir() if path.is_file() and path.suffix != ".py"}
    assert on_disk == listed


def test_every_folder_with_python_in_it_is_a_package() -> None:
    for folder in ("rmq_spark", "store", "datasource"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} needs an __init__.py"


def test_the_tree_has_the_shape_of_the_import_names() -> None:
    for name in ("store", "datasource"):
        link = ROOT / "rmq_spark" / name
        assert link.is_symlink(), f"{link} must be a link to ../{name}"
        assert os.readlink(link) == f"../{name}", "relative, so that a clone anywhere works"


def test_every_mark_has_a_meaning_in_setup_cfg() -> None:
    marks = read_setup_cfg()["tool:pytest"]["markers"].strip().split("\n")
    assert all(": " in mark for mark in marks), marks


def test_test_files_have_names_of_their_own() -> None:
    seen: dict[str, Path] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        assert path.name not in seen, f"{path} and {seen[path.name]}: pytest tells them apart by name"
        seen[path.name] = path
