"""The registry of queues of one store, read and written: see `store/format/queue_registry.py` for its content.

At the end of each section the registry has every queue that our writers have made. Recovery compares it with the
folders, and replaces it where a broker has written since.
"""

from collections.abc import Iterable, Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.queue_registry import RegisteredQueues, decode_registry, encode_line
from rmq_spark.store.log.watermark_file import SIDE_FOLDER
from rmq_spark.store.units import QueueKey

REGISTRY = "queues"
_NEXT_STEP = "Run rmq_spark.repair: it rebuilds the queue from the log."


def registry_path(root: str) -> str:
    """Return the path of a store's registry."""
    return files.join(root, SIDE_FOLDER, REGISTRY)


def read_registry(root: str) -> RegisteredQueues | None:
    """Return the registry of a store, None without one."""
    data = files.read_small(registry_path(root))
    return None if data is None else decode_registry(data)[0]


def lost_queue(root: str, key: QueueKey) -> DamageError:
    """Return the error for a queue whose files are gone although the store has had messages of it."""
    folder = files.join(root, filenames.CONSUME_QUEUE, key.topic, str(key.queue_id))
    return DamageError(
        f"queue {key} has had messages, and its files are missing", folder, 0, "files", "none", _NEXT_STEP
    )


class QueueRegistry:
    """The registry for a writer, under the store's lock. What was read is kept while the file stays the same."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._path, self._disk = registry_path(root), disk
        self._held: RegisteredQueues | None = None
        self._length = 0
        self._stamp: tuple[int, int, int] | None = None
        self._exists = False
        self._new_topics: set[str] = set()
        self._new_queues: dict[QueueKey, int] = {}

    def exists(self) -> bool:
        """Say whether the store has a registry; once it has, the disk is not asked again."""
        self._exists = self._exists or files.file_size(self._path) >= 0
        return self._exists

    def read(self) -> RegisteredQueues | None:
        """Return the registry with what was noted since, None without a file or with a damaged one."""
        stamp = files.stamp(self._path)
        if stamp is None or stamp != self._stamp:
            data = files.read_small(self._path)
            held, self._length = decode_registry(data or b"")
            self._held = held if data and self._length == len(data) else None
            self._stamp = stamp
        if self._held is not None:
            self._held.add(self._new_topics, self._new_queues)
        return self._held

    def note_topics(self, topics: Iterable[str]) -> None:
        """Note topics that were made, for the next `write`."""
        self._new_topics.update(topics)

    @property
    def noted_topics(self) -> frozenset[str]:
        """Topics that were made and are not in the file yet."""
        return frozenset(self._new_topics)

    def note_queue(self, key: QueueKey, physical_offset: int) -> None:
        """Note a queue that got its first file, for the next `write`, and where its first record is."""
        self._new_queues[key] = physical_offset

    def write(self) -> None:
        """Append what was noted, durably. Without news nothing is written."""
        if not self._new_topics and not self._new_queues:
            return
        if self.read() is None:
            return  # recovery makes the file first, from the folders
        self._append(encode_line(self._new_topics, self._new_queues))
        self._new_topics, self._new_queues = set(), {}

    def note_search(self, found: Mapping[QueueKey, int]) -> None:
        """Append the queues that a search of all unsearched records has found, durably."""
        held = self.read()
        assert held is not None, self._path
        new = {key: place for key, place in found.items() if key not in held.queues and key.topic not in held.topics}
        self._append(encode_line((), new, (0, 0)))
        held.add((), new, (0, 0))

    def replace(self, queues: Mapping[QueueKey, int], unsearched: tuple[int, int], topics: Iterable[str] = ()) -> None:
        """Give the registry just these queues, durably. What was noted and not written is forgotten."""
        made = set(topics)
        line = encode_line(made, queues, unsearched)
        self._disk.make_folder(files.parent(self._path))
        self._disk.replace(self._path, line)
        self._held, self._length = RegisteredQueues(dict(queues), made, unsearched), len(line)
        self._stamp, self._exists = files.stamp(self._path), True
        self._new_topics, self._new_queues = set(), {}

    def _append(self, line: bytes) -> None:
        with self._disk.open(self._path) as file:
            # Over the rest of a line that a crash has torn; a remainder of it ends the file as well.
            file.write(self._length, line)
            file.sync()
        self._length += len(line)
        self._stamp = files.stamp(self._path)
