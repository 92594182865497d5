"""The JSON dialect of fastjson 1.2: a tolerant reader, and a writer whose output every reader accepts.

fastjson writes two things that strict parsers refuse: numeric keys without quotes (`{0:12,1:34}`), and objects as keys.
This reader returns every key as text. A number becomes its digits as written, and an object becomes the part of the
text that it takes. References like `{"$ref":"$.a"}` are returned as they are, not resolved.

Most texts are strict JSON. Python's parser reads these, because it is 30 times as fast. The reader in this module reads
all other texts. It does not recurse, takes linear time, and accepts at most MAX_DEPTH levels.
Source: fastjson 1.2.83, as called by RemotingSerializable#toJson (4.9, 5.3).
"""

import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, NoReturn

MAX_DEPTH = 100  # config files have five levels; the limit bounds the cost of objects as keys
_MAX_NUMBER_CHARS = 400  # bounds the time to convert a number; enough for all digits of a double

_SPACE = re.compile(r"[ \t\r\n]*+")
_STRING = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD = re.compile(r"true|false|null")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_PLAIN_ESCAPES = {
    **{character: character for character in "\"\\/'"},
    **{"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"},
    **{digit: chr(int(digit)) for digit in "01234567"},
}
_WORDS = {"true": True, "false": False, "null": None}


class FastjsonError(ValueError):
    """A text is not valid in fastjson's dialect of JSON. `position` is the index of the wrong character, from 0."""

    def __init__(self, what: str, position: int) -> None:
        super().__init__(what, position)
        self.what, self.position = what, position

    def __str__(self) -> str:
        return f"character {self.position}: {self.what}"


def parse(text: str) -> Any:
    """Return the value of a text: a dict (with str keys), list, str, int, float, bool or None.

    If an object has the same key several times, the last value is used. Raises FastjsonError if the text is invalid.
    """
    try:
        value = _STRICT.decode(text)
    except (ValueError, RecursionError):
        return _Reader(text).read()
    return value if _is_shallow(value) else _Reader(text).read()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _parse_int(digits: str) -> int:
    return int(digits) if len(digits) <= _MAX_NUMBER_CHARS else _refuse(digits)


def _parse_float(digits: str) -> float:
    return float(digits) if len(digits) <= _MAX_NUMBER_CHARS else _refuse(digits)


_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_int=_parse_int, parse_float=_parse_float)


