"""System calls of a delivery round: if nothing is due, as many for ten messages as for ten thousand."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.disk import files
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.testing.sample_message import SampleMessage

if TYPE_CHECKING:
    from tests.store.delivery.conftest import Kit

Wait = Callable[..., SampleMessage]
SYSTEM = {"posix", "fcntl", "_io", "io", "time"}


def system_calls(work: Callable[[], object]) -> int:
    """Return how often `work` calls what calls the kernel: functions of os and fcntl, and methods of open files."""
    count = 0

    def see(_: object, event: str, called: object) -> None:
        nonlocal count
        if event == "c_call":
            owner = getattr(called, "__module__", None) or type(getattr(called, "__self__", None)).__module__
            count += owner in SYSTEM

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_system_calls_are_counted() -> None:
    assert system_calls(lambda: None) == 0
    assert system_calls(lambda: files.file_size(__file__)) == 1
    assert system_calls(lambda: files.read_small(__file__)) >= 2


@pytest.fixture
def costs(make_kit: "type[Kit]", wait: Wait, tmp_path: Path) -> Callable[[int], tuple[int, int]]:
    """A function that returns what a tick costs that knows what waits, and one that has to look."""

    def measure(pending: int) -> tuple[int, int]:
        kit = make_kit(str(tmp_path / str(pending)), settings=WriterSettings(sizes=FileSizes(segment_bytes=8 << 20)))
        kit.put(*(wait(1 + number % 18, f"{number:05d}") for number in range(pending)))
        ticker = kit.ticker()
        kit.tick(ticker)
        known = system_calls(lambda: kit.tick(ticker))
        other = kit.ticker()
        kit.tick(other)
        kit.put(SampleMessage("T", 0, b"moves the store"))
        looks = system_calls(lambda: kit.tick(other))
        return known, looks

    return measure


def test_tick_costs_what_is_due_and_not_what_waits(costs: Callable[[int], tuple[int, int]]) -> None:
    few, many = costs(18), costs(10_000)
    assert few == many
    known, looks = few
    assert known <= 10
    assert looks <= 18 * 7 + 30, "some small reads a level"
