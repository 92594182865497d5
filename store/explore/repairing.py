"""`repair`: the steps of a plan done, by what writers do anyway.

Only recovery takes bytes of the log back and makes units and keys: `store/log/recovery.py`, under the store's lock.
Here the store is brought to where recovery does it all, in an order that no crash spoils:

0. A config file that cannot be read is kept in `rmq/before-repair/`, then its `.bak` takes its place; of topics.json
   with the topics that are newer than that, in one step: recovery passes over records of topics that it does not name.
   So a topics.json that is older than queues that are made anew gets their topics, too.
1. What a dead writer wrote in part is taken back, and what it wrote as a whole is synced, as our note says: no later
   step can tell the two apart. Then a note, `rmq/rebuild`, says which files are to be made anew. From here until they
   are complete readers refuse the queues that it names, and the next writer goes on with the steps 2 to 4, whoever
   died.
2. `abort` is there, for good: from here on who opens the store recovers it, a broker too. Then the checkpoint is a page
   that vouches for nothing, and our own note is gone: so all of the log is looked at, and all units and keys that are
   missing are made.
3. A writer's section: what the note names is removed. A crash here leaves a store without these files, which a broker
   recovers too.
4. Recovery, and what dead writers promised. Then the store is settled: all is synced, `abort` goes, and last the note.
5. Queues of topics that were deleted long ago go again: without units of others nothing tells them from new ones.
6. Of a log that was cut, offsets beyond the ends that its queues now have are set back, the files before kept as in 0.
7. Store times that are ahead of the clock are set back (`store_times.py`), after steps 1 to 3 and before step 4, which
   are done once more: the key index has the times, too. A note of a sync that began stays until all of it is on disk.
   After a failed sync the next writer writes the log again.
8. A timer that is ahead of the clock is set back (`Ticker.set_timer_back`).
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.intents import Intents
from rmq_spark.store.delivery.ticker import Ticker
from rmq_spark.store.delivery.timer_files import TIMER_CHECK_NAME
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import OptionError, StoreChangedError
from rmq_spark.store.explore.check_report import CheckReport
from rmq_spark.store.explore.checking import Progress, check
from rmq_spark.store.explore.config_check import decode_config
from rmq_spark.store.explore.older_topics import Deleted, with_topics, with_topics_on_disk
from rmq_spark.store.explore.repair_plan import (
    CLOCK,
    CUT,
    LEAVE,
    REBUILD,
    RECOVER,
    RESET,
    RESTORE,
    RepairPlan,
    RepairStep,
    levels_of,
    plan_repair,
    stamp_of,
)
from rmq_spark.store.explore.set_back import queue_ends
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.explore.sound_topics import SoundTopics
from rmq_spark.store.explore.store_times import write_times
from rmq_spark.store.format import filenames
from rmq_spark.store.format.filenames import BACKUP_SUFFIX
from rmq_spark.store.format.offset_limits import set_back
from rmq_spark.store.format.rebuild_note import Rebuild
from rmq_spark.store.log.kept_files import keep_file
from rmq_spark.store.log.lost_queues import counted_queues
from rmq_spark.store.log.queue_registry import read_registry
from rmq_spark.store.log.rebuilding import empty_folder
from rmq_spark.store.log.recovery import remove_note
from rmq_spark.store.log.settings_file import check_settings
from rmq_spark.store.log.store_files import nothing_written
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.watermark_file import read_watermark, write_watermark
from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did: `steps` were done, `left` were not. `report` is of a check after it."""

    steps: tuple[RepairStep, ...]
    left: tuple[RepairStep, ...]
    messages_lost: int
    report: CheckReport


