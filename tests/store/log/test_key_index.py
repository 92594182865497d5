"""KeyIndex: put_many writes the bytes of a broker's writer; files, names, shapes and repair."""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.index_twin import IndexKey, key_columns, read_index, write_one_by_one

from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, DiskFullError, StoreChangedError, StorePathError
from rmq_spark.store.format.index_file import (
    INDEX_UNIT,
    IndexFile,
    IndexHeader,
    IndexShape,
    IndexState,
    decode_header,
    encode_header,
)
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import TRANSACTION_MASK, TRANSACTION_ROLLBACK, Record, decode_record
from rmq_spark.store.log import key_index
from rmq_spark.store.log.commit_log_writer import DirtyFiles
from rmq_spark.store.log.key_index import IndexFiles, KeyIndex

TINY = IndexShape(5, 10)
START_MS = 1_700_000_000_000  # 2023-11-14 22:13:20 UTC
MAX_HASH = 2**31 - 1


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def index_of(root: Path, shape: IndexShape = TINY, now_ms: int = START_MS, disk: Disk | None = None) -> KeyIndex:
    return KeyIndex(str(root), disk or Disk(), shape, lambda: now_ms)


def put(index: KeyIndex, keys: Sequence[IndexKey], *, skip_known: bool = False) -> int:
    return index.put_many(*key_columns(keys), skip_known=skip_known)


def some_keys(count: int, first: int = 0) -> list[IndexKey]:
    """Keys of records of 100 bytes, one second apart, two keys per record."""
    return [
        IndexKey(number * 7919 % 1000 + 1, 100 * (number // 2 + 1), START_MS + number // 2 * 1000)
        for number in range(first, first + count)
    ]


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / "index"))


def lay(root: Path, data: Sequence[bytes]) -> None:
    (root / "index").mkdir(parents=True)
    for number, content in enumerate(data):
        (root / "index" / f"{20200101000000000 + number}").write_bytes(content)


def headers(root: Path) -> list[IndexHeader]:
    return [decode_header(data) for data in read_index(root)]


# --- the bytes ---


@st.composite
def key_lists(draw: st.DrawFn, max_size: int = 60) -> list[IndexKey]:
    hashes = st.one_of(st.integers(0, 12), st.integers(0, MAX_HASH), st.just(MAX_HASH))
    drawn = draw(st.lists(st.tuples(hashes, st.integers(0, 3), st.integers(-900, 2500)), max_size=max_size))
    place, now = draw(st.sampled_from([0, 1, 1 << 40])), draw(st.sampled_from([0, 1, START_MS]))
    keys = []
    for key_hash, distance, waited in drawn:
        place, now = place + distance, max(now + waited, 0)
        keys.append(IndexKey(key_hash, place, now))
    return keys


# 70,000 slots are more than one run holds, with gaps between runs.
shapes = st.builds(IndexShape, st.sampled_from([1, 2, 5, 70_000]), st.integers(2, 30))


@given(keys=key_lists(), shape=shapes, cuts=st.lists(st.integers(0, 60), max_size=5))
def test_put_many_in_any_portions_writes_the_bytes_of_a_broker(
    tmp_path_factory: pytest.TempPathFactory, keys: list[IndexKey], shape: IndexShape, cuts: list[int]
) -> None:
    root = tmp_path_factory.mktemp("store")
    index = index_of(root, shape)
    for begin, end in pairwise([0, *sorted(min(cut, len(keys)) for cut in cuts), len(keys)]):
        assert put(index, keys[begin:end]) == end - begin
    assert read_index(root) == write_one_by_one(keys, shape)


@given(
    keys=key_lists(max_size=25),
    slots=st.lists(st.integers(-3, 25), min_size=5, max_size=5),
    next_unit=st.integers(0, 19),
    begin_ms=st.sampled_from([-5, 0, START_MS - 10_000]),
)
def test_put_many_follows_invalid_slots_as_a_broker_does(
    tmp_path_factory: pytest.TempPathFactory, keys: list[IndexKey], slots: list[int], next_unit: int, begin_ms: int
) -> None:
    shape = IndexShape(5, 20)
    data = bytearray(shape.file_bytes)
    data[:40] = encode_header(IndexHeader(begin_ms, begin_ms, 77, 78, 3, next_unit))
    data[40:60] = np.array(slots, ">i4").tobytes()
    root = tmp_path_factory.mktemp("store")
    index = index_of(root, shape)
    put(index, some_keys(1))
    (path,) = (root / "index").iterdir()
    path.write_bytes(data)  # the shape is known already; these bytes do not show it
    index.refresh()
    put(index, keys)
    assert read_index(root) == write_one_by_one(keys, shape, [bytes(data)])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), counts=st.lists(st.integers(1, 3000), min_size=1, max_size=2))
