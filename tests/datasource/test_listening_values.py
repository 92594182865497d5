"""Values that a listener gets from columns: times in their zones; no value makes the query fail."""

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from rmq_spark.datasource.spark.listener_task import values_of

AT = datetime(2026, 7, 2, 3, 4, 5, 678_900, tzinfo=UTC)
AT_US = 1_782_961_445_678_900
EAST = timezone(timedelta(hours=8))


@pytest.mark.parametrize(
    ("name", "zone"),
    [
        ("UTC", UTC),
        ("Z", UTC),
        ("Europe/Berlin", ZoneInfo("Europe/Berlin")),
        ("GMT", UTC),
        ("+08:00", EAST),
        ("GMT+8", EAST),
        ("GMT+08:00", EAST),
        ("UTC+08", EAST),
        ("UT+080000", EAST),
        ("+8", EAST),
        ("-03:30", timezone(-timedelta(hours=3, minutes=30))),
        ("GMT+99", UTC),
        ("Mars/Olympus", UTC),
        ("../etc/passwd", UTC),
        ("", UTC),
    ],
)
def test_a_time_is_in_the_zone_that_java_names(name: str, zone: Any) -> None:
    column = pa.array([AT_US, None], pa.int64()).view(pa.timestamp("us", tz=name or "nowhere"))
    found, nothing = values_of(column)
    assert (found, nothing) == (AT, None)
    assert found.utcoffset() == AT.astimezone(zone).utcoffset()


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [
        ("s", 1, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        ("ms", -1, datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)),
        ("ns", 1_999, datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        ("us", 1_700_000_000_000_000_000, None),
        ("us", 2**63 - 1, None),
        ("us", -(2**63), None),
        ("s", 2**63 - 1, None),
        ("us", 253_402_214_400_000_000, datetime(9999, 12, 31, tzinfo=UTC)),
        ("us", 253_402_214_400_000_001, None),
        ("us", -62_135_510_400_000_000, datetime(1, 1, 2, tzinfo=UTC)),
        ("us", -62_135_510_400_000_001, None),
    ],
)
def test_a_time_that_no_datetime_can_say_is_none(unit: str, value: int, expected: datetime | None) -> None:
    for zone in ("UTC", "GMT+14", "Pacific/Pago_Pago"):
        column = pa.array([value], pa.int64()).view(pa.timestamp(unit, tz=zone))
        assert values_of(column) == [expected]


def test_a_time_without_a_zone_has_none() -> None:
    column = pa.array([AT_US, 2**60], pa.int64()).view(pa.timestamp("us"))
    assert values_of(column) == [AT.replace(tzinfo=None), None]


def test_a_date_that_no_date_can_say_is_none() -> None:
    column = pa.array([0, -719_162, 2_932_896, -719_163, 2_932_897, None], pa.int32()).view(pa.date32())
    assert values_of(column) == [date(1970, 1, 1), date.min, date.max, None, None, None]


def test_times_within_structs_and_lists_are_those_values_too() -> None:
    times = pa.array([AT_US, 2**62, AT_US, 0], pa.int64()).view(pa.timestamp("us", tz="GMT+8"))
    structs = pa.StructArray.from_arrays(
        [times, pa.array([1, 2, 3, 4])], ["at", "n"], mask=pa.array([False, False, True, False])
    )
    assert values_of(structs.slice(1)) == [{"at": None, "n": 2}, None, {"at": datetime(1970, 1, 1, tzinfo=UTC), "n": 4}]
    lists = pa.ListArray.from_arrays(pa.array([0, 1, None, 2, 4]), times)
    assert values_of(lists.slice(1)) == [[None], None, [AT, datetime(1970, 1, 1, tzinfo=UTC)]]


def test_other_values_are_arrows() -> None:
    assert values_of(pa.array([b"x", None])) == [b"x", None]
    assert values_of(pa.array([[1, 2], None])) == [[1, 2], None]
    assert values_of(pa.array([[("a", "b")], None], pa.map_(pa.string(), pa.string()))) == [{"a": "b"}, None]
