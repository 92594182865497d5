"""A drill: streams read from two brokers and two name servers, each a process, while events happen to the servers.

A Java producer writes to all queues all the time, and keeps a ledger of what was acknowledged. After each event it
stops; the streams read to the end; and the judge compares the ledger with all rows of each stream.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

from compat_kit.clusters import FourServers
from compat_kit.drill_judge import Batches, Place, Truth, Verdict, judge, ledger_length, losses_in, read_ledger
from compat_kit.rocketmq import Java, Program

TOPIC = "drill"
STREAMS: dict[str, dict[str, str]] = {"waiting": {"longPollingMs": "2s"}, "plain": {}}
SMALL, LARGE = "200", "5000"  # maxOffsetsPerTrigger
PAUSE_MS = 200  # between two messages of a queue
QUEUES = 4  # of each broker, at the start
AWAY_S = 15.0
SETTLE_S = 600.0  # within this time the streams reach the ends of the queues, or the drill fails
CONF = {"mappedFileSizeCommitLog": 65536}
_SLOW_STARTS = ("Timed out while waiting for the Python worker", "Python worker failed to connect back")
_KIT = Path(__file__).parent
_OPTIONS = {"subscribe": TOPIC, "startingOffsets": "earliest", "checkCrc": "true"}


@dataclass(slots=True)
class Stream:
    """A stream of a drill. `begins` is for the judge, from the batch after number `since` on."""

    name: str
    options: dict[str, str]
    batches: Batches
    begins: dict[Place, int] | None = field(default_factory=dict)
    since: int = -1
    lost: dict[Place, list[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """The result of an event: rows of each stream, the judge's findings about them, and what the queries said."""

    event: str
    seconds: float
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


