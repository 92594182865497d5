"""The registry of queues, `rmq/queues`: which queues our writers have made in a store. A broker ignores it.

A queue without files is empty, or its files are lost: the folders alone do not show which. The file is a log of lines,
each a CRC-32 (8 hex digits) and a JSON object. A line that is torn or damaged ends the file.

| field | meaning |
| --- | --- |
| `v` | version of the format |
| `topics` | topics that were made: they have no queue of an earlier line, and their queues begin at queue offset 0 |
| `queues` | queues that got a file, by topic: queue id and physical offset of the first record, -1 if unknown |
| `unsearched` | physical offsets [begin, end) of records that a broker wrote: they may have queues that no line names |
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.units import QueueKey

VERSION = 1
_CRC_DIGITS = 8


@dataclass(slots=True)
class RegisteredQueues:
    """The content of a registry. `queues` has the physical offset of each queue's first record, -1 if unknown."""

    queues: dict[QueueKey, int] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)  # made by our writers
    unsearched: tuple[int, int] = (0, 0)  # physical offsets

    def add(
        self, topics: Iterable[str], queues: Mapping[QueueKey, int], unsearched: tuple[int, int] | None = None
    ) -> None:
        """Apply one line."""
        made = set(topics)
        if made:
            self.topics |= made
            self.queues = {key: place for key, place in self.queues.items() if key.topic not in made}
        self.queues.update(queues)
        if unsearched is not None:
            self.unsearched = unsearched


def encode_line(
    topics: Iterable[str], queues: Mapping[QueueKey, int], unsearched: tuple[int, int] | None = None
) -> bytes:
    """Return one line of a registry."""
    by_topic: dict[str, list[tuple[int, int]]] = {}
    for key, place in queues.items():
        by_topic.setdefault(key.topic, []).append((key.queue_id, place))
    value: dict[str, Any] = {"v": VERSION, "topics": sorted(topics), "queues": by_topic}
    if unsearched is not None:
        value["unsearched"] = unsearched
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)) + text + b"\n"


def decode_registry(data: bytes) -> tuple[RegisteredQueues, int]:
    """Return the content of a registry and the length in bytes of its complete lines. Never raises."""
    found, length = RegisteredQueues(), 0
    for line in data.splitlines(keepends=True):
        text = line[_CRC_DIGITS:-1]
        if not line.endswith(b"\n") or line[:_CRC_DIGITS] != b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)):
            break
        try:
            topics, queues, unsearched = _decode_line(text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            break
        found.add(topics, queues, unsearched)
        length += len(line)
    return found, length


def _decode_line(text: bytes) -> tuple[list[str], dict[QueueKey, int], tuple[int, int] | None]:
    value = json.loads(text)
    if value["v"] != VERSION:
        raise ValueError(value["v"])
    queues = {
        QueueKey(str(topic), int(queue_id)): int(place)
        for topic, listed in value["queues"].items()
        for queue_id, place in listed
    }
    unsearched = None
    if "unsearched" in value:
        begin, end = value["unsearched"]
        unsearched = int(begin), int(end)
    return [str(topic) for topic in value["topics"]], queues, unsearched
