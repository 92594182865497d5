"""A value -> one near to it that is wrong: what a mutant writes or reads in its place.

Goes into the altered tree, where the mutants import it. Arrays keep their type and length, texts stay texts.
"""

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

NO_WRONG_VALUE = "no wrong value is known"


def wrong(value: Any) -> Any:
    """Return a number one greater, a text or bytes with another end, a collection of wrong values; None stays."""
    if value is None:
        return None
    for kinds, change in _CHANGES:
        if isinstance(value, kinds):
            return change(value)
    if dataclasses.is_dataclass(value):
        first = dataclasses.fields(value)[0].name
        return dataclasses.replace(value, **{first: wrong(getattr(value, first))})
    if callable(value):
        return lambda *arguments: wrong(value(*arguments))
    raise AssertionError(f"{NO_WRONG_VALUE} of {type(value)}")


def wrong_flags(value: Any) -> Any:
    """Return the bits of a sysFlag with those turned that say how a record is laid out and its body is stored."""
    return value ^ 0x31


def wrong_at(values: Any, place: int, change: Callable[[Any], Any] = wrong) -> Any:
    """Return the sequence, its element at a place wrong."""
    changed = list(values)
    changed[place] = change(changed[place])
    return tuple(changed)


def wrong_key(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping, the value of a key wrong."""
    return {name: wrong(value) if name == key else value for name, value in values.items()}


def _bytes(value: Any) -> bytes:
    data = bytes(value)
    return data[:-1] + bytes([data[-1] ^ 1]) if data else b"?"


def _array(value: np.ndarray) -> np.ndarray:
    if value.dtype.kind in "iu":
        return (value + np.ones((), value.dtype)).astype(value.dtype)
    if value.dtype.kind == "b":
        return ~value
    changed = np.ascontiguousarray(value).copy()
    if changed.size:
        changed.view(np.uint8).reshape(*changed.shape, -1)[..., -1] ^= 1
    return changed


def _scalar(value: np.generic) -> Any:
    return _array(np.array([value], value.dtype))[0]


def _column(value: pa.Array) -> pa.Array:
    return pa.array([wrong(one) for one in value.to_pylist()], value.type)


_CHANGES: list[tuple[Any, Callable[[Any], Any]]] = [
    (bool, lambda value: not value),
    (np.generic, _scalar),
    (int, lambda value: value + 1),
    (str, lambda value: value + "?"),
    (bytes | bytearray | memoryview, _bytes),
    (np.ndarray, _array),
    (np.dtype, lambda value: value.newbyteorder()),
    (pa.Array, _column),
    (datetime.datetime, lambda value: value + datetime.timedelta(seconds=1)),
    (Mapping, lambda value: {key: wrong(one) for key, one in value.items()}),
    (list, lambda value: [wrong(one) for one in value]),
    (tuple, lambda value: tuple(wrong(one) for one in value)),
]
