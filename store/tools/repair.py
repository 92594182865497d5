"""`repair`: run the steps of a repair plan.

A repair does not truncate the commit log or write entries and keys itself. Only recovery does that, under the store's
lock (`store/log/recovery.py`). A repair brings the store into a state in which recovery does all that is needed. It can
crash at any point without loss, because its steps have this order:

0. Restore config files. A config file that cannot be read is copied to `rmq/before-repair/`, and then replaced by its
   `.bak`. If topics have queues on disk and are missing in the `.bak` of topics.json, they are added, because recovery
   skips records of topics that are not in topics.json. Topics of queues that will be rebuilt are added for the same
   reason.
1. Finish the writes of a dead writer. The watermark shows which of its records are complete. Incomplete records are
   truncated and complete ones are synced, because the next steps remove the watermark. Then `rmq/rebuild` is written,
   with the list of files to rebuild. While it exists, readers refuse the listed queues. If any process dies, the next
   writer resumes at step 2.
2. Request a full recovery. `abort` is created and synced, so that a writer or broker that opens the store recovers it.
   Then an empty checkpoint is written and the watermark is removed, so that recovery scans the whole log and writes
   all missing entries and keys.
3. In a write session, delete the files that are listed in `rmq/rebuild`. After a crash here, a broker can recover the
   store, too: it only lacks these files.
4. Run recovery, and complete the intents of dead writers. Then flush the store and mark it as cleanly shut down:
   everything is synced, `abort` is removed, and `rmq/rebuild` is removed last.
5. Remove queues of topics that were deleted long ago. Recovery normally skips records of deleted topics. But if the
   other queues had lost their entries, it cannot tell these records from new ones, so it creates their queues again.
6. If the log was cut, set offsets of groups and delay levels that are beyond the new ends of their queues back to those
   ends. The old files are copied as in step 0.
7. Set store times that are ahead of the clock back (`store_times.py`). This repeats steps 1 to 4 for the key index,
   because it contains the times; the times are written before step 4. Until all of them are on disk, the watermark
   contains that a sync is in progress. So after a failed sync, the next writer writes the log's data again.
8. Set a timer that is ahead of the clock back (`DeliveryScheduler.set_timer_back`).
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.delivery.timer_files import TIMER_CHECK_NAME
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import OptionError, StoreChangedError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import (
    BATCH_QUEUE_TYPE,
    QUEUE_TYPE,
    DataVersion,
    TopicConfig,
    decode_topics_file,
    encode_topics_file,
)
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT
from rmq_spark.store.format.file_names import BACKUP_SUFFIX
from rmq_spark.store.format.own_files import Rebuild
from rmq_spark.store.log.group_offsets import set_back
from rmq_spark.store.log.queue_registry import counted_queues, read_registry
from rmq_spark.store.log.rebuild import empty_folder, keep_file
from rmq_spark.store.log.recovery import remove_note
from rmq_spark.store.log.store_files import nothing_written
from rmq_spark.store.log.store_state import check_settings, commit_log_folders, read_watermark, write_watermark
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import check_sent_topic
from rmq_spark.store.tools.check import Progress, check
from rmq_spark.store.tools.check_config import decode_config
from rmq_spark.store.tools.check_report import CheckReport
from rmq_spark.store.tools.finding import Action
from rmq_spark.store.tools.log_walk import TolerantCommitLog, TolerantTopics
from rmq_spark.store.tools.repair_plan import RepairPlan, RepairStep, levels_of, plan_repair, queue_ends, stamp_of
from rmq_spark.store.tools.store_times import write_times
from rmq_spark.store.transaction.intents import Intents
from rmq_spark.store.transaction.roll_forward import IntentRollForward

_LAST_ENTRIES = 64  # entries of a queue that are read at its end; several, because some may be damaged


def with_topics(data: bytes, queues: Mapping[QueueKey, bool], now_ms: int) -> bytes:
    """Add the missing topics of some queues to a topics.json. Returns its new content, or `data` if none is missing.

    `data` is the content of topics.json. `queues` maps each queue to whether it is a batch queue. A broker's own topics
    are not added, because the broker creates them when it starts. `now_ms` becomes the time of the data version.
    """
    file = decode_topics_file(data)
    added: dict[str, TopicConfig] = {}
    for key, is_batch in queues.items():
        if key.topic in file.topics:
            continue
        try:
            check_sent_topic(key.topic)
        except OptionError:
            continue
        count = key.queue_id + 1
        if key.topic not in added or added[key.topic].write_queue_count < count:
            attributes = {QUEUE_TYPE: BATCH_QUEUE_TYPE} if is_batch else {}
            added[key.topic] = TopicConfig(key.topic, count, count, attributes=attributes)
    if not added:
        return data
    version = file.data_version or DataVersion()
    newer = replace(version, counter=version.counter + 1, timestamp=now_ms)
    return encode_topics_file(replace(file, topics={**file.topics, **added}, data_version=newer))


class DeletedQueues:
    """Finds queues of deleted topics that a recovery has created again.

    Records of deleted topics stay in the log until they expire, so a recovery of the whole log may create their queues.
    Create an instance before the recovery. It remembers which queues exist, and the physical offset of the last record
    that has an entry. Entries for records at or after `log_end` are ignored, because they are stale or damaged.
    """

    def __init__(self, root: str, log_end: int) -> None:
        self._root, self._log_end = root, log_end
        table = TopicTable(root)
        self._existing = set(table.queues)
        self._last_offset = max((self._last_offset_of(table, key) for key in self._existing), default=-1)

    def recreated_folders(self) -> list[str]:
        """Return the folders of queues of deleted topics that were created after this instance.

        Such a queue has only records from before the last record at that time, and its topic is not in topics.json.
        """
        table = TopicTable(self._root)
        return [
            queue.run.folder
            for key, queue in table.queues.items()
            if key not in self._existing
            and not table.may_exist(key.topic)
            and self._last_offset_of(table, key) < self._last_offset
        ]

    def _last_offset_of(self, table: TopicTable, key: QueueKey) -> int:
        """Return the physical offset of a queue's last record, according to its last entries.

        Returns -1 if the queue cannot be read, or if none of these entries is for a record below the log's end.
        """
        queue = table.queues[key]
        if queue.run.is_damaged():
            return -1
        end = queue.search_written_end()
        physical_offsets = queue.read(max(end - _LAST_ENTRIES, queue.run.begin), end).physical_offsets
        queue.run.close()
        return int(physical_offsets[physical_offsets < self._log_end].max(initial=-1))


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair.

    `steps` were done. `left` are steps that no repair can do. `messages_lost` is the number of messages that the repair
    deleted, as planned. `report` is a check of the store after the repair.
    """

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
    """Repair a store. Returns the steps that were done, and a check of the store after the repair.

    `plan` is a plan from `plan_repair`, or the path of a store, which is then planned and repaired. No messages are
    lost unless the plan says so and `accept_loss` is True.

    Nothing was changed if one of these errors is raised:

    - OptionError: the plan loses messages or cuts the log, and `accept_loss` is False
    - StoreChangedError: another program wrote to the store after the plan was made; plan again
    - LockTimeoutError: a broker or another writer holds the store's lock
    - DamageError or StoreError: settings or intents of rmq-spark are damaged, so no writer can open the store

    Any other error leaves the store as after a crash, for example if the disk fails or another program takes the lock
    during the repair. No further messages are lost. Repair the store again.
    """
    if not isinstance(plan, RepairPlan):
        plan = plan_repair(plan, commit_log_path=commit_log_path)
    if plan.is_lossy and not accept_loss:
        raise OptionError(
            f"the repair of {plan.path} would lose {plan.messages_lost} messages; expected accept_loss=True for a plan "
            "that loses messages. Nothing was changed. Copy the store and read the plan (rmq_spark.plan_repair) first."
        )
    done = tuple(step for step in plan.steps if step.is_done_by_repair)
    left = tuple(step for step in plan.steps if step.action == Action.LEAVE)
    if done:
        _Repair(plan, lock_timeout_ms, allow_network_store).run(done)
    report = check(plan.path, commit_log_path=plan.commit_log_path, progress=progress)
    return Repaired(done, left, plan.messages_lost, report)


