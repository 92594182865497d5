"""Builders of complete stores: `build_store` for any messages, `build_uniform_store` for millions of similar messages.

Both write a store like that of a broker after a clean shutdown. It has segments of one size, each except the last with
a filler (BLANK) at its end; zeros after the last record; consume queues; topics.json; the checkpoint; and `lock`. It
has no key index. If you set `abort` and `preallocated`, the store is like that of a broker that crashed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import Checkpoint, encode_abort, encode_checkpoint
from rmq_spark.store.format.config_json import QUEUE_TYPE, TopicConfig, TopicsFile, encode_topics_file
from rmq_spark.store.format.consume_queue_entry import (
    BATCH_UNIT,
    QUEUE_UNIT,
    encode_batch_entries,
    encode_blank_fill,
    encode_entries,
)
from rmq_spark.store.format.record import BLANK_BYTES, encode_blank, encode_record
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import BORN_MS, SampleMessage
from rmq_spark.store.testing.uniform_records import UniformRecords

SEGMENT_BYTES = 1 << 30  # mappedFileSizeCommitLog
QUEUE_FILE_BYTES = 300_000 * QUEUE_UNIT.itemsize  # mappedFileSizeConsumeQueue
BATCH_QUEUE_FILE_BYTES = 300_000 * BATCH_UNIT.itemsize  # mapperFileSizeBatchConsumeQueue
FIRST_STORE_MS = BORN_MS + 877  # default store time of the first message
INTERLEAVES = ("message", "batch")
BATCH_RUN = 32  # consecutive messages of one queue if interleave="batch"


@dataclass(frozen=True, slots=True)
class BuiltStore:
    """A store that was built. `bounds` has the queue offsets of each queue that got messages.

    `[log_begin, log_end)` are the physical offsets of its commit log.
    """

    path: Path
    bounds: dict[QueueKey, QueueBounds]
    log_begin: int
    log_end: int


@dataclass(slots=True)
class _Queue:
    """A queue that is being built: its first and its next queue offset, and the fields of its entries so far."""

    first: int
    next: int
    rows: list[tuple[int, int, int, int, int, int]]


def build_store(
    path: str | Path,
    messages: Iterable[SampleMessage],
    *,
    segment_bytes: int = 1 << 16,
    queue_file_bytes: int = 50 * QUEUE_UNIT.itemsize,
    batch_queue_file_bytes: int = 50 * BATCH_UNIT.itemsize,
    log_begin: int = 0,
    first_offsets: Mapping[QueueKey, int] | None = None,
    batch_topics: Collection[str] = (),
    empty_topics: Mapping[str, int] | None = None,
    with_topics_json: bool = True,
    abort: bool = False,
    preallocated: bool = False,
) -> BuiltStore:
    """Write a store with `messages`, in their order, into the folder `path`, which is created if it is missing.

    Sizes are in bytes.

    - `log_begin` is the first physical offset of the commit log. It must be a multiple of `segment_bytes`.
    - `first_offsets` has the first queue offset of queues that do not begin at 0. Fill entries precede it in the
      queue's first file, as if earlier messages had expired.
    - `batch_topics` are the topics that get batch consume queues.
    - `empty_topics` maps the names of further topics to their numbers of queues. They are only in topics.json.
    - `preallocated` adds an empty segment after the last one.

    Raises ValueError if a message does not fit into a segment or exceeds a limit of the format. Raises FileExistsError
    if `path` already has a commit log.
    """
    assert log_begin % segment_bytes == 0, (log_begin, segment_bytes)
    root = Path(path)
    (root / filenames.COMMIT_LOG).mkdir(parents=True)
    log = _LogFile(root, segment_bytes, log_begin)
    queues: dict[QueueKey, _Queue] = {}
    first_offsets = first_offsets or {}
    stored_ms = FIRST_STORE_MS - 1
    for message in messages:
        first = first_offsets.get(message.queue, 0)
        queue = queues.setdefault(message.queue, _Queue(first, first, []))
        stored_ms = stored_ms + 1 if message.store_timestamp is None else message.store_timestamp
        data = encode_record(message.as_record(queue.next, 0, stored_ms))
        place = log.place(len(data))
        log.append(encode_record(message.as_record(queue.next, place, stored_ms)))
        if message.has_unit:
            count = max(message.message_count, 1)
            queue.rows.append((place, len(data), message.tags_code, stored_ms, queue.next, count))
            queue.next += count
    log.close(preallocated=preallocated)
    for key, queue in queues.items():
        columns = np.array(queue.rows, np.int64).reshape(-1, 6).T
        if key.topic in batch_topics:
            _write_queue(root, key, encode_batch_entries(*columns), 0, batch_queue_file_bytes, batch=True)
        elif queue.rows:
            _write_queue(root, key, encode_entries(*columns[:3]), queue.first, queue_file_bytes, batch=False)
    counts = dict(empty_topics or {})
    for key in queues:
        counts[key.topic] = max(counts.get(key.topic, 0), key.queue_id + 1)
    _write_side_files(root, counts if with_topics_json else None, batch_topics, stored_ms, log.end, abort=abort)
    bounds = {key: QueueBounds(queue.first, queue.next) for key, queue in queues.items()}
    return BuiltStore(root, bounds, log_begin, log.end)


def build_uniform_store(
    path: str | Path,
    *,
    topic: str,
    queue_count: int,
    message_count: int,
    body_bytes: int = 200,
    interleave: str = "message",
    segment_bytes: int = SEGMENT_BYTES,
    queue_file_bytes: int = QUEUE_FILE_BYTES,
    seed: int = 0,
    messages_per_ms: int = 100,
    abort: bool = False,
) -> BuiltStore:
    """Write a store with `message_count` messages, all in one topic and with records of equal size.

    A record has about 370 bytes if its body has 200. Bodies, keys and UNIQ_KEYs are all different. Bodies are printable
    ASCII that does not compress well. Each message has one of the tags TagA to TagH, in no regular order.

    `interleave` is "message" or "batch". With "message", consecutive messages go to different queues. With "batch", 32
    consecutive messages go to one queue, as from producers that send batches. The store time increases by 1 ms after
    every `messages_per_ms` messages.

    On a fast disk, this writes about two million messages per second. Raises FileExistsError if `path` already has a
    commit log.
    """
    assert interleave in INTERLEAVES, interleave
    assert queue_count > 0, queue_count
    root = Path(path)
    (root / filenames.COMMIT_LOG).mkdir(parents=True)
    records = UniformRecords(topic, body_bytes, seed, FIRST_STORE_MS, messages_per_ms)
    per_segment = (segment_bytes - BLANK_BYTES) // records.size
    assert per_segment > 0, f"a record of {records.size} bytes does not fit into a segment of {segment_bytes}"
    numbers = np.arange(message_count)
    queue_ids, offsets = _deal(numbers, queue_count, interleave)
    places = numbers // per_segment * segment_bytes + numbers % per_segment * records.size
    for first in range(0, message_count, per_segment):
        last = min(first + per_segment, message_count)
        with open(root / filenames.commit_log_segment(first // per_segment * segment_bytes), "wb") as file:
            file.truncate(segment_bytes)
            for begin in range(first, last, records.chunk):
                part = slice(begin, min(begin + records.chunk, last))
                file.write(records.encode(numbers[part], queue_ids[part], offsets[part], places[part]))
            if last < message_count:
                file.write(encode_blank(segment_bytes - file.tell()))
    bounds = {}
    for queue_id in range(queue_count):
        key = QueueKey(topic, queue_id)
        chosen = np.flatnonzero(queue_ids == queue_id)
        bounds[key] = QueueBounds(0, len(chosen))
        units = encode_entries(places[chosen], np.full(len(chosen), records.size), records.tags_codes(chosen))
        _write_queue(root, key, units, 0, queue_file_bytes, batch=False)
    end = int(places[-1]) + records.size if message_count else 0
    last_ms = FIRST_STORE_MS + max(message_count - 1, 0) // messages_per_ms
    _write_side_files(root, {topic: queue_count}, (), last_ms, end, abort=abort)
    return BuiltStore(root, bounds, 0, end)


def _deal(numbers: NDArray[np.int64], queue_count: int, interleave: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays with the queue id and the queue offset of the message with each number."""
    if interleave == "message":
        return numbers % queue_count, numbers // queue_count
    runs = numbers // BATCH_RUN
    return runs % queue_count, runs // queue_count * BATCH_RUN + numbers % BATCH_RUN


