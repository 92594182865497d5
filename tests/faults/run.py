"""Every public operation, with a fault at every one of its system calls.

    python tests/faults/run.py [--seconds 300] [--sample 100] [--seed 7] [--operations send,read] [--kinds eio,enospc]
    python tests/faults/run.py --case read:eio:17

Each case runs in a process of its own (cases.py) and is judged (oracle.py). The seed shuffles them;
calls that differ from all earlier calls come first. The search ends when all were tried, or a number of them
(`--sample`), or when the time is over. Prints a line for each fault, with the options that repeat the case, and the
totals. Stores of the first cases that failed stay in the folder. Exits with 1 after a fault, with 2 without a C
compiler for the shim.
"""

import argparse
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `support`, if this runs as a script

import base_stores
from cases import OPERATIONS, Bases, CaseRunner, Plain, numbers_of
from fault_kinds import FAULT_KINDS
from oracle import judge
from reading_operations import read_rows
from shim import FOLDER_VARIABLE, SOURCE
from support.preload import NoCompilerError, compile_preload, preloaded

from rmq_spark.store import check

KEPT_STORES = 10
LEAST_SHARE = 0.3  # of the time, for cases
LEAST_CASES = 20  # of each worker, whatever the time
NO_COMPILER = 2
Case = tuple[str, str, int]  # operation, kind, number of the call


class FaultSearch:
    """Tries cases in several processes, each in a folder of its own below `folder`/cases."""

    def __init__(self, folder: Path, operations: Sequence[str], kinds: Sequence[str]) -> None:
        self.folder, self._bases = folder, Bases(folder / "bases")
        warm_up(folder / "warm")
        runner = self._runner(0)
        self.plain: dict[str, Plain] = {}
        for name in operations:
            self.plain[name] = runner.run_plain(OPERATIONS[name])
        self.cases: dict[Case, int] = {
            (name, kind, number): alike
            for name in operations
            for kind in kinds
            for number, alike in numbers_of(FAULT_KINDS[kind], self.plain[name].calls)
        }

    def shuffled(self, random: Random) -> list[Case]:
        """Return all cases in random order; first those of calls that no similar call precedes."""
        return sorted(random.sample(list(self.cases), len(self.cases)), key=lambda case: min(self.cases[case], 2))

    def sample(self, random: Random, count: int) -> list[Case]:
        """Choose cases round-robin by operation, with a random kind of each."""
        pairs: dict[tuple[str, str], list[Case]] = {}
        for case in reversed(self.shuffled(random)):
            pairs.setdefault(case[:2], []).append(case)
        chosen: list[Case] = []
        names = random.sample(list(self.plain), len(self.plain))
        while len(chosen) < count and any(pairs.values()):
            for name in names:
                rest = [pair for pair, cases in pairs.items() if pair[0] == name and cases]
                if rest:
                    chosen.append(pairs[random.choice(rest)].pop())
        return chosen[:count]

    def work(self, number: int, cases: Sequence[Case], until: float) -> Counter[str]:
        """Try cases until the time is over; print faults, return counts."""
        runner, counts = self._runner(number), Counter[str]()
        for case in cases:
            if time.monotonic() > until and counts["cases"] >= LEAST_CASES:
                break
            counts += self._try(runner, case)
        return counts

    def _runner(self, number: int) -> CaseRunner:
        return CaseRunner(self._bases, self.folder / "cases" / str(number))

    def _try(self, runner: CaseRunner, case: Case) -> Counter[str]:
        name, kind, number = case
        operation, fault = OPERATIONS[name], FAULT_KINDS[kind]
        tried = runner.run(operation, fault, number)
        if not tried.hit.count:
            return Counter({"cases": 1, "call did not come": 1})
        faults = judge(runner, operation, fault, self.plain[name], tried)
        for text in faults:
            line = " ".join(text.split())
            print(f"FAULT {name}:{kind}:{number} {tried.first.how} at {tried.hit} | {line}", flush=True)
        if faults:
            self._keep(runner, case)
        kinds = Counter({f"{name} {kind} {text.split()[0]}": 1 for text in faults})
        return Counter({"cases": 1, f"ended {tried.first.how}": 1, "failed": int(bool(faults))}) + kinds

    def _keep(self, runner: CaseRunner, case: Case) -> None:
        kept = self.folder / "failed"
        kept.mkdir(exist_ok=True)
        if len(list(kept.iterdir())) < KEPT_STORES and runner.store.exists():
            runner.store.rename(kept / "-".join(map(str, case)))


