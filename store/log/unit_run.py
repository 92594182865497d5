"""The units of one queue: entries of a fixed size in a run of segments, counted from the queue's first ever.

Where a unit stands is its number times its size; a run that lost its oldest files begins at a higher number.
Nothing here believes a unit: that takes a look at its record.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreChangedError, StoreError
from rmq_spark.store.log.segments import Segment, SegmentRun, list_segments


class UnitRun:
    """Units of layout `layout` in `folder`, as its files were when they were first needed after the last `look`.

    One thread at a time. Keeps at most one file open, the one it read last.
    """

    def __init__(self, folder: str, layout: np.dtype[np.void]) -> None:
        self.folder, self.layout = folder, layout
        self._file: OpenFile | None = None
        self._listed: SegmentRun | None = None

    def look(self) -> None:
        """Have the files listed anew when they are next needed: a store has thousands of queues."""
        self._listed = None
        self.close()

    def fault(self) -> StoreError | None:
        """Return what is wrong with the files as such (names, lengths), None if nothing is.

        Also the error of files that the kernel does not let be listed, see `is_unreadable`.
        """
        try:
            self._listed = self._run
        except StoreError as error:
            return error
        return None

    def is_damaged(self) -> bool:
        """Say whether something is wrong with the files as such.

        Raises StoreError where the kernel does not let them be listed: nobody knows then what units there are.
        """
        fault = self.fault()
        if fault is not None and is_unreadable(fault):
            raise fault
        return fault is not None

    @property
    def _run(self) -> SegmentRun:
        if self._listed is None:
            self._listed = self._list()
        return self._listed

    def _list(self) -> SegmentRun:
        run = list_segments(self.folder)
        if run.size % self.layout.itemsize:
            raise DamageError(
                "a file of units has a length that units do not fill",
                run.segments[0].path,
                0,
                f"a multiple of {self.layout.itemsize} bytes",
                run.size,
            )
        return run

    def close(self) -> None:
        """Close the file that is open, if any; reading opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the files, in order."""
        return self._run.segments

    @property
    def begin(self) -> int:
        """Return the number of the first unit that has a file."""
        return -(-self._run.begin // self.layout.itemsize)

    @property
    def end(self) -> int:
        """Return the number after the last unit that has room in a file, written or not."""
        return self._run.end // self.layout.itemsize

    def path_of(self, unit: int) -> tuple[str, int]:
        """Return the file of a unit and its position there (bytes), for messages."""
        position = unit * self.layout.itemsize
        segment = self._run.holding(position)
        return (segment.path, position - segment.begin) if segment else (self.folder, position)

    def read(self, begin: int, end: int) -> NDArray[np.void]:
        """Return the units [begin, end); those past the last file are left out. A copy, safe to keep."""
        size = self.layout.itemsize
        position, stop = begin * size, min(end, self.end) * size
        parts = []
        while position < stop:
            segment = self._run.holding(position)
            if segment is None:
                raise StoreChangedError(
                    f"{self.folder} has no file for unit {position // size}: it was deleted. Plan the read again."
                )
            until = min(stop, segment.end)
            data = self._open(segment).read(position - segment.begin, until - position)
            if len(data) < until - position:
                raise StoreChangedError(
                    f"{segment.path} has fewer than {segment.size} bytes: it was cut while it was being read."
                )
            parts.append(data)
            position = until
        return np.frombuffer(b"".join(parts), self.layout)

    def first_where(self, begin: int, end: int, holds: Any) -> int:
        """Return the first unit in [begin, end) for which `holds(unit)` is true, `end` if there is none.

        Binary search: `holds` must be false up to some unit and true from there on.
        """
        while begin < end:
            middle = (begin + end) // 2
            found = self.read(middle, middle + 1)
            if not len(found):
                raise StoreChangedError(f"{self.folder} has no file for unit {middle}: it was deleted. Plan again.")
            if holds(found[0]):
                end = middle
            else:
                begin = middle + 1
        return begin

    def _open(self, segment: Segment) -> OpenFile:
        if self._file is None or self._file.path != segment.path:
            self.close()
            try:
                self._file = OpenFile(segment.path)
            except StoreChangedError:
                self._listed = None  # retention took it: whoever asks again is to meet what is left
                raise
        return self._file
