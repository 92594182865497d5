"""Encoded records in parts of bounded size, each whole in itself."""

from collections.abc import Iterator

import numpy as np

from rmq_spark.store.format.encoding import EncodedRecords


def split_records(records: EncodedRecords, max_bytes: int) -> Iterator[EncodedRecords]:
    """Yield the records in parts of at most `max_bytes` of log, in order; a larger record is a part by itself.

    Parts are views: what is written into a part's `data` is written into that of `records`. Their digests are 0, since
    digests are of whole batches.
    """
    if len(records.data) <= max_bytes:
        yield records
        return
    ends = np.cumsum(records.sizes)
    first, done = 0, 0
    while first < len(records):
        last = max(int(np.searchsorted(ends, done + max_bytes, side="right")), first + 1)
        keys = slice(*np.searchsorted(records.key_rows, (first, last)).tolist())
        yield EncodedRecords(
            records.data[done : int(ends[last - 1])],
            records.sizes[first:last],
            records.queues,
            records.queue_numbers[first:last],
            records.tags_codes[first:last],
            records.key_rows[keys] - first,
            records.key_hashes[keys],
            0,
        )
        first, done = last, int(ends[last - 1])
