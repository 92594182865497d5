"""session(): starts from any shell, reads the source at once, and can be called twice."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rmq_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

# The environment of a login shell without an activated virtual environment.
BARE = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}


def test_asked_for_again_it_is_the_same_session(spark: "SparkSession") -> None:
    again = rmq_spark.session("another name", conf={"spark.sql.shuffle.partitions": "2"})
    assert again.sparkContext is spark.sparkContext


def test_python_workers_run_this_interpreter_unless_told_otherwise(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", "chosen-by-the-user")
    rmq_spark.session()
    assert os.environ["PYSPARK_PYTHON"] == "chosen-by-the-user"
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable


def test_a_local_session_listens_on_the_loopback_address_only(spark: "SparkSession") -> None:
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.conf.get("spark.ui.enabled") == "false"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The sources that are registered during the test."""
    from pyspark.sql.datasource import DataSourceRegistration

    classes: list[type] = []
    real = DataSourceRegistration.register

    def register(self: DataSourceRegistration, source: type) -> None:
        classes.append(source)
        real(self, source)

    monkeypatch.setattr(DataSourceRegistration, "register", register)
    return classes


def test_a_session_that_has_the_source_gets_it_no_second_time(spark: "SparkSession", registered: list[type]) -> None:
    session = spark.newSession()
    rmq_spark.register(session)
    rmq_spark.register(session)
    assert registered == [], "Spark warns of each"


def test_another_source_of_the_same_name_is_replaced(
    spark: "SparkSession", registered: list[type], golden: Path
) -> None:
    from pyspark.sql.datasource import DataSource

    class Other(DataSource):
        @classmethod
        def name(cls) -> str:
            return "rmq"

    session = spark.newSession()
    session.dataSource.register(Other)
    rmq_spark.register(session)
    assert [source.__name__ for source in registered] == ["Other", "RmqDataSource"]
    rows = session.read.format("rmq").option("path", str(golden / "demo")).option("subscribe", "orders").load()
    assert rows.count() == 1170


@pytest.mark.slow
def test_a_script_that_ends_with_the_stop_of_a_query_publishes_its_last_batch(tmp_path: Path) -> None:
    store, script = tmp_path / "store", tmp_path / "script.py"
    with rmq_spark.open_store(store, queues=1, segment_bytes=1 << 16) as messages:
        messages.send("orders", "x")
    script.write_text(
        "import time, rmq_spark\n"
        "spark = rmq_spark.session(master='local[1]', conf={'spark.log.level': 'WARN'})\n"
        "orders = spark.readStream.format('rmq').option('subscribe', 'orders').option('consumerGroup', 'billing')\n"
        f"orders = orders.option('startingOffsets', 'earliest').load({str(store)!r})\n"
        "query = orders.writeStream.format('noop').trigger(processingTime='1 hour')\n"
        f"query = query.option('checkpointLocation', {str(tmp_path / 'checkpoint')!r}).start()\n"
        "while not query.lastProgress:\n"
        "    time.sleep(0.05)\n"
        "query.stop()\n"
    )
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert rmq_spark.group_offsets(store, "billing") == {"orders": {0: 1}}, run.stderr
    assert "Py4JException" not in run.stderr


@pytest.mark.slow
@pytest.mark.wheel
def test_a_script_started_from_a_bare_shell_reads_a_store(golden: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import rmq_spark\n"
        "spark = rmq_spark.session(master='local[1]', conf={'spark.log.level': 'WARN'})\n"
        f"rows = spark.read.format('rmq').option('path', {str(golden / 'demo')!r})\n"
        "rows = rows.option('subscribePattern', '.*').load()\n"
        "print('rows:', rows.count() > 0, spark.conf.get('spark.driver.host'))\n"
        "spark.stop()\n"
    )
    run = subprocess.run([sys.executable, script], cwd=tmp_path, env=BARE, capture_output=True, text=True)
    assert "rows: True 127.0.0.1" in run.stdout, run.stderr
    assert "DataSourceManager" not in run.stderr, "Spark warns that the source is registered over itself"


@pytest.mark.slow
@pytest.mark.wheel
def test_a_session_of_the_users_own_reads_with_the_interpreter_that_was_called_by_its_path(
    golden: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, rmq_spark\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "spark.sparkContext.setLogLevel('ERROR')\n"
        "if sys.argv[1] == 'register':\n"
        "    rmq_spark.register(spark)\n"
        "else:\n"
        "    rmq_spark.session()\n"
        f"rows = spark.read.format('rmq').load({str(golden / 'demo')!r}, subscribe='orders', handOverBytes='0')\n"
        "print('rows:', rows.count(), spark.sparkContext.pythonExec == sys.executable)\n"
        "spark.stop()\n"
    )
    (tmp_path / "bin").mkdir()
    wrong = tmp_path / "bin" / "python3"  # a Python without the packages of this one
    wrong.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
    wrong.chmod(0o755)
    environment = BARE | {"PATH": f"{tmp_path / 'bin'}:{BARE['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    for how in ("register", "session"):
        command = [sys.executable, script, how]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert "rows: 1170 True" in run.stdout, run.stderr


_QUIET = """
import sys, rmq_spark

# Spark shows the progress of a job that takes half a second.
spark = rmq_spark.session(master="local[1]", conf={"spark.ui.showConsoleProgress": "false"})
print(spark.range(3).count())
"""


def _start(**more: str) -> tuple[str, list[str]]:
    """Start a session in another process. Return what it prints, and the lines of its standard error."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", _QUIET], env={**BARE, **_import_path(), **more}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr.splitlines()


def _import_path() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


@pytest.mark.slow
def test_a_session_prints_nothing_of_its_own() -> None:
    assert _start() == ("3\n", [])


@pytest.mark.slow
def test_what_prevents_the_start_of_java_is_shown() -> None:
    variables = BARE | _import_path() | {"SPARK_SUBMIT_OPTS": "-Xmx0x"}
    run = subprocess.run([sys.executable, "-P", "-c", _QUIET], env=variables, capture_output=True, text=True)
    assert run.returncode != 0
    assert "Invalid maximum heap size: -Xmx0x" in run.stderr
    assert "JAVA_GATEWAY_EXITED" in run.stderr


@pytest.mark.slow
def test_a_configuration_of_log4j_of_the_user_decides(tmp_path: Path) -> None:
    text = (Path(rmq_spark.__file__).parent / "log4j2.properties").read_text()
    (tmp_path / "log4j2.properties").write_text(text.replace("rootLogger.level = warn", "rootLogger.level = info"))
    printed, lines = _start(SPARK_CONF_DIR=str(tmp_path))
    assert printed == "3\n"
    assert lines[0] == 'Setting default log level to "WARN".', "Spark says so where the level is another one"
