"""All long random runs, one stage after the other, within a time that is given.

    python tests/torture/run.py [--minutes 55] [--seed 7] [--stages kills,faults]

Each stage gets its share of the time that is left, and a least time. It prints its seed and its counts, and ends by
itself. The output of each stage is in a file of its own in the folder that is printed first. The last lines are a table
of the stages, and how many of them ended how:

| status | meaning | a failure |
| --- | --- | --- |
| ok | cases ran, none failed | no |
| cut short | it was ended in the middle of a case, for the whole command has a limit; no case before it failed | no |
| nothing run | no case is known to have run | yes |
| FAILED | a case failed | yes |
| did not end | it hangs: it was ended long after its time | yes |
| missing: a C compiler | it cannot run on this machine | only with RMQ_COMPILER=required |

The whole command ends five minutes after its limit at the latest. Exits with 1 after a failure. The seed is random
unless it is given.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = TESTS.parent
MINUTES = 55  # with TORTURE=1: the rest of an hour is for stages that end late
GRACE = 1.5  # of a stage's seconds, and
GRACE_S = 180  # beside: then it is ended
ENDS_WITHIN_S = 60
OVERRUN_S = 300  # of the whole command, with ENDS_WITHIN_S
START_S = 20  # of a stage, before its first case
HANG_TIMES = 3  # a test that runs for that many times its minutes hangs
SHOWN_FAULTS = 10
MISSING = 2  # the exit status of a stage that misses something on this machine

OK, CUT, NOTHING, FAILED, HANGS = "ok", "cut short", "nothing run", "FAILED", "did not end"
NO_COMPILER = "missing: a C compiler"

Command = Callable[[int, int], list[str]]  # by seed and seconds


@dataclass(frozen=True)
class Stage:
    """One stage: its share of the time, at least `least_s`, and its command. `repeat` repeats one of its cases.

    `counted` finds in the stage's output how many cases ran. `is_cut`: it may be in a long case when its time is over.
    """

    name: str
    share: int
    command: Command
    repeat: str
    counted: str
    least_s: float = 10.0
    is_cut: bool = False

    @property
    def need_s(self) -> float:
        """The seconds that its least amount takes."""
        return self.least_s + START_S


@dataclass(frozen=True)
class Result:
    """How a stage ended. `summary` is the last line that it printed about itself."""

    stage: Stage
    status: str
    seconds: float
    summary: str


def script(path: Path, *arguments: str) -> Command:
    """Return the command of a script that takes --seed and --seconds."""
    return lambda seed, seconds: [str(path), *arguments, "--seed", str(seed), "--seconds", str(seconds)]


def tests(marks: str, least: int) -> Command:
    """Return the command of tests with these marks; tests/conftest.py chooses those for which there is time.

    It begins `least` of the short ones in any case.
    """
    options = ("-q", "-rfEs", "-s", "-o", "faulthandler_timeout=900", "-p", "no:cacheprovider")
    return lambda seed, seconds: [
        *("-P", "-m", "pytest", "-m", marks, *options),
        *("--torture-seed", str(seed), "--torture-seconds", str(seconds), "--torture-least", str(least)),
        *files_with_long_runs(),
    ]


def files_with_long_runs() -> list[str]:
    """Return the files with tests marked `torture`: to collect all tests takes most of a minute."""
    return [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.torture" in path.read_text()]


def mutations(seed: int, seconds: int) -> list[str]:
    """Return the command that damages the golden stores."""
    return [str(TESTS / "store" / "test_mutations.py"), "--from", str(seed), "--search", str(seconds)]


PASSED, CASES = r"(\d+) passed", r", (\d+) cases"
STAGES = (
    Stage(
        "drivers",
        20,
        tests("torture and spark", 1),
        "python -P -m pytest -m torture FILE::TEST --torture-seed SEED",
        PASSED,
        least_s=120,  # one pipeline
        is_cut=True,
    ),
    Stage(
        "faults",
        26,
        script(TESTS / "faults" / "run.py"),
        "python tests/faults/run.py --case OPERATION:KIND:NUMBER",
        r", (\d+) of \d+ cases",
        least_s=40,
    ),
    Stage(
        "kills",
        16,
        script(HERE / "kills.py"),
        "python tests/torture/kills.py --seed SEED --round N --seconds 0",
        r'"rounds": (\d+)',
    ),
    Stage("stops", 8, script(HERE / "kills.py", "--stops"), "the same with --stops", r'"rounds": (\d+)'),
    Stage(
        "interrupts",
        6,
        script(HERE / "interrupts.py"),
        "python tests/torture/interrupts.py --place OPERATION:N",
        r", (\d+) of \d+ places",
    ),
    Stage("mutations", 6, mutations, "python tests/store/test_mutations.py --seed N", CASES),
    Stage(
        "our mutations",
        5,
        script(HERE / "our_mutations.py"),
        "python tests/torture/our_mutations.py --seed SEED --case N",
        CASES,
    ),
    Stage(
        "frames",
        2,
        script(TESTS / "store" / "cluster" / "test_frame_mutations.py"),
        "python tests/store/cluster/test_frame_mutations.py --seed SEED --case N",
        CASES,
    ),
    Stage("clocks", 4, script(HERE / "clocks.py"), "python tests/torture/clocks.py --seed SEED --case N", CASES),
    Stage(
        "crashes",
        9,
        tests("torture and not spark", 3),
        "python -P -m pytest -m torture FILE::TEST",
        PASSED,
        least_s=40,  # three short ones
        is_cut=True,
    ),
)


def run_stage(stage: Stage, seed: int, seconds: float, limit_s: float, folder: Path) -> Result:
    """Run a stage in a session of its own; end it if it does not end within `limit_s`."""
    log = folder / f"{stage.name.replace(' ', '-')}.log"
    command = [sys.executable, *stage.command(seed, max(1, round(seconds)))]
    print(f"\n{stage.name}: seed {seed}, {seconds:.0f} s", flush=True)
    begun, ends_when_told = time.monotonic(), True
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code, told_s = None, time.monotonic()
            ends_when_told = end(process)
    lines = log.read_text(errors="replace").splitlines()
    if code is None:
        is_hung = not ends_when_told or hangs(stage, lines, told_s, limit_s >= limit_of(seconds))
        print(f"  cut short after {told_s - begun:.0f} s: {at_work(lines)}", flush=True)
        status = status_of(stage, CUT, lines) if not is_hung else HANGS
    elif code == MISSING and any("no C compiler" in line for line in lines):
        status = NO_COMPILER
    else:
        status = status_of(stage, FAILED if code else OK, lines)
    show(stage, status, lines, log)
    return Result(stage, status, time.monotonic() - begun, summary_of(stage, lines))


def limit_of(seconds: float) -> float:
    """Return the seconds after which a stage is ended that was given `seconds`."""
    return seconds * GRACE + GRACE_S


def status_of(stage: Stage, ended: str, lines: Sequence[str]) -> str:
    """Return the status of a stage that ended so: OK and CUT are none if a case failed, or if none ran."""
    if ended == FAILED or faults_of(lines):
        return FAILED
    return ended if cases_of(stage, lines) else NOTHING


def cases_of(stage: Stage, lines: Sequence[str]) -> int:
    """Return how many cases a stage says that it ran, 0 if it does not say."""
    counts = [int(found[1]) for line in lines if (found := re.search(stage.counted, line))]
    return counts[-1] if counts else 0


def faults_of(lines: Sequence[str]) -> list[str]:
    """Return the lines that tell of faults."""
    return [line for line in lines if line.startswith(("FAULT", "FAILED", "ERROR"))]


BEGUN = re.compile(r"begun at (\d+) s: (\S.*), ([0-9.]+) minutes$")  # tests/conftest.py


def at_work(lines: Sequence[str]) -> str:
    """Return what a stage that was ended was at, as far as it says."""
    begun = [found[2] for line in lines if (found := BEGUN.match(line))]
    return begun[-1] if begun else "before its summary"


def hangs(stage: Stage, lines: Sequence[str], now_s: float, had_its_time: bool) -> bool:
    """Say whether a stage that was ended at `now_s` hung. Its last case may just have been too long.

    A test hangs after some times its minutes. Other stages look at the clock after each case, and cases are short.
    """
    if not stage.is_cut:
        return had_its_time
    begun = [found for line in lines if (found := BEGUN.match(line))]
    return bool(begun) and now_s - int(begun[-1][1]) > HANG_TIMES * 60 * float(begun[-1][3])


def end(process: subprocess.Popen[bytes]) -> bool:
    """End a stage: first so that tests end what they started in sessions of their own, then for certain.

    Return whether the first was enough.
    """
    ends_when_told = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            ends_when_told = False
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return ends_when_told


def show(stage: Stage, status: str, lines: Sequence[str], log: Path) -> None:
    """Print what matters of a stage's output: all of it if it is short, else faults and the end."""
    faults = faults_of(lines)
    for line in faults[:SHOWN_FAULTS]:
        print(f"  {line[:500]}")
    if len(faults) > SHOWN_FAULTS:
        print(f"  … and {len(faults) - SHOWN_FAULTS} more")
    for line in [line for line in lines if line not in faults][-4:]:
        print(f"  {line[:500]}")
    if status != OK:
        print(f"  {status}; all of it: {log}; to repeat one: {stage.repeat}", flush=True)


