"""The independent decoder on stores that are not in this folder: copies with one thing changed."""

import importlib.util
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def load_decoder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_decode_altered", HERE / "decode_store.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


decoder = load_decoder()
FIRST = f"{0:020d}"


@pytest.fixture
def basic(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / "basic", tmp_path / "basic"))


def queue(store: Path, topic: str, queue_id: int) -> Any:
    return decoder.decode_store(store)["topics"][topic][str(queue_id)]


def patch(file: Path, position: int, new: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        opened.write(new)


def test_units_of_a_deleted_segment_are_expired(basic: Path) -> None:
    (basic / "commitlog" / FIRST).unlink()
    found = queue(basic, "TopicR", 0)
    assert (found["min"], found["max"], found["units"]["expired"]) == (17, 60, 17)
    assert found["rows"][0]["keys"] == "rk17"
    gone = queue(basic, "TopicA", 0)  # all its messages: the next offset stays
    assert (gone["min"], gone["max"], gone["rows"]) == (3, 3, [])


@pytest.mark.parametrize(
    ("physical_offset", "size"),
    [
        (384, 136),  # of the same queue, but queue offset 2
        (1440, 126),  # of another topic, queue offset 1
        (170, 97),  # no record starts there
        (169, 98),  # the record has 97 bytes
    ],
)
def test_a_unit_that_is_not_its_records_ends_the_queue(basic: Path, physical_offset: int, size: int) -> None:
    unit = struct.pack(">qi", physical_offset, size)  # instead of (169, 97), queue offset 1
    patch(basic / "consumequeue" / "TopicA" / "0" / FIRST, 20, unit)
    found = queue(basic, "TopicA", 0)
    assert (found["min"], found["max"], found["units"]["stale"]) == (0, 1, 2)


@pytest.mark.parametrize(
    ("position", "new"),
    [
        (169 + 4, b"\x00"),  # magic
        (169 + 28, struct.pack(">q", 170)),  # PHYSICALOFFSET
        (169 + 84, struct.pack(">i", 1)),  # body length: the fields no longer fill the record
        (266, struct.pack(">i", 119)),  # total size of the next record
        (266 + 88, b"X"),  # body of the next record: CRC
    ],
)
def test_the_log_ends_before_the_first_record_that_is_not_whole(basic: Path, position: int, new: bytes) -> None:
    patch(basic / "commitlog" / FIRST, position, new)
    log = decoder.walk_log(basic)
    assert log.end == (169 if position < 266 else 266)
    assert max(log.records) < log.end


def test_properties_lose_what_is_empty_and_keep_the_last_of_equals() -> None:
    raw = b"a\x011\x02b\x01\x02\x01c\x02d\x02a\x012\x02e\x01x\x01y\x02last\x01z"
    assert decoder.parse_properties(raw) == {"a": "2", "e": "x\x01y", "last": "z"}
    assert decoder.parse_properties(b"") == {}


def test_lz4_frames_come_out_with_long_lengths_and_overlapping_copies() -> None:
    text = b"ab" * 500
    # 2 literals, a copy of 998 bytes from 2 back (998 - 4 = 15 + 3 * 255 + 214), no literals at last.
    block = bytes([0x2F]) + b"ab" + struct.pack("<H", 2) + b"\xff\xff\xff" + bytes([214, 0])
    stored = b"plain"
    frame = bytes.fromhex("04224d186070") + b"\x00"
    frame += struct.pack("<I", len(block)) + block
    frame += struct.pack("<I", len(stored) | 1 << 31) + stored + bytes(4)
    assert decoder.unpack_lz4(frame) == text + stored
