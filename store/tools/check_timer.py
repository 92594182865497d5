"""Checks of the timer's files: timer log, timer wheel and timer check.

See `store/format/timer.py` for the format of these files.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.timer_files import TIMER_CHECK_NAME, TIMER_LOG, TIMER_WHEEL, TimerLog, TimerWheel
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import CLOCKS_DIFFER_MS
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.timer import (
    BLANK_MAGIC,
    SECOND_MS,
    SLOT_COUNT,
    TIMER_CHECK,
    TIMER_CHECK_FILE_BYTES,
    TIMER_SLOT_BYTES,
    TIMER_UNIT,
    TIMER_UNIT_BYTES,
    TimerCheck,
    decode_timer_check,
    due_times,
)
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity, field_position, utc_text
from rmq_spark.store.tools.log_walk import TolerantCommitLog

_NEXT_STEP = (
    "Stop all deliveries, and restore timerlog/, timerwheel and config/timercheck together from a copy. If one of them "
    "is missing or empty, all waiting messages are read from their queue again, and overdue ones are delivered again."
)


def check_timer(
    root: str,
    log: TolerantCommitLog,
    log_extent: Callable[[], tuple[int, int]],
    queue_end: Callable[[], int | None],
    *,
    is_live: bool,
) -> list[Finding]:
    """Return the findings about the timer's files.

    `log_extent` returns the begin and the end of the commit log (physical offsets) at the time of the call.
    `queue_end` returns the next queue offset of the timer's queue, or None if that queue does not exist.

    A running writer changes the files in this order: it appends a record and its consume-queue entry, appends a timer
    entry, changes a slot of the wheel, and then changes the timer check. This function reads them in the opposite
    order. So everything that one file references exists in the file that is read next.
    """
    has_entries = bool(files.list_folder(files.join(root, TIMER_LOG)))
    path = files.join(root, filenames.CONFIG, TIMER_CHECK_NAME)
    page = files.read_small(path)
    check = decode_timer_check(page or b"")
    found = list(_check_page(path, page, queue_end, has_entries=has_entries))
    wheel, slots, is_wheel_invalid = TimerWheel(root, Disk()), None, False
    try:
        if wheel.is_there():
            slots = wheel.slots_from(check.read_time)
    except DamageError as error:
        finding = _finding(error.what, files.join(root, TIMER_WHEEL), 0, str(error.expected), str(error.found))
        found.append(replace(finding, severity=Severity.REPAIRABLE))
        is_wheel_invalid = True
    try:
        timer_log = TimerLog(root, Disk())
    except (DamageError, StorePathError) as error:
        if is_unreadable(error):
            raise
        found.append(_finding(f"the files of the timer log: {error}", files.join(root, TIMER_LOG), 0, "", ""))
        return found
    end, findings = _check_entries(timer_log, log, log_extent, is_live=is_live)
    found += findings
    is_needed = slots is None or bool((slots["first_position"].astype(np.int64) < timer_log.run.begin).any())
    # Files of the timer log are deleted only after their messages have expired from the commit log. So no file may be
    # missing while the commit log begins at 0.
    if timer_log.run.begin > 0 and is_needed and not log_extent()[0]:
        what = "the first files of the timer log are missing, and with them which messages wait"
        first = timer_log.run.segments[0].path
        found.append(_finding(what, first, 0, "a file that begins at 0", str(timer_log.run.begin)))
    if not is_wheel_invalid:
        found += _check_wheel(root, wheel, slots, timer_log, end, check, is_live=is_live)
    if page is not None and not page.strip(b"\0") and end > timer_log.run.begin:
        what = "the timer check is empty, and a timer log exists"
        found.append(_finding(what, path, 0, "the position of the timer", "zeros" if page else "an empty file"))
    if timer_log.run.segments and check.log_position > end:
        what = "the timer check names a position after the end of the timer log"
        at = field_position(TIMER_CHECK, "log_position")
        found.append(_finding(what, path, at, f"at most {end}", str(check.log_position)))
    return found


def _check_page(
    path: str, page: bytes | None, queue_end: Callable[[], int | None], *, has_entries: bool
) -> Iterator[Finding]:
    if page is None:
        if has_entries:
            what = "config/timercheck is missing, and a timer log exists"
            yield _finding(what, path, 0, f"a page of {TIMER_CHECK_FILE_BYTES} bytes", "none")
        return
    check = decode_timer_check(page)
    if page and len(page) not in (TIMER_CHECK_FILE_BYTES, TIMER_CHECK.itemsize):
        expected = f"{TIMER_CHECK_FILE_BYTES} bytes"
        yield _finding("the length of the timer check", path, len(page), expected, str(len(page)))
    for name in ("read_time", "log_position", "queue_offset", "master_queue_offset"):
        value, at = getattr(check, name), field_position(TIMER_CHECK, name)
        most = queue_end() if name == "queue_offset" else None
        if value < 0 or (most is not None and value > most):
            expected = "at least 0" if most is None else f"0 to {most}"
            yield _finding(f"the field {name} of the timer check", path, at, expected, str(value))
    if check.read_time % SECOND_MS:
        what = "the time up to which the timer has delivered"
        yield _finding(what, path, 0, "a whole second", str(check.read_time))
    if check.read_time > wall_clock_ms() + CLOCKS_DIFFER_MS:
        yield Finding(
            severity=Severity.REPAIRABLE,
            area=Area.TIMER,
            what=f"the timer has delivered up to {utc_text(check.read_time)}, ahead of this machine's clock: a clock "
            "was wrong. Messages for an earlier time are delivered when the clock reaches that time",
            path=path,
            next_step="Check this machine's clock. Then rmq_spark.repair sets the timer back.",
            action=Action.CLOCK,
        )
    if page[TIMER_CHECK.itemsize :].strip(b"\0"):
        yield Finding(
            severity=Severity.NOTE,
            area=Area.TIMER,
            what="bytes after the fields of the timer check, which are never read",
            path=path,
            position=TIMER_CHECK.itemsize,
        )


def _check_entries(
    timer_log: TimerLog, log: TolerantCommitLog, log_extent: Callable[[], tuple[int, int]], *, is_live: bool
) -> tuple[int, list[Finding]]:
    """Return the position after the last entry of the timer log, and the findings about its entries."""
    found: list[Finding] = []
    run = timer_log.run
    end = run.begin
    for positions, entries in timer_log.scan(run.begin):
        end = int(positions[-1]) + TIMER_UNIT_BYTES
        log_begin, log_end = log_extent()  # called after the entries were read, because records are appended first
        previous = entries["previous_position"].astype(np.int64)
        offsets, sizes = entries["physical_offset"].astype(np.int64), entries["record_size"].astype(np.int64)
        checks = (
            ("previous_position", (previous < -1) | (previous >= positions), "an earlier position, or -1"),
            ("physical_offset", (offsets < 0) | (offsets + sizes > log_end), f"a record below {log_end}"),
            ("write_time", (entries["write_time"] <= 0) | (entries["write_time"] % SECOND_MS != 0), "a whole second"),
            ("record_size", _differ_from_records(log, offsets, sizes, log_begin, log_end), "the size of its record"),
        )
        for name, wrong, expected in checks:
            for at in np.flatnonzero(wrong)[:1].tolist():
                position = int(positions[at]) + field_position(TIMER_UNIT, name)
                segment = run.holding(position)
                path = segment.path if segment else ""
                what = f"{int(np.count_nonzero(wrong))} entries of the timer log with a wrong {name}, the first here"
                in_file = position - segment.begin if segment else position
                found.append(_finding(what, path, in_file, expected, str(int(entries[name][at]))))
    for segment in run.segments:
        begin = max(end - segment.begin, 0)
        if begin >= segment.size:
            continue
        for first, last in files.data_extents(segment.path, begin, segment.size):
            following = timer_log.units_at(np.array([segment.begin + begin]))
            if int(following["magic"][0]) == BLANK_MAGIC and last - first <= 64:
                continue  # a filler
            if is_live and timer_log.goes_on(end):
                break  # a writer has appended entries after the scan
            what = "bytes after the end of the timer log"
            found.append(_finding(what, segment.path, first, "zeros", f"{last - first} other bytes"))
            break
    return end, found


def _differ_from_records(
    log: TolerantCommitLog, offsets: np.ndarray, sizes: np.ndarray, log_begin: int, log_end: int
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return a mask of the timer entries that differ from their records.

    An entry differs if the header of its record has another size or physical offset. Records outside of the log are not
    read, and their entries are not marked.
    """
    wrong = np.zeros(len(offsets), np.bool_)
    offset_at = field_position(RECORD_HEAD, "physical_offset")
    inside = np.flatnonzero((offsets >= log_begin) & (offsets + sizes <= log_end) & (offsets >= 0))
    for at in inside.tolist():
        header = log.bytes_at(int(offsets[at]), offset_at + 8)
        found = int.from_bytes(header[:4], "big"), int.from_bytes(header[offset_at:], "big")
        wrong[at] = found != (int(sizes[at]), int(offsets[at]))
    return wrong


