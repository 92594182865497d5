"""An intent rolled forward: by its owner chunk by chunk, or by whoever finds it when the owner is dead.

The steps, and what a crash leaves at each:

1. Topics that are missing are made, all at once and for good. A crash leaves empty topics.
2. Chunks are appended. What stands in the log is found by comparing it with what was staged (`count_appended`).
3. With flush=sync everything is settled: the ledger must not speak of messages that a power cut may take.
4. The ledger has the batch. From here on nobody appends it again; an intent that is found has only to be taken away.
5. The intent goes, and when that is on disk for good its staged files. A crash leaves files that nobody names.

Nothing that was appended is ever taken back: readers may have seen it.

An intent that cannot be finished (a staged file is gone or damaged, the disk is full) stops its own query and nobody
else, retention least of all: others are told in the log and go on. Their messages may stand between those of an intent
anyway, so it can be finished later.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rmq_spark.store.commit.intents import Hint, Intent, Intents
from rmq_spark.store.commit.ledger import Ledger, LedgerRow
from rmq_spark.store.commit.staging import CHUNK_BYTES, StagedFile, check_staged, read_chunks
from rmq_spark.store.commit.sweeping import remove_staged
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, NotFoundError, OptionError, RmqError, StoreChangedError
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import COMMIT_LOG, check_topic_name
from rmq_spark.store.format.record import BLANK_BYTES, Record, decode_record
from rmq_spark.store.log.section import Section

_LOG = logging.getLogger("rmq_spark")
_COMPARED_BYTES = 4 << 20  # of staged records, read at a time to be compared one by one
_PROGRESS_RECORDS = 5_000  # compared between two signs of life


class Roller:
    """What rolling intents forward needs to know of a store. Keeps nothing but where things are."""

    def __init__(self, root: str, disk: Disk, now_ms: Callable[[], int], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.root, self.disk, self.now_ms, self.chunk_bytes = root, disk, now_ms, chunk_bytes
        self.intents, self.ledger = Intents(root, disk), Ledger(root, disk)

    def append(self, section: Section, intent: Intent, records: EncodedRecords, first_row: int) -> int:
        """Append a chunk, the rows of an intent from number `first_row` on; return how many rows stand in the log."""
        appended = section.append(records)
        if intent.is_synced:
            section.begin_sync()  # the disk works while the next chunk is read
        rows = first_row + len(records)
        if rows < intent.rows:
            # Only a hint: a crash before it has whoever goes on compare one chunk more.
            self.intents.note_hint(intent, Hint(rows, int(appended.physical_offsets[-1])))
        return rows

    def conclude(self, section: Section, intent: Intent) -> None:
        """Make it known that all rows of an intent are in the store, and take the intent away."""
        if intent.is_synced:
            section.settle()
        if intent.key.batch_id is not None:
            row = LedgerRow(
                intent.key.query_id, intent.key.batch_id, intent.rows, intent.bytes, intent.digest, self.now_ms()
            )
            self.ledger.write(row, is_durable=intent.is_synced)
        self.intents.remove(intent.key.query_id)

    def clean_up(self, staged: Sequence[StagedFile]) -> None:
        """Take the staged files of a concluded intent away."""
        # First the intent for good: a power cut that brought it back without its files would leave it for ever.
        self.intents.sync()
        remove_staged(self.root, self.disk, staged)

    def finish(self, section: Section, intent: Intent) -> StoreChangedError | None:
        """Finish the intent of an owner who died. The caller holds its lock.

        Return None, or, if it cannot be finished now, the error for who must have it finished: what it needs is gone
        or damaged, or there is no room. Raises what an append raises that has begun. It all happens in one section,
        however much there is; those who wait for the lock see progress.
        """
        try:
            is_done = self._is_in_ledger(intent)
            if not is_done:
                intent, rows = self._take_stock(section, intent)
        except RmqError as error:
            return self.unfinished(intent, error)
        if is_done:
            # Its writer may have died between the row's name and its sync: then a power cut would leave neither.
            self.ledger.sync()
            self.intents.remove(intent.key.query_id)
            self.clean_up(intent.files)
            return None
        _LOG.warning(
            "rmq: finishing %s of application %r, whose writer died: %d of %d rows are in the store",
            intent.key,
            intent.application,
            rows,
            intent.rows,
        )
        chunks = read_chunks(self.root, intent.files, rows, self.chunk_bytes)
        while rows < intent.rows:
            try:
                records = next(chunks)
            except RmqError as error:
                return self.unfinished(intent, error)
            rows = self.append(section, intent, records, rows)
            section.note_progress()
        self.conclude(section, intent)
        self.clean_up(intent.files)
        return None

    def prepare(self, section: Section, intent: Intent, rows_there: int = 0) -> None:
        """See that the store can take an intent's rows but for the first few; then make topics that are missing.

        There must be room for all of them: a commit that fills the disk would come to an end only when there is room
        again. Raises DiskFullError, NotFoundError, OptionError, StoreChangedError, StorePathError; then nothing has
        changed, unless making a topic failed.
        """
        rows = intent.rows - rows_there
        if rows:
            section.refuse_full_disk(intent.bytes * rows // intent.rows, rows)
        largest = max((file.largest_bytes for file in intent.files), default=0)
        if largest + BLANK_BYTES > section.segment_bytes:
            raise OptionError(
                f"a message takes {largest} bytes as a record, and a segment of this store holds "
                f"{section.segment_bytes - BLANK_BYTES}. Send it in parts, or into a store with larger segments "
                "(mappedFileSizeCommitLog). Nothing was written."
            )
        for topic, wanted in sorted(intent.topics.items()):
            found = section.write_queues(topic)
            if found is None and not intent.create_topics:
                raise NotFoundError(
                    f'there is no topic "{topic}", and createTopic=false. Create it with {wanted} or more queues, or '
                    "let the write create it. Nothing was written."
                )
            if found is None:
                found = intent.queue_count
                check_topic_name(topic)
            if wanted > found:
                raise StoreChangedError(
                    f'topic "{topic}" has {found} write queues, and messages were prepared for queue {wanted - 1}: it '
                    "was changed meanwhile, or queueId asks for a queue that it does not have. Nothing was written. "
                    "Write again, or give the topic more queues (option queues where it is yet to be made)."
                )
        section.ensure_topics(sorted(intent.topics), intent.queue_count)

    def _take_stock(self, section: Section, intent: Intent) -> tuple[Intent, int]:
        """Return the intent as it stands now, and how many of its rows are in the log."""
        if intent.start > section.end:
            # A power cut took the end of the log. From here on others may append in its place, maybe before this
            # intent is finished: it must not start in the middle of one of their records.
            intent = replace(intent, start=section.end)
            self.intents.write(intent)
        else:
            # Its writer may have died between the intent's name and its sync: then a power cut would take the intent
            # and leave what is appended here.
            self.intents.sync()
        for file in intent.files:
            check_staged(self.root, file)
            section.note_progress()
        rows = count_appended(section, self.root, intent, self.intents.hints(intent.key.query_id))
        self.prepare(section, intent, rows)
        return intent, rows

    def _is_in_ledger(self, intent: Intent) -> bool:
        """Say whether the ledger has an intent's batch; if it was not synced, the log has to say so."""
        row = self.ledger.read(intent.key.query_id) if intent.is_synced else None
        return row is not None and (row.batch_id, row.rows, row.digest) == (
            intent.key.batch_id,
            intent.rows,
            intent.digest,
        )

    def unfinished(self, intent: Intent, why: RmqError) -> StoreChangedError:
        """Return the error for an intent that cannot be finished as things are: what to mend, or how to give it up."""
        path = self.intents.path(intent.key.query_id)
        error = StoreChangedError(
            f"{intent.key} was begun by application {intent.application!r} and cannot be finished: {why} Some of its "
            f"{intent.rows} rows may be in the store already. Mend that, and the next write to the store finishes it. "
            f"Or give it up by removing {path}: rows that are not in the store yet stay out, and if the query writes "
            "this batch again, the others are there twice. Other queries can write meanwhile; retention leaves "
            f"the log from physical offset {intent.start} on."
        )
        error.__cause__ = why
        return error


