"""Extended entries of a consume queue, and their addresses."""

from pathlib import Path

import pytest

from rmq_spark.store.format.consume_queue_entry import (
    MAX_ADDRESS,
    MAX_POSITION,
    ExtendedEntry,
    NoEntry,
    decode_entries,
    decode_extended_entry,
    encode_end_of_file,
    encode_extended_entry,
    fits,
    is_address,
    iter_extended_entries,
    to_address,
    to_position,
)
from rmq_spark.store.format.java import string_hash

TWO = encode_extended_entry(ExtendedEntry(-7, 1795223890858, b"\x01\x02\x03")) + encode_extended_entry(
    ExtendedEntry(0, 0)
)


def test_to_position_finds_the_extended_entries_of_a_golden_queue(golden: Path) -> None:
    units = decode_entries((golden / "batchcq-cqext/consumequeue/TopicE/0/00000000000000000000").read_bytes())
    data = (golden / "batchcq-cqext/consumequeue_ext/TopicE/0/00000000000000000000").read_bytes()
    for number in range(3):
        address = int(units[number]["tags_code"])
        assert is_address(address)
        unit = decode_extended_entry(data, to_position(address))
        assert isinstance(unit, ExtendedEntry)
        assert unit.tags_code == string_hash(f"t{number}")
        assert unit.store_timestamp in (1795223890858, 1795223890859)
        assert unit.bitmap == b""
    assert [position for position, _ in iter_extended_entries(data)] == [0, 20, 40]
    assert b"".join(encode_extended_entry(unit) for _, unit in iter_extended_entries(data)) == data[:60]


@pytest.mark.parametrize("position", [0, 1, 48 << 20, MAX_POSITION])
def test_to_position_restores_the_position(position: int) -> None:
    address = to_address(position)
    assert is_address(address)
    assert to_position(address) == position


def test_is_address_is_false_for_hashes() -> None:
    assert not is_address(-(1 << 31))
    assert not is_address(0)
    assert is_address(MAX_ADDRESS)
    assert MAX_ADDRESS == -2147483649


@pytest.mark.parametrize("size", range(len(TWO) + 1))
def test_iter_extended_entries_stops_at_an_incomplete_entry(size: int) -> None:
    whole = [ExtendedEntry(-7, 1795223890858, b"\x01\x02\x03"), ExtendedEntry(0, 0)]
    count = 2 if size == len(TWO) else 1 if size >= 23 else 0
    assert [unit for _, unit in iter_extended_entries(TWO[:size])] == whole[:count]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes left"),
        (bytes(20), "nothing is written"),
        (encode_end_of_file() + bytes(18), "entries end here"),
        (b"\x00\x15" + bytes(19), "extended entry of 21 bytes with a bit map of 0"),
        (b"\x00\x16" + bytes(16) + b"\x00\x02\x00", "extended entry of 22 bytes, 21 left"),
        (b"\x80\x00" + bytes(18), "extended entry of -32768 bytes"),
        (b"\x00\x13" + bytes(16) + b"\xff\xff", "bit map of -1"),
    ],
)
def test_decode_extended_entry_returns_no_entry_for_invalid_bytes(data: bytes, why: str) -> None:
    found = decode_extended_entry(data, 0)
    assert isinstance(found, NoEntry)
    assert why in found.why


def test_decode_extended_entry_returns_no_entry_outside_the_file() -> None:
    assert isinstance(decode_extended_entry(TWO, -1), NoEntry)
    assert isinstance(decode_extended_entry(TWO, 1 << 40), NoEntry)


def test_fits_leaves_four_bytes_for_the_mark() -> None:
    unit = ExtendedEntry(0, 0, b"x" * 10)
    assert fits(unit, 0, 34)
    assert not fits(unit, 0, 33)
    assert encode_end_of_file() == b"\xff\xff"
