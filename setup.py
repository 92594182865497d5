"""Completes setup.cfg with the project's URLs, which are in `[tool.rmq-spark.urls]` of pyproject.toml.

PyPI shows README.md outside of the repository, where its relative links and pictures lead nowhere. So the description
of the package is README.md with absolute links. While the URLs are empty, it has no pictures, and its links are text.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
_LABELS = {
    "documentation": "Documentation",
    "repository": "Source",
    "changelog": "Changelog",
    "tracker": "Issues",
}
_PICTURE = re.compile(r"^!\[[^\]]*\]\((?P<target>[^)]+)\)\n+", re.MULTILINE)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def read_urls() -> dict[str, str]:
    """Return the project's URLs by their names in pyproject.toml, without those that are empty."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    urls: dict[str, str] = settings["tool"]["rmq-spark"]["urls"]
    return {name: url.rstrip("/") for name, url in urls.items() if url}


def project_urls(urls: dict[str, str]) -> dict[str, str]:
    """Return the URLs by the labels under which PyPI shows them."""
    return {label: urls[name] for name, label in _LABELS.items() if name in urls}


def describe(readme: str, urls: dict[str, str]) -> str:
    """Return the text of README.md for readers outside of the repository.

    A relative link becomes one below the URL `files`, and a picture one below `raw`, which serves the bytes of files.
    Without these URLs the text of the link remains, and the picture is left out.
    """
    if "raw" not in urls:
        readme = _PICTURE.sub(lambda found: found[0] if "://" in found["target"] else "", readme)

    def complete(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith("#"):
            return found[0]
        base = urls.get("raw" if found["picture"] else "files")
        return f"{found['picture']}[{found['text']}]({base}/{target})" if base else found["text"]

    return LINK.sub(complete, readme)


if __name__ == "__main__":
    from setuptools import setup

    known = read_urls()
    setup(
        project_urls=project_urls(known),
        long_description=describe((ROOT / "README.md").read_text(encoding="utf-8"), known),
        long_description_content_type="text/markdown",
    )
