"""A parquet file that is written whole or not at all, and one that is read: by our own files, not by Arrow's."""

import contextlib
import hashlib
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import ChangingFile, Disk
from rmq_spark.store.disk.file_cursor import FileCursor
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.errors import OptionError, StoreChangedError, StorePathError

_HASHED_BYTES = 8 << 20
_ON_ITS_WAY = ".rmq-export"  # a name that is nobody else's: what has it is taken away
_TRIES = 4  # for a file that others make and take away meanwhile


class ParquetTarget:
    """A parquet file on its way: `path` is there once `finish` has returned, whole and on disk for good.

    Until then it is `path` with a suffix of ours, locked, where locks are to be had: who else wants to write it gets an
    OptionError, and would else give its name to half of a file. Used in `with`; what is not finished is taken away.
    What a kill leaves the next export of that path takes away.
    """

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self._path, self._temporary, self._disk = path, path + _ON_ITS_WAY, Disk()
        self._lock = FileLock(self._temporary)
        self._make()
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
            with contextlib.suppress(pa.ArrowException, OSError):  # an end that goes nowhere
                self._writer.close()
            self._disk.remove(self._temporary)
        self._lock.release()

    def write(self, table: pa.Table) -> None:
        """Write a table as one row group."""
        self._writer.write_table(table, row_group_size=max(len(table), 1))

    def finish(self) -> int:
        """Give the file its name; return its length in bytes."""
        self._writer.close()
        size = self._sink.finish()
        self._disk.put_in_place(self._temporary, self._path)
        self._is_finished = True
        return size

    def _make(self) -> None:
        """Make the file on its way, empty, and nobody else's."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                self._disk.create(self._temporary, 0, is_own=True)
            try:
                if not self._lock.try_take():
                    break
            except StoreChangedError:
                continue  # its owner was done with it in this moment
            except StorePathError:
                pass  # no locks on that file system
            if files.file_size(self._temporary) == 0:
                return
            self._disk.remove(self._temporary)
            self._lock.release()
        raise OptionError(f"{self._path} is being written by another export. Give another file. Nothing was written.")


class _Sink:
    """Where Arrow writes."""

    def __init__(self, file: ChangingFile) -> None:
        self.closed = False  # Arrow asks
        self._file, self._written, self._is_dropped = file, 0, False

    def drop(self) -> None:
        """Close the file; what Arrow still writes goes nowhere."""
        self._is_dropped = True
        self._file.close()

    def finish(self) -> int:
        """Sync and close; return the file's length."""
        self._file.sync()
        self._file.close()
        return self._written

    def write(self, data: Any) -> int:
        """Write bytes behind the others."""
        view = memoryview(data)
        if not self._is_dropped:
            self._file.write(self._written, view)
        self._written += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return how much was written."""
        return self._written

    def flush(self) -> None:
        """Do nothing: every write is one of the file."""

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self._file.close()


class ParquetSource:
    """A parquet file open for reading. Used in `with`. Raises OptionError for what is none."""

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
            raise OptionError(f"{path} is no parquet file: {str(error).rstrip('.')}. Nothing was sent.") from None

    def __enter__(self) -> "ParquetSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.parquet.close()
        self._file.close()

    def digest(self) -> str:
        """Return what names the content: 32 hex digits."""
        hashed, at = hashlib.sha256(), 0
        while data := self._file.read(at, _HASHED_BYTES):
            hashed.update(data)
            at += len(data)
        return hashed.hexdigest()[:32]
