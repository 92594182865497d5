"""Queues without files: empty, or lost although the store has had messages of them.

A reader compares the registry with the folders. What a writer does is in `queue_registration.py`.
"""

from collections.abc import Callable, Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.queue_registry import RegisteredQueues
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.left_behind import vouched_end
from rmq_spark.store.log.queue_registry import lost_end, lost_queue, read_registry
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.topics import FoundTopics, TopicTable
from rmq_spark.store.units import QueueKey

MAX_UNIT = 2**63 - 1


def find_lost_queues(
    root: str,
    log: CommitLog,
    registered: RegisteredQueues | None,
    newest: Callable[[QueueKey], int],
    topics: TopicTable,
) -> dict[QueueKey, StoreError]:
    """Return the registered queues whose files, or newest file, are gone, or cannot be listed, and each one's error.

    `newest` gives the `newest_unit` of a queue. `registered` was read before the folders were listed: a live writer
    makes a queue's file first. The registry counts as long as nobody but our writers has written or changed
    topics.json, which `topics` has as of the listing, and after a power cut for what was settled before. Without
    topics.json, or with an older one, it counts as well: that is no deletion of topics, and the registry has no queue
    of a topic that a broker deleted.
    """
    if registered is None:
        return {}
    missing, shorter, found = [], dict[QueueKey, int](), dict[QueueKey, StoreError]()
    for key in registered.queues:
        try:
            unit = newest(key)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            found[key] = error
            continue
        if unit < 0:
            missing.append(key)
        elif unit < registered.rolls.get(key, (0, 0))[0]:
            shorter[key] = unit
    configs = topics.found if missing or shorter else FoundTopics()
    if missing and not counted_queues(registered, configs):
        registered = read_registry(root) or registered  # a live writer of ours may have made topics since it was read
    counted, end = counted_queues(registered, configs), vouched_end(root, log) if missing or shorter else None
    for key in missing:
        if end is not None and counted.get(key, end) < end:
            is_named = not configs.is_lost and key.topic in configs.file.topics
            found[key] = lost_queue(root, key, counted[key], log.segments.begin, is_named=is_named)
    return found | (_lost_ends(root, log, shorter, end, topics) if end is not None and shorter else {})


class QueueDoubt:
    """Says whether a queue without files may be lost as well as empty, where the registry does not tell.

    As of one listing of the folders: where a broker has written, or has changed topics.json, what the registry covers
    is not all that there is.
    """

    def __init__(self, root: str, log: CommitLog, registered: RegisteredQueues | None, configs: FoundTopics) -> None:
        self._begin = log.segments.begin
        is_exact = bool(registered and (configs.is_lost or registered.knows(configs.text)))
        self._registered = registered if is_exact and vouched_end(root, log) is not None else None
        self._has_messages = isinstance(log.record_at(self._begin), Record)

    def is_about(self, key: QueueKey) -> bool:
        """Say whether the queue, which has no files, may have had messages."""
        held = self._registered
        if held is None:
            return self._has_messages
        begin = max(held.unsearched[0], held.topics.get(key.topic, 0), self._begin)
        return key in held.found or begin < held.unsearched[1]


def _lost_ends(
    root: str, log: CommitLog, newest: Mapping[QueueKey, int], end: int, topics: TopicTable
) -> dict[QueueKey, StoreError]:
    """Return the errors of those queues that had a newer file than their `newest`, with records before `end`."""
    # A recovery says that it takes files away before it does: what was read may be older than that.
    registered, found = read_registry(root), dict[QueueKey, StoreError]()
    if registered is None or not counted_queues(registered, topics.found):
        return found
    for key, unit in newest.items():
        roll, queue = registered.rolls.get(key, (0, 0)), topics.find(key)
        if queue is not None and unit < roll[0] and roll[1] < end:
            found[key] = lost_end(root, queue, roll, log.segments.begin)
    return found


def counted_queues(registered: RegisteredQueues | None, configs: FoundTopics) -> Mapping[QueueKey, int]:
    """Return the queues of a registry if it counts beside this topics.json, and where the first record of each is."""
    if registered is None or not (configs.is_lost or registered.knows(configs.text)):
        return {}
    return registered.queues


def has_files(queue: ConsumeQueue) -> bool:
    """Say whether a queue has a file; one whose files are damaged as such has some.

    Raises StoreError where the kernel does not let them be listed: nobody knows then.
    """
    return queue.run.is_damaged() or bool(queue.run.segments)


def newest_unit(queue: ConsumeQueue) -> int:
    """Return the first unit of a queue's newest file, -1 without files; one whose files are damaged counts as complete.

    Raises StoreError where the kernel does not let them be listed.
    """
    if queue.run.is_damaged():
        return MAX_UNIT
    return -(-queue.run.segments[-1].begin // queue.layout.itemsize) if queue.run.segments else -1


def refuse_lost_folder(root: str, log: CommitLog) -> None:
    """Raise DamageError for a log with messages in a store without a folder of queues, which every broker makes."""
    if files.is_folder(files.join(root, filenames.CONSUME_QUEUE)):
        return
    record = log.record_at(log.segments.begin)
    # All topics of a store may be of inner batches: their queues are in a folder of their own.
    of_batches = {name.encode() for name, _ in files.list_folder(files.join(root, filenames.BATCH_CONSUME_QUEUE))}
    if isinstance(record, Record) and record.topic not in of_batches:
        raise DamageError(
            "the log has messages, and the folder of the consume queues is missing",
            files.join(root, filenames.CONSUME_QUEUE),
            0,
            "a folder",
            "none",
            "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queues from the log.",
        )