class IntentFinisher:
    """Called in every section before its own work (StoreWriter's `finishers`): finishes what dead writers promised.

    At most `chunk_bytes` are appended, and in memory, at a time.
    """

    def __init__(self, root: str, disk: Disk, now_ms: Callable[[], int], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._roller = Roller(root, disk, now_ms, chunk_bytes)
        self._told: set[str] = set()  # what was logged: a writer has many sections

    def __call__(self, section: Section) -> None:
        """Finish every intent whose owner is dead, or say in the log why that cannot be done.

        Raises what an append raises that has begun, and DamageError or StoreError for an intent that cannot be read:
        nobody knows what it asks for.
        """
        intents = self._roller.intents
        if not files.list_folder(intents.folder):
            return
        intents.remove_remains()
        dead = intents.take_dead()
        try:
            for intent, _ in dead:
                error = self._roller.finish(section, intent)
                if error is not None and str(error) not in self._told:
                    self._told.add(str(error))
                    _LOG.error("rmq: %s", error)
        finally:
            for _, lock in dead:
                lock.release()

    def needed_from(self) -> int | None:
        """Return where the oldest intent's rows begin: without that part of the log nobody could finish it.

        The living are asked too: they may die. Raises what `Intents.read_all` raises.
        """
        return min((intent.start for intent in self._roller.intents.read_all()), default=None)


def count_appended(section: Section, root: str, intent: Intent, hints: Sequence[Hint]) -> int:
    """Return how many of an intent's rows stand in the log, counted from the first: they are appended in order.

    Starts at the last hint that the log bears out, else where the log ended when the intent was made, and compares the
    log's records with the staged ones. Others' records may stand between. Raises DamageError for a log that cannot be
    read up to its end or has lost a row, and what `read_chunks` raises.
    """
    rows, place = 0, _first_record(section, intent.start)
    staged = _staged_records(root, intent.files, 0)
    for hint in reversed(hints):
        if not 0 < hint.rows <= intent.rows or hint.physical_offset >= section.end:
            continue
        from_hint = _staged_records(root, intent.files, hint.rows - 1)
        found = section.record_from(hint.physical_offset)
        if found is not None and _is_same(found, next(from_hint)):
            rows, place, staged = hint.rows, hint.physical_offset + found.total_size, from_hint
            break
    wanted, following = next(staged, None), next(staged, None)
    if wanted is None:
        return rows
    for number, record in enumerate(section.records_from(place)):
        if _is_same(record, wanted):
            rows += 1
            wanted, following = following, next(staged, None)
            if wanted is None:
                return rows
        elif following is not None and _is_same(record, following):
            # Rows are appended in their order. What no CRC covers may be damaged: the row would come twice.
            raise DamageError(
                f"row {rows + 1} of {intent.rows} of {intent.key}, and row {rows} nowhere before it, counted from 0",
                files.join(root, COMMIT_LOG),
                record.physical_offset,
                f"row {rows} between physical offset {place} and this one",
                "none that is equal to the staged one",
            )
        if number % _PROGRESS_RECORDS == 0:
            section.note_progress()
    return rows


def _first_record(section: Section, physical_offset: int) -> int:
    """Return where to look from: a physical offset, or its segment's begin if no record starts there any more.

    After a power cut a broker may have taken back the log's end and written other messages in its place.
    """
    if physical_offset >= section.end or section.record_from(physical_offset) is not None:
        return physical_offset
    return physical_offset - physical_offset % section.segment_bytes


def _is_same(one: Record, other: Record) -> bool:
    """Say whether two records are the same message: the UNIQ_KEY is among the properties."""
    return (
        one.properties == other.properties
        and (one.topic, one.queue_id) == (other.topic, other.queue_id)
        and one.body == other.body
    )


def _staged_records(root: str, staged: Sequence[StagedFile], first_row: int) -> Iterator[Record]:
    """Yield the staged records from a row on, decoded one by one."""
    for records in read_chunks(root, staged, first_row, _COMPARED_BYTES):
        view, begin = records.data.data, 0
        for end in np.cumsum(records.sizes).tolist():
            record = decode_record(view[begin:end])
            assert isinstance(record, Record), record  # its checksum was right
            yield record
            begin = end
