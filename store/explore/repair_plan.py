"""What would be done to make a store whole, step by step, before anything is done: and what would be lost.

The log is the truth, so all that is derived from it can be made anew while the log is whole: units of queues, the key
index, the checkpoint. What a crash left is what a writer's recovery is for. Only recovery takes bytes of the log back.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import TEMPORARY_SUFFIX
from rmq_spark.store.explore.check_report import CheckReport
from rmq_spark.store.explore.checking import Progress, check
from rmq_spark.store.explore.cut_loss import messages_behind
from rmq_spark.store.explore.finding import DAMAGE, DOUBLED, NOTE, Finding, utc_text
from rmq_spark.store.explore.set_back import beyond_ends, queue_ends
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.explore.store_times import find_wrong_times
from rmq_spark.store.format import filenames
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.log.settings_file import check_settings
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.watermark_file import SIDE_FOLDER
from rmq_spark.store.units import QueueKey

RECOVER, REBUILD, RESTORE, CUT, LEAVE = "recover", "rebuild", "restore", "cut", "leave"
RESET = "reset"  # offsets of groups and delay levels, to where their queues end
CLOCK = "clock"  # store times, or the timer, that are ahead of the clock
TIMER = "timer"  # area of findings
LOST, KEEP = "lost", "keep"  # of findings: messages that other damage takes with it; records that are whole otherwise
_STEPS = pa.schema(
    [
        ("action", pa.string()),
        ("what", pa.string()),
        ("path", pa.string()),
        ("messagesLost", pa.int64()),
        ("isDoneByRepair", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One thing to be done.

    `action` is "recover" (as the next writer would), "rebuild" (derived files are made anew from the log), "restore" (a
    config file from the one before it), "cut" (the log ends before the damage, and all behind it is lost), "reset"
    (offsets of groups and delay levels that stand beyond their queues, to the ends of those), "clock" (store times that
    are ahead of the clock are set back) or "leave" (nothing here can be done: `what` says how to go on around it).
    """

    action: str
    what: str
    path: str
    messages_lost: int = 0
    queue: QueueKey | None = None  # that is made anew

    @property
    def is_done_by_repair(self) -> bool:
        """Say whether `repair` does anything about it."""
        return self.action != LEAVE


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The steps that make a store whole, as of the check in `report`. Nothing is done by making it."""

    path: str
    commit_log_path: str | None
    report: CheckReport
    steps: tuple[RepairStep, ...]
    stamp: int  # of the store's files when the check began

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to do."""
        return not any(step.is_done_by_repair for step in self.steps)

    @property
    def messages_lost(self) -> int:
        """Return how many messages the repair would take away for good."""
        return sum(step.messages_lost for step in self.steps)

    @property
    def is_lossy(self) -> bool:
        """Say whether the repair takes away what may be messages: a cut does, however many could be counted."""
        return self.messages_lost > 0 or any(step.action == CUT for step in self.steps)

    def to_arrow(self) -> pa.Table:
        """Return the steps as a table, a row for each."""
        rows = [
            {
                "action": step.action,
                "what": step.what,
                "path": step.path,
                "messagesLost": step.messages_lost,
                "isDoneByRepair": step.is_done_by_repair,
            }
            for step in self.steps
        ]
        return pa.Table.from_pylist(rows, _STEPS)

    def __str__(self) -> str:
        lost = f"{self.messages_lost} messages would be lost" if self.messages_lost else "no message is lost"
        lines = [f"{self.path}: {len(self.steps)} steps, {lost}"]
        return "\n".join([*lines, *(f"{step.action}: {step.what} ({step.path})" for step in self.steps)])


