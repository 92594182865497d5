"""A sink of failed rows: tasks that stage their copies, and the driver's commit, which appends each of them once.

Tasks look their originals up, so the bodies go from the log into the staged files and never through Spark. What the
query has sent back for this batch already (`sent_rows`) is left out before anything is looked up: a batch that is run
again comes to its end although its originals have expired since. So are rows that name a message twice
(`doubled_rows`): what multiplies rows on their way does not multiply messages.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.commit.commits import CommitOptions, CommitTotals, commit_staged
from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.keys import CommitKey, make_folders
from rmq_spark.store.commit.ledger import LedgerRow, LedgerRules, judge_batch
from rmq_spark.store.commit.staged_file import StagedFile
from rmq_spark.store.commit.staging import StageWriter, total_digest
from rmq_spark.store.commit.sweeping import abort_staged
from rmq_spark.store.delivery.doubled_rows import first_rows, without_doubles
from rmq_spark.store.delivery.failed_rows import FailedRows, row_keys
from rmq_spark.store.delivery.retry_topics import read_retry_topics
from rmq_spark.store.delivery.send_back import SendBacks, SendBackTerms
from rmq_spark.store.delivery.sent_rows import NO_COMMIT, RowKeys, Sent, SentRows
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.errors import BatchConflictError, LockTimeoutError, OptionError
from rmq_spark.store.format.message_columns import RowFault
from rmq_spark.store.log.store_lock import refuse_network
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SendBackSettings:
    """What tasks and driver need to know of a sink of failed rows; small, and pickled into every task."""

    path: str
    terms: SendBackTerms
    commit_log_path: str | None = None
    commit: CommitOptions = field(default_factory=CommitOptions)
    application: str = "rmq-spark sendBack"
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False


@dataclass(frozen=True, slots=True)
class StagedCopies:
    """What one task tells the commit: its file, whose rows they are, and what it knew to be sent back before.

    `keys` are those of `row_keys`, in the order of the file's rows, as bytes. Small but for them, and it pickles.
    """

    file: StagedFile
    keys: bytes = b""
    last_commit: int = NO_COMMIT
    has_retries: bool = False
    has_dead: bool = False


class SendBackTask:
    """One task's failed rows on their way. Without a row nothing is opened. For one thread."""

    def __init__(self, settings: SendBackSettings, key: CommitKey, name: str) -> None:
        self._root, self._settings, self._disk = files.absolute(settings.path), settings, Disk()
        refuse_network(self._root, allowed=settings.allow_network_store)
        self._stage = StageWriter(self._root, self._disk, staging_key(key).folder, name)
        self._sending: SendBacks | None = None
        self._last_commit, self._known = NO_COMMIT, np.zeros(0, np.uint64)
        if key.batch_id is not None:
            self._last_commit, self._known = SentRows(self._root, self._disk, key).known()
        self._keys: list[RowKeys] = []
        self._has_retries = self._has_dead = False
        self._row_count = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Stage the copies of rows, in the types of `failed_rows`, but for those that were sent back before.

        Of several that name one message the first counts; those that come in other calls are left out by the commit.

        Raises what `SendBacks.prepare` raises; rows count from the task's first.
        """
        try:
            failed = FailedRows.of(rows)
        except RowFault as fault:
            raise OptionError(f"row {self._row_count + fault.row}: {fault.what}") from None
        keys = row_keys(failed)
        numbers = first_rows(keys)
        if len(self._known):
            numbers = numbers[~np.isin(keys[numbers], self._known)]
        if len(numbers):
            self._write(rows, failed, numbers, keys)
        self._row_count += rows.num_rows

    def _write(self, rows: pa.RecordBatch, failed: FailedRows, numbers: NDArray[np.intp], keys: RowKeys) -> None:
        if self._sending is None:
            self._sending = SendBacks(self._root, self._settings.terms, commit_log_path=self._settings.commit_log_path)
        for sent in self._sending.prepare(rows, first_row=self._row_count, only=numbers):
            digest = failed.take(sent.rows).digest(self._settings.terms.group)
            self._stage.write(replace(sent.records, digest=digest))
            self._has_dead |= bool(sent.decisions.are_dead.any())
            self._has_retries |= not sent.decisions.are_dead.all()
            self._keys.append(keys[sent.rows])

    def finish(self) -> StagedCopies:
        """Return what was staged; it is on disk for good."""
        self._close()
        keys = np.concatenate(self._keys).astype("<u8").tobytes() if self._keys else b""
        return StagedCopies(self._stage.finish(), keys, self._last_commit, self._has_retries, self._has_dead)

    def discard(self) -> None:
        """Take the file away: the task failed."""
        self._close()
        self._stage.discard()

    def _close(self) -> None:
        if self._sending is not None:
            self._sending.close()


def staging_key(key: CommitKey) -> CommitKey:
    """Return the key under which a batch's copies are staged. The ledger knows none of that name."""
    return key if key.batch_id is None else CommitKey(f"sendback-rows:{key.query_id}", key.batch_id)


def check_send_back_sink(settings: SendBackSettings) -> str | None:
    """See that failed rows can be sent back, before any task runs; return the store's id. Changes nothing.

    Raises StorePathError where there is no store, OptionError for a group that has no retry queues or is none.
    """
    root = files.absolute(settings.path)
    with StoreReader(root, commit_log_path=settings.commit_log_path) as reader:
        read_retry_topics(root, settings.terms.group, settings.terms.max_reconsume_times)
        return reader.store_id()


