"""The record chain: the consecutive records that lead to the end of the log.

In a chain each record ends where the next one begins. The chain is built from the physical offsets and sizes in the
entries that match their records. In some cases bytes alone do not distinguish live records from stale ones, which a
truncation has left. Then store times and the checkpoint are used.

`whole_end` and `walk_whole` find where a power cut or a failed sync tore the log. They check one record after another.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import CHECKPOINT_FIELDS, CLOCKS_DIFFER_MS, Checkpoint
from rmq_spark.store.format.record import Blank, Record
from rmq_spark.store.format.record_headers import first_torn_record
from rmq_spark.store.log.commit_log import CommitLog

# A restart of a broker takes longer than this. A clock that is set back in small steps moves by less.
_RESTART_MS = 1000
CHECKPOINT_STEP = (
    "The checkpoint is wrong: run `rmq repair`, or rmq_spark.repair, which rebuilds it from the log without a loss."
)


class ShutdownState(enum.Enum):
    """How the last writer left the store. This determines what a missing entry means."""

    LIVE = "a broker or writer holds the lock"
    CLOSED = "clean shutdown: every message has its entry"
    CRASHED = "its writer died: the last messages may have no entry yet"


@dataclass(frozen=True, slots=True)
class StoreState:
    """How the last writer left the store, and a time stamp.

    If two states are equal, no writer changed the store in between.

    `stamp_ms` is a number made from times of files; it is only compared. `started_ms` is when the last writer started
    (ms since the epoch), which is the time of `abort`, or -1 if `abort` does not exist.
    """

    closing: ShutdownState
    stamp_ms: int
    started_ms: int = -1


class RecordChain:
    """The records of all queues in the order of the log, from their entries. Sizes are in bytes, store times in ms.

    `end` is the physical offset where the trusted log ends. `unitless` are the records before `end` that have no entry.
    If the record at `end` is stale, `refused_ms` is its store time (ms). Otherwise it is None.
    """

    def __init__(
        self,
        log: CommitLog,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        store_times: NDArray[np.int64],
        base: int,
        known_ms: int,
    ) -> None:
        self._log = log
        self.physical_offsets, self.sizes, self.store_times = physical_offsets, sizes, store_times
        self.end = base
        self._known_ms = known_ms  # the newest store time (ms) before `base`, -1 if unknown
        self.unitless: list[Record] = []
        self.refused_ms: int | None = None

    def settle(self, left: StoreState, checkpoint: Callable[[], Checkpoint], last_indexed: Callable[[], int]) -> None:
        """Set `end`, the physical offset at which the chain ends. `left` is how the last writer left the store.

        `last_indexed` returns the physical offset of the last message in the key index, or -1 if the index is empty.
        Raises DamageError if the store was shut down cleanly although messages follow a gap in the log, or although the
        chain ends before the checkpoint's last message. After a crash, raises DamageError if a segment is missing
        before one with messages.
        """
        self._follow()
        self._cut_stale(left, checkpoint)
        if left.closing is ShutdownState.CRASHED:
            self._refuse_gap()
            self._cut_torn(checkpoint().physic_msg_timestamp)
        elif left.closing is ShutdownState.CLOSED:
            self._refuse_hole(checkpoint(), last_indexed)

    def _follow(self) -> None:
        """Move `end` over consecutive records. Collect the records that have no entry in `unitless`."""
        physical_offsets, sizes = self.physical_offsets, self.sizes
        breaks = np.flatnonzero(physical_offsets[1:] != physical_offsets[:-1] + sizes[:-1]) + 1
        while True:
            at = int(np.searchsorted(physical_offsets, self.end))
            if at < len(physical_offsets) and physical_offsets[at] == self.end:
                later = int(np.searchsorted(breaks, at, side="right"))
                last = (int(breaks[later]) if later < len(breaks) else len(physical_offsets)) - 1
                self.end = int(physical_offsets[last] + sizes[last])
                continue
            record = self._log.record_at(self.end)
            if isinstance(record, Record) and record.crc_matches:  # otherwise partly written, or torn by a power cut
                self.unitless.append(record)
                self.end += record.total_size
            elif isinstance(record, Blank):
                segment = self._log.segments.holding(self.end)
                if segment is None or self._log.segments.holding(segment.end) is None:
                    return
                self.end = segment.end
            else:
                return

    def newest_ms(self) -> int:
        """Return the newest store time (ms) of a record before the end. Return -1 if there is none."""
        _, times = self._times()
        return max(self._known_ms, int(times.max()) if len(times) else -1)

    def is_all_that_was_known(self, checkpoint: Checkpoint, last_indexed: Callable[[], int]) -> bool:
        """Say whether the last clean shutdown found no message after the end. Two sources must agree.

        One source is the time of the last dispatched message in the checkpoint. The other is the physical offset of the
        last message: the key index contains the last message that has a key, and a 5.x broker writes to the checkpoint
        where the last message began when the broker started.
        """
        if checkpoint.logics_msg_timestamp != max(self.newest_ms(), 0):
            return False
        physical_offsets, _ = self._times()
        last = int(physical_offsets[-1]) if len(physical_offsets) else -1
        return last in (checkpoint.confirm_phy_offset, last_indexed())

    def _times(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return two arrays with the physical offset and the store time (ms) of every record of the chain, in order."""
        live = self.physical_offsets < self.end
        extra = [record for record in self.unitless if record.physical_offset < self.end]
        more = np.array([(record.physical_offset, record.store_timestamp) for record in extra], np.int64).reshape(-1, 2)
        physical_offsets = np.append(self.physical_offsets[live], more[:, 0])
        times = np.append(self.store_times[live], more[:, 1])
        order = np.argsort(physical_offsets, kind="stable")
        return physical_offsets[order], times[order]

    def _cut_back(self, end: int, refused_ms: int | None = None) -> None:
        self.end, self.refused_ms = end, refused_ms
        self.unitless = [record for record in self.unitless if record.physical_offset < end]

    def _cut_stale(self, left: StoreState, checkpoint: Callable[[], Checkpoint]) -> None:
        """Move `end` before records that a truncation left, if their sizes happen to continue the chain.

        Such records are all older than the records that were appended after the truncation, when the broker had
        restarted. So where they begin, the store time steps back, and it never catches up. A clock that was set back
        looks the same until it has caught up. Three sources distinguish the two cases:

        - The start of the writer: its own messages are not stale.
        - The checkpoint, which contains the store time of the last message.
        - The length of the step.
        """
        physical_offsets, times = self._times()
        if len(times) < 2:
            return
        newest = np.maximum.accumulate(times)
        behind = times < newest
        if not behind[-1]:
            return  # the store time caught up, so a clock was set back and nothing is stale
        first = int(np.flatnonzero(~behind)[-1]) + 1
        step_ms = int(newest[first - 1] - times[first])
        page = checkpoint()
        last_ms = page.physic_msg_timestamp or page.logics_msg_timestamp
        is_clean = left.closing is ShutdownState.CLOSED
        if is_clean and last_ms == int(times[-1]) and last_ms != int(newest[first - 1]):
            return  # in the checkpoint, the last of these records is the last message
        if not is_clean and 0 <= left.started_ms <= int(times[first]):
            return  # stored after the writer started, so these are the writer's own messages
        if step_ms >= _RESTART_MS or (is_clean and last_ms == int(newest[first - 1])):
            self._cut_back(int(physical_offsets[first]), int(times[first]))

    def _refuse_gap(self) -> None:
        """Raise DamageError if a segment is missing before one with messages.

        Called after a crash; no crash causes this.
        """
        run = self._log.segments
        later = next((segment for segment in run.segments if segment.begin >= self.end), None)
        if later is None or run.holding(later.begin - 1) is not None:
            return
        known = self.physical_offsets[self.physical_offsets >= later.begin]
        if len(known):
            raise DamageError(
                f"missing segment after [{run.begin}, {self.end}) of the log: messages follow it, the first at "
                f"physical offset {int(known[0])}",
                later.path,
                0,
                "a segment directly before it",
                "none",
            )

    def _cut_torn(self, flushed_ms: int) -> None:
        """Move `end` before the first incomplete message that is newer than `flushed_ms` (ms, from the checkpoint)."""
        young = (self.store_times > flushed_ms) & (self.physical_offsets < self.end)
        physical_offsets, sizes = self.physical_offsets[young], self.sizes[young]
        distinct = np.flatnonzero(np.diff(physical_offsets, prepend=-1) > 0)
        for stretch in self._log.stretches(physical_offsets[distinct], sizes[distinct]):
            torn = first_torn_record(stretch.buffer, stretch.positions)
            stretch.check()
            if torn is not None:
                self._cut_back(int(physical_offsets[distinct][stretch.first + torn]))
                return

    def _refuse_hole(self, checkpoint: Checkpoint, last_indexed: Callable[[], int]) -> None:
        """Raise DamageError if newer messages follow the end.

        A log that was shut down cleanly ends with its newest message.

        There are two exceptions. Either the broker that shut the store down had ended its log here
        (checkpoint.confirmPhyOffset, 5.x). Or that broker found no message after the end, because it recovered a log in
        which a power cut had left a hole.
        """
        beyond = self.physical_offsets >= self.end
        if checkpoint.confirm_phy_offset == self.end > 0:
            return
        # Records that a truncation left are older by at least the time of a broker's restart. So a record of the same
        # millisecond is not stale.
        newer = self.store_times[beyond] >= self.newest_ms()
        if not newer.any():
            if not self._ends_before_torn(checkpoint, last_indexed):
                self._refuse_early_end(checkpoint)
            return
        if self.is_all_that_was_known(checkpoint, last_indexed) or self._ends_before_torn(checkpoint, last_indexed):
            return
        segment = self._log.segments.holding(self.end)
        found = self._log.record_at(self.end)
        why = "a filler" if isinstance(found, Blank) else getattr(found, "why", "no record")
        raise DamageError(
            f"no record at the end of the chain: {int(newer.sum())} newer messages follow, the first at physical "
            f"offset {int(self.physical_offsets[beyond][0])}",
            segment.path if segment else "commitlog",
            self.end - (segment.begin if segment else 0),
            "a record",
            why,
        )

    def _ends_before_torn(self, checkpoint: Checkpoint, last_indexed: Callable[[], int]) -> bool:
        """Move `end` before a record of which a power cut left only the header. Return whether `end` moved.

        `end` moves only if the last clean shutdown ended there too. Such a record can be part of the chain, because its
        entry may have survived the power cut.
        """
        before = self.end, self.refused_ms, self.unitless
        self._cut_torn(checkpoint.logics_msg_timestamp)
        if self.end < before[0] and self.is_all_that_was_known(checkpoint, last_indexed):
            return True
        self.end, self.refused_ms, self.unitless = before
        return False

    def _refuse_early_end(self, checkpoint: Checkpoint) -> None:
        """Raise DamageError if the chain does not contain the checkpoint's last message, after a clean shutdown.

        The checkpoint contains the store time of the last message that has an entry, or 0 if there never was one. A
        newer message in the chain does not show that the chain is complete, because its time may be damaged.
        """
        last_ms = checkpoint.logics_msg_timestamp
        if last_ms <= max(self._known_ms, 0) or (self._times()[1] == last_ms).any():
            return
        newest = self.newest_ms()
        if last_ms > max(newest, wall_clock_ms()) + CLOCKS_DIFFER_MS:
            raise DamageError(
                "the checkpoint's last message is in the future (ms since the epoch)",
                checkpoint.path or filenames.CHECKPOINT,
                CHECKPOINT_FIELDS.fields["logics_msg_timestamp"][1],  # type: ignore[index]
                f"at most {max(newest, 0)}",
                last_ms,
                CHECKPOINT_STEP,
            )
        segment = self._log.segments.holding(self.end)
        raise DamageError(
            "the log ends before its last message, which the checkpoint contains with its store time (ms since the "
            "epoch)",
            segment.path if segment else "commitlog",
            self.end - (segment.begin if segment else 0),
            checkpoint.logics_msg_timestamp,
            newest if newest >= 0 else "no message",
        )


