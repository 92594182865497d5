"""Sink of failed rows, which sends the message of each row of a batch back once.

Tasks stage the copies of their messages, and the driver's commit appends the copies. The tasks themselves read the
originals, so bodies go from the log into the staging files and not through Spark. Two kinds of rows are left out before
any original is read:

- Rows that the query has sent back for this batch already (`send_back_ledger.py`). So a repeated batch can complete
  even if these originals have expired meanwhile.
- All rows of the same message except the first. So an operation that multiplies rows, such as a join, does not multiply
  messages.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.backend import CommitTotals, SendBackTerms
from rmq_spark.store.batch_order import BatchRules, judge_batch
from rmq_spark.store.delivery.retry_policy import read_retry_topics
from rmq_spark.store.delivery.send_back import SendBacks
from rmq_spark.store.delivery.send_back_ledger import (
    NO_COMMIT,
    NO_KEYS,
    RowKeys,
    SendBackLedger,
    Sent,
)
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import BatchConflictError, LockTimeoutError, OptionError
from rmq_spark.store.format.failed_rows import FailedRows, row_keys
from rmq_spark.store.format.message_columns import RowFault
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.log.store_lock import refuse_network
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import CommitKey
from rmq_spark.store.transaction.commit import CommitOptions, commit_staged
from rmq_spark.store.transaction.encoded_slices import merge_records, slice_records
from rmq_spark.store.transaction.intents import StagedFile
from rmq_spark.store.transaction.ledger import LedgerRow, folder_of, make_folders
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.staging import StageWriter, read_chunks, total_digest
from rmq_spark.store.transaction.staging_cleanup import abort_staged

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SendBackSettings:
    """The settings of a sink of failed rows, for its tasks and the driver. Small, because Spark sends them to tasks."""

    path: str
    terms: SendBackTerms
    commit_log_path: str | None = None
    commit: CommitOptions = field(default_factory=CommitOptions)
    application: str = "rmq-spark sendBack"
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False


@dataclass(frozen=True, slots=True)
class StagedCopies:
    """The result of one task, which the task sends to the driver's commit.

    `keys` are the `row_keys` of the rows in the staging file `file`, in the same order, as little-endian numbers of 8
    bytes. `last_commit` is the number of the query's last commit when the task began. `has_retries` is True if a copy
    goes to the retry topic, and `has_dead` if one goes to the dead letters.
    """

    file: StagedFile
    keys: bytes = b""
    last_commit: int = NO_COMMIT
    has_retries: bool = False
    has_dead: bool = False


class SendBackTask:
    """Stages the copies for the failed rows of one task. The store is opened at the first row to copy. Not thread-safe.

    Call `finish` at the end, or `discard` if the task failed.
    """

    def __init__(self, settings: SendBackSettings, key: CommitKey, name: str) -> None:
        self._root, self._settings, self._disk = files.store_folder(settings.path), settings, Disk()
        refuse_network(self._root, allowed=settings.allow_network_store)
        self._stage = StageWriter(self._root, self._disk, folder_of(staging_key(key)), name)
        self._sending: SendBacks | None = None
        self._last_commit, self._sent_keys = NO_COMMIT, np.zeros(0, np.uint64)
        if key.batch_id is not None:
            self._last_commit, self._sent_keys = SendBackLedger(self._root, self._disk, key).known()
        self._keys: list[RowKeys] = []
        self._has_retries = self._has_dead = False
        self._row_count = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Stage the copies for rows, except rows that were sent back before. Columns have the types of `failed_rows`.

        If several rows are of the same message, only the first of this call is staged. The commit leaves out those of
        other calls. Raises the errors of `SendBacks.prepare`; row numbers count from 0 at the first row of the task.
        """
        try:
            failed = FailedRows.of(rows)
        except RowFault as fault:
            raise OptionError(f"row {self._row_count + fault.row}: {fault.what}") from None
        keys = row_keys(failed)
        numbers = _first_rows(keys)
        if len(self._sent_keys):
            numbers = numbers[~np.isin(keys[numbers], self._sent_keys)]
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
        """Make the staging file durable, and return its description for the commit."""
        self._close()
        keys = np.concatenate(self._keys).astype("<u8").tobytes() if self._keys else b""
        return StagedCopies(self._stage.finish(), keys, self._last_commit, self._has_retries, self._has_dead)

    def discard(self) -> None:
        """Remove the staging file of a failed task."""
        self._close()
        self._stage.discard()

    def _close(self) -> None:
        if self._sending is not None:
            self._sending.close()


