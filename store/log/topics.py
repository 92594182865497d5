"""Topics and queues of a store, from topics.json and from the folders of queues.

A store has every queue that topics.json names or that has a folder. So it also has empty queues without a folder. A
folder is skipped if its name is not a queue id, as in ConsumeQueueStore#load (5.3).

`TopicWriter` creates topics as a broker does. Only the holder of the store's lock may change topics.json. The previous
version of topics.json is kept as `topics.json.bak`; a broker reads it if it cannot read topics.json.
Source: TopicConfigManager, ConfigManager#persist, #load (5.3).
"""

import difflib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, OptionError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import (
    BATCH_QUEUE_TYPE,
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    QUEUE_TYPE,
    DataVersion,
    TopicConfig,
    TopicsFile,
    decode_topics_file,
    encode_topics_file,
)
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.log.consume_queue import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import (
    AUTO_CREATE_TOPIC,
    LIGHT_QUEUE_PREFIX,
    MAX_QUEUES,
    SCHEDULE_TOPIC,
    WAITING_TOPICS,
    check_topic_name,
    is_system_topic,
)

_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled after each try; a broker overwrites the file in place within milliseconds
_NEXT_STEP = "Restore the file from a copy."
_NEXT_STEP_OF_WRITER = "Restore it from a copy. Nothing was appended."


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FoundTopics:
    """The decoded contents of config/topics.json, or of its `.bak`, and the bytes of that file as `text`.

    `text` is b"" if neither file exists. `is_backup` means that `.bak` was read instead of the file.
    """

    file: TopicsFile = field(default_factory=TopicsFile)
    text: bytes = b""
    is_backup: bool = False

    @property
    def is_lost(self) -> bool:
        """Return whether topics.json is missing or unreadable.

        If it is, a topic that is missing here was not necessarily deleted.
        """
        return self.is_backup or not self.text


# Decoded files by path, as long as an object of this process uses them. Shared, because a file of 100,000 topics takes
# a second to decode.
_decoded: "weakref.WeakValueDictionary[str, FoundTopics]" = weakref.WeakValueDictionary()


def _decode(path: str, text: bytes, *, is_backup: bool = False) -> FoundTopics:
    """Return the decoded `text`, the content of the file at `path`. Reuse the last result if the text is the same."""
    found = _decoded.get(path)
    if found is None or found.text != text:
        found = FoundTopics(decode_topics_file(text), text, is_backup)
        _decoded[path] = found
    return found


def read_topics(root: str, sleep: Callable[[float], None] = time.sleep) -> dict[str, TopicConfig]:
    """Return the topics of config/topics.json by name. Return {} if the file does not exist.

    Raises DamageError in the same cases as `find_topics`.
    """
    return dict(find_topics(root, sleep).file.topics)


