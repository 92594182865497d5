"""When a batch is full and where a scan ends: RocketMQ's numbers, and a slow twin that goes message by message."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.errors import OptionError
from rmq_spark.store.group.pull_limits import Candidates, PullLimits, Scan, scan

GIB = 1 << 30
BROKER = PullLimits()


def candidates(
    sizes: list[int], wanted: object = True, gone: object = False, counts: list[int] | None = None
) -> Candidates:
    lengths = np.array(sizes, np.int64)
    return Candidates(
        np.cumsum(lengths) - lengths,
        lengths,
        np.broadcast_to(np.array(wanted, bool), len(sizes)),
        np.broadcast_to(np.array(gone, bool), len(sizes)),
        None if counts is None else np.array(counts, np.int64),
    )


def taken(units: Candidates, max_messages: int, limits: PullLimits = BROKER, *, on_disk: bool = False) -> int:
    log_end = 40 * GIB if on_disk else int(units.sizes.sum())
    found = scan(units, max_messages, limits, log_end=log_end, segment_bytes=GIB)
    assert found.found.tolist() == list(range(found.scanned))
    return found.scanned


@pytest.mark.parametrize(
    ("sizes", "max_messages", "on_disk", "count"),
    [
        ([100] * 100, 32, False, 32),
        ([100] * 100, 1, False, 1),
        ([100] * 100, 2, False, 2),
        ([100] * 100, 64, False, 32),
        ([10_000] * 100, 32, False, 26),
        ([100] * 100, 32, True, 8),
        ([10_000] * 100, 32, True, 6),
        ([300_000, 100, 100], 32, False, 1),
        ([262_144, 1], 32, False, 1),
        ([131_072, 131_072, 1], 32, False, 2),
        ([], 32, False, 0),
    ],
)
def test_a_batch_is_full_where_a_broker_says_so(sizes: list[int], max_messages: int, on_disk: bool, count: int) -> None:
    assert taken(candidates(sizes), max_messages, on_disk=on_disk) == count


def test_limits_are_options() -> None:
    units = candidates([100] * 100)
    assert taken(units, 64, PullLimits(max_count_in_memory=50)) == 50
    assert taken(units, 64, PullLimits(max_bytes_in_memory=1_000)) == 10
    assert taken(units, 64, PullLimits(max_count_on_disk=9), on_disk=True) == 9
    assert taken(units, 64, PullLimits(max_bytes_on_disk=300), on_disk=True) == 3


@pytest.mark.parametrize(("asked_bytes", "count"), [(1, 1), (100, 1), (199, 1), (200, 2), (1 << 40, 32)])
def test_a_request_may_limit_the_bytes_to_100_at_least(asked_bytes: int, count: int) -> None:
    assert taken(candidates([100] * 100), 64, PullLimits(max_message_bytes=asked_bytes)) == count


@pytest.mark.parametrize(("log_end", "is_on_disk"), [(429_496_729, False), (429_496_730, True)])
def test_more_than_the_ratio_of_the_memory_behind_the_end_is_on_disk(log_end: int, is_on_disk: bool) -> None:
    limits = PullLimits(memory_bytes=GIB, memory_ratio_percent=40)
    assert limits.is_on_disk(np.zeros(1, np.int64), log_end).tolist() == [is_on_disk]


@pytest.mark.parametrize(("max_messages", "scanned"), [(1, 800), (32, 800), (800, 800), (1_000, 1_000)])
def test_a_scan_looks_at_800_units_or_as_many_as_messages_are_asked_for(max_messages: int, scanned: int) -> None:
    assert BROKER.max_scanned_messages(max_messages, 20, are_batches=False) == scanned


@pytest.mark.parametrize(("max_messages", "scanned"), [(1, 348), (347, 348), (348, 349), (1_000, 1_001)])
def test_a_scan_of_batches_ends_with_the_unit_that_begins_at_the_limit(max_messages: int, scanned: int) -> None:
    assert BROKER.max_scanned_messages(max_messages, 46, are_batches=True) == scanned


def test_a_batch_counts_with_all_its_messages() -> None:
    assert taken(candidates([100] * 9, counts=[10] * 9), 32) == 3
    assert taken(candidates([100] * 9, counts=[40] * 9), 32) == 1
    assert taken(candidates([100] * 9, counts=[10] * 9), 1_000) == 4


def test_the_test_for_a_full_batch_comes_before_the_filter() -> None:
    units = candidates([200_000, 100_000, 10], wanted=[True, False, True])
    found = scan(units, 32, BROKER, log_end=0, segment_bytes=GIB)
    assert (found.scanned, found.found.tolist()) == (1, [0])


def test_a_full_batch_ends_before_the_next_unit_and_not_before_the_next_wanted_one() -> None:
    units = candidates([100] * 10, wanted=[True, False] * 5)
    found = scan(units, 2, BROKER, log_end=0, segment_bytes=GIB)
    assert (found.scanned, found.found.tolist()) == (3, [0, 2])


@pytest.mark.parametrize(
    ("wanted", "gone", "scanned", "found", "was_removed"),
    [
        # Segments of 4 units each.
        ([1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0], 8, [4, 5, 6, 7], False),
        ([1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], 8, [], False),
        ([0, 0, 1, 0, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1], 8, [], True),
        ([0, 0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], 8, [], False),
        ([0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], 8, [], False),
        ([0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1], 8, [], True),
        ([1, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1], 8, [0], True),
    ],
)
def test_units_whose_segment_is_gone_are_counted_and_not_looked_at(
    wanted: list[int], gone: list[int], scanned: int, found: list[int], was_removed: bool
) -> None:
    seen = scan(candidates([100] * 8, wanted, gone), 32, BROKER, log_end=800, segment_bytes=400)
    assert (seen.scanned, seen.found.tolist(), seen.was_removed) == (scanned, found, was_removed)


def test_a_full_batch_goes_on_over_units_that_are_passed() -> None:
    units = candidates([100] * 8, gone=[0] * 2 + [1] * 4 + [0] * 2)
    seen = scan(units, 2, BROKER, log_end=800, segment_bytes=200)
    assert seen.scanned == 2, "full before the first unit that is gone"
    units = candidates([100] * 8, gone=[0, 1, 1, 1, 1, 1, 0, 0])
    seen = scan(units, 2, BROKER, log_end=800, segment_bytes=600)
    assert (seen.scanned, seen.found.tolist()) == (7, [0, 6])


def test_a_unit_that_is_passed_does_not_fill_the_batch() -> None:
    units = candidates([100, 10, 1_000, 10], gone=[False, True, True, False])
    seen = scan(units, 32, PullLimits(max_bytes_in_memory=500), log_end=1_120, segment_bytes=1_110)
    assert (seen.scanned, seen.found.tolist()) == (4, [0, 3])


def scan_one_by_one(
    units: Candidates, max_messages: int, limits: PullLimits, *, log_end: int, segment_bytes: int
) -> Scan:
    """The loop of DefaultMessageStore#getMessage (4.9.8), with the counting of batches of 5.3."""
    found: list[int] = []
    total_bytes = total_count = 0
    next_segment: int | None = None
    was_removed = False
    scanned = 0
    counts = np.ones(len(units), np.int64) if units.message_counts is None else units.message_counts
    rows = zip(units.physical_offsets, units.sizes, units.are_wanted, units.are_gone, counts, strict=True)
    for row, (place, size, is_wanted, is_gone, count) in enumerate(rows):
        if next_segment is None or place >= next_segment:
            on_disk = log_end - place > int(limits.memory_bytes * limits.memory_ratio_percent / 100)
            max_bytes = limits.max_bytes_on_disk if on_disk else limits.max_bytes_in_memory
            max_count = limits.max_count_on_disk if on_disk else limits.max_count_in_memory
            if total_count and (
                total_count + count > max_messages or total_bytes + size > max_bytes or total_count > max_count - 1
            ):
                break
            if not is_wanted:
                was_removed = was_removed and bool(total_count)
            elif is_gone:
                was_removed = was_removed or not total_count
                next_segment = (place // segment_bytes + 1) * segment_bytes
            else:
                found.append(row)
                total_bytes, total_count, next_segment = total_bytes + size, total_count + count, None
        scanned = row + 1
    return Scan(scanned, np.array(found, np.intp), was_removed)


@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_scans_agree_with_a_loop_over_the_units(data: st.DataObject, seed: int) -> None:
    random = np.random.default_rng(seed)
    count = data.draw(st.integers(0, 60))
    segment_bytes = data.draw(st.sampled_from([50, 300, 1_000]))
    sizes = random.integers(1, 50, count)
    places = np.cumsum(sizes + random.integers(0, 30, count)) - sizes
    segments = places // segment_bytes
    units = Candidates(
        places,
        sizes,
        random.random(count) < data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        np.isin(segments, random.choice(60, data.draw(st.integers(0, 30)))),
        random.integers(1, 4, count) if data.draw(st.booleans()) else None,
    )
    limits = PullLimits(
        max_bytes_in_memory=data.draw(st.integers(1, 600)),
        max_count_in_memory=data.draw(st.integers(1, 20)),
        max_bytes_on_disk=data.draw(st.integers(1, 200)),
        max_count_on_disk=data.draw(st.integers(1, 9)),
        memory_bytes=data.draw(st.sampled_from([100, 1_000, 1 << 30])),
    )
    max_messages = data.draw(st.integers(1, 40))
    log_end = int(places[-1] + sizes[-1]) if count else 0
    seen = scan(units, max_messages, limits, log_end=log_end, segment_bytes=segment_bytes)
    expected = scan_one_by_one(units, max_messages, limits, log_end=log_end, segment_bytes=segment_bytes)
    assert (seen.scanned, seen.found.tolist()) == (expected.scanned, expected.found.tolist())
    if not len(expected.found):
        assert seen.was_removed == expected.was_removed


@pytest.mark.parametrize("limit", ["max_count_on_disk", "max_scanned_bytes", "max_message_bytes"])
def test_a_limit_is_above_0(limit: str) -> None:
    with pytest.raises(OptionError, match=f"{limit}: found 0; expected at least 1"):
        PullLimits(**{limit: 0})
