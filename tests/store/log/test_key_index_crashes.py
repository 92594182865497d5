"""A writer of the key index that dies at any system call, or loses the machine's power there, and what is left."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.index_twin import IndexKey, key_columns, read_index, write_one_by_one

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import INDEX_UNIT, IndexFile, IndexShape, IndexState
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.commit_log_writer import DirtyFiles
from rmq_spark.store.log.key_index import KeyIndex
from rmq_spark.store.log.key_search import IndexCoverage, IndexFolder
from rmq_spark.store.log.key_search import keys_of as keys_of_record
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

START_MS = 1_700_000_000_000
# Slots and units of several sectors (512 bytes), so that a power cut has something to tear.
SHAPE = IndexShape(200, 60)


def index_of(root: Path, disk: Disk | None = None, changes: DirtyFiles | None = None) -> KeyIndex:
    ticks = count(START_MS)
    return KeyIndex(str(root), disk or Disk(), SHAPE, lambda: next(ticks), changes)


def put(index: KeyIndex, keys: Sequence[IndexKey], *, skip_known: bool = False) -> int:
    return index.put_many(*key_columns(keys), skip_known=skip_known)


def keys_of(seed: int, size: int) -> list[IndexKey]:
    """Keys of records with two keys each; few enough hashes that slots have chains, some of them long."""
    hashes = [(number * 7919 + seed) * 31 % (300 if number % 3 else 4) + 1 for number in range(size)]
    return [IndexKey(key_hash, 100 * (number // 2 + 1), START_MS + number) for number, key_hash in enumerate(hashes)]


class Life:
    """What writers did to an index on a disk that remembers, and what the index was at each moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.disk = CrashDisk(root)
        self.changes = DirtyFiles(self.disk, (str(root),))
        self.index = index_of(root, self.disk, self.changes)
        self.synced: list[tuple[int, IndexState, list[bytes]]] = []
        self.put_so_far: list[tuple[int, IndexState, list[bytes]]] = []
        self._note(self.synced)
        self._note(self.put_so_far)

    def _note(self, moments: list[tuple[int, IndexState, list[bytes]]]) -> None:
        moments.append((self.disk.effect_count, self.index.state(), read_index(self.root)))
        self.dirty = self.changes.names()  # as a watermark has it, which a section that dies does not write

    def put(self, keys: Sequence[IndexKey]) -> None:
        put(self.index, keys)
        self._note(self.put_so_far)

    def sync(self) -> None:
        self.index.sync()
        self._note(self.synced)

    def die_and_repair(self, keys: Sequence[IndexKey], after: int) -> None:
        """Die so many effects into a put, and let the next writer repair what is left, without a sync."""
        state, before = self.index.state(), read_index(self.root)
        self.disk.die_at(self.disk.effect_count + after)
        try:
            put(self.index, keys)
        except ProcessDeathError:
            self.disk.revive()
            self.changes = DirtyFiles(self.disk, (str(self.root),), self.dirty)
            self.index = index_of(self.root, self.disk, self.changes)
            assert self.index.repair(state)
            assert read_index(self.root) == before
        else:
            self.disk.revive()
            self._note(self.put_so_far)

    def expected(self, point: int, image: str) -> tuple[IndexState, list[bytes]]:
        """Return the state to repair to after this crash, and what must come out."""
        moments = self.put_so_far if image.startswith("killed") else self.synced
        return next((state, files) for at, state, files in reversed(moments) if at <= point)


def crashes(life: Life, tmp: Callable[[], Path], seed: int) -> Iterator[tuple[Path, IndexState, list[bytes]]]:
    """Yield a folder for every crash, the state to repair to and the files that must come out."""
    for point in range(life.disk.effect_count + 1):
        for image in life.disk.images(point, seed):
            root = tmp()
            image.write_to(root)
            yield root, *life.expected(point, image.name)


@pytest.fixture
def tmp(tmp_path: Path) -> Callable[[], Path]:
    numbers = count()
    return lambda: tmp_path / f"image-{next(numbers)}"


