"""The documentation site: what its hooks convert, that its check finds planted faults, and that it builds."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    """Return a program of .ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES, CHECK = load("site_pages"), load("site_check")


def converted(text: str) -> str:
    return "\n".join(PAGES._converted_lines(text))


def test_a_list_after_a_paragraph_gets_an_empty_line() -> None:
    assert converted("words:\n- one\n- two") == "words:\n\n- one\n- two"


def test_content_of_list_items_gets_four_spaces() -> None:
    assert converted("1. one\n\n   ```sh\n   make\n   ```\n2. two") == "1. one\n\n    ```sh\n    make\n    ```\n2. two"
    assert converted("- one\n  more\n\nwords\n  here") == "- one\n    more\n\nwords\n  here"


def test_pipes_in_code_of_tables_lose_their_backslash() -> None:
    assert converted("| `a \\|\\| b` | c \\| d |") == "| `a || b` | c \\| d |"


def test_blocks_of_code_stay_as_they_are() -> None:
    text = "```text\n- a\nb\n- c\n| `\\|` |\n```"
    assert converted(text) == text


def test_move_links_leads_to_pages_of_the_site() -> None:
    moved = PAGES.move_links(
        "[a](docs/GUIDE.md#deploying) [b](CONTRIBUTING.md) [c](setup.cfg) [d](https://host/x)", Path()
    )
    assert moved == "[a](GUIDE.md#deploying) [b](contributing.md) [c](../setup.cfg) [d](https://host/x)"


def test_links_out_of_the_documents_become_text_while_the_repository_has_no_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PAGES, "read_urls", dict)
    text = "[a](../../setup.cfg) [b](../../CHANGELOG.md) [c](../GUIDE.md)"
    assert PAGES._outer_links(text, Path("recipes")) == "a [b](../changelog.md) [c](../GUIDE.md)"
    monkeypatch.setattr(PAGES, "read_urls", lambda: {"files": "https://host/files"})
    assert PAGES._outer_links("[a](../setup.cfg)", Path()) == "[a](https://host/files/setup.cfg)"


def test_mark_errors_gives_each_text_of_an_error_an_anchor() -> None:
    row = "| `drawing needs matplotlib` | the extra |"
    marked = '| <span id="drawing-needs-matplotlib"></span>`drawing needs matplotlib` | the extra |'
    assert PAGES.mark_errors(f"{row}\n{row}") == f"{marked}\n{row}", "an id is used once"


def test_the_reference_has_every_function_and_class() -> None:
    import rmq_spark

    page = PAGES.reference_page()
    missing = [name for name in rmq_spark.__all__ if not name.isupper() and f".{name}\n" not in page]
    assert not missing


@pytest.mark.slow
def test_the_picture_shows_the_record() -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    drawn, kept = PAGES.draw_record(), (ROOT / "docs" / "record.svg").read_text()
    # Versions of matplotlib differ in details of the paths. They write each text as a comment.
    texts = [re.findall(r"<!-- (.*?) -->", one) for one in (drawn, kept)]
    assert len(texts[1]) > 40
    assert texts[0] == texts[1], "run: python .ci/site_pages.py"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site of one good page, whose search finds every error."""
    (tmp_path / "index.html").write_text(
        '<h1 id="top-part">A</h1><a href="#top-part">a</a><a href="https://host/">b</a>'
    )
    (tmp_path / "search").mkdir()
    text = (ROOT / "docs" / "ERRORS.md").read_text().replace("\\|", "|").replace("`", "")
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": [{"text": text}]}))
    return tmp_path


def test_find_faults_accepts_a_good_site(site: Path) -> None:
    assert CHECK.find_faults(site) == []


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="gone.html">a</a>', "links to gone.html, which does not exist"),
        ('<a href="index.html#gone">a</a>', "has no such anchor"),
        ('<script src="https://host/a.js"></script>', "loads https://host/a.js from another host"),
        ('<link rel="preconnect" href="https://host">', "loads https://host from another host"),
        ('<img src="//host/a.png">', "loads //host/a.png from another host"),
        ('<img src="gone.png">', "links to gone.png, which does not exist"),
    ],
)
def test_find_faults_finds_a_planted_one(site: Path, html: str, fault: str) -> None:
    (site / "other.html").write_text(html)
    (found,) = CHECK.find_faults(site)
    assert found.startswith("other.html: ")
    assert found.endswith(fault)


def test_find_faults_finds_styles_that_load_from_other_hosts(site: Path) -> None:
    (site / "a.css").write_text("@import url(https://host/font.css);")
    assert CHECK.find_faults(site) == ["a.css: loads from another host"]


def test_find_faults_finds_an_error_that_the_search_lacks(site: Path) -> None:
    index = site / "search" / "search_index.json"
    index.write_text(index.read_text().replace("drawing needs matplotlib", ""))
    assert CHECK.find_faults(site) == ["the search does not find: drawing needs matplotlib"]


@pytest.mark.slow
def test_the_site_builds_and_its_links_are_good(tmp_path: Path) -> None:
    for module in ("material", "mkdocs", "mkdocstrings"):
        pytest.importorskip(module, reason="the extra docs is not installed: make site")
    built = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert CHECK.find_faults(tmp_path / "site") == []
