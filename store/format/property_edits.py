"""Texts of properties changed by columns: names taken out, values put in, for many records at once.

What comes out is what RocketMQ's map of the properties would be written as, in another order: a part without a name or
a value is gone, and the text ends in 0x02. `store/testing/retry_twin.py` does the same record by record.

Source: MessageDecoder#string2messageProperties, #messageProperties2String (4.9, 5.3).
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.message_columns import Texts, join_rows
from rmq_spark.store.format.properties import PROPERTY_SEPARATOR, PropertyPairs
from rmq_spark.store.format.ragged import take_ranges

# What a property may be put in as: the same bytes in all rows, or a column; a row where that is null keeps what it has.
Put: TypeAlias = bytes | pa.BinaryArray

_ENDING = bytes([PROPERTY_SEPARATOR])


def edit_properties(
    texts: pa.BinaryArray,
    dropped: Collection[str],
    put: Mapping[str, Put],
    dropped_where: Mapping[str, NDArray[np.bool_]] | None = None,
) -> pa.BinaryArray:
    """Return the texts without the properties `dropped`, and with those in `put` instead of what they had of them.

    `dropped_where` has names that go from some rows only. No text is null. Names and values that are put in hold no
    separator, and values are not empty.
    """
    assert not texts.null_count
    if not len(texts):
        return texts
    masks: dict[str, NDArray[np.bool_] | None] = {**(dropped_where or {})}
    for name, value in put.items():
        given, other = _given(value), masks.get(name)
        masks[name] = given if given is None or other is None else given | other
    kept = _without(texts, {**masks, **dict.fromkeys(dropped)})
    pieces: list[bytes | pa.BinaryArray] = [kept.array()]
    for name, value in put.items():
        before = name.encode() + b"\x01"
        if isinstance(value, bytes):
            pieces.append(before + value + _ENDING)
        else:
            pieces.append(_pair(before, value))
    return join_rows(*pieces)


def _without(texts: pa.BinaryArray, masks: Mapping[str, NDArray[np.bool_] | None]) -> Texts:
    """Return the pairs that stay, joined row by row: not those with these names, in the rows of a mask or in all."""
    pairs = PropertyPairs.split(texts)
    rows = np.repeat(np.arange(len(texts)), np.diff(pairs.pair_ends, prepend=0))
    names = take_ranges(pairs.text, pairs.name_begins, pairs.name_ends)
    stays = ~_are(names, [name for name, mask in masks.items() if mask is None])
    for name, mask in masks.items():
        if mask is not None and mask.any():
            stays &= ~(_are(names, [name]) & mask[rows])
    begins, ends = pairs.name_begins[stays], pairs.value_ends[stays] + 1
    kept_before = np.concatenate([[0], np.cumsum(stays)])
    bytes_before = np.concatenate([[0], np.cumsum(ends - begins)])
    bounds = bytes_before[kept_before[np.concatenate([[0], pairs.pair_ends])]]
    return Texts(Texts.of(take_ranges(pairs.text, begins, ends)).data, bounds)


def _given(value: Put) -> NDArray[np.bool_] | None:
    """Return the rows in which a value is put in, None for all."""
    if isinstance(value, bytes) or not value.null_count:
        return None
    given: NDArray[np.bool_] = value.is_valid().to_numpy(zero_copy_only=False)
    return given


def _are(names: pa.BinaryArray, wanted: list[str]) -> NDArray[np.bool_]:
    """Say of each name whether it is one of those."""
    among = pa.array([name.encode() for name in wanted], pa.binary())
    found: NDArray[np.bool_] = pc.is_in(names, among).to_numpy(zero_copy_only=False)
    return found


def _pair(before: bytes, values: pa.BinaryArray) -> pa.BinaryArray:
    """Return the property for each row, nothing where the value is null."""
    values = values.cast(pa.binary())
    joined = pc.binary_join_element_wise(
        pa.scalar(before, pa.binary()), values, pa.scalar(_ENDING, pa.binary()), pa.scalar(b"", pa.binary())
    )  # null where a value is
    return pc.fill_null(joined, pa.scalar(b"", pa.binary()))
