"""Log blocks: yields the records of a part of the commit log as columns. For recovery, which may read a whole log.

`log_blocks` raises at damage. `sound_blocks` skips damaged parts.
"""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.record import (
    MAGIC_V1,
    MAGIC_V2,
    RECORD_HEAD,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    Blank,
    Record,
    Torn,
)
from rmq_spark.store.format.record_batch import NotWholeError, RecordColumns, split_records, walk_records
from rmq_spark.store.log.store_files import StoreFiles

BLOCK_BYTES = 8 << 20  # how much of the log is decoded together, to limit memory
_LOG = logging.getLogger("rmq_spark")
_WINDOW_BYTES = 1 << 20  # how much is scanned at once for the next record after damage
_FIELDS: Any = RECORD_HEAD.fields
_MAGIC_AT: int = _FIELDS["magic"][1]
_MAGICS = tuple(magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2))


def log_blocks(store: StoreFiles, begin: int, end: int, block_bytes: int = BLOCK_BYTES) -> Iterator[RecordColumns]:
    """Yield the records of the log in [begin, end), in blocks. Raises DamageError at bytes that are not a record.

    `block_bytes` is the maximum size of a block, unless one record is larger. After a filler, the next segment follows,
    whatever length the filler contains. A broker ignores this length too, and may have continued after a filler that a
    power cut tore (CommitLog#checkMessageAndReturnSize, #rollNextFile, 4.9 and 5.3).
    """
    offset = begin
    while offset < end:
        data = store.log.bytes_at(offset, min(block_bytes, end - offset))
        positions, size = walk_records(data)
        if not len(positions):
            # A filler, a record that is larger than a block, or not a record.
            record = store.log.record_at(offset)
            if isinstance(record, Torn):
                raise _no_record_error(store, offset, record)
            if isinstance(record, Blank):
                segment = store.log.segments.holding(offset)
                assert segment is not None, offset  # the filler was read from it
                offset = segment.end
                continue
            data = store.log.bytes_at(offset, record.total_size)
            positions, size = np.zeros(1, np.int64), record.total_size
        try:
            records = split_records(data, positions, size, offset, store.levels)
        except NotWholeError as fault:
            bad = offset + int(positions[fault.row])
            raise _no_record_error(store, bad, store.log.record_at(bad)) from fault
        yield records
        offset += size


def sound_blocks(store: StoreFiles, begin: int, end: int) -> Iterator[RecordColumns]:
    """Yield the complete records of [begin, end) in blocks. Damaged parts are skipped, with a warning.

    Old damage must not prevent writers from creating a queue.
    """
    for segment in store.log.segments.segments:
        physical_offset, stop = max(segment.begin, begin), min(segment.end, end)
        limit = stop
        while physical_offset < stop:
            try:
                for records in log_blocks(store, physical_offset, limit):
                    yield records
                    physical_offset = int(records.places[-1] + records.sizes[-1])
                physical_offset = limit
            except DamageError as error:
                limit = segment.begin + error.position  # next, read the records before the damage
                _LOG.warning("rmq: skipped damage in the log during a search for lost queues: %s", error)
            if physical_offset >= limit and limit < stop:
                physical_offset, limit = _next_record(store, limit + 1, stop), stop


def needs_entry(records: RecordColumns) -> NDArray[np.bool_]:
    """Return for each record whether it gets a consume-queue entry.

    Prepared and rolled back messages do not get one.
    """
    return np.isin(records.sys_flags & TRANSACTION_MASK, (0, TRANSACTION_COMMIT))


def _no_record_error(store: StoreFiles, physical_offset: int, found: Record | Blank | Torn) -> DamageError:
    segment = store.log.segments.holding(physical_offset)
    path, position = (segment.path, physical_offset - segment.begin) if segment else (store.root, physical_offset)
    why = found.why if isinstance(found, Torn) else "another one"
    return DamageError("a record before the log's end", path, position, "a record", why)


def _next_record(store: StoreFiles, begin: int, stop: int) -> int:
    """Return the physical offset of the first record in [begin, stop). Return `stop` if there is none.

    A record is recognized by its magic and by the physical offset that it contains.
    """
    physical_offset = begin
    while physical_offset < stop:
        window = store.log.bytes_at(physical_offset, min(_WINDOW_BYTES, stop - physical_offset))
        found = [
            physical_offset + at - _MAGIC_AT for magic in _MAGICS for at in _positions(window, magic) if at >= _MAGIC_AT
        ]
        for one in sorted(found):
            if isinstance(store.log.record_at(one), Record):
                return one
        if len(window) < _WINDOW_BYTES:
            return stop
        physical_offset += len(window) - 2 * _MAGIC_AT  # windows overlap, because a magic may cross the boundary
    return stop


def _positions(window: bytes, wanted: bytes) -> Iterator[int]:
    at = window.find(wanted)
    while at >= 0:
        yield at
        at = window.find(wanted, at + 1)