class _LogFile:
    """The commit log that is being written. Only its current segment is in memory."""

    def __init__(self, root: Path, segment_bytes: int, begin: int) -> None:
        self._root, self._segment_bytes, self._begin = root, segment_bytes, begin
        self._data = bytearray()

    @property
    def end(self) -> int:
        return self._begin + len(self._data)

    def place(self, size: int) -> int:
        """Return the physical offset of the next record, which has `size` bytes.

        If the current segment would have no room for a filler after the record, the segment is filled up and written,
        and the record is the first one of the next segment. Raises ValueError if no segment has room for the record.
        """
        if size + BLANK_BYTES > self._segment_bytes:
            raise ValueError(f"a record of {size} bytes does not fit into a segment of {self._segment_bytes}")
        remaining = self._segment_bytes - len(self._data)
        if size + BLANK_BYTES > remaining:
            self._data += encode_blank(remaining)
            self._flush()
            self._begin, self._data = self._begin + self._segment_bytes, bytearray()
        return self.end

    def append(self, record: bytes) -> None:
        self._data += record

    def close(self, *, preallocated: bool) -> None:
        self._flush()
        if preallocated:
            following = filenames.commit_log_segment(self._begin + self._segment_bytes)
            _write_padded(self._root / following, b"", self._segment_bytes)

    def _flush(self) -> None:
        _write_padded(self._root / filenames.commit_log_segment(self._begin), self._data, self._segment_bytes)


