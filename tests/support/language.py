"""Count turns of phrase that a native reader stumbles over: `python tests/support/language.py --show 5`.

A place is a hint, not a verdict: some are right where they are. `tests/test_language.py` bounds the counts.
"""

import argparse
import ast
import json
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_SUBJECTS = "files?|bytes?|records?|units?|entry|entries|logs?|stores?|queues?|names?|marks?|notes?"
_VERBS = "say|says|tell|tells|know|knows|believe|believes|speak|speaks|vouch|vouches"
PATTERNS = {
    "headless who": r"(?:^|[.:;(,] +)[Ww]ho(?:ever)? (?!knows)\w+",
    "headless what": r"(?:^|[.:;(] +)(?:What|That which) (?!is the|are the|does|do|happens\?)\w+",
    "is no X": r"\b(?:is|are|was|were) no (?!longer|more than|less than|such)\w+",
    "fronted of": r"(?:^|[.:;] +)Of (?!course)\w+ ",
    "things that speak": rf"\b(?:{_SUBJECTS}) (?:{_VERBS})\b",
    "behind for order": r"\bbehind (?:the|it|its|them|that|an?|which)\b",
    "stands, lies": r"\b(?:stands?|lies|lie|stood|lay) (?:at|in|on|behind|before|there|where)\b",
    "goes on": r"\b(?:goes|go|went|going) on\b|\bstays? back\b",
    "for good, anew": r"\bfor good\b|\banew\b|\bbe it\b|\bhow manieth\b",
    "passed over": r"\bpass(?:es|ed)? over\b|\btaken? back\b|\btak(?:e|es|en|ing) (?:it|them) back\b",
    "is there": r"\b(?:is|are|was|were) (?:not )?there\b(?! (?:a|an|any|no)\b)|\bthat (?:is|are) there\b",
    "from 1 on": r"\bfrom (?:\d+|one|here|there) on\b|\b[Ss]o (?:many|much)\b(?! (?:that|as|more))",
    "nothing but": r"\bbut for\b|\blest\b|\bnothing but\b",
    "is to be": r"\b(?:is|are|was|were) to (?:be|have|go|come|get|do|say|stay)\b",
    "mend, spoilt": r"\bmend(?:s|ed|ing)?\b|\bspoil(?:t|ed|s)\b|\bin turns?\b",
}
_WORDS_OF_A_SENTENCE = 3


@dataclass
class Tally:
    """The lines of text of one kind, the phrases by pattern, and their places."""

    lines: int = 0
    phrases: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)

    @property
    def per_thousand(self) -> float:
        """Phrases in 1,000 lines of text."""
        return 1000 * self.phrases.total() / max(self.lines, 1)

    def add(self, place: str, line: str) -> None:
        """Count one line of text."""
        self.lines += 1
        for what, pattern in PATTERNS.items():
            found = len(re.findall(pattern, line))
            if found:
                self.phrases[what] += found
                self.places.append(f"{place}: {what}: {line.strip()[:150]}")


def count() -> dict[str, Tally]:
    """Return the tallies of documents, messages to users, other texts of the product, and texts of tests.

    Documents are README, docs and notebooks. Messages are errors, warnings, log lines and the help of the command:
    strings of the product that are sentences, and docstrings of the command.
    """
    tallies = {kind: Tally() for kind in ("documents", "messages", "product", "tests")}
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "*.ipynb"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in sorted(listed.stdout.splitlines()):
        path = ROOT / name
        if not path.is_file() or name.startswith(("rmq_spark/store/", "rmq_spark/datasource/")):  # links
            continue
        if path.samefile(__file__) or path.name == "test_language.py":
            continue
        for kind, number, line in _lines(path, name):
            tallies[kind].add(f"{name}:{number}", line)
    return tallies


def _lines(path: Path, name: str) -> Iterator[tuple[str, int, str]]:
    if path.suffix == ".md":
        yield from (("documents", number, line) for number, line in enumerate(path.read_text().splitlines(), 1))
    elif path.suffix == ".ipynb":
        lines = [line for cell in json.loads(path.read_text())["cells"] for line in "".join(cell["source"]).split("\n")]
        yield from (("documents", number, line) for number, line in enumerate(lines, 1))
    else:
        is_product = name.startswith(("store/", "datasource/", "rmq_spark/"))
        with path.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                if token.type == tokenize.COMMENT:
                    yield "product" if is_product else "tests", token.start[0], token.string
        yield from _strings(path, is_product, name.startswith("rmq_spark/command/"))


def _strings(path: Path, is_product: bool, is_command: bool) -> Iterator[tuple[str, int, str]]:
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_docstring = id(node) in docstrings
            if not is_docstring and len(node.value.split()) < _WORDS_OF_A_SENTENCE:
                continue
            kind = "tests"
            if is_product:
                kind = "product" if is_docstring and not is_command else "messages"
            for number, line in enumerate(node.value.splitlines()):
                yield kind, node.lineno + number, line


def main() -> None:
    """Print the tallies, and the places of the kinds that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", metavar="KIND_OR_PATH", help="print the places of a kind, or of a path")
    asked = parser.parse_args()
    for kind, tally in count().items():
        print(f"{kind:10} {tally.phrases.total():5} in {tally.lines:6} lines, {tally.per_thousand:5.1f} per 1,000")
        if asked.show:
            print(*(place for place in tally.places if asked.show in (kind, *place.split(":")[:1])), sep="\n")


if __name__ == "__main__":
    main()
