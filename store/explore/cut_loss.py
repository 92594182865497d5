"""What is lost where a log is cut: of each queue, what its records say or what its units say, whichever is more.

Neither is enough. Units may be gone with the files of a queue, and the records behind the damage are whole all the
same; a record that is spoilt counts for nothing, and its unit still says that there was a message.
"""

from collections import Counter

import numpy as np

from rmq_spark.store.explore.log_walk import LogBlock, LogWalk
from rmq_spark.store.explore.set_back import first_reaching_beyond
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.record import TRANSACTION_COMMIT, TRANSACTION_MASK
from rmq_spark.store.format.record_columns import RecordColumns
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey


def messages_behind(root: str, folders: tuple[str, ...], place: int, end: int) -> int:
    """Return how many messages go when the log at `folders`, which ends at `end`, is cut at a physical offset.

    All of the log behind it is read: whole records count wherever they stand, behind more damage too. Raises
    StoreChangedError for a store that changes meanwhile.
    """
    lost = _by_records(folders, place, end)
    for key, count in _by_units(root, place).items():
        lost[key] = max(lost[key], count)
    return lost.total()


def _by_records(folders: tuple[str, ...], place: int, end: int) -> Counter[QueueKey]:
    counts: Counter[QueueKey] = Counter()
    log = SoundLog(folders)
    try:
        for step in LogWalk(log, DEFAULT_DELAY_LEVELS).run(place, end):
            if isinstance(step, LogBlock):
                counts.update(_messages_of(step.columns))
    finally:
        log.close()
    return counts


def _messages_of(records: RecordColumns) -> dict[QueueKey, int]:
    """Return how many messages of each queue are in a block: of records that get units."""
    rows = np.flatnonzero(np.isin(records.sys_flags & TRANSACTION_MASK, (0, TRANSACTION_COMMIT)))
    queues, numbers = np.unique(
        np.stack((records.topic_numbers[rows], records.queue_ids[rows]), axis=1), axis=0, return_inverse=True
    )
    counts = np.bincount(numbers.reshape(-1), records.message_counts[rows], len(queues))
    return {
        QueueKey(records.topics[topic], queue_id): int(count)
        for (topic, queue_id), count in zip(queues.tolist(), counts.tolist(), strict=True)
    }


def _by_units(root: str, place: int) -> dict[QueueKey, int]:
    """Return how many messages of each queue have units for records that reach beyond a physical offset."""
    counts = {}
    for key, queue in TopicTable(root).queues.items():
        if not queue.run.is_damaged():
            end = queue.search_written_end()
            first = first_reaching_beyond(queue, end, place)
            counts[key] = queue.offset_of(end, end) - queue.offset_of(first, end)
            queue.run.close()
    return counts