_SECTOR_BYTES = 512  # a disk writes at least this many bytes completely or not at all


def whole_end(log: CommitLog, begin: int, heartbeat: Callable[[], None] = lambda: None) -> int:
    """Return the physical offset of the first record at or after `begin` that a power cut left incomplete.

    If all records are complete, return the end of the log. A power cut may leave the header and the body of a record,
    with zeros in place of the properties, which no CRC covers. If a filler crosses the boundary of a sector, a power
    cut may leave its magic without its length, or older bytes before its magic. So a filler is complete only if its
    length ends exactly at the end of its segment.
    """
    physical_offset, doubtful = walk_whole(log, begin, None, heartbeat)
    return doubtful[0] if doubtful else physical_offset


def walk_whole(log: CommitLog, begin: int, end: int | None, heartbeat: Callable[[], None]) -> tuple[int, list[int]]:
    """Return the physical offset of the first torn record in [begin, end), and a list of doubtful records before it.

    The list has the physical offsets of complete records in which a sector seems to be missing, because it has only
    zeros. If no record is torn, the first value is where the walk ended. If `end` is None, the walk continues to the
    end of the log, or to the first doubtful record.
    """
    physical_offset, doubtful = begin, list[int]()
    while end is None or physical_offset < end:
        heartbeat()
        record = log.record_at(physical_offset)
        if isinstance(record, Blank):
            segment = log.segments.holding(physical_offset)
            is_whole = segment is not None and physical_offset + record.remaining_size == segment.end
            if segment is None or not is_whole or log.segments.after(segment) is None:
                break
            physical_offset = segment.end
        elif not isinstance(record, Record) or not record.crc_matches:
            break
        else:
            if _lacks_a_sector(log, record):
                doubtful.append(physical_offset)
                if end is None:
                    break
            physical_offset += record.total_size
    return physical_offset, doubtful


def _lacks_a_sector(log: CommitLog, record: Record) -> bool:
    """Say whether a sector within a record's topic and properties contains only zeros. Partial sectors count too.

    A power cut leaves such zeros. A property of hundreds of NUL characters looks the same, and cannot be distinguished.
    """
    segment = log.segments.holding(record.physical_offset)
    assert segment is not None, record.physical_offset
    end = record.physical_offset - segment.begin + record.total_size
    tail = log.bytes_at(record.physical_offset, record.total_size)[-(len(record.topic) + len(record.properties)) :]
    begin = end - len(tail)
    edges = [begin, *range(begin // _SECTOR_BYTES * _SECTOR_BYTES + _SECTOR_BYTES, end, _SECTOR_BYTES), end]
    return any(not tail[one - begin : other - begin].strip(b"\0") for one, other in pairwise(edges))
