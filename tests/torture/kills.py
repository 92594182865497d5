"""Six processes do everything to one store; one after the other is killed, or stopped and woken.

    python tests/torture/kills.py [--seconds 300] [--seed 7] [--stops] [--folder F]

A round has a store of its own and some bursts of kills. After each burst all workers are dead: the store is read as it
is, closed, checked, and compared with the workers' ledgers (kill_judge.py). With `--stops` workers are also stopped
for up to seconds (SIGSTOP, SIGCONT) while others continue, and wait less long for the store. Folders of rounds with a
fault stay. `--round N` with the same seed repeats a round's deeds, and the moments of its kills as far as the machine
allows. Exits with 1 after a fault.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `support`, if this runs as a script

from deeds import WEIGHTS, Worker, check_store, read, send, sink
from kill_judge import Judge, Seen, close_and_look, look
from ledger import Facts, read_facts
from support.forked import run_forked

from rmq_spark.store import DeliveryScheduler
from rmq_spark.store.delivery import timer as timer_store  # noqa: F401  loaded before the first fork
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import RmqError
from rmq_spark.store.tools import repair as repairing  # noqa: F401

WORKERS = 6
KILLS_A_BURST = 60
WORKER_S = 3.0  # a worker ends by itself after so long
LOOK_S = 120  # ends a hang of whoever looks at the store
SLOW_S = 30.0  # a deed beside six others; longer is told
STOP_S = (0.02, 0.2, 1.0, 2.5)
KEPT_ROUNDS = 5
Deeds = dict[Callable[[Worker], None], int]


@dataclass
class Burst:
    """The living workers of one burst, and what was done to them."""

    store: str
    books: Path
    deeds: Deeds
    random: Random
    with_stops: bool
    living: set[int] = field(default_factory=set)
    stopped: dict[int, float] = field(default_factory=dict)  # until when
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, until: float) -> None:
        """Keep the workers busy, kill a number of them at random moments, and in the end all."""
        for _ in range(WORKERS):
            self._start()
        mean_s = self.random.choice([0.004, 0.02, 0.08])
        while self.counts["kills"] < KILLS_A_BURST and time.monotonic() < until:
            time.sleep(min(self.random.expovariate(1 / mean_s), 0.5))
            self._replace_ended()
            if self.with_stops:
                self._wake()
                if self.random.random() < 0.35:
                    self._stop(self.random.choice(sorted(self.living)))
                    continue
            count = 1 if self.random.random() < 0.93 else self.random.randint(2, WORKERS)
            for pid in self.random.sample(sorted(self.living), min(count, len(self.living))):
                self._kill(pid)
                self._start()
        for pid in list(self.living):
            self._kill(pid)

    def _start(self) -> None:
        seed = self.random.getrandbits(48)
        pid = os.fork()
        if not pid:
            work(self.store, self.books, seed, self.deeds, 800 if self.with_stops else 60_000)
        self.living.add(pid)

    def _replace_ended(self) -> None:
        for pid in list(self.living):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.living.remove(pid)
                self.counts["ended by themselves"] += 1
                self._start()

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.living.remove(pid)
        self.counts["kills"] += 1

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.stopped[pid] = time.monotonic() + self.random.choice(STOP_S)
        self.counts["stops"] += 1

    def _wake(self) -> None:
        for pid in [pid for pid, until in self.stopped.items() if until < time.monotonic()]:
            del self.stopped[pid]
            if pid in self.living:
                os.kill(pid, signal.SIGCONT)


def work(store: str, books: Path, seed: int, deeds: Deeds, lock_timeout_ms: int) -> None:
    """Do random deeds for some seconds, in this process, which ends then."""
    try:
        worker = Worker(store, books, seed, lock_timeout_ms)
        begun = time.monotonic()
        while time.monotonic() < begun + WORKER_S:
            deed = worker.random.choices(list(deeds), list(deeds.values()))[0]
            worker.ledger.note("deed", deed.__name__)
            deed_begun = time.monotonic()
            try:
                deed(worker)
            except BaseException as error:
                is_ours = isinstance(error, RmqError)
                worker.ledger.note("raised", deed.__name__, type(error).__name__, str(error)[:600], is_ours)
                break
            took_s = time.monotonic() - deed_begun
            if took_s > SLOW_S:
                worker.ledger.note("slow", deed.__name__, round(took_s, 1))
    finally:
        os._exit(0)


class KillRound:
    """One store, some bursts, and what the judge says after each."""

    def __init__(self, folder: Path, seed: str, with_stops: bool) -> None:
        self.random, self.with_stops = Random(seed), with_stops
        self.folder = folder
        self.store, self.books = str(folder / "store"), folder / "books"
        shutil.rmtree(folder, ignore_errors=True)
        self.books.mkdir(parents=True)
        self.counts: Counter[str] = Counter()
        self.facts: Facts = {}
        self._judge = Judge()
        self.deeds: Deeds = dict(WEIGHTS)
        if self.random.random() > 0.7:
            always = (send, sink)
            self.deeds = {deed: n for deed, n in WEIGHTS.items() if deed in always or self.random.random() < 0.5}

    def run(self, until: float) -> list[str]:
        """Return the faults."""
        faults: list[str] = []
        for _ in range(self.random.choice([1, 3, 6])):
            burst = Burst(self.store, self.books, self.deeds, self.random, self.with_stops)
            burst.run(until)
            self.counts += burst.counts
            self.facts = read_facts(self.books)
            faults += self._judged(look)
            faults += self._judged(close_and_look, is_final=True)
            if self.random.random() < 0.3:
                ticked = run_forked(lambda: tick_until_nothing_is_due(self.store), LOOK_S)
                faults += [f"TICK {ticked.fault}"] if ticked.fault else []
                faults += self._judged(close_and_look, is_final=True, is_ticked=True)
            if faults or time.monotonic() > until:
                break
        for deed, kind, text, is_ours in self.facts.get("raised", []):
            faults += [] if is_ours else [f"RAW in {deed}: {kind}: {text}"]
        faults += [f"SLOW {deed}: {took_s} s" for deed, took_s in self.facts.get("slow", []) if not self.with_stops]
        return faults

    def _judged(self, looking: Callable[[str], Seen], *, is_final: bool = False, is_ticked: bool = False) -> list[str]:
        if not Path(self.store).exists():
            return []  # nobody lived long enough to make it
        ended = run_forked(lambda: looking(self.store), LOOK_S)
        if ended.how != "returned":
            return [f"UNREADABLE in {looking.__name__}: {ended.fault}"]
        self.counts["messages read"] += len(ended.value.rows)
        return list(self._judge.faults(self.facts, ended.value, is_final=is_final, is_ticked=is_ticked))


def tick_until_nothing_is_due(store: str) -> None:
    """Deliver all delayed messages; wait for those whose time has not come."""
    with DeliveryScheduler(store) as ticker:
        while True:
            ticked = ticker.tick(wall_clock_ms() + 10)
            if ticked.problem:
                raise ticked.problem
            if ticked.next_due_ms is None:
                return
            time.sleep(0.1)


def warm_up(folder: Path) -> None:
    """Import what deeds use before the first fork: else a worker's first deeds are imports."""
    folder.mkdir(parents=True)
    worker = Worker(str(folder / "store"), folder, 0, 60_000)
    for deed in (send, sink, read, check_store):
        deed(worker)
    shutil.rmtree(folder)


