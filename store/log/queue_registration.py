"""How writers keep the registry of queues true, and refuse to begin a lost queue again.

A writer that is about to make a queue's first file asks the registry, and searches the part of the log that the
registry does not cover.
"""

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.queue_registry import RegisteredQueues, RegistryLine
from rmq_spark.store.format.queue_unit import QUEUE_UNIT
from rmq_spark.store.format.record import MAGIC_V1, MAGIC_V2, RECORD_HEAD, Record
from rmq_spark.store.format.record_columns import RecordColumns
from rmq_spark.store.log.log_blocks import gets_unit, log_blocks
from rmq_spark.store.log.lost_queues import has_files
from rmq_spark.store.log.queue_registry import found_queue, lost_end, lost_queue
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")
_WINDOW_BYTES = 1 << 20  # looked through at once for the next record behind damage
_FIELDS: Any = RECORD_HEAD.fields
_MAGIC_AT: int = _FIELDS["magic"][1]
_MAGICS = tuple(magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2))


def refuse_lost_queue(store: StoreFiles, key: QueueKey, end: int) -> None:
    """Raise DamageError if the store has had messages, before physical offset `end`, of a queue that has no files.

    Where a broker or an older release has written, its part of the log is searched once for all queues.
    """
    if not store.topics.may_exist(key.topic):
        return  # it was deleted: a broker begins it again at 0, too
    held = follow_topics(store, end)
    if key not in held.queues and key not in held.found:
        _search_once(store, held, end, key.topic)
    if held.queues.get(key, end) < end:
        raise lost_queue(store.root, key, held.queues[key], store.log.segments.begin)
    if held.found.get(key, end) < end:
        raise found_queue(store.root, key)


def refuse_lost_end(store: StoreFiles, queue: ConsumeQueue, newest: int) -> None:
    """Raise DamageError if the queue has had a newer file than the newest one, which begins with unit `newest`."""
    roll = follow_topics(store, store.note.end).rolls.get(queue.key, (0, 0))
    if newest < roll[0]:
        raise lost_end(store.root, queue, roll, store.log.segments.begin)


def _search_once(store: StoreFiles, held: RegisteredQueues, end: int, topic: str) -> None:
    """Search the unsearched records for queues without files, where the topic may have some of them."""
    begin = max(held.unsearched[0], store.log.segments.begin, held.topics.get(topic, 0))
    if begin < min(held.unsearched[1], end):
        store.registry.add_search(_search(store, held, end))


def follow_topics(store: StoreFiles, end: int) -> RegisteredQueues:
    """Return the registry; where it cannot be read, or others have changed topics.json, after making it again.

    Up to physical offset `end` the log is unsearched then: they may have deleted topics and created them again. That
    topics.json is missing tells of no deletion: then the registry stays.
    """
    held, configs = store.registry.read(), store.topics.found()
    if held is None or (not held.knows(configs.text) and not configs.is_lost):
        register_queues(store, end)
        held = store.registry.read()
    assert held is not None, store.root
    store.registry.is_followed = True
    return held


def register_topics(store: StoreFiles, topics: Iterable[str], text: bytes) -> None:
    """Register topics that are about to be made, and the text of topics.json that will name them.

    They have no queue yet, and no record before the log's end is of this life of theirs. Raises DamageError where
    topics.json is missing, or older than the registry, and one of them has had messages: nobody deleted it.
    """
    end = store.note.end
    held, topics, configs = follow_topics(store, end), list(topics), store.topics.found()
    if configs.is_lost:
        for topic in topics:
            _search_once(store, held, end, topic)
    # A topic that a broker deleted has none in the registry. What a search finds may be its records.
    known, made = {**(held.found if configs.is_lost else {}), **held.queues}, {*topics}
    lost = sorted(key for key, place in known.items() if key.topic in made and place < end)
    if lost:
        raise lost_queue(store.root, lost[0], known[lost[0]], store.log.segments.begin, is_named=False)
    crcs = zlib.crc32(configs.text), zlib.crc32(text)
    store.registry.add_topics(dict.fromkeys(topics, end), crcs)


def register_queues(store: StoreFiles, end: int) -> None:
    """Write the registry of a store from its folders: up to physical offset `end` the log is unsearched."""
    held = store.registry.read()
    present = _present(store)
    places = {key: _first_place(queue) for key, queue in present.items()}
    _replace(store, held.topics if held else {}, places, _range(store.log.segments.begin, end), rolls=_rolls(present))


