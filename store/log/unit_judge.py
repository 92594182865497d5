"""Single units under suspicion: late, stale, or damaged?

The columns of `tail.LogTail` judge units by the thousand. What is left over comes here, one by one: the last units of a
queue, and messages whose unit is not there.
"""

from collections.abc import Callable, Mapping

import numpy as np

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_body import message_count
from rmq_spark.store.format.checkpoint import Checkpoint
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import TAGS, parse
from rmq_spark.store.format.record import Blank, Record, Torn
from rmq_spark.store.format.unit_ext import is_address
from rmq_spark.store.log.chain import Chain, Closing
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.units import QueueKey


class UnitJudge:
    """Judges units of one store by what it finds in the log. Keeps nothing.

    `last_indexed` tells the physical offset of the last message that the key index knows, -1 if it knows none.
    """

    def __init__(self, log: CommitLog, checkpoint: Callable[[], Checkpoint], last_indexed: Callable[[], int]) -> None:
        self._log, self._checkpoint, self._last_indexed = log, checkpoint, last_indexed

    def fault_behind(
        self,
        queues: Mapping[QueueKey, ConsumeQueue],
        key: QueueKey,
        unit: int,
        units: Units,
        agreeing: int,
        chained: Chain,
        unnamed: Mapping[int, Record],
    ) -> DamageError | None:
        """Return what is wrong with the written units behind a queue's end, of a store that was closed in order.

        `units` begin with number `unit`; the first `agreeing` of them agree with the head of their record. `unnamed`
        are the messages of the topic that no unit agrees with, by physical offset. None if the units can be what a
        truncation left behind.
        """
        if not len(units):
            return None
        queue = queues[key]
        if agreeing:
            fault = self._lost(queues, queue, unit, units)
        else:
            fault = self._beyond(queue, unit, int(units.physical_offsets[0]), chained)
        return fault or self._misnamed(queue, unit, units, unnamed)

    def _beyond(self, queue: ConsumeQueue, unit: int, place: int, chained: Chain) -> DamageError | None:
        """A truncation leaves whole records behind the log's end that are older than the newest message before it.

        Zeros, torn bytes and newer records are what damage leaves, or a power cut: units may outlive one that their
        records did not. The broker that recovers such a store moves the queue's end in memory and leaves those units
        (ConsumeQueue#truncateDirtyLogicFiles, 4.9, 5.3).
        """
        if place < chained.end or self._checkpoint().confirm_phy_offset == chained.end > 0:
            return None
        record = self._log.record_at(place)
        if isinstance(record, Record) and record.store_timestamp < chained.newest_ms():
            return None
        if chained.is_all_that_was_known(self._checkpoint(), self._last_indexed):
            return None
        path, position = queue.run.path_of(unit)
        return DamageError(
            f"a unit of queue {queue.key} behind the end of the log, which is at {chained.end}",
            path,
            position,
            f"one for the record at {place}",
            record.why if isinstance(record, Torn) else "another one",
        )

    def _misnamed(
        self, queue: ConsumeQueue, unit: int, units: Units, unnamed: Mapping[int, Record]
    ) -> DamageError | None:
        """A unit that names place and size of a message of its topic was that message's, whatever the message says.

        Every message has its unit, and this one has no other: unit or record is damaged. A stale unit that meets a
        newer record meets one that has a unit of its own.
        """
        for at in np.flatnonzero(np.isin(units.physical_offsets, list(unnamed))).tolist():
            record = unnamed[int(units.physical_offsets[at])]
            if int(units.sizes[at]) == record.total_size:
                path, position = queue.run.path_of(unit + at)
                return DamageError(
                    f"a unit of queue {queue.key} for the record at physical offset {record.physical_offset}",
                    path,
                    position,
                    f"queue offset {int(units.queue_offsets[at])} of queue {queue.key.queue_id} in the record",
                    f"queue offset {record.queue_offset} of queue {record.queue_id}",
                )
        return None

    def _lost(
        self, queues: Mapping[QueueKey, ConsumeQueue], queue: ConsumeQueue, unit: int, units: Units
    ) -> DamageError | None:
        """A unit that agrees with the head of its record and is not believed all the same: only a stale one may.

        That is one whose record is another queue's, which has a unit for it.
        """
        place = int(units.physical_offsets[0])
        record = self._log.record_at(place)
        if isinstance(record, Record):
            owner = queues.get(QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id))
            if owner is not None and owner is not queue:
                if owner.run.is_damaged():
                    return None  # nobody knows what units it has
                if record.queue_offset >= owner.run.begin:
                    end = owner.search_written_end()
                    is_held = record.queue_offset < owner.offset_of(end, end)
                    at = owner.unit_of(record.queue_offset, end) if is_held else end
                    if place in owner.read(at, at + 1).physical_offsets:
                        return None
        path, position = queue.run.path_of(unit)
        found = record.why if isinstance(record, Torn) else "a record that does not agree with it"
        return DamageError(f"a unit of queue {queue.key}", path, position, "one for a whole record", found)

    def fault_of_older_end(self, queue: ConsumeQueue, end: int) -> DamageError | None:
        """Return what is wrong if the last unit of a queue that has none in the last segment is not its record's."""
        units = queue.read(max(end - 1, queue.run.begin), end)
        if not len(units) or int(units.physical_offsets[0]) < self._log.segments.begin:
            return None  # nothing there, or expired
        if self.confirm(queue.key, units, 1, Closing.CLOSED):
            return None
        record = self._log.record_at(int(units.physical_offsets[0]))
        path, position = queue.run.path_of(end - 1)
        found = record.why if isinstance(record, Torn) else "a record that does not agree with it"
        return DamageError(f"the last unit of queue {queue.key}", path, position, "one for its record", found)

    def confirm(self, key: QueueKey, units: Units, last: int, closing: Closing) -> int:
        """Step back from the last believed units that are another queue's record or only half written.

        The columns compare no topic: in a queue that a broker truncated, a stale unit could meet a newer record
        of another topic with the same queue id and offset. And a unit that is being written may show its
        position before its tags code.
        """
        while last:
            record = self._log.record_at(int(units.physical_offsets[last - 1]))
            same = isinstance(record, Record) and record.topic.decode("utf-8", "replace") == key.topic
            counted = units.message_counts is None or int(units.message_counts[last - 1]) == message_count(record)
            if (
                same
                and counted
                and (closing is Closing.CLOSED or _tags_agree(key, int(units.tags_codes[last - 1]), record))
            ):
                break
            last -= 1
        return last

    def fault(self, queue: ConsumeQueue, end: int, record: Record, closing: Closing) -> DamageError | None:
        """Return what is wrong if the unit that the record should have cannot be merely late."""
        late = record.queue_offset - queue.offset_of(end, end)
        if closing is Closing.LIVE or (late and closing is Closing.CRASHED):
            return None
        found = queue.read(end, end + 1)
        written = len(found) > 0 and int(found.sizes[0]) > 0
        if closing is Closing.CRASHED and not written:
            return None
        same = (record.physical_offset, record.total_size)
        if closing is Closing.CRASHED and (found.physical_offsets[0], found.sizes[0]) == same:
            return None  # its writer died before the rest of it
        path, position = queue.run.path_of(end)
        unit = f"({found.physical_offsets[0]}, {found.sizes[0]})" if written else "nothing"
        return no_unit(record, queue.key, path, position, unit)


