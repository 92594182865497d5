"""Queue registration: writers keep the queue registry complete, and refuse to restart a queue whose files are lost.

Before a writer creates a queue's first file, it checks the registry. It also searches the part of the log that the
registry does not cover.
"""

import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT
from rmq_spark.store.format.queue_registry import RegisteredQueues, RegistryLine
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.log_blocks import needs_entry, sound_blocks
from rmq_spark.store.log.queue_registry import found_queue, has_files, lost_end, lost_queue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey


def refuse_lost_queue(store: StoreFiles, key: QueueKey, end: int) -> None:
    """Raise DamageError if the log had messages of this queue before physical offset `end`. The queue has no files.

    If a broker or an older release has written, its part of the log is searched once, for all queues. Does nothing if
    the queue's topic was deleted.
    """
    if not store.topics.may_exist(key.topic):
        return  # the topic was deleted; a broker also restarts its queues at 0
    registered = follow_topics(store, end)
    if key not in registered.queues and key not in registered.found:
        _search_once(store, registered, end, key.topic)
    if registered.queues.get(key, end) < end:
        raise lost_queue(store.root, key, registered.queues[key], store.log.segments.begin)
    if registered.found.get(key, end) < end:
        raise found_queue(store.root, key)


def refuse_lost_end(store: StoreFiles, queue: ConsumeQueue, newest: int) -> None:
    """Raise DamageError if the queue has lost its newest file.

    `newest` is the first entry number of the newest file that exists.
    """
    roll = follow_topics(store, store.watermark.end).rolls.get(queue.key, (0, 0))
    if newest < roll[0]:
        raise lost_end(store.root, queue, roll, store.log.segments.begin)


def _search_once(store: StoreFiles, registered: RegisteredQueues, end: int, topic: str) -> None:
    """Search the unsearched part of the log for queues without files, unless it has no records of the topic."""
    begin = max(registered.unsearched[0], store.log.segments.begin, registered.topics.get(topic, 0))
    if begin < min(registered.unsearched[1], end):
        store.registry.add_search(_search(store, registered, end))


def follow_topics(store: StoreFiles, end: int) -> RegisteredQueues:
    """Return the registry. Rebuild it first if it is unreadable, or if another process has changed topics.json.

    After a rebuild the log is treated as unsearched up to physical offset `end`, because topics may have been deleted
    and created again. If topics.json is missing, the registry is not rebuilt, because this does not show that a topic
    was deleted.
    """
    registered, configs = store.registry.read(), store.topics.found()
    if registered is None or (not registered.knows(configs.text) and not configs.is_lost):
        register_queues(store, end)
        registered = store.registry.read()
    assert registered is not None, store.root
    store.registry.is_followed = True
    return registered


def register_topics(store: StoreFiles, topics: Iterable[str], text: bytes) -> None:
    """Register topics before they are created. `text` is the text of topics.json that will contain them.

    The new topics have no queue yet, and no record before the log's end belongs to them. Raises DamageError if
    topics.json is missing, or older than the registry, and one of the topics has had messages, because this topic was
    not deleted.
    """
    end = store.watermark.end
    registered, topics, configs = follow_topics(store, end), list(topics), store.topics.found()
    if configs.is_lost:
        for topic in topics:
            _search_once(store, registered, end, topic)
    # A topic that a broker deleted has no queues in the registry, but a search may find its records.
    known, made = {**(registered.found if configs.is_lost else {}), **registered.queues}, {*topics}
    lost = sorted(key for key, physical_offset in known.items() if key.topic in made and physical_offset < end)
    if lost:
        raise lost_queue(store.root, lost[0], known[lost[0]], store.log.segments.begin, is_named=False)
    crcs = zlib.crc32(configs.text), zlib.crc32(text)
    store.registry.add_topics(dict.fromkeys(topics, end), crcs)


def register_queues(store: StoreFiles, end: int) -> None:
    """Write the registry of a store from its folders.

    The log is treated as unsearched up to physical offset `end`.
    """
    registered = store.registry.read()
    present = _present(store)
    physical_offsets = {key: _first_physical_offset(queue) for key, queue in present.items()}
    _replace(
        store,
        registered.topics if registered else {},
        physical_offsets,
        _range(store.log.segments.begin, end),
        rolls=_rolls(present),
    )


