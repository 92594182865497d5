"""Whose a commit is, and the names of files and folders that follow from it.

    rmq/intents/<query>.json      rmq/ledger/<query>.json      rmq/staging/<query>@<batch>/<task>.arrow

A query's id may hold anything (a transaction's is the user's own text), so that `<query>` is a name made from it:
different ids have different names, and none leaves its folder.
"""

import contextlib
import hashlib
from dataclasses import dataclass
from urllib.parse import quote

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

INTENTS = "intents"
LEDGER = "ledger"
STAGING = "staging"

# Made when the folders stand on disk for good. Its name counts up with their layout.
_FOLDERS_MADE = "commits-v1"
# Longer names are cut: a file's name has at most 255 bytes, and `.json.tmp` and a batch id follow.
_MAX_NAME_CHARS = 150
_CUT_NAME_CHARS = 80
_HASH_DIGITS = 40


@dataclass(frozen=True, slots=True)
class CommitKey:
    """One batch of one query: what makes a commit the same when it is tried again.

    `batch_id` None is a batch write of its own, and `query_id` a uuid made for it. A transaction's `query_id` is
    "txn:" and its application, `batch_id` its version.
    """

    query_id: str
    batch_id: int | None = None

    def __post_init__(self) -> None:
        assert self.query_id, "a query has an id"
        assert self.batch_id is None or self.batch_id >= 0, self.batch_id

    def __str__(self) -> str:
        if self.batch_id is None:
            return f"write {self.query_id}"
        return f"batch {self.batch_id} of query {self.query_id}"

    @property
    def folder(self) -> str:
        """Return the folder in `rmq/staging/` for its staged files; `batch_of_folder` reads it."""
        name = safe_name(self.query_id)
        return name if self.batch_id is None else f"{name}@{self.batch_id}"


def batch_of_folder(folder: str) -> tuple[str, int] | None:
    """Return name of the query and batch id of a folder in `rmq/staging/`; None for one that names no batch."""
    name, separator, digits = folder.rpartition("@")
    if not separator or not name or not digits.isascii() or not digits.isdigit():
        return None
    return name, int(digits)


def safe_name(query_id: str) -> str:
    """Return the name of a query's files: letters, digits and `_ - . ~` stay, all else is escaped as in URLs.

    A very long one is cut, and a hash with a `+` before it, which no escaped name has, keeps it apart from others.
    """
    name = quote(query_id, safe="", errors="surrogatepass")
    if name.startswith("."):  # no hidden file, and above all no `..`
        name = f"%2E{name[1:]}"
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(query_id.encode(errors="surrogatepass")).hexdigest()
    return f"{name[:_CUT_NAME_CHARS]}+{digest[:_HASH_DIGITS]}"


def side_path(root: str, *parts: str) -> str:
    """Return a path below `rmq/` in the store's folder."""
    return files.join(root, SIDE_FOLDER, *parts)


def make_folders(root: str, disk: Disk) -> None:
    """Make the folders for intents, ledger and staged files, for good. Many may do so at once.

    Their names must be on disk before anything in them counts. They are synced once: the empty file that is made
    last says so to all who come later.
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
    with contextlib.suppress(FileExistsError):  # another process was as quick
        disk.create(made, 0)