def commit_copies(
    settings: SendBackSettings,
    key: CommitKey,
    staged: Sequence[StagedCopies],
    before_intent: Callable[[], None] | None = None,
) -> CommitTotals:
    """Append what tasks staged, once for each row of a batch, whether it is run again with the same rows or others.

    `before_intent` is called as `commit_staged` calls it. Raises what that raises, and BatchConflictError where another
    process sent rows of the batch back while the tasks ran.
    """
    root, disk = files.absolute(settings.path), Disk()
    lock_settings = WriterSettings(
        settings.application, settings.lock_timeout_ms, settings.allow_network_store, settings.commit_log_path
    )
    finisher = IntentFinisher(root, disk, wall_clock_ms)
    with StoreWriter(root, disk, lock_settings, wall_clock_ms, time.sleep, (finisher,)) as writer:
        if key.batch_id is None:
            _ensure_topics(writer, settings, staged)
            return _commit_once(writer, key, key, staged, settings.commit, before_intent)
        return _commit_batch(writer, settings, key, staged, before_intent)


def abort_copies(settings: SendBackSettings, key: CommitKey, staged: Sequence[StagedCopies]) -> None:
    """Take away what tasks staged, but for what a commit promised to append. Raises nothing that is in the way."""
    abort_staged(files.absolute(settings.path), Disk(), staging_key(key).folder, [one.file for one in staged])


def _commit_batch(
    writer: StoreWriter,
    settings: SendBackSettings,
    key: CommitKey,
    staged: Sequence[StagedCopies],
    before_intent: Callable[[], None] | None,
) -> CommitTotals:
    make_folders(writer.root, writer.disk)
    rows = SentRows(writer.root, writer.disk, key)
    lock = rows.lock()
    try:
        _take(lock, key, settings.lock_timeout_ms)
        files_of = [one.file for one in staged]
        count = sum(one.rows for one in files_of)
        if count:
            _ensure_topics(writer, settings, staged)
        sent = rows.look()
        has_other = sent.row is not None and sent.batch_id != key.batch_id
        if has_other and not _is_next(settings.commit, key, sent, files_of):
            abort_copies(settings, key, staged)
            return CommitTotals(skipped=True)
        if any(one.last_commit != sent.last_commit for one in staged):
            raise BatchConflictError(
                f"{key} cannot be sent back: another process did so while its tasks ran. Nothing of it was sent back "
                "by this one. Does the query run twice? Stop one of the two; the batch, run again, sends back what is "
                "left."
            )
        if not count and sent.batch_id == key.batch_id:
            if rows.is_unfinished():
                # What a try that died had promised comes now, not when somebody writes next: the batch ends with this.
                with writer.section():
                    pass
            return CommitTotals(skipped=True)
        next_key = rows.announce(sent, np.unique(np.concatenate([_keys_of(one) for one in staged])))
        options = replace(settings.commit, is_transaction=True, note=rows.note)
        return _commit_once(writer, next_key, staging_key(key), staged, options, before_intent)
    finally:
        lock.release()


def _commit_once(
    writer: StoreWriter,
    key: CommitKey,
    staged_as: CommitKey,
    staged: Sequence[StagedCopies],
    options: CommitOptions,
    before_intent: Callable[[], None] | None,
) -> CommitTotals:
    """Append what tasks staged, but rows that another file has too, or the same one before."""
    root, disk, folder = writer.root, writer.disk, staged_as.folder
    given = [one.file for one in staged]
    chosen = without_doubles(root, disk, folder, [(one.file, _keys_of(one)) for one in staged])
    left_over = [file for file in given if file not in chosen]
    try:
        totals = commit_staged(writer, key, chosen, options, before_intent=before_intent)
    except BaseException:
        # Spark gives up the files that the tasks spoke of, and these are others; what was promised stays.
        abort_staged(root, disk, folder, [file for file in chosen if file not in given])
        raise
    if left_over:
        abort_staged(root, disk, folder, left_over)
    return totals


def _keys_of(one: StagedCopies) -> RowKeys:
    return np.frombuffer(one.keys, "<u8").astype(np.uint64)


def _is_next(options: CommitOptions, key: CommitKey, sent: Sent, staged: Sequence[StagedFile]) -> bool:
    """Say whether a batch follows the last one that was sent back, or may pass for that. Raises BatchConflictError."""
    assert sent.row is not None
    last = LedgerRow(key.query_id, sent.batch_id, sent.row.rows, sent.row.bytes, sent.row.digest, sent.row.time_ms)
    rules = LedgerRules(options.on_conflict, options.on_gap, options.is_transaction)
    return judge_batch(last, key, sum(one.rows for one in staged), total_digest(staged), rules).name == "APPEND"


def _ensure_topics(writer: StoreWriter, settings: SendBackSettings, staged: Sequence[StagedCopies]) -> None:
    topics = read_retry_topics(writer.root, settings.terms.group, settings.terms.max_reconsume_times)
    with writer.section() as section:
        topics.ensure(section, retry=any(one.has_retries for one in staged), dead=any(one.has_dead for one in staged))


def _take(lock: FileLock, key: CommitKey, timeout_ms: int) -> None:
    """Take a lock that other commits of the query hold for a moment. Raises LockTimeoutError."""
    for _ in range(max(int(timeout_ms / 1000 / _POLL_S), 1)):
        if lock.try_take():
            return
        time.sleep(_POLL_S)
    raise LockTimeoutError(
        f"{key} cannot be sent back: another process has been at it for {timeout_ms / 1000:g} s. Does the query run "
        "twice? Stop one of the two. Nothing was sent back."
    )
