"""Parquet files: `export_parquet`, and classes that write a file atomically or read the file of an import.

Files are opened with `store/disk`, not with Arrow. No file is written into the folder of a store, because tools that
only read a store must not change it (`require_outside_store`).
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import FileCursor, OpenFile
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk, WritableFile
from rmq_spark.store.errors import OptionError, StoreChangedError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_state import SIDE_FOLDER, commit_log_folders
from rmq_spark.store.log.topics import read_topics
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import is_system_topic

_TREES = (filenames.COMMIT_LOG, filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE)
_OTHERS = (filenames.CONFIG, filenames.CHECKPOINT, filenames.ABORT, filenames.LOCK, SIDE_FOLDER)


def require_outside_store(target: str | PurePath, root: str | PurePath, commit_log_path: str | None = None) -> None:
    """Raise OptionError if the file `target` is inside the store at `root`, or inside any other store.

    If the file or one of its parent folders is a link, the target of the link is checked, too. A folder is treated as
    another store if it has a commit log or queues, and also another file or folder of a store. A commit log outside of
    its store is recognised if it is in `commit_log_path`, or if the folder of `target` has segments. Only folders are
    read.

    Raises StorePathError if `root` is not a store.
    """
    file, store = files.absolute(target), files.absolute(root)
    known = {files.resolved(folder) for folder in (store, *commit_log_folders(store, commit_log_path))}
    # If `target` is a link, a rename replaces the link, and a write changes the file that it points to. So check both.
    for path in {files.join(files.resolved(files.parent(file)), file.rpartition("/")[2]), files.resolved(file)}:
        found, child = None, path
        while found is None and (folder := files.parent(child)) != child:
            found = folder if folder in known or _is_store(folder) else None
            child = folder
        if found is None and _has_segments(files.parent(path)):
            found = files.parent(path)
        if found is not None:
            raise OptionError(
                f"cannot write {file}: it is inside the store at {found}; expected a file in another folder. A broker "
                "refuses to start on files that it does not know. Nothing was written."
            )


def _is_store(folder: str) -> bool:
    """Return whether a folder is a store.

    A commit log alone, or queues alone, do not make a folder a store: it may be a folder for exports.
    """
    trees = sum(files.is_folder(files.join(folder, name)) for name in _TREES)
    return trees > 1 or (trees == 1 and any(files.exists(files.join(folder, name)) for name in _OTHERS))


def _has_segments(folder: str) -> bool:
    with contextlib.suppress(StorePathError):  # a folder that cannot be listed is allowed, because it may be writable
        return any(filenames.parse_segment_name(name) is not None for name, _ in files.list_folder(folder))
    return False


_HASHED_BYTES = 8 << 20
_TEMPORARY_SUFFIX = ".rmq-export"  # must not be used for other files, because files with it are deleted
_TRIES = 4  # to create a file that other exports create and delete at the same time


class ParquetTarget:
    """A parquet file that is written atomically: `finish` creates or replaces `path`, with a complete file.

    Use it in a `with` statement. The data is written to a temporary file beside `path`. `finish` syncs that file and
    renames it. If the `with` block ends before `finish`, the temporary file is deleted. If the process is killed, the
    next export to `path` deletes the temporary file.

    If the file system supports locks, the temporary file is locked, and another writer of `path` gets an OptionError.
    Without the lock, that writer could rename an incomplete file.
    """

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self._path, self._temporary, self._disk = path, path + _TEMPORARY_SUFFIX, Disk()
        self._lock = FileLock(self._temporary)
        self._create()
        try:
            self._sink = _Sink(self._disk.open(self._temporary))
            self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd")
        except BaseException:
            self._disk.remove(self._temporary)
            self._lock.release()
            raise
        self._is_finished = False

    def __enter__(self) -> "ParquetTarget":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_finished:
            self._sink.drop()
            with contextlib.suppress(pa.ArrowException, OSError):  # what Arrow still writes is discarded
                self._writer.close()
            self._disk.remove(self._temporary)
        self._lock.release()

    def write(self, table: pa.Table) -> None:
        """Write a table as one row group."""
        self._writer.write_table(table, row_group_size=max(len(table), 1))

    def finish(self) -> int:
        """Complete and sync the file, and rename it to `path`. Returns its length in bytes."""
        self._writer.close()
        size = self._sink.finish()
        self._disk.put_in_place(self._temporary, self._path)
        self._is_finished = True
        return size

    def _create(self) -> None:
        """Create an empty temporary file and lock it. Raises OptionError if another export holds the lock."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                self._disk.create(self._temporary, 0, is_own=True)
            try:
                if not self._lock.try_take():
                    break
            except StoreChangedError:
                continue  # the export that owned the file has just deleted it
            except StorePathError:
                pass  # the file system has no locks
            if files.file_size(self._temporary) == 0:
                return
            self._disk.remove(self._temporary)
            self._lock.release()
        raise OptionError(f"{self._path} is being written by another export. Give another file. Nothing was written.")


