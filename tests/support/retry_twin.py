"""Copies that a broker writes of messages that are sent back, by the obvious code, one message at a time."""

from dataclasses import dataclass

from rmq_spark.store.format.properties import parse
from rmq_spark.store.format.record import Record


@dataclass(frozen=True, slots=True)
class RetryCopy:
    """A message's copy: its queue, its properties, and the number of retries by then."""

    topic: str
    queue_id: int
    properties: dict[str, str]
    reconsume_times: int


def edit_one(text: bytes, dropped: set[str], put: dict[str, str]) -> dict[str, str]:
    """Return the properties of a text without some, and with others."""
    kept = {name: value for name, value in parse(text).items() if name not in dropped}
    return {**kept, **put}


def decide_one(reconsume_times: int, asked_level: int, max_reconsume_times: int, level_count: int) -> int | None:
    """Return the level at which a failed message waits, None for a dead letter."""
    if reconsume_times >= max_reconsume_times or asked_level < 0:
        return None
    level = asked_level if asked_level else 3 + max(reconsume_times, 0)
    return min(level, level_count)


def copy_one(
    record: Record,
    group: str,
    asked_level: int,
    error: str | None,
    *,
    max_reconsume_times: int = 16,
    level_count: int = 18,
    retry_queue: int = 0,
) -> RetryCopy:
    """Return the copy of a record that the group failed to consume (consumerSendMsgBack, then the put's diversion)."""
    properties = parse(record.properties)
    properties.setdefault("RETRY_TOPIC", record.topic.decode())
    if not properties.get("ORIGIN_MESSAGE_ID", "").strip():
        properties["ORIGIN_MESSAGE_ID"] = (record.store_host.hex() + f"{record.physical_offset:016x}").upper()
    properties["WAIT"] = "false"
    level = decide_one(record.reconsume_times, asked_level, max_reconsume_times, level_count)
    properties["DELAY"] = str(level or 0)
    properties.pop("__CRC32#", None)
    topic, queue_id = f"%DLQ%{group}", 0
    if level is not None:
        for name in ("TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"):
            properties.pop(name, None)
        properties |= {"REAL_TOPIC": f"%RETRY%{group}", "REAL_QID": str(retry_queue)}
        topic, queue_id = "SCHEDULE_TOPIC_XXXX", level - 1
    if error:
        properties["CONSUME_ERROR"] = error.replace("\x01", " ").replace("\x02", " ")[:1024]
    return RetryCopy(topic, queue_id, properties, min(record.reconsume_times + 1, 2**31 - 1))
