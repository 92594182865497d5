"""Messages as JSON lines, such as `rmq cat --json` prints, for `rmq send --from-json`.

Each line is an object. The list of `rmq cat --json` is accepted too, because it has one object in each line. Lines are
parsed in parts as they arrive, so a pipe without an end can be read.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import say
from rmq_spark.command.parameters import Moment

_READ_BYTES = 1 << 20
_SHOWN_CHARS = 60
_BODY, _BASE64 = "body", "bodyBase64"
_INT_32 = range(-(1 << 31), 1 << 31)
_INT_64 = range(-(1 << 63), 1 << 63)
_MAX_ROWS = 1 << 15  # send_many checks as many at a time before it stores one of them
_ADVICE = "Correct the line, and send from it on."
LAST_LEVEL = (
    "{what} {level}: a broker has 18 levels unless its messageDelayLevel has more, and takes a higher one for its last "
    "level. For another delay give a delivery time."
)


class LineError(rmq_spark.OptionError):
    """An error about a line. `shown` are texts of the line, which are printed unchanged."""

    def __init__(self, text: str, shown: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.shown = tuple(shown)


class Part(NamedTuple):
    """Messages to send, and the number of the line of each, from 1."""

    messages: pa.Table
    lines: Sequence[int]


class _Field(NamedTuple):
    """A field of a line that is sent: its type in a table, a check of its value, and what the check expects."""

    type: pa.DataType
    fits: Callable[[Any], bool]
    expected: str


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in _INT_32


def _is_time(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value in _INT_64)


def _is_keys(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))


def _is_properties(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


_FIELDS = {
    "tags": _Field(pa.string(), _is_text, "a text"),
    "keys": _Field(pa.list_(pa.string()), _is_keys, "a text, or a list of texts"),
    "properties": _Field(pa.map_(pa.string(), pa.string()), _is_properties, "an object whose values are texts"),
    "shardingKey": _Field(pa.string(), _is_text, "a text"),
    "flag": _Field(pa.int32(), _is_number, "an integer"),
    "delayLevel": _Field(pa.int32(), _is_number, "an integer"),
    "deliverTimestamp": _Field(pa.int64(), _is_time, "ms since 1970, or a time"),
}
_QUEUE_FIELDS = {
    "queueId": _Field(pa.int32(), _is_number, "an integer"),
    "brokerName": _Field(pa.string(), _is_text, "a text"),
}
# Fields of `rmq cat --json` that a copy gets new values for.
_IGNORED = frozenset({*rmq_spark.COLUMNS, *_QUEUE_FIELDS, _BASE64})


class JsonMessages:
    """The messages of a stream of JSON lines. `name` is that of the stream, for errors.

    Queues are only kept with `keeps_queues`. `levels` is the number of delay levels that the place certainly has.
    A line with a higher level is refused with `refuses_others`. Otherwise the first such line is named on stderr.
    """

    def __init__(self, stream: IO[bytes], name: str, *, keeps_queues: bool, levels: int, refuses_others: bool) -> None:
        self._stream, self._name = stream, name
        self._fields = _FIELDS | _QUEUE_FIELDS if keeps_queues else _FIELDS
        self._levels, self._refuses_others = levels, refuses_others
        self._line = 0
        self._said: set[str] = set()

    def parts(self) -> Iterator[Part]:
        """Yield messages for `send_many`. Raises LineError for a wrong line after those before it were yielded."""
        for lines in _short_parts(line_parts(self._stream)):
            rows: list[dict[str, Any]] = []
            numbers: list[int] = []
            problem: LineError | None = None
            for line in lines:
                self._line += 1
                text = line.strip()
                if text in (b"[", b"]", b"[]", b""):
                    continue
                try:
                    rows.append(self._parse(text))
                except ValueError as error:
                    problem = self._error(self._line, str(error), [str(error)])
                    break
                numbers.append(self._line)
            if rows:
                yield Part(self._table(rows), numbers)
            if problem is not None:
                raise problem

    def explain(self, part: Part, error: rmq_spark.OptionError) -> LineError:
        """Return the error for a part of one message, which `send_many` refused."""
        (row,) = part.messages.drop_columns(_BODY).to_pylist()
        return self._error(part.lines[0], str(error).removeprefix("row 0, ").rstrip("."), _texts_of(row))

    def _error(self, line: int, problem: str, shown: Iterable[str]) -> LineError:
        return LineError(f"cannot send {self._name}:{line}: {problem}. {_ADVICE}", [self._name, *shown])

    def _parse(self, text: bytes) -> dict[str, Any]:
        """Return the fields of a line to send. Raises ValueError with what was found and what was expected."""
        try:
            row = json.loads(text.removeprefix(b"[").removesuffix(b"]").rstrip().removesuffix(b","))
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f'found {_shown(text)}; expected a JSON object, such as {{"body": "hello"}}')
        found: dict[str, Any] = {_BODY: _body_of(row)}
        for name, value in row.items():
            field = self._fields.get(name)
            if field is None:
                if name not in _IGNORED:
                    known = ", ".join([_BODY, _BASE64, *self._fields])
                    raise ValueError(f"found the field {name!r}; expected some of {known}, or fields of rmq cat --json")
            elif value is not None:
                if not field.fits(value):
                    raise ValueError(f"found {name} {_shown(value)}; expected {field.expected}")
                _require_valid_text(name, value)
                if name == "delayLevel":
                    self._check_level(value)
                found[name] = _sent_value(name, value)
        if "queueOffset" in row and "properties" not in row:
            self._say_once(
                "properties",
                "The lines have no properties, so the copies have none. `rmq cat --columns '*' --json` prints them.",
            )
        return found

    def _check_level(self, level: int) -> None:
        """Raise ValueError for a delay level that does not exist, which RocketMQ would take for none or the last."""
        if level < 1 or (level > self._levels and self._refuses_others):
            raise ValueError(f"found delayLevel {level}; expected one of the levels 1 to {self._levels}")
        if level > self._levels:
            self._say_once(
                "delayLevel", f"{self._name}:{self._line}: {LAST_LEVEL.format(what='delayLevel', level=level)}"
            )

    def _say_once(self, kind: str, text: str) -> None:
        """Print a note, the first of its kind."""
        if kind not in self._said:
            say(text)
            self._said.add(kind)

    def _table(self, rows: list[dict[str, Any]]) -> pa.Table:
        columns = {_BODY: pa.array([row[_BODY] for row in rows], pa.binary())}
        for name, field in self._fields.items():
            values = [row.get(name) for row in rows]
            if any(value is not None for value in values):
                columns[name] = pa.array(values, field.type)
        return pa.table(columns)


def line_parts(stream: Any) -> Iterator[list[bytes]]:
    """Yield lists of complete lines as they arrive, at most 1 MiB at a time. The last line may lack its line end."""
    rest: list[bytes] = []
    while read := stream.read1(_READ_BYTES):
        *whole, last = read.split(b"\n")
        if whole:
            whole[0] = b"".join([*rest, whole[0]])
            rest = []
            yield [line.removesuffix(b"\r") for line in whole]
        rest.append(last)
    if any(rest):
        yield [b"".join(rest)]


def _short_parts(parts: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    for lines in parts:
        for first in range(0, len(lines), _MAX_ROWS):
            yield lines[first : first + _MAX_ROWS]


def _body_of(row: dict[str, Any]) -> bytes:
    """Return the body of a line, which is text, or base64 in the other field."""
    body, encoded = row.get(_BODY), row.get(_BASE64)
    if isinstance(body, str) and encoded is None:
        _require_valid_text(_BODY, body)
        return body.encode()
    if body is not None or not isinstance(encoded, str):
        found = f"{_BODY} {_shown(body)}" if _BODY in row else f"no {_BODY}"
        raise ValueError(f"found {found}; expected a text, or null and base64 in {_BASE64}")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:  # also of a text that is not ASCII
        raise ValueError(f"found {_BASE64} {_shown(encoded)}; expected base64") from None


def _sent_value(name: str, value: Any) -> Any:
    """Return a value as `send_many` takes it."""
    if name == "keys" and isinstance(value, str):
        return value.split()
    if name == "properties":
        return list(value.items())
    if name == "deliverTimestamp":
        try:
            time_ms = Moment().convert(value, None, None)
        except click.BadParameter as error:
            raise ValueError(f"found {name} {_shown(value)}: {error.message.rstrip('.')}") from None
        if time_ms not in _INT_64:
            raise ValueError(f"found {name} {_shown(value)}; expected {_FIELDS[name].expected}")
        return time_ms
    return value


def _require_valid_text(name: str, value: Any) -> None:
    """Raise ValueError if a text of a value has half of a surrogate pair, which UTF-8 cannot contain."""
    for text in _texts_of(value):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"found {name} {_shown(value)}, half of a surrogate pair; expected valid text") from None


def _texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in a value: of an object also its names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_of(one)
    elif isinstance(value, dict):
        yield from _texts_of([*value, *value.values()])


def _shown(value: Any) -> str:
    """Return a value of a line, or a line, as JSON in valid text."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False)
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