def staging_key(key: CommitKey) -> CommitKey:
    """Return the key whose folder contains the staging files of a batch's copies. The ledger has no row for it."""
    return key if key.batch_id is None else CommitKey(f"sendback-rows:{key.query_id}", key.batch_id)


def check_send_back_sink(settings: SendBackSettings) -> str | None:
    """Check, before any task runs, that failed rows can be sent back. Return the store's id. Changes nothing.

    Raises StorePathError if there is no store, and OptionError if the group's name is invalid or the group has no retry
    queues.
    """
    root = files.store_folder(settings.path)
    with StoreReader(root, commit_log_path=settings.commit_log_path) as reader:
        read_retry_topics(root, settings.terms.group, settings.terms.max_reconsume_times)
        return reader.store_id()


def commit_copies(
    settings: SendBackSettings,
    key: CommitKey,
    staged: Sequence[StagedCopies],
    before_intent: Callable[[], None] | None = None,
) -> CommitTotals:
    """Append the copies that tasks staged, and return the totals.

    Each row of a batch is sent back once, even if the batch is run again and other rows fail. `before_intent` is passed
    on to `commit_staged`. Raises the errors of `commit_staged`, BatchConflictError if another process sent back rows of
    the batch while the tasks ran, and LockTimeoutError if another process holds the query's lock.
    """
    root, disk = files.store_folder(settings.path), Disk()
    lock_settings = WriterSettings(
        settings.application, settings.lock_timeout_ms, settings.allow_network_store, settings.commit_log_path
    )
    finisher = IntentRollForward(root, disk, wall_clock_ms)
    with StoreWriter(root, disk, lock_settings, wall_clock_ms, time.sleep, (finisher,)) as writer:
        if key.batch_id is None:
            _ensure_topics(writer, settings, staged)
            return _commit_once(writer, key, key, staged, settings.commit, before_intent)
        return _commit_batch(writer, settings, key, staged, before_intent)


def abort_copies(settings: SendBackSettings, key: CommitKey, staged: Sequence[StagedCopies]) -> None:
    """Remove the files that tasks staged, except files that an intent names. Errors are only logged."""
    abort_staged(files.store_folder(settings.path), Disk(), folder_of(staging_key(key)), [one.file for one in staged])


def _commit_batch(
    writer: StoreWriter,
    settings: SendBackSettings,
    key: CommitKey,
    staged: Sequence[StagedCopies],
    before_intent: Callable[[], None] | None,
) -> CommitTotals:
    make_folders(writer.root, writer.disk)
    rows = SendBackLedger(writer.root, writer.disk, key)
    lock = rows.lock()
    try:
        _take_lock(lock, key, settings.lock_timeout_ms)
        given = [one.file for one in staged]
        count = sum(file.rows for file in given)
        if count:
            _ensure_topics(writer, settings, staged)
        sent = rows.read()
        has_other = sent.row is not None and sent.batch_id != key.batch_id
        if has_other and not _is_next_batch(settings.commit, key, sent, given):
            abort_copies(settings, key, staged)
            return CommitTotals(skipped=True)
        if any(one.last_commit != sent.last_commit for one in staged):
            raise BatchConflictError(
                f"{key} was not sent back: another process sent it back while its tasks ran; expected one process. If "
                "the query runs twice, stop one of the two. Run again, the batch sends back what is left."
            )
        if not count and sent.batch_id == key.batch_id:
            if rows.is_unfinished():
                # The batch ends here, so roll the commit of a dead attempt forward now and not at the next write.
                with writer.section():
                    pass
            return CommitTotals(skipped=True)
        next_key = rows.announce(sent, np.unique(np.concatenate([_keys_of(one) for one in staged])))
        options = replace(settings.commit, is_transaction=True, note=rows.metadata)
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
    """Append the copies that tasks staged, and return the totals. Of several rows with the same key, only the first.

    `key` is the key of the commit, and `staged_as` the key of the staging folder.
    """
    root, disk, folder = writer.root, writer.disk, folder_of(staged_as)
    given = [one.file for one in staged]
    chosen = _without_duplicates(root, disk, folder, [(one.file, _keys_of(one)) for one in staged])
    left_over = [file for file in given if file not in chosen]
    try:
        totals = commit_staged(writer, key, chosen, options, before_intent=before_intent)
    except BaseException:
        # Spark aborts the files that the tasks returned. Remove the others too, unless an intent names them.
        abort_staged(root, disk, folder, [file for file in chosen if file not in given])
        raise
    if left_over:
        abort_staged(root, disk, folder, left_over)
    return totals


