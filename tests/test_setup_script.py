""".ci/setup lists everything that a machine lacks, with commands to install it, before it starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parent.parent / ".ci" / "setup"
MAKEFILE = SETUP.parent.parent / "Makefile"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder that is the whole PATH: the shell's tools, and programs of the test."""
    path = tmp_path / "bin"
    path.mkdir()
    for tool in ("sh", "dirname", "sed", "head", "cat", "cksum", "printf"):
        found = shutil.which(tool)
        assert found is not None
        (path / tool).symlink_to(found)
    return path


def add_program(machine: Path, name: str, script: str) -> None:
    program = machine / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def add_java(machine: Path, version: str = "17.0.15") -> None:
    add_program(machine, "java", f"echo 'openjdk version \"{version}\" 2025-04-15' >&2")


def add_python(machine: Path, name: str = "python3") -> None:
    add_program(machine, name, f'exec "{sys.executable}" "$@"')


def check(machine: Path, **env: str) -> tuple[int, str]:
    run = subprocess.run(
        [str(machine / "sh"), str(SETUP), "--check"],
        env={"PATH": str(machine), **env},
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


def test_a_machine_with_both_is_fine(machine: Path) -> None:
    add_python(machine)
    add_java(machine)
    code, said = check(machine)
    assert (code, said.count("\n")) == (0, 1), said
    assert "Java 17 are there" in said


def test_an_empty_machine_is_told_of_python_and_java_at_once(machine: Path) -> None:
    code, said = check(machine)
    assert code == 1
    assert "Missing: Python 3.11 or newer" in said
    assert "none found" in said
    assert "Missing: Java 17 or newer" in said
    assert said.count("apt-get install") == 2


def test_an_old_python_is_named_with_its_version(machine: Path) -> None:
    # Answers as Python 3.9.18 would: prints its version, and fails the comparison.
    add_program(machine, "python3", 'case "$2" in *print*) echo 3.9.18;; *) exit 1;; esac')
    add_java(machine)
    code, said = check(machine)
    assert code == 1
    assert "python3 is 3.9.18" in said
    assert "Java" not in said


def test_a_newer_python_behind_an_old_one_is_taken(machine: Path) -> None:
    add_program(machine, "python3", 'case "$2" in *print*) echo 3.9.18;; *) exit 1;; esac')
    add_program(machine, "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    add_python(machine, "python3.11")
    add_java(machine)
    code, said = check(machine)
    assert code == 0, said
    assert "(python3.11)" in said


def test_a_python_without_venv_is_told_which_package_has_it(machine: Path) -> None:
    add_program(machine, "python3", 'case "$2" in *print*) echo 3.11.2;; *ensurepip*) exit 1;; esac')
    add_java(machine)
    code, said = check(machine)
    assert code == 1
    assert "apt-get install python3.11-venv" in said


@pytest.mark.parametrize(("version", "number"), [("1.8.0_392", "8"), ("11.0.21", "11")])
def test_an_old_java_is_named_with_its_version(machine: Path, version: str, number: str) -> None:
    add_python(machine)
    add_java(machine, version)
    code, said = check(machine)
    assert code == 1
    assert f"is Java {number})" in said


def test_java_home_is_respected(machine: Path, tmp_path: Path) -> None:
    add_python(machine)
    add_java(machine)
    code, said = check(machine, JAVA_HOME=str(tmp_path / "nowhere"))
    assert code == 1
    assert f"{tmp_path}/nowhere/bin/java, from JAVA_HOME, is not there" in said


def test_a_python_of_ones_own_choice_is_the_only_one_asked(machine: Path) -> None:
    add_python(machine)
    add_java(machine)
    code, said = check(machine, PYTHON="python3.99")
    assert code == 1
    assert "looked for python3.99" in said


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_unknown_target_prints_the_targets() -> None:
    run = subprocess.run(
        ["make", "-f", MAKEFILE, "tset"],
        cwd=MAKEFILE.parent,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "no target 'tset'" in run.stderr
    assert "make test" in run.stderr
