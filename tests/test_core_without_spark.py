"""An installation without PySpark: programs and the command work, and names that need Spark say what to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS_SPARK = ("GroupLagListener", "GroupOffsetListener", "MetricsListener", "parse", "register", "session")
PROGRAM = """
import sys
from importlib.util import find_spec

import rmq_spark

assert find_spec("pyspark") is None
path = sys.argv[1]
with rmq_spark.open_store(path) as store:
    store.send("orders", "one", tags="new", keys="o-1")
with rmq_spark.open_reader(path) as store:
    (queue,) = [queue for queue in store.queues("orders") if store.bounds(queue).max_offset]
    (batch,) = store.read(queue, 0, 1, ["body"])
    assert batch.column("body").to_pylist() == [b"one"]
"""


def run_without_spark(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the code in an interpreter that finds no PySpark."""
    hide = "import sys\nsys.modules['pyspark'] = None\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-P", "-c", hide + code, *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("name", ["session", "parse"])
def test_a_name_that_needs_spark_says_what_to_install(name: str) -> None:
    run = run_without_spark(f"import rmq_spark; rmq_spark.{name}")
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: rmq_spark.{name}: the package pyspark is not installed for ")
    assert last.endswith("Install it: pip install 'rmq-spark[spark]'")
    assert "During handling" not in run.stderr


@pytest.mark.slow
def test_all_other_names_need_no_spark() -> None:
    code = f"import rmq_spark; [getattr(rmq_spark, name) for name in rmq_spark.__all__ if name not in {NEEDS_SPARK}]"
    run = run_without_spark(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_the_core_and_the_command_in_an_environment_without_spark(tmp_path: Path) -> None:
    def run(*words: str | Path) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-P", "-m", "build", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(sys.executable, "-P", "-m", "twine", "check", "--strict", *(tmp_path / "dist").iterdir())
    run(sys.executable, "-m", "venv", tmp_path / "env")
    programs = tmp_path / "env" / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[cli]")
    run(programs / "python", "-c", PROGRAM, tmp_path / "store")
    assert '"tags":"new"' in run(programs / "rmq", "cat", tmp_path / "store", "orders", "--json").replace(": ", ":")
    assert "orders" in run(programs / "rmq", "topics", tmp_path / "store")
    assert "rmq topics" in run(programs / "rmq", "demo")
