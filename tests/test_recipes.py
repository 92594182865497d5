"""The programs of docs/index.md and docs/recipes/ run from top to bottom, and print what the pages show.

The pages: index, disk_to_dataframe, running_cluster, exactly_once, retries, backfill_by_time, duckdb_and_polars. The
programs of airflow and kubernetes are parsed only.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rmq_spark.datasource.options.option_table import CONNECTION_OPTIONS, OPTIONS, SINK_OPTIONS
from rmq_spark.store import open_reader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RECIPES = DOCS / "recipes"
BLOCK = re.compile(r"(<!-- not run: .*?-->\s*)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_SPARK = ["disk_to_dataframe", "running_cluster", "exactly_once", "retries", "backfill_by_time"]
WITHOUT_SPARK = ["duckdb_and_polars"]
PARSED = ["airflow", "kubernetes"]
ADDRESS = "namesrv:9876"


def run(page: Path, address: str = ADDRESS) -> None:
    """Run the page's Python blocks in order, with the address of the cluster that it names."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for reason, language, code in BLOCK.findall(page.read_text()):
        if language == "python" and not reason:
            exec(compile(code.replace(ADDRESS, address), page.name, "exec"), namespace)


def check_shown(page: Path, printed: str) -> None:
    """Raise AssertionError unless the programs printed what the page shows."""
    for _, language, shown in BLOCK.findall(page.read_text()):
        if language == "text":
            assert shown in printed, f"{page.name} shows\n{shown}and its programs print\n{printed}"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of the name server of a cluster with 20 orders and the topic of the copies."""
    with RunningCluster(tmp_path / "cluster", brokers=1) as cluster:
        cluster.create_topic("orders", queues=2)
        for number in range(20):
            cluster.send("orders", f"order {number}")
        cluster.create_topic("paid-orders", queues=2)
        yield cluster.address


def test_every_recipe_is_run_or_parsed() -> None:
    pages = {page.stem for page in RECIPES.glob("*.md")}
    assert pages == {"index", *WITH_SPARK, *WITHOUT_SPARK, *PARSED}
    listed = set(re.findall(r"\]\((\w+)\.md\)", (RECIPES / "index.md").read_text()))
    assert listed == pages - {"index"}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("name", WITH_SPARK)
def test_a_recipe_runs(
    name: str,
    spark: "SparkSession",
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)  # their paths are relative
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(RECIPES / f"{name}.md", address)
    printed = capfd.readouterr().out
    check_shown(RECIPES / f"{name}.md", printed)


@pytest.mark.spark
def test_the_four_lines_of_the_first_page_run(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    run(DOCS / "index.md")
    assert "|cancelled|   72|" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_SPARK)
def test_a_recipe_without_spark_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    pytest.importorskip("polars", reason="polars is not installed")
    monkeypatch.chdir(ROOT)
    run(RECIPES / f"{name}.md")
    check_shown(RECIPES / f"{name}.md", capsys.readouterr().out)


@pytest.mark.parametrize("name", PARSED)
def test_a_program_for_another_service_is_python(name: str) -> None:
    blocks = [
        (reason, code)
        for reason, language, code in BLOCK.findall((RECIPES / f"{name}.md").read_text())
        if language == "python"
    ]
    assert blocks
    for reason, code in blocks:
        ast.parse(code)
        assert "a test parses it" in reason


@pytest.mark.parametrize("name", PARSED)
def test_a_program_for_another_service_has_only_options_that_exist(name: str) -> None:
    known = {option.name for option in (*CONNECTION_OPTIONS, *OPTIONS, *SINK_OPTIONS)} | {"checkpointLocation"}
    named = re.findall(r'\.option\("(\w+)"', (RECIPES / f"{name}.md").read_text())
    assert named
    assert set(named) <= known


def test_runs_of_airflow_have_an_interval() -> None:
    page = (RECIPES / "airflow.md").read_text()
    ((_, _, code),) = BLOCK.findall(page)
    (imported,) = re.findall(r"^from airflow\.sdk import (.*)$", code, re.MULTILINE)
    assert "CronDataIntervalTimetable" in imported.split(", "), 'with "@daily" begin and end of the interval are equal'
    assert "schedule=CronDataIntervalTimetable(" in code


def test_airflow_refuses_a_day_that_was_deleted(tmp_path: Path) -> None:
    ((_, _, code),) = BLOCK.findall((RECIPES / "airflow.md").read_text())
    (function,) = [one for one in ast.parse(code).body if getattr(one, "name", "") == "require_whole"]
    namespace: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "airflow.md", "exec"), namespace)
    require_whole = namespace["require_whole"]
    assert code.index("require_whole(reader, ") < code.index('.mode("overwrite")')
    first_ms = 1_600_000_000_000
    messages = [SampleMessage("orders", number % 2, b"x", store_timestamp=first_ms + number) for number in range(6)]
    build_store(tmp_path / "whole", messages)
    build_store(tmp_path / "cut", messages, first_offsets={QueueKey("orders", 1): 4})
    build_store(tmp_path / "gone", messages[::2], first_offsets={QueueKey("orders", 0): 4})
    with open_reader(tmp_path / "whole") as reader:
        require_whole(reader, "orders", first_ms - 1)
    with open_reader(tmp_path / "cut") as reader:
        require_whole(reader, "orders", first_ms + 1)
        with pytest.raises(RuntimeError, match="messages of orders may be deleted since"):
            require_whole(reader, "orders", first_ms)
    with open_reader(tmp_path / "gone") as reader, pytest.raises(RuntimeError):
        require_whole(reader, "orders", first_ms - 1)


def test_the_recipe_of_kubernetes_is_the_program_that_is_deployed() -> None:
    ((_, _, code),) = BLOCK.findall((RECIPES / "kubernetes.md").read_text())
    assert code == (ROOT / "deploy" / "kubernetes" / "orders_stream.py").read_text()
