"""Write session: the critical section in which one writer changes a store while it holds the lock.

A session writes in this order. Each step says what a crash after it leaves.

1. The file `abort` is made durable before the first byte of the log is written. If the writer crashes, the broker or
   writer that opens the store next finds `abort`, and recovers the store.
2. The watermark records that a session is open. After a crash, the next of our writers checks only the log after the
   watermark's end.
3. Records are written to the log. They are invisible without entries. If a crash interrupts this, the next writer
   clears the bytes. Then the watermark records that the records are complete. If a crash follows, the next writer makes
   the missing entries and keys.
4. Entries are written, then keys. If a crash happens between the entries of two queues, some messages exist only in the
   log. If `abort` were missing then, a broker would append after the largest physical offset of any queue, and so lose
   these messages forever.
5. New queues are appended to the queue registry, which is synced, see `queue_registry.py`. If a crash prevents this,
   recovery registers the queues from the folders. New topics are registered earlier, before topics.json contains them.
6. The watermark records the new end of the log and that the session is closed. After this step the messages survive the
   death of any process.
7. `settle` syncs everything, then writes the checkpoint, then the watermark, and then removes `abort`. After this step
   the messages survive a power cut, and a broker finds a clean shutdown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, OptionError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.record import BLANK_BYTES, BORN_HOST_V6, RECORD_HEAD, Blank, Record, Torn
from rmq_spark.store.format.record_batch import born_host_shift
from rmq_spark.store.log.consume_queue_writer import NewEntries
from rmq_spark.store.log.queue_registration import (
    follow_topics,
    refuse_lost_end,
    refuse_lost_queue,
    register_topics,
)
from rmq_spark.store.log.retention import Expired, Needed, expire
from rmq_spark.store.log.segments import place_records
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_lock import MAX_SESSION_BYTES
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC

_FIELDS: Any = RECORD_HEAD.fields
_QUEUE_OFFSET_AT = _FIELDS["queue_offset"][1]
_PHYSICAL_OFFSET_AT = _FIELDS["physical_offset"][1]
_SYS_FLAG_LOW_AT = _FIELDS["sys_flag"][1] + 3  # the byte with the bits for hosts
_STORE_TIMESTAMP_AT = _FIELDS["store_timestamp"][1]  # after a born host of IPv4


@dataclass(frozen=True, slots=True)
class Appended:
    """Where records were appended: queue offset and physical offset of each, and their common store time (ms)."""

    queue_offsets: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    store_time_ms: int


class Guard(Protocol):
    """The methods of the store's lock (`StoreLock`) that a session uses."""

    @property
    def broker_is_waiting(self) -> bool:
        """Say whether a starting broker waits until the lock is released."""

    def refuse_broker(self, needed_s: float = 0) -> None:
        """Raise LockTimeoutError if a waiting broker could begin to read the store within `needed_s` seconds."""


