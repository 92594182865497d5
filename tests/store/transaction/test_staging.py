"""Staging files: rows are read as a task wrote them, or an error names expected and found."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreChangedError, StoreError
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.disk_effects import Sync, SyncFolder, Write
from rmq_spark.store.transaction import staging
from rmq_spark.store.transaction.encoded_slices import merge_records, slice_records, split_records
from rmq_spark.store.transaction.intents import StagedFile
from rmq_spark.store.transaction.ledger import folder_of
from rmq_spark.store.transaction.staging import StageWriter, check_staged, read_chunks, staged_path

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

KEY = CommitKey("q", 1)
ARRAYS = ("data", "sizes", "queue_numbers", "tags_codes", "key_rows", "key_hashes")
Encode = Callable[..., EncodedRecords]


def assert_same(found: EncodedRecords, wanted: EncodedRecords) -> None:
    assert [found.queues[number] for number in found.queue_numbers] == [
        wanted.queues[number] for number in wanted.queue_numbers
    ]
    for name in ARRAYS:
        if name != "queue_numbers":
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
        assert getattr(found, name).dtype == getattr(wanted, name).dtype, name


def stage(root: Path, *batches: EncodedRecords, name: str = "a") -> StagedFile:
    writer = StageWriter(str(root), Disk(), folder_of(KEY), name)
    for batch in batches:
        writer.write(batch)
    return writer.finish()


def test_read_chunks_returns_staged_rows_in_order(tmp_path: Path, encode: Encode) -> None:
    shapes = [(5, "T", 3), (1, "U", 1), (7, "T", 4)]
    batches = [encode([f"{count}{n}" for n in range(count)], topic, queues) for count, topic, queues in shapes]
    file = stage(tmp_path, *batches)
    (chunk,) = read_chunks(str(tmp_path), [file])
    assert_same(chunk, merge_records(batches))
    assert chunk.data.flags.writeable
    assert file == StagedFile(
        "q@1/a.arrow",
        13,
        len(chunk.data),
        sum(batch.digest for batch in batches) % (1 << 64),
        {"T": 4, "U": 1},
        int(chunk.sizes.max()),
        (tmp_path / "rmq/staging/q@1/a.arrow").stat().st_size,
    )
    assert pickle.loads(pickle.dumps(file)) == file
    check_staged(str(tmp_path), file)


def test_staging_file_column_has_the_records(tmp_path: Path, encode: Encode) -> None:
    records = encode(["a", "b", "c"])
    file = stage(tmp_path, records)
    batch = pa.ipc.open_file(staged_path(str(tmp_path), file.name)).get_batch(0)
    assert batch.column("record").buffers()[2].to_pybytes()[: len(records.data)] == records.data.tobytes()


@pytest.mark.parametrize("limit", [1, 150, 400, 401, 1000, 1 << 20])
@pytest.mark.parametrize("first_row", [0, 1, 4, 5, 6, 12, 16, 17, 18])
def test_read_chunks_starts_at_any_row(tmp_path: Path, encode: Encode, limit: int, first_row: int) -> None:
    parts = [encode([f"{b}{n}" * (n + 1) for n in range(b)], queues=b) for b in (5, 1, 7, 5)]
    files = [stage(tmp_path, *parts[:2], name="a"), stage(tmp_path, name="b"), stage(tmp_path, *parts[2:], name="c")]
    chunks = list(read_chunks(str(tmp_path), files, first_row, limit))
    assert all(len(chunk.data) <= limit or len(chunk) == 1 for chunk in chunks)
    assert all(len(chunk.data) + int(after.sizes[0]) > limit for chunk, after in pairwise(chunks)), (
        "no smaller than need be"
    )
    if first_row < 18:
        assert_same(merge_records(chunks), slice_records(merge_records(parts), first_row, 18))
    else:
        assert not chunks


def test_stage_writer_splits_a_large_batch(tmp_path: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_SESSION_BYTES", 300)
    records = encode([f"{n}" for n in range(20)])
    file = stage(tmp_path, records)
    reader = pa.ipc.open_file(staged_path(str(tmp_path), file.name))
    assert reader.num_record_batches == 11
    (chunk,) = read_chunks(str(tmp_path), [file])
    assert_same(chunk, records)


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_split_records_and_merge_records_are_inverse(encode: Encode, count: int) -> None:
    records = encode([f"{n}" * (n + 1) for n in range(count)])
    parts = list(split_records(records, 250))
    assert sum(map(len, parts)) == count
    if parts:
        assert_same(merge_records(parts), records)


def test_stage_writer_without_rows_creates_no_file(tmp_path: Path, encode: Encode) -> None:
    writer = StageWriter(str(tmp_path / "store"), Disk(), folder_of(KEY), "a")
    writer.write(encode([]))
    file = writer.finish()
    assert (file.rows, file.bytes, file.digest, file.topics) == (0, 0, 0, {})
    assert not (tmp_path / "store").exists()
    check_staged(str(tmp_path / "store"), file)
    assert list(read_chunks(str(tmp_path / "store"), [file])) == []


def test_stage_writer_finish_syncs_the_file_and_its_names(tmp_path: Path, encode: Encode) -> None:
    disk = CrashDisk(tmp_path)
    writer = StageWriter(str(tmp_path), disk, folder_of(KEY), "a")
    writer.write(encode(["a"]))
    writer.write(encode(["b"]))
    writer.finish()
    path = "rmq/staging/q@1/a.arrow"
    last = disk.effects[-6:]
    assert [type(effect) for effect in last[:3]] == [Write, Write, Write], "one write for each batch, one for the rest"
    assert isinstance(last[3], Sync)
    assert last[3].path == path
    assert last[4:] == (SyncFolder("rmq/staging/q@1"), SyncFolder("rmq/staging"))


def test_stage_writer_discard_deletes_the_file(tmp_path: Path, encode: Encode) -> None:
    StageWriter(str(tmp_path), Disk(), folder_of(KEY), "a").discard()
    other = stage(tmp_path, encode(["x"]), name="b")
    writer = StageWriter(str(tmp_path), Disk(), folder_of(KEY), "a")
    writer.write(encode(["a"]))
    writer.discard()
    assert [path.name for path in (tmp_path / "rmq/staging/q@1").iterdir()] == ["b.arrow"]
    Disk().remove(staged_path(str(tmp_path), other.name))
    writer = StageWriter(str(tmp_path), Disk(), folder_of(KEY), "c")
    writer.write(encode(["a"]))
    writer.discard()
    assert not (tmp_path / "rmq/staging/q@1").exists()


def test_stage_writer_never_overwrites_the_file_of_another_attempt(tmp_path: Path, encode: Encode) -> None:
    stage(tmp_path, encode(["a"]))
    with pytest.raises(FileExistsError):
        stage(tmp_path, encode(["b"]))


def test_check_staged_names_a_missing_file(tmp_path: Path, encode: Encode) -> None:
    file = stage(tmp_path, encode(["a"]))
    path = Path(staged_path(str(tmp_path), file.name))
    path.unlink()
    with pytest.raises(StoreChangedError, match=f"a.arrow: expected {file.file_bytes} bytes, found no such file"):
        check_staged(str(tmp_path), file)
    with pytest.raises(StoreChangedError, match=r"a\.arrow"):
        list(read_chunks(str(tmp_path), [file]))


def test_check_staged_names_a_file_of_another_length(tmp_path: Path, encode: Encode) -> None:
    file = stage(tmp_path, encode(["a"]))
    path = Path(staged_path(str(tmp_path), file.name))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreChangedError, match=f"expected {file.file_bytes} bytes, found {file.file_bytes - 1} bytes"):
        check_staged(str(tmp_path), file)


def test_check_staged_names_a_file_with_other_rows(tmp_path: Path, encode: Encode) -> None:
    file = stage(tmp_path, encode(["a"]))
    for changed in (replace(file, digest=file.digest ^ 1), replace(file, rows=2), replace(file, bytes=1)):
        with pytest.raises(StoreChangedError, match=r"a\.arrow holds other rows.*expected rows .*, found rows "):
            check_staged(str(tmp_path), changed)
    with pytest.raises(DamageError, match="expected 2, found 1"):
        list(read_chunks(str(tmp_path), [replace(file, rows=2)]))


def test_read_chunks_detects_a_flipped_bit_or_is_not_affected(tmp_path: Path, encode: Encode) -> None:
    records = encode([f"{n}" for n in range(4)])
    file = stage(tmp_path, records)
    path = Path(staged_path(str(tmp_path), file.name))
    whole = path.read_bytes()
    random = np.random.default_rng(1)
    messages: list[str] = []
    for position in range(0, len(whole), 7):
        bad = bytearray(whole)
        bad[position] ^= 1 << int(random.integers(8))
        path.write_bytes(bad)
        try:
            check_staged(str(tmp_path), file)
            (chunk,) = read_chunks(str(tmp_path), [file])
        except StoreError as error:
            messages.append(str(error))
        else:
            assert_same(chunk, records)
    assert len(messages) > len(whole) // 7 // 2
    assert [message for message in messages if "a.arrow" not in message] == []


def test_read_chunks_detects_unwritten_pages(tmp_path: Path, encode: Encode) -> None:
    file = stage(tmp_path, encode([f"{n:0500d}" for n in range(100)]))
    path = Path(staged_path(str(tmp_path), file.name))
    whole = path.read_bytes()
    for begin in range(4096, len(whole) - 4096, 4096):
        path.write_bytes(whole[:begin] + bytes(4096) + whole[begin + 4096 :])
        with pytest.raises(DamageError, match=r"a\.arrow"):
            list(read_chunks(str(tmp_path), [file]))


def test_check_staged_refuses_a_newer_version(tmp_path: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = staging.SCHEMA.with_metadata({"rmq": '{"v": 2}'})
    with monkeypatch.context() as patch:
        patch.setattr("rmq_spark.store.transaction.staging.SCHEMA", newer)
        patch.setattr("rmq_spark.store.transaction.encoded_slices.SCHEMA", newer)
        file = stage(tmp_path, encode(["a"]))
    with pytest.raises(StoreError, match="has version 2, and this rmq-spark supports version 1: driver and executors"):
        check_staged(str(tmp_path), file)


def test_stage_writer_before_the_store_exists_does_not_block_its_creation(kit: "Kit") -> None:
    files = kit.stage(KEY, ["a", "b"])
    assert kit.commit(KEY, files).rows == 2
