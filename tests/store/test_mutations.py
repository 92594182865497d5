"""Damaged stores: for any damage a reader gives the right rows, or an error that describes it.

Each seed damages one of the golden stores in one way (`tests/support/mutations.py`) and reads all of it. A
case is good if

1. it ends normally or with an RmqError, within 5 seconds of work and a bounded address space;
2. the judge (`tests/support/mutation_judge.py`) finds every row right, and each missing one explained;
3. damage to files that rows do not come from (index, timer, lock ...) changes nothing.

`python tests/store/test_mutations.py --seed 7` shows one case. Failures print their seed. `--from 7 --search 300`
tries the cases from seed 7 for 300 seconds, in two processes; `make torture` does.
"""

import argparse
import importlib.util
import json
import math
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType, ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `support`, if this runs as a script

import pytest
from support.mutation_judge import Judge, read_all, search_faults
from support.mutations import MutableStore
from support.plain_truth import Truth

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CASE_SECONDS = 5  # of this process's time: the machine may be busy with others
WAIT_SECONDS = 120  # for waits without work of this process
WORKERS = 2
ADDRESS_SPACE_BYTES = 1 << 30  # beyond what a worker has after it read every store once
WEIGHTS = {"demo": 0.3}  # the larger ones more seldom
# What rows come from: damage elsewhere must not be noticed.
SOURCES = ("commitlog", "consumequeue/", "batchconsumequeue", "config/topics.json", "checkpoint", "abort")


def load_decoder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_decode_store", GOLDEN / "decode_store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


decoder = load_decoder()
STORES = (*decoder.STORES, *decoder.STORES_OF_BROKERS, *decoder.DIGESTED)


class HangError(BaseException):
    """A case took too long; no RmqError and no Exception, so that nobody takes it for an answer."""


def alarm(number: int, frame: FrameType | None) -> None:
    raise HangError


def set_alarms(seconds: int, wait_seconds: int) -> None:
    for signal_number, timer, limit in (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, wait_seconds),
    ):
        signal.signal(signal_number, alarm)
        signal.setitimer(timer, limit)


class Cases:
    """Runs cases by seed in one folder."""

    def __init__(self, folder: Path) -> None:
        self._stores: dict[str, tuple[Truth, MutableStore]] = {}
        pristine = [Path(shutil.copytree(GOLDEN / name, folder / "pristine" / name)) for name in STORES]
        for path in pristine:
            others = [other for other in pristine if other != path]
            self._stores[path.name] = Truth(path, decoder), MutableStore(path, folder / "work" / path.name, others)

    def run(self, seed: int, show: Callable[[str], None] = lambda _: None) -> list[str]:
        """Run one case; return what is wrong, each with all that is needed to see it again."""
        random = Random(seed)
        name = random.choices(STORES, [WEIGHTS.get(name, 1.0) for name in STORES])[0]
        truth, store = self._stores[name]
        what = store.mutate(random)
        read_mode = random.choice(("mmap", "pread"))
        show(f"seed {seed}, {name}, {read_mode}: {'; '.join(what)}")
        set_alarms(CASE_SECONDS, WAIT_SECONDS)
        faults: list[str] = []
        try:
            found, faults = read_all(store.path, read_mode)
            for queue, error in found.errors.items():
                show(f"  {queue}: {type(error).__name__}: {error}")
                if not str(error):
                    faults.append(f"{queue}: an error without evidence")
            if found.errors and not any(path.startswith(SOURCES) for path in store.changed()):
                faults.append(f"an error for damage that does not matter: {found.errors}")
            foreign = any(one.startswith("commitlog/") and " replaced by commitlog/" in one for one in what)
            faults += Judge(truth, store.path, foreign).faults(found)
            if random.random() < 0.3:
                faults += search_faults(store.path, random, truth, found, read_mode)
        except HangError:
            faults.append(f"still at it after {CASE_SECONDS} s")
        except Exception as error:
            faults.append(f"{type(error).__name__} at {places(error)}: {error}")
        finally:
            set_alarms(0, 0)
            store.restore()
        return [f"seed {seed}, {name}, {read_mode}, {'; '.join(what)}: {fault[:900]}" for fault in faults]


