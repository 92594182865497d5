"""Import: send the messages of a parquet file to a store directory. Repeated calls send each message only once.

An import sends the file in parts, and commits each part. The ledger records the number of the last commit under the
import's name, with metadata. The metadata contains how many rows of the file are in the store, and is committed
together with the messages. So a call after a crash resumes after the last commit, and a call after a complete import
sends nothing.

The metadata also identifies the file and the topic. If another file is imported under the same name, the import is
refused, because the first rows of that file would be skipped.

The messages are new. Their ids, hosts, times and queue offsets are those of this import, and reconsumeTimes is 0.
Properties that have a meaning only in the old store are dropped: DELAY, REAL_TOPIC, UNIQ_KEY and the others in
`property_encoder.ENGINE_OWNED`. Everything else is kept. In each queue, messages have the order of the file.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath

from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import random_bits, wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import BatchConflictError, OptionError
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import CommitKey
from rmq_spark.store.tools.import_source import DEFAULT_QUEUES, ImportSource
from rmq_spark.store.tools.parquet_file import ParquetSource
from rmq_spark.store.transaction.commit import CommitOptions, commit_staged
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow, folder_of
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.sink import RecordBuilder, RecordBuilderSettings
from rmq_spark.store.transaction.staging import StageWriter

_ROWS = "rows"  # name in the metadata of a commit: the number of rows of the file that are in the store
_FILE = "file"  # name in the metadata of a commit: 48 bits of a digest of the file and the topic


@dataclass(frozen=True, slots=True)
class ImportTerms:
    """What is imported: the arguments `topic`, `name`, `keep_queues` and `progress` of `import_parquet`."""

    topic: str | None = None
    name: str | None = None
    keep_queues: bool = True
    progress: Callable[[int, int], None] | None = None

    def open(self, source: ParquetSource, *, has_brokers: bool) -> ImportSource:
        """Return the rows of a file, for a place that has names of brokers or not."""
        return ImportSource(source, self.topic, self.name, keep_queues=self.keep_queues, has_brokers=has_brokers)

    def note(self, done: int, total: int) -> None:
        """Report the number of messages that were sent, and of those in the file."""
        if self.progress is not None:
            self.progress(done, total)


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import.

    `name` identifies the import. `messages` is the number of messages that this call sent, and `skipped` the number
    that earlier calls had sent. `topics` are the topics of the file, sorted.
    """

    name: str
    messages: int
    skipped: int
    topics: tuple[str, ...]


def import_into_store(
    path: str | PurePath, source: str | PurePath, terms: ImportTerms, settings: WriterSettings
) -> Imported:
    """Send the messages of the file `source` to the store at `path`. See `import_parquet` of `store.parquet_copies`."""
    with ParquetSource(files.absolute(source)) as opened:
        root, disk = files.store_folder(path), Disk()
        work = _Import(root, disk, terms, terms.open(opened, has_brokers=False), settings.commit_log_path)
        finisher = IntentRollForward(root, disk, wall_clock_ms)
        with StoreWriter(root, disk, settings, wall_clock_ms, time.sleep, (finisher,)) as writer:
            return work.run(writer)


class _Import:
    """One call of `import_into_store`."""

    def __init__(
        self, root: str, disk: Disk, terms: ImportTerms, source: ImportSource, commit_log_path: str | None
    ) -> None:
        self._root, self._disk, self._terms, self._source = root, disk, terms, source
        self._commit_log_path = commit_log_path
        self._file = int(source.digest[:12], 16)
        self._query_id = f"rmq:import:{source.name}"

    def run(self, writer: StoreWriter) -> Imported:
        """Send and commit the rows that are not in the store yet, part by part."""
        name, total = self._source.name, self._source.total
        with writer.section() as section:  # first completes the commit of a call that died, so the ledger is current
            row = Ledger(self._root, self._disk).read(self._query_id)
            self._require_same_file(row, total)
            self._make_topics(section.write_queues, section.ensure_topics)
        number, at = (-1, 0) if row is None else (row.batch_id, row.note.get(_ROWS, 0))
        skipped = at
        outbox = RecordBuilder(self._root, RecordBuilderSettings(self._commit_log_path, DEFAULT_QUEUES))
        self._terms.note(at, total)
        for rows in self._source.parts(at):
            number += 1
            key = CommitKey(self._query_id, number)
            stage = StageWriter(self._root, self._disk, folder_of(key), f"{random_bits():08x}")
            try:
                for batch in rows.to_batches():
                    stage.write(outbox.encode(batch, at))
                    at += batch.num_rows
                staged = stage.finish()
            except BaseException:
                stage.discard()
                raise
            options = CommitOptions(is_transaction=True, create_topics=False, note={_ROWS: at, _FILE: self._file})
            if commit_staged(writer, key, [staged], options).skipped:
                raise BatchConflictError(
                    f"another import named {name!r} is running on {self._root}. Call again when it is done."
                )
            self._terms.note(at, total)
        return Imported(name, at - skipped, skipped, self._source.topics)

    def _require_same_file(self, row: LedgerRow | None, total: int) -> None:
        """Raise OptionError if another file was sent under this name, because rows of this file would be skipped.

        `row` is the import's row in the ledger, None for a new import. `total` is the number of rows of the file.
        """
        if row is None:
            return
        sent = row.note.get(_ROWS, 0)
        if sent > total or row.note.get(_FILE, self._file) != self._file:
            raise OptionError(
                f"{self._source.path} is not what was imported as {self._source.name!r}, of which {sent} rows are in "
                "the store: the file or its topic was another one. Give this import a name of its own. Nothing was "
                "sent."
            )

    def _make_topics(
        self, has: Callable[[str], int | None], make: Callable[[Iterable[str], dict[str, int]], object]
    ) -> None:
        """Create the missing topics. `has` returns the number of queues of a topic, or None if the topic is missing.

        Raises OptionError if an existing topic has too few queues for the messages. Then no topic was created.
        """
        new, missing = self._source.new_queue_counts(), dict[str, int]()
        for name in self._source.topics:
            count, needed = has(name), max(self._source.needed_queues(name).values())
            if count is None:
                missing[name] = new[name]
            elif count < needed:
                raise OptionError(
                    f"topic {name} has {count} queues in the store, and the file has messages of queue {needed - 1}. "
                    "Give keep_queues=False to spread them over the existing queues, or a topic of its own "
                    "(topic=...). Nothing was sent."
                )
        if missing:
            make(missing, missing)  # one call writes topics.json once, which may be long
