"""The last batch that a member planned, and the last one that it finished: two files beside the member's own.

| file | written by | when |
| --- | --- | --- |
| `members/<member id>.planned` | the member's reader | a batch is planned, before Spark knows of it |
| `members/<member id>.finished` | the member's driver | the batch's offsets are published |

The reader of a query runs in a process of its own. Spark calls it when the next batch is planned, and does not say when
a batch ends. The driver hears of the end from Spark's listener. It publishes the batch's offsets, and then records the
batch's number, which the reader's process finds. Spark's events may come late, when the member works on a later batch
already. By the number of the last planned batch the driver recognizes such an event. Numbers count the batches that the
member planned.

The files are written without a sync: a power cut ends the member too.
"""

from typing import Any

from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.group.group_paths import GroupPaths

_NEXT_STEP = "Remove the file: the member's driver writes it again after the next batch."
_NEXT_PLANNED = "Remove the file: the member's reader writes it again with the next batch."


def write_finished_batch(paths: GroupPaths, disk: Disk, member_id: str, batch: int) -> None:
    """Record that a member finished the batch `batch`, and that the batch's offsets are published.

    The caller has the group's turn. Raises what the disk raises.
    """
    disk.replace_unsynced(paths.finished_batch(member_id), encode_side_file({"batch": batch}))


def write_planned_batch(paths: GroupPaths, disk: Disk, member_id: str, batch: int) -> None:
    """Record that a member has planned the batch `batch`. For its reader. Raises what the disk raises."""
    disk.replace_unsynced(paths.planned_batch(member_id), encode_side_file({"batch": batch}))


def read_planned_batch(paths: GroupPaths, member_id: str) -> int:
    """Return the number of the last batch that a member has planned, 0 for none. Takes no lock. Raises DamageError."""
    path = paths.planned_batch(member_id)
    return read_side_file(path, "the number of a member's last planned batch", _NEXT_PLANNED, _build) or 0


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
