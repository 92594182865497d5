"""Tests of `place_records`: records go one after the other, and to the next segment if one does not fit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.format.record import BLANK_BYTES
from rmq_spark.store.log.segments import Filler, Run, place_records

SEGMENT = 1000


def placed_one_by_one(sizes: list[int], end: int) -> tuple[list[int], list[tuple[int, int]], int]:
    """Place record by record, as RocketMQ's loop does."""
    places, fillers = [], []
    for size in sizes:
        remaining = SEGMENT - end % SEGMENT
        if size + BLANK_BYTES > remaining:
            fillers.append((end, remaining))
            end += remaining
        places.append(end)
        end += size
    return places, fillers, end


@given(st.lists(st.integers(91, SEGMENT - BLANK_BYTES), max_size=40), st.integers(0, 5), st.integers(0, 992))
def test_place_records_equals_the_loop_over_single_records(sizes: list[int], segment: int, position: int) -> None:
    begin = segment * SEGMENT + position
    places, fillers, end = placed_one_by_one(sizes, begin)
    placement = place_records(np.array(sizes, np.int64), begin, SEGMENT)
    assert placement.physical_offsets.tolist() == places
    assert [(one.physical_offset, one.remaining) for one in placement.writes if isinstance(one, Filler)] == fillers
    assert placement.end == end


@given(st.lists(st.integers(91, SEGMENT - BLANK_BYTES), max_size=40), st.integers(0, 992))
def test_place_records_writes_each_byte_once_within_one_segment(sizes: list[int], begin: int) -> None:
    placement = place_records(np.array(sizes, np.int64), begin, SEGMENT)
    runs = [write for write in placement.writes if isinstance(write, Run)]
    at = 0
    for run in runs:
        assert run.begin == at
        at = run.end
        last = run.physical_offset + run.end - run.begin
        assert run.physical_offset // SEGMENT == (last - 1) // SEGMENT
        assert last % SEGMENT <= SEGMENT - BLANK_BYTES
    assert at == sum(sizes)


def test_place_records_keeps_a_record_that_leaves_space_for_a_filler() -> None:
    placement = place_records(np.array([SEGMENT - BLANK_BYTES - 100], np.int64), 100, SEGMENT)
    assert placement.writes == [Run(100, 0, SEGMENT - BLANK_BYTES - 100)]


def test_place_records_moves_a_record_that_is_one_byte_too_long() -> None:
    size = SEGMENT - BLANK_BYTES - 99
    placement = place_records(np.array([size], np.int64), 100, SEGMENT)
    assert placement.writes == [Filler(100, 900), Run(SEGMENT, 0, size)]