def is_registry_ahead(store: StoreFiles, end: int) -> bool:
    """Say whether the registry may contain queues or topics that are newer than a log that ends at `end`.

    This is possible because the registry is synced immediately. Also True if the registry is missing or damaged.
    """
    registered = store.registry.read()
    return registered is None or (
        any(physical_offset >= end for physical_offset in registered.queues.values())
        or any(physical_offset > end for physical_offset in registered.topics.values())
        or any(entry and physical_offset >= end for entry, physical_offset in registered.rolls.values())
    )


def register_again(store: StoreFiles, trusted_end: int) -> None:
    """Update the registry from the folders, after a writer died and recovery made the entries of its records.

    A queue without files stays in the registry if it had a record before `trusted_end`, because its files are lost.
    """
    registered = store.registry.read()
    if registered is None:
        register_queues(store, trusted_end)
        return
    present = _present(store)
    queues = {
        key: physical_offset
        for key, physical_offset in registered.queues.items()
        if key in present or physical_offset < trusted_end
    }
    new = {key: queue for key, queue in present.items() if key not in queues and not store.topics.is_deleted(key.topic)}
    queues.update({key: _first_physical_offset(queue) for key, queue in new.items()})
    topics = {topic: min(end, trusted_end) for topic, end in registered.topics.items()}
    kept = {key: roll for key, roll in registered.rolls.items() if key in queues and roll[0] and roll[1] < trusted_end}
    rolls = _rolls({key: queue for key, queue in present.items() if key in queues}, kept)
    store.registry.replace(
        RegistryLine(topics, queues, registered.unsearched, registered.found, registered.configs, rolls)
    )


def register_after_others(
    store: StoreFiles, among: Iterable[ConsumeQueue], *, same_until: int | None, searched_from: int
) -> None:
    """Write the registry from the folders after a broker has written.

    `among` are all queues that may have files. Up to physical offset `same_until` the log is as our writers left it;
    None if that is unknown. From physical offset `searched_from` on, every message has its entry or will get one.
    """
    registered, present = store.registry.read(), _present(store, among)
    begin, found = store.log.segments.begin, {}
    if registered is not None and same_until is not None and registered.queues.keys() <= present.keys():
        begin = registered.unsearched[0] if registered.unsearched[0] < registered.unsearched[1] else same_until
        found = registered.found
    known = registered.queues if registered is not None else {}
    # The real offset and not -1 for queues that are new here: if a power cut removes their records, nothing of them is
    # lost.
    physical_offsets = {
        key: known[key] if key in known else _first_physical_offset(queue) for key, queue in present.items()
    }
    topics, rolls = registered.topics if registered is not None else {}, _rolls(present)
    _replace(store, topics, physical_offsets, _range(begin, searched_from), found, rolls)


def _replace(
    store: StoreFiles,
    topics: Mapping[str, int],
    physical_offsets: Mapping[QueueKey, int],
    unsearched: tuple[int, int],
    found: Mapping[QueueKey, int] | None = None,
    rolls: Mapping[QueueKey, tuple[int, int]] | None = None,
) -> None:
    """Replace the registry, so that it matches the current topics.json. Topics that are not in topics.json are dropped.

    Queues of deleted topics are dropped too, although their files may exist: a broker deletes the topic first, and
    removes the files some time later.
    """
    # The log may have been truncated since the topics were registered, so that newer records begin before its former
    # end.
    named = {
        topic: min(end, store.watermark.end) for topic, end in topics.items() if store.topics.config(topic) is not None
    }
    configs = (zlib.crc32(store.topics.found().text),)
    queues = {
        key: physical_offset
        for key, physical_offset in physical_offsets.items()
        if not store.topics.is_deleted(key.topic)
    }
    kept = {key: roll for key, roll in (rolls or {}).items() if key in queues}
    store.registry.replace(RegistryLine(named, queues, unsearched, found or {}, configs, kept))


