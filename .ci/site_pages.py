"""Hooks of mkdocs for the documentation site: generated pages, the project's URLs, and Markdown as GitHub reads it.

The pages of docs/ are also read on GitHub, so they are written for it. Python-Markdown, which mkdocs uses, wants four
spaces in lists, an empty line before a list, and plain pipes in the code of tables. `on_page_markdown` converts that.

Run as a program, it draws docs/record.svg, the picture of the first page: python .ci/site_pages.py
"""

import ast
import re
import runpy
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Documents outside of docs/, and their pages.
COPIES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "deploy/README.md": "deploy.md"}
REFERENCE = "reference/rmq_spark.md"
# Sections of the reference: title, and the modules that define its names (beginnings of their dotted names).
_SECTIONS = {
    "Spark": (
        "rmq_spark.spark_session",
        "rmq_spark.stop",
        "rmq_spark.parsing",
        "rmq_spark.consuming",
        "rmq_spark.group_listeners",
        "rmq_spark.datasource",
        "rmq_spark.error_texts",
        "rmq_spark.metrics",
    ),
    "Plots": ("rmq_spark.plots", "rmq_spark.drawing"),
    "Errors": ("rmq_spark.store.errors",),
    "Stores, clusters and groups, without Spark": ("",),
}
_FENCE = re.compile(r"^ *(```+|~~~+)")
_ITEM = re.compile(r"^(?P<mark>[-*] |\d+\. )")
_ERROR_ROW = re.compile(r"^\| (?P<cell>`(?P<text>[^`]+)`)", re.MULTILINE)
_CODE = re.compile(r"`[^`]+`")
# Links and URLs are read as for the description of the package.
_SETUP = runpy.run_path(str(ROOT / "setup.py"))
LINK, read_urls = _SETUP["LINK"], _SETUP["read_urls"]


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Set the site's URLs, and add pages that the navigation does not name: new guides, and the gallery."""
    urls = read_urls()
    config["site_url"] = f"{urls['documentation']}/" if "documentation" in urls else None
    config["repo_url"] = urls.get("repository")
    named = set(_pages(config["nav"]))
    guides = next(section["Guides"] for section in config["nav"] if "Guides" in section)
    guides += [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in named]
    gallery = sorted(f"gallery/{page.name}" for page in (ROOT / "docs" / "gallery").glob("*.md"))
    gallery = [page for page in gallery if page not in named]
    if gallery:
        gallery.sort(key=lambda page: not page.endswith("/index.md"))
        config["nav"].insert(3, {"Gallery": gallery})
    return config


def _pages(nav: Any) -> Iterator[str]:
    for entry in nav.values() if isinstance(nav, dict) else nav:
        if isinstance(entry, str):
            yield entry
        else:
            yield from _pages(entry)


def on_files(files: Any, config: MutableMapping[str, Any]) -> Any:
    """Add the generated pages: copies of documents outside of docs/, and the reference."""
    from mkdocs.structure.files import File

    for source, page in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=move_links(text, Path(source).parent)))
    files.append(File.generated(config, REFERENCE, content=reference_page()))
    return files


