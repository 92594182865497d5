"""Which rows of a query's batch were sent back: what keeps a batch that is run again from sending them twice.

    rmq/sentback/<query>.json        rmq/sentback/<query>.lock

A batch that Spark runs again may fail in other rows than the first time: a listener that calls a service does. So it is
not the batch that is sent back once, but each of its rows. The commits of one query are numbered, and the ledger says
which was the last (`store/commit/ledger.py`, query `sendback:<query>`) and for which batch (its note). The file says
which rows each of them had. It is written before its commit begins, so it may speak of one commit too many, which
never came to be: whoever reads it believes it as far as the ledger, or an intent that somebody will finish.

Only who holds the lock beside it writes: one commit of a query at a time.
"""

import base64
import contextlib
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.commit.intents import Intents
from rmq_spark.store.commit.keys import CommitKey, safe_name, side_path
from rmq_spark.store.commit.ledger import Ledger, LedgerRow
from rmq_spark.store.commit.side_file import encode_side_file, read_side_file
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.errors import StoreError

RowKeys = NDArray[np.uint64]

NO_COMMIT = -1
_FOLDER = "sentback"
_BATCH = "batch"  # in the note of a commit
_NO_KEYS: RowKeys = np.zeros(0, np.uint64)
_WHAT = (
    "which rows of a query's last batch were sent back; without it rows of a batch that is run again are sent back "
    "once more"
)
_NEXT_STEP = "Restore the file from a copy, or remove it at that price."


@dataclass(frozen=True, slots=True)
class Sent:
    """What a query has sent back: the number of its last commit, that one's batch, and the rows of this batch."""

    last_commit: int = NO_COMMIT
    batch_id: int = -1
    row: LedgerRow | None = None
    keys: RowKeys = field(default_factory=lambda: _NO_KEYS)


@dataclass(frozen=True, slots=True)
class _Commit:
    """A commit that was, or was to be: for which batch, and which rows."""

    batch_id: int
    keys: RowKeys


class SentRows:
    """The rows that one query has sent back to one store. `key` is of one of its batches, and has a batch id."""

    def __init__(self, root: str, disk: Disk, key: CommitKey) -> None:
        assert key.batch_id is not None
        self._root, self._disk, self._key, self._batch_id = root, disk, key, key.batch_id
        self.query_id = f"sendback:{key.query_id}"
        self._ledger, self._intents = Ledger(root, disk), Intents(root, disk)

    def look(self) -> Sent:
        """Return what was sent back by now, by commits that are sure to be finished too. Takes no lock.

        Raises DamageError, and StoreError for files of a newer release.
        """
        intent = self._intents.read(self.query_id)
        row = self._ledger.read(self.query_id)  # then: what an intent promised is in the ledger when the intent goes
        # Last: it knows the commit that these two name, or more than one has come since, which the commit refuses.
        held = read_side_file(self._path(".json"), _WHAT, _NEXT_STEP, _build_file)
        last, batch_id = NO_COMMIT, -1
        if row is not None:
            last, batch_id = row.batch_id, row.note.get(_BATCH, -1)
        if intent is not None and intent.key.batch_id is not None and intent.key.batch_id > last:
            last, batch_id = intent.key.batch_id, intent.note.get(_BATCH, -1)
        commits = {} if held is None else held
        keys = [one.keys for number, one in commits.items() if number <= last and one.batch_id == batch_id]
        return Sent(last, batch_id, row, np.concatenate(keys) if keys else _NO_KEYS)

    def known(self) -> tuple[int, RowKeys]:
        """Return the number of the last commit, and the rows of this batch that need not be sent back any more."""
        sent = self.look()
        return sent.last_commit, sent.keys if sent.batch_id == self._batch_id else _NO_KEYS

    def is_unfinished(self) -> bool:
        """Say whether a commit of the query was promised and is not in the ledger yet."""
        return self._intents.read(self.query_id) is not None

    def lock(self) -> FileLock:
        """Return the lock that one commit of the query holds at a time; not taken yet."""
        self._disk.make_folder(side_path(self._root, _FOLDER))
        path = self._path(".lock")
        if files.file_size(path) < 0:
            with contextlib.suppress(FileExistsError):  # another process was as quick
                self._disk.create_lock(path)
        return FileLock(path, only_writers=True)

    def announce(self, sent: Sent, keys: RowKeys) -> CommitKey:
        """Have the file say which rows the next commit has, and return its key. The caller holds the lock.

        From here on they count as sent back once the commit's intent is there; a crash before that changes nothing.
        """
        number = sent.last_commit + 1
        # What the last batch sent back stays until this commit is there: it may never come to be.
        commits = {sent.last_commit: _Commit(sent.batch_id, sent.keys), number: _Commit(self._batch_id, keys)}
        fields = {
            "queryId": self._key.query_id,
            "commits": {str(one): [commit.batch_id, _encode_keys(commit.keys)] for one, commit in commits.items()},
        }
        self._disk.replace(self._path(".json"), encode_side_file(fields))
        return CommitKey(self.query_id, number)

    @property
    def note(self) -> dict[str, int]:
        """What the commit's intent and ledger row are to say."""
        return {_BATCH: self._batch_id}

    def _path(self, ending: str) -> str:
        return files.join(side_path(self._root, _FOLDER), safe_name(self._key.query_id) + ending)


def look_at_sent_files(root: str) -> list[tuple[str, StoreError]]:
    """Return the files of all queries that cannot be read, and why."""
    folder, faults = side_path(root, _FOLDER), []
    for name, is_folder in files.list_folder(folder):
        path = files.join(folder, name)
        try:
            if name.endswith(".json") and not is_folder:
                read_side_file(path, _WHAT, _NEXT_STEP, _build_file)
        except StoreError as error:
            faults.append((path, error))
    return faults


def _encode_keys(keys: RowKeys) -> str:
    return base64.b64encode(zlib.compress(np.sort(keys).astype("<u8").tobytes(), 1)).decode()


def _build_file(fields: dict[str, Any]) -> dict[int, _Commit]:
    commits = {}
    for number, (batch_id, text) in dict(fields["commits"]).items():
        try:
            data = zlib.decompress(base64.b64decode(text, validate=True))
        except zlib.error as error:
            raise ValueError(f"rows of commit {number}: {error}") from error
        commits[int(number)] = _Commit(int(batch_id), np.frombuffer(data, "<u8").astype(np.uint64))
    return commits