def repair(
    plan: RepairPlan | str | PurePath,
    *,
    accept_loss: bool = False,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    progress: Progress | None = None,
) -> Repaired:
    """Do what a plan says, or the plan of the store at a path; return what was done, and a check of the store after it.

    Nothing is lost unless the plan says so and `accept_loss` is given. Raises OptionError for a plan that would lose
    messages or cuts the log without it, StoreChangedError for a plan that is not true any more (plan again),
    LockTimeoutError while a broker holds the store, and DamageError or StoreError for settings and intents of ours that
    no writer passes over; nothing was changed then. After another error, of the disk or because somebody took the lock
    in the middle of it, the store is as after a crash, and loses nothing by it: repair it again.
    """
    if not isinstance(plan, RepairPlan):
        plan = plan_repair(plan, commit_log_path=commit_log_path)
    if plan.is_lossy and not accept_loss:
        raise OptionError(
            f"the repair of {plan.path} would lose {plan.messages_lost} messages for good. Nothing was changed. Keep a "
            "copy of the store, look at the plan (rmq_spark.plan_repair), and say accept_loss=True if that is meant."
        )
    done = tuple(step for step in plan.steps if step.is_done_by_repair)
    left = tuple(step for step in plan.steps if step.action == LEAVE)
    if done:
        _Repair(plan, lock_timeout_ms, allow_network_store).run(done)
    report = check(plan.path, commit_log_path=plan.commit_log_path, progress=progress)
    return Repaired(done, left, plan.messages_lost, report)