def summary_of(stage: Stage, lines: Sequence[str]) -> str:
    """Return the line with the stage's counts."""
    words = (f"{stage.name}: seed", "mutations: seeds", "mutations of ours: seed", "===", " passed", " skipped")
    found = [
        line.strip("= ") for line in lines if line.startswith(words[:4]) or any(word in line for word in words[4:])
    ]
    return found[-1][:200] if found else (lines[-1][:200] if lines else "")


def main() -> int:
    """Run the stages; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, default=Random().randrange(10**6))
    parser.add_argument("--stages", type=lambda names: names.split(","), default=[stage.name for stage in STAGES])
    options = parser.parse_args()
    stages = [stage for stage in STAGES if stage.name in options.stages]
    unknown = set(options.stages) - {stage.name for stage in stages}
    if unknown:
        parser.error(f"unknown stages {sorted(unknown)}; known are {', '.join(stage.name for stage in STAGES)}")
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    print(f"torture: seed {options.seed}, {options.minutes:g} minutes; output of each stage in {folder}", flush=True)
    until = time.monotonic() + options.minutes * 60
    results = [run_next(stages[number:], options.seed + number, until, folder) for number in range(len(stages))]
    print(f"\ntorture: seed {options.seed}")
    for result in results:
        print(f"  {result.stage.name:14} {result.status:12} {result.seconds:6.0f} s  {result.summary}")
    counts = Counter(result.status for result in results)
    print(f"torture: {len(results)} stages: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    is_complete = os.environ.get("RMQ_COMPILER") == "required"
    good = {OK, CUT} if is_complete else {OK, CUT, NO_COMPILER}
    return int(not counts.keys() <= good)


def run_next(stages: Sequence[Stage], seed: int, until: float, folder: Path) -> Result:
    """Run the first of the stages that are left; leave the others their least time before all must have ended."""
    stage, now = stages[0], time.monotonic()
    seconds = max((until - now) * stage.share / sum(one.share for one in stages), stage.least_s)
    left_s = until + OVERRUN_S - ENDS_WITHIN_S - now
    needed_s = sum(one.need_s for one in stages)
    limit_s = min(limit_of(seconds), max(left_s - needed_s + stage.need_s, left_s * stage.need_s / needed_s))
    if limit_s <= 1:
        print(f"\n{stage.name}: no time is left", flush=True)
        return Result(stage, NOTHING, 0.0, "no time was left")
    return run_stage(stage, seed, min(seconds, max(limit_s - START_S, 1.0)), limit_s, folder)


if __name__ == "__main__":
    sys.exit(main())