class _Repair:
    """One run of a repair plan."""

    def __init__(self, plan: RepairPlan, lock_timeout_ms: int, allow_network_store: bool) -> None:
        self._plan, self._root, self._disk = plan, plan.path, Disk()
        settings = WriterSettings("rmq-spark repair", lock_timeout_ms, allow_network_store, plan.commit_log_path)
        finisher = IntentRollForward(self._root, self._disk, wall_clock_ms)
        self._writer = StoreWriter(self._root, self._disk, settings, wall_clock_ms, time.sleep, (finisher,))
        self._topics_path = files.join(self._root, filenames.CONFIG, filenames.TOPICS_JSON)

    def run(self, steps: tuple[RepairStep, ...]) -> None:
        """Run the steps. Each has an action that changes the store."""
        actions = {step.action for step in steps}
        needs_recovery = not actions.isdisjoint({Action.RECOVER, Action.REBUILD, Action.CUT})
        with self._writer:
            with self._writer.lock.hold():
                self._require_unchanged_store()
                self._require_readable_files(steps)
                if needs_recovery or Action.CLOCK in actions:
                    # A write session reads settings and intents when it begins. Read them now, so that damage of these
                    # files raises an error before the first step and not in the middle of the repair.
                    check_settings(self._root)
                    Intents(self._root, self._disk).read_all()
                counted = counted_queues(read_registry(self._root), TolerantTopics(self._root).found)
                for step in steps:
                    if step.action == Action.RESTORE:
                        self._restore(step.path)
                self._add_topics({step.queue for step in steps if step.queue in counted})
                deleted = DeletedQueues(self._root, self._plan.report.log_end)
                if not actions.isdisjoint({Action.REBUILD, Action.CUT}):
                    index = files.join(self._root, filenames.INDEX)
                    rebuilt = [step for step in steps if step.action == Action.REBUILD]
                    queues = frozenset(step.queue for step in rebuilt if step.queue is not None)
                    has_index = any(step.queue is None and step.path == index for step in rebuilt)
                    self._writer.begin_rebuild(Rebuild(queues, has_index))
                elif any(finding.action == Action.WATERMARK for finding in self._plan.report.findings):
                    self._writer.forget_note()
            if needs_recovery:
                self._disk.make_folder(files.join(self._root, filenames.CONSUME_QUEUE))  # every writer needs the folder
                with self._writer.section() as section:
                    section.settle()
                with self._writer.lock.hold():
                    self._remove_queues(deleted.recreated_folders())
            with self._writer.lock.hold():
                self._clamp_offsets([step.path for step in steps if step.action == Action.RESET])
            clocks = {step.path for step in steps if step.action == Action.CLOCK}
            timer = files.join(self._root, filenames.CONFIG, TIMER_CHECK_NAME)
            if clocks - {timer}:
                self._set_store_times_back()
        if timer in clocks:
            with DeliveryScheduler(self._root, self._writer.settings, disk=self._disk) as scheduler:
                scheduler.set_timer_back()

    def _require_unchanged_store(self) -> None:
        if stamp_of(self._root, commit_log_folders(self._root, self._plan.commit_log_path)) != self._plan.stamp:
            raise StoreChangedError(
                f"cannot repair {self._root}: another program wrote to the store since the plan was made; expected the "
                "store of the plan. Nothing was changed. Plan again."
            )

    def _require_readable_files(self, steps: tuple[RepairStep, ...]) -> None:
        """Raise StorePathError if a file that the repair would replace cannot be read, because it may be valid."""
        files.read_small(files.join(self._root, filenames.CHECKPOINT))
        for step in steps:
            if step.action in (Action.RESTORE, Action.RESET):
                files.read_small(step.path)

    def _remove_queues(self, folders: list[str]) -> None:
        for folder in folders:
            empty_folder(self._disk, folder)
            topic = files.parent(folder)
            if self._disk.remove_folder(folder):
                self._disk.sync_folder(topic)
            if self._disk.remove_folder(topic):
                self._disk.sync_folder(files.parent(topic))

    def _set_store_times_back(self) -> None:
        """Set store times that are ahead of the clock back, and rebuild the key index, which contains them."""
        with self._writer.section() as section:
            # Remove bytes after the log's end: after the store times were lowered, they could look newer than the log.
            section.settle()
        folders = commit_log_folders(self._root, self._plan.commit_log_path)
        with self._writer.lock.hold():
            watermark = read_watermark(self._root)
            has_abort = files.file_size(files.join(self._root, filenames.ABORT)) >= 0
            if watermark is None or not watermark.is_settled or has_abort:
                raise StoreChangedError(
                    f"cannot set the store times of {self._root} back: another program wrote to the store meanwhile; "
                    "expected only this repair. Plan the repair again."
                )
            deleted, log = DeletedQueues(self._root, watermark.end), TolerantCommitLog(folders)
            try:
                self._writer.begin_rebuild(Rebuild(frozenset(), True))
                empty_folder(self._disk, files.join(self._root, filenames.INDEX))
                begun = replace(nothing_written(), is_open=True, dirty=None, is_syncing=True)
                write_watermark(self._disk, self._root, begun)
                write_times(
                    self._root,
                    self._disk,
                    log,
                    levels_of(self._root),
                    watermark.end,
                    wall_clock_ms(),
                    self._writer.lock.heartbeat,
                )
            finally:
                log.close()
            remove_note(self._disk, self._root)
        with self._writer.section() as section:
            section.settle()
        with self._writer.lock.hold():
            self._remove_queues(deleted.recreated_folders())

    def _restore(self, path: str) -> None:
        """Replace the config file at `path`, which cannot be read, by its copy.

        The copy of a file is its `.bak`, and the copy of a `.bak` is the file.
        """
        main = path.removesuffix(BACKUP_SUFFIX)
        source = main if path != main else main + BACKUP_SUFFIX
        data = files.read_small(source) or b""
        decode_config(main.rpartition("/")[2], data)  # raises an error if the copy is not valid any more
        keep_file(self._disk, self._root, path, wall_clock_ms())
        if path == self._topics_path:
            queues = TolerantTopics(self._root).queues
            data = with_topics(data, {key: one.layout is BATCH_UNIT for key, one in queues.items()}, wall_clock_ms())
        self._disk.replace(path, data)

    def _add_topics(self, queues: Iterable[QueueKey | None]) -> None:
        """Add the topics of `queues` to topics.json if it exists and lacks them. None in `queues` is ignored."""
        data = files.read_small(self._topics_path)
        if not data:
            return
        newer = with_topics(data, {key: False for key in queues if key is not None}, wall_clock_ms())
        if newer != data:
            keep_file(self._disk, self._root, self._topics_path, wall_clock_ms())
            self._disk.replace(self._topics_path, newer)

    def _clamp_offsets(self, paths: list[str]) -> None:
        """Set offsets in the config files at `paths` back to the ends of their queues if they are beyond those ends."""
        ends = queue_ends(self._root) if paths else {}
        for path in paths:
            data, changes = set_back(path.rpartition("/")[2], files.read_small(path) or b"", ends)
            if changes:
                keep_file(self._disk, self._root, path, wall_clock_ms())
                self._disk.replace(path, data)
