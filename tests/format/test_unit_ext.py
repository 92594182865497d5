"""Units of a consume queue's extension, and the addresses that lead to them."""

from pathlib import Path

import pytest

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.queue_unit import decode_units
from rmq_spark.store.format.unit_ext import (
    MAX_ADDRESS,
    MAX_POSITION,
    NoUnit,
    UnitExt,
    decode_unit_ext,
    encode_end_of_file,
    encode_unit_ext,
    fits,
    is_address,
    iter_units_ext,
    to_address,
    to_position,
)

TWO = encode_unit_ext(UnitExt(-7, 1795223890858, b"\x01\x02\x03")) + encode_unit_ext(UnitExt(0, 0))


def test_the_addresses_in_a_golden_queue_lead_to_its_extension(golden: Path) -> None:
    units = decode_units((golden / "batchcq-cqext/consumequeue/TopicE/0/00000000000000000000").read_bytes())
    data = (golden / "batchcq-cqext/consumequeue_ext/TopicE/0/00000000000000000000").read_bytes()
    for number in range(3):
        address = int(units[number]["tags_code"])
        assert is_address(address)
        unit = decode_unit_ext(data, to_position(address))
        assert isinstance(unit, UnitExt)
        assert unit.tags_code == string_hash(f"t{number}")
        assert unit.store_timestamp in (1795223890858, 1795223890859)
        assert unit.bitmap == b""
    assert [position for position, _ in iter_units_ext(data)] == [0, 20, 40]
    assert b"".join(encode_unit_ext(unit) for _, unit in iter_units_ext(data)) == data[:60]


@pytest.mark.parametrize("position", [0, 1, 48 << 20, MAX_POSITION])
def test_an_address_gives_its_position_back(position: int) -> None:
    address = to_address(position)
    assert is_address(address)
    assert to_position(address) == position


def test_no_hash_is_an_address() -> None:
    assert not is_address(-(1 << 31))
    assert not is_address(0)
    assert is_address(MAX_ADDRESS)
    assert MAX_ADDRESS == -2147483649


@pytest.mark.parametrize("size", range(len(TWO) + 1))
def test_of_a_cut_file_the_whole_units_are_read(size: int) -> None:
    whole = [UnitExt(-7, 1795223890858, b"\x01\x02\x03"), UnitExt(0, 0)]
    count = 2 if size == len(TWO) else 1 if size >= 23 else 0
    assert [unit for _, unit in iter_units_ext(TWO[:size])] == whole[:count]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes left"),
        (bytes(20), "nothing is written"),
        (encode_end_of_file() + bytes(18), "units end here"),
        (b"\x00\x15" + bytes(19), "unit of 21 bytes with a bit map of 0"),
        (b"\x00\x16" + bytes(16) + b"\x00\x02\x00", "unit of 22 bytes, 21 left"),
        (b"\x80\x00" + bytes(18), "unit of -32768 bytes"),
        (b"\x00\x13" + bytes(16) + b"\xff\xff", "bit map of -1"),
    ],
)
def test_what_is_no_unit_is_an_answer(data: bytes, why: str) -> None:
    found = decode_unit_ext(data, 0)
    assert isinstance(found, NoUnit)
    assert why in found.why


def test_a_place_outside_the_file_has_no_unit() -> None:
    assert isinstance(decode_unit_ext(TWO, -1), NoUnit)
    assert isinstance(decode_unit_ext(TWO, 1 << 40), NoUnit)


def test_a_unit_leaves_four_bytes_for_the_mark() -> None:
    unit = UnitExt(0, 0, b"x" * 10)
    assert fits(unit, 0, 34)
    assert not fits(unit, 0, 33)
    assert encode_end_of_file() == b"\xff\xff"
