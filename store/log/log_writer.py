"""The commit log for a writer: records written where they were placed, segments made, a torn tail taken back.

Only who holds the store's lock may use it. Segments are made at their full size and never change it.
Source: CommitLog#asyncPutMessages, MappedFileQueue#tryCreateMappedFile, MultiPathMappedFileQueue (5.3).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import ChangingFile, Disk
from rmq_spark.store.format.filenames import segment_name
from rmq_spark.store.format.record import encode_blank
from rmq_spark.store.log.changes import Changes, write_again
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.placement import Filler, Placement
from rmq_spark.store.log.segments import Segment


class LogWriter:
    """Writes into the segments that `log` reads, whose size they have in common, or `segment_bytes` without any."""

    def __init__(
        self, disk: Disk, log: CommitLog, folders: tuple[str, ...], changes: Changes, segment_bytes: int
    ) -> None:
        self._disk, self._log, self._changes = disk, log, changes
        self._folders = tuple(sorted(folders))
        self._new_segment_bytes = segment_bytes
        self._open: ChangingFile | None = None

    @property
    def segment_bytes(self) -> int:
        """Return the length of every segment, in bytes."""
        return self._log.segments.size or self._new_segment_bytes

    def close(self) -> None:
        """Close the segment that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def begin_sync(self) -> None:
        """Have the disk begin with what was written to the segment that is open: settling waits less then."""
        if self._open is not None:
            self._open.begin_sync()

    def write(self, placement: Placement, data: NDArray[np.uint8]) -> None:
        """Write records that lie one behind the other in `data` where they were placed: one write for each segment.

        A segment's filler comes after its records and before the next segment is made, as a broker does it: a
        crash between the two leaves a log that ends at its filler, and the next writer makes the segment.
        """
        for write in placement.writes:
            segment = self._segment_at(write.physical_offset)
            position = write.physical_offset - segment.begin
            if isinstance(write, Filler):
                self._file(segment).write(position, encode_blank(write.remaining))
            else:
                self._file(segment).write(position, data[write.begin : write.end])
            self._changes.note_file(segment.path)

    def clear_from(self, physical_offset: int) -> int:
        """Make everything behind a physical offset zero, for recovery; return how many bytes were not.

        A broker that truncates leaves those bytes, and a later recovery may take them for records again. Segments
        that begin behind it are deleted, as MappedFileQueue#truncateDirtyFiles does.
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
        self._log.look()
        return cleared

    def write_again_from(self, physical_offset: int, end: int, note_progress: Callable[[], None]) -> None:
        """Write again the log from a physical offset to its end, and what was cleared behind, after a failed sync."""
        self.close()
        for segment in self._log.segments.segments:
            if segment.end > physical_offset:
                begin, last = max(physical_offset - segment.begin, 0), max(end - segment.begin, 0)
                write_again(self._disk, segment.path, begin, note_progress, end=last)
                self._changes.note_file(segment.path)

    def _segment_at(self, physical_offset: int) -> Segment:
        """Return the segment for a physical offset; it is made if it is not there yet."""
        segment = self._log.segments.holding(physical_offset)
        if segment is not None:
            return segment
        self.close()
        size = self.segment_bytes
        begin = physical_offset // size * size
        folder = self._folders[begin // size % len(self._folders)]
        path = files.join(folder, segment_name(begin))
        if files.file_size(path) == 0:
            self._disk.remove(path)  # a broker died while it made it: MappedFileQueue#doLoad takes it away, too
        self._disk.create(path, size)
        self._changes.note_new_file(path)
        self._log.look()
        return Segment(begin, size, path)

    def _file(self, segment: Segment) -> ChangingFile:
        if self._open is None or self._open.path != segment.path:
            self.close()
            self._open = self._disk.open(segment.path)
        return self._open