def test_put_many_with_many_slots_writes_the_bytes_of_a_broker(
    tmp_path_factory: pytest.TempPathFactory, seed: int, counts: list[int]
) -> None:
    random = np.random.default_rng(seed)
    shape = IndexShape(300_007, 3500)
    count = sum(counts)
    hashes = np.where(random.random(count) < 0.2, random.integers(0, 50, count), random.integers(0, MAX_HASH, count))
    offsets = np.sort(random.integers(0, 1 << 40, count))
    times = START_MS + np.arange(count) // 7
    root = tmp_path_factory.mktemp("store")
    index = index_of(root, shape)
    for begin, end in pairwise(np.cumsum([0, *counts]).tolist()):
        index.put_many(hashes[begin:end].astype(np.int32), offsets[begin:end], times[begin:end])
    keys = [IndexKey(*key) for key in zip(hashes.tolist(), offsets.tolist(), times.tolist(), strict=True)]
    assert read_index(root) == write_one_by_one(keys, shape)


def test_put_many_adds_keys_in_parts_that_bound_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_PART_KEYS", 3)
    put(index_of(tmp_path), some_keys(50))
    assert read_index(tmp_path) == write_one_by_one(some_keys(50), TINY)


def test_put_many_keeps_seconds_within_their_field(tmp_path: Path) -> None:
    keys = [IndexKey(1, 1, 5000), IndexKey(1, 2, 0), IndexKey(1, 3, 1 << 60)]
    put(index_of(tmp_path), keys)
    assert read_index(tmp_path) == write_one_by_one(keys, TINY)
    assert np.frombuffer(read_index(tmp_path)[0], INDEX_UNIT, 4, 60)["seconds"].tolist() == [0, 0, 0, MAX_HASH]


def test_index_file_is_sparse_and_has_a_brokers_size(tmp_path: Path) -> None:
    put(index_of(tmp_path, IndexShape()), some_keys(2))
    (path,) = (tmp_path / "index").iterdir()
    assert path.stat().st_size == 420_000_040
    assert path.stat().st_blocks * 512 < 1 << 16


def test_put_many_writes_few_pages_for_few_keys(tmp_path: Path) -> None:
    written = []

    class Listening(SystemCalls):
        def write(self, descriptor: int, position: int, data: memoryview) -> int:
            written.append((position, len(data)))
            return super().write(descriptor, position, data)

    index = index_of(tmp_path, IndexShape(), disk=Disk(Listening()))
    put(index, [IndexKey(key_hash, 1, START_MS) for key_hash in (4_000_000, 10, 12)])
    assert written == [(20_000_060, 60), (80, 12), (16_000_040, 4), (0, 40)], "units, two runs of slots, header"


# --- real files ---


def keys_of(store: Path) -> list[IndexKey]:
    """The keys that a broker adds to the index for the records of a log."""
    keys = []
    for segment in sorted((store / "commitlog").iterdir()):
        data, at = memoryview(segment.read_bytes()), 0
        while isinstance(record := decode_record(data[at:]), Record):
            if record.physical_offset != int(segment.name) + at:
                break
            at += record.total_size
            if record.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
                continue
            properties = parse(record.properties)
            texts = [properties[UNIQ_KEY]] if UNIQ_KEY in properties else []
            texts += [text for text in properties.get(KEYS, "").split(" ") if text]
            for text in texts:
                key_hash = index_key_hash(f"{record.topic.decode()}#{text}")
                keys.append(IndexKey(key_hash, record.physical_offset, record.store_timestamp))
    return keys


@pytest.mark.parametrize(
    "store", ["basic", "propcrc", "crashed", "batchcq-cqext", "timer", "demo", "broker497", "livekill533"]
)
@pytest.mark.parametrize("portion", [1, 7, 10_000])
def test_put_many_reproduces_the_index_of_a_real_broker(golden: Path, tmp_path: Path, store: str, portion: int) -> None:
    real = read_index(golden / store)
    shape = IndexFile(real[0]).shape
    assert shape is not None
    # The broker of livekill533 died before it had indexed all records.
    count = sum(header.next_unit - 1 for header in headers(golden / store))
    keys = keys_of(golden / store)[:count]
    index = index_of(tmp_path, shape)
    for begin in range(0, count, portion):
        put(index, keys[begin : begin + portion])
    assert read_index(tmp_path) == real


