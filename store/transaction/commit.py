"""Commit of staging files: appends all of their rows once, in the order of the files, or appends none.

    stage: tasks, many at once          commit: one process
    --------------------------          -------------------------------------------------------------
    StageWriter.write, .finish  ->      read ledger -> [store's lock: ledger, topics, intent, chunk] ->
    StagedFile, in a message            [lock: chunks] -> … -> [lock: chunks, settle, ledger] -> remove files

Once the intent is durable, its rows will get into the store even if the commit raises, because the next holder of the
store's lock finishes the intent. Until the intent is durable, nothing in the store changes, except that missing topics
are created. While one chunk is appended, a thread reads the next one (`read_ahead`).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.batch_order import BatchRules, Verdict, judge_batch
from rmq_spark.store.disk import files
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.errors import LockTimeoutError, RmqError, StoreError
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.log.store_lock import MAX_SESSION_BYTES
from rmq_spark.store.log.store_writer import StoreWriter
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.transaction.intents import Intent, StagedFile
from rmq_spark.store.transaction.ledger import LedgerRow, folder_of, make_folders
from rmq_spark.store.transaction.roll_forward import BatchRollForward
from rmq_spark.store.transaction.staging import CHUNK_BYTES, check_staged, read_chunks, total_digest
from rmq_spark.store.transaction.staging_cleanup import abort_staged, find_orphans, sweep_staging

_LOG = logging.getLogger("rmq_spark")
_POLL_S = 0.05  # between two looks at the intent of another process that commits for the same query
T = TypeVar("T")


def read_ahead(items: Iterator[T]) -> Generator[T]:
    """Yield the items of an iterator, and let a thread produce the next item while the caller uses the current one.

    No item may be None. At most two items are in memory if the caller drops each item before it asks for the next. If
    the iterator raises an error instead of returning an item, this generator raises that error when it reaches the
    item. The caller must not use `items` itself. Closing or dropping the generator waits until the thread has produced
    its item.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="rmq-read-ahead") as pool:
        upcoming = pool.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = pool.submit(next, items, None)
            yield item


@dataclass(frozen=True, slots=True)
class CommitOptions:
    """The options of a commit. They mean the same as the sink's options of these names.

    `queue_count` is the number of queues of each topic that the commit creates. `flush` is "sync" or "async" (see
    `ledger.py`). With `is_transaction` the batch id is the version of a transaction; versions up to the last committed
    one are treated as stored already. `checks_topics` and `note` are copied to the `Intent`, which explains them.
    """

    on_conflict: str = "fail"  # or "skip"
    on_gap: str = "fail"  # or "continue"
    is_transaction: bool = False
    create_topics: bool = True
    queue_count: int = 4
    flush: str = "sync"
    staging_retention_ms: int = 24 * 3_600_000
    chunk_bytes: int = CHUNK_BYTES  # bytes of log that are read and appended at a time; at most MAX_SESSION_BYTES
    session_bytes: int = MAX_SESSION_BYTES  # bytes of log appended under the lock in one go: at least one whole chunk
    checks_topics: bool = True
    note: Mapping[str, int] = field(default_factory=dict)
    log_level: int = logging.INFO


def commit_staged(
    writer: StoreWriter,
    key: CommitKey,
    staged: Sequence[StagedFile],
    options: CommitOptions,
    *,
    sleep: Callable[[float], None] = time.sleep,
    before_intent: Callable[[], None] | None = None,
) -> CommitTotals:
    """Append each row of the staging files to the store once, and remove the files. Returns the commit's totals.

    `writer` must have an IntentRollForward among its finishers. A second call with the same key appends nothing. This
    does not hold for a key without a batch id: the ledger has no row for it, so use such a key only once. Many
    processes may commit at the same time, even for the same query.

    `before_intent` is called under the store's lock, after it is certain that the batch is not in the store and before
    the intent is written. The function may make metadata of the batch durable. After a crash it may be called again for
    the same batch. If it raises an error, nothing is appended and the error is passed on.

    The following errors, raised before the first chunk is appended, mean that nothing was appended. Raises
    BatchConflictError if `options` forbid the batch after the last one of its query; NotFoundError, OptionError or
    StoreChangedError if the store does not accept a topic or a record; StoreChangedError or DamageError if a staging
    file is missing, changed or damaged; and LockTimeoutError if another process holds the store or commits for the same
    query.

    After any other error (DiskFullError, a failing disk), and after an error at a later chunk, a part of the rows may
    have been appended. Then the next writer appends the rest.
    """
    return _Commit(writer, key, staged, options, sleep, before_intent).run()


