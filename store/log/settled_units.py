"""Queues set back by recovery to where the records begin that it makes units for, and no further.

A unit of a settled message may be damaged: then it names a place where its record is not, or none. What it should name
is in the log, so recovery looks there before it takes a unit for one that outlived its record.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from rmq_spark.store.format.record import Record
from rmq_spark.store.log.log_blocks import gets_unit
from rmq_spark.store.log.queue_registration import sound_blocks
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")


def rewind_queues(store: StoreFiles, keys: Iterable[QueueKey], physical_offset: int) -> None:
    """Have queues go on behind their last unit of a record before `physical_offset`.

    Those units are complete, but may be damaged, the last ones, too. Behind them anything may stand. It is written
    over, with mostly the same bytes, so that a reader beside loses nothing; `clear_behind` takes away the rest.
    """
    begins = dict[QueueKey, int]()
    for key in keys:
        begin = store.queues.rewind(
            key,
            physical_offset,
            partial(is_of, store, key),
            store.log.segments.begin,
        )
        if begin is not None:
            begins[key] = begin
    if begins:
        _pass_damaged(store, begins, physical_offset)


def is_of(store: StoreFiles, key: QueueKey, queue_offset: int, physical_offset: int) -> bool:
    """Say whether the record at a physical offset is the queue's one with that queue offset."""
    record = store.log.record_at(physical_offset)
    return isinstance(record, Record) and (record.topic, record.queue_id, record.queue_offset) == (
        key.topic.encode(),
        key.queue_id,
        queue_offset,
    )


def _pass_damaged(store: StoreFiles, begins: Mapping[QueueKey, int], end: int) -> None:
    """Have queues go on behind the units of their records before physical offset `end`, damaged as they may be.

    `begins` has where the last record with a sound unit begins, -1 for a queue without one.
    """
    registered = store.registry.read()
    places = registered.queues if registered is not None else {}
    firsts = {key: begin if begin >= 0 else max(places.get(key, end), 0) for key, begin in begins.items()}
    last = dict[QueueKey, tuple[int, int, int]]()  # how many, the queue offset behind them, the place of the last
    for records in sound_blocks(store, min(firsts.values()), end):
        store.note_progress()
        rows = np.flatnonzero(gets_unit(records))
        for key, first in firsts.items():
            if key.topic not in records.topics:
                continue
            count, offset, _ = last.get(key, (0, store.queues.next_offset(key), 0))
            mine = rows[
                (records.topic_numbers[rows] == records.topics.index(key.topic))
                & (records.queue_ids[rows] == key.queue_id)
                & (records.queue_offsets[rows] >= offset)
                & (records.places[rows] >= first)
            ]
            if len(mine):
                behind = int(records.queue_offsets[mine[-1]] + records.message_counts[mine[-1]])
                last[key] = count + len(mine), behind, int(records.places[mine[-1]])
    for key, (count, offset, place) in last.items():
        _LOG.error(
            "rmq: %s: units of queue %s are damaged, before queue offset %d: they are left as they are, and so is the "
            "log that has their messages. Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log",
            store.root,
            key,
            offset,
        )
        store.queues.pass_over(key, count, offset, place)
