"""Checks a built site: python .ci/site_check.py [FOLDER]. Prints what is wrong, and exits with status 1.

- Every link and picture leads to a file of the site, and every anchor to an element with that id.
- No page loads anything from another host: scripts, styles, fonts, pictures. Links for a reader to follow may.
- Every error of docs/ERRORS.md that users search by its text is in the index of the search.
"""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
# Elements that make a browser load what they name, and the attributes with the names.
_LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
    "embed": "src",
}
_LOADING_RELATIONS = {"stylesheet", "icon", "preconnect", "preload", "dns-prefetch", "modulepreload", "manifest"}
_STYLE_URL = re.compile(r"(?:@import\s+|url\()\s*['\"]?(https?:)?//", re.IGNORECASE)


class Page(HTMLParser):
    """The ids of a page, what it loads, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the ids, links and loads of one element."""
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a" and "name" in values:
            self.ids.add(values["name"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and _LOADING_RELATIONS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        if tag in _LOADING and values.get(_LOADING[tag]):
            self.loads.append(values[_LOADING[tag]])


def find_faults(site: Path) -> list[str]:
    """Return what is wrong with the site in the folder, one text for each fault."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site}: no page; expected the folder of a built site. Run make site."]
    faults = []
    for path, page in pages.items():
        name = path.relative_to(site)
        faults += [f"{name}: loads {load} from another host" for load in page.loads if _is_outside(load)]
        for target in page.links + page.loads:
            if not _is_outside(target) and (fault := _follow(target, path, pages, site)):
                faults.append(f"{name}: {fault}")
    for style in sorted(site.rglob("*.css")):
        if _STYLE_URL.search(style.read_text(encoding="utf-8")):
            faults.append(f"{style.relative_to(site)}: loads from another host")
    return faults + _unsearchable(site)


def _is_outside(target: str) -> bool:
    return bool(urlsplit(target).scheme or urlsplit(target).netloc)


def _follow(target: str, path: Path, pages: dict[Path, Page], site: Path) -> str | None:
    """Return what is wrong with a link of the page at `path`, or None."""
    parts = urlsplit(target)
    # 404.html has absolute links, because a server shows it at any address.
    base = site if parts.path.startswith("/") else path.parent
    reached = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
    if reached.is_dir():
        reached = reached / "index.html"
    if not reached.exists():
        return f"links to {target}, which does not exist"
    anchor = unquote(parts.fragment)
    if anchor and reached in pages and anchor not in pages[reached].ids and anchor not in ("__top", "top"):
        return f"links to {target}, and {reached.relative_to(site)} has no such anchor"
    return None


def _unsearchable(site: Path) -> list[str]:
    """Return the texts of errors that the index of the search lacks."""
    index = site / "search" / "search_index.json"
    if not index.exists():
        return ["search/search_index.json is missing"]
    found = "\n".join(entry["text"] for entry in json.loads(index.read_text(encoding="utf-8"))["docs"])
    plain = _plain(re.sub(r"<[^>]+>", "", found))
    page = (ROOT / "docs" / "ERRORS.md").read_text(encoding="utf-8")
    table = page.split("## By the text of an error")[1].split("\n## ")[0]
    texts = re.findall(r"`([^`]+)`", "\n".join(row.split(" | ")[0] for row in table.splitlines() if row[:3] == "| `"))
    return [f"the search does not find: {text}" for text in texts if _plain(text.replace("\\|", "|")) not in plain]


def _plain(text: str) -> str:
    """Return a text without what the index escapes, and with single spaces."""
    for mark, character in (("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&#39;", "'"), ("&amp;", "&")):
        text = text.replace(mark, character)
    return " ".join(text.split())


if __name__ == "__main__":
    found_faults = find_faults(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve())
    print("\n".join(found_faults) or "The site's links are good.")
    raise SystemExit(bool(found_faults))
