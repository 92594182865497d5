"""What a package index shows: URLs from one place, absolute links, and a section of the changelog for the version."""

import configparser
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import rmq_spark

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
URLS = {"files": "https://host/files", "raw": "https://host/raw"}


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    """The module setup.py, which calls setuptools only when it is the main program."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_describe_makes_every_link_of_the_readme_absolute(setup_script: ModuleType) -> None:
    described = setup_script.describe(README, URLS)
    assert len(targets(described)) == len(targets(README))
    assert not [target for target in targets(described) if "://" not in target]
    assert (
        "![The records of a commit-log segment, by topic; the shares of a topic's tags](https://host/raw/docs/pictures.png)"
        in (described)
    )
    assert "](https://host/files/docs/GUIDE.md#deploying)" in described


def test_describe_without_urls_has_no_relative_link_and_no_picture(setup_script: ModuleType) -> None:
    described = setup_script.describe(README, {})
    assert not [target for target in targets(described) if "://" not in target]
    assert "pictures.png" not in described
    assert "reads a running cluster over the network" in described


def test_describe_keeps_links_to_other_places(setup_script: ModuleType) -> None:
    text = "[a](https://host/a) [b](#part)"
    assert setup_script.describe(text, URLS) == text


def test_project_urls_leaves_empty_urls_out(setup_script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.rmq-spark.urls]\nrepository = "https://host/code/"\ntracker = ""\nraw = "https://host/raw"\n'
    )
    setup_script.ROOT = tmp_path
    urls = setup_script.read_urls()
    setup_script.ROOT = ROOT
    assert setup_script.project_urls(urls) == {"Source": "https://host/code"}


def test_the_release_recipe_names_every_url(setup_script: ModuleType) -> None:
    section = (ROOT / "pyproject.toml").read_text().split("[tool.rmq-spark.urls]\n")[1].split("\n\n")[0]
    names = re.findall(r"^(\w+) = ", section, re.MULTILINE)
    assert {*setup_script._LABELS, "files", "raw"} == set(names)
    recipe = (ROOT / "docs" / "RELEASING.md").read_text()
    assert not [name for name in names if f"| `{name}` |" not in recipe]


def test_the_changelog_has_a_section_for_a_released_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", section) for section in sections[1:])
    if "dev" not in rmq_spark.__version__:
        assert sections[1].startswith(f"[{rmq_spark.__version__}]")
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_core_needs_no_spark() -> None:
    cfg = configparser.ConfigParser(interpolation=None)
    cfg.read(ROOT / "setup.cfg")
    assert [line.split(">")[0] for line in cfg["options"]["install_requires"].split()] == ["numpy", "pyarrow"]
    extras = cfg["options.extras_require"]
    assert extras["spark"].startswith("\npyspark>=")
    own = re.findall(r"^rmq-spark\[(.*)\]$", extras["test"], re.MULTILINE)
    assert "spark" in ",".join(own).split(","), "an environment of a developer has Spark"
