"""ConsumeQueue and BatchConsumeQueue: written entries, their end and their fields."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.consume_queue_entry import (
    BATCH_UNIT,
    QUEUE_UNIT,
    encode_batch_entries,
    encode_blank_fill,
    encode_entries,
)
from rmq_spark.store.log.consume_queue import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.model import QueueKey

KEY = QueueKey("T", 0)


def put(folder: Path, units: bytes, unit_bytes: int) -> str:
    """Write a queue with one file of twenty entries."""
    (folder / f"{0:020d}").write_bytes(units.ljust(20 * unit_bytes, b"\0"))
    return str(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("record_size", 0), ("message_count", 0), ("physical_offset", -1), ("base_offset", -1)]
)
def test_written_end_of_a_batch_queue_is_before_an_incomplete_entry(tmp_path: Path, field: str, value: int) -> None:
    """A broker that recovers ends the queue there too."""
    units = np.frombuffer(
        encode_batch_entries([0, 100, 200, 300], [100] * 4, [0] * 4, [1] * 4, [0, 2, 4, 6], [2] * 4), BATCH_UNIT
    ).copy()
    units[field][3] = value
    queue = BatchConsumeQueue(KEY, put(tmp_path, units.tobytes(), BATCH_UNIT.itemsize))
    assert queue.search_written_end() == 3
    assert [queue.written_end(known) for known in (0, 2, 3)] == [3, 3, 3]
    assert [queue.is_written(number) for number in (0, 2, 3, 4, 20, 99)] == [True, True, False, False, False, False]
    assert queue.offset_of(3, 3) == 6


def test_is_written_and_first_from_with_blank_fill(tmp_path: Path) -> None:
    units = encode_blank_fill(3) + encode_entries([0, 100], [100, 100], [0, 0])
    queue = ConsumeQueue(KEY, put(tmp_path, units, QUEUE_UNIT.itemsize))
    assert queue.search_written_end() == queue.written_end(0) == queue.end_for(5) == 5
    assert queue.first_from(0, 5) == 3
    queue.refuse_hole_before(3, 0)
    assert queue.first_from(50, 5) == 4


@pytest.mark.parametrize("kind", [ConsumeQueue, BatchConsumeQueue])
def test_entries_part_has_every_field(tmp_path: Path, kind: type[ConsumeQueue]) -> None:
    places, sizes, codes = [0, 110, 230], [110, 120, 130], [7, -8, 9]
    if kind is BatchConsumeQueue:
        data = encode_batch_entries(places, sizes, codes, [1, 2, 3], [0, 2, 5], [2, 3, 4])
    else:
        data = encode_entries(places, sizes, codes)
    units = kind(KEY, put(tmp_path, data, kind.layout.itemsize)).read(0, 3)
    for found, first in ((units, 0), (units.part(1, 3), 1)):
        assert found.physical_offsets.tolist() == places[first:]
        assert found.sizes.tolist() == sizes[first:]
        assert found.tags_codes.tolist() == codes[first:]
        assert found.queue_offsets.tolist() == ([0, 2, 5] if kind is BatchConsumeQueue else [0, 1, 2])[first:]
        counts = found.message_counts
        assert (None if counts is None else counts.tolist()) == ([2, 3, 4][first:] if counts is not None else None)
    assert (units.message_counts is None) == (kind is ConsumeQueue)


@pytest.mark.parametrize(
    ("place", "size", "is_hole"), [(0, 100, False), (399, 100, False), (400, 100, True), (0, 0, True)]
)
def test_refuse_hole_before_accepts_only_expired_entries(tmp_path: Path, place: int, size: int, is_hole: bool) -> None:
    data = encode_entries([place, 400], [size, 100], [0, 0])
    queue = ConsumeQueue(KEY, put(tmp_path, data, QUEUE_UNIT.itemsize))
    expected = pytest.raises(DamageError, match="the entry before the first readable one") if is_hole else nullcontext()
    with expected:
        queue.refuse_hole_before(1, 400)
