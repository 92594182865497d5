"""The queue registry of one store: reads and writes it, and finds the queues whose files are lost.

For its content see `store/format/queue_registry.py`. At the end of each write session the registry contains every queue
that our writers created. A reader compares the registry with the folders, so it can distinguish an empty queue from one
whose files are lost. Recovery does the same, and replaces the registry if a broker has written. For the checks of a
writer see `queue_registration.py`.
"""

import time
from collections.abc import Callable, Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.queue_registry import RegisteredQueues, RegistryLine, decode_registry, encode_line
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.store_state import SIDE_FOLDER, vouched_end
from rmq_spark.store.log.topics import FoundTopics, TopicTable
from rmq_spark.store.model import QueueKey

REGISTRY = "queues"
_TRIES, _WAIT_S = 3, 0.001  # a live writer may be appending a line at the moment
_REBUILD = "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log."


def registry_path(root: str) -> str:
    """Return the path of a store's queue registry."""
    return files.join(root, SIDE_FOLDER, REGISTRY)


def read_registry(root: str) -> RegisteredQueues | None:
    """Return the registry of a store. Return None if it is missing, or if a line is torn or damaged."""
    for attempt in range(_TRIES):
        data = files.read_small(registry_path(root))
        if data is None:
            return None
        found, length = decode_registry(data)
        if data and length == len(data):
            return found
        if attempt < _TRIES - 1:
            time.sleep(_WAIT_S)
    return None


def lost_queue(root: str, key: QueueKey, physical_offset: int, log_begin: int, *, is_named: bool = True) -> DamageError:
    """Return the error for a queue whose files are lost. Its first record was at `physical_offset`.

    `is_named=False` means that topics.json does not contain the topic, because topics.json is lost too, or is older
    than the queue.
    """
    return _lost(root, key, _step(root, physical_offset, log_begin), is_named=is_named)


def _step(root: str, physical_offset: int, log_begin: int) -> str:
    if physical_offset < log_begin:  # the record has expired, and later ones may have expired too
        return (
            "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the messages that the log still has. "
            "If all have expired, restore the files from a copy: they contain the next queue offset. To begin the "
            f"queue at queue offset 0 again, below the offsets of its groups, remove {registry_path(root)}."
        )
    return _REBUILD


def found_queue(root: str, key: QueueKey) -> DamageError:
    """Return the error for a queue without files, if a search of the log has found messages of the queue."""
    step = "If a broker deleted the topic and created it again, send the queue's first message through a broker."
    return _lost(root, key, f"{_REBUILD} {step}")


def lost_end(root: str, queue: ConsumeQueue, roll: tuple[int, int], log_begin: int) -> DamageError:
    """Return the error for a queue whose newest file is lost.

    `roll` is the number of that file's first entry, and the physical offset of the entry's record.
    """
    entry, physical_offset = roll
    path = files.join(queue.run.folder, filenames.segment_name(entry * queue.layout.itemsize))
    return DamageError(
        f"queue {queue.key} has had messages in its newest file, which is missing",
        path,
        0,
        "a file",
        "none",
        _step(root, physical_offset, log_begin),
    )


def _lost(root: str, key: QueueKey, next_step: str, *, is_named: bool = True) -> DamageError:
    folder = files.join(root, filenames.CONSUME_QUEUE, key.topic, str(key.queue_id))
    what = f"queue {key} has had messages, and its files are missing"
    if not is_named:
        path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
        what += f", as is {path}, or its version with the topic"
    return DamageError(what, folder, 0, "files", "none", next_step)


