"""Messages by key and by id: the index or the id gives places in the log, the records there decide.

Source: DefaultMessageStore#queryMessage, IndexService#queryOffset, MessageDecoder#decodeMessageId (5.3).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rmq_spark.store.disk import files
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_body import message_count
from rmq_spark.store.format.index_file import IndexFile
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.message_id import may_be_offset_message_id, parse_offset_message_id
from rmq_spark.store.format.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    Record,
)
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.units import QueueKey

Hit = tuple[QueueKey, int, int]  # a record's queue and the queue offsets of its messages, [begin, end)


def find_by_key(root: str, log: CommitLog, topic: str, key: str, begin_ms: int, end_ms: int) -> list[Hit]:
    """Return the records of the topic that the index names for the key: candidates, for hashes collide."""
    hits = []
    for place in _index_places(root, f"{topic}#{key}", begin_ms, end_ms):
        record = log.record_at(place)
        if isinstance(record, Record) and begin_ms <= record.store_timestamp <= end_ms:
            hits += [hit for hit in [_hit(record)] if hit is not None and hit[0].topic == topic]
    return hits


def find_by_id(root: str, log: CommitLog, message_id: str, topics: Sequence[str]) -> list[Hit]:
    """Return the records in `topics` that an id may mean: by the place in it, and by the index for a UNIQ_KEY."""
    hits = []
    if may_be_offset_message_id(message_id):
        place = parse_offset_message_id(message_id).physical_offset
        record = log.record_at(place) if place >= 0 else None
        hit = _hit(record) if isinstance(record, Record) else None
        if hit is not None and hit[0].topic in topics:
            hits.append(hit)
    for topic in topics:
        hits += find_by_key(root, log, topic, message_id, 0, 2**63 - 1)
    return hits


def _index_places(root: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int]:
    """Yield the physical offsets that the index files hold for `topic#key`, newest file first; names that are no
    index file's are passed over, as IndexService#load does."""
    folder = files.join(root, filenames.INDEX)
    key_hash = index_key_hash(key)
    names = [name for name, is_folder in files.list_folder(folder) if not is_folder and filenames.is_index_name(name)]
    with ExitStack() as stack:
        opened = [stack.enter_context(files.OpenFile(files.join(folder, name))) for name in names]
        found = [IndexFile(file.read, file.size()) for file in opened]
        # A file that is nearly empty proves no shape of its own, but a broker makes all files alike.
        shapes = {file.size(): index.shape for file, index in zip(opened, found, strict=True) if index.shape}
        for file, index in reversed(list(zip(opened, found, strict=True))):
            shaped = index if index.shape else IndexFile(file.read, file.size(), shapes.get(file.size()))
            yield from shaped.find(key_hash, begin_ms, end_ms)


def _hit(record: Record) -> Hit | None:
    """Return where a record's messages are in its queue, None for one that no queue names."""
    if record.sys_flag & TRANSACTION_MASK not in (0, TRANSACTION_COMMIT):
        return None
    key = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
    return key, record.queue_offset, record.queue_offset + message_count(record)
