"""Repair plan: the steps that would repair a store, and the number of messages that would be lost.

If the commit log is sound, everything that is derived from it can be rebuilt: consume queues, key index and checkpoint.
Recovery finishes the work of a crashed writer. Only recovery may truncate the log.

If the log is truncated, the lost messages are counted in two ways, because each way may miss some. One counts the
records after the damage, and works even if the files of a queue are missing. The other counts the consume-queue
entries, and works even if a record is corrupt. For each queue, the larger number is used.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import TEMPORARY_SUFFIX
from rmq_spark.store.errors import StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.consume_queue_entry import is_blank_fill
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.record import TRANSACTION_COMMIT, TRANSACTION_MASK
from rmq_spark.store.format.record_batch import RecordColumns
from rmq_spark.store.html_tables import MAX_ROWS, box, number_column, table, text_column
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.group_offsets import OFFSET_FILES, set_back
from rmq_spark.store.log.store_state import SIDE_FOLDER, check_settings, commit_log_folders
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.check import Progress, check
from rmq_spark.store.tools.check_report import CheckReport
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity, utc_text
from rmq_spark.store.tools.log_walk import LogBlock, LogWalk, TolerantCommitLog
from rmq_spark.store.tools.store_times import find_wrong_times

_STEPS = pa.schema(
    [
        ("action", pa.string()),
        ("what", pa.string()),
        ("path", pa.string()),
        ("messagesLost", pa.int64()),
        ("isDoneByRepair", pa.bool_()),
    ]
)
_SHOWN_OFFSETS = 10


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One step of a repair plan.

    `action` is one of:

    - "recover": finish what a dead writer left, as the next writer would
    - "rebuild": write derived files again from the commit log
    - "restore": replace a config file by its `.bak`, or a `.bak` by its file
    - "cut": truncate the commit log before the damage; all later messages are lost
    - "reset": set offsets of groups and delay levels back to the ends of their queues if they are beyond those ends
    - "clock": set store times, or the timer, back if they are ahead of this machine's clock
    - "leave": no repair can do anything; `what` says what to do instead

    `what` describes the step, and `path` is the file or folder that it concerns. `messages_lost` is the number of
    messages that the step deletes or makes unreadable.
    """

    action: Action
    what: str
    path: str
    messages_lost: int = 0
    queue: QueueKey | None = None  # the queue that the step rebuilds, if any

    @property
    def is_done_by_repair(self) -> bool:
        """Whether `repair` does anything in this step."""
        return self.action != Action.LEAVE


@dataclass(frozen=True, slots=True, repr=False)
class RepairPlan:
    """The steps that repair the store at `path`. They follow from the findings of the check in `report`.

    To make a plan changes nothing on disk. To run it, call `repair(plan)`. A notebook displays it as a table of steps.
    """

    path: str
    commit_log_path: str | None
    report: CheckReport
    steps: tuple[RepairStep, ...]
    stamp: int  # checksum of the store's files when the check began (`stamp_of`)

    @property
    def is_empty(self) -> bool:
        """Whether `repair` would change nothing."""
        return not any(step.is_done_by_repair for step in self.steps)

    @property
    def messages_lost(self) -> int:
        """The number of messages that the repair would delete or make unreadable."""
        return sum(step.messages_lost for step in self.steps)

    @property
    def is_lossy(self) -> bool:
        """Whether the repair may delete messages. A cut may delete messages even if none was counted."""
        return self.messages_lost > 0 or any(step.action == Action.CUT for step in self.steps)

    def to_arrow(self) -> pa.Table:
        """Return a table with one row for each step."""
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
        return self._text(self.steps)

    def __repr__(self) -> str:
        more = len(self.steps) - MAX_ROWS
        shown = self._text(self.steps[:MAX_ROWS])
        return f"{shown}\n… and {more:,} more: to_arrow() has all" if more > 0 else shown

    def _text(self, steps: Sequence[RepairStep]) -> str:
        lost = f"{self.messages_lost} messages would be lost" if self.messages_lost else "no message is lost"
        lines = [f"{self.path}: {len(self.steps)} steps, {lost}"]
        return "\n".join([*lines, *(f"{step.action}: {step.what} ({step.path})" for step in steps)])

    def _repr_html_(self) -> str:
        shown = self.steps[:MAX_ROWS]
        facts = {
            "steps": f"{len(self.steps):,}, {sum(step.is_done_by_repair for step in self.steps):,} of them by repair",
            "messages lost": f"{self.messages_lost:,}",
        }
        columns = [
            text_column("action", [step.action for step in shown]),
            text_column("what", [step.what for step in shown], is_long=True),
            text_column("file", [step.path for step in shown]),
            number_column("messages lost", [step.messages_lost for step in shown]),
        ]
        left_out = len(self.steps) - len(shown)
        more = f"… and {left_out:,} more: to_arrow() has all" if left_out else ""
        return box("repair plan for", self.path, facts, table(columns, more) if shown else "")