class _Repair:
    """One repair."""

    def __init__(self, plan: RepairPlan, lock_timeout_ms: int, allow_network_store: bool) -> None:
        self._plan, self._root, self._disk = plan, plan.path, Disk()
        settings = WriterSettings("rmq-spark repair", lock_timeout_ms, allow_network_store, plan.commit_log_path)
        finisher = IntentFinisher(self._root, self._disk, wall_clock_ms)
        self._writer = StoreWriter(self._root, self._disk, settings, wall_clock_ms, time.sleep, (finisher,))

    def run(self, steps: tuple[RepairStep, ...]) -> None:
        """Do the steps."""
        with self._writer:
            with self._writer.lock.hold():
                self._refuse_other_store()
                self._refuse_unreadable(steps)
                if any(step.action in (RECOVER, REBUILD, CUT, CLOCK) for step in steps):
                    self._refuse_what_stops_writers()
                counted = counted_queues(read_registry(self._root), SoundTopics(self._root).found)
                for step in steps:
                    if step.action == RESTORE:
                        self._restore(step.path)
                self._name_topics({step.queue for step in steps if step.queue in counted})
                deleted = Deleted(self._root, self._plan.report.log_end)
                if any(step.action in (REBUILD, CUT) for step in steps):
                    self._writer.begin_rebuild(self._made_anew(steps))
                elif any(finding.action == "watermark" for finding in self._plan.report.findings):
                    self._writer.forget_note()
            if any(step.action in (RECOVER, REBUILD, CUT) for step in steps):
                self._disk.make_folder(files.join(self._root, filenames.CONSUME_QUEUE))  # no writer works without it
                with self._writer.section() as section:
                    section.settle()
                with self._writer.lock.hold():
                    for folder in deleted.folders_again():
                        self._remove_queue(folder)
            with self._writer.lock.hold():
                self._set_back([step.path for step in steps if step.action == RESET])
            clocks = {step.path for step in steps if step.action == CLOCK}
            timer = files.join(self._root, filenames.CONFIG, TIMER_CHECK_NAME)
            if clocks - {timer}:
                self._set_times_back()
        if timer in clocks:
            with Ticker(self._root, self._writer.settings, disk=self._disk) as ticker:
                ticker.set_timer_back()

    def _refuse_other_store(self) -> None:
        """Under the lock nothing moves: what was planned must still be so."""
        if stamp_of(self._root, commit_log_folders(self._root, self._plan.commit_log_path)) != self._plan.stamp:
            raise StoreChangedError(
                f"the store at {self._root} is not what the plan was made for: somebody wrote to it since. Nothing was "
                "changed. Plan again."
            )

    def _refuse_unreadable(self, steps: tuple[RepairStep, ...]) -> None:
        """Raise StorePathError for a file that would be replaced and cannot be read: nobody knows what it is worth."""
        for path in [
            files.join(self._root, filenames.CHECKPOINT),
            *(s.path for s in steps if s.action in (RESTORE, RESET)),
        ]:
            files.read_small(path)

    def _refuse_what_stops_writers(self) -> None:
        """Read what the section reads first, and may raise for: before the first step, so that none is half of it."""
        check_settings(self._root)
        Intents(self._root, self._disk).read_all()

    def _made_anew(self, steps: tuple[RepairStep, ...]) -> Rebuild:
        rebuilt = [step for step in steps if step.action == REBUILD]
        index = files.join(self._root, filenames.INDEX)
        queues = frozenset(step.queue for step in rebuilt if step.queue is not None)
        return Rebuild(queues, any(step.queue is None and step.path == index for step in rebuilt))

    def _remove_queue(self, folder: str) -> None:
        empty_folder(self._disk, folder)
        topic = files.parent(folder)
        if self._disk.remove_folder(folder):
            self._disk.sync_folder(topic)
        if self._disk.remove_folder(topic):
            self._disk.sync_folder(files.parent(topic))

    def _set_times_back(self) -> None:
        """Give messages that were stored ahead of the clock right store times."""
        with self._writer.section() as section:
            section.settle()  # nothing stays behind the log's end that could pass for newer once times are less
        folders = commit_log_folders(self._root, self._plan.commit_log_path)
        with self._writer.lock.hold():
            note = read_watermark(self._root)
            if note is None or not note.is_settled or files.file_size(files.join(self._root, filenames.ABORT)) >= 0:
                raise StoreChangedError(
                    f"the store times of {self._root} were not set back: another program wrote to the store meanwhile; "
                    "expected only this repair. Plan the repair again."
                )
            deleted, log = Deleted(self._root, note.end), SoundLog(folders)
            try:
                self._writer.begin_rebuild(Rebuild(frozenset(), True))
                empty_folder(self._disk, files.join(self._root, filenames.INDEX))
                begun = replace(nothing_written(), is_open=True, dirty=None, is_syncing=True)
                write_watermark(self._disk, self._root, begun)
                write_times(
                    self._root, self._disk, log, levels_of(self._root), note.end, wall_clock_ms(),
                    self._writer.lock.note_progress,
                )  # fmt: skip
            finally:
                log.close()
            remove_note(self._disk, self._root)
        with self._writer.section() as section:
            section.settle()
        with self._writer.lock.hold():
            for folder in deleted.folders_again():
                self._remove_queue(folder)

    def _restore(self, path: str) -> None:
        """Put the copy of a config file that can be read in the place of the one that cannot."""
        main = path.removesuffix(BACKUP_SUFFIX)
        source = main if path != main else main + BACKUP_SUFFIX
        data = files.read_small(source) or b""
        decode_config(main.rpartition("/")[2], data)  # it could be read when the plan was made
        keep_file(self._disk, self._root, path, wall_clock_ms())
        if path == files.join(self._root, filenames.CONFIG, filenames.TOPICS_JSON):
            data = with_topics_on_disk(self._root, data, wall_clock_ms())
        self._disk.replace(path, data)

    def _name_topics(self, queues: Iterable[QueueKey | None]) -> None:
        """Give topics.json the topics of queues that are made anew, if it is older than they are."""
        path = files.join(self._root, filenames.CONFIG, filenames.TOPICS_JSON)
        data = files.read_small(path)
        newer = with_topics({key: False for key in queues if key is not None}, data, wall_clock_ms()) if data else data
        if data and newer and newer != data:
            keep_file(self._disk, self._root, path, wall_clock_ms())
            self._disk.replace(path, newer)

    def _set_back(self, paths: list[str]) -> None:
        ends = queue_ends(self._root) if paths else {}
        for path in paths:
            data, told = set_back(path.rpartition("/")[2], files.read_small(path) or b"", ends)
            if told:
                keep_file(self._disk, self._root, path, wall_clock_ms())
                self._disk.replace(path, data)