def plan_repair(
    path: str | PurePath,
    *,
    commit_log_path: str | None = None,
    cut_log: bool = False,
    progress: Progress | None = None,
) -> RepairPlan:
    """Return what `repair` would do to the store at `path`, and what would be lost by it. Changes nothing.

    Damage to the log itself is left as it is: with `cut_log` the log is to end before it, as RocketMQ's recovery would
    have it, every message behind it is lost, and offsets of groups and delay levels that stand beyond their queues are
    set back to the ends of those. Runs a `check`, and raises what that raises.
    """
    root = files.absolute(path)
    folders = commit_log_folders(root, commit_log_path)
    stamp = stamp_of(root, folders)
    report = check(root, commit_log_path=commit_log_path, progress=progress)
    steps = tuple(_steps(report, folders, cut_log))
    return RepairPlan(report.path, commit_log_path, report, steps, stamp)


def _steps(report: CheckReport, folders: tuple[str, ...], cut_log: bool) -> Iterator[RepairStep]:
    found = [finding for finding in report.findings if finding.severity != NOTE]
    of_log = [one for one in found if one.area == filenames.COMMIT_LOG and one.action not in (RECOVER, DOUBLED)]
    others = [one for one in found if one not in of_log]
    cuts = [one for one in of_log if one.action == CUT]
    is_cut = cut_log and bool(cuts) and all(one.action in (CUT, LOST, KEEP) for one in of_log)
    if is_cut:
        yield _cut(report, folders, cuts)
    yield from (_left(one) for one in of_log if not is_cut or one.action == KEEP)
    is_whole = is_cut or all(one.action == KEEP for one in of_log)
    yield from _recover(report, others, is_whole)
    yield from _rebuild(report, others, is_whole)
    for one in others:
        if one.action == CLOCK and one.area == TIMER:
            yield _set_timer_back(report, one, is_whole and not is_cut)
        elif one.action == CLOCK:
            yield _set_clock_back(report, folders, one, is_whole and not is_cut)
    is_set_back = cut_log and is_whole
    if is_set_back:
        yield from _set_back(report.path, min(map(_place, cuts)) if is_cut else None)
    for one in others:
        if one.action == RESTORE:
            yield RepairStep(RESTORE, f"{one.what}: the copy that can be read is put in its place", one.path)
        elif one.action == LEAVE or (one.action == RESET and not is_set_back):
            yield _left(one)


def _recover(report: CheckReport, found: list[Finding], is_whole: bool) -> Iterator[RepairStep]:
    chosen = [one for one in found if one.action in (RECOVER, "watermark")]
    lost = sum(one.messages for one in chosen if one.severity == DAMAGE)
    if chosen:
        words = "what died writers left is finished, and the store is left in order"
        yield RepairStep(RECOVER, f"{words}; {len(chosen)} findings", report.path, lost)
    for one in found:
        if one.action == "checkpoint":
            if is_whole:
                yield RepairStep(REBUILD, f"{one.what}: made anew", one.path)
            else:
                yield RepairStep(LEAVE, f"{one.what}: cannot be made anew while the log is damaged", one.path)


def _rebuild(report: CheckReport, found: list[Finding], is_whole: bool) -> Iterator[RepairStep]:
    queues: dict[QueueKey, Finding] = {}
    of_index: Finding | None = None
    for one in found:
        if one.action == REBUILD and one.area == filenames.INDEX:
            of_index = of_index or one
        elif one.action == REBUILD and one.topic is not None and one.queue_id is not None:
            queues.setdefault(QueueKey(one.topic, one.queue_id), one)
    doubled = [one for one in found if one.action == DOUBLED]
    yield from (_left(one) for one in doubled if _queue_of(one) not in queues)
    for key, one in queues.items():
        yield _make_queue(key, one, sum(other.messages for other in doubled if _queue_of(other) == key), is_whole)
    if of_index is not None:
        path = files.join(report.path, filenames.INDEX)
        if is_whole:
            yield RepairStep(REBUILD, "the key index: made anew from the log", path)
        else:
            yield RepairStep(LEAVE, "the key index cannot be made anew while the log is damaged", path)


def _make_queue(key: QueueKey, one: Finding, doubled: int, is_whole: bool) -> RepairStep:
    """Plan to make a queue anew; so many of its messages are `doubled`."""
    if not is_whole:
        what = f"queue {key} cannot be made anew while the log is damaged: mend that first, or cut the log"
        return RepairStep(LEAVE, what, one.path)
    what = f"queue {key}: all its units are made anew from the log"
    if doubled:
        what += f"; {doubled} messages, whose queue offsets earlier ones have, are not read any more"
    return RepairStep(REBUILD, what, one.path, doubled, queue=key)


