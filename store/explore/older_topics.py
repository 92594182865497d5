"""Topics that topics.json does not name: made since the `.bak` that takes its place, or deleted long ago.

Records of deleted topics stay in the log until they expire. A recovery passes over them while later records have units;
where those had to be made anew, it makes queues of all. What it would have passed over before is taken away again.
"""

from collections.abc import Mapping
from dataclasses import replace

from rmq_spark.store.errors import OptionError
from rmq_spark.store.explore.sound_topics import SoundTopics
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.config_json import (
    BATCH_QUEUE_TYPE,
    QUEUE_TYPE,
    DataVersion,
    TopicConfig,
    decode_topics_file,
    encode_topics_file,
)
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey

_LAST_UNITS = 64  # of a queue, of which some may be damaged


def with_topics_on_disk(root: str, data: bytes, now_ms: int) -> bytes:
    """Return a topics.json, `data`, with the topics of which there are folders of queues, and so many queues.

    But for a broker's own, which it makes when it starts.
    """
    return with_topics(
        {key: queue.layout is BATCH_UNIT for key, queue in SoundTopics(root).queues.items()}, data, now_ms
    )


def with_topics(queues: Mapping[QueueKey, bool], data: bytes, now_ms: int) -> bytes:
    """Return a topics.json, `data`, with the topics of queues, which are batch queues or not, and so many queues.

    But for a broker's own, which it makes when it starts.
    """
    file = decode_topics_file(data)
    made: dict[str, TopicConfig] = {}
    for key, is_batch in queues.items():
        count = key.queue_id + 1
        if key.topic in file.topics or not _is_sent(key.topic):
            continue
        if key.topic not in made or made[key.topic].write_queue_count < count:
            attributes = {QUEUE_TYPE: BATCH_QUEUE_TYPE} if is_batch else {}
            made[key.topic] = TopicConfig(key.topic, count, count, attributes=attributes)
    if not made:
        return data
    version = file.data_version or DataVersion()
    newer = replace(version, counter=version.counter + 1, timestamp=now_ms)
    return encode_topics_file(replace(file, topics={**file.topics, **made}, data_version=newer))


def _is_sent(topic: str) -> bool:
    try:
        filenames.check_sent_topic(topic)
    except OptionError:
        return False
    return True


class Deleted:
    """Which queues there are, and where the last record lies that has a unit: as of now, before anything is changed.

    `log_end` is where the log ends: units that name a place behind it are stale, or damaged.
    """

    def __init__(self, root: str, log_end: int) -> None:
        self._root, self._log_end = root, log_end
        table = TopicTable(root)
        self._there = set(table.queues)
        self._last_place = max((self._place_of(table, key) for key in self._there), default=-1)

    def folders_again(self) -> list[str]:
        """Return the folders of queues that are new, of topics that topics.json does not name and with old records."""
        table = TopicTable(self._root)
        return [
            queue.run.folder
            for key, queue in table.queues.items()
            if key not in self._there
            and not table.may_exist(key.topic)
            and self._place_of(table, key) < self._last_place
        ]

    def _place_of(self, table: TopicTable, key: QueueKey) -> int:
        """Return where the last record of a queue lies, as its last units say; -1 without one that can be read."""
        queue = table.queues[key]
        if queue.run.is_damaged():
            return -1
        end = queue.search_written_end()
        places = queue.read(max(end - _LAST_UNITS, queue.run.begin), end).physical_offsets
        queue.run.close()
        return int(places[places < self._log_end].max(initial=-1))