@dataclass(slots=True)
class _Progress:
    """The progress of a commit whose intent this process has written."""

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
        self._roll_forward = BatchRollForward(writer.root, writer.disk, writer.now_ms, options.chunk_bytes)

    def run(self) -> CommitTotals:
        verdict = self._judge_early()
        if verdict is not Verdict.APPEND:
            return self._skip(verdict)
        chunks = read_chunks(self._writer.root, self._staged, 0, self._options.chunk_bytes)
        if self._bytes <= self._options.chunk_bytes:  # for one chunk, a thread costs more time than it saves
            return self._run(chunks)
        # Close the generator here. Otherwise a traceback may keep it alive, and its own thread may end up closing it.
        with contextlib.closing(read_ahead(chunks)) as ahead:
            return self._run(ahead)

    def _run(self, chunks: Iterator[EncodedRecords]) -> CommitTotals:
        first, problem = self._check_files(chunks)
        begun: Verdict | _Progress | None = None
        try:
            begun = self._begin(first, problem)
            del first  # otherwise three chunks would be in memory
            if isinstance(begun, _Progress):
                while begun.rows < self._rows:
                    self._append_session(begun, chunks)
        finally:
            # If some rows are not appended yet, the next holder of the store's lock resumes the intent.
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
        """Return a first verdict about the batch. This is cheap, because it takes no lock.

        If the query has an intent, the verdict is APPEND, and the batch is judged again after that intent is finished.
        """
        if files.file_size(self._roll_forward.intents.path(self._key.query_id)) >= 0:
            return Verdict.APPEND
        row = self._ledger_row()
        if row is None and self._key.batch_id and not self._options.is_transaction:
            _LOG.warning(
                "rmq: %s is the first batch of its query in the store at %s. If earlier batches were written to this "
                "path, they are missing: the store was emptied, or another folder is at this path now",
                self._key,
                self._writer.root,
            )
        return self._judge(row)

    def _judge(self, row: LedgerRow | None) -> Verdict:
        options = self._options
        rules = BatchRules(options.on_conflict, options.on_gap, options.is_transaction)
        return judge_batch(row, self._key, self._rows, self._digest, rules)

    def _ledger_row(self) -> LedgerRow | None:
        return None if self._key.batch_id is None else self._roll_forward.ledger.read(self._key.query_id)

    def _check_files(self, chunks: Iterator[EncodedRecords]) -> tuple[EncodedRecords | None, RmqError | None]:
        """Check the staging files and read the first chunk, before the lock is taken. Return (chunk, error).

        The chunk is None if the batch has no rows. If the files cannot be read, the chunk is None and the error is set.
        The files may be missing because another process has stored the batch meanwhile, so the caller raises the error
        only if the batch is not in the store.
        """
        try:
            for file in self._staged:
                check_staged(self._writer.root, file)
            return next(chunks, None), None
        except RmqError as error:
            return None, error

    def _begin(self, first: EncodedRecords | None, problem: RmqError | None) -> Verdict | _Progress | None:
        """Write the intent, append the first chunk and return the progress.

        Returns None if the batch has no rows, and the verdict if the batch must be skipped. While another process
        commits for the same query, this waits. Raises LockTimeoutError if that process makes no progress.
        """
        waited_ms, last_state = 0, None
        while True:
            with self._writer.section() as session:
                other = self._find_other(session)
                if other is None:
                    verdict = self._judge(self._ledger_row())
                    if verdict is not Verdict.APPEND:
                        return verdict
                    if problem is not None:
                        raise problem
                    if self._before_intent is not None:
                        self._before_intent()
                    if first is not None:
                        return self._append_first(session, first)
                    self._record_empty_batch()
                    return None
            state = other, tuple(self._roll_forward.intents.hints(self._key.query_id))
            waited_ms = waited_ms + int(_POLL_S * 1000) if state == last_state else 0
            last_state = state
            timeout_ms = self._writer.settings.lock_timeout_ms
            if waited_ms >= timeout_ms:
                raise LockTimeoutError(
                    f"{self._key} cannot be written: application {other.application!r} is writing {other.key} and made "
                    f"no progress for {timeout_ms / 1000:g} s. If the query runs twice, stop one of the two; the next "
                    "write finishes its batch. Nothing was written."
                )
            self._sleep(_POLL_S)

    def _find_other(self, session: WriteSession) -> Intent | None:
        """Return the query's intent if it must be finished first: its owner is alive, or rows are still missing.

        If the owner is dead, this call appends the missing rows, as many as one session may append. Returns None if the
        query has no intent, or none any more. Raises StoreChangedError if the intent of a dead owner cannot be
        finished.
        """
        other = self._roll_forward.intents.read(self._key.query_id)
        if other is None:
            return None
        lock = self._roll_forward.intents.lock(self._key.query_id)
        try:
            if not lock.try_take():
                return other
            result = self._roll_forward.finish(session, other)
        finally:
            lock.release()
        if result.error is not None:
            raise result.error
        return None if result.is_done else other

    def _append_first(self, session: WriteSession, first: EncodedRecords) -> _Progress:
        intent = Intent(
            key=self._key,
            files=self._staged,
            rows=self._rows,
            bytes=self._bytes,
            digest=self._digest,
            create_topics=self._options.create_topics,
            queue_count=self._options.queue_count,
            is_synced=self._options.flush == "sync",
            start=session.end,
            application=self._writer.settings.application,
            made_ms=self._writer.now_ms(),
            checks_topics=self._options.checks_topics,
            note=self._options.note,
        )
        self._roll_forward.prepare(session, intent)
        lock = self._roll_forward.intents.lock(self._key.query_id)
        try:
            is_taken = lock.try_take()
            assert is_taken, lock.path  # it is free: the query has no intent, and this process holds the store's lock
            progress = _Progress(intent, lock)
            self._roll_forward.intents.write(intent)
            # From here the rows will be appended, by this process or another. A crash before this changes nothing.
            self._append(session, progress, first)
        except BaseException:
            lock.release()
            raise
        return progress

    def _append_session(self, progress: _Progress, chunks: Iterator[EncodedRecords]) -> None:
        """Append chunks in one write session, up to `session_bytes`.

        Appends at least one chunk. If a broker is waiting for the store, appends no further one.
        """
        records = self._next(chunks, progress.intent)  # read before the lock is taken
        with self._writer.section() as session:
            left_bytes = self._options.session_bytes - len(records.data)
            self._append(session, progress, records)
            while progress.rows < self._rows and left_bytes >= self._options.chunk_bytes:
                if session.broker_is_waiting:
                    break
                del records
                records = self._next(chunks, progress.intent)
                left_bytes -= len(records.data)
                self._append(session, progress, records)

    def _next(self, chunks: Iterator[EncodedRecords], intent: Intent) -> EncodedRecords:
        try:
            return next(chunks)
        except RmqError as error:
            raise self._roll_forward.stuck_error(intent, error) from error

    def _append(self, session: WriteSession, progress: _Progress, records: EncodedRecords) -> None:
        progress.rows = self._roll_forward.append(session, progress.intent, records, progress.rows)
        progress.queues.update(records.queues[number] for number in np.unique(records.queue_numbers).tolist())
        if progress.rows == self._rows:
            self._roll_forward.conclude(session, progress.intent)

    def _record_empty_batch(self) -> None:
        """Write a batch without rows to the ledger, so that the next batch follows it."""
        if self._key.batch_id is not None:
            make_folders(self._writer.root, self._writer.disk)
            note, now_ms = self._options.note, self._writer.now_ms()
            row = LedgerRow(self._key.query_id, self._key.batch_id, 0, 0, self._digest, now_ms, note)
            self._roll_forward.ledger.write(row, is_durable=self._options.flush == "sync")

    def _skip(self, verdict: Verdict) -> CommitTotals:
        # A repeated batch is normal: Spark and foreachBatch repeat a failed one. Dropped rows deserve a warning.
        level = logging.INFO if verdict is Verdict.REPEATED else logging.WARNING
        _LOG.log(level, "rmq: %s with %d rows is skipped: %s", self._key, self._rows, verdict.value)
        abort_staged(self._writer.root, self._writer.disk, folder_of(self._key), self._staged)
        return CommitTotals(skipped=True)

    def _clean_up(self) -> None:
        """Remove the batch's staging files, and orphaned ones of other batches.

        The commit is complete by now, so an error is only logged.
        """
        writer, retention_ms = self._writer, self._options.staging_retention_ms
        try:
            self._roll_forward.clean_up(self._staged)
            if any(True for _ in find_orphans(writer.root, writer.disk, writer.now_ms(), retention_ms)):
                with writer.section():
                    count = sweep_staging(writer.root, writer.disk, writer.now_ms(), retention_ms)
                _LOG.info("rmq: removed %d orphaned staging files", count)
        except StoreError as error:
            _LOG.warning("rmq: %s is in the store, but staging files in rmq/ remain: %s", self._key, error)


__all__ = ["CommitOptions", "abort_staged", "commit_staged", "sweep_staging"]
