"""`import_parquet`: the messages of a parquet file sent to a store, each once, however often that is called.

An import is a row of commits, a part of the file in each, numbered in the ledger under the import's name; the note of
each says how many rows of the file are in the store by then. It comes there with the messages, so a call after a kill
goes on where the last one ended, and one after the end sends nothing.

What is sent is new: its ids, hosts, times and queue offsets are those of this sending, reconsumeTimes is 0, and
properties that only mean something where the message was (DELAY, REAL_TOPIC, UNIQ_KEY and the others in
`outgoing_properties.ENGINE_OWNED`) are left out. All else is as it was, in the order of the file in each queue.

The note also says which file and topic a name was first used for: another file under that name would be taken for one
that is half sent, and its first rows would be passed over.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import pyarrow as pa

from rmq_spark.store.commit.arguments import cast_columns, check_flags, check_number, check_topic, messages_of
from rmq_spark.store.commit.commits import CommitOptions, commit_staged
from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.keys import CommitKey
from rmq_spark.store.commit.ledger import Ledger, LedgerRow
from rmq_spark.store.commit.outbox import Outbox, OutboxSettings
from rmq_spark.store.commit.staging import StageWriter
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import random_bits, wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import BatchConflictError, OptionError
from rmq_spark.store.explore.parquet_export import METADATA
from rmq_spark.store.explore.parquet_file import ParquetSource
from rmq_spark.store.format.encoding import MESSAGE_COLUMNS
from rmq_spark.store.format.filenames import check_sent_topic
from rmq_spark.store.format.side_json import parse_json
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.topics import MAX_QUEUES

_ROWS = "rows"  # in the note of a commit: how many rows of the file are in the store
_FILE = "file"  # in the note, too: what tells the file and the topic that it goes to, 48 bits
_READ_ROWS = 1024  # of the file at a time: bodies may be large
_COMMIT_ROWS, _COMMIT_BYTES = 65_536, 16 << 20
_DEFAULT_QUEUES = 4
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did: messages that this call sent, those that earlier calls of the name had sent, and topics."""

    name: str
    messages: int
    skipped: int
    topics: tuple[str, ...]


