"""Where the believable log ends, and where each queue ends before it, found without recovery and without a lock.

A broker keeps both in memory only. On disk, whole-looking records and units may stand behind the end: a broker
that recovers moves its positions back and leaves the bytes. So a reader believes a unit only if

1. the record at its physical offset names the same queue id, queue offset, physical offset and length, and
2. that record belongs to the chain of records that leads, each ending where the next begins, from a place
   that is certainly live to the end of the log. The chain is made of the units' own extents, as columns;
   only a record that no unit names is decoded by itself.

Where the chain runs on into older bytes because lengths happen to agree, time gives them away (`_cut_stale`).
Readers end where the units end: what was logged and has no unit yet belongs to a writer's repair.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.checkpoint import Checkpoint
from rmq_spark.store.format.record import (
    RECORD_HEAD,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    Blank,
    Record,
    Torn,
)
from rmq_spark.store.log.chain import Chain, Closing, Left
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.log.standstill import MANY_QUEUES, AwaitedUnit, Standstill
from rmq_spark.store.log.unit_agreement import compare_heads
from rmq_spark.store.log.unit_judge import UnitJudge, no_queue
from rmq_spark.store.units import QueueKey


class LogTail:
    """The ends, as of the last `look`. `ends` counts units of each queue; `faults` names queues not to be trusted.

    One thread at a time. Looks are cheap where little was appended since the one before.
    """

    def __init__(
        self,
        log: CommitLog,
        left: Callable[[], Left],
        checkpoint: Callable[[], Checkpoint],
        may_exist: Callable[[str], bool],
        last_indexed: Callable[[], int],
    ) -> None:
        self._log, self._left, self._checkpoint = log, left, checkpoint
        self._may_exist, self._last_indexed = may_exist, last_indexed
        self._judge = UnitJudge(log, checkpoint, last_indexed)
        self.begin = 0  # physical offset from which the last whole look followed all records
        self.end = 0
        self.ends: dict[QueueKey, int] = {}
        self._last_places: dict[QueueKey, int] = {}  # physical offset of each queue's last unit
        self.faults: dict[QueueKey, StoreError] = {}
        self._unreadable: dict[QueueKey, tuple[ConsumeQueue, StoreError]] = {}  # what files they have
        self.pending: set[QueueKey] = set()  # queues with a logged message that has no unit yet
        # Where the next look starts: behind the last record that has a unit. What has none yet may still be
        # taken back by the restart of a writer that died.
        self._base = 0
        self._newest_ms = -1  # store time
        self._last_record: tuple[int, bytes] = (0, b"")
        self._waiting: list[Record] = []  # logged, and without a unit when last seen
        self._standstill: Standstill | None = None  # None: look again

    def is_idle(self, has_folder: Callable[[QueueKey], bool]) -> bool:
        """Say whether nothing can have moved since the last look: a few small reads, whatever the number of queues.

        `has_folder` asks the disk whether a queue has one by now.
        """
        return (
            self._standstill is not None
            and self._standstill.holds(self._log, self._left, has_folder)
            and not self.is_rewritten()
        )

    def appended(self, at_most: int) -> set[QueueKey] | None:
        """Return the queues of the records appended since the last look; None if there are too many to say."""
        found, place = self.pending | self.faults.keys(), self._base
        for _ in range(at_most):
            record = self._log.record_at(place)
            if isinstance(record, Blank):
                segment = self._log.segments.holding(place)
                if segment is None or self._log.segments.holding(segment.end) is None:
                    return found
                place = segment.end
            elif isinstance(record, Torn):
                return found
            else:
                found.add(QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id))
                place += record.total_size
        return None

    @property
    def newest_ms(self) -> int:
        """Return the newest store time (ms) up to the end, -1 without a message."""
        return self._newest_ms

    @property
    def last_record(self) -> tuple[int, bytes]:
        """Return the place of the last record that has a unit, and its head; (0, b"") without one."""
        return self._last_record

    def first_unitless(self) -> int:
        """Return a physical offset up to which every message has its unit, but for those of topics that were deleted.

        At the latest where the first message begins whose unit is missing or is not believed.
        """
        return min(self._base, min((record.physical_offset for record in self._waiting), default=self.end))

    def is_rewritten(self) -> bool:
        """Say whether what was seen is nothing to go on from: look at everything again.

        Either the last record is no longer what stands there, or files that could not be read have been mended.
        """
        place, head = self._last_record
        if head and self._log.bytes_at(place, RECORD_HEAD.itemsize) != head:
            return True
        for queue, fault in self._unreadable.values():
            queue.run.look()
            if str(queue.run.fault()) != str(fault):
                return True
        return False

    def look(
        self,
        queues: Mapping[QueueKey, ConsumeQueue],
        among: Iterable[QueueKey],
        *,
        whole: bool,
        left: Left | None = None,
    ) -> None:
        """Find the ends anew: from the last segment on (`whole`), or from the last end on in the queues `among` all.

        `left` is how the store was left before its files were listed. A writer may have made more of them since and
        closed the store: what is not listed must not be taken for lost.
        """
        left, self._standstill = left or self._left(), None
        try:
            self._look(queues, list(among), left, whole=whole)
            if not self.faults or self._left() == left:
                return
        except DamageError:
            if self._left() == left:
                raise
        # A writer came while we looked: what seemed to be missing from a store at rest may only be late.
        self._look(queues, list(among), replace(left, closing=Closing.LIVE), whole=whole)

    def _look(self, queues: Mapping[QueueKey, ConsumeQueue], among: list[QueueKey], left: Left, *, whole: bool) -> None:
        if whole:
            self._base, self.ends, self._last_record = self._live_begin(left.closing), {}, (0, b"")
            self._waiting, self._newest_ms, self._last_places, self.begin = [], -1, {}, self._base
        base = self._base
        seen = self._read_units(queues, among, whole=whole)
        flags, chained = self._chain(base, seen, left)
        self.end = chained.end
        unnamed = _messages_by_topic(chained.unitless) if left.closing is Closing.CLOSED else {}
        unconfirmed: dict[QueueKey, int] = {}
        doubted: dict[QueueKey, DamageError] = {}
        for key, (begin, units) in seen.items():
            believed = flags[key] & (units.physical_offsets + units.sizes <= self.end)
            last = int(np.flatnonzero(believed)[-1]) + 1 if believed.any() else 0
            if left.closing is Closing.CRASHED and not believed[:last].all():
                last = int(np.argmin(believed))  # a power cut lost units in the middle: the queue ends before them
            confirmed = self._judge.confirm(key, units, last, left.closing)
            self.ends[key] = begin + confirmed
            if confirmed:
                self._last_places[key] = int(units.physical_offsets[confirmed - 1])
            if confirmed < last:
                unconfirmed[key] = int(units.physical_offsets[confirmed])
            fault = None
            if left.closing is Closing.CLOSED:
                behind = units.part(confirmed, len(units))
                fault = self._judge.fault_behind(
                    queues, key, begin + confirmed, behind, last - confirmed, chained, unnamed.get(key.topic, {})
                )
            if whole and not len(units) and left.closing is not Closing.LIVE:
                fault = self._judge.fault_of_older_end(queues[key], begin)
            if fault is not None:
                doubted[key] = fault
        self._remember(chained, min(unconfirmed.values(), default=chained.end))
        self._newest_ms = chained.newest_ms()
        # Records behind the last unit are met again by the next look; those before it are kept in mind.
        self._waiting = [record for record in self._waiting if record.physical_offset < base] + chained.unitless
        self._judge_waiting(chained, queues, left.closing)
        self.pending |= unconfirmed.keys()
        self.faults.update(doubted)
        self.faults.update({key: fault for key, (_, fault) in self._unreadable.items()})
        self._standstill = self._stand(queues, seen, chained, left)

    def _stand(
        self,
        queues: Mapping[QueueKey, ConsumeQueue],
        seen: Mapping[QueueKey, tuple[int, Units]],
        chained: Chain,
        left: Left,
    ) -> Standstill | None:
        """Return what is not to change until it is worth while to look again, None if that is at once."""
        if not self.pending and not self.faults and chained.refused_ms is None:
            return Standstill(self.end)
        homeless = self.pending - queues.keys()
        waiting = self.pending & queues.keys()
        if len(self.pending) > MANY_QUEUES or not waiting <= seen.keys():
            return None
        awaited = []
        for key in waiting:
            begin, units = seen[key]
            at = self.ends[key] - begin
            awaited.append(AwaitedUnit(queues[key], self.ends[key], units.part(at, at + 1)))
        return Standstill(self.end, chained.refused_ms, left, tuple(awaited), frozenset(homeless))

    def _read_units(
        self, queues: Mapping[QueueKey, ConsumeQueue], among: list[QueueKey], *, whole: bool
    ) -> dict[QueueKey, tuple[int, Units]]:
        """Return the number of the first unit that this look has to judge, and the units, where files can be read."""
        if whole:
            self._unreadable = {}
        for gone in self._unreadable.keys() - queues.keys():
            del self._unreadable[gone]
        seen = {}
        for key in among:
            queue = queues[key]
            fault = queue.run.fault()
            if fault is not None:
                self._unreadable[key] = queue, fault
                self.ends.pop(key, None)
                continue
            begin, end = self._unread(queue, self._base, whole=whole)
            seen[key] = begin, queue.read(begin, end)
            queue.run.close()  # there may be more queues than a process may have files open
        return seen

    def _live_begin(self, closing: Closing) -> int:
        """Return where a segment begins whose records before it are beyond doubt.

        That is the last segment with a record; after a crash the last one that was flushed as a whole before
        the checkpoint (CommitLog#recoverAbnormally, 5.3), since a power cut may have torn what came later.
        """
        flushed_ms = self._checkpoint().min_timestamp if closing is Closing.CRASHED else None
        for segment in reversed(self._log.segments.segments):
            record = self._log.record_at(segment.begin)
            if isinstance(record, Record) and (flushed_ms is None or record.store_timestamp <= flushed_ms):
                return segment.begin
        return self._log.segments.begin

    def _unread(self, queue: ConsumeQueue, base: int, *, whole: bool) -> tuple[int, int]:
        """Return the range of written units that this look has to judge."""
        known = self.ends.get(queue.key)
        if whole or known is None or self._is_another(queue, known):
            end = queue.search_written_end()
            return queue.first_from(base, end), end
        return known, queue.written_end(known)

    def _is_another(self, queue: ConsumeQueue, known: int) -> bool:
        """Say whether the queue was made anew since the last look: its topic was deleted and created again."""
        place = self._last_places.get(queue.key)
        units = queue.read(known - 1, known) if known > queue.run.begin else None
        return place is not None and units is not None and (not len(units) or int(units.physical_offsets[0]) != place)

    def _chain(
        self, base: int, seen: Mapping[QueueKey, tuple[int, Units]], left: Left
    ) -> tuple[dict[QueueKey, NDArray[np.bool_]], Chain]:
        """Check all units against their records and follow the chain of those that agree."""
        keys = list(seen)
        lengths = [len(seen[key][1]) for key in keys]
        places = np.concatenate([np.zeros(0, np.int64), *(seen[key][1].physical_offsets for key in keys)])
        sizes = np.concatenate([np.zeros(0, np.int64), *(seen[key][1].sizes for key in keys)])
        offsets = np.concatenate([np.zeros(0, np.int64), *(seen[key][1].queue_offsets for key in keys)])
        queue_ids = np.repeat(np.array([key.queue_id for key in keys], np.int64), lengths)
        order = np.argsort(places, kind="stable")
        agree, times = compare_heads(self._log, places[order], sizes[order], offsets[order], queue_ids[order])
        chosen = order[agree]
        chained = Chain(self._log, places[chosen], sizes[chosen], times[agree], base, self._newest_ms)
        chained.settle(left, self._checkpoint, self._last_indexed)
        flags = np.zeros(len(places), np.bool_)
        flags[chosen] = True
        parts = np.split(flags, np.cumsum(lengths)[:-1]) if keys else []
        return dict(zip(keys, parts, strict=True)), chained

    def _judge_waiting(self, chained: Chain, queues: Mapping[QueueKey, ConsumeQueue], closing: Closing) -> None:
        """Sort the messages without a unit: still to come, or, in a store closed in order, a sign of damage."""
        self.faults, self.pending = {}, set()
        last_unit_place = int(chained.physical_offsets[-1]) if len(chained.physical_offsets) else -1
        waiting = []
        for record in self._waiting:
            if not _gets_unit(record):
                continue
            key = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
            queue = queues.get(key)
            if queue is None and record.physical_offset < last_unit_place and not self._may_exist(key.topic):
                continue  # later messages have units: this one had its own until its topic was deleted
            if queue is None and closing is Closing.CLOSED and self._may_exist(key.topic):
                self.faults.setdefault(key, no_queue(record, key))
            end = self.ends.get(key)
            if queue is not None and end is not None and record.queue_offset < queue.offset_of(end, end):
                continue  # it has come
            if queue is not None and record.physical_offset < self._last_places.get(key, -1):
                continue  # the queue's own last record lies behind it: it is of a topic that was deleted and made anew
            waiting.append(record)
            if closing is not Closing.CLOSED and key not in self._unreadable:
                self.pending.add(key)
            if queue is not None and end is not None and key not in self.faults:
                fault = self._judge.fault(queue, end, record, closing)
                if fault is not None:
                    self.faults[key] = fault
        self._waiting = waiting

    def _remember(self, chained: Chain, before: int) -> None:
        """Keep the place behind the last record `before` a place that has a unit, and its head.

        A later look starts there, and notices by the head that the log was written anew.
        """
        live = np.flatnonzero(chained.physical_offsets < min(before, chained.end))
        if len(live):
            place = int(chained.physical_offsets[live[-1]])
            self._last_record = place, self._log.bytes_at(place, RECORD_HEAD.itemsize)
            self._base = max(self._base, place + int(chained.sizes[live[-1]]))


def _gets_unit(record: Record) -> bool:
    """Say whether a queue names the message: prepared and rolled back ones never get a unit."""
    return record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)


def _messages_by_topic(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Return those records that should have a unit, by topic and physical offset."""
    found: dict[str, dict[int, Record]] = {}
    for record in filter(_gets_unit, records):
        found.setdefault(record.topic.decode("utf-8", "replace"), {})[record.physical_offset] = record
    return found