def plan_repair(
    path: str | PurePath,
    *,
    commit_log_path: str | None = None,
    cut_log: bool = False,
    progress: Progress | None = None,
) -> RepairPlan:
    """Check the store at `path`, and return the steps that would repair it. Changes nothing on disk.

    If `cut_log` is False, the plan leaves damage of the commit log as it is. If it is True, the log will be truncated
    before the damage, as RocketMQ's recovery would do, and all later messages will be lost. Then offsets of groups and
    delay levels that are beyond the ends of their queues will be set back to those ends.

    `progress` and the errors are those of `check`.
    """
    root = files.store_folder(path)
    folders = commit_log_folders(root, commit_log_path)
    stamp = stamp_of(root, folders)
    report = check(root, commit_log_path=commit_log_path, progress=progress)
    steps = tuple(_steps(report, folders, cut_log))
    return RepairPlan(report.path, commit_log_path, report, steps, stamp)


def _steps(report: CheckReport, folders: tuple[str, ...], cut_log: bool) -> Iterator[RepairStep]:
    of_log, others = list[Finding](), list[Finding]()
    for one in report.findings:
        if one.severity != Severity.NOTE:
            is_of_log = one.area == Area.COMMIT_LOG and one.action not in (Action.RECOVER, Action.DOUBLED)
            (of_log if is_of_log else others).append(one)
    cuts = [one for one in of_log if one.action == Action.CUT]
    is_cut = cut_log and bool(cuts) and all(one.action in (Action.CUT, Action.LOST, Action.KEEP) for one in of_log)
    cut_offset = min(map(_physical_offset, cuts)) if is_cut else None
    if cut_offset is not None:
        lost = truncation_loss(report.path, folders, cut_offset, report.log_end)
        what = f"truncate the commit log before the damage at physical offset {cut_offset}: {lost} messages are lost"
        yield RepairStep(Action.CUT, what, min(cuts, key=_physical_offset).path, lost)
    yield from (_left(one) for one in of_log if not is_cut or one.action == Action.KEEP)
    is_sound = is_cut or all(one.action == Action.KEEP for one in of_log)
    yield from _recover(report, others, is_sound)
    yield from _rebuild(report, others, is_sound)
    for one in others:
        if one.action == Action.CLOCK:
            plan_clock = _set_timer_back if one.area == Area.TIMER else _set_store_times_back
            yield plan_clock(report, folders, one, is_sound and not is_cut)
    is_clamped = cut_log and is_sound
    if is_clamped:
        yield from _clamp_offsets(report.path, queue_ends(report.path, cut_offset))
    for one in others:
        if one.action == Action.RESTORE:
            yield RepairStep(Action.RESTORE, f"{one.what}: replace it by the copy that can be read", one.path)
        elif one.action == Action.LEAVE or (one.action == Action.RESET and not is_clamped):
            yield _left(one)


def _left(one: Finding) -> RepairStep:
    return RepairStep(Action.LEAVE, f"{one.what}. {one.next_step}", one.path)


