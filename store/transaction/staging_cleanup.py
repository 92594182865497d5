"""Removal of staging files that no commit needs: those of aborted commits, and of tasks that died or were not chosen.

The functions that look for such files never remove a file that an intent names, because its rows will be appended.
"""

import logging
from collections.abc import Iterator, Sequence

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.log.store_state import side_path
from rmq_spark.store.transaction.intents import Intents, StagedFile
from rmq_spark.store.transaction.ledger import STAGING, Ledger, batch_of_folder
from rmq_spark.store.transaction.staging import staged_path

_LOG = logging.getLogger("rmq_spark")
# Staging files of a committed batch are kept this long, so that the tasks of a restarted query that repeats it can end.
_COMMITTED_RETENTION_MS = 15 * 60_000


def abort_staged(root: str, disk: Disk, key_folder: str, staged: Sequence[StagedFile]) -> None:
    """Remove the staging files of an aborted batch, except files that an intent names.

    `key_folder` is the batch's `ledger.folder_of`. The exception is needed because Spark also aborts a commit that
    raised an error, and that commit may have written its intent. If the intents cannot be read, a warning is logged and
    the files remain until `sweep_staging` removes them.
    """
    try:
        named = Intents(root, disk).staged_names()
        remove_staged(root, disk, [file for file in staged if file.name not in named])
        disk.remove_folder(staged_path(root, key_folder))
    except StoreError as error:
        _LOG.warning("rmq: staging files remain until they are older than stagingRetention: %s", error)


def remove_staged(root: str, disk: Disk, staged: Sequence[StagedFile]) -> None:
    """Remove staging files, and each of their folders that is empty then."""
    for file in staged:
        disk.remove(staged_path(root, file.name))
    for folder in sorted({files.parent(staged_path(root, file.name)) for file in staged}):
        disk.remove_folder(folder)


def find_orphans(root: str, disk: Disk, now_ms: int, retention_ms: int) -> Iterator[tuple[str, list[str]]]:
    """Yield (path of a staging folder, names of the old files in it) for folders unchanged for `retention_ms`.

    Old files have not changed for that time either. If the batch of a folder was committed, 15 minutes apply instead of
    `retention_ms` if they are shorter. An empty folder is yielded with an empty list. Raises the errors of
    `Ledger.read`.
    """
    ledger = Ledger(root, disk)
    staging = side_path(root, STAGING)
    for folder, is_folder in files.list_folder(staging):
        path = files.join(staging, folder)
        if not is_folder or files.modified_ms(path) > now_ms - min(retention_ms, _COMMITTED_RETENTION_MS):
            continue
        batch = batch_of_folder(folder)
        row = ledger.read_named(batch[0]) if batch is not None else None
        is_committed = batch is not None and row is not None and row.batch_id >= batch[1]
        before_ms = now_ms - (min(retention_ms, _COMMITTED_RETENTION_MS) if is_committed else retention_ms)
        if files.modified_ms(path) <= before_ms:
            names = [name for name, _ in files.list_folder(path)]
            old = [name for name in names if files.modified_ms(files.join(path, name)) <= before_ms]
            if old or not names:
                yield path, old


def sweep_staging(root: str, disk: Disk, now_ms: int, retention_ms: int) -> int:
    """Remove old staging files that no intent names, and return how many were removed. See `find_orphans` for "old".

    The caller must hold the store's lock. Otherwise another process could write an intent for a file after this call
    has read the intents. If intents or ledger cannot be read, raises the errors of `Intents.read` and `Ledger.read`
    before any file is removed.
    """
    orphans = list(find_orphans(root, disk, now_ms, retention_ms))
    named = {staged_path(root, name) for name in Intents(root, disk).staged_names()} if orphans else set()
    removed = 0
    for folder, names in orphans:
        for path in (files.join(folder, name) for name in names):
            if path not in named:
                disk.remove(path)
                removed += 1
        disk.remove_folder(folder)
    return removed
