"""Staged files: the encoded records of one task, as an Arrow file that nobody believes until a commit names it.

    rmq/staging/<query>@<batch>/<task>.arrow

An Arrow IPC file. Each EncodedRecords is one record batch (`staged_batch.py`), or several where it has more than
64 MiB. The last batch has no rows and, as metadata, `rows`, `bytes` and `digest` of the whole file.

A commit looks at length and totals of every file before it begins (`check_staged`), and at the checksum of each batch
when it reads it (`read_chunks`).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from rmq_spark.store.commit.keys import STAGING, make_folders, side_path
from rmq_spark.store.commit.row_slices import add_topics, merge_records, named_topics, slice_records, split_records
from rmq_spark.store.commit.side_file import digest_text
from rmq_spark.store.commit.staged_batch import SCHEMA, VERSION, from_batch, to_batch, version_of
from rmq_spark.store.commit.staged_file import StagedFile, staged_path
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import ChangingFile, Disk
from rmq_spark.store.disk.file_cursor import FileCursor
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.errors import DamageError, StoreChangedError, StoreError
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.log.section import MAX_SECTION_BYTES

# Appended, and in memory, at a time. Larger arrays are given back to the kernel each time, and their pages faulted in
# anew: 0.3 µs a message.
CHUNK_BYTES = 16 << 20
_WRITE_OUT_BYTES = 8 << 20  # of a staged file, before the disk is told to begin with them
_NEXT_STEP = (
    "When the query writes the batch again it stages its rows anew; unless some of them are in the store already: then "
    "restore the file."
)
_DIGESTS = 1 << 64  # digests of parts add up modulo this


def total_digest(staged: Sequence[StagedFile]) -> int:
    """Return the digest of the rows of all files."""
    return sum(file.digest for file in staged) % _DIGESTS


class StageWriter:
    """Writes one staged file. Nothing is made before the first row. One thread; `finish` or `discard` it.

    `key_folder` is `CommitKey.folder`, `name` must be another one for every attempt of every task. After an error
    `discard` is all that is left to do.
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
        """Add records behind those that are there."""
        if not len(records):
            return
        sink = self._opened()
        for part in split_records(records, MAX_SECTION_BYTES):
            sink.write_batch(*to_batch(part))
        self._rows += len(records)
        self._bytes += len(records.data)
        self._digest = (self._digest + records.digest) % _DIGESTS
        self._largest = max(self._largest, int(records.sizes.max()))
        self._topics = add_topics((self._topics, named_topics(records)))

    def finish(self) -> StagedFile:
        """Return what the commit needs to know of the file, which is on disk for good from here on."""
        if self._sink is None:
            return StagedFile(self._name, 0, 0, 0)
        file_bytes = self._sink.finish(_totals(self._rows, self._bytes, self._digest))
        # The names too: a commit may only promise what a power cut leaves. The folder's own name is in the one above.
        self._disk.sync_folder(self._folder)
        self._disk.sync_folder(side_path(self._root, STAGING))
        return StagedFile(
            self._name, self._rows, self._bytes, self._digest, self._topics.copy(), self._largest, file_bytes
        )

    def discard(self) -> None:
        """Take the file away. A crash before this leaves it to `sweep_staging`."""
        if self._sink is not None:
            self._sink.close()
            self._disk.remove(self._path)
            self._disk.remove_folder(self._folder)

    def _opened(self) -> "_Sink":
        if self._sink is None:
            make_folders(self._root, self._disk)
            self._disk.make_folder(self._folder)
            self._disk.create(self._path, 0)
            self._sink = _Sink(self._disk.open(self._path))
        return self._sink


