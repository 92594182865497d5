"""An intent rolled forward: by its owner chunk by chunk, or by whoever finds it when the owner is dead.

The steps, and what a crash leaves at each:

1. Topics that are missing are made, all at once and for good. A crash leaves empty topics.
2. Chunks are appended. How many stand in the log is on disk, or found by comparing it with what was staged
   (`counting.py`).
3. With flush=sync everything is settled: the ledger must not speak of messages that a power cut may take.
4. The ledger has the batch. From here on nobody appends it again; an intent that is found has only to be taken away.
5. The intent goes, and when that is on disk for good its staged files. A crash leaves files that nobody names.

Nothing that was appended is ever taken back: readers may have seen it.

An intent that cannot be finished (a staged file is gone or damaged, the disk is full) stops its own query, and no other
from writing: others are told in the log and go on. Their messages may stand between those of an intent anyway, so it
can be finished later. What it asks of them in every section is little, whatever stands in the log by then. But
retention leaves the log from where the intent begins, until it is finished or given up, and says so.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rmq_spark.store.commit.counting import count_appended, known_count, mark_of
from rmq_spark.store.commit.intents import Count, Hint, Intent, Intents
from rmq_spark.store.commit.ledger import Ledger, LedgerRow
from rmq_spark.store.commit.staged_file import StagedFile, staged_path
from rmq_spark.store.commit.staging import CHUNK_BYTES, check_staged, read_chunks
from rmq_spark.store.commit.sweeping import remove_staged
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.errors import (
    DiskFullError,
    LockTimeoutError,
    NotFoundError,
    OptionError,
    RmqError,
    StoreChangedError,
)
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import check_topic_name
from rmq_spark.store.format.record import BLANK_BYTES
from rmq_spark.store.log.retention import Needed
from rmq_spark.store.log.section import MAX_SECTION_BYTES, Section

_LOG = logging.getLogger("rmq_spark")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did for an intent: bytes of log appended, and how it stands. Without error there may be more."""

    appended_bytes: int = 0
    is_done: bool = False
    error: StoreChangedError | None = None


