"""Offsets of groups and delay levels: lowers those beyond the ends of their queues, after the log lost its end.

A group's offset is durable as soon as it is committed, but the messages below it may not be durable yet. After a power
cut the queue may be shorter, so the group would skip all new messages up to its old offset. The same is true of a
broker's own groups (for retries and transactions) and of delay levels, which no administrator resets.

Recovery lowers the offsets of groups before it completes, and so before the first append. If recovery crashes, the file
is either old or new, and the next recovery does the same again. Recovery does not change the offsets of delay levels:
each append to their queues calls `DelayOffsetFile.keep_within`. A repair lowers both kinds of offsets.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import (
    decode_consumer_offsets,
    decode_delay_offsets,
    encode_consumer_offsets,
    encode_delay_offsets,
)
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.queue_registration import refuse_lost_queue
from rmq_spark.store.log.queue_registry import newest_unit
from rmq_spark.store.log.rebuild import keep_file
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC

OFFSET_FILES = (filenames.CONSUMER_OFFSET_JSON, filenames.DELAY_OFFSET_JSON)


def set_back(name: str, data: bytes, ends: Mapping[QueueKey, int]) -> tuple[bytes, list[str]]:
    """Return an offset file's content with each offset lowered to its queue's end, and a description of each change.

    `name` is one of OFFSET_FILES, `data` is the file's content, and `ends` has the end of each queue as a queue offset.
    Offsets in queues that are not in `ends` stay. Raises ValueError if `data` is not the content of such a file.
    """
    changes: list[str] = []

    def within(owner: str, key: QueueKey, offset: int) -> int:
        end = ends.get(key, offset)
        if offset > end:
            changes.append(f"{owner} in queue {key} from {offset} to {end}")
        return min(offset, end)

    if name == filenames.DELAY_OFFSET_JSON:
        delays = decode_delay_offsets(data)
        levels = {
            level: within(f"delay level {level}", QueueKey(SCHEDULE_TOPIC, level - 1), offset)
            for level, offset in delays.offsets.items()
        }
        return encode_delay_offsets(replace(delays, offsets=levels), bare_numbers=True), changes
    committed = decode_consumer_offsets(data)
    offsets = {}
    for at, numbers in committed.offsets.items():
        topic, _, group = at.rpartition("@")
        offsets[at] = {one: within(f"group {group}", QueueKey(topic, one), offset) for one, offset in numbers.items()}
    return encode_consumer_offsets(replace(committed, offsets=offsets), bare_numbers=True), changes


_LOG = logging.getLogger("rmq_spark")


def set_groups_back(store: StoreFiles, end: int) -> None:
    """Lower each group's offset that is beyond the end of its queue to that end. For recovery, under the store's lock.

    `end` is the physical offset of the log's end. Call it after recovery has finished the registry and the queues'
    files. Both the offset file and its `.bak` are changed. A file that cannot be decoded is skipped; its readers report
    it. The old file is kept in `rmq/before-repair/`. A warning with the old and the new offset is logged for each group
    and queue.
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
        lower, changes = set_back(filenames.CONSUMER_OFFSET_JSON, data, _ends(store, offsets, end))
        if not changes:
            continue
        keep_file(store.disk, store.root, name, store.now_ms())
        store.disk.replace(name, lower)
        for change in changes:
            _LOG.warning(
                "rmq: %s: set back %s: the log was longer when this was committed. The messages between were not "
                "durable and are lost. Without the change, new messages there would be skipped",
                name,
                change,
            )


def _highest(data: bytes) -> dict[QueueKey, int]:
    """Return the highest offset that any group has in each queue, from the content of an offset file.

    Queues in which all offsets are 0 are left out. Raises ValueError if `data` cannot be decoded.
    """
    found = dict[QueueKey, int]()
    for at, numbers in decode_consumer_offsets(data).offsets.items():
        for queue_id, offset in numbers.items():
            key = QueueKey(at.rpartition("@")[0], queue_id)
            if offset > found.get(key, 0):
                found[key] = offset
    return found


def _ends(store: StoreFiles, offsets: Mapping[QueueKey, int], log_end: int) -> dict[QueueKey, int]:
    """Return the next queue offset of each queue in which an offset may be beyond it.

    Queues whose next offset is unknown are left out. It is 0 for a queue that never had files. If the store has lost
    the queue's files, it is unknown, because a repair can restore the queue's messages.
    """
    table, found, registered = TopicTable(store.root), dict[QueueKey, int](), store.registry.read()
    rolls = registered.rolls if registered is not None else {}
    for key, offset in offsets.items():
        store.heartbeat()
        try:
            queue = table.find(key)
            if queue is not None and _is_within(queue, offset):
                continue
            end = _end_of(store, key, queue, rolls.get(key, (0, 0))[0], log_end)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            _LOG.warning("rmq: the offsets of groups in queue %s were not checked: %s", key, error)
            continue
        if end is not None:
            found[key] = end
    return found


def _is_within(queue: ConsumeQueue, offset: int) -> bool:
    """Return whether the entry before an offset was written, so that the offset is not beyond the queue's end.

    Costs one small read. False if this cannot be seen from that entry.
    """
    if queue.layout is not QUEUE_UNIT or queue.run.is_damaged() or not queue.run.begin < offset <= queue.run.end:
        return False
    is_written = queue.is_written(offset - 1)
    queue.run.close()
    return is_written


def _end_of(store: StoreFiles, key: QueueKey, queue: ConsumeQueue | None, newest: int, log_end: int) -> int | None:
    """Return a queue's next queue offset. Return None if it is unknown because files are lost or damaged.

    `newest` is the first entry number of the queue's newest file according to the registry. `log_end` is the physical
    offset of the log's end.
    """
    if queue is not None and queue.run.is_damaged():
        return None
    if queue is not None and queue.run.segments:
        return store.queues.next_offset(key) if newest_unit(queue) >= newest else None
    if not store.topics.may_exist(key.topic):
        return None  # topics.json is lost, or the topic was deleted; a broker keeps the offsets of deleted topics
    try:
        refuse_lost_queue(store, key, log_end)
    except DamageError:
        return None
    return 0