def warm_up(store: Path) -> None:
    """Import what operations use before the first fork: else each case spends most of its time with imports."""
    delivery, explore = ("delivery.scheduler", "delivery.timer"), ("tools.repair", "view.explorer")
    for module in (*delivery, *explore, "group.final_commit"):
        importlib.import_module(f"rmq_spark.store.{module}")
    importlib.import_module("rmq_spark.datasource.spark.group_planner")
    base_stores.settled(str(store))
    read_rows(str(store))
    check(store)
    shutil.rmtree(store)


def search(options: argparse.Namespace, folder: Path) -> int:
    """Try the cases that were asked for; return the exit status."""
    begun = time.monotonic()
    random, until = Random(options.seed), begun + options.seconds
    if options.case:
        name, kind, number = options.case.split(":")
        found = FaultSearch(folder, [name], [kind])
        chosen = [(name, kind, int(number))]
    else:
        found = FaultSearch(folder, options.operations, options.kinds)
        chosen = found.sample(random, options.sample) if options.sample else found.shuffled(random)
    until = max(until, time.monotonic() + LEAST_SHARE * options.seconds)  # whatever the stores took to build
    shares = [chosen[worker :: options.workers] for worker in range(options.workers)]
    waiting = [
        os.fork() or _child(found, number, share, until, folder / f"counts-{number}")
        for number, share in enumerate(shares, start=1)
    ]
    codes = [os.waitpid(pid, 0)[1] for pid in waiting]
    counts = Counter[str]()
    for number in range(1, options.workers + 1):
        counts += Counter(json.loads((folder / f"counts-{number}").read_text()))
    table = sorted((name, count) for name, count in counts.items() if name.split()[0] in OPERATIONS and " " in name)
    for name, count in table:
        print(f"{count:6} {name}")
    totals = {name: count for name, count in sorted(counts.items()) if (name, count) not in table}
    print(
        f"faults: seed {options.seed}, {counts['cases']} of {len(found.cases)} cases in "
        f"{time.monotonic() - begun:.0f} s, {counts['failed']} failed; {totals}",
        flush=True,
    )
    return int(bool(counts["failed"] or any(codes)))


def _child(found: FaultSearch, number: int, share: Sequence[Case], until: float, counts: Path) -> int:
    try:
        counts.write_text(json.dumps(found.work(number, share, until)))
        os._exit(0)
    except BaseException as error:
        print(f"worker {number}: {error!r}", flush=True)
        os._exit(1)


def main() -> int:
    """Build the shim and start again with it; then search."""
    options = parse_arguments()
    if FOLDER_VARIABLE in os.environ:
        logging.getLogger("rmq_spark").setLevel(logging.CRITICAL)
        return search(options, options.folder)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="faults-", dir=roomy_folder())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        library = compile_preload(SOURCE, folder)
    except NoCompilerError as error:
        print(f"faults: {error}")
        return NO_COMPILER
    environment = preloaded(library, **{FOLDER_VARIABLE: f"{folder}/cases/"})
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
    status = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn(sys.executable, command, environment), 0)[1])
    shutil.rmtree(folder / "bases", ignore_errors=True)
    shutil.rmtree(folder / "cases", ignore_errors=True)
    if status:
        print(f"faults: stores of cases that failed are in {folder}/failed")
    elif not options.folder:
        shutil.rmtree(folder)
    return status


def roomy_folder() -> str | None:
    """Return a folder in memory, ten times as fast as a disk, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of stores; default: a temporary one, in memory if possible")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--sample", type=int, default=0, help="the number of cases to choose")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--case", help="one case: operation:kind:number")
    parser.add_argument("--operations", type=lambda names: names.split(","), default=list(OPERATIONS))
    parser.add_argument("--kinds", type=lambda names: names.split(","), default=list(FAULT_KINDS))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
