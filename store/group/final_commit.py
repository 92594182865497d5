"""The commit of a query's offsets by its driver: after the query's end, and after each batch if queues are shared.

At each trigger, the reader of a query commits the offsets of earlier batches. After the last batch Spark does not call
the reader again, so the reader cannot commit the offsets of that batch. The driver commits them instead, because Spark
tells it when the query ends and at which offsets. At that time the query's claims still exist. If another member has
claimed a queue in between, that member has started at the committed offset.

If queues are shared, the driver commits each batch in this way as soon as the batch ends. It records the end in a file.
The handover thread of the member reads that file (`read_finished_batch`), and may then release queues.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import PurePath

from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, NotFoundError, OffsetRangeError
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_files import (
    GroupLock,
    GroupPaths,
    read_planned_batch,
    write_commit_stamp,
    write_finished_batch,
)
from rmq_spark.store.group.offset_file import OffsetFile, Outcome, SeenEnds, stamp_of_ends
from rmq_spark.store.group.resets import read_resets, read_suspended
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.model import CommitKey, QueueKey

_WAIT_MS = 10_000


def commit_final_offsets(
    path: str | PurePath,
    group: str,
    member_id: str,
    offsets: Mapping[QueueKey, int],
    applied_reset: int,
    applied_suspension: int = 0,
    last_batch: CommitKey | None = None,
    *,
    finished_batch: int | None = None,
    commit_log_path: str | None = None,
) -> bool:
    """Commit the next queue offsets of a member whose batch has ended. Return whether they are committed.

    `offsets` are those at the end of the batch `last_batch`. Returns False if a broker holds the store, or if every
    queue is left out:

    - queues that another member has claimed in between;
    - queues that were reset after the reset with the number `applied_reset`;
    - queues with a higher committed offset, because another member of the group may have continued there;
    - queues that end before the offset because the store was truncated or restored;
    - queues that another query, or a later batch, suspended after the change with the number `applied_suspension`.

    If this batch or an earlier one of the query did, the offset where the queue resumes is committed instead.

    `finished_batch` is the member's number of the batch. Nothing is committed if the member has planned a later batch,
    because then the member has committed the end of this one itself. Otherwise the number is recorded when the offsets
    of all queues of the member are committed, except those that were reset.

    Waits up to 10 s for a writer of ours without progress. Raises LockTimeoutError if that is not enough,
    StorePathError if the store may not be written, and DamageError if a file is damaged.
    """
    root, disk = files.store_folder(path), Disk()
    paths = GroupPaths(root, group)
    if not _owned(paths, member_id, offsets):
        return False
    settings = WriterSettings("rmq-spark", _WAIT_MS, allow_network_store=True)
    # The file is read again below, under the lock. That read decodes it only if it has changed.
    file = OffsetFile(root, disk, settings, wall_clock_ms, time.sleep)
    committed = file.read(group)
    advanced = {queue: offset for queue, offset in offsets.items() if offset > committed.get(queue, 0)}
    ends = SeenEnds(root, stamp_of_ends(root))  # the stamp is taken before the queue ends are read
    reached = _reached(root, commit_log_path, advanced)
    with GroupLock(paths, disk, time.sleep).hold():
        owned, resets = _owned(paths, member_id, offsets), read_resets(paths.resets).since(applied_reset)
        suspended = read_suspended(root, group)
        # Checked after the suspended queues were read. If no later batch is planned yet, no later batch has changed
        # these suspended queues.
        if finished_batch is not None and finished_batch < read_planned_batch(paths, member_id):
            return False
        resume_offsets = suspended.behind(offsets, applied_suspension)
        doubtful = {
            queue
            for queue, one in suspended.queues.items()
            if one.number > applied_suspension and not one.is_of(last_batch)
        }
        committed = file.read(group)
        accepted = {
            queue: offset
            for queue, offset in {**offsets, **resume_offsets}.items()
            if queue in owned - resets.keys() - doubtful
            and (offset == committed.get(queue, 0) or (offset > committed.get(queue, 0) and queue in reached))
        }
        outcome = file.commit(group, accepted, ends) if accepted else Outcome.UNCHANGED
        if outcome is Outcome.WRITTEN:
            write_commit_stamp(paths, disk, wall_clock_ms(), member_id)
        is_complete = bool(owned) and owned <= accepted.keys() | resets.keys() and not ends.corrected
        if finished_batch and is_complete and outcome is not Outcome.BROKER:
            write_finished_batch(paths, disk, member_id, finished_batch)
    return bool(accepted) and outcome is not Outcome.BROKER and not ends.corrected


def _owned(paths: GroupPaths, member_id: str, queues: Collection[QueueKey]) -> set[QueueKey]:
    claims = read_claims(paths.claims).queues
    return {queue for queue in queues if queue in claims and claims[queue].owner == member_id}


def _reached(root: str, commit_log_path: str | None, offsets: Mapping[QueueKey, int]) -> set[QueueKey]:
    """Return those queues of `offsets` that do not end before their offset."""
    found = set()
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        for queue, offset in offsets.items():
            try:
                reader.proof(queue, offset - 1)
            except OffsetRangeError as error:  # retention may have deleted the message
                if offset <= error.max_offset:
                    found.add(queue)
            except (NotFoundError, DamageError):
                pass
            else:
                found.add(queue)
    return found