class WriteSession:
    """The operations on a store under its lock. StoreWriter creates a session after recovery.

    A session is invalid after the `with` block of `StoreWriter.section`. `needed_from` returns the lowest physical
    offset that retention must keep, and None if retention may delete all expired segments.
    """

    def __init__(self, store: StoreFiles, guard: Guard, needed_from: Callable[[], Needed | None]) -> None:
        self._store, self._guard, self._needed_from = store, guard, needed_from

    @property
    def broker_is_waiting(self) -> bool:
        """Say whether a starting broker waits for the lock.

        Cheap. If so, end the session at the next consistent point.
        """
        return self._guard.broker_is_waiting

    @property
    def end(self) -> int:
        """Return the physical offset of the end of the log."""
        return self._store.watermark.end

    @property
    def last_ms(self) -> int:
        """Return the store time of the last message, in ms since the epoch. No message has a later store time."""
        return self._store.watermark.last_ms

    @property
    def segment_bytes(self) -> int:
        """Return the size of a segment, in bytes. A record must be at least 8 bytes shorter."""
        return self._store.log_writer.segment_bytes

    def write_queues(self, topic: str) -> int | None:
        """Return the number of the topic's write queues, to which messages are appended.

        Return None for an unknown topic.

        Raises StorePathError if the topic has no write permission.
        """
        return self._store.topics.write_queues(topic)

    def ensure_topic(self, topic: str, queue_count: int, perm: int = PERM_READ | PERM_WRITE) -> int:
        """Return the topic's number of write queues. Create a missing topic, durably, with `queue_count` queues.

        Raises the same errors as `ensure_topics`. For many topics, `ensure_topics` is faster by orders of magnitude.
        """
        return self.ensure_topics((topic,), queue_count, perm)[topic]

    def ensure_topics(
        self, topics: Iterable[str], queue_count: int | Mapping[str, int], perm: int = PERM_READ | PERM_WRITE
    ) -> dict[str, int]:
        """Return each topic's number of write queues, by topic. Create the missing topics together, durably.

        `queue_count` is one number for all new topics, or a mapping with a number for each topic. Raises OptionError if
        a broker would refuse a name or if there are too many queues, and StorePathError if a topic has no write
        permission. Raises DamageError if an existing topic has too many queues, or if the queues of a new topic have
        lost their files. No topic is created if an error is raised.
        """
        store = self._store
        return store.topics.ensure(
            topics, queue_count, store.now_ms(), perm, register=lambda made, text: register_topics(store, made, text)
        )

    def next_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset that the next message of a queue will get."""
        return self._store.queues.next_offset(QueueKey(topic, queue_id))

    def append(self, records: EncodedRecords) -> Appended:
        """Append records to the log, to their queues and to the key index, at most MAX_SESSION_BYTES of records.

        When it returns, the messages survive the death of any process. `records.data` is modified: the offsets and the
        store time are filled in. Raises:
        - OptionError if a record is larger than a segment, and DiskFullError if there is too little space. Both are
          raised before anything is written. After any other error the next session recovers the store.
        - LockTimeoutError if a starting broker would read the store before the write is complete.
        - StoreError in a process that was forked from the holder of the lock.
        """
        store = self._store
        store.heartbeat()
        if not len(records):
            nothing = np.zeros(0, np.int64)
            return Appended(nothing, nothing, store.watermark.last_ms)
        self._refuse_oversize(records)
        store.refuse_full_disk(len(records.data), len(records))
        placement = place_records(records.sizes, store.watermark.end, self.segment_bytes)
        time_ms = max(store.now_ms(), store.watermark.last_ms)  # never decreases, even if the clock does
        order = np.argsort(records.queue_numbers, kind="stable")
        if not store.registry.is_followed:  # once for each writer
            follow_topics(store, store.watermark.end)
        offsets = self._assign_queue_offsets(records, order)
        _fill_in_headers(records, offsets, placement.physical_offsets, time_ms)
        store.open_session()
        self._guard.refuse_broker()
        levels = [key for key in records.queues if key.topic == SCHEDULE_TOPIC]
        if levels:
            store.delay_offsets.keep_within({key.queue_id + 1: store.queues.next_offset(key) for key in levels})
        store.log_writer.write(placement, records.data)
        # If a broker has read the store meanwhile, it appends over these records. So no entry may point to them, and
        # the caller must get an error.
        self._guard.refuse_broker()
        # If a crash happens before this line, the next writer clears all of these records. If it happens after this
        # line, the next writer makes their entries.
        store.note_logged(placement.end)
        self._dispatch(records, order, offsets, placement.physical_offsets, time_ms)
        last_place = int(placement.physical_offsets[-1])
        last_head = records.data[len(records.data) - int(records.sizes[-1]) :][: RECORD_HEAD.itemsize].tobytes()
        self._guard.refuse_broker()
        store.close_session(placement.end, time_ms, last_place, last_head)
        return Appended(offsets, placement.physical_offsets, time_ms)

    def begin_sync(self) -> None:
        """Start to write the appended bytes to the disk, so that a later `settle` is faster. Guarantees nothing."""
        self._store.log_writer.begin_sync()

    def refuse_full_disk(self, log_bytes: int, record_count: int) -> None:
        """Raise DiskFullError if any of the store's folders has too little free space for these records."""
        self._store.refuse_full_disk(log_bytes, record_count)

    def settle(self) -> None:
        """Make everything durable that any writer appended, and mark the store as cleanly shut down.

        Raises LockTimeoutError if a starting broker may read the store before this is complete. In that case `abort`
        stays.
        """
        self._store.heartbeat()
        self._store.settle()

    def expire(self, max_age_ms: int | None = None, max_bytes: int | None = None) -> Expired:
        """Delete the oldest segments, by the age of their messages (ms) and by the size of the log (bytes).

        Segments are deleted if all of their messages are older than `max_age_ms`, or while the log is larger than
        `max_bytes`. None means no limit. See `retention.expire`.
        """
        self._store.heartbeat()
        return expire(self._store, max_age_ms, max_bytes, self._needed_from)

    def heartbeat(self) -> None:
        """Show waiting processes that the holder of the lock makes progress. Call it during long work."""
        self._store.heartbeat()

    def records_from(self, physical_offset: int) -> Iterator[Record]:
        """Yield the log's records in order, one by one, from `physical_offset` to the end of the log. For recovery.

        Raises DamageError at a record before the end that is not complete, so that a caller that counts records never
        counts too few.
        """
        log = self._store.log
        while physical_offset < self.end:
            record = log.record_at(physical_offset)
            if isinstance(record, Record) and record.crc_matches:
                size, why = record.total_size, "a record"
            elif isinstance(record, Blank):
                size, why = self.segment_bytes - physical_offset % self.segment_bytes, "a filler"
            else:
                size, why = 0, record.why if isinstance(record, Torn) else "a body with another CRC"
            if not 0 < size <= self.end - physical_offset:
                segment = log.segments.holding(physical_offset)
                raise DamageError(
                    "bytes before the log's end",
                    segment.path if segment else self._store.folders[0],
                    physical_offset - (segment.begin if segment else 0),
                    f"a complete record or filler in the log that ends at {self.end}",
                    f"{why} of {size} bytes" if size else why,
                )
            if isinstance(record, Record):
                yield record
            physical_offset += size

    def record_from(self, physical_offset: int) -> Record | None:
        """Return the first record at or after `physical_offset`.

        Return None at the log's end or for an incomplete record.
        """
        try:
            return next(self.records_from(physical_offset), None)
        except DamageError:
            return None

    def _refuse_oversize(self, records: EncodedRecords) -> None:
        assert len(records.data) <= MAX_SESSION_BYTES or len(records) == 1, len(records.data)
        largest = int(np.argmax(records.sizes))
        size = int(records.sizes[largest])
        if size + BLANK_BYTES > self.segment_bytes:
            topic = records.queues[int(records.queue_numbers[largest])].topic
            raise OptionError(
                f'a message to topic "{topic}" takes {size} bytes as a record, and a segment of this store holds '
                f"{self.segment_bytes - BLANK_BYTES}. Send it in parts, or to a store with larger segments "
                "(mappedFileSizeCommitLog). Nothing was written."
            )

    def _assign_queue_offsets(self, records: EncodedRecords, order: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the queue offset of each record, in the order of the records. `order` lists them queue by queue."""
        counts = np.bincount(records.queue_numbers, minlength=len(records.queues))
        nexts = np.array(
            [self._next_offset(key) if count else 0 for key, count in zip(records.queues, counts, strict=True)],
            np.int64,
        )
        firsts = np.cumsum(counts) - counts
        offsets = np.empty(len(records), np.int64)
        offsets[order] = np.arange(len(records)) - np.repeat(firsts - nexts, counts)
        return offsets

    def _next_offset(self, key: QueueKey) -> int:
        """Return the queue offset of a queue's next message. Raises DamageError if files or entries are lost."""
        store = self._store
        offset = store.queues.next_offset(key)
        if key not in store.sound_queues:  # once for each writer
            store.queues.refuse_hole(key, store.watermark.end)
            store.sound_queues.add(key)
        newest = store.queues.newest_unit(key)
        if newest is not None and newest >= 0:  # the next entry begins a new file
            refuse_lost_end(store, store.queues.queue(key), newest)
        elif newest is not None and not offset:
            refuse_lost_queue(store, key, store.watermark.end)
        return offset

    def _dispatch(
        self,
        records: EncodedRecords,
        order: NDArray[np.intp],
        offsets: NDArray[np.int64],
        physical_offsets: NDArray[np.int64],
        time_ms: int,
    ) -> None:
        tags_codes, first, levels = records.tags_codes[order], 0, self._store.levels
        counts = np.bincount(records.queue_numbers, minlength=len(records.queues)).tolist()
        for key, count in zip(records.queues, counts, strict=True):
            if key.topic == SCHEDULE_TOPIC:
                # In the delay queues the tags code is the due time, computed as in recovery.
                tags_codes[first : first + count] = time_ms + levels.due_after_ms(levels.clamp(key.queue_id + 1))
            first += count
        entries = NewEntries(
            physical_offsets[order], records.sizes[order], tags_codes, offsets[order], np.full(len(records), time_ms)
        )
        first = 0
        for key, count in zip(records.queues, counts, strict=True):
            if count:
                self._guard.refuse_broker()
                self._store.queues.put(key, entries.part(first, first + count))
            first += count
        self._store.index.put_many(
            records.key_hashes, physical_offsets[records.key_rows], np.full(len(records.key_rows), time_ms)
        )


def _fill_in_headers(
    records: EncodedRecords, offsets: NDArray[np.int64], physical_offsets: NDArray[np.int64], time_ms: int
) -> None:
    """Write queue offsets, physical offsets and the store time into the headers of the records.

    All are big-endian numbers, at positions that are not aligned.
    """
    size = int(records.sizes[0])
    if size * len(records) == len(records.data) and (records.sizes == size).all():
        # Records of one size form a matrix: no need to compute each position.
        headers: NDArray[np.void] = np.ndarray((len(records),), RECORD_HEAD, records.data, strides=(size,))
        if not (headers["sys_flag"] & BORN_HOST_V6).any():
            headers["queue_offset"], headers["physical_offset"], headers["store_timestamp"] = (
                offsets,
                physical_offsets,
                time_ms,
            )
            return
    positions = np.cumsum(records.sizes) - records.sizes
    numbers: NDArray[np.int64] = np.ndarray((len(records.data) - 7,), ">i8", records.data, strides=(1,))
    numbers[positions + _QUEUE_OFFSET_AT] = offsets
    numbers[positions + _PHYSICAL_OFFSET_AT] = physical_offsets
    # The encoder writes born hosts of IPv4. Records that are appended again keep theirs, and one of IPv6 is longer.
    shifts = born_host_shift(records.data[positions + _SYS_FLAG_LOW_AT])
    numbers[positions + shifts + _STORE_TIMESTAMP_AT] = time_ms
