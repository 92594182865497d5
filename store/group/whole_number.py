"""Whole numbers that a program hands over: queue offsets above all, which must be written as nothing else."""

import operator
from datetime import datetime

from rmq_spark.store.errors import OptionError

MAX_LONG = (1 << 63) - 1  # what RocketMQ holds in a Java long


def check_whole(name: str, value: object, least: int, most: int = MAX_LONG) -> int:
    """Return `value` as an int. numpy's whole numbers are accepted, True and 1.0 are not. Raises OptionError."""
    number = _whole(value)
    if number is None or not least <= number <= most:
        bounds = f"from {least} on" if most == MAX_LONG else f"from {least} to {most}"
        raise OptionError(f"{name}={value!r} is no whole number {bounds}.")
    return number


def as_ms(name: str, value: object) -> object:
    """Return a datetime as ms since the epoch, rounded, and anything else as it is.

    Raises OptionError for a datetime without a time zone: which moment it means depends on the machine.
    """
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise OptionError(
            f"{name}={value!r} has no time zone; expected one, or ms since the epoch. Give it, as in "
            "datetime(…, tzinfo=timezone.utc)."
        )
    return round(value.timestamp() * 1000)


def check_offset(call: str, value: object) -> int:
    """Return a queue offset as an int. Raises OptionError, which names the call."""
    number = _whole(value)
    if number is None or not 0 <= number <= MAX_LONG:
        raise OptionError(
            f"{call}: offset={value!r} is no queue offset. Accepted are whole numbers from 0 to 2**63 - 1; min_offset "
            "and max_offset say what a queue holds."
        )
    return number


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is what is asked
    except TypeError:
        return None