def places(error: BaseException) -> str:
    """Name the innermost lines of ours that an error came through."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(found[-4:])


def work(folder: Path, seeds: range, seconds: float = math.inf) -> None:
    """Run cases in this process: a line with each seed before it is tried, a line of JSON for each fault."""
    warnings.simplefilter("error")
    cases = Cases(folder)
    for name in STORES:
        read_all(GOLDEN / name, "mmap")  # fills imports, caches and pools before memory is counted
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES, -1))
    until = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until:
            break
        print(seed, flush=True)
        for fault in cases.run(seed):
            print(json.dumps(fault), flush=True)


def run_workers(seeds: range, seconds: float = math.inf) -> tuple[int, list[str]]:
    """Run cases in processes of their own, for at most so long; return how many, and the faults.

    A process that dies is a fault of the case that it was at.
    """
    count, faults = 0, list[str]()
    until = time.monotonic() + seconds
    waiting = [range(seeds.start + number, seeds.stop, WORKERS) for number in range(WORKERS)]
    running = [(left, start_worker(left, seconds)) for left in waiting]
    while running:
        left, worker = running.pop(0)
        output, errors = worker.communicate()
        lines = output.splitlines()
        faults += [json.loads(line) for line in lines if line.startswith('"')]
        tried = [int(line) for line in lines if line.isdigit()]
        count += len(tried)
        if worker.returncode:
            faults.append(f"seed {tried[-1:]}: the process ended with {worker.returncode}: {errors[-2000:]}")
            rest = left[len(tried) :]
            if tried and rest:
                running.append((rest, start_worker(rest, until - time.monotonic())))
    return count, faults


def start_worker(seeds: range, seconds: float) -> subprocess.Popen[str]:
    arguments = ["--from", str(seeds.start), "--to", str(seeds.stop), "--step", str(seeds.step)]
    arguments += ["--seconds", str(seconds)]
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        command,
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )


@pytest.mark.parametrize("read_mode", ["mmap", "pread"])
@pytest.mark.parametrize("name", STORES)
def test_an_undamaged_store_gives_all_rows(name: str, read_mode: str) -> None:
    truth = Truth(GOLDEN / name, decoder)
    found, faults = read_all(truth.path, read_mode)
    assert not faults
    assert not found.errors
    assert {queue: rows for queue, rows in found.rows.items() if rows} == {
        queue: list(rows.values()) for queue, rows in truth.rows.items() if rows
    }


def test_the_judge_sees_rows_that_are_missing_doubled_or_made_up() -> None:
    truth = Truth(GOLDEN / "demo", decoder)
    judge = Judge(truth, truth.path, foreign=False)
    found, _ = read_all(truth.path, "mmap")
    queue, rows = max(found.rows.items(), key=lambda item: len(item[1]))
    whole = list(rows)
    assert not list(judge.faults(found))
    for altered, fault in (
        (whole[:-1], f"offsets [{whole[-1]['queueOffset']}] are silently missing"),
        (whole[1:], "offsets [0] are silently missing"),
        ([*whole[:-1], {**whole[-1], "body": b"another"}], "not what the record"),
        ([{**whole[0], "queueOffset": 1}], "not what the record"),
    ):
        found.rows[queue] = altered
        assert any(fault in one for one in judge.faults(found)), fault


def test_a_damaged_store_becomes_whole_again_and_its_origin_stays_whole(tmp_path: Path) -> None:
    """A damage that stayed, or reached the pristine files through a hard link, would spoil every case after it."""
    origin = Path(shutil.copytree(GOLDEN / "demo", tmp_path / "origin"))
    store = MutableStore(origin, tmp_path / "work", [GOLDEN / "basic"])
    for seed in range(150):
        store.mutate(Random(seed))
        store.restore()
        for path in (origin, store.path):
            assert contents_of(path) == contents_of(GOLDEN / "demo"), f"seed {seed}"


def contents_of(folder: Path) -> dict[Path, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_thousand_damaged_stores_are_read_right_or_refused() -> None:
    count, faults = run_workers(range(1_000))
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:20]])
    assert count == 1_000


def search(begin: int, seconds: float) -> int:
    """Try cases until the time is over; print the faults and the count. Return 1 after a fault."""
    count, faults = run_workers(range(begin, begin + 10**9), seconds)
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"mutations: seeds from {begin}, {count} cases, {len(faults)} faults")
    return int(bool(faults))


def main() -> None:
    parser = argparse.ArgumentParser(description="Damaged stores, case by case.")
    parser.add_argument("--seed", type=int, help="show one case")
    parser.add_argument("--from", type=int, dest="start", default=0)
    parser.add_argument("--to", type=int, dest="stop", default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the cases from --from to --to")
    parser.add_argument("--search", type=float, help="seconds; try the cases beginning with --from")
    options = parser.parse_args()
    if options.search:
        sys.exit(search(options.start, options.search))
    with tempfile.TemporaryDirectory() as folder:
        if options.seed is None:
            work(Path(folder), range(options.start, options.stop, options.step), options.seconds)
            return
        for fault in Cases(Path(folder)).run(options.seed, print):
            print("FAULT", fault)


if __name__ == "__main__":
    main()
