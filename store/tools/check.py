"""`check`: scan every file of a store and report damage. Nothing on disk is changed.

1. List the files, and find the end of the commit log as a reader does.
2. Scan the commit log block by block. Check the records, and compare them with consume-queue entries and index entries.
3. Judge the entries that have no record, and the records that have no entry.
4. Check config files, timer files and the files of rmq-spark.

If the last writer crashed, recovery may truncate the log. If the watermark contains the position at which it will do
so, the check treats that position as the log's end, and later bytes are not reported as damage.

If a writer is running, the check determines the log's end once, before the scan. Records below that end do not change.
But the writer may still add their entries, and may replace small files. So a problem with an entry or a small file is
reported only if the check finds it again when it looks a second time.
If a writer opens a cleanly shut down store during the check, and the check found anything, all of it is repeated.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import PurePath

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, RmqError, StoreChangedError, StoreError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.own_files import StoreSettings
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.key_search import last_indexed_place
from rmq_spark.store.log.log_end import LogEnd
from rmq_spark.store.log.queue_registry import (
    MAX_UNIT,
    counted_queues,
    find_lost_queues,
    newest_unit,
    read_registry,
    registry_path,
)
from rmq_spark.store.log.rebuild import read_rebuild
from rmq_spark.store.log.record_chain import ShutdownState, StoreState, whole_end
from rmq_spark.store.log.store_state import (
    commit_log_folders,
    durable_end,
    logged_end,
    read_settings,
    read_store_state,
    vouched_end,
)
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import TIMER_TOPIC
from rmq_spark.store.tools.check_config import check_configs
from rmq_spark.store.tools.check_context import CheckContext
from rmq_spark.store.tools.check_index import IndexJoin, IndexScan, check_index
from rmq_spark.store.tools.check_log import fault_findings, odd_file_findings, record_finding
from rmq_spark.store.tools.check_records import RecordCheck
from rmq_spark.store.tools.check_report import CheckReport
from rmq_spark.store.tools.check_side_files import check_side_files, check_small_files
from rmq_spark.store.tools.check_timer import check_timer
from rmq_spark.store.tools.extended_entries import ExtendedEntries
from rmq_spark.store.tools.finding import Action, Area, Finding, Findings, Severity, error_finding
from rmq_spark.store.tools.join_entries import EntryJoin, unreadable_queues
from rmq_spark.store.tools.judge_entries import (
    entry_findings,
    forbid_renumbering,
    odd_due_times,
    odd_lengths,
    recheck,
    unreadable_queue,
)
from rmq_spark.store.tools.log_walk import LogBlock, LogFault, LogWalk, TolerantCommitLog, TolerantTopics, written_bytes

Progress = Callable[[int, int], None]
_TRIES = 4
_CHECKS = 3  # maximum number of checks if the store is written to meanwhile; the last one treats the store as live
_WAIT_S = 0.05  # doubled at each try; a broker replaces a small file within milliseconds
_ENTRY_BYTES = 20
_OF_BROKERS = {filenames.SUBSCRIPTION_GROUP_JSON, "consumerFilter.json"}
# The next step for a queue whose messages have all expired.
_RESTORE_QUEUE = (
    "Restore the files from a copy: they record the queue's next offset. To begin the queue at queue offset 0 again, "
    "below the offsets of its groups, remove"
)


def check(
    path: str | PurePath,
    *,
    commit_log_path: str | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CheckReport:
    """Read every file of the store at `path` and report what is damaged and which messages are lost.

    The check reads all records, verifies their CRCs, and compares them with the entries of all consume queues and of
    the key index. Then it reads the config files, the checkpoint, the timer's files and the files of rmq-spark. It
    creates, changes and locks nothing on disk, so a broker or a writer may run at the same time. The memory that it
    needs depends on the amount of damage, not on the size of the store.

    `progress(done, total)` is called repeatedly. Both numbers are bytes of the commit log: those read so far, and all.

    Raises StorePathError if `path` is not a store. Raises StoreError if the operating system refuses to read the commit
    log, a queue or the index.
    """
    root = files.store_folder(path)
    folders, state = commit_log_folders(root, commit_log_path), read_store_state(root)
    for checks_left in range(_CHECKS - 1, -1, -1):
        report = _Check(root, folders, state, progress or (lambda done, total: None), sleep).run()
        if not report.findings or state.closing is ShutdownState.LIVE or (now := read_store_state(root)) == state:
            break
        # A writer ran during the check, and the findings may be its unfinished writes. So check again, and treat the
        # store as live. A closed store is treated as live, too: rmq-spark closes it after each commit. The last check
        # treats every state as live, so that writers that start and die repeatedly do not keep the check from ending.
        is_live = now.closing is ShutdownState.CLOSED or checks_left == 1
        state = replace(now, closing=ShutdownState.LIVE) if is_live else now
    return report


class _Check:
    """One scan of a store."""

    def __init__(
        self, root: str, folders: tuple[str, ...], state: StoreState, progress: Progress, sleep: Callable[[float], None]
    ) -> None:
        self._root, self._state, self._progress, self._sleep = root, state, progress, sleep
        self._is_live = state.closing is ShutdownState.LIVE
        self._findings = Findings()
        self._log = TolerantCommitLog(folders)
        # If a repair has not finished, its caller accepted the loss, and the next writer completes the repair. So
        # recovery may truncate at any position, which 0 means.
        self._durable_end = 0 if read_rebuild(root) is not None else durable_end(root, self._log)
        # Read both before the queues are listed: a queue that a live writer registers later would seem to be lost.
        self._vouched_end, self._registered = vouched_end(root, self._log), read_registry(root)
        self._topics = TolerantTopics(root)
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self._log_end = LogEnd(
            self._log, lambda: self._state, self._checkpoint, self._topics.may_exist, lambda: last_indexed_place(root)
        )
        self._end: int | None = None  # physical offset of the log's end; None if a reader cannot determine it
        self._is_checkpoint_damaged = False
        self._queue_findings: list[Finding] = []

    def run(self) -> CheckReport:
        """Run all checks, close the files, and return the report."""
        try:
            return self._run()
        finally:
            self._log.close()
            for queue in self._queues.values():
                queue.run.close()

    def _run(self) -> CheckReport:
        unreadable = self._list_files()
        self._find_end()
        begin = self._log.segments.begin
        index = check_index(self._root, is_live=self._is_live)
        extension = ExtendedEntries(self._root)
        entries, keys = EntryJoin(self._queues, unreadable, extension), IndexJoin(index)
        walk = LogWalk(self._log, self._levels())
        faults = list(self._scan(walk, begin, entries, keys))
        entries.close()
        if self._end is None and not walk.records:
            walk.physical_offset = self._log.segments.begin  # for readers, too, a log without records ends there
        end = walk.physical_offset if self._end is None else self._end
        context = CheckContext(
            log=self._log,
            queues=self._queues,
            unreadable=unreadable,
            joined=entries.joined,
            faults=[fault for fault in faults if fault.begin < fault.end],
            shutdown=self._state.closing,
            may_exist=self._may_exist,
            folder_of=lambda key: files.join(self._root, filenames.CONSUME_QUEUE, key.topic, str(key.queue_id)),
            begin=self._log.segments.begin,
            end=end,
            newest_ms=self._log_end.newest_ms,
            dispatched_end=self._dispatched_end(),
            durable_end=self._durable_end,
            is_ours_alone=self._is_ours() and not _has_seen_a_broker(self._root),
        )
        self._findings.extend(fault_findings(self._log, faults))
        if self._is_live:
            recheck(entries.joined, self._find_queue, self._log, self._levels(), self._sleep)
        found = list(entry_findings(context))
        self._report_refusals(found, unreadable)
        found += self._lost_queues(entries, unreadable)
        due_times = odd_due_times(entries.odd_delays, entries.joined, self._queues)
        of_queues = [*self._queue_findings, *found, *due_times, *extension.odd_files()]
        may_restart = entries.has_records if begin else lambda key: True
        self._findings.extend(forbid_renumbering(of_queues, may_restart))
        self._report_index(index, keys, begin, end)
        self._check_other_files(entries, begin, end)
        self._report_stale_bytes(end)
        entry_count = entries.joined.matched.count + context.orphan_count
        file_count = self._count_files(self._root, {one.path for one in self._findings.all()})
        return CheckReport(
            path=self._root,
            state=self._state.closing.name.lower(),
            findings=self._findings.all(),
            files=file_count,
            records=walk.records,
            units=entry_count,
            index_entries=index.entries,
            bytes=end - begin + entry_count * _ENTRY_BYTES + index.bytes,
            log_begin=begin,
            log_end=end,
        )

    def _list_files(self) -> set[QueueKey]:
        """List the files of the commit log and of all queues. Returns the queues whose files cannot be read.

        Adds findings about files that do not belong there or that have the wrong length.
        """
        self._findings.extend(odd_file_findings(self._log.odd))
        try:
            self._queues = dict(self._topics.queues)
        except StorePathError as error:
            if is_unreadable(error):
                raise  # without the queues, the commit log cannot be judged
            self._findings.add(
                Finding(
                    severity=Severity.DAMAGE,
                    area=Area.CONSUME_QUEUE,
                    what=str(error),
                    path=self._root,
                    next_step="queue.type in topics.json decides which of them is the queue's.",
                )
            )
        unreadable = dict(unreadable_queues(self._queues))
        self._queue_findings = [unreadable_queue(self._queues[key], fault) for key, fault in unreadable.items()]
        self._queue_findings += odd_lengths(self._queues, unreadable)
        return set(unreadable)

    def _find_end(self) -> None:
        """Set `_end` to the log's end as a reader finds it.

        If a reader cannot find the end, adds a finding and leaves `_end` None. The scan then stops at the last record.
        """
        for attempt in range(_TRIES):
            try:
                self._log_end.refresh(self._queues, self._queues, whole=True)
                self._end = min(self._log_end.end, self._recovered_end())
                return
            except StoreChangedError as error:
                if attempt == _TRIES - 1:
                    self._findings.add(
                        Finding(severity=Severity.DAMAGE, area=Area.COMMIT_LOG, what=str(error), path=self._root)
                    )
                    return
                self._sleep(_WAIT_S * 2**attempt)
                self._log.refresh()
                for queue in self._queues.values():
                    queue.run.refresh()
            except DamageError as error:
                if error.path == files.join(self._root, filenames.CHECKPOINT):
                    # Try again without the checkpoint, because the log may be sound. `check_small_files` reports the
                    # checkpoint.
                    self._is_checkpoint_damaged = True
                    continue
                self._findings.add(replace(error_finding(error, Area.COMMIT_LOG), action=Action.LOST))
                return

    def _recovered_end(self) -> int:
        """Return the physical offset at which the log will end after the next writer has recovered the store.

        If the last writer crashed and the watermark contains a valid position, the next writer truncates the log there.
        Otherwise, the log ends where readers find its end.
        """
        end = self._log_end.end
        if self._state.closing is not ShutdownState.CRASHED or read_rebuild(self._root) is not None:
            return end
        if self._durable_end is not None:
            return whole_end(self._log, self._durable_end)
        logged = logged_end(self._root, self._log)
        return end if logged is None or self._has_entry_from(logged) else logged

    def _has_entry_from(self, physical_offset: int) -> bool:
        """Return True if a queue has an entry for a record at or above `physical_offset`, or if it cannot be read."""
        for queue in self._queues.values():
            fault = queue.run.fault()
            if is_unreadable(fault) if fault is not None else queue.last_place() >= physical_offset:
                return True
        return False

    def _scan(self, walk: LogWalk, begin: int, entries: EntryJoin, keys: IndexJoin) -> Iterator[LogFault]:
        end = self._end if self._end is not None else self._log.segments.end
        records = RecordCheck()
        for step in walk.run(begin, self._end):
            if isinstance(step, LogFault):
                yield step
                continue
            entries.add(step.columns)
            keys.add(step.columns, step.begin, step.end)
            for fault in records.faults(step):
                self._findings.extend(record_finding(self._log, fault))
            done = walk.physical_offset - begin
            self._progress(done, max(end - begin, done))
        self._progress(end - begin, end - begin)

    def _dispatched_end(self) -> int:
        """Return the physical offset below which a missing entry stays missing.

        No writer adds entries for records below it, except in a recovery of the whole log.
        """
        if self._vouched_end is not None:
            return self._vouched_end
        if self._is_live:
            return self._log_end.last_record[0]  # a broker appends entries in the order of the log
        return self._log_end.first_unitless()

    def _may_exist(self, topic: str) -> bool:
        """Return False if the topic was deleted, else True.

        A topic that is missing in topics.json was not deleted if rmq-spark has registered queues of it: topics.json may
        be older than these queues.
        """
        counted = counted_queues(self._registered, self._topics.found)
        return self._topics.may_exist(topic) or any(key.topic == topic for key in counted)

    def _find_queue(self, key: QueueKey) -> ConsumeQueue | None:
        """Return a queue, or None if it does not exist. Also finds a queue that was created after the check began."""
        return self._queues.get(key) or TopicTable(self._root).find(key)

    def _lost_queues(self, entries: EntryJoin, unreadable: set[QueueKey]) -> Iterator[Finding]:
        """Yield findings about registered queues whose files are missing and whose records have all expired.

        If a record of a lost queue is in the log, the join of records and entries reports the loss instead. Queues in
        `unreadable` are skipped, because they have a finding already.
        """
        lost = find_lost_queues(
            self._root,
            self._log,
            self._registered,
            lambda key: (
                MAX_UNIT if key in unreadable else newest_unit(self._queues[key]) if key in self._queues else -1
            ),
            self._topics,
        )
        for key, error in lost.items():
            if not entries.has_records(key):
                yield replace(
                    error_finding(error, Area.CONSUME_QUEUE),
                    topic=key.topic,
                    queue_id=key.queue_id,
                    next_step=f"{_RESTORE_QUEUE} {registry_path(self._root)}.",
                )

    def _report_refusals(self, found: list[Finding], unreadable: set[QueueKey]) -> None:
        """Add a finding for each queue whose entries a reader refuses, unless the queue has a finding already.

        `found` are the findings about queues so far.
        """
        if self._end is None or self._is_live:
            return
        reported = {(one.topic, one.queue_id) for one in found if one.severity != Severity.NOTE}
        for key, fault in self._log_end.faults.items():
            is_new = key not in unreadable and (key.topic, key.queue_id) not in reported
            if is_new and isinstance(fault, DamageError):
                finding = error_finding(fault, Area.CONSUME_QUEUE)
                self._findings.add(replace(finding, topic=key.topic, queue_id=key.queue_id))

    def _report_index(self, index: IndexScan, keys: IndexJoin, begin: int, end: int) -> None:
        if self._is_live and keys.missing:
            self._sleep(_WAIT_S)
            first = keys.first_missing
            index = check_index(self._root, is_live=True)
            keys = IndexJoin(index)
            for step in LogWalk(self._log, self._levels()).run(first, end):
                if isinstance(step, LogBlock):
                    keys.add(step.columns, step.begin, step.end)
        self._findings.extend(index.findings)
        is_late = self._is_live and keys.first_missing >= last_indexed_place(self._root)
        self._findings.extend(
            keys.result(
                self._root,
                has_files=bool(index.files),
                is_unknown=index.is_partly_unknown,
                severity=Severity.NOTE if is_late else Severity.REPAIRABLE,
                is_expected=self._is_ours() or files.is_folder(files.join(self._root, filenames.INDEX)),
            )
        )

    def _check_other_files(self, entries: EntryJoin, begin: int, end: int) -> None:
        state, bounds = self._state.closing, entries.bounds_of
        batches = {key for key, queue in self._queues.items() if queue.layout is BATCH_UNIT}
        newest_ms = self._log_end.newest_ms if self._end is not None else None

        def log_extent() -> tuple[int, int]:
            if not self._is_live:
                return begin, end
            self._log.refresh()  # a live writer appends to the log and deletes segments
            return self._log.segments.begin, self._log.segments.end

        def timer_queue_end() -> int | None:
            key = QueueKey(TIMER_TOPIC, 0)
            if self._is_live and key in self._queues:
                self._queues[key].run.refresh()
            return None if (found := bounds(key)) is None else found[1]

        self._add_confirmed(lambda: check_configs(self._root, set(self._queues), batches, bounds))
        self._add_confirmed(
            lambda: check_timer(self._root, self._log, log_extent, timer_queue_end, is_live=self._is_live)
        )
        self._add_confirmed(lambda: check_small_files(self._root, state, newest_ms))
        self._add_confirmed(lambda: check_side_files(self._root, state))

    def _add_confirmed(self, checks: Callable[[], Iterable[Finding]]) -> None:
        """Run some checks and add their findings.

        If a writer is running, the checks are repeated, and only findings that each repetition returns are added.
        """
        found = self._run_checks(checks)
        for attempt in range(_TRIES - 1):
            if not self._is_live or all(one.severity == Severity.NOTE for one in found):
                break
            self._sleep(_WAIT_S * 2**attempt)
            again = {one.key for one in self._run_checks(checks)}
            found = [one for one in found if one.key in again]
        self._findings.extend(found)

    def _run_checks(self, checks: Callable[[], Iterable[Finding]]) -> list[Finding]:
        """Run some checks and return their findings. An error becomes a finding.

        If a file changes while it is read, the checks run again.
        """
        for attempt in range(_TRIES):
            try:
                return list(checks())
            except StoreChangedError as error:
                found = error_finding(error, Area.STORE, self._root)  # returned only if the last try fails, too
                self._sleep(_WAIT_S * 2**attempt)
            except StoreError as error:
                return [error_finding(error, Area.STORE, self._root)]
        return [found]

    def _report_stale_bytes(self, end: int) -> None:
        for segment in self._log.segments.segments:
            if segment.end > end and (count := written_bytes(segment, end)):
                why = "they were appended meanwhile, or are never read" if self._is_live else "they are never read"
                self._findings.add(
                    Finding(
                        severity=Severity.NOTE,
                        area=Area.COMMIT_LOG,
                        what=f"{count} bytes after the log's end that are not all zeros: {why}",
                        path=segment.path,
                        position=max(end - segment.begin, 0),
                    )
                )

    def _count_files(self, folder: str, reported: set[str]) -> int:
        """Return the number of files in a folder and its subfolders.

        Adds a finding for each folder that cannot be listed, unless `reported` contains its path.
        """
        try:
            listed = files.list_folder(folder)
        except StoreError as error:
            if folder not in reported:
                self._findings.add(error_finding(error, Area.STORE, folder))
            return 0
        return sum(
            self._count_files(files.join(folder, name), reported) if is_folder else 1 for name, is_folder in listed
        )

    def _settings(self) -> StoreSettings | None:
        try:
            settings = read_settings(self._root)
        except RmqError:
            return None  # `check_side_files` reports the error
        return settings if isinstance(settings, StoreSettings) else None

    def _levels(self) -> DelayLevels:
        settings = self._settings()
        return DEFAULT_DELAY_LEVELS if settings is None else settings.levels

    def _is_ours(self) -> bool:
        """Return whether rmq-spark created the store."""
        settings = self._settings()
        return settings is not None and bool(settings.file_sizes)

    def _checkpoint(self) -> Checkpoint:
        if self._is_checkpoint_damaged:
            return Checkpoint()
        path = files.join(self._root, filenames.CHECKPOINT)
        try:
            return decode_checkpoint(files.read_small(path) or b"", path)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            self._findings.add(error_finding(error, Area.CHECKPOINT, path))
            self._is_checkpoint_damaged = True
            return Checkpoint()


def _has_seen_a_broker(root: str) -> bool:
    """Return whether the store has a config file that only a broker writes."""
    names = {name for name, _ in files.list_folder(files.join(root, filenames.CONFIG))}
    return bool(names & _OF_BROKERS)
