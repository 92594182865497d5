"""Messages by key and by id: the index or the id gives places in the log, the records there decide.

Source: DefaultMessageStore#queryMessage, IndexService#queryOffset, MessageDecoder#decodeMessageId (5.3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_body import message_count
from rmq_spark.store.format.index_file import IndexFile, IndexShape
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.message_id import may_be_offset_message_id, parse_offset_message_id
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK, Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.units import QueueKey


class Hit(NamedTuple):
    """A record's queue and the queue offsets of its messages, [begin, end).

    `is_whole`: what was looked up is carried by the record around an inner batch, so all its messages are meant.
    """

    queue: QueueKey
    begin: int
    end: int
    is_whole: bool = False


@dataclass(slots=True)
class _Opened:
    """An index file that is open, and what is known of its shape as of so many units."""

    file: OpenFile
    shape: IndexShape | None = None
    unit_count: int = -1

    def look(self) -> IndexFile:
        """Return the file with its header as it is now; a file that is written goes on growing."""
        index = IndexFile(self.file.read, self.file.size(), self.shape)
        if self.shape is None and index.header.next_unit != self.unit_count:
            self.shape, self.unit_count = index.shape, index.header.next_unit
        return index


class IndexFolder:
    """The index files of a store, for looking up keys: opened, and their shapes learned, once for all keys.

    One thread at a time. `close` it; it can be used again.
    """

    def __init__(self, root: str) -> None:
        self._folder = files.join(root, filenames.INDEX)
        self._opened: dict[str, _Opened] = {}  # by name

    def close(self) -> None:
        """Close every file."""
        for opened in self._opened.values():
            opened.file.close()
        self._opened.clear()

    def places(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Yield the physical offsets of records that may have the key and lie in [begin_ms, end_ms], newest first."""
        key_hash = index_key_hash(f"{topic}#{key}")
        found = self._look()
        # A file that is nearly empty proves no shape of its own, but a broker makes all files alike.
        shapes = {opened.file.size(): opened.shape for opened, _ in found if opened.shape}
        for opened, index in reversed(found):
            shape = opened.shape or shapes.get(opened.file.size())
            if shape is not None:
                shaped = index if opened.shape else IndexFile(opened.file.read, opened.file.size(), shape)
                yield from shaped.find(key_hash, begin_ms, end_ms)

    def _look(self) -> list[tuple[_Opened, IndexFile]]:
        """Return the files that are there now, oldest first; other names are passed over, as IndexService#load does."""
        listed = files.list_folder(self._folder)
        names = [name for name, is_folder in listed if not is_folder and filenames.is_index_name(name)]
        for gone in self._opened.keys() - set(names):
            self._opened.pop(gone).file.close()
        for name in names:
            if name not in self._opened:
                self._opened[name] = _Opened(OpenFile(files.join(self._folder, name)))
        return [(self._opened[name], self._opened[name].look()) for name in names]


def last_indexed_place(root: str) -> int:
    """Return the physical offset of the last message that a store's key index knows, -1 if it knows none."""
    folder = files.join(root, filenames.INDEX)
    names = [name for name, is_folder in files.list_folder(folder) if not is_folder and filenames.is_index_name(name)]
    for name in reversed(names):
        file = OpenFile(files.join(folder, name))
        header = IndexFile(file.read, file.size()).header
        file.close()
        if not header.is_empty:
            return header.end_physical_offset
    return -1


def find_by_key(index: IndexFolder, log: CommitLog, topic: str, key: str, begin_ms: int, end_ms: int) -> list[Hit]:
    """Return the records of the topic that the index names for the key: candidates, for hashes collide."""
    hits = []
    for place in index.places(topic, key, begin_ms, end_ms):
        record = log.record_at(place)
        if isinstance(record, Record) and begin_ms <= record.store_timestamp <= end_ms:
            hits += [hit for hit in [_hit(record, key)] if hit is not None and hit.queue.topic == topic]
    return hits


def find_by_id(index: IndexFolder, log: CommitLog, message_id: str, topics: Sequence[str]) -> list[Hit]:
    """Return the records in `topics` that an id may mean: by the place in it, and by the index for a UNIQ_KEY."""
    hits = []
    if may_be_offset_message_id(message_id):
        place = parse_offset_message_id(message_id).physical_offset
        record = log.record_at(place) if place >= 0 else None
        hit = _hit(record) if isinstance(record, Record) else None
        if hit is not None and hit.queue.topic in topics:
            hits.append(hit)
    for topic in topics:
        hits += find_by_key(index, log, topic, message_id, 0, 2**63 - 1)
    return hits


def _hit(record: Record, wanted: str = "") -> Hit | None:
    """Return where a record's messages are in its queue, None for one that no queue names."""
    if record.sys_flag & TRANSACTION_MASK not in (0, TRANSACTION_COMMIT):
        return None
    key = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
    is_whole = wanted != "" and bool(record.sys_flag & INNER_BATCH) and wanted in _keys_of(record)
    return Hit(key, record.queue_offset, record.queue_offset + message_count(record), is_whole)


def _keys_of(record: Record) -> list[str]:
    properties = parse(record.properties)
    return [properties.get(UNIQ_KEY, ""), *properties.get(KEYS, "").split(" ")]
