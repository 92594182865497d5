"""Entries of a batch consume queue, from a golden store and from this project's encoder."""

from pathlib import Path

import pytest

from rmq_spark.store.format.consume_queue_entry import (
    BATCH_UNIT,
    decode_batch_entries,
    encode_batch_entries,
    is_written,
)

PATH = "batchcq-cqext/batchconsumequeue/TopicIB/0/00000000000000000000"


def test_decode_batch_entries_reads_golden_entries(golden: Path) -> None:
    units = decode_batch_entries((golden / PATH).read_bytes())
    assert len(units) == 50
    written = units[is_written(units)]
    assert written["physical_offset"].tolist() == [0, 247, 545]
    assert written["record_size"].tolist() == [247, 298, 349]
    assert written["base_offset"].tolist() == [0, 2, 5]
    assert written["message_count"].tolist() == [2, 3, 4]
    assert written["compacted_offset"].tolist() == [-1, -1, -1]
    assert written["tags_code"].tolist() == [0, 0, 0]
    assert written["store_timestamp"].tolist() == [1795223890795, 1795223890822, 1795223890822]


def test_encode_batch_entries_restores_golden_entries(golden: Path) -> None:
    data = (golden / PATH).read_bytes()[: 3 * BATCH_UNIT.itemsize]
    units = decode_batch_entries(data)
    assert encode_batch_entries(*(units[name] for name in (BATCH_UNIT.names or ())[:6])) == data


@pytest.mark.parametrize("size", range(2 * 46 + 1))
def test_decode_batch_entries_ignores_an_incomplete_entry(size: int) -> None:
    data = encode_batch_entries([1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [1, 1])
    assert decode_batch_entries(data[:size])["base_offset"].tolist() == [9, 10][: size // 46]


def test_is_written_is_false_for_entries_that_recovery_drops() -> None:
    units = decode_batch_entries(
        encode_batch_entries([-1, 0, 0, 0], [9, 0, 9, 9], [0] * 4, [0] * 4, [0, 0, -1, 0], [1] * 4)
    )
    assert is_written(units).tolist() == [False, False, False, True]
    units = units.copy()
    units["message_count"] = 0
    assert not is_written(units).any()


def test_encode_batch_entries_sets_each_field() -> None:
    # All bytes differ; golden entries have no tags.
    written = encode_batch_entries(
        [0x0102030405060708], [0x090A0B0C], [0x0D0E0F1011121314], [0x15161718191A1B1C], [0x1D1E1F2021222324], [0x2526]
    )
    assert written == bytes(range(1, 0x27)) + b"\xff\xff\xff\xff" + bytes(4)
    (unit,) = decode_batch_entries(written)
    assert unit.tolist() == (
        0x0102030405060708, 0x090A0B0C, 0x0D0E0F1011121314, 0x15161718191A1B1C, 0x1D1E1F2021222324, 0x2526, -1, 0,
    )  # fmt: skip
