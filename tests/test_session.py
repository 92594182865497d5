"""A session starts from any shell, reads the source at once, and can be asked for twice."""

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

# What a login shell without an activated environment has.
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


def test_registering_twice_does_no_harm(spark: "SparkSession") -> None:
    rmq_spark.register(spark)
    rmq_spark.register(spark)


@pytest.mark.wheel
def test_a_script_started_from_a_bare_shell_reads_a_store(golden: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import rmq_spark\n"
        "spark = rmq_spark.session(master='local[1]', conf={'spark.log.level': 'ERROR'})\n"
        f"rows = spark.read.format('rmq').option('path', {str(golden / 'demo')!r})\n"
        "rows = rows.option('subscribePattern', '.*').load()\n"
        "print('rows:', rows.count() > 0, spark.conf.get('spark.driver.host'))\n"
        "spark.stop()\n"
    )
    run = subprocess.run([sys.executable, script], cwd=tmp_path, env=BARE, capture_output=True, text=True)
    assert "rows: True 127.0.0.1" in run.stdout, run.stderr
