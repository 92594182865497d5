"""What stood where news of a store shows first, when it was last looked at: as long as it stands, nothing is new.

News is a record behind the log's end, a unit for a message that waits for one, files of a queue that had none, and
a writer that comes or goes. To ask costs a few small reads, whatever the number of queues.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rmq_spark.store.errors import StoreError
from rmq_spark.store.format.record import BLANK_BYTES, MAGIC_BLANK, MAGIC_V1, MAGIC_V2, Blank, Record
from rmq_spark.store.log.chain import Left
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.units import QueueKey

MANY_QUEUES = 64  # with a unit to come: to read the places of more costs as much as to look


@dataclass(frozen=True, slots=True)
class AwaitedUnit:
    """A unit to come: the first one of its queue that is not believed, and what was written there, if anything."""

    queue: ConsumeQueue
    number: int
    stood: Units

    def has_changed(self) -> bool:
        """Say whether something else stands there now."""
        if self.number >= self.queue.run.end:
            self.queue.run.look()  # its file may have been made since
        stands = self.queue.read(self.number, self.number + self.queue.is_written(self.number))
        self.queue.run.close()
        return not stands.equals(self.stood)


@dataclass(frozen=True, slots=True)
class Standstill:
    """The end of the log (physical offset), and what the last look waits for.

    `refused_ms` is the store time of a whole record at the end that was taken for stale, None without one. `left` says
    how the store was left where something hangs on it: messages without a unit, faults, a stale record. `homeless` are
    queues with a message and without a folder.
    """

    end: int
    refused_ms: int | None = None
    left: Left | None = None
    awaited: tuple[AwaitedUnit, ...] = ()
    homeless: frozenset[QueueKey] = frozenset()

    def holds(self, log: CommitLog, left: Callable[[], Left], has_folder: Callable[[QueueKey], bool]) -> bool:
        """Say whether nothing can have moved; what moves while it is asked is noticed when it is asked again."""
        if not log.is_begin_there() or self._log_goes_on(log):
            return False
        if self.left is None:
            return True
        try:
            return (
                left() == self.left
                and not any(unit.has_changed() for unit in self.awaited)
                and not any(has_folder(key) for key in self.homeless)
            )
        except StoreError:
            return False  # whatever it is, the look will meet it

    def _log_goes_on(self, log: CommitLog) -> bool:
        """Say whether a record is whole by now where the log ended, or its next segment made."""
        magic = int.from_bytes(log.bytes_at(self.end, BLANK_BYTES)[4:], "big")
        if magic not in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK):
            return False
        found = log.record_at(self.end)
        if isinstance(found, Blank):
            segment = log.segments.holding(self.end)
            return segment is None or log.has_file_at(segment.end)
        return isinstance(found, Record) and found.crc_matches and found.store_timestamp != self.refused_ms
