"""The pytest plugin, as other projects use it: each test starts a pytest of its own, and docs/TESTING.md is run.

An editable installation may be older than the entry point, so the plugin is named with `-p`.
"""

import configparser
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.embedded import EmbeddedCluster, EmbeddedStore
from rmq_spark.store.testing.pytest_plugin import _ARGUMENTS

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PLUGIN = "rmq_spark.store.testing.pytest_plugin"
BLOCKS = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

RunPytest = Callable[..., subprocess.CompletedProcess[str]]
EXAMPLES = BLOCKS.findall((ROOT / "docs" / "TESTING.md").read_text())


@pytest.fixture
def run_pytest(tmp_path: Path) -> RunPytest:
    """A function that runs a module of tests in a pytest of its own, in an empty folder."""

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_of_user.py").write_text(code)
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", PLUGIN, "-W", "error", "--strict-markers"]
        return subprocess.run(
            [*command, f"--basetemp={tmp_path / 'temp'}", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.wheel
def test_the_entry_point_names_the_plugin() -> None:
    cfg = configparser.ConfigParser(interpolation=None)
    cfg.read(ROOT / "setup.cfg")
    (line,) = cfg["options.entry_points"]["pytest11"].strip().split("\n")
    assert line == f"rmq_spark = {PLUGIN}"
    installed = [one.value for one in entry_points(group="pytest11") if one.name == "rmq_spark"]
    is_wheel = "site-packages" in Path(rmq_spark.__file__).parts
    assert installed == [PLUGIN] or (not installed and not is_wheel), "an editable installation may be older"


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        f"import sys, {PLUGIN}; "
        "print([name for name in sys.modules if name.partition('.')[0] in ('pyspark', 'numpy', 'pyarrow') "
        "or name.startswith('rmq_spark.store.') and 'testing' not in name])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", [code for code in EXAMPLES if "spark.readStream" not in code])
def test_examples_of_TESTING_pass(run_pytest: RunPytest, code: str) -> None:
    run = run_pytest(code)
    assert run.returncode == 0, run.stdout
    assert re.search(r"^[12] passed", run.stdout, re.MULTILINE), run.stdout


@pytest.mark.slow
def test_the_spark_example_of_TESTING_passes(run_pytest: RunPytest) -> None:
    (code,) = (code for code in EXAMPLES if "spark.readStream" in code)
    run = run_pytest(code, "-W", "default")  # what Spark warns of is not ours
    assert run.returncode == 0, run.stdout


def test_the_mark_lists_its_arguments_if_another_is_given(run_pytest: RunPytest) -> None:
    given = ["(2)", "(broker=2)", "(2, release='4.9')"]
    tests = [
        f"@pytest.mark.rmq_cluster{one}\ndef test_{number}(rmq_cluster):\n    pass" for number, one in enumerate(given)
    ]
    run = run_pytest("\n\n\n".join(["import pytest", *tests]))
    assert "3 errors" in run.stdout, run.stdout
    for one in given:
        assert (
            f"the mark rmq_cluster has no such arguments: found {one}; expected some of brokers, name_s" in run.stdout
        )
    assert "Traceback" not in run.stdout


def test_the_arguments_of_the_mark_are_those_of_RunningCluster() -> None:
    parameters = inspect.signature(RunningCluster).parameters
    assert set(_ARGUMENTS) == parameters.keys() - {"folder", "tls"}


@pytest.mark.slow
def test_an_error_of_a_server_fails_the_test_that_met_it(run_pytest: RunPytest) -> None:
    code = """
from rmq_spark.store.testing.backend_groups import eventually


def test_fault(rmq_cluster):
    def fail():
        raise RuntimeError("a planted fault")

    rmq_cluster.running.loop.run(lambda: rmq_cluster.running.loop.call_later(0, fail))
    assert eventually(lambda: rmq_cluster.running.loop.errors)
"""
    run = run_pytest(code)
    assert run.returncode == 1
    assert "a planted fault" in run.stdout
    assert "1 passed, 1 error" in run.stdout


def test_EmbeddedStore_sends_and_reads(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store")
    assert store.options == {"path": store.path}
    store.create_topic("orders", queues=2)
    places = store.send("orders", b"one", "zwei €", queueId=1, keys=["a", "b"], properties={"x": "1"}, tags="T")
    assert places == [(1, 0), (1, 1)]
    rows = store.messages("orders")
    assert [row["body"] for row in rows] == [b"one", "zwei €".encode()]
    assert (rows[0]["queueId"], rows[0]["tags"], rows[0]["keys"]) == (1, "T", "a b")
    assert rows[0]["properties"]["x"] == "1"
    assert store.messages("orders", columns=["queueOffset"]) == [{"queueOffset": 0}, {"queueOffset": 1}]


def test_EmbeddedStore_refuses_what_is_unknown(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store")
    with pytest.raises(OptionError, match="send: no such column: tag; expected columns of tags, keys"):
        store.send("orders", "x", tag="T")
    with pytest.raises(NotFoundError):
        store.messages("orders")


@pytest.mark.parametrize("release", ["4.9", "5.3"])
def test_EmbeddedCluster_sends_and_reads_over_the_wire(tmp_path: Path, release: str) -> None:
    before = set(threading.enumerate())
    with EmbeddedCluster(tmp_path / "cluster", brokers=2, release=release) as cluster:
        assert cluster.options == {"nameServer": cluster.name_server}
        cluster.create_topic("orders", queues=1)
        sent = cluster.send("orders", "one", "two", tags="T", properties={"x": "1"})
        assert sorted(sent) == [("broker-a", 0, 0), ("broker-b", 0, 0)]
        rows = cluster.messages("orders", columns=["brokerName", "body", "tags", "properties"])
        assert sorted(row["body"] for row in rows) == [b"one", b"two"]
        assert {(row["tags"], row["properties"]["x"]) for row in rows} == {("T", "1")}
        assert [row["brokerName"] for row in rows] == ["broker-a", "broker-b"]
        with pytest.raises(NotFoundError):
            cluster.messages("payments")
    assert set(threading.enumerate()) == before


def test_EmbeddedCluster_refuses_another_release(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"release='6\.0'; expected one of 4\.9, 5\.3"):
        EmbeddedCluster(tmp_path / "cluster", release="6.0")
