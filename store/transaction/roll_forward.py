"""Roll forward of intents: the steps that append an intent's rows, chunk by chunk, and then remove the intent.

The owner of the intent takes these steps. If the owner dies, the next writer continues.

| step | a crash in this step leaves |
| --- | --- |
| 1. create missing topics, all at once and durably | empty topics |
| 2. append the rows in chunks, and save how many rows were appended | a part of the rows |
| 3. with flush=sync, flush the store, so that the ledger never names messages that a power cut may lose | all rows |
| 4. write the batch to the ledger; from here no process appends it again | an intent to remove |
| 5. remove the intent, sync the removal, and remove the staging files | orphaned staging files |

If the number of appended rows is unknown after a crash, the log is compared with the staging files. Appended rows are
never truncated, because readers may have seen them.

An intent may be impossible to finish for now, because a staging file is missing or damaged, or the disk is full. This
blocks only the intent's own query. Other writers log an error and append their messages. The intent can still be
finished later, because messages of other writers may be between its rows. Every write session checks again whether the
intent can be finished; this check is cheap. Until the intent is finished or abandoned, retention keeps the log from the
intent's start.
"""

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rmq_spark.store.disk import files
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import (
    DamageError,
    DiskFullError,
    LockTimeoutError,
    NotFoundError,
    OptionError,
    RmqError,
    StoreChangedError,
)
from rmq_spark.store.format.file_names import COMMIT_LOG
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.record import BLANK_BYTES, Record, decode_record
from rmq_spark.store.log.retention import Needed
from rmq_spark.store.log.store_lock import MAX_SESSION_BYTES
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.names import check_topic_name
from rmq_spark.store.transaction.intents import Count, Hint, Intent, Intents, StagedFile
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow
from rmq_spark.store.transaction.staging import CHUNK_BYTES, check_staged, read_chunks, staged_path
from rmq_spark.store.transaction.staging_cleanup import remove_staged

_COMPARED_BYTES = 4 << 20  # bytes of staged records that are read at a time, to be compared one by one
_HEARTBEAT_RECORDS = 5_000  # records that are compared between two heartbeats
_LOG = logging.getLogger("rmq_spark")


def fingerprint_of(record: Record) -> int:
    """Return a checksum that identifies a record at its position in the log.

    If the log is truncated and another record is stored there later, that one has another store time, and so another
    checksum.
    """
    head = record.physical_offset, record.queue_offset, record.store_timestamp, record.body_crc, record.queue_id
    return zlib.crc32(record.properties, zlib.crc32(record.topic, zlib.crc32(repr(head).encode())))


@dataclass(frozen=True, slots=True)
class AppliedRows:
    """A count that was compared with the log: up to the record `last`, the log has exactly the first `rows` rows.

    `last` is None if no record was compared.
    """

    rows: int = 0
    last: Record | None = None
    is_complete: bool = False  # as in Count


def known_applied_rows(session: WriteSession, count: Count | None) -> AppliedRows | None:
    """Return a saved count as AppliedRows if it is still valid: its record, and so all before it, is still in the log.

    Returns None otherwise, and if `count` is None.
    """
    if count is None:
        return None
    if count.physical_offset < 0:
        return AppliedRows(count.rows, is_complete=True) if count.is_complete else None
    found = session.record_from(count.physical_offset)
    if found is None or found.physical_offset != count.physical_offset or fingerprint_of(found) != count.fingerprint:
        return None
    return AppliedRows(count.rows, found, count.is_complete)


