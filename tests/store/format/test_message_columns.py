"""Message columns: nulls, slices, types of strings, and keys as strings or lists."""

import numpy as np
import pyarrow as pa
import pytest

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics, join_rows, keys_of
from rmq_spark.store.names import CLOSED_TOPICS

VALUES = ["a", None, "", "中文", "long " * 9, None]


def listed(texts: Texts) -> list[bytes]:
    return [texts.bytes(row) for row in range(len(texts))]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.string_view(), pa.binary_view()])
@pytest.mark.parametrize("begin", range(len(VALUES)))
def test_texts_of_any_column_or_slice_have_its_bytes(kind: pa.DataType, begin: int) -> None:
    column = pa.array(VALUES, pa.string()).cast(kind)[begin:]
    texts = Texts.of(column)
    assert listed(texts) == [(value or "").encode() for value in VALUES[begin:]]
    assert texts.given is not None
    assert texts.given.tolist() == [value is not None for value in VALUES[begin:]]
    assert texts.array().to_pylist() == listed(texts)


def test_texts_of_a_column_without_nulls_are_not_copied() -> None:
    column = pa.array(["x", "yz"])
    texts = Texts.of(column)
    assert texts.given is None
    assert texts.data.ctypes.data == column.buffers()[2].address


def test_texts_ignore_the_bytes_of_nulls() -> None:
    column = pa.array(["ab", "cd"])
    hidden = pa.StringArray.from_buffers(2, column.buffers()[1], column.buffers()[2], pa.py_buffer(b"\x02"))
    assert listed(Texts.of(hidden)) == [b"", b"cd"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["a", "b"], [(0, "a"), (1, "b")]),
        (["a b", "", "c  d "], [(0, "a"), (0, "b"), (2, "c"), (2, "d")]),
        ([" ", "x", None], [(1, "x")]),
        (["", ""], []),
        (["é 中 é"], [(0, "é"), (0, "中"), (0, "é")]),
    ],
)
def test_words_are_separated_by_spaces(keys: list[str | None], words: list[tuple[int, str]]) -> None:
    rows, hashes = Texts.of(pa.array(keys, pa.string())).words()
    assert rows.tolist() == [row for row, _ in words]
    assert hashes.java().view(np.int32).tolist() == [string_hash(word) for _, word in words]
    before = np.array([string_hash("中#") & 0xFFFFFFFF], np.uint32)
    assert hashes.java(before).view(np.int32).tolist() == [string_hash(f"中#{word}") for _, word in words]


@pytest.mark.parametrize("begin", range(5))
def test_keys_of_lists_omits_null_and_empty_keys(begin: int) -> None:
    keys = [["a", "b"], [], None, ["", None, "c"], [None]]
    texts = keys_of(pa.array(keys, pa.list_(pa.string()))[begin:])
    assert listed(texts) == [b"a b", b"", b"", b"c", b""][begin:]
    given = np.ones(5 - begin, np.bool_) if texts.given is None else texts.given
    assert given.tolist() == [True, True, False, True, True][begin:]


def test_keys_of_lists_equals_keys_of_strings() -> None:
    lists = pa.array([["a", "b"], ["c"]], pa.list_(pa.string()))
    assert listed(keys_of(lists)) == listed(keys_of(pa.array(["a b", "c"]))) == [b"a b", b"c"]


def test_keys_of_ignores_the_keys_of_a_null_list() -> None:
    hidden = pa.ListArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", "b"]), mask=pa.array([True, False]))
    assert listed(keys_of(hidden)) == [b"", b"b"]


@pytest.mark.parametrize(
    "names",
    [["t"], ["t", "t", "t"], ["tt", "t", "tt"], ["ab", "cd"], ["aa", "a", "aaa"], ["aa", "ab", "aa"], ["aab", "aab"]],
)
def test_topics_name_returns_the_topic_of_a_row(names: list[str]) -> None:
    topics = Topics.of(pa.array(["before", *names])[1:])
    assert [topics.name(row) for row in range(len(names))] == names
    assert sorted(topics.names) == sorted(set(names))
    assert (topics.numbers is None) == (len(set(names)) == 1)
    sizes = np.broadcast_to(topics.per_row([len(name) for name in topics.names], np.int64), len(names))
    assert sizes.tolist() == [len(name) for name in names]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_topics_of_accepts_any_type_of_strings(kind: pa.DataType) -> None:
    assert Topics.of(pa.array(["t", "u", "t"]).cast(kind)).names == ("t", "u")


@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "..", "主题", "t" * 128, *sorted(CLOSED_TOPICS)])
def test_topics_of_refuses_an_invalid_topic_with_its_first_row(wrong: str) -> None:
    with pytest.raises(RowFault) as error:
        Topics.of(pa.array(["good", "good", wrong, wrong]))
    assert error.value.row == 2
    assert wrong[:40] in error.value.what


def test_topics_of_refuses_a_null() -> None:
    with pytest.raises(RowFault, match="its topic is null") as error:
        Topics.of(pa.array(["t", None, "t", None]))
    assert error.value.row == 1


def test_given_of_marks_the_rows_with_a_number() -> None:
    given = Given.of(pa.array([7, None, -1], pa.int32()))
    assert (given.values.tolist(), given.mask.tolist()) == ([7, 0, -1], [True, False, True])
    assert Given.of(pa.array([1, 2], pa.int64())).mask.all()


def test_join_rows_joins_row_by_row() -> None:
    one, two = pa.array([b"a", b""]), pa.array([b"1", b"22"])
    assert join_rows(b"<", b"-", one, b":", two, b">", b".").to_pylist() == [b"<-a:1>.", b"<-:22>."]
    assert join_rows(one).to_pylist() == [b"a", b""]
