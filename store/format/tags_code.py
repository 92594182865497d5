"""The tags code of a unit, from its record: what a queue knows of a message without reading it.

The Java hash of the TAGS property, 0 without one; in SCHEDULE_TOPIC_XXXX the time at which the message is due.
Source: MessageExtBrokerInner#tagsString2tagsCode, CommitLog#checkMessageAndReturnSize,
ScheduleMessageService#computeDeliverTimestamp (4.9, 5.3).
"""

from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import TAGS, parse
from rmq_spark.store.format.record import Record

DELAY = "DELAY"

# messageDelayLevel's default: 1s 5s 10s 30s 1m 2m … 10m 20m 30m 1h 2h, in ms.
_SECONDS = (1, 5, 10, 30, *(60 * minutes for minutes in range(1, 11)), 1200, 1800, 3600, 7200)
DELAY_LEVELS_MS = tuple(1000 * seconds for seconds in _SECONDS)
_UNKNOWN_LEVEL_MS = 1000


def tags_code_of(record: Record) -> int:
    """Return the tags code that the record's unit has; an unreadable delay level counts as none."""
    properties = parse(record.properties)
    if record.topic.decode("utf-8", "replace") == SCHEDULE_TOPIC and DELAY in properties:
        level = min(_number(properties[DELAY]), len(DELAY_LEVELS_MS))
        if level > 0:
            return record.store_timestamp + due_after_ms(level)
    tags = properties.get(TAGS)
    return string_hash(tags) if tags else 0


def due_after_ms(level: int) -> int:
    """Return after how many ms a message of a delay level (from 1 on) is due."""
    return DELAY_LEVELS_MS[level - 1] if 0 < level <= len(DELAY_LEVELS_MS) else _UNKNOWN_LEVEL_MS


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
