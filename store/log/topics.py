"""Which topics and queues a store has: what topics.json or a folder of queues names.

Empty queues that only topics.json knows count too. A folder whose name is no queue id is passed over, as
ConsumeQueueStore#load does (5.3).
"""

import difflib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError, OptionError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import TopicConfig, TopicsFile, decode_topics_file
from rmq_spark.store.log.queues import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.units import QueueKey

_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled each time: a broker overwrites the file in place within milliseconds
_NEXT_STEP = "Restore the file from a copy."
MAX_QUEUES = 1 << 16  # of one topic: a damaged digit must not become billions of queues


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FoundTopics:
    """What config/topics.json says, and the text that says it: b"" without one, and that of `.bak` if `is_backup`."""

    file: TopicsFile = field(default_factory=TopicsFile)
    text: bytes = b""
    is_backup: bool = False

    @property
    def is_lost(self) -> bool:
        """Say whether topics.json itself is missing or cannot be read: then it says of no topic that it was deleted."""
        return self.is_backup or not self.text


# What objects of this process have decoded and still use, by path: a file of 100,000 topics takes a second.
_decoded: "weakref.WeakValueDictionary[str, FoundTopics]" = weakref.WeakValueDictionary()


def _decode(path: str, text: bytes, *, is_backup: bool = False) -> FoundTopics:
    """Return the topics of a text, decoded only if it is not the one that was last decoded for this path."""
    found = _decoded.get(path)
    if found is None or found.text != text:
        found = FoundTopics(decode_topics_file(text), text, is_backup)
        _decoded[path] = found
    return found


def read_topics(root: str, sleep: Callable[[float], None] = time.sleep) -> dict[str, TopicConfig]:
    """Return the topics of config/topics.json by name, {} without one. Raises what `find_topics` raises."""
    return dict(find_topics(root, sleep).file.topics)


def find_topics(root: str, sleep: Callable[[float], None] = time.sleep) -> FoundTopics:
    """Return what config/topics.json says, or, where it is missing, empty or half of one, its `.bak`.

    A broker of 5.x overwrites the file in place, one of 4.9 removes it before it renames the new one: half of it is
    read again a few times before `.bak` is taken (ConfigManager#load, MixAll#string2File). Raises DamageError when
    there is something and neither can be read.
    """
    path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
    problem = None
    for attempt in range(_TRIES):
        text = files.read_small(path)
        if not text:
            break
        try:
            return _decode(path, text)
        except ValueError as error:
            problem = error
            sleep(_WAIT_SECONDS * 2**attempt)
    text = files.read_small(path + filenames.BACKUP_SUFFIX)
    if not text:
        if problem is None:
            return FoundTopics()
        what = "not the JSON of topics, and there is no .bak beside it"
        raise DamageError(what, path, 0, "JSON", str(problem), _NEXT_STEP)
    try:
        return _decode(path + filenames.BACKUP_SUFFIX, text, is_backup=True)
    except ValueError as error:
        path += filenames.BACKUP_SUFFIX
        raise DamageError("not the JSON of topics", path, 0, "JSON", str(error), _NEXT_STEP) from error


_TREES = ((filenames.CONSUME_QUEUE, ConsumeQueue), (filenames.BATCH_CONSUME_QUEUE, BatchConsumeQueue))


