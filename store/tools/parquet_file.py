"""Parquet files: classes that write a file atomically, or read the file of an import.

Files are opened with `store/disk`, not with Arrow. No file is written into the folder of a store, because tools that
only read a store must not change it (`require_outside_store`).
"""

import contextlib
import hashlib
from pathlib import PurePath
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import FileCursor, OpenFile
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk, WritableFile
from rmq_spark.store.errors import OptionError, StoreChangedError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.log.store_state import SIDE_FOLDER, commit_log_folders

_TREES = (filenames.COMMIT_LOG, filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE)
METADATA = b"rmq"  # key in a file's metadata; its value is JSON with the number of queues of each topic
_OTHERS = (filenames.CONFIG, filenames.CHECKPOINT, filenames.ABORT, filenames.LOCK, SIDE_FOLDER)


def require_outside_store(
    target: str | PurePath, root: str | PurePath | None = None, commit_log_path: str | None = None
) -> None:
    """Raise OptionError if the file `target` is inside the store at `root`, or inside any other store.

    If the file or one of its parent folders is a link, the target of the link is checked, too. A folder is treated as
    another store if it has a commit log or queues, and also another file or folder of a store. A commit log outside of
    its store is recognised if it is in `commit_log_path`, or if the folder of `target` has segments. Only folders are
    read.

    Raises StorePathError if `root` is not a store.
    """
    file, known = files.absolute(target), set[str]()
    if root is not None:
        store = files.absolute(root)
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
