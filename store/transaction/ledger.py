"""The ledger, which records the last committed batch of each query; and the keys of commits.

    rmq/intents/<query>.json      rmq/ledger/<query>.json      rmq/staging/<query>@<batch>/<task>.arrow

`<query>` is the safe file name of the query id (`store/format/side_file.py`), because a query id may be any text.

Each query has one row in the ledger. The row is replaced under the store's lock, after all rows of the batch are in the
commit log. Batch writes have no ledger row, because nobody repeats a write under the same id; only the intent of a
batch write records its progress.

With `flush` "sync" the messages become durable first, then the ledger row, and then the commit returns. With "async"
the commit does not wait for the disk, and the row is in another file, `<query>.unsynced`. Then each batch is still
stored exactly once if processes die. But a power cut may keep the row and lose the last messages, or the reverse; a row
that was written in part is ignored. To store each batch exactly once across power cuts too, use "sync".
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.side_file import (
    digest_of,
    digest_text,
    encode_side_file,
    note_of,
    number_of,
    safe_name,
    text_of,
)
from rmq_spark.store.log.store_state import read_side_file, side_path
from rmq_spark.store.model import CommitKey

INTENTS = "intents"
LEDGER = "ledger"
STAGING = "staging"

# The file that is created when the folders are durable. The number in its name is the version of their layout.
_FOLDERS_MADE = "commits-v1"
_SYNCED, _UNSYNCED = ".json", ".unsynced"
_PURPOSE = (
    "the ledger of a query, which prevents a batch from being written twice; without it the query's next batch counts "
    "as its first"
)
_NEXT_STEP = "Restore the file from a copy; or remove it, if the batch that the query writes next is not in the store."
_LOG = logging.getLogger("rmq_spark")


def folder_of(key: CommitKey) -> str:
    """Return the name of a batch's folder in `rmq/staging/`. `batch_of_folder` parses this name."""
    name = safe_name(key.query_id)
    return name if key.batch_id is None else f"{name}@{key.batch_id}"


def batch_of_folder(folder: str) -> tuple[str, int] | None:
    """Return (safe name of the query, batch id) from the name of a folder in `rmq/staging/`.

    Returns None if the name contains no batch id.
    """
    name, separator, digits = folder.rpartition("@")
    if not separator or not name or not digits.isascii() or not digits.isdigit():
        return None
    return name, int(digits)


def make_folders(root: str, disk: Disk) -> None:
    """Create the folders for intents, ledger and staging files, durably. Several processes may do this at once.

    The names of the folders must be durable before a commit relies on a file in them. They are synced only once: the
    empty file that this function creates at the end shows later callers that the folders are durable.
    """
    made = side_path(root, _FOLDERS_MADE)
    if files.file_size(made) >= 0:
        return
    if not files.is_folder(root):
        disk.make_folder(root, is_own=True)
        disk.sync_folder(files.parent(root))
    for folder in (INTENTS, LEDGER, STAGING):
        disk.make_folder(side_path(root, folder))
    disk.sync_folder(side_path(root))
    disk.sync_folder(root)
    with contextlib.suppress(FileExistsError):  # another process created it meanwhile
        disk.create(made, 0)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The last committed batch of a query: its number of rows, their bytes in the commit log, and their digest.

    `time_ms` is when the batch was committed, in ms since the epoch. `note` is metadata from the author of the batch,
    copied from the intent.
    """

    query_id: str
    batch_id: int
    rows: int
    bytes: int
    digest: int
    time_ms: int
    note: Mapping[str, int] = field(default_factory=dict)


class Ledger:
    """The ledger of one store. Any process may read it, but only the holder of the store's lock may write to it."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._root, self._disk = root, disk

    def read(self, query_id: str) -> LedgerRow | None:
        """Return the row of a query, or None if it has none.

        Raises DamageError if its file is damaged, and StoreError if a newer version of rmq-spark wrote it.
        """
        return self.read_named(safe_name(query_id))

    def read_named(self, name: str) -> LedgerRow | None:
        """Return the row of the query with this safe name (see `safe_name`), or None. Raises the errors of `read`."""
        row, unsynced = self._read_file(name, _SYNCED), None
        try:
            unsynced = self._read_file(name, _UNSYNCED)
        except DamageError as error:
            _LOG.warning("rmq: a power cut damaged the last, unsynced row of a ledger; the row is ignored: %s", error)
        if row is None or unsynced is None:
            return row or unsynced
        return max(row, unsynced, key=lambda one: one.batch_id)

    def write(self, row: LedgerRow, *, is_durable: bool) -> None:
        """Replace the query's row, durably if `is_durable`.

        Otherwise a power cut may lose the new row, or may keep it and lose the messages of its batch.
        """
        fields = {
            "queryId": row.query_id,
            "batchId": row.batch_id,
            "rows": row.rows,
            "bytes": row.bytes,
            "digest": digest_text(row.digest),
            "timeMs": row.time_ms,
            "note": dict(row.note),
        }
        if is_durable:
            self._disk.replace(self._path(safe_name(row.query_id), _SYNCED), encode_side_file(fields))
        else:
            self._disk.replace_unsynced(self._path(safe_name(row.query_id), _UNSYNCED), encode_side_file(fields))

    def sync(self) -> None:
        """Make the names of the ledger's files durable.

        This is needed if the last writer of a row may have died before it synced the folder.
        """
        self._disk.sync_folder(side_path(self._root, LEDGER))

    def _read_file(self, name: str, ending: str) -> LedgerRow | None:
        row = read_side_file(self._path(name, ending), _PURPOSE, _NEXT_STEP, _build_row)
        if row is not None and safe_name(row.query_id) != name:
            raise DamageError(_PURPOSE, self._path(name, ending), 0, name, row.query_id, _NEXT_STEP)
        return row

    def _path(self, name: str, ending: str) -> str:
        return files.join(side_path(self._root, LEDGER), name + ending)


def _build_row(fields: dict[str, Any]) -> LedgerRow:
    return LedgerRow(
        text_of(fields, "queryId"),
        number_of(fields, "batchId"),
        number_of(fields, "rows"),
        number_of(fields, "bytes"),
        digest_of(fields),
        number_of(fields, "timeMs"),
        note_of(fields),
    )
