"""Columns of Arrow as the values that a listener gets, whatever is in them: no row stops a query by a value. Pure.

Arrow's own way fails for a time that Python's datetime cannot say, and for a zone that Python does not know; a producer
may write any born time, and Spark names zones as Java does.
"""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = _EPOCH.date().toordinal()
_DAY_US = 86_400_000_000
# A day from either end of what datetime can say: the same moment in any zone can be said, too.
_FIRST_US = (date.min.toordinal() + 1 - _EPOCH_DAY) * _DAY_US
_LAST_US = (date.max.toordinal() - _EPOCH_DAY) * _DAY_US
_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
# Java's zones that are an offset: +8, +08:00, +080000, and these behind GMT, UTC or UT.
_OFFSET = re.compile(r"(?:GMT|UTC|UT)?([+-])(\d{1,2})(?::?(\d{2})(?::?(\d{2}))?)?")


def values_of(column: pa.Array) -> list[Any]:
    """Return a column's values: maps are dicts, times are datetimes in the column's zone.

    A time that no datetime can say, in the years before 1 or after 9999, is None. A zone that Python does not know is
    UTC: it is the same moment.
    """
    kind = column.type
    if pa.types.is_map(kind):
        return [None if value is None else dict(value) for value in column.to_pylist()]
    convert = _converter(kind)
    return column.to_pylist() if convert is None else convert(column)


def _converter(kind: pa.DataType) -> Callable[[pa.Array], list[Any]] | None:
    """Return what makes values of a column that has times or dates in it, None for one that has none."""
    if pa.types.is_timestamp(kind):
        return _times
    if pa.types.is_date32(kind):
        return _dates
    if pa.types.is_struct(kind) and any(_converter(field.type) for field in kind):
        return _structs
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _converter(kind.value_type):
        return _lists
    return None


def _times(column: pa.Array) -> list[Any]:
    per_s = _PER_S[column.type.unit]
    micros = [None if value is None else value * 1_000_000 // per_s for value in column.view(pa.int64()).to_pylist()]
    zone = None if column.type.tz is None else _zone(column.type.tz)
    epoch = _EPOCH.replace(tzinfo=None) if zone is None else _EPOCH
    times = [
        epoch + timedelta(microseconds=value) if value is not None and _FIRST_US <= value <= _LAST_US else None
        for value in micros
    ]
    return times if zone is None else [None if time is None else time.astimezone(zone) for time in times]


def _dates(column: pa.Array) -> list[Any]:
    days = column.view(pa.int32()).to_pylist()
    first, last = date.min.toordinal() - _EPOCH_DAY, date.max.toordinal() - _EPOCH_DAY
    return [date.fromordinal(_EPOCH_DAY + day) if day is not None and first <= day <= last else None for day in days]


def _structs(column: pa.StructArray) -> list[Any]:
    names = [field.name for field in column.type]
    rows = zip(*map(values_of, column.flatten()), strict=True)
    return [
        dict(zip(names, row, strict=True)) if is_there else None
        for row, is_there in zip(rows, column.is_valid().to_pylist(), strict=True)
    ]


def _lists(column: pa.ListArray) -> list[Any]:
    values, made, begin = values_of(column.flatten()), [], 0
    for count in column.value_lengths().to_pylist():
        made.append(None if count is None else values[begin : begin + count])
        begin += count or 0
    return made


def _zone(name: str) -> tzinfo:
    found = _OFFSET.fullmatch(name)
    if found is not None:
        sign, *parts = found.groups()
        hours, minutes, seconds = (int(part or 0) for part in parts)
        offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if offset < timedelta(days=1):
            return timezone(-offset if sign == "-" else offset)
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # ZoneInfoNotFoundError is a KeyError
        return UTC