class Roller:
    """What rolling intents forward needs to know of a store. Keeps nothing but where things are."""

    def __init__(self, root: str, disk: Disk, now_ms: Callable[[], int], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.root, self.disk, self.now_ms, self.chunk_bytes = root, disk, now_ms, chunk_bytes
        self.intents, self.ledger = Intents(root, disk), Ledger(root, disk)

    def append(self, section: Section, intent: Intent, records: EncodedRecords, first_row: int) -> int:
        """Append a chunk, the rows of an intent from number `first_row` on; return how many rows stand in the log."""
        self.intents.forget_count(intent)
        appended = section.append(records)
        if intent.is_synced:
            section.begin_sync()  # the disk works while the next chunk is read
        rows = first_row + len(records)
        if rows < intent.rows:
            # Only a hint: a crash before it has whoever goes on compare one chunk more.
            place = int(appended.physical_offsets[-1])
            self.intents.note_hint(intent, Hint(rows, place))
            last = section.record_from(place)
            if last is not None:
                self.intents.note_count(intent, Count(rows, place, mark_of(last), is_whole=True))
        return rows

    def conclude(self, section: Section, intent: Intent) -> None:
        """Make it known that all rows of an intent are in the store, and take the intent away."""
        if intent.is_synced:
            section.settle()
        section.note_progress()  # raises where a broker may write over the rows: then they are not to be spoken of
        query_id, batch_id = intent.key.query_id, intent.key.batch_id
        if batch_id is not None:
            row = LedgerRow(query_id, batch_id, intent.rows, intent.bytes, intent.digest, self.now_ms(), intent.note)
            self.ledger.write(row, is_durable=intent.is_synced)
        self.intents.remove(intent.key.query_id)

    def clean_up(self, staged: Sequence[StagedFile]) -> None:
        """Take the staged files of a concluded intent away."""
        # First the intent for good: a power cut that brought it back without its files would leave it for ever.
        self.intents.sync()
        remove_staged(self.root, self.disk, staged)

    def finish(self, section: Section, intent: Intent, turn_bytes: int = MAX_SECTION_BYTES) -> Turn:
        """Go on with the intent of an owner who died, by so many bytes of log at most. The caller holds its lock.

        The turn has an error, for who must have it finished, if it cannot go on now: what it needs is gone or damaged,
        or there is no room. Raises what an append raises that has begun, and LockTimeoutError where a broker starts.
        """
        try:
            is_done = self._is_in_ledger(intent)
            if not is_done:
                intent, rows = self._take_stock(section, intent)
        except LockTimeoutError:
            raise
        except RmqError as error:
            return Turn(error=self.unfinished(intent, error))
        if is_done:
            # Its writer may have died between the row's name and its sync: then a power cut would leave neither.
            self.ledger.sync()
            self.intents.remove(intent.key.query_id)
            self.clean_up(intent.files)
            return Turn(is_done=True)
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
            if appended_bytes and (appended_bytes + self.chunk_bytes > turn_bytes or section.is_waited_for):
                return Turn(appended_bytes)
            try:
                records = next(chunks)
            except RmqError as error:
                return Turn(appended_bytes, error=self.unfinished(intent, error))
            rows = self.append(section, intent, records, rows)
            appended_bytes += len(records.data)
            section.note_progress()
        self.conclude(section, intent)
        self.clean_up(intent.files)
        return Turn(appended_bytes, is_done=True)

    def prepare(self, section: Section, intent: Intent, rows_there: int = 0) -> None:
        """See that the store can take an intent's rows but for the first few; then make topics that are missing.

        There must be room for all of them: a commit that fills the disk would come to an end only when there is room
        again. Raises DiskFullError, NotFoundError, OptionError, StoreChangedError, StorePathError; then nothing has
        changed, unless making a topic failed.
        """
        self._refuse_full_disk(section, intent, rows_there)
        self._refuse_misfits(section, intent)
        if intent.checks_topics:
            section.ensure_topics(sorted(intent.topics), intent.queue_count)

    def _refuse_full_disk(self, section: Section, intent: Intent, rows_there: int) -> None:
        rows = intent.rows - rows_there
        if rows:
            section.refuse_full_disk(intent.bytes * rows // intent.rows, rows)

    def _refuse_misfits(self, section: Section, intent: Intent) -> None:
        """Raise if the store cannot take some rows whatever room there is. Cheap."""
        largest = max((file.largest_bytes for file in intent.files), default=0)
        if largest + BLANK_BYTES > section.segment_bytes:
            raise OptionError(
                f"a message takes {largest} bytes as a record, and a segment of this store holds "
                f"{section.segment_bytes - BLANK_BYTES}. Send it in parts, or into a store with larger segments "
                "(mappedFileSizeCommitLog). Nothing was written."
            )
        for topic, wanted in sorted(intent.topics.items()) if intent.checks_topics else ():
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

    def _take_stock(self, section: Section, intent: Intent) -> tuple[Intent, int]:
        """Return the intent as it stands now, and how many of its rows are in the log.

        What is asked comes in the order of what it costs: this is done in every section as long as it raises.
        """
        self._refuse_misfits(section, intent)
        if intent.start > section.end:
            # A power cut took the end of the log. From here on others may append in its place, maybe before this
            # intent is finished: it must not start in the middle of one of their records.
            intent = replace(intent, start=section.end)
            self.intents.write(intent)
        known = known_count(section, self.intents.count(intent))
        if known is not None and known.is_whole:
            self._refuse_full_disk(section, intent, known.rows)
        # First those of another length, most often of none: one look at each tells.
        for file in sorted(intent.files, key=self._has_its_length):
            check_staged(self.root, file)
            section.note_progress()
        if known is not None and known.is_whole:
            rows = known.rows
        else:
            hints = self.intents.hints(intent.key.query_id)
            rows = count_appended(section, self.root, intent, hints, known, lambda count: self._keep(intent, count))
        self.prepare(section, intent, rows)
        # Its writer may have died between the intent's name and its sync: then a power cut would take the intent and
        # leave what is appended from here on.
        self.intents.sync()
        return intent, rows

    def _has_its_length(self, file: StagedFile) -> bool:
        return files.file_size(staged_path(self.root, file.name)) == file.file_bytes

    def _keep(self, intent: Intent, count: Count) -> None:
        with contextlib.suppress(DiskFullError):  # then the next section counts again
            self.intents.note_count(intent, count)

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

    At most `chunk_bytes` of log are appended, and in memory, at a time, and at most `turn_bytes` in a section, but for
    a record that is longer.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        now_ms: Callable[[], int],
        chunk_bytes: int = CHUNK_BYTES,
        turn_bytes: int = MAX_SECTION_BYTES,
    ) -> None:
        self._roller, self._turn_bytes = Roller(root, disk, now_ms, chunk_bytes), turn_bytes
        self._stuck: set[str] = set()  # queries whose intents cannot be finished, as of the last section
        self._told: set[str] = set()  # what was logged: a writer has many sections

    def __call__(self, section: Section) -> bool:
        """Finish intents whose owners are dead, one turn of them all, or say in the log why that cannot be done.

        Return whether anything was appended: then the store is to be released, and there may be more to do. Raises what
        an append raises that has begun, and DamageError or StoreError for an intent that cannot be read: nobody knows
        what it asks for.
        """
        intents = self._roller.intents
        if not files.list_folder(intents.folder):
            return False
        intents.remove_remains()
        dead: list[tuple[Intent, FileLock]] = []
        appended_bytes = 0
        try:
            dead = intents.take_dead()
            self._stuck.clear()
            for intent, _ in dead:
                turn = self._roller.finish(section, intent, self._turn_bytes - appended_bytes)
                appended_bytes += turn.appended_bytes
                if turn.error is not None:
                    self._stuck.add(intent.key.query_id)
                    if str(turn.error) not in self._told:
                        self._told.add(str(turn.error))
                        _LOG.error("rmq: %s", turn.error)
                elif not turn.is_done or appended_bytes + self._roller.chunk_bytes > self._turn_bytes:
                    break
            return appended_bytes > 0
        finally:
            try:
                for _, lock in dead:
                    lock.release()
            finally:  # an interrupt may have ended the first round
                for _, lock in dead:
                    lock.release()

    def needed_from(self) -> Needed | None:
        """Return where the oldest intent's rows begin: without that part of the log nobody could finish it.

        The living are asked too: they may die. Raises what `Intents.read_all` raises.
        """
        for intent in self._roller.intents.read_all():
            query_id = intent.key.query_id
            return Needed(intent.start, self._roller.intents.path(query_id), query_id in self._stuck)
        return None