def _present(store: StoreFiles, among: Iterable[ConsumeQueue] | None = None) -> dict[QueueKey, ConsumeQueue]:
    """Return the queues that have files, out of `among`, or out of all queues on disk if `among` is None."""
    found = {}
    for queue in TopicTable(store.root).queues.values() if among is None else among:
        store.heartbeat()
        if has_files(queue):
            found[queue.key] = queue
    return found


def _first_physical_offset(queue: ConsumeQueue) -> int:
    """Return the physical offset in a queue's first entry. Return -1 if its files are damaged.

    Raises StoreError if the kernel cannot list them.
    """
    if queue.run.is_damaged():
        return -1
    entries = queue.read(queue.run.begin, queue.run.begin + 1)
    queue.run.close()
    return int(entries.physical_offsets[0])


def _rolls(
    present: Mapping[QueueKey, ConsumeQueue], known: Mapping[QueueKey, tuple[int, int]] | None = None
) -> dict[QueueKey, tuple[int, int]]:
    """Return the first entry number of each queue's newest file, and the physical offset of that entry's record.

    A queue is left out if its newest file begins at entry 0. An element of `known` stays if the files show no newer
    one, because the newest file is then lost.
    """
    found = dict(known or {})
    for key, queue in present.items():
        if queue.run.is_damaged() or not queue.run.segments:
            continue
        entry = -(-queue.run.segments[-1].begin // queue.layout.itemsize)
        if entry > found.get(key, (0, 0))[0]:
            entries = queue.read(entry, entry + 1)
            queue.run.close()
            if int(entries.sizes[0]) > 0:  # otherwise a broker died before it wrote the entry
                found[key] = entry, int(entries.physical_offsets[0])
    return found


def _range(begin: int, end: int) -> tuple[int, int]:
    return (begin, end) if begin < end else (0, 0)


def _search(store: StoreFiles, registered: RegisteredQueues, end: int) -> dict[QueueKey, int]:
    """Return the physical offset of the first unsearched record of each queue that has no files.

    Only records before `end` are searched. A record is ignored if its topic was deleted and created again after it.
    This is known for records before our writers created the topic. It is also assumed for a queue if another queue of
    its topic has files that begin after an old record of that other queue, and the queue itself last began (at queue
    offset 0) before that old record.
    """
    first: dict[QueueKey, int] = {}
    begun: dict[QueueKey, int] = {}  # physical offset of each queue's last record with queue offset 0
    old_until: dict[str, int] = {}  # physical offset of each topic's last record from before it was deleted
    # Physical offset of each queue's first message. 0 if the queue's files do not contain it.
    first_messages = {
        key: max(_first_physical_offset(queue), 0) if not queue.run.begin and queue.layout is QUEUE_UNIT else 0
        for key, queue in _present(store).items()
    }
    for records in sound_blocks(
        store, max(registered.unsearched[0], store.log.segments.begin), min(registered.unsearched[1], end)
    ):
        store.heartbeat()
        rows = np.flatnonzero(needs_entry(records))
        physical_offsets, is_begin = records.places[rows], records.queue_offsets[rows] == 0
        numbers = np.stack([records.topic_numbers[rows], records.queue_ids[rows]])
        unique, of = np.unique(numbers, axis=1, return_inverse=True)
        of = of.reshape(-1)
        for number, (topic_number, queue_id) in enumerate(unique.T.tolist()):
            key = QueueKey(records.topics[topic_number], queue_id)
            mine = of == number
            here = physical_offsets[mine]
            here = here[here >= registered.topics.get(key.topic, 0)]
            if not len(here):
                continue
            first.setdefault(key, int(here[0]))
            begins = physical_offsets[mine & is_begin]
            if len(begins):
                begun[key] = int(begins[-1])
            old = here[here < first_messages.get(key, 0)]
            if len(old):
                old_until[key.topic] = max(old_until.get(key.topic, -1), int(old[-1]))
    return {
        key: physical_offset
        for key, physical_offset in first.items()
        if key not in first_messages and begun.get(key, -1) >= old_until.get(key.topic, -1)
    }
