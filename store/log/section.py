"""A critical section: what one writer does to a store while it holds the lock.

The order of writes in a section, and what a crash leaves at each step:

1. `abort` is there, on disk for good, before the first byte: whoever opens the store after a crash recovers it.
2. The watermark says that a section is open: the next of our writers looks only behind its end.
3. Records. Without units nobody sees them; a crash among them leaves what the next writer takes back. Then the
   watermark says that they are there: from here the next writer finishes what is left.
4. Units, then keys. A crash between two queues' units leaves messages that only the log knows; a broker would go on
   behind the largest physical offset of any queue and lose the others for ever, if `abort` were not there.
5. The registry of queues gets those that are new, synced: see `queue_registry.py`. After a crash before it, recovery
   registers them from the folders. Topics are registered when they are made, before topics.json names them.
6. The watermark says that the section is closed, and where. From here the messages survive the death of any process.
7. `settle`: everything is synced, then the checkpoint, then the watermark, then `abort` is taken away. From here they
   survive a power cut, and a broker calls the store closed in order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, OptionError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.record import BLANK_BYTES, BORN_HOST_V6, RECORD_HEAD, Blank, Record, Torn
from rmq_spark.store.format.whole_records import born_host_shift
from rmq_spark.store.log.placement import place_records
from rmq_spark.store.log.queue_registration import (
    follow_topics,
    refuse_lost_end,
    refuse_lost_queue,
    register_topics,
)
from rmq_spark.store.log.queue_writer import NewUnits
from rmq_spark.store.log.retention import Expired, Needed, expire
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.units import QueueKey

MAX_SECTION_BYTES = 64 << 20  # of log: bounds how long others wait for the lock

_FIELDS: Any = RECORD_HEAD.fields
_QUEUE_OFFSET_AT = _FIELDS["queue_offset"][1]
_PHYSICAL_OFFSET_AT = _FIELDS["physical_offset"][1]
_SYS_FLAG_LOW_AT = _FIELDS["sys_flag"][1] + 3  # the byte with the bits for hosts
_STORE_TIMESTAMP_AT = _FIELDS["store_timestamp"][1]  # behind a born host of IPv4


@dataclass(frozen=True, slots=True)
class Appended:
    """Where records went: queue offsets (messages) and physical offsets (bytes), one each; their store time (ms)."""

    queue_offsets: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    store_time_ms: int


class Guard(Protocol):
    """What a section asks of the store's lock: StoreLock, whose words these are."""

    @property
    def is_waited_for(self) -> bool:
        """Say whether a broker that starts waits for the release."""

    def refuse_broker(self, needed_s: float = 0) -> None:
        """Raise LockTimeoutError unless for `needed_s` seconds more no broker looks at the store."""


