"""Findings of a check: what is wrong, where it is, the evidence, and what to do next."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError

_ALIKE_MAX = 200  # findings of one kind that are kept; bounds memory if everything is damaged
_SHOWN_CHARS = 200


class Severity(StrEnum):
    """The severity of a finding. The worst comes first."""

    DAMAGE = "damage"  # messages are lost or wrong, or will be; the store does not contain what would restore them
    REPAIRABLE = "repairable"  # derived files are wrong, or the last writer died; `repair` or the next writer fixes it
    NOTE = "note"  # harmless, such as writes in progress or stale bytes that are never read


class Area(StrEnum):
    """The part of a store that a finding concerns."""

    COMMIT_LOG = "commitlog"
    CONSUME_QUEUE = "consumequeue"
    BATCH_CONSUME_QUEUE = "batchconsumequeue"
    CONSUME_QUEUE_EXT = "consumequeue_ext"
    INDEX = "index"
    CONFIG = "config"
    CHECKPOINT = "checkpoint"
    TIMER = "timer"
    RMQ = "rmq"  # the files of rmq-spark, in `rmq/`
    STORE = "store"  # the store as a whole


class Action(StrEnum):
    """What a repair does about a finding."""

    RECOVER = "recover"  # finish what a dead writer left, as the next writer would
    REBUILD = "rebuild"  # write derived files again from the commit log
    RESTORE = "restore"  # replace a config file by its `.bak`, or the `.bak` by the file
    CUT = "cut"  # truncate the commit log before the damage, but only if the plan was made with `cut_log`
    RESET = "reset"  # set offsets back to the ends of their queues, but only if the plan was made with `cut_log`
    CLOCK = "clock"  # set store times, or the timer, back to this machine's clock
    WATERMARK = "watermark"  # write the watermark again
    CHECKPOINT = "checkpoint"  # write the checkpoint again
    KEEP = "keep"  # do nothing, because no repair depends on the wrong field; the rest of the record is right
    LOST = "lost"  # do nothing, because another finding is about the damage that lost these messages
    DOUBLED = "doubled"  # do nothing; but if the queue is rebuilt, only the first message of each queue offset is kept
    LEAVE = "leave"  # do nothing, because no repair can fix it


_WITHOUT_REPAIR = frozenset({Action.KEEP, Action.LOST, Action.DOUBLED, Action.LEAVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, or one note, that a check found.

    `what` describes it, and `path` is its file. `position` is the position in that file (bytes). `expected` and `found`
    are the evidence, and `next_step` is the advice; each may be empty.

    If the finding concerns a single queue, `topic` and `queue_id` name the queue, and `[begin, end)` are the affected
    queue offsets if they are known. Otherwise, these fields are None. `messages` is the number of affected messages, or
    0 if it is not known.
    """

    severity: Severity
    area: Area
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
    action: Action = Action.LEAVE

    def __str__(self) -> str:
        detail = f": expected {self.expected}, found {self.found}" if self.expected or self.found else ""
        queue = "" if self.topic is None else f"; queue {self.topic}/{self.queue_id}"
        if self.begin is not None:
            queue += f", queue offsets [{self.begin}, {self.end})"
        count = f"; {self.messages} messages" if self.messages else ""
        step = f". {self.next_step}" if self.next_step else ""
        return f"{self.severity}: {self.path}, position {self.position}: {self.what}{detail}{queue}{count}{step}"

    @property
    def key(self) -> tuple[Area, str, str, int]:
        """A key that identifies the problem. If a second scan finds the same problem, its finding has an equal key."""
        return self.area, self.path, self.what, self.position


def error_finding(error: StoreError, area: Area, path: str = "") -> Finding:
    """Return a finding about an error. `path` is used unless the error is a DamageError, which has a path."""
    if not isinstance(error, DamageError):
        step = "Check that it is a file, and that the user of this check may read it."
        step = "" if is_unreadable(error) else step  # the text of an unreadable file's error contains the next step
        return Finding(severity=Severity.DAMAGE, area=area, what=str(error), path=path, next_step=step)
    return Finding(
        severity=Severity.DAMAGE,
        area=area,
        what=error.what,
        path=error.path,
        position=error.position,
        expected="" if error.expected is None else str(error.expected),
        found="" if error.expected is None else str(error.found),
        next_step=error.next_step,
    )


def utc_text(time_ms: int) -> str:
    """Return a time (ms since the epoch) as text in UTC, in whole seconds, for findings and plans."""
    return str(np.datetime64(time_ms // 1000, "s")).replace("T", " ") + " UTC"


class Findings:
    """Collects findings in bounded memory. Not thread-safe.

    A repair is planned from the findings. So the first finding about each target of a repair is always kept, and for a
    cut also the finding with the lowest position. Of the others, the first 200 of each kind are kept. A kind is a
    combination of severity, area and action. The rest of each kind is replaced by one finding with their number.
    """

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._counts: dict[tuple[str, str, str], int] = {}
        self._hidden: dict[tuple[str, str, str], int] = {}
        self._more: dict[tuple[str, str, str], Finding] = {}
        self._lowest: dict[tuple[str, str, str, str | None, int | None], int] = {}  # target of a repair -> position

    def add(self, finding: Finding) -> None:
        """Add a finding. Long evidence is shortened. If there are too many of its kind, the finding is only counted."""
        finding = replace(finding, expected=_shortened(finding.expected), found=_shortened(finding.found))
        kind = finding.severity, finding.area, finding.action
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._is_needed_by_repair(finding) or count <= _ALIKE_MAX:
            self._found.append(finding)
            return
        previous = self._more.get(kind)
        messages = finding.messages + (previous.messages if previous else 0)
        hidden = self._hidden[kind] = self._hidden.get(kind, 0) + 1
        first = previous or replace(finding, expected="", found="", topic=None, queue_id=None, begin=None, end=None)
        self._more[kind] = replace(
            first, what=f"{hidden} more findings of this kind, the first here", messages=messages
        )

    def extend(self, findings: Iterable[Finding]) -> None:
        """Add several findings, as `add` does."""
        for finding in findings:
            self.add(finding)

    def all(self) -> tuple[Finding, ...]:
        """Return the findings, ordered by severity (worst first), area, path and position."""
        severities = list(Severity)
        found = [*self._found, *self._more.values()]
        return tuple(sorted(found, key=lambda one: (severities.index(one.severity), one.area, one.path, one.position)))

    def _is_needed_by_repair(self, finding: Finding) -> bool:
        """Return whether a repair plan needs the finding.

        It does if the finding is the first about its repair target, or the one with the lowest position of a cut.
        """
        if finding.severity == Severity.NOTE or finding.action in _WITHOUT_REPAIR:
            return False
        target = finding.area, finding.action, finding.path, finding.topic, finding.queue_id
        if finding.action == Action.CUT:
            target = finding.area, finding.action, finding.path, None, None
        lowest = self._lowest.get(target)
        if lowest is not None and (finding.action != Action.CUT or lowest <= finding.position):
            return False
        self._lowest[target] = finding.position
        return True


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def field_position(layout: np.dtype[np.void], name: str) -> int:
    """Return the position of the field `name` in an entry with this layout (bytes)."""
    layout_fields: Any = layout.fields
    return int(layout_fields[name][1])
