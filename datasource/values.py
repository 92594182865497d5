"""Texts of single option values -> Python values. What may stand where is said by `options`.

A parser takes the text and returns the value, or raises Unacceptable with the rest of a sentence that
begins with the option and the text: `maxOffsetsPerTrigger="0"` … `is no whole number from 1 on.`
Positions are queue offsets or one of two words for them, EARLIEST and LATEST; times are ms since the epoch.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from rmq_spark.store.units import QueueKey, describe_unit, is_in_another_unit

# As in Kafka's offset JSON: a queue offset may be one of these instead.
LATEST = -1
EARLIEST = -2
# And ours: where the consumer group stands. Only as a word for all queues.
GROUP = -3

COUNT_MAX = 2**63 - 1  # what Spark and RocketMQ keep in a long
_SHOWN_CHARACTERS = 80  # of a bad name or value inside JSON
TOPIC_LENGTH_MAX = 255  # TopicValidator, 5.x: 127, and 255 with %RETRY% or %DLQ% in front

# The key under which an offset of ours keeps what is no topic; "@" is no legal character in one.
MARK = "@"

_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]+")
_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECOND_MS = 1000
_DURATIONS_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER_AND_UNIT = re.compile(r"(\d+)\s*([a-z]*)", re.ASCII)


class Unacceptable(ValueError):
    """The rest of the sentence that begins with the option and its text."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Wanted queue offsets: those of some queues, and `default` (EARLIEST, LATEST or GROUP) for the rest.

    None as default leaves the rest to the kind of query. Values may be EARLIEST or LATEST too.
    """

    default: int | None = None
    queues: Mapping[QueueKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Times:
    """Wanted times, ms since the epoch: of single queues, of whole topics, and for the rest, if at all."""

    default_ms: int | None = None
    topics: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[QueueKey, int] = field(default_factory=dict)

    def of(self, queue: QueueKey) -> int | None:
        """Return the time for one queue: its own, else its topic's, else the one for all, else None."""
        return self.queues.get(queue, self.topics.get(queue.topic, self.default_ms))


def parse_text(text: str) -> str:
    """Return the text without blanks around it; it must not be empty."""
    if not text.strip():
        raise Unacceptable("is empty.")
    return text.strip()


def parse_words(*accepted: str) -> Callable[[str], str]:
    """Return a parser for one of some words, in any case."""

    def parse(text: str) -> str:
        if text.strip().lower() not in accepted:
            raise Unacceptable(f"is none of: {', '.join(accepted)}.")
        return text.strip().lower()

    return parse


def parse_flag(text: str) -> bool:
    """Return a truth value: true or false."""
    return parse_words("true", "false")(text) == "true"


def parse_count(text: str) -> int:
    """Return a whole number of messages or partitions, from 1 on."""
    found = re.fullmatch(r"[+]?(\d+)", text.strip().replace("_", ""), re.ASCII)
    if found is None or not 1 <= _number(found[1]) <= COUNT_MAX:
        raise Unacceptable("is no whole number from 1 on.")
    return _number(found[1])


def parse_size(text: str) -> int:
    """Return a size in bytes: a number, with b, k, m, g or t (powers of 1024) behind it or without."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    unit = _SIZES.get(re.sub(r"(?<=[kmgt])i?b$", "", found[2])) if found else None
    if found is None or unit is None or not 1 <= _number(found[1]) * unit <= COUNT_MAX:
        raise Unacceptable("is no size from 1 byte on. Accepted: bytes, or a number with k, m, g, such as 64m.")
    return _number(found[1]) * unit


def parse_wait(text: str) -> int:
    """Return a duration in ms, as `parse_duration` does; it may be 0."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    if found is not None and not found[1].strip("0") and (found[2] or "ms") in _DURATIONS_MS:
        return 0
    try:
        return parse_duration(text)
    except Unacceptable:
        raise Unacceptable("is no duration. Accepted: 0, or a number with ms, s, m, h, d, such as 15s.") from None


