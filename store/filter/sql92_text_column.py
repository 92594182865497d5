"""One property of many messages as a column of texts, and what was read out of it: numbers, booleans, comparisons.

Nulls are messages without the property. A dictionary column is looked at once for each of its values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.filter.sql92_number_columns import Flags, as_flags, read_doubles, read_integers

_Item = TypeVar("_Item", bound=np.generic)
_FOUND_BY = {"CONTAINS": pc.match_substring, "STARTSWITH": pc.starts_with, "ENDSWITH": pc.ends_with}


@dataclass(frozen=True, slots=True)
class TextColumn:
    """The texts: `values[codes]`, or `values` themselves where there are no codes. What stands at a null is any value.

    Made by `text_column`. What is computed from it is flags or numbers by row.
    """

    values: pa.Array
    codes: NDArray[np.int64] | None = None
    _numbers: dict[int, tuple[NDArray[np.generic], Flags]] = field(default_factory=dict)

    def is_in(self, texts: Sequence[str]) -> Flags:
        """Return which are one of the texts."""
        if len(texts) == 1:
            return self._spread(as_flags(pc.equal(self.values, pa.scalar(texts[0], self.values.type))))
        return self._spread(as_flags(pc.is_in(self.values, value_set=pa.array(texts, self.values.type))))

    def equals(self, other: "TextColumn") -> Flags:
        """Return which are the same as the other column's, row by row."""
        left, right = self._decoded(), other._decoded()
        if left.type != right.type:
            left, right = left.cast(pa.large_string()), right.cast(pa.large_string())
        return as_flags(pc.equal(left, right))

    def has(self, how: str, text: str) -> Flags:
        """Return which contain, start or end with the text."""
        return self._spread(as_flags(_FOUND_BY[how](self.values, pattern=text)))

    def booleans(self) -> Flags:
        """Return Boolean#valueOf of each."""
        return self._spread(as_flags(pc.equal(pc.ascii_lower(self.values), pa.scalar("true", self.values.type))))

    def integers(self, bits: int) -> tuple[NDArray[np.int64], Flags]:
        """Return the numbers of Integer#valueOf (32 bits) or Long#valueOf (64), and which texts are one."""
        values, is_number = self._read(bits, lambda texts: read_integers(texts, bits))
        return self._spread(values.astype(np.int64, copy=False)), self._spread(is_number)

    def doubles(self) -> tuple[NDArray[np.float64], Flags]:
        """Return the numbers of Double#valueOf, and which texts are one."""
        values, is_number = self._read(0, read_doubles)
        return self._spread(values.astype(np.float64, copy=False)), self._spread(is_number)

    def _read(
        self, key: int, read: Callable[[pa.Array], tuple[NDArray[np.generic], Flags]]
    ) -> tuple[NDArray[np.generic], Flags]:
        """Read once what BETWEEN and the like ask for twice."""
        if key not in self._numbers:
            self._numbers[key] = read(self.values)
        return self._numbers[key]

    def _spread(self, by_value: NDArray[_Item]) -> NDArray[_Item]:
        return by_value if self.codes is None else by_value[self.codes]

    def _decoded(self) -> pa.Array:
        return self.values if self.codes is None else self.values.take(pa.array(self.codes))


def text_column(array: pa.Array) -> tuple[TextColumn, Flags | None]:
    """Return the column of a string, large_string or dictionary array, and which rows are null (None: no row is)."""
    is_null = as_flags(pc.is_null(array)) if array.null_count else None
    if not pa.types.is_dictionary(array.type):
        return TextColumn(_as_texts(array)), is_null
    values = _as_texts(array.dictionary)
    if values.null_count or not len(values):  # rows that a code makes null are rare enough to write them all out
        return text_column(array.cast(values.type))
    codes = pc.fill_null(array.indices, 0) if array.indices.null_count else array.indices
    return TextColumn(values, codes.to_numpy().astype(np.int64, copy=False)), is_null


def _as_texts(array: pa.Array) -> pa.Array:
    return array if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) else array.cast(pa.string())