def count_applied_rows(
    session: WriteSession,
    root: str,
    intent: Intent,
    hints: Sequence[Hint],
    known: AppliedRows | None = None,
    save: Callable[[Count], None] = lambda _: None,
) -> int:
    """Return how many of an intent's rows are in the log. Rows are appended in order, so these are the first ones.

    Compares the records of the log with the staged records; records of other writers may be between the rows. Starts
    after the count `known`. If that is None, starts at the last of the `hints` that the log confirms. If there is none,
    starts at the physical offset where the log ended when the intent was written. Passes the count to `save`; after an
    error, passes the count so far. Raises DamageError if the log cannot be read to its end or has lost a row, and the
    errors of `read_chunks`.

    An intent with a `note` delivers delayed messages. If a broker has used the store meanwhile, it may have delivered
    the same messages in another order. This is not damage; messages found out of order are delivered twice.
    """
    begin = known or _from_hints(session, root, intent, hints) or AppliedRows()
    rows, last_row, last = begin.rows, begin.last, begin.last  # last_row is of the intent, last of any writer
    if last is not None:
        position = _end_of(last)
    else:
        position = intent.start
        if position < session.end and session.record_from(position) is None:
            # After a power cut a broker may have truncated the log's end and appended other messages there.
            position -= position % session.segment_bytes
    staged = _staged_records(root, intent.files, rows)
    expected, following = next(staged, None), next(staged, None)
    records = enumerate(session.records_from(position))
    try:
        while expected is not None and (found := next(records, None)) is not None:
            number, record = found
            if number % _HEARTBEAT_RECORDS == 0:
                session.heartbeat()
            if _is_same(record, expected):
                rows, last_row, last = rows + 1, record, record
                expected, following = following, next(staged, None)
            elif following is not None and not intent.note and _is_same(record, following):
                last = last_row  # in a repaired log, the lost row may be anywhere after `last_row`
                raise _lost_row(root, intent, rows, last_row, record)
            else:
                last = record
    except BaseException:
        if last is not None and last is not begin.last:
            save(Count(rows, last.physical_offset, fingerprint_of(last)))
        raise
    # The record of the last row identifies the count. A process that appends more rows clears the count first.
    if last_row is None:
        save(Count(rows, is_complete=True))
    else:
        save(Count(rows, last_row.physical_offset, fingerprint_of(last_row), is_complete=True))
    return rows


def _from_hints(session: WriteSession, root: str, intent: Intent, hints: Sequence[Hint]) -> AppliedRows | None:
    """Return the rows of the last hint that the log confirms, with the record of the last row; None if none is."""
    for hint in reversed(hints):
        if not 0 < hint.rows <= intent.rows or hint.physical_offset >= session.end:
            continue
        found = session.record_from(hint.physical_offset)
        if found is not None and _is_same(found, next(_staged_records(root, intent.files, hint.rows - 1))):
            return AppliedRows(hint.rows, found)
    return None


def _end_of(record: Record) -> int:
    return record.physical_offset + record.total_size


def _lost_row(root: str, intent: Intent, row: int, before: Record | None, found: Record) -> DamageError:
    """Return the error for a log that has row `row` + 1 of an intent but not row `row`.

    Rows are appended in order, so the missing row is in the log, with damage in a field that no CRC covers. If this
    were not an error, the row would be appended a second time.
    """
    return DamageError(
        f"row {row + 1} of {intent.rows} of {intent.key} without row {row} before it, counted from 0",
        files.join(root, COMMIT_LOG),
        found.physical_offset,
        f"row {row} between physical offset {_end_of(before) if before is not None else intent.start} and this one",
        "no record that is equal to the staged one",
    )


def _is_same(one: Record, other: Record) -> bool:
    """Return whether two records are the same message. The properties contain the UNIQ_KEY, so copies differ."""
    return (
        one.properties == other.properties
        and (one.topic, one.queue_id) == (other.topic, other.queue_id)
        and one.reconsume_times == other.reconsume_times
        and one.body == other.body
    )


def _staged_records(root: str, staged: Sequence[StagedFile], first_row: int) -> Iterator[Record]:
    """Yield the staged records one by one, decoded, starting at row `first_row`."""
    for records in read_chunks(root, staged, first_row, _COMPARED_BYTES):
        view, begin = records.data.data, 0
        for end in np.cumsum(records.sizes).tolist():
            record = decode_record(view[begin:end])
            assert isinstance(record, Record), record  # its checksum was verified
            yield record
            begin = end


