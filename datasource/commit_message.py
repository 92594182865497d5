"""What a task tells the commit: whose rows it staged, and where. Spark carries it to the driver, pickled."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage

from rmq_spark.store import CommitKey, StagedCopies, StagedFile


@dataclass(frozen=True, slots=True)
class StagedRows(WriterCommitMessage):
    """One task's staged rows: the batch that they belong to, as the task knows it, and their file."""

    key: CommitKey
    file: StagedFile | StagedCopies


def staged_keys(messages: Sequence[WriterCommitMessage | None]) -> list[CommitKey]:
    """Return whose rows the messages say were staged; a task that failed has no message."""
    return [message.key for message in messages if isinstance(message, StagedRows)]


def staged_files(messages: Sequence[WriterCommitMessage | None]) -> list[StagedFile | StagedCopies]:
    """Return the files that the messages name, in the order of the tasks."""
    return [message.file for message in messages if isinstance(message, StagedRows)]