def import_parquet(
    path: str | PurePath,
    source: str | PurePath,
    *,
    topic: str | None = None,
    name: str | None = None,
    keep_queues: bool = True,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Send the messages of a parquet file to the store at `path`, each once, and return how many that were.

    The file is one of `export_parquet`, or any with columns of the sink (body, and topic unless `topic` is given).
    Topics that are missing are made, with as many queues as they had; each message goes to the queue that it was in,
    or, without `keep_queues`, by its sharding key or in turn. Called again, after a kill or an error too, it goes on
    behind what is in the store, by `name`; without one the content of the file and `topic` name it. To send the same
    file twice to the same topics give two names. `progress` is called with the messages that are in the store and those
    of the file.

    Raises OptionError for what is no such file, for a name under which another file was sent, and for rows that are no
    messages (what was sent before stays sent), BatchConflictError where another call of the name is at work, and what a
    sink raises of the store.
    """
    if topic is not None:
        check_sent_topic(check_topic(topic))
    if name is not None and (not isinstance(name, str) or not name):
        raise OptionError(f"name={name!r} is no name: a text, or None to go by the content of the file.")
    check_number("lock_timeout_ms", lock_timeout_ms, 0)
    check_flags(allow_network_store=allow_network_store)
    with ParquetSource(files.absolute(source)) as opened:
        work = _Import(files.absolute(path), opened, topic, name, keep_queues, commit_log_path)
        with work.open_writer(lock_timeout_ms, allow_network_store) as writer:
            return work.run(writer, progress or (lambda done, total: None))


class _Import:
    """One call."""

    def __init__(
        self,
        root: str,
        source: ParquetSource,
        topic: str | None,
        name: str | None,
        keep_queues: bool,
        commit_log_path: str | None,
    ) -> None:
        self._root, self._source, self._topic, self._keep_queues = root, source, topic, keep_queues
        self._commit_log_path, self._disk = commit_log_path, Disk()
        names = source.parquet.schema_arrow.names
        twice = sorted({name for name in names if names.count(name) > 1} & {*MESSAGE_COLUMNS, "physicalTopic"})
        if twice:
            raise OptionError(
                f"{source.path} has the column {', '.join(twice)} twice; expected each column once. Write the file "
                "without the second one. Nothing was sent."
            )
        self._columns = {column: column for column in MESSAGE_COLUMNS if column in names}
        if topic is None and "physicalTopic" in names:
            self._columns["topic"] = "physicalTopic"  # `topic` is where a retried message came from
        if topic is not None or not keep_queues:
            self._columns.pop("topic" if topic is not None else "queueId", None)
        if not keep_queues:
            self._columns.pop("queueId", None)
        missing = {"body"} - set(self._columns) | ({"topic"} - set(self._columns) if topic is None else set())
        if missing:
            raise OptionError(
                f"{source.path} has no column {', '.join(sorted(missing))}. It has: {', '.join(names)}. Wanted are "
                f"some of: {', '.join(MESSAGE_COLUMNS)}. Nothing was sent."
            )
        digest = source.digest()
        own_name = digest if topic is None else hashlib.sha256(f"{digest}:{topic}".encode()).hexdigest()[: len(digest)]
        self._name = name or own_name
        self._file = int(own_name[:12], 16)
        self._query_id = f"rmq:import:{self._name}"
        self._queues = self._find_queues()

    def open_writer(self, lock_timeout_ms: int, allow_network_store: bool) -> StoreWriter:
        """Return a writer of the store, which finishes what dead ones promised."""
        settings = WriterSettings("rmq-spark import", lock_timeout_ms, allow_network_store, self._commit_log_path)
        finisher = IntentFinisher(self._root, self._disk, wall_clock_ms)
        return StoreWriter(self._root, self._disk, settings, wall_clock_ms, time.sleep, (finisher,))

    def run(self, writer: StoreWriter, progress: Callable[[int, int], None]) -> Imported:
        """Send what is not in the store yet, a commit at a time."""
        total = self._source.parquet.metadata.num_rows
        with writer.section() as section:  # what a dead call promised is finished by then, and the ledger says so
            row = Ledger(self._root, self._disk).read(self._query_id)
            self._refuse_other_file(row, total)
            self._make_topics(section.write_queues, section.ensure_topics)
        number, at = (-1, 0) if row is None else (row.batch_id, row.note.get(_ROWS, 0))
        skipped = at
        outbox = Outbox(self._root, OutboxSettings(self._commit_log_path, _DEFAULT_QUEUES))
        progress(at, total)
        for rows in self._parts(at):
            number += 1
            key = CommitKey(self._query_id, number)
            stage = StageWriter(self._root, self._disk, key.folder, f"{random_bits():08x}")
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
                    f"another import named {self._name!r} is at work on {self._root}. Call again when it is done."
                )
            progress(at, total)
        return Imported(self._name, at - skipped, skipped, tuple(sorted(self._queues)))

    def _refuse_other_file(self, row: LedgerRow | None, total: int) -> None:
        """Raise OptionError if under this name something else was sent: its rows would count as sent."""
        if row is None:
            return
        sent = row.note.get(_ROWS, 0)
        if sent > total or row.note.get(_FILE, self._file) != self._file:
            raise OptionError(
                f"{self._source.path} is not what was imported as {self._name!r}, of which {sent} rows are in the "
                "store: that was another file, or went to another topic. Give this one a name of its own. Nothing was "
                "sent."
            )

    def _parts(self, first_row: int) -> Iterator[pa.Table]:
        """Yield the rows of the file from one on, as the encoder takes them, as much at a time as a commit has."""
        waiting: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in self._batches(first_row, list(self._columns.values())):
            waiting.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= _COMMIT_ROWS or size >= _COMMIT_BYTES:
                yield self._messages(waiting)
                waiting, rows, size = [], 0, 0
        if waiting:
            yield self._messages(waiting)

    def _batches(self, first_row: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        metadata, before = self._source.parquet.metadata, 0
        for group in range(metadata.num_row_groups):
            count = metadata.row_group(group).num_rows
            skipped = min(max(first_row - before, 0), count)
            before += count
            if skipped == count:
                continue
            try:
                for batch in self._source.parquet.iter_batches(_READ_ROWS, [group], columns, use_threads=False):
                    yield batch.slice(skipped)
                    skipped = max(skipped - batch.num_rows, 0)
            except (pa.ArrowException, OSError) as error:
                raise OptionError(f"{self._source.path}, row group {group}, cannot be read: {error}.") from None

    def _messages(self, batches: list[pa.RecordBatch]) -> pa.Table:
        table = pa.Table.from_batches([batch for batch in batches if batch.num_rows])
        return messages_of(self._cast(table, list(self._columns)), self._topic).combine_chunks()

    def _cast(self, table: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Return some columns of the file's rows under the names and with the types of messages."""
        table = table.select([self._columns[column] for column in columns]).rename_columns(list(columns))
        try:
            return cast_columns(table)
        except OptionError as error:
            raise OptionError(f"{self._source.path}: {error}") from None

    def _find_queues(self) -> dict[str, int]:
        """Return the topics of the file, and how many queues each needs at least."""
        self._cast(self._source.parquet.schema_arrow.empty_table(), list(self._columns))
        columns = [column for column in ("topic", "queueId") if column in self._columns]
        found: dict[str, int] = {} if self._topic is None else {self._topic: 0}
        for batch in self._batches(0, [self._columns[column] for column in columns]) if columns else ():
            rows = self._cast(pa.Table.from_batches([batch]), columns)
            for name, least, most in _queue_ids(rows, self._topic):
                for queue_id in (least, most):
                    if queue_id is not None and not 0 <= queue_id < MAX_QUEUES:
                        raise OptionError(
                            f"{self._source.path}: topic {name!r} has a row with queueId {queue_id}; expected 0 to "
                            f"{MAX_QUEUES - 1}. Correct the column, or give keep_queues=False to have the messages "
                            "spread over the topic's queues. Nothing was sent."
                        )
                found[name] = max(found.get(name, 0), 0 if most is None else most + 1)
        for name in found:
            check_sent_topic(check_topic(name))
        return found

    def _exported_queues(self) -> dict[str, int]:
        """Return how many queues the topics of an exported file had. Raises OptionError for wild numbers."""
        text = (self._source.parquet.schema_arrow.metadata or {}).get(METADATA)
        try:
            held = {} if text is None else parse_json(text).get("queues", {})
            counts = {name: count for name, count in held.items() if name in self._queues}
            if all(type(count) is int and 0 <= count <= MAX_QUEUES for count in counts.values()):
                return counts
            found = repr(counts)
        except (AttributeError, ValueError) as error:
            found = repr(error)
        raise OptionError(
            f"{self._source.path} has metadata that no export writes: found {found[:_SHOWN_CHARS]}; "
            f"expected 0 to {MAX_QUEUES} queues for each topic. Export the file again, or write it without this "
            "metadata. Nothing was sent."
        )

    def _make_topics(
        self, has: Callable[[str], int | None], make: Callable[[Iterable[str], dict[str, int]], object]
    ) -> None:
        """Make topics that are missing; raise before that if a topic has too few queues for the file's messages."""
        told, missing = self._exported_queues(), dict[str, int]()
        for name, needed in self._queues.items():
            count = has(name)
            if count is None:
                missing[name] = max(needed, told.get(name, _DEFAULT_QUEUES), 1)
            elif count < needed:
                raise OptionError(
                    f"topic {name} has {count} queues in the store, and the file has messages of queue {needed - 1}. "
                    "Give keep_queues=False to have them spread over the queues that there are, or a topic of its own "
                    "(topic=...). Nothing was sent."
                )
        if missing:
            make(missing, missing)  # in one write: the file is as long as the store has topics


def _queue_ids(rows: pa.Table, topic: str | None) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield each topic of some rows, with its smallest and its largest queue id, None where no row has one."""
    names = rows["topic"] if topic is None else pa.repeat(pa.scalar(topic), len(rows))
    ids = rows["queueId"] if "queueId" in rows.column_names else pa.nulls(len(rows), pa.int32())
    grouped = pa.table({"topic": names, "id": ids}).group_by("topic").aggregate([("id", "min"), ("id", "max")])
    for name, least, most in zip(
        *(grouped[column].to_pylist() for column in ("topic", "id_min", "id_max")), strict=True
    ):
        if name is None:
            raise OptionError("a row has no topic. Give topic=, or a file in which each row has one. Nothing was sent.")
        yield name, least, most
