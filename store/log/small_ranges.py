"""Small ranges of many queues, read together.

Reading one range costs about a millisecond, however few messages it has: most of that time is overhead of numpy and
Arrow. `SmallRanges` reads the entries of all ranges first, and then their records in the order of the log, with one
pass over the columns.

It reads only ranges in which everything is as usual. Otherwise a method returns None, and the caller must read the
ranges one by one. That finds the same messages, or raises the error that names queue, file and position. So this
module applies the same checks to entries and records as `queue_reader`, but reports no damage.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import StoreError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.columns import decode, empty_batch
from rmq_spark.store.format.record import MAX_RECORD_BYTES, MIN_RECORD_BYTES
from rmq_spark.store.format.record_batch import NotWholeError, WholeRecords
from rmq_spark.store.format.record_headers import RecordFault, RecordRun
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries, EntryTable
from rmq_spark.store.log.queue_reader import BATCH_BYTES, BATCH_ROWS
from rmq_spark.store.model import QueueKey, QueueRange, RecordProof

_PLACE = "commitLogOffset"
_NO_END = 1 << 62  # `decode` returns it unless decompressed bodies filled the result


class SmallRanges:
    """Reads small ranges of many queues of one store. For one thread at a time.

    `find` returns the files of a queue, or None if it has none. `recent` returns the entries that the last refresh of
    the reader confirmed.
    """

    def __init__(
        self,
        log: CommitLog,
        find: Callable[[QueueKey], ConsumeQueue | None],
        recent: Callable[[], EntryTable],
    ) -> None:
        self._log, self._find, self._recent = log, find, recent

    def proofs(self, at: Collection[tuple[QueueKey, int]]) -> dict[tuple[QueueKey, int], RecordProof] | None:
        """Return physical offset and store time of each message, which is given by its queue and queue offset.

        Returns None if any message must be looked up alone.
        """
        entries = self._entries((queue, offset, offset + 1) for queue, offset in at)
        if entries is None:
            return None
        offsets, places = np.unique(entries.physical_offsets, return_index=True)
        times = self._store_times(offsets, entries.sizes[places])
        if times is None:
            return None
        times_of = times[np.searchsorted(offsets, entries.physical_offsets)].tolist()
        found = zip(entries.physical_offsets.tolist(), times_of, strict=True)
        return {one: RecordProof(*proof) for one, proof in zip(at, found, strict=True)}

    def record_bytes(self, parts: Collection[QueueRange]) -> dict[QueueRange, int] | None:
        """Return the size of the records of each range in bytes. Returns None if any range must be measured alone."""
        entries = self._entries((part.queue, part.begin, part.end) for part in parts)
        if entries is None:
            return None
        ends = np.cumsum([part.count for part in parts])
        totals = np.diff(np.concatenate(([0], np.cumsum(entries.sizes)))[np.concatenate(([0], ends))])
        return dict(zip(parts, totals.tolist(), strict=True))

    def read(
        self, parts: Sequence[QueueRange], columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> pa.RecordBatch | None:
        """Return the messages of the ranges, one range after another, or those that match the filter `wanted`.

        All ranges must be of one topic, and none empty. Returns None if they must be read one by one.
        """
        entries = self._entries((part.queue, part.begin, part.end) for part in parts)
        if entries is None or int(entries.sizes.sum()) > BATCH_BYTES:
            return None
        queue_ids = np.repeat([part.queue.queue_id for part in parts], [part.count for part in parts])
        if ((np.diff(entries.physical_offsets) <= 0) & (np.diff(queue_ids) == 0)).any():
            return None
        topic = parts[0].queue.topic
        is_scattered = wanted is not None and wanted.asks_units_of(topic, are_batches=False)
        if wanted is not None and is_scattered:
            chosen = np.flatnonzero(wanted.may_match(entries.tags_codes))
            entries, queue_ids = entries.take(chosen), queue_ids[chosen]
        order = np.argsort(entries.physical_offsets, kind="stable")
        ordered = entries.take(order)
        if (ordered.physical_offsets[1:] < (ordered.physical_offsets + ordered.sizes)[:-1]).any():
            return None
        with suppress(StoreError, RecordFault):
            found = self._decode(
                topic, ordered, queue_ids[order], (*columns, _PLACE), limits, wanted, expects_all=is_scattered
            )
            return None if found is None else _sorted(found, entries.physical_offsets, order, columns)
        return None

    def _decode(
        self,
        topic: str,
        entries: Entries,
        queue_ids: NDArray[np.int64],
        columns: Sequence[str],
        limits: DecodeLimits,
        wanted: RowFilter | None,
        *,
        expects_all: bool,
    ) -> pa.RecordBatch | None:
        """Return the messages of `entries` that match `wanted`, in the order of the log.

        Returns None if they do not fit into one batch. Raises RecordFault if a record is damaged, and StoreError if
        the log cannot be read.
        """
        batches = []
        for stretch in self._log.stretches(entries.physical_offsets, entries.sizes, are_scattered=True):
            part = slice(stretch.first, stretch.last)
            run = RecordRun(
                stretch.buffer,
                stretch.positions,
                entries.sizes[part],
                entries.physical_offsets[part],
                entries.queue_offsets[part],
                topic,
                queue_ids[part],
            )
            batch, next_offset = decode(run, columns, 0, _NO_END, limits, wanted, expects_all=expects_all)
            stretch.check()
            if next_offset != _NO_END:
                return None
            batches.append(batch)
        if len(batches) < 2:
            return batches[0] if batches else empty_batch(columns)
        table = pa.Table.from_batches(batches).combine_chunks()
        return table.to_batches()[0] if len(table) else empty_batch(columns)

    def _store_times(self, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the store time (ms) of the record at each physical offset, or None if one is not a whole record."""
        times = []
        with suppress(StoreError, NotWholeError):
            if (np.diff(physical_offsets) < sizes[:-1]).any():
                return None
            for stretch in self._log.stretches(physical_offsets, sizes, are_scattered=True):
                part = slice(stretch.first, stretch.last)
                whole = WholeRecords.of(stretch.buffer, stretch.positions, stretch.positions + sizes[part])
                are_there = np.array_equal(whole.field("physical_offset"), physical_offsets[part])
                times.append(whole.field("store_timestamp").astype(np.int64))
                stretch.check()
                if not are_there:
                    return None
            return np.concatenate(times)
        return None

    def _entries(self, ranges: Iterable[tuple[QueueKey, int, int]]) -> Entries | None:
        """Return the entries of the ranges (queue, begin, end), one range after another.

        Returns None if there are too many, or if any is missing, is not written or may have expired.
        """
        asked = list(ranges)
        count = sum(end - begin for _, begin, end in asked)
        if not 0 < count <= BATCH_ROWS:
            return None
        with suppress(StoreError):
            entries = self._recent().find(asked)
            entries = self._read_entries(asked) if entries is None else entries
            if entries is None or len(entries) != count:
                return None
            places, sizes = entries.physical_offsets, entries.sizes
            is_usual = (
                (places >= self._log.segments.begin)
                & (places < self._log.segments.end)
                & (sizes >= MIN_RECORD_BYTES)
                & (sizes <= MAX_RECORD_BYTES)
            )
            return entries if is_usual.all() else None
        return None

    def _read_entries(self, asked: list[tuple[QueueKey, int, int]]) -> Entries | None:
        parts = []
        opened: ConsumeQueue | None = None
        try:
            for key, begin, end in asked:
                queue = self._find(key)
                if queue is None or queue.are_batches or begin < queue.run.begin:
                    return None
                if opened is not None and opened is not queue:
                    opened.run.close()  # there may be more queues than a process may have open files
                opened = queue
                parts.append((begin, queue.run.read(begin, end)))
        finally:
            if opened is not None:
                opened.run.close()
        raw = np.concatenate([data for _, data in parts])
        offsets = [np.arange(begin, begin + len(data)) for begin, data in parts]
        return ConsumeQueue.entries_of(raw, np.concatenate(offsets))


def _sorted(
    found: pa.RecordBatch, physical_offsets: NDArray[np.int64], order: NDArray[np.intp], columns: Sequence[str]
) -> pa.RecordBatch:
    """Return the `columns` of the messages in `found` in the order of `physical_offsets`.

    `order` sorts `physical_offsets`. `found` is sorted by physical offset too, but may lack some.
    """
    places = found.column(found.num_columns - 1).to_numpy()
    rows = np.argsort(order[np.searchsorted(physical_offsets[order], places)])
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.nulls(len(rows), pa.struct([])))
    kept = found.select(range(len(columns)))
    return kept if (np.diff(rows) == 1).all() else kept.take(pa.array(rows))
