"""What a task of an orderly listener has to know of its queues: which rows failed, and which are dead letters.

What an outcome says of dead letters is written before they are. So whose batch was not committed, or is being repeated,
may not have them in the store: then they are made again, which costs nothing where they are there (`sent_rows.py`).
"""

from collections.abc import Mapping

from rmq_spark.store.commit.keys import CommitKey
from rmq_spark.store.delivery.sent_rows import SentRows
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.group.suspended import Suspension, read_suspended
from rmq_spark.store.units import QueueKey


def read_stopped_queues(root: str, group: str, key: CommitKey) -> Mapping[QueueKey, tuple[Suspension, bool]]:
    """Return the stopped queues of a group for a task of the batch `key`, and of each whether it is settled.

    It is if those that its batch made dead letters are in the store for sure. Takes no lock. Raises DamageError, and
    StoreError for files of a newer release.
    """
    return {queue: (one, _is_settled(root, one, key)) for queue, one in read_suspended(root, group).queues.items()}


def _is_settled(root: str, one: Suspension, key: CommitKey) -> bool:
    if not one.dead:
        return True
    batch = CommitKey(one.query_id, one.batch_id)
    return batch != key and SentRows(root, Disk(), batch).look().batch_id >= one.batch_id
