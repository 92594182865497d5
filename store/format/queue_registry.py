"""The registry of queues, `rmq/queues`: which queues our writers have made in a store. A broker ignores it.

A queue without files is empty, or its files are lost: the folders alone do not show which. The file is a log of lines,
each a CRC-32 (8 hex digits) and a JSON object. A file with a line that is
torn or damaged does not count, for readers and for writers: the next writer makes it again from the folders.

| field | meaning |
| --- | --- |
| `v` | version of the format |
| `topics` | topics that were made, and where the log ended then: they have no queue of an earlier line or record |
| `queues` | queues that got a file, by topic: queue id and physical offset of the first record, -1 if unknown |
| `unsearched` | physical offsets [begin, end) of records that a broker wrote: they may have queues that no line names |
| `found` | queues without files that a search of such records has found, as in `queues`: only writers use them |
| `rolls` | queues with several files, by topic: queue id, first unit of the newest, physical offset of its record |
| `configs` | CRC-32 of the text of topics.json before and after our last change: with another text, others changed it |
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.units import QueueKey

VERSION = 1
_CRC_DIGITS = 8


@dataclass(frozen=True, slots=True)
class RegistryLine:
    """One line of a registry. None leaves the older value; places are physical offsets of first records."""

    topics: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[QueueKey, int] = field(default_factory=dict)
    unsearched: tuple[int, int] | None = None
    found: Mapping[QueueKey, int] = field(default_factory=dict)
    configs: tuple[int, ...] | None = None
    rolls: Mapping[QueueKey, tuple[int, int]] = field(default_factory=dict)  # unit 0: as if it had one file


@dataclass(slots=True)
class RegisteredQueues:
    """The content of a registry: all its lines together. The fields are those of the lines."""

    queues: dict[QueueKey, int] = field(default_factory=dict)
    topics: dict[str, int] = field(default_factory=dict)
    unsearched: tuple[int, int] = (0, 0)
    found: dict[QueueKey, int] = field(default_factory=dict)
    configs: tuple[int, ...] = ()
    rolls: dict[QueueKey, tuple[int, int]] = field(default_factory=dict)

    def knows(self, text: bytes) -> bool:
        """Say whether this text of topics.json is ours: with another one, others have changed it."""
        return zlib.crc32(text) in self.configs

    def is_older(self, text: bytes) -> bool:
        """Say whether a text of topics.json is that from before our last change of it: queues made since may be lost.

        Our writers write the line before the file. A crash in between leaves the older text, too, and no queue of the
        topics that were about to be made.
        """
        return self.knows(text) and zlib.crc32(text) != self.configs[-1]

    def add(self, line: RegistryLine) -> None:
        """Apply one line."""
        if line.topics:
            self.topics.update(line.topics)
            self.queues = {key: place for key, place in self.queues.items() if key.topic not in line.topics}
            self.found = {key: place for key, place in self.found.items() if key.topic not in line.topics}
            self.rolls = {key: roll for key, roll in self.rolls.items() if key.topic not in line.topics}
        self.queues.update(line.queues)
        self.found.update(line.found)
        self.rolls.update(line.rolls)
        if line.unsearched is not None:
            self.unsearched = line.unsearched
        if line.configs is not None:
            self.configs = line.configs


def encode_line(line: RegistryLine) -> bytes:
    """Return the bytes of one line."""
    value: dict[str, Any] = {"v": VERSION, "topics": dict(line.topics), "queues": _by_topic(line.queues)}
    if line.found:
        value["found"] = _by_topic(line.found)
    if line.unsearched is not None:
        value["unsearched"] = line.unsearched
    if line.configs is not None:
        value["configs"] = line.configs
    if line.rolls:
        rolls: dict[str, list[tuple[int, int, int]]] = {}
        for key, (unit, place) in line.rolls.items():
            rolls.setdefault(key.topic, []).append((key.queue_id, unit, place))
        value["rolls"] = rolls
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)) + text + b"\n"


def _by_topic(queues: Mapping[QueueKey, int]) -> dict[str, list[tuple[int, int]]]:
    by_topic: dict[str, list[tuple[int, int]]] = {}
    for key, place in queues.items():
        by_topic.setdefault(key.topic, []).append((key.queue_id, place))
    return by_topic


def decode_registry(data: bytes) -> tuple[RegisteredQueues, int]:
    """Return the content of a registry and the length in bytes of its complete lines. Never raises."""
    found, length = RegisteredQueues(), 0
    for line in data.splitlines(keepends=True):
        text = line[_CRC_DIGITS:-1]
        if not line.endswith(b"\n") or line[:_CRC_DIGITS] != b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)):
            break
        try:
            one = _decode_line(text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            break
        found.add(one)
        length += len(line)
    return found, length


def _decode_line(text: bytes) -> RegistryLine:
    value = json.loads(text)
    if value["v"] != VERSION:
        raise ValueError(value["v"])
    unsearched = None
    if "unsearched" in value:
        begin, end = value["unsearched"]
        unsearched = int(begin), int(end)
    configs = tuple(int(crc) for crc in value["configs"]) if "configs" in value else None
    topics = {str(topic): int(end) for topic, end in value["topics"].items()}
    rolls = {
        QueueKey(str(topic), int(queue_id)): (int(unit), int(place))
        for topic, listed in value.get("rolls", {}).items()
        for queue_id, unit, place in listed
    }
    return RegistryLine(topics, _keys(value["queues"]), unsearched, _keys(value.get("found", {})), configs, rolls)


def _keys(by_topic: Mapping[str, list[tuple[int, int]]]) -> dict[QueueKey, int]:
    return {
        QueueKey(str(topic), int(queue_id)): int(place)
        for topic, listed in by_topic.items()
        for queue_id, place in listed
    }
