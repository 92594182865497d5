"""The ledger: of every query the last batch that is in the store, and what a further one means.

A small file a query, `rmq/ledger/<query>.json`, is replaced under the store's lock when all rows of a batch stand in
the log. Batch writes have none: nobody repeats a write under the same id, and an intent alone tells how far it got.

What `flush` means here: with "sync" the row is on disk before the commit returns, and after the messages are. With
"async" nothing waits for the disk, and the row goes into a file of its own, `<query>.unsynced`. Exactly once then holds
through the death of any process. After a power cut the row may be there and the last messages not, or the other way
round, and a row of which only a part is there counts as none. Who needs exactly once after a power cut uses "sync".
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rmq_spark.store.commit.keys import LEDGER, CommitKey, safe_name, side_path
from rmq_spark.store.commit.side_file import (
    digest_of,
    digest_text,
    encode_side_file,
    note_of,
    number_of,
    read_side_file,
    text_of,
)
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import BatchConflictError, DamageError

_LOG = logging.getLogger("rmq_spark")
_SYNCED, _UNSYNCED = ".json", ".unsynced"
_WHAT = (
    "the ledger of a query, which keeps a batch from being written twice; without it the query's next batch is taken "
    "for its first one"
)
_NEXT_STEP = "Restore the file from a copy; or remove it, if the batch that the query writes next is not in the store."


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The last batch of a query: its rows, their bytes in the log and their digest; when it was written (ms).

    `note` is what the batch stands for to whoever made it, as its intent said.
    """

    query_id: str
    batch_id: int
    rows: int
    bytes: int
    digest: int
    time_ms: int
    note: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LedgerRules:
    """What the user wants where a batch does not follow the last one. `onBatchConflict`, `onBatchGap`.

    A transaction's versions need not follow each other, and a smaller one was written before.
    """

    on_conflict: str = "fail"  # or "skip"
    on_gap: str = "fail"  # or "continue"
    is_transaction: bool = False


class Verdict(Enum):
    """What to do with a batch."""

    APPEND = "append"
    REPEATED = "it is in the store already"
    PASSED = (
        "a later version of this txnAppId is in the store. If these rows are new, another writer or an earlier "
        "checkpoint has used the name: give every one its own txnAppId"
    )
    OVERRULED = "the store has another batch of that number, and onBatchConflict=skip"


def judge_batch(row: LedgerRow | None, key: CommitKey, rows: int, digest: int, rules: LedgerRules) -> Verdict:
    """Say what to do with a batch of so many rows, after what the ledger has. Pure.

    Raises BatchConflictError where the rules say so, with what was found and what to do.
    """
    if row is None or key.batch_id is None:
        return Verdict.APPEND
    if key.batch_id == row.batch_id:
        if (rows, digest) == (row.rows, row.digest):
            return Verdict.REPEATED
        return _conflict(row, key, f"the batch to write has {rows} rows with the digest {digest_text(digest)}", rules)
    if key.batch_id < row.batch_id:
        if rules.is_transaction:
            return Verdict.PASSED
        return _conflict(row, key, "batches are written once and in order", rules)
    if key.batch_id > row.batch_id + 1 and not rules.is_transaction and rules.on_gap != "continue":
        missing = f"{row.batch_id + 1}"
        if key.batch_id > row.batch_id + 2:
            missing = f"{row.batch_id + 1} to {key.batch_id - 1}"
        raise BatchConflictError(
            f"{key} cannot be written: the last one in the store is {row.batch_id}, so {missing} would be missing. The "
            "store was restored from a copy older than the query's checkpoint, another store is at this path, or a "
            "power cut took batches that were written with flush=async. Restore a newer copy; or set "
            "onBatchGap=continue to go on without the missing batches; or start the query with a new checkpoint. "
            "Nothing was written."
        )
    return Verdict.APPEND


def _conflict(row: LedgerRow, key: CommitKey, why: str, rules: LedgerRules) -> Verdict:
    if rules.on_conflict == "skip":
        return Verdict.OVERRULED
    what = "version" if rules.is_transaction else "batch"
    remedy = (
        "Give every write of an application a txnVersion of its own, larger than the one before"
        if rules.is_transaction
        else "The query's checkpoint was copied, deleted in part or rolled back, or its source gave other rows for the "
        "same batch. Start the query with a new checkpoint"
    )
    raise BatchConflictError(
        f"{key} cannot be written: the last {what} in the store is {row.batch_id} with {row.rows} rows and the digest "
        f"{digest_text(row.digest)}; {why}. {remedy}; or set onBatchConflict=skip to leave out what the store does not "
        "expect. Nothing was written."
    )


class Ledger:
    """The rows of one store. Anybody may read; only who holds the store's lock writes."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._root, self._disk = root, disk

    def read(self, query_id: str) -> LedgerRow | None:
        """Return a query's row, None for a query without one. Raises DamageError, or StoreError for a newer one."""
        return self.read_named(safe_name(query_id))

    def read_named(self, name: str) -> LedgerRow | None:
        """Return the row in the files of that name (`keys.safe_name`). Raises what `read` raises."""
        row, unsynced = self._read_file(name, _SYNCED), None
        try:
            unsynced = self._read_file(name, _UNSYNCED)
        except DamageError as error:
            _LOG.warning("rmq: a power cut spoilt the last row of a ledger that nobody had synced: %s", error)
        if row is None or unsynced is None:
            return row or unsynced
        return max(row, unsynced, key=lambda one: one.batch_id)

    def write(self, row: LedgerRow, *, is_durable: bool) -> None:
        """Make `row` its query's; unless it `is_durable`, a power cut may lose it or let it outlive its messages."""
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
        """Return when a power cut takes no row away that was written to last: its writer may have died before that."""
        self._disk.sync_folder(side_path(self._root, LEDGER))

    def _read_file(self, name: str, ending: str) -> LedgerRow | None:
        row = read_side_file(self._path(name, ending), _WHAT, _NEXT_STEP, _build_row)
        if row is not None and safe_name(row.query_id) != name:
            raise DamageError(_WHAT, self._path(name, ending), 0, name, row.query_id, _NEXT_STEP)
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
