"""A reader that also shows the units of a queue as a pull meets them: those of one file, and what became of the log.

It looks at the disk where the last `refresh` may be out of date by design: files that retention has taken since are
an answer to a pull, no error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.log.range_reader import decode_units
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class QueueFiles:
    """How a queue lies on disk: bytes of a unit, units of a file; whether a unit may hold several messages."""

    unit_bytes: int
    file_units: int
    are_batches: bool


class PullReader(StoreReader):
    """A StoreReader that pulls are made on. One thread at a time; `close` it, or use it in `with`."""

    @property
    def segment_bytes(self) -> int:
        """How long each segment of the commit log is; 1 where there is none."""
        return self._log.segments.size or 1

    def look_at_log(self) -> None:
        """List the log's segments again. Bounds stay as of the last refresh."""
        self._log.look()

    def queue_files(self, queue: QueueKey) -> QueueFiles:
        """Return how the queue, which has files, lies on disk."""
        run = self._files_of(queue).run
        unit_bytes = run.layout.itemsize
        file_units = run.segments[0].size // unit_bytes if run.segments else 1
        return QueueFiles(unit_bytes, file_units, run.layout is BATCH_UNIT)

    def units_in_file(self, queue: QueueKey, offset: int, max_messages: int) -> Units | None:
        """Return the units from the one of `offset` on: of its file, up to the queue's end as of the last refresh.

        Of at most so many messages, or so far as the last unit begins before that. None if the file is gone and a later
        one is not. Raises DamageError for units that do not ascend as records do, StoreChangedError where no later file
        exists either.
        """
        files_of = self._files_of(queue)
        listed = files_of.run.segments
        position = 0
        try:
            _, end = self._unit_bounds(files_of)
            unit = files_of.unit_of(offset, end)
            position = unit * files_of.run.layout.itemsize
            segment = next((one for one in listed if one.begin <= position < one.end), None)
            if segment is None:
                self._refuse_lost_end(files_of, position)
                return None
            until = min(segment.end // files_of.run.layout.itemsize, end, unit + max_messages)
            units = files_of.read(unit, until)
        except StoreChangedError:
            files_of.run.look()
            if files_of.run.segments == listed:
                raise
            self._refuse_lost_end(files_of, position)
            return None  # retention took it since
        finally:
            files_of.run.close()
        units = units.part(0, int(np.searchsorted(units.queue_offsets, offset + max_messages)))
        self._refuse_disorder(files_of, unit, units)
        return units

    def messages_of(
        self,
        queue: QueueKey,
        units: Units,
        begin: int,
        columns: Sequence[str],
        limits: DecodeLimits,
        wanted: RowFilter | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the messages of these units, ascending, with queue offsets from `begin` on, as batches of the columns.

        With a filter those that it wants. Raises DamageError for a unit that does not agree with its record or a
        record that does not decode, StoreChangedError for files that are gone.
        """
        if len(units):
            end, is_scattered = end_of(units), wanted is not None
            for found in decode_units(
                self._log, queue, units, begin, end, columns, limits, wanted, is_scattered=is_scattered
            ):
                if found.batch.num_rows:
                    yield found.batch

    def which_match(self, queue: QueueKey, units: Units, wanted: RowFilter, limits: DecodeLimits) -> NDArray[np.bool_]:
        """Say of each of these units, ascending, whether a message of its record is wanted, by the record's properties.

        Raises DamageError and StoreChangedError as `messages_of`.
        """
        found = np.zeros(len(units), np.bool_)
        if len(units):
            first = int(units.queue_offsets[0])
            for batch in self.messages_of(queue, units, first, ("queueOffset",), limits, wanted):
                offsets = batch.column(0).to_numpy()
                found[np.searchsorted(units.queue_offsets, offsets, side="right") - 1] = True
        return found

    def are_gone(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say of each place in the log, ascending, whether its segment is gone by now."""
        numbers, row_of = np.unique(physical_offsets // self.segment_bytes, return_inverse=True)
        gone = []
        for number in numbers.tolist():
            segment = self._log.segments.holding(number * self.segment_bytes)
            gone.append(segment is None or files.file_size(segment.path) < 0)
        return np.array(gone, np.bool_)[row_of]

    def _files_of(self, queue: QueueKey) -> ConsumeQueue:
        files_of = self._queue(queue)
        assert files_of is not None, queue  # who asks has seen a message there
        return files_of

    def _refuse_lost_end(self, queue: ConsumeQueue, position: int) -> None:
        """Raise StoreChangedError where a queue has no file behind a position (bytes): retention leaves the last file.

        Who skips to the next file would be beyond the queue's end: a repair may make the queue anew.
        """
        segments = queue.run.segments
        if not segments or segments[-1].begin <= position:
            unit = position // queue.run.layout.itemsize
            raise StoreChangedError(
                f"the file of {queue.run.folder} for unit {unit} is gone, and no later one exists; expected the "
                "queue's last file, which retention never removes. If a repair makes the queue anew, pull again after "
                "it. If not, run rmq_spark.check."
            )

    def _refuse_disorder(self, queue: ConsumeQueue, first: int, units: Units) -> None:
        """Raise DamageError unless records follow each other: a pull adds up sizes, and counts on the order."""
        before = np.append(0, (units.physical_offsets + units.sizes)[:-1])
        bad = np.flatnonzero((units.sizes <= 0) | (units.physical_offsets < before))
        if len(bad):
            at = int(bad[0])
            path, position = queue.run.path_of(first + at)
            found = f"({units.physical_offsets[at]}, {units.sizes[at]})"
            what = f"the unit of queue offset {units.queue_offsets[at]} of {queue.key}"
            raise DamageError(what, path, position, f"a record at or after physical offset {before[at]}", found)


def end_of(units: Units) -> int:
    """Return the queue offset behind the last message of units, of which there are some."""
    count = 1 if units.message_counts is None else int(units.message_counts[-1])
    return int(units.queue_offsets[-1]) + count
