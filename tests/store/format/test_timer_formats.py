"""Timer: positions and times equal those of a loop over messages, and the timer check is decoded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.timer_twin import TimerTwin, TwinMessage

from rmq_spark.store.format.timer import (
    BLANK_MAGIC,
    SLOT_COUNT,
    TIMER_BLANK,
    TIMER_CHECK,
    WINDOW_MS,
    TimerCheck,
    decode_timer_check,
    encode_timer_blank,
    encode_timer_check,
    floor_second,
    place_entries,
    slot_numbers,
    wheel_times,
)

NOW_MS = 1_800_000_000_000


def places_one_by_one(end: int, count: int, file_bytes: int) -> tuple[list[int], list[int], int]:
    positions, blanks = [], []
    for _ in range(count):
        if file_bytes - end % file_bytes < 52 + 16:
            if end % file_bytes:
                blanks.append(end)
            end += file_bytes - end % file_bytes
        positions.append(end)
        end += 52
    return positions, blanks, end


@given(units=st.integers(0, 30), count=st.integers(0, 40), file_bytes=st.integers(68, 600))
def test_place_entries_equals_a_broker(units: int, count: int, file_bytes: int) -> None:
    _, _, end = places_one_by_one(0, units, file_bytes)
    places = place_entries(end, count, file_bytes)
    found = places.positions.tolist(), places.blanks.tolist(), places.end
    assert found == places_one_by_one(end, count, file_bytes)


def test_encode_timer_blank_contains_the_remaining_size() -> None:
    blank = np.frombuffer(encode_timer_blank(416, 436), TIMER_BLANK)[0]
    assert (int(blank["remaining_size"]), int(blank["magic"])) == (20, BLANK_MAGIC)


@given(
    out_ms=st.lists(
        st.one_of(
            st.integers(-WINDOW_MS, 3 * WINDOW_MS),
            st.integers(-2, 2).map(lambda seconds: WINDOW_MS + seconds * 1000),
            st.integers(-2, 2).map(lambda seconds: WINDOW_MS + WINDOW_MS // 3 + seconds * 1000),
        ),
        min_size=1,
    ),
    write_ms=st.integers(NOW_MS, NOW_MS + 5000),
    behind_s=st.integers(0, 5),
)
def test_wheel_times_equals_a_loop_over_messages(out_ms: list[int], write_ms: int, behind_s: int) -> None:
    second_ms = floor_second(write_ms)
    read_ms = second_ms - behind_s * 1000
    times, rolls = wheel_times(np.array(out_ms) + NOW_MS, second_ms, read_ms)
    for number, one in enumerate(out_ms):
        twin = TimerTwin(read_ms)
        twin.take(TwinMessage(number, NOW_MS + one, "k"), write_ms)
        ((second, [(_, is_rolled)]),) = twin.seconds.items()
        assert (int(times[number]), bool(rolls[number])) == (second, is_rolled)


def test_slot_numbers_repeat_after_fourteen_days() -> None:
    times = np.array([NOW_MS, NOW_MS + 999, NOW_MS + 1000, NOW_MS + 14 * 86_400_000])
    first = NOW_MS // 1000 % SLOT_COUNT
    assert slot_numbers(times).tolist() == [first, first, first + 1, first]


@pytest.mark.parametrize("size", [0, 8, 56, 4096])
def test_decode_timer_check_reads_missing_fields_as_zero(size: int) -> None:
    check = TimerCheck(1, 2, 3, 4, 5, 6, 7)
    page = encode_timer_check(check).ljust(4096, b"\0")[:size]
    found = decode_timer_check(page)
    assert found == (check if size >= TIMER_CHECK.itemsize else TimerCheck(1 if size >= 8 else 0))
