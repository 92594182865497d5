"""Texts of counts, bytes, times and durations, with their units."""

import calendar
import time

NOTHING = "-"  # shown for a missing number

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"))
# The first and the last time that a date can represent. A producer may write any number as a time.
_FIRST_MS, _LAST_MS = calendar.timegm((1, 1, 1, 0, 0, 0)) * 1000, calendar.timegm((9999, 12, 31, 0, 0, 0)) * 1000


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 queue" or "12,345 queues"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(size: float, is_exact: bool = True) -> str:
    """Return a number of bytes, such as "512 B" or "3.4 MiB". If `is_exact` is False, returns "about 3.4 MiB"."""
    about = "" if is_exact else "about "
    if size < 1024:
        return f"{about}{size:.0f} B"
    power = 0
    while size >= 999.5 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{about}{size:.3g} {_UNITS[power]}"


def time_text(time_ms: int | None) -> str:
    """Return a time (ms since the epoch) as a date in UTC, such as "2026-11-21 05:50:31.764".

    If no date can represent the time, returns it in ms, such as "-9000000000000000 ms". Returns "-" if it is None.
    """
    if time_ms is None:
        return NOTHING
    if not _FIRST_MS <= time_ms <= _LAST_MS:
        return f"{time_ms} ms"
    seconds, ms = divmod(time_ms, 1000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{ms:03}"


def span_text(seconds: float) -> str:
    """Return a duration in its two largest units, such as "2 d 3 h", "5 min 10 s", "1.25 s" or "40 ms"."""
    if seconds < 0:
        return f"-{span_text(-seconds)}"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    left, parts = round(seconds), []
    for size, name in _SPANS:
        if left >= size:
            parts.append(f"{left // size:,} {name}")
            left %= size
    if left:
        parts.append(f"{left} s")
    return " ".join(parts[:2])
