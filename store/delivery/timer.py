"""RocketMQ's timer, which keeps messages until a given time in the files of a broker of 5.x.

`timerlog/`, `timerwheel` and `config/timercheck` are written as a broker of 5.3 writes them. So a broker can continue
where this engine stopped, and the reverse. The scheduler uses the timer as a source (`delay_source.py`):

    timer.refresh(now_ms, metadata)           makes a few small reads, however many messages wait
    timer.prepare(section, now_ms, metadata)  repairs the files after a broker or a crash; takes new messages from the
                                              queue into log and wheel; writes into the check how far messages were
                                              delivered according to the metadata
    timer.take(now_ms, bytes, count)          returns records to commit, with the metadata keys READ and PART

A batch is committed before the check is written. After a crash between the two, the check lags behind. Then the
metadata is right, and the next `prepare` writes the check. A broker that starts before that does not read the metadata
and delivers this batch again.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.delay_source import Due, Metadata, Outlook
from rmq_spark.store.delivery.timer_batch import as_rolling_deletions, make_batch
from rmq_spark.store.delivery.timer_files import TimerCheckFile, TimerLog, TimerWheel
from rmq_spark.store.delivery.timer_intake import Intake, Recovered, recover
from rmq_spark.store.delivery.timer_state import (
    PART,
    READ,
    ChainedEntries,
    Progress,
    TimerOwnership,
    TimerOwnershipFile,
    TimerState,
    UncertainWindow,
    read_chains,
)
from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.timer import DELETE, ROLL, SECOND_MS, SLOT_COUNT, WINDOW_MS, TimerCheck, floor_second
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import TIMER_TOPIC

_LOG = logging.getLogger("rmq_spark")
_TAKEN_AT_ONCE = 131_072  # messages taken in one write session at most, because other writers wait for its end
_GROWTH_BYTES = 96  # a record grows by at most this, because its delivery adds properties
_WRONG_CLOCK_MS = 60 * SECOND_MS  # if the timer is ahead of the clock by more than this, that is logged
_LONG_AGO_MS = 24 * 3600 * SECOND_MS
_TOO_LONG_AGO_MS = 11 * _LONG_AGO_MS  # if the timer lags by more, the wheel (14 days) has no room for new messages
_OTHER_CLOCK_MS = 3600 * SECOND_MS  # the clock of another process may be ahead by this much


class TimerStore:
    """The DelaySource of the timer's messages, for the store with this root and commit log folders. Not thread-safe."""

    def __init__(self, root: str, folders: tuple[str, ...], disk: Disk) -> None:
        self._root, self._folders, self._disk = root, folders, disk
        self._queue = ConsumeQueue(QueueKey(TIMER_TOPIC, 0), files.join(root, filenames.queue_folder(TIMER_TOPIC, 0)))
        self._check, self._ownership = TimerCheckFile(root, disk), TimerOwnershipFile(root, disk)
        self._wheel = TimerWheel(root, disk)
        self._log: TimerLog | None = None
        self._boot = host.boot_id()
        self._wheel_cache = WheelCache(self._wheel)
        self._metadata: Metadata = {}  # as passed to the last `prepare`
        self._is_ahead_logged = False
        self._read_ms = 0  # the check's `read_time` when the check was last read

    def refresh(self, now_ms: int, metadata: Metadata) -> Outlook:
        """Return whether a message is due or `prepare` has work, and when the next message is due.

        If the store has never had a timer message, this only lists the files of the timer's queue.
        """
        self._queue.run.refresh()
        if not self._queue.run.segments:
            return Outlook()
        state = self._state(metadata)
        if not state.is_recorded or not self._is_consistent(state) or self._has_new(state):
            return Outlook(True)
        assert state.check is not None
        times = self._wheel_cache.times(state.check, now_ms)
        at = int(np.searchsorted(times, state.progress.read_ms))
        if at == len(times):
            return Outlook()
        next_ms = int(times[at]) + SECOND_MS
        return Outlook(next_ms <= now_ms, next_ms)

    def prepare(self, section: WriteSession, now_ms: int, metadata: Metadata, *, takes_new: bool = True) -> None:
        """Repair the files, take new messages from the timer's queue, and bring the check up to date with the metadata.

        Repairs what a broker or a crash has left. Takes as many messages as fit into one write session, or none if
        `takes_new` is False. Takes no new messages either while a message has been overdue for more than eleven days. A
        crash during this call neither loses nor doubles a message. Raises LockTimeoutError if a broker starts and does
        not wait, and DamageError if a file has contents that a broker would not load.
        """
        self._metadata = dict(metadata)
        self._queue.run.refresh()
        if not self._queue.run.segments:
            return
        state = self._state(metadata)
        takes_new = takes_new and self._has_new(state)
        if state.is_recorded and self._is_consistent(state) and not takes_new:
            return
        section.heartbeat()
        has_wheel, is_consistent = self._wheel.is_there(), self._is_consistent(state)
        self._wheel.make()
        if state.progress.part >= 0 and not state.is_recorded:
            self._unlink_delivered(state.progress, section.heartbeat)
        if is_consistent and not takes_new:
            doubt = state.doubt if state.doubt.covers(state.progress.read_ms) else UncertainWindow()
            assert state.check is not None
            self._save(state.check, state.progress, doubt, now_ms, [])
        else:
            self._take_in(section, state, now_ms, has_wheel=has_wheel, is_consistent=is_consistent, takes_new=takes_new)
        self._queue.run.close()

    def take(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return the next messages that must be delivered, or put back into the queue because they are due later.

        Starts where the metadata of the last `prepare` ends. The messages are ordered by second, and within a second in
        the order in which they were taken. Returns at most `room_count` messages and `room_bytes` bytes, or one message
        that is longer. Returns no messages while the files need repair. Changes nothing.
        """
        state, end_ms = self._state(self._metadata), floor_second(now_ms)
        if not self._is_consistent(state):
            return Due()
        assert state.check is not None
        self._timer_log(refresh=True)  # another process may have deleted files in a round of its own
        times = self._wheel_cache.times(state.check, end_ms)
        at = int(np.searchsorted(times, state.progress.read_ms))
        if at >= len(times) or times[at] >= end_ms:
            return Due()
        slots = self._wheel.slots_from(state.progress.read_ms, end_ms)
        return self._take_slots(slots, state, now_ms, room_bytes, room_count)

    def take_waiting(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return messages that wait in the wheel, due or not, as records that put them back into the timer's queue.

        Limits and order are those of `take`. Messages that others delete are left out. The messages that delete them
        are put back too.
        """
        state = self._state(self._metadata)
        if not self._is_consistent(state):
            return Due()
        self._timer_log(refresh=True)
        slots = self._wheel.slots_from(state.progress.read_ms)
        return self._take_slots(slots, state, now_ms, room_bytes, room_count, puts_back=True)

    def clear(self, section: WriteSession) -> None:
        """Remove wheel and timer log.

        Before this, all waiting messages must have been put back into the queue, and the check must record that. After
        a crash during this call, no message is delivered from the remaining files. Raises StoreChangedError if a
        message waits, or if another program has changed the files.
        """
        state = self._state(self._metadata)
        waiting = len(self._wheel.slots_from(state.progress.read_ms))
        if not state.is_recorded or not self._is_consistent(state) or waiting:
            raise _changed(self._root, f"{state} and {waiting} seconds with messages")
        section.heartbeat()
        self._timer_log(refresh=True).discard()
        self._wheel.discard()

    def restart(self, section: WriteSession, now_ms: int, metadata: Metadata) -> None:
        """Start the timer at `now_ms`, after `clear` has emptied it. All waiting messages are in the queue.

        The metadata must not be ahead of `now_ms`. Raises StoreChangedError if another program used the timer after
        `clear`.
        """
        state = self._state(metadata)
        if (
            state.check is None
            or not state.is_ours
            or self._wheel.is_there()
            or self._timer_log(refresh=True).run.segments
        ):
            raise _changed(self._root, f"{state} and files of the timer")
        section.heartbeat()
        check = replace(state.check, log_position=0)
        self._save(check, Progress(floor_second(now_ms)), state.doubt, now_ms, None)

    def close(self) -> None:
        """Close the files. The object stays usable: the next call opens them again."""
        self._queue.run.close()
        self._log = None

    def _state(self, metadata: Metadata) -> TimerState:
        check = self._check.read()
        if check is not None and check.read_time < self._read_ms:
            self._log = None  # list its files again: a repair has set the timer back and rebuilt them
        self._read_ms = 0 if check is None else check.read_time
        return TimerState(check, self._ownership.read(), Progress.of(check, metadata))

    def _has_new(self, state: TimerState) -> bool:
        """Return whether the timer's queue has messages that are not taken yet."""
        offset = 0 if state.check is None else state.check.queue_offset
        has_new = self._queue.is_written(max(offset, self._queue.run.begin))
        self._queue.run.close()
        return has_new

    def _is_consistent(self, state: TimerState) -> bool:
        """Return whether the files need no repair.

        That is, this engine was the last to write all three files, the machine was not restarted later, and the log has
        no entries after the end that the check records (a crash leaves such entries).
        """
        if not state.is_ours or not self._wheel.is_there():
            return False
        assert state.check is not None
        assert state.ownership is not None
        if state.ownership.boot != self._boot:
            return False
        log = self._timer_log()
        if not log.run.begin <= state.check.log_position <= log.run.end:
            self._log = None  # list the files again: another process has created one
            log = self._timer_log()
        return log.run.begin <= state.check.log_position <= log.run.end and not log.goes_on(state.check.log_position)

    def _timer_log(self, *, refresh: bool = False) -> TimerLog:
        if self._log is None:
            self._log = TimerLog(self._root, self._disk)
        elif refresh:
            self._log.refresh()
        return self._log

    def _take_in(
        self,
        section: WriteSession,
        state: TimerState,
        now_ms: int,
        *,
        has_wheel: bool,
        is_consistent: bool,
        takes_new: bool,
    ) -> None:
        """Recover log and wheel unless they are consistent. Then take messages from the queue, and write the check."""
        end, old = section.next_offset(TIMER_TOPIC, 0), state.check or TimerCheck()
        log, second_ms = self._timer_log(refresh=True), floor_second(now_ms)
        if is_consistent:
            recovered = Recovered(old.log_position, old.queue_offset, np.zeros(0, np.int64), True)
        else:
            recovered = recover(
                log,
                self._wheel,
                self._queue,
                end,
                old,
                read_ms=state.progress.read_ms,
                has_wheel=has_wheel,
                is_ours=state.is_ours,
                is_same_boot=state.ownership is not None and state.ownership.boot == self._boot,
            )
            # Bytes after the check's position were not synced, or the sync failed. After a failed sync, no later sync
            # writes them to the disk unless they are written again.
            log.write_again_from(min(old.log_position, recovered.end), section.heartbeat)
            self._wheel.write_again(section.heartbeat)
        taken = self._first_left(recovered.queue_offset, min(self._queue.run.begin, end))
        progress = self._skip_empty_seconds(state.progress, second_ms)
        # No entry may get a second before the timer's progress, because such a second is not read any more, or only
        # after a whole round of the wheel.
        write_ms = max(second_ms, progress.read_ms)
        self._log_ahead(progress.read_ms - second_ms)
        intake = Intake(log, self._wheel, self._queue, CommitLog(self._folders, mapped=False), recovered.end, [])
        try:
            if takes_new and second_ms - progress.read_ms < _TOO_LONG_AGO_MS and taken < end:
                limit = min(end, taken + _TAKEN_AT_ONCE)
                # Make the messages durable before their entries. If a power cut lost only the messages, other messages
                # might get their physical offsets and would be treated as taken.
                section.settle()
                if state.check is None:
                    self._check.write(TimerCheck(progress.read_ms, 0, taken, limit))
                else:
                    self._check.announce_taken(limit)
                while taken < limit:
                    section.heartbeat()
                    taken = intake.take(taken, limit, recovered.logged, read_ms=progress.read_ms, write_ms=write_ms)
            section.heartbeat()
            doubt = state.doubt if recovered.is_certain else UncertainWindow(section.end, second_ms)
            check = replace(old, log_position=intake.end, queue_offset=taken)
            self._save(check, progress, doubt, now_ms, intake.new_times if is_consistent else None)
            log.expire(intake.log.segments.begin)
        finally:
            intake.log.close()

    def _first_left(self, taken: int, begin: int) -> int:
        """Return the queue offset where intake resumes: `taken`, or `begin` if messages before `begin` have expired.

        If messages have expired that were not taken, logs how many.
        """
        if begin > taken:
            _LOG.error(
                "rmq: %d messages of %s that were not delivered are no longer in the log, starting at queue offset %d",
                begin - taken,
                self._queue.key,
                taken,
            )
        return max(taken, begin)

    def _log_ahead(self, ahead_ms: int) -> None:
        """Log, once, that the timer is ahead of the clock, because a clock was wrong when messages were delivered."""
        is_ahead = ahead_ms > _WRONG_CLOCK_MS
        if is_ahead and not self._is_ahead_logged:
            _LOG.error(
                "rmq: the timer of %s has delivered up to a time that is %d s ahead of this clock: messages for an "
                "earlier time are not delivered before the clock reaches it",
                self._root,
                ahead_ms // SECOND_MS,
            )
        self._is_ahead_logged = is_ahead

    def _take_slots(
        self,
        slots: NDArray[np.void],
        state: TimerState,
        now_ms: int,
        room_bytes: int,
        room_count: int,
        *,
        puts_back: bool = False,
    ) -> Due:
        """Return the first messages of `slots`, which ascend by second, as records, with the new metadata.

        With `puts_back` the records put the messages back into the timer's queue.
        """
        if not len(slots):
            return Due()
        counts = np.cumsum(np.maximum(slots["message_count"].astype(np.int64), 1))
        slots = slots[: int(np.searchsorted(counts, room_count)) + 1]
        chained = read_chains(self._timer_log(), slots)
        magics = chained.entries["magic"]
        deletions = chained.chosen(((magics & DELETE) != 0) & ((magics & ROLL) == 0))
        left = chained.chosen((chained.times > state.progress.read_ms) | (chained.positions > state.progress.part))
        if len(left):
            return self._batch(deletions, left, state.doubt, now_ms, room_bytes, room_count, puts_back=puts_back)
        _LOG.error(
            "rmq: the timer log of %s has no entries for %d seconds of its wheel, starting at %d (ms): their messages, "
            "%d by the wheel's count, are not delivered",
            self._root,
            len(slots),
            int(slots["second"][0]) * SECOND_MS,
            int(np.maximum(slots["message_count"].astype(np.int64), 0).sum()),
        )
        return Due(metadata={READ: int(slots["second"][-1]) * SECOND_MS + SECOND_MS, PART: -1})

    def _batch(
        self,
        deletions: ChainedEntries,
        chained: ChainedEntries,
        doubt: UncertainWindow,
        now_ms: int,
        room_bytes: int,
        room_count: int,
        *,
        puts_back: bool,
    ) -> Due:
        """Return the messages of the first entries of `chained`, as many as there is room for, with new metadata."""
        sizes = chained.entries["record_size"].astype(np.int64) + _GROWTH_BYTES
        cut = max(min(room_count, int(np.searchsorted(np.cumsum(sizes), room_bytes, "right"))), 1)
        last_ms = int(chained.times[min(cut, len(chained)) - 1])
        is_part = cut < len(chained) and int(chained.times[cut]) == last_ms
        metadata = {READ: last_ms if is_part else last_ms + SECOND_MS}
        metadata[PART] = int(chained.positions[cut - 1]) if is_part else -1
        chained = chained.chosen(slice(0, cut))
        log = CommitLog(self._folders, mapped=False)
        try:
            built = [make_batch(self._root, log, deletions, chained, doubt, now_ms, puts_back=puts_back)]
            if puts_back:
                built.append(make_batch(self._root, log, *as_rolling_deletions(chained), UncertainWindow(), now_ms))
        finally:
            log.close()
        return Due(tuple(records for records in built if records is not None), metadata)

    def _unlink_delivered(self, progress: Progress, heartbeat: Callable[[], None]) -> None:
        """Remove the entries that were delivered from the chain of their second, so that no broker delivers them again.

        Does nothing if one of them deletes another message. The entry of that message may come later in the chain, and
        without the deletion a broker would deliver it.
        """
        log, read_ms = self._timer_log(), progress.read_ms
        slots = self._wheel.slots_from(read_ms, read_ms + SECOND_MS)
        if not len(slots):
            return
        chained = read_chains(log, slots)
        old = chained.positions <= progress.part
        if not old.any():
            # A process has removed these entries already, but failed or died before it synced that.
            log.write_again_from(int(chained.positions[0]), heartbeat)
            self._wheel.write_again(heartbeat)
            return
        if old.all() or (chained.entries["magic"][old] & DELETE).any():
            return
        first = int(np.argmin(old))
        log.unlink_before(int(chained.positions[first]))
        slot = slots.copy()
        slot["first_position"] = chained.positions[first]
        slot["message_count"] -= int(old.sum())
        self._wheel.write_slots(slots["second"].astype(np.int64) % SLOT_COUNT, slot)

    def _skip_empty_seconds(self, progress: Progress, second_ms: int) -> Progress:
        """If the timer lags by more than a day, return the progress at the next second that has messages.

        If there is no such second, this is the second before `second_ms`. Otherwise returns `progress` unchanged.
        """
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
        doubt: UncertainWindow,
        now_ms: int,
        new_times: list[NDArray[np.int64]] | None,
    ) -> None:
        """Sync log and wheel, and then write the check, so that everything to which the check refers is durable.

        `new_times` are the seconds (ms) that got messages; None means that they are unknown.
        """
        self._timer_log().sync()
        self._wheel.sync()
        written = replace(
            check,
            read_time=progress.read_ms,
            master_queue_offset=check.queue_offset,
            version_timestamp=now_ms,
            version_counter=check.version_counter + 1,
        )
        # A crash between these two writes looks as if a broker had used the store. This is safe: messages that a broker
        # may have delivered are looked up before they are delivered.
        self._ownership.write(TimerOwnership.of(written, progress.part, self._boot, doubt))
        self._check.write(written)
        self._wheel_cache.follow(written, new_times)