def _write_padded(path: Path, data: bytes | bytearray | memoryview, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
        file.write(data)


def _write_queue(root: Path, key: QueueKey, units: bytes, first: int, file_bytes: int, *, batch: bool) -> None:
    """Write the files of a queue. Its first entry has the number `first`.

    The first file begins with fill entries if a file does not begin with the number `first`.
    """
    tree = filenames.BATCH_CONSUME_QUEUE if batch else filenames.CONSUME_QUEUE
    folder = root / filenames.queue_folder(key.topic, key.queue_id, tree)
    folder.mkdir(parents=True)
    begin = first * QUEUE_UNIT.itemsize // file_bytes * file_bytes
    fill = encode_blank_fill(first - begin // QUEUE_UNIT.itemsize)
    data = memoryview(fill + units if fill else units)
    for at in range(0, len(data), file_bytes):
        _write_padded(folder / filenames.segment_name(begin + at), data[at : at + file_bytes], file_bytes)


def _write_side_files(
    root: Path,
    queue_counts: Mapping[str, int] | None,
    batch_topics: Collection[str],
    last_ms: int,
    log_end: int,
    *,
    abort: bool,
) -> None:
    checkpoint = Checkpoint(last_ms, last_ms, 0, 0, log_end)
    (root / filenames.CHECKPOINT).write_bytes(encode_checkpoint(checkpoint))
    (root / filenames.LOCK).write_bytes(b"lock")
    if abort:
        (root / filenames.ABORT).write_bytes(encode_abort(None))
    if queue_counts is not None:
        topics = {
            name: TopicConfig(name, count, count, attributes=_attributes(name in batch_topics))
            for name, count in queue_counts.items()
        }
        path = root / filenames.config_file(filenames.TOPICS_JSON)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_topics_file(TopicsFile(topics)))


def _attributes(batch: bool) -> dict[str, str]:
    return {QUEUE_TYPE: "BatchCQ"} if batch else {}