class Section:
    """What may be done under the lock. Made by StoreWriter, which has recovered the store; not to be kept behind it.

    `needed_from` says from which physical offset on the log must stay, None if nobody needs more of it than readers.
    """

    def __init__(self, store: StoreFiles, guard: Guard, needed_from: Callable[[], Needed | None]) -> None:
        self._store, self._guard, self._needed_from = store, guard, needed_from

    @property
    def is_waited_for(self) -> bool:
        """Say whether a broker that starts waits: end the section where that leaves nothing half done. Cheap."""
        return self._guard.is_waited_for

    @property
    def end(self) -> int:
        """Return the physical offset where the log ends."""
        return self._store.note.end

    @property
    def last_ms(self) -> int:
        """Return when the last message was stored, ms since the epoch: no message of the store has a later time."""
        return self._store.note.last_ms

    @property
    def segment_bytes(self) -> int:
        """Return the length of a segment, in bytes: a record may have 8 less."""
        return self._store.log_writer.segment_bytes

    def write_queues(self, topic: str) -> int | None:
        """Return over how many queues the topic's messages are spread, None if there is no such topic.

        Raises StorePathError for a topic that may not be written to.
        """
        return self._store.topics.write_queues(topic)

    def ensure_topic(self, topic: str, queue_count: int, perm: int = PERM_READ | PERM_WRITE) -> int:
        """Return the topic's number of queues; make it, for good, with `queue_count` of them if it is not there.

        Raises what `ensure_topics` raises; for many topics that is faster by orders of magnitude.
        """
        return self.ensure_topics((topic,), queue_count, perm)[topic]

    def ensure_topics(
        self, topics: Iterable[str], queue_count: int | Mapping[str, int], perm: int = PERM_READ | PERM_WRITE
    ) -> dict[str, int]:
        """Return each topic's number of queues; those that are not there are made together, for good.

        `queue_count` is one number for all topics, or a number for each of them. Raises OptionError for a name that no
        broker would take and StorePathError for a topic that may not be written to, before anything is made.
        """
        store = self._store
        return store.topics.ensure(
            topics, queue_count, store.now_ms(), perm, register=lambda made, text: register_topics(store, made, text)
        )

    def next_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset that the next message of a queue will get."""
        return self._store.next_offset(topic, queue_id)

    def append(self, records: EncodedRecords) -> Appended:
        """Append records, at most MAX_SECTION_BYTES of them, to the log, their queues and the key index.

        Once it returns they survive the death of any process. `records.data` is changed: offsets and store time are
        filled in. Raises OptionError for a record that no segment holds and DiskFullError where there is no room, both
        before anything is written; after any other error the next section finds out what there is. LockTimeoutError
        where a broker that starts will not wait until it is done, StoreError in a process that was forked from the one
        that holds the lock.
        """
        store = self._store
        store.note_progress()
        if not len(records):
            nothing = np.zeros(0, np.int64)
            return Appended(nothing, nothing, store.note.last_ms)
        self._refuse_oversize(records)
        store.refuse_full_disk(len(records.data), len(records))
        placement = place_records(records.sizes, store.note.end, self.segment_bytes)
        time_ms = max(store.now_ms(), store.note.last_ms)  # never runs back, whatever the clock does
        order = np.argsort(records.queue_numbers, kind="stable")
        if not store.registry.is_followed:  # once for each writer
            follow_topics(store, store.note.end)
        offsets = self._number(records, order)
        _fill_in(records, offsets, placement.physical_offsets, time_ms)
        store.open_section()
        self._guard.refuse_broker()
        levels = [key for key in records.queues if key.topic == SCHEDULE_TOPIC]
        if levels:
            store.delay_offsets.keep_within({key.queue_id + 1: store.queues.next_offset(key) for key in levels})
        store.log_writer.write(placement, records.data)
        # A broker that looked meanwhile appends over them: then no unit may speak of them, and nobody be told of them.
        self._guard.refuse_broker()
        # A crash before this takes all of them back, a crash after it has the next writer make their units.
        store.note_logged(placement.end)
        self._dispatch(records, order, offsets, placement.physical_offsets, time_ms)
        last_place = int(placement.physical_offsets[-1])
        last_head = records.data[len(records.data) - int(records.sizes[-1]) :][: RECORD_HEAD.itemsize].tobytes()
        self._guard.refuse_broker()
        store.close_section(placement.end, time_ms, last_place, last_head)
        return Appended(offsets, placement.physical_offsets, time_ms)

    def begin_sync(self) -> None:
        """Have the disk begin to write what was appended, for who will settle later. Promises nothing."""
        self._store.log_writer.begin_sync()

    def refuse_full_disk(self, log_bytes: int, record_count: int) -> None:
        """Raise DiskFullError if there is no room for so much log, in any folder that it may go to."""
        self._store.refuse_full_disk(log_bytes, record_count)

    def settle(self) -> None:
        """Have everything that anybody appended on disk for good, and leave the store as one closed in order.

        Raises LockTimeoutError where a broker that starts may look at the store before it is done; `abort` stays then.
        """
        self._store.note_progress()
        self._store.settle()

    def expire(self, max_age_ms: int | None = None, max_bytes: int | None = None) -> Expired:
        """Delete the oldest segments, by age of their messages (ms) and by size of the log (bytes); see `retention`."""
        self._store.note_progress()
        return expire(self._store, max_age_ms, max_bytes, self._needed_from)

    def note_progress(self) -> None:
        """Tell those who wait for the lock that its holder gets on: in long work that appends nothing."""
        self._store.note_progress()

    def records_from(self, physical_offset: int) -> Iterator[Record]:
        """Yield the log's records from one on, in their order, to its end: for recovery, one by one.

        Raises DamageError where no whole record of this place stands before the end: who counts must not count short.
        """
        log, place = self._store.log, physical_offset
        while place < self.end:
            record = log.record_at(place)
            if isinstance(record, Record) and record.crc_matches:
                size, why = record.total_size, "a record"
            elif isinstance(record, Blank):
                size, why = self.segment_bytes - place % self.segment_bytes, "a filler"
            else:
                size, why = 0, record.why if isinstance(record, Torn) else "a body with another CRC"
            if not 0 < size <= self.end - place:
                segment = log.segments.holding(place)
                raise DamageError(
                    "what stands before the log's end",
                    segment.path if segment else self._store.folders[0],
                    place - (segment.begin if segment else 0),
                    f"a whole record, or a filler, in the log that ends at {self.end}",
                    f"{why} of {size} bytes" if size else why,
                )
            if isinstance(record, Record):
                yield record
            place += size

    def record_from(self, physical_offset: int) -> Record | None:
        """Return the first record from a physical offset on; None at the log's end, and where no whole one starts."""
        try:
            return next(self.records_from(physical_offset), None)
        except DamageError:
            return None

    def _refuse_oversize(self, records: EncodedRecords) -> None:
        assert len(records.data) <= MAX_SECTION_BYTES or len(records) == 1, len(records.data)
        largest = int(np.argmax(records.sizes))
        size = int(records.sizes[largest])
        if size + BLANK_BYTES > self.segment_bytes:
            topic = records.queues[int(records.queue_numbers[largest])].topic
            raise OptionError(
                f'a message to topic "{topic}" takes {size} bytes as a record, and a segment of this store holds '
                f"{self.segment_bytes - BLANK_BYTES}. Send it in parts, or into a store with larger segments "
                "(mappedFileSizeCommitLog). Nothing was written."
            )

    def _number(self, records: EncodedRecords, order: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the queue offset of every record. `order` has the records queue by queue."""
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
        """Return the queue offset of a queue's next message. Raises DamageError for one that lost files or units."""
        store = self._store
        offset = store.queues.next_offset(key)
        if key not in store.sound_queues:  # once for each writer
            store.queues.refuse_hole(key, store.note.end)
            store.sound_queues.add(key)
        newest = store.queues.newest_unit(key)
        if newest is not None and newest >= 0:  # it is about to get another file
            refuse_lost_end(store, store.queues.queue(key), newest)
        elif newest is not None and not offset:
            refuse_lost_queue(store, key, store.note.end)
        return offset

    def _dispatch(
        self,
        records: EncodedRecords,
        order: NDArray[np.intp],
        offsets: NDArray[np.int64],
        places: NDArray[np.int64],
        time_ms: int,
    ) -> None:
        tags_codes, first = records.tags_codes[order], 0
        counts = np.bincount(records.queue_numbers, minlength=len(records.queues)).tolist()
        for key, count in zip(records.queues, counts, strict=True):
            if key.topic == SCHEDULE_TOPIC:
                tags_codes[first : first + count] = time_ms + self._due_after_ms(key.queue_id)
            first += count
        units = NewUnits(
            places[order], records.sizes[order], tags_codes, offsets[order], np.full(len(records), time_ms)
        )
        first = 0
        for key, count in zip(records.queues, counts, strict=True):
            if count:
                self._guard.refuse_broker()
                self._store.queues.put(key, units.part(first, first + count))
            first += count
        self._store.index.put_many(
            records.key_hashes, places[records.key_rows], np.full(len(records.key_rows), time_ms)
        )

    def _due_after_ms(self, queue_id: int) -> int:
        """Return after how long a message is due that waits in a queue of SCHEDULE_TOPIC_XXXX: as recovery finds it."""
        levels = self._store.levels
        return levels.due_after_ms(levels.clamp(queue_id + 1))


def _fill_in(records: EncodedRecords, offsets: NDArray[np.int64], places: NDArray[np.int64], time_ms: int) -> None:
    """Write into every record what only the store knows: big-endian numbers at places that need no alignment."""
    size = int(records.sizes[0])
    if size * len(records) == len(records.data) and (records.sizes == size).all():
        # Records of one size are rows of a matrix: no need to look each one up.
        heads: NDArray[np.void] = np.ndarray((len(records),), RECORD_HEAD, records.data, strides=(size,))
        if not (heads["sys_flag"] & BORN_HOST_V6).any():
            heads["queue_offset"], heads["physical_offset"], heads["store_timestamp"] = offsets, places, time_ms
            return
    positions = np.cumsum(records.sizes) - records.sizes
    numbers: NDArray[np.int64] = np.ndarray((len(records.data) - 7,), ">i8", records.data, strides=(1,))
    numbers[positions + _QUEUE_OFFSET_AT] = offsets
    numbers[positions + _PHYSICAL_OFFSET_AT] = places
    # The encoder writes born hosts of IPv4; records that are made again keep theirs, and one of IPv6 is longer.
    shifts = born_host_shift(records.data[positions + _SYS_FLAG_LOW_AT])
    numbers[positions + shifts + _STORE_TIMESTAMP_AT] = time_ms
