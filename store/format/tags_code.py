"""The tags code of a unit, from its record: what a queue knows of a message without reading it.

The Java hash of the TAGS property, 0 without one; in SCHEDULE_TOPIC_XXXX the time at which the message is due.
Source: MessageExtBrokerInner#tagsString2tagsCode, CommitLog#checkMessageAndReturnSize,
ScheduleMessageService#computeDeliverTimestamp (4.9, 5.3).
"""

from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import TAGS, parse
from rmq_spark.store.format.record import Record

DELAY = "DELAY"


def tags_code_of(record: Record, levels: DelayLevels = DEFAULT_DELAY_LEVELS) -> int:
    """Return the tags code that the record's unit has; an unreadable delay level counts as none."""
    properties = parse(record.properties)
    if record.topic.decode("utf-8", "replace") == SCHEDULE_TOPIC and DELAY in properties:
        level = levels.clamp(level_of(properties[DELAY]))
        if level > 0:
            return record.store_timestamp + levels.due_after_ms(level)
    tags = properties.get(TAGS)
    return string_hash(tags) if tags else 0


def level_of(text: str) -> int:
    """Return the delay level that a property DELAY names, 0 for a text that is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