def _first_rows(keys: RowKeys) -> NDArray[np.intp]:
    """Return, in ascending order, the number of the first row of each distinct key."""
    return np.sort(np.unique(keys, return_index=True)[1])


def _without_duplicates(
    root: str, disk: Disk, key_folder: str, staged: Sequence[tuple[StagedFile, RowKeys]]
) -> list[StagedFile]:
    """Return files that together contain each row once: files without duplicates, and new ones for the others.

    `staged` has each file with the keys of its rows, in order. Each new file contains the rows of one old file without
    duplicates. The old file is kept; neither has an effect unless a commit names it. Raises the errors of `read_chunks`
    and `StageWriter`.
    """
    counts = [len(keys) for _, keys in staged]
    every = np.concatenate([keys for _, keys in staged]) if staged else NO_KEYS
    kept = np.zeros(len(every), np.bool_)
    kept[_first_rows(every)] = True
    if kept.all():
        return [file for file, _ in staged]
    parts = np.split(kept, np.cumsum(counts)[:-1])
    return [
        file if part.all() else _stage_again(root, disk, key_folder, file, part)
        for (file, _), part in zip(staged, parts, strict=True)
    ]


def _stage_again(root: str, disk: Disk, key_folder: str, file: StagedFile, kept: NDArray[np.bool_]) -> StagedFile:
    assert len(kept) == file.rows, (len(kept), file.rows)
    name = file.name.rpartition("/")[2].removesuffix(".arrow")
    writer = StageWriter(root, disk, key_folder, f"{name}-once")
    try:
        first = 0
        for records in read_chunks(root, [file]):
            chosen = _select(records, kept[first : first + len(records)])
            if chosen is not None:
                writer.write(chosen)
            first += len(records)
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


def _select(records: EncodedRecords, kept: NDArray[np.bool_]) -> EncodedRecords | None:
    """Return the records at which `kept` is True, or None if there is none. Their digest is 0; nobody compares it."""
    if not kept.any():
        return None
    edges = np.flatnonzero(np.diff(kept.astype(np.int8), prepend=0, append=0))
    runs = edges.reshape(-1, 2).tolist()
    return merge_records([slice_records(records, first, last) for first, last in runs])


def _keys_of(one: StagedCopies) -> RowKeys:
    return np.frombuffer(one.keys, "<u8").astype(np.uint64)


def _is_next_batch(options: CommitOptions, key: CommitKey, sent: Sent, staged: Sequence[StagedFile]) -> bool:
    """Return whether the batch `key` may follow the last batch that was sent back.

    Returns False if the batch must be skipped. Raises BatchConflictError by the rules of `options` (`judge_batch`).
    """
    assert sent.row is not None
    last = LedgerRow(key.query_id, sent.batch_id, sent.row.rows, sent.row.bytes, sent.row.digest, sent.row.time_ms)
    rules = BatchRules(options.on_conflict, options.on_gap, options.is_transaction)
    return judge_batch(last, key, sum(one.rows for one in staged), total_digest(staged), rules).name == "APPEND"


def _ensure_topics(writer: StoreWriter, settings: SendBackSettings, staged: Sequence[StagedCopies]) -> None:
    topics = read_retry_topics(writer.root, settings.terms.group, settings.terms.max_reconsume_times)
    with writer.section() as section:
        topics.ensure(section, retry=any(one.has_retries for one in staged), dead=any(one.has_dead for one in staged))


def _take_lock(lock: FileLock, key: CommitKey, timeout_ms: int) -> None:
    """Take the lock of the query, which other commits hold only for a short time.

    Raises LockTimeoutError if it is not free within `timeout_ms`.
    """
    for _ in range(max(int(timeout_ms / 1000 / _POLL_S), 1)):
        if lock.try_take():
            return
        time.sleep(_POLL_S)
    raise LockTimeoutError(
        f"{key} was not sent back: another process has held the query's lock for {timeout_ms / 1000:g} s; expected it "
        "to be free. If the query runs twice, stop one of the two, and run the batch again."
    )
