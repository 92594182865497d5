"""session(): what it sets for low latency, and what it leaves as the user set it. Each case is a program of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

CHECKPOINTS = "spark.sql.streaming.checkpointFileManagerClass"
DAEMON = "spark.python.daemon.module"
OURS = {
    CHECKPOINTS: "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
    DAEMON: "rmq_spark.datasource.spark.worker_daemon",
    "spark.ui.enabled": "false",
    "spark.sql.python.filterPushdown.enabled": "true",
}
THEIRS = {
    CHECKPOINTS: "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager",
    DAEMON: "pyspark.daemon",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.sql.python.filterPushdown.enabled": "false",
}
# Prints the settings and, as a worker sees them, the daemon's command and threads, and a part of the environment.
SHOW = """
import json, os, sys
def look(_):
    daemon = f"/proc/{os.getppid()}"
    command = open(f"{daemon}/cmdline").read().split(chr(0))
    module = command[command.index("-m") + 1]
    names = [name for name in os.environ if "MALLOC" in name or "THREADS" in name]
    return [module, len(os.listdir(f"{daemon}/task")), names, "pyarrow" in sys.modules, os.getppid()]
settings = dict(spark.sparkContext.getConf().getAll()) | spark.conf.getAll
print(json.dumps([settings, spark.sparkContext.parallelize([0], 1).map(look).first()]))
"""
BEGIN = "import rmq_spark\nspark = rmq_spark.session(master='local[1]', conf={'spark.log.level': 'ERROR', **CONF})\n"


def run(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(program + SHOW)
    ours = {name: value for name, value in os.environ.items() if name != "_RJEM_MALLOC_CONF"}  # set by polars
    environment = {**ours, **environment}
    return subprocess.run([sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True)


def shown(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, str], list[object]]:
    assert done.returncode == 0, done.stderr
    settings, worker = json.loads(done.stdout)  # and nothing else was printed
    return settings, worker


def test_a_local_session_writes_checkpoints_without_chmod_and_forks_loaded_workers(tmp_path: Path) -> None:
    done = run(tmp_path, "CONF = {}\n" + BEGIN)
    settings, (daemon, threads, names, is_loaded, _) = shown(done)
    assert {name: settings.get(name) for name in OURS} == OURS
    assert (daemon, threads, is_loaded) == (OURS[DAEMON], 1, True)
    assert names == ["OMP_NUM_THREADS"], "of Spark"
    assert "rmq" not in done.stderr, "only Spark prints something"


def test_what_conf_contains_is_not_overridden(tmp_path: Path) -> None:
    settings, (daemon, *_) = shown(run(tmp_path, f"CONF = {THEIRS}\n" + BEGIN))
    assert {name: settings.get(name) for name in THEIRS} == THEIRS
    assert daemon == "pyspark.daemon"


def test_what_spark_defaults_contain_is_not_overridden(tmp_path: Path) -> None:
    lines = [f"{name} {value}\n" for name, value in THEIRS.items()]
    (tmp_path / "spark-defaults.conf").write_text("".join(lines))
    settings, _ = shown(run(tmp_path, "CONF = {}\n" + BEGIN, SPARK_CONF_DIR=str(tmp_path)))
    assert {name: settings.get(name) for name in THEIRS} == THEIRS


def test_what_an_active_session_has_is_not_overridden(tmp_path: Path) -> None:
    theirs = {name: value for name, value in THEIRS.items() if name.startswith("spark.sql")}
    program = (
        "from pyspark.sql import SparkSession\n"
        "import rmq_spark\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "before = spark.conf.getAll\n"
        "rmq_spark.register(spark)\n"
        "assert spark.conf.getAll == before, 'register() changes no configuration'\n"
        f"for name, value in {theirs}.items():\n"
        "    spark.conf.set(name, value)\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "assert ThreadPoolExecutor(1).submit(rmq_spark.session).result() is spark, 'where no session is active'\n"
        "assert rmq_spark.session() is spark\n"
    )
    settings, (daemon, *_) = shown(run(tmp_path, program))
    assert {name: settings.get(name) for name in theirs} == theirs
    assert daemon == "pyspark.daemon"


def test_with_several_blas_threads_the_daemon_is_pysparks(tmp_path: Path) -> None:
    done = run(tmp_path, "CONF = {'spark.executorEnv.OMP_NUM_THREADS': '2'}\n" + BEGIN)
    _, (daemon, threads, names, is_loaded, _) = shown(done)
    assert (daemon, threads, is_loaded) == ("pyspark.daemon", 1, False)
    assert names == ["OMP_NUM_THREADS"]


def test_workers_that_cannot_import_the_package_still_run(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -P -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    import pyspark

    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(pyspark.__file__).parent.parent.iterdir():
        if "rmq" not in path.name:
            (packages / path.name).symlink_to(path)
    program = f"CONF = {{'spark.executorEnv.PYTHONPATH': {str(packages)!r}}}\n" + BEGIN
    settings, (daemon, *_) = shown(run(tmp_path, program, PYSPARK_PYTHON=str(tmp_path / "python")))
    assert (daemon, DAEMON in settings) == ("pyspark.daemon", False)