def parse_duration(text: str) -> int:
    """Return a duration in ms: a number with ms, s, m, h or d behind it; ms without."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    unit = _DURATIONS_MS.get(found[2] or "ms") if found else None
    if found is None or unit is None or not 1 <= _number(found[1]) * unit <= COUNT_MAX:
        raise Unacceptable("is no duration from 1 ms on. Accepted: a number with ms, s, m, h, d, such as 15m.")
    return _number(found[1]) * unit


def parse_seconds(text: str) -> int:
    """Return a duration in ms, as `parse_duration` does, of at least one second."""
    try:
        duration_ms = parse_duration(text)
    except Unacceptable:
        duration_ms = 0
    if duration_ms < _SECOND_MS:
        raise Unacceptable("is no duration from 1 s on. Accepted: a number with ms, s, m, h, d, such as 15m.")
    return duration_ms


def show_duration(duration_ms: int) -> str:
    """Return a duration as users give one, and as `parse_duration` takes it: in s, or in ms where that is no number."""
    return f"{duration_ms}ms" if duration_ms % 1000 else f"{duration_ms // 1000}s"


def _number(digits: str) -> int:
    """Return the number, or one beyond all limits: Python refuses to read thousands of digits."""
    significant = digits.lstrip("0") or "0"
    return int(significant) if len(significant) <= len(str(COUNT_MAX)) else COUNT_MAX + 1


def parse_path(text: str) -> str:
    """Return the path of a local folder; `file:` is taken off, other schemes are refused."""
    path = _parse_local_path(text)
    if not path:
        raise Unacceptable("names no folder.")
    if "\0" in path:  # plain, or as %00 behind file:
        raise Unacceptable("has the character 0 in it, which no path can have.")
    return path


def _parse_local_path(text: str) -> str:
    path = parse_text(text)
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):", path)
    if scheme is None:
        return path
    if scheme[1].lower() != "file":
        raise Unacceptable(
            f"has the scheme {scheme[1]}:, but a store is read from a file system. Accepted: a path, or file:///path. "
            "Mount the storage, at the same path on the driver and every executor, and give that path."
        )
    path = path[len("file:") :]
    if path.startswith("//"):
        host, slash, path = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise Unacceptable(f'names the host "{host}"; write file:///path with three slashes.')
        path = slash + path
    return unquote(path)  # "?" and "#" are part of a name, as Spark has it


def parse_paths(text: str) -> tuple[str, ...]:
    """Return the paths of local folders that commas separate."""
    return tuple(parse_path(part) for part in parse_names(text))


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names that commas separate: at least one, none empty, none twice."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise Unacceptable("has an empty name in it. Accepted: names separated by commas.")
    for name, count in Counter(names).items():
        if count > 1:
            raise Unacceptable(f'names "{name}" twice.')
    return tuple(names)


def check_topic(name: str) -> str:
    """Return a topic's name if it is legal, as TopicValidator#validateTopic has it (5.x)."""
    if not _TOPIC.fullmatch(name) or len(name) > TOPIC_LENGTH_MAX:
        raise Unacceptable(
            f'names the topic "{name[:_SHOWN_CHARACTERS]}", which no topic can be called. Accepted: up to '
            f"{TOPIC_LENGTH_MAX} letters, digits, %, |, - and _."
        )
    return name


def parse_topics(text: str) -> tuple[str, ...]:
    """Return legal topic names that commas separate."""
    return tuple(check_topic(name) for name in parse_names(text))


def parse_pattern(text: str) -> str:
    """Return a regular expression as Python's `re` takes it."""
    try:
        re.compile(parse_text(text))
    except (re.error, OverflowError) as error:
        raise Unacceptable(f"is no regular expression: {error}.") from None
    except RecursionError:
        raise Unacceptable("is no regular expression that can be read: it is nested too deeply.") from None
    return text.strip()


def parse_search_words(text: str) -> tuple[str, ...]:
    """Return the words that blanks separate: RocketMQ allows everything but a blank in a key."""
    return tuple(dict.fromkeys(parse_text(text).split()))


def parse_assignment(text: str) -> tuple[QueueKey, ...]:
    """Return the queues of `{"TopicA": [0, 1]}`, sorted."""
    example = '{"TopicA": [0, 1]}'
    keys = []
    for topic, numbers in parse_object(text, example).items():
        check_topic(topic)
        if not isinstance(numbers, list) or not numbers:
            raise Unacceptable(f"gives {topic} no list of queue ids. Accepted: {example}.")
        keys += [QueueKey(topic, _queue_id(number, example)) for number in numbers]
    if not keys:
        raise Unacceptable(f"names no queue. Accepted: {example}.")
    return tuple(sorted(set(keys)))


def parse_starts(text: str) -> Positions:
    """Return what `parse_positions` does, and the word `group`."""
    if text.strip().lower() == "group":
        return Positions(GROUP)
    return parse_positions(text, 'earliest, latest, group, {"TopicA": {"0": 42}}')


