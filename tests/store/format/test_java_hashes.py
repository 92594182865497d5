"""Java's hash of a text, and host fields."""

import pytest

from rmq_spark.store.format import java

# Text -> what String#hashCode gave.
KNOWN = {
    "": 0,
    "TagA": 2598919,
    "zzzzzzz": 215481018,
    "中文tag": 2076969056,
    "polygenelubricants": -(1 << 31),
    "😀": 1772899,  # two UTF-16 units
}


@pytest.mark.parametrize(("text", "value"), KNOWN.items())
def test_string_hash_is_javas(text: str, value: int) -> None:
    assert java.string_hash(text) == value


def test_index_key_hash_is_absolute_or_zero() -> None:
    assert java.index_key_hash("TopicA#k2") % 100 == 48
    assert java.index_key_hash("TopicA#k2") == abs(java.string_hash("TopicA#k2"))
    assert java.index_key_hash("polygenelubricants") == 0


@pytest.mark.parametrize(
    ("host", "field", "text"),
    [
        (java.Host("127.0.0.1", 10911), "7f00000100002a9f", "127.0.0.1:10911"),
        (java.Host("2001:db8::1", 1), "20010db8" + "0" * 22 + "01" + "00000001", "[2001:db8::1]:1"),
        (java.Host("0.0.0.0", -1), "00000000ffffffff", "0.0.0.0:-1"),
    ],
)
def test_encode_host_writes_address_and_port(host: java.Host, field: str, text: str) -> None:
    assert java.encode_host(host) == bytes.fromhex(field)
    assert java.decode_host(bytes.fromhex(field)) == host
    assert str(host) == text


def test_encode_host_refuses_a_host_name() -> None:
    with pytest.raises(ValueError, match="broker-a"):
        java.encode_host(java.Host("broker-a", 1))