def move_links(text: str, folder: Path) -> str:
    """Return the text of a document in `folder`, with its relative links as seen from docs/."""

    def moved(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith("#"):
            return found[0]
        path, _, anchor = target.partition("#")
        seen = (ROOT / folder / path).resolve().relative_to(ROOT).as_posix()
        seen = COPIES.get(seen, seen.removeprefix("docs/") if seen.startswith("docs/") else f"../{seen}")
        return f"{found['picture']}[{found['text']}]({seen}{'#' if anchor else ''}{anchor})"

    return LINK.sub(moved, text)


def reference_page() -> str:
    """Return the page with all public names, whose texts mkdocstrings takes from the code."""
    homes = _homes(ROOT / "rmq_spark" / "__init__.py")
    store_homes = _homes(ROOT / "store" / "__init__.py")
    lines = ["# Python names", "", "The text of each name comes from the code. Import the names from `rmq_spark`.", ""]
    left = sorted(homes, key=str.lower)
    for title, modules in _SECTIONS.items():
        chosen = [name for name in left if homes[name].startswith(modules)]
        left = [name for name in left if name not in chosen]
        lines += [f"## {title}", ""]
        for name in chosen:
            lines += [f"::: {homes[name]}.{name}", ""]
    lines += ["## The package rmq_spark.store", "", _STORE, ""]
    for name in sorted(store_homes.keys() - homes.keys(), key=str.lower):
        lines += [f"::: {store_homes[name]}.{name}", ""]
    return "\n".join(lines)


_STORE = (
    "Classes whose objects the functions above return, and parts of the data source and the command. "
    "Import these names from `rmq_spark.store`."
)


def _homes(path: Path) -> dict[str, str]:
    """Return the public names of a package, with the modules that define them, without importing anything."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node.body for node in tree.body if isinstance(node, ast.If)] + [tree.body]
    found = {
        alias.asname or alias.name: str(node.module)
        for body in imports
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    public = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    # Constants have comments and no docstrings. PROGRAMS.md describes those that users need.
    return {name: _defining(found[name], name) for name in public if name in found and not name.isupper()}


def _defining(module: str, name: str) -> str:
    """Return the module that defines the name, which `module` may import from there."""
    folder = ROOT.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return _defining(node.module, name)
    return module


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text as Python-Markdown needs it, with links out of docs/ as links to the repository."""
    if page.file.src_uri == "ERRORS.md":
        markdown = mark_errors(markdown)
    return "\n".join(_converted_lines(_outer_links(markdown, Path(page.file.src_uri).parent)))


def mark_errors(markdown: str) -> str:
    """Return the page of errors with an anchor in each row that begins with the text of an error: its words, joined."""
    seen: set[str] = set()

    def marked(found: re.Match[str]) -> str:
        anchor = "-".join(re.findall(r"[a-z0-9]+", found["text"].lower()))
        if not anchor or anchor in seen:
            return found[0]
        seen.add(anchor)
        return f'| <span id="{anchor}"></span>{found["cell"]}'

    return _ERROR_ROW.sub(marked, markdown)


def _outer_links(text: str, folder: Path) -> str:
    """Replace links to files outside of docs/ by links to the repository, or by their text if its URL is unknown."""
    files = read_urls().get("files")

    def outer(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith("#"):
            return found[0]
        path, _, anchor = target.partition("#")
        place = (ROOT / "docs" / folder / path).resolve()
        if place.is_relative_to(ROOT / "docs"):
            return found[0]
        seen = place.relative_to(ROOT).as_posix()
        if seen in COPIES:
            up = "../" * len(folder.parts)
            return f"[{found['text']}]({up}{COPIES[seen]}{'#' if anchor else ''}{anchor})"
        return f"[{found['text']}]({files}/{seen})" if files else found["text"]

    return LINK.sub(outer, text)


def _converted_lines(text: str) -> Iterator[str]:
    """Yield the lines as Python-Markdown needs them: indents of lists, lines before lists, pipes in code of tables."""
    fence, indent, before = "", 0, ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence:
            yield _shifted(line, indent)
            fence = "" if mark and line.strip() == fence else fence
        elif mark:
            if not line.startswith(" "):
                indent = 0
            fence = mark[1]
            yield _shifted(line, indent)
        elif item := _ITEM.match(line):
            if before and not indent:
                yield ""
            indent = len(item["mark"])
            yield line
        else:
            if line and not line.startswith(" "):
                indent = indent if before and indent and not line.startswith(("#", "|")) else 0
            if line.startswith("|"):
                line = _CODE.sub(lambda code: code[0].replace("\\|", "|"), line)
            nested = line.lstrip()
            if indent and _ITEM.match(nested) and before and not _ITEM.match(before.lstrip()) and line != nested:
                yield from () if before.startswith(" ") else [""]
            yield _shifted(line, indent)
        before = line


def _shifted(line: str, indent: int) -> str:
    """Return a line of an item of a list, whose content begins after `indent` characters, with four spaces."""
    return " " * (4 - indent) + line if 0 < indent < 4 and line.startswith(" " * indent) else line


def draw_record() -> str:
    """Return the picture of the first page as SVG: the record of one message, byte by byte."""
    sys.path.insert(0, str(ROOT))
    import rmq_spark
    from rmq_spark.drawing import svg_text

    with rmq_spark.open_reader(ROOT / "tests" / "golden" / "demo") as reader:
        (queue, offset), *_ = reader.find_key("orders", "O-1000")
        return svg_text(rmq_spark.plot_record(reader, queue, offset))


if __name__ == "__main__":
    (ROOT / "docs" / "record.svg").write_text(draw_record(), encoding="utf-8")