class Drill:
    """One drill. Entered: the servers, the producer and the streams run. Left: they were killed.

    Servers are frozen for `freeze_s`; those that are killed are back after `away_s`. `say` gets a line for all that
    happens. `conf` is for the brokers. Without Spark the streams call the source as Spark does (`bare_streams.py`).
    """

    def __init__(
        self,
        java: Java,
        folder: Path,
        seed: int,
        *,
        freeze_s: float,
        away_s: float = AWAY_S,
        has_spark: bool = True,
        say: Callable[[str], None] = print,
        **conf: object,
    ) -> None:
        self.java, self.folder, self.random, self._say = java, folder, Random(seed), say
        self.freeze_s, self.away_s, self.has_spark = freeze_s, away_s, has_spark
        folder.mkdir(exist_ok=True)
        self.servers = FourServers(java, folder, **{**CONF, **conf})
        self.ledger = folder / "ledger"
        self.streams: dict[str, Stream] = {}
        self.results: list[Result] = []
        self.queues = QUEUES
        self.since = 0  # line of the ledger from which on it is true
        self.inherited = Truth()  # what was true before
        self._queries: Program | None = None
        self._log_read = 0
        self._held = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.servers)
            self.client = self.servers.client()
            stack.callback(self.client.program.kill)
            stack.callback(self._kill_queries)
            self.create_queues(self.queues)
            self.start_queries()
            for name, options in STREAMS.items():
                self.start(name, maxOffsetsPerTrigger=SMALL, **options)
            self.produce()
            until_s = time.monotonic() + SETTLE_S
            while len(self.truth().ends()) < 2 * self.queues:
                assert time.monotonic() < until_s, f"only some queues have messages: {self.truth().ends()}"
                time.sleep(0.5)
            self.settle()
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    # The producer.

    def create_queues(self, count: int) -> None:
        """Give the topic this number of queues on each broker that is registered."""
        self.queues = count
        with contextlib.suppress(RuntimeError):  # no name server replies; `produce` repeats it
            self.client("create-topic", topic=TOPIC, queues=count)

    def produce(self) -> None:
        """Let the producer write to all queues."""
        until_s = time.monotonic() + SETTLE_S
        while True:
            try:
                (sent,) = self.client("keep-storing", topic=TOPIC, pauseMs=PAUSE_MS, ledger=str(self.ledger))
            except RuntimeError as error:  # no name server replies, or none has the route yet
                sent = {"count": 0, "error": str(error)}
            if sent["count"] >= 2 * self.queues:
                return
            assert time.monotonic() < until_s, f"the producer finds {sent}, expected {2 * self.queues} queues"
            time.sleep(1)
            self.create_queues(self.queues)  # also on a broker that has registered now

    def rest(self) -> None:
        """Stop the producer. All outcomes are in the ledger then."""
        self.client("stop-storing")

    def truth(self) -> Truth:
        """Return what the producer knows."""
        truth = read_ledger(self.ledger, self.since)
        for place, held in self.inherited.stored.items():
            truth.stored[place] = held | truth.stored[place]
        for place, bodies in self.inherited.unknown.items():
            truth.unknown[place] |= bodies
        return truth

    # The queries.

    def start_queries(self) -> None:
        """Start the program of the queries."""
        home = self.folder / f"queries-{len(list(self.folder.glob('queries-*')))}"
        home.mkdir()
        program = "recording_queries" if self.has_spark else "bare_streams"
        command = [*self.java.network.prefix, "env", f"PYTHONPATH={_KIT.parent}"]
        command += [sys.executable, "-P", "-m", f"{_KIT.name}.{program}", str(self.folder)]
        self._queries, self._log_read = Program([*command, self.servers.address], home), 0
        self._queries.read()

    def kill_queries(self) -> None:
        """Kill the program of the queries with kill -9."""
        self.listen()
        self._kill_queries()

    def _kill_queries(self) -> None:
        if self._queries is not None:
            self._queries.kill()
            self._queries = None

    def order(self, op: str, **fields: str) -> dict[str, Any]:
        """Have the program of the queries do something. Raises RuntimeError with its error."""
        assert self._queries is not None
        self._queries.write({"op": op, **fields})
        answer = self._queries.read()
        if answer["event"] == "error":
            raise RuntimeError(f"{op} {fields}: {answer['error']}")
        return answer

    def start(self, name: str, **options: str) -> Stream:
        """Start a stream, or start it again; then `options` are changes."""
        stream = self.streams.get(name) or Stream(name, dict(_OPTIONS), Batches(self.folder / name / "batches"))
        self.streams[name] = stream
        stream.options |= options
        self.order("start", stream=name, options=stream.options)  # type: ignore[arg-type]
        return stream

    def stop(self, *names: str) -> None:
        """Stop streams."""
        for name in names:
            self.order("stop", stream=name)

    @contextlib.contextmanager
    def planned(self, *names: str) -> Iterator[None]:
        """Inside of the block keep a batch of each stream from being read. It has messages of all queues."""
        self.hold_recorded(*names)
        time.sleep(2)  # the next batch has messages of all queues
        for name in names:
            self.order("hold", stream=name, place="planned")
        yield
        for name in names:
            self.order("release", stream=name)

    def hold_recorded(self, *names: str) -> None:
        """Keep a batch of each stream, which was recorded, from being committed."""
        self.settle(*names)
        for name in names:
            self.order("hold", stream=name, place="recorded")

    def error_of(self, name: str) -> str | None:
        """Return the error of a stream, None while it runs. On a busy machine Spark may need a second start."""
        error = self.order("status", stream=name)["error"]
        if error is not None and any(text in error for text in _SLOW_STARTS):
            self.tell(f"   {name} starts again: Spark waited too long for Python")
            self.start(name)
            return None
        return None if error is None else _shorten(str(error))

    def await_error(self, name: str) -> str:
        """Return the error with which a stream ends."""
        until_s = time.monotonic() + SETTLE_S
        while (error := self.error_of(name)) is None:
            assert time.monotonic() < until_s, f"the stream {name} continues; expected an error"
            time.sleep(0.5)
        self.tell(f"{name} failed: {error}")
        return error

    # Events.

    @contextlib.contextmanager
    def event(self, what: str) -> Iterator[None]:
        """Judge all streams after what happens in the block."""
        began_s = time.monotonic()
        self.results.append(Result(what, 0.0))
        self.tell(f"== {what}")
        yield
        self.rest()
        self.settle()
        self.listen()
        result = self.results[-1]
        result.seconds = time.monotonic() - began_s
        truth = self.truth()
        for stream in self.streams.values():
            result.verdicts[stream.name] = verdict = self.verdict(stream, truth)
            self.tell(f"   {stream.name}: {describe(verdict)}")
        self.produce()

    def verdict(self, stream: Stream, truth: Truth) -> Verdict:
        """Return the judge's verdict about a stream."""
        stream.batches.read()
        verdict = judge(stream.batches.rows_after(stream.since), truth, stream.begins, stream.lost)
        called = sum(end - begin for ranges in stream.lost.values() for begin, end in ranges)
        if called != verdict.lost:
            verdict.faults.append(f"LOST: {verdict.lost} messages, and the query called {called} lost")
        verdict.faults += [f"UNEQUAL batch {number} was repeated with other rows" for number in stream.batches.unequal]
        return verdict

    def settle(self, *names: str, ends: dict[Place, int] | None = None) -> None:
        """Wait until streams, by default all, have delivered all up to `ends`, by default all that was acknowledged.

        Raises RuntimeError if a stream fails or makes no progress.
        """
        ends, until_s = self.truth().ends() if ends is None else ends, time.monotonic() + SETTLE_S
        for name in names or tuple(self.streams):
            batches = self.streams[name].batches
            while short := {
                place: (batches.ends.get(place, 0), end)
                for place, end in ends.items()
                if batches.ends.get(place, 0) < end
            }:
                if (error := self.error_of(name)) is not None:
                    raise RuntimeError(f"the stream {name} failed: {error}")
                if time.monotonic() >= until_s:
                    raise RuntimeError(f"the stream {name} does not advance: (delivered, acknowledged) is {short}")
                time.sleep(0.3)
                batches.read()

    def pause(self, seconds: float) -> None:
        """Let time pass, then tell what the queries say."""
        time.sleep(seconds)
        self.listen()
        for name in self.streams:
            if (away := self.order("status", stream=name)["away"]) is not None:
                self.tell(f"   {seconds:g} s later, progress of {name}: away {away}")

    def tell(self, line: str) -> None:
        """Tell a line."""
        self._say(f"{time.strftime('%H:%M:%S')} {line}")

    def listen(self) -> list[str]:
        """Return what the queries have logged since the last call, and tell it."""
        if self._queries is None:
            return []
        log = (self._queries.home / "stderr").read_bytes()
        lines = [
            line for line in log[self._log_read :].decode(errors="replace").splitlines() if line.startswith("rmq:")
        ]
        self._log_read = len(log)
        for line in lines:
            self.tell(f"   {line}")
        if self.results:
            self.results[-1].said += lines
        return lines

    def begin_phase(self, ends: dict[Place, int], inherited: Truth) -> None:
        """Judge from now: the streams have delivered all, and a broker's store ends or begins elsewhere.

        `ends` has where each stream continues. `inherited` is what is true of the store besides what comes.
        """
        self.since, self.inherited = ledger_length(self.ledger), inherited
        for stream in self.streams.values():
            stream.batches.read()
            stream.since, stream.begins, stream.lost = stream.batches.last_number(), dict(ends), {}
            stream.batches.ends = dict(ends)

    def note_losses(self, name: str, lines: list[str]) -> None:
        """Take what a stream's log calls lost as lost."""
        for place, ranges in losses_in(lines).items():
            self.streams[name].lost.setdefault(place, []).extend(ranges)


def describe(verdict: Verdict) -> str:
    """Return the counts of a verdict, and its first faults."""
    counts = (
        f"{verdict.delivered} rows, {verdict.missing} missing, {verdict.doubled} doubled, "
        f"{verdict.out_of_order} out of order, {verdict.foreign} foreign, {verdict.lost} called lost"
    )
    return "\n      ".join([counts, *verdict.faults[:5]])


def _shorten(error: str) -> str:
    """Return the line of an error of Spark that has the product's error."""
    lines = [line.strip() for line in error.splitlines() if "Error: " in line]
    return lines[-1] if lines else error[:500]
