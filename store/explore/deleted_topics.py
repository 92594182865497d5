"""Queues that a recovery made of records whose topic was deleted long ago.

Their records stay in the log until they expire. A recovery passes over them while later records have units; where those
had to be made anew, it makes queues of all. What it would have passed over before is taken away again.
"""

from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey

_LAST_UNITS = 64  # of a queue, of which some may be damaged


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
        if queue.run.fault() is not None:
            return -1
        end = queue.search_written_end()
        places = queue.read(max(end - _LAST_UNITS, queue.run.begin), end).physical_offsets
        queue.run.close()
        return int(places[places < self._log_end].max(initial=-1))
