"""Record lookup by physical offset: records in any order, and offsets without one."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.row_twin import walk_records

from rmq_spark.store.delivery import record_lookup as originals
from rmq_spark.store.delivery.record_lookup import read_originals
from rmq_spark.store.format.record import encode_record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Messages of many lengths in several segments, one longer than what is read of a record at first."""
    root = tmp_path_factory.mktemp("originals") / "store"
    sizes = [3, 40, 7000, 0, 200, 9000, 1, 1, 30_000, 5]
    messages = [SampleMessage("T", number % 3, b"b" * sizes[number % len(sizes)]) for number in range(40)]
    build_store(root, messages, segment_bytes=65_536, queue_file_bytes=1000)
    return root


def _found(root: Path, places: list[int], sizes: list[int] | None = None) -> list[bytes | None]:
    log = CommitLog((str(root / "commitlog"),), mapped=False)
    try:
        wanted = None if sizes is None else np.array(sizes, np.int64)
        found = read_originals(log, np.array(places, np.int64), wanted)
    finally:
        log.close()
    each = zip(found.positions.tolist(), found.ends.tolist(), found.is_whole.tolist(), strict=True)
    return [found.data[begin:end].tobytes() if whole else None for begin, end, whole in each]


@pytest.mark.parametrize("gap_bytes", [0, 16 << 10])
def test_read_originals_returns_records_in_the_requested_order(store, monkeypatch, gap_bytes):
    monkeypatch.setattr(originals, "_GAP_BYTES", gap_bytes)
    records = list(walk_records(store))
    chosen = [records[at] for at in (39, 0, 5, 5, 8, 17, 3, 38)]
    places = [record.physical_offset for record in chosen]
    assert _found(store, places) == [encode_record(record) for record in chosen]
    assert _found(store, places, [record.total_size for record in chosen]) == _found(store, places)


def test_read_originals_bounds_what_it_reads_at_once(store, monkeypatch):
    monkeypatch.setattr(originals, "_RUN_BYTES", 10_000)
    records = list(walk_records(store))
    assert _found(store, [one.physical_offset for one in records]) == [encode_record(one) for one in records]


def test_read_originals_reports_offsets_without_a_record(store):
    first, second = list(walk_records(store))[:2]
    places = [-1, first.physical_offset, 1, 88, 10**12, 2**63 - 1, second.physical_offset]
    expected = [None, encode_record(first), None, None, None, None, encode_record(second)]
    assert _found(store, places) == expected
    assert _found(store, []) == []


def test_read_originals_finds_no_record_in_the_body_of_another(tmp_path):
    inner = encode_record(SampleMessage("T", 0, b"inner").as_record(0, 17, 1))
    build_store(tmp_path / "store", [SampleMessage("T", 0, inner)], segment_bytes=65_536, queue_file_bytes=1000)
    (outer,) = walk_records(tmp_path / "store")
    assert _found(tmp_path / "store", [88, outer.physical_offset]) == [None, encode_record(outer)]


def test_read_originals_compares_lengths_with_entries(store):
    first, second = list(walk_records(store))[:2]
    places = [first.physical_offset, second.physical_offset]
    assert _found(store, places, [first.total_size + 1, second.total_size]) == [None, encode_record(second)]
    assert _found(store, places, [2**40, -5]) == [None, None]


@given(st.data())
def test_read_originals_raises_for_no_offset(store, data):
    records = list(walk_records(store))
    there = {record.physical_offset: encode_record(record) for record in records}
    end = records[-1].physical_offset + records[-1].total_size
    place = st.one_of(st.sampled_from(sorted(there)), st.integers(-10, end + 70_000), st.integers(-(2**63), 2**63 - 1))
    places = data.draw(st.lists(place, max_size=30))
    assert _found(store, places) == [there.get(place) for place in places]


def test_read_originals_wrong_length_hides_no_other_record(store):
    first = next(iter(walk_records(store)))
    size = first.total_size
    for sizes in ([size, 0], [0, size], [size + 1, size]):
        expected = [encode_record(first) if one == size else None for one in sizes]
        assert _found(store, [first.physical_offset] * 2, sizes) == expected