def no_unit(record: Record, key: QueueKey, path: str, position: int, found: str = "nothing") -> DamageError:
    """Return the error for a message that has no unit."""
    return DamageError(
        f"the unit of queue offset {record.queue_offset} of {key}, whose record lies at physical offset "
        f"{record.physical_offset}",
        path,
        position,
        f"({record.physical_offset}, {record.total_size})",
        found,
    )


def no_queue(record: Record, key: QueueKey) -> DamageError:
    """Return the error for a message whose queue has no files."""
    return DamageError(
        f"queue {key} has no files, and a message of it is in the log at physical offset {record.physical_offset}",
        f"{filenames.CONSUME_QUEUE}/{key}",
        0,
        f"({record.physical_offset}, {record.total_size})",
        "nothing",
        "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log. If a broker deleted the topic and "
        "created it again, send the queue's first message through a broker.",
    )


def _tags_agree(key: QueueKey, tags_code: int, record: Record | Blank | Torn) -> bool:
    """Say whether a unit's tags code is that of its record's tags (MessageExtBrokerInner#tagsString2tagsCode)."""
    if key.topic == filenames.SCHEDULE_TOPIC or is_address(tags_code) or not isinstance(record, Record):
        return True  # a due time, or an address
    tags = parse(record.properties).get(TAGS)
    return tags_code == (string_hash(tags) if tags else 0)
