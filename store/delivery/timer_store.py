"""Messages that wait for a time, in RocketMQ 5.x's own files: a broker goes on where we stopped, and we where it did.

`timerlog/`, `timerwheel` and `config/timercheck` are kept as a broker of 5.3 keeps them, and no other structure beside
them. A ticker uses it as one of its sources (`due_source.py`):

    timer.look(now_ms, note)              a few small reads, whatever waits
    timer.prepare(section, now_ms, note)  what the note says was delivered goes into the check; new messages of the
                                          queue go into log and wheel; what a broker or a crash left is mended
    timer.take(now_ms, bytes, count)      records to be committed with the keys READ and PART in the note

The commit comes first, so a crash behind it leaves a check that says less than was delivered; the note says it, and the
next `prepare` writes it. A broker that starts between the two knows no note, and delivers that batch again.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.due_source import Due, Outlook
from rmq_spark.store.delivery.pending_seconds import PendingSeconds
from rmq_spark.store.delivery.timer_batch import as_rolling_deletions, make_batch
from rmq_spark.store.delivery.timer_chains import ChainedUnits, read_chains
from rmq_spark.store.delivery.timer_files import TimerCheckFile, TimerLog, TimerWheel
from rmq_spark.store.delivery.timer_intake import Intake, Mended, mend
from rmq_spark.store.delivery.timer_mark import Doubt, TimerMark, TimerMarkFile
from rmq_spark.store.delivery.timer_state import PART, READ, Progress, TimerState
from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.filenames import TIMER_TOPIC
from rmq_spark.store.format.timer_check import TimerCheck
from rmq_spark.store.format.timer_log import DELETE, ROLL
from rmq_spark.store.format.timer_wheel import SECOND_MS, SLOT_COUNT, floor_second
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.section import Section
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")

_TAKEN_AT_ONCE = 131_072  # of the queue, in one section: others get their turn
_GROWTH_BYTES = 96  # of a record, by the properties that it is delivered with
_WRONG_CLOCK_MS = 60 * SECOND_MS  # that a timer is ahead of the clock: such steps are told
_LONG_AGO_MS = 24 * 3600 * SECOND_MS
_TOO_LONG_AGO_MS = 11 * _LONG_AGO_MS  # behind it the wheel, of 14 days, has no room for what is new


class TimerStore:
    """The timer of the store at `root`, whose commit log is in `folders`: a source of a ticker. For one thread."""

    def __init__(self, root: str, folders: tuple[str, ...], disk: Disk) -> None:
        self._root, self._folders, self._disk = root, folders, disk
        self._queue = ConsumeQueue(QueueKey(TIMER_TOPIC, 0), files.join(root, filenames.queue_folder(TIMER_TOPIC, 0)))
        self._check, self._mark = TimerCheckFile(root, disk), TimerMarkFile(root, disk)
        self._wheel = TimerWheel(root, disk)
        self._log: TimerLog | None = None
        self._boot = host.boot_id()
        self._pending = PendingSeconds(self._wheel)
        self._note: Mapping[str, int] = {}  # of the last `prepare`
        self._is_ahead_told = False
        self._read_ms = 0  # of the check, when it was last read

    def look(self, now_ms: int, note: Mapping[str, int]) -> Outlook:
        """Say whether something is due, or is to be taken or mended, and when the next message is due.

        In a store where no message ever waited for a time that takes a look for its queue.
        """
        self._queue.run.look()
        if not self._queue.run.segments:
            return Outlook()
        state = self._state(note)
        if not state.is_told or not self._is_settled(state) or self._has_new(state):
            return Outlook(True)
        assert state.check is not None
        times = self._pending.times(state.check, now_ms)
        at = int(np.searchsorted(times, state.progress.read_ms))
        if at == len(times):
            return Outlook()
        next_ms = int(times[at]) + SECOND_MS
        return Outlook(next_ms <= now_ms, next_ms)

    def prepare(self, section: Section, now_ms: int, note: Mapping[str, int], *, takes_new: bool = True) -> None:
        """Have the check say what the note says, and take messages from the queue, as many as fit into a section.

        Without `takes_new` none is taken.

        What a broker or a crash left is mended first. A crash anywhere in it loses nothing and doubles nothing. Where
        something has waited to be delivered for more than eleven days nothing is taken before that is done. Raises
        LockTimeoutError where a broker that starts will not wait, DamageError for files that no broker would load.
        """
        self._note = dict(note)
        self._queue.run.look()
        if not self._queue.run.segments:
            return
        state = self._state(note)
        takes_new = takes_new and self._has_new(state)
        if state.is_told and self._is_settled(state) and not takes_new:
            return
        section.note_progress()
        has_wheel, is_settled = self._wheel.is_there(), self._is_settled(state)
        self._wheel.make()
        if state.progress.part >= 0 and not state.is_told:
            self._cut_chain(state.progress, section.note_progress)
        if is_settled and not takes_new:
            doubt = state.doubt if state.doubt.covers(state.progress.read_ms) else Doubt()
            assert state.check is not None
            self._save(state.check, state.progress, doubt, now_ms, [])
        else:
            self._take_in(section, state, now_ms, has_wheel=has_wheel, is_settled=is_settled, takes_new=takes_new)
        self._queue.run.close()

    def take(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return what is to be delivered, or put back into the queue, by now, behind the note of the last `prepare`.

        At most so many messages and so many bytes, but for a first one that is longer; by their seconds, and those of
        one second as they were taken. Changes nothing. Nothing is due while there is something to mend.
        """
        state = self._state(self._note)
        if not self._is_settled(state):
            return Due()
        assert state.check is not None
        self._timer_log(look=True)  # whoever delivered since may have deleted files
        chosen = self._chosen(state.check, state.progress, floor_second(now_ms), room_count)
        if isinstance(chosen, Due):
            return chosen
        return self._batch(*chosen, state.doubt, now_ms, room_bytes, room_count)

    def take_back(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return what waits in the wheel, due or not, to be put back into the queue; limits and order as `take` has.

        Units that take others back in their second do so, and are put back themselves.
        """
        state = self._state(self._note)
        if not self._is_settled(state):
            return Due()
        self._timer_log(look=True)
        chosen = self._chosen_of(self._wheel.slots_from(state.progress.read_ms), state.progress, room_count)
        if isinstance(chosen, Due):
            return chosen
        return self._batch(*chosen, state.doubt, now_ms, room_bytes, room_count, puts_back=True)

    def clear(self, section: Section) -> None:
        """Remove wheel and timer log, after all that waited was put back into the queue and the check says so.

        A crash on the way leaves files of which nothing is to be delivered. Raises StoreChangedError where something
        waits, or another program changed the files since.
        """
        state = self._state(self._note)
        waiting = len(self._wheel.slots_from(state.progress.read_ms))
        if not state.is_told or not self._is_settled(state) or waiting:
            raise _changed(self._root, f"{state} and {waiting} seconds with messages")
        section.note_progress()
        self._timer_log(look=True).discard()
        self._wheel.discard()

    def restart(self, section: Section, now_ms: int, note: Mapping[str, int]) -> None:
        """Have the timer, which `clear` left empty, go on from now: all that waits is in the queue, not taken yet.

        The note must not say that more was delivered. Raises StoreChangedError where another program came between.
        """
        state = self._state(note)
        if (
            state.check is None
            or not state.is_ours
            or self._wheel.is_there()
            or self._timer_log(look=True).run.segments
        ):
            raise _changed(self._root, f"{state} and files of the timer")
        section.note_progress()
        check = replace(state.check, log_position=0)
        self._save(check, Progress(floor_second(now_ms)), state.doubt, now_ms, None)

    def close(self) -> None:
        """Let go of files; they are listed again when they are used again."""
        self._queue.run.close()
        self._log = None

    def _state(self, note: Mapping[str, int]) -> TimerState:
        check = self._check.read()
        if check is not None and check.read_time < self._read_ms:
            self._log = None  # a repair has set the timer back, and made its files again
        self._read_ms = 0 if check is None else check.read_time
        return TimerState(check, self._mark.read(), Progress.of(check, note))

    def _has_new(self, state: TimerState) -> bool:
        """Say whether the queue has messages that were not taken."""
        offset = 0 if state.check is None else state.check.queue_offset
        has_new = self._queue.is_written(max(offset, self._queue.run.begin))
        self._queue.run.close()
        return has_new

    def _take_in(
        self,
        section: Section,
        state: TimerState,
        now_ms: int,
        *,
        has_wheel: bool,
        is_settled: bool,
        takes_new: bool,
    ) -> None:
        end, held = section.next_offset(TIMER_TOPIC, 0), state.check or TimerCheck()
        log, second_ms = self._timer_log(look=True), floor_second(now_ms)
        if is_settled:
            mended = Mended(held.log_position, held.queue_offset, np.zeros(0, np.int64), True)
        else:
            mended = mend(
                log,
                self._wheel,
                self._queue,
                end,
                held,
                read_ms=state.progress.read_ms,
                has_wheel=has_wheel,
                is_ours=state.is_ours,
                is_same_boot=state.mark is not None and state.mark.boot == self._boot,
            )
            # What is behind the check's position was not synced, or its sync failed: then no later sync writes it.
            log.write_again_from(min(held.log_position, mended.end), section.note_progress)
            self._wheel.write_again(section.note_progress)
        taken = self._first_left(mended.queue_offset, min(self._queue.run.begin, end))
        progress = self._free_progress(state.progress, second_ms)
        # Never behind what was delivered: a second before it comes once round the wheel again, if ever.
        write_ms = max(second_ms, progress.read_ms)
        self._tell_ahead(progress.read_ms - second_ms)
        intake = Intake(log, self._wheel, self._queue, CommitLog(self._folders, mapped=False), mended.end, [])
        try:
            if takes_new and second_ms - progress.read_ms < _TOO_LONG_AGO_MS and taken < end:
                until = min(end, taken + _TAKEN_AT_ONCE)
                # Units must not outlive their messages: others would lie there after a power cut, and pass for taken.
                section.settle()
                if state.check is None:
                    self._check.write(TimerCheck(progress.read_ms, 0, taken, until))
                else:
                    self._check.note_coming(until)
                while taken < until:
                    section.note_progress()
                    taken = intake.take(taken, until, mended.logged, read_ms=progress.read_ms, write_ms=write_ms)
            section.note_progress()
            doubt = state.doubt if mended.is_sure else Doubt(section.end, second_ms)
            check = replace(held, log_position=intake.end, queue_offset=taken)
            self._save(check, progress, doubt, now_ms, intake.new_times if is_settled else None)
            log.expire(intake.log.segments.begin)
        finally:
            intake.log.close()

    def _first_left(self, taken: int, begin: int) -> int:
        """Return where to go on in the queue; say in the log how many messages waited in vain before it."""
        if begin > taken:
            _LOG.error(
                "rmq: %d messages of %s that were not delivered are no longer in the log, from queue offset %d on",
                begin - taken,
                self._queue.key,
                taken,
            )
        return max(taken, begin)

    def _tell_ahead(self, ahead_ms: int) -> None:
        """Say once in the log that messages come late, because a clock was wrong when others were delivered."""
        is_ahead = ahead_ms > _WRONG_CLOCK_MS
        if is_ahead and not self._is_ahead_told:
            _LOG.error(
                "rmq: the timer of %s was delivered up to a time that is %d s ahead of this clock: no message that "
                "waits for an earlier one comes before the clock is there",
                self._root,
                ahead_ms // SECOND_MS,
            )
        self._is_ahead_told = is_ahead

    def _batch(
        self,
        deletions: ChainedUnits,
        units: ChainedUnits,
        doubt: Doubt,
        now_ms: int,
        room_bytes: int,
        room_count: int,
        *,
        puts_back: bool = False,
    ) -> Due:
        """Return the first of some units as records, and what the note says with them."""
        sizes = units.units["record_size"].astype(np.int64) + _GROWTH_BYTES
        cut = max(min(room_count, int(np.searchsorted(np.cumsum(sizes), room_bytes, "right"))), 1)
        last_ms = int(units.times[min(cut, len(units)) - 1])
        is_part = cut < len(units) and int(units.times[cut]) == last_ms
        note = {READ: last_ms if is_part else last_ms + SECOND_MS}
        note[PART] = int(units.positions[cut - 1]) if is_part else -1
        units = units.chosen(slice(0, cut))
        log = CommitLog(self._folders, mapped=False)
        try:
            made = [make_batch(self._root, log, deletions, units, doubt, now_ms, puts_back=puts_back)]
            if puts_back:
                made.append(make_batch(self._root, log, *as_rolling_deletions(units), Doubt(), now_ms))
        finally:
            log.close()
        return Due(tuple(records for records in made if records is not None), note)

    def _chosen(
        self, check: TimerCheck, progress: Progress, end_ms: int, max_count: int
    ) -> tuple[ChainedUnits, ChainedUnits] | Due:
        """Return units that take others back, and all units that are due in some seconds: as many as are wanted.

        Where there are none, what the note is to say.
        """
        times = self._pending.times(check, end_ms)
        at = int(np.searchsorted(times, progress.read_ms))
        if at >= len(times) or times[at] >= end_ms:
            return Due()
        return self._chosen_of(self._wheel.slots_from(progress.read_ms, end_ms), progress, max_count)

    def _chosen_of(
        self, slots: NDArray[np.void], progress: Progress, max_count: int
    ) -> tuple[ChainedUnits, ChainedUnits] | Due:
        """Return the same of some slots, which ascend by second."""
        if not len(slots):
            return Due()
        counts = np.cumsum(np.maximum(slots["message_count"].astype(np.int64), 1))
        slots = slots[: int(np.searchsorted(counts, max_count)) + 1]
        units = read_chains(self._timer_log(), slots)
        magics = units.units["magic"]
        deletions = units.chosen(((magics & DELETE) != 0) & ((magics & ROLL) == 0))
        left = units.chosen((units.times > progress.read_ms) | (units.positions > progress.part))
        if len(left):
            return deletions, left
        _LOG.error(
            "rmq: the timer log of %s has no units for %d seconds of its wheel, from %d (ms) on: messages that waited "
            "for them, %d as the wheel counts, are not delivered",
            self._root,
            len(slots),
            int(slots["second"][0]) * SECOND_MS,
            int(np.maximum(slots["message_count"].astype(np.int64), 0).sum()),
        )
        return Due(note={READ: int(slots["second"][-1]) * SECOND_MS + SECOND_MS, PART: -1})

    def _cut_chain(self, progress: Progress, note_progress: Callable[[], None]) -> None:
        """Take the units that were delivered out of their second's chain, for a broker.

        Not where one of them takes another back, which may be behind it: then a broker would deliver that.
        """
        log, read_ms = self._timer_log(), progress.read_ms
        slots = self._wheel.slots_from(read_ms, read_ms + SECOND_MS)
        if not len(slots):
            return
        units = read_chains(log, slots)
        old = units.positions <= progress.part
        if not old.any():
            # It is cut already, by who failed or died before that was synced.
            log.write_again_from(int(units.positions[0]), note_progress)
            self._wheel.write_again(note_progress)
            return
        if old.all() or (units.units["magic"][old] & DELETE).any():
            return
        first = int(np.argmin(old))
        log.unlink_before(int(units.positions[first]))
        slot = slots.copy()
        slot["first_position"] = units.positions[first]
        slot["message_count"] -= int(old.sum())
        self._wheel.write_slots(slots["second"].astype(np.int64) % SLOT_COUNT, slot)

    def _free_progress(self, progress: Progress, second_ms: int) -> Progress:
        """Return the progress to the first second that has messages: nothing is to be delivered before it."""
        latest = second_ms - SECOND_MS
        if latest - progress.read_ms < _LONG_AGO_MS:
            return progress
        slots = self._wheel.slots_from(progress.read_ms, latest)
        read_ms = int(slots["second"][0]) * SECOND_MS if len(slots) else latest
        return progress if read_ms == progress.read_ms else Progress(read_ms)

    def _save(
        self,
        check: TimerCheck,
        progress: Progress,
        doubt: Doubt,
        now_ms: int,
        new_times: list[NDArray[np.int64]] | None,
    ) -> None:
        """Write the check, after all that it speaks of is on disk for good. `new_times` None: nothing is known."""
        self._timer_log().sync()
        self._wheel.sync()
        held = replace(
            check,
            read_time=progress.read_ms,
            master_queue_offset=check.queue_offset,
            version_timestamp=now_ms,
            version_counter=check.version_counter + 1,
        )
        # A crash between the two looks as if a broker had been here: what it may have delivered is looked for.
        self._mark.write(TimerMark.of(held, progress.part, self._boot, doubt))
        self._check.write(held)
        self._pending.follow(held, new_times)

    def _is_settled(self, state: TimerState) -> bool:
        """Say whether we wrote all three files last, and no crash left units behind the end that the check names."""
        if not state.is_ours or not self._wheel.is_there():
            return False
        assert state.check is not None
        assert state.mark is not None
        if state.mark.boot != self._boot:
            return False
        log = self._timer_log()
        if not log.run.begin <= state.check.log_position <= log.run.end:
            self._log = None  # another process has made a file since
            log = self._timer_log()
        return log.run.begin <= state.check.log_position <= log.run.end and not log.goes_on(state.check.log_position)

    def _timer_log(self, *, look: bool = False) -> TimerLog:
        if self._log is None:
            self._log = TimerLog(self._root, self._disk)
        elif look:
            self._log.look()
        return self._log


def _changed(root: str, found: str) -> StoreChangedError:
    return StoreChangedError(
        f"the timer of {root} was not set back: another program used it meanwhile, and left {found}; expected the "
        "state that this repair left. Stop what delivers, and plan the repair again."
    )