def _changed(root: str, found: str) -> StoreChangedError:
    return StoreChangedError(
        f"the timer of {root} was not set back: another program used it meanwhile, and left {found}; expected the "
        "state that this repair left. Stop the programs that deliver, and plan the repair again."
    )


class WheelCache:
    """A cache of the seconds that have messages, together with the check at which they were read. Not thread-safe.

    The whole wheel is read once, and later only the part that may have changed. So the cost of a round depends on the
    messages that are due, not on all that wait.
    """

    def __init__(self, wheel: TimerWheel) -> None:
        self._wheel = wheel
        self._cached: tuple[TimerCheck, NDArray[np.int64]] | None = None

    def times(self, check: TimerCheck, now_ms: int) -> NDArray[np.int64]:
        """Return the seconds (ms, ascending) that have messages by the current `check`; some may be delivered."""
        if self._cached is None or check.read_time < self._cached[0].read_time:
            slots = self._wheel.slots_from(check.read_time)
            self._cached = check, slots["second"].astype(np.int64) * SECOND_MS
        elif self._cached[0] != check:
            # Other processes have delivered or taken messages. These are in the window, a seventh of the wheel.
            end_ms = max(check.read_time, now_ms) + WINDOW_MS + _OTHER_CLOCK_MS
            slots = self._wheel.slots_from(check.read_time, end_ms)
            later = self._cached[1][int(np.searchsorted(self._cached[1], end_ms)) :]
            self._cached = check, np.concatenate([slots["second"].astype(np.int64) * SECOND_MS, later])
        return self._cached[1]

    def follow(self, check: TimerCheck, new_times: list[NDArray[np.int64]] | None) -> None:
        """Record that `check` was written, and which seconds (ms) got messages.

        If `new_times` is None, this is unknown, and the cache is emptied.
        """
        if new_times is None or self._cached is None:
            self._cached = None
        else:
            times = _merged([self._cached[1], *new_times])
            self._cached = check, times[int(np.searchsorted(times, check.read_time)) :]


def _merged(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the distinct numbers of all parts, ascending. Each part must be ascending and without duplicates.

    A stable sort is fast here, because it makes use of sorted runs.
    """
    if len(parts) == 1:
        return parts[0]
    times: NDArray[np.int64] = np.sort(np.concatenate(parts), kind="stable")
    is_new = np.ones(len(times), np.bool_)
    is_new[1:] = times[1:] != times[:-1]
    return times[is_new]
