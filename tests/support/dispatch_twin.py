"""Slow twin of `store/log/redispatch.py`: rebuilds entries and index keys record by record."""

from collections.abc import Iterator

import numpy as np

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.consume_queue_entry import message_count
from rmq_spark.store.format.index_keys import tags_code_of
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_ROLLBACK,
    Blank,
    Record,
    Torn,
)
from rmq_spark.store.log.consume_queue_writer import NewEntries
from rmq_spark.store.log.redispatch import LastRecord, rewind_queues
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.model import QueueKey

_TWIN_RECORDS = 50


def dispatch(store: StoreFiles, begin: int, end: int, unit_begin: int, *, rewind: bool = False) -> LastRecord | None:
    """Add missing keys for the records of [begin, end), and missing entries for those at or above `unit_begin`.

    With `rewind` existing entries of those records are rewritten too. Return the last record, without body.
    """
    waiting: list[Record] = []
    last: LastRecord | None = None
    births = {
        _key(record): record.physical_offset
        for record in _records(store, begin, end)
        if _gets_unit(record) and record.queue_offset == 0 and record.physical_offset >= unit_begin
    }
    for record in _records(store, begin, end):
        waiting.append(record)
        last = LastRecord(record.physical_offset, record.store_timestamp)
        if len(waiting) >= _TWIN_RECORDS:
            _put_records(store, waiting, unit_begin, births, rewind=rewind)
            waiting = []
    _put_records(store, waiting, unit_begin, births, rewind=rewind)
    return last


def _records(store: StoreFiles, begin: int, end: int) -> Iterator[Record]:
    """Yield the records of [begin, end). A filler means that the rest of its file has no records."""
    for segment in store.log.segments.segments:
        place = max(begin, segment.begin)
        while place < min(end, segment.end):
            record = store.log.record_at(place)
            if isinstance(record, Blank):
                break
            if isinstance(record, Torn):
                raise DamageError(
                    "a record before the log's end", segment.path, place - segment.begin, "a record", record.why
                )
            yield record
            place += record.total_size


def _gets_unit(record: Record) -> bool:
    return record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)


def _key(record: Record) -> QueueKey:
    return QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)


def _put_records(
    store: StoreFiles, records: list[Record], unit_begin: int, births: dict[QueueKey, int], *, rewind: bool
) -> None:
    """Add entries and keys. `births`: the last start of each queue; earlier messages belong to a deleted topic."""
    store.heartbeat()
    by_queue: dict[QueueKey, list[Record]] = {}
    for record in records:
        if _gets_unit(record) and record.physical_offset >= max(unit_begin, births.get(_key(record), 0)):
            by_queue.setdefault(_key(record), []).append(record)
    for key, of_queue in by_queue.items():
        if rewind:
            first = of_queue[0].physical_offset
            rewind_queues(store, (key,), first)
        _put_missing(store, key, of_queue)
    _index(store, records)


def _put_missing(store: StoreFiles, key: QueueKey, records: list[Record]) -> None:
    """Add the missing entries of those records.

    Skips records before the queue's last one, of a topic that was deleted and created again, and records whose queue
    offset is taken (ConsumeQueue#putMessagePositionInfo).
    """
    last_place, missing = store.queues.last_place(key), list[Record]()
    expected = next_offset = store.queues.next_offset(key)
    has_begun = bool(next_offset) or store.queues.has_files(key)
    for record in records:
        if record.physical_offset <= last_place or record.queue_offset < expected:
            continue
        if record.queue_offset > expected and has_begun:
            segment = store.log.segments.holding(record.physical_offset)
            raise DamageError(
                f"queue {key} ends at queue offset {expected}, and the next message in the log has "
                f"{record.queue_offset}",
                segment.path if segment else store.root,
                record.physical_offset - (segment.begin if segment else 0),
                expected,
                record.queue_offset,
            )
        has_begun = True
        missing.append(record)
        expected = record.queue_offset + message_count(record)
    if not missing:
        return
    if missing[0].queue_offset > next_offset:
        store.queues.begin_at(key, missing[0].queue_offset)
    counts = np.array([message_count(record) for record in missing], np.int64)
    store.queues.put(
        key,
        NewEntries(
            np.array([record.physical_offset for record in missing], np.int64),
            np.array([record.total_size for record in missing], np.int64),
            np.array([tags_code_of(record, store.levels) for record in missing], np.int64),
            np.array([record.queue_offset for record in missing], np.int64),
            np.array([record.store_timestamp for record in missing], np.int64),
            None if (counts == 1).all() else counts,
        ),
    )


def _index(store: StoreFiles, records: list[Record]) -> None:
    """Add the keys of records to the index, which skips keys that it has (IndexService#buildIndex)."""
    hashes, places, times = [], [], []
    for record in records:
        if record.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
            continue
        topic, properties = record.topic.decode("utf-8", "replace"), parse(record.properties)
        keys = [properties[UNIQ_KEY]] if UNIQ_KEY in properties else []
        keys += [key for key in properties.get(KEYS, "").split(" ") if key]
        hashes += [index_key_hash(f"{topic}#{key}") for key in keys]
        places += [record.physical_offset] * len(keys)
        times += [record.store_timestamp] * len(keys)
    store.index.put_many(
        np.array(hashes, np.int32), np.array(places, np.int64), np.array(times, np.int64), skip_known=True
    )
