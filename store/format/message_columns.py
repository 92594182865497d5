"""Columns of messages that will be encoded: texts, keys, topics and numbers, one element per row.

Texts become contiguous bytes, and numbers become arrays. Nulls are replaced; a mask marks the rows that had a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.byte_ranges import Bytes, Positions
from rmq_spark.store.format.message_ids import TextHashes
from rmq_spark.store.names import check_sent_topic

_SPACE = ord(" ")
_FIRST_BEYOND_ASCII = 0x80


class RowFault(Exception):
    """Row number `row` cannot become a message; `what` is the reason. The caller adds where the row came from."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(row, what)
        self.row, self.what = row, what


@dataclass
class Texts:
    """One text (or body) per row. The text of row `i` is `data[bounds[i] : bounds[i + 1]]`.

    `given` marks the rows that were not null; None means that no row was null. The text of a null is empty.
    """

    data: Bytes
    bounds: Positions
    given: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, column: pa.Array) -> "Texts":
        """Return the texts of a column of strings or bytes.

        The result shares the column's memory. The data is copied only if the column has nulls, or a type other than
        pa.string() and pa.binary().
        """
        given = None
        if column.type not in (pa.string(), pa.binary()):
            column = column.cast(pa.binary())
        if column.null_count:
            given = column.is_valid().to_numpy(zero_copy_only=False)
            column = pc.fill_null(column, pa.scalar(b"", pa.binary()).cast(column.type))
        _, offsets, data = column.buffers()
        if not len(column) or data is None:
            return cls(np.zeros(0, np.uint8), np.zeros(len(column) + 1, np.int64), given)
        bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)
        begin, end = int(bounds[0]), int(bounds[-1])
        return cls(np.frombuffer(data, np.uint8, end - begin, begin), bounds - begin, given)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The size in bytes of each text."""
        return np.diff(self.bounds)

    @cached_property
    def some_empty(self) -> bool:
        """Whether at least one text is empty."""
        return not self.sizes.all()

    def array(self) -> pa.BinaryArray:
        """Return the texts as an Arrow array that shares their memory."""
        offsets = pa.py_buffer(self.bounds.astype(np.int32))
        return pa.BinaryArray.from_buffers(pa.binary(), len(self), [None, offsets, pa.py_buffer(self.data)])

    def bytes(self, row: int) -> bytes:
        """Return the text of one row."""
        return self.data[self.bounds[row] : self.bounds[row + 1]].tobytes()

    @cached_property
    def hashes(self) -> TextHashes:
        """An object that computes hashes of each text."""
        return TextHashes(self.data, self.bounds[:-1], self.bounds[1:])

    def java_hashes(self) -> NDArray[np.int64]:
        """Return Java's String#hashCode of each text as a signed number. The hash of an empty text is 0."""
        return self.hashes.java().view(np.int32).astype(np.int64)

    def rows_with(self, byte: int) -> NDArray[np.int64]:
        """Return the row numbers of all occurrences of `byte`, ascending. A row with two of them is listed twice."""
        return np.searchsorted(self.bounds, np.flatnonzero(self.data == byte), "right") - 1

    def first_invalid(self) -> int | None:
        """Return the first row whose bytes are not valid UTF-8. Returns None if all rows are valid."""
        if not len(self.data) or self.data.max() < _FIRST_BEYOND_ASCII:
            return None
        offsets = pa.py_buffer(self.bounds.astype(np.int32))
        texts = pa.StringArray.from_buffers(len(self), offsets, pa.py_buffer(self.data))
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            return next(row for row in range(len(self)) if not _is_utf8(self.bytes(row)))
        return None

    def words(self) -> tuple[NDArray[np.int64], TextHashes]:
        """Return the row of each word, ascending, and an object that computes the words' hashes.

        Words are the parts of a text between spaces. Empty parts are not words.
        """
        spaces = np.flatnonzero(self.data == _SPACE)
        rows = np.arange(len(self))
        if not len(spaces) and not self.some_empty:
            return rows, self.hashes
        counts = np.bincount(self.rows_with(_SPACE), minlength=len(self)) + 1
        # Words and empty parts cover all bytes except the spaces. So after sorting, the n-th begin and the n-th end
        # belong to the same part.
        begins = np.sort(np.concatenate([self.bounds[:-1], spaces + 1]), kind="stable")
        ends = np.sort(np.concatenate([self.bounds[1:], spaces]), kind="stable")
        kept = ends > begins
        return np.repeat(rows, counts)[kept], TextHashes(self.data, begins[kept], ends[kept])


