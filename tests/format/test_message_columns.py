"""Columns as Arrow hands them over: nulls, slices, other kinds of strings, keys in two shapes."""

import numpy as np
import pyarrow as pa
import pytest

from rmq_spark.store.format.filenames import CLOSED_TOPICS
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics, join_rows, keys_of

VALUES = ["a", None, "", "中文", "long " * 9, None]


def listed(texts: Texts) -> list[bytes]:
    return [texts.bytes(row) for row in range(len(texts))]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.string_view(), pa.binary_view()])
@pytest.mark.parametrize("begin", range(len(VALUES)))
def test_texts_are_the_bytes_of_any_column_and_of_a_part_of_one(kind: pa.DataType, begin: int) -> None:
    column = pa.array(VALUES, pa.string()).cast(kind)[begin:]
    texts = Texts.of(column)
    assert listed(texts) == [(value or "").encode() for value in VALUES[begin:]]
    assert texts.given is not None
    assert texts.given.tolist() == [value is not None for value in VALUES[begin:]]
    assert texts.array().to_pylist() == listed(texts)


def test_a_column_without_nulls_is_given_everywhere_and_not_copied() -> None:
    column = pa.array(["x", "yz"])
    texts = Texts.of(column)
    assert texts.given is None
    assert texts.data.ctypes.data == column.buffers()[2].address


def test_bytes_behind_a_null_are_not_seen() -> None:
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
def test_words_are_what_stands_between_spaces(keys: list[str | None], words: list[tuple[int, str]]) -> None:
    rows, hashes = Texts.of(pa.array(keys, pa.string())).words()
    assert rows.tolist() == [row for row, _ in words]
    assert hashes.java().view(np.int32).tolist() == [string_hash(word) for _, word in words]
    before = np.array([string_hash("中#") & 0xFFFFFFFF], np.uint32)
    assert hashes.java(before).view(np.int32).tolist() == [string_hash(f"中#{word}") for _, word in words]


@pytest.mark.parametrize("begin", range(5))
def test_lists_of_keys_are_joined_by_spaces_without_what_is_null_or_empty(begin: int) -> None:
    keys = [["a", "b"], [], None, ["", None, "c"], [None]]
    texts = keys_of(pa.array(keys, pa.list_(pa.string()))[begin:])
    assert listed(texts) == [b"a b", b"", b"", b"c", b""][begin:]
    given = np.ones(5 - begin, np.bool_) if texts.given is None else texts.given
    assert given.tolist() == [True, True, False, True, True][begin:]


def test_lists_of_keys_without_gaps_and_strings_of_keys_are_the_same() -> None:
    lists = pa.array([["a", "b"], ["c"]], pa.list_(pa.string()))
    assert listed(keys_of(lists)) == listed(keys_of(pa.array(["a b", "c"]))) == [b"a b", b"c"]


def test_keys_behind_a_null_list_are_not_seen() -> None:
    hidden = pa.ListArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", "b"]), mask=pa.array([True, False]))
    assert listed(keys_of(hidden)) == [b"", b"b"]


@pytest.mark.parametrize(
    "names",
    [["t"], ["t", "t", "t"], ["tt", "t", "tt"], ["ab", "cd"], ["aa", "a", "aaa"], ["aa", "ab", "aa"], ["aab", "aab"]],
)
def test_a_topic_of_a_row_is_found_by_its_number(names: list[str]) -> None:
    topics = Topics.of(pa.array(["before", *names])[1:])
    assert [topics.name(row) for row in range(len(names))] == names
    assert sorted(topics.names) == sorted(set(names))
    assert (topics.numbers is None) == (len(set(names)) == 1)
    sizes = np.broadcast_to(topics.per_row([len(name) for name in topics.names], np.int64), len(names))
    assert sizes.tolist() == [len(name) for name in names]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_topics_come_in_any_kind_of_strings(kind: pa.DataType) -> None:
    assert Topics.of(pa.array(["t", "u", "t"]).cast(kind)).names == ("t", "u")


@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "..", "主题", "t" * 128, *sorted(CLOSED_TOPICS)])
def test_a_topic_that_no_broker_takes_is_refused_where_it_first_stands(wrong: str) -> None:
    with pytest.raises(RowFault) as error:
        Topics.of(pa.array(["good", "good", wrong, wrong]))
    assert error.value.row == 2
    assert wrong[:40] in error.value.what


def test_a_topic_that_is_null_is_refused() -> None:
    with pytest.raises(RowFault, match="its topic is null") as error:
        Topics.of(pa.array(["t", None, "t", None]))
    assert error.value.row == 1


def test_numbers_come_with_those_that_were_given() -> None:
    given = Given.of(pa.array([7, None, -1], pa.int32()))
    assert (given.values.tolist(), given.mask.tolist()) == ([7, 0, -1], [True, False, True])
    assert Given.of(pa.array([1, 2], pa.int64())).mask.all()


def test_pieces_are_joined_row_by_row() -> None:
    one, two = pa.array([b"a", b""]), pa.array([b"1", b"22"])
    assert join_rows(b"<", b"-", one, b":", two, b">", b".").to_pylist() == [b"<-a:1>.", b"<-:22>."]
    assert join_rows(one).to_pylist() == [b"a", b""]
