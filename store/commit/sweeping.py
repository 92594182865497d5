"""Staged files that came to nothing, taken away: of commits that were given up, of tasks that died or were not chosen.

What an intent names is never taken away here, whoever asks: its rows come into the store.
"""

import logging
from collections.abc import Iterator, Sequence

from rmq_spark.store.commit.intents import Intents
from rmq_spark.store.commit.keys import STAGING, batch_of_folder, side_path
from rmq_spark.store.commit.ledger import Ledger
from rmq_spark.store.commit.staged_file import StagedFile, staged_path
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreError

_LOG = logging.getLogger("rmq_spark")
# A batch that the ledger has may be written again by a query that was started anew: its tasks are left to finish.
_PASSED_RETENTION_MS = 15 * 60_000


def abort_staged(root: str, disk: Disk, key_folder: str, staged: Sequence[StagedFile]) -> None:
    """Take away staged files of a folder (`CommitKey.folder`) that nobody will commit, but for those of an intent.

    For whoever staged them and has tried to commit them, or has not: Spark calls abort after a commit that raised, and
    that commit may have promised them. Where it cannot be known the files stay, for `sweep_staging`.
    """
    try:
        named = Intents(root, disk).staged_names()
        remove_staged(root, disk, [file for file in staged if file.name not in named])
        disk.remove_folder(staged_path(root, key_folder))
    except StoreError as error:
        _LOG.warning("rmq: staged files stay behind until they are older than stagingRetention: %s", error)


def remove_staged(root: str, disk: Disk, staged: Sequence[StagedFile]) -> None:
    """Take staged files away that nobody needs any more, and their folders where nothing else is in them."""
    for file in staged:
        disk.remove(staged_path(root, file.name))
    for folder in sorted({files.parent(staged_path(root, file.name)) for file in staged}):
        disk.remove_folder(folder)


def find_garbage(root: str, disk: Disk, now_ms: int, retention_ms: int) -> Iterator[tuple[str, list[str]]]:
    """Yield folders of staged files that nothing changed in for long, and the old files in each. Removes nothing.

    Long is `retention_ms`, or a quarter of an hour where the ledger has the folder's batch. Raises what reading the
    ledger raises.
    """
    ledger = Ledger(root, disk)
    staging = side_path(root, STAGING)
    for folder, is_folder in files.list_folder(staging):
        path = files.join(staging, folder)
        if not is_folder or files.modified_ms(path) > now_ms - min(retention_ms, _PASSED_RETENTION_MS):
            continue
        batch = batch_of_folder(folder)
        row = ledger.read_named(batch[0]) if batch is not None else None
        has_passed = batch is not None and row is not None and row.batch_id >= batch[1]
        before_ms = now_ms - (min(retention_ms, _PASSED_RETENTION_MS) if has_passed else retention_ms)
        if files.modified_ms(path) <= before_ms:
            names = [name for name, _ in files.list_folder(path)]
            old = [name for name in names if files.modified_ms(files.join(path, name)) <= before_ms]
            if old or not names:
                yield path, old


def sweep_staging(root: str, disk: Disk, now_ms: int, retention_ms: int) -> int:
    """Take away old staged files that no intent names; return how many. The caller holds the store's lock.

    Without the lock somebody could promise a file between the look at the intents and its end. Raises what reading
    intents and ledger raises, before anything is taken away.
    """
    garbage = list(find_garbage(root, disk, now_ms, retention_ms))
    named = {staged_path(root, name) for name in Intents(root, disk).staged_names()} if garbage else set()
    removed = 0
    for folder, names in garbage:
        for path in (files.join(folder, name) for name in names):
            if path not in named:
                disk.remove(path)
                removed += 1
        disk.remove_folder(folder)
    return removed
