"""Orphan entries: consume-queue entries that were written but do not agree with any record.

Most of them are harmless: fill, entries of expired records, and entries that remained at a queue's end after the log
was truncated. The others refer to records that were lost, or to records that contain another queue or queue offset.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, is_blank_fill
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.record_chain import ShutdownState
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.check_context import READ_AROUND, REBUILD_STEP, CheckContext, area_of
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity
from rmq_spark.store.tools.join_entries import EntryRanges, Mismatch
from rmq_spark.store.tools.log_walk import LogFault

_LOOKUPS_MAX = 5_000  # records that are read one by one; bounds the time if everything is damaged
_LOST_STEP = (
    "The records were not on disk when the power failed. Restore the commit log from a copy, or continue without them: "
    "start a writer."
)
_TRUNCATED_STEP = (
    "The records were not on disk when the power failed, and were not acknowledged as durable. The next writer removes "
    "the entries; rmq_spark.repair does it now."
)

# Kinds of orphans. _REPORTED: another finding is about it. For example, a missing record in the middle of a queue is
# reported as a gap between the queue offsets of its neighbours.
_BEYOND_LOG, _GARBAGE, _EARLY, _MISNAMED, _REPORTED = "beyond log", "garbage", "early", "misnamed", "reported"


@dataclass(frozen=True, slots=True)
class OrphanEntries:
    """Orphan entries of one queue, and their numbers in the queue, ascending.

    Fill entries and entries of expired records are not included. `fill` and `expired` are their numbers.
    """

    numbers: NDArray[np.int64]
    entries: NDArray[np.void]
    expired: int
    fill: int

    @property
    def physical_offsets(self) -> NDArray[np.int64]:
        """The physical offsets that the entries contain."""
        return self.entries["physical_offset"].astype(np.int64)

    def offsets(self) -> NDArray[np.int64]:
        """Return the queue offset of each entry; for an entry of a batch queue, that of its first message."""
        if self.entries.dtype == BATCH_UNIT:
            return self.entries["base_offset"].astype(np.int64)
        return self.numbers

    def counts(self) -> NDArray[np.int64]:
        """Return the number of messages of each entry. It is 1 for an entry of a plain queue."""
        if self.entries.dtype == BATCH_UNIT:
            return np.clip(self.entries["message_count"].astype(np.int64), 0, None)
        return np.ones(len(self.numbers), np.int64)


def find_orphans(queue: ConsumeQueue, matched: EntryRanges, log_begin: int) -> Iterator[OrphanEntries]:
    """Yield the written entries of a queue that are not in `matched`, in several parts.

    Holes of sparse files are not read. `log_begin` is the begin of the commit log: entries for earlier records are
    expired.
    """
    run, size = queue.run, queue.layout.itemsize
    for begin, end in matched.gaps(queue.key, run.begin, run.end):
        for segment in run.segments:
            first, last = max(begin * size, segment.begin), min(end * size, segment.end)
            if first >= last:
                continue
            extents = files.data_extents(segment.path, first - segment.begin, last - segment.begin)
            with contextlib.suppress(StoreChangedError):  # retention has deleted the file
                for extent_begin, extent_end in extents:
                    number = max((segment.begin + extent_begin) // size, begin)
                    stop = min(-(-(segment.begin + extent_end) // size), end)
                    if number < stop:
                        yield _orphans_in(number, run.read(number, stop), log_begin)
    run.close()


def _orphans_in(number: int, entries: NDArray[np.void], log_begin: int) -> OrphanEntries:
    numbers = number + np.arange(len(entries), dtype=np.int64)
    written = entries.view((np.uint8, entries.dtype.itemsize)).any(axis=1)
    fill = is_blank_fill(entries)
    ends = entries["physical_offset"].astype(np.int64) + entries["record_size"]
    expired = ~fill & (entries["record_size"] > 0) & (entries["physical_offset"] >= 0) & (ends <= log_begin) & written
    kept = written & ~fill & ~expired
    return OrphanEntries(numbers[kept], entries[kept], int(expired.sum()), int((fill & written).sum()))


def orphan_findings(
    context: CheckContext,
    queue: ConsumeQueue,
    orphans: OrphanEntries,
    blamed: set[int],
    lost: dict[QueueKey, list[tuple[int, int]]],
) -> Iterator[Finding]:
    """Yield the findings about orphan entries of one queue.

    If a finding is about a record that differs from its entry, the record's physical offset is added to `blamed`. If a
    finding is about lost messages, the range of their queue offsets is added to `lost`.
    """
    offsets, counts = orphans.offsets(), orphans.counts()
    in_faults: list[tuple[LogFault, int, int]] = []
    first: dict[str, int] = {}  # kind -> number of the first entry of this kind
    count: Counter[str] = Counter()
    for at in range(len(orphans.numbers)):
        kind = _kind_of(context, queue, orphans, at)
        if isinstance(kind, LogFault):
            begin, end = int(offsets[at]), int(offsets[at] + counts[at])
            if in_faults and in_faults[-1][0] is kind and in_faults[-1][2] == begin:
                in_faults[-1] = kind, in_faults[-1][1], end
            else:
                in_faults.append((kind, begin, end))
            continue
        if kind == _MISNAMED:
            finding, is_stale = _judge_misnamed(context, queue, orphans, at, blamed)
            if finding is not None:
                yield finding
            kind = _GARBAGE if is_stale else _REPORTED
        first.setdefault(kind, int(orphans.numbers[at]))
        count[kind] += 1
    for fault, begin, end in in_faults:
        lost.setdefault(queue.key, []).append((begin, end))
        segment = context.log.segments.holding(fault.begin)
        where = "are in damaged bytes" if segment else "were in a missing segment"
        yield Finding(
            severity=Severity.DAMAGE,
            area=Area.COMMIT_LOG,
            what=f"messages whose records {where}, physical offsets [{fault.begin}, {fault.end})",
            path=segment.path if segment else context.log.missing_path(fault.begin),
            position=fault.begin - segment.begin if segment else 0,
            expected=fault.expected,
            found=fault.found,
            topic=queue.key.topic,
            queue_id=queue.key.queue_id,
            begin=begin,
            end=end,
            messages=end - begin,
            next_step=READ_AROUND,
            action=Action.LOST,
        )
    for kind, number in first.items():
        if kind == _BEYOND_LOG:
            yield _beyond_log_finding(context, queue, number, count[kind])
        elif kind != _REPORTED:
            yield _stale_finding(context, queue, kind, number, count[kind])


def _kind_of(context: CheckContext, queue: ConsumeQueue, orphans: OrphanEntries, at: int) -> str | LogFault:
    """Return the kind of the orphan with index `at`, or the fault that covers its record."""
    physical_offset, number = int(orphans.physical_offsets[at]), int(orphans.numbers[at])
    size = int(orphans.entries["record_size"][at])
    fault = context.fault_at(physical_offset) if physical_offset >= 0 else None
    if fault is not None:
        return fault
    if 0 <= physical_offset < context.end and size > 0:
        return _MISNAMED
    if number >= context.queue_end(queue.key):
        return _BEYOND_LOG if physical_offset >= 0 and size > 0 else _GARBAGE
    first_matched = context.joined.matched.begin(queue.key)
    return _EARLY if first_matched is None or number < first_matched else _REPORTED


def _stale_finding(context: CheckContext, queue: ConsumeQueue, kind: str, number: int, count: int) -> Finding:
    """Return the finding about `count` orphans before the first or after the last message of a queue.

    `number` is the number of the first of these entries. `kind` is _EARLY or _GARBAGE.
    """
    path, position = queue.run.path_of(number)
    entries = "entry" if count == 1 else "entries"
    if kind == _EARLY:
        return Finding(
            severity=Severity.REPAIRABLE,
            area=area_of(queue),
            what=f"{count} {entries} before the first message of queue {queue.key}, neither fill nor expired",
            path=path,
            position=position,
            expected=f"fill, or a record below physical offset {context.begin}",
            found=f"{queue.run.read(number, number + 1)[0].item()}",
            topic=queue.key.topic,
            queue_id=queue.key.queue_id,
            next_step=f"Readers may refuse the queue. {REBUILD_STEP}",
            action=Action.REBUILD,
        )
    is_next = number == context.queue_end(queue.key)
    is_serious = is_next and context.shutdown is not ShutdownState.LIVE
    return Finding(
        severity=Severity.REPAIRABLE if is_serious else Severity.NOTE,
        area=area_of(queue),
        what=f"{count} {entries} after the last message of queue {queue.key}, of none of its messages",
        path=path,
        position=position,
        expected="zeros",
        found="entries",
        topic=queue.key.topic,
        queue_id=queue.key.queue_id,
        next_step=f"A broker that starts may take them for messages. {REBUILD_STEP}" if is_next else "",
        action=Action.REBUILD if is_next else Action.LEAVE,
    )


def _beyond_log_finding(context: CheckContext, queue: ConsumeQueue, number: int, count: int) -> Finding:
    """Return the finding about `count` entries for records after the log's end. `number` is that of the first one.

    Either the log was truncated and the entries remained, or a power failure destroyed the records.
    """
    path, position = queue.run.path_of(number)
    physical_offset = int(queue.run.read(number, number + 1)["physical_offset"][0])
    record = context.log.record_at(physical_offset)
    is_stale = isinstance(record, Record) and record.store_timestamp < context.newest_ms
    is_stale |= context.shutdown is not ShutdownState.CRASHED
    finding = Finding(
        severity=Severity.NOTE,
        area=area_of(queue),
        what=f"{count} entries of queue {queue.key} for records after the log's end: they are never read",
        path=path,
        position=position,
        topic=queue.key.topic,
        queue_id=queue.key.queue_id,
    )
    if context.shutdown is ShutdownState.LIVE:
        what = f"{count} entries of queue {queue.key} for records after the log's end: they were appended meanwhile, "
        return replace(finding, what=what + "or are never read")
    if is_stale:
        return finding
    is_truncated = context.durable_end is not None and physical_offset >= context.durable_end
    is_numbered = queue.layout is not BATCH_UNIT
    return replace(
        finding,
        severity=Severity.REPAIRABLE if is_truncated else Severity.DAMAGE,
        what=f"entries of queue {queue.key} for records after the log's end, which a crash left",
        expected=f"a record at physical offset {physical_offset}",
        found=getattr(record, "why", "a record after bytes that are not a record"),
        begin=number if is_numbered else None,
        end=number + count if is_numbered else None,
        messages=count,
        next_step=_TRUNCATED_STEP if is_truncated else _LOST_STEP,
        action=Action.RECOVER,
    )


def _judge_misnamed(
    context: CheckContext, queue: ConsumeQueue, orphans: OrphanEntries, at: int, blamed: set[int]
) -> tuple[Finding | None, bool]:
    """Judge the orphan with index `at`, which contains a physical offset within the log.

    Returns a finding, or None if the orphan needs none of its own. The flag is True if the entry is only stale: it is
    after the queue's last message. If the header of the record differs from the entry, `blamed` gets the record.
    """
    is_tail = int(orphans.numbers[at]) >= context.queue_end(queue.key)
    physical_offset, number = int(orphans.physical_offsets[at]), int(orphans.numbers[at])
    offset, count = int(orphans.offsets()[at]), int(orphans.counts()[at])
    context.looked_up += 1
    record = context.log.record_at(physical_offset) if context.looked_up <= _LOOKUPS_MAX else None
    if not isinstance(record, Record) or record.total_size != int(orphans.entries["record_size"][at]):
        return None, is_tail
    owner = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
    is_own = owner == queue.key and record.queue_offset == offset
    mismatch = _mismatch_at(context, owner, physical_offset) if owner in context.queues else None
    if is_own or (owner in context.queues and mismatch is None):
        return None, is_tail  # the record has another entry, so this one is stale, or a finding about a gap reports it
    if mismatch is not None and _is_record_confirmed(context, mismatch, physical_offset, queue.key):
        return None, is_tail  # the finding about the mismatch reports the entry
    if physical_offset < context.joined.restarts.get(queue.key, 0):
        return None, is_tail
    blamed.add(physical_offset)
    entry_path, entry_position = queue.run.path_of(number)
    path, position = context.locate(physical_offset)
    finding = Finding(
        severity=Severity.DAMAGE,
        area=Area.COMMIT_LOG,
        what=f"a record whose header differs from its entry ({entry_path}, position {entry_position})",
        path=path,
        position=position,
        expected=f"queue {queue.key}, queue offset {offset}",
        found=f"queue {owner}, queue offset {record.queue_offset}",
        topic=queue.key.topic,
        queue_id=queue.key.queue_id,
        begin=offset,
        end=offset + count,
        messages=count,
        next_step=READ_AROUND,
    )
    return finding, False


def _mismatch_at(context: CheckContext, key: QueueKey, physical_offset: int) -> Mismatch | None:
    """Return the mismatch of the queue `key` that covers a physical offset, or None if there is none."""
    covering = (
        mismatch
        for mismatch in context.joined.mismatches
        if mismatch.key == key and mismatch.first <= physical_offset <= mismatch.last
    )
    return next(covering, None)


def _is_record_confirmed(context: CheckContext, mismatch: Mismatch, physical_offset: int, entry_key: QueueKey) -> bool:
    """Return whether other records confirm the header of a record, so that its entry in the queue `entry_key` is wrong.

    `mismatch` covers the record. If the queue offset of a record was changed, it does not fit the previous or the next
    record of the queue. If the queue id was changed, the record may fit another queue by chance, as its first or last
    record. But then the entries of its neighbours are right.
    """
    if context.is_beside_jump(physical_offset):
        return False
    is_one_of_many = mismatch.count > 1 or any(
        other.key == mismatch.key and (other.end == mismatch.begin or mismatch.end == other.begin)
        for other in context.joined.mismatches
    )
    return is_one_of_many or (mismatch.key == entry_key and context.joined.matched.begin(entry_key) is not None)
