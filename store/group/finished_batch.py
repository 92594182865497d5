"""The last batch that a member finished: `members/<member id>.finished`, which the member's driver writes.

The reader of a query runs in a process of its own. Spark calls it when the next batch is planned, and does not say when
a batch ends. The driver hears of the end from Spark's listener. It publishes the batch's offsets, and then records the
batch's number here, where the reader's process finds it. Numbers count the batches that the member planned.

The file is written without a sync: a power cut ends the member too.
"""

from typing import Any

from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.group.group_paths import GroupPaths

_NEXT_STEP = "Remove the file: the member's driver writes it again after the next batch."


def write_finished_batch(paths: GroupPaths, disk: Disk, member_id: str, batch: int) -> None:
    """Record that a member finished the batch `batch`, and that the batch's offsets are published.

    The caller has the group's turn. Raises what the disk raises.
    """
    disk.replace_unsynced(paths.finished_batch(member_id), encode_side_file({"batch": batch}))


def read_finished_batch(paths: GroupPaths, member_id: str) -> int:
    """Return the number of the last batch that was recorded, 0 without one. A file that cannot be read counts as none.

    Takes no lock.
    """
    try:
        return (
            read_side_file(paths.finished_batch(member_id), "a member's last finished batch", _NEXT_STEP, _build) or 0
        )
    except StoreError:
        return 0


def _build(fields: dict[str, Any]) -> int:
    return number_of(fields, "batch", least=1)
