"""Numbers as people read them: counts, bytes, times and spans of time, each with its unit."""

import calendar
import time

NOTHING = "-"  # where there is no number

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"))
# Times that a date has room for. A producer may write any number.
_FIRST_MS, _LAST_MS = calendar.timegm((1, 1, 1, 0, 0, 0)) * 1000, calendar.timegm((9999, 12, 31, 0, 0, 0)) * 1000


def count_text(count: int, noun: str) -> str:
    """Return "1 queue", "12,345 queues"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(size: float, is_exact: bool = True) -> str:
    """Return bytes as "512 B", "3.4 MiB", or "about 3.4 MiB" for an estimate."""
    about = "" if is_exact else "about "
    if size < 1024:
        return f"{about}{size:.0f} B"
    power = 0
    while size >= 999.5 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{about}{size:.3g} {_UNITS[power]}"


def time_text(time_ms: int | None) -> str:
    """Return a moment in UTC as "2026-11-21 05:50:31.764", the number itself where no date can say it."""
    if time_ms is None:
        return NOTHING
    if not _FIRST_MS <= time_ms <= _LAST_MS:
        return f"{time_ms} ms"
    seconds, ms = divmod(time_ms, 1000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{ms:03}"


def span_text(seconds: float) -> str:
    """Return a span of time in its two largest units, as "2 d 3 h", "5 min 10 s", "1.25 s", "40 ms"."""
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