def test_put_many_adds_a_record_once_that_a_broker_added_twice(golden: Path, tmp_path: Path) -> None:
    real = read_index(golden / "preblank")  # basic, opened once more: its last record was put again
    keys = keys_of(golden / "basic")
    again = [key for key in keys if key.physical_offset == keys[-1].physical_offset]
    lay(tmp_path, read_index(golden / "basic"))
    index = index_of(tmp_path)
    assert put(index, again, skip_known=True) == 0
    assert read_index(tmp_path) == read_index(golden / "basic")
    assert put(index, again) == len(again)
    assert read_index(tmp_path) == real


def test_put_many_continues_real_files_of_five_slots(golden: Path, tmp_path: Path) -> None:
    first, second = (path.read_bytes() for path in sorted((golden / "index-rollover").glob("2*")))
    lay(tmp_path, [first])
    files = IndexFiles(str(tmp_path), Disk(), IndexShape(), lambda: START_MS, DirtyFiles(Disk(), ()), {})
    files.make(files.last())  # the first one was not full
    units = np.frombuffer(second, INDEX_UNIT, decode_header(second).next_unit, TINY.unit_position(0))[1:]
    header = decode_header(second)
    times = header.begin_timestamp + units["seconds"].astype(np.int64) * 1000
    times[0], times[-1] = header.begin_timestamp, header.end_timestamp
    hashes, offsets = units["key_hash"].astype(np.int32), units["physical_offset"].astype(np.int64)
    index_of(tmp_path).put_many(hashes, offsets, times)
    assert read_index(tmp_path) == [first, second]
    assert units["seconds"][0] > 0, "counted from the end of the first file"


# --- files: names, shapes ---


def test_index_file_has_the_local_time_of_its_creation_as_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(index_of(tmp_path / "a", now_ms=START_MS + 7), some_keys(1))
    assert names(tmp_path / "a") == ["20231114221320007"]
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    put(index_of(tmp_path / "b", now_ms=START_MS + 7), some_keys(1))
    assert names(tmp_path / "b") == ["20231115061320007"]


def test_index_file_names_ascend_if_the_clock_stops_or_is_set_back(tmp_path: Path) -> None:
    put(index_of(tmp_path), some_keys(30))
    put(index_of(tmp_path, now_ms=START_MS - 86_400_000), some_keys(10, 30))
    assert names(tmp_path) == [f"{20231114221320000 + number}" for number in range(5)]
    assert read_index(tmp_path) == write_one_by_one(some_keys(40), TINY)


def test_index_file_name_without_a_higher_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "index" / ("9" * 17)).mkdir(parents=True)
    with pytest.raises(StorePathError, match=r"9{17} has the highest possible name.* Move that file away"):
        put(index_of(tmp_path), some_keys(1))


def test_key_index_ignores_other_files(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "notes.txt").write_bytes(b"mine")
    (tmp_path / "index" / "20990101000000000").mkdir()
    index = index_of(tmp_path)
    put(index, some_keys(20))
    assert index.repair(IndexState())
    assert names(tmp_path) == ["20990101000000000", "notes.txt"]


@pytest.mark.parametrize("shape", [TINY, IndexShape(), IndexShape(10, 9)], ids=str)
def test_index_files_determine_the_shape_before_the_settings(tmp_path: Path, shape: IndexShape) -> None:
    lay(tmp_path, write_one_by_one(some_keys(5), TINY))
    put(index_of(tmp_path, shape), some_keys(20, 5))
    assert read_index(tmp_path) == write_one_by_one(some_keys(25), TINY)


def test_learn_takes_the_shape_of_an_empty_file_from_others(tmp_path: Path) -> None:
    full = write_one_by_one(some_keys(9), TINY)
    header = decode_header(full[0])
    end = (header.end_timestamp, header.end_timestamp, header.end_physical_offset, header.end_physical_offset, 0, 0)
    lay(tmp_path, [*full, encode_header(IndexHeader(*end)).ljust(TINY.file_bytes, b"\0")])
    put(index_of(tmp_path, IndexShape(10, 9)), some_keys(5, 9))
    assert read_index(tmp_path) == write_one_by_one(some_keys(14), TINY)


def test_learn_takes_no_shape_from_a_file_of_another_size(tmp_path: Path) -> None:
    lay(tmp_path, [*write_one_by_one(some_keys(9), IndexShape(7, 10)), bytes(TINY.file_bytes)])
    put(index_of(tmp_path), some_keys(5, 9))
    assert read_index(tmp_path)[1:] == write_one_by_one(some_keys(5, 9), TINY)


