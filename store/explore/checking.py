"""`check`: every file of a store looked at, and nothing changed.

    files as such -> where the log ends (as a reader finds it) -> the log, block by block: records by themselves,
    their units, their keys -> units and keys that nothing asked for -> config, timer, our own files

After a crash the log ends where the next writer ends it, if our note says so: what that takes back is no damage.
Beside a live writer the log's end is fixed first, so all before it stands still but for units and keys that are about
to come; what does not agree there, and small files that are being replaced, is looked at again before it is told. Where
a store that was closed when the check began was written to meanwhile, and something is wrong, all is done again.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import PurePath

from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, RmqError, StoreChangedError, StoreError, StorePathError
from rmq_spark.store.explore.check_report import CheckReport, Looked
from rmq_spark.store.explore.config_check import look_at_configs
from rmq_spark.store.explore.ext_units import ExtUnits
from rmq_spark.store.explore.finding import DAMAGE, NOTE, REPAIRABLE, Finding, Findings
from rmq_spark.store.explore.index_check import IndexLook, look_at_index
from rmq_spark.store.explore.index_join import IndexJoin
from rmq_spark.store.explore.late_units import look_again, odd_times
from rmq_spark.store.explore.log_findings import of_error, of_faults, of_odd_files, of_record
from rmq_spark.store.explore.log_walk import LogBlock, LogFault, LogWalk, written_bytes
from rmq_spark.store.explore.queue_files import keep_numbers, odd_lengths, of_unread
from rmq_spark.store.explore.record_check import RecordCheck
from rmq_spark.store.explore.seen_log import Seen
from rmq_spark.store.explore.side_check import look_at_side_files, look_at_small_files
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.explore.sound_topics import SoundTopics
from rmq_spark.store.explore.timer_findings import look_at_timer
from rmq_spark.store.explore.unit_join import UnitJoin, unreadable_queues
from rmq_spark.store.explore.unit_verdicts import verdicts
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.store_settings import StoreSettings
from rmq_spark.store.log.chain import Closing, Left
from rmq_spark.store.log.index_reach import last_indexed_place
from rmq_spark.store.log.left_behind import durable_end, how_left, logged_end, vouched_end
from rmq_spark.store.log.lost_queues import MAX_UNIT, counted_queues, find_lost_queues, newest_unit
from rmq_spark.store.log.queue_registry import read_registry, registry_path
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.rebuilding import read_rebuild
from rmq_spark.store.log.settings_file import read_settings
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.tail import LogTail
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.log.torn_tail import whole_end
from rmq_spark.store.units import QueueKey

Progress = Callable[[int, int], None]
_TRIES = 4
_LOOKS = 3  # at all of a store that writers come to meanwhile; the last one as beside one at work
_OF_BROKERS = {filenames.SUBSCRIPTION_GROUP_JSON, "consumerFilter.json"}
_WAIT_S = 0.05  # doubled: a broker overwrites a small file within milliseconds
# Only where all messages of the queue have expired.
_RESTORE_QUEUE = (
    "Restore them from a copy: they show which queue offset comes next. To begin the queue at queue offset 0 again, "
    "below the offsets of its groups, remove"
)


def check(
    path: str | PurePath,
    *,
    commit_log_path: str | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CheckReport:
    """Look at every file of the store at `path` and return what is damaged, and what would be lost.

    All records are read, with their CRCs, and held against the units of all queues and the entries of the key index;
    then config files, checkpoint, timer and our own files. Nothing on disk is changed, made or locked, and it works
    beside a live broker or writer. Memory does not grow with the store, but for what is wrong with it. `progress` is
    called with the bytes of the log that were read and that there are. Raises StorePathError where there is no store,
    and StoreError where the kernel does not let the log, a queue or the index be read: nobody knows how the rest is.
    """
    root = files.absolute(path)
    folders, left = commit_log_folders(root, commit_log_path), how_left(root)
    for looks_left in range(_LOOKS - 1, -1, -1):
        report = _Check(root, folders, left, progress or (lambda done, total: None), sleep).run()
        if not report.findings or left.closing is Closing.LIVE or (now := how_left(root)) == left:
            break
        # A writer came meanwhile, and what was found may be what it was at: once more, as beside one. It may have
        # closed the store again, as ours do after each commit. Writers that come and die each time end in that, too.
        left = replace(now, closing=Closing.LIVE) if now.closing is Closing.CLOSED or looks_left == 1 else now
    return report


class _Check:
    """One check."""

    def __init__(
        self, root: str, folders: tuple[str, ...], left: Left, progress: Progress, sleep: Callable[[float], None]
    ) -> None:
        self._root, self._left, self._progress, self._sleep = root, left, progress, sleep
        self._findings, self._looked = Findings(), Looked()
        self._log = SoundLog(folders)
        # A repair that has begun was told what it costs: the next writer goes on with it.
        self._durable_end = 0 if read_rebuild(root) is not None else durable_end(root, self._log)
        # Before queues are listed: a live writer makes new ones.
        self._vouched_end, self._registered = vouched_end(root, self._log), read_registry(root)
        self._topics = SoundTopics(root)
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self._tail = LogTail(
            self._log, lambda: self._left, self._checkpoint, self._topics.may_exist, lambda: last_indexed_place(root)
        )
        self._end: int | None = None
        self._is_checkpoint_spoilt = False
        self._odd_queues: list[Finding] = []

    def run(self) -> CheckReport:
        """Do it all."""
        try:
            return self._run()
        finally:
            self._log.close()
            for queue in self._queues.values():
                queue.run.close()

    def _run(self) -> CheckReport:
        unread = self._look_at_files()
        self._find_end()
        begin = self._log.segments.begin
        index = look_at_index(self._root, is_live=self._is_live)
        ext = ExtUnits(self._root)
        units, keys = UnitJoin(self._queues, unread, ext, begin), IndexJoin(index)
        walk = LogWalk(self._log, self._levels())
        faults = list(self._walk(walk, begin, units, keys))
        units.close()
        self._find_end_again(walk)
        end = walk.place if self._end is None else self._end
        self._looked.records = walk.records
        seen = Seen(
            log=self._log,
            queues=self._queues,
            unread=unread,
            joined=units.joined,
            faults=[fault for fault in faults if fault.begin < fault.end],
            closing=self._left.closing,
            may_exist=self._may_exist,
            folder_of=self._folder_of,
            begin=self._log.segments.begin,
            end=end,
            newest_ms=self._tail.newest_ms,
            dispatched_end=self._dispatched_end(),
            durable_end=self._durable_end,
            is_ours_alone=self._is_ours() and not _has_seen_a_broker(self._root),
        )
        self._findings.extend(of_faults(self._log, faults))
        if self._is_live:
            look_again(units.joined, self._find_queue, self._log, self._levels(), self._sleep)
        told = list(verdicts(seen))
        self._tell_tail(told, unread)
        told += self._lost_queues(units, unread)
        of_queues = [*self._odd_queues, *told, *odd_times(units.odd_delays, units.joined, self._queues)]
        may_begin_anew = units.has_records if begin else lambda key: True
        self._findings.extend(keep_numbers([*of_queues, *ext.odd_files()], may_begin_anew))
        self._tell_index(index, keys, begin, end)
        self._looked.units = units.joined.ranges.count + seen.units
        bounds = units.bounds_of
        batches = {key for key, queue in self._queues.items() if queue.layout is BATCH_UNIT}
        self._again(lambda: look_at_configs(self._root, set(self._queues), batches, bounds))
        self._again(
            lambda: look_at_timer(
                self._root,
                self._log,
                lambda: self._log_extent(begin, end),
                lambda: self._timer_queue_end(units),
                is_live=self._is_live,
            )
        )
        newest_ms = self._tail.newest_ms if self._end is not None else None
        self._again(lambda: look_at_small_files(self._root, self._left.closing, newest_ms))
        self._again(lambda: look_at_side_files(self._root, self._left.closing))
        self._tell_stale(end)
        self._looked.bytes += end - begin + self._looked.units * 20 + index.bytes
        self._looked.files = self._count_files(self._root, {one.path for one in self._findings.all()})
        return self._report(begin, end)

    def _report(self, begin: int, end: int) -> CheckReport:
        looked = self._looked
        return CheckReport(
            self._root,
            self._left.closing.name.lower(),
            self._findings.all(),
            looked.files,
            looked.records,
            looked.units,
            looked.index_entries,
            looked.bytes,
            begin,
            end,
        )

    @property
    def _is_live(self) -> bool:
        return self._left.closing is Closing.LIVE

    def _may_exist(self, topic: str) -> bool:
        """Say whether a topic was not deleted: topics.json may be older than queues of ours."""
        counted = counted_queues(self._registered, self._topics.found)
        return self._topics.may_exist(topic) or any(key.topic == topic for key in counted)

    def _dispatched_end(self) -> int:
        """Return the physical offset before which no writer makes units any more, unless it looks at all of the log."""
        if self._vouched_end is not None:
            return self._vouched_end
        if self._is_live:
            return self._tail.last_record[0]  # a broker makes units in the order of the log
        return self._tail.first_unitless()

    def _lost_queues(self, units: UnitJoin, unread: set[QueueKey]) -> Iterator[Finding]:
        """Yield the queues whose files are gone, and of which the log has no record that would show it.

        Of those that are `unread` it was told.
        """
        lost = find_lost_queues(
            self._root,
            self._log,
            self._registered,
            lambda key: MAX_UNIT if key in unread else newest_unit(self._queues[key]) if key in self._queues else -1,
            self._topics,
        )
        for key, error in lost.items():
            if not units.has_records(key):
                found = replace(of_error(error, filenames.CONSUME_QUEUE), topic=key.topic, queue_id=key.queue_id)
                yield replace(found, next_step=f"{_RESTORE_QUEUE} {registry_path(self._root)}.")

    def _find_queue(self, key: QueueKey) -> ConsumeQueue | None:
        """Return a queue that has a folder by now."""
        return self._queues.get(key) or TopicTable(self._root).find(key)

    def _log_extent(self, begin: int, end: int) -> tuple[int, int]:
        """Return where the log begins and ends: beside a live writer as of now, since it appends and deletes."""
        if not self._is_live:
            return begin, end
        self._log.look()
        return self._log.segments.begin, self._log.segments.end

    def _timer_queue_end(self, units: UnitJoin) -> int | None:
        """Return the next offset of the timer's queue as of now, None without one."""
        key = QueueKey(filenames.TIMER_TOPIC, 0)
        if self._is_live and key in self._queues:
            self._queues[key].run.look()
        bounds = units.bounds_of(key)
        return None if bounds is None else bounds[1]

    def _levels(self) -> DelayLevels:
        try:
            held = read_settings(self._root)
        except RmqError:
            held = None  # told with our own files
        return held.levels if isinstance(held, StoreSettings) else DEFAULT_DELAY_LEVELS

    def _is_ours(self) -> bool:
        """Say whether a writer of ours made the store."""
        try:
            held = read_settings(self._root)
        except RmqError:
            return False
        return isinstance(held, StoreSettings) and bool(held.file_sizes)

    def _checkpoint(self) -> Checkpoint:
        if self._is_checkpoint_spoilt:
            return Checkpoint()
        path = files.join(self._root, filenames.CHECKPOINT)
        try:
            return decode_checkpoint(files.read_small(path) or b"", path)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            self._findings.add(of_error(error, filenames.CHECKPOINT, path))
            self._is_checkpoint_spoilt = True
            return Checkpoint()

    def _folder_of(self, key: QueueKey) -> str:
        return files.join(self._root, filenames.CONSUME_QUEUE, key.topic, str(key.queue_id))

    def _look_at_files(self) -> set[QueueKey]:
        """List all files; return the queues whose files cannot be read as such."""
        self._findings.extend(of_odd_files(self._log.odd))
        try:
            self._queues = dict(self._topics.queues)
        except StorePathError as error:
            if is_unreadable(error):
                raise  # without its queues nothing can be said of the log
            step = "Which one is the queue's topics.json says (queue.type)."
            self._findings.add(Finding(DAMAGE, filenames.CONSUME_QUEUE, str(error), self._root, next_step=step))
        unread = dict(unreadable_queues(self._queues))
        self._odd_queues = [of_unread(self._queues[key], fault) for key, fault in unread.items()]
        self._odd_queues += odd_lengths(self._queues, unread)
        return set(unread)

    def _find_end(self) -> None:
        """Find the log's end as a reader does; without one the walk ends where no more records come."""
        for attempt in range(_TRIES):
            try:
                self._tail.look(self._queues, self._queues, whole=True)
                self._end = min(self._tail.end, self._recovered_end())
                return
            except StoreChangedError as error:
                if attempt == _TRIES - 1:
                    self._findings.add(Finding(DAMAGE, filenames.COMMIT_LOG, str(error), self._root))
                    return
                self._sleep(_WAIT_S * 2**attempt)
                self._log.look()
                for queue in self._queues.values():
                    queue.run.look()
            except DamageError as error:
                if error.path == files.join(self._root, filenames.CHECKPOINT):
                    self._is_checkpoint_spoilt = True  # told with the small files; the log is another matter
                    continue
                self._findings.add(replace(of_error(error, filenames.COMMIT_LOG), action="lost"))
                return

    def _recovered_end(self) -> int:
        """Return the physical offset behind which the next writer takes back what a dead one left, by our note."""
        end = self._tail.end
        if self._left.closing is not Closing.CRASHED or read_rebuild(self._root) is not None:
            return end
        if self._durable_end is not None:
            return whole_end(self._log, self._durable_end)
        logged = logged_end(self._root, self._log)
        return end if logged is None or self._has_unit_from(logged) else logged

    def _has_unit_from(self, place: int) -> bool:
        """Say whether some queue has a unit for a record from a physical offset on."""
        for queue in self._queues.values():
            fault = queue.run.fault()
            if is_unreadable(fault) if fault is not None else queue.last_place() >= place:
                return True  # what cannot be read may have one
        return False

    def _find_end_again(self, walk: LogWalk) -> None:
        """After a walk with an open end that came to a place: readers end there, whatever made them refuse."""
        if self._end is None and not walk.records:
            walk.place = self._log.segments.begin

    def _walk(self, walk: LogWalk, begin: int, units: UnitJoin, keys: IndexJoin) -> Iterator[LogFault]:
        end = self._end if self._end is not None else self._log.segments.end
        records = RecordCheck()
        for step in walk.run(begin, self._end):
            if isinstance(step, LogFault):
                yield step
                continue
            units.add(step.columns)
            keys.add(step.columns, step.begin, step.end)
            for fault in records.faults(step):
                self._findings.extend(of_record(self._log, fault))
            self._progress(walk.place - begin, max(end - begin, walk.place - begin))
        self._progress(end - begin, end - begin)

    def _tell_tail(self, told: list[Finding], unread: set[QueueKey]) -> None:
        """Tell what a reader refuses, of queues of which nothing was told yet."""
        known = {(one.topic, one.queue_id) for one in told if one.severity != NOTE}
        for key, fault in self._tail.faults.items() if self._end is not None else ():
            if (
                key not in unread
                and (key.topic, key.queue_id) not in known
                and isinstance(fault, DamageError)
                and not self._is_live
            ):
                found = of_error(fault, filenames.CONSUME_QUEUE)
                self._findings.add(replace(found, topic=key.topic, queue_id=key.queue_id))

    def _tell_index(self, index: IndexLook, keys: IndexJoin, begin: int, end: int) -> None:
        self._looked.index_entries = index.entries
        if self._is_live and keys.missing:
            self._sleep(_WAIT_S)
            first = keys.first_missing
            index = look_at_index(self._root, is_live=True)
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
                severity=NOTE if is_late else REPAIRABLE,
                is_expected=self._is_ours() or files.is_folder(files.join(self._root, filenames.INDEX)),
            )
        )

    def _tell_stale(self, end: int) -> None:
        for segment in self._log.segments.segments:
            if segment.end > end and (count := written_bytes(segment, end)):
                whose = "they came meanwhile, or nobody reads them" if self._is_live else "nobody reads them"
                what = f"{count} bytes behind the log's end that are not all zeros: {whose}"
                self._findings.add(Finding(NOTE, filenames.COMMIT_LOG, what, segment.path, max(end - segment.begin, 0)))

    def _again(self, look: Callable[[], "Iterator[Finding] | list[Finding]"]) -> None:
        """Keep what `look` finds; beside a live writer only what it finds again."""
        found = self._tried(look)
        for attempt in range(_TRIES - 1):
            if not self._is_live or all(one.severity == NOTE for one in found):
                break
            self._sleep(_WAIT_S * 2**attempt)
            again = {one.key for one in self._tried(look)}
            found = [one for one in found if one.key in again]
        self._findings.extend(found)

    def _tried(self, look: Callable[[], "Iterator[Finding] | list[Finding]"]) -> list[Finding]:
        for attempt in range(_TRIES):
            try:
                return list(look())
            except StoreChangedError as error:
                found = of_error(error, "store", self._root)  # if it goes on like that, it is no writer at work
                self._sleep(_WAIT_S * 2**attempt)
            except StoreError as error:
                return [of_error(error, "store", self._root)]
        return [found]

    def _count_files(self, folder: str, told: set[str]) -> int:
        """Return how many files a folder holds; tell of those within it that cannot be listed, if it is not `told`."""
        try:
            listed = files.list_folder(folder)
        except StoreError as error:
            if folder not in told:
                self._findings.add(of_error(error, "store", folder))
            return 0
        return sum(self._count_files(files.join(folder, name), told) if is_folder else 1 for name, is_folder in listed)


def _has_seen_a_broker(root: str) -> bool:
    """Say whether the store has a config file that only a broker writes."""
    names = {name for name, _ in files.list_folder(files.join(root, filenames.CONFIG))}
    return bool(names & _OF_BROKERS)
