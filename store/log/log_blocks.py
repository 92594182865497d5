"""The records of a part of the log as columns, block by block: for recovery, which may have to read all of a log."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.record import TRANSACTION_COMMIT, TRANSACTION_MASK, Blank, Record, Torn
from rmq_spark.store.format.record_columns import RecordColumns, split_records, walk_records
from rmq_spark.store.format.whole_records import NotWholeError
from rmq_spark.store.log.store_files import StoreFiles

BLOCK_BYTES = 8 << 20  # of log, handled together: bounds memory


def log_blocks(store: StoreFiles, begin: int, end: int, block_bytes: int = BLOCK_BYTES) -> Iterator[RecordColumns]:
    """Yield the records of [begin, end), many at a time. Raises DamageError for what is none.

    A filler leads to the next segment whatever length it names: a broker goes by the end of the file, too, and may have
    gone on behind one that a power cut tore (CommitLog#checkMessageAndReturnSize, #rollNextFile, 4.9 and 5.3).
    """
    place = begin
    while place < end:
        data = store.log.bytes_at(place, min(block_bytes, end - place))
        positions, size = walk_records(data)
        if not len(positions):
            # A filler, a record that is larger than a block, or none.
            record = store.log.record_at(place)
            if isinstance(record, Torn):
                raise _no_record(store, place, record)
            if isinstance(record, Blank):
                segment = store.log.segments.holding(place)
                assert segment is not None, place  # the filler was read from it
                place = segment.end
                continue
            data = store.log.bytes_at(place, record.total_size)
            positions, size = np.zeros(1, np.int64), record.total_size
        try:
            records = split_records(data, positions, size, place, store.levels)
        except NotWholeError as fault:
            bad = place + int(positions[fault.row])
            raise _no_record(store, bad, store.log.record_at(bad)) from fault
        yield records
        place += size


def gets_unit(records: RecordColumns) -> NDArray[np.bool_]:
    """Return for each record whether a queue names it: prepared and rolled back messages get no unit."""
    return np.isin(records.sys_flags & TRANSACTION_MASK, (0, TRANSACTION_COMMIT))


def _no_record(store: StoreFiles, place: int, found: Record | Blank | Torn) -> DamageError:
    segment = store.log.segments.holding(place)
    path, position = (segment.path, place - segment.begin) if segment else (store.root, place)
    why = found.why if isinstance(found, Torn) else "another one"
    return DamageError("a record before the log's end", path, position, "a record", why)
