"""Whoever ticks delivers what is due: messages of delay levels, and of the timer.

There is no process that must live for this: whoever looks at a store and may write to it ticks first. So an idle tick
has to be cheap, and no tick may wait for long:

1. Nothing was appended since the last look, and nothing is due yet: a few calls to the system.
2. Else every source is asked (`due_source.py`), without a lock; mostly nothing is due then either.
3. Else the turn of tickers, a lock on `rmq/delivery/turn`, is taken, or the tick is over: somebody else delivers.
4. The store's lock, by which dead processes' commits are finished; what is due; a commit. Again until nothing is due.

Once among all ticks: what was delivered up to where is in the ledger's note, which comes there with the commit. A crash
before the commit's intent has changed nothing, one behind it leaves a commit that whoever takes the store's lock next
finishes, note and all. And the number of a commit, the ledger's plus one, is taken once.

A broker that holds the store delivers by itself: then a tick does nothing. Files of one source that are damaged keep
only its own messages waiting.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rmq_spark.store.commit.commits import CommitOptions, abort_staged, commit_staged
from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.keys import CommitKey, side_path
from rmq_spark.store.commit.ledger import Ledger
from rmq_spark.store.commit.staging import StageWriter
from rmq_spark.store.delivery.delay_queue import DelayQueues
from rmq_spark.store.delivery.due_source import QUERY_ID, Due, DueSource, Note, Outlook
from rmq_spark.store.delivery.timer_state import PART, READ
from rmq_spark.store.delivery.timer_store import TimerStore
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import random_bits, wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import BrokerLock, FileLock
from rmq_spark.store.disk.lock_probe import seems_locked
from rmq_spark.store.disk.synchronized import Synchronized, synchronized
from rmq_spark.store.errors import DamageError, LockTimeoutError, RmqError, StoreChangedError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.timer_wheel import floor_second
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.log.settings_file import SETTINGS, check_settings
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.watermark_file import watermark_path

_LOG = logging.getLogger("rmq_spark")
FOLDER = "delivery"  # in `rmq/`
_TURN = "turn"
_APPLICATION = "rmq-spark ticker"
COMMIT_BYTES = 16 << 20  # of log, or one message: what is in memory at a time
COMMIT_MESSAGES = 32_768
TICK_BYTES = 64 << 20  # of log, in one call: whoever ticks has other things to do
_LOCK_TIMEOUT_MS = 500  # for a writer that makes no progress: a later tick tries again
_LATER_MS = 2_000  # after which: whoever ticks before it has other things to do


@dataclass(frozen=True, slots=True)
class Tick:
    """What one tick did: messages delivered, and when it is worth while to tick again (ms since the epoch).

    `next_due_ms` is when the first message is due that waits; the tick's own time where there is more than one call
    delivers; None where none waits, or others deliver. `problem` is why what may be due was not delivered.
    """

    delivered: int = 0
    next_due_ms: int | None = None
    problem: RmqError | None = None


class Ticker(Synchronized):
    """Delivers what is due in the store at `path`. For any number of threads and processes; `close` it.

    The calls of one object run one at a time.

    `settings` say how the store's lock is taken and where the log lies; without them the log lies at `commit_log_path`.
    `clock_ms` is the time at which messages are stored, `sleep` takes seconds. Opening it touches nothing.
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
        self.path = files.absolute(path)
        self._settings = settings or WriterSettings(
            _APPLICATION, _LOCK_TIMEOUT_MS, allow_network_store, commit_log_path
        )
        self._disk, self._clock_ms, self._sleep = disk or Disk(), clock_ms, sleep
        self._ledger = Ledger(self.path, self._disk)
        self._turn = FileLock(side_path(self.path, FOLDER, _TURN), only_writers=True)
        self._probe = BrokerLock(files.join(self.path, filenames.LOCK))
        self._sources: Sequence[DueSource] | None = None
        self._known: tuple[object, Outlook] | None = None  # what stood where news shows first, and what was due then
        self._told = ""
        self._not_before_ms = 0  # by the clock of who ticks, after a lock that was not to be had
        self._broken: dict[int, RmqError] = {}  # sources, by number, that could not be asked in this tick
        self._turns = 0  # that sources had: a backlog of one must not keep the others' messages waiting
        self.commit_bytes, self.commit_messages, self.tick_bytes = COMMIT_BYTES, COMMIT_MESSAGES, TICK_BYTES

    def __enter__(self) -> "Ticker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @synchronized
    def close(self) -> None:
        """Let go of files. A tick opens again what it needs."""
        self._close()

    def _close(self) -> None:
        for source in self._sources or ():
            source.close()

    def _release_locks(self) -> None:
        self._turn.release()
        self._probe.release()

    @synchronized
    def tick(self, now_ms: int) -> Tick:
        """Deliver what is due at `now_ms`, at most 64 MiB of log, and say when to tick again.

        Raises nothing that is wrong with the store: it is told once in the log, and in the answer, and a later tick
        tries again. Where nothing is due nothing on disk is changed, made or locked.
        """
        if 0 < self._not_before_ms - now_ms <= _LATER_MS:
            return Tick(0, self._not_before_ms)
        try:
            self._broken.clear()
            stamp = self._stamp()
            if self._known is not None and self._known[0] == stamp and not _is_due(self._known[1], now_ms):
                return Tick(0, self._known[1].next_due_ms)
            if self._is_brokers():
                return self._leave()
            outlook = self._look(now_ms)
            if not outlook.has_work:
                return self._rest(stamp, outlook)
            return self._work(now_ms)
        except RmqError as error:
            return self._leave(error, now_ms)

    def tick_now(self) -> float | None:
        """Tick at the clock's time, and return in how many ms to tick again; None: not before the store has moved."""
        now_ms = self._clock_ms()
        next_due_ms = self.tick(now_ms).next_due_ms
        return None if next_due_ms is None else max(next_due_ms - now_ms, 0)

    @synchronized
    def hand_over(self) -> None:
        """Have the files that a broker reads say what was delivered so far; deliver nothing.

        For a store that a broker opens next: a ticker that died may have left them behind. Raises what taking the
        store's lock raises, and DamageError for a file that cannot be read. Does nothing where nobody ever ticked.
        """
        if self._note()[0] < 0:
            return
        self._make_turn()
        try:
            if not self._turn.try_take():
                return  # who delivers now does that at the end
            finisher = IntentFinisher(self.path, self._disk, self._clock_ms)
            with StoreWriter(self.path, self._disk, self._settings, self._clock_ms, self._sleep, [finisher]) as writer:
                self._broken.clear()
                self._prepare(writer, self._clock_ms())
                for problem in self._broken.values():
                    raise problem
        finally:
            try:
                self._close()
            finally:
                self._turn.release()

    @synchronized
    def set_timer_back(self) -> None:
        """Have the timer go on from now, where it was delivered up to a time that is ahead of the clock.

        What waits is put back into the timer's queue, in commits like those that deliver; then the timer's files begin
        again. What was delivered early is not delivered again. A crash leaves the timer ahead of the clock, or done.
        Raises what `hand_over` raises, LockTimeoutError where another program delivers, and StoreChangedError where one
        used the timer in between.
        """
        self._make_turn()
        try:
            if not self._turn.try_take():
                raise LockTimeoutError(
                    f"the timer of {self.path} was not set back: another program delivers messages; expected none. "
                    "Stop it (rmq serve, queries with a consumerGroup), and repair again."
                )
            finisher = IntentFinisher(self.path, self._disk, self._clock_ms)
            with StoreWriter(self.path, self._disk, self._settings, self._clock_ms, self._sleep, [finisher]) as writer:
                self._put_timer_back(writer, self._clock_ms())
        finally:
            try:
                self._close()
            finally:
                self._turn.release()

    def _put_timer_back(self, writer: StoreWriter, now_ms: int) -> None:
        timer = next(source for source in self._all_sources() if isinstance(source, TimerStore))
        while True:
            with writer.section() as section:
                number, note = self._note()
                timer.prepare(section, now_ms, note, takes_new=False)
            due = timer.take_back(now_ms, self.commit_bytes, self.commit_messages)
            if not due.records and not due.note:
                break
            self._commit(writer, number + 1, due, {**note, **due.note})
        # From here nothing waits but in the queue, and the check says that all else was delivered.
        with writer.section() as section:
            timer.clear(section)
        # The note first: as long as the check says more it has no meaning. The check alone sets the timer back.
        while True:
            number, note = self._note()
            if self._commit(writer, number + 1, Due(), {**note, READ: floor_second(now_ms), PART: -1}):
                break
        with writer.section() as section:
            timer.restart(section, now_ms, self._note()[1])

    def _prepare(self, writer: StoreWriter, now_ms: int) -> tuple[int, Note]:
        """Have all sources learn what waits, and write what a broker reads. Return the last commit and its note."""
        with writer.section() as section:
            number, note = self._note()
            for at, source in self._working():
                with self._apart(at):
                    source.prepare(section, now_ms, note)
        return number, note

    def _working(self) -> Iterator[tuple[int, DueSource]]:
        """Yield the sources, and their numbers, but those whose files turned out damaged in this tick."""
        for at, source in enumerate(self._all_sources()):
            if at not in self._broken:
                yield at, source

    @contextlib.contextmanager
    def _apart(self, at: int) -> Iterator[None]:
        """Keep what is wrong with the files of source number `at` from the others."""
        try:
            yield
        except (DamageError, StorePathError, StoreChangedError) as error:
            self._broken[at] = error

    def _rest(self, stamp: object, outlook: Outlook, delivered: int = 0) -> Tick:
        """End a tick behind which nothing is due, but what cannot be asked about."""
        problem = next(iter(self._broken.values()), None)
        if problem is not None:
            return replace(self._leave(problem), delivered=delivered, next_due_ms=outlook.next_due_ms)
        self._told, self._known = "", (stamp, outlook)
        return Tick(delivered, outlook.next_due_ms)

    def _leave(self, problem: RmqError | None = None, now_ms: int = 0) -> Tick:
        """End a tick that could not find out, or not do, what there is to do."""
        self._known = None
        if isinstance(problem, LockTimeoutError):
            self._not_before_ms = now_ms + _LATER_MS
        if problem is not None and str(problem) != self._told:
            self._told = str(problem)
            _LOG.warning("rmq: what is due in %s is not delivered now: %s", self.path, problem)
        return Tick(0, None, problem)

    def _stamp(self) -> object:
        """Return what stands where news shows first.

        Every append of ours moves the watermark, by its content: the clock of files is too coarse. A broker writes to
        `lock` when it starts. The settings have the table of levels.
        """
        settings = side_path(self.path, SETTINGS)
        return (
            files.read_small(watermark_path(self.path)),
            files.modified_ms(files.join(self.path, filenames.LOCK)),
            files.modified_ms(settings),
        )

    def _is_brokers(self) -> bool:
        """Say whether a broker holds the store or is starting; at once, so that somebody else may look like one."""
        if not seems_locked(self._probe.path):
            return False
        try:
            return not self._probe.try_take()
        finally:
            self._probe.release()

    def _look(self, now_ms: int) -> Outlook:
        note, outlook = self._note()[1], Outlook()
        for at, source in self._working():
            with self._apart(at):
                outlook = outlook.joined(source.look(now_ms, note))
        return outlook

    def _note(self) -> tuple[int, Note]:
        """Return the number of the last commit of ticks, -1 before the first one, and its note."""
        row = self._ledger.read(QUERY_ID)
        return (-1, {}) if row is None else (row.batch_id, row.note)

    def _all_sources(self) -> Sequence[DueSource]:
        if self._sources is None:
            folders = commit_log_folders(self.path, self._settings.commit_log_path)
            offsets = DelayOffsetFile(self.path, self._disk, self._clock_ms, self._sleep)
            timer = TimerStore(self.path, folders, self._disk)
            self._sources = (DelayQueues(self.path, folders, offsets, self._levels), timer)
        return self._sources

    def _levels(self) -> DelayLevels:
        held = check_settings(self.path)
        return DEFAULT_DELAY_LEVELS if held is None else held.levels

    def _work(self, now_ms: int) -> Tick:
        """Take the turn and deliver; without it somebody else does."""
        self._make_turn()
        delivered: list[int] = []
        try:
            if not self._turn.try_take():
                return self._leave()
            is_more = self._deliver(now_ms, delivered)
        except RmqError as error:
            return replace(self._leave(error, now_ms), delivered=sum(delivered))
        finally:
            try:
                self._close()
            finally:
                self._turn.release()
        stamp, outlook = self._stamp(), self._look(now_ms)
        rest = self._rest(stamp, outlook, sum(delivered))
        if is_more or outlook.has_work:
            self._known = None
            return replace(rest, next_due_ms=now_ms)
        return rest

    def _make_turn(self) -> None:
        """Make the file of the turn where it is missing. Not for good: who finds none makes one."""
        if files.file_size(self._turn.path) < 0:
            self._disk.make_folder(files.parent(self._turn.path))
            with contextlib.suppress(FileExistsError):
                self._disk.create_lock(self._turn.path)

    def _deliver(self, now_ms: int, delivered: list[int]) -> bool:
        """Deliver, a commit at a time; note in `delivered` how many messages. Return whether there may be more."""
        left_bytes = self.tick_bytes
        finisher = IntentFinisher(self.path, self._disk, self._clock_ms)
        with StoreWriter(self.path, self._disk, self._settings, self._clock_ms, self._sleep, [finisher]) as writer:
            while True:
                # Also after the last commit: what a broker reads says so before this call ends.
                number, note = self._prepare(writer, now_ms)
                if left_bytes <= 0:
                    return True
                due = self._take(now_ms, min(self.commit_bytes, left_bytes))
                changed = {key: value for key, value in due.note.items() if note.get(key) != value}
                if not due.records and not changed:
                    return False
                if self._commit(writer, number + 1, due, {**note, **changed}):
                    delivered.append(sum(map(len, due.records)))
                    left_bytes -= sum(len(records.data) for records in due.records)

    def _take(self, now_ms: int, room_bytes: int) -> Due:
        """Return what all sources have for one commit."""
        taken, room_count = Due(), self.commit_messages
        working = list(self._working())
        self._turns += 1
        for number in range(len(working)):
            at, source = working[(number + self._turns) % len(working)]
            if room_bytes <= 0 or room_count <= 0:
                break
            due = Due()
            with self._apart(at):
                due = source.take(now_ms, room_bytes, room_count)
            taken = Due((*taken.records, *due.records), {**taken.note, **due.note})
            room_bytes -= sum(len(records.data) for records in due.records)
            room_count -= sum(map(len, due.records))
        return taken

    def _commit(self, writer: StoreWriter, number: int, due: Due, note: Note) -> bool:
        """Have messages and note in the store together. Return whether they are: the number may have been taken.

        After an error they may be there in part: whoever takes the store's lock next appends the rest.
        """
        key = CommitKey(QUERY_ID, number)
        stage = StageWriter(self.path, self._disk, key.folder, f"{random_bits():08x}")
        try:
            for records in due.records:
                stage.write(records)
            staged = [stage.finish()]
        except BaseException:
            stage.discard()
            raise
        # A number is taken once: by this commit, or by one that was begun before and is finished by now.
        options = CommitOptions(
            on_conflict="skip",
            is_transaction=True,
            create_topics=False,
            checks_topics=False,
            note=note,
            log_level=logging.DEBUG,  # of many small ones; `rmq serve` sums them up
        )
        try:
            return not commit_staged(writer, key, staged, options, sleep=self._sleep).skipped
        except RmqError:
            abort_staged(self.path, self._disk, key.folder, staged)
            raise


def _is_due(outlook: Outlook, now_ms: int) -> bool:
    return outlook.has_work or (outlook.next_due_ms is not None and outlook.next_due_ms <= now_ms)
