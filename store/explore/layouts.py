"""Where a field stands in its layout: for findings, which name the very bytes."""

from typing import Any

import numpy as np


def field_position(layout: np.dtype[np.void], name: str) -> int:
    """Return where a field begins, in bytes from the begin of its entry."""
    fields: Any = layout.fields
    return int(fields[name][1])
