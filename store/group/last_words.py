"""What a query finished last, published on its behalf: when it has ended, and after each batch of a shared group.

A query publishes at each trigger what the batches before it finished. The batch that was the last one when it was
stopped is finished too, and nobody asks its reader again. So whoever hears that the query ended, and how far it had
come, publishes that: its queues are still claimed in its name, unless another member has taken them, who then has gone
on from where the group stood.

A member that shares queues has each batch published in this way as soon as the batch has ended. The member's handover
thread learns of the end from `finished_batch.py`, and may give the queues up from then on.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import PurePath

from rmq_spark.store.commit.keys import CommitKey
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, NotFoundError, OffsetRangeError
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.finished_batch import read_planned_batch, write_finished_batch
from rmq_spark.store.group.group_paths import GroupPaths, GroupTurn
from rmq_spark.store.group.offset_file import OffsetFile, Outcome
from rmq_spark.store.group.published import write_published
from rmq_spark.store.group.resets import read_resets
from rmq_spark.store.group.seen_ends import SeenEnds, stamp_of_ends
from rmq_spark.store.group.suspended import read_suspended
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.units import QueueKey

_WAIT_MS = 10_000


def publish_last_offsets(
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
    """Publish the next queue offsets that a member has reached and finished; say whether the group has them now.

    Nothing is published of a batch before the member's last planned one. Spark's events may come late: the next batch
    may have read stopped queues again by then, and less of them. The member itself published such a batch's end.

    Left out are queues that another has claimed since, those that a reset after `applied_reset` sent elsewhere, and
    those in which the group stands further by now: this comes late, and somebody may have gone on as the group. And
    those that end before, in a store that was cut or restored: what is stored there next would be passed over. A queue
    that an orderly listener stopped after the change `applied_suspension` is finished where it goes on, if the query's
    `last_batch`, the one that reached the offsets, or one before it stopped it. What another one says of it may never
    have been committed: it is written down before the batch's dead letters are in the store. Then it is left out.

    `finished_batch` is the member's number of the batch. It is recorded once the offsets of all queues that are the
    member's are published, but for those that a reset sent elsewhere: where one is left out, the next owner would not
    begin at the batch's end. Waits for writers of ours up to 10 s without progress of theirs. Raises LockTimeoutError,
    StorePathError and DamageError.
    """
    root, disk = files.absolute(path), Disk()
    paths = GroupPaths(root, group)
    if not _owned(paths, member_id, offsets):
        return False
    settings = WriterSettings("rmq-spark", _WAIT_MS, allow_network_store=True)
    # Read here and, as others may publish until then, in the turn: what is the same by then is not decoded again.
    file = OffsetFile(root, disk, settings, wall_clock_ms, time.sleep)
    held = file.read(group)
    moved = {queue: offset for queue, offset in offsets.items() if offset > held.get(queue, 0)}
    ends = SeenEnds(root, stamp_of_ends(root))  # before the look at the queues
    reached = _reached(root, commit_log_path, moved)
    with GroupTurn(paths, disk, time.sleep).hold():
        owned, resets = _owned(paths, member_id, offsets), read_resets(paths.resets).since(applied_reset)
        suspended = read_suspended(root, group)
        # After the stopped queues: they are those of the batch as long as the member has planned no other.
        if finished_batch is not None and finished_batch < read_planned_batch(paths, member_id):
            return False
        stopped = suspended.behind(offsets, applied_suspension)
        doubtful = {
            queue
            for queue, one in suspended.queues.items()
            if one.number > applied_suspension and not one.is_of(last_batch)
        }
        held = file.read(group)
        own = {
            queue: offset
            for queue, offset in {**offsets, **stopped}.items()
            if queue in owned - resets.keys() - doubtful
            and (offset == held.get(queue, 0) or (offset > held.get(queue, 0) and queue in reached))
        }
        outcome = file.commit(group, own, ends) if own else Outcome.UNCHANGED
        if outcome is Outcome.WRITTEN:
            write_published(paths, disk, wall_clock_ms(), member_id)
        is_whole = bool(owned) and owned <= own.keys() | resets.keys() and not ends.corrected
        if finished_batch and is_whole and outcome is not Outcome.BROKER:
            write_finished_batch(paths, disk, member_id, finished_batch)
    return bool(own) and outcome is not Outcome.BROKER and not ends.corrected


def _owned(paths: GroupPaths, member_id: str, queues: Collection[QueueKey]) -> set[QueueKey]:
    claims = read_claims(paths.claims).queues
    return {queue for queue in queues if queue in claims and claims[queue].owner == member_id}


def _reached(root: str, commit_log_path: str | None, offsets: Mapping[QueueKey, int]) -> set[QueueKey]:
    """Return the queues whose offsets lie no further than their ends. Looks at no other queue."""
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
