"""Which messages that seem due a broker delivered already, without saying so: their copies are in their queues.

A copy has the UNIQ_KEY, the time of birth, the CRC and the due time of its original, and lies behind it in the log. It
was stored a second after the one that it waited for at the earliest, so only the end of its queue is looked at.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.originals import read_originals
from rmq_spark.store.delivery.timer_mark import Doubt
from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.properties import UNIQ_KEY
from rmq_spark.store.format.timer_properties import TIMER_OUT_MS
from rmq_spark.store.format.timer_wheel import SECOND_MS
from rmq_spark.store.format.whole_records import WholeRecords
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.time_search import LOWER, TimeSearch
from rmq_spark.store.units import QueueKey

_BATCH_UNITS = 32_768

_Identity = tuple[object, ...]


def are_delivered(
    root: str,
    log: CommitLog,
    doubt: Doubt,
    records: WholeRecords,
    places: NDArray[np.int64],
    targets: Sequence[QueueKey | None],
    due_ms: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Say of each record, which lies at physical offset `places`, whether its queue has a copy of it in the doubt.

    `targets` is the queue that each goes to, None for nowhere; `due_ms` is when each was due at the earliest.
    """
    found = np.zeros(len(records), np.bool_)
    rows_of: dict[QueueKey, list[int]] = {}
    for row, key in enumerate(targets):
        if key is not None and doubt.covers(int(due_ms[row])):
            rows_of.setdefault(key, []).append(row)
    if not rows_of:
        return found
    identities = _identities(records)
    for key, rows in rows_of.items():
        copies = _copies(root, log, key, int(due_ms[rows].min()) + SECOND_MS, doubt.end)
        for row in rows:
            found[row] = any(place > places[row] for place in copies.get(identities[row], ()))
    return found


def _copies(root: str, log: CommitLog, key: QueueKey, from_ms: int, end: int) -> dict[_Identity, list[int]]:
    """Return what was stored in the queue from a time on, before a physical offset: places by identity."""
    found: dict[_Identity, list[int]] = {}
    queue = ConsumeQueue(key, files.join(root, filenames.queue_folder(key.topic, key.queue_id)))
    try:
        if not queue.run.segments:
            return found
        last = queue.first_from(end, queue.search_written_end())
        first = TimeSearch(log, queue, queue.first_from(log.segments.begin, last), last).unit_at(from_ms, LOWER)
        while first < last:
            units = queue.read(first, min(first + _BATCH_UNITS, last))
            if not len(units):
                break
            originals = read_originals(log, units.physical_offsets, units.sizes)
            whole = originals.is_whole
            records = WholeRecords.of(originals.data, originals.positions[whole], originals.ends[whole])
            if len(records):
                for identity, place in zip(_identities(records), units.physical_offsets[whole].tolist(), strict=True):
                    found.setdefault(identity, []).append(place)
            first += len(units)
    except (DamageError, StorePathError) as error:
        if is_unreadable(error):
            raise  # it may be read at the next tick: what it waits for stays until then
        # A queue that is damaged tells of no copy: then what it waits for is delivered, maybe again.
        return found
    finally:
        queue.run.close()
    return found


def _identities(records: WholeRecords) -> list[_Identity]:
    pairs = records.pairs()
    columns: list[list[object]] = [
        pairs.column(UNIQ_KEY).to_pylist(),
        pairs.column(TIMER_OUT_MS).to_pylist(),
        records.field("born_timestamp").tolist(),
        records.field("body_crc").tolist(),
    ]
    return list(zip(*columns, strict=True))