def test_learn_takes_the_shape_of_a_single_empty_file_from_the_settings(tmp_path: Path) -> None:
    lay(tmp_path, [bytes(TINY.file_bytes)])
    put(index_of(tmp_path, IndexShape(10, 9)), some_keys(5))
    assert read_index(tmp_path) == write_one_by_one(some_keys(5), IndexShape(10, 9))


@pytest.mark.parametrize("content", [b"", bytes(77), encode_header(IndexHeader(5, 6, 7, 8, 1, 2)).ljust(300, b"\1")])
def test_put_many_creates_a_file_after_one_of_unknown_shape(tmp_path: Path, content: bytes) -> None:
    lay(tmp_path, [content])
    index = index_of(tmp_path)
    before = index.state()
    assert before.shape is None
    put(index, some_keys(20))
    assert read_index(tmp_path)[0] == content
    assert [header.next_unit for header in headers(tmp_path)][1:] == [10, 10, 3]
    assert index.repair(before)
    assert read_index(tmp_path) == [content]


def test_refresh_finds_keys_of_other_writers(tmp_path: Path) -> None:
    index, other = index_of(tmp_path), index_of(tmp_path)
    put(index, some_keys(5))
    put(other, some_keys(10, 5))
    index.refresh()
    put(index, some_keys(10, 15))
    assert read_index(tmp_path) == write_one_by_one(some_keys(25), TINY)


def test_put_many_refuses_a_file_that_ends_among_its_slots(tmp_path: Path) -> None:
    index = index_of(tmp_path, IndexShape(5000, 10))
    put(index, some_keys(1))
    (path,) = (tmp_path / "index").iterdir()
    os.truncate(path, 1000)
    with pytest.raises(
        DamageError, match=r"20231114221320000, position 12036: key-index file that ends among its slots"
    ):
        put(index, [IndexKey(2999, 500, START_MS)])


# --- keys that are known ---


def test_put_many_skips_known_keys(tmp_path: Path) -> None:
    index, keys = index_of(tmp_path), some_keys(60)
    assert put(index, keys[:25], skip_known=True) == 25
    assert put(index, keys[:25], skip_known=True) == 0
    assert put(index, keys[10:40], skip_known=True) == 15
    assert put(index, keys, skip_known=True) == 20
    assert read_index(tmp_path) == write_one_by_one(keys, TINY)


@pytest.mark.parametrize("there", range(1, 40))
def test_put_many_adds_only_missing_keys_of_the_newest_record(tmp_path: Path, there: int) -> None:
    # The fourth record has keys for more than one file.
    keys = [IndexKey(number, 100 * min(number + 1, 4), START_MS) for number in range(40)]
    index = index_of(tmp_path)
    put(index, keys[:there])
    assert put(index, keys, skip_known=True) == 40 - there
    assert read_index(tmp_path) == write_one_by_one(keys, TINY)


def test_put_many_with_skip_known_adds_a_record_at_the_logs_begin(tmp_path: Path) -> None:
    keys = [IndexKey(3, 0, START_MS), IndexKey(4, 0, START_MS)]
    index = index_of(tmp_path)
    assert put(index, keys, skip_known=True) == 2
    assert index.indexed_end() == 0