def _is_shallow(value: Any) -> bool:
    """Return whether a value has at most MAX_DEPTH levels."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return True
        members = (one.values() if isinstance(one, dict) else one for one in level)
        level = [member for each in members for member in each if isinstance(member, (dict, list))]
    return not level


class _Reader:
    """Parses one text. `_open` contains the objects and lists whose end was not read yet, the outermost first."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._open: list[_Object | list[Any]] = []

    def read(self) -> Any:
        self._skip_space()
        value = self._begin_value()
        while self._open:
            value = self._add(value)
        if self._at < len(self._text):
            self._fail("nothing after the value")
        return value

    def _add(self, value: Any) -> Any:
        """Add a value to the innermost open container. Then close the container, or begin to read its next value.

        `value` is _NOTHING if the container was just opened. Returns the closed container or the next value.
        """
        inner = self._open[-1]
        empty = value is _NOTHING
        if isinstance(inner, list):
            if not empty:
                inner.append(value)
            if self._take_end("]", "," if not empty else None):
                return self._close()
            return self._begin_value()
        if inner.awaits_key and not empty:  # the value is an object before the colon, so its text is the key
            return self._begin_after_colon(inner, self._text[inner.key_at : self._end_of_value])
        if not empty:
            inner.values[inner.key] = value
        if self._take_end("}", "," if not empty else None):
            return self._close()
        inner.awaits_key, inner.key_at = True, self._at
        if self._peek() == "{":
            return self._begin_value()
        return self._begin_after_colon(inner, self._read_key())

    def _begin_after_colon(self, inner: "_Object", key: str) -> Any:
        inner.key, inner.awaits_key = key, False
        self._skip_space()
        if self._peek() != ":":
            self._fail("a colon after a key")
        self._at += 1
        self._skip_space()
        return self._begin_value()

    def _begin_value(self) -> Any:
        """Read a value that is a single token, or open a container and return _NOTHING."""
        character = self._peek()
        if character in ("{", "["):
            if len(self._open) == MAX_DEPTH:
                self._fail(f"at most {MAX_DEPTH} levels")
            self._open.append(_Object() if character == "{" else [])
            self._at += 1
            self._skip_space()
            return _NOTHING
        if character == '"':
            value: Any = self._read_string()
        elif match := _WORD.match(self._text, self._at):
            value = _WORDS[match[0]]
            self._at = match.end()
        else:
            value = self._read_number()
        self._skip_space()
        return value

    def _close(self) -> Any:
        self._end_of_value = self._at
        self._skip_space()
        inner = self._open.pop()
        return inner.values if isinstance(inner, _Object) else inner

    def _take_end(self, bracket: str, separator: str | None) -> bool:
        """Return whether the container ends here, and skip its closing bracket. If not, skip the separator, if any.

        `separator` is None after the opening bracket, where no separator is expected.
        """
        character = self._peek()
        if character == bracket:
            self._at += 1
            return True
        if separator is not None:
            if character != separator:
                self._fail(f"{separator} or {bracket}")
            self._at += 1
            self._skip_space()
        return False

    def _read_key(self) -> str:
        if self._peek() == '"':
            return self._read_string()
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            self._fail("a key: a string, a number or an object")
        self._at = match.end()
        return match[0]

    def _read_string(self) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            self._fail("a string that ends")
        self._at = match.end()
        inside = match[1]
        if "\\" not in inside:
            return inside
        text = _ESCAPE.sub(lambda escape: self._unescape(escape, match.start(1)), inside)
        # Two escaped surrogates become one character. A single surrogate stays as it is.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")

    def _unescape(self, escape: re.Match[str], begin: int) -> str:
        digits = escape[1] or escape[2]
        if digits:
            return chr(int(digits, 16))
        plain = _PLAIN_ESCAPES.get(escape[3])
        if plain is None:
            self._at = begin + escape.start()
            self._fail("a known escape")
        return plain

    def _read_number(self) -> int | float:
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            self._fail("a value")
        if len(match[0]) > _MAX_NUMBER_CHARS:
            self._fail(f"a number of at most {_MAX_NUMBER_CHARS} characters")
        try:
            number = float(match[0]) if match[1] or match[2] else int(match[0])
        except ValueError:
            self._fail("a whole number")
        self._at = match.end()
        return number

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None  # the pattern matches the empty string
        self._at = match.end()

    def _fail(self, expected: str) -> NoReturn:
        found = self._text[self._at : self._at + 20]
        raise FastjsonError(
            f"expected {expected}, found {found!r}" if found else f"expected {expected}, the text ends", self._at
        )


class _Object:
    """An object whose end was not read yet. If `awaits_key`, the next value is a key. Else it is the value of `key`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.key = ""
        self.awaits_key = False
        self.key_at = 0


_NOTHING: Any = object()


def write(value: Any, *, bare_numbers: bool = False) -> str:
    """Return the text of a value in fastjson's pretty style, with sorted keys.

    Objects are indented by tabs, and lists are on one line. Fields of objects that are None are omitted. Keys that are
    integers have quotes, because every reader accepts them. If `bare_numbers` is True, they have no quotes, as fastjson
    writes them.
    """
    return _write(value, 0, bare_numbers)


def _write(value: Any, depth: int, bare_numbers: bool) -> str:
    assert depth <= MAX_DEPTH, depth
    if type(value) is int:  # tested first, because most values in files of offsets are integers
        return str(value)
    if isinstance(value, Mapping):
        return _write_object(value, depth, bare_numbers)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_write(item, depth + 1, bare_numbers) for item in value)}]"
    if isinstance(value, str):
        return _quote(value)
    assert value is None or isinstance(value, (bool, int, float)), type(value)
    return json.dumps(value, allow_nan=False)


def _write_object(value: Mapping[Any, Any], depth: int, bare_numbers: bool) -> str:
    present = {key: item for key, item in value.items() if item is not None}
    if not present:
        return "{}"
    numeric = all(isinstance(key, int) for key in present)
    indent = "\t" * (depth + 1)
    parts = []
    for key in sorted(present):
        item = _write(present[key], depth + 1, bare_numbers)
        if numeric:
            parts.append(f"{key}:{item}" if bare_numbers else f'"{key}":{item}')
        else:
            assert isinstance(key, str), key
            parts.append(f"\n{indent}{_quote(key)}:{item}")
    return "{" + ",".join(parts) + "\n" + "\t" * depth + "}"


def _quote(text: str) -> str:
    if text.isascii():
        return encode_basestring(text)
    try:
        text.encode()
    except UnicodeEncodeError:  # a single surrogate can only be written as an escape
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)
