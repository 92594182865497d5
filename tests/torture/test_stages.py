"""The stages of `make torture`: what ran is counted, hangs are told from cuts, and the time is shared out."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torture import run
from tests.torture.run import CASES, CUT, FAILED, HANGS, NOTHING, OK, PASSED, Stage

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 120  # ends a hang
BEGUN = "begun at {} s: tests/test_x.py::test_x[a b], 2 minutes"


def stage(program: str = "", counted: str = CASES, *, is_cut: bool = False) -> Stage:
    return Stage("a stage", 1, lambda seed, seconds: ["-c", program], "repeat it", counted, is_cut=is_cut)


@pytest.mark.parametrize(
    ("ended", "lines", "status"),
    [
        (OK, ["clocks: seed 1, 4 cases in 9 s, 0 with faults"], OK),
        (OK, ["clocks: seed 1, 0 cases in 9 s, 0 with faults"], NOTHING),
        (OK, [], NOTHING),
        (CUT, ["clocks: seed 1, 4 cases in 9 s, 0 with faults"], CUT),
        (CUT, [], NOTHING),
        (CUT, ["FAULT case 3", "clocks: seed 1, 4 cases in 9 s, 1 with faults"], FAILED),
        (FAILED, ["clocks: seed 1, 4 cases in 9 s, 0 with faults"], FAILED),
    ],
)
def test_a_stage_that_ran_nothing_is_not_ok(ended: str, lines: list[str], status: str) -> None:
    assert run.status_of(stage(), ended, lines) == status


@pytest.mark.parametrize(
    ("last_line", "cases"),
    [("=== 400 skipped in 9.00s ===", 0), ("=== 3 passed, 400 skipped in 9.00s ===", 3), ("12 passed in 1.00s", 12)],
)
def test_tests_for_which_there_was_no_time_count_for_nothing(last_line: str, cases: int) -> None:
    assert run.cases_of(stage(counted=PASSED), ["3 passages", last_line]) == cases


def test_each_stage_finds_its_count_in_what_it_prints() -> None:
    printed = {
        "drivers": "== 1 passed, 40 skipped in 95.01s (0:01:35) ==",
        "faults": "faults: seed 1, 45 of 10020 cases in 21 s, 0 failed; {'cases': 45}",
        "kills": 'kills: seed 7, 12 s, {"rounds": 3, "deaths": 9}',
        "stops": 'stops: seed 7, 12 s, {"deaths": 9, "rounds": 2}',
        "interrupts": "interrupts: seed 7, 20 of 31000 places in 10 s, 0 faults {}",
        "mutations": "mutations: seeds from 7, 31 cases, 0 faults",
        "our mutations": "mutations of ours: seed 7, 9 cases in 10 s, 0 faults",
        "frames": "frames: seed 7, 1000 cases, 0 faults, 540 commands",
        "clocks": "clocks: seed 7, 6 cases in 11 s, 0 with faults",
        "crashes": "== 5 passed, 400 skipped in 61.00s (0:01:01) ==",
    }
    found = {one.name: run.cases_of(one, [printed[one.name]]) for one in run.STAGES}
    assert found == dict(zip(printed, [1, 45, 3, 2, 20, 31, 9, 1000, 6, 5], strict=True))


def test_a_test_that_is_cut_short_hangs_after_three_times_its_minutes() -> None:
    lines = [BEGUN.format(100), "...", BEGUN.format(1000)]
    tests = stage(is_cut=True)
    assert not run.hangs(tests, lines, 1300.0, True)
    assert run.hangs(tests, lines, 1400.0, False)
    assert run.at_work(lines) == "tests/test_x.py::test_x[a b]"


def test_a_stage_of_short_cases_hangs_if_it_had_its_time() -> None:
    assert run.hangs(stage(), [], 0.0, True)
    assert not run.hangs(stage(), [], 0.0, False)


def test_stages_whose_programs_end_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran, idle = stage("print('a: seed 1, 2 cases')"), stage("print('a: seed 1, 0 cases')")
    assert run.run_stage(ran, 1, 10, LIMIT_S, tmp_path).status == OK
    assert run.run_stage(idle, 1, 10, LIMIT_S, tmp_path).status == NOTHING
    assert "nothing run; all of it" in capsys.readouterr().out


def test_the_command_fails_if_a_stage_ran_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, idle = stage("print('a: seed 1, 2 cases')"), stage("print('a: seed 1, 0 cases')")
    for stages, code, last in (((ran, ran), 0, "2 stages: 2 ok"), ((ran, idle), 1, "2 stages: 1 ok, 1 nothing run")):
        monkeypatch.setattr(run, "STAGES", stages)
        monkeypatch.setattr(sys, "argv", ["run.py"])
        assert run.main() == code
        assert capsys.readouterr().out.splitlines()[-1] == f"torture: {last}"


@pytest.fixture
def child(tmp_path: Path) -> Callable[[str], "subprocess.Popen[bytes]"]:
    """A function that starts a program, and returns once that has printed something."""

    def start(program: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        return process

    return start


def test_who_ends_when_told_is_told_from_who_does_not(
    child: Callable[[str], "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "import signal, time\n{}\nprint(1, flush=True)\ntime.sleep(600)"
    assert run.end(child(waits.format("signal.signal(signal.SIGINT, signal.default_int_handler)")))
    monkeypatch.setattr(run, "ENDS_WITHIN_S", 0.5)
    assert not run.end(child(waits.format("signal.signal(signal.SIGINT, signal.SIG_IGN)")))


@pytest.mark.slow
def test_a_stage_that_does_not_end_is_cut_short_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('2 passed', flush=True)\n{}"
    waits = stage(program.format("time.sleep(600)"), PASSED, is_cut=True)
    assert run.run_stage(waits, 1, 10, 5, tmp_path).status in (CUT, NOTHING), "NOTHING: it had no time to print"
    hung = stage("import time\ntime.sleep(600)")
    monkeypatch.setattr(run, "limit_of", lambda seconds: 1.0)
    assert run.run_stage(hung, 1, 10, 1, tmp_path).status == HANGS


@pytest.mark.parametrize("minutes", [1, 5, 55])
def test_all_stages_are_over_five_minutes_after_the_limit_and_each_gets_a_share(
    minutes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, given = 1000.0, dict[str, tuple[float, float]]()

    def overrun(one: Stage, seed: int, seconds: float, limit_s: float, folder: Path) -> run.Result:
        nonlocal now
        given[one.name] = seconds, limit_s
        now += limit_s
        return run.Result(one, CUT, limit_s, "")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(run, "run_stage", overrun)
    until = now + minutes * 60
    for number in range(len(run.STAGES)):
        run.run_next(run.STAGES[number:], 1, until, tmp_path)
    assert given.keys() == {one.name for one in run.STAGES}
    assert now + run.ENDS_WITHIN_S <= until + 300
    for one in run.STAGES:
        seconds, limit_s = given[one.name]
        assert seconds <= limit_s
        assert minutes == 1 or seconds >= one.least_s


def test_the_first_short_test_runs_although_the_time_is_over() -> None:
    file = "tests/store/transaction/test_commit_races.py"
    options = ("-q", "-m", "torture", "-p", "no:cacheprovider", "--torture-seconds", "0", "--torture-least", "1")
    command = [sys.executable, "-P", "-m", "pytest", *options, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 299 skipped" in done.stdout