def test_after_any_crash_the_index_is_what_it_was(tmp_path: Path, tmp: Callable[[], Path]) -> None:
    keys = keys_of(1, 200)
    life = Life(tmp_path / "life")
    life.put(keys[:20])
    life.sync()
    life.put(keys[20:50])
    life.put(keys[50:75])  # full: the next file begins
    life.sync()
    life.put(keys[75:100])
    life.put(keys[100:200])  # two more files
    seen = 0
    for root, state, files in crashes(life, tmp, seed=5):
        index = index_of(root)
        assert index.repair(state)
        assert read_index(root) == files
        assert index.state() == state
        # And it goes on as if nothing had been.
        put(index, keys, skip_known=True)
        assert read_index(root) == write_one_by_one(keys, SHAPE)
        seen += 1
    assert seen > 150


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "put", "sync", "die"]), st.integers(1, 70), st.integers(0, 8)),
        min_size=2,
        max_size=6,
    ),
)
def test_after_any_history_and_crash_the_index_is_what_it_was(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: list[tuple[str, int, int]]
) -> None:
    base = tmp_path_factory.mktemp("history")
    life = Life(base / "life")
    for what, size, effect in steps:
        # Another seed each time: what is put again after a crash need not be what was put before it.
        keys = keys_of(seed := seed + 1, 2000)
        begin = next(place for place, key in enumerate(keys) if key.physical_offset > life.index.indexed_end())
        if what == "put":
            life.put(keys[begin : begin + size])
        elif what == "sync":
            life.sync()
        else:
            life.die_and_repair(keys[begin : begin + size], effect)
    numbers = count()
    for root, state, files in crashes(life, lambda: base / str(next(numbers)), seed):
        assert index_of(root).repair(state)
        assert read_index(root) == files


def test_a_repair_that_dies_anywhere_is_done_again(tmp_path: Path, tmp: Callable[[], Path]) -> None:
    keys = keys_of(2, 200)
    life = Life(tmp_path / "life")
    life.put(keys[:40])
    life.sync()
    life.put(keys[40:190])
    point = life.disk.effect_count
    images = list(life.disk.images(point, seed=9))[1:]
    state, files = life.expected(point, "power cut")
    seen = 0
    for image in images:
        root = tmp()
        image.write_to(root)
        disk = CrashDisk(root)
        assert index_of(root, disk).repair(state)
        for repair_point in range(disk.effect_count + 1):
            for again in disk.images(repair_point, seed=3, subset_count=2):
                second = tmp()
                again.write_to(second)
                assert index_of(second).repair(state)
                assert read_index(second) == files
                seen += 1
    assert seen > 50


def test_what_was_not_lost_is_not_looked_for_and_not_written(tmp_path: Path) -> None:
    keys = keys_of(3, 50)
    life = Life(tmp_path)
    life.put(keys)
    state, before = life.index.state(), life.disk.effect_count
    assert index_of(tmp_path, life.disk).repair(state)
    assert life.disk.effect_count == before


def test_slots_of_a_lost_put_get_back_the_units_that_no_chain_leads_to(tmp_path: Path) -> None:
    # A power cut kept the slots and lost the units, with the numbers of the units before them.
    keys = keys_of(4, 50)
    index = index_of(tmp_path)
    put(index, keys[:30])
    state, files = index.state(), read_index(tmp_path)
    put(index, keys[30:])
    (path,) = (tmp_path / "index").iterdir()
    lost = SHAPE.unit_position(31)
    with path.open("r+b") as file:
        file.seek(lost)
        file.write(bytes(20 * INDEX_UNIT.itemsize))
    assert index.repair(state)
    assert read_index(tmp_path) == files


def test_a_million_units_are_searched_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.store.log.key_index_slots._CHUNK_ENTRIES", 7)
    monkeypatch.setattr("rmq_spark.store.log.key_index_slots._CHUNK_SLOTS", 11)
    keys = keys_of(5, 58)
    for there in range(58):
        root = tmp_path / str(there)
        index = index_of(root)
        put(index, keys[:there])
        state, files = index.state(), read_index(root)
        put(index, keys[there:])
        assert index.repair(state)
        assert read_index(root) == files


def test_a_state_whose_file_is_gone_leaves_what_is_older_and_says_from_where_to_put_again(tmp_path: Path) -> None:
    keys = keys_of(6, 170)
    index = index_of(tmp_path)
    put(index, keys[:100])
    state = index.state()
    put(index, keys[100:])
    path = tmp_path / "index" / state.name
    path.unlink()
    index.refresh()
    assert not index.repair(state)
    assert index.indexed_end() == keys[58].physical_offset
    put(index, keys, skip_known=True)
    assert read_index(tmp_path) == write_one_by_one(keys, SHAPE)


@pytest.mark.parametrize("damage", ["shorter", "first unit", "last unit"])
def test_a_file_that_is_not_the_states_is_made_anew(tmp_path: Path, damage: str) -> None:
    keys = keys_of(7, 100)
    index = index_of(tmp_path)
    put(index, keys[:80])
    state = index.state()
    path = tmp_path / "index" / state.name
    data = bytearray(path.read_bytes())
    if damage == "shorter":
        del data[-1:]
    else:
        position = SHAPE.unit_position(1 if damage == "first unit" else state.next_unit - 1)
        data[position : position + INDEX_UNIT.itemsize] = bytes(INDEX_UNIT.itemsize)
    path.write_bytes(data)
    index.refresh()
    assert not index.repair(state)
    assert not path.exists()
    put(index, keys, skip_known=True)
    assert read_index(tmp_path) == write_one_by_one(keys, SHAPE)


