"""Java push consumers and queries of ours in one group, while they join, leave, die and freeze; and what a judge finds.

A Java producer writes to all queues all the time, and keeps a ledger of what was acknowledged.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from compat_kit.clusters import FourServers
from compat_kit.drill_judge import read_ledger
from compat_kit.group_judge import (
    Change,
    GroupVerdict,
    MemberLives,
    batch_spans,
    cut_out,
    find_overlaps,
    judge_group,
    judge_overlaps,
    judge_turns,
    longest_span_ms,
    owned_spans,
)
from compat_kit.members import Consumed, JavaMember, Member, Owned, Place, QueryMember, read_member
from compat_kit.rocketmq import Java
from rmq_spark.store.disk.clock import wall_clock_ms

TOPIC, GROUP = "drill", "drill-group"
QUEUES = 8  # of each broker
JOIN, STOP, KILL, FREEZE = "join", "stop", "kill -9", "freeze"
THAW, FAIL, RESTART = "thaw", "failure", "restart"  # what follows from the others
SETTLE_S = 900.0  # within this time the group consumes what was stored, or the drill ends
_SHARES = {STOP: 4, KILL: 5, FREEZE: 3}  # of the changes that take a member away
_MOST_AWAY = 2
_MOST_FAILURES = 5  # of a query
_SPARK_IS_LATE = "Python worker failed to connect back"  # Spark gives a Python worker ten seconds to start
_SHOWN_OVERLAPS = 20
_CHANGE = re.compile(r"(\d\d:\d\d:\d\d) \d+: (.+) of (\S+); \d+ messages sent")


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """The size of a drill: its changes, the pauses between them, how long members freeze, and the messages."""

    changes: int
    messages: int
    pause_s: tuple[float, float]
    freeze_s: float
    is_orderly: bool = False
    has_spark: bool = True
    rows_a_batch: int = 2000


class GroupDrill:
    """One drill. `say` gets a line for all that happens.

    Entered: the servers, the producer and four members run. Left: they were killed.
    """

    def __init__(self, java: Java, folder: Path, random: Random, plan: DrillPlan, say: Callable[[str], None]) -> None:
        self.java, self.folder, self.random, self.plan, self._say = java, folder, random, plan, say
        self.changes: list[Change] = []
        self._servers = FourServers(java, folder / "servers")
        self._lives: dict[str, MemberLives] = {}
        self._away: list[Member] = []
        self._held = ExitStack()
        self._is_producing = False
        self.longest_batch_ms = 0  # of a query, as of `judge`

    def __enter__(self) -> "GroupDrill":
        with ExitStack() as stack:
            stack.enter_context(self._servers)
            self._client = self._servers.client()
            stack.callback(self._client.program.kill)
            self._client("create-topic", topic=TOPIC, queues=QUEUES)
            self.members = self._make_members()
            for member in self.members:
                self._lives[member.name] = MemberLives()
                stack.callback(member.kill)
                member.start()
            self._produce()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _make_members(self) -> list[Member]:
        plan, address = self.plan, self._servers.address
        options = {
            "subscribe": TOPIC,
            "consumerGroup": GROUP,
            "groupFallback": "earliest",
            "maxOffsetsPerTrigger": str(plan.rows_a_batch),
            **({"orderly": "true"} if plan.is_orderly else {}),
        }
        found: list[Member] = [
            JavaMember(
                self.java,
                address,
                self.folder / f"{name}.ledger",
                group=GROUP,
                topic=TOPIC,
                name=name,
                orderly=plan.is_orderly,
            )
            for name in ("java-1", "java-2")
        ]
        kind = "spark" if plan.has_spark else "bare"
        for name in ("query-1", "query-2"):
            found.append(QueryMember(self.java, address, self.folder, options, name=name, kind=kind))
        return found

    # The producer.

    @property
    def ledger(self) -> Path:
        """The ledger of the producer."""
        return self.folder / "sent.ledger"

    def _produce(self) -> None:
        seconds = self.plan.changes * (sum(self.plan.pause_s) / 2 + self.plan.freeze_s / 5)
        pause_ms = max(int(seconds * 1000 * 2 * QUEUES / self.plan.messages), 1)
        self._client("keep-storing", topic=TOPIC, pauseMs=pause_ms, ledger=str(self.ledger))
        self._is_producing = True

    def _rest(self) -> None:
        if self._is_producing:
            self._client("stop-storing")
            self._is_producing = False

    def _count_sent(self) -> int:
        return self.ledger.read_bytes().count(b"\n") if self.ledger.exists() else 0

    # Changes.

    def run(self) -> GroupVerdict:
        """Let the changes happen, then let the group consume the rest. Return the verdict."""
        self._pause()
        left = self._disruptions()
        while self._count() < self.plan.changes:
            if self._away and (not left or len(self._away) == _MOST_AWAY or self.random.random() < 0.4):
                self._join(self.random.choice(self._away))
            else:
                self._disturb(left.pop(), self.random.choice([one for one in self.members if one not in self._away]))
            self._pause()
            self._check()
        while self._count_sent() < self.plan.messages:
            self._check()
            time.sleep(1)
        self._rest()
        for member in [*self._away]:
            self._join(member)
        self._settle()
        for member in self.members:
            member.stop()
            self._lives[member.name].ends_ms.append(wall_clock_ms())
        return self.judge()

    def _disruptions(self) -> list[str]:
        bag = [kind for kind, share in _SHARES.items() for _ in range(share)]
        found: list[str] = []
        while len(found) < self.plan.changes:
            self.random.shuffle(bag)
            found += bag
        return found

    def _join(self, member: Member) -> None:
        self._note(JOIN, member)
        member.start()
        self._away.remove(member)

    def _disturb(self, what: str, member: Member) -> None:
        self._note(what, member)
        if what == FREEZE:
            member.freeze()
            begin = wall_clock_ms()
            time.sleep(self.plan.freeze_s)
            self._lives[member.name].frozen.append((begin, wall_clock_ms()))
            self._note(THAW, member)
            member.thaw()
            return
        member.kill() if what == KILL else member.stop()
        self._lives[member.name].ends_ms.append(wall_clock_ms())
        self._away.append(member)

    def _note(self, what: str, member: Member) -> None:
        change = Change(wall_clock_ms(), what, member.name)
        self.changes.append(change)
        self._say(f"{time.strftime('%H:%M:%S')} {self._count()}: {change}; {self._count_sent()} messages sent")

    def _count(self) -> int:
        """Return the number of changes, without those that follow from others."""
        return sum(change.what in (JOIN, STOP, KILL, FREEZE) for change in self.changes)

    def _pause(self) -> None:
        time.sleep(self.random.uniform(*self.plan.pause_s))

    def _check(self) -> None:
        """Start a query again that has failed because another member has the lock of a queue, or Spark was too slow.

        Raises RuntimeError for another failure, for a member that died unasked, and if a query fails again and again.
        """
        for member in self.members:
            if member not in self._away and (status := member.exit_status()) is not None:
                self._check_death(member, status)
            if not isinstance(member, QueryMember) or member in self._away or (error := member.error()) is None:
                continue
            self._note(FAIL, member)
            self._lives[member.name].ends_ms.append(wall_clock_ms())
            failures = sum(change.what == FAIL and change.member == member.name for change in self.changes)
            has_lost_lock = "GroupConflictError" in error and self.plan.is_orderly
            if failures > _MOST_FAILURES or not (has_lost_lock or _SPARK_IS_LATE in error):
                raise RuntimeError(f"query {member.name} failed: {error}")
            member.kill()
            self._note(RESTART, member)
            member.start()

    def _check_death(self, member: Member, status: int) -> None:
        if not isinstance(member, QueryMember) or member.error() is None:
            raise RuntimeError(f"{member.name} ended unasked, with status {status}")

    def _settle(self) -> None:
        """Wait until the group has consumed all that was stored, or for a long time."""
        truth, until = read_ledger(self.ledger), time.monotonic() + SETTLE_S
        wanted = {(Place(*place), offset) for place, held in truth.stored.items() for offset in held}
        while time.monotonic() < until:
            self._check()
            left = wanted.difference((one.place, one.offset) for member in self.members for one in member.consumed())
            if not left:
                return
            time.sleep(2)
        self._say(f"not consumed within {SETTLE_S:g} s: {len(left)}, such as {sorted(left)[:3]}")

    # The judge.

    def judge(self) -> GroupVerdict:
        """Judge what the members consumed."""
        consumed = {member.name: member.consumed() for member in self.members}
        owned = {member.name: member.owned() for member in self.members if isinstance(member, JavaMember)}
        verdict, self.longest_batch_ms = judge_ledgers(
            self.ledger, consumed, owned, self._lives, self.changes, is_orderly=self.plan.is_orderly
        )
        return verdict

    def said(self) -> list[str]:
        """Return what the queries have logged."""
        return [f"{one.name}: {line}" for one in self.members if isinstance(one, QueryMember) for line in one.said()]


def judge_ledgers(
    sent: Path,
    consumed: Mapping[str, Sequence[Consumed]],
    owned: Mapping[str, Sequence[Owned]],
    lives: Mapping[str, MemberLives],
    changes: Sequence[Change],
    *,
    is_orderly: bool,
) -> tuple[GroupVerdict, int]:
    """Judge what members consumed, by the ledger of the producer. Return also the time of the longest batch, in ms.

    `owned` has the queues of Java consumers, `lives` the times of all members; their spans are set.
    """
    truth = read_ledger(sent)
    stored = {Place(*place): {offset: row.body for offset, row in held.items()} for place, held in truth.stored.items()}
    unknown = {Place(*place): bodies for place, bodies in truth.unknown.items()}
    verdict = judge_group(stored, unknown, consumed, changes, is_orderly=is_orderly)
    longest_ms = 0
    for name, life in lives.items():
        if name in owned:
            life.spans = owned_spans(owned[name], life.ends_ms)
        else:
            life.spans = batch_spans(consumed[name])
            longest_ms = max(longest_ms, longest_span_ms(life.spans, life.frozen))
    verdict.overlaps = find_overlaps({name: cut_out(life.spans, life.frozen) for name, life in lives.items()})
    judge_overlaps(verdict, longest_ms, lives)
    if is_orderly:
        judge_turns(verdict, consumed, lives)
    return verdict, longest_ms


def judge_again(folder: Path, said: Iterable[str]) -> tuple[GroupVerdict, list[str]]:
    """Judge the ledgers that a drill left in `folder`. Return the verdict and the lines of a report.

    `said` are the lines that the drill printed. They have its changes, whose times are thus known to the second only.
    """
    lines = list(said)
    is_orderly = any(line.startswith("seed ") and line.endswith(", orderly") for line in lines)
    members = {path.stem: read_member(path) for path in sorted(folder.glob("*-*.ledger"))}
    first_ms = min(one.from_ms for consumed, _ in members.values() for one in consumed)
    changes = list(read_changes(lines, first_ms))
    lives = {name: MemberLives() for name in members}
    begun: dict[str, int] = {}
    for change in changes:
        if change.what == FREEZE:
            begun[change.member] = change.at_ms
        elif change.what == THAW:
            lives[change.member].frozen.append((begun[change.member], change.at_ms))
        elif change.what in (STOP, KILL, FAIL):
            lives[change.member].ends_ms.append(change.at_ms)
    for name, (consumed, owned) in members.items():
        if owned:  # its queues need an end
            lives[name].ends_ms.append(max(one.at_ms for one in [*consumed, *owned]))
    verdict, longest_ms = judge_ledgers(
        folder / "sent.ledger",
        {name: consumed for name, (consumed, _) in members.items()},
        {name: owned for name, (_, owned) in members.items() if owned},
        lives,
        changes,
        is_orderly=is_orderly,
    )
    return verdict, list(describe_group(verdict, changes, longest_ms))


def read_changes(lines: Iterable[str], first_ms: int) -> Iterator[Change]:
    """Yield the changes in the lines of a drill that began about `first_ms`. Their times are in the local zone."""
    day, last_ms = time.strftime("%Y-%m-%d", time.localtime(first_ms / 1000)), first_ms - 3_600_000
    for line in lines:
        if (found := _CHANGE.match(line)) is None:
            continue
        at_ms = int(time.mktime(time.strptime(f"{day} {found[1]}", "%Y-%m-%d %H:%M:%S"))) * 1000
        while at_ms < last_ms:
            at_ms += 86_400_000
        last_ms = at_ms
        yield Change(at_ms, found[2], found[3])


def describe_group(verdict: GroupVerdict, changes: Sequence[Change], longest_batch_ms: int) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"changes: {dict(Counter(change.what for change in changes))}"
    yield (
        f"{verdict.stored} messages stored, {verdict.deliveries} deliveries, {verdict.missing} missing, "
        f"{verdict.foreign} foreign, {verdict.doubled} doubled, {verdict.inversions} inversions"
    )
    for cause, count in verdict.causes.most_common():
        yield f"  doubled {count}: {cause}"
    yield f"{len(verdict.overlaps)} overlaps of two members; the longest batch took {longest_batch_ms} ms"
    for one in sorted(verdict.overlaps, key=lambda one: -one.ms)[:_SHOWN_OVERLAPS]:
        before = [change for change in changes if change.at_ms <= one.from_ms]
        when = f"{one.from_ms - before[-1].at_ms} ms after {before[-1]}" if before else "before the changes"
        yield f"  {one.place.broker}:{one.place.queue_id}, {' and '.join(one.members)}: {one.ms} ms, {when}"
    yield from verdict.faults[:20]


@contextmanager
def report_on_failure(drill: GroupDrill, say: Callable[[str], None]) -> Iterator[None]:
    """Tell what the queries have logged if the block fails."""
    try:
        yield
    except BaseException:
        for line in drill.said():
            say(line)
        raise
