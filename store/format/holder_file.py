"""Who holds the store's lock: `rmq/holder.json`, a note of ours that a broker ignores.

The kernel does not say whose lock on a file is (fcntl's F_GETLK answers -1), so whoever takes it writes its name
beside it. The note is a courtesy to those who wait: it locks nothing, and after a crash it names somebody dead.
"""

import json
from dataclasses import asdict, dataclass, fields

from rmq_spark.store.format.side_json import parse_json

VERSION = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that took the lock at `since_ms` (ms since the epoch) and has come `progress` steps further since."""

    host: str
    boot_id: str
    pid_space: str
    pid: int
    start_ticks: int
    application: str  # what the user calls it: the Spark application's name
    since_ms: int
    progress: int = 0


_TYPES = {field.name: field.type for field in fields(Holder)}


def encode_holder(holder: Holder) -> bytes:
    """Write the note as JSON."""
    return json.dumps({"v": VERSION, **asdict(holder)}).encode()


def decode_holder(data: bytes) -> Holder | None:
    """Read the note; None for anything else: a torn text, another version. Never raises."""
    try:
        value = parse_json(data)
        if value.pop("v") != VERSION or any(type(value[name]) is not kind for name, kind in _TYPES.items()):
            return None
        return Holder(**value)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
