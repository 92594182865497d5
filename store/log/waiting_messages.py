"""What waits to be delivered, and so what retention leaves in the log: messages of delay levels, and of the timer.

Whoever ticks reads the message itself when it is due; once its segment is gone it cannot come. But a store in which
nobody ticks must not grow for ever: what is late by more than a day is held no longer, and who ticks then says how many
messages are lost. RocketMQ deletes by age alone, as its segments live longer than its messages wait.

How far was delivered is in the files that a broker reads too. They may say less than what was delivered, never more.
Files that are lost or damaged do not show what waits: then nothing is deleted before somebody has mended them.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import decode_delay_offsets
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC, TIMER_TOPIC
from rmq_spark.store.format.queue_unit import is_blank_fill
from rmq_spark.store.format.record import MAX_RECORD_BYTES, MIN_RECORD_BYTES
from rmq_spark.store.format.store_settings import StoreSettings
from rmq_spark.store.format.timer_check import TimerCheck, decode_timer_check
from rmq_spark.store.format.timer_log import BLANK_MAGIC, TIMER_UNIT, TIMER_UNIT_BYTES, are_units, due_times
from rmq_spark.store.format.timer_wheel import SECOND_MS
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.retention import Needed
from rmq_spark.store.log.segments import Segment, SegmentRun, list_segments
from rmq_spark.store.log.settings_file import check_settings
from rmq_spark.store.log.time_search import LOWER, TimeSearch
from rmq_spark.store.log.unit_agreement import compare_heads
from rmq_spark.store.units import QueueKey

LATE_MS = 24 * 3_600_000  # behind its time a message is held no longer
_KEPT_MS = 60_000  # an answer is good for as long, while nothing is delivered
_TIMER_LOG, _TIMER_CHECK = "timerlog", "timercheck"
_AT_ONCE = 1 << 16  # units
KEEPS = "Retention deletes nothing before that is mended: messages may wait there."
MEND_QUEUE = f"{KEEPS} Run `rmq repair`: it makes the queue anew from the log."
_MEND_TIMER = (
    f"{KEEPS} `rmq check` says what is wrong. Stop what delivers, and restore timerlog/, timerwheel and "
    "config/timercheck together from a copy. Without a copy move all three away: then all that waits is taken from its "
    "queue anew, and what is overdue is delivered again."
)


class WaitingMessages:
    """Says from where on the log of the store at `root` is needed. One thread at a time, under the store's lock.

    `refuse_lost` raises DamageError for a queue in which messages waited, and that has no files.
    """

    def __init__(
        self, root: str, log: CommitLog, now_ms: Callable[[], int], refuse_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._root, self._log, self._now_ms, self._refuse_lost = root, log, now_ms, refuse_lost
        self._offsets_path = files.join(root, filenames.CONFIG, filenames.DELAY_OFFSET_JSON)
        self._check_path = files.join(root, filenames.CONFIG, _TIMER_CHECK)
        self._known: tuple[object, int, Needed] | None = None

    def needed_from(self) -> Needed | None:
        """Return where the first message lies that waits and is not late by more than a day, None where none does.

        Raises DamageError for queues and files of the timer that are lost or damaged, and StoreError for those that the
        kernel does not let be read: what waits in them is not known, so nothing may be deleted.
        """
        now_ms = self._now_ms()
        read = files.read_small(self._offsets_path), files.read_small(self._check_path)
        if self._known is not None and self._known[0] == read and 0 <= now_ms - self._known[1] < _KEPT_MS:
            return self._known[2]
        self._refuse_lost()
        found = [Needed(place, self._offsets_path) for place in self._in_levels(read[0], now_ms)]
        found += [Needed(place, self._check_path) for place in self._in_timer(read[1], now_ms)]
        needed = min(found, key=lambda one: one.physical_offset, default=None)
        # What comes later lies behind it, so the answer stays while nothing is delivered. "Nothing" does not.
        self._known = None if needed is None else (read, now_ms, needed)
        return needed

    def _in_levels(self, held: bytes | None, now_ms: int) -> Iterator[int]:
        offsets = _offsets(held)
        folder = files.join(self._root, filenames.CONSUME_QUEUE, SCHEDULE_TOPIC)
        for name, is_folder in files.list_folder(folder):
            if not (is_folder and name.isascii() and name.isdigit() and len(name) < 10):
                continue
            queue = ConsumeQueue(QueueKey(SCHEDULE_TOPIC, int(name)), files.join(folder, name))
            try:
                yield from self._in_level(queue, offsets.get(int(name) + 1, 0), now_ms)
            except StoreError as error:
                raise _unknown(error, queue.run.folder, MEND_QUEUE) from error
            finally:
                queue.run.close()

    def _in_level(self, queue: ConsumeQueue, delivered: int, now_ms: int) -> list[int]:
        """Return where the first message of a level's queue lies that waits: its unit has the time when it is due."""
        for first, units in self._units(queue, delivered):
            here = np.flatnonzero(units["physical_offset"] >= self._log.segments.begin)
            due = units["tags_code"][here].astype(np.int64)
            # A negative one is the place of that in another file.
            waits = np.flatnonzero((due < 0) | (due >= now_ms - LATE_MS))
            asked = here[: waits[0] + 1] if len(waits) else here
            times = self._store_times(queue, first, units, asked)
            late = asked[: waits[0]] if len(waits) else asked
            _refuse(queue, first, late, times[: len(late)] > due[: len(late)], "a time after its message was stored")
            if len(waits):
                return [int(units["physical_offset"][asked[-1]])]
        return []

    def _units(self, queue: ConsumeQueue, begin: int) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yield the units that stand in a queue from number `begin` on, but for fill, and the number of the first.

        A part at a time. Raises DamageError for one that cannot be that of a record behind the one before.
        """
        if not queue.run.segments:
            return
        queue.refuse_hole_before(queue.run.begin, self._log.segments.begin)
        number, end, floor = max(begin, queue.run.begin), _data_end(queue), 0
        while number < end:
            units = queue.run.read(number, min(number + _AT_ONCE, end))
            places, sizes = units["physical_offset"].astype(np.int64), units["record_size"].astype(np.int64)
            fills = is_blank_fill(units)
            fill = len(units) if fills.all() else int(np.argmin(fills))
            places, sizes, units = places[fill:], sizes[fill:], units[fill:]
            floors = np.concatenate([[floor], places + sizes])[:-1]
            wrong = (sizes < MIN_RECORD_BYTES) | (sizes > MAX_RECORD_BYTES) | (places < floors)
            wrong |= places > self._log.segments.end - sizes
            _refuse(queue, number + fill, np.arange(len(units)), wrong, "the place of a record behind the one before")
            if len(units):
                yield number + fill, units
                floor = int(places[-1] + sizes[-1])
            number += fill + len(units)

    def _store_times(
        self, queue: ConsumeQueue, first: int, units: NDArray[np.void], rows: NDArray[np.intp]
    ) -> NDArray[np.int64]:
        """Return when the messages of some units were stored. Raises DamageError for one that is of no record."""
        asked = units[rows]
        places, sizes = asked["physical_offset"].astype(np.int64), asked["record_size"].astype(np.int64)
        ids = np.full(len(rows), queue.key.queue_id)
        agree, times = compare_heads(self._log, places, sizes, first + rows.astype(np.int64), ids)
        _refuse(queue, first, rows, ~agree, "the place of its record")
        return times

    def _in_timer(self, held: bytes | None, now_ms: int) -> Iterator[int]:
        check = decode_timer_check(held) if held else TimerCheck()
        folder = files.join(self._root, filenames.queue_folder(TIMER_TOPIC, 0))
        queue = ConsumeQueue(QueueKey(TIMER_TOPIC, 0), folder)
        try:
            yield from self._not_taken(queue, check, now_ms)
        except StoreError as error:
            raise _unknown(error, folder, MEND_QUEUE) from error
        finally:
            queue.run.close()
        try:
            yield from self._taken(check, now_ms)
        except StoreError as error:
            raise _unknown(error, files.join(self._root, _TIMER_LOG), _MEND_TIMER) from error

    def _not_taken(self, queue: ConsumeQueue, check: TimerCheck, now_ms: int) -> list[int]:
        """Return where the first message lies that is not in the timer log yet.

        Its queue knows only when it was stored.
        """
        settings = check_settings(self._root) or StoreSettings("")
        begin = end = max(check.queue_offset, queue.run.begin)
        for first, units in self._units(queue, begin):
            end = first + len(units)
        if queue.run.segments and check.queue_offset > _data_end(queue):
            what, expected = "the timer's check goes on behind the end of its queue", f"at most {_data_end(queue)}"
            raise DamageError(what, self._check_path, 0, expected, check.queue_offset, _MEND_TIMER)
        begin = max(begin, queue.first_from(self._log.segments.begin, end))
        if begin >= end:
            return []
        from_ms = now_ms - LATE_MS - settings.timer_max_delay_ms
        first = TimeSearch(self._log, queue, begin, end).unit_at(from_ms, LOWER)
        units = queue.run.read(first, min(first + 1, end))
        self._store_times(queue, first, units, np.arange(len(units)))
        return [int(place) for place in units["physical_offset"]]

    def _taken(self, check: TimerCheck, now_ms: int) -> list[int]:
        """Return where the message of the oldest unit of the timer log lies whose second is still to come.

        The wheel only finds units by their second, so it is not asked: it may be lost. A timer that is ahead of the
        clock may have delivered some of what counts here.
        """
        folder = files.join(self._root, _TIMER_LOG)
        run = list_segments(folder)
        first = run.segments[0] if run.segments else None
        if check.log_position > run.end:
            what, expected = "the timer log ends before what the timer's check says", f"{check.log_position} bytes"
            raise DamageError(what, folder, 0, expected, run.end, _MEND_TIMER)
        if first is not None and first.begin and not self._log.segments.begin:
            what = "the first files of the timer log are missing"
            raise DamageError(what, first.path, 0, "a file that begins at 0", first.begin, _MEND_TIMER)
        begin_ms = max(min(check.read_time, now_ms), now_ms - LATE_MS, 0) // SECOND_MS * SECOND_MS
        for units in _timer_units(run, check.log_position):
            waits = np.flatnonzero(due_times(units) >= begin_ms)
            if len(waits):
                return [int(units["physical_offset"][waits[0]])]
        return []


def _timer_units(run: SegmentRun, end: int) -> Iterator[NDArray[np.void]]:
    """Yield the units of the timer log, a part at a time; a filler ends a file.

    Up to position `end` the log was synced. Behind it a crash may have left half a unit: there nothing is damage, and
    what waits is in its queue, too, as not taken.
    """
    position = run.begin
    while position < run.end:
        segment = run.holding(position)
        if segment is None:
            raise DamageError("a file of the timer log is missing", run.segments[0].path, 0, position, "none")
        count = min((segment.end - position) // TIMER_UNIT_BYTES, _AT_ONCE)
        units = _read_units(segment, position, count)
        good = are_units(units)
        stop = count if good.all() else int(np.argmin(good))
        if stop:
            yield units[:stop]
        position += stop * TIMER_UNIT_BYTES
        if stop == count and count:
            continue
        if not _is_filler(segment, position):
            if position >= end:
                return
            raise DamageError("unit of the timer log", segment.path, position - segment.begin, "a unit", "none")
        position = segment.end


def _read_units(segment: Segment, position: int, count: int) -> NDArray[np.void]:
    with OpenFile(segment.path) as file:
        data = file.read(position - segment.begin, count * TIMER_UNIT_BYTES).ljust(count * TIMER_UNIT_BYTES, b"\0")
    return np.frombuffer(data, TIMER_UNIT)


def _is_filler(segment: Segment, position: int) -> bool:
    unit = _read_units(segment, position, 1)
    return int(unit["magic"][0]) == BLANK_MAGIC and int(unit["unit_size"][0]) == segment.end - position


def _data_end(queue: ConsumeQueue) -> int:
    """Return the number after the last unit of a queue that is anything but zeros."""
    size = queue.layout.itemsize
    for segment in reversed(queue.run.segments):
        parts = list(files.data_extents(segment.path, 0, segment.size))
        if parts:
            first, last = ((segment.begin + at) // size for at in parts[-1])
            units = queue.run.read(first, last + 1)
            return first + int(np.flatnonzero(units != np.zeros(1, queue.layout))[-1]) + 1
    return queue.run.begin


def _refuse(queue: ConsumeQueue, first: int, rows: NDArray[np.intp], wrong: NDArray[np.bool_], expected: str) -> None:
    """Raise DamageError for the first of some units, counted from number `first` on, that is wrong."""
    for row in rows[wrong][:1].tolist():
        path, position = queue.run.path_of(first + row)
        found = tuple(queue.run.read(first + row, first + row + 1)[0].tolist())
        raise DamageError(f"unit of queue {queue.key}", path, position, expected, found, MEND_QUEUE)


def _unknown(error: StoreError, path: str, next_step: str) -> StoreError:
    """Return the error to raise where files do not show what waits: one of the kernel as it is."""
    if is_unreadable(error):
        return error
    if isinstance(error, DamageError):
        next_step = error.next_step if error.next_step.startswith(KEEPS) else next_step
        return DamageError(error.what, error.path, error.position, error.expected, error.found, next_step)
    return DamageError("which messages wait is not known", path, 0, "files that can be read", str(error), next_step)


def _offsets(held: bytes | None) -> dict[int, int]:
    """Return how far each level was delivered; nothing known is 0, which holds more."""
    try:
        return dict(decode_delay_offsets(held).offsets) if held else {}
    except ValueError:
        return {}
