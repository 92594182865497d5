"""Parsers of option values. Each converts the text of an option to a Python value.

A parser returns the value, or raises InvalidValueError. `option_table` puts the option and its text before the message,
as in `maxOffsetsPerTrigger="0": expected an integer ≥ 1.` So a message has the form `expected …`, or
`found …; expected …`. Offsets are queue offsets or one of the constants below. Times are in ms since the epoch,
durations in ms, sizes in bytes.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from rmq_spark.store.model import QueueKey, describe_unit, is_in_another_unit

# Values that stand for a queue offset. LATEST and EARLIEST are those of Kafka's offset JSON.
LATEST = -1
EARLIEST = -2
GROUP = -3  # the group's committed offset; only as a word for all queues, never in JSON
COUNT_MAX = 2**63 - 1  # Spark and RocketMQ keep counts in a long
_SHOWN_CHARACTERS = 80  # of an invalid name or value inside JSON
TOPIC_LENGTH_MAX = 255  # TopicValidator, 5.x: 127, and 255 with %RETRY% or %DLQ% in front
# A broker can still load this number of queues. Each queue of a topic is a folder, so a typing error must not create
# millions.
QUEUES_MAX = 1 << 16
INT_MAX = (1 << 31) - 1

# The key of the metadata in a stream's offset; "@" is not a legal character of a topic.
MARK = "@"
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]+")
_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATIONS_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER_AND_UNIT = re.compile(r"(\d+)\s*([a-z]*)", re.ASCII)


class InvalidValueError(ValueError):
    """The text of an option is not valid. The message says what was expected.

    `option_table.parse_value` adds the option's name, its text and an example.
    """


@dataclass(frozen=True, slots=True)
class Positions:
    """The offsets of startingOffsets or endingOffsets: for single queues (`queues`), and for all others (`default`).

    Offsets of single queues may be EARLIEST or LATEST. `default` is EARLIEST, LATEST, GROUP, or None if it is not
    given; the kind of query then determines it.
    """

    default: int | None = None
    queues: Mapping[QueueKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Times:
    """Times in ms since the epoch: for single queues, for topics, and for all other queues (None if not given)."""

    default_ms: int | None = None
    topics: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[QueueKey, int] = field(default_factory=dict)

    def of(self, queue: QueueKey) -> int | None:
        """Return the time of a queue: its own, else that of its topic, else the default. None means no time."""
        return self.queues.get(queue, self.topics.get(queue.topic, self.default_ms))

    def of_each(self, queues: Iterable[QueueKey]) -> dict[QueueKey, int]:
        """Return the time of each of `queues` that has one."""
        return {queue: time_ms for queue in queues if (time_ms := self.of(queue)) is not None}


def parse_text(text: str) -> str:
    """Return the text without surrounding blanks. An empty text is invalid."""
    if not text.strip():
        raise InvalidValueError("expected a text that is not empty.")
    return text.strip()


def parse_words(*accepted: str) -> Callable[[str], str]:
    """Return a parser that accepts the words in `accepted`. It ignores case, and returns the spelling in `accepted`."""
    words = {word.lower(): word for word in accepted}

    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise InvalidValueError(f"expected one of: {', '.join(accepted)}.")
        return words[text.strip().lower()]

    return parse


def parse_flag(text: str) -> bool:
    """Parse the words true and false."""
    return parse_words("true", "false")(text) == "true"


def parse_count(text: str, maximum: int = COUNT_MAX) -> int:
    """Parse an integer from 1 to `maximum`, which may have underscores between its digits."""
    return _check_integer(text.strip().replace("_", ""), 1, maximum)


def parse_integer(text: str, maximum: int = COUNT_MAX) -> int:
    """Parse an integer from 0 to `maximum`."""
    return _check_integer(text.strip(), 0, maximum)


def parse_version(text: str) -> int:
    """Parse a version: an integer from 0, of which the next one is a count too."""
    return parse_integer(text, COUNT_MAX - 1)


def _check_integer(text: str, minimum: int, maximum: int) -> int:
    found = re.fullmatch(r"[+]?(\d+)", text, re.ASCII)
    if found is None or not minimum <= _number(found[1]) <= maximum:
        limits = f"≥ {minimum}" if maximum == COUNT_MAX else f"from {minimum} to {maximum}"
        raise InvalidValueError(f"expected an integer {limits}.")
    return _number(found[1])


def parse_size(text: str, minimum: int = 1, maximum: int = COUNT_MAX) -> int:
    """Parse a size: a number, optionally followed by b, k, m, g or t (powers of 1024). Return it in bytes."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    unit = _SIZES.get(re.sub(r"(?<=[kmgt])i?b$", "", found[2])) if found else None
    if found is None or unit is None or not minimum <= _number(found[1]) * unit <= maximum:
        least = "1 byte" if minimum else "0"
        wanted = f"a size ≥ {least}" if maximum == COUNT_MAX else f"a size from {least} to {maximum >> 20}m"
        raise InvalidValueError(f"expected {wanted}: bytes, or a number with k, m or g, such as 64m.")
    return _number(found[1]) * unit


