"""The queues of SCHEDULE_TOPIC_XXXX: which of their messages are due, and what is delivered for them.

Level n waits in queue n - 1, in the order of arrival; its units' tags codes are the times at which they are due. All of
a level are as late, so the first one that is not due ends the look.

| what is there | what is done |
| --- | --- |
| a time that is further from now, or from the last message's, than the delay | due now: the delay was longer once |
| a last message stored more than an hour ahead of now | the same, from now alone: a clock was wrong |
| a level that the table does not have | its unit's time, whatever that is |
| no record, damage, REAL_TOPIC or REAL_QID missing or bad | passed over for good, with a line in the log |
| REAL_TOPIC is the topic of half messages | discarded, with a line in the log |
| an offset before the first unit, or behind the last | the first, or the last, counts |
| a note behind the last unit | delayOffset.json alone counts: the log is an older copy |

The properties of what is delivered are those that waited, byte by byte, but for the CRC of the record that waited.

RocketMQ compares a time with the clock alone, read after the unit. Here it was read before, others may have stored
messages since, and it may be behind theirs: set back by a ms. Source: ScheduleMessageService#executeOnTimeup,
#correctDeliverTimestamp, #correctDelayOffset, #messageTimeup (4.9.8, 5.3).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.due_source import Due, Note, Outlook
from rmq_spark.store.delivery.originals import read_originals
from rmq_spark.store.delivery.real_queues import find_real_queues
from rmq_spark.store.disk import files
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.queue_unit import BLANK_FILL_OFFSET, BLANK_FILL_SIZE, is_blank_fill
from rmq_spark.store.format.rebuilt_records import rebuild_records
from rmq_spark.store.format.record import BLANK_BYTES
from rmq_spark.store.format.whole_records import WholeRecords
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.log.section import Section
from rmq_spark.store.log.watermark_file import read_watermark
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")
_FEW_UNITS = 64  # read at first: mostly few are due
_MANY_UNITS = 32_768
_AHEAD_UNITS = 256  # looked at behind where a level goes on: a page of zeros is shorter
_NEVER_MS = 2**63 - 1
_WRONG_CLOCK_MS = 3_600_000  # a store's time so far ahead is nothing to go by
_TOLD_ROWS = 5  # of those passed over in one look, each with a line of its own


def note_key(level: int) -> str:
    """Return the key of a level in the ledger's note; its value is the next queue offset to deliver."""
    return f"level.{level}"


@dataclass(slots=True)
class _Level:
    """One level: [next, end) wait, as of the last `prepare`."""

    number: int
    queue: ConsumeQueue
    next: int = 0
    end: int = 0
    is_overstated: bool = False  # the note says that more was delivered than the queue has
    idle_at: int = -1  # where `prepare` found that it goes on and that nothing waits there


