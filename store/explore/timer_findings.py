"""The timer's files looked at: timer log, wheel and check. What waits is told in `store/format/timer_log.py`."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.timer_files import TIMER_CHECK_NAME, TIMER_LOG, TIMER_WHEEL, TimerLog, TimerWheel
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.explore.finding import DAMAGE, NOTE, REPAIRABLE, Finding, utc_text
from rmq_spark.store.explore.layouts import field_position
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.format import filenames
from rmq_spark.store.format.checkpoint import CLOCKS_DIFFER_MS
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.timer_check import TIMER_CHECK, TIMER_CHECK_FILE_BYTES, TimerCheck, decode_timer_check
from rmq_spark.store.format.timer_log import BLANK_MAGIC, TIMER_UNIT, TIMER_UNIT_BYTES, due_times
from rmq_spark.store.format.timer_wheel import SECOND_MS, SLOT_COUNT, TIMER_SLOT_BYTES

_AREA = "timer"
_NEXT_STEP = (
    "Stop what delivers, and restore timerlog/, timerwheel and config/timercheck together from a copy. Without any of "
    "them all that waits is taken from its queue anew, and what is overdue is delivered again"
)
_UNIT_AT = {name: field_position(TIMER_UNIT, name) for name in TIMER_UNIT.names or ()}


def look_at_timer(
    root: str,
    log: SoundLog,
    log_extent: Callable[[], tuple[int, int]],
    queue_end: Callable[[], int | None],
    *,
    is_live: bool,
) -> list[Finding]:
    """Return what is wrong with the timer's files.

    `log_extent` lists the log again and returns its begin and end, `queue_end` returns the next offset of the timer's
    queue, None without one. A writer appends a record and its consume-queue entry, then a unit, then changes a slot,
    then the check. The files are read in the opposite order: what one of them names is in the next one.
    """
    has_units = bool(files.list_folder(files.join(root, TIMER_LOG)))
    path = files.join(root, filenames.CONFIG, TIMER_CHECK_NAME)
    page = files.read_small(path)
    check = decode_timer_check(page or b"")
    found = list(_look_at_check(path, page, queue_end, has_units=has_units))
    wheel, slots, has_odd_wheel = TimerWheel(root, Disk()), None, False
    try:
        if wheel.is_there():
            slots = wheel.slots_from(check.read_time)
    except DamageError as error:
        path_of_wheel, step = files.join(root, TIMER_WHEEL), _NEXT_STEP
        found.append(
            Finding(
                REPAIRABLE, _AREA, error.what, path_of_wheel, 0, str(error.expected), str(error.found), next_step=step
            )
        )
        has_odd_wheel = True
    try:
        timer_log = TimerLog(root, Disk())
    except (DamageError, StorePathError) as error:
        if is_unreadable(error):
            raise
        found.append(_finding(f"the files of the timer log: {error}", files.join(root, TIMER_LOG), 0, "", ""))
        return found
    end, findings = _look_at_units(timer_log, log, log_extent, is_live=is_live)
    found += findings
    is_needed = slots is None or bool((slots["first_position"].astype(np.int64) < timer_log.run.begin).any())
    # What a file holds of the log goes before the file does.
    if timer_log.run.begin > 0 and is_needed and not log_extent()[0]:
        what = "the first files of the timer log are missing, and with them which messages wait"
        first = timer_log.run.segments[0].path
        found.append(_finding(what, first, 0, "a file that begins at 0", str(timer_log.run.begin)))
    if not has_odd_wheel:
        found += _look_at_wheel(root, wheel, slots, timer_log, end, check, is_live=is_live)
    if page is not None and not page.strip(b"\0") and end > timer_log.run.begin:
        what = "the timer's check says nothing: all that waits is taken anew, what is overdue again"
        found.append(_finding(what, path, 0, "where the timer is", "zeros" if page else "an empty file"))
    if timer_log.run.segments and check.log_position > end:
        what = "the timer's check names a position behind the end of the timer log"
        at = field_position(TIMER_CHECK, "log_position")
        found.append(_finding(what, path, at, f"at most {end}", str(check.log_position)))
    return found


def _look_at_check(
    path: str, page: bytes | None, queue_end: Callable[[], int | None], *, has_units: bool
) -> Iterator[Finding]:
    if page is None:
        if has_units:
            what = "there is a timer log and no config/timercheck: all that waits is taken anew, what is overdue again"
            yield _finding(what, path, 0, f"a page of {TIMER_CHECK_FILE_BYTES} bytes", "none")
        return
    check = decode_timer_check(page)
    if page and len(page) not in (TIMER_CHECK_FILE_BYTES, TIMER_CHECK.itemsize):
        expected = f"{TIMER_CHECK_FILE_BYTES} bytes"
        yield _finding("the length of the timer's check", path, len(page), expected, str(len(page)))
    for name in ("read_time", "log_position", "queue_offset", "master_queue_offset"):
        value, at = getattr(check, name), field_position(TIMER_CHECK, name)
        most = queue_end() if name == "queue_offset" else None
        if value < 0 or (most is not None and value > most):
            expected = "0 or more" if most is None else f"0 to {most}"
            yield _finding(f"the field {name} of the timer's check", path, at, expected, str(value))
    if check.read_time % SECOND_MS:
        what = "the time up to which the timer has delivered"
        yield _finding(what, path, 0, "a whole second", str(check.read_time))
    if check.read_time > wall_clock_ms() + CLOCKS_DIFFER_MS:
        what = (
            f"the timer has delivered up to {utc_text(check.read_time)}, ahead of this machine's clock: a clock was "
            "wrong. Messages that wait for an earlier time come when the clock reaches that time"
        )
        step = "See that this machine's clock is right. Then rmq_spark.repair sets the timer back."
        yield Finding(REPAIRABLE, _AREA, what, path, next_step=step, action="clock")
    if page[TIMER_CHECK.itemsize :].strip(b"\0"):
        what = "bytes behind the fields of the timer's check, which nobody reads"
        yield Finding(NOTE, _AREA, what, path, TIMER_CHECK.itemsize)


def _look_at_units(
    timer_log: TimerLog, log: SoundLog, log_extent: Callable[[], tuple[int, int]], *, is_live: bool
) -> tuple[int, list[Finding]]:
    """Return where the timer log ends, and what is wrong with its units."""
    found: list[Finding] = []
    run = timer_log.run
    end = run.begin
    for positions, units in timer_log.scan(run.begin):
        end = int(positions[-1]) + TIMER_UNIT_BYTES
        log_begin, log_end = log_extent()  # after the units were read: their records were logged before
        previous = units["previous_position"].astype(np.int64)
        places, sizes = units["physical_offset"].astype(np.int64), units["record_size"].astype(np.int64)
        checks = (
            ("previous_position", (previous < -1) | (previous >= positions), "an earlier position, or -1"),
            ("physical_offset", (places < 0) | (places + sizes > log_end), f"a place before {log_end}"),
            ("write_time", (units["write_time"] <= 0) | (units["write_time"] % SECOND_MS != 0), "a whole second"),
            ("record_size", _are_other_sizes(log, places, sizes, log_begin, log_end), "the size of its record"),
        )
        for name, wrong, expected in checks:
            for at in np.flatnonzero(wrong)[:1].tolist():
                path, position = _place_of(timer_log, int(positions[at]) + _UNIT_AT[name])
                what = f"{int(np.count_nonzero(wrong))} units of the timer log with a wrong {name}, the first here"
                found.append(_finding(what, path, position, expected, str(int(units[name][at]))))
    for segment in run.segments:
        begin = max(end - segment.begin, 0)
        if begin >= segment.size:
            continue
        for first, last in files.data_extents(segment.path, begin, segment.size):
            stands = timer_log.units_at(np.array([segment.begin + begin]))
            if int(stands["magic"][0]) == BLANK_MAGIC and last - first <= 64:
                continue  # a filler
            if is_live and timer_log.goes_on(end):
                break  # a writer has appended units since
            what = "bytes behind the end of the timer log"
            found.append(_finding(what, segment.path, first, "zeros", f"{last - first} other bytes"))
            break
    return end, found


def _are_other_sizes(
    log: SoundLog, places: np.ndarray, sizes: np.ndarray, log_begin: int, log_end: int
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Say of each unit whether the record that it names says of itself that it is another."""
    wrong = np.zeros(len(places), np.bool_)
    place_at = field_position(RECORD_HEAD, "physical_offset")
    inside = np.flatnonzero((places >= log_begin) & (places + sizes <= log_end) & (places >= 0))
    for at in inside.tolist():
        head = log.bytes_at(int(places[at]), place_at + 8)
        told = int.from_bytes(head[:4], "big"), int.from_bytes(head[place_at:], "big")
        wrong[at] = told != (int(sizes[at]), int(places[at]))
    return wrong


