"""Rows and log lines as JSON that is safe to print: valid, in one line, and without control characters."""

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

# What `json` leaves as it is although it must not be printed: DEL, C1, Unicode's line separators, lone surrogates.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def json_text(fields: Mapping[str, Any], default: Callable[[Any], Any]) -> str:
    """Return a JSON object in one line. `default` replaces each value that is not of a type of JSON.

    A number that is infinite or none is null. Another value that JSON cannot have, such as a list that contains itself,
    is shortened text.
    """
    try:
        text = _dump(fields, default)
    except (ValueError, TypeError, RecursionError):
        text = _dump({str(name): _valid(value, default) for name, value in fields.items()}, default)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _dump(value: Any, default: Callable[[Any], Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=default)


def _valid(value: Any, default: Callable[[Any], Any]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        _dump(value, default)
    except (ValueError, TypeError, RecursionError):
        return reprlib.repr(value)
    return value
