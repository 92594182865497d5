"""The engine's door: open a store for reading, and the columns that its messages have.

May import every folder of the engine. What lives where: `format/` turns bytes into values and back, `disk/` is the
only place that touches files, `log/` knows how RocketMQ keeps messages in them. Outside the engine only this door
and the words beside it (`errors`, `units`) are seen.
"""

from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.log.store_reader import READ_MODES, StoreReader

__all__ = ["COLUMNS", "READ_MODES", "StoreReader", "open_reader"]


def open_reader(path: str, *, commit_log_path: str | None = None, read_mode: str = "auto") -> StoreReader:
    """Open the store at `path` for reading; nothing on disk is changed, created or locked.

    `commit_log_path` names the commit log's folder, or several joined by commas, where it lies elsewhere.
    `read_mode` is "mmap", "pread" or "auto", which maps files except on network and FUSE file systems. Raises
    StorePathError for a path that holds no store, or one of an unsupported kind.
    """
    return StoreReader(path, commit_log_path=commit_log_path, read_mode=read_mode)
