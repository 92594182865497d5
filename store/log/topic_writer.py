"""topics.json for a writer: topics looked up, and made as a broker makes them.

Only who holds the store's lock may change it. The file before the change is kept beside it as `.bak`, which is what a
broker reads when it finds none that it can read. Source: TopicConfigManager, ConfigManager#persist, #load (5.3).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, OptionError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import (
    BATCH_QUEUE_TYPE,
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    QUEUE_TYPE,
    DataVersion,
    TopicConfig,
    encode_topics_file,
)
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.log.topics import MAX_QUEUES, FoundTopics, find_topics


class TopicWriter:
    """The topics of one store. What was read is kept while the file stays the same. One thread, under the lock."""

    def __init__(self, disk: Disk, root: str, note_progress: Callable[[], None] = lambda: None) -> None:
        self._disk, self._root, self._note_progress = disk, root, note_progress
        self._path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
        self._read_at: tuple[int, int] | None = None  # length and time of what was read
        self._durable_at: tuple[int, int] | None = None  # of what is known to be on disk for good
        self.schedule_queue_count = len(DEFAULT_DELAY_LEVELS)  # one for each delay level of the store
        self._found = FoundTopics()

    def config(self, topic: str) -> TopicConfig | None:
        """Return a topic's settings, None for one that topics.json does not name."""
        return self._look().file.topics.get(topic)

    def may_exist(self, topic: str) -> bool:
        """Say whether topics.json, if there is one, names the topic: a deleted one is not in it."""
        configs = self._look().file.topics
        return not configs or topic in configs

    def is_deleted(self, topic: str) -> bool:
        """Say whether topics.json is there and does not name the topic."""
        found = self._look()
        return not found.is_lost and topic not in found.file.topics

    def found(self) -> FoundTopics:
        """Return what names the topics, and its text."""
        return self._look()

    def is_batch(self, topic: str) -> bool:
        """Say whether the topic's queues are batch consume queues: by topics.json, else by where they lie."""
        config = self.config(topic)
        if config is not None:
            return config.is_batch_queue
        return files.is_folder(files.join(self._root, filenames.BATCH_CONSUME_QUEUE, topic))

    def write_queues(self, topic: str) -> int | None:
        """Return over how many queues messages to the topic are spread, None if there is no such topic.

        The topics in which delayed messages wait are always there: a broker has them from its start on, and here the
        first delayed message makes them. Raises StorePathError for a topic that may not be written to, and DamageError
        for more queues than a reader accepts.
        """
        config = self.config(topic)
        if config is None and topic in filenames.WAITING_TOPICS:
            return self.schedule_queue_count if topic == filenames.SCHEDULE_TOPIC else 1
        if config is None:
            tree = filenames.BATCH_CONSUME_QUEUE if self.is_batch(topic) else filenames.CONSUME_QUEUE
            held = files.list_folder(files.join(self._root, tree, topic))
            ids = [int(name) for name, is_folder in held if is_folder and name.isascii() and name.isdigit()]
            _check_count(topic, max(ids, default=-1) + 1, files.join(self._root, tree, topic))
            return max(ids) + 1 if ids else None
        if not config.perm & PERM_WRITE:
            raise StorePathError(
                f'topic "{topic}" may not be written to: its perm in {self._path} is {config.perm}, and '
                f"{PERM_WRITE} (write) is not in it. Let a broker's administrator give the topic perm "
                f"{config.perm | PERM_WRITE}, or write to another topic."
            )
        _check_count(topic, max(config.read_queue_count, config.write_queue_count), self._path)
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
        """Return the number of write queues of each topic; those that are not there are made with `queue_count`.

        `queue_count` is one number for all topics, or a number for each of them.
        `register` gets the topics that have no queue, and the new text, before the file is replaced.
        All are made by one write of the file: it is as long as the store has topics. What it returns stands on disk
        for good. Raises OptionError for a name that no broker would take and for too many queues, StorePathError for a
        topic that may not be written to, and DamageError as `write_queues` does, before anything is made.
        """
        most = queue_count if isinstance(queue_count, int) else max(queue_count.values(), default=0)
        if most > MAX_QUEUES:
            raise OptionError(
                f"a topic cannot be created: found {most} queues; expected at most {MAX_QUEUES}. Give fewer "
                "queues. Nothing was changed."
            )
        counts: dict[str, int] = {}
        made: dict[str, TopicConfig] = {}
        new: list[str] = []
        for topic in topics:
            self._note_progress()
            count = self.write_queues(topic)
            if count is None:
                new.append(topic)
            if count is None or self.config(topic) is None:
                filenames.check_topic_name(topic)
                count = count or (queue_count if isinstance(queue_count, int) else queue_count[topic])
                attributes = {QUEUE_TYPE: BATCH_QUEUE_TYPE} if self.is_batch(topic) else {}
                # Without the bit a broker makes no topic by itself (TopicConfigManager, 4.9 and 5.3).
                bits = perm | PERM_INHERIT if topic == filenames.AUTO_CREATE_TOPIC else perm
                made[topic] = TopicConfig(topic, count, count, bits, attributes=attributes)
            counts[topic] = count
        if made:
            self._write(made, now_ms, lambda text: register(new, text))
        elif counts:
            self._make_durable()
        return counts

    def _make_durable(self) -> None:
        """See that the file as it is survives a power cut, once for each version of it.

        Who wrote it may have died before its sync, or may be a broker, which waits for no disk: then messages would be
        on disk for good, and their topic not.
        """
        found = self._look()
        if self._read_at == self._durable_at:
            return
        if found.is_backup:
            # The next change of a broker would put what stands in the file, nothing or half, over the backup.
            self._replace(found.text)
            return
        self._disk.make_durable(self._path, found.text)
        self._durable_at = self._read_at

    def _seen(self) -> tuple[int, int]:
        return files.file_size(self._path), files.modified_ms(self._path)

    def _look(self) -> FoundTopics:
        seen = self._seen()
        if seen != self._read_at:
            self._found = find_topics(self._root)
            self._read_at = seen
        return self._found

    def _write(self, made: dict[str, TopicConfig], now_ms: int, register: Callable[[bytes], None]) -> None:
        found = self._look()
        version = found.file.data_version or DataVersion()
        newer = replace(version, counter=version.counter + 1, timestamp=now_ms)
        if not found.text:
            self._disk.make_folder(files.parent(self._path))
            self._disk.sync_folder(self._root)
        elif not found.is_backup:
            # From here a broker that finds the file unreadable has the one before it. Where the backup is all there is
            # it stays until the file is whole again: of the two one has every topic at any moment.
            self._disk.replace(self._path + filenames.BACKUP_SUFFIX, found.text)
        topics = {**found.file.topics, **made}
        text = encode_topics_file(replace(found.file, topics=topics, data_version=newer))
        # Before anybody can make a queue of them: the registry's line forgets all older queues of these topics.
        register(text)
        # From here the topics are there for everybody; a crash before leaves the file as it was.
        self._replace(text)

    def _replace(self, text: bytes) -> None:
        self._disk.replace(self._path, text)
        self._read_at, self._durable_at = None, self._seen()


def _check_count(topic: str, count: int, path: str) -> None:
    """Raise DamageError for more queues than readers accept."""
    if count > MAX_QUEUES:
        what, next_step = f"the number of queues of topic {topic}", "Restore it from a copy. Nothing was appended."
        raise DamageError(what, path, 0, f"at most {MAX_QUEUES}", count, next_step)
