"""The commit log for a writer: writes records, creates segments, clears torn bytes. Also tracks files to sync.

`CommitLogWriter` is for the holder of the store's lock only. It creates each segment at its full size, which never
changes. `DirtyFiles` holds the files that changed since the store was last flushed and marked clean (settled), so that
the next sync can skip all others. `write_again` repairs a file after a failed sync.
Source: CommitLog#asyncPutMessages, MappedFileQueue#tryCreateMappedFile, MultiPathMappedFileQueue (5.3).
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.system_calls import FOLIO_BYTES, REWRITE_BYTES
from rmq_spark.store.disk.write import Disk, WritableFile
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.file_names import segment_name
from rmq_spark.store.format.record import BLANK_BYTES, encode_blank
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.segments import Filler, Placement, Segment
from rmq_spark.store.log.store_state import SIDE_FOLDER

_SMALL_GAP = 15  # blocks: a hole of at most this size is written too, to save a second write


def write_again(
    disk: Disk,
    path: str,
    begin: int,
    heartbeat: Callable[[], None] = lambda: None,
    *,
    end: int | None = None,
    stop: int | None = None,
) -> None:
    """Write the bytes of a file into it again, from position `begin`, so that the next sync writes them to the disk.

    This is needed after a failed sync: Linux then treats the pages as clean, so no later sync writes them. Holes stay
    holes. From `begin` to `end`, holes are read too, because the page cache may have bytes for which the file system
    found no space. After `end`, holes are skipped without reading them. The file is written in folios of FOLIO_BYTES;
    folios that begin at or after `stop` are not written. `end` and `stop` are positions in bytes, by default the end of
    the file.

    Raises StoreError if the bytes that are read back differ.
    """
    with disk.open(path) as file, OpenFile(path) as reader:
        size = file.size()
        dense = begin, size if end is None else min(end, size)
        for first in range(begin - begin % FOLIO_BYTES, size if stop is None else min(stop, size), FOLIO_BYTES):
            heartbeat()
            parts = list(_parts(reader, first, min(first + FOLIO_BYTES, size), dense))
            if not parts:
                continue
            file.write_again(parts)
            if any(file.read(position, len(data)) != data for position, data in parts):
                raise StoreError(
                    f"cannot write {path}: the bytes at position {first} were written again after a failed sync, and "
                    f"the disk has other bytes; expected the same {sum(len(data) for _, data in parts)} bytes. Check "
                    "the disk in the kernel's log (dmesg), and move the store to an intact disk."
                )


def _parts(file: OpenFile, first: int, last: int, dense: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) for the parts of the bytes [first, last) of a file to write again, in whole blocks.

    Holes outside of the range `dense`, and holes in it that contain only zeros, are skipped. They read as zeros anyway,
    so it is harmless that a write drops them from the page cache.
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
    """Return (begin, end) of each run of true elements. Up to `gap` false elements do not end a run."""
    numbers = np.flatnonzero(chosen)
    if not len(numbers):
        return []
    last = np.flatnonzero(np.diff(numbers) > gap + 1)
    begins, ends = numbers[[0, *(last + 1)]], numbers[[*last, -1]] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


class DirtyFiles:
    """Files and folders that may have changes that were not synced. For one thread that holds the store's lock.

    `known` are the names of changed files from a watermark, each absolute or relative to the first of the `roots`. None
    means that the names are unknown, or were too many for a watermark. Then the next sync syncs everything in the
    `roots` once, except our side files in `rmq/`, which the code that writes them syncs, partly without the lock.
    `heartbeat` is called before each sync of a file, because there may be thousands.
    """

    def __init__(
        self,
        disk: Disk,
        roots: Iterable[str],
        known: Iterable[str] | None = (),
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk, self._roots, self._heartbeat = disk, tuple(roots), heartbeat
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._unknown = set(self._roots) if known is None else set()  # folders in which any file may have changed
        for name in known or ():
            path = files.join(self._roots[0], name)  # an absolute name stays as it is
            if path.endswith("/"):
                self._folders.add(path[:-1])
            else:
                self._files.add(path)

    def note_file(self, path: str) -> None:
        """Add a file of which bytes changed."""
        self._files.add(path)

    def note_new_file(self, path: str) -> None:
        """Add a file that was created, and its folder, because a new name in a folder must be synced too."""
        self._files.add(path)
        self._folders.add(files.parent(path))

    def note_folder(self, path: str) -> None:
        """Add a folder in which a name was created or removed."""
        self._folders.add(path)

    def note_new_folder(self, path: str, root: str) -> None:
        """Add all parents of a created folder, up to `root`, because some of them may be new too."""
        while len(path) > len(root):
            path = files.parent(path)
            self._folders.add(path)

    def is_empty(self) -> bool:
        """Say whether nothing has changed."""
        return not (self._files or self._folders or self._unknown)

    def names(self) -> tuple[str, ...] | None:
        """Return the names for a watermark: files, then folders with a final slash. Return None if they are unknown.

        They are unknown if this object was created with `known=None` and has not been synced since.
        """
        if self._unknown:
            return None
        inside = self._roots[0] + "/"  # relative names stay correct when the store is moved
        paths = [*sorted(self._files), *sorted(f"{path}/" for path in self._folders)]
        return tuple(path.removeprefix(inside) for path in paths)

    def sync(self) -> None:
        """Sync all changed files and folders, so that they are durable. If a sync raises an error, all stay dirty."""
        for root in sorted(self._unknown):
            self._note_all(root)
        self._sync(self._files, self._folders)
        self._files.clear()
        self._folders.clear()
        self._unknown.clear()

    def sync_in(self, folders: Iterable[str]) -> None:
        """Sync only these folders and the changed files directly in them. Raises the same errors as `sync`."""
        chosen = set(folders)
        for root in sorted(self._unknown & chosen):
            self._note_all(root)
        inside = {path for path in self._files if files.parent(path) in chosen}
        self._sync(inside, self._folders & chosen)
        self._files -= inside
        self._folders -= chosen
        self._unknown -= chosen

    def folders(self) -> set[str] | None:
        """Return the folders in which a file or a name changed. Return None if they are unknown, as in `names`."""
        return None if self._unknown else self._folders | set(map(files.parent, self._files))

    def write_again(self, begin_of: Callable[[str], int]) -> None:
        """Write the bytes of every changed file into it again, as the function `write_again` does.

        `begin_of` returns for a path the position (bytes) to start from.
        """
        for root in sorted(self._unknown):
            self._note_all(root)
        for path in sorted(self._files):
            if files.file_size(path) > 0:
                write_again(self._disk, path, begin_of(path), self._heartbeat)

    def _sync(self, paths: Iterable[str], folders: Iterable[str]) -> None:
        present = [path for path in sorted(paths) if files.file_size(path) >= 0]  # retention may have deleted some
        # The disk starts to write all files before the first sync waits. So the file system gives all of them their
        # blocks, and the first commit of its journal covers them. Otherwise each sync waits for a commit of its own.
        for path in present[1:]:
            self._heartbeat()
            with self._disk.open(path) as file:
                file.begin_sync()
        for path in present:
            self._heartbeat()
            with self._disk.open(path) as file:
                file.sync()
        for path in sorted(folders):
            self._heartbeat()
            if files.is_folder(path):
                self._disk.sync_folder(path)

    def _note_all(self, folder: str) -> None:
        self._folders.add(folder)
        for name, is_folder in files.list_folder(folder):
            path = files.join(folder, name)
            if path == files.join(self._roots[0], filenames.LOCK):
                continue  # its content is never needed, and opening it for writing waits until the lock is released
            if not is_folder:
                self._files.add(path)
            elif path != files.join(self._roots[0], SIDE_FOLDER):
                self._note_all(path)


class CommitLogWriter:
    """Writes into the segments of `log`, and creates new segments with the size of the existing ones.

    In an empty log a new segment has `segment_bytes`.
    """

    def __init__(
        self, disk: Disk, log: CommitLog, folders: tuple[str, ...], changes: DirtyFiles, segment_bytes: int
    ) -> None:
        self._disk, self._log, self._changes = disk, log, changes
        self._folders = tuple(sorted(folders))
        self._new_segment_bytes = segment_bytes
        self._open: WritableFile | None = None
        self._segment: Segment | None = None  # that of the open file

    @property
    def segment_bytes(self) -> int:
        """Return the length of every segment, in bytes."""
        return self._log.segments.size or self._new_segment_bytes

    def close(self) -> None:
        """Close the open segment."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def begin_sync(self) -> None:
        """Start to write the open segment's pages to the disk, so that a later sync takes less time."""
        if self._open is not None:
            self._open.begin_sync()

    def write(self, placement: Placement, data: NDArray[np.uint8]) -> None:
        """Write records at the positions in `placement`, with one write for each segment.

        `data` has the records in a row.

        A segment's filler is written after its records and before the next segment is created, as a broker does. If a
        crash happens in between, the log ends at the filler, and the next writer creates the next segment.
        """
        for write in placement.writes:
            segment = self._segment_at(write.physical_offset)
            position = write.physical_offset - segment.begin
            if isinstance(write, Filler):
                self._file(segment).write(position, encode_blank(write.remaining))
            else:
                self._file(segment).write(position, data[write.begin : write.end])
            self._changes.note_file(segment.path)

    def has_room(self, physical_offset: int, size: int) -> bool:
        """Say whether a record of `size` bytes fits at this physical offset into the segment that is open."""
        segment = self._segment
        if self._open is None or segment is None or self._open.path != segment.path:
            return False
        return segment.begin <= physical_offset <= segment.end - size - BLANK_BYTES

    def write_one(self, physical_offset: int, data: bytes | bytearray) -> None:
        """Write one record for which `has_room` is true."""
        assert self._open is not None
        assert self._segment is not None
        self._open.write(physical_offset - self._segment.begin, data)
        self._changes.note_file(self._segment.path)

    def clear_from(self, physical_offset: int) -> int:
        """Clear the log from a physical offset to its end, for recovery. Return how many bytes of data were cleared.

        A broker that truncates its log leaves such bytes, and a later recovery may read them as records again. Segments
        that begin after the offset are deleted, as in MappedFileQueue#truncateDirtyFiles.
        """
        self.close()
        cleared = 0
        for segment in self._log.segments.segments:
            begin = max(physical_offset - segment.begin, 0)
            parts = list(files.data_extents(segment.path, begin, segment.size)) if begin < segment.size else []
            cleared += sum(last - first for first, last in parts)
            if segment.begin > physical_offset:
                self._disk.remove(segment.path)
                self._changes.note_folder(files.parent(segment.path))
            elif parts:
                file = self._file(segment)
                for first, last in parts:
                    file.write(first, bytes(last - first))
                self._changes.note_file(segment.path)
        self.close()
        self._log.refresh()
        return cleared

    def write_again_from(self, physical_offset: int, end: int, heartbeat: Callable[[], None]) -> None:
        """Write the log again after a failed sync, from `physical_offset` to the end of its segments.

        After `end`, the end of the log, the bytes that recovery cleared are written again.
        """
        self.close()
        for segment in self._log.segments.segments:
            if segment.end > physical_offset:
                begin, last = max(physical_offset - segment.begin, 0), max(end - segment.begin, 0)
                write_again(self._disk, segment.path, begin, heartbeat, end=last)
                self._changes.note_file(segment.path)

    def _segment_at(self, physical_offset: int) -> Segment:
        """Return the segment that contains a physical offset. Create it if it is missing."""
        segment = self._log.segments.holding(physical_offset)
        if segment is not None:
            return segment
        self.close()
        size = self.segment_bytes
        begin = physical_offset // size * size
        folder = self._folders[begin // size % len(self._folders)]
        path = files.join(folder, segment_name(begin))
        if files.file_size(path) == 0:
            self._disk.remove(path)  # a broker died while it created the file: MappedFileQueue#doLoad removes it too
        self._disk.create(path, size)
        self._changes.note_new_file(path)
        self._log.refresh()
        return Segment(begin, size, path)

    def _file(self, segment: Segment) -> WritableFile:
        if self._open is None or self._open.path != segment.path:
            self.close()
            self._open, self._segment = self._disk.open(segment.path), segment
        return self._open
