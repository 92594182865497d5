"""`import_parquet`: send the messages of a parquet file to a store. Repeated calls send each message only once.

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

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import pyarrow as pa

from rmq_spark.store.argument_checks import check_flags, check_setting
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import random_bits, wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import BatchConflictError, OptionError
from rmq_spark.store.format.message_encoder import MESSAGE_COLUMNS
from rmq_spark.store.format.message_table import cast_columns, check_topic, messages_of
from rmq_spark.store.format.side_file import parse_json
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import CommitKey
from rmq_spark.store.names import MAX_QUEUES, check_sent_topic
from rmq_spark.store.tools.parquet_file import METADATA, ParquetSource
from rmq_spark.store.transaction.commit import CommitOptions, commit_staged
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow, folder_of
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.sink import RecordBuilder, RecordBuilderSettings
from rmq_spark.store.transaction.staging import StageWriter

_ROWS = "rows"  # name in the metadata of a commit: the number of rows of the file that are in the store
_FILE = "file"  # name in the metadata of a commit: 48 bits of a digest of the file and the topic
_READ_ROWS = 1024  # rows that are read at once; small, because bodies may be large
_COMMIT_ROWS, _COMMIT_BYTES = 65_536, 16 << 20
_DEFAULT_QUEUES = 4
_SHOWN_CHARS = 80


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
    """Send the messages of the parquet file `source` to the store at `path`. Repeated calls send each message once.

    `source` is a file that `export_parquet` wrote, or any parquet file with columns of the sink. The column `body` is
    required, and also `topic`, unless the argument `topic` is given. Then all messages are sent to that topic.

    Missing topics are created. If the file is an export, a topic gets as many queues as it had in the old store. Each
    message is sent to the queue with its old queue id. If `keep_queues` is False, its queue is chosen by its sharding
    key, or round robin if it has none.

    If a call fails or crashes, call it again: it resumes after the rows that are in the store. `name` identifies the
    import. If it is None, it is derived from the file's content and `topic`. To send the same file twice to the same
    topics, use two names.

    `progress(done, total)` is called with the number of messages that are in the store, and the number in the file.

    Raises OptionError if the file is invalid, if `name` was used for another file, or if a row is not a valid message
    (rows of earlier commits stay in the store). Raises BatchConflictError if another call with this name is running.
    Also raises the errors that a sink raises.
    """
    if topic is not None:
        check_sent_topic(check_topic(topic))
    if name is not None and (not isinstance(name, str) or not name):
        raise OptionError(f"name={name!r} must be a text that is not empty, or None to go by the content of the file.")
    check_setting("lock_timeout_ms", lock_timeout_ms, 0)
    check_flags(allow_network_store=allow_network_store)
    with ParquetSource(files.absolute(source)) as opened:
        root, disk = files.absolute(path), Disk()
        work = _Import(root, disk, opened, topic, name, keep_queues, commit_log_path)
        settings = WriterSettings("rmq-spark import", lock_timeout_ms, allow_network_store, commit_log_path)
        finisher = IntentRollForward(root, disk, wall_clock_ms)
        with StoreWriter(root, disk, settings, wall_clock_ms, time.sleep, (finisher,)) as writer:
            return work.run(writer, progress or (lambda done, total: None))


class _Import:
    """One call of `import_parquet`."""

    def __init__(
        self,
        root: str,
        disk: Disk,
        source: ParquetSource,
        topic: str | None,
        name: str | None,
        keep_queues: bool,
        commit_log_path: str | None,
    ) -> None:
        self._root, self._disk, self._source, self._topic = root, disk, source, topic
        self._commit_log_path = commit_log_path
        names = source.parquet.schema_arrow.names
        twice = sorted({name for name in names if names.count(name) > 1} & {*MESSAGE_COLUMNS, "physicalTopic"})
        if twice:
            raise OptionError(
                f"{source.path} has the column {', '.join(twice)} twice; expected each column once. Write the file "
                "without the second one. Nothing was sent."
            )
        self._columns = {column: column for column in MESSAGE_COLUMNS if column in names}
        if topic is None and "physicalTopic" in names:
            self._columns["topic"] = "physicalTopic"  # for a retried message, `topic` is the original topic
        if topic is not None:
            self._columns.pop("topic", None)
        if not keep_queues:
            self._columns.pop("queueId", None)
        missing = {"body"} - set(self._columns) | ({"topic"} - set(self._columns) if topic is None else set())
        if missing:
            raise OptionError(
                f"{source.path} has no column {', '.join(sorted(missing))}. It has: {', '.join(names)}; expected some "
                f"of: {', '.join(MESSAGE_COLUMNS)}. Nothing was sent."
            )
        digest = source.digest()
        own_name = digest if topic is None else hashlib.sha256(f"{digest}:{topic}".encode()).hexdigest()[: len(digest)]
        self._name = name or own_name
        self._file = int(own_name[:12], 16)
        self._query_id = f"rmq:import:{self._name}"
        self._queues = self._find_queues()

    def run(self, writer: StoreWriter, progress: Callable[[int, int], None]) -> Imported:
        """Send and commit the rows that are not in the store yet, part by part."""
        total = self._source.parquet.metadata.num_rows
        with writer.section() as section:  # first completes the commit of a call that died, so the ledger is current
            row = Ledger(self._root, self._disk).read(self._query_id)
            self._require_same_file(row, total)
            self._make_topics(section.write_queues, section.ensure_topics)
        number, at = (-1, 0) if row is None else (row.batch_id, row.note.get(_ROWS, 0))
        skipped = at
        outbox = RecordBuilder(self._root, RecordBuilderSettings(self._commit_log_path, _DEFAULT_QUEUES))
        progress(at, total)
        for rows in self._parts(at):
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
                    f"another import named {self._name!r} is running on {self._root}. Call again when it is done."
                )
            progress(at, total)
        return Imported(self._name, at - skipped, skipped, tuple(sorted(self._queues)))

    def _require_same_file(self, row: LedgerRow | None, total: int) -> None:
        """Raise OptionError if another file was sent under this name, because rows of this file would be skipped.

        `row` is the import's row in the ledger, None for a new import. `total` is the number of rows of the file.
        """
        if row is None:
            return
        sent = row.note.get(_ROWS, 0)
        if sent > total or row.note.get(_FILE, self._file) != self._file:
            raise OptionError(
                f"{self._source.path} is not what was imported as {self._name!r}, of which {sent} rows are in the "
                "store: the file or its topic was another one. Give this import a name of its own. Nothing was sent."
            )

    def _parts(self, first_row: int) -> Iterator[pa.Table]:
        """Yield the rows of the file as tables, beginning with `first_row`. Each table is sent in one commit."""
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
        """Return `columns` of a table of the file, with the names and types that message columns must have.

        Raises OptionError if a column cannot be converted.
        """
        table = table.select([self._columns[column] for column in columns]).rename_columns(list(columns))
        try:
            return cast_columns(table)
        except OptionError as error:
            raise OptionError(f"{self._source.path}: {error}") from None

    def _find_queues(self) -> dict[str, int]:
        """Return a dict from each topic of the file to the number of queues that its messages need.

        Raises OptionError if a queue id or a topic name is invalid.
        """
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
        """Return a dict from topic to its number of queues in the old store. It is empty if the file is not an export.

        Raises OptionError if the file's metadata is invalid.
        """
        text = (self._source.parquet.schema_arrow.metadata or {}).get(METADATA)
        try:
            exported = {} if text is None else parse_json(text).get("queues", {})
            counts = {name: count for name, count in exported.items() if name in self._queues}
            if all(type(count) is int and 0 <= count <= MAX_QUEUES for count in counts.values()):
                return counts
            found = repr(counts)
        except (AttributeError, ValueError) as error:
            found = repr(error)
        raise OptionError(
            f"{self._source.path} has invalid metadata: found {found[:_SHOWN_CHARS]}; "
            f"expected 0 to {MAX_QUEUES} queues for each topic. Export the file again, or write it without this "
            "metadata. Nothing was sent."
        )

    def _make_topics(
        self, has: Callable[[str], int | None], make: Callable[[Iterable[str], dict[str, int]], object]
    ) -> None:
        """Create the missing topics. `has` returns the number of queues of a topic, or None if the topic is missing.

        Raises OptionError if an existing topic has too few queues for the messages. Then no topic was created.
        """
        exported, missing = self._exported_queues(), dict[str, int]()
        for name, needed in self._queues.items():
            count = has(name)
            if count is None:
                missing[name] = max(needed, exported.get(name, _DEFAULT_QUEUES), 1)
            elif count < needed:
                raise OptionError(
                    f"topic {name} has {count} queues in the store, and the file has messages of queue {needed - 1}. "
                    "Give keep_queues=False to spread them over the existing queues, or a topic of its own "
                    "(topic=...). Nothing was sent."
                )
        if missing:
            make(missing, missing)  # one call writes topics.json once, which may be long


def _queue_ids(rows: pa.Table, topic: str | None) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield a tuple for each topic in `rows`: its name, its lowest queue id, and its highest queue id.

    If `topic` is given, it is the topic of all rows. The queue ids are None if no row of the topic has one.
    Raises OptionError if a row has no topic.
    """
    names = rows["topic"] if topic is None else pa.repeat(pa.scalar(topic), len(rows))
    ids = rows["queueId"] if "queueId" in rows.column_names else pa.nulls(len(rows), pa.int32())
    grouped = pa.table({"topic": names, "id": ids}).group_by("topic").aggregate([("id", "min"), ("id", "max")])
    for name, least, most in zip(
        *(grouped[column].to_pylist() for column in ("topic", "id_min", "id_max")), strict=True
    ):
        if name is None:
            raise OptionError("a row has no topic. Give topic=, or a file in which each row has one. Nothing was sent.")
        yield name, least, most