def parse_positions(text: str, accepted: str = 'earliest, latest, {"TopicA": {"0": 42}}') -> Positions:
    """Return what earliest, latest or `{"TopicA": {"0": 42}}` says; -1 is latest, -2 earliest.

    What a stream reports as its offset is accepted too: its key "@" is passed over. `accepted` is for errors.
    """
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return Positions(words[text.strip().lower()])
    if not text.strip().startswith("{"):
        raise Unacceptable(f"is none of: {accepted}.")
    queues = {}
    for topic, offsets in parse_object(text, accepted).items():
        if topic == MARK:
            continue
        check_topic(topic)
        if not isinstance(offsets, dict):
            raise Unacceptable(f"gives {topic} no offsets by queue id. Accepted: {accepted}.")
        for number, offset in offsets.items():
            key = QueueKey(topic, _queue_id(number, accepted))
            if type(offset) is not int or not EARLIEST <= offset <= COUNT_MAX:
                raise Unacceptable(
                    f"gives {key} the offset {_shown(offset)}. Accepted: 0 and up, -1 (latest), -2 (earliest)."
                )
            queues[key] = offset
    return Positions(None, queues)


def parse_times(text: str, now_ms: int) -> Times:
    """Return what a time, or `{"TopicA": time}` or `{"TopicA": {"0": time}}` says; see `parse_time`."""
    if not text.strip().startswith("{"):
        return Times(parse_time(text, now_ms))
    example = '{"TopicA": "-10m"}, {"TopicA": {"0": 1700000000000}}'
    topics: dict[str, int] = {}
    queues: dict[QueueKey, int] = {}
    for topic, value in parse_object(text, example).items():
        if topic == MARK:
            continue
        check_topic(topic)
        if isinstance(value, dict):
            for number, time in value.items():
                queues[QueueKey(topic, _queue_id(number, example))] = parse_time(_text(time), now_ms)
        else:
            topics[topic] = parse_time(_text(value), now_ms)
    if not topics and not queues:
        raise Unacceptable(f"names no topic. Accepted: {example}.")
    return Times(None, topics, queues)


def parse_time(text: str, now_ms: int) -> int:
    """Return ms since the epoch for a number of them, an ISO 8601 time with its zone, or `-10m` before now.

    A number before 2001 or after 9999 is refused, except 0: it is not in ms.
    """
    stripped = text.strip()
    if re.fullmatch(r"\d+", stripped, re.ASCII) and _number(stripped) <= COUNT_MAX:
        time_ms = _number(stripped)
        if is_in_another_unit(time_ms):
            raise Unacceptable(f"has the number {time_ms}, which {describe_unit(time_ms)}.")
        return time_ms
    accepted = 'Accepted: ms since 1970, "2026-01-31T12:00:00Z", "2026-01-31T12:00:00+01:00", "-10m" (before now).'
    relative = _NUMBER_AND_UNIT.fullmatch(stripped[1:].lower()) if stripped.startswith("-") else None
    if relative is not None:
        unit = _DURATIONS_MS.get(relative[2])
        if unit is None:
            raise Unacceptable(f'has no unit of ms, s, m, h, d after "{stripped}". {accepted}')
        return max(0, now_ms - _number(relative[1]) * unit)
    try:
        moment = datetime.fromisoformat(stripped)
    except ValueError:
        raise Unacceptable(f"is no time. {accepted}") from None
    if moment.tzinfo is None:
        # The session's time zone does not reach a Python source, and a guess would be hours off.
        raise Unacceptable(f"names no time zone. {accepted}")
    return max(0, round(moment.timestamp() * 1000))


def parse_object(text: str, accepted: str) -> dict[str, Any]:
    """Return the members of an object in JSON; `accepted` is for errors."""
    try:
        value = json.loads(text, object_pairs_hook=_members)
    except Unacceptable:
        raise
    except ValueError as error:
        raise Unacceptable(f"is no JSON: {error}. Accepted: {accepted}.") from None
    except RecursionError:
        raise Unacceptable(f"is no JSON that can be read: it is nested too deeply. Accepted: {accepted}.") from None
    if not isinstance(value, dict):
        raise Unacceptable(f"is no JSON object. Accepted: {accepted}.")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object, each named once: of two Python's reader would take the last, without a word."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise Unacceptable(f"names {_shown(name)} twice.")
    return dict(pairs)


def _queue_id(value: object, accepted: str) -> int:
    """Return a queue id from JSON: a number in a list, a text of digits as a key."""
    if type(value) is int and 0 <= value < 2**31:
        return value
    if isinstance(value, str) and re.fullmatch(r"0|[1-9]\d{0,8}", value, re.ASCII):
        return int(value)
    raise Unacceptable(f"has the queue id {_shown(value)}, which is no whole number from 0 on. Accepted: {accepted}.")


def _text(value: object) -> str:
    """Return a time out of JSON as the text that stands there alone."""
    return value if isinstance(value, str) else _shown(value)


def _shown(value: object) -> str:
    """Return a value out of JSON for a message: text in quotes, the beginning of what is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # it could just be read, a few calls further up
        text = "…"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