class _Sink:
    """Where Arrow writes: its many small writes are gathered, and each batch becomes one write of the file."""

    def __init__(self, file: ChangingFile) -> None:
        self.closed = False  # Arrow asks
        self._file, self._written = file, 0
        self._begun = 0  # what the disk was told to begin with
        self._parts: list[bytes] = []
        self._pending_bytes = 0
        self._arrow = pa.ipc.new_file(self, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4"))

    def write_batch(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        self._arrow.write_batch(batch, custom_metadata=metadata)
        self._pass_on()

    def finish(self, totals: Mapping[bytes, bytes]) -> int:
        """Write totals and footer, sync and close; return the file's length."""
        self._arrow.write_batch(pa.RecordBatch.from_pylist([], SCHEMA), custom_metadata=totals)
        self._arrow.close()
        self._pass_on()
        self._file.sync()
        self._file.close()
        return self._written

    def _pass_on(self) -> None:
        data = b"".join(self._parts)
        self._file.write(self._written, data)
        self._written += len(data)
        self._parts, self._pending_bytes = [], 0
        if self._written - self._begun >= _WRITE_OUT_BYTES:
            self._file.begin_sync()  # the disk works while the task goes on
            self._begun = self._written

    # What Arrow calls.

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
    """Raise StoreChangedError if a staged file is not there, of another length or with other rows than it should have.

    Its rows are not read. DamageError if its footer is unreadable, StoreError for a file of a newer version.
    """
    if not file.rows:
        return
    path = staged_path(root, file.name)
    found_bytes = files.file_size(path)
    if found_bytes != file.file_bytes:
        found = "no such file" if found_bytes < 0 else f"{found_bytes} bytes"
        raise StoreChangedError(
            f"staged file {path}: expected {file.file_bytes} bytes, found {found}. Somebody took it away or changed "
            "it, it is older than stagingRetention, or tasks see another folder at this path than the driver does."
        )
    wanted = _totals(file.rows, file.bytes, file.digest)
    with _StagedReader(path) as reader:
        found_totals = reader.totals()
    if found_totals != wanted:
        raise StoreChangedError(
            f"staged file {path} holds other rows than it was finished with: expected {_shown(wanted)}, found "
            f"{_shown(found_totals)}. Somebody replaced it."
        )


def read_chunks(
    root: str, staged: Sequence[StagedFile], first_row: int = 0, limit_bytes: int = CHUNK_BYTES
) -> Iterator[EncodedRecords]:
    """Yield the rows of staged files from number `first_row` on, in order, in chunks of at most `limit_bytes` of log.

    Each chunk has memory of its own that may be changed, and the digest 0: parts of a batch have none. Takes about
    three times `limit_bytes` of memory. Raises StoreChangedError and DamageError for a file that is gone or is not as
    it was written.
    """
    parts: list[EncodedRecords] = []
    room = limit_bytes
    for records in _read_rows(root, staged, first_row):
        rest = records
        while len(rest):
            ends = np.cumsum(rest.sizes)
            fitting = int(np.searchsorted(ends, room, side="right"))
            if not fitting and not parts:
                fitting = 1  # a record longer than any chunk goes alone
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
    """Yield the batches of all files without the first `first_row` rows; their memory is read-only."""
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
            raise DamageError("rows of a staged file", path, 0, file.rows, found, _NEXT_STEP)


class _StagedReader:
    """An open staged file. One batch at a time is in memory."""

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
        """Return what `_totals` gave when the file was finished."""
        with _Explained(self._path):
            _, metadata = self._arrow.get_batch_with_custom_metadata(self._arrow.num_record_batches - 1)
            return dict(metadata)

    def batches(self) -> Iterator[EncodedRecords]:
        """Yield all batches; their memory is Arrow's."""
        for number in range(self._arrow.num_record_batches - 1):
            with _Explained(self._path):
                records = from_batch(*self._arrow.get_batch_with_custom_metadata(number))
            yield records

    def _open(self) -> pa.ipc.RecordBatchFileReader:
        with _Explained(self._path):
            reader = pa.ipc.open_file(FileCursor(self._file))
            found = version_of(reader.schema)
            if found == VERSION and not reader.schema.equals(SCHEMA):
                raise ValueError(f"columns {reader.schema.names}")
        if found != VERSION:
            raise StoreError(
                f"staged file {self._path} has version {found!r}, and this rmq-spark knows version {VERSION}: driver "
                "and executors must run the same one. Write again once they do."
            )
        return reader


class _Explained:
    """Raises what Arrow says of bytes that are no staged file as DamageError."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pa.ArrowException | ValueError | LookupError | TypeError | OSError):
            expected = "an Arrow file of records"
            raise DamageError("a staged file", self._path, 0, expected, str(error), _NEXT_STEP) from error


def _totals(rows: int, size_bytes: int, digest: int) -> dict[bytes, bytes]:
    return {
        b"rows": str(rows).encode(),
        b"bytes": str(size_bytes).encode(),
        b"digest": digest_text(digest).encode(),
    }


def _shown(totals: Mapping[bytes, bytes]) -> str:
    return b", ".join(name + b" " + value for name, value in totals.items()).decode(errors="replace")
