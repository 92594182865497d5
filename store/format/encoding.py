"""Rows of messages -> finished records of the commit log, a whole batch at a time.

What only the store can decide is left at zero: queue offset, physical offset and store time, which the appender fills
in while it holds the store's lock. Everything that costs time (properties, CRCs, hashes, ids) is done here, before it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Whole records one after the other, and what their units and index entries need.

    Arrays are in the order of the records. Record `i` takes `sizes[i]` bytes of `data`; its queue offset, physical
    offset and store time are zero in there. It belongs to `queues[queue_numbers[i]]`. `digest` tells whether two
    batches are the same to their user: it depends on topics, bodies, tags, keys, properties, flags and given queue
    ids, and not on the order of rows, ids, hosts, times or the choice of a queue. Digests of parts add up, modulo 2^64.
    """

    data: NDArray[np.uint8]
    sizes: NDArray[np.int64]  # bytes of each record, TOTALSIZE
    queues: tuple[QueueKey, ...]  # distinct
    queue_numbers: NDArray[np.int32]  # into `queues`
    tags_codes: NDArray[np.int64]  # Java hash of TAGS, 0 without
    key_rows: NDArray[np.int64]  # one element for each index entry, ascending: which record it is of
    key_hashes: NDArray[np.int32]  # java.index_key_hash of `topic#key`; of a record first UNIQ_KEY, then KEYS in order
    digest: int  # 0 .. 2^64-1

    def __len__(self) -> int:
        return len(self.sizes)
