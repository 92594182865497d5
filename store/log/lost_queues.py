"""Queues without files: empty, or lost although the store has had messages of them.

A reader compares the registry with the folders. What a writer does is in `queue_registration.py`.
"""

import zlib
from collections.abc import Callable, Mapping

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
from rmq_spark.store.log.topics import FoundTopics, TopicTable
from rmq_spark.store.units import QueueKey

_TREES = (filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE)


def find_lost_queues(
    root: str,
    log: CommitLog,
    registered: RegisteredQueues | None,
    has_files: Callable[[QueueKey], bool],
    topics: TopicTable,
) -> dict[QueueKey, StoreError]:
    """Return the registered queues whose files are gone, or cannot be listed, and the error for each.

    `registered` was read before the folders were listed: a live writer makes a queue's file first. The registry counts
    as long as nobody but our writers has written or changed topics.json, which `topics` has as of the listing, and
    after a power cut for what was settled before. Without topics.json, or with an older one, it counts as well: that
    is no deletion of topics, and the registry has no queue of a topic that a broker deleted.
    """
    queues = registered.queues if registered is not None else {}
    missing, found = [], dict[QueueKey, StoreError]()
    for key in queues:
        try:
            if not has_files(key):
                missing.append(key)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            found[key] = error
    if not missing or registered is None:
        return found
    configs = topics.found
    if not counted_queues(registered, configs):
        # A live writer of ours may have made topics since the registry was read.
        counted = counted_queues(read_registry(root), configs)
        missing = [key for key in missing if key in counted]
    end, begin = vouched_end(root, log), log.segments.begin
    for key in missing:
        if end is not None and queues[key] < end:
            is_named = not configs.is_lost and key.topic in configs.file.topics
            found[key] = lost_queue(root, key, queues[key], begin, is_named=is_named)
    return found


def counted_queues(registered: RegisteredQueues | None, configs: FoundTopics) -> Mapping[QueueKey, int]:
    """Return the queues of a registry if it counts beside this topics.json, and where the first record of each is."""
    if registered is None or not (configs.is_lost or zlib.crc32(configs.text) in registered.configs):
        return {}
    return registered.queues


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
            "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queues from the log.",
        )
