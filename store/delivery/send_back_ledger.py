"""Record of which rows of a query's batch were sent back, so that a repeated batch does not send them back twice.

    rmq/sentback/<query>.json        rmq/sentback/<query>.lock

If Spark runs a batch again, other rows may fail than before, for example because a listener calls a service. So this
package makes sure that each row, not each batch, is sent back once. The commits of one query are numbered. The ledger
records the last commit (`store/transaction/ledger.py`, query `sendback:<query>`), and its metadata says which batch it
belongs to. The JSON file records the rows of each commit. It is written before its commit begins, so its last commit
may never have happened. Therefore readers use only commits up to the one in the ledger, or up to the one in an intent,
because an intent will be rolled forward. Only the holder of the lock writes the JSON file, so a query has one commit at
a time.

A task of an orderly listener needs to know which of its queues are suspended, and whether the dead letters of a
suspension are in the store. The suspension is written before its dead letters. So they may be missing if the batch was
not committed, or while it is being repeated. In both cases they are sent again; dead letters that are in the store are
not stored twice.
"""

import base64
import contextlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format.side_file import encode_side_file, safe_name
from rmq_spark.store.group.resets import read_suspended
from rmq_spark.store.log.store_state import read_side_file, side_path
from rmq_spark.store.model import CommitKey, QueueKey, Suspension
from rmq_spark.store.transaction.intents import Intents
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow

RowKeys = NDArray[np.uint64]
NO_COMMIT = -1
_FOLDER = "sentback"
_BATCH = "batch"  # key in the metadata of a commit; the value is the batch id
NO_KEYS: RowKeys = np.zeros(0, np.uint64)
_WHAT = (
    "which rows of a query's last batch were sent back; without it rows of a batch that is run again are sent back "
    "once more"
)
_NEXT_STEP = "Restore the file from a copy, or remove it at that price."


@dataclass(frozen=True, slots=True)
class Sent:
    """How far a query has sent rows back: its last commit, the batch of that commit, and all rows of that batch.

    `row` is the ledger row of the last commit that is concluded, None if there is none. `keys` are the keys of the rows
    of batch `batch_id` that were sent back.
    """

    last_commit: int = NO_COMMIT
    batch_id: int = -1
    row: LedgerRow | None = None
    keys: RowKeys = field(default_factory=lambda: NO_KEYS)


@dataclass(frozen=True, slots=True)
class _Commit:
    """One commit as the JSON file records it: its batch, and the keys of its rows."""

    batch_id: int
    keys: RowKeys