class _Sink:
    """The file object to which Arrow writes. It writes to a file of `store/disk`."""

    def __init__(self, file: WritableFile) -> None:
        self.closed = False  # read by Arrow
        self._file, self._written, self._is_dropped = file, 0, False

    def drop(self) -> None:
        """Close the file. What Arrow writes later is discarded."""
        self._is_dropped = True
        self._file.close()

    def finish(self) -> int:
        """Sync and close the file. Returns its length in bytes."""
        self._file.sync()
        self._file.close()
        return self._written

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data)
        if not self._is_dropped:
            self._file.write(self._written, view)
        self._written += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._written

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self._file.close()


class ParquetSource:
    """A parquet file that is open for reading. Use it in a `with` statement.

    Raises OptionError if the file does not exist or is not a parquet file.
    """

    def __init__(self, path: str) -> None:
        if files.is_folder(path) or files.file_size(path) < 0:
            what = "is a folder" if files.is_folder(path) else "does not exist"
            raise OptionError(f"{path} {what}. Give a parquet file, such as export_parquet writes.")
        self.path = path
        self._file = OpenFile(path)
        try:
            self.parquet = pq.ParquetFile(pa.PythonFile(FileCursor(self._file), mode="r"))
        except (pa.ArrowException, OSError, ValueError) as error:
            self._file.close()
            raise OptionError(f"{path} is not a parquet file: {str(error).rstrip('.')}. Nothing was sent.") from None

    def __enter__(self) -> "ParquetSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.parquet.close()
        self._file.close()

    def digest(self) -> str:
        """Return a digest of the file's content, as 32 hex digits."""
        hashed, at = hashlib.sha256(), 0
        while data := self._file.read(at, _HASHED_BYTES):
            hashed.update(data)
            at += len(data)
        return hashed.hexdigest()[:32]


