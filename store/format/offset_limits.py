"""Offsets of groups and delay levels beyond their queues' ends, set back to them: for a log that lost its end.

What is stored next at such a queue would be passed over. A broker's own groups (of retries, of transactions) and delay
levels are among them, which nobody resets otherwise.
"""

from collections.abc import Mapping
from dataclasses import replace

from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import (
    decode_consumer_offsets,
    decode_delay_offsets,
    encode_consumer_offsets,
    encode_delay_offsets,
)
from rmq_spark.store.units import QueueKey

OFFSET_FILES = (filenames.CONSUMER_OFFSET_JSON, filenames.DELAY_OFFSET_JSON)


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