def test_a_state_survives_as_json(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    for state in (index.state(), put(index, keys_of(8, 70)) and index.state()):
        assert isinstance(state, IndexState)
        assert IndexState(**json.loads(json.dumps(asdict(state)))) == state


def test_a_sync_covers_what_repair_and_retention_did(tmp_path: Path, tmp: Callable[[], Path]) -> None:
    keys = keys_of(9, 200)
    life = Life(tmp_path / "life")
    life.put(keys[:100])
    life.sync()
    state, files = life.index.state(), read_index(life.root)
    life.put(keys[100:])
    other = index_of(life.root, life.disk)  # knows nothing of what the one before it changed
    assert other.repair(state)
    other.sync()
    repaired = life.disk.effect_count
    assert other.expire(1 << 40) == 1
    other.sync()
    for point, wanted in ((repaired, files), (life.disk.effect_count, files[1:])):
        for image in life.disk.images(point, seed=1):
            root = tmp()
            image.write_to(root)
            assert read_index(root) == wanted


@pytest.mark.parametrize("effect", range(6))
def test_a_folder_that_a_dead_writer_made_is_synced_by_the_next(
    tmp_path: Path, tmp: Callable[[], Path], effect: int
) -> None:
    life = Life(tmp_path / "life")
    life.die_and_repair(keys_of(11, 5), effect)
    life.put(keys_of(12, 5))
    life.sync()
    for image in life.disk.images(life.disk.effect_count, seed=1):
        root = tmp()
        image.write_to(root)
        assert read_index(root) == read_index(life.root)


def test_every_key_is_found_after_a_crash_a_repair_and_the_rest_of_the_log(
    tmp_path: Path, tmp: Callable[[], Path]
) -> None:
    messages = [
        SampleMessage("T", number % 2, b"%03d" % number, keys=f"k{number} all", store_timestamp=START_MS + number)
        for number in range(60)
    ]
    store = tmp_path / "store"
    build_store(store, messages)
    log = CommitLog((str(store / "commitlog"),), mapped=False)
    keys, place = [], 0
    while isinstance(record := log.record_at(place), Record):
        number = len(keys) // 2
        for text in (f"k{number}", "all"):
            keys.append(IndexKey(index_key_hash(f"T#{text}"), place, record.store_timestamp))
        place += record.total_size
    assert len(keys) == 120
    life = Life(store)
    life.put(keys[:50])
    life.sync()
    life.put(keys[50:])
    for root, state, _ in list(crashes(life, tmp, seed=2))[::11]:
        index = index_of(root)
        assert index.repair(state)
        put(index, keys, skip_known=True)
        lookup = IndexFolder(str(root))
        files = lookup.refresh(None).files

        def records_of(key: str, files: Sequence[IndexCoverage] = files) -> list[Record]:
            places = [place for reach in files for place in reach.candidates(index_key_hash(f"T#{key}")) or []]
            records = [record for record in map(log.record_at, places) if isinstance(record, Record)]
            return [record for record in records if key in keys_of_record(record)]

        assert len(records_of("all")) == 60
        for number in range(60):
            (hit,) = records_of(f"k{number}")
            assert (hit.queue_id, hit.queue_offset) == (number % 2, number // 2)
        lookup.close()
    log.close()


def test_a_reader_meanwhile_finds_what_was_there_before(tmp_path: Path) -> None:
    keys = keys_of(10, 150)
    life = Life(tmp_path)
    life.put(keys[:30])
    wanted = {key.key_hash for key in keys[:30]}
    before = {key_hash: {key.physical_offset for key in keys[:30] if key.key_hash == key_hash} for key_hash in wanted}
    first = life.disk.effect_count
    life.put(keys[30:])
    for point in range(first, life.disk.effect_count + 1):
        for image in life.disk.images(point, seed=1, subset_count=0):
            if not image.name.startswith("killed"):
                continue
            files = [data for path, data in sorted(image.contents.items()) if data is not None]
            for key_hash in wanted:
                found = [place for data in files for place in IndexFile(data, shape=SHAPE).find(key_hash, 0, 2**62)]
                assert before[key_hash] <= set(found)
                assert set(found) <= {key.physical_offset for key in keys if key.key_hash == key_hash}
