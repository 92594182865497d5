"""Writes from executors that die, fail and are doubled: tasks run again, and every row comes out once.

local-cluster has executors of its own, but all on one host, where Spark starts no second attempt of a slow task. So
that is tried on a cluster of two workers with two loopback addresses.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyspark
import pytest

import rmq_spark
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from tests.torture.conftest import Life

pytestmark = pytest.mark.spark

Start = Callable[..., "Life"]

STARTS_WITHIN_S = 120
ENDS_WITHIN_S = 600
EXECUTOR = "CoarseGrainedExecutorBackend"
CLUSTER = "local-cluster[2,1,1024]"
LOOPBACK = {"SPARK_LOCAL_IP": "127.0.0.1"}
SPECULATION = (
    "spark.speculation=true",
    "spark.speculation.interval=100ms",
    "spark.speculation.quantile=0.5",
    "spark.speculation.multiplier=1.5",
    "spark.speculation.minTaskRuntime=500ms",
)


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    """Spark's folder by links: executors write beside it, and not into an installed package."""
    home = tmp_path / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).resolve().parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


def read_bodies(path: Path) -> list[int]:
    """Return the numbers in the bodies of all messages."""
    found = []
    with rmq_spark.open_reader(str(path)) as store:
        for queue in store.queues("orders"):
            for batch in store.read(queue, 0, store.bounds(queue).max_offset, ["body"], check_crc=True):
                found += [int(body) for body in batch.column("body").to_pylist()]
    return sorted(found)


def staged_files(store: Path) -> list[Path]:
    return list((store / "rmq" / "staging").rglob("*.arrow"))


def kill_executors(start: Start, folder: Path, home: Path, seed: int, kills: int) -> None:
    """Run a pipeline to its end while executors are killed; look at what it wrote."""
    random = Random(seed)
    count = 100 + 100 * kills
    build_store(folder / "source", [SampleMessage("orders", n % 3, f"{n}".encode()) for n in range(count)])
    paths = [str(folder / name) for name in ("source", "store", "checkpoint")]
    options = ("spark.task.maxFailures=100", "spark.deploy.maxExecutorRetries=-1")
    life = start("pipeline_life.py", CLUSTER, *paths, *options, SPARK_HOME=str(home), **LOOPBACK)
    assert life.wait_for("started", STARTS_WITHIN_S), life.log.read_text(errors="replace")
    killed = 0
    while killed < kills and life.wait(random.uniform(0.5, 4)) is None:
        executors = life.members("java", EXECUTOR)
        if executors:
            life.kill([random.choice(executors)])
            killed += 1
            print(f"seed {seed}: executor {killed}")
    assert life.wait(ENDS_WITHIN_S) == 0, life.log.read_text(errors="replace")
    assert killed, "nothing was killed: it was over too soon"
    assert read_bodies(folder / "store") == list(range(count)), f"seed {seed}, {killed} kills"


@pytest.mark.torture(minutes=1.5)
def test_a_pipeline_whose_executors_are_killed_copies_every_message_once(
    start: Start, tmp_path: Path, spark_home: Path, run_seed: int
) -> None:
    kill_executors(start, tmp_path, spark_home, run_seed, kills=2)


@pytest.mark.torture(minutes=4)
@pytest.mark.parametrize("seed", range(5))
def test_pipelines_whose_executors_are_killed_for_long_copy_every_message_once(
    start: Start, tmp_path: Path, spark_home: Path, seed: int
) -> None:
    kill_executors(start, tmp_path, spark_home, seed, kills=20)


@pytest.mark.torture(minutes=3)
def test_what_failed_and_doubled_attempts_staged_is_written_once(
    start: Start, tmp_path: Path, spark_home: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"spark://127.0.0.1:{free.getsockname()[1]}"
    environment = {"SPARK_HOME": str(spark_home), "SPARK_NO_DAEMONIZE": "1"}
    run = [str(spark_home / "bin" / "spark-class")]
    start("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", master.rpartition(":")[2],
          "--webui-port", "0", command=run, **environment, **LOOPBACK)  # fmt: skip
    for host in ("127.0.0.1", "127.0.0.2"):
        start("worker", "org.apache.spark.deploy.worker.Worker", "--host", host, "--cores", "2", "--memory", "1g",
              "--webui-port", "0", "--work-dir", str(tmp_path / host), master, command=run,
              **environment, SPARK_LOCAL_IP=host)  # fmt: skip
    store, notes, writes = tmp_path / "store", tmp_path / "notes", 20
    notes.mkdir()
    options = (*SPECULATION, "spark.executor.memory=600m", "spark.executor.cores=2")
    arguments = (master, str(store), str(notes), str(writes), *options)
    life = start("speculation_life.py", *arguments, **environment, **LOOPBACK)
    assert life.wait(ENDS_WITHIN_S) == 0, life.log.read_text(errors="replace")
    assert life.says("done")
    attempts = {file.name for file in notes.iterdir()}
    assert {f"{write}-{partition}-1" for write in range(writes) for partition in (1, 2)} <= attempts
    assert read_bodies(store) == list(range(writes * 200))
    print(f"{len(staged_files(store))} files left by attempts that were not chosen")