class SendBackLedger:
    """The rows that one query has sent back to one store. `key` identifies a batch of the query; it has a batch id."""

    def __init__(self, root: str, disk: Disk, key: CommitKey) -> None:
        assert key.batch_id is not None
        self._root, self._disk, self._key, self._batch_id = root, disk, key, key.batch_id
        self.query_id = f"sendback:{key.query_id}"
        self._ledger, self._intents = Ledger(root, disk), Intents(root, disk)

    def read(self) -> Sent:
        """Return what was sent back so far, including commits that will be rolled forward. Takes no lock.

        Raises DamageError if a file is damaged, and StoreError if a newer version of rmq-spark wrote it.
        """
        intent = self._intents.read(self.query_id)
        row = self._ledger.read(self.query_id)  # after the intent: a commit is in the ledger before its intent goes
        # Read the file last. It contains the last commit of intent and ledger, unless several commits were made
        # meanwhile; then the caller's own commit is refused.
        commits = read_side_file(self._path(".json"), _WHAT, _NEXT_STEP, _parse_file) or {}
        last, batch_id = NO_COMMIT, -1
        if row is not None:
            last, batch_id = row.batch_id, row.note.get(_BATCH, -1)
        if intent is not None and intent.key.batch_id is not None and intent.key.batch_id > last:
            last, batch_id = intent.key.batch_id, intent.note.get(_BATCH, -1)
        keys = [one.keys for number, one in commits.items() if number <= last and one.batch_id == batch_id]
        return Sent(last, batch_id, row, np.concatenate(keys) if keys else NO_KEYS)

    def known(self) -> tuple[int, RowKeys]:
        """Return (number of the query's last commit, keys of the rows of this batch that were sent back already)."""
        sent = self.read()
        return sent.last_commit, sent.keys if sent.batch_id == self._batch_id else NO_KEYS

    def is_unfinished(self) -> bool:
        """Return whether the query has a commit that is not concluded yet, that is, an intent."""
        return self._intents.read(self.query_id) is not None

    def lock(self) -> FileLock:
        """Return the lock that the current commit of the query holds. The caller must take it."""
        self._disk.make_folder(side_path(self._root, _FOLDER))
        path = self._path(".lock")
        if files.file_size(path) < 0:
            with contextlib.suppress(FileExistsError):  # another process has created it
                self._disk.create_lock(path)
        return FileLock(path, only_writers=True)

    def announce(self, sent: Sent, keys: RowKeys) -> CommitKey:
        """Record which rows the next commit will send back, and return the key of that commit.

        `sent` is what `read` returned. The caller must hold the lock. The rows are treated as sent back as soon as the
        commit's intent exists. A crash before that has no effect.
        """
        number = sent.last_commit + 1
        # Keep the rows of the last commit, because the new commit may never happen.
        commits = {sent.last_commit: _Commit(sent.batch_id, sent.keys), number: _Commit(self._batch_id, keys)}
        encoded = {}
        for one, commit in commits.items():
            data = zlib.compress(np.sort(commit.keys).astype("<u8").tobytes(), 1)
            encoded[str(one)] = [commit.batch_id, base64.b64encode(data).decode()]
        fields = {"queryId": self._key.query_id, "commits": encoded}
        self._disk.replace(self._path(".json"), encode_side_file(fields))
        return CommitKey(self.query_id, number)

    @property
    def metadata(self) -> dict[str, int]:
        """The metadata that the commit must write into its intent and its ledger row."""
        return {_BATCH: self._batch_id}

    def _path(self, ending: str) -> str:
        return files.join(side_path(self._root, _FOLDER), safe_name(self._key.query_id) + ending)


def look_at_sent_files(root: str) -> list[tuple[str, StoreError]]:
    """Return (path, error) for each file `rmq/sentback/*.json` that cannot be read."""
    folder, faults = side_path(root, _FOLDER), []
    for name, is_folder in files.list_folder(folder):
        path = files.join(folder, name)
        try:
            if name.endswith(".json") and not is_folder:
                read_side_file(path, _WHAT, _NEXT_STEP, _parse_file)
        except StoreError as error:
            faults.append((path, error))
    return faults


def _parse_file(fields: dict[str, Any]) -> dict[int, _Commit]:
    commits = {}
    for number, (batch_id, text) in dict(fields["commits"]).items():
        try:
            data = zlib.decompress(base64.b64decode(text, validate=True))
        except zlib.error as error:
            raise ValueError(f"rows of commit {number}: {error}") from error
        commits[int(number)] = _Commit(int(batch_id), np.frombuffer(data, "<u8").astype(np.uint64))
    return commits


def read_suspended_queues(root: str, group: str, key: CommitKey) -> Mapping[QueueKey, tuple[Suspension, bool]]:
    """Return a mapping from each suspended queue of a group to (its suspension, whether the suspension is settled).

    A suspension is settled if it has no dead letters, or if they are certainly in the store. `key` is the batch that
    asks: dead letters of this same batch are not settled, because the batch is being repeated. Takes no lock. Raises
    DamageError if a file is damaged, and StoreError if a newer version of rmq-spark wrote it.
    """
    found = {}
    for queue, one in read_suspended(root, group).queues.items():
        is_settled = True
        if one.dead:
            batch = CommitKey(one.query_id, one.batch_id)
            is_settled = batch != key and SendBackLedger(root, Disk(), batch).read().batch_id >= one.batch_id
        found[queue] = (one, is_settled)
    return found
