"""Offsets of groups and delay levels that stand beyond their queues' ends, set back to them: for a log that was cut.

What is stored next at such a queue would be passed over. A broker's own groups (of retries, of transactions) and delay
levels are among them, which nobody resets otherwise.
"""

from collections.abc import Mapping
from dataclasses import replace

from rmq_spark.store.disk import files
from rmq_spark.store.errors import StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import (
    decode_consumer_offsets,
    decode_delay_offsets,
    encode_consumer_offsets,
    encode_delay_offsets,
)
from rmq_spark.store.format.queue_unit import is_blank_fill
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey

OFFSET_FILES = (filenames.CONSUMER_OFFSET_JSON, filenames.DELAY_OFFSET_JSON)


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


def set_back(name: str, data: bytes, ends: Mapping[QueueKey, int]) -> tuple[bytes, list[str]]:
    """Return an offset file without offsets beyond the ends, and what was set back: who, where, from and to.

    `name` is one of OFFSET_FILES, `data` what it holds. Raises ValueError for what is no such file.
    """
    told: list[str] = []

    def within(who: str, key: QueueKey, offset: int) -> int:
        end = ends.get(key, offset)
        if offset > end:
            told.append(f"{who} in queue {key} from {offset} to {end}")
        return min(offset, end)

    if name == filenames.DELAY_OFFSET_JSON:
        delays = decode_delay_offsets(data)
        levels = {
            level: within(f"delay level {level}", QueueKey(filenames.SCHEDULE_TOPIC, level - 1), offset)
            for level, offset in delays.offsets.items()
        }
        return encode_delay_offsets(replace(delays, offsets=levels), bare_numbers=True), told
    held = decode_consumer_offsets(data)
    offsets = {}
    for at, numbers in held.offsets.items():
        topic, _, group = at.rpartition("@")
        offsets[at] = {one: within(f"group {group}", QueueKey(topic, one), offset) for one, offset in numbers.items()}
    return encode_consumer_offsets(replace(held, offsets=offsets), bare_numbers=True), told


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
