"""The registry of queues of one store, read and written: see `store/format/queue_registry.py` for its content.

At the end of each section the registry has every queue that our writers have made. Recovery compares it with the
folders, and replaces it where a broker has written since.
"""

import time
from collections.abc import Callable, Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.queue_registry import RegisteredQueues, RegistryLine, decode_registry, encode_line
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.watermark_file import SIDE_FOLDER
from rmq_spark.store.units import QueueKey

REGISTRY = "queues"
_TRIES, _WAIT_S = 3, 0.001  # for a line that a live writer is appending
_REBUILD = "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log."


def registry_path(root: str) -> str:
    """Return the path of a store's registry."""
    return files.join(root, SIDE_FOLDER, REGISTRY)


def read_registry(root: str) -> RegisteredQueues | None:
    """Return the registry of a store, None without one and for one with a torn or damaged line."""
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


def lost_queue(root: str, key: QueueKey, place: int, log_begin: int, *, is_named: bool = True) -> DamageError:
    """Return the error for a queue whose files are gone, and whose first record was at physical offset `place`.

    Where topics.json does not name the topic it is gone, too, or older than the queue.
    """
    return _lost(root, key, _step(root, place, log_begin), is_named=is_named)


def _step(root: str, place: int, log_begin: int) -> str:
    if place < log_begin:  # it has expired, and later ones may have
        return (
            "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the messages that the log still has. "
            "Where all have expired, restore the files from a copy: they show which queue offset comes next. To begin "
            f"the queue at queue offset 0 again, below the offsets of its groups, remove {registry_path(root)}."
        )
    return _REBUILD


def found_queue(root: str, key: QueueKey) -> DamageError:
    """Return the error for a queue without files of which a search of a broker's records has found messages."""
    step = "If a broker deleted the topic and created it again, send the queue's first message through a broker."
    return _lost(root, key, f"{_REBUILD} {step}")


def lost_end(root: str, queue: ConsumeQueue, roll: tuple[int, int], log_begin: int) -> DamageError:
    """Return the error for a queue whose newest file, which began with that unit, for that place, is gone."""
    unit, place = roll
    path = files.join(queue.run.folder, filenames.segment_name(unit * queue.layout.itemsize))
    return DamageError(
        f"queue {queue.key} has had messages in a newer file than its newest one",
        path,
        0,
        "a file",
        "none",
        _step(root, place, log_begin),
    )


def _lost(root: str, key: QueueKey, next_step: str, *, is_named: bool = True) -> DamageError:
    folder = files.join(root, filenames.CONSUME_QUEUE, key.topic, str(key.queue_id))
    what = f"queue {key} has had messages, and its files are missing"
    if not is_named:
        path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
        what += f", as is {path}, or the version of it that named the topic"
    return DamageError(what, folder, 0, "files", "none", next_step)


class QueueRegistry:
    """The registry for a writer, under the store's lock. What was read is kept while the file stays the same."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._path, self._disk = registry_path(root), disk
        self._held: RegisteredQueues | None = None
        self._length = 0
        self._stamp: tuple[int, int, int] | None = None
        self._new_queues: dict[QueueKey, int] = {}
        self._new_rolls: dict[QueueKey, tuple[int, int]] = {}
        self.was_sought = False  # has this writer asked whether the file and the folder of queues are there?
        self.is_followed = False  # was it compared with topics.json by this writer?

    def exists(self) -> bool:
        """Say whether the store has a registry."""
        return files.file_size(self._path) >= 0

    def read(self) -> RegisteredQueues | None:
        """Return the registry with what was noted since, None without a file or with a damaged one."""
        stamp = files.stamp(self._path)
        if stamp is None or stamp != self._stamp:
            data = files.read_small(self._path)
            held, self._length = decode_registry(data or b"")
            self._held = held if data and self._length == len(data) else None
            self._stamp = stamp
        if self._held is not None:
            self._held.queues.update(self._new_queues)
            self._held.rolls.update(self._new_rolls)
        return self._held

    def add_topics(self, topics: Mapping[str, int], configs: tuple[int, int]) -> None:
        """Append topics that are about to be made, durably: see `RegistryLine`. The registry can be read."""
        self._add(RegistryLine(topics, configs=configs))

    def note_queue(self, key: QueueKey, physical_offset: int) -> None:
        """Note a queue that got its first file, for the next `write`, and where its first record is."""
        self._new_queues[key] = physical_offset

    def note_roll(self, key: QueueKey, unit: int, physical_offset: int) -> None:
        """Note a queue that got another file, for the next `write`: its first unit, and where that one's record is."""
        self._new_rolls[key] = unit, physical_offset

    def forget_roll(self, key: QueueKey) -> None:
        """Append, durably, that a queue's newest file does not count: recovery is about to remove files of it.

        A crash behind this leaves a queue of which less is known. In the other order it would leave one that everybody
        refuses.
        """
        held = self.read()
        self._new_rolls.pop(key, None)
        if held is not None and held.rolls.get(key, (0, 0))[0]:
            self._add(RegistryLine(rolls={key: (0, 0)}))

    def write(self, is_deleted: Callable[[str], bool]) -> None:
        """Append what was noted, durably. Without news nothing is written.

        But for queues of topics of which `is_deleted` says that they were: their files go again.
        """
        if not self._new_queues and not self._new_rolls:
            return
        self._new_queues = {key: place for key, place in self._new_queues.items() if not is_deleted(key.topic)}
        self._new_rolls = {key: roll for key, roll in self._new_rolls.items() if not is_deleted(key.topic)}
        if not (self._new_queues or self._new_rolls) or self.read() is None:
            return  # recovery makes the file first, from the folders
        self._append(encode_line(RegistryLine(queues=self._new_queues, rolls=self._new_rolls)))
        self._new_queues, self._new_rolls = {}, {}

    def add_search(self, found: Mapping[QueueKey, int]) -> None:
        """Append the queues that a search of all unsearched records has found, durably."""
        held = self.read()
        assert held is not None, self._path
        new = {key: place for key, place in found.items() if key not in held.queues}
        self._add(RegistryLine(unsearched=(0, 0), found=new))

    def replace(self, content: RegistryLine) -> None:
        """Give the registry just this content, durably. What was noted and not written is forgotten."""
        data = encode_line(content)
        self._disk.make_folder(files.parent(self._path))
        self._disk.replace(self._path, data)
        self._held, self._length = RegisteredQueues(), len(data)
        self._held.add(content)
        self._stamp = files.stamp(self._path)
        self._new_queues, self._new_rolls = {}, {}

    def _add(self, line: RegistryLine) -> None:
        held = self.read()
        assert held is not None, self._path
        self._append(encode_line(line))
        held.add(line)

    def _append(self, line: bytes) -> None:
        with self._disk.open(self._path) as file:
            file.write(self._length, line)
            file.sync()
        self._length += len(line)
        self._stamp = files.stamp(self._path)
