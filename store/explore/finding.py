"""What a check found: one thing each, with its evidence and the next step.

Three severities:

- damage: messages are or would be lost, or are wrong, and nothing in the store can mend that by itself;
- repairable: files that a writer makes anew from the log, or a shutdown that was none: `repair` or the next writer
  puts it right;
- note: worth knowing, and nothing is wrong: what a live writer is at, stale bytes that nobody reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

DAMAGE, REPAIRABLE, NOTE = "damage", "repairable", "note"
DOUBLED = "doubled"  # action
SEVERITIES = (DAMAGE, REPAIRABLE, NOTE)

_ALIKE_AT_MOST = 200  # findings of one kind: a store of nothing but damage must not fill the memory
_SHOWN_CHARS = 200
_PLANNED = frozenset(
    {"recover", "rebuild", "restore", "cut", "reset", "clock", "watermark", "checkpoint"}
)  # done by a repair


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found. `position` counts bytes in the file at `path`; ranges are half-open.

    `[begin, end)` are queue offsets of the queue `topic`/`queue_id`, None where no single queue is concerned.
    `messages` is how many are concerned. `action` is what `plan_repair` would do: see RepairStep;
    besides, "watermark" and "checkpoint" (the file is written again), "keep" (nothing needs to be done), and "doubled"
    (a rebuild of the queue gives units to the first messages of their queue offsets, and loses those that came later).
    """

    severity: str
    area: str
    what: str
    path: str
    position: int = 0
    expected: str = ""
    found: str = ""
    topic: str | None = None
    queue_id: int | None = None
    begin: int | None = None
    end: int | None = None
    messages: int = 0
    next_step: str = ""
    action: str = "leave"

    def __str__(self) -> str:
        detail = f": expected {self.expected}, found {self.found}" if self.expected or self.found else ""
        queue = "" if self.topic is None else f"; queue {self.topic}/{self.queue_id}"
        if self.begin is not None:
            queue += f", queue offsets [{self.begin}, {self.end})"
        count = f"; {self.messages} messages" if self.messages else ""
        step = f". {self.next_step}" if self.next_step else ""
        return f"{self.severity}: {self.path}, position {self.position}: {self.what}{detail}{queue}{count}{step}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        """By which the same thing, found again, is known."""
        return self.area, self.path, self.what, self.position


def utc_text(time_ms: int) -> str:
    """Return a time (ms since the epoch) to the second, as texts of findings and plans have it."""
    return str(np.datetime64(time_ms // 1000, "s")).replace("T", " ") + " UTC"


class Findings:
    """Findings as they come. One thread.

    A repair plans from them, so the first finding of each target of a repair is always kept, and the lowest place of a
    cut. Of the others, some hundreds of each kind are kept, and one that counts the rest.
    """

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._counts: dict[tuple[str, str, str], int] = {}
        self._hidden: dict[tuple[str, str, str], int] = {}
        self._more: dict[tuple[str, str, str], Finding] = {}
        self._lowest: dict[tuple[str, str, str, str | None, int | None], int] = {}  # position, by target of a repair

    def add(self, finding: Finding) -> None:
        """Keep a finding, its texts cut to what can be read."""
        finding = replace(finding, expected=_shown(finding.expected), found=_shown(finding.found))
        kind = finding.severity, finding.area, finding.action
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._is_planned(finding) or count <= _ALIKE_AT_MOST:
            self._found.append(finding)
            return
        before = self._more.get(kind)
        messages = finding.messages + (before.messages if before else 0)
        hidden = self._hidden[kind] = self._hidden.get(kind, 0) + 1
        first = before or replace(finding, expected="", found="", topic=None, queue_id=None, begin=None, end=None)
        self._more[kind] = replace(first, what=f"and {hidden} more of this kind, the first here", messages=messages)

    def extend(self, findings: Iterable[Finding]) -> None:
        """Keep several."""
        for finding in findings:
            self.add(finding)

    def all(self) -> tuple[Finding, ...]:
        """Return them, damage first, else by area and place."""
        found = [*self._found, *self._more.values()]
        return tuple(sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.area, one.path, one.position)))

    def _is_planned(self, finding: Finding) -> bool:
        """Say whether a repair may need this finding: its target is new, or its place is the lowest of a cut."""
        if finding.severity == NOTE or finding.action not in _PLANNED:
            return False
        target = finding.area, finding.action, finding.path, finding.topic, finding.queue_id
        if finding.action == "cut":
            target = finding.area, finding.action, finding.path, None, None
        lowest = self._lowest.get(target)
        if lowest is not None and (finding.action != "cut" or lowest <= finding.position):
            return False
        self._lowest[target] = finding.position
        return True


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
