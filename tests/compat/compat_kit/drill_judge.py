"""Judge of a drill: compares the batches that a stream recorded with what the producer knows it stored.

A *place* is a broker's name and a queue id. For each place of a stream:

- The queue offsets are contiguous, from where the stream began. Only ranges that the query called lost are missing.
- A message that was acknowledged has the queue offset and the body that the producer knows.
- A message without an acknowledgement is there once or not at all. No other message is there, and none twice.
- A batch that was repeated has the same rows as before.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

Place: TypeAlias = tuple[str, int]
_LOSS = re.compile(r"(\d+) messages of queue [^/]+/([^:]+):(\d+), queue offsets \[(\d+), (\d+)\)")


class Sent(NamedTuple):
    """A message that the producer sent. `sent_ms` is when it began to."""

    body: str
    sent_ms: int


@dataclass(slots=True)
class Truth:
    """The knowledge of the producer: messages that were acknowledged, by queue offset, and bodies of the others."""

    stored: dict[Place, dict[int, Sent]] = field(default_factory=lambda: defaultdict(dict))
    unknown: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))

    def ends(self) -> dict[Place, int]:
        """Return where each queue ends at least."""
        return {place: max(held) + 1 for place, held in self.stored.items() if held}

    def count(self) -> int:
        """Return the number of acknowledged messages."""
        return sum(map(len, self.stored.values()))


def read_ledger(path: Path, begin: int = 0) -> Truth:
    """Return what a ledger of `Storing.java` says from a line on."""
    truth = Truth()
    for line in _lines(path)[begin:]:
        broker, queue, number, sent_ms, *offset = line.split(" ")
        place, body = (broker, int(queue)), f"{broker}/{queue}/{number}"
        if offset and offset[0]:
            truth.stored[place][int(offset[0])] = Sent(body, int(sent_ms))
        else:
            truth.unknown[place].add(body)
    return truth


def ledger_length(path: Path) -> int:
    """Return the number of lines of a ledger."""
    return len(_lines(path))


def _lines(path: Path) -> list[str]:
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


class Row(NamedTuple):
    """A message that a stream delivered. `body` is without the filler."""

    place: Place
    offset: int
    body: str


class Batches:
    """The batches that a stream recorded in a folder. `read` reads those that are new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[int, list[Row]] = {}  # by number of the batch
        self.ends: dict[Place, int] = {}  # after the last message that was delivered
        self.repeated: set[int] = set()
        self.unequal: list[int] = []  # batches that were repeated with other rows
        self._read: set[str] = set()

    def read(self) -> None:
        """Read the files that were written since the last call."""
        for path in sorted(self.folder.glob("*.json")):
            if path.name in self._read:
                continue
            self._read.add(path.name)
            number = int(path.name.partition("-")[0])
            rows = [
                Row((broker, queue), offset, body.partition(" ")[0])
                for broker, queue, offset, body in json.loads(path.read_text())
            ]
            if number in self.rows:
                self.repeated.add(number)
                if _by_place(rows) != _by_place(self.rows[number]):
                    self.unequal.append(number)
            self.rows[number] = rows
            self.ends |= {row.place: row.offset + 1 for row in rows}

    def last_number(self) -> int:
        """Return the number of the last batch, -1 if there is none."""
        return max(self.rows, default=-1)

    def rows_after(self, number: int) -> Iterator[Row]:
        """Yield the rows of the batches after the one of this number, in order."""
        for later in sorted(self.rows):
            if later > number:
                yield from self.rows[later]


def _by_place(rows: Iterable[Row]) -> Mapping[Place, list[Row]]:
    found: dict[Place, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.place].append(row)
    return found


def losses_in(lines: Iterable[str]) -> dict[Place, list[tuple[int, int]]]:
    """Return the ranges of queue offsets that log lines or errors call lost."""
    found: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    for line in lines:
        for _, broker, queue, begin, end in _LOSS.findall(line):
            if (int(begin), int(end)) not in found[broker, int(queue)]:
                found[broker, int(queue)].append((int(begin), int(end)))
    return found


@dataclass(slots=True)
class Verdict:
    """The result of a judge. `faults` describes each of the others that are counted, and all more."""

    delivered: int = 0
    missing: int = 0
    doubled: int = 0
    out_of_order: int = 0
    foreign: int = 0
    lost: int = 0  # that the query called lost, so they are not faults
    faults: list[str] = field(default_factory=list)


def judge(
    rows: Iterable[Row],
    truth: Truth,
    begins: Mapping[Place, int] | None,
    lost: Mapping[Place, Sequence[tuple[int, int]]] | None = None,
) -> Verdict:
    """Judge the rows of one stream, all up to the ends of the queues.

    `begins` has where the stream began in each place, 0 where it says nothing. With None a place begins at its first
    row. `lost` has the ranges that the query called lost.
    """
    verdict, lost = Verdict(), lost or {}
    nexts: dict[Place, int] = {}
    seen: dict[Place, set[str]] = defaultdict(set)
    for row in rows:
        verdict.delivered += 1
        first = row.offset if begins is None else begins.get(row.place, 0)
        expected = nexts.get(row.place, first)
        if row.offset < expected:
            kind = "doubled" if row.body in seen[row.place] else "out_of_order"
            setattr(verdict, kind, getattr(verdict, kind) + 1)
            verdict.faults.append(f"{kind.upper()} {row}: expected the queue offset {expected}")
        else:
            _note_gap(verdict, row.place, range(expected, row.offset), lost)
            nexts[row.place] = row.offset + 1
            _judge_body(verdict, row, truth, seen[row.place])
        seen[row.place].add(row.body)
    for place, end in truth.ends().items():
        begin = end if begins is None else begins.get(place, 0)
        _note_gap(verdict, place, range(nexts.get(place, begin), end), lost)
    return verdict


def _note_gap(verdict: Verdict, place: Place, gap: range, lost: Mapping[Place, Sequence[tuple[int, int]]]) -> None:
    called = [one for one in gap if any(begin <= one < end for begin, end in lost.get(place, ()))]
    verdict.lost += len(called)
    if len(called) < len(gap):
        verdict.missing += len(gap) - len(called)
        verdict.faults.append(
            f"MISSING {place}: queue offsets {gap.start} to {gap.stop - 1}; {len(called)} called lost"
        )


def _judge_body(verdict: Verdict, row: Row, truth: Truth, seen: set[str]) -> None:
    known = truth.stored.get(row.place, {}).get(row.offset)
    if row.body in seen:
        verdict.doubled += 1
        verdict.faults.append(f"DOUBLED {row}: the message was delivered at another queue offset")
    elif known is not None and known.body != row.body:
        verdict.foreign += 1
        verdict.faults.append(f"FOREIGN {row}: the producer stored {known.body} there")
    elif known is None and row.body not in truth.unknown.get(row.place, ()):
        verdict.foreign += 1
        verdict.faults.append(f"FOREIGN {row}: the producer did not send it there")