def parse_duration(text: str, minimum_ms: int = 1) -> int:
    """Parse a duration: a number, optionally followed by ms (the default), s, m, h or d. Return it in ms."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    unit = _DURATIONS_MS.get(found[2] or "ms") if found else None
    if found is None or unit is None or not minimum_ms <= _number(found[1]) * unit <= COUNT_MAX:
        least = show_duration(minimum_ms) if minimum_ms else "0"
        raise InvalidValueError(f"expected a duration ≥ {least}: a number with ms, s, m, h or d, such as 15m.")
    return _number(found[1]) * unit


def show_duration(duration_ms: int) -> str:
    """Return a duration as text for `parse_duration`: in s, or in ms if it is not a multiple of 1 s."""
    return f"{duration_ms}ms" if duration_ms % 1000 else f"{duration_ms // 1000}s"


def _number(digits: str) -> int:
    """Return the number with these digits. For a very long one return COUNT_MAX + 1, which is above every limit.

    Python refuses to convert a text with thousands of digits.
    """
    significant = digits.lstrip("0") or "0"
    return int(significant) if len(significant) <= len(str(COUNT_MAX)) else COUNT_MAX + 1


def parse_path(text: str) -> str:
    """Parse the path of a local folder. A `file:` URI is valid; URIs with other schemes are not."""
    path = parse_text(text)
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):", path)
    if scheme is not None:
        path = _parse_file_uri(scheme[1], path[len(scheme[0]) :])
    if not path:
        raise InvalidValueError("found no folder; expected a path, or file:///path.")
    if "\0" in path:  # as it is, or as %00 in a URI
        raise InvalidValueError("found the character 0; expected a path, which cannot contain it.")
    return path


def _parse_file_uri(scheme: str, path: str) -> str:
    if re.match(r"\d+($|[;,])", path):
        raise InvalidValueError(
            "found the address of a name server; expected a path. For a cluster give nameServer instead of path, for a "
            "folder of this name ./host:port."
        )
    if scheme.lower() != "file":
        raise InvalidValueError(
            f"found the scheme {scheme}:; expected a path of a file system, or file:///path. Mount the storage at the "
            "same path on the driver and every executor, and give that path."
        )
    if path.startswith("//"):
        host, slash, path = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise InvalidValueError(f'found the host "{host}"; expected file:///path, with three slashes.')
        path = slash + path
    return unquote(path)  # "?" and "#" are part of a name, as in Spark


def parse_paths(text: str) -> tuple[str, ...]:
    """Parse the paths of local folders, which are separated by commas."""
    return tuple(parse_path(part) for part in parse_names(text))


def parse_names(text: str) -> tuple[str, ...]:
    """Parse names that are separated by commas. An empty name, or the same name twice, is invalid."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise InvalidValueError("found an empty name; expected names separated by commas.")
    _check_distinct(names)
    return tuple(names)


