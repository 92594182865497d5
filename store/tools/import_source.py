"""The rows of a Parquet file as messages to send: their columns, and the queues that they need.

The whole file is looked at for topics and queues before anything is sent, so that a mistake in them changes nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.batch_items import BROKER_NAME
from rmq_spark.store.format.message_encoder import MESSAGE_COLUMNS
from rmq_spark.store.format.message_table import cast_columns, check_topic, messages_of
from rmq_spark.store.format.side_file import parse_json
from rmq_spark.store.names import MAX_QUEUES, check_sent_topic
from rmq_spark.store.tools.parquet_file import METADATA, ParquetSource

DEFAULT_QUEUES = 4  # of a topic that is created and was not exported
_READ_ROWS = 1024  # rows that are read at once; small, because bodies may be large
_PART_ROWS, _PART_BYTES = 65_536, 16 << 20
_SHOWN_CHARS = 80


class ImportSource:
    """The rows of a file, for one import.

    `topic` is the topic of all rows, or None to go by the file. `name` identifies the import; None for the file's
    content and `topic`. Without `keep_queues` queue ids are left out. The names of brokers are left out, unless the
    place `has_brokers`. The constructor raises OptionError if the file lacks a column, or has a wrong one.

    `digest` stands for the content of the file and the topic. `needs` maps each topic and broker name to the number
    of queues that its rows need, 0 if they may go to any queue; the broker name is "" if rows have none.
    """

    def __init__(
        self, source: ParquetSource, topic: str | None, name: str | None, *, keep_queues: bool, has_brokers: bool
    ) -> None:
        if topic is not None:
            check_sent_topic(check_topic(topic))
        if name is not None and (not isinstance(name, str) or not name):
            raise OptionError(
                f"name={name!r} must be a text that is not empty, or None to go by the content of the file."
            )
        self._source, self._topic, self._has_brokers = source, topic, has_brokers
        names = source.parquet.schema_arrow.names
        known = (*MESSAGE_COLUMNS, BROKER_NAME) if has_brokers else MESSAGE_COLUMNS
        twice = sorted({name for name in names if names.count(name) > 1} & {*known, "physicalTopic"})
        if twice:
            raise OptionError(
                f"{source.path} has the column {', '.join(twice)} twice; expected each column once. Write the file "
                "without the second one. Nothing was sent."
            )
        self._columns = {column: column for column in known if column in names}
        if topic is None and "physicalTopic" in names:
            self._columns["topic"] = "physicalTopic"  # for a retried message, `topic` is the original topic
        if topic is not None:
            self._columns.pop("topic", None)
        if not keep_queues:
            self._columns.pop("queueId", None)
        if "queueId" not in self._columns:
            self._columns.pop(BROKER_NAME, None)  # it says where a queue is
        missing = {"body"} - set(self._columns) | ({"topic"} - set(self._columns) if topic is None else set())
        if missing:
            raise OptionError(
                f"{source.path} has no column {', '.join(sorted(missing))}. It has: {', '.join(names)}; expected some "
                f"of: {', '.join(known)}. Nothing was sent."
            )
        content = source.digest()
        self.digest = (
            content if topic is None else hashlib.sha256(f"{content}:{topic}".encode()).hexdigest()[: len(content)]
        )
        self.name = name or self.digest
        self.needs = self._find_needs()

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._source.path

    @property
    def total(self) -> int:
        """The number of rows."""
        count: int = self._source.parquet.metadata.num_rows
        return count

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of the messages, sorted."""
        return tuple(sorted({topic for topic, _ in self.needs}))

    def needed_queues(self, topic: str) -> dict[str, int]:
        """Return how many queues the messages of a topic need, by broker name."""
        return {broker: count for (name, broker), count in self.needs.items() if name == topic}

    def new_queue_counts(self) -> dict[str, int]:
        """Return with how many queues each topic is created if it is missing, on each broker.

        A topic that was exported gets as many queues as it had. Raises OptionError if the file's metadata is invalid.
        """
        exported = self._exported_queues()
        return {
            topic: max(*self.needed_queues(topic).values(), exported.get(topic, DEFAULT_QUEUES), 1)
            for topic in self.topics
        }

    def parts(self, first_row: int) -> Iterator[pa.Table]:
        """Yield the rows as tables of messages, beginning with `first_row`. They have 16 MiB and 65,536 rows or less.

        The last batch of a table may exceed the bytes.
        """
        waiting: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in self._batches(first_row, list(self._columns.values())):
            waiting.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= _PART_ROWS or size >= _PART_BYTES:
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
        cast = self._cast(table, list(self._columns))
        return messages_of(cast, self._topic, has_brokers=self._has_brokers).combine_chunks()

    def _cast(self, table: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Return `columns` of a table of the file, with the names and types that message columns must have.

        Raises OptionError if a column cannot be converted.
        """
        table = table.select([self._columns[column] for column in columns]).rename_columns(list(columns))
        try:
            return cast_columns(table)
        except OptionError as error:
            raise OptionError(f"{self._source.path}: {error}") from None

    def _find_needs(self) -> dict[tuple[str, str], int]:
        """Return `needs`. Raises OptionError if a queue id or the name of a topic or broker is invalid."""
        self._cast(self._source.parquet.schema_arrow.empty_table(), list(self._columns))
        columns = [column for column in ("topic", "queueId", BROKER_NAME) if column in self._columns]
        found: dict[tuple[str, str], int] = {} if self._topic is None else {(self._topic, ""): 0}
        for batch in self._batches(0, [self._columns[column] for column in columns]) if columns else ():
            rows = self._cast(pa.Table.from_batches([batch]), columns)
            for name, broker, least, most in _queue_ids(rows, self._topic):
                for queue_id in (least, most):
                    if queue_id is not None and not 0 <= queue_id < MAX_QUEUES:
                        raise OptionError(
                            f"{self._source.path}: topic {name!r} has a row with queueId {queue_id}; expected 0 to "
                            f"{MAX_QUEUES - 1}. Correct the column, or give keep_queues=False to have the messages "
                            "spread over the topic's queues. Nothing was sent."
                        )
                if broker and least is None:
                    raise OptionError(
                        f"{self._source.path}: topic {name!r} has a row with brokerName {broker!r} and no queueId; "
                        "expected both, or neither. Correct the columns, or give keep_queues=False to have the "
                        "messages spread over the topic's queues. Nothing was sent."
                    )
                found[name, broker] = max(found.get((name, broker), 0), 0 if most is None else most + 1)
        for name, _ in found:
            check_sent_topic(check_topic(name))
        return found

    def _exported_queues(self) -> Mapping[str, int]:
        """Return a dict from topic to its number of queues in the old place. It is empty if the file is not an export.

        Raises OptionError if the file's metadata is invalid.
        """
        text = (self._source.parquet.schema_arrow.metadata or {}).get(METADATA)
        try:
            exported = {} if text is None else parse_json(text).get("queues", {})
            counts = {name: count for name, count in exported.items() if name in self.topics}
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


def _queue_ids(rows: pa.Table, topic: str | None) -> Iterator[tuple[str, str, int | None, int | None]]:
    """Yield a tuple for each topic and broker in `rows`: their names, the lowest queue id, and the highest queue id.

    If `topic` is given, it is the topic of all rows. The name of a broker is "" for rows without one. The queue ids are
    None if no row of both has one. Rows with a broker and without a queue id have a tuple of their own. Raises
    OptionError if a row has no topic.
    """
    names = rows["topic"] if topic is None else pa.repeat(pa.scalar(topic), len(rows))
    ids = rows["queueId"] if "queueId" in rows.column_names else pa.nulls(len(rows), pa.int32())
    brokers = pa.repeat(pa.scalar(""), len(rows))
    if BROKER_NAME in rows.column_names:
        brokers = pc.fill_null(rows[BROKER_NAME], "")
    table = pa.table({"topic": names, "broker": brokers, "is_lost": pc.is_null(ids), "id": ids})
    grouped = table.group_by(["topic", "broker", "is_lost"]).aggregate([("id", "min"), ("id", "max")])
    for name, broker, least, most in zip(
        *(grouped[column].to_pylist() for column in ("topic", "broker", "id_min", "id_max")), strict=True
    ):
        if name is None:
            raise OptionError("a row has no topic. Give topic=, or a file in which each row has one. Nothing was sent.")
        yield name, broker, least, most
