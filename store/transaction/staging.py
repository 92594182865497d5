"""Staging files: each contains the encoded records of one task, and is ignored until a commit names it.

    rmq/staging/<query>@<batch>/<task>.arrow

A staging file is an Arrow IPC file. Each EncodedRecords becomes one record batch (`encoded_slices.py`), or several if
it is larger than 64 MiB. The last record batch has no rows; its metadata contains the totals of the whole file: `rows`,
`bytes` and `digest`.

Before a commit begins, it verifies the length and the totals of every file (`check_staged`). When it reads a record
batch, it verifies the checksum of this batch (`read_chunks`).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import FileCursor, OpenFile
from rmq_spark.store.disk.write import Disk, WritableFile
from rmq_spark.store.errors import DamageError, StoreChangedError, StoreError
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.side_file import digest_text
from rmq_spark.store.log.store_lock import MAX_SESSION_BYTES
from rmq_spark.store.log.store_state import side_path
from rmq_spark.store.transaction.encoded_slices import (
    SCHEMA,
    VERSION,
    from_batch,
    max_queue_counts,
    merge_records,
    required_topics,
    slice_records,
    split_records,
    to_batch,
    version_of,
)
from rmq_spark.store.transaction.intents import StagedFile
from rmq_spark.store.transaction.ledger import STAGING, make_folders

# Bytes of log that are read and appended at a time. The memory of larger arrays goes back to the kernel each time, and
# getting its pages again costs 0.3 µs per message.
CHUNK_BYTES = 16 << 20
_WRITE_OUT_BYTES = 8 << 20  # each time that a staging file has grown by this, the disk starts to sync it
_DIGESTS = 1 << 64  # the digest of several parts is the sum of their digests modulo this
_NEXT_STEP = (
    "When the query writes the batch again it stages its rows again. If some of them are in the store already, restore "
    "the file instead."
)


def staged_path(root: str, name: str) -> str:
    """Return the path of the staging file `name` (its path below `rmq/staging/`) in the store at `root`."""
    return side_path(root, STAGING, name)


def total_digest(staged: Sequence[StagedFile]) -> int:
    """Return one digest over the rows of all files; the order of the rows does not matter."""
    return sum(file.digest for file in staged) % _DIGESTS


class StageWriter:
    """Writes one staging file, which is created when the first row is written. Not thread-safe.

    `key_folder` is the batch's `ledger.folder_of`. `name` must be different for every attempt of every task. At the end
    call `finish`, or `discard` if the task failed. After an error only `discard` may be called.
    """

    def __init__(self, root: str, disk: Disk, key_folder: str, name: str) -> None:
        assert "/" not in key_folder + name, (key_folder, name)
        self._root, self._disk = root, disk
        self._folder = staged_path(root, key_folder)
        self._name = f"{key_folder}/{name}.arrow"
        self._path = staged_path(root, self._name)
        self._sink: _Sink | None = None
        self._rows, self._bytes, self._digest, self._largest = 0, 0, 0, 0
        self._topics: dict[str, int] = {}

    def write(self, records: EncodedRecords) -> None:
        """Append records to the file."""
        if not len(records):
            return
        if self._sink is None:
            make_folders(self._root, self._disk)
            self._disk.make_folder(self._folder)
            self._disk.create(self._path, 0)
            self._sink = _Sink(self._disk.open(self._path))
        for part in split_records(records, MAX_SESSION_BYTES):
            self._sink.write_batch(*to_batch(part))
        self._rows += len(records)
        self._bytes += len(records.data)
        self._digest = (self._digest + records.digest) % _DIGESTS
        self._largest = max(self._largest, int(records.sizes.max()))
        self._topics = max_queue_counts((self._topics, required_topics(records)))

    def finish(self) -> StagedFile:
        """Make the file durable, and return its description for the commit.

        If no row was written, there is no file, and the description has 0 rows.
        """
        if self._sink is None:
            return StagedFile(self._name, 0, 0, 0)
        file_bytes = self._sink.finish(_totals(self._rows, self._bytes, self._digest))
        # Sync the names of file and folder too: a commit may only name files that survive a power cut.
        self._disk.sync_folder(self._folder)
        self._disk.sync_folder(side_path(self._root, STAGING))
        return StagedFile(
            self._name, self._rows, self._bytes, self._digest, self._topics.copy(), self._largest, file_bytes
        )

    def discard(self) -> None:
        """Delete the file. If the process dies before this, `sweep_staging` deletes the file later."""
        if self._sink is not None:
            self._sink.close()
            self._disk.remove(self._path)
            self._disk.remove_folder(self._folder)


class _Sink:
    """The file object that Arrow writes to. It collects Arrow's small writes and writes each record batch in one go."""

    def __init__(self, file: WritableFile) -> None:
        self.closed = False  # read by Arrow
        self._file, self._written = file, 0
        self._sync_begun = 0  # bytes that the disk has started to sync
        self._parts: list[bytes] = []
        self._pending_bytes = 0
        self._arrow = pa.ipc.new_file(self, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4"))

    def write_batch(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        self._arrow.write_batch(batch, custom_metadata=metadata)
        self._write_parts()

    def finish(self, totals: Mapping[bytes, bytes]) -> int:
        """Write the totals and the footer, sync and close the file, and return its length in bytes."""
        self._arrow.write_batch(pa.RecordBatch.from_pylist([], SCHEMA), custom_metadata=totals)
        self._arrow.close()
        self._write_parts()
        self._file.sync()
        self._file.close()
        return self._written

    def _write_parts(self) -> None:
        data = b"".join(self._parts)
        self._file.write(self._written, data)
        self._written += len(data)
        self._parts, self._pending_bytes = [], 0
        if self._written - self._sync_begun >= _WRITE_OUT_BYTES:
            self._file.begin_sync()  # the disk works while the task encodes
            self._sync_begun = self._written

    # Called by Arrow.

    def write(self, data: bytes) -> int:
        self._parts.append(data)
        self._pending_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written + self._pending_bytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self._file.close()


def check_staged(root: str, file: StagedFile) -> None:
    """Check that a staging file exists and has the expected length and totals. Does not read the rows.

    Raises StoreChangedError if the file is missing or has another length or other totals, DamageError if its footer
    cannot be read, and StoreError if another version of rmq-spark wrote it.
    """
    if not file.rows:
        return
    path = staged_path(root, file.name)
    found_bytes = files.file_size(path)
    if found_bytes != file.file_bytes:
        found = "no such file" if found_bytes < 0 else f"{found_bytes} bytes"
        raise StoreChangedError(
            f"staging file {path}: expected {file.file_bytes} bytes, found {found}. Either it was deleted or changed, "
            "or it is older than stagingRetention, or executors see another folder at this path than the driver."
        )
    expected = _totals(file.rows, file.bytes, file.digest)
    with _StagedReader(path) as reader:
        found_totals = reader.totals()
    if found_totals != expected:
        raise StoreChangedError(
            f"staging file {path} holds other rows than its task wrote: expected {_shown(expected)}, found "
            f"{_shown(found_totals)}. It was replaced."
        )


def read_chunks(
    root: str, staged: Sequence[StagedFile], first_row: int = 0, limit_bytes: int = CHUNK_BYTES
) -> Iterator[EncodedRecords]:
    """Yield the records of staging files in order, in chunks of at most `limit_bytes` bytes of log.

    Skips the first `first_row` rows, counted over all files. A record longer than `limit_bytes` is a chunk of its own.
    The caller may modify a chunk; its digest is 0. Needs about three times `limit_bytes` of memory. Raises
    StoreChangedError if a file is missing, and DamageError if its bytes differ from what was written.
    """
    parts: list[EncodedRecords] = []
    room = limit_bytes
    for records in _read_rows(root, staged, first_row):
        rest = records
        while len(rest):
            ends = np.cumsum(rest.sizes)
            fitting = int(np.searchsorted(ends, room, side="right"))
            if not fitting and not parts:
                fitting = 1  # a record longer than a chunk
            if fitting:
                parts.append(slice_records(rest, 0, fitting))
                room -= int(ends[fitting - 1])
                rest = slice_records(rest, fitting, len(rest))
            if len(rest):
                yield merge_records(parts)
                parts, room = [], limit_bytes
    if parts:
        yield merge_records(parts)


def _read_rows(root: str, staged: Sequence[StagedFile], first_row: int) -> Iterator[EncodedRecords]:
    """Yield the records of all files, one batch at a time, without the first `first_row` rows; read-only memory."""
    skipped = first_row
    for file in staged:
        if skipped >= file.rows:
            skipped -= file.rows
            continue
        found = 0
        with _StagedReader(staged_path(root, file.name)) as reader:
            for records in reader.batches():
                found += len(records)
                if skipped < len(records):
                    yield slice_records(records, skipped, len(records))
                skipped = max(skipped - len(records), 0)
        if found != file.rows:
            path = staged_path(root, file.name)
            raise DamageError("rows of a staging file", path, 0, file.rows, found, _NEXT_STEP)


class _StagedReader:
    """An open staging file, which is read one record batch at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = OpenFile(path)
        try:
            self._arrow = self._open()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "_StagedReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def totals(self) -> dict[bytes, bytes]:
        """Return the totals from the last record batch of the file, in the form of `_totals`."""
        with _damage_raised(self._path):
            _, metadata = self._arrow.get_batch_with_custom_metadata(self._arrow.num_record_batches - 1)
            return dict(metadata)

    def batches(self) -> Iterator[EncodedRecords]:
        """Yield the records of all record batches; their memory belongs to Arrow."""
        for number in range(self._arrow.num_record_batches - 1):
            with _damage_raised(self._path):
                records = from_batch(*self._arrow.get_batch_with_custom_metadata(number))
            yield records

    def _open(self) -> pa.ipc.RecordBatchFileReader:
        with _damage_raised(self._path):
            reader = pa.ipc.open_file(FileCursor(self._file))
            found = version_of(reader.schema)
            if found == VERSION and not reader.schema.equals(SCHEMA):
                raise ValueError(f"columns {reader.schema.names}")
        if found != VERSION:
            raise StoreError(
                f"staging file {self._path} has version {found!r}, and this rmq-spark supports version {VERSION}: "
                "driver and executors must run the same one. Write again once they do."
            )
        return reader


@contextlib.contextmanager
def _damage_raised(path: str) -> Iterator[None]:
    """Turn Arrow's errors about an invalid file into DamageError."""
    try:
        yield
    except (pa.ArrowException, ValueError, LookupError, TypeError, OSError) as error:
        expected = "an Arrow file of records"
        raise DamageError("a staging file", path, 0, expected, str(error), _NEXT_STEP) from error


def _totals(rows: int, size_bytes: int, digest: int) -> dict[bytes, bytes]:
    return {
        b"rows": str(rows).encode(),
        b"bytes": str(size_bytes).encode(),
        b"digest": digest_text(digest).encode(),
    }


def _shown(totals: Mapping[bytes, bytes]) -> str:
    return b", ".join(name + b" " + value for name, value in totals.items()).decode(errors="replace")
