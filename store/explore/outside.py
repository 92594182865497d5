"""Whether a file that somebody wants written lies among the files of a store: nothing that only reads goes there."""

import contextlib
from collections.abc import Iterator
from pathlib import PurePath

from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

_TREES = (filenames.COMMIT_LOG, filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE)
_OTHERS = (filenames.CONFIG, filenames.CHECKPOINT, filenames.ABORT, filenames.LOCK, SIDE_FOLDER)


def refuse_in_store(target: str | PurePath, root: str | PurePath, commit_log_path: str | None = None) -> None:
    """Raise OptionError if the file `target` lies in a store: the one at `root`, or any other.

    Links are followed, of the file itself and of every folder above it. Another store is known by a log or queues, and
    one more thing that belongs to a store; a log that lies elsewhere by `commit_log_path`, else by its segments. Reads
    folders only. Raises StorePathError where there is no store at `root`.
    """
    file, store = files.absolute(target), files.absolute(root)
    known = {files.resolved(folder) for folder in (store, *commit_log_folders(store, commit_log_path))}
    # The file's name is taken away by a rename, whatever it is; and who gives a link means what it leads to.
    for place in {files.join(files.resolved(files.parent(file)), file.rpartition("/")[2]), files.resolved(file)}:
        for folder in _above(place):
            if folder in known or _is_store(folder):
                raise _refusal(file, folder)
        if _has_segments(files.parent(place)):
            raise _refusal(file, files.parent(place))


def _above(path: str) -> Iterator[str]:
    """Yield the folders that a path lies in, the nearest first."""
    while (folder := files.parent(path)) != path:
        yield folder
        path = folder


def _is_store(folder: str) -> bool:
    """Say whether a folder is a store. One alone may hold the log of a store, and exports beside it, all the same."""
    trees = sum(files.is_folder(files.join(folder, name)) for name in _TREES)
    return trees > 1 or (trees == 1 and any(files.exists(files.join(folder, name)) for name in _OTHERS))


def _has_segments(folder: str) -> bool:
    with contextlib.suppress(StorePathError):  # who may not list it may still write to it
        return any(filenames.parse_segment_name(name) is not None for name, _ in files.list_folder(folder))
    return False


def _refusal(file: str, folder: str) -> OptionError:
    return OptionError(
        f"{file} lies among the files of the store at {folder}: what is written there may be the end of it, and no "
        "broker starts on a file that it does not know. Give a file in another folder. Nothing was written."
    )
