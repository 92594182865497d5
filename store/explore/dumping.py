"""`dump`: any file of a store as a table of what stands in it, with the position of each entry in bytes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError, StorePathError
from rmq_spark.store.explore import dumped_index, dumped_log, dumped_text, dumped_units
from rmq_spark.store.format import filenames

Reader = Callable[[str, int], Iterator[pa.RecordBatch]]

_KINDS: Mapping[str, tuple[pa.Schema, Reader]] = {
    "commitlog": (dumped_log.SCHEMA, dumped_log.dump_log),
    "consumequeue": (dumped_units.QUEUE_SCHEMA, dumped_units.dump_queue),
    "batchconsumequeue": (dumped_units.BATCH_SCHEMA, dumped_units.dump_batch_queue),
    "consumequeue_ext": (dumped_units.EXT_SCHEMA, dumped_units.dump_ext),
    "index": (dumped_index.SCHEMA, dumped_index.dump_index),
    "timerlog": (dumped_units.TIMER_LOG_SCHEMA, dumped_units.dump_timer_log),
    "timerwheel": (dumped_units.WHEEL_SCHEMA, dumped_units.dump_timer_wheel),
    "checkpoint": (dumped_text.SCHEMA, lambda path, at: dumped_text.dump_page(path, at, "checkpoint")),
    "timercheck": (dumped_text.SCHEMA, lambda path, at: dumped_text.dump_page(path, at, "timercheck")),
    "watermark": (dumped_text.SCHEMA, dumped_text.dump_watermark),
    "json": (dumped_text.SCHEMA, dumped_text.dump_json),
    "abort": (dumped_text.SCHEMA, dumped_text.dump_text),
    "lock": (dumped_text.SCHEMA, dumped_text.dump_text),
    "text": (dumped_text.SCHEMA, dumped_text.dump_text),
}
DUMP_KINDS = tuple(_KINDS)
_TREES = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "timerlog", "commitlog")  # the longer name first
_NAMED = {
    "checkpoint": "checkpoint",
    "timercheck": "timercheck",
    "timerwheel": "timerwheel",
    "watermark": "watermark",
    "lock": "lock",
    "abort": "abort",
    "abort.bak": "abort",
    "turn": "lock",
    "queues": "text",
    "rebuild": "text",
    "timermetrics": "json",
    "transactionMetrics": "json",
    "position-checkpoint": "json",
}


@dataclass(frozen=True, slots=True)
class Dump:
    """What stands in one file. Iterating opens the file anew and yields Arrow batches; memory does not grow with it.

    `schema` has `position` first, in bytes from the file's begin, then `entry`, what stands there, then its fields.
    """

    path: str
    kind: str
    position: int = 0
    limit: int | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns, which the kind of the file decides."""
        return _KINDS[self.kind][0]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the entries, at most `limit` of them. Raises StoreError for a file that goes or cannot be read."""
        left = self.limit
        for batch in _KINDS[self.kind][1](self.path, self.position):
            if left is not None:
                batch = batch.slice(0, left)
                left -= batch.num_rows
            if batch.num_rows:
                yield batch
            if left == 0:
                return

    def to_arrow(self) -> pa.Table:
        """Return all of it as one table."""
        return pa.Table.from_batches(list(self), self.schema)


def dump(file: str | PurePath, *, kind: str | None = None, position: int = 0, limit: int | None = None) -> Dump:
    """Return what stands in a file of a store, from a position in bytes on, and at most `limit` entries of it.

    Segments of the commit log, files of queues, of their extension and of the key index, timer log, wheel and check,
    checkpoint, abort, lock, JSON, and our own in rmq/. The kind is told by name and folder where it is not given.
    Nothing is believed: damaged entries are told as such. Raises OptionError for what cannot be told, StorePathError
    where there is no file.
    """
    path = files.absolute(file)
    if files.is_folder(path) or files.file_size(path) < 0:
        what = "is a folder" if files.is_folder(path) else "does not exist"
        raise StorePathError(f"{path} {what}. Give a file of a store, such as commitlog/00000000000000000000.")
    if kind is None:
        kind = _kind_of(path)
    if kind not in _KINDS:
        raise OptionError(f"kind={kind!r} is none of: {', '.join(DUMP_KINDS)}.")
    for name, value in (("position", position), ("limit", limit)):
        if value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"{name}={value!r} is no whole number from 0 on.")
    return Dump(path, kind, position, limit)


def _kind_of(path: str) -> str:
    """Return a file's kind by its name and the folders that it lies in. Raises OptionError where they do not tell."""
    *folders, name = path.split("/")
    if name in _NAMED:
        return _NAMED[name]
    plain = name.removesuffix(filenames.BACKUP_SUFFIX).removesuffix(".tmp")
    if plain.endswith((".json", ".unsynced")) or plain in _NAMED:
        return _NAMED.get(plain, "json")
    if filenames.parse_segment_name(name) is not None:
        found = next((folder for folder in reversed(folders) if folder in _TREES), None)
        if found is not None:
            return found
    if filenames.is_index_name(name) and folders[-1] == filenames.INDEX:
        return "index"
    if name.endswith((".conf", ".progress", ".count")):
        return "text"
    if name.endswith(".lock"):
        return "lock"
    raise OptionError(f"what {path} is cannot be told by its name. Give its kind, one of: {', '.join(DUMP_KINDS)}.")
