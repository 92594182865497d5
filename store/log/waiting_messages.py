"""What waits to be delivered, and so what retention leaves in the log: messages of delay levels, and of the timer.

Whoever ticks reads the message itself when it is due; once its segment is gone it cannot come. But a store in which
nobody ticks must not grow for ever: what is late by more than a day is held no longer, and who ticks then says how many
messages are lost. RocketMQ deletes by age alone, as its segments live longer than its messages wait.

How far was delivered is in the files that a broker reads too. They may say less than what was delivered, never more.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import decode_delay_offsets
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC, TIMER_TOPIC
from rmq_spark.store.format.store_settings import StoreSettings
from rmq_spark.store.format.timer_check import TimerCheck, decode_timer_check
from rmq_spark.store.format.timer_log import TIMER_UNIT, TIMER_UNIT_BYTES, are_units
from rmq_spark.store.format.timer_wheel import (
    SECOND_MS,
    SLOT_COUNT,
    TIMER_SLOT,
    TIMER_SLOT_BYTES,
    WHEEL_BYTES,
    WINDOW_MS,
)
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.retention import Needed
from rmq_spark.store.log.segments import list_segments
from rmq_spark.store.log.settings_file import check_settings
from rmq_spark.store.log.time_search import LOWER, TimeSearch
from rmq_spark.store.units import QueueKey

LATE_MS = 24 * 3_600_000  # behind its time a message is held no longer
_CLOCK_MS = 3_600_000  # that clocks may differ
_KEPT_MS = 60_000  # an answer is good for as long, while nothing is delivered
_TIMER_LOG, _TIMER_WHEEL, _TIMER_CHECK = "timerlog", "timerwheel", "timercheck"


class WaitingMessages:
    """Says from where on the log of the store at `root` is needed. One thread at a time, under the store's lock."""

    def __init__(self, root: str, log: CommitLog, now_ms: Callable[[], int]) -> None:
        self._root, self._log, self._now_ms = root, log, now_ms
        self._offsets_path = files.join(root, filenames.CONFIG, filenames.DELAY_OFFSET_JSON)
        self._check_path = files.join(root, filenames.CONFIG, _TIMER_CHECK)
        self._known: tuple[object, int, Needed] | None = None

    def needed_from(self) -> Needed | None:
        """Return where the first message lies that waits and is not late by more than a day, None where none does.

        Files that are damaged hold nothing: else they would fill the disk. Raises StoreError for files that the kernel
        does not let be read: what waits in them is not known, so nothing may be deleted.
        """
        now_ms = self._now_ms()
        read = files.read_small(self._offsets_path), files.read_small(self._check_path)
        if self._known is not None and self._known[0] == read and 0 <= now_ms - self._known[1] < _KEPT_MS:
            return self._known[2]
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
                end = queue.search_written_end()
                begin = max(offsets.get(int(name) + 1, 0), queue.first_from(self._log.segments.begin, end))
                # Units ascend by when they are due; a negative one is the place of that in another file.
                first = queue.run.first_where(
                    min(begin, end), end, lambda unit: not 0 <= unit["tags_code"] < now_ms - LATE_MS
                )
                yield from queue.read(first, min(first + 1, end)).physical_offsets.tolist()
            except StoreError as error:
                if is_unreadable(error):
                    raise
            finally:
                queue.run.close()

    def _in_timer(self, held: bytes | None, now_ms: int) -> Iterator[int]:
        check = decode_timer_check(held) if held else TimerCheck()
        for find in (self._not_taken, self._in_wheel):
            try:
                yield from find(check, now_ms)
            except StoreError as error:
                if is_unreadable(error):
                    raise

    def _not_taken(self, check: TimerCheck, now_ms: int) -> list[int]:
        """Return where the first message lies that is not in the wheel yet: its queue knows only when it was stored."""
        settings = check_settings(self._root) or StoreSettings("")
        queue = ConsumeQueue(QueueKey(TIMER_TOPIC, 0), files.join(self._root, filenames.queue_folder(TIMER_TOPIC, 0)))
        try:
            begin = max(check.queue_offset, queue.run.begin)
            if not queue.run.segments or not queue.is_written(begin):
                return []
            end = queue.search_written_end()
            begin = max(begin, queue.first_from(self._log.segments.begin, end))
            from_ms = now_ms - LATE_MS - settings.timer_max_delay_ms
            first = TimeSearch(self._log, queue, begin, end).unit_at(from_ms, LOWER) if begin < end else end
            return [int(place) for place in queue.read(first, min(first + 1, end)).physical_offsets]
        finally:
            queue.run.close()

    def _in_wheel(self, check: TimerCheck, now_ms: int) -> list[int]:
        """Return where the message of the oldest unit lies whose second is still to come."""
        wheel = files.join(self._root, _TIMER_WHEEL)
        if files.file_size(wheel) != WHEEL_BYTES:
            return []
        begin = max(check.read_time, now_ms - LATE_MS, 0) // SECOND_MS
        end = (max(check.read_time, now_ms) + WINDOW_MS + _CLOCK_MS) // SECOND_MS
        slots = _slots(wheel, begin % SLOT_COUNT, min(end - begin, SLOT_COUNT))
        slots = slots[(slots["second"] >= begin) & (slots["last_position"] >= 0) & (slots["first_position"] >= 0)]
        if not len(slots):
            return []
        position = int(slots["first_position"].min())
        segment = list_segments(files.join(self._root, _TIMER_LOG)).holding(position)
        if segment is None:
            return []
        with OpenFile(segment.path) as file:
            unit = np.frombuffer(file.read(position - segment.begin, TIMER_UNIT_BYTES), TIMER_UNIT)
        return [int(unit["physical_offset"][0])] if len(unit) and are_units(unit)[0] else []


def _offsets(held: bytes | None) -> dict[int, int]:
    """Return how far each level was delivered; nothing known is 0, which holds more."""
    try:
        return dict(decode_delay_offsets(held).offsets) if held else {}
    except ValueError:
        return {}


def _slots(path: str, first: int, count: int) -> NDArray[np.void]:
    """Return so many slots of the wheel from one on, round its end, but for those in pages that nobody wrote."""
    parts = [np.zeros(0, TIMER_SLOT)]
    with OpenFile(path) as file:
        for begin, end in ((first, min(first + count, SLOT_COUNT)), (0, max(first + count - SLOT_COUNT, 0))):
            for start, stop in files.data_extents(path, begin * TIMER_SLOT_BYTES, end * TIMER_SLOT_BYTES):
                at, until = start // TIMER_SLOT_BYTES, -(-stop // TIMER_SLOT_BYTES)
                data = file.read(at * TIMER_SLOT_BYTES, (until - at) * TIMER_SLOT_BYTES)
                parts.append(np.frombuffer(data[: len(data) // TIMER_SLOT_BYTES * TIMER_SLOT_BYTES], TIMER_SLOT))
    return np.concatenate(parts)