def main() -> int:
    """Run rounds until the time is over; return 1 after a fault."""
    options = parse_arguments()
    logging.getLogger("rmq_spark").setLevel(logging.CRITICAL)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-", dir=options.parent))
    warm_up(folder / "warm")
    begun = time.monotonic()
    counts: Counter[str] = Counter()
    deeds: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    number = options.round
    while time.monotonic() < begun + options.seconds or not counts["rounds"]:
        kill_round = KillRound(folder / f"round-{number}", f"{options.seed}.{number}", options.stops)
        faults = kill_round.run(begun + options.seconds)
        for fault in faults:
            print(f"FAULT round {number} of seed {options.seed} | {' '.join(fault.split())[:1500]}", flush=True)
        facts = kill_round.facts
        for deed, kind, text, _ in facts.get("raised", []):
            if not raised[f"{deed}:{kind}"]:
                print(f"an error that a worker met: {deed}: {kind}: {' '.join(text.split())[:300]}", flush=True)
            raised[f"{deed}:{kind}"] += 1
        deeds.update(deed for (deed,) in facts.get("deed", []))
        counts += kill_round.counts + Counter(rounds=1, faults=len(faults), bad_rounds=int(bool(faults)))
        counts["acknowledged"] += len(facts.get("sent", [])) + sum(count for _, count, _ in facts.get("sent many", []))
        counts["batches"] += len(facts.get("committed", []))
        if not faults:
            shutil.rmtree(kill_round.folder)
        elif counts["bad_rounds"] >= KEPT_ROUNDS:
            break
        number += 1
    print(f"deeds {json.dumps(deeds)}, errors of workers {json.dumps(raised)}")
    name = "stops" if options.stops else "kills"
    print(f"{name}: seed {options.seed}, {time.monotonic() - begun:.0f} s, {json.dumps(counts)}", flush=True)
    if counts["faults"]:
        print(f"{name}: stores and ledgers of bad rounds are in {folder}")
    else:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return int(counts["faults"] > 0)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, default=0, help="the first round; one alone with --seconds 0")
    parser.add_argument("--stops", action="store_true", help="stop and wake workers, too")
    parser.add_argument("--folder", type=Path, help="of the stores; default: a temporary one, in memory if possible")
    default = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    parser.add_argument("--parent", default=default, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
