"""Small JSON files with a version: `{"v": 1, …}`, replaced as a whole."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.side_json import parse_json

VERSION = 1

T = TypeVar("T")

_SHOWN_CHARS = 80


def encode_side_file(fields: Mapping[str, Any]) -> bytes:
    """Write the fields behind the version."""
    return json.dumps({"v": VERSION, **fields}, indent=1).encode() + b"\n"


def read_side_file(path: str, what: str, next_step: str, build: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what `build` makes of a file's fields, None without a file.

    `what` says what the file is for and what taking it away would mean, `next_step` what to do if it is damaged: a
    sentence. Raises StoreError for a file of another
    version, DamageError for one that is not JSON or lacks fields (`build` may raise KeyError, TypeError, ValueError).
    """
    data = files.read_small(path)
    if data is None:
        return None
    try:
        fields = parse_json(data)
        if not isinstance(fields, dict):
            raise TypeError("no object")
        version = fields["v"]
        if version == VERSION:
            return build(fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        shown = data[:_SHOWN_CHARS].decode("utf-8", "replace")
        expected = f"JSON of version {VERSION}"
        raise DamageError(f"{what} ({error!r})", path, 0, expected, repr(shown), next_step) from error
    raise StoreError(
        f"{path} has version {version!r}, and this rmq-spark knows version {VERSION}: a newer one wrote it. Write to "
        f"this store with that one. {what[0].upper()}{what[1:]}."
    )


def number_of(fields: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    """Return a whole number from the fields. Raises KeyError, TypeError or ValueError."""
    value = fields[name]
    if type(value) is not int:
        raise TypeError(f"{name}: expected a whole number, found {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value}")
    return value


def note_of(fields: Mapping[str, Any], name: str = "note") -> dict[str, int]:
    """Return whole numbers by name from the fields, {} where an older file has none. Raises TypeError."""
    note = fields.get(name, {})
    if type(note) is not dict or not all(type(value) is int for value in note.values()):
        raise TypeError(f"{name}: expected whole numbers by name, found {note!r}")
    return note


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """Return a text that is not empty from the fields. Raises KeyError or TypeError."""
    value = fields[name]
    if type(value) is not str or not value:
        raise TypeError(f"{name}: expected a text, found {value!r}")
    return value


def digest_text(digest: int) -> str:
    """Return a digest of 64 bits as 16 hex digits: as a number JSON's readers would round it."""
    return f"{digest:016x}"


def digest_of(fields: Mapping[str, Any], name: str = "digest") -> int:
    """Return a digest written by `digest_text`. Raises KeyError, TypeError or ValueError."""
    return int(text_of(fields, name), 16)
