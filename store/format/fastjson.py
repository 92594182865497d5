"""JSON as fastjson 1.2 writes it, which is not quite JSON: read tolerantly, written so that both can read it.

What fastjson writes and a strict parser refuses: maps with numeric keys leave the keys bare (`{0:12,1:34}`), and
maps with objects as keys have an object before the colon. Here every key is text: a bare number as it is written,
an object as the slice of text that it is. `{"$ref":"$.a"}` stays what it is.

Reading takes time linear in the text and nests at most MAX_DEPTH levels. A text that is strict JSON, as most are, is
read by Python's own parser, which is 30 times as fast; the other reader, which does not recurse, reads the rest.
Source: fastjson 1.2.83, as called by RemotingSerializable#toJson (4.9, 5.3).
"""

import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, NoReturn

MAX_DEPTH = 100  # config files nest five deep; bounds what an object as a key can cost
_MAX_NUMBER_CHARS = 400  # bounds the time that a number takes to convert; a double's digits fit

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
    """A text is not JSON, not even fastjson's. `position` counts characters from 0."""

    def __init__(self, what: str, position: int) -> None:
        super().__init__(what, position)
        self.what, self.position = what, position

    def __str__(self) -> str:
        return f"character {self.position}: {self.what}"


def parse(text: str) -> Any:
    """Return the value: dict (keys are str), list, str, int, float, bool or None. Of equal keys the last wins.

    Raises FastjsonError, with the position, for anything else than one value and space around it.
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
    """Say whether a value nests at most MAX_DEPTH levels."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return True
        members = (one.values() if isinstance(one, dict) else one for one in level)
        level = [member for each in members for member in each if isinstance(member, (dict, list))]
    return not level


class _Reader:
    """One reading. `_open` holds the objects and lists that have begun, outermost first."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._open: list[_Object | list[Any]] = []

    def read(self) -> Any:
        self._skip_space()
        value = self._begin_value()
        while self._open:
            value = self._go_on(value)
        if self._at < len(self._text):
            self._fail("nothing after the value")
        return value

    def _go_on(self, value: Any) -> Any:
        """Put a value, or _NOTHING after an opening bracket, into the innermost container; read the next one."""
        inner = self._open[-1]
        empty = value is _NOTHING
        if isinstance(inner, list):
            if not empty:
                inner.append(value)
            if self._take_end("]", "," if not empty else None):
                return self._close()
            return self._begin_value()
        if inner.awaits_key and not empty:  # what was read before the colon: an object that is a key
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
        """Read a value that takes no more than a token, or open a container and return _NOTHING."""
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
        """Say whether the container ends here; with a separator, one must stand here if it does not."""
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
        # Two escaped halves of one character come out as two; join them, and leave single halves alone.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")

    def _unescape(self, escape: re.Match[str], begin: int) -> str:
        digits = escape[1] or escape[2]
        if digits:
            return chr(int(digits, 16))
        plain = _PLAIN_ESCAPES.get(escape[3])
        if plain is None:
            self._at = begin + escape.start()
            self._fail("an escape that is known")
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
        assert match is not None  # it matches nothing as well
        self._at = match.end()

    def _fail(self, expected: str) -> NoReturn:
        found = self._text[self._at : self._at + 20]
        raise FastjsonError(
            f"expected {expected}, found {found!r}" if found else f"expected {expected}, the text ends", self._at
        )


class _Object:
    """An object being read: the key whose value comes next, or that the next value is a key itself."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.key = ""
        self.awaits_key = False
        self.key_at = 0


_NOTHING: Any = object()


def write(value: Any, *, bare_numbers: bool = False) -> str:
    """Return the text that fastjson's pretty style has for the value, with the keys sorted.

    Objects are indented by tabs, None in them is left out, lists stay on one line. A key that is an int is
    quoted, which every reader takes; with `bare_numbers` it is not, as fastjson itself does it.
    """
    return _write(value, 0, bare_numbers)


def _write(value: Any, depth: int, bare_numbers: bool) -> str:
    assert depth <= MAX_DEPTH, depth
    if type(value) is int:  # first: a file of offsets is made of them
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
    except UnicodeEncodeError:  # half of a character: only its escape can be written
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)