class DelayQueues:
    """All delay levels of one store: a DueSource. One thread at a time.

    `folders` are those of the commit log; `levels` returns the store's table; `offsets` is its delayOffset.json.
    """

    def __init__(
        self,
        root: str,
        folders: tuple[str, ...],
        offsets: DelayOffsetFile,
        levels: Callable[[], DelayLevels],
    ) -> None:
        self._root, self._folder = root, files.join(root, filenames.CONSUME_QUEUE, SCHEDULE_TOPIC)
        self._offsets, self._read_levels = offsets, levels
        self._log = CommitLog(folders, mapped=False)
        self._levels: dict[int, _Level] = {}
        self._delays = levels()
        self._segment_bytes = 0
        self._last_ms = 0  # when the last message was stored, as far as is known

    def close(self) -> None:
        """Let go of files; what is used again is opened again."""
        self._log.close()
        for level in self._levels.values():
            level.queue.run.close()

    def look(self, now_ms: int, note: Note) -> Outlook:
        """Say whether a first message is due, or an offset is not what it should be: a few small reads a level."""
        self._list_levels()
        held = self._offsets.read() if self._levels else {}
        outlook = Outlook()
        for level in self._levels.values():
            begin = _progress(level.number, held, note)
            is_behind = note.get(note_key(level.number), 0) > held.get(level.number, 0)
            found = Outlook(True) if is_behind else self._look_at(level, begin, now_ms)
            level.queue.run.close()
            outlook = outlook.joined(found)
        return outlook

    def prepare(self, section: Section, now_ms: int, note: Note) -> None:
        """Learn where each level goes on and ends, and have delayOffset.json say so."""
        self._list_levels()
        self._log.look()
        self._segment_bytes, self._last_ms = section.segment_bytes, section.last_ms
        held, corrected = self._offsets.read() if self._levels else {}, {}
        for level in self._levels.values():
            level.queue.run.look()
            level.end = section.next_offset(SCHEDULE_TOPIC, level.queue.key.queue_id)
            known = _progress(level.number, held, note)
            level.is_overstated = note.get(note_key(level.number), 0) > level.end
            # A note of another log, longer than this copy of it, says nothing of what was stored here since.
            level.next = self._corrected(level, _progress(level.number, held, {}) if level.is_overstated else known)
            level.idle_at = level.next if level.next >= level.end else -1
            level.queue.run.close()
            if level.next != held.get(level.number, 0):
                corrected[level.number] = level.next
            if level.next < known:
                _LOG.error(
                    "rmq: delay level %d was to go on at queue offset %d, and %s has [%d, %d): it goes on at %d",
                    level.number, known, level.queue.key, min(level.next, level.end), level.end, level.next,
                )  # fmt: skip
        if corrected:
            # After the commit that delivered up to there: a crash before this leaves an older offset, and the note.
            self._offsets.write(corrected)

    def take(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return what is due, the level that is late by most first."""
        firsts = [(self._first_due(level), level.number) for level in self._levels.values() if level.next < level.end]
        records: list[EncodedRecords] = []
        # Before its queue grows beyond what the note says: what it grows by would not be delivered.
        note = {note_key(level.number): level.next for level in self._levels.values() if level.is_overstated}
        for _, number in sorted(firsts):
            level, begin = self._levels[number], self._levels[number].next
            end = begin
            while room_count > 0 and room_bytes > 0 and end < level.end:
                units = self._due_units(level, end, now_ms, room_bytes, room_count, is_first=not records)
                if not len(units):
                    break
                made = self._deliver(level, units)
                if made is not None:
                    records.append(made)
                    room_bytes -= len(made.data)
                end += len(units)
                room_count -= len(units)
            level.queue.run.close()
            if end > begin:
                note[note_key(number)] = end
        return Due(tuple(records), note)

    def _list_levels(self) -> None:
        """Bring the list of levels up to date: those that have a folder. Their files are listed when they are read."""
        self._delays = self._read_levels()
        names = {name for name, is_folder in files.list_folder(self._folder) if is_folder and name.isascii()}
        numbers = {int(name) + 1: name for name in names if name.isdigit() and len(name) < 10}
        self._levels = {
            number: self._levels.get(number)
            or _Level(number, ConsumeQueue(QueueKey(SCHEDULE_TOPIC, number - 1), files.join(self._folder, name)))
            for number, name in sorted(numbers.items())
        }

    def _look_at(self, level: _Level, begin: int, now_ms: int) -> Outlook:
        """Look at the unit where a level goes on, and at those beside it."""
        run = level.queue.run
        try:
            if begin >= run.end or begin < run.begin:
                run.look()  # files may have been made, or retention took some
            first = max(begin, run.begin)
            before = max(first - 1, run.begin)
            units = run.read(before, first + _AHEAD_UNITS)
        except StoreChangedError:
            run.look()
            return Outlook(True)  # whatever it is, `prepare` finds out
        is_written = level.queue.are_written(units).tolist()
        at = first - before
        if not any(is_written[at:]):
            is_behind = first > run.end or not all(is_written[:at])  # the queue's end: to be corrected
            return Outlook(begin > run.begin and is_behind)
        if not is_written[at]:
            return Outlook(begin != level.idle_at)  # damage, with messages behind it
        place, size, due_ms = units[at].tolist()
        if first != begin or (place, size) == (BLANK_FILL_OFFSET, BLANK_FILL_SIZE):
            return Outlook(True)
        if due_ms < 0:
            due_ms = int(self._times(level, level.queue.read(first, first + 1))[0])
        if due_ms > self._latest_due(level, now_ms):
            # Behind the unit: whoever stored its message has said so since, or is about to.
            watermark = read_watermark(self._root)
            self._last_ms = max(self._last_ms, 0 if watermark is None else watermark.last_ms)
        is_due = due_ms <= now_ms or due_ms > self._latest_due(level, now_ms)
        return Outlook(True) if is_due else Outlook(next_due_ms=due_ms)

    def _corrected(self, level: _Level, known: int) -> int:
        """Return where a level goes on: within what its queue has."""
        if known >= level.end:
            return level.end
        first = level.queue.first_from(self._log.segments.begin, level.end)
        if first > known:
            self._tell_expired(level, known, first)
        return max(known, first)

    def _tell_expired(self, level: _Level, known: int, first: int) -> None:
        """Say in the log how many messages waited in vain: retention took them, or a hand."""
        run = level.queue.run
        begin = run.first_where(run.begin, first, lambda unit: not is_blank_fill(unit))
        if begin > run.begin:
            known = max(known, begin)  # there never were any before it
        if first > known:
            _LOG.error(
                "rmq: delay level %d: %d messages of %s that were not delivered are no longer in the log, from queue "
                "offset %d on: it goes on at %d",
                level.number, first - known, level.queue.key, known, first,
            )  # fmt: skip

    def _first_due(self, level: _Level) -> int:
        return int(level.queue.read(level.next, level.next + 1).tags_codes[0])

    def _due_units(
        self, level: _Level, begin: int, now_ms: int, room_bytes: int, room_count: int, *, is_first: bool
    ) -> Units:
        """Return the units from `begin` on that are due, up to the first that is not, as many as there is room for."""
        step, until = _FEW_UNITS, min(level.end, begin + min(room_count, _MANY_UNITS))
        while True:
            end = min(begin + step, until)
            units = level.queue.read(begin, end)
            times = self._times(level, units)
            is_early = times > self._latest_due(level, now_ms)
            is_late = (times <= now_ms) | is_early
            count = len(units) if is_late.all() else int(np.argmin(is_late))
            if count < len(units) or end >= until:
                break
            step *= 16
        fitting = int(np.searchsorted(np.cumsum(np.maximum(units.sizes, 0)), room_bytes, side="right"))
        count = min(count, max(fitting, 1 if is_first else 0))
        self._tell_early(level, times[:count][is_early[:count]], now_ms)
        return units.part(0, count)

    def _latest_due(self, level: _Level, now_ms: int) -> int:
        """Return the latest time that a message of a level can be due, if its unit says what is so."""
        if level.number > len(self._delays):
            return _NEVER_MS
        is_wrong = self._last_ms > now_ms + _WRONG_CLOCK_MS
        return (now_ms if is_wrong else max(now_ms, self._last_ms)) + self._delays.due_after_ms(level.number)

    def _tell_early(self, level: _Level, times: NDArray[np.int64], now_ms: int) -> None:
        """Say in the log which messages are delivered though their units name a time that is far ahead."""
        if len(times):
            _LOG.warning(
                "rmq: delay level %d: %d messages are delivered now, though they were to wait up to %d s more: longer "
                "than the level's delay of %d s, which was another one when they were stored, or the clock was%s",
                level.number, len(times), (int(times.max()) - now_ms) // 1000,
                self._delays.due_after_ms(level.number) // 1000,
                f"; the store's last message is {(self._last_ms - now_ms) // 1000} s ahead of it"
                if self._last_ms > now_ms + _WRONG_CLOCK_MS
                else "",
            )  # fmt: skip

    def _times(self, level: _Level, units: Units) -> NDArray[np.int64]:
        """Return when each unit says that its message is due, in ms."""
        delay_ms, times = self._delays.due_after_ms(level.number), units.tags_codes
        extended = np.flatnonzero(times < 0)
        if len(extended):
            # No time but the place of one in a file that not every broker writes: the record says it too.
            found = read_originals(self._log, units.physical_offsets[extended], units.sizes[extended])
            kept = np.flatnonzero(found.is_whole)
            times = times.copy()
            whole = WholeRecords.of(found.data, found.positions[kept], found.ends[kept])
            times[extended[kept]] = whole.field("store_timestamp") + delay_ms
        return times

    def _deliver(self, level: _Level, units: Units) -> EncodedRecords | None:
        """Return the records to deliver for these units, None if none of them can be."""
        found = read_originals(self._log, units.physical_offsets, units.sizes)
        offsets = units.queue_offsets
        kept = np.flatnonzero(found.is_whole)
        _tell(level, offsets[~found.is_whole], "no whole record stands where its unit says")
        if not len(kept):
            return None
        whole = WholeRecords.of(found.data, found.positions[kept], found.ends[kept])
        key = level.queue.key
        is_its = whole.are_of(key.topic, key.queue_id) & (whole.field("queue_offset") == offsets[kept])
        if not is_its.all():
            _tell(level, offsets[kept[~is_its]], "the record that its unit names is another one's")
            kept = kept[is_its]
            if not len(kept):
                return None
            whole = WholeRecords.of(found.data, found.positions[kept], found.ends[kept])
        queues = find_real_queues(whole.pairs(), self._segment_bytes - BLANK_BYTES, whole)
        for why, rows in queues.refused.items():
            _tell(level, offsets[kept[rows]], why)
        if not len(queues.rows):
            return None
        chosen = kept[queues.rows]
        return rebuild_records(
            found.data, found.positions[chosen], found.ends[chosen], topics=queues.topics, queue_ids=queues.queue_ids
        )


def _progress(level: int, held: Mapping[int, int], note: Note) -> int:
    """Return where a level goes on, as delayOffset.json or the note says: the one that is further."""
    return max(held.get(level, 0), note.get(note_key(level), 0), 0)


def _tell(level: _Level, offsets: NDArray[np.int64], why: str) -> None:
    """Say in the log which messages of a level are passed over for good."""
    for offset in offsets[:_TOLD_ROWS].tolist():
        _LOG.error(
            "rmq: delay level %d: the message at queue offset %d of %s is passed over: %s",
            level.number, offset, level.queue.key, why,
        )  # fmt: skip
    if len(offsets) > _TOLD_ROWS:
        _LOG.error("rmq: delay level %d: so are %d more messages behind it", level.number, len(offsets) - _TOLD_ROWS)
