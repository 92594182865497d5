"""The reader for pulls: a StoreReader that also returns the consume-queue entries in one file of a queue.

A StoreReader shows the store as of its last `refresh`. Retention may delete files after that. For a pull this is no
error, but a result with a status of its own. So the reader for pulls lists the files again when one is missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.log.queue_reader import decode_entries_of
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey


@dataclass(frozen=True, slots=True)
class QueueFiles:
    """The layout of a queue: bytes per entry, entries per file, and whether an entry may have several messages."""

    entry_bytes: int
    file_entries: int
    are_batches: bool


class PullReader(StoreReader):
    """A StoreReader for pulls. For one thread at a time. Use it in `with`, or call `close`."""

    @property
    def segment_bytes(self) -> int:
        """The size of a commit-log segment in bytes, or 1 if the log has no segments."""
        return self._log.segments.size or 1

    def look_at_log(self) -> None:
        """List the segments of the log again. The bounds of the queues stay as they were at the last refresh."""
        self._log.refresh()

    def queue_files(self, queue: QueueKey) -> QueueFiles:
        """Return the layout of a queue. The queue must have files."""
        run = self._files_of(queue).run
        entry_bytes = run.layout.itemsize
        file_entries = run.segments[0].size // entry_bytes if run.segments else 1
        return QueueFiles(entry_bytes, file_entries, run.layout is BATCH_UNIT)

    def entries_in_file(self, queue: QueueKey, offset: int, max_messages: int) -> Entries | None:
        """Return the entries from the queue offset `offset` to the end of the file that contains this offset.

        The result ends earlier at the queue's end as of the last refresh, and before the first entry that begins at
        `offset + max_messages` or later. Returns None if the file is gone but a later file of the queue exists. Raises
        StoreChangedError if no later file exists either, and DamageError if the records of the entries are not in
        ascending order in the log.
        """
        files_of = self._files_of(queue)
        listed = files_of.run.segments
        position = 0
        try:
            _, end = self._entry_bounds(files_of)
            entry = files_of.unit_of(offset, end)
            position = entry * files_of.run.layout.itemsize
            segment = next((one for one in listed if one.begin <= position < one.end), None)
            if segment is None:
                self._refuse_lost_end(files_of, position)
                return None
            until = min(segment.end // files_of.run.layout.itemsize, end, entry + max_messages)
            entries = files_of.read(entry, until)
        except StoreChangedError:
            files_of.run.refresh()
            if files_of.run.segments == listed:
                raise
            self._refuse_lost_end(files_of, position)
            return None  # retention has deleted the file
        finally:
            files_of.run.close()
        entries = entries.part(0, int(np.searchsorted(entries.queue_offsets, offset + max_messages)))
        self._refuse_disorder(files_of, entry, entries)
        return entries

    def messages_of(
        self,
        queue: QueueKey,
        entries: Entries,
        begin: int,
        columns: Sequence[str],
        limits: DecodeLimits,
        wanted: RowFilter | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the messages of these entries as batches with the given columns, in ascending order of queue offsets.

        Messages with a queue offset below `begin` are left out, and so are messages that the filter `wanted` rejects.
        Raises DamageError if an entry does not match its record or a record cannot be decoded, and StoreChangedError if
        a file is missing.
        """
        if len(entries):
            end, is_scattered = end_of(entries), wanted is not None
            for found in decode_entries_of(
                self._log, queue, entries, begin, end, columns, limits, wanted, is_scattered=is_scattered
            ):
                if found.batch.num_rows:
                    yield found.batch

    def which_match(
        self, queue: QueueKey, entries: Entries, wanted: RowFilter, limits: DecodeLimits
    ) -> NDArray[np.bool_]:
        """Say for each entry whether its record contains a message that the filter `wanted` accepts.

        The entries must be in ascending order. The records are read, because the filter may need their properties.
        Raises the errors of `messages_of`.
        """
        found = np.zeros(len(entries), np.bool_)
        if len(entries):
            first = int(entries.queue_offsets[0])
            for batch in self.messages_of(queue, entries, first, ("queueOffset",), limits, wanted):
                offsets = batch.column(0).to_numpy()
                found[np.searchsorted(entries.queue_offsets, offsets, side="right") - 1] = True
        return found

    def are_gone(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say for each physical offset (bytes) whether the segment of the log that contained it is gone."""
        numbers, row_of = np.unique(physical_offsets // self.segment_bytes, return_inverse=True)
        gone = []
        for number in numbers.tolist():
            segment = self._log.segments.holding(number * self.segment_bytes)
            gone.append(segment is None or files.file_size(segment.path) < 0)
        return np.array(gone, np.bool_)[row_of]

    def _files_of(self, queue: QueueKey) -> ConsumeQueue:
        files_of = self._queue(queue)
        assert files_of is not None, queue  # the caller has seen a message in the queue
        return files_of

    def _refuse_lost_end(self, queue: ConsumeQueue, position: int) -> None:
        """Raise StoreChangedError if a queue has no file that begins after `position` (bytes).

        Retention never deletes the last file of a queue. So if there is no later file, retention is not the reason why
        the file with `position` is gone. A repair may be rebuilding the queue.
        """
        segments = queue.run.segments
        if not segments or segments[-1].begin <= position:
            entry = position // queue.run.layout.itemsize
            raise StoreChangedError(
                f"the file of {queue.run.folder} for entry {entry} is gone, and no later one exists; expected the "
                "queue's last file, which retention never removes. If a repair is rebuilding the queue, pull again "
                "after it. If not, run rmq_spark.check."
            )

    def _refuse_disorder(self, queue: ConsumeQueue, first: int, entries: Entries) -> None:
        """Raise DamageError unless the records of the entries are in ascending order in the log, and have a size.

        A pull adds up the sizes of the records and depends on their order.
        """
        previous_ends = np.append(0, (entries.physical_offsets + entries.sizes)[:-1])
        bad = np.flatnonzero((entries.sizes <= 0) | (entries.physical_offsets < previous_ends))
        if len(bad):
            at = int(bad[0])
            path, position = queue.run.path_of(first + at)
            found = f"({entries.physical_offsets[at]}, {entries.sizes[at]})"
            what = f"the consume-queue entry of queue offset {entries.queue_offsets[at]} of {queue.key}"
            raise DamageError(what, path, position, f"a record at or after physical offset {previous_ends[at]}", found)


def end_of(entries: Entries) -> int:
    """Return the queue offset after the last message of `entries`. There must be at least one entry."""
    count = 1 if entries.message_counts is None else int(entries.message_counts[-1])
    return int(entries.queue_offsets[-1]) + count
