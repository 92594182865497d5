"""The chain of records that leads to the end of the log, and the four ways in which it can mislead.

A chain is made of the extents of units that agree with their records, each record ending where the next begins.
It is judged by time and by the checkpoint where bytes alone cannot tell live from stale.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.checkpoint import CHECKPOINT_FIELDS, CLOCKS_DIFFER_MS, Checkpoint
from rmq_spark.store.format.heads import first_torn_record
from rmq_spark.store.format.record import Blank, Record
from rmq_spark.store.log.commit_log import CommitLog

# A restart of a broker takes longer than this; a clock that is set back in small steps moves less.
_RESTART_MS = 1000
CHECKPOINT_STEP = (
    "It is the checkpoint that is wrong: `rmq repair`, or rmq_spark.repair, has it made anew from the log, and no "
    "message is lost by that."
)


class Closing(enum.Enum):
    """How the store was left, which decides what a unit that is missing means."""

    LIVE = "a broker or writer holds the lock"
    CLOSED = "closed in order: every message has its unit"
    CRASHED = "its writer died: the last messages may have no unit yet"


@dataclass(frozen=True, slots=True)
class Left:
    """How the store was left, and when its writers last said so: two looks at it differ if one came between.

    `started_ms` is when the last writer started, by `abort`, which it made then; -1 without one. Both in ms.
    """

    closing: Closing
    stamp_ms: int
    started_ms: int = -1


class Chain:
    """Units of all queues in order of their records: extents in bytes, store times in ms.

    `end` is the physical offset where the believable log ends, `unitless` the records before it that no unit names.
    `refused_ms` is the store time of the record at `end` if it was taken for stale, else None.
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
        self._known_ms = known_ms  # the newest store time before `base`, -1 if nobody looked there
        self.unitless: list[Record] = []
        self.refused_ms: int | None = None

    def settle(self, left: Left, checkpoint: Callable[[], Checkpoint], last_indexed: Callable[[], int]) -> None:
        """Find `end`. Raises DamageError if the store was closed in order and yet newer messages follow a hole.

        `last_indexed` tells the physical offset of the last message that the key index knows, -1 if it knows none.
        """
        self._follow()
        self._cut_stale(left, checkpoint)
        if left.closing is Closing.CRASHED:
            self._refuse_gap()
            self._cut_torn(checkpoint().physic_msg_timestamp)
        elif left.closing is Closing.CLOSED:
            self._refuse_hole(checkpoint(), last_indexed)

    def _follow(self) -> None:
        """Move `end` from record to record as far as they touch, noting those without a unit."""
        places, sizes = self.physical_offsets, self.sizes
        breaks = np.flatnonzero(places[1:] != places[:-1] + sizes[:-1]) + 1
        while True:
            at = int(np.searchsorted(places, self.end))
            if at < len(places) and places[at] == self.end:
                later = int(np.searchsorted(breaks, at, side="right"))
                last = (int(breaks[later]) if later < len(breaks) else len(places)) - 1
                self.end = int(places[last] + sizes[last])
                continue
            record = self._log.record_at(self.end)
            if isinstance(record, Record) and record.crc_matches:  # else it is half written, or torn by a power cut
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
        """Return the newest store time up to the end."""
        _, times = self._times()
        return max(self._known_ms, int(times.max()) if len(times) else -1)

    def is_all_that_was_known(self, checkpoint: Checkpoint, last_indexed: Callable[[], int]) -> bool:
        """Say whether who closed the store in order knew of no message behind the end: two witnesses have to agree.

        The checkpoint names the time of the last message that was dispatched. The key index names the last one with a
        key; and 5.x notes in the checkpoint where the last one began when the broker started.
        """
        if checkpoint.logics_msg_timestamp != max(self.newest_ms(), 0):
            return False
        places, _ = self._times()
        last_place = int(places[-1]) if len(places) else -1
        return last_place in (checkpoint.confirm_phy_offset, last_indexed())

    def _times(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return place and store time of every record of the chain, in order."""
        live = self.physical_offsets < self.end
        extra = [record for record in self.unitless if record.physical_offset < self.end]
        more = np.array([(record.physical_offset, record.store_timestamp) for record in extra], np.int64).reshape(-1, 2)
        places = np.append(self.physical_offsets[live], more[:, 0])
        times = np.append(self.store_times[live], more[:, 1])
        order = np.argsort(places, kind="stable")
        return places[order], times[order]

    def _cut_back(self, end: int, refused_ms: int | None = None) -> None:
        self.end, self.refused_ms = end, refused_ms
        self.unitless = [record for record in self.unitless if record.physical_offset < end]

    def _cut_stale(self, left: Left, checkpoint: Callable[[], Checkpoint]) -> None:
        """End before records that a truncation left behind and whose lengths happen to continue the chain.

        They are all older than what was appended after the restart that truncated. So time steps back where
        they begin and never comes up again. A clock that was set back looks alike until it has caught up. Three
        witnesses tell the two apart: the start of the writer, whose own messages are not stale, the checkpoint,
        which knows the last message's time, and the length of the step.
        """
        places, times = self._times()
        if len(times) < 2:
            return
        newest = np.maximum.accumulate(times)
        behind = times < newest
        if not behind[-1]:
            return  # it came up again: a clock was set back, nothing is stale
        first = int(np.flatnonzero(~behind)[-1]) + 1
        step_ms = int(newest[first - 1] - times[first])
        page = checkpoint()
        last_ms = page.physic_msg_timestamp or page.logics_msg_timestamp
        is_clean = left.closing is Closing.CLOSED
        if is_clean and last_ms == int(times[-1]) and last_ms != int(newest[first - 1]):
            return  # the checkpoint names the last of them as the last message
        if not is_clean and 0 <= left.started_ms <= int(times[first]):
            return  # stored since the writer started: nothing of its own is stale
        if step_ms >= _RESTART_MS or (is_clean and last_ms == int(newest[first - 1])):
            self._cut_back(int(places[first]), int(times[first]))

    def _refuse_gap(self) -> None:
        """After a crash: a segment that is missing before one with messages was not lost by the crash."""
        run = self._log.segments
        later = next((segment for segment in run.segments if segment.begin >= self.end), None)
        if later is None or run.holding(later.begin - 1) is not None:
            return
        known = self.physical_offsets[self.physical_offsets >= later.begin]
        if len(known):
            raise DamageError(
                f"no segment where the log goes on at {run.begin}..{self.end}: messages follow behind it, the first at "
                f"physical offset {int(known[0])}",
                later.path,
                0,
                "a segment right before it",
                "none",
            )

    def _cut_torn(self, flushed_ms: int) -> None:
        """After a crash: end before the first message newer than the checkpoint that was not written whole."""
        young = (self.store_times > flushed_ms) & (self.physical_offsets < self.end)
        places, sizes = self.physical_offsets[young], self.sizes[young]
        distinct = np.flatnonzero(np.diff(places, prepend=-1) > 0)
        for stretch in self._log.stretches(places[distinct], sizes[distinct]):
            torn = first_torn_record(stretch.buffer, stretch.positions)
            stretch.check()
            if torn is not None:
                self._cut_back(int(places[distinct][stretch.first + torn]))
                return

    def _refuse_hole(self, checkpoint: Checkpoint, last_indexed: Callable[[], int]) -> None:
        """A store that was closed in order ends with its newest message: newer ones behind the end mean damage.

        Unless the broker that closed it had ended its log just there (checkpoint.confirmPhyOffset, 5.x), or knew of
        none behind the end: it recovered what a power cut had left with a hole in it.
        """
        beyond = self.physical_offsets >= self.end
        if checkpoint.confirm_phy_offset == self.end > 0:
            return
        # What a truncation left behind is older by a broker's restart; the same millisecond is no restart.
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
            f"no record where the log goes on: {int(newer.sum())} newer messages follow, the first at physical "
            f"offset {int(self.physical_offsets[beyond][0])}",
            segment.path if segment else "commitlog",
            self.end - (segment.begin if segment else 0),
            "a record",
            why,
        )

    def _ends_before_torn(self, checkpoint: Checkpoint, last_indexed: Callable[[], int]) -> bool:
        """End before a record of which a power cut left the head alone, if who closed the store ended there too.

        Its unit may have outlived the power cut, so it is one of the chain.
        """
        before = self.end, self.refused_ms, self.unitless
        self._cut_torn(checkpoint.logics_msg_timestamp)
        if self.end < before[0] and self.is_all_that_was_known(checkpoint, last_indexed):
            return True
        self.end, self.refused_ms, self.unitless = before
        return False

    def _refuse_early_end(self, checkpoint: Checkpoint) -> None:
        """The checkpoint of a store closed in order names the time of its last message that has a unit.

        0 says that there never was one. That some message is newer proves nothing: its time may be damaged.
        """
        last_ms = checkpoint.logics_msg_timestamp
        if last_ms <= max(self._known_ms, 0) or (self._times()[1] == last_ms).any():
            return
        newest = self.newest_ms()
        if last_ms > max(newest, wall_clock_ms()) + CLOCKS_DIFFER_MS:
            raise DamageError(
                "the checkpoint names a last message of a time to come (ms since the epoch)",
                checkpoint.path or filenames.CHECKPOINT,
                CHECKPOINT_FIELDS.fields["logics_msg_timestamp"][1],  # type: ignore[index]
                f"at most {max(newest, 0)}",
                last_ms,
                CHECKPOINT_STEP,
            )
        segment = self._log.segments.holding(self.end)
        raise DamageError(
            "the log ends before its last message: the checkpoint names one stored at (ms since the epoch)",
            segment.path if segment else "commitlog",
            self.end - (segment.begin if segment else 0),
            checkpoint.logics_msg_timestamp,
            newest if newest >= 0 else "no message",
        )