def _recover(report: CheckReport, found: list[Finding], is_sound: bool) -> Iterator[RepairStep]:
    chosen = [one for one in found if one.action in (Action.RECOVER, Action.WATERMARK)]
    lost = sum(one.messages for one in chosen if one.severity == Severity.DAMAGE)
    if chosen:
        what = f"finish what dead writers left, and mark the shutdown as clean; {len(chosen)} findings"
        yield RepairStep(Action.RECOVER, what, report.path, lost)
    for one in found:
        if one.action == Action.CHECKPOINT and is_sound:
            yield RepairStep(Action.REBUILD, f"{one.what}: write it again", one.path)
        elif one.action == Action.CHECKPOINT:
            yield RepairStep(Action.LEAVE, f"{one.what}: cannot be rebuilt while the log is damaged", one.path)


def _rebuild(report: CheckReport, found: list[Finding], is_sound: bool) -> Iterator[RepairStep]:
    queues: dict[QueueKey, Finding] = {}
    for one in found:
        if one.action == Action.REBUILD and one.area != Area.INDEX and (key := _queue_of(one)) is not None:
            queues.setdefault(key, one)
    duplicates = [one for one in found if one.action == Action.DOUBLED]
    yield from (_left(one) for one in duplicates if _queue_of(one) not in queues)
    for key, one in queues.items():
        if is_sound:
            what = f"queue {key}: rebuild all its entries from the commit log"
            lost = sum(other.messages for other in duplicates if _queue_of(other) == key)
            if lost:
                what += f"; {lost} messages with queue offsets of earlier messages become unreadable"
            yield RepairStep(Action.REBUILD, what, one.path, lost, queue=key)
        else:
            what = f"queue {key} cannot be rebuilt while the log is damaged: restore the log first, or cut it"
            yield RepairStep(Action.LEAVE, what, one.path)
    if any(one.action == Action.REBUILD and one.area == Area.INDEX for one in found):
        path = files.join(report.path, filenames.INDEX)
        if is_sound:
            yield RepairStep(Action.REBUILD, "the key index: rebuild it from the commit log", path)
        else:
            yield RepairStep(Action.LEAVE, "the key index cannot be rebuilt while the log is damaged", path)


def _queue_of(one: Finding) -> QueueKey | None:
    return None if one.topic is None or one.queue_id is None else QueueKey(one.topic, one.queue_id)


def _set_store_times_back(report: CheckReport, folders: tuple[str, ...], one: Finding, is_sound: bool) -> RepairStep:
    """Return the step that sets store times ahead of the clock back, or a step with the reason if that is impossible.

    `one` is the finding about these times. `is_sound` is whether the commit log has no damage.
    """
    if not is_sound:
        return RepairStep(Action.LEAVE, f"{one.what}. Plan again after the log was repaired", one.path)
    now_ms, log = wall_clock_ms(), TolerantCommitLog(folders)
    try:
        found = find_wrong_times(report.path, log, levels_of(report.path), report.log_end, now_ms)
    finally:
        log.close()
    if found.refusal is not None:
        what = f"the store times cannot be set back: {found.refusal}. Until then: {one.what}"
        return RepairStep(Action.LEAVE, what, one.path)
    what = (
        f"set the store times of {found.messages} messages, at and after physical offset {found.begin}, back to their "
        f"born times, at most this machine's clock ({utc_text(now_ms)})"
    )
    return RepairStep(Action.CLOCK, what, one.path)


def _set_timer_back(report: CheckReport, folders: tuple[str, ...], one: Finding, is_sound: bool) -> RepairStep:
    """Return the step that sets the timer back to this machine's clock, or a step with the reason if it is impossible.

    `one` is the finding about the timer. `is_sound` is whether the commit log has no damage.
    """
    is_timer_sound = all(other.severity != Severity.DAMAGE for other in report.findings if other.area == Area.TIMER)
    if not is_sound or not is_timer_sound:
        return RepairStep(Action.LEAVE, f"{one.what}. Plan again after the damage was repaired", one.path)
    what = f"set the timer back to this machine's clock ({utc_text(wall_clock_ms())}), and put waiting messages back"
    return RepairStep(Action.CLOCK, f"{what} into its queue", one.path)


def levels_of(root: str) -> DelayLevels:
    """Return the delay levels of the store at `root`: those in its settings, or else RocketMQ's defaults."""
    settings = check_settings(root)
    return DEFAULT_DELAY_LEVELS if settings is None else settings.levels


