"""Which batch of which query a task works for, and that all tasks of a commit say the same.

Only tasks learn the ids: Spark puts them among the local properties of a streaming query's jobs and tells a writer's
commit no more than the batch id. So they travel to the commit in the messages of the tasks.
"""

from collections.abc import Sequence

from rmq_spark.store import CommitKey
from rmq_spark.store.errors import BatchConflictError

# Local properties of a streaming query's tasks (MicroBatchExecution.BATCH_ID_KEY, StreamExecution.QUERY_ID_KEY; 4.3).
QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"


def key_of_task(query_id: str | None, batch_id: str | None) -> CommitKey:
    """Return the key of a streaming query's batch, from the two local properties of one of its tasks.

    Raises BatchConflictError if one of them is missing: without them a repeated batch would be written twice.
    """
    if not query_id or not (batch_id or "").isdecimal():
        raise BatchConflictError(
            f"Spark did not say which batch of which query this task writes: {QUERY_ID_PROPERTY}={query_id!r}, "
            f"{BATCH_ID_PROPERTY}={batch_id!r}. Without both a repeated batch would be written twice, so nothing was "
            "written. Write with writeStream of PySpark 4.3 or newer, or in foreachBatch with txnAppId and txnVersion."
        )
    return CommitKey(query_id, int(batch_id or ""))


def key_of_commit(keys: Sequence[CommitKey], task_count: int, batch_id: int | None) -> CommitKey:
    """Return the one key that all tasks of a commit named; `keys` are those of the messages that came.

    `batch_id` is what Spark commits, None for what is no batch of a stream. Raises BatchConflictError where a task sent
    no message, or where the keys differ from each other or from the batch id.
    """
    what = "the write" if batch_id is None else f"batch {batch_id}"
    if len(keys) != task_count or not keys:
        raise BatchConflictError(
            f"{what} cannot be committed: {len(keys)} of {task_count} tasks said what they staged. Nothing was "
            "written. Start it again."
        )
    different = sorted({str(key) for key in keys})
    if len(different) > 1 or batch_id not in (None, keys[0].batch_id):
        raise BatchConflictError(
            f"{what} cannot be committed: its tasks staged {', and '.join(different)}. Nothing was written. "
            "Start it again."
        )
    return keys[0]
