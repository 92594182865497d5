"""The contents of responses, checked: fields of the header, and values of the JSON in the body.

Brokers write JSON with fastjson: numeric keys without quotes, and objects as keys (`store.format.fastjson`). Tables by
queue have objects as keys: `{{"brokerName":"b","queueId":0,"topic":"t"}:{…},…}`.
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode
from rmq_spark.store.cluster.frame import Command, FrameError, shorten_value
from rmq_spark.store.format import fastjson
from rmq_spark.store.model import QueueKey

_INT64 = range(-(1 << 63), 1 << 63)
_DIGITS = re.compile(r"-?[0-9]{1,19}")
_SURE_DIGITS = 18  # this many digits are always a number of 64 bits
_TEXT = r'"([^"\\\x00-\x1f]*+)"'
_QUEUE = rf'\{{"brokerName":{_TEXT},"queueId":([0-9]{{1,9}}+),"topic":{_TEXT}\}}'
_QUEUE_KEY = re.compile(rf"(?<=[{{,]){_QUEUE}(?=:)")
_QUOTED_QUEUE_KEY = r'"{\\"brokerName\\":\\"\1\\",\\"queueId\\":\2,\\"topic\\":\\"\3\\"}"'
_WHOLE_QUEUE = re.compile(_QUEUE)


class AnswerError(FrameError):
    """A response lacks a value, or has one of another kind than RocketMQ's servers send."""


class Question(Protocol):
    """The request to which a response belongs, or which a broker has sent."""

    @property
    def code(self) -> RequestCode | BrokerRequestCode:
        """The code of the request."""


class Answer:
    """The contents of the response to one request. Every method raises AnswerError for what is missing or invalid."""

    def __init__(self, command: Command, request: Question) -> None:
        self._command = command
        self._request = request

    def number(self, name: str) -> int:
        """Return a field of the header, a whole number of 64 bits."""
        text = self._command.fields.get(name)
        if text is None:
            self.refuse(f"field {name}", "no such field", "a whole number")
        if len(text) <= _SURE_DIGITS and text.isascii() and text.isdigit():
            return int(text)
        if not _DIGITS.fullmatch(text) or (number := int(text)) not in _INT64:
            self.refuse(f"field {name}", shorten_value(text), "a whole number of 64 bits")
        return number

    def optional_number(self, name: str) -> int | None:
        """Return a field of the header, a whole number of 64 bits. Return None if the response lacks it."""
        return self.number(name) if name in self._command.fields else None

    def json(self) -> dict[str, Any]:
        """Return the body, a JSON object as brokers write it. Keys that are objects come as their texts."""
        try:
            text = str(self._command.body, "utf-8")
            value = parse_json(text)
        except UnicodeDecodeError as error:
            self.refuse("body", f"a byte that is not UTF-8 at position {error.start}", "JSON")
        except fastjson.FastjsonError as error:
            self.refuse("body", f"no JSON ({error})", "JSON")
        return self.object(value, "body")

    def object(self, value: Any, where: str) -> dict[str, Any]:
        """Return `value`, an object. `where` names it in errors."""
        if not isinstance(value, dict):
            self.refuse(where, shorten_value(value), "an object")
        return value

    def objects(self, parent: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        """Return a list of objects in an object. A missing list is empty."""
        values = self._list(parent, name)
        return [self.object(value, f"{name}[{number}]") for number, value in enumerate(values)]

    def texts(self, parent: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """Return a list of texts in an object. A missing list is empty."""
        values = self._list(parent, name)
        return tuple(self._as_text(value, f"{name}[{number}]") for number, value in enumerate(values))

    def table(self, parent: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
        """Return an object of objects in an object. A missing one is empty."""
        values = self.object(self._present(parent.get(name), {}), name)
        return {key: self.object(value, f"{name}.{key}") for key, value in values.items()}

    def text(self, parent: Mapping[str, Any], name: str, default: str | None = None) -> str:
        """Return a text in an object. A missing one is an error, unless there is a default."""
        return self._as_text(self._present(parent.get(name), default), name)

    def integer(self, parent: Mapping[str, Any], name: str, default: int | None = None) -> int:
        """Return a whole number of 64 bits in an object. A missing one is an error, unless there is a default."""
        value = self._present(parent.get(name), default)
        if type(value) is not int or value not in _INT64:
            self.refuse(name, shorten_value(value), "a whole number of 64 bits")
        return value

    def boolean(self, parent: Mapping[str, Any], name: str) -> bool:
        """Return a truth value in an object. A missing one is False."""
        value = self._present(parent.get(name), False)
        if not isinstance(value, bool):
            self.refuse(name, shorten_value(value), "true or false")
        return value

    def queue(self, text: str) -> QueueKey:
        """Return the queue whose JSON object is the text `text`."""
        if match := _WHOLE_QUEUE.fullmatch(text):
            return QueueKey(match[3], int(match[2]), match[1])
        try:
            value = self.object(fastjson.parse(text), "a queue")
        except fastjson.FastjsonError as error:
            self.refuse("a queue", f"no JSON ({error})", "an object")
        return QueueKey(self.text(value, "topic"), self.integer(value, "queueId"), self.text(value, "brokerName"))

    def refuse(self, where: str, found: str, expected: str) -> NoReturn:
        """Raise the AnswerError for one part of the response."""
        raise AnswerError(
            f"the answer to {self._request.code.name} is invalid in its {shorten_line(where)}: found "
            f"{shorten_line(found)}; expected {expected}"
        )

    def _list(self, parent: Mapping[str, Any], name: str) -> list[Any]:
        values = self._present(parent.get(name), [])
        if not isinstance(values, list):
            self.refuse(name, shorten_value(values), "a list")
        return values

    def _as_text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self.refuse(where, shorten_value(value), "a text")
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse(where, shorten_value(value), "Unicode text without single surrogates")
        return value

    @staticmethod
    def _present(value: Any, default: Any) -> Any:
        return default if value is None else value


def parse_json(text: str) -> Any:
    """Return what `fastjson.parse` returns, but faster for tables by queue. Raises FastjsonError.

    Queues as keys are put into quotes, so that the text is JSON for Python's parser. They cannot be parts of a longer
    text, whose quotes would be escaped.
    """
    return fastjson.parse(_QUEUE_KEY.sub(_QUOTED_QUEUE_KEY, text))


def shorten_line(text: str, max_chars: int = 150) -> str:
    """Return a server's text for a message: printable, and at most this many characters."""
    line = "".join(character if character.isprintable() else "?" for character in text[:max_chars])
    return line if len(text) <= max_chars else f"{line}…"
