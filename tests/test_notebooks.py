"""The notebooks and the demo run, use only installed packages, and contain the outputs of a run.

`make notebooks` runs each from top to bottom in a kernel of its own (mark and extra `notebooks`), without a browser and
without storing the output; `make outputs` stores it. The default tests check the cells and the stored outputs.
"""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rmq_spark

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BARE = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}

# A JVM that lives for a minute does not earn what its second compiler costs: 30 s become 17. No notebook has it, for
# who copies from one may want to run for days.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
HANG_S = 1_800  # a limit of a cell or a loop that only ends a hang, however busy the machine is
PICTURES = {"01": 3, "02": 1, "03": 1, "04": 2, "05": 6, "06": 2, "07": 0, "08": 1}  # that each notebook draws
# Paths of a machine, and times and ids of a run, which would differ in every run.
MARKS = re.compile(r"/(?:tmp|home|root|work|Users|usr)/|0x[0-9a-f]{9,}|\b1(?:72|92|0)\.\d+\.\d+\.\d+:(?!10911)")

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)


def read_cells(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def sources(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in read_cells(notebook)]


@each_notebook
def test_a_notebook_holds_the_outputs_of_a_run_from_top_to_bottom(notebook: Path) -> None:
    cells = read_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)], "run make outputs"
    outputs = [output for cell in cells for output in cell["outputs"]]
    shown = [output.get("data", {}) for output in outputs]
    assert sum("image/png" in one for one in shown) == PICTURES[notebook.name[:2]]
    assert any("text/html" in one for one in shown)
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} <= {"stdout"}


@each_notebook
def test_stored_outputs_have_no_marks_of_a_machine(notebook: Path) -> None:
    for cell in read_cells(notebook):
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", ())})
            text = "".join("".join(lines) for kind, lines in data.items() if kind.startswith("text/"))
            assert not MARKS.findall(text), text
            assert "Traceback" not in text


@each_notebook
def test_a_cell_that_shows_an_object_has_an_output(notebook: Path) -> None:
    for cell in read_cells(notebook):
        last = ast.parse("".join(cell["source"])).body[-1]
        is_shown = isinstance(last, ast.Expr) and isinstance(last.value, ast.Name | ast.Subscript)
        assert cell["outputs"] or not is_shown, f"run make outputs: {cell['id']} has none"


@each_notebook
def test_every_cell_has_an_id_and_the_notebook_says_what_it_is(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")


@pytest.mark.parametrize("path", [*NOTEBOOKS, *sorted(FOLDER.glob("*.py"))], ids=lambda path: path.name)
def test_it_imports_and_uses_only_what_a_user_has(path: Path) -> None:
    code = "\n".join(sources(path)) if path.suffix == ".ipynb" else path.read_text()
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for name in names:
            assert name in ("rmq_spark", "rmq_spark.store.testing.brokers") or name.split(".")[0] in {
                "matplotlib",
                "pandas",
                "pyspark",
                "demo_sink",  # beside demo.py
                *sys.stdlib_module_names,
            }
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), f"{path.name} uses {node.attr}"
            if isinstance(node.value, ast.Name) and node.value.id == "rmq_spark":
                assert node.attr in rmq_spark.__all__, f"{path.name} uses rmq_spark.{node.attr}"


def test_what_is_expected_of_notebooks_is_expected_of_those_that_are_there() -> None:
    assert [notebook.name[:2] for notebook in NOTEBOOKS] == list(PICTURES)


@each_notebook
def test_a_limit_of_time_in_a_notebook_only_ends_a_hang(notebook: Path) -> None:
    tree = ast.parse("\n".join(sources(notebook)))
    tests = [ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    timed = [test for test in tests if "monotonic()" in test]
    assert all(test.endswith("< HANG_S") for test in timed), timed
    values = [ast.literal_eval(value) for value in re.findall(r"(?m)^HANG_S = (\S+)", "\n".join(sources(notebook)))]
    assert values == [HANG_S] * (1 if timed else 0)


@pytest.mark.notebooks
@each_notebook
def test_a_notebook_runs_from_top_to_bottom(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the extra notebooks is not installed: make notebooks")
    nbclient = pytest.importorskip("nbclient", reason="the extra notebooks is not installed: make notebooks")
    for name in os.environ.keys() - BARE.keys() - {"PYTHONPATH"}:
        monkeypatch.delenv(name)
    read = nbformat.read(notebook, 4)
    monkeypatch.setenv("JDK_JAVA_OPTIONS", QUICK_JAVA)
    begun = time.monotonic()
    nbclient.NotebookClient(read, timeout=HANG_S, resources={"metadata": {"path": str(FOLDER)}}).execute()
    print(f"{notebook.name}: {time.monotonic() - begun:.0f} s")
    shown = [output.get("data", {}) for cell in read.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in one for one in shown) == PICTURES[notebook.name[:2]]
    assert any("text/html" in one for one in shown), "an object shows itself"
    assert not re.search(r"(?m)^Traceback", "".join(one.get("text/plain", "") for one in shown))


def count_of_user_topics(golden: Path) -> int:
    """Return how many messages the topics that `.*` matches have, after the decoder of tests/golden."""
    topics = json.loads((golden / "expected" / "demo.json").read_text())["topics"]
    return sum(
        queue["count"]
        for topic, queues in topics.items()
        if not topic.startswith(("%", "RMQ_SYS_", "SCHEDULE_TOPIC_"))
        for queue in queues.values()
    )


@pytest.mark.slow
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
