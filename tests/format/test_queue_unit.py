"""Units of a consume queue, from stores that RocketMQ wrote and of our own."""

from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.format import queue_unit
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.queue_unit import (
    QUEUE_UNIT,
    decode_units,
    encode_blank_fill,
    encode_units,
    is_blank_fill,
    unit_position,
)


def read(golden: Path, path: str) -> bytes:
    return (golden / path).read_bytes()


def test_the_first_units_of_a_queue_are_where_rocketmq_put_them(golden: Path) -> None:
    units = decode_units(read(golden, "basic/consumequeue/TopicA/0/00000000000000000000"))
    assert len(units) == 50
    written = units[units["record_size"] > 0]
    assert len(written) == 3
    assert written["physical_offset"][0] == 0
    assert written["record_size"][0] == 169
    assert written["tags_code"][0] == string_hash("TagA")


def test_a_unit_of_the_schedule_topic_has_a_time_in_place_of_a_hash(golden: Path) -> None:
    unit = decode_units(read(golden, "basic/consumequeue/SCHEDULE_TOPIC_XXXX/2/00000000000000000000"))[0]
    assert unit["tags_code"] > 1_700_000_000_000


def test_fill_before_a_queues_first_message_is_known(golden: Path) -> None:
    units = decode_units(read(golden, "preblank/consumequeue/TopicR/0/00000000000000000000"))
    assert np.flatnonzero(is_blank_fill(units)).tolist() == list(range(17))
    assert (units[17:]["record_size"] > 0).all()
    assert encode_blank_fill(17) == units[:17].tobytes()


def test_what_has_only_one_mark_of_fill_is_no_fill() -> None:
    units = decode_units(encode_units([0, 1, 0], [100, queue_unit.BLANK_FILL_SIZE, 0], [0, 0, 0]))
    assert not is_blank_fill(units).any()


def test_units_come_back_as_they_were_written() -> None:
    offsets, sizes, codes = [0, 1 << 40, 7], [91, 1, 2], [0, -5, 1 << 50]
    data = encode_units(offsets, sizes, codes)
    assert len(data) == unit_position(3)
    units = decode_units(data)
    assert units["physical_offset"].tolist() == offsets
    assert units["record_size"].tolist() == sizes
    assert units["tags_code"].tolist() == codes


def test_a_whole_golden_file_is_written_again_byte_for_byte(golden: Path) -> None:
    data = read(golden, "basic/consumequeue/TopicR/0/00000000000000000000")
    units = decode_units(data)
    assert encode_units(*(units[name] for name in QUEUE_UNIT.names or ())) == data


@pytest.mark.parametrize("size", range(3 * 20 + 1))
def test_of_a_cut_file_the_whole_units_are_read(size: int) -> None:
    data = encode_units([1, 2, 3], [4, 5, 6], [7, 8, 9])
    assert decode_units(data[:size])["physical_offset"].tolist() == [1, 2, 3][: size // 20]
