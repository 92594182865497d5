"""What a look at all of the log has found: what the verdicts on units go by."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from rmq_spark.store.explore.log_walk import LogFault
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.explore.unmet import Joined
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.log.chain import Closing
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

READ_AROUND = (
    "Restore the file from a copy. Else read around the place: startingOffsets and endingOffsets of the source, or "
    "failOnDataLoss=false where whole queues end before it"
)
REBUILD_STEP = "rmq_spark.repair makes the queue anew from the log."


@dataclass(slots=True)
class Seen:
    """What verdicts go by. `may_exist` says whether topics.json, if it is there, still names a topic.

    `[begin, end)` is the log, `faults` what of it is no record. `unread` are queues whose files cannot be read.
    """

    log: SoundLog
    queues: dict[QueueKey, ConsumeQueue]
    unread: set[QueueKey]
    joined: Joined
    faults: list[LogFault]
    closing: Closing
    may_exist: Callable[[str], bool]
    folder_of: Callable[[QueueKey], str]
    begin: int
    end: int
    newest_ms: int  # store time up to the end
    dispatched_end: int  # physical offset before which a missing unit does not come by itself
    durable_end: int | None  # physical offset from which on recovery takes back what is torn; None if that is a loss
    is_ours_alone: bool  # no broker has ever written to the store
    units: int = 0  # that were looked at
    looked_up: int = 0
    expired: int = 0  # units of records before the log's begin
    fault_begins: list[int] = field(default_factory=list)

    def fault_at(self, place: int) -> LogFault | None:
        """Return the fault in whose extent a physical offset lies."""
        if not self.fault_begins:
            self.fault_begins = [fault.begin for fault in self.faults]
        at = bisect_right(self.fault_begins, place) - 1
        return self.faults[at] if at >= 0 and place < self.faults[at].end else None

    def has_fault_between(self, first: int, last: int) -> bool:
        """Say whether bytes between two records are no record."""
        return any(first < fault.end and fault.begin <= last and fault.begin < fault.end for fault in self.faults)

    def queue_end(self, key: QueueKey) -> int:
        """Return the number behind the last unit of a queue that agrees with a record."""
        return self.joined.ranges.end(key)

    def first_place(self, key: QueueKey) -> int:
        """Return the physical offset of the first record that a unit of a queue agrees with; the log's end without."""
        number = self.joined.ranges.begin(key)
        if number is None or key in self.unread:
            return self.end
        unit = self.queues[key].run.read(number, number + 1)
        self.queues[key].run.close()
        return int(unit["physical_offset"][0]) if len(unit) else self.end

    def place_of(self, place: int) -> tuple[str, int]:
        """Return the segment that holds a physical offset, and the position in it (bytes)."""
        segment = self.log.segments.holding(place)
        return (segment.path, place - segment.begin) if segment else ("", place)


def area_of(queue: ConsumeQueue) -> str:
    """Return the folder of the store in which queues of this kind lie."""
    return filenames.BATCH_CONSUME_QUEUE if queue.layout is BATCH_UNIT else filenames.CONSUME_QUEUE
