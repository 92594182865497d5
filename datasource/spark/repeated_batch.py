"""The batch that a query repeats when it starts again, as its checkpoint shows it.

Spark writes the offsets of a batch to `offsets/N` before the batch runs, and `commits/N` when it has ended. If the last
of the first has none of the second, the next run repeats this batch, with the same number and the same offsets. The
file of the offsets also has the time at which the batch was planned, `batchTimestampMs`, by the clock of the driver. It
is read with Hadoop's file systems, as Spark reads it, so the checkpoint may be wherever Spark can have it.

Source: MicroBatchExecution#populateStartOffsets, HDFSMetadataLog, OffsetSeqMetadata (Spark 4.3).
"""

import json
import logging
from typing import TYPE_CHECKING, Any

from rmq_spark.store.backend import RepeatedBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("rmq_spark")
_SHOWN_WORDS = 60  # of an error, whose text has the stack of the JVM


def find_repeated_batch(spark: "SparkSession", checkpoint_location: str) -> RepeatedBatch | None:
    """Return the batch that a query with this checkpoint will repeat, or None if it will repeat none.

    Also returns None, with a warning in the log, if the checkpoint cannot be read. Reads on the driver; thread-safe.
    """
    try:
        return _Checkpoint(spark, checkpoint_location).repeated_batch()
    except Exception as error:  # file systems raise any type
        _LOG.warning(
            "rmq: cannot read the checkpoint %s, and if the query repeats a batch, may send failed messages of it back "
            "twice: %s: %s",
            checkpoint_location,
            type(error).__name__,
            " ".join(str(error).split()[:_SHOWN_WORDS]),
        )
        return None


class _Checkpoint:
    """The folder of a checkpoint."""

    def __init__(self, spark: "SparkSession", location: str) -> None:
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._path = jvm.org.apache.hadoop.fs.Path
        self._root = self._path(location)
        self._files = self._root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def repeated_batch(self) -> RepeatedBatch | None:
        """Return the batch that was planned and has not ended."""
        planned = self._last("offsets")
        if planned is None or planned == self._last("commits"):
            return None
        # The first line is the version of the format, the second one the metadata, and the others are the offsets.
        metadata = json.loads(self._read("offsets", planned).split("\n")[1])
        return RepeatedBatch(planned, int(metadata["batchTimestampMs"]))

    def _last(self, folder: str) -> int | None:
        """Return the highest number of a batch in a folder. None if the folder does not exist, or has no batch."""
        path = self._path(self._root, folder)
        if not self._files.exists(path):
            return None
        names = [status.getPath().getName() for status in self._files.listStatus(path)]
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def _read(self, folder: str, batch_id: int) -> str:
        stream = self._files.open(self._path(self._path(self._root, folder), str(batch_id)))
        try:
            text: str = self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        return text