def _physical_offset(one: Finding) -> int:
    """Return the physical offset of a finding about a segment of the commit log."""
    return (filenames.parse_segment_name(one.path.rpartition("/")[2]) or 0) + one.position


def queue_ends(root: str, log_end: int | None = None) -> dict[QueueKey, int]:
    """Return a dict from each queue that can be read to its next queue offset.

    If `log_end` is given, the offsets are those after the log was truncated at that physical offset.
    """
    ends = {}
    for key, queue in TopicTable(root).queues.items():
        if not queue.run.is_damaged():
            end = queue.search_written_end()
            ends[key] = queue.offset_of(end if log_end is None else _first_beyond(queue, end, log_end), end)
            queue.run.close()
    return ends


def _first_beyond(queue: ConsumeQueue, end: int, physical_offset: int) -> int:
    """Return the number of the first entry whose record ends after `physical_offset`, or `end` if there is none.

    `end` is the number after the queue's last entry.
    """
    return queue.run.first_where(
        queue.run.begin,
        end,
        lambda entry: (
            entry["physical_offset"] + entry["record_size"].astype("i8") > physical_offset and not is_blank_fill(entry)
        ),
    )


def _clamp_offsets(root: str, ends: Mapping[QueueKey, int]) -> Iterator[RepairStep]:
    """Yield a step for each file with offsets that are beyond the ends of their queues. `ends` has these ends.

    A file that cannot be read is skipped, because `check` reports it.
    """
    for name in OFFSET_FILES:
        path = files.join(root, filenames.CONFIG, name)
        try:
            changes = set_back(name, files.read_small(path) or b"", ends)[1]
        except (StorePathError, ValueError):
            continue
        if changes:
            shown = "; ".join(changes[:_SHOWN_OFFSETS]) + ("; …" if len(changes) > _SHOWN_OFFSETS else "")
            what = f"set {len(changes)} offsets beyond the ends of their queues back to those ends: {shown}"
            yield RepairStep(Action.RESET, what, path)


def truncation_loss(root: str, folders: tuple[str, ...], physical_offset: int, end: int) -> int:
    """Return how many messages are lost if the commit log is truncated at `physical_offset`.

    `folders` are the folders of the log, and `end` is its end (physical offset). The function reads the log between the
    two offsets and counts all complete records there, also those after further damage.

    Raises StoreChangedError if the store is written to meanwhile.
    """
    lost: Counter[QueueKey] = Counter()
    log = TolerantCommitLog(folders)
    try:
        for step in LogWalk(log, DEFAULT_DELAY_LEVELS).run(physical_offset, end):
            if isinstance(step, LogBlock):
                lost.update(_message_counts(step.columns))
    finally:
        log.close()
    for key, queue in TopicTable(root).queues.items():
        if not queue.run.is_damaged():
            last = queue.search_written_end()
            first = _first_beyond(queue, last, physical_offset)
            lost[key] = max(lost[key], queue.offset_of(last, last) - queue.offset_of(first, last))
            queue.run.close()
    return lost.total()


def _message_counts(records: RecordColumns) -> dict[QueueKey, int]:
    """Return a dict from queue to its number of messages in a block.

    Records that get no consume-queue entry are not counted, such as half messages of transactions.
    """
    rows = np.flatnonzero(np.isin(records.sys_flags & TRANSACTION_MASK, (0, TRANSACTION_COMMIT)))
    queues, numbers = np.unique(
        np.stack((records.topic_numbers[rows], records.queue_ids[rows]), axis=1), axis=0, return_inverse=True
    )
    counts = np.bincount(numbers.reshape(-1), records.message_counts[rows], len(queues))
    return {
        QueueKey(records.topics[topic], queue_id): int(count)
        for (topic, queue_id), count in zip(queues.tolist(), counts.tolist(), strict=True)
    }


def stamp_of(root: str, folders: tuple[str, ...]) -> int:
    """Return a checksum of the names, lengths and modification times of all files of the store at `root`.

    The checksum changes if the store is written to. Files of the lock are not included. `folders` are the folders of
    the commit log, which may be outside of the store.
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
