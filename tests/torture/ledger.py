"""Ledger of a worker, outside of the store: the deeds that it began, and those that the store acknowledged.

Each fact is one line of JSON, appended by one write() to a file of the worker. A line that a death cut off is ignored.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

Facts = dict[str, list[tuple[Any, ...]]]


class Ledger:
    """The notes of one worker."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = os.open(folder / f"{name}.facts", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, word: str, *details: Any) -> None:
        """Append a fact."""
        os.write(self._file, (json.dumps((word, *details)) + "\n").encode())


def read_facts(folder: Path) -> Facts:
    """Return the details of all facts, by their word."""
    facts: Facts = defaultdict(list)
    for path in sorted(folder.glob("*.facts")):
        for line in path.read_text().splitlines():
            try:
                word, *details = json.loads(line)
            except ValueError:
                continue
            facts[word].append(tuple(details))
    return facts
