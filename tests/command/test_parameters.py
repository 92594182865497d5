"""Times and sizes as they are typed."""

from datetime import UTC, datetime

import click
import pytest

from rmq_spark.command.parameters import Moment, Size


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("0", 0),
        ("1767225600000", 1767225600000),
        ("2026-01-01T00:00:00Z", 1767225600000),
        ("2026-01-01T08:00:00.5+08:00", 1767225600500),
        # as tables, `cat`, `get` and --json print times
        ("2026-01-01 00:00:00", 1767225600000),
        ("2026-01-01 00:00:00.500", 1767225600500),
        ("2026-01-01 00:00:00.500 UTC", 1767225600500),
        ("2026-01-01T00:00:00.500Z", 1767225600500),
        ("4611686018427387 ms", 4611686018427387),
        ("2026-01-01", 1767225600000),
        ("2026-01-01T00:00:00", 1767225600000),
    ],
)
def test_a_time_is_ms_or_a_date_in_utc_unless_it_has_a_zone(text: str, time_ms: int) -> None:
    assert Moment().convert(text, None, None) == time_ms


@pytest.mark.parametrize(
    ("text", "ago_ms"), [("now", 0), ("now-90m", 5_400_000), ("-2d", 172_800_000), ("now+1h", -3_600_000), ("-5ms", 5)]
)
def test_a_time_may_be_told_from_now(text: str, ago_ms: int) -> None:
    before = int(datetime.now(UTC).timestamp() * 1000)  # noqa: TID251 - what is told from now has no other clock
    found = Moment().convert(text, None, None)
    assert 0 <= found + ago_ms - before < 60_000


@pytest.mark.parametrize("text", ["", "noon", "2026-13-01", "now-1w", "10m", "9" * 20, "²"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time"):
        Moment().convert(text, None, None)


@pytest.mark.parametrize(("text", "size"), [("5", 5), ("64k", 65536), ("1M", 1 << 20), ("2gb", 2 << 30)])
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "k", "1.5m", "1t", "-1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        Size().convert(text, None, None)