def _check_distinct(names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidValueError(f"found {_shown(name)} twice; expected each name once.")


def check_topic(name: str) -> str:
    """Return the name if it is legal for a topic, as TopicValidator#validateTopic (5.x) defines it."""
    if not _TOPIC.fullmatch(name) or len(name) > TOPIC_LENGTH_MAX:
        raise InvalidValueError(
            f'found the topic name "{name[:_SHOWN_CHARACTERS]}"; expected up to {TOPIC_LENGTH_MAX} letters, digits, '
            "%, |, - and _."
        )
    return name


def parse_topic(text: str) -> str:
    """Parse one topic name, which must be legal."""
    return check_topic(parse_text(text))


def parse_topics(text: str) -> tuple[str, ...]:
    """Parse topic names that are separated by commas. All must be legal, so none may be a pattern."""
    names = parse_names(text)
    if any(character in name for name in names for character in "*+?[](){}^$\\"):
        raise InvalidValueError(
            "found a pattern; expected names of topics. For a pattern give subscribePattern instead of subscribe: a "
            "regular expression, such as orders.*, which a whole name must match."
        )
    return tuple(check_topic(name) for name in names)


def parse_pattern(text: str) -> str:
    """Return the text of a regular expression if Python's `re` can compile it."""
    try:
        re.compile(parse_text(text))
    except (re.error, OverflowError) as error:
        raise InvalidValueError(f"expected a regular expression of Python: {error}.") from None
    except RecursionError:
        raise InvalidValueError("found a regular expression nested too deeply; expected a simpler one.") from None
    return text.strip()


def parse_search_words(text: str) -> tuple[str, ...]:
    """Parse keys or ids that are separated by blanks. In RocketMQ a key may contain any character except a blank."""
    return tuple(dict.fromkeys(parse_text(text).split()))


def parse_assignment(text: str) -> tuple[QueueKey, ...]:
    """Parse queues in JSON, such as `{"TopicA": [0, 1]}`. Return them sorted."""
    example = '{"TopicA": [0, 1]}'
    keys = []
    for topic, numbers in parse_object(text, example).items():
        check_topic(topic)
        if not isinstance(numbers, list) or not numbers:
            raise InvalidValueError(f"found {_shown(numbers)} for topic {topic}; expected queue ids, as in {example}.")
        keys += [_queue(topic, number, example) for number in numbers]
    if not keys:
        raise InvalidValueError(f"found no queue; expected at least one, as in {example}.")
    return tuple(sorted(set(keys)))


def parse_starts(text: str) -> Positions:
    """Parse startingOffsets: the word group, or anything that `parse_positions` accepts."""
    if text.strip().lower() == "group":
        return Positions(GROUP)
    return parse_positions(text, 'earliest, latest, group or {"TopicA": {"0": 42}}')


def parse_positions(text: str, accepted: str = 'earliest, latest or {"TopicA": {"0": 42}}') -> Positions:
    """Parse the word earliest or latest, or offsets in JSON such as `{"TopicA": {"0": 42}}`.

    In JSON -1 means latest and -2 earliest. The offset in a stream's progress report is valid too; its key "@" is
    skipped. `accepted` is the text for error messages.
    """
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return Positions(words[text.strip().lower()])
    if not text.strip().startswith("{"):
        raise InvalidValueError(f"expected {accepted}.")
    queues = {}
    for topic, offsets in parse_object(text, accepted).items():
        if topic == MARK:
            continue
        check_topic(topic)
        if not isinstance(offsets, dict):
            raise InvalidValueError(f"found {_shown(offsets)} for topic {topic}; expected offsets by queue id.")
        for number, offset in offsets.items():
            key = _queue(topic, number, accepted)
            if type(offset) is not int or not EARLIEST <= offset <= COUNT_MAX:
                raise InvalidValueError(
                    f"found the offset {_shown(offset)} for queue {key}; expected an integer ≥ 0, -1 (latest) or "
                    "-2 (earliest)."
                )
            queues[key] = offset
    return Positions(None, queues)


def parse_times(text: str, now_ms: int) -> Times:
    """Parse one time for all queues, or times in JSON: `{"TopicA": time}` or `{"TopicA": {"0": time}}`.

    `parse_time` describes the form of a time. `now_ms` is the current time.
    """
    if not text.strip().startswith("{"):
        return Times(parse_time(text, now_ms))
    example = '{"TopicA": "-10m"} or {"TopicA": {"0": 1700000000000}}'
    topics: dict[str, int] = {}
    queues: dict[QueueKey, int] = {}
    for topic, value in parse_object(text, example).items():
        if topic == MARK:
            continue
        check_topic(topic)
        if isinstance(value, dict):
            for number, time in value.items():
                queues[_queue(topic, number, example)] = _parse_json_time(time, now_ms)
        else:
            topics[topic] = _parse_json_time(value, now_ms)
    if not topics and not queues:
        raise InvalidValueError(f"found no topic; expected {example}.")
    return Times(None, topics, queues)


def _parse_json_time(value: object, now_ms: int) -> int:
    return parse_time(value if isinstance(value, str) else _shown(value), now_ms)


def parse_time(text: str, now_ms: int) -> int:
    """Parse a time and return it in ms since the epoch.

    The text is a number of ms since the epoch, an ISO 8601 time with a time zone, or a duration before `now_ms` such as
    "-10m". A number that would be a time before 2001 or after 9999 is invalid, except 0, because its unit is certainly
    not ms.
    """
    stripped = text.strip()
    if re.fullmatch(r"\d+", stripped, re.ASCII) and _number(stripped) <= COUNT_MAX:
        time_ms = _number(stripped)
        if is_in_another_unit(time_ms):
            raise InvalidValueError(f"found the number {time_ms}, which {describe_unit(time_ms)}.")
        return time_ms
    expected = 'expected ms since 1970, "2026-01-31T12:00:00Z", "2026-01-31T12:00:00+01:00" or "-10m" (before now).'
    relative = _NUMBER_AND_UNIT.fullmatch(stripped[1:].lower()) if stripped.startswith("-") else None
    if relative is not None:
        unit = _DURATIONS_MS.get(relative[2])
        if unit is None:
            raise InvalidValueError(f'found "{stripped}" without the unit ms, s, m, h or d; {expected}')
        return max(0, now_ms - _number(relative[1]) * unit)
    try:
        moment = datetime.fromisoformat(stripped)
    except ValueError:
        raise InvalidValueError(expected) from None
    if moment.tzinfo is None:
        # A Python source does not get the session's time zone, and a guess could be wrong by hours.
        raise InvalidValueError(f"found a time without a time zone; {expected}")
    return max(0, round(moment.timestamp() * 1000))


def parse_object(text: str, accepted: str) -> dict[str, Any]:
    """Return the members of a JSON object. `accepted` is the text for error messages that says what is valid."""
    try:
        value = json.loads(text, object_pairs_hook=_members)
    except InvalidValueError:
        raise
    except ValueError as error:
        raise InvalidValueError(f"found invalid JSON ({error}); expected {accepted}.") from None
    except RecursionError:
        raise InvalidValueError(f"found JSON nested too deeply; expected {accepted}.") from None
    if not isinstance(value, dict):
        raise InvalidValueError(f"found JSON that is not an object; expected {accepted}.")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dict. A name that occurs twice is invalid.

    Python's JSON reader would silently keep only the last of several members with the same name.
    """
    _check_distinct([name for name, _ in pairs])
    return dict(pairs)


def _queue(topic: str, value: object, accepted: str) -> QueueKey:
    """Return a queue from JSON: a number in a list, or a string of digits, after a broker's name and ":" if any."""
    if type(value) is int and 0 <= value < 2**31:
        return QueueKey(topic, value)
    if isinstance(value, str) and re.fullmatch(r"(?:[^/:\s]+:)?(?:0|[1-9]\d{0,8})", value, re.ASCII):
        return QueueKey.of_text(topic, value)
    raise InvalidValueError(f"found the queue id {_shown(value)}; expected an integer ≥ 0, as in {accepted}.")


def _shown(value: object) -> str:
    """Return a JSON value as text for an error message. Strings have quotes; a long text is cut off."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # the value is deep, and there are a few more calls on the stack now than when it was read
        text = "…"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
