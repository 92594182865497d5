"""A place in an open file that moves on as it is read: what Arrow takes for a file of Python's."""

from rmq_spark.store.disk.files import OpenFile


class FileCursor:
    """Where somebody stands in an open file, in bytes. The file stays open when this is closed. For one thread."""

    def __init__(self, file: OpenFile) -> None:
        self.closed = False
        self._file, self._at = file, 0

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes from here, fewer at the file's end; without `size`, all that are left."""
        data = self._file.read(self._at, size if size >= 0 else self._file.size() - self._at)
        self._at += len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Go to a position, counted from the begin (0), from here (1) or from the end (2); return where that is."""
        self._at = (0, self._at, self._file.size())[whence] + position
        return self._at

    def tell(self) -> int:
        """Return where this stands."""
        return self._at

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def readable(self) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Leave the file to who opened it."""
        self.closed = True
