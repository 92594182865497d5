"""`export_parquet`: messages of a store as one parquet file, with the columns of the source."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError
from rmq_spark.store.explore.outside import refuse_in_store
from rmq_spark.store.explore.parquet_file import ParquetTarget
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.filenames import is_system_topic
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.topics import read_topics
from rmq_spark.store.units import QueueBounds, QueueKey

METADATA = b"rmq"  # of the file: JSON, with the number of queues of each topic
_GROUP_BYTES = 64 << 20  # of a row group, as it lies in memory
Range = QueueBounds | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: the file, how many messages and bytes, and the topics that they are of."""

    path: str
    messages: int
    bytes: int
    topics: tuple[str, ...]


def export_parquet(
    path: str | PurePath,
    target: str | PurePath,
    *,
    topics: Sequence[str] | None = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    bounds: Mapping[QueueKey | tuple[str, int], Range] | None = None,
    columns: Sequence[str] | None = None,
    commit_log_path: str | None = None,
    row_group_rows: int = 65_536,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write messages of the store at `path` into one parquet file (zstd), queue by queue, and return what that was.

    All topics but RocketMQ's own, or those named in `topics`; stored in [begin_ms, end_ms), ms since the epoch; or just
    the queue offsets in `bounds`, (topic, queue id) to (begin, end). Not in it is what waits for its time, in a topic
    of RocketMQ's, and halves of transactions. `columns` are those of the source, all of them if not given: then
    `import_parquet` can send them again. A row group has at most `row_group_rows` rows and 64 MiB. The file is there
    whole or not at all; one that is there is only replaced with `overwrite`. `progress` is called with the messages
    written and those to be written.

    Raises OptionError for arguments that make no sense and for a `target` that lies in a store, NotFoundError for a
    topic that is not there, DamageError and StoreChangedError for messages that cannot be read: nothing is left at
    `target` then.
    """
    root, file = files.absolute(path), files.absolute(target)
    names = list(COLUMNS) if columns is None else list(columns)
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not names or isinstance(columns, str):
        raise OptionError(f"no such column: {', '.join(unknown) or columns!r}. Columns are: {', '.join(COLUMNS)}.")
    if type(row_group_rows) is not int or row_group_rows < 1:
        raise OptionError(f"row_group_rows={row_group_rows!r} is no whole number from 1 on.")
    if bounds is not None and (topics is not None or begin_ms is not None or end_ms is not None):
        raise OptionError("bounds say which messages are meant: give no topics and no times beside them.")
    refuse_in_store(file, root, commit_log_path)
    if files.is_folder(file) or (files.file_size(file) >= 0 and not overwrite):
        raise OptionError(f"{file} is there. Give another file, or overwrite=True. Nothing was written.")
    if not files.is_folder(files.parent(file)):
        raise OptionError(f"there is no folder {files.parent(file)}. Make it, or give another file.")
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        reader.refresh()
        ranges = _given(bounds) if bounds is not None else dict(_ranges(reader, topics, begin_ms, end_ms))
        chosen = tuple(sorted({key.topic for key in ranges}))
        schema = pa.schema([(name, COLUMNS[name]) for name in names], _metadata(root, reader, chosen))
        total, done = sum(held.max_offset - held.min_offset for held in ranges.values()), 0
        with ParquetTarget(file, schema) as written:
            for table in _groups(reader, ranges, names, schema, row_group_rows):
                written.write(table)
                done += len(table)
                if progress is not None:
                    progress(done, total)
            size = written.finish()
    return Exported(file, done, size, chosen)


def _given(bounds: Mapping[QueueKey | tuple[str, int], Range]) -> dict[QueueKey, QueueBounds]:
    try:
        return {
            key if isinstance(key, QueueKey) else QueueKey(*key): (
                held if isinstance(held, QueueBounds) else QueueBounds(*held)
            )
            for key, held in bounds.items()
        }
    except TypeError:
        raise OptionError(
            f"bounds={bounds!r} is no mapping of queues, (topic, queue id), to queue offsets, (begin, end)."
        ) from None


def _ranges(
    reader: StoreReader, topics: Sequence[str] | None, begin_ms: int | None, end_ms: int | None
) -> Iterator[tuple[QueueKey, QueueBounds]]:
    if isinstance(topics, str):
        raise OptionError(f'topics="{topics}" is a text. Give a list of names, such as ["{topics}"].')
    names = [name for name in reader.topics() if not is_system_topic(name)] if topics is None else list(topics)
    for name in names:
        for key in reader.queues(name):
            held = reader.bounds(key)
            begin = held.min_offset if begin_ms is None else reader.offset_at_time(key, begin_ms)
            end = held.max_offset if end_ms is None else reader.offset_at_time(key, end_ms)
            yield key, QueueBounds(max(begin, held.min_offset), min(max(begin, end), held.max_offset))


def _metadata(root: str, reader: StoreReader, topics: Sequence[str]) -> dict[bytes, bytes]:
    """Return what an import needs to make the same topics."""
    configs = read_topics(root)
    queues = {name: configs[name].write_queue_count if name in configs else len(reader.queues(name)) for name in topics}
    return {METADATA: json.dumps({"v": 1, "queues": queues}).encode()}


def _groups(
    reader: StoreReader,
    ranges: Mapping[QueueKey, QueueBounds],
    names: Sequence[str],
    schema: pa.Schema,
    row_group_rows: int,
) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for key, held in ranges.items():
        for batch in reader.read(key, held.min_offset, held.max_offset, names):
            while batch.num_rows:
                part = batch.slice(0, row_group_rows - rows)
                batch = batch.slice(part.num_rows)
                waiting.append(part)
                rows, size = rows + part.num_rows, size + part.nbytes
                if rows >= row_group_rows or size >= _GROUP_BYTES:
                    yield _table(waiting, schema)
                    waiting, rows, size = [], 0, 0
    if waiting:
        yield _table(waiting, schema)


def _table(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(batches).replace_schema_metadata(schema.metadata).cast(schema)
