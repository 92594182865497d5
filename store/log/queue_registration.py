"""How writers keep the registry of queues true, and refuse to begin a lost queue again.

A writer that is about to make a queue's first file asks the registry, and searches the part of the log that the
registry does not cover.
"""

from collections.abc import Iterable

import numpy as np

from rmq_spark.store.log.log_blocks import gets_unit, log_blocks
from rmq_spark.store.log.lost_queues import has_files
from rmq_spark.store.log.queue_registry import lost_queue
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey


def refuse_lost_queue(store: StoreFiles, key: QueueKey, end: int) -> None:
    """Raise DamageError if the store has had messages, before physical offset `end`, of a queue that has no files.

    Where a broker or an older release has written, its part of the log is searched once for all queues.
    """
    if not store.topics.may_exist(key.topic):
        return  # it was deleted: a broker begins it again at 0, too
    held = store.registry.read()
    if held is None:
        register_queues(store, end)
        held = store.registry.read()
    assert held is not None, key
    if key not in held.queues and key.topic not in held.topics:
        begin, until = max(held.unsearched[0], store.log.segments.begin), min(held.unsearched[1], end)
        if begin < until:
            store.registry.note_search(_search(store, begin, until))
    if held.queues.get(key, end) < end:
        raise lost_queue(store.root, key)


def register_queues(store: StoreFiles, end: int) -> None:
    """Write the registry of a store from its folders: up to physical offset `end` the log is unsearched."""
    unsearched = _range(store.log.segments.begin, end)
    places = {key: _first_place(queue) for key, queue in _present(store).items()}
    store.registry.replace(places, unsearched, store.registry.noted_topics)


def register_again(store: StoreFiles, trusted_end: int) -> None:
    """Compare the registry with the folders after a writer died and its records were dispatched.

    Queues without files are kept that had a record before `trusted_end`: they are lost.
    """
    held = store.registry.read()
    if held is None:
        register_queues(store, trusted_end)
        return
    present = _present(store)
    queues = {key: place for key, place in held.queues.items() if key in present or place < trusted_end}
    queues.update({key: _first_place(queue) for key, queue in present.items() if key not in queues})
    store.registry.replace(queues, held.unsearched, held.topics)


def register_after_others(
    store: StoreFiles, among: Iterable[ConsumeQueue], *, same_until: int | None, searched_from: int
) -> None:
    """Write the registry from the folders after a broker has written.

    Up to the physical offset `same_until` the log is as our writers left it, None if that is unknown; from
    `searched_from` on every message has its unit or gets it.
    """
    held, present = store.registry.read(), _present(store, among)
    begin = store.log.segments.begin
    if held is not None and same_until is not None and held.queues.keys() <= present.keys():
        begin = held.unsearched[0] if held.unsearched[0] < held.unsearched[1] else same_until
    known = held.queues if held is not None else {}
    # Not -1 for queues that are new here: a power cut may take their records, and then nothing of them is lost.
    places = {key: known[key] if key in known else _first_place(queue) for key, queue in present.items()}
    store.registry.replace(places, _range(begin, searched_from))


def _present(store: StoreFiles, among: Iterable[ConsumeQueue] | None = None) -> dict[QueueKey, ConsumeQueue]:
    """Return the queues that have files, of those on disk or `among` some."""
    found = {}
    for queue in TopicTable(store.root).queues.values() if among is None else among:
        store.note_progress()
        if has_files(queue):
            found[queue.key] = queue
    return found


def _first_place(queue: ConsumeQueue) -> int:
    """Return the physical offset of the record that a queue's first unit names, -1 if it cannot be read."""
    if queue.run.fault() is not None:
        return -1
    units = queue.read(queue.run.begin, queue.run.begin + 1)
    queue.run.close()
    return int(units.physical_offsets[0])


def _range(begin: int, end: int) -> tuple[int, int]:
    return (begin, end) if begin < end else (0, 0)


def _search(store: StoreFiles, begin: int, end: int) -> dict[QueueKey, int]:
    """Return the queues of the records of [begin, end), and the physical offset of the first one of each."""
    found: dict[QueueKey, int] = {}
    for records in log_blocks(store, begin, end):
        store.note_progress()
        rows = np.flatnonzero(gets_unit(records))
        numbers = np.stack([records.topic_numbers[rows], records.queue_ids[rows]])
        unique, first = np.unique(numbers, axis=1, return_index=True)
        for (topic, queue_id), row in zip(unique.T.tolist(), rows[first].tolist(), strict=True):
            found.setdefault(QueueKey(records.topics[topic], queue_id), int(records.places[row]))
    return found
