"""Columns of rows that are to become messages -> runs of bytes and numbers, without nulls or kinds of strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.filenames import check_sent_topic
from rmq_spark.store.format.ragged import Bytes, Positions
from rmq_spark.store.format.text_hashes import TextHashes

_SPACE = ord(" ")
_FIRST_BEYOND_ASCII = 0x80


class RowFault(Exception):
    """A row cannot become a message: `what` says why, and what is accepted. The caller knows where the row is from."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(row, what)
        self.row, self.what = row, what


@dataclass
class Texts:
    """One text (or body) a row: row `i` is `data[bounds[i] : bounds[i + 1]]`. Nulls have become empty.

    `given` marks the rows that were not null; None: all.
    """

    data: Bytes
    bounds: Positions
    given: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, column: pa.Array) -> "Texts":
        """Take a column of strings or bytes; bytes are copied only where nulls or another kind of string ask for it."""
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
        """The bytes of each text."""
        return np.diff(self.bounds)

    @cached_property
    def some_empty(self) -> bool:
        """Whether a text is empty."""
        return not self.sizes.all()

    def array(self) -> pa.BinaryArray:
        """Return the same bytes for Arrow, not copied."""
        offsets = pa.py_buffer(self.bounds.astype(np.int32))
        return pa.BinaryArray.from_buffers(pa.binary(), len(self), [None, offsets, pa.py_buffer(self.data)])

    def bytes(self, row: int) -> bytes:
        """Return one text."""
        return self.data[self.bounds[row] : self.bounds[row + 1]].tobytes()

    @cached_property
    def hashes(self) -> TextHashes:
        """The hashes of each text."""
        return TextHashes(self.data, self.bounds[:-1], self.bounds[1:])

    def rows_with(self, byte: int) -> NDArray[np.int64]:
        """Return for each such byte, in order, the row that has it."""
        places = np.flatnonzero(self.data == byte)
        return np.searchsorted(self.bounds, places, "right") - 1

    def first_invalid(self) -> int | None:
        """Return the first row whose bytes are not UTF-8, None if all are."""
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
        """Return row and hashes of each word: what stands between single spaces and is not empty."""
        spaces = np.flatnonzero(self.data == _SPACE)
        rows = np.arange(len(self))
        if not len(spaces) and not self.some_empty:
            return rows, self.hashes
        counts = np.bincount(self.rows_with(_SPACE), minlength=len(self)) + 1
        # In their order each begin belongs to one end: the words cover all but the spaces.
        begins = np.sort(np.concatenate([self.bounds[:-1], spaces + 1]), kind="stable")
        ends = np.sort(np.concatenate([self.bounds[1:], spaces]), kind="stable")
        kept = ends > begins
        return np.repeat(rows, counts)[kept], TextHashes(self.data, begins[kept], ends[kept])


def join_rows(*pieces: bytes | pa.BinaryArray) -> pa.BinaryArray:
    """Join pieces row by row; bytes are the same in all rows. At least one piece is a column, none has nulls."""
    merged: list[Any] = []
    for piece in pieces:
        if isinstance(piece, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += piece
        else:
            merged.append(piece)
    binary = pa.binary()
    scalars = (pa.scalar(piece, binary) if isinstance(piece, bytes) else piece for piece in (*merged, b""))
    return pc.binary_join_element_wise(*scalars)  # the last one stands between them


def keys_of(column: pa.Array) -> Texts:
    """Take keys: strings with single spaces between keys, or lists of keys, of which nulls and empty ones are left out.

    A key that holds a space becomes several, as in RocketMQ (Message#setKeys).
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
    """The topic of each row: `names[numbers[row]]`, or the only name where `numbers` is None."""

    names: tuple[str, ...]
    numbers: NDArray[np.int64] | None

    @classmethod
    def of(cls, column: pa.Array) -> "Topics":
        """Take a column of topics, at least one row. Raises RowFault for a null or a topic that nobody may send to."""
        texts = Texts.of(column)
        if texts.given is not None:
            raise RowFault(int(np.argmin(texts.given)), "its topic is null: give a column topic, or the option topic")
        size = int(texts.bounds[1])
        if len(texts.data) == size * len(texts) and (texts.sizes == size).all() and _repeats(texts.data, size):
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
        """Return the first row with the topic of this number."""
        return 0 if self.numbers is None else int(np.argmax(self.numbers == number))

    def per_row(self, values: Sequence[int], dtype: type[np.generic]) -> NDArray[Any]:
        """Return the value of each row's topic; one element, for all rows, where there is only one topic."""
        array: NDArray[Any] = np.array(values, dtype)
        return array if self.numbers is None else array[self.numbers]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _repeats(data: Bytes, period: int) -> bool:
    """Say whether the bytes are the first `period` of them again and again."""
    return bool((data[period:] == data[: len(data) - period]).all())


@dataclass(frozen=True, slots=True)
class Given:
    """A number for each row, and which rows were given one."""

    values: NDArray[Any]
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, column: pa.Array) -> "Given":
        """Take a column of ints; what was null is 0."""
        values = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
        if not column.null_count:
            return cls(values, np.ones(len(column), np.bool_))
        return cls(values, column.is_valid().to_numpy(zero_copy_only=False))
