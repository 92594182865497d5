"""The notebooks and the demo run, import only what a user has, and hold no stored output.

The code cells run in order in one fresh interpreter, in the folder of the notebook; the value of a
cell's last expression is shown as text. A Jupyter kernel would do the same and bring twenty
packages into the environment.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BARE = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}

# Reads cells from standard input and runs them as a kernel would.
RUNNER = """
import ast, json, sys
scope = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin), start=1):
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    name = f"cell {number}"
    exec(compile(ast.Module(body, []), name, "exec"), scope)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
        if value is not None:
            print(repr(value))
"""

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)


def read_cells(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def sources(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in read_cells(notebook)]


@each_notebook
def test_a_notebook_holds_no_output(notebook: Path) -> None:
    for cell in read_cells(notebook):
        assert not cell["outputs"], "clear all outputs before saving: they are noise in a diff"
        assert cell["execution_count"] is None, "clear all outputs before saving"


@pytest.mark.parametrize("path", [*NOTEBOOKS, *sorted(FOLDER.glob("*.py"))], ids=lambda path: path.name)
def test_it_imports_only_what_a_user_has(path: Path) -> None:
    code = "\n".join(sources(path)) if path.suffix == ".ipynb" else path.read_text()
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for name in names:
            assert name == "rmq_spark" or name.split(".")[0] in {
                "pyspark",
                "demo_sink",  # beside demo.py
                *sys.stdlib_module_names,
            }


@pytest.mark.spark
@each_notebook
def test_a_notebook_runs_from_top_to_bottom(notebook: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(sources(notebook)),
        cwd=notebook.parent,
        env=BARE,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "root\n |-- " in run.stdout, "it shows the schema"


def count_of_user_topics(golden: Path) -> int:
    """Return how many messages the topics that `.*` matches have, after the decoder of tests/golden."""
    topics = json.loads((golden / "expected" / "demo.json").read_text())["topics"]
    return sum(
        queue["count"]
        for topic, queues in topics.items()
        if not topic.startswith(("%", "RMQ_SYS_", "SCHEDULE_TOPIC_"))
        for queue in queues.values()
    )


@pytest.mark.spark
@pytest.mark.wheel
def test_the_demo_shows_rows_batches_and_sums_and_leaves_the_store_alone(golden: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (golden / "demo").rglob("*")}
    run = subprocess.run([sys.executable, FOLDER / "demo.py"], cwd=tmp_path, env=BARE, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ("|topic", "batch   0", "messages/s", "all together", "What to try next"):
        assert part in run.stdout
    for part in ("written, exactly once          1,000,000", "0 messages still to read", "normal             900,000"):
        assert part in run.stdout
    read = next(line for line in run.stdout.split("\n") if line.startswith("all together"))
    assert int(read.split()[2].replace(",", "")) == count_of_user_topics(golden)
    assert {path: path.stat().st_mtime_ns for path in (golden / "demo").rglob("*")} == before
    assert not list(tmp_path.iterdir())
