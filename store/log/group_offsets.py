"""Offsets of groups that a lost end of the log left beyond their queues' ends, set back by recovery.

A group's offset is on disk for good as soon as it is committed, and the messages that it passes may not be. After a
power cut the queue is shorter, and the group would pass over all that is stored up to its old offset. So recovery
lowers such offsets before it says that it is done: before anything is appended. Who dies on the way leaves the old file
or the new one, and the next recovery does the same again.

Delay levels are no matter of recovery: `DelayOffsetFile.keep_within` is asked with every append to their queues.
"""

import logging

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import decode_consumer_offsets
from rmq_spark.store.format.offset_limits import set_back
from rmq_spark.store.log.kept_files import keep_file
from rmq_spark.store.log.lost_queues import newest_unit
from rmq_spark.store.log.queue_registration import refuse_lost_queue
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
    ends: dict[QueueKey, int] | None = None
    for name in (path, path + filenames.BACKUP_SUFFIX):
        data = files.read_small(name)
        if not data:
            continue
        try:
            keys = _queues_of(data)
        except ValueError:
            continue
        ends = _ends(store, keys, end) if ends is None else ends | _ends(store, keys - ends.keys(), end)
        lower, told = set_back(filenames.CONSUMER_OFFSET_JSON, data, ends)
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


def _queues_of(data: bytes) -> set[QueueKey]:
    """Return the queues that a file of offsets names, with an offset above 0. Raises ValueError."""
    held = decode_consumer_offsets(data)
    return {
        QueueKey(at.rpartition("@")[0], queue_id)
        for at, numbers in held.offsets.items()
        for queue_id, offset in numbers.items()
        if offset > 0
    }


def _ends(store: StoreFiles, keys: set[QueueKey], log_end: int) -> dict[QueueKey, int]:
    """Return the next queue offset of those queues of which it is known.

    A queue without files has none, unless the store has lost them: then a repair brings its messages back.
    """
    table, found, registered = TopicTable(store.root), dict[QueueKey, int](), store.registry.read()
    rolls = registered.rolls if registered is not None else {}
    for key in keys:
        store.note_progress()
        queue = table.find(key)
        if queue is not None and queue.run.is_damaged():
            continue
        if queue is None or not queue.run.segments:
            if not store.topics.may_exist(key.topic):
                continue  # a broker keeps the offsets of a deleted topic; or topics.json is lost
            try:
                refuse_lost_queue(store, key, log_end)
            except DamageError:
                continue
            found[key] = 0
        elif newest_unit(queue) >= rolls.get(key, (0, 0))[0]:
            found[key] = store.queues.next_offset(key)
    return found
