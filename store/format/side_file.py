"""Side files: the small JSON files that rmq-spark keeps in `rmq/` in a store, beside RocketMQ's own files.

A side file is a JSON object with a version, `{"v": 1, …}`. A writer replaces the whole file at once. The name of a side
file is made from an id, which may be any text (the id of a query, group or application). Different ids have different
names, and no name leads out of the folder. Each module that owns a side file declares its fields, the effect of losing
the file, and what a user should do if the file is damaged.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

from rmq_spark.store.errors import DamageError, StoreError

VERSION = 1

# Longer names are cut, because a file name has at most 255 bytes, and `.json.tmp` and a batch id are appended to it.
_MAX_NAME_CHARS = 150
_CUT_NAME_CHARS = 80
_HASH_DIGITS = 40
_SHOWN_CHARS = 80  # how much of a damaged file an error shows
T = TypeVar("T")


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if the text is not valid JSON, contains NaN or Infinity, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def safe_name(query_id: str) -> str:
    """Return the name, without extension, of the files for an id. Different ids have different names.

    Letters, digits and `_ - . ~` stay as they are, except `.` as the first character. All other characters are escaped
    as in URLs. If the name would be too long, it is cut, and `+` and a hash of the id are appended. No other name
    contains `+`, because it would be escaped.
    """
    name = quote(query_id, safe="", errors="surrogatepass")
    if name.startswith("."):  # neither a hidden file nor `..`
        name = f"%2E{name[1:]}"
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(query_id.encode(errors="surrogatepass")).hexdigest()
    return f"{name[:_CUT_NAME_CHARS]}+{digest[:_HASH_DIGITS]}"


def encode_side_file(fields: Mapping[str, Any]) -> bytes:
    """Return the content of a side file: a JSON object with the version and then the fields."""
    return json.dumps({"v": VERSION, **fields}, indent=1).encode() + b"\n"


def decode_side_file(data: bytes, path: str, what: str, next_step: str, build: Callable[[dict[str, Any]], T]) -> T:
    """Decode the content of a side file, and return the result of `build` for its fields.

    The other arguments are used in errors. `path` is the path of the file. `what` says what the file is for and what
    removing it would do. `next_step` is a sentence that says what to do if the file is damaged. Raises StoreError if
    the file has another version. Raises DamageError if the file is not valid JSON, or if `build` raises KeyError,
    TypeError, ValueError or AttributeError because a field is missing or wrong.
    """
    try:
        fields = parse_json(data)
        if not isinstance(fields, dict):
            raise TypeError("not an object")
        version = fields["v"]
        if version == VERSION:
            return build(fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        shown = data[:_SHOWN_CHARS].decode("utf-8", "replace")
        expected = f"JSON of version {VERSION}"
        raise DamageError(f"{what} ({error!r})", path, 0, expected, repr(shown), next_step) from error
    raise StoreError(
        f"{path} has version {version!r}, and this rmq-spark supports version {VERSION}: a newer one wrote it. Write "
        f"to this store with the newer one. {what[0].upper()}{what[1:]}."
    )


def number_of(fields: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    """Return the integer field `name`.

    Raises KeyError if the field is missing, TypeError if it is not an integer, and ValueError if it is less than
    `least`.
    """
    value = fields[name]
    if type(value) is not int:
        raise TypeError(f"{name}: expected an integer, found {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value}")
    return value


def note_of(fields: Mapping[str, Any], name: str = "note") -> dict[str, int]:
    """Return the field `name`, an object that maps names to integers.

    Returns {} if the field is missing, as in files of older releases. Raises TypeError if it is anything else.
    """
    note = fields.get(name, {})
    if type(note) is not dict or not all(type(value) is int for value in note.values()):
        raise TypeError(f"{name}: expected integers by name, found {note!r}")
    return note


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """Return the text field `name`. Raises KeyError if it is missing, and TypeError if it is not a text or is empty."""
    value = fields[name]
    if type(value) is not str or not value:
        raise TypeError(f"{name}: expected a text, found {value!r}")
    return value


def digest_text(digest: int) -> str:
    """Return a 64-bit digest as 16 hex digits. It is stored as text, because JSON readers would round such a number."""
    return f"{digest:016x}"


def digest_of(fields: Mapping[str, Any], name: str = "digest") -> int:
    """Return the digest in the field `name`, which contains a result of `digest_text`.

    Raises KeyError if the field is missing, TypeError if it is not a text, and ValueError if it is not hex digits.
    """
    return int(text_of(fields, name), 16)
