"""The ends of a store's queues as somebody saw them before taking a lock, and whether they may have moved back since.

Offsets are compared with the ends of their queues long before they are written: a look at all queues under the store's
lock would take too long. A repair in between may cut the log, and what is stored next would be passed over. Recovery,
which a repair also uses, replaces the registry of queues (`rmq/queues`) each time. So where the registry is the same
file with the same content as before the look, no queue has become shorter.
"""

from collections.abc import Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.log.queue_registry import registry_path
from rmq_spark.store.log.rebuilding import read_rebuild
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey

Stamp = tuple[int, int, int] | None  # of the registry, None without one


def stamp_of_ends(root: str) -> Stamp:
    """Return what differs once a queue may have become shorter. Take it before the look at the queues."""
    return files.stamp(registry_path(root))


class SeenEnds:
    """The ends of queues of the store at `root` as of a look before which `stamp` was taken. For one commit."""

    def __init__(self, root: str, stamp: Stamp) -> None:
        self._root, self._stamp = root, stamp
        self.corrected: set[QueueKey] = set()  # queues whose offset `within` changed or left out

    def within(self, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return the offsets, each at most the end of its queue as it is now. For who holds the store's lock.

        Offsets above 0 of queues whose end nobody knows are left out. It costs one `stat` as long as the stamp is the
        same; the queues are looked at only if it is not.
        """
        self.corrected = set()
        if stamp_of_ends(self._root) == self._stamp:
            return dict(offsets)
        found: dict[QueueKey, int] = {}
        rebuild, table = read_rebuild(self._root), TopicTable(self._root)
        for key, offset in offsets.items():
            end = None if rebuild is not None and key in rebuild.queues else _end_of(table, key)
            if offset > 0 and (end is None or end < offset):
                self.corrected.add(key)
            if not offset or end is not None:
                found[key] = min(offset, end or 0)
        return found


def _end_of(table: TopicTable, key: QueueKey) -> int | None:
    """Return the offset of a queue's next message, None where no file says it."""
    queue = table.find(key)
    if queue is None or queue.run.is_damaged() or not queue.run.segments:
        return None
    try:
        end = queue.search_written_end()
        return queue.offset_of(end, end)
    finally:
        queue.run.close()