def find_topics(root: str, sleep: Callable[[float], None] = time.sleep) -> FoundTopics:
    """Read config/topics.json. Read its `.bak` if the file is missing, empty or incomplete.

    A file may be incomplete for a moment, because a 5.x broker overwrites it in place, and a 4.9 broker removes it
    before it renames the new one. So an incomplete file is read again a few times before `.bak` is used
    (ConfigManager#load, MixAll#string2File). Raises DamageError if at least one of the two files has contents and
    neither can be decoded.
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
        what = "not the JSON of topics, and its .bak is missing or empty"
        raise DamageError(what, path, 0, "JSON", str(problem), _NEXT_STEP)
    try:
        return _decode(path + filenames.BACKUP_SUFFIX, text, is_backup=True)
    except ValueError as error:
        path += filenames.BACKUP_SUFFIX
        raise DamageError("not the JSON of topics", path, 0, "JSON", str(error), _NEXT_STEP) from error


_TREES = ((filenames.CONSUME_QUEUE, ConsumeQueue), (filenames.BATCH_CONSUME_QUEUE, BatchConsumeQueue))


class TopicTable:
    """The topics and queues of a store as of the last `refresh`. Not thread-safe.

    The first call that needs all queues or topics calls `refresh` by itself. `find` looks up one queue without listing
    the others.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._is_listed = False
        self._configs_stamp: tuple[int, int, int] | None = None  # of the file that was read; None if it is missing
        self._has_configs = False
        self._found = FoundTopics()
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self._keys: dict[str, dict[int, QueueKey]] = {}  # the queues that have a folder, by topic and queue id

    @property
    def queues(self) -> dict[QueueKey, ConsumeQueue]:
        """The files of every queue that has a folder, by queue."""
        self._refresh_once()
        return self._queues

    @property
    def configs(self) -> Mapping[str, TopicConfig]:
        """The settings of each topic in topics.json, by topic name."""
        self._refresh_once()
        return self._found.file.topics

    @property
    def found(self) -> FoundTopics:
        """The contents and the text of topics.json, as of the last refresh."""
        self._refresh_once()
        return self._found

    def _refresh_once(self) -> None:
        if not self._is_listed:
            self.refresh()

    def find(self, key: QueueKey) -> ConsumeQueue | None:
        """Return the queue's files. Return None if the queue has no folder."""
        if key not in self._queues and not self._is_listed:
            for tree, kind in _TREES:
                folder = files.join(self._root, filenames.queue_folder(key.topic, key.queue_id, tree))
                if files.is_folder(folder):
                    self._queues[key] = kind(key, folder)
        return self._queues.get(key)

    def has_folder(self, key: QueueKey) -> bool:
        """Return whether the queue has a folder on disk now. False for a topic name or queue id that is not valid."""
        if key.queue_id < 0 or key.topic.startswith(LIGHT_QUEUE_PREFIX):
            return False
        try:
            folders = [filenames.queue_folder(key.topic, key.queue_id, tree) for tree, _ in _TREES]
        except OptionError:
            return False
        return any(files.is_folder(files.join(self._root, folder)) for folder in folders)

    def opened(self) -> list[ConsumeQueue]:
        """Return the queues that may have an open file."""
        return list(self._queues.values())

    def refresh(self) -> None:
        """Read topics.json and list the folders again. Queues that still exist keep their objects."""
        self.look_at_configs()
        found: dict[QueueKey, ConsumeQueue] = {}
        for tree, kind in _TREES:
            for topic, is_folder in files.list_folder(files.join(self._root, tree)):
                if is_folder and not topic.startswith(LIGHT_QUEUE_PREFIX):
                    self._list_queues(tree, topic, kind, found)
        self._queues, self._keys, self._is_listed = found, {}, True
        for key in found:
            self._keys.setdefault(key.topic, {})[key.queue_id] = key

    def look_at_configs(self) -> None:
        """Read topics.json again if it has changed."""
        path = files.join(self._root, filenames.CONFIG, filenames.TOPICS_JSON)
        stamp = files.stamp(path)
        if stamp != self._configs_stamp or not self._has_configs:
            self._found = find_topics(self._root)
            # Taken before the read, so the next call finds a change during the read.
            self._configs_stamp, self._has_configs = stamp, True

    def _list_queues(
        self, tree: str, topic: str, kind: type[ConsumeQueue], found: dict[QueueKey, ConsumeQueue]
    ) -> None:
        for name, is_folder in files.list_folder(files.join(self._root, tree, topic)):
            if not is_folder or not (name.isascii() and name.isdigit()):
                continue
            key = QueueKey(topic, int(name))
            if key in found:
                raise StorePathError(
                    f"cannot list queue {key}: it is in {filenames.CONSUME_QUEUE}/ and in "
                    f"{filenames.BATCH_CONSUME_QUEUE}/; expected one of them. A broker refuses to load both. Move away "
                    "the one that does not match the topic's queue.type."
                )
            known = self._queues.get(key)
            if known is None:
                found[key] = kind(key, files.join(self._root, tree, topic, name))
            else:
                known.run.refresh()
                found[key] = known

    def topics(self) -> list[str]:
        """Return the names of all topics that topics.json or a folder names, sorted."""
        self._refresh_once()
        names = {*self._keys, *self._found.file.topics}
        return sorted(name for name in names if not name.startswith(LIGHT_QUEUE_PREFIX))

    def has(self, key: QueueKey) -> bool:
        """Return whether the queue is in topics.json or has a folder."""
        return key in self.queues or 0 <= key.queue_id < self._count(key.topic)

    def may_exist(self, topic: str) -> bool:
        """Return whether topics.json has the topic, or has no topics at all.

        If it has other topics only, the topic was deleted or never created.
        """
        return not self.configs or topic in self.configs

    def _count(self, topic: str) -> int:
        """Return the number of the topic's queues in topics.json. Raises DamageError if it is above MAX_QUEUES."""
        config = self.configs.get(topic)
        count = max(config.read_queue_count, config.write_queue_count) if config else 0
        _check_count(topic, count, files.join(self._root, filenames.CONFIG, filenames.TOPICS_JSON), _NEXT_STEP)
        return count

    def queues_of(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues, sorted by queue id. Empty queues are included. Return [] for an unknown topic."""
        self._refresh_once()
        keys = self._keys.get(topic, {})
        queue_ids = {*keys, *range(self._count(topic))}
        # Python compares equal keys much faster if they are one object.
        return [keys.get(queue_id) or QueueKey(topic, queue_id) for queue_id in sorted(queue_ids)]


def describe_missing_topic(topic: str, known: Iterable[str], path: str) -> str:
    """Return an error text for a topic that does not exist in the store at `path`.

    The text lists similar names, and up to 12 of the `known` topics.
    """
    names = sorted(known, key=is_system_topic)  # the user's own topics first
    near = difflib.get_close_matches(topic, names, 3)
    shown = names[:12]
    existing = (
        f"Topics there: {', '.join(shown)}{' …' if len(names) > len(shown) else ''}." if shown else "It has none."
    )
    if near:
        existing = f"Did you mean {' or '.join(near)}? {existing}"
    return f'no topic "{topic}" in the store at "{path}". {existing}'


class TopicWriter:
    """The topics of one store, for its writer. Caches topics.json as long as the file is unchanged.

    For one thread that holds the store's lock.
    """

    def __init__(self, disk: Disk, root: str, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._disk, self._root, self._heartbeat = disk, root, heartbeat
        self._path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
        self._read_stamp: tuple[int, int] | None = None  # size (bytes) and mtime (ms) of the file that was read
        self._durable_stamp: tuple[int, int] | None = None  # the same for the version that is known to be durable
        self.schedule_queue_count = len(DEFAULT_DELAY_LEVELS)  # one per delay level of the store
        self._found = FoundTopics()

    def config(self, topic: str) -> TopicConfig | None:
        """Return a topic's settings. Return None if topics.json does not have the topic."""
        return self._refresh().file.topics.get(topic)

    def may_exist(self, topic: str) -> bool:
        """Return whether topics.json has the topic, or has no topics at all.

        If it has other topics only, the topic was deleted or never created.
        """
        configs = self._refresh().file.topics
        return not configs or topic in configs

    def is_deleted(self, topic: str) -> bool:
        """Return whether topics.json is readable and does not have the topic."""
        found = self._refresh()
        return not found.is_lost and topic not in found.file.topics

    def found(self) -> FoundTopics:
        """Return the contents and the text of topics.json."""
        return self._refresh()

    def is_batch(self, topic: str) -> bool:
        """Return whether the topic's queues are batch consume queues.

        topics.json decides. If it does not have the topic, the folder of the topic's queues decides.
        """
        config = self.config(topic)
        if config is not None:
            return config.is_batch_queue
        return files.is_folder(files.join(self._root, filenames.BATCH_CONSUME_QUEUE, topic))

    def write_queues(self, topic: str) -> int | None:
        """Return the number of the topic's write queues, to which messages are appended.

        Return None for an unknown topic.

        If the topic is not in topics.json but has queue folders, they give the number. The topics that hold delayed
        messages always exist: a broker creates them when it starts, and in a store without them the first delayed
        message creates them. Raises StorePathError if the topic is not writable, and DamageError if it has more than
        MAX_QUEUES queues.
        """
        config = self.config(topic)
        if config is None and topic in WAITING_TOPICS:
            return self.schedule_queue_count if topic == SCHEDULE_TOPIC else 1
        if config is None:
            tree = filenames.BATCH_CONSUME_QUEUE if self.is_batch(topic) else filenames.CONSUME_QUEUE
            folders = files.list_folder(files.join(self._root, tree, topic))
            ids = [int(name) for name, is_folder in folders if is_folder and name.isascii() and name.isdigit()]
            _check_count(topic, max(ids, default=-1) + 1, files.join(self._root, tree, topic), _NEXT_STEP_OF_WRITER)
            return max(ids) + 1 if ids else None
        if not config.perm & PERM_WRITE:
            raise StorePathError(
                f'cannot write to topic "{topic}": its perm in {self._path} is {config.perm}; expected one with '
                f"{PERM_WRITE} (write). Set perm {config.perm | PERM_WRITE} with the broker's admin tool, or write to "
                "another topic."
            )
        _check_count(topic, max(config.read_queue_count, config.write_queue_count), self._path, _NEXT_STEP_OF_WRITER)
        return config.write_queue_count

    def ensure(
        self,
        topics: Iterable[str],
        queue_count: int | Mapping[str, int],
        now_ms: int,
        perm: int = PERM_READ | PERM_WRITE,
        *,
        register: Callable[[list[str], bytes], None] = lambda *_: None,
    ) -> dict[str, int]:
        """Return the number of write queues of each topic, by topic. Create missing topics with `queue_count` queues.

        `queue_count` is one number for all new topics, or a mapping with one number per topic. All topics are created
        by one write of topics.json, because a write takes time in proportion to the number of topics. Before the file
        is replaced, `register` is called with the new topics that have no queue yet and with the file's new text. The
        topics are durable when this returns.

        Raises OptionError if a broker would refuse a name, or if there are too many queues. Raises StorePathError if a
        topic is not writable, and DamageError in the same cases as `write_queues`. If an error is raised, nothing was
        created.
        """
        most = queue_count if isinstance(queue_count, int) else max(queue_count.values(), default=0)
        if most > MAX_QUEUES:
            raise OptionError(
                f"a topic cannot be created: found {most} queues; expected at most {MAX_QUEUES}. Give fewer "
                "queues. Nothing was changed."
            )
        counts: dict[str, int] = {}
        created: dict[str, TopicConfig] = {}
        new: list[str] = []
        for topic in topics:
            self._heartbeat()
            count = self.write_queues(topic)
            if count is None:
                new.append(topic)
            if count is None or self.config(topic) is None:
                check_topic_name(topic)
                count = count or (queue_count if isinstance(queue_count, int) else queue_count[topic])
                attributes = {QUEUE_TYPE: BATCH_QUEUE_TYPE} if self.is_batch(topic) else {}
                # Without the inherit bit a broker does not create topics by itself (TopicConfigManager, 4.9 and 5.3).
                bits = perm | PERM_INHERIT if topic == AUTO_CREATE_TOPIC else perm
                created[topic] = TopicConfig(topic, count, count, bits, attributes=attributes)
            counts[topic] = count
        if created:
            self._write(created, now_ms, lambda text: register(new, text))
        elif counts:
            self._make_durable()
        return counts

    def _make_durable(self) -> None:
        """Make the current topics.json durable. Does nothing if this version is known to be durable.

        The process that wrote it may have died before the sync, or may be a broker, which does not sync the file.
        Without this, a power cut could keep messages and lose their topic.
        """
        found = self._refresh()
        if self._read_stamp == self._durable_stamp:
            return
        if found.is_backup:
            # The file itself is empty or incomplete. A broker's next change would copy it over the valid backup, so
            # write it.
            self._replace(found.text)
            return
        self._disk.make_durable(self._path, found.text)
        self._durable_stamp = self._read_stamp

    def _stamp(self) -> tuple[int, int]:
        return files.file_size(self._path), files.modified_ms(self._path)

    def _refresh(self) -> FoundTopics:
        stamp = self._stamp()
        if stamp != self._read_stamp:
            self._found = find_topics(self._root)
            self._read_stamp = stamp
        return self._found

    def _write(self, created: dict[str, TopicConfig], now_ms: int, register: Callable[[bytes], None]) -> None:
        found = self._refresh()
        version = found.file.data_version or DataVersion()
        newer = replace(version, counter=version.counter + 1, timestamp=now_ms)
        if not found.text:
            self._disk.make_folder(files.parent(self._path))
            self._disk.sync_folder(self._root)
        elif not found.is_backup:
            # After this, a broker that cannot read the file reads its previous version. If only the backup is readable,
            # the backup stays until the file is complete again. So at any moment one of the two files has every topic.
            self._disk.replace(self._path + filenames.BACKUP_SUFFIX, found.text)
        topics = {**found.file.topics, **created}
        text = encode_topics_file(replace(found.file, topics=topics, data_version=newer))
        # Called before anyone can create a queue of these topics, because the registry's new line drops all older
        # queues of them.
        register(text)
        # After this line every reader sees the topics. A crash before it leaves the old file.
        self._replace(text)

    def _replace(self, text: bytes) -> None:
        self._disk.replace(self._path, text)
        self._read_stamp, self._durable_stamp = None, self._stamp()


def _check_count(topic: str, count: int, path: str, next_step: str) -> None:
    """Raise DamageError if `count` is above MAX_QUEUES, which is the maximum that readers accept."""
    if count > MAX_QUEUES:
        raise DamageError(f"the number of queues of topic {topic}", path, 0, f"at most {MAX_QUEUES}", count, next_step)