def is_registry_ahead(store: StoreFiles, end: int) -> bool:
    """Say whether the registry, which is synced at once, may know of more than a log that ends at `end`."""
    held = store.registry.read()
    return held is None or (
        any(place >= end for place in held.queues.values())
        or any(place > end for place in held.topics.values())
        or any(unit and place >= end for unit, place in held.rolls.values())
    )


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
    new = {key: queue for key, queue in present.items() if key not in queues and not store.topics.is_deleted(key.topic)}
    queues.update({key: _first_place(queue) for key, queue in new.items()})
    topics = {topic: min(end, trusted_end) for topic, end in held.topics.items()}
    kept = {key: roll for key, roll in held.rolls.items() if key in queues and roll[0] and roll[1] < trusted_end}
    rolls = _rolls({key: queue for key, queue in present.items() if key in queues}, kept)
    store.registry.replace(RegistryLine(topics, queues, held.unsearched, held.found, held.configs, rolls))


def register_after_others(
    store: StoreFiles, among: Iterable[ConsumeQueue], *, same_until: int | None, searched_from: int
) -> None:
    """Write the registry from the folders after a broker has written.

    Up to the physical offset `same_until` the log is as our writers left it, None if that is unknown; from
    `searched_from` on every message has its unit or gets it.
    """
    held, present = store.registry.read(), _present(store, among)
    begin, found = store.log.segments.begin, {}
    if held is not None and same_until is not None and held.queues.keys() <= present.keys():
        begin = held.unsearched[0] if held.unsearched[0] < held.unsearched[1] else same_until
        found = held.found
    known = held.queues if held is not None else {}
    # Not -1 for queues that are new here: a power cut may take their records, and then nothing of them is lost.
    places = {key: known[key] if key in known else _first_place(queue) for key, queue in present.items()}
    topics, rolls = held.topics if held is not None else {}, _rolls(present)
    _replace(store, topics, places, _range(begin, searched_from), found, rolls)


def _replace(
    store: StoreFiles,
    topics: Mapping[str, int],
    places: Mapping[QueueKey, int],
    unsearched: tuple[int, int],
    found: Mapping[QueueKey, int] | None = None,
    rolls: Mapping[QueueKey, tuple[int, int]] | None = None,
) -> None:
    """Write the registry anew beside topics.json as it is; topics that it does not name are forgotten.

    So are their queues: where a broker deleted a topic their files go some time later.
    """
    # The log may have been cut back since: then newer records begin before where it ended.
    named = {topic: min(end, store.note.end) for topic, end in topics.items() if store.topics.config(topic) is not None}
    configs = (zlib.crc32(store.topics.found().text),)
    queues = {key: place for key, place in places.items() if not store.topics.is_deleted(key.topic)}
    kept = {key: roll for key, roll in (rolls or {}).items() if key in queues}
    store.registry.replace(RegistryLine(named, queues, unsearched, found or {}, configs, kept))


def _present(store: StoreFiles, among: Iterable[ConsumeQueue] | None = None) -> dict[QueueKey, ConsumeQueue]:
    """Return the queues that have files, of those on disk or `among` some."""
    found = {}
    for queue in TopicTable(store.root).queues.values() if among is None else among:
        store.note_progress()
        if has_files(queue):
            found[queue.key] = queue
    return found


def _first_place(queue: ConsumeQueue) -> int:
    """Return the physical offset of the record that a queue's first unit names, -1 if its files are damaged as such.

    Raises StoreError where the kernel does not let them be listed.
    """
    if queue.run.is_damaged():
        return -1
    units = queue.read(queue.run.begin, queue.run.begin + 1)
    queue.run.close()
    return int(units.physical_offsets[0])