def join_rows(*pieces: bytes | pa.BinaryArray) -> pa.BinaryArray:
    """Return for each row its pieces joined in the given order.

    A piece is a column, or bytes that are used in every row. At least one piece must be a column. Columns must not
    contain nulls.
    """
    merged: list[Any] = []
    for piece in pieces:
        if isinstance(piece, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += piece
        else:
            merged.append(piece)
    binary = pa.binary()
    scalars = (pa.scalar(piece, binary) if isinstance(piece, bytes) else piece for piece in (*merged, b""))
    return pc.binary_join_element_wise(*scalars)  # the last argument is the separator


def keys_of(column: pa.Array) -> Texts:
    """Return the keys of each row as one text, separated by spaces.

    `column` has such texts, or lists of keys. Nulls and empty keys in a list are omitted. A key that contains a space
    becomes several keys, as in RocketMQ (Message#setKeys).
    """
    if not pa.types.is_list(column.type):
        return Texts.of(column)
    lists = column.cast(pa.list_(pa.binary()))
    given = lists.is_valid().to_numpy(zero_copy_only=False) if lists.null_count else None
    keys = Texts.of(lists.flatten())  # nulls have become empty
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    rows = np.repeat(np.arange(len(lists)), counts)
    array = keys.array()
    if keys.some_empty:
        kept = keys.sizes > 0
        rows, array = rows[kept], array.filter(pa.array(kept))
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=len(lists)), out=offsets[1:])
    joined = Texts.of(pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), array), b" "))
    return Texts(joined.data, joined.bounds, given)


@dataclass(frozen=True)
class Topics:
    """The topic of each row. It is `names[numbers[row]]`; if `numbers` is None, all rows have the topic `names[0]`."""

    names: tuple[str, ...]
    numbers: NDArray[np.int64] | None

    @classmethod
    def of(cls, column: pa.Array) -> "Topics":
        """Return the topics of a column with at least one row.

        Raises RowFault if a topic is null, or if clients must not send to it (`check_sent_topic`).
        """
        texts = Texts.of(column)
        if texts.given is not None:
            raise RowFault(int(np.argmin(texts.given)), "its topic is null: give a column topic, or the option topic")
        size, data = int(texts.bounds[1]), texts.data
        has_one_size = len(data) == size * len(texts) and bool((texts.sizes == size).all())
        if has_one_size and (data[size:] == data[: len(data) - size]).all():  # all rows have the same topic
            topics = cls((texts.bytes(0).decode("utf-8", "replace"),), None)
        else:
            encoded = texts.array().dictionary_encode()
            names = tuple(name.decode("utf-8", "replace") for name in encoded.dictionary.to_pylist())
            topics = cls(names, encoded.indices.to_numpy().astype(np.int64))
        for number, name in enumerate(topics.names):
            try:
                check_sent_topic(name)
            except OptionError as error:
                raise RowFault(topics.first_row(number), str(error)) from None
        return topics

    def name(self, row: int) -> str:
        """Return the topic of a row."""
        return self.names[0 if self.numbers is None else self.numbers[row]]

    def first_row(self, number: int) -> int:
        """Return the first row with the topic `names[number]`."""
        return 0 if self.numbers is None else int(np.argmax(self.numbers == number))

    def per_row(self, values: Sequence[int], dtype: type[np.generic]) -> NDArray[Any]:
        """Return for each row the value of its topic. `values` has one value for each of `names`.

        If `numbers` is None, the result has only one element, which numpy broadcasts to all rows.
        """
        array: NDArray[Any] = np.array(values, dtype)
        return array if self.numbers is None else array[self.numbers]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Given:
    """A number for each row, and a mask of the rows for which a number was given."""

    values: NDArray[Any]
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, column: pa.Array) -> "Given":
        """Return the numbers of a column of integers. A null becomes 0 and is not marked in `mask`."""
        values = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
        if not column.null_count:
            return cls(values, np.ones(len(column), np.bool_))
        return cls(values, column.is_valid().to_numpy(zero_copy_only=False))