def _look_at_wheel(
    root: str,
    wheel: TimerWheel,
    slots: NDArray[np.void] | None,
    timer_log: TimerLog,
    log_end: int,
    check: TimerCheck,
    *,
    is_live: bool,
) -> Iterator[Finding]:
    """Compare the wheel with the timer log. `slots` were read before the log, None without a wheel."""
    path = files.join(root, TIMER_WHEEL)
    if slots is None:
        if timer_log.run.segments:
            yield Finding(NOTE, _AREA, "there is no timer wheel: it is made anew from the timer log", path)
        return
    read_ms = check.read_time
    seconds, lasts = slots["second"].astype(np.int64), slots["last_position"].astype(np.int64)
    chosen = np.flatnonzero((seconds < read_ms // SECOND_MS + SLOT_COUNT) & (lasts >= timer_log.run.begin))
    order = chosen[np.argsort(lasts[chosen], kind="stable")]
    units = timer_log.units_at(lasts[order])
    wrong = (units["unit_size"] != TIMER_UNIT_BYTES) | (due_times(units) // SECOND_MS != seconds[order])
    wrong |= lasts[order] >= log_end
    for at in np.flatnonzero(wrong)[:1].tolist():
        slot = int(seconds[order[at]])
        yield _finding(
            f"{int(np.count_nonzero(wrong))} slots of the timer wheel name no unit of their second, the first here",
            path,
            slot % SLOT_COUNT * TIMER_SLOT_BYTES,
            f"the position of a unit that is due in second {slot}",
            str(int(lasts[order[at]])),
        )
    newest = _newest(timer_log, read_ms, check.log_position if is_live else log_end)
    if is_live and newest:
        slots = wheel.slots_from(read_ms)  # again: the slot of a unit is written after the unit
    yield from _unnamed(path, newest, slots, is_live=is_live)


def _newest(timer_log: TimerLog, read_ms: int, end: int) -> dict[int, int]:
    """Return the position of the newest unit below `end` that waits, by its second."""
    newest: dict[int, int] = {}
    for positions, units in timer_log.scan(timer_log.run.begin, end):
        due = due_times(units) // SECOND_MS
        waits = due >= read_ms // SECOND_MS
        newest.update(zip(due[waits].tolist(), positions[waits].tolist(), strict=True))
    return newest


def _unnamed(path: str, newest: dict[int, int], slots: NDArray[np.void], *, is_live: bool) -> Iterator[Finding]:
    """Tell seconds of which the wheel does not name the newest unit that waits; a live writer may have a newer one."""
    lasts = dict(zip(slots["second"].tolist(), slots["last_position"].tolist(), strict=True))
    missing = sorted(
        second
        for second, position in newest.items()
        if lasts.get(second, -1) < position or (not is_live and lasts[second] != position)
    )
    if missing:
        at = missing[0] % SLOT_COUNT * TIMER_SLOT_BYTES
        what = f"{len(missing)} slots of the timer wheel do not name the newest message that waits, the first here"
        yield _finding(what, path, at, str(newest[missing[0]]), str(lasts.get(missing[0], "nothing")))


def _place_of(timer_log: TimerLog, position: int) -> tuple[str, int]:
    segment = timer_log.run.holding(position)
    return (segment.path, position - segment.begin) if segment else ("", position)


def _finding(what: str, path: str, position: int, expected: str, found: str) -> Finding:
    return Finding(DAMAGE, _AREA, what, path, position, expected, found, next_step=_NEXT_STEP)