@dataclass(frozen=True, slots=True)
class RollForwardRound:
    """The result of one `finish` call: how many bytes of log it appended, and the state of the intent.

    `is_done` means that the intent is finished. `error` is why it cannot be finished now. If there is neither, call
    again in the next session.
    """

    appended_bytes: int = 0
    is_done: bool = False
    error: StoreChangedError | None = None


class BatchRollForward:
    """The steps that roll a batch's intent forward. The object itself keeps no progress of any intent."""

    def __init__(self, root: str, disk: Disk, now_ms: Callable[[], int], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.root, self.disk, self.now_ms, self.chunk_bytes = root, disk, now_ms, chunk_bytes
        self.intents, self.ledger = Intents(root, disk), Ledger(root, disk)

    def append(self, session: WriteSession, intent: Intent, records: EncodedRecords, first_row: int) -> int:
        """Append one chunk of an intent's rows, and return how many of its rows are in the log then.

        `first_row` is the number of the chunk's first row in the intent, counted from 0. If rows are left to append, a
        hint and a count are saved.
        """
        self.intents.clear_count(intent)
        appended = session.append(records)
        if intent.is_synced:
            session.begin_sync()  # the disk works while the next chunk is read
        rows = first_row + len(records)
        if rows < intent.rows:
            # If a crash prevents this, the next writer has to compare one more chunk.
            physical_offset = int(appended.physical_offsets[-1])
            self.intents.add_hint(intent, Hint(rows, physical_offset))
            last = decode_record(records.data[len(records.data) - int(records.sizes[-1]) :].data)
            assert isinstance(last, Record), last  # `append` has filled in its header
            count = Count(rows, physical_offset, fingerprint_of(last), is_complete=True)
            self.intents.save_count(intent, count)
        return rows

    def conclude(self, session: WriteSession, intent: Intent) -> None:
        """Write an intent's batch to the ledger, and remove the intent. All of its rows must be appended before."""
        if intent.is_synced:
            session.settle()
        session.heartbeat()  # raises if a broker may overwrite the rows; then the ledger must not contain the batch
        query_id, batch_id = intent.key.query_id, intent.key.batch_id
        if batch_id is not None:
            row = LedgerRow(query_id, batch_id, intent.rows, intent.bytes, intent.digest, self.now_ms(), intent.note)
            self.ledger.write(row, is_durable=intent.is_synced)
        self.intents.remove(intent.key.query_id)

    def clean_up(self, staged: Sequence[StagedFile]) -> None:
        """Remove the staging files of a concluded intent."""
        # First sync the intent's removal. If a power cut restored the intent without its files, nobody could finish it.
        self.intents.sync()
        remove_staged(self.root, self.disk, staged)

    def finish(self, session: WriteSession, intent: Intent, session_bytes: int = MAX_SESSION_BYTES) -> RollForwardRound:
        """Resume the intent of a dead owner, and append at most `session_bytes` bytes of log.

        The caller must hold the intent's lock. If the intent cannot be resumed now, for example because a staging file
        is missing or damaged or the disk is full, the result has an error. Raises an error if an append fails after it
        has begun, and LockTimeoutError if a broker starts.
        """
        try:
            is_done = self._is_in_ledger(intent)
            if not is_done:
                intent, rows = self._prepare_resume(session, intent)
        except LockTimeoutError:
            raise
        except RmqError as error:
            return RollForwardRound(error=self.stuck_error(intent, error))
        if is_done:
            # The owner may have died after it renamed the ledger's file and before it synced the folder. Without a sync
            # here, a power cut could lose both the row and the intent.
            self.ledger.sync()
            self.intents.remove(intent.key.query_id)
            self.clean_up(intent.files)
            return RollForwardRound(is_done=True)
        _LOG.warning(
            "rmq: finishing %s of application %r, whose writer died: %d of %d rows are in the store",
            intent.key,
            intent.application,
            rows,
            intent.rows,
        )
        chunks = read_chunks(self.root, intent.files, rows, self.chunk_bytes)
        appended_bytes = 0
        while rows < intent.rows:
            if appended_bytes and (appended_bytes + self.chunk_bytes > session_bytes or session.broker_is_waiting):
                return RollForwardRound(appended_bytes)
            try:
                records = next(chunks)
            except RmqError as error:
                return RollForwardRound(appended_bytes, error=self.stuck_error(intent, error))
            rows = self.append(session, intent, records, rows)
            appended_bytes += len(records.data)
            session.heartbeat()
        self.conclude(session, intent)
        self.clean_up(intent.files)
        return RollForwardRound(appended_bytes, is_done=True)

    def prepare(self, session: WriteSession, intent: Intent, applied_rows: int = 0) -> None:
        """Check that the store accepts the rest of an intent's rows, and then create missing topics.

        The rest is all rows except the first `applied_rows`. The disk must have room for the whole rest, because a
        commit that fills the disk is stuck until the disk has room again. Raises DiskFullError if it has not,
        OptionError if a record is longer than a segment or a topic's name is invalid, NotFoundError if a topic is
        missing and may not be created, StoreChangedError if a topic has too few queues, and StorePathError if a topic
        is not writable. After an error nothing has changed, unless creating a topic failed.
        """
        self._check_room(session, intent, applied_rows)
        self._check_acceptable(session, intent)
        if intent.checks_topics:
            session.ensure_topics(sorted(intent.topics), intent.queue_count)

    def _check_room(self, session: WriteSession, intent: Intent, applied_rows: int) -> None:
        rows = intent.rows - applied_rows
        if rows:
            session.refuse_full_disk(intent.bytes * rows // intent.rows, rows)

    def _check_acceptable(self, session: WriteSession, intent: Intent) -> None:
        """Raise an error of `prepare` if a record is longer than a segment, or a topic or a queue is missing. Cheap."""
        largest = max((file.largest_bytes for file in intent.files), default=0)
        if largest + BLANK_BYTES > session.segment_bytes:
            raise OptionError(
                f"a message takes {largest} bytes as a record, and a segment of this store holds "
                f"{session.segment_bytes - BLANK_BYTES}. Send it in parts, or to a store with larger segments "
                "(mappedFileSizeCommitLog). Nothing was written."
            )
        for topic, needed in sorted(intent.topics.items()) if intent.checks_topics else ():
            found = session.write_queues(topic)
            if found is None and not intent.create_topics:
                raise NotFoundError(
                    f'topic "{topic}" does not exist, and createTopic=false. Create it with {needed} or more queues, '
                    "or let the write create it. Nothing was written."
                )
            if found is None:
                found = intent.queue_count
                check_topic_name(topic)
            if needed > found:
                raise StoreChangedError(
                    f'topic "{topic}" has {found} write queues, and messages were prepared for queue {needed - 1}: '
                    "either the topic was changed meanwhile, or queueId names a queue that it does not have. Nothing "
                    "was written. Write again, or give the topic more queues (option queues for a topic that does not "
                    "exist yet)."
                )

    def _prepare_resume(self, session: WriteSession, intent: Intent) -> tuple[Intent, int]:
        """Check that an intent can be resumed. Return the intent, updated if necessary, and how many rows the log has.

        The cheapest checks come first, because every write session repeats the checks while the intent cannot be
        finished.
        """
        self._check_acceptable(session, intent)
        if intent.start > session.end:
            # A power cut truncated the log. Other writers may append messages there before this intent is finished, and
            # the intent's start must not be inside one of their records.
            intent = replace(intent, start=session.end)
            self.intents.write(intent)
        known = known_applied_rows(session, self.intents.count(intent))
        if known is not None and known.is_complete:
            self._check_room(session, intent, known.rows)
        # Check files of a wrong length first, most of which are missing, because this check is the cheapest.
        for file in sorted(
            intent.files, key=lambda one: files.file_size(staged_path(self.root, one.name)) == one.file_bytes
        ):
            check_staged(self.root, file)
            session.heartbeat()
        if known is not None and known.is_complete:
            rows = known.rows
        else:
            hints = self.intents.hints(intent.key.query_id)
            rows = count_applied_rows(session, self.root, intent, hints, known, lambda count: self._save(intent, count))
        self.prepare(session, intent, rows)
        # The owner may have died after it renamed the intent and before it synced the folder. Without a sync here, a
        # power cut could lose the intent and keep the rows that are appended from here.
        self.intents.sync()
        return intent, rows

    def _save(self, intent: Intent, count: Count) -> None:
        with contextlib.suppress(DiskFullError):  # if the count is not saved, the next session counts again
            self.intents.save_count(intent, count)

    def _is_in_ledger(self, intent: Intent) -> bool:
        """Return whether the ledger certainly has an intent's batch.

        Returns False if the intent has flush=async, because its ledger row is not synced. The log is compared then.
        """
        row = self.ledger.read(intent.key.query_id) if intent.is_synced else None
        return row is not None and (row.batch_id, row.rows, row.digest) == (
            intent.key.batch_id,
            intent.rows,
            intent.digest,
        )

    def stuck_error(self, intent: Intent, why: RmqError) -> StoreChangedError:
        """Return the error for an intent that cannot be finished now, because of the error `why`.

        Its text says how to fix the cause and how to abandon the intent.
        """
        path = self.intents.path(intent.key.query_id)
        error = StoreChangedError(
            f"{intent.key} of application {intent.application!r} cannot be finished: {why} Some of its {intent.rows} "
            "rows may be in the store already. Fix the cause, and the next write to the store finishes the batch. Or "
            f"abandon it by removing {path}: rows that are not in the store yet are lost, and if the query writes this "
            "batch again, the others are duplicated. Other queries can write meanwhile; retention keeps the log from "
            f"physical offset {intent.start}."
        )
        error.__cause__ = why
        return error


class IntentRollForward:
    """A finisher of StoreWriter, which finishes the intents of dead writers when a write session begins.

    It reads and appends at most `chunk_bytes` bytes of log at a time, and at most `session_bytes` in one session. A
    longer record is appended alone.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        now_ms: Callable[[], int],
        chunk_bytes: int = CHUNK_BYTES,
        session_bytes: int = MAX_SESSION_BYTES,
    ) -> None:
        self._roll_forward, self._session_bytes = BatchRollForward(root, disk, now_ms, chunk_bytes), session_bytes
        self._stuck: set[str] = set()  # queries whose intents could not be finished in the last session
        self._logged: set[str] = set()  # texts of errors that were logged, so that each is logged once per writer

    def __call__(self, session: WriteSession) -> bool:
        """Finish the intents of dead owners, or log why that is impossible. Return whether any rows were appended.

        Appends at most the bytes of one session. If it returns True, the caller must release the store's lock and call
        again in a new session. Raises an error if an append fails after it has begun, and DamageError or StoreError if
        an intent cannot be read.
        """
        intents = self._roll_forward.intents
        if not files.list_folder(intents.folder):
            return False
        intents.remove_orphans()
        orphans: list[tuple[Intent, FileLock]] = []
        appended_bytes = 0
        try:
            orphans = intents.lock_orphans()
            self._stuck.clear()
            for intent, _ in orphans:
                result = self._roll_forward.finish(session, intent, self._session_bytes - appended_bytes)
                appended_bytes += result.appended_bytes
                if result.error is not None:
                    self._stuck.add(intent.key.query_id)
                    if str(result.error) not in self._logged:
                        self._logged.add(str(result.error))
                        _LOG.error("rmq: %s", result.error)
                elif not result.is_done or appended_bytes + self._roll_forward.chunk_bytes > self._session_bytes:
                    break
            return appended_bytes > 0
        finally:
            try:
                for _, lock in orphans:
                    lock.release()
            finally:  # an interrupt may have ended the first loop
                for _, lock in orphans:
                    lock.release()

    def needed_from(self) -> Needed | None:
        """Return the physical offset from which open intents need the log; None if there is no intent.

        This is the start of the oldest intent. Intents whose owners are alive are included, because an owner may die.
        Raises the errors of `Intents.read_all`.
        """
        for intent in self._roll_forward.intents.read_all():
            query_id = intent.key.query_id
            return Needed(intent.start, self._roll_forward.intents.path(query_id), query_id in self._stuck)
        return None