class QueueRegistry:
    """The registry for a writer that holds the store's lock. Its content is cached until the file changes."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._path, self._disk = registry_path(root), disk
        self._registered: RegisteredQueues | None = None
        self._length = 0
        self._stamp: tuple[int, int, int] | None = None
        self._new_queues: dict[QueueKey, int] = {}
        self._new_rolls: dict[QueueKey, tuple[int, int]] = {}
        self.was_checked = False  # has this writer checked that the file and the folder of queues exist?
        self.is_followed = False  # has this writer compared the registry with topics.json?

    def exists(self) -> bool:
        """Say whether the store has a registry."""
        return files.file_size(self._path) >= 0

    def read(self) -> RegisteredQueues | None:
        """Return the registry, including what was noted and is not written yet.

        Return None if the registry is missing or damaged.
        """
        stamp = files.stamp(self._path)
        if stamp is None or stamp != self._stamp:
            data = files.read_small(self._path)
            registered, self._length = decode_registry(data or b"")
            self._registered = registered if data and self._length == len(data) else None
            self._stamp = stamp
        if self._registered is not None:
            self._registered.queues.update(self._new_queues)
            self._registered.rolls.update(self._new_rolls)
        return self._registered

    def add_topics(self, topics: Mapping[str, int], configs: tuple[int, int]) -> None:
        """Append topics, durably, before they are created. For the arguments see `RegistryLine`.

        The registry must be readable.
        """
        self._add(RegistryLine(topics, configs=configs))

    def note_queue(self, key: QueueKey, physical_offset: int) -> None:
        """Note for the next `write` that a queue got its first file, and the physical offset of its first record."""
        self._new_queues[key] = physical_offset

    def note_roll(self, key: QueueKey, entry: int, physical_offset: int) -> None:
        """Note for the next `write` that a queue got another file.

        `entry` is the number of the file's first entry, and `physical_offset` is where the record of that entry is.
        """
        self._new_rolls[key] = entry, physical_offset

    def forget_roll(self, key: QueueKey) -> None:
        """Append, durably, that a queue need not have its newest file, because recovery is about to remove it.

        If a crash follows, the registry only has less information about the queue. If the file were removed first, a
        crash would leave a queue that readers and writers refuse.
        """
        registered = self.read()
        self._new_rolls.pop(key, None)
        if registered is not None and registered.rolls.get(key, (0, 0))[0]:
            self._add(RegistryLine(rolls={key: (0, 0)}))

    def write(self, is_deleted: Callable[[str], bool]) -> None:
        """Append what was noted, durably. Does nothing if nothing was noted.

        Queues of topics for which `is_deleted` is true are dropped, because a broker removes their files.
        """
        if not self._new_queues and not self._new_rolls:
            return
        self._new_queues = {
            key: physical_offset for key, physical_offset in self._new_queues.items() if not is_deleted(key.topic)
        }
        self._new_rolls = {key: roll for key, roll in self._new_rolls.items() if not is_deleted(key.topic)}
        if not (self._new_queues or self._new_rolls) or self.read() is None:
            return  # the registry is missing or damaged, and recovery creates it from the folders
        self._append(encode_line(RegistryLine(queues=self._new_queues, rolls=self._new_rolls)))
        self._new_queues, self._new_rolls = {}, {}

    def add_search(self, found: Mapping[QueueKey, int]) -> None:
        """Append, durably, that all unsearched records were searched, and the queues that this search has found."""
        registered = self.read()
        assert registered is not None, self._path
        new = {key: physical_offset for key, physical_offset in found.items() if key not in registered.queues}
        self._add(RegistryLine(unsearched=(0, 0), found=new))

    def replace(self, content: RegistryLine) -> None:
        """Replace the content of the registry, durably. What was noted and not written is discarded."""
        data = encode_line(content)
        self._disk.make_folder(files.parent(self._path))
        self._disk.replace(self._path, data)
        self._registered, self._length = RegisteredQueues(), len(data)
        self._registered.add(content)
        self._stamp = files.stamp(self._path)
        self._new_queues, self._new_rolls = {}, {}

    def _add(self, line: RegistryLine) -> None:
        registered = self.read()
        assert registered is not None, self._path
        self._append(encode_line(line))
        registered.add(line)

    def _append(self, line: bytes) -> None:
        with self._disk.open(self._path) as file:
            file.write(self._length, line)
            file.sync()
        self._length += len(line)
        self._stamp = files.stamp(self._path)


MAX_UNIT = 2**63 - 1  # an entry number above all others


def find_lost_queues(
    root: str,
    log: CommitLog,
    registered: RegisteredQueues | None,
    newest: Callable[[QueueKey], int],
    topics: TopicTable,
) -> dict[QueueKey, StoreError]:
    """Return the error of each registered queue whose files, or newest file, are lost or cannot be listed.

    `newest` returns what the function `newest_unit` returns for a queue, or -1 if it has no folder. `registered` must
    be read before the folders are listed, because a live writer creates a queue's file first. `topics` has the contents
    of topics.json at the time of the listing.

    The registry is valid as long as only our writers have written, and have changed topics.json. After a power cut it
    is valid for everything up to the settled watermark, the state that was last flushed and marked clean. If
    topics.json is missing, or is an older version, the registry is still valid: this does not show that a topic was
    deleted, and the registry has no queue of a topic that a broker deleted.
    """
    if registered is None:
        return {}
    missing, shorter, found = [], dict[QueueKey, int](), dict[QueueKey, StoreError]()
    for key in registered.queues:
        try:
            entry = newest(key)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            found[key] = error
            continue
        if entry < 0:
            missing.append(key)
        elif entry < registered.rolls.get(key, (0, 0))[0]:
            shorter[key] = entry
    configs = topics.found if missing or shorter else FoundTopics()
    if missing and not counted_queues(registered, configs):
        registered = read_registry(root) or registered  # one of our writers may have created topics meanwhile
    counted, end = counted_queues(registered, configs), vouched_end(root, log) if missing or shorter else None
    for key in missing:
        if end is not None and counted.get(key, end) < end:
            is_named = not configs.is_lost and key.topic in configs.file.topics
            found[key] = lost_queue(root, key, counted[key], log.segments.begin, is_named=is_named)
    return found | (_lost_ends(root, log, shorter, end, topics) if end is not None and shorter else {})


class QueueDoubt:
    """Answers whether a queue without files may be lost instead of empty, if the registry cannot show it.

    The registry is incomplete if a broker has written or has changed topics.json. Make a new object for each listing of
    the folders.
    """

    def __init__(self, root: str, log: CommitLog, registered: RegisteredQueues | None, configs: FoundTopics) -> None:
        self._begin = log.segments.begin
        is_exact = bool(registered and (configs.is_lost or registered.knows(configs.text)))
        self._registered = registered if is_exact and vouched_end(root, log) is not None else None
        self._has_messages = isinstance(log.record_at(self._begin), Record)

    def is_about(self, key: QueueKey) -> bool:
        """Say whether the queue, which has no files, may have had messages."""
        registered = self._registered
        if registered is None:
            return self._has_messages
        begin = max(registered.unsearched[0], registered.topics.get(key.topic, 0), self._begin)
        return key in registered.found or begin < registered.unsearched[1]


def _lost_ends(
    root: str, log: CommitLog, newest: Mapping[QueueKey, int], end: int, topics: TopicTable
) -> dict[QueueKey, StoreError]:
    """Return the errors of the queues that have lost their newest file, which had records before `end`.

    `newest` has for each queue the first entry number of its newest file on disk. `end` is a physical offset.
    """
    # A recovery appends to the registry before it removes files. So the registry that was read earlier may be outdated.
    registered, found = read_registry(root), dict[QueueKey, StoreError]()
    if registered is None or not counted_queues(registered, topics.found):
        return found
    for key, entry in newest.items():
        roll, queue = registered.rolls.get(key, (0, 0)), topics.find(key)
        if queue is not None and entry < roll[0] and roll[1] < end:
            found[key] = lost_end(root, queue, roll, log.segments.begin)
    return found


def counted_queues(registered: RegisteredQueues | None, configs: FoundTopics) -> Mapping[QueueKey, int]:
    """Return the physical offset of each registered queue's first record.

    Return {} if the registry does not match topics.json, unless topics.json is lost.
    """
    if registered is None or not (configs.is_lost or registered.knows(configs.text)):
        return {}
    return registered.queues


def has_files(queue: ConsumeQueue) -> bool:
    """Say whether a queue has a file. True also if its files are damaged.

    Raises StoreError if the kernel cannot list them.
    """
    return queue.run.is_damaged() or bool(queue.run.segments)


def newest_unit(queue: ConsumeQueue) -> int:
    """Return the first entry number of a queue's newest file.

    Return -1 if the queue has no files, and MAX_UNIT if its folder is damaged. Raises StoreError if the kernel cannot
    list the files.
    """
    if queue.run.is_damaged():
        return MAX_UNIT
    return -(-queue.run.segments[-1].begin // queue.layout.itemsize) if queue.run.segments else -1


def refuse_lost_folder(root: str, log: CommitLog) -> None:
    """Raise DamageError if the log has messages and the folder of all queues is missing.

    Every broker creates this folder.
    """
    if files.is_folder(files.join(root, filenames.CONSUME_QUEUE)):
        return
    record = log.record_at(log.segments.begin)
    # If all topics have batch queues, the folder may be missing, because these queues are in another folder.
    of_batches = {name.encode() for name, _ in files.list_folder(files.join(root, filenames.BATCH_CONSUME_QUEUE))}
    if isinstance(record, Record) and record.topic not in of_batches:
        raise DamageError(
            "the log has messages, and the folder of the consume queues is missing",
            files.join(root, filenames.CONSUME_QUEUE),
            0,
            "a folder",
            "none",
            "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queues from the log.",
        )
