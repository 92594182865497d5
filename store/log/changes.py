"""Which files of a store changed since it was last settled, so that settling syncs those and no others."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.system_calls import FOLIO_BYTES, REWRITE_BYTES
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format import filenames
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

_SMALL_GAP = 15  # blocks of a hole that are filled rather than having two writes


def write_again(
    disk: Disk,
    path: str,
    begin: int,
    note_progress: Callable[[], None] = lambda: None,
    *,
    end: int | None = None,
    stop: int | None = None,
) -> None:
    """Write the same bytes into a file from a position on, so that the next sync puts them on the disk.

    After a failed sync Linux treats pages as written, and no later sync writes them. Holes stay holes. Up to `end` they
    are read, too: the page cache may have bytes for which the file system found no room. From `end` on only what is no
    hole is read. Nothing is done from the folio on that begins at or behind `stop`. Both are the file's end if None.
    """
    with disk.open(path) as file, OpenFile(path) as held:
        size = file.size()
        dense = begin, size if end is None else min(end, size)
        for first in range(begin - begin % FOLIO_BYTES, size if stop is None else min(stop, size), FOLIO_BYTES):
            note_progress()
            parts = list(_parts(held, first, min(first + FOLIO_BYTES, size), dense))
            if not parts:
                continue
            file.write_again(parts)
            if any(file.read(position, len(data)) != data for position, data in parts):
                raise StoreError(
                    f"{path} cannot be written: its bytes from position {first} on were written again after a "
                    f"failed sync, and the disk has others; expected the same {sum(len(data) for _, data in parts)} "
                    "bytes. Look for the disk's state in the kernel's log (dmesg), and move the store to a sound disk."
                )


def _parts(file: OpenFile, first: int, last: int, dense: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
    """Yield what [first, last) of a file holds, by position, in whole blocks: no holes, but for bytes of `dense` there.

    What it leaves out is zero and a hole: a write that drops it from the page cache does no harm.
    """
    is_data, is_read = np.zeros((2, -(-(last - first) // REWRITE_BYTES)), np.bool_)
    for begin, end in file.extents(first, last):
        is_data[(begin - first) // REWRITE_BYTES : -(-(end - first) // REWRITE_BYTES)] = True
    begin, end = max(dense[0], first), min(dense[1], last)
    if begin < end:
        is_read[(begin - first) // REWRITE_BYTES : -(-(end - first) // REWRITE_BYTES)] = True
    for begin, end in _runs(is_data | is_read):
        data = file.read(first + begin * REWRITE_BYTES, min(end * REWRITE_BYTES, last - first) - begin * REWRITE_BYTES)
        blocks = np.frombuffer(data.ljust((end - begin) * REWRITE_BYTES, b"\0"), np.int64)
        chosen = is_data[begin:end] | blocks.reshape(end - begin, -1).any(axis=1)
        for one, other in _runs(chosen, _SMALL_GAP):
            yield first + (begin + one) * REWRITE_BYTES, data[one * REWRITE_BYTES : other * REWRITE_BYTES]


def _runs(chosen: NDArray[np.bool_], gap: int = 0) -> list[tuple[int, int]]:
    """Return where each run of true elements begins and ends; up to `gap` false ones in a row do not end it."""
    numbers = np.flatnonzero(chosen)
    if not len(numbers):
        return []
    last = np.flatnonzero(np.diff(numbers) > gap + 1)
    begins, ends = numbers[[0, *(last + 1)]], numbers[[*last, -1]] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


class Changes:
    """Files and folders that may not be on disk for good. One thread, under the store's lock.

    `known` is what a watermark named, below the first of the `roots` or absolute; None, "too many", has everything
    under the `roots` synced once, but for our side files: who writes those syncs them, some without the lock.
    `note_progress` is called before each sync: there may be thousands.
    """

    def __init__(
        self,
        disk: Disk,
        roots: Iterable[str],
        known: Iterable[str] | None = (),
        note_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk, self._roots, self._note_progress = disk, tuple(roots), note_progress
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._unknown = set(self._roots) if known is None else set()  # folders below which anything may have changed
        for name in known or ():
            path = files.join(self._roots[0], name)  # an absolute one stays as it is
            if path.endswith("/"):
                self._folders.add(path[:-1])
            else:
                self._files.add(path)

    def note_file(self, path: str) -> None:
        """Note a file whose bytes changed."""
        self._files.add(path)

    def note_new_file(self, path: str) -> None:
        """Note a file that was made: its name is part of its folder."""
        self._files.add(path)
        self._folders.add(files.parent(path))

    def note_folder(self, path: str) -> None:
        """Note a folder in which a name was made or removed."""
        self._folders.add(path)

    def note_new_folder(self, path: str, root: str) -> None:
        """Note a folder that was made, maybe with others between it and `root`."""
        while len(path) > len(root):
            path = files.parent(path)
            self._folders.add(path)

    def is_empty(self) -> bool:
        """Say whether nothing is noted."""
        return not (self._files or self._folders or self._unknown)

    def names(self) -> tuple[str, ...] | None:
        """Return what a watermark keeps: files, and folders with a slash at the end; None for "too many"."""
        if self._unknown:
            return None
        inside = self._roots[0] + "/"  # such names stay right when the store is moved
        paths = [*sorted(self._files), *sorted(f"{path}/" for path in self._folders)]
        return tuple(path.removeprefix(inside) for path in paths)

    def sync(self) -> None:
        """Have all of it on disk for good. Raises what a failed sync raises; then nothing counts as synced."""
        for root in sorted(self._unknown):
            self._note_all(root)
        self._sync(self._files, self._folders)
        self._files.clear()
        self._folders.clear()
        self._unknown.clear()

    def sync_in(self, folders: Iterable[str]) -> None:
        """Have what lies right in some folders on disk for good; the rest stays noted. Raises what `sync` raises."""
        chosen = set(folders)
        for root in sorted(self._unknown & chosen):
            self._note_all(root)
        inside = {path for path in self._files if files.parent(path) in chosen}
        self._sync(inside, self._folders & chosen)
        self._files -= inside
        self._folders -= chosen
        self._unknown -= chosen

    def folders(self) -> set[str] | None:
        """Return the folders in which a file or a name changed; None for "too many"."""
        return None if self._unknown else self._folders | set(map(files.parent, self._files))

    def write_again(self, begin_of: Callable[[str], int]) -> None:
        """Write the same bytes into every noted file, from the position on that `begin_of` returns for its path."""
        for root in sorted(self._unknown):
            self._note_all(root)
        for path in sorted(self._files):
            if files.file_size(path) > 0:
                write_again(self._disk, path, begin_of(path), self._note_progress)

    def _sync(self, paths: Iterable[str], folders: Iterable[str]) -> None:
        for path in sorted(paths):
            self._note_progress()
            if files.file_size(path) >= 0:  # retention may have taken it since
                with self._disk.open(path) as file:
                    file.sync()
        for path in sorted(folders):
            self._note_progress()
            if files.is_folder(path):
                self._disk.sync_folder(path)

    def _note_all(self, folder: str) -> None:
        self._folders.add(folder)
        for name, is_folder in files.list_folder(folder):
            path = files.join(folder, name)
            if path == files.join(self._roots[0], filenames.LOCK):
                continue  # nothing in it is ever needed, and who opens it to write waits until the store is released
            if not is_folder:
                self._files.add(path)
            elif path != files.join(self._roots[0], SIDE_FOLDER):
                self._note_all(path)
