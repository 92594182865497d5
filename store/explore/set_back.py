"""Where queues end, in a log that is whole or is to be cut, and which offsets in `config/` stand beyond that."""

from collections.abc import Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.errors import StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.offset_limits import OFFSET_FILES, set_back
from rmq_spark.store.format.queue_unit import is_blank_fill
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey


def first_reaching_beyond(queue: ConsumeQueue, end: int, place: int) -> int:
    """Return the number of the first unit before `end` whose record reaches beyond a physical offset."""
    return queue.run.first_where(
        queue.run.begin,
        end,
        lambda unit: unit["physical_offset"] + unit["record_size"].astype("i8") > place and not is_blank_fill(unit),
    )


def queue_ends(root: str, place: int | None = None) -> dict[QueueKey, int]:
    """Return the next queue offset of each queue whose files can be read; those of a log that ends at `place`."""
    ends = {}
    for key, queue in TopicTable(root).queues.items():
        if not queue.run.is_damaged():
            end = queue.search_written_end()
            last = end if place is None else first_reaching_beyond(queue, end, place)
            ends[key] = queue.offset_of(last, end)
            queue.run.close()
    return ends


def beyond_ends(root: str, ends: Mapping[QueueKey, int]) -> dict[str, list[str]]:
    """Return what would be set back, by the path of its file. What cannot be read is told elsewhere."""
    found = {}
    for name in OFFSET_FILES:
        path = files.join(root, filenames.CONFIG, name)
        try:
            told = set_back(name, files.read_small(path) or b"", ends)[1]
        except (StorePathError, ValueError):
            continue
        if told:
            found[path] = told
    return found
