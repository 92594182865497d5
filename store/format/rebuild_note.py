"""The note of a rebuild, `rmq/rebuild`: which files a repair makes anew from the log. A broker ignores it.

The note exists from before the first of these files is removed until all of them are complete again. It is one line: a
CRC-32 (8 hex digits) and a JSON object.

| field | meaning |
| --- | --- |
| `v` | version of the format |
| `queues` | queues whose units are made anew: queue ids by topic |
| `index` | whether the key index is made anew |
"""

import json
import zlib
from dataclasses import dataclass

from rmq_spark.store.format.side_json import parse_json
from rmq_spark.store.units import QueueKey

VERSION = 1
_CRC_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What a repair makes anew: the units of these queues, and the key index if `has_index`."""

    queues: frozenset[QueueKey] = frozenset()
    has_index: bool = False


def encode_rebuild(rebuild: Rebuild) -> bytes:
    """Return the content of the note."""
    by_topic: dict[str, list[int]] = {}
    for key in sorted(rebuild.queues):
        by_topic.setdefault(key.topic, []).append(key.queue_id)
    value = {"v": VERSION, "queues": by_topic, "index": rebuild.has_index}
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)) + text + b"\n"


def decode_rebuild(data: bytes) -> Rebuild | None:
    """Return what the note says, None for one that is damaged or of another version. Never raises."""
    text = data[_CRC_DIGITS:-1]
    if data[:_CRC_DIGITS] != b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)):
        return None
    try:
        value = parse_json(text)
        if value["v"] != VERSION:
            return None
        queues = frozenset(QueueKey(str(topic), int(one)) for topic, ids in value["queues"].items() for one in ids)
        return Rebuild(queues, bool(value["index"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
