"""Judge of a group drill: what its members consumed, against what the producer stored. Pure.

- Each message that the producer knows as stored was consumed, and no other. Each side, Java's and ours, consumed some.
- A message that was consumed twice is counted by who consumed it, and by the last change of the group before.
- In an orderly group no message is consumed for the first time after a later one of its queue. And no member continues
  in a queue in which another one is ahead: it consumes no message if the other one has consumed a later one since its
  turn began, that is since it got the queue or went back in it. Excused is a member that was frozen in the 120 s
  before, or whose batch takes longer than 60 s, after which a broker gives its lock to another
  (RebalanceLockManager#REBALANCE_LOCK_MAX_LIVE_TIME), and one that continues where the other one ended or was frozen.
- Two members *overlap* in a queue while both work on it: a Java consumer while it has the queue, a query while it reads
  a batch with messages of the queue. The time in which a member was frozen does not count. An overlap takes at most as
  long as the longest batch of the drill, and in addition 60 s, in which a lock expires and members rebalance three
  times; or 120 s, after which a broker drops a member that is silent (ClientHousekeepingService), if one of the two was
  frozen within the 120 s before the end of the overlap.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from compat_kit.members import Consumed, Owned, Place

Span: TypeAlias = tuple[int, int]  # ms since 1970

LOCK_EXPIRY_MS, SILENT_MS = 60_000, 120_000


@dataclass(slots=True)
class MemberLives:
    """When a member worked on queues, when it was frozen, and when its processes have ended, in ms since 1970."""

    spans: Mapping[Place, Sequence[Span]] = field(default_factory=dict)
    frozen: list[Span] = field(default_factory=list)
    ends_ms: list[int] = field(default_factory=list)

    def was_frozen(self, from_ms: int, to_ms: int) -> bool:
        """Return whether it was frozen for a part of this time."""
        return any(low <= to_ms and from_ms <= high for low, high in self.frozen)

    def may_not_know(self, one: Consumed, passed_ms: int) -> bool:
        """Return whether it may not know, when it consumes a message, that another member had its queue then."""
        return one.at_ms - one.from_ms > LOCK_EXPIRY_MS or self.was_frozen(passed_ms - SILENT_MS, one.at_ms)

    def has_failed(self, from_ms: int, to_ms: int) -> bool:
        """Return whether it may have lost what it did: it ended or was frozen in this time."""
        return self.was_frozen(from_ms, to_ms) or any(from_ms <= end_ms <= to_ms for end_ms in self.ends_ms)


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
    """The findings of a judge. `faults` are texts about what must not be."""

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
    """Judge what members consumed, by their names, whose part before a hyphen is their side.

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
    active = {member.partition("-")[0] for member, own in consumed.items() if own}
    for side in sorted({member.partition("-")[0] for member in consumed} - active):
        verdict.faults.append(f"IDLE {side}: none of its members consumed a message")
    return verdict


def judge_turns(
    verdict: GroupVerdict, consumed: Mapping[str, Sequence[Consumed]], lives: Mapping[str, MemberLives]
) -> None:
    """Add the faults of members of an orderly group that continue in a queue in which another one is ahead."""
    by_place: defaultdict[Place, list[tuple[Consumed, str]]] = defaultdict(list)
    for member, own in consumed.items():
        for one in own:
            by_place[one.place].append((one, member))
    for place, rows in sorted(by_place.items()):
        rows.sort(key=lambda row: (row[0].at_ms, row[0].offset))
        last: dict[str, Consumed] = {}
        began_ms: dict[str, int] = {}  # of a member's turn
        furthest: defaultdict[str, list[Consumed]] = defaultdict(list)  # by falling offset and rising time
        for one, member in rows:
            if member not in last or last[member].offset + 1 != one.offset:
                own_ms = [low for low, high in lives[member].spans.get(place, ()) if low <= one.at_ms <= high]
                began_ms[member] = min(own_ms, default=one.from_ms)
            for other, ahead in furthest.items():
                passed = [it for it in ahead if began_ms[member] < it.at_ms and it.offset > one.offset]
                if other == member or not passed or lives[member].may_not_know(one, passed[-1].at_ms):
                    continue
                if not lives[other].has_failed(passed[0].at_ms, one.at_ms):
                    verdict.inversions += 1
                    verdict.faults.append(f"INVERSION {one} of {member}: {other} consumed {passed[0]} in its turn")
            last[member] = one
            while furthest[member] and furthest[member][-1].offset <= one.offset:
                furthest[member].pop()
            furthest[member].append(one)


def judge_overlaps(verdict: GroupVerdict, longest_batch_ms: int, lives: Mapping[str, MemberLives]) -> None:
    """Add the faults of overlaps that take too long."""
    for one in verdict.overlaps:
        end_ms = one.from_ms + one.ms
        was_frozen = any(lives[name].was_frozen(end_ms - SILENT_MS, end_ms) for name in one.members)
        most_ms = longest_batch_ms + (SILENT_MS if was_frozen else LOCK_EXPIRY_MS)
        if one.ms > most_ms:
            verdict.faults.append(f"OVERLAP {one}: expected at most {most_ms} ms")


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


def longest_span_ms(spans: Mapping[Place, Sequence[Span]], holes: Sequence[Span]) -> int:
    """Return the length of the longest span without the time in `holes`, which do not overlap."""
    return max(
        (
            high - low - sum(max(min(high, end) - max(low, begin), 0) for begin, end in holes)
            for own in spans.values()
            for low, high in own
        ),
        default=0,
    )


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
