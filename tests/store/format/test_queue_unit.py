"""Entries of a consume queue, from golden stores and from this project's encoder."""

from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.format import consume_queue_entry as queue_unit
from rmq_spark.store.format.consume_queue_entry import (
    QUEUE_UNIT,
    decode_entries,
    encode_blank_fill,
    encode_entries,
    entry_position,
    is_blank_fill,
)
from rmq_spark.store.format.java import string_hash


def read(golden: Path, path: str) -> bytes:
    return (golden / path).read_bytes()


def test_decode_entries_reads_golden_entries(golden: Path) -> None:
    units = decode_entries(read(golden, "basic/consumequeue/TopicA/0/00000000000000000000"))
    assert len(units) == 50
    written = units[units["record_size"] > 0]
    assert len(written) == 3
    assert written["physical_offset"][0] == 0
    assert written["record_size"][0] == 169
    assert written["tags_code"][0] == string_hash("TagA")


def test_decode_entries_of_the_schedule_topic_have_a_time_as_tags_code(golden: Path) -> None:
    unit = decode_entries(read(golden, "basic/consumequeue/SCHEDULE_TOPIC_XXXX/2/00000000000000000000"))[0]
    assert unit["tags_code"] > 1_700_000_000_000


def test_is_blank_fill_recognizes_fill_before_the_first_message(golden: Path) -> None:
    units = decode_entries(read(golden, "preblank/consumequeue/TopicR/0/00000000000000000000"))
    assert np.flatnonzero(is_blank_fill(units)).tolist() == list(range(17))
    assert (units[17:]["record_size"] > 0).all()
    assert encode_blank_fill(17) == units[:17].tobytes()


def test_is_blank_fill_needs_both_values() -> None:
    units = decode_entries(encode_entries([0, 1, 0], [100, queue_unit.BLANK_FILL_SIZE, 0], [0, 0, 0]))
    assert not is_blank_fill(units).any()


def test_decode_entries_restores_entries() -> None:
    offsets, sizes, codes = [0, 1 << 40, 7], [91, 1, 2], [0, -5, 1 << 50]
    data = encode_entries(offsets, sizes, codes)
    assert len(data) == entry_position(3)
    units = decode_entries(data)
    assert units["physical_offset"].tolist() == offsets
    assert units["record_size"].tolist() == sizes
    assert units["tags_code"].tolist() == codes


def test_encode_entries_restores_a_golden_file(golden: Path) -> None:
    data = read(golden, "basic/consumequeue/TopicR/0/00000000000000000000")
    units = decode_entries(data)
    assert encode_entries(*(units[name] for name in QUEUE_UNIT.names or ())) == data


@pytest.mark.parametrize("size", range(3 * 20 + 1))
def test_decode_entries_ignores_an_incomplete_entry(size: int) -> None:
    data = encode_entries([1, 2, 3], [4, 5, 6], [7, 8, 9])
    assert decode_entries(data[:size])["physical_offset"].tolist() == [1, 2, 3][: size // 20]
