"""The units of one queue: where the written ones end, by whichever way it is looked for."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.batch_unit import BATCH_UNIT, encode_batch_units
from rmq_spark.store.format.queue_unit import QUEUE_UNIT, encode_blank_fill, encode_units
from rmq_spark.store.log.queues import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.units import QueueKey

KEY = QueueKey("T", 0)


def put(folder: Path, units: bytes, unit_bytes: int) -> str:
    """Write a queue with one file, which has room for twenty units."""
    (folder / f"{0:020d}").write_bytes(units.ljust(20 * unit_bytes, b"\0"))
    return str(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("record_size", 0), ("message_count", 0), ("physical_offset", -1), ("base_offset", -1)]
)
def test_a_batch_unit_that_is_not_whole_ends_the_queue_from_wherever_it_is_looked_for(
    tmp_path: Path, field: str, value: int
) -> None:
    """A broker that recovers takes it for the end too."""
    units = np.frombuffer(
        encode_batch_units([0, 100, 200, 300], [100] * 4, [0] * 4, [1] * 4, [0, 2, 4, 6], [2] * 4), BATCH_UNIT
    ).copy()
    units[field][3] = value
    queue = BatchConsumeQueue(KEY, put(tmp_path, units.tobytes(), BATCH_UNIT.itemsize))
    assert queue.search_written_end() == 3
    assert [queue.written_end(known) for known in (0, 2, 3)] == [3, 3, 3]
    assert [queue.is_written(number) for number in (0, 2, 3, 4, 20, 99)] == [True, True, False, False, False, False]
    assert queue.offset_of(3, 3) == 6


def test_fill_counts_as_written_and_as_before_every_message(tmp_path: Path) -> None:
    units = encode_blank_fill(3) + encode_units([0, 100], [100, 100], [0, 0])
    queue = ConsumeQueue(KEY, put(tmp_path, units, QUEUE_UNIT.itemsize))
    assert queue.search_written_end() == queue.written_end(0) == queue.end_for(5) == 5
    assert queue.first_from(0, 5) == 3
    queue.refuse_hole_before(3, 0)
    assert queue.first_from(50, 5) == 4


@pytest.mark.parametrize("kind", [ConsumeQueue, BatchConsumeQueue])
def test_units_come_with_every_field_whole_or_in_part(tmp_path: Path, kind: type[ConsumeQueue]) -> None:
    places, sizes, codes = [0, 110, 230], [110, 120, 130], [7, -8, 9]
    if kind is BatchConsumeQueue:
        data = encode_batch_units(places, sizes, codes, [1, 2, 3], [0, 2, 5], [2, 3, 4])
    else:
        data = encode_units(places, sizes, codes)
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
def test_what_stands_before_the_first_readable_unit_has_expired_with_the_log(
    tmp_path: Path, place: int, size: int, is_hole: bool
) -> None:
    data = encode_units([place, 400], [size, 100], [0, 0])
    queue = ConsumeQueue(KEY, put(tmp_path, data, QUEUE_UNIT.itemsize))
    expected = pytest.raises(DamageError, match="the last unit before those") if is_hole else nullcontext()
    with expected:
        queue.refuse_hole_before(1, 400)
