"""Files of one size in a row, named by the position of their first byte: commit log, queues, side files of queues.

A `SegmentRun` is what a folder (or several) holds at one moment. It knows names and sizes and opens nothing by
itself; looking again makes a new one. Source: MappedFileQueue#load (5.3), but nothing is deleted here.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format.filenames import parse_segment_name


@dataclass(frozen=True, slots=True)
class Segment:
    """One file: the bytes [begin, begin + size) of the whole run."""

    begin: int
    size: int
    path: str

    @property
    def end(self) -> int:
        """Return the position after the last byte."""
        return self.begin + self.size


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """The segments of a run in order. `size` is the length that all have in common, 0 without segments."""

    segments: tuple[Segment, ...]
    size: int

    @property
    def begin(self) -> int:
        """Return the position of the first byte that is still there, 0 without segments."""
        return self.segments[0].begin if self.segments else 0

    @property
    def end(self) -> int:
        """Return the position after the last byte that has a file."""
        return self.segments[-1].end if self.segments else 0

    def holding(self, position: int) -> Segment | None:
        """Return the segment with the byte at `position`, None if no file has it."""
        at = bisect_right(self.segments, position, key=lambda segment: segment.begin) - 1
        if at < 0 or position >= self.segments[at].end:
            return None
        return self.segments[at]

    def after(self, segment: Segment) -> Segment | None:
        """Return the segment that begins where `segment` ends, None if there is none."""
        return self.holding(segment.end)


def list_segments(*folders: str) -> SegmentRun:
    """Return the segments in the folders, which may be missing.

    Raises StorePathError for a file that is no segment, and DamageError for one of another length: a broker
    refuses to start on both. An empty last file is one that is just being made, and does not count.
    """
    found = []
    for folder in folders:
        for name, is_folder in files.list_folder(folder):
            if is_folder:
                continue
            begin = parse_segment_name(name)
            path = files.join(folder, name)
            if begin is None:
                raise StorePathError(
                    f"{path} does not belong there: files in this folder are named by 20 digits, and a broker "
                    "refuses to load a folder with any other. Move it away and read again."
                )
            found.append(Segment(begin, files.file_size(path), path))
    found.sort(key=lambda segment: segment.begin)
    found = [segment for segment in found if segment.size >= 0]  # gone between listing and asking
    if found and found[-1].size == 0:
        found.pop()
    size = found[0].size if found else 0
    for before, segment in pairwise(found):
        if segment.size != size:
            smaller = min(segment, before, key=lambda one: one.size)
            raise DamageError(
                "segments of one folder have one size", smaller.path, 0, max(size, segment.size), smaller.size
            )
        if segment.begin < before.end:
            raise DamageError("segments overlap", segment.path, 0, f"a name from {before.end} on", segment.begin)
    return SegmentRun(tuple(found), size)