def test_indexed_end_is_the_newest_record_with_a_key(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    assert index.indexed_end() == 0
    put(index, some_keys(5))
    assert index.indexed_end() == 300
    put(index, some_keys(20, 5))
    assert index_of(tmp_path).indexed_end() == index.indexed_end() == 1300


# --- deleting ---


def test_expire_deletes_files_of_expired_records_but_not_the_newest(tmp_path: Path) -> None:
    index, keys = index_of(tmp_path), some_keys(30)
    put(index, keys)
    ends = [header.end_physical_offset for header in headers(tmp_path)]
    files = read_index(tmp_path)
    assert ends == [500, 900, 1400, 1500]
    assert index.expire(500) == 0
    assert index.expire(501) == 1
    assert read_index(tmp_path) == files[1:]
    assert index.expire(10**9) == 2
    assert read_index(tmp_path) == files[3:]
    put(index, some_keys(6, 30))
    assert headers(tmp_path)[-1].next_unit == 10


def test_drop_unsafe_keeps_only_files_that_the_checkpoint_covers(tmp_path: Path) -> None:
    keys = some_keys(30)
    files = write_one_by_one(keys, TINY)
    ends = [decode_header(data).end_timestamp for data in files]
    for number, (time_ms, kept) in enumerate(
        [(0, 0), (ends[0] - 1, 0), (ends[0], 1), (ends[1] - 1, 1), (ends[1], 2), (ends[2], 3), (ends[3], 4)]
    ):
        root = tmp_path / str(number)
        lay(root, files)
        index = index_of(root)
        indexed = index.drop_unsafe(time_ms)
        assert read_index(root) == files[:kept]
        assert indexed == (decode_header(files[kept - 1]).end_physical_offset if kept else 0)
        put(index, keys, skip_known=True)
        assert read_index(root) == files


def test_drop_unsafe_keeps_the_first_of_files_that_end_at_one_time(tmp_path: Path) -> None:
    keys = [IndexKey(number, number, START_MS) for number in range(30)]
    lay(tmp_path, write_one_by_one(keys, TINY))
    assert index_of(tmp_path).drop_unsafe(START_MS) == 8
    assert len(names(tmp_path)) == 1


def test_drop_unsafe_deletes_a_file_without_a_header(tmp_path: Path) -> None:
    files = write_one_by_one(some_keys(15), TINY)
    lay(tmp_path, [files[0], bytes(40) + files[1][40:]])
    assert index_of(tmp_path).drop_unsafe(START_MS * 2) == decode_header(files[0]).end_physical_offset
    assert read_index(tmp_path) == files[:1]


def test_full_until_ms_is_the_end_of_the_newest_full_file(tmp_path: Path) -> None:
    index, keys = index_of(tmp_path), some_keys(40)
    told = [index.full_until_ms()]
    for key in keys[:20]:
        put(index, [key])
        told.append(index.full_until_ms())
    assert told == [0] * 9 + [keys[8].store_time] * 9 + [keys[17].store_time] * 3
    assert index_of(tmp_path).full_until_ms() == told[-1]


# --- failures ---


class FillingUp(SystemCalls):
    """A disk without room for write number `fails_at`, which it does in part, and for later writes."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.count = fails_at, 0

    def write(self, descriptor: int, position: int, data: memoryview) -> int:
        self.count += 1
        if self.count < self.fails_at:
            return super().write(descriptor, position, data)
        if self.count == self.fails_at and len(data) > 1:
            return super().write(descriptor, position, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("there", [0, 4, 9])
def test_put_many_succeeds_after_a_full_disk_has_room(tmp_path: Path, there: int) -> None:
    keys = some_keys(45)
    for fails_at in range(1, 30):
        calls = FillingUp(10**9)
        root = tmp_path / str(fails_at)
        index = index_of(root, disk=Disk(calls))
        put(index, keys[:there])
        before, state = read_index(root), index.state()
        calls.fails_at = calls.count + fails_at
        try:
            put(index, keys[there:30])
        except DiskFullError:
            calls.fails_at = 10**9
            if fails_at % 2:
                assert index.state() == state
                assert read_index(root) == before
            # Other keys than those that failed: none of those may remain.
            put(index, keys[there + 15 :])
            assert read_index(root) == write_one_by_one(keys[there + 15 :], TINY, before)
        else:
            assert fails_at > 4, "it has to fail sometimes"
            break


@pytest.mark.parametrize("what", ["is gone", "a file of the key index was replaced"])
def test_put_many_refuses_a_file_replaced_after_a_failed_call(tmp_path: Path, what: str) -> None:
    calls = FillingUp(10**9)
    index = index_of(tmp_path, disk=Disk(calls))
    put(index, some_keys(4))
    calls.fails_at = calls.count + 1
    with pytest.raises(DiskFullError):
        put(index, some_keys(4, 4))
    calls.fails_at = 10**9
    (path,) = (tmp_path / "index").iterdir()
    if what == "is gone":
        path.unlink()
    else:
        path.write_bytes(bytes(TINY.file_bytes))
    with pytest.raises(StoreChangedError, match=what):
        put(index, some_keys(4, 4))


def test_put_many_without_keys_creates_nothing(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    assert put(index, []) == put(index, [], skip_known=True) == 0
    assert not (tmp_path / "index").exists()
    assert index.state() == IndexState()


@pytest.mark.parametrize(
    "keys",
    [[IndexKey(-1, 1, 1)], [IndexKey(1, 2, 1), IndexKey(1, 1, 1)]],
    ids=["a hash below 0", "not in the order of the log"],
)
def test_put_many_refuses_keys_that_a_broker_would_not_add(tmp_path: Path, keys: list[IndexKey]) -> None:
    with pytest.raises(AssertionError):
        put(index_of(tmp_path), keys)
