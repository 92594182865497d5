"""The engine's door: open a store for reading, and the columns that its messages have.

May import every folder of the engine. What lives where: `format/` turns bytes into values and back, `disk/` is the
only place that touches files, `log/` knows how RocketMQ keeps messages in them. Outside the engine only this door
and the words beside it (`errors`, `units`, `options`) are seen.

Whoever imports one of the words comes through here. So nothing is loaded until it is asked for: each name is
fetched from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.store.format.columns import COLUMNS
    from rmq_spark.store.log.store_reader import StoreReader

__all__ = ["COLUMNS", "StoreReader", "open_reader"]

# Where a name lives that is not defined here.
_HOMES = {
    "COLUMNS": "rmq_spark.store.format.columns",
    "StoreReader": "rmq_spark.store.log.store_reader",
}


def open_reader(path: str, *, commit_log_path: str | None = None, read_mode: str = "auto") -> "StoreReader":
    """Open the store at `path` for reading; nothing on disk is changed, created or locked.

    `commit_log_path` names the commit log's folder, or several joined by commas, where it lies elsewhere.
    `read_mode` is "mmap", "pread" or "auto", which maps files except on network and FUSE file systems. Raises
    StorePathError for a path that holds no store, or one of an unsupported kind.
    """
    from rmq_spark.store.log.store_reader import StoreReader  # the whole engine: not before somebody opens a store

    return StoreReader(path, commit_log_path=commit_log_path, read_mode=read_mode)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rmq_spark.store' has no attribute {name!r}; it has {__all__}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
