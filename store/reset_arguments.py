"""Checks of the arguments of `reset_offsets`: the group, the topics, and where the group continues. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rmq_spark.store.argument_checks import as_ms, check_integer, check_offset
from rmq_spark.store.errors import OffsetRangeError, OptionError
from rmq_spark.store.model import QueueBounds, QueueKey, describe_unit, is_in_another_unit
from rmq_spark.store.names import BROKER_GROUP_PREFIX, check_consumer_group

EARLIEST, LATEST = "earliest", "latest"
_QUEUE_ID_DIGITS = 10  # the most digits that a Java int has
ResetTo = str | int | datetime | Mapping[str, Mapping[int | str, int]]


def check_resettable(group: str) -> None:
    """Raise OptionError if `group` is not a valid name for a group of consumers.

    If it is one of a broker's own groups, the error has special advice.
    """
    if isinstance(group, str) and group.startswith(BROKER_GROUP_PREFIX):
        raise OptionError(
            f"reset_offsets: consumer group {group!r} is a broker's own and contains its progress with transactions "
            "and the like; expected a group of consumers. If its offset is beyond the end of its queue, stop the "
            "broker and set the offset in config/consumerOffset.json to that end."
        )
    check_consumer_group(group)


def check_topics(topics: str | Sequence[str]) -> list[str]:
    """Return the names of the topics to reset, sorted. Raises OptionError unless they are a name or a list of names."""
    listed = [topics] if isinstance(topics, str) or not isinstance(topics, Iterable) else list(topics)
    if not all(isinstance(name, str) for name in listed):
        raise OptionError(f"reset_offsets: found topics={topics!r}; expected a topic name or a list of them.")
    if not listed:
        raise OptionError("reset_offsets: found an empty list of `topics`; expected at least one.")
    return sorted(set(listed))


def check_reset_time(to: object) -> int:
    """Return the time of a reset in ms since the epoch. `to` is neither a word nor offsets.

    Raises OptionError for any other value than a time, and for a time that was given in another unit.
    """
    moment = as_ms("reset_offsets: to", to)
    try:
        time_ms = check_integer("to", moment, 0)
    except OptionError:
        raise OptionError(
            f'reset_offsets: to={to!r} is none of: "{EARLIEST}", "{LATEST}", ms since the epoch, a datetime, offsets '
            'as {"topic": {0: 12}}.'
        ) from None
    if is_in_another_unit(time_ms) and not isinstance(to, datetime):
        raise OptionError(f"reset_offsets: to={time_ms} {describe_unit(time_ms)}.")
    return time_ms


def check_targets(
    to: Mapping[str, Mapping[int | str, int]], topics: object, *, has_brokers: bool
) -> dict[QueueKey, int]:
    """Return the queue offsets that `to` names. A queue that was named without a broker has the broker "".

    `has_brokers` says that keys may have broker names, as in "broker-a:0". Raises OptionError unless `to` has offsets
    by topic and queue, and if `topics` were given too.
    """
    if topics is not None:
        raise OptionError("reset_offsets: found `topics` and offsets in `to`; expected one. Leave `topics` out.")
    targets: dict[QueueKey, int] = {}
    for topic, queues in to.items():
        if topic == "@":  # not a topic, but our metadata if the offsets were copied from a query's progress
            continue
        if not isinstance(topic, str):
            raise OptionError(f"reset_offsets: found the topic {topic!r} in `to`; expected a topic name.")
        if not isinstance(queues, Mapping):
            raise OptionError(f"reset_offsets: to[{topic!r}] is {queues!r}; expected offsets by queue id: {{0: 12}}.")
        for name, at in queues.items():
            queue = _queue(topic, name, has_brokers=has_brokers)
            if queue in targets:
                raise OptionError(f"reset_offsets: to[{topic!r}] names the queue {queue.id_text} twice.")
            targets[queue] = check_offset(f"reset_offsets: to[{topic!r}][{name!r}]", at)
    if not targets:
        raise OptionError("reset_offsets: found no queue in `to`; expected offsets by topic and queue id.")
    return targets


def check_target(queue: QueueKey, offset: int, bounds: QueueBounds) -> None:
    """Raise OffsetRangeError if a queue with these bounds cannot continue at an offset."""
    low, high = bounds.min_offset, bounds.max_offset
    if not low <= offset <= high:
        step = f'reset_offsets accepts these offsets: "{EARLIEST}" is {low} and "{LATEST}" is {high} now.'
        raise OffsetRangeError(str(queue), offset, offset, low, high, step)


def _queue(topic: str, name: object, *, has_brokers: bool) -> QueueKey:
    """Return the queue for a key of a mapping. A queue id may be a text, because keys in JSON are texts."""
    broker, value = "", name
    if isinstance(name, str):
        broker, _, digits = name.rpartition(":") if has_brokers else ("", "", name)
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _QUEUE_ID_DIGITS else name
    try:
        return QueueKey(topic, check_integer("queue id", value, 0), broker)
    except OptionError:
        expected = 'a queue as "broker-a:0"' if has_brokers else "a queue id"
        raise OptionError(f"reset_offsets: to[{topic!r}] has the key {name!r}; expected {expected}.") from None
