"""JSON of our own files in `rmq/`, parsed so that every malformed text is a ValueError."""

import json
from typing import Any, NoReturn


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for any other text: also for NaN and Infinity, which are not JSON, and for deeper nesting than
    the parser can follow.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
