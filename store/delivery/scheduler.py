"""Delivery rounds, which deliver the scheduled messages that are due: those of the delay levels and of the timer.

No process has to stay alive for this. Instead every program that reads from a store, and may write to it, runs a
delivery round first. So a round must be cheap if nothing is due, and no round may wait for long:

1. If nothing was appended since the last round and nothing is due yet, the round ends after a few system calls.
2. Otherwise it asks every source of messages (`delay_source.py`), without a lock. If nothing is due, the round ends.
3. Otherwise it takes the delivery lock, `rmq/delivery/turn`. If another process holds this lock, the round ends.
4. It takes the store's lock, under which the commits of dead processes are rolled forward. It commits messages until
   no more are due.

All rounds together deliver each message once, because the ledger's metadata records how far messages were delivered and
is committed together with them. A crash before the commit's intent is written changes nothing. After a crash later than
that, the next holder of the store's lock rolls the commit forward, with its metadata. The number of a commit is the
last one in the ledger plus one, and each number is used once.

If a broker holds the store, the broker delivers the messages, and a round does nothing. If the files of one source are
damaged, only the messages of that source are not delivered.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rmq_spark.store.delivery.delay_levels import DelayQueues
from rmq_spark.store.delivery.delay_source import QUERY_ID, DelaySource, Due, Metadata, Outlook
from rmq_spark.store.delivery.timer import TimerStore
from rmq_spark.store.delivery.timer_state import PART, READ
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import random_bits, wall_clock_ms
from rmq_spark.store.disk.locks import BrokerLock, FileLock, seems_locked
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, LockTimeoutError, RmqError, StoreChangedError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.timer import floor_second
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.log.store_state import SETTINGS, check_settings, commit_log_folders, side_path, watermark_path
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import CommitKey
from rmq_spark.store.synchronized import Synchronized, synchronized
from rmq_spark.store.transaction.commit import CommitOptions, abort_staged, commit_staged
from rmq_spark.store.transaction.ledger import Ledger, folder_of
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.staging import StageWriter

_LOG = logging.getLogger("rmq_spark")
FOLDER = "delivery"  # in `rmq/`
_LOCK_NAME = "turn"
_APPLICATION = "rmq-spark ticker"
COMMIT_BYTES = 16 << 20  # bytes of log in one commit, or one longer message: limits the memory that a round needs
COMMIT_MESSAGES = 32_768
TICK_BYTES = 64 << 20  # bytes of log in one round: limits the time that the caller has to wait
_LOCK_TIMEOUT_MS = 500  # if another writer holds the store's lock longer without progress, a later round tries again
_RETRY_MS = 2_000  # between two attempts to get the store's lock, because each attempt makes the caller wait


@dataclass(frozen=True, slots=True)
class DeliveryRound:
    """The result of one delivery round: how many messages it `delivered`, and when to run the next round.

    `next_due_ms` is when the first waiting message is due, in ms since the epoch. If more messages are due than one
    round delivers, it is the time of this round, so run the next one at once. After a timeout of the store's lock it
    may be the time of the next attempt. It is None if no message waits, or if another program delivers. `problem` is
    the error because of which messages that may be due were not delivered, or None.
    """

    delivered: int = 0
    next_due_ms: int | None = None
    problem: RmqError | None = None


class DeliveryScheduler(Synchronized):
    """Delivers the messages of the store at `path` that are due. Call `close` at the end.

    Any number of threads and processes may use it; calls of the same object run one after the other.

    `settings` configures the store's lock and the folder of the log. If it is None, `commit_log_path` is the folder of
    the log. `clock_ms` returns the time in ms since the epoch that delivered messages get as their store time. `sleep`
    takes seconds. The constructor accesses no file.
    """

    def __init__(
        self,
        path: str,
        settings: WriterSettings | None = None,
        *,
        commit_log_path: str | None = None,
        allow_network_store: bool = False,
        disk: Disk | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.path = files.store_folder(path)
        self._settings = settings or WriterSettings(
            _APPLICATION, _LOCK_TIMEOUT_MS, allow_network_store, commit_log_path
        )
        self._disk, self._clock_ms, self._sleep = disk or Disk(), clock_ms, sleep
        self._ledger = Ledger(self.path, self._disk)
        self._lock = FileLock(side_path(self.path, FOLDER, _LOCK_NAME), only_writers=True)
        self._broker_lock = BrokerLock(files.join(self.path, filenames.LOCK))
        self._sources: Sequence[DelaySource] | None = None
        self._idle: tuple[object, Outlook] | None = None  # (fingerprint, outlook) of a round that found no work
        self._logged_problem = ""
        self._retry_at_ms = 0  # by the caller's clock: no attempt before this, after a timeout of the store's lock
        self._failures: dict[int, RmqError] = {}  # errors of this round, by the number of the source
        self._rotation = 0  # which source is asked first, so that a backlog in one source does not delay the others
        self.commit_bytes, self.commit_messages, self.tick_bytes = COMMIT_BYTES, COMMIT_MESSAGES, TICK_BYTES

    def __enter__(self) -> "DeliveryScheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @synchronized
    def close(self) -> None:
        """Close the files. A later call of this object opens again the files that it needs."""
        self._close_sources()

    def _close_sources(self) -> None:
        for source in self._sources or ():
            source.close()

    def _release_locks(self) -> None:
        self._lock.release()
        self._broker_lock.release()

    @synchronized
    def tick(self, now_ms: int) -> DeliveryRound:
        """Run a delivery round: deliver the messages that are due at `now_ms`, at most 64 MiB of log.

        `now_ms` is in ms since the epoch. If something is wrong with the store, no error is raised. Instead the problem
        is logged once and is in the result, and a later round tries again. If nothing is due, the round creates and
        changes nothing on disk, and takes neither the delivery lock nor the store's lock.
        """
        if 0 < self._retry_at_ms - now_ms <= _RETRY_MS:
            return DeliveryRound(0, self._retry_at_ms)
        try:
            self._failures.clear()
            fingerprint = self._fingerprint()
            if self._idle is not None and self._idle[0] == fingerprint:
                outlook = self._idle[1]
                if not outlook.has_work and (outlook.next_due_ms is None or now_ms < outlook.next_due_ms):
                    return DeliveryRound(0, outlook.next_due_ms)
            if self._broker_holds_store():
                return self._abandon()
            outlook = self._refresh_sources(now_ms)
            if not outlook.has_work:
                return self._finish(fingerprint, outlook)
            return self._deliver(now_ms)
        except RmqError as error:
            return self._abandon(error, now_ms)

    def tick_now(self) -> float | None:
        """Run a round at the clock's time, and return the time until the next round, in ms.

        None means that no round is needed until the store changes.
        """
        now_ms = self._clock_ms()
        next_due_ms = self.tick(now_ms).next_due_ms
        return None if next_due_ms is None else max(next_due_ms - now_ms, 0)

    @synchronized
    def hand_over(self) -> None:
        """Update the files that a broker reads, so that they record what was delivered so far. Deliver nothing.

        Call this before a broker opens the store, because the files are out of date if a process died in a round. Does
        nothing if no round has ever delivered anything. Raises LockTimeoutError if another process holds the store,
        DamageError or StorePathError if a file of a source cannot be read, and StoreChangedError if another program
        changed it meanwhile.
        """
        if self._last_commit()[0] < 0:
            return
        self._create_lock_file()
        try:
            if not self._lock.try_take():
                return  # the process that delivers now does this at its end
            with self._open_writer() as writer:
                self._failures.clear()
                self._prepare_sources(writer, self._clock_ms())
                for problem in self._failures.values():
                    raise problem
        finally:
            self._end_delivery()

    @synchronized
    def set_timer_back(self) -> None:
        """Set the timer back to now, if a wrong clock made it deliver messages up to a time in the future.

        Puts the waiting messages back into the timer's queue, in commits like those of a round, and then resets the
        timer's files. Messages that were delivered too early are not delivered again. After a crash the timer is either
        still ahead of the clock or set back. Raises LockTimeoutError if another program is delivering messages,
        StoreChangedError if another program used the timer meanwhile, and the errors of `hand_over`.
        """
        self._create_lock_file()
        try:
            if not self._lock.try_take():
                raise LockTimeoutError(
                    f"the timer of {self.path} was not set back: another program delivers messages; expected none. "
                    "Stop it (rmq serve, queries with a consumerGroup), and repair again."
                )
            with self._open_writer() as writer:
                self._requeue_timer(writer, self._clock_ms())
        finally:
            self._end_delivery()

    def _requeue_timer(self, writer: StoreWriter, now_ms: int) -> None:
        timer = next(source for source in self._all_sources() if isinstance(source, TimerStore))
        while True:
            with writer.section() as section:
                number, metadata = self._last_commit()
                timer.prepare(section, now_ms, metadata, takes_new=False)
            due = timer.take_waiting(now_ms, self.commit_bytes, self.commit_messages)
            if not due.records and not due.metadata:
                break
            self._commit(writer, number + 1, due, {**metadata, **due.metadata})
        # Now all waiting messages are in the queue. According to the timer's check, all others were delivered.
        with writer.section() as section:
            timer.clear(section)
        # Set back the metadata before the check. It has no effect while the check is ahead of it.
        while True:
            number, metadata = self._last_commit()
            if self._commit(writer, number + 1, Due(), {**metadata, READ: floor_second(now_ms), PART: -1}):
                break
        with writer.section() as section:
            timer.restart(section, now_ms, self._last_commit()[1])

    def _prepare_sources(self, writer: StoreWriter, now_ms: int) -> tuple[int, Metadata]:
        """Prepare all sources, so that they write the files that a broker reads. Return what `_last_commit` returns."""
        with writer.section() as section:
            number, metadata = self._last_commit()
            for at, source in self._sound_sources():
                with self._isolated(at):
                    source.prepare(section, now_ms, metadata)
        return number, metadata

    def _sound_sources(self) -> Iterator[tuple[int, DelaySource]]:
        """Yield (number, source) of each source, except those that have failed in this round."""
        for at, source in enumerate(self._all_sources()):
            if at not in self._failures:
                yield at, source

    @contextlib.contextmanager
    def _isolated(self, at: int) -> Iterator[None]:
        """Record an error of source number `at` instead of raising it, so that the other sources can deliver."""
        try:
            yield
        except (DamageError, StorePathError, StoreChangedError) as error:
            self._failures[at] = error

    def _finish(self, fingerprint: object, outlook: Outlook, delivered: int = 0) -> DeliveryRound:
        """Return the result of a round that did all it could: no source has work, except sources that failed."""
        problem = next(iter(self._failures.values()), None)
        if problem is not None:
            return replace(self._abandon(problem), delivered=delivered, next_due_ms=outlook.next_due_ms)
        self._logged_problem, self._idle = "", (fingerprint, outlook)
        return DeliveryRound(delivered, outlook.next_due_ms)

    def _abandon(self, problem: RmqError | None = None, now_ms: int = 0) -> DeliveryRound:
        """Return the result of a round that could not find out what is due or could not deliver it. Log the problem.

        `problem` is None if another program delivers.
        """
        self._idle = None
        if isinstance(problem, LockTimeoutError):
            self._retry_at_ms = now_ms + _RETRY_MS
        if problem is not None and str(problem) != self._logged_problem:
            self._logged_problem = str(problem)
            _LOG.warning("rmq: messages that are due in %s are not delivered now: %s", self.path, problem)
        return DeliveryRound(0, None, problem)

    def _fingerprint(self) -> object:
        """Return a value that changes whenever something happens that may change which messages are due.

        It consists of the content of the watermark file, which each of our appends changes (modification times are too
        coarse for that); of the modification time of `lock`, to which a broker writes when it starts; and of the
        modification time of the settings, which contain the delay levels.
        """
        return (
            files.read_small(watermark_path(self.path)),
            files.modified_ms(files.join(self.path, filenames.LOCK)),
            files.modified_ms(side_path(self.path, SETTINGS)),
        )

    def _broker_holds_store(self) -> bool:
        """Return whether a broker holds the store or is starting.

        Does not wait for the broker's lock, so another process may be mistaken for a broker.
        """
        if not seems_locked(self._broker_lock.path):
            return False
        try:
            return not self._broker_lock.try_take()
        finally:
            self._broker_lock.release()

    def _refresh_sources(self, now_ms: int) -> Outlook:
        metadata, outlook = self._last_commit()[1], Outlook()
        for at, source in self._sound_sources():
            with self._isolated(at):
                outlook = outlook.joined(source.refresh(now_ms, metadata))
        return outlook

    def _last_commit(self) -> tuple[int, Metadata]:
        """Return the number and the metadata of the last commit of all rounds; (-1, {}) if there was none."""
        row = self._ledger.read(QUERY_ID)
        return (-1, {}) if row is None else (row.batch_id, row.note)

    def _all_sources(self) -> Sequence[DelaySource]:
        if self._sources is None:
            folders = commit_log_folders(self.path, self._settings.commit_log_path)
            offsets = DelayOffsetFile(self.path, self._disk, self._clock_ms, self._sleep)
            timer = TimerStore(self.path, folders, self._disk)
            self._sources = (DelayQueues(self.path, folders, offsets, self._delay_levels), timer)
        return self._sources

    def _delay_levels(self) -> DelayLevels:
        settings = check_settings(self.path)
        return DEFAULT_DELAY_LEVELS if settings is None else settings.levels

    def _deliver(self, now_ms: int) -> DeliveryRound:
        """Deliver under the delivery lock. If another process holds this lock, deliver nothing."""
        self._create_lock_file()
        delivered: list[int] = []
        try:
            if not self._lock.try_take():
                return self._abandon()
            is_more = self._commit_due(now_ms, delivered)
        except RmqError as error:
            return replace(self._abandon(error, now_ms), delivered=sum(delivered))
        finally:
            self._end_delivery()
        fingerprint, outlook = self._fingerprint(), self._refresh_sources(now_ms)
        result = self._finish(fingerprint, outlook, sum(delivered))
        if is_more or outlook.has_work:
            self._idle = None
            return replace(result, next_due_ms=now_ms)
        return result

    def _create_lock_file(self) -> None:
        """Create the file of the delivery lock if it is missing. If a power cut loses it, the next round creates it."""
        if files.file_size(self._lock.path) < 0:
            self._disk.make_folder(files.parent(self._lock.path))
            with contextlib.suppress(FileExistsError):
                self._disk.create_lock(self._lock.path)

    def _end_delivery(self) -> None:
        try:
            self._close_sources()
        finally:
            self._lock.release()

    def _open_writer(self) -> StoreWriter:
        finisher = IntentRollForward(self.path, self._disk, self._clock_ms)
        return StoreWriter(self.path, self._disk, self._settings, self._clock_ms, self._sleep, [finisher])

    def _commit_due(self, now_ms: int, delivered: list[int]) -> bool:
        """Deliver the messages that are due, one commit at a time. Return whether more may be due.

        Appends the number of messages of each commit to `delivered`, so that the caller knows them even after an error.
        """
        left_bytes = self.tick_bytes
        with self._open_writer() as writer:
            while True:
                # This also runs after the last commit, so that the files that a broker reads are up to date at the end.
                number, metadata = self._prepare_sources(writer, now_ms)
                if left_bytes <= 0:
                    return True
                due = self._take(now_ms, min(self.commit_bytes, left_bytes))
                changed = {key: value for key, value in due.metadata.items() if metadata.get(key) != value}
                if not due.records and not changed:
                    return False
                if self._commit(writer, number + 1, due, {**metadata, **changed}):
                    delivered.append(sum(map(len, due.records)))
                    left_bytes -= sum(len(records.data) for records in due.records)

    def _take(self, now_ms: int, room_bytes: int) -> Due:
        """Return the messages of all sources that are due, up to the limits of one commit."""
        taken, room_count = Due(), self.commit_messages
        sources = list(self._sound_sources())
        self._rotation += 1
        for number in range(len(sources)):
            at, source = sources[(number + self._rotation) % len(sources)]
            if room_bytes <= 0 or room_count <= 0:
                break
            due = Due()
            with self._isolated(at):
                due = source.take(now_ms, room_bytes, room_count)
            taken = Due((*taken.records, *due.records), {**taken.metadata, **due.metadata})
            room_bytes -= sum(len(records.data) for records in due.records)
            room_count -= sum(map(len, due.records))
        return taken

    def _commit(self, writer: StoreWriter, number: int, due: Due, metadata: Metadata) -> bool:
        """Commit messages and metadata together. Return False if the commit's number was used already.

        After an error the store may contain a part of the messages. Then the next holder of the store's lock appends
        the rest.
        """
        key = CommitKey(QUERY_ID, number)
        stage = StageWriter(self.path, self._disk, folder_of(key), f"{random_bits():08x}")
        try:
            for records in due.records:
                stage.write(records)
            staged = [stage.finish()]
        except BaseException:
            stage.discard()
            raise
        # A number is used only once. If an earlier commit has used it, that commit is rolled forward by now.
        options = CommitOptions(
            on_conflict="skip",
            is_transaction=True,
            create_topics=False,
            checks_topics=False,
            note=metadata,
            log_level=logging.DEBUG,  # these commits are many and small; `rmq serve` logs their totals
        )
        try:
            return not commit_staged(writer, key, staged, options, sleep=self._sleep).skipped
        except RmqError:
            abort_staged(self.path, self._disk, folder_of(key), staged)
            raise
