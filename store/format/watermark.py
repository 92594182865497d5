"""Our own note of how far a store was written: `rmq/watermark.json`, which a broker ignores.

A broker knows only after a scan where its log ends and which queues lack units. The note says so at once, and what it
says is believed only where it can be checked: the last record still stands where it stood, nothing follows it, and
the checkpoint is the page that we left.

It is replaced as a whole in every critical section, without a sync. So it survives the death of any process, but
after a power cut may be ahead of what it speaks of; `boot` tells the two apart.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from rmq_spark.store.format.index_state import IndexState

VERSION = 1
MAX_DIRTY_FILES = 256  # beyond it the note says "many", and who settles looks at every file


@dataclass(frozen=True, slots=True)
class Watermark:
    """What was true when a critical section ended: offsets in bytes of the commit log, times in ms.

    Every message before `end` has its unit and its keys. Up to `settled_end` all of it is on disk for good, and `dirty`
    names the files that changed since then (None: too many to name).
    """

    end: int
    last_ms: int  # store time of the last message, -1 without one
    last_place: int  # physical offset of the last record, -1 without one
    last_head: bytes  # that record's first bytes
    boot: str  # of the machine: kernel's id of this start, and its name
    checkpoint_crc: int  # of the page that we left
    settled_end: int
    is_open: bool = False  # a section has begun behind `end`; its writer is at work or dead
    dirty: tuple[str, ...] | None = ()
    index: IndexState = IndexState()

    @property
    def is_settled(self) -> bool:
        """Say whether nothing was written since the store was last left in order."""
        return not self.is_open and self.end == self.settled_end and self.dirty == ()

    def opened(self) -> "Watermark":
        """Return the note for the time of a section."""
        return replace(self, is_open=True)


def encode_watermark(note: Watermark) -> bytes:
    """Write the note as JSON."""
    value: dict[str, Any] = {"v": VERSION, **asdict(note), "last_head": note.last_head.hex()}
    if note.dirty is not None and len(note.dirty) > MAX_DIRTY_FILES:
        value["dirty"] = None
    return json.dumps(value).encode()


def decode_watermark(data: bytes) -> Watermark:
    """Read the note. Raises ValueError for anything else, a cut text and another version included."""
    value = json.loads(data)
    try:
        if value.pop("v") != VERSION:
            raise ValueError("a watermark of another version")
        dirty, index = value.pop("dirty"), value.pop("index")
        return Watermark(
            last_head=bytes.fromhex(value.pop("last_head")),
            dirty=None if dirty is None else tuple(dirty),
            index=IndexState(**index),
            **value,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no watermark: {error}") from error