METADATA = b"rmq"  # key in the file's metadata; its value is JSON with the number of queues of each topic
_GROUP_BYTES = 64 << 20  # size in memory at which a row group is written
Range = QueueBounds | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: the path of the file, the number of messages in it, its length, and their topics."""

    path: str
    messages: int
    bytes: int
    topics: tuple[str, ...]


def export_parquet(
    path: str | PurePath,
    target: str | PurePath,
    *,
    topics: Sequence[str] | None = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    bounds: Mapping[QueueKey | tuple[str, int], Range] | None = None,
    columns: Sequence[str] | None = None,
    commit_log_path: str | None = None,
    row_group_rows: int = 65_536,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write messages of the store at `path` into one parquet file (zstd), queue by queue.

    Choose the messages in one of two ways:

    - by topic and time: the messages of `topics` with a store time in [begin_ms, end_ms), in ms since the epoch. If
      `topics` is None, these are all topics except RocketMQ's own. A time that is None sets no limit.
    - by queue offset: `bounds` maps (topic, queue id) to a range of queue offsets, (begin, end).

    Delayed messages that are not due yet, and half messages of transactions, are not included, because RocketMQ keeps
    them in its own topics.

    `columns` are names of the source's columns; None means all. Keep all of them if you want to import the file again.
    A row group is written when it has `row_group_rows` rows or 64 MiB. The file is written atomically. An existing file
    is replaced only if `overwrite` is True. `progress(done, total)` is called with the number of messages that were
    written, and the number of messages to write.

    Raises OptionError if an argument is invalid, if `target` is inside a store, or if it exists and `overwrite` is
    False. Raises NotFoundError if a topic does not exist, and DamageError or StoreChangedError if a message cannot be
    read. After any of these errors, `target` is unchanged.
    """
    root, file = files.absolute(path), files.absolute(target)
    names = list(COLUMNS) if columns is None else list(columns)
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not names or isinstance(columns, str):
        raise OptionError(f"no such column: {', '.join(unknown) or columns!r}. Columns are: {', '.join(COLUMNS)}.")
    check_setting("row_group_rows", row_group_rows, 1)
    if bounds is not None and (topics is not None or begin_ms is not None or end_ms is not None):
        raise OptionError("bounds cannot be combined with topics, begin_ms or end_ms.")
    require_outside_store(file, root, commit_log_path)
    if files.is_folder(file) or (files.file_size(file) >= 0 and not overwrite):
        raise OptionError(f"{file} exists. Give another file, or overwrite=True. Nothing was written.")
    if not files.is_folder(files.parent(file)):
        raise OptionError(f"the folder {files.parent(file)} does not exist. Create it, or give another file.")
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        reader.refresh()
        ranges = _given(bounds) if bounds is not None else dict(_ranges(reader, topics, begin_ms, end_ms))
        chosen = tuple(sorted({key.topic for key in ranges}))
        schema = pa.schema([(name, COLUMNS[name]) for name in names], _metadata(root, reader, chosen))
        total, done = sum(one.max_offset - one.min_offset for one in ranges.values()), 0
        with ParquetTarget(file, schema) as written:
            for table in _groups(reader, ranges, names, schema, row_group_rows):
                written.write(table)
                done += len(table)
                if progress is not None:
                    progress(done, total)
            size = written.finish()
    return Exported(file, done, size, chosen)


def _given(bounds: Mapping[QueueKey | tuple[str, int], Range]) -> dict[QueueKey, QueueBounds]:
    try:
        return {
            key if isinstance(key, QueueKey) else QueueKey(*key): (
                one if isinstance(one, QueueBounds) else QueueBounds(*one)
            )
            for key, one in bounds.items()
        }
    except TypeError:
        raise OptionError(
            f"bounds={bounds!r} must map queues, (topic, queue id), to queue offsets, (begin, end)."
        ) from None


def _ranges(
    reader: StoreReader, topics: Sequence[str] | None, begin_ms: int | None, end_ms: int | None
) -> Iterator[tuple[QueueKey, QueueBounds]]:
    if isinstance(topics, str):
        raise OptionError(f'topics="{topics}" is a text. Give a list of names, such as ["{topics}"].')
    names = [name for name in reader.topics() if not is_system_topic(name)] if topics is None else list(topics)
    for name in names:
        for key in reader.queues(name):
            whole = reader.bounds(key)
            begin = whole.min_offset if begin_ms is None else reader.offset_at_time(key, begin_ms)
            end = whole.max_offset if end_ms is None else reader.offset_at_time(key, end_ms)
            yield key, QueueBounds(max(begin, whole.min_offset), min(max(begin, end), whole.max_offset))


def _metadata(root: str, reader: StoreReader, topics: Sequence[str]) -> dict[bytes, bytes]:
    """Return the metadata of the file: the number of queues of each topic. An import creates topics with it."""
    configs = read_topics(root)
    queues = {name: configs[name].write_queue_count if name in configs else len(reader.queues(name)) for name in topics}
    return {METADATA: json.dumps({"v": 1, "queues": queues}).encode()}


def _groups(
    reader: StoreReader,
    ranges: Mapping[QueueKey, QueueBounds],
    names: Sequence[str],
    schema: pa.Schema,
    row_group_rows: int,
) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for key, one in ranges.items():
        for batch in reader.read(key, one.min_offset, one.max_offset, names):
            while batch.num_rows:
                part = batch.slice(0, row_group_rows - rows)
                batch = batch.slice(part.num_rows)
                waiting.append(part)
                rows, size = rows + part.num_rows, size + part.nbytes
                if rows >= row_group_rows or size >= _GROUP_BYTES:
                    yield _table(waiting, schema)
                    waiting, rows, size = [], 0, 0
    if waiting:
        yield _table(waiting, schema)


def _table(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(batches).replace_schema_metadata(schema.metadata).cast(schema)