def _check_wheel(
    root: str,
    wheel: TimerWheel,
    slots: NDArray[np.void] | None,
    timer_log: TimerLog,
    log_end: int,
    check: TimerCheck,
    *,
    is_live: bool,
) -> Iterator[Finding]:
    """Yield the findings about slots of the wheel that do not agree with the timer log.

    `slots` were read before the timer log. They are None if the wheel does not exist. `log_end` is the position after
    the last entry of the timer log.
    """
    path = files.join(root, TIMER_WHEEL)
    if slots is None:
        if timer_log.run.segments:
            what = "the timer wheel is missing: the next delivery rebuilds it from the timer log"
            yield Finding(severity=Severity.NOTE, area=Area.TIMER, what=what, path=path)
        return
    read_ms = check.read_time
    seconds, lasts = slots["second"].astype(np.int64), slots["last_position"].astype(np.int64)
    chosen = np.flatnonzero((seconds < read_ms // SECOND_MS + SLOT_COUNT) & (lasts >= timer_log.run.begin))
    order = chosen[np.argsort(lasts[chosen], kind="stable")]
    entries = timer_log.units_at(lasts[order])
    wrong = (entries["unit_size"] != TIMER_UNIT_BYTES) | (due_times(entries) // SECOND_MS != seconds[order])
    wrong |= lasts[order] >= log_end
    for at in np.flatnonzero(wrong)[:1].tolist():
        second = int(seconds[order[at]])
        yield _finding(
            f"{int(np.count_nonzero(wrong))} slots of the timer wheel name no entry of their second, the first here",
            path,
            second % SLOT_COUNT * TIMER_SLOT_BYTES,
            f"the position of an entry that is due in second {second}",
            str(int(lasts[order[at]])),
        )
    newest = _newest_entries(timer_log, read_ms, check.log_position if is_live else log_end)
    if is_live and newest:
        slots = wheel.slots_from(read_ms)  # read again, because a writer changes the slot after it appended the entry
    yield from _stale_slots(path, newest, slots, is_live=is_live)


def _newest_entries(timer_log: TimerLog, read_ms: int, end: int) -> dict[int, int]:
    """Return a dict from each due second to the position of its newest entry in the timer log.

    Only entries below the position `end` that are due at or after `read_ms` are included.
    """
    newest: dict[int, int] = {}
    for positions, entries in timer_log.scan(timer_log.run.begin, end):
        due = due_times(entries) // SECOND_MS
        waits = due >= read_ms // SECOND_MS
        newest.update(zip(due[waits].tolist(), positions[waits].tolist(), strict=True))
    return newest


def _stale_slots(path: str, newest: dict[int, int], slots: NDArray[np.void], *, is_live: bool) -> Iterator[Finding]:
    """Yield one finding if slots of the wheel do not contain the position of the newest entry of their second.

    `newest` has these positions by second. If a writer is running, a slot may contain the position of a later entry.
    """
    lasts = dict(zip(slots["second"].tolist(), slots["last_position"].tolist(), strict=True))
    missing = sorted(
        second
        for second, position in newest.items()
        if lasts.get(second, -1) < position or (not is_live and lasts[second] != position)
    )
    if missing:
        at = missing[0] % SLOT_COUNT * TIMER_SLOT_BYTES
        what = f"{len(missing)} slots of the timer wheel do not name the newest waiting message, the first here"
        yield _finding(what, path, at, str(newest[missing[0]]), str(lasts.get(missing[0], "nothing")))


def _finding(what: str, path: str, position: int, expected: str, found: str) -> Finding:
    return Finding(
        severity=Severity.DAMAGE,
        area=Area.TIMER,
        what=what,
        path=path,
        position=position,
        expected=expected,
        found=found,
        next_step=_NEXT_STEP,
    )
