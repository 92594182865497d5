"""Watermark file: the slots that are written, and the slots that are valid."""

import json
import zlib
from dataclasses import replace

import pytest

from rmq_spark.store.format.index_file import IndexState
from rmq_spark.store.format.own_files import SLOT_BYTES, OpenSlots, Watermark, decode_slots, encode_slot

NOTE = Watermark(100, 5, 50, b"head", "boot", 7, 60, True, 90, ("a", "b"), number=11, settled_number=4)
SETTLED = replace(NOTE, is_open=False, end=60, dirty=())


def file_of(*notes: Watermark) -> bytes:
    """Return the file after these watermarks were written in this order."""
    data = bytearray(4 * SLOT_BYTES)
    for note in notes:
        place, slot = encode_slot(note)
        assert len(slot) == SLOT_BYTES
        data[place : place + SLOT_BYTES] = slot
    return bytes(data)


@pytest.mark.parametrize(
    ("note", "place"),
    [(NOTE, 1), (replace(NOTE, number=12), 0), (SETTLED, 2), (replace(SETTLED, settled_number=5), 3)],
)
def test_encode_slot_alternates_the_slots(note: Watermark, place: int) -> None:
    found, slot = encode_slot(note)
    assert found == place * 8192
    text = slot[8:].partition(b"\n")[0]
    assert slot == b"%08x" % zlib.crc32(text) + text + b"\n" + bytes(8192 - len(text) - 9)
    value = json.loads(text)
    assert value["v"] == 1
    assert (value["end"], value["last_head"], value["number"]) == (note.end, b"head".hex(), note.number)
    newest, settled = decode_slots(file_of(note))
    assert newest == note
    assert settled == (note if note.is_settled else None)


def test_decode_slots_returns_the_newest_and_the_newest_settled() -> None:
    notes = [SETTLED, NOTE, replace(NOTE, number=12), replace(SETTLED, number=13, settled_number=5)]
    assert decode_slots(file_of(*notes)) == (notes[3], notes[3])
    assert decode_slots(file_of(*notes[:3])) == (notes[2], notes[0])
    assert decode_slots(bytes(4 * SLOT_BYTES)) == (None, None)


def test_decode_slots_ignores_torn_slots_and_other_versions() -> None:
    whole = file_of(NOTE)
    torn = bytearray(whole)
    torn[SLOT_BYTES + 20] ^= 1
    assert decode_slots(bytes(torn)) == (None, None)
    text = whole[SLOT_BYTES + 8 :].partition(b"\n")[0].replace(b'"v": 1', b'"v": 2')
    other = (b"%08x" % zlib.crc32(text) + text + b"\n").ljust(SLOT_BYTES, b"\0")
    assert decode_slots(bytes(SLOT_BYTES) + other) == (None, None)


def test_encode_slot_omits_too_many_dirty_files() -> None:
    many = replace(NOTE, dirty=tuple(f"consumequeue/topic-{number}" for number in range(1000)))
    assert decode_slots(file_of(many))[0] == replace(many, dirty=None)


INDEX = IndexState("20260101000000000", 7, 40, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "dirty", [(), ("a", 'quote " and 标'), None, tuple(f"topic-{number}" for number in range(1000))]
)
@pytest.mark.parametrize("is_syncing", [False, True])
def test_open_slots_encode_as_encode_slot(dirty: tuple[str, ...] | None, is_syncing: bool) -> None:
    begin = replace(NOTE, boot='host "a"', dirty=dirty, is_syncing=is_syncing, index=INDEX)
    slots = OpenSlots(begin)
    later = replace(
        begin,
        end=1 << 40,
        last_ms=-1,
        last_place=7,
        last_head=b"\0\xff",
        logged_end=(1 << 40) + 9,
        number=12,
        index=IndexState("20260101000000000", 7, 40, 11, 12, 13, 14, 15, 16),
    )
    assert slots.encode(begin) == encode_slot(begin)
    assert slots.encode(later) == encode_slot(later)
