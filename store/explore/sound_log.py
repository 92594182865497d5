"""The commit log as far as its files make sense: for who looks at a store that may be damaged.

Readers and writers refuse a folder with a file that is no segment, or of another length, as a broker does. Here such
files are told, and the rest is read all the same.
"""

from collections import Counter
from dataclasses import dataclass

from rmq_spark.store.disk import files
from rmq_spark.store.format.filenames import parse_segment_name, segment_name
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.segments import Segment, SegmentRun


@dataclass(frozen=True, slots=True)
class OddFile:
    """A file in a folder of segments that keeps a broker from starting: what is expected of it, and what it is."""

    path: str
    expected: str
    found: str


def list_sound(*folders: str) -> tuple[SegmentRun, list[OddFile]]:
    """Return the segments that can be read, in order, and the files that do not belong there or have another length.

    An empty last file, which somebody is just making, is neither. A short segment is read as far as it goes.
    """
    named, odd = _named(folders)
    lengths = Counter(segment.size for segment in named if segment.size)
    usual = max(lengths, key=lambda size: (lengths[size], size)) if lengths else 0
    sound: list[Segment] = []
    for segment in named:
        if segment.size != usual:
            odd.append(OddFile(segment.path, f"{usual} bytes, as its neighbours have", str(segment.size)))
        if sound and segment.begin < sound[-1].end:
            odd.append(OddFile(segment.path, f"a name from {sound[-1].end} on", str(segment.begin)))
            continue
        if usual and segment.begin % usual:
            odd.append(OddFile(segment.path, f"a name that is a multiple of {usual}", str(segment.begin)))
            continue
        if segment.size:
            sound.append(Segment(segment.begin, min(segment.size, usual), segment.path))
    return SegmentRun(tuple(sound), usual), odd


def _named(folders: tuple[str, ...]) -> tuple[list[Segment], list[OddFile]]:
    """Return the files that are named as segments, in order, and the others."""
    named: list[Segment] = []
    odd = []
    for folder in folders:
        for name, is_folder in files.list_folder(folder):
            path = files.join(folder, name)
            begin = parse_segment_name(name)
            if is_folder:  # a broker passes folders over: it would not miss what was a segment
                odd += [] if begin is None else [OddFile(path, "a file", "a folder")]
                continue
            if begin is None:
                odd.append(OddFile(path, "a name of 20 digits", name))
            elif (size := files.file_size(path)) >= 0:
                named.append(Segment(begin, size, path))
    named.sort(key=lambda segment: segment.begin)
    if named and named[-1].size == 0:
        named.pop()
    return named, odd


class SoundLog(CommitLog):
    """The segments that can be read; `odd` are the files that cannot. Nothing is mapped. One thread; `close` it."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.odd: list[OddFile] = []
        super().__init__(folders, mapped=False)

    def look(self) -> None:
        """List the files again."""
        self.close()
        self.segments, self.odd = list_sound(*self._folders)

    def segment_from(self, physical_offset: int) -> Segment | None:
        """Return the first segment that begins at a physical offset or behind it."""
        return next((one for one in self.segments.segments if one.begin >= physical_offset), None)

    def missing_path(self, physical_offset: int) -> str:
        """Return where the segment with the byte at a physical offset would lie that is not there."""
        run = self.segments
        neighbour = next((one for one in reversed(run.segments) if one.end <= physical_offset), None)
        neighbour = neighbour or next(iter(run.segments), None)
        folder = files.parent(neighbour.path) if neighbour else self._folders[0]
        return files.join(folder, segment_name(physical_offset - physical_offset % max(run.size, 1)))
