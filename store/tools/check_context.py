"""Context of a check: the results of one scan of the commit log. Entries and records are judged with them."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.record_chain import ShutdownState
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.finding import Area
from rmq_spark.store.tools.join_entries import JoinResult
from rmq_spark.store.tools.log_walk import LogFault, TolerantCommitLog

READ_AROUND = (
    "Restore the file from a copy, or read around the place: startingOffsets and endingOffsets of the source; "
    "failOnDataLoss=false where whole queues end before it."
)
REBUILD_STEP = "rmq_spark.repair rebuilds the queue from the commit log."


@dataclass(slots=True)
class CheckContext:
    """Facts about a store after a scan of its commit log. The log's physical offsets are `[begin, end)`.

    `faults` are the ranges of the log that are not records. `unreadable` are the queues whose files cannot be read.
    `may_exist(topic)` returns False if topics.json shows that the topic was deleted.
    """

    log: TolerantCommitLog
    queues: dict[QueueKey, ConsumeQueue]
    unreadable: set[QueueKey]
    joined: JoinResult
    faults: list[LogFault]
    shutdown: ShutdownState
    may_exist: Callable[[str], bool]
    folder_of: Callable[[QueueKey], str]
    begin: int
    end: int
    newest_ms: int  # store time of the last record
    dispatched_end: int  # physical offset below which no writer will add missing entries
    # Physical offset at and above which recovery may truncate incomplete records. None if truncating would lose
    # messages whose durability was confirmed.
    durable_end: int | None
    is_ours_alone: bool  # rmq-spark created the store, and no broker has written to it
    orphan_count: int = 0  # number of entries without a record: orphans, entries of expired records, and fill
    looked_up: int = 0  # number of records that were read one by one
    expired: int = 0  # number of entries for records before the log's begin
    fault_begins: list[int] = field(default_factory=list)
    jump_places: set[int] | None = None  # physical offsets of the records beside jumps; None if not collected yet

    def fault_at(self, physical_offset: int) -> LogFault | None:
        """Return the fault that covers a physical offset, or None if no fault covers it."""
        if not self.fault_begins:
            self.fault_begins = [fault.begin for fault in self.faults]
        at = bisect_right(self.fault_begins, physical_offset) - 1
        return self.faults[at] if at >= 0 and physical_offset < self.faults[at].end else None

    def is_beside_jump(self, physical_offset: int) -> bool:
        """Return whether the record at a physical offset does not fit the previous or the next record of its queue.

        Also returns True for the record with queue offset 0 at which the queue restarted.
        """
        if self.jump_places is None:
            jumps = self.joined.jumps
            self.jump_places = {place for jump in jumps for place in (jump.previous, jump.physical_offset)}
            self.jump_places.update(self.joined.restarts.values())
        return physical_offset in self.jump_places

    def queue_end(self, key: QueueKey) -> int:
        """Return the number of the last entry that agrees with a record, plus 1. Returns 0 if no entry agrees."""
        return self.joined.matched.end(key)

    def first_physical_offset(self, key: QueueKey) -> int:
        """Return the physical offset of the first record that agrees with an entry of the queue `key`.

        Returns the log's end if no record agrees with an entry, or if the queue cannot be read.
        """
        number = self.joined.matched.begin(key)
        if number is None or key in self.unreadable:
            return self.end
        entries = self.queues[key].run.read(number, number + 1)
        self.queues[key].run.close()
        return int(entries["physical_offset"][0]) if len(entries) else self.end

    def locate(self, physical_offset: int) -> tuple[str, int]:
        """Return the path of the segment that contains a physical offset, and the position in that file (bytes).

        If no segment contains the offset, returns an empty path and the offset itself.
        """
        segment = self.log.segments.holding(physical_offset)
        return (segment.path, physical_offset - segment.begin) if segment else ("", physical_offset)


def area_of(queue: ConsumeQueue) -> Area:
    """Return the area of a finding about `queue`, which depends on whether it is a batch queue."""
    return Area.BATCH_CONSUME_QUEUE if queue.layout is BATCH_UNIT else Area.CONSUME_QUEUE
