"""Queue registry, `rmq/queues`: the queues that rmq-spark created in a store. A broker ignores the file.

If a queue has no files, it is empty, or its files are lost. The folders do not show which of these is true, but the
registry does. The file is a log of lines. Each line contains a CRC-32 (8 hex digits) and a JSON object. If a line is
torn or damaged, readers and writers ignore the whole file, and the next writer rebuilds it from the folders.

| field | meaning |
| --- | --- |
| `v` | version of the format |
| `topics` | topics that were created, and the end of the log at that time (bytes) |
| `queues` | queues that got a file, by topic: queue id, and physical offset of the first record (-1 if unknown) |
| `unsearched` | physical offsets [begin, end) of records by a broker, so their queues may not be in the registry |
| `found` | queues without files that have records in such a range, in the form of `queues`; only writers search |
| `rolls` | queues with several files, by topic: queue id, number of the newest file's first entry, physical offset |
| `configs` | CRC-32 of topics.json before and after rmq-spark's last change to it |

A topic in `topics` is new. If a topic of the same name existed before, the queues in earlier lines and the records
before that end of the log belong to the deleted topic. If the CRC-32 of topics.json is not one of `configs`, another
process has changed it.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.model import QueueKey

VERSION = 1
_CRC_DIGITS = 8


@dataclass(frozen=True, slots=True)
class RegistryLine:
    """One line of a registry, in which None keeps the value of earlier lines.

    `topics` maps each created topic to the end of the log at that time. `queues` and `found` map each queue to the
    physical offset of its first record. `rolls` maps each queue to the number of the first entry in its newest file and
    the physical offset of this entry's record.
    """

    topics: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[QueueKey, int] = field(default_factory=dict)
    unsearched: tuple[int, int] | None = None
    found: Mapping[QueueKey, int] = field(default_factory=dict)
    configs: tuple[int, ...] | None = None
    # An entry 0 means that nothing is known about the queue's newest file.
    rolls: Mapping[QueueKey, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class RegisteredQueues:
    """The content of a registry after all its lines were applied. The fields mean the same as in `RegistryLine`."""

    queues: dict[QueueKey, int] = field(default_factory=dict)
    topics: dict[str, int] = field(default_factory=dict)
    unsearched: tuple[int, int] = (0, 0)
    found: dict[QueueKey, int] = field(default_factory=dict)
    configs: tuple[int, ...] = ()
    rolls: dict[QueueKey, tuple[int, int]] = field(default_factory=dict)

    def knows(self, text: bytes) -> bool:
        """Return whether `text` is what topics.json contained directly before or after rmq-spark's last change to it.

        If not, another process has changed topics.json.
        """
        return zlib.crc32(text) in self.configs

    def is_older(self, text: bytes) -> bool:
        """Return whether `text` is what topics.json contained before rmq-spark's last change to it.

        Then the change may be lost, and topics with queues may be missing in topics.json. There is another reason for
        the older text: a writer appends the line to the registry before it changes topics.json, so a crash in between
        leaves the older text. In this case no queue of the new topics exists.
        """
        return self.knows(text) and zlib.crc32(text) != self.configs[-1]

    def add(self, line: RegistryLine) -> None:
        """Apply one line. Topics in `line.topics` are new, so queues of topics with these names are removed first."""
        if line.topics:
            self.topics.update(line.topics)
            self.queues = {key: first for key, first in self.queues.items() if key.topic not in line.topics}
            self.found = {key: first for key, first in self.found.items() if key.topic not in line.topics}
            self.rolls = {key: roll for key, roll in self.rolls.items() if key.topic not in line.topics}
        self.queues.update(line.queues)
        self.found.update(line.found)
        self.rolls.update(line.rolls)
        if line.unsearched is not None:
            self.unsearched = line.unsearched
        if line.configs is not None:
            self.configs = line.configs


def encode_line(line: RegistryLine) -> bytes:
    """Return the bytes of one line of the registry."""
    value: dict[str, Any] = {"v": VERSION, "topics": dict(line.topics), "queues": _by_topic(line.queues)}
    if line.found:
        value["found"] = _by_topic(line.found)
    if line.unsearched is not None:
        value["unsearched"] = line.unsearched
    if line.configs is not None:
        value["configs"] = line.configs
    if line.rolls:
        rolls: dict[str, list[tuple[int, int, int]]] = {}
        for key, (entry, physical_offset) in line.rolls.items():
            rolls.setdefault(key.topic, []).append((key.queue_id, entry, physical_offset))
        value["rolls"] = rolls
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)) + text + b"\n"


def _by_topic(queues: Mapping[QueueKey, int]) -> dict[str, list[tuple[int, int]]]:
    by_topic: dict[str, list[tuple[int, int]]] = {}
    for key, physical_offset in queues.items():
        by_topic.setdefault(key.topic, []).append((key.queue_id, physical_offset))
    return by_topic


def decode_registry(data: bytes) -> tuple[RegisteredQueues, int]:
    """Return the content of a registry, and the size of its valid lines (bytes). Never raises.

    Lines after the first damaged line are ignored. If the size is smaller than `data`, the registry is damaged.
    """
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
        QueueKey(str(topic), int(queue_id)): (int(entry), int(physical_offset))
        for topic, listed in value.get("rolls", {}).items()
        for queue_id, entry, physical_offset in listed
    }
    return RegistryLine(topics, _keys(value["queues"]), unsearched, _keys(value.get("found", {})), configs, rolls)


def _keys(by_topic: Mapping[str, list[tuple[int, int]]]) -> dict[QueueKey, int]:
    return {
        QueueKey(str(topic), int(queue_id)): int(physical_offset)
        for topic, listed in by_topic.items()
        for queue_id, physical_offset in listed
    }
