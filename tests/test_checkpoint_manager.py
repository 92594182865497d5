"""The checkpoint manager that session() chooses for a local master: what it promises, as docs/LOW_LATENCY.md says."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
OURS, SPARKS = "FileSystemBasedCheckpointFileManager", "FileContextBasedCheckpointFileManager"
WITHIN_S = 180


class Folder:
    """A folder of a checkpoint, and one of Spark's managers for it."""

    def __init__(self, spark: "SparkSession", path: Path, name: str) -> None:
        jvm: Any = spark._jvm
        self._path, self._at = path, jvm.org.apache.hadoop.fs.Path
        managers = jvm.org.apache.spark.sql.execution.streaming.checkpointing
        configuration = spark._jsparkSession.sessionState().newHadoopConf()
        self._manager = getattr(managers, name)(self._at(str(path)), configuration)

    def begin(self, name: str, byte: str, *, overwrites: bool = False) -> Any:
        """Begin to write a file of one byte, which appears with close()."""
        stream = self._manager.createAtomic(self._at(str(self._path / name)), overwrites)
        stream.write(ord(byte))
        return stream

    def files(self) -> dict[str, str]:
        """Return the contents of the files that are not hidden."""
        return {file.name: file.read_text() for file in self._path.iterdir() if not file.name.startswith(".")}


@pytest.mark.parametrize("name", [OURS, SPARKS])
def test_of_two_writers_of_a_file_one_fails(spark: "SparkSession", tmp_path: Path, name: str) -> None:
    folder = Folder(spark, tmp_path, name)
    one, other = folder.begin("0", "a"), folder.begin("0", "b")
    assert folder.files() == {}, "no file is visible before it is complete"
    one.close()
    with pytest.raises(Exception, match="already exists"):
        other.close()
    assert folder.files() == {"0": "a"}


@pytest.mark.parametrize("name", [OURS, SPARKS])
def test_a_file_that_is_cancelled_does_not_appear(spark: "SparkSession", tmp_path: Path, name: str) -> None:
    folder = Folder(spark, tmp_path, name)
    folder.begin("0", "a").cancel()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "left"), [(OURS, "a"), (SPARKS, "b")])
def test_only_sparks_manager_replaces_a_file(spark: "SparkSession", tmp_path: Path, name: str, left: str) -> None:
    folder = Folder(spark, tmp_path, name)
    folder.begin("0", "a").close()
    folder.begin("0", "b", overwrites=True).close()
    assert folder.files() == {"0": left}


def forget_commit(checkpoint: Path) -> None:
    """Make Spark repeat the last batch, as after a kill between the batch and its commit."""
    last = max(int(file.name) for file in (checkpoint / "commits").iterdir() if file.name.isdigit())
    for name in (str(last), f".{last}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)


def test_a_stateful_query_that_repeats_a_batch_counts_each_message_once(spark: "SparkSession", tmp_path: Path) -> None:
    store, checkpoint, counts = tmp_path / "store", tmp_path / "checkpoint", {}
    assert spark.conf.get(MANAGER).endswith(OURS)

    def note(batch: Any, batch_id: int) -> None:
        counts.update({row.queueId: row["count"] for row in batch.collect()})

    def run(messages: int) -> None:
        shutil.rmtree(store, ignore_errors=True)
        build_store(store, [SampleMessage("orders", number % 2, b"x") for number in range(messages)])
        reader = spark.readStream.format("rmq").options(subscribe="orders", columns="queueId")
        frame = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=6).load(str(store))
        writer = frame.groupBy("queueId").count().writeStream.outputMode("update").foreachBatch(note)
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(WITHIN_S)
        finally:
            query.stop()

    run(12)
    forget_commit(checkpoint)
    run(12)
    assert counts == {0: 6, 1: 6}
    run(20)
    assert counts == {0: 10, 1: 10}
