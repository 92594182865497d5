"""`TextHashes`: Java's hashes of many texts equal `string_hash` of each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_ids import TextHashes, powers_of_31

usual = settings(deadline=None, derandomize=True, max_examples=200)
texts = st.one_of(
    st.text(max_size=20),
    st.text("ab1\0", max_size=40),
    st.sampled_from(["", "a", "\0a", "polygenelubricants", "12345678", "中文tag", "😀", "x" * 700, "é" * 300]),
)


def hashes_of(values: list[bytes], gap: bytes = b"") -> TextHashes:
    """Hash the texts out of one run of bytes, a gap between them."""
    sizes = np.array([len(value) for value in values], np.int64)
    ends = np.cumsum(sizes + len(gap)) - len(gap)
    return TextHashes(np.frombuffer(gap.join(values), np.uint8), ends - sizes, ends)


def signed(hashes: NDArray[np.uint32]) -> list[int]:
    assert hashes.dtype == np.uint32
    return [int(value) for value in hashes.view(np.int32)]


@usual
@given(st.lists(texts, max_size=100), st.sampled_from([b"", b" "]))
def test_java_equals_string_hash(values: list[str], gap: bytes) -> None:
    found = hashes_of([value.encode() for value in values], gap).java()
    assert signed(found) == [string_hash(value) for value in values]


@pytest.mark.parametrize("letters", ["aZ09", "aé中😀"])
@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_java_equals_string_hash_for_all_lengths(letters: str, count: int) -> None:
    """Long texts among short ones leave the common path when few rows have a further word."""
    values = [(letters * 999)[: row * 7 % 50 + (2000 if row % 90 == 3 else 0)] for row in range(count)]
    assert signed(hashes_of([value.encode() for value in values]).java()) == [string_hash(value) for value in values]


@usual
@given(st.lists(st.tuples(texts, texts), max_size=90))
def test_java_continues_the_hash_of_a_prefix(pairs: list[tuple[str, str]]) -> None:
    before = np.array([string_hash(first) & 0xFFFFFFFF for first, _ in pairs], np.uint32)
    found = hashes_of([second.encode() for _, second in pairs]).java(before)
    assert signed(found) == [string_hash(first + second) for first, second in pairs]


@pytest.mark.parametrize("size", range(25))
def test_java_equals_string_hash_for_one_length(size: int) -> None:
    values = [f"{number * 7919:025d}"[:size] for number in range(100)]
    assert signed(hashes_of([value.encode() for value in values]).java()) == [string_hash(value) for value in values]


def test_java_hashes_invalid_utf8_as_replacement_characters() -> None:
    values = [b"a\xff", b"\xe4\xb8", b"\xadb", b"plain"]
    assert signed(hashes_of(values).java()) == [string_hash(value.decode("utf-8", "replace")) for value in values]


@usual
@given(st.lists(st.binary(max_size=30), max_size=100, unique=True), st.integers(0, 200))
def test_digests_depend_only_on_the_text(values: list[bytes], before: int) -> None:
    found = hashes_of(values).digests().tolist()
    assert len(set(found)) == len(values)
    shifted = hashes_of([b"x" * before, *values]).digests().tolist()
    assert shifted[1:] == found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"", b"\0"), (b"a", b"\0a"), (b"12345678abcdefgh", b"abcdefgh12345678"), (b"Aa", b"BB"), (b"x" * 8, b"x" * 16),
        (b"a" * 999 + b"b", b"a" * 998 + b"ba"),
    ],
)  # fmt: skip
def test_digests_differ_for_similar_texts(one: bytes, other: bytes) -> None:
    first, second = hashes_of([one, other]).digests().tolist()
    assert first != second


def test_powers_of_31_wrap_like_javas_int() -> None:
    counts = np.array([0, 1, 7, 4000])
    assert powers_of_31(counts).tolist() == [31**count & 0xFFFFFFFF for count in counts.tolist()]
    assert powers_of_31(5, 8) == 31**40 & 0xFFFFFFFF
