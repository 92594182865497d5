"""Our own note of how far a store was written: `rmq/watermark`, which a broker ignores.

A broker knows only after a scan where its log ends and which queues lack units. The note says so at once, and what it
says is believed only where it can be checked: the last record still stands where it stood, nothing follows it, and
the checkpoint is the page that we left.

The file has four slots, each a line of JSON behind its CRC. Two are written in turn in every critical section, without
a sync: they survive the death of any process, but after a power cut may be ahead of what they speak of, or gone; `boot`
tells the two cases apart. The other two are written in turn when the store is settled, and synced: what they say holds
through a power cut. In each pair a half-written slot leaves the other.

A note with `is_syncing` is written before each sync of the store's files, and replaced after it. Linux reports a failed
sync once, to one process: the next sync of the same file succeeds, and the bytes are not on disk. The note outlives the
process that got the error, needs no room on a full disk, and counts in the boot that wrote it: after another one only
what is on disk can be read.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rmq_spark.store.format.index_state import IndexState
from rmq_spark.store.format.side_json import parse_json

VERSION = 1
SLOT_BYTES = 8 << 10
SLOT_COUNT = 4
_CRC_DIGITS = 8


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
    logged_end: int = 0  # in an open section: where its records end, once all of them are written
    dirty: tuple[str, ...] | None = ()
    index: IndexState = field(default_factory=IndexState)
    number: int = 0  # counts the notes: the higher one of two is the newer
    settled_number: int = 0  # counts the settled ones
    is_syncing: bool = False  # a sync of the files in `dirty` began; it failed, unless a writer is at work

    @property
    def is_settled(self) -> bool:
        """Say whether nothing was written since the store was last left in order."""
        return not self.is_open and not self.is_syncing and self.end == self.settled_end and self.dirty == ()


def encode_slot(note: Watermark) -> tuple[int, bytes]:
    """Return where in the file a note goes (bytes), and a slot with it."""
    value: dict[str, Any] = {"v": VERSION, **asdict(note), "last_head": note.last_head.hex()}
    text = json.dumps(value).encode()
    if len(text) > SLOT_BYTES - _CRC_DIGITS - 1:
        text = json.dumps({**value, "dirty": None}).encode()  # too many to name
    slot = b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)) + text + b"\n"
    assert len(slot) <= SLOT_BYTES, len(slot)
    place = 2 + note.settled_number % 2 if note.is_settled else note.number % 2
    return place * SLOT_BYTES, slot.ljust(SLOT_BYTES, b"\0")


def decode_slots(data: bytes) -> tuple[Watermark | None, Watermark | None]:
    """Return the newest note in the file and the newest settled one; None where none can be read. Never raises."""
    found = [_decode_slot(data[at * SLOT_BYTES : (at + 1) * SLOT_BYTES]) for at in range(SLOT_COUNT)]
    return _newest(found), _newest(found[2:])


def _newest(notes: Sequence[Watermark | None]) -> Watermark | None:
    return max((note for note in notes if note is not None), key=lambda note: note.number, default=None)


def _decode_slot(slot: bytes) -> Watermark | None:
    line = slot.partition(b"\n")[0]
    text = line[_CRC_DIGITS:]
    if line[:_CRC_DIGITS] != b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)):
        return None
    try:
        value = parse_json(text)
        if value.pop("v") != VERSION:
            return None  # of another release, which knows what it meant
        dirty, index = value.pop("dirty"), value.pop("index")
        head = bytes.fromhex(value.pop("last_head"))
        return Watermark(
            last_head=head, dirty=None if dirty is None else tuple(dirty), index=IndexState(**index), **value
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
