"""The gallery: outputs of notebooks without marks of a machine, and pages of the documentation site made of them."""

import ast
import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EVIL = "<script>alert(1)</script>"


def load(name: str) -> ModuleType:
    """Return a program of gallery/ as a module."""
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", ROOT / "gallery" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


run_notebooks, pages = load("run_notebooks"), load("pages")


@pytest.fixture
def marks() -> Any:
    return run_notebooks.Marks(("2031-05-06",), "172.17.0.9", "AC110009", Path("/srv/rmq"), Path("/scratch"))


class Page(HTMLParser):
    """The links, pictures, scripts and scrolling elements of an HTML page or a part of one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scrolling = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append(tag)
        self.links += [given[name] or "" for name in ("href", "src") if name in given]
        self.scrolling += "overflow-x:auto" in (given.get("style") or "")


def written(folder: Path, *outputs: dict[str, Any], first: str = "# A title\n\nWhat it shows.") -> Path:
    """Write a notebook with one cell that has these outputs."""
    code = {"cell_type": "code", "id": "b", "execution_count": 1, "metadata": {}, "source": "1", "outputs": [*outputs]}
    text = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": first}
    folder.mkdir(parents=True, exist_ok=True)
    notebook = {"cells": [text, code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "01_one.ipynb").write_text(json.dumps(notebook))
    return folder / "01_one.ipynb"


def shown(**data: str) -> dict[str, Any]:
    return {
        "output_type": "display_data",
        "metadata": {},
        "data": {kind.replace("_", "/"): text for kind, text in data.items()},
    }


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("store at /scratch/tmpab12_x9/store", "store at /data/store"),
        ("/srv/rmq/tests/golden/demo, /srv/rmq", "../tests/golden/demo, .."),
        ("at 2031-05-06 23:59:58.123 UTC", "at 2026-01-01 12:00:00.000 UTC"),
        ("at 2026-11-21 05:50:31.764 UTC", "at 2026-11-21 05:50:31.764 UTC"),
        ("2031-05-06 01:01:01.000 UTC, at h:1 (3.81 s later)", "2026-01-01 12:00:00.000 UTC, at h:1 (0 s later)"),
        (
            "2031-05-06 01:01:01.000 to 2031-05-06 01:01:02.130 UTC, 1 min 3 s<",
            "2026-01-01 12:00:00.000 to 2026-01-01 12:00:00.000 UTC, 0 s<",
        ),
        ("by 172.17.0.9:4711, 172.17.0.99:1", "by 192.0.2.1:10911, 172.17.0.99:1"),
        ("nameServer=127.0.0.1:43210", "nameServer=127.0.0.1:9876"),
        (f"id AC110009{'A' * 24}", f"id C0000201{0:024X}"),
        (
            "query 106dda5c-3bf2-4493-8c19-7534384ffea1, 106dda5c-3bf2-4493-8c19-7534384ffea1",
            "query 00000000-0000-4000-8000-000000000000, 00000000-0000-4000-8000-000000000000",
        ),
        ("id 7F000001AAAAAAAAAAAAAAAAAAAAAAAA", "id 7F000001AAAAAAAAAAAAAAAAAAAAAAAA"),
    ],
)
def test_marks_of_a_machine_and_a_run_are_replaced(marks: Any, text: str, stored: str) -> None:
    assert marks.replace(text) == stored


def test_marks_give_equal_ids_equal_numbers(marks: Any) -> None:
    one, two = f"AC110009{1:024X}", f"AC110009{2:024X}"
    assert marks.replace(f"{two} {one} {two}") == f"C0000201{0:024X} C0000201{1:024X} C0000201{0:024X}"


def test_cleaned_leaves_out_standard_error_and_addresses_of_objects(marks: Any) -> None:
    outputs = [
        {"output_type": "stream", "name": "stderr", "text": "WARN"},
        {"output_type": "stream", "name": "stdout", "text": "/scratch/tmp1/store\n"},
        {**shown(image_png="iVBOR", text_plain="<Axes at 0x7f00aa112233>"), "metadata": {"x": 1}},
    ]
    stream, picture = run_notebooks.cleaned(outputs, marks)
    assert stream["text"] == "/data/store\n"
    assert picture["data"] == {"image/png": "iVBOR", "text/plain": "<Axes at 0x0>"}
    assert picture["metadata"] == {}


def test_a_page_needs_a_title_and_outputs(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="the extra docs is not installed")
    with pytest.raises(ValueError, match="expected a title and a paragraph"):
        pages.page_of(written(tmp_path, shown(text_plain="1"), first="No title"))
    with pytest.raises(ValueError, match=r"found no outputs; .* Run gallery/run_notebooks\.py"):
        pages.page_of(written(tmp_path))


def test_a_page_keeps_html_on_one_line_that_scrolls_and_escapes_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="the extra docs is not installed")
    html = '<table border="1" class="dataframe">\n\n<tr><td>&lt;b&gt;</td></tr></table>'
    printed = {"output_type": "stream", "name": "stdout", "text": f"{EVIL}\n"}
    path = written(
        tmp_path, shown(text_html=html, text_plain="plain"), printed, first=f"# {EVIL}\n\nSee docs/GUIDE.md. {EVIL}"
    )
    page = pages.page_of(path)
    (line,) = [line for line in page.text.splitlines() if "<table>" in line]
    assert line == f"{pages.SCROLLS}<table>&#10;&#10;<tr><td>&lt;b&gt;</td></tr></table></div>"
    assert "plain" not in page.text
    assert f"    {EVIL}" in page.text, "standard output is a block of code"
    assert "[GUIDE](../GUIDE.md)" in page.text
    assert "script" not in Page(pages.index_of([page])).tags


def test_without_nbconvert_there_is_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbconvert", None)
    monkeypatch.setitem(sys.modules, "nbformat", ModuleType("nbformat"))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rmq-spark\[docs\]'"):
        pages.page_of(tmp_path / "01_one.ipynb")


def test_every_notebook_has_a_page_with_its_pictures_and_its_tables(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="the extra docs is not installed")
    made = pages.write_pages(tmp_path)
    assert [page.name for page in made] == [path.stem for path in NOTEBOOKS]
    index = (tmp_path / "index.md").read_text()
    assert [link for link in Page(index).links if link.endswith(".html")] == [f"{page.name}.html" for page in made]
    for page, path in zip(made, NOTEBOOKS, strict=True):
        outputs = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", ())]
        kinds = [output.get("data", {}).keys() for output in outputs]
        text = (tmp_path / f"{page.name}.md").read_text()
        assert text.startswith(f"# {page.title}\n")
        pictures = re.findall(r"!\[.*?\]\((\S+\.png)\)", text)
        assert len(pictures) == sum("image/png" in kind for kind in kinds)
        assert all((tmp_path / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
        assert text.count(pages.SCROLLS) == sum("text/html" in kind for kind in kinds)
        assert all((ROOT / "docs" / name).exists() for name in re.findall(r"\]\(\.\./(\w+\.md)\)", text))
    assert all((tmp_path / link).exists() for link in Page(index).links if link.endswith(".png"))


def test_programs_of_the_gallery_have_docstrings() -> None:
    for path in sorted((ROOT / "gallery").glob("*.py")):
        tree = ast.parse(path.read_text())
        named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert all(ast.get_docstring(node) for node in [tree, *named] if not getattr(node, "name", "").startswith("_"))


def test_the_picture_of_the_readme_is_that_of_the_plots_and_transparent(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="the extra plot is not installed")
    load("readme_picture").draw(tmp_path / "pictures.png")
    drawn, stored = (image.imread(folder / "pictures.png") for folder in (tmp_path, ROOT / "docs"))
    assert drawn.shape[2] == stored.shape[2] == 4
    assert drawn[0, 0, 3] == stored[0, 0, 3] == 0
    again = "python gallery/readme_picture.py draws it again"
    assert max(abs(one - other) for one, other in zip(drawn.shape, stored.shape, strict=True)) < 20, again
    # Versions of matplotlib differ in the edges of letters, so means of squares of 20 pixels are compared.
    height, width = (min(one, other) // 20 * 20 for one, other in zip(drawn.shape[:2], stored.shape[:2], strict=True))
    means = [
        one[:height, :width].reshape(height // 20, 20, width // 20, 20, 4).mean(axis=(1, 3)) for one in (drawn, stored)
    ]
    differing = (abs(means[0] - means[1]).max(axis=2) > 0.1).mean()
    assert differing < 0.05, f"{differing:.0%} of the picture differ: {again}"
