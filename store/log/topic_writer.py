"""topics.json for a writer: topics looked up, and made as a broker makes them.

Only who holds the store's lock may change it. The file before the change is kept beside it as `.bak`, which is what a
broker reads when it finds none that it can read. Source: TopicConfigManager, ConfigManager#persist, #load (5.3).
"""

from dataclasses import replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import (
    BATCH_QUEUE_TYPE,
    PERM_READ,
    PERM_WRITE,
    QUEUE_TYPE,
    DataVersion,
    TopicConfig,
    TopicsFile,
    decode_topics_file,
    encode_topics_file,
)
from rmq_spark.store.log.topics import read_topics


class TopicWriter:
    """The topics of one store. What was read is kept while the file stays the same. One thread, under the lock."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root = disk, root
        self._path = files.join(root, filenames.CONFIG, filenames.TOPICS_JSON)
        self._read_at: tuple[int, int] | None = None  # length and time of what was read
        self._durable_at: tuple[int, int] | None = None  # of what is known to be on disk for good
        self._configs: dict[str, TopicConfig] = {}

    def config(self, topic: str) -> TopicConfig | None:
        """Return a topic's settings, None for one that topics.json does not name."""
        return self._all().get(topic)

    def is_batch(self, topic: str) -> bool:
        """Say whether the topic's queues are batch consume queues: by topics.json, else by where they lie."""
        config = self.config(topic)
        if config is not None:
            return config.is_batch_queue
        return files.is_folder(files.join(self._root, filenames.BATCH_CONSUME_QUEUE, topic))

    def write_queues(self, topic: str) -> int | None:
        """Return over how many queues messages to the topic are spread, None if there is no such topic.

        Raises StorePathError for a topic that may not be written to.
        """
        config = self.config(topic)
        if config is None:
            tree = filenames.BATCH_CONSUME_QUEUE if self.is_batch(topic) else filenames.CONSUME_QUEUE
            held = files.list_folder(files.join(self._root, tree, topic))
            ids = [int(name) for name, is_folder in held if is_folder and name.isdigit()]
            return max(ids) + 1 if ids else None
        if not config.perm & PERM_WRITE:
            raise StorePathError(
                f'topic "{topic}" may not be written to: its perm in {self._path} is {config.perm}, and '
                f"{PERM_WRITE} (write) is not in it. Let a broker's administrator give the topic perm "
                f"{config.perm | PERM_WRITE}, or write to another topic."
            )
        return config.write_queue_count

    def ensure(self, topic: str, queue_count: int, now_ms: int, perm: int = PERM_READ | PERM_WRITE) -> int:
        """Return the topic's number of write queues; a topic that is not there is made with `queue_count` of them.

        What it returns stands on disk for good. Raises OptionError for a name that no broker would take.
        """
        count = self.write_queues(topic)
        if count is not None and self.config(topic) is not None:
            self._make_durable()
            return count
        filenames.check_topic_name(topic)
        attributes = {QUEUE_TYPE: BATCH_QUEUE_TYPE} if self.is_batch(topic) else {}
        made = TopicConfig(topic, count or queue_count, count or queue_count, perm, attributes=attributes)
        self._write({**self._all(), topic: made}, now_ms)
        return made.write_queue_count

    def _make_durable(self) -> None:
        """See that the file as it is survives a power cut, once for each version of it.

        Who wrote it may have died before its sync, or may be a broker, which waits for no disk: then messages would be
        on disk for good, and their topic not.
        """
        if self._read_at != self._durable_at:
            with self._disk.open(self._path) as file:
                file.sync()
            self._disk.sync_folder(files.parent(self._path))
            self._durable_at = self._read_at

    def _seen(self) -> tuple[int, int]:
        return files.file_size(self._path), files.modified_ms(self._path)

    def _all(self) -> dict[str, TopicConfig]:
        seen = self._seen()
        if seen != self._read_at:
            self._configs = read_topics(self._root)
            self._read_at = seen
        return self._configs

    def _write(self, topics: dict[str, TopicConfig], now_ms: int) -> None:
        old = files.read_small(self._path)
        try:
            kept = decode_topics_file(old) if old else TopicsFile()
        except ValueError as error:
            raise DamageError("not the JSON of topics", self._path, 0, "JSON", str(error)) from error
        version = kept.data_version or DataVersion()
        newer = replace(version, counter=version.counter + 1, timestamp=now_ms)
        if old is None:
            self._disk.make_folder(files.parent(self._path))
            self._disk.sync_folder(self._root)
        else:
            # From here a broker that finds the file unreadable has the one before it.
            self._disk.replace(self._path + filenames.BACKUP_SUFFIX, old)
        # From here the topic is there for everybody; a crash before leaves the file as it was.
        self._disk.replace(self._path, encode_topics_file(replace(kept, topics=topics, data_version=newer)))
        self._read_at, self._durable_at = None, self._seen()
