"""All long random runs, one stage after the other, within a time that is given.

    python tests/torture/run.py [--minutes 55] [--seed 7] [--stages kills,faults]

Each stage gets its share of the time that is left, prints its seed and its counts, and ends by itself; one that does
not is ended, and has failed. The output of each stage is in a file of its own in the folder that is printed first.
The last lines are a table of the stages. Exits with 1 if one failed; a stage that misses a C compiler has failed only
with RMQ_COMPILER=required. The seed is random unless it is given.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
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
SHOWN_FAULTS = 10
MISSING = 2  # the exit status of a stage that misses something on this machine
NO_COMPILER = "missing: a C compiler"

Command = Callable[[int, int], list[str]]  # by seed and seconds


@dataclass(frozen=True)
class Stage:
    """One stage: its share of the time, at least `least_s`, and its command. `repeat` repeats one of its cases."""

    name: str
    share: int
    command: Command
    repeat: str
    least_s: float = 10.0


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


def tests(marks: str) -> Command:
    """Return the command of tests with these marks; tests/conftest.py chooses those for which there is time."""
    options = ("-q", "-rfEs", "-s", "-o", "faulthandler_timeout=900", "-p", "no:cacheprovider")
    return lambda seed, seconds: [
        *("-P", "-m", "pytest", "-m", marks, *options),
        *("--torture-seed", str(seed), "--torture-seconds", str(seconds), *files_with_long_runs()),
    ]


def files_with_long_runs() -> list[str]:
    """Return the files with tests marked `torture`: to collect all tests takes most of a minute."""
    return [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.torture" in path.read_text()]


def mutations(seed: int, seconds: int) -> list[str]:
    """Return the command that damages the golden stores."""
    return [str(TESTS / "store" / "test_mutations.py"), "--from", str(seed), "--search", str(seconds)]


STAGES = (
    Stage(
        "drivers",
        20,
        tests("torture and spark"),
        "python -P -m pytest -m torture FILE::TEST --torture-seed SEED",
        least_s=120,  # one pipeline
    ),
    Stage(
        "faults",
        26,
        script(TESTS / "faults" / "run.py"),
        "python tests/faults/run.py --case OPERATION:KIND:NUMBER",
        least_s=40,
    ),
    Stage("kills", 16, script(HERE / "kills.py"), "python tests/torture/kills.py --seed SEED --round N --seconds 0"),
    Stage("stops", 8, script(HERE / "kills.py", "--stops"), "the same with --stops"),
    Stage("interrupts", 6, script(HERE / "interrupts.py"), "python tests/torture/interrupts.py --place OPERATION:N"),
    Stage("mutations", 6, mutations, "python tests/store/test_mutations.py --seed N"),
    Stage(
        "our mutations",
        5,
        script(HERE / "our_mutations.py"),
        "python tests/torture/our_mutations.py --seed SEED --case N",
    ),
    Stage("clocks", 4, script(HERE / "clocks.py"), "python tests/torture/clocks.py --seed SEED --case N"),
    Stage("crashes", 9, tests("torture and not spark"), "python -P -m pytest -m torture FILE::TEST"),
)


def run_stage(stage: Stage, seed: int, seconds: float, folder: Path) -> Result:
    """Run a stage in a session of its own; end it if it does not end."""
    log = folder / f"{stage.name.replace(' ', '-')}.log"
    command = [sys.executable, *stage.command(seed, max(1, round(seconds)))]
    print(f"\n{stage.name}: seed {seed}, {seconds:.0f} s", flush=True)
    begun = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds * GRACE + GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
    status = {0: "ok", None: "did not end"}.get(code, "FAILED")
    if code == MISSING and "no C compiler" in log.read_text(errors="replace"):
        status = NO_COMPILER
    lines = log.read_text(errors="replace").splitlines()
    show(stage, status, lines, log)
    return Result(stage, status, time.monotonic() - begun, summary_of(stage, lines))


def end(process: subprocess.Popen[bytes]) -> None:
    """End a stage: first so that tests end what they started in sessions of their own, then for certain."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def show(stage: Stage, status: str, lines: Sequence[str], log: Path) -> None:
    """Print what matters of a stage's output: all of it if it is short, else faults and the end."""
    faults = [line for line in lines if line.startswith(("FAULT", "FAILED", "ERROR"))]
    for line in faults[:SHOWN_FAULTS]:
        print(f"  {line[:500]}")
    if len(faults) > SHOWN_FAULTS:
        print(f"  … and {len(faults) - SHOWN_FAULTS} more")
    for line in [line for line in lines if line not in faults][-4:]:
        print(f"  {line[:500]}")
    if status != "ok":
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
    results = []
    for number, stage in enumerate(stages):
        share = stage.share / sum(later.share for later in stages[number:])
        seconds = max((until - time.monotonic()) * share, stage.least_s)
        results.append(run_stage(stage, options.seed + number, seconds, folder))
    print(f"\ntorture: seed {options.seed}")
    for result in results:
        print(f"  {result.stage.name:14} {result.status:12} {result.seconds:6.0f} s  {result.summary}")
    is_complete = os.environ.get("RMQ_COMPILER") == "required"
    good = {"ok"} if is_complete else {"ok", NO_COMPILER}
    return int(any(result.status not in good for result in results))


if __name__ == "__main__":
    sys.exit(main())
