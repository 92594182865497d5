"""Index file: golden files read and written, shapes learned, damaged chains."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.format.index_file import (
    INDEX_UNIT,
    ChainFault,
    IndexEntry,
    IndexFile,
    IndexFileWriter,
    IndexHeader,
    IndexShape,
    decode_header,
    encode_header,
    learn_shape,
)
from rmq_spark.store.format.java import index_key_hash

EVER = (0, 1 << 62)
STORES = ["basic", "propcrc", "crashed", "preblank", "truncated-stale", "batchcq-cqext", "timer", "index-rollover",
          "demo", "broker497", "livekill533"]  # fmt: skip


def paths(golden: Path, store: str) -> list[Path]:
    folder = golden / store
    return sorted(folder.glob("2*" if store == "index-rollover" else "index/*"))


def made(shape: IndexShape, keys: list[tuple[int, int, int]], previous: IndexHeader | None = None) -> bytes:
    buffer = np.zeros(shape.file_bytes, np.uint8)
    writer = IndexFileWriter(buffer, shape, previous)
    for key in keys:
        assert writer.put(*key)
    return buffer.tobytes()


@pytest.mark.parametrize("store", STORES)
def test_index_file_writer_restores_golden_files(golden: Path, store: str) -> None:
    before: IndexHeader | None = None
    assert paths(golden, store)
    for path in paths(golden, store):
        data = path.read_bytes()
        file = IndexFile(data)
        shape, header = file.shape, file.header
        assert shape is not None
        assert shape.file_bytes == len(data)
        begin = shape.unit_position(0)
        units = np.frombuffer(data, INDEX_UNIT, header.next_unit, begin)[1:]
        buffer = np.zeros(len(data), np.uint8)
        rolled = before is not None and before.next_unit >= shape.unit_count
        writer = IndexFileWriter(buffer, shape, before if rolled or store == "index-rollover" else None)
        for number, unit in enumerate(units, start=1):
            last = number == len(units)
            time_ms = header.begin_timestamp + 1000 * (0 if number == 1 else int(unit["seconds"]))
            put = (int(unit["key_hash"]), int(unit["physical_offset"]), header.end_timestamp if last else time_ms)
            assert writer.put(*put)
            assert int(unit["physical_offset"]) in file.find(put[0], *EVER)
        assert buffer.tobytes() == data, path
        before = header


def test_learn_shape_of_golden_files(golden: Path) -> None:
    assert IndexFile(paths(golden, "basic")[0].read_bytes()).shape == IndexShape(100, 400)
    for path in paths(golden, "index-rollover"):
        assert IndexFile(path.read_bytes()).shape == IndexShape(5, 10)


def test_find_returns_the_record_of_a_key(golden: Path) -> None:
    file = IndexFile(paths(golden, "basic")[0].read_bytes())
    assert list(file.find(index_key_hash("TopicA#k2"), *EVER)) == [0]
    assert list(file.find(index_key_hash("TopicR#rk0"), *EVER))
    assert list(file.find(index_key_hash("TopicR#nothing"), *EVER)) == []


def test_find_reads_a_few_bytes_at_a_time(golden: Path) -> None:
    data = paths(golden, "basic")[0].read_bytes()
    sizes = []

    def read(position: int, size: int) -> bytes:
        sizes.append(size)
        return data[position : position + size]

    file = IndexFile(read, len(data), IndexShape(100, 400))
    assert list(file.find(index_key_hash("TopicA#k2"), *EVER)) == [0]
    assert sum(sizes) < 200


def test_walk_uses_the_files_begin_as_the_time_of_the_first_entry(golden: Path) -> None:
    file = IndexFile(paths(golden, "index-rollover")[1].read_bytes())
    (unit,) = [unit for unit in file.walk(0x13FF4) if isinstance(unit, IndexEntry) and unit.number == 1]
    assert unit.time_ms == file.header.begin_timestamp
    assert list(file.find(unit.key_hash, unit.time_ms, unit.time_ms)) == [unit.physical_offset]


def test_find_misses_no_message_by_rounded_times() -> None:
    times = [1_000_000, 1_000_999, 1_001_000, 1_002_500, 1_009_999]
    file = IndexFile(made(IndexShape(7, 20), [(3, place, time) for place, time in enumerate(times, start=1)]))
    for begin in range(999_000, 1_011_000, 250):
        for end in range(begin, 1_011_000, 250):
            wanted = {place for place, time in enumerate(times, start=1) if begin <= time <= end}
            found = list(file.find(3, begin, end))
            assert wanted <= set(found)
            assert found == sorted(found, reverse=True)
            assert all(begin - 1000 < times[place - 1] < end + 1000 for place in found)


def test_find_separates_the_keys_of_one_slot() -> None:
    file = IndexFile(made(IndexShape(5, 20), [(1, 10, 5000), (6, 20, 5000), (1, 30, 5000), (2, 40, 5000)]))
    assert list(file.find(1, *EVER)) == [30, 10]
    assert list(file.find(6, *EVER)) == [20]
    assert list(file.find(11, *EVER)) == []
    assert [unit.number for unit in file.walk(1) if isinstance(unit, IndexEntry)] == [3, 2, 1]


def test_put_returns_false_and_changes_nothing_in_a_full_file() -> None:
    shape = IndexShape(2, 4)
    buffer = np.zeros(shape.file_bytes, np.uint8)
    writer = IndexFileWriter(buffer, shape)
    assert [writer.put(key, key, 5000) for key in range(1, 5)] == [True, True, True, False]
    assert writer.is_full
    assert writer.header == IndexHeader(5000, 5000, 1, 3, 2, 4)
    after = buffer.tobytes()
    assert not writer.put(9, 9, 9999)
    assert buffer.tobytes() == after


def test_index_file_writer_continues_an_existing_file() -> None:
    shape = IndexShape(3, 10)
    keys = [(key, key * 100, 5000 + key * 700) for key in range(1, 9)]
    buffer = np.frombuffer(bytearray(made(shape, keys[:4])), np.uint8)
    writer = IndexFileWriter(buffer, shape)
    for key in keys[4:]:
        writer.put(*key)
    assert buffer.tobytes() == made(shape, keys)


def test_put_clips_seconds_to_their_field() -> None:
    data = made(IndexShape(3, 10), [(1, 1, 5000), (1, 2, 0), (1, 3, 1 << 60)])
    units = np.frombuffer(data, INDEX_UNIT, 4, IndexShape(3, 10).unit_position(0))
    assert units["seconds"].tolist() == [0, 0, 0, (1 << 31) - 1]


@pytest.mark.parametrize("shape", [IndexShape(slots, units) for slots in range(1, 14) for units in range(4, 12)])
def test_learn_shape_is_right_or_none(shape: IndexShape) -> None:
    keys = [(key, 100 + key, 5000 + key) for key in (977, 31, 1_000_003, 977)]
    for count in range(min(len(keys), shape.unit_count - 1) + 1):
        data = made(shape, keys[:count])
        found = learn_shape(lambda at, size, data=data: data[at : at + size], len(data))  # type: ignore[misc]
        assert found == (shape if count else None)


def test_learn_shape_recognizes_the_default_by_its_size() -> None:
    assert IndexShape().file_bytes == 420_000_040
    assert learn_shape(lambda at, size: bytes(size), 420_000_040) == IndexShape()


def test_learn_shape_finds_another_shape_of_the_default_size() -> None:
    shape = IndexShape(5_000_000 + 5 * 40, 20_000_000 - 40)
    unit = np.zeros(1, INDEX_UNIT)
    unit[0] = (77, 4711, 0, 0)
    pieces = {
        0: encode_header(IndexHeader(5000, 5000, 4711, 4711, 1, 2)),
        shape.slot_position(77): b"\0\0\0\1",
        shape.unit_position(1): unit.tobytes(),
    }

    def read(position: int, size: int) -> bytes:
        data = bytearray(size)
        for at, piece in pieces.items():
            begin, end = max(at, position), min(at + len(piece), position + size)
            if begin < end:
                data[begin - position : end - position] = piece[begin - at : end - at]
        return bytes(data)

    file = IndexFile(read, shape.file_bytes)
    assert file.shape == shape
    assert list(file.find(77, *EVER)) == [4711]


def unit_bytes(key_hash: int, physical_offset: int, seconds: int = 0, previous: int = 0) -> bytes:
    return np.array([(key_hash, physical_offset, seconds, previous)], INDEX_UNIT).tobytes()


def test_learn_shape_refuses_a_shape_that_the_slots_contradict() -> None:
    shape = IndexShape(7, 20)
    data = bytearray(made(shape, [(3, 100, 5000)]))
    assert IndexFile(bytes(data)).shape == shape
    place = shape.slot_position(3)
    data[place : place + 4] = bytes(4)
    assert IndexFile(bytes(data)).shape is None
    assert list(IndexFile(bytes(data)).find(3, *EVER)) == []


def test_learn_shape_returns_none_if_two_shapes_fit() -> None:
    shapes = [IndexShape(5, 20), IndexShape(15, 18)]
    assert shapes[0].file_bytes == shapes[1].file_bytes
    data = bytearray(shapes[0].file_bytes)
    data[:40] = encode_header(IndexHeader(5000, 5000, 4711, 4711, 1, 2))
    for shape, key_hash in zip(shapes, (4, 7), strict=True):
        slot, unit = shape.slot_position(key_hash), shape.unit_position(1)
        data[slot : slot + 4] = b"\0\0\0\1"
        data[unit : unit + 20] = unit_bytes(key_hash, 4711)
    assert IndexFile(bytes(data)).shape is None
    assert [list(IndexFile(bytes(data), shape=shape).find(7, *EVER)) for shape in shapes] == [[], [4711]]


def test_learn_shape_returns_none_without_room_for_slots() -> None:
    header = encode_header(IndexHeader(5000, 5000, 4711, 4711, 1, 2))
    assert IndexFile(header + bytes(20) + unit_bytes(3, 4711) + bytes(20)).shape is None


def test_walk_ends_at_a_negative_time_difference() -> None:
    shape = IndexShape(2, 10)
    data = bytearray(made(shape, [(2, 10, 5000), (2, 20, 5000), (2, 30, 5000)]))
    place = shape.unit_position(2)
    data[place : place + 20] = unit_bytes(2, 20, -1, 1)
    *_, last = IndexFile(bytes(data), shape=shape).walk(2)
    assert last == ChainFault(place, "time difference of -1 seconds")
    assert list(IndexFile(bytes(data), shape=shape).find(2, *EVER)) == [30]


def test_index_file_cut_anywhere_is_read_without_an_error(golden: Path) -> None:
    data = paths(golden, "index-rollover")[1].read_bytes()
    hashes = [int(unit["key_hash"]) for unit in np.frombuffer(data, INDEX_UNIT, 9, 80)]
    whole = {key_hash: list(IndexFile(data).find(key_hash, *EVER)) for key_hash in hashes}
    for size in range(len(data)):
        for shape in (None, IndexShape(5, 10)):
            file = IndexFile(data[:size], shape=shape)
            for key_hash in hashes:
                found = list(file.find(key_hash, *EVER))
                assert set(found) <= set(whole[key_hash]), size


@pytest.mark.parametrize("position", range(0, 260, 4))
@pytest.mark.parametrize("value", [-1, 1 << 31, 1, 3, 9, 10, 255, (1 << 31) - 1])
def test_walk_ends_without_an_error_after_any_damage(golden: Path, position: int, value: int) -> None:
    data = bytearray(paths(golden, "index-rollover")[1].read_bytes())
    data[position : position + 4] = (value & 0xFFFFFFFF).to_bytes(4, "big")
    for shape in (None, IndexShape(5, 10)):
        file = IndexFile(bytes(data), shape=shape)
        for key_hash in range(5):
            units = list(file.walk(key_hash))
            assert len(units) <= 10
            numbers = [unit.number for unit in units if isinstance(unit, IndexEntry)]
            assert all(newer > older for newer, older in pairwise(numbers))
            list(file.find(key_hash, *EVER))


@pytest.mark.parametrize(
    ("previous", "what"), [(3, "entry number 3, expected 0 to 2"), (9, "entry number 9"), (-2, "entry number -2")]
)
def test_walk_reports_a_chain_whose_numbers_do_not_fall(previous: int, what: str) -> None:
    shape = IndexShape(2, 10)
    data = bytearray(made(shape, [(2, place, 5000) for place in (10, 20, 30)]))
    place = shape.unit_position(3)
    data[place + 16 : place + 20] = (previous & 0xFFFFFFFF).to_bytes(4, "big")
    if previous == 3:
        data[place + 16 : place + 20] = b"\0\0\0\2"
        place = shape.unit_position(2)
        data[place + 16 : place + 20] = b"\0\0\0\3"
        what = "entry number 3, expected 0 to 1"
    *_, last = IndexFile(bytes(data), shape=shape).walk(2)
    assert isinstance(last, ChainFault)
    assert what in last.what
    assert last.position == place
    assert next(IndexFile(bytes(data), shape=shape).find(2, *EVER)) == 30


def test_decode_header_restores_a_header() -> None:
    header = IndexHeader(1, 2, 3, 4, 5, 6)
    assert decode_header(encode_header(header)) == header
    assert decode_header(encode_header(header)[:39]) == IndexHeader()


def test_index_file_writer_begins_at_the_end_of_the_previous_file() -> None:
    shape = IndexShape(5, 10)
    buffer = np.zeros(shape.file_bytes, np.uint8)
    IndexFileWriter(buffer, shape, IndexHeader(11, 22, 33, 44, 5, 6))
    begun = decode_header(buffer[:40].tobytes())
    assert (begun.begin_timestamp, begun.end_timestamp) == (22, 22)
    assert (begun.begin_physical_offset, begun.end_physical_offset) == (44, 44)
