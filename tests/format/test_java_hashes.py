"""Java's hash of a text, one by one and over columns, and host fields."""

import pyarrow as pa
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
MANY = [*KNOWN, "a", "\0", "\x7f", "é", "\uffff", *(f"topic#key{number}" for number in range(200)), "x" * 5000]


@pytest.mark.parametrize(("text", "value"), KNOWN.items())
def test_a_hash_is_javas(text: str, value: int) -> None:
    assert java.string_hash(text) == value


def test_the_key_index_takes_the_absolute_hash_and_zero_for_the_one_that_has_none() -> None:
    assert java.index_key_hash("TopicA#k2") % 100 == 48
    assert java.index_key_hash("TopicA#k2") == abs(java.string_hash("TopicA#k2"))
    assert java.index_key_hash("polygenelubricants") == 0


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string()])
def test_a_column_of_texts_hashes_like_its_texts_one_by_one(kind: pa.DataType) -> None:
    texts = pa.array(MANY, pa.string()).cast(kind)
    assert java.string_hashes(texts).tolist() == [java.string_hash(text) for text in MANY]
    assert java.index_key_hashes(texts).tolist() == [java.index_key_hash(text) for text in MANY]


@pytest.mark.parametrize("begin", range(0, len(MANY), 17))
def test_a_part_of_a_column_hashes_like_its_texts(begin: int) -> None:
    part = pa.array(MANY, pa.string())[begin : begin + 20]
    assert java.string_hashes(part).tolist() == [java.string_hash(text) for text in MANY[begin : begin + 20]]


def test_nulls_hash_to_zero_even_where_bytes_lie_behind_them() -> None:
    texts = pa.array(["ab", "中", "cd"])
    validity = pa.py_buffer(bytes([0b100]))
    hidden = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2], validity)
    assert hidden.to_pylist() == [None, None, "cd"]
    assert java.string_hashes(hidden).tolist() == [0, 0, java.string_hash("cd")]
    assert java.string_hashes(pa.array([], pa.string())).tolist() == []
    assert java.string_hashes(pa.array([None], pa.string())).tolist() == [0]


def test_bytes_that_are_no_text_count_as_the_replacement_character() -> None:
    assert java.string_hashes(pa.array([b"a\xffb"])).tolist() == [java.string_hash("a\ufffdb")]


@pytest.mark.parametrize(
    ("host", "field", "text"),
    [
        (java.Host("127.0.0.1", 10911), "7f00000100002a9f", "127.0.0.1:10911"),
        (java.Host("2001:db8::1", 1), "20010db8" + "0" * 22 + "01" + "00000001", "[2001:db8::1]:1"),
        (java.Host("0.0.0.0", -1), "00000000ffffffff", "0.0.0.0:-1"),
    ],
)
def test_a_host_field_has_the_address_and_a_port_of_four_bytes(host: java.Host, field: str, text: str) -> None:
    assert java.encode_host(host) == bytes.fromhex(field)
    assert java.decode_host(bytes.fromhex(field)) == host
    assert str(host) == text


def test_a_name_is_no_address() -> None:
    with pytest.raises(ValueError, match="broker-a"):
        java.encode_host(java.Host("broker-a", 1))
