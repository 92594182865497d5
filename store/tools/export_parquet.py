"""Export: write messages of a store directory or of a live cluster into one Parquet file, queue by queue.

The queue offsets of all ranges are fixed at the beginning, so messages that arrive during an export are not in its
file. A queue of a cluster that cannot be read ends the export with an error that names it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

import pyarrow as pa

from rmq_spark.store import backend
from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.reader import ClusterReader
from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.topics import read_topics
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import is_system_topic
from rmq_spark.store.tools.parquet_file import METADATA, ParquetTarget, require_outside_store

_GROUP_BYTES = 64 << 20  # size in memory at which a row group is written
Range = QueueBounds | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: the path of the file, the number of messages in it, its length, and their topics."""

    path: str
    messages: int
    bytes: int
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExportTerms:
    """Which messages and columns are exported, and how the file is written: the arguments of `export_parquet`."""

    topics: Sequence[str] | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    bounds: Mapping[QueueKey | tuple[str, int] | tuple[str, int, str], Range] | None = None
    columns: Sequence[str] | None = None
    row_group_rows: int = 65_536
    overwrite: bool = False
    progress: Callable[[int, int], None] | None = None


class _Place(Protocol):
    """What an export reads."""

    def topics(self) -> list[str]:
        """Return the names of all topics."""

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the queues of a topic. Raises NotFoundError if it does not exist."""

    def bounds(self, queues: Sequence[QueueKey]) -> Mapping[QueueKey, QueueBounds]:
        """Return the bounds of queues. Raises an error if one of them cannot be read."""

    def offsets_at(self, queues: Sequence[QueueKey], time_ms: int) -> Mapping[QueueKey, int]:
        """Return for each queue the offset of the first message stored at or after a time."""

    def read(self, queue: QueueKey, begin: int, end: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield messages of a queue."""

    def queue_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Return how many queues each topic has, on one broker."""


class _Directory:
    """A store directory that is exported."""

    def __init__(self, root: str, reader: StoreReader) -> None:
        self._root, self._reader = root, reader
        self.topics, self.queues, self.read = reader.topics, reader.queues, reader.read

    def bounds(self, queues: Sequence[QueueKey]) -> dict[QueueKey, QueueBounds]:
        return {queue: self._reader.bounds(queue) for queue in queues}

    def offsets_at(self, queues: Sequence[QueueKey], time_ms: int) -> dict[QueueKey, int]:
        return {queue: self._reader.offset_at_time(queue, time_ms) for queue in queues}

    def queue_counts(self, topics: Iterable[str]) -> dict[str, int]:
        configs = read_topics(self._root)
        return {
            name: configs[name].write_queue_count if name in configs else len(self._reader.queues(name))
            for name in topics
        }


class _Cluster:
    """A live cluster that is exported."""

    def __init__(self, reader: ClusterReader) -> None:
        self._reader = reader
        self.topics, self.queues, self.bounds, self.read = reader.topics, reader.queues, reader.all_bounds, reader.read

    def offsets_at(self, queues: Sequence[QueueKey], time_ms: int) -> dict[QueueKey, int]:
        return self._reader.offsets_at(dict.fromkeys(queues, time_ms))

    def queue_counts(self, topics: Iterable[str]) -> dict[str, int]:
        return {name: max((one.queue_id + 1 for one in self._reader.queues(name)), default=0) for name in topics}


def export_store(
    path: str | PurePath, target: str | PurePath, terms: ExportTerms, *, commit_log_path: str | None = None
) -> Exported:
    """Write messages of the store at `path` into the file `target`. See `export_parquet` of `store.parquet_copies`."""
    root, file = files.store_folder(path), files.absolute(target)
    _check(terms, COLUMNS)
    require_outside_store(file, root, commit_log_path)
    _require_free(file, terms)
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        reader.refresh()
        return _export(_Directory(root, reader), file, terms, COLUMNS)


def export_cluster(address: ClusterAddress, target: str | PurePath, terms: ExportTerms) -> Exported:
    """Write messages of a cluster into the file `target`. See `export_parquet` of `store.parquet_copies`."""
    file = files.absolute(target)
    _check(terms, backend.COLUMNS)
    require_outside_store(file)
    _require_free(file, terms)
    with ClusterReader(address) as reader:
        reader.refresh()
        return _export(_Cluster(reader), file, terms, backend.COLUMNS)


def _check(terms: ExportTerms, known: Mapping[str, pa.DataType]) -> None:
    """Raise OptionError if the terms are invalid. `known` are the columns of the place."""
    names = terms.columns
    if names is not None:
        unknown = [name for name in names if name not in known]
        if unknown or not names or isinstance(names, str):
            raise OptionError(f"no such column: {', '.join(unknown) or names!r}. Columns are: {', '.join(known)}.")
    check_setting("row_group_rows", terms.row_group_rows, 1)
    if terms.bounds is not None and any(one is not None for one in (terms.topics, terms.begin_ms, terms.end_ms)):
        raise OptionError("bounds cannot be combined with topics, begin_ms or end_ms.")


def _require_free(file: str, terms: ExportTerms) -> None:
    """Raise OptionError if the file exists and must not be replaced, or if its folder does not exist."""
    if files.is_folder(file):
        raise OptionError(f"{file} is a folder; expected the name of a file. Give a file in it. Nothing was written.")
    if files.file_size(file) >= 0 and not terms.overwrite:
        raise OptionError(f"{file} exists. Give another file, or overwrite=True. Nothing was written.")
    if not files.is_folder(files.parent(file)):
        raise OptionError(f"the folder {files.parent(file)} does not exist. Create it, or give another file.")


def _export(place: _Place, file: str, terms: ExportTerms, known: Mapping[str, pa.DataType]) -> Exported:
    ranges = _given(terms.bounds) if terms.bounds is not None else _find_ranges(place, terms)
    chosen = tuple(sorted({queue.topic for queue in ranges}))
    names = list(known if terms.columns is None else terms.columns)
    metadata = {METADATA: json.dumps({"v": 1, "queues": place.queue_counts(chosen)}).encode()}
    schema = pa.schema([(name, known[name]) for name in names], metadata)
    total, done = sum(one.max_offset - one.min_offset for one in ranges.values()), 0
    with ParquetTarget(file, schema) as written:
        for table in _groups(place, ranges, names, schema, terms.row_group_rows):
            written.write(table)
            done += len(table)
            if terms.progress is not None:
                terms.progress(done, total)
        size = written.finish()
    return Exported(file, done, size, chosen)


def _given(
    bounds: Mapping[QueueKey | tuple[str, int] | tuple[str, int, str], Range],
) -> dict[QueueKey, QueueBounds]:
    try:
        return {
            key if isinstance(key, QueueKey) else QueueKey(*key): (
                one if isinstance(one, QueueBounds) else QueueBounds(*one)
            )
            for key, one in bounds.items()
        }
    except TypeError:
        raise OptionError(
            f"bounds={bounds!r} must map queues, (topic, queue id), to queue offsets, (begin, end)."
        ) from None


def _find_ranges(place: _Place, terms: ExportTerms) -> dict[QueueKey, QueueBounds]:
    """Return the queue offsets of the messages of topics between two times."""
    if isinstance(terms.topics, str):
        raise OptionError(f'topics="{terms.topics}" is a text. Give a list of names, such as ["{terms.topics}"].')
    names = [name for name in place.topics() if not is_system_topic(name)] if terms.topics is None else terms.topics
    queues = list(dict.fromkeys(queue for name in names for queue in place.queues(name)))
    whole = place.bounds(queues)
    begins = None if terms.begin_ms is None else place.offsets_at(queues, terms.begin_ms)
    ends = None if terms.end_ms is None else place.offsets_at(queues, terms.end_ms)
    found = {}
    for queue in queues:
        held = whole[queue]
        begin = held.min_offset if begins is None else begins[queue]
        end = held.max_offset if ends is None else ends[queue]
        found[queue] = QueueBounds(max(begin, held.min_offset), min(max(begin, end), held.max_offset))
    return found


def _groups(
    place: _Place,
    ranges: Mapping[QueueKey, QueueBounds],
    names: Sequence[str],
    schema: pa.Schema,
    row_group_rows: int,
) -> Iterator[pa.Table]:
    """Yield the row groups of the file."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for queue, one in ranges.items():
        for batch in place.read(queue, one.min_offset, one.max_offset, names):
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
