"""Queues without files: empty, or lost although the store has had messages of them.

A reader compares the registry with the folders. What a writer does is in `queue_registration.py`.
"""

import zlib
from collections.abc import Callable

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.queue_registry import RegisteredQueues
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.left_behind import vouched_end
from rmq_spark.store.log.queue_registry import lost_queue, read_registry
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

_TREES = (filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE)


def find_lost_queues(
    root: str,
    log: CommitLog,
    registered: RegisteredQueues | None,
    has_files: Callable[[QueueKey], bool],
    may_exist: Callable[[str], bool],
    configs_text: Callable[[], bytes],
) -> dict[QueueKey, StoreError]:
    """Return the registered queues whose files are gone, or cannot be listed, and the error for each.

    `registered` was read before the folders were listed: a live writer makes a queue's file first. The registry counts
    as long as nobody but our writers has written or changed topics.json, whose text `configs_text` returns as of the
    listing, and after a power cut for what was settled before.
    """
    queues = registered.queues if registered is not None else {}
    missing, found = [], dict[QueueKey, StoreError]()
    for key in [key for key in queues if may_exist(key.topic)]:
        try:
            if not has_files(key):
                missing.append(key)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            found[key] = error
    if not missing or registered is None:
        return found
    crc = zlib.crc32(configs_text())
    if crc not in registered.configs:
        # A live writer of ours may have made topics since the registry was read.
        registered = read_registry(root)
        if registered is None or crc not in registered.configs:
            return found
        missing = [key for key in missing if key in registered.queues]
    end, begin = vouched_end(root, log), log.segments.begin
    found |= {
        key: lost_queue(root, key, queues[key], begin) for key in missing if end is not None and queues[key] < end
    }
    return found


def has_files(queue: ConsumeQueue) -> bool:
    """Say whether a queue has a file; one whose files are damaged as such has some.

    Raises StoreError where the kernel does not let them be listed: nobody knows then.
    """
    return queue.run.is_damaged() or bool(queue.run.segments)


def refuse_lost_folder(root: str, log: CommitLog) -> None:
    """Raise DamageError for a log with messages in a store without a folder of queues, which every broker makes."""
    if any(files.is_folder(files.join(root, tree)) for tree in _TREES):
        return
    if isinstance(log.record_at(log.segments.begin), Record):
        raise DamageError(
            "the log has messages, and the folder of the consume queues is missing",
            files.join(root, filenames.CONSUME_QUEUE),
            0,
            "a folder",
            "none",
            "Run rmq_spark.repair: it rebuilds the queues from the log.",
        )
