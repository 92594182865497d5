"""Committing what tasks staged: all of it, once, in the order of the files, or nothing.

    stage: tasks, many at once          commit: one process
    --------------------------          -------------------------------------------------------------
    StageWriter.write, .finish  ->      ledger looked at -> [store's lock: ledger, topics, intent, chunk] ->
    StagedFile, in a message            [lock: chunks] -> … -> [lock: chunks, settle, ledger] -> staged files away

Once the intent is on disk the rows come into the store, even if this call raises: whoever takes the store's lock next
finishes it. Up to then nothing has changed but topics that were made.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rmq_spark.store.commit.finishing import Roller
from rmq_spark.store.commit.intents import Intent
from rmq_spark.store.commit.keys import CommitKey, make_folders
from rmq_spark.store.commit.ledger import LedgerRow, LedgerRules, Verdict, judge_batch
from rmq_spark.store.commit.read_ahead import read_ahead
from rmq_spark.store.commit.staged_file import StagedFile
from rmq_spark.store.commit.staging import CHUNK_BYTES, check_staged, read_chunks, total_digest
from rmq_spark.store.commit.sweeping import abort_staged, find_garbage, sweep_staging
from rmq_spark.store.disk import files
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.errors import LockTimeoutError, RmqError, StoreError
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.log.section import MAX_SECTION_BYTES, Section
from rmq_spark.store.log.store_writer import StoreWriter
from rmq_spark.store.units import QueueKey

__all__ = ["CommitOptions", "CommitTotals", "abort_staged", "commit_staged", "sweep_staging"]

_LOG = logging.getLogger("rmq_spark")
_POLL_S = 0.05  # for another process that commits for the same query: it has some chunks to go


@dataclass(frozen=True, slots=True)
class CommitOptions:
    """What the user wants of a commit; the sink's options of the same names.

    `queue_count` is for topics that are made, `flush` "sync" or "async" (see `ledger.py`). A transaction's batch id is
    its version, and one that is not larger than the last is in the store already. `checks_topics` and `note` go into
    the intent: see there.
    """

    on_conflict: str = "fail"  # or "skip"
    on_gap: str = "fail"  # or "continue"
    is_transaction: bool = False
    create_topics: bool = True
    queue_count: int = 4
    flush: str = "sync"
    staging_retention_ms: int = 24 * 3_600_000
    chunk_bytes: int = CHUNK_BYTES  # of log, in memory and appended at a time; at most MAX_SECTION_BYTES
    turn_bytes: int = MAX_SECTION_BYTES  # of log, appended before others get their turn: whole chunks, at least one
    checks_topics: bool = True
    note: Mapping[str, int] = field(default_factory=dict)
    log_level: int = logging.INFO


@dataclass(frozen=True, slots=True)
class CommitTotals:
    """What one commit appended: rows, their bytes in the log, and how many queues got some. All 0 if it was skipped."""

    rows: int = 0
    bytes: int = 0
    queues: int = 0
    skipped: bool = False


def commit_staged(
    writer: StoreWriter,
    key: CommitKey,
    staged: Sequence[StagedFile],
    options: CommitOptions,
    *,
    sleep: Callable[[float], None] = time.sleep,
    before_intent: Callable[[], None] | None = None,
) -> CommitTotals:
    """Append the rows of staged files to the store, all of them once, and take the files away.

    `writer` was opened with an IntentFinisher among its finishers. Called again with the same key it appends nothing
    more; that is what a ledger is for, so it does not hold for a key without a batch id, which is used once.

    `before_intent` is called with the store's lock held, once it is clear that the batch is not in the store yet, and
    before anything says that it will be: it makes durable what is to be known of the batch, and may be called again for
    the same batch after a crash. What it raises is raised; nothing was appended then.

    Raises BatchConflictError, NotFoundError, OptionError, StoreChangedError and DamageError for a batch, files or
    topics that are not as they should be, and LockTimeoutError for a store or query that another process is at work
    on: then nothing was appended. After any other error (DiskFullError, a failing disk), and where a file is damaged
    behind the first chunk, the rows may be there in part, and whoever writes to the store next appends the rest. Many
    processes may commit at once, for the same query too.
    """
    return _Commit(writer, key, staged, options, sleep, before_intent).run()


@dataclass(slots=True)
class _Progress:
    """How far a commit of ours got."""

    intent: Intent
    lock: FileLock
    rows: int = 0
    queues: set[QueueKey] = field(default_factory=set)


class _Commit:
    def __init__(
        self,
        writer: StoreWriter,
        key: CommitKey,
        staged: Sequence[StagedFile],
        options: CommitOptions,
        sleep: Callable[[float], None],
        before_intent: Callable[[], None] | None,
    ) -> None:
        assert options.flush in ("sync", "async"), options.flush
        self._writer, self._key, self._options, self._sleep = writer, key, options, sleep
        self._before_intent = before_intent
        self._staged = tuple(file for file in staged if file.rows)
        self._rows = sum(file.rows for file in self._staged)
        self._bytes = sum(file.bytes for file in self._staged)
        self._digest = total_digest(self._staged)
        self._roller = Roller(writer.root, writer.disk, writer.now_ms, options.chunk_bytes)

    def run(self) -> CommitTotals:
        verdict = self._judge_early()
        if verdict is not Verdict.APPEND:
            return self._skip(verdict)
        chunks = read_chunks(self._writer.root, self._staged, 0, self._options.chunk_bytes)
        if self._bytes <= self._options.chunk_bytes:  # a thread costs more than it gains where there is one chunk
            return self._run(chunks)
        # Closed here: an error may keep it for long, and its thread must not come to be the one that closes it.
        with contextlib.closing(read_ahead(chunks)) as ahead:
            return self._run(ahead)

    def _run(self, chunks: Iterator[EncodedRecords]) -> CommitTotals:
        first, problem = self._look_at_files(chunks)
        begun: Verdict | _Progress | None = None
        try:
            begun = self._begin(first, problem)
            del first  # else a third chunk would be in memory to the end
            if isinstance(begun, _Progress):
                while begun.rows < self._rows:
                    self._take_turn(begun, chunks)
        finally:
            # Not done: whoever takes the store's lock next goes on from here.
            if isinstance(begun, _Progress):
                begun.lock.release()
        if isinstance(begun, Verdict):
            return self._skip(begun)
        if begun is not None:
            self._clean_up()
        queues = begun.queues if begun is not None else set()
        level = self._options.log_level
        _LOG.log(level, "rmq: %s: %d rows, %d bytes, %d queues", self._key, self._rows, self._bytes, len(queues))
        return CommitTotals(self._rows, self._bytes, len(queues))

    def _judge_early(self) -> Verdict:
        """Judge without the lock, which is cheap; unless somebody is at work on the query: that changes the answer."""
        if files.file_size(self._roller.intents.path(self._key.query_id)) >= 0:
            return Verdict.APPEND  # and this batch comes behind its
        row = self._ledger_row()
        if row is None and self._key.batch_id and not self._options.is_transaction:
            _LOG.warning(
                "rmq: %s is the first one of its query in the store at %s. If earlier ones were written here, the "
                "store was emptied, or another folder is at this path now: they are missing",
                self._key,
                self._writer.root,
            )
        return self._judge(row)

    def _judge(self, row: LedgerRow | None) -> Verdict:
        options = self._options
        rules = LedgerRules(options.on_conflict, options.on_gap, options.is_transaction)
        return judge_batch(row, self._key, self._rows, self._digest, rules)

    def _ledger_row(self) -> LedgerRow | None:
        return None if self._key.batch_id is None else self._roller.ledger.read(self._key.query_id)

    def _look_at_files(self, chunks: Iterator[EncodedRecords]) -> tuple[EncodedRecords | None, RmqError | None]:
        """Return the first chunk, read before the lock is asked for; or what is wrong with the files.

        They may be gone because the batch is in the store by now, so it is an error only if it is not.
        """
        try:
            for file in self._staged:
                check_staged(self._writer.root, file)
            return next(chunks, None), None
        except RmqError as error:
            return None, error

    def _begin(self, first: EncodedRecords | None, problem: RmqError | None) -> Verdict | _Progress | None:
        """Make the intent and append the first chunk. Return how far that is; None if there are no rows.

        A verdict, if there is nothing to append. Waits for another process that commits for the same query.
        """
        waited_ms, seen = 0, None
        while True:
            with self._writer.section() as section:
                other = self._find_other(section)
                if other is None:
                    verdict = self._judge(self._ledger_row())
                    if verdict is not Verdict.APPEND:
                        return verdict
                    if problem is not None:
                        raise problem
                    if self._before_intent is not None:
                        self._before_intent()
                    if first is not None:
                        return self._append_first(section, first)
                    self._note_nothing()
                    return None
            state = other, tuple(self._roller.intents.hints(self._key.query_id))
            waited_ms = waited_ms + int(_POLL_S * 1000) if state == seen else 0
            seen = state
            timeout_ms = self._writer.settings.lock_timeout_ms
            if waited_ms >= timeout_ms:
                raise LockTimeoutError(
                    f"{self._key} cannot be written: application {other.application!r} has been at work on {other.key} "
                    f"and made no progress for {timeout_ms / 1000:g} s. Does the query run twice? Stop one of the two; "
                    "what it began is finished by the next write. Nothing was written."
                )
            self._sleep(_POLL_S)

    def _find_other(self, section: Section) -> Intent | None:
        """Return the intent of another process that is at work on the same query. One of a dead process is finished."""
        other = self._roller.intents.read(self._key.query_id)
        if other is None:
            return None
        lock = self._roller.intents.lock(self._key.query_id)
        try:
            if not lock.try_take():
                return other
            turn = self._roller.finish(section, other)
        finally:
            lock.release()
        if turn.error is not None:
            raise turn.error
        return None if turn.is_done else other

    def _append_first(self, section: Section, first: EncodedRecords) -> _Progress:
        intent = Intent(
            key=self._key,
            files=self._staged,
            rows=self._rows,
            bytes=self._bytes,
            digest=self._digest,
            create_topics=self._options.create_topics,
            queue_count=self._options.queue_count,
            is_synced=self._options.flush == "sync",
            start=section.end,
            application=self._writer.settings.application,
            made_ms=self._writer.now_ms(),
            checks_topics=self._options.checks_topics,
            note=self._options.note,
        )
        self._roller.prepare(section, intent)
        lock = self._roller.intents.lock(self._key.query_id)
        try:
            is_taken = lock.try_take()
            assert is_taken, lock.path  # there is no intent, and the store's lock is ours
            begun = _Progress(intent, lock)
            self._roller.intents.write(intent)
            # From here the rows come into the store, by whomever. A crash before has changed nothing.
            self._append(section, begun, first)
        except BaseException:
            lock.release()
            raise
        return begun

    def _take_turn(self, begun: _Progress, chunks: Iterator[EncodedRecords]) -> None:
        """Append as many chunks as go before others get the lock, and a broker that starts gets it soon."""
        records = self._next(chunks, begun.intent)  # read while others have the lock
        with self._writer.section() as section:
            left_bytes = self._options.turn_bytes - len(records.data)
            self._append(section, begun, records)
            while begun.rows < self._rows and left_bytes >= self._options.chunk_bytes and not section.is_waited_for:
                del records
                records = self._next(chunks, begun.intent)
                left_bytes -= len(records.data)
                self._append(section, begun, records)

    def _next(self, chunks: Iterator[EncodedRecords], intent: Intent) -> EncodedRecords:
        try:
            return next(chunks)
        except RmqError as error:
            raise self._roller.unfinished(intent, error) from error

    def _append(self, section: Section, begun: _Progress, records: EncodedRecords) -> None:
        begun.rows = self._roller.append(section, begun.intent, records, begun.rows)
        begun.queues.update(records.queues[number] for number in np.unique(records.queue_numbers).tolist())
        if begun.rows == self._rows:
            self._roller.conclude(section, begun.intent)

    def _note_nothing(self) -> None:
        """Let the ledger have a batch without rows: the next one follows it."""
        if self._key.batch_id is not None:
            make_folders(self._writer.root, self._writer.disk)
            note, now_ms = self._options.note, self._writer.now_ms()
            row = LedgerRow(self._key.query_id, self._key.batch_id, 0, 0, self._digest, now_ms, note)
            self._roller.ledger.write(row, is_durable=self._options.flush == "sync")

    def _skip(self, verdict: Verdict) -> CommitTotals:
        # Spark repeats a batch that died, and so does foreachBatch: that is no news. Rows that are dropped may be.
        level = logging.INFO if verdict is Verdict.REPEATED else logging.WARNING
        _LOG.log(level, "rmq: %s with %d rows is skipped: %s", self._key, self._rows, verdict.value)
        abort_staged(self._writer.root, self._writer.disk, self._key.folder, self._staged)
        return CommitTotals(skipped=True)

    def _clean_up(self) -> None:
        """Take away the staged files, and old ones of others. An error here costs room, not rows: the commit stands."""
        writer, retention_ms = self._writer, self._options.staging_retention_ms
        try:
            self._roller.clean_up(self._staged)
            if any(True for _ in find_garbage(writer.root, writer.disk, writer.now_ms(), retention_ms)):
                with writer.section():
                    count = sweep_staging(writer.root, writer.disk, writer.now_ms(), retention_ms)
                _LOG.info("rmq: %d staged files that came to nothing were removed", count)
        except StoreError as error:
            _LOG.warning("rmq: %s is in the store, but files in rmq/ stay behind: %s", self._key, error)
