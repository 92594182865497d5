"""Pages of the documentation site from the notebooks, with their outputs: python gallery/pages.py [FOLDER]

nbconvert makes a Markdown page and picture files of each notebook. HTML tables stay HTML, on one line, so that Markdown
leaves them as they are, and scroll if they are wide. An index page shows the first picture of each notebook. FOLDER is
docs/gallery by default; mkdocs adds its pages to the navigation.
"""

import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS, TARGET = ROOT / "notebooks", ROOT / "docs" / "gallery"
SCROLLS = '<div class="rmq-output" style="overflow-x:auto">'
_DOCUMENT = re.compile(r"(?<![\w/`(])docs/(\w+)\.md")
_PANDAS = ' border="1" class="dataframe"'  # without it, a table has the style of the site
_PLAIN = str.maketrans("", "", "`*")  # marks of Markdown in a paragraph
_CARDS = "display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:1.2rem"
_CARD = "border:1px solid rgba(128,128,128,.35);border-radius:.3rem;padding:.8rem"
_PICTURE = "width:100%;height:9rem;object-fit:contain;object-position:left top"


@dataclass(frozen=True, slots=True)
class Page:
    """A page made of a notebook: its name without suffix, its title, its first paragraph, its text and its pictures."""

    name: str
    title: str
    summary: str
    text: str
    pictures: dict[str, bytes]


def page_of(path: Path) -> Page:
    """Return the page of a notebook.

    Raises ModuleNotFoundError with the pip command if nbconvert is not installed, and ValueError if the notebook has no
    title or stored no output.
    """
    try:
        import nbformat
        from nbconvert import MarkdownExporter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the gallery needs nbconvert: pip install 'rmq-spark[docs]'", name="nbconvert"
        ) from error
    notebook = nbformat.read(path, 4)
    first = notebook.cells[0]["source"]
    if not first.startswith("# ") or "\n\n" not in first:
        raise ValueError(f"{path.name}: the first cell is {first[:40]!r}; expected a title and a paragraph.")
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise ValueError(f"{path.name}: found no outputs; expected those of a run. Run gallery/run_notebooks.py.")
    for cell in notebook.cells:
        if cell["cell_type"] == "markdown":
            cell["source"] = _DOCUMENT.sub(r"[\1](../\1.md)", cell["source"])
        for output in cell.get("outputs", ()):
            _keep_html(output)
    exporter = MarkdownExporter()
    text, resources = exporter.from_notebook_node(
        notebook, resources={"output_files_dir": path.stem, "unique_key": path.stem}
    )
    title, _, rest = first.removeprefix("# ").partition("\n\n")
    summary = " ".join(rest.split("\n\n")[0].split()).translate(_PLAIN)
    return Page(path.stem, title, summary, text, dict(resources["outputs"]))


def _keep_html(output: Any) -> None:
    """Put the HTML of an output on one line in an element that scrolls, and leave its plain text out."""
    data = output.get("data", {})
    if "text/html" in data:
        html = data["text/html"].strip().replace(_PANDAS, "").replace("\n", "&#10;")
        output["data"] = {"text/html": f"{SCROLLS}{html}</div>"}
    elif "image/png" in data:
        output["data"] = {"image/png": data["image/png"]}


def index_of(pages: list[Page]) -> str:
    """Return the index page: a card with title, first picture and summary for each page."""
    cards = []
    for page in pages:
        pictures = [name for name in page.pictures if name.endswith(".png")]
        picture = f'<img src="{escape(pictures[0])}" alt="" style="{_PICTURE}" loading="lazy">' if pictures else ""
        link = f'<a href="{page.name}.html"><b>{escape(page.title)}</b></a>'
        cards.append(f'<div style="{_CARD}">{link}<p>{escape(page.summary)}</p>{picture}</div>')
    about = "Each page is a notebook of `notebooks/` with the outputs of a run. `make notebooks` runs them all."
    return f'# Gallery\n\n{about}\n\n<div style="{_CARDS}">{"".join(cards)}</div>\n'


def write_pages(target: Path, notebooks: Path = NOTEBOOKS) -> list[Page]:
    """Write the pages of all notebooks, their pictures and the index into the folder `target`, and return the pages."""
    pages = [page_of(path) for path in sorted(notebooks.glob("*.ipynb"))]
    for page in pages:
        (target / page.name).mkdir(parents=True, exist_ok=True)
        (target / f"{page.name}.md").write_text(page.text, encoding="utf-8")
        for name, data in page.pictures.items():
            (target / name).write_bytes(data)
    (target / "index.md").write_text(index_of(pages), encoding="utf-8")
    return pages


if __name__ == "__main__":
    for written in write_pages(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET):
        print(written.name)
