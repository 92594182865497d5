"""Spark finds format("rmq") automatically, and the file for that does not affect other programs."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).resolve().parent.parent.parent
SHIM = ROOT / "pyspark_rmq.py"


def run_python(
    *arguments: str | Path, cwd: Path, path: str | Path = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in another folder, with only `path` of our code on sys.path."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(path), "PYSPARK_PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
    )


def installed_path() -> str:
    """Return what PYTHONPATH must name for Spark to list pyspark_rmq: nothing, if it is a wheel.

    An editable install uses an import hook, which does not list modules; the checkout itself does.
    """
    import pyspark_rmq

    return "" if "site-packages" in pyspark_rmq.__file__ else str(ROOT)


@pytest.mark.slow
@pytest.mark.spark
def test_a_session_that_nobody_told_of_it_reads_and_may_register_it_later(golden: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')"
        ".config('spark.driver.host', '127.0.0.1').getOrCreate()\n"
        "def count():\n"
        "    reader = spark.read.format('rmq').option('subscribePattern', '.*')\n"
        f"    return reader.load({str(golden / 'demo')!r}).count()\n"
        "found = count()\n"
        "import rmq_spark\n"
        "rmq_spark.register(spark)\n"
        "print('same and some:', count() == found > 0)\n"
        "spark.stop()\n"
    )
    run = run_python(script, cwd=tmp_path, path=installed_path())
    assert "same and some: True" in run.stdout, run.stderr


def test_spark_s_own_look_up_takes_the_class_and_pickles_it() -> None:
    from pyspark import cloudpickle
    from pyspark.sql.datasource import DataSource

    import pyspark_rmq

    source = pyspark_rmq.DefaultSource
    assert issubclass(source, DataSource)
    assert source.name() == "rmq"
    assert pickle.loads(cloudpickle.dumps(source)) is source


def test_an_instance_is_the_real_source() -> None:
    import pyspark_rmq
    from rmq_spark.datasource.spark.source import RmqDataSource

    options = {"path": "somewhere", "subscribe": "orders"}
    assert type(pyspark_rmq.DefaultSource(options=options)) is RmqDataSource


def test_importing_it_loads_no_engine(tmp_path: Path) -> None:
    code = (
        "import sys, pyspark_rmq; pyspark_rmq.DefaultSource.name(); "
        "print([m for m in ('numpy', 'pyarrow', 'rmq_spark') if m in sys.modules])"
    )
    run = run_python("-c", code, cwd=tmp_path, path=installed_path())
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize(
    "line",
    [
        "raise ModuleNotFoundError('no pyspark here')",
        "raise AttributeError('a pyspark that this Python breaks')",
        "DataSauce = 0",
    ],
)
def test_without_a_usable_pyspark_it_imports_all_the_same(line: str, tmp_path: Path) -> None:
    package = tmp_path / "pyspark" / "sql"
    package.mkdir(parents=True)
    (tmp_path / "pyspark" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "datasource.py").write_text(line)
    (tmp_path / SHIM.name).write_text(SHIM.read_text())
    code = "import pyspark_rmq; print(hasattr(pyspark_rmq, 'DefaultSource'))"
    run = run_python("-c", code, cwd=tmp_path, path=tmp_path)
    assert run.stdout.strip() == "False", run.stderr


def test_where_only_the_shim_is_installed_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / SHIM.name).write_text(SHIM.read_text())
    (tmp_path / "rmq_spark.py").write_text("raise ImportError('half installed')")
    code = "import pyspark_rmq; pyspark_rmq.DefaultSource(options={})"
    run = run_python("-c", code, cwd=tmp_path, path=tmp_path)
    assert "cannot import rmq_spark: half installed" in run.stderr
    assert "pip install rmq-spark" in run.stderr
    assert sys.executable in run.stderr