def _queue_of(one: Finding) -> QueueKey:
    return QueueKey(one.topic or "", -1 if one.queue_id is None else one.queue_id)


def _set_clock_back(report: CheckReport, folders: tuple[str, ...], one: Finding, is_whole: bool) -> RepairStep:
    """Plan new store times for messages that were stored ahead of the clock."""
    if not is_whole:
        return RepairStep(LEAVE, f"{one.what}. Plan again after the log was repaired", one.path)
    now_ms, log = wall_clock_ms(), SoundLog(folders)
    try:
        found = find_wrong_times(report.path, log, levels_of(report.path), report.log_end, now_ms)
    finally:
        log.close()
    if found.refusal is not None:
        return RepairStep(
            LEAVE, f"the store times cannot be set back: {found.refusal}. Until then: {one.what}", one.path
        )
    what = (
        f"{found.messages} messages from physical offset {found.begin} on get the store times at which they were born, "
        f"at most the time of this machine's clock, which says {utc_text(now_ms)}"
    )
    return RepairStep(CLOCK, what, one.path)


def _set_timer_back(report: CheckReport, one: Finding, is_whole: bool) -> RepairStep:
    """Plan to have the timer go on from now."""
    is_sound = all(other.severity != DAMAGE for other in report.findings if other.area == TIMER)
    if not is_whole or not is_sound:
        return RepairStep(LEAVE, f"{one.what}. Plan again after what is damaged was repaired", one.path)
    what = (
        "the timer goes on from the time of this machine's clock, which says "
        f"{utc_text(wall_clock_ms())}; what waits is put back into its queue"
    )
    return RepairStep(CLOCK, what, one.path)


def levels_of(root: str) -> DelayLevels:
    """Return the store's table of delay levels."""
    held = check_settings(root)
    return DEFAULT_DELAY_LEVELS if held is None else held.levels


def _left(one: Finding) -> RepairStep:
    return RepairStep(LEAVE, f"{one.what}. {one.next_step}", one.path)


def _cut(report: CheckReport, folders: tuple[str, ...], cuts: list[Finding]) -> RepairStep:
    first = min(cuts, key=_place)
    lost = messages_behind(report.path, folders, _place(first), report.log_end)
    what = f"the log is to end before what is damaged at physical offset {_place(first)}: {lost} messages are lost"
    return RepairStep(CUT, what, first.path, lost)


def _set_back(root: str, place: int | None) -> Iterator[RepairStep]:
    for path, told in beyond_ends(root, queue_ends(root, place)).items():
        what = f"{len(told)} offsets beyond the ends of their queues are set back to them: {'; '.join(told[:10])}"
        yield RepairStep(RESET, what + ("; …" if len(told) > 10 else ""), path)


def _place(one: Finding) -> int:
    """Return the physical offset that a finding in a segment names."""
    return (filenames.parse_segment_name(one.path.rpartition("/")[2]) or 0) + one.position


def stamp_of(root: str, folders: tuple[str, ...]) -> int:
    """Return what changes when anybody writes to a store: of names, lengths and times of all its files.

    But for those by which the store's lock is taken.
    """
    locks = {files.join(root, filenames.LOCK), files.join(root, SIDE_FOLDER, "turn")}
    locks.add(files.join(root, SIDE_FOLDER, "holder.json"))
    found: list[tuple[str, tuple[int, int, int] | None]] = []
    waiting = [root, *(folder for folder in folders if not folder.startswith(root + "/"))]
    while waiting:
        folder = waiting.pop()
        for name, is_folder in files.list_folder(folder):
            path = files.join(folder, name)
            if is_folder:
                waiting.append(path)
            elif path not in locks and not path.endswith(TEMPORARY_SUFFIX):
                found.append((path, files.stamp(path)))
    return zlib.crc32(repr(sorted(found)).encode())
