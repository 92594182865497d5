"""Offsets of groups that a lost end of the log left beyond their queues' ends, set back by recovery.

A group's offset is on disk for good as soon as it is committed, and the messages that it passes may not be. After a
power cut the queue is shorter, and the group would pass over all that is stored up to its old offset. So recovery
lowers such offsets before it says that it is done: before anything is appended. Who dies on the way leaves the old file
or the new one, and the next recovery does the same again.

Delay levels are no matter of recovery: `DelayOffsetFile.keep_within` is asked with every append to their queues.
"""

import logging
from collections.abc import Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import decode_consumer_offsets
from rmq_spark.store.format.offset_limits import set_back
from rmq_spark.store.format.queue_unit import QUEUE_UNIT
from rmq_spark.store.log.kept_files import keep_file
from rmq_spark.store.log.lost_queues import newest_unit
from rmq_spark.store.log.queue_registration import refuse_lost_queue
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")


def set_groups_back(store: StoreFiles, end: int) -> None:
    """Set each group's offset that is beyond the end of its queue to that end. For recovery, under the store's lock.

    The log ends at `end`; the registry and the files of queues are as recovery leaves them. The file and its `.bak` are
    both looked at; what cannot be read is left to who reads it. The old file is kept in `rmq/before-repair/`, and the
    log names each group, queue, old and new offset.
    """
    path = files.join(store.root, filenames.CONFIG, filenames.CONSUMER_OFFSET_JSON)
    for name in (path, path + filenames.BACKUP_SUFFIX):
        data = files.read_small(name)
        if not data:
            continue
        try:
            offsets = _highest(data)
        except ValueError:
            continue
        lower, told = set_back(filenames.CONSUMER_OFFSET_JSON, data, _ends(store, offsets, end))
        if not told:
            continue
        keep_file(store.disk, store.root, name, store.now_ms())
        store.disk.replace(name, lower)
        for line in told:
            _LOG.warning(
                "rmq: %s: set back %s: the log was longer when that was committed. The messages between were not on "
                "disk, and are lost; what is stored there next would have been passed over",
                name,
                line,
            )


def _highest(data: bytes) -> dict[QueueKey, int]:
    """Return the highest offset above 0 that a file of offsets has for each queue. Raises ValueError."""
    held, found = decode_consumer_offsets(data), dict[QueueKey, int]()
    for at, numbers in held.offsets.items():
        for queue_id, offset in numbers.items():
            key = QueueKey(at.rpartition("@")[0], queue_id)
            if offset > found.get(key, 0):
                found[key] = offset
    return found


def _ends(store: StoreFiles, offsets: Mapping[QueueKey, int], log_end: int) -> dict[QueueKey, int]:
    """Return the next queue offset of those queues of which it is known, and not certain that the offset is within.

    A queue without files has none, unless the store has lost them: then a repair brings its messages back.
    """
    table, found, registered = TopicTable(store.root), dict[QueueKey, int](), store.registry.read()
    rolls = registered.rolls if registered is not None else {}
    for key, offset in offsets.items():
        store.note_progress()
        try:
            queue = table.find(key)
            if queue is not None and _holds(queue, offset):
                continue
            end = _end_of(store, key, queue, rolls.get(key, (0, 0))[0], log_end)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            _LOG.warning("rmq: the offsets of groups in queue %s are left as they are: %s", key, error)
            continue
        if end is not None:
            found[key] = end
    return found


def _holds(queue: ConsumeQueue, offset: int) -> bool:
    """Say whether the unit before an offset is written: then the offset is not beyond the end. One small read."""
    if queue.layout is not QUEUE_UNIT or queue.run.is_damaged() or not queue.run.begin < offset <= queue.run.end:
        return False
    is_written = queue.is_written(offset - 1)
    queue.run.close()
    return is_written


def _end_of(store: StoreFiles, key: QueueKey, queue: ConsumeQueue | None, newest: int, log_end: int) -> int | None:
    """Return a queue's next queue offset, None if it is not known. `newest` is the first unit of its newest file."""
    if queue is not None and queue.run.is_damaged():
        return None
    if queue is not None and queue.run.segments:
        return store.queues.next_offset(key) if newest_unit(queue) >= newest else None
    if not store.topics.may_exist(key.topic):
        return None  # a broker keeps the offsets of a deleted topic; or topics.json is lost
    try:
        refuse_lost_queue(store, key, log_end)
    except DamageError:
        return None
    return 0
