"""A seeded sample of tests/faults/run.py: a system call fails, is cut short or kills, and nothing is lost or hidden.

`make torture` tries the others. FAULTS_SEED chooses another sample. Without a C compiler the test is skipped with the
reason; with RMQ_COMPILER=required it fails.
"""

import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
SAMPLE = 80
LIMIT_S = 900  # ends a hang: a sample takes some twenty seconds on a machine of its own
NO_COMPILER = 2


def run_search(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run.py"), "--folder", str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    if done.returncode == NO_COMPILER:
        if os.environ.get("RMQ_COMPILER") == "required":
            pytest.fail(f"RMQ_COMPILER=required: {done.stdout}")
        pytest.skip(done.stdout.strip())
    return done


@pytest.mark.slow
def test_a_sample_of_failed_calls_loses_and_hides_nothing(tmp_path: Path) -> None:
    seed = os.environ.get("FAULTS_SEED", "0")
    done = run_search(tmp_path, "--sample", str(SAMPLE), "--seed", seed)
    print(done.stdout)
    assert f"{SAMPLE} of " in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "run.py"), "--folder", str(tmp_path), "--sample", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == NO_COMPILER
    assert "no C compiler found (looked for cc, gcc, clang): install gcc or clang" in done.stdout


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of the search, by name."""
    monkeypatch.syspath_prepend(str(HERE))
    return {name: importlib.import_module(name) for name in ("oracle", "cases", "fault_kinds", "operations", "shim")}


def ending_faults(
    kit: dict[str, ModuleType], name: str, first: tuple[str, str], second: str, **more: object
) -> set[str]:
    """Return the kinds of faults that the oracle finds in how a case ended, with EIO at a read of one file."""
    cases, shim = kit["cases"], kit["shim"]
    hit = shim.Hit(1, str(more.pop("call", "pread")), "here/commitlog/0")
    plain = cases.Plain(Counter(), more.get("plain"), [])
    again = more.get("again", plain.answer)
    tried = cases.Tried(hit, cases.Ending(*first), cases.Ending(second), more.get("answer"), second_answer=again)
    found = kit["oracle"].ending_faults(cases.OPERATIONS[name], kit["fault_kinds"].FAULT_KINDS["eio"], plain, tried)
    return {fault.split()[0] for fault in found}


def test_the_oracle_sees_errors_that_are_foreign_or_name_no_path(kit: dict[str, ModuleType]) -> None:
    named = ("StoreError", "reading here/commitlog/0: Input/output error")
    assert ending_faults(kit, "send", named, "ok") == set()
    assert ending_faults(kit, "send", ("StoreError", "it failed"), "ok") == {"UNNAMED"}
    assert ending_faults(kit, "send", ("RAW", "OSError(5)"), "ok") == {"RAW"}
    assert ending_faults(kit, "send", ("hung", "after 90 s"), "not tried") == {"HUNG"}
    assert ending_faults(kit, "send", named, "LockTimeoutError") == {"SECOND"}
    assert ending_faults(kit, "send-sync", ("ok", ""), "ok", call="fdatasync") == {"SWALLOWED"}
    assert ending_faults(kit, "send", ("ok", ""), "ok", call="fdatasync") == set(), "flush=async promises less"


def test_the_oracle_sees_answers_that_are_silently_other_ones(kit: dict[str, ModuleType]) -> None:
    rows, fewer = Counter({("orders", "a"): 2}), Counter({("orders", "a"): 1})
    assert ending_faults(kit, "read", ("ok", ""), "ok", plain=rows, answer=rows) == set()
    assert ending_faults(kit, "read", ("ok", ""), "ok", plain=rows, answer=fewer) == {"SILENT"}
    assert ending_faults(kit, "read", ("ok", ""), "ok", plain=rows, answer=rows, again=fewer) == {"AGAIN"}
    healthy = {"counts": [7], "findings": []}
    fewer_units = {"counts": [6], "findings": []}
    named, foreign = ({"counts": [6], "findings": [f"damage: {path}"]} for path in ("here/commitlog/0", "elsewhere"))
    assert ending_faults(kit, "check", ("ok", ""), "ok", plain=healthy, answer=named) == set()
    assert ending_faults(kit, "check", ("ok", ""), "ok", plain=healthy, answer=fewer_units) == {"SILENT"}
    assert ending_faults(kit, "check", ("ok", ""), "ok", plain=healthy, answer=foreign) == {"FALSE-ALARM"}


@pytest.mark.parametrize(
    ("name", "rows", "word"),
    [
        ("send", {("orders", "sent1"): 1, ("orders", "sent2"): 1}, ""),
        ("send", {("orders", "sent2"): 1}, "LOST"),
        ("send", {("orders", "sent1"): 2, ("orders", "sent2"): 1}, "DOUBLE"),
        ("send", {("orders", "old0"): 0, ("orders", "sent1"): 1, ("orders", "sent2"): 1}, "GONE"),
        ("send-many", {("orders", "sent1.0"): 1}, "PART"),
        ("sink", {("sink0", "sunk0.0"): 1}, "PART"),
        ("tick", {("late", "first"): 1}, "TICK:"),
        ("expire-beside-timer", {("rmq_sys_wheel_timer", "waits0"): 9}, "DELETED:"),
        ("send-back", {("%DLQ%crew", "old0"): 9}, "WRONG"),
    ],
)
def test_the_oracle_sees_messages_that_are_lost_doubled_or_partial(
    kit: dict[str, ModuleType], name: str, rows: dict[tuple[str, str], int], word: str
) -> None:
    before = Counter({("orders", "old0"): 1})
    outcome = kit["operations"].Outcome("", before | Counter(rows), "ok", "ok", {})
    outcome.rows.update({key: -1 for key, count in rows.items() if count == 0})
    found = {fault.split()[0] for fault in kit["oracle"].row_faults(kit["cases"].OPERATIONS[name], before, outcome)}
    assert (word in found) if word else not found
