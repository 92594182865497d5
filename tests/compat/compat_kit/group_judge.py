"""Judge of a group drill: what its members consumed, against what the producer stored. Pure.

- Each message that the producer knows as stored was consumed, and no other.
- A message that was consumed twice is counted by who consumed it, and by the last change of the group before.
- In an orderly group no message is consumed for the first time after a later one of its queue.
- Two members *overlap* in a queue while both work on it: a Java consumer while it has the queue, a query while it reads
  a batch with messages of the queue. The time in which a member was frozen does not count.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from compat_kit.members import Consumed, Owned, Place

Span: TypeAlias = tuple[int, int]  # ms since 1970


class Change(NamedTuple):
    """A change of the group: what happened to a member, and when, in ms since 1970."""

    at_ms: int
    what: str
    member: str

    def __str__(self) -> str:
        return f"{self.what} of {self.member}"


class Overlap(NamedTuple):
    """The time for which members worked on a queue at the same time, from a time on in ms since 1970."""

    place: Place
    members: tuple[str, ...]
    from_ms: int
    ms: int


@dataclass(slots=True)
class GroupVerdict:
    """What a judge found. `faults` describes what must not be."""

    stored: int = 0
    deliveries: int = 0
    missing: int = 0
    foreign: int = 0
    doubled: int = 0
    inversions: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # of the messages that were consumed twice
    overlaps: list[Overlap] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def judge_group(
    stored: Mapping[Place, Mapping[int, str]],
    unknown: Mapping[Place, set[str]],
    consumed: Mapping[str, Sequence[Consumed]],
    changes: Sequence[Change],
    *,
    is_orderly: bool,
) -> GroupVerdict:
    """Judge what members consumed, by their names.

    `stored` has the bodies that the producer knows as stored, by queue and offset; those in `unknown` may be stored.
    """
    verdict = GroupVerdict(stored=sum(map(len, stored.values())))
    found: defaultdict[Place, list[tuple[Consumed, str]]] = defaultdict(list)
    for member, own in consumed.items():
        for one in own:
            found[one.place].append((one, member))
    times = [change.at_ms for change in changes]
    for place in sorted(stored.keys() | found.keys()):
        rows = sorted(found[place], key=lambda row: row[0].at_ms)  # stable: a member's own order stays
        verdict.deliveries += len(rows)
        known, firsts = stored.get(place, {}), dict[int, str]()
        last = -1
        for one, member in rows:
            if one.body != known.get(one.offset) and (one.offset in known or one.body not in unknown.get(place, ())):
                verdict.foreign += 1
                verdict.faults.append(f"FOREIGN {one} of {member}: stored is {known.get(one.offset)}")
            elif one.offset in firsts:
                verdict.doubled += 1
                cause = changes[bisect_right(times, one.at_ms) - 1] if times and times[0] <= one.at_ms else "the start"
                verdict.causes[f"{firsts[one.offset]}, then {member}; after {cause}"] += 1
            else:
                if is_orderly and one.offset < last:
                    verdict.inversions += 1
                    verdict.faults.append(f"INVERSION {one} of {member}: first consumed after offset {last}")
                firsts[one.offset] = member
                last = max(last, one.offset)
        missing = sorted(known.keys() - firsts.keys())
        verdict.missing += len(missing)
        if missing:
            verdict.faults.append(f"MISSING {place}: {len(missing)} offsets, {missing[0]} to {missing[-1]}")
    return verdict


def batch_spans(consumed: Iterable[Consumed]) -> dict[Place, list[Span]]:
    """Return when a query read batches with messages of each queue."""
    spans: defaultdict[Place, dict[Span, None]] = defaultdict(dict)
    for one in consumed:
        spans[one.place][one.from_ms, one.at_ms] = None
    return {place: list(found) for place, found in spans.items()}


def owned_spans(owned: Sequence[Owned], ends_ms: Sequence[int]) -> dict[Place, list[Span]]:
    """Return when a Java consumer had each queue. `ends_ms` are the times at which its processes have ended."""
    spans: defaultdict[Place, list[Span]] = defaultdict(list)
    for number, one in enumerate(owned):
        following = owned[number + 1].at_ms if number + 1 < len(owned) else max(ends_ms, default=one.at_ms)
        ends = [end for end in ends_ms if one.at_ms <= end < following]
        for place in one.places:
            spans[place].append((one.at_ms, min([following, *ends])))
    return dict(spans)


def cut_out(spans: Mapping[Place, Sequence[Span]], holes: Sequence[Span]) -> dict[Place, list[Span]]:
    """Return the spans without the times in `holes`, in which the member was frozen."""
    kept = {place: list(own) for place, own in spans.items()}
    for begin, end in holes:
        kept = {
            place: [
                part
                for low, high in own
                for part in ((low, min(high, begin)), (max(low, end), high))
                if part[0] < part[1]
            ]
            for place, own in kept.items()
        }
    return kept


def find_overlaps(members: Mapping[str, Mapping[Place, Sequence[Span]]]) -> list[Overlap]:
    """Return when two or more members worked on a queue at the same time. Spans of a member may touch or overlap."""
    edges: defaultdict[Place, list[tuple[int, int, str]]] = defaultdict(list)
    for name, spans in members.items():
        for place, own in spans.items():
            edges[place] += [edge for low, high in own for edge in ((low, 1, name), (high, -1, name))]
    found = []
    for place, of_place in sorted(edges.items()):
        busy, since, both = Counter[str](), 0, set[str]()
        for at_ms, step, name in sorted(of_place):
            before = {one for one, count in busy.items() if count}
            busy[name] += step
            now = {one for one, count in busy.items() if count}
            if len(before) < 2 <= len(now):
                since, both = at_ms, now
            elif len(now) < 2 <= len(before):
                if at_ms > since:
                    found.append(Overlap(place, tuple(sorted(both)), since, at_ms - since))
            elif len(now) > 1:
                both |= now
    return found