class TopicTable:
    """Topics and queues as of the last `look`, which the first question for all of them makes by itself.

    One thread at a time. Who only reads a queue that it knows (`find`) pays for no other.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._looked = False
        self._configs_stamp: tuple[int, int] | None = None  # size and time (ms) of the file that was read
        self._found = FoundTopics()
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self._ids: dict[str, list[int]] = {}  # of the queues that have a folder, by topic

    @property
    def queues(self) -> dict[QueueKey, ConsumeQueue]:
        """The queues that have a folder."""
        self._look_once()
        return self._queues

    @property
    def configs(self) -> Mapping[str, TopicConfig]:
        """What topics.json says, by topic."""
        self._look_once()
        return self._found.file.topics

    @property
    def found(self) -> FoundTopics:
        """What topics.json says as of the last look, and its text."""
        self._look_once()
        return self._found

    def _look_once(self) -> None:
        if not self._looked:
            self.look()

    def find(self, key: QueueKey) -> ConsumeQueue | None:
        """Return the queue's files, None for one without a folder."""
        if key not in self._queues and not self._looked:
            for tree, kind in _TREES:
                folder = files.join(self._root, filenames.queue_folder(key.topic, key.queue_id, tree))
                if files.is_folder(folder):
                    self._queues[key] = kind(key, folder)
        return self._queues.get(key)

    def has_folder(self, key: QueueKey) -> bool:
        """Say whether the queue has a folder on disk by now. Topic and id may be anything that a record says."""
        if key.queue_id < 0 or key.topic.startswith(filenames.LIGHT_QUEUE_PREFIX):
            return False
        try:
            folders = [filenames.queue_folder(key.topic, key.queue_id, tree) for tree, _ in _TREES]
        except OptionError:
            return False
        return any(files.is_folder(files.join(self._root, folder)) for folder in folders)

    def opened(self) -> list[ConsumeQueue]:
        """Return the queues that may have a file open."""
        return list(self._queues.values())

    def look(self) -> None:
        """Read topics.json and list the folders again; queues that are still there keep their object."""
        self.look_at_configs()
        found: dict[QueueKey, ConsumeQueue] = {}
        for tree, kind in _TREES:
            for topic, is_folder in files.list_folder(files.join(self._root, tree)):
                if is_folder and not topic.startswith(filenames.LIGHT_QUEUE_PREFIX):
                    self._look_at_topic(tree, topic, kind, found)
        self._queues, self._ids, self._looked = found, {}, True
        for key in found:
            self._ids.setdefault(key.topic, []).append(key.queue_id)

    def look_at_configs(self) -> None:
        """Read topics.json again if it has changed."""
        path = files.join(self._root, filenames.CONFIG, filenames.TOPICS_JSON)
        stamp = files.file_size(path), files.modified_ms(path)
        if stamp != self._configs_stamp:
            self._found = find_topics(self._root)
            self._configs_stamp = stamp  # of before it was read: what changed meanwhile is read once more

    def _look_at_topic(
        self, tree: str, topic: str, kind: type[ConsumeQueue], found: dict[QueueKey, ConsumeQueue]
    ) -> None:
        for name, is_folder in files.list_folder(files.join(self._root, tree, topic)):
            if not is_folder or not (name.isascii() and name.isdigit()):
                continue
            key = QueueKey(topic, int(name))
            if key in found:
                raise StorePathError(
                    f"queue {key} lies in {filenames.CONSUME_QUEUE}/ and in {filenames.BATCH_CONSUME_QUEUE}/: a broker "
                    "refuses to load that. Move the one that is not of the topic's queue.type away."
                )
            known = self._queues.get(key)
            if known is None:
                folder = files.join(self._root, tree, topic, name)
                found[key] = kind(key, folder)
            else:
                known.run.look()
                found[key] = known

    def topics(self) -> list[str]:
        """Return every topic's name, sorted."""
        self._look_once()
        names = {*self._ids, *self._found.file.topics}
        return sorted(name for name in names if not name.startswith(filenames.LIGHT_QUEUE_PREFIX))

    def has(self, key: QueueKey) -> bool:
        """Say whether topics.json or a folder names the queue."""
        return key in self.queues or 0 <= key.queue_id < self._count(key.topic)

    def may_exist(self, topic: str) -> bool:
        """Say whether topics.json, if there is one, still names the topic: a deleted one is not in it."""
        return not self.configs or topic in self.configs

    def _count(self, topic: str) -> int:
        """Return how many queues topics.json gives a topic. Raises DamageError for a count that no broker has."""
        config = self.configs.get(topic)
        count = max(config.read_queue_count, config.write_queue_count) if config else 0
        if count > MAX_QUEUES:
            path = files.join(self._root, filenames.CONFIG, filenames.TOPICS_JSON)
            what = f"the number of queues of topic {topic}"
            raise DamageError(what, path, 0, f"at most {MAX_QUEUES}", count, _NEXT_STEP)
        return count

    def queues_of(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues by id, those without a message included; [] for a topic that is not there."""
        self._look_once()
        queue_ids = {*self._ids.get(topic, ()), *range(self._count(topic))}
        return [QueueKey(topic, queue_id) for queue_id in sorted(queue_ids)]


def describe_missing_topic(topic: str, known: Iterable[str], path: str) -> str:
    """Return the text of an error for a topic that the store at `path` does not have: with others that it has."""
    names = sorted(known, key=filenames.is_system_topic)  # the user's own first
    near = difflib.get_close_matches(topic, names, 3)
    shown = names[:12]
    there = f"Topics there: {', '.join(shown)}{' …' if len(names) > len(shown) else ''}." if shown else "It has none."
    if near:
        there = f"Did you mean {' or '.join(near)}? {there}"
    return f'no topic "{topic}" in the store at "{path}". {there}'