def _rolls(
    present: Mapping[QueueKey, ConsumeQueue], known: Mapping[QueueKey, tuple[int, int]] | None = None
) -> dict[QueueKey, tuple[int, int]]:
    """Return the first unit of each queue's newest file that is not its first, and the physical offset of its record.

    What is `known` stays where the files show nothing newer: then they are lost.
    """
    found = dict(known or {})
    for key, queue in present.items():
        if queue.run.is_damaged() or not queue.run.segments:
            continue
        unit = -(-queue.run.segments[-1].begin // queue.layout.itemsize)
        if unit > found.get(key, (0, 0))[0]:
            units = queue.read(unit, unit + 1)
            queue.run.close()
            if int(units.sizes[0]) > 0:  # a broker may have died before it wrote one
                found[key] = unit, int(units.physical_offsets[0])
    return found


def _range(begin: int, end: int) -> tuple[int, int]:
    return (begin, end) if begin < end else (0, 0)


def _search(store: StoreFiles, held: RegisteredQueues, end: int) -> dict[QueueKey, int]:
    """Return the queues of the unsearched records before `end`, and the physical offset of the first one of each.

    Records of an earlier life of a topic do not count: those before our writers made it, and those of a queue that
    began before the last old record of another queue of its topic, which has files and begins behind that record.
    """
    first: dict[QueueKey, int] = {}
    begun: dict[QueueKey, int] = {}  # where each queue began at queue offset 0, the last time
    old_until: dict[str, int] = {}  # the last record of an earlier life of each topic
    places_of = {key: _place_of_offset_0(queue) for key, queue in _present(store).items()}
    for records in sound_blocks(store, max(held.unsearched[0], store.log.segments.begin), min(held.unsearched[1], end)):
        store.note_progress()
        rows = np.flatnonzero(gets_unit(records))
        places, is_begin = records.places[rows], records.queue_offsets[rows] == 0
        numbers = np.stack([records.topic_numbers[rows], records.queue_ids[rows]])
        unique, of = np.unique(numbers, axis=1, return_inverse=True)
        of = of.reshape(-1)
        for number, (topic_number, queue_id) in enumerate(unique.T.tolist()):
            key = QueueKey(records.topics[topic_number], queue_id)
            mine = of == number
            here = places[mine]
            here = here[here >= held.topics.get(key.topic, 0)]
            if not len(here):
                continue
            first.setdefault(key, int(here[0]))
            begins = places[mine & is_begin]
            if len(begins):
                begun[key] = int(begins[-1])
            old = here[here < places_of.get(key, 0)]
            if len(old):
                old_until[key.topic] = max(old_until.get(key.topic, -1), int(old[-1]))
    return {
        key: place
        for key, place in first.items()
        if key not in places_of and begun.get(key, -1) >= old_until.get(key.topic, -1)
    }


def _place_of_offset_0(queue: ConsumeQueue) -> int:
    """Return the physical offset of a queue's first message, 0 if the files do not show it."""
    return max(_first_place(queue), 0) if not queue.run.begin and queue.layout is QUEUE_UNIT else 0


def sound_blocks(store: StoreFiles, begin: int, end: int) -> Iterator[RecordColumns]:
    """Yield the records of [begin, end) that are whole; what is damaged is passed over, with a warning.

    What was damaged long ago must not keep writers from a new queue.
    """
    for segment in store.log.segments.segments:
        place, stop = max(segment.begin, begin), min(segment.end, end)
        limit = stop
        while place < stop:
            try:
                for records in log_blocks(store, place, limit):
                    yield records
                    place = int(records.places[-1] + records.sizes[-1])
                place = limit
            except DamageError as error:
                limit = segment.begin + error.position  # first the records before it
                _LOG.warning("rmq: a search for lost queues passes over damage in the log: %s", error)
            if place >= limit and limit < stop:
                place, limit = _next_record(store, limit + 1, stop), stop


def _next_record(store: StoreFiles, begin: int, stop: int) -> int:
    """Return the first physical offset in [begin, stop) where a record names just this offset, `stop` without one."""
    place = begin
    while place < stop:
        window = store.log.bytes_at(place, min(_WINDOW_BYTES, stop - place))
        found = [place + at - _MAGIC_AT for magic in _MAGICS for at in _positions(window, magic) if at >= _MAGIC_AT]
        for one in sorted(found):
            if isinstance(store.log.record_at(one), Record):
                return one
        if len(window) < _WINDOW_BYTES:
            return stop
        place += len(window) - 2 * _MAGIC_AT  # a magic may lie across the edge
    return stop


def _positions(window: bytes, wanted: bytes) -> Iterator[int]:
    at = window.find(wanted)
    while at >= 0:
        yield at
        at = window.find(wanted, at + 1)
