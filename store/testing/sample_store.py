"""A whole store at once: `build_store` for any messages, `build_uniform_store` for millions of equal shape.

Both write what a broker that was closed in order leaves behind: segments of one size with a BLANK at the end of
each but the last, zeros behind the last record, units for every message that has one, topics.json, checkpoint,
`lock`. A key index is not written. `abort` and a preallocated segment make it a store whose broker died.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format import filenames
from rmq_spark.store.format.abort_file import encode_abort
from rmq_spark.store.format.batch_unit import BATCH_UNIT, encode_batch_units
from rmq_spark.store.format.checkpoint import Checkpoint, encode_checkpoint
from rmq_spark.store.format.config_json import QUEUE_TYPE, TopicConfig, TopicsFile, encode_topics_file
from rmq_spark.store.format.queue_unit import QUEUE_UNIT, encode_blank_fill, encode_units
from rmq_spark.store.format.record import BLANK_BYTES, encode_blank, encode_record
from rmq_spark.store.testing.sample_message import BORN_MS, SampleMessage
from rmq_spark.store.testing.uniform_records import UniformRecords
from rmq_spark.store.units import QueueBounds, QueueKey

SEGMENT_BYTES = 1 << 30  # mappedFileSizeCommitLog
QUEUE_FILE_BYTES = 300_000 * QUEUE_UNIT.itemsize  # mappedFileSizeConsumeQueue
BATCH_QUEUE_FILE_BYTES = 300_000 * BATCH_UNIT.itemsize  # mapperFileSizeBatchConsumeQueue
FIRST_STORE_MS = BORN_MS + 877  # when the first message is stored unless it says otherwise
INTERLEAVES = ("message", "batch")
BATCH_RUN = 32  # messages of one queue in a row with interleave="batch"


@dataclass(frozen=True, slots=True)
class BuiltStore:
    """What was built: bounds of every queue with a message, and the commit log's extent (physical offsets)."""

    path: Path
    bounds: dict[QueueKey, QueueBounds]
    log_begin: int
    log_end: int


@dataclass(slots=True)
class _Queue:
    """A queue being built: its next offset and the unit fields so far."""

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
    """Write a store of these messages, in their order, into the folder `path` (made if missing, else empty).

    Sizes are bytes. `log_begin` is the first physical offset, a multiple of `segment_bytes`; `first_offsets` the
    offsets with which queues begin (fill before them, as after an expiry); `batch_topics` get batch consume
    queues; `empty_topics` (name -> queues) are in topics.json only. Raises ValueError for a message that does not
    fit into a segment or breaks a limit of the format, FileExistsError where a store already is.
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
            _write_queue(root, key, encode_batch_units(*columns), 0, batch_queue_file_bytes, batch=True)
        elif queue.rows:
            _write_queue(root, key, encode_units(*columns[:3]), queue.first, queue_file_bytes, batch=False)
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
    """Write a store of `message_count` messages of one size (about 370 bytes each with 200 bytes of body).

    Every body, key and UNIQ_KEY is different, tags are TagA to TagH, scattered; bodies are printable ASCII and do not
    compress well. `interleave` "message" deals the messages out one by one, "batch" 32 in a row to a queue, as
    producers that send batches do. Store times rise by 1 ms every `messages_per_ms` messages. About two million
    messages a second on a fast disk. Raises FileExistsError where a store already is.
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
        units = encode_units(places[chosen], np.full(len(chosen), records.size), records.tags_codes(chosen))
        _write_queue(root, key, units, 0, queue_file_bytes, batch=False)
    end = int(places[-1]) + records.size if message_count else 0
    last_ms = FIRST_STORE_MS + max(message_count - 1, 0) // messages_per_ms
    _write_side_files(root, {topic: queue_count}, (), last_ms, end, abort=abort)
    return BuiltStore(root, bounds, 0, end)


def _deal(numbers: NDArray[np.int64], queue_count: int, interleave: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return queue id and queue offset of each message number."""
    if interleave == "message":
        return numbers % queue_count, numbers // queue_count
    runs = numbers // BATCH_RUN
    return runs % queue_count, runs // queue_count * BATCH_RUN + numbers % BATCH_RUN


class _LogFile:
    """The commit log being written: one segment in memory at a time."""

    def __init__(self, root: Path, segment_bytes: int, begin: int) -> None:
        self._root, self._segment_bytes, self._begin = root, segment_bytes, begin
        self._data = bytearray()

    @property
    def end(self) -> int:
        return self._begin + len(self._data)

    def place(self, size: int) -> int:
        """Return where a record of that many bytes will lie; rolls where it would leave no room for a BLANK."""
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
    """Write the files of a queue whose first unit has number `first`; fill up to there in its first file."""
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
