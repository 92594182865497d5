"""Message ids: parsed, encoded, and refused with the expected format."""

import pickle

import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.java import Host
from rmq_spark.store.format.message_ids import (
    OffsetMessageId,
    UniqueKey,
    make_unique_key,
    may_be_offset_message_id,
    parse_offset_message_id,
    parse_unique_key,
)

OFFSET_ID = "7F00000100002A9F000000000000CD9E"
OFFSET_ID_V6 = "20010DB800000000000000000000000100002A9F000000000000CD9E"
KEY = "C0A8010A04D218B4AAC2684E0E2F0007"
KEY_V6 = "FD00000000000000000000000000000215684E0E2F2A674C646F0000"


def test_parse_offset_message_id_returns_host_and_offset() -> None:
    found = parse_offset_message_id(OFFSET_ID)
    assert found == OffsetMessageId(Host("127.0.0.1", 10911), 52638)
    assert str(found) == OFFSET_ID
    assert parse_offset_message_id(OFFSET_ID.lower()) == found


def test_parse_offset_message_id_accepts_ipv6() -> None:
    found = parse_offset_message_id(OFFSET_ID_V6)
    assert found == OffsetMessageId(Host("2001:db8::1", 10911), 52638)
    assert str(found) == OFFSET_ID_V6


def test_parse_unique_key_returns_the_parts() -> None:
    assert parse_unique_key(KEY) == UniqueKey("192.168.1.10", 1234, 0x18B4AAC2, 0x684E0E2F, 7)
    assert str(parse_unique_key(KEY)) == KEY
    assert parse_unique_key(KEY_V6).ip == "fd00::2"
    assert str(parse_unique_key(KEY_V6)) == KEY_V6


@pytest.mark.parametrize("whole", [OFFSET_ID, OFFSET_ID_V6])
def test_parsers_refuse_an_id_cut_anywhere_or_too_long(whole: str) -> None:
    for size in [*range(len(whole)), len(whole) + 1]:
        text = (whole * 2)[:size]
        if size in (32, 56):
            continue
        for parse in (parse_offset_message_id, parse_unique_key):
            with pytest.raises(OptionError, match=f"of {size} characters is not .*; expected 32 hex digits, or 56"):
                parse(text)
        assert not may_be_offset_message_id(text)


@pytest.mark.parametrize(
    "text", ["G" * 32, " " * 32, "é" * 32, "0x" + "0" * 30, "0 " * 16, "-" + "0" * 31, "\u0660" * 32]
)
def test_parsers_refuse_other_characters(text: str) -> None:
    with pytest.raises(OptionError, match="expected 32 hex digits") as caught:
        parse_offset_message_id(text)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_may_be_offset_message_id_is_false_for_a_wrong_port() -> None:
    assert may_be_offset_message_id(OFFSET_ID)
    assert not may_be_offset_message_id(KEY)
    with pytest.raises(OptionError, match=r"port 80877748 .* If it is a UNIQ_KEY"):
        parse_offset_message_id(KEY)


def test_parse_offset_message_id_refuses_a_port_of_three_bytes() -> None:
    with pytest.raises(OptionError, match="port 65536 and physical offset 1;"):
        parse_offset_message_id("7F000001" + "00010000" + "0" * 15 + "1")


def test_parse_offset_message_id_refuses_a_negative_offset() -> None:
    with pytest.raises(OptionError, match="physical offset -1"):
        parse_offset_message_id("7F00000100002A9F" + "F" * 16)


def test_make_unique_key_keeps_the_low_bits() -> None:
    key = make_unique_key("10.0.0.1", 0x12345, -1, (1 << 32) + 5, -1)
    assert key == UniqueKey("10.0.0.1", 0x2345, 0xFFFFFFFF, 5, 0xFFFF)


def test_advance_does_not_repeat_keys() -> None:
    first = UniqueKey("10.0.0.1", 1, 2, 5, 0xFFFE)
    assert first.advance(1).counter == 0xFFFF
    assert first.advance(2) == UniqueKey("10.0.0.1", 1, 2, 6, 0)
    assert len({str(first.advance(count)) for count in range(70_000)}) == 70_000
    assert UniqueKey("10.0.0.1", 1, 2, 0xFFFFFFFF, 0xFFFF).advance(1) == UniqueKey("10.0.0.1", 1, 2, 0, 0)
