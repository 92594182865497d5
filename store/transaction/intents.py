"""Intents: durable promises to append the rows of staging files, and the progress of each promise.

| file in `rmq/intents/` | content |
| --- | --- |
| `<query>.json` | the intent; once this file exists, its rows will be appended, even if the writer dies |
| `<query>.lock` | locked (FileLock) by the owner, the process that appends the rows; free if the owner has died |
| `<query>.progress` | hints: physical offsets of appended rows; not synced, so the log must confirm each hint |
| `<query>.count` | the number of rows in the log; valid until the machine stops or a process appends more rows |

A query has at most one intent. These files are created and removed only under the store's lock. The intent's lock is
also taken only under the store's lock, so a lock file is never removed while another process is about to lock it. The
owner keeps the intent's lock between its write sessions, while other processes may hold the store's lock.
"""

import contextlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import TEMPORARY_SUFFIX, Disk
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
from rmq_spark.store.transaction.ledger import INTENTS, make_folders

_JSON, _LOCK, _PROGRESS, _COUNT = ".json", ".lock", ".progress", ".count"
# `<query>.progress` is a sequence of hints. After a power cut an older hint may be valid although the newest is not.
_HINT = np.dtype(
    [
        ("rows", ">i8"),  # number of the intent's rows in the log; 0 means that this is not a hint
        ("physical_offset", ">i8"),  # of the last of these rows
    ]
)
assert _HINT.itemsize == 16
# The content of `<query>.count`, which is overwritten in place. If the number is unknown, all fields are 0.
_COUNT_ENTRY = np.dtype(
    [
        ("rows", ">i8"),  # number of the intent's rows in the log
        ("physical_offset", ">i8"),  # of the last record that was compared; -1 if none was
        ("fingerprint", ">u4"),  # of that record
        ("is_complete", ">u4"),  # 1 if no row of the intent follows that record
        ("crc", ">u4"),  # checksum of the other fields, the intent, and the boot id
    ]
)
assert _COUNT_ENTRY.itemsize == 28
_PURPOSE = (
    "the intent to append staging files; removing it abandons the rows that are not in the store yet, and duplicates "
    "the others if the query writes the batch again"
)
_NEXT_STEP = "Restore the file from a copy, or remove it and accept that."


@dataclass(frozen=True, slots=True)
class StagedFile:
    """The description of one staging file. A task sends it to the commit in Spark's commit message, so it is small.

    `name` is the path below `rmq/staging/`. If a task has no rows, there is no file, and the sizes are 0.
    """

    name: str
    rows: int
    bytes: int  # of the records: the commit log grows by this, plus fillers
    digest: int  # over the user's rows, 0 .. 2^64-1
    topics: Mapping[str, int] = field(default_factory=dict)  # `encoded_slices.required_topics` of the rows
    largest_bytes: int = 0  # length of the longest record
    file_bytes: int = 0  # length of the file


@dataclass(frozen=True, slots=True)
class Intent:
    """The staging files of one batch, with everything that another process needs to append their rows.

    If `checks_topics` is False, rows are appended to their queues without a look at topics.json, as a broker delivers
    delayed messages. `note` is metadata from the author of the batch; it is copied into the batch's ledger row.
    """

    key: CommitKey
    files: tuple[StagedFile, ...]
    rows: int
    bytes: int
    digest: int
    create_topics: bool
    queue_count: int  # number of queues of each topic that is created
    is_synced: bool  # flush=sync: the messages are made durable before the batch is written to the ledger
    start: int  # physical offset of the log's end when the intent was written
    application: str  # name of the owner's application, for error messages
    made_ms: int  # when the intent was made, in ms since the epoch
    checks_topics: bool = True
    note: Mapping[str, int] = field(default_factory=dict)

    @property
    def topics(self) -> dict[str, int]:
        """The topics that must exist, with the number of queues that each needs (`encoded_slices.required_topics`)."""
        topics: dict[str, int] = {}
        for file in self.files:
            for topic, count in file.topics.items():
                topics[topic] = max(topics.get(topic, 0), count)
        return topics


@dataclass(frozen=True, slots=True)
class Hint:
    """A record of progress: the first `rows` rows of an intent were in the log, the last one at `physical_offset`."""

    rows: int
    physical_offset: int


@dataclass(frozen=True, slots=True)
class Count:
    """The exact number of an intent's rows in the log, up to and including the record at `physical_offset`.

    `fingerprint` identifies that record. If no record was compared, `physical_offset` is -1. `is_complete` means that
    no row of the intent follows that record in the log. This remains true until a process appends rows of the intent.
    """

    rows: int
    physical_offset: int = -1
    fingerprint: int = 0
    is_complete: bool = False


class Intents:
    """The intents of one store. Every call reads them from disk, because nothing is cached."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._root, self._disk = root, disk
        self.folder = side_path(root, INTENTS)

    def path(self, query_id: str) -> str:
        """Return the path of the file of a query's intent, whether it exists or not."""
        return self._path(query_id, _JSON)

    def read(self, query_id: str) -> Intent | None:
        """Return a query's intent, or None if it has none.

        Raises DamageError if the file is damaged, and StoreError if a newer version of rmq-spark wrote it.
        """
        return self._read_named(safe_name(query_id))

    def read_all(self) -> list[Intent]:
        """Return all intents in the order in which they start in the log. Raises the errors of `read`."""
        found = [intent for name in self._names() if (intent := self._read_named(name)) is not None]
        return sorted(found, key=_log_order)

    def lock_orphans(self) -> list[tuple[Intent, FileLock]]:
        """Lock the intents whose owners are dead, and return each with its lock, in the order of starts in the log.

        The caller must hold the store's lock, and must release the returned locks. Raises the errors of `read`; then no
        intent remains locked.
        """
        orphans: list[tuple[Intent, FileLock]] = []
        locks: list[FileLock] = []
        try:
            for name in self._names():
                lock = self._lock_named(name)
                locks.append(lock)
                if lock.try_take():
                    intent = self._read_named(name)
                    orphans += [(intent, lock)] if intent is not None else []
        except BaseException:
            for lock in locks:
                lock.release()
            raise
        return sorted(orphans, key=lambda pair: _log_order(pair[0]))

    def lock(self, query_id: str) -> FileLock:
        """Return the lock of a query's intent without taking it. The caller must hold the store's lock."""
        make_folders(self._root, self._disk)
        return self._lock_named(safe_name(query_id))

    def write(self, intent: Intent) -> None:
        """Create or replace an intent, durably. The caller must hold the store's lock and the intent's lock.

        Once this returns, the intent's rows will be appended. A crash during the call leaves either the old state or
        the complete new intent.
        """
        self._disk.replace(self.path(intent.key.query_id), encode_side_file(_intent_fields(intent)))

    def add_hint(self, intent: Intent, hint: Hint) -> None:
        """Record progress for a process that may have to resume the intent. A power cut may lose or corrupt the hint.

        The owner calls this after it has appended a chunk.
        """
        path = self._path(intent.key.query_id, _PROGRESS)
        if files.file_size(path) < 0:
            self._disk.create(path, 0)
        with self._disk.open(path) as file:
            end = file.size() // _HINT.itemsize * _HINT.itemsize
            file.write(end, np.array([(hint.rows, hint.physical_offset)], _HINT).tobytes())

    def hints(self, query_id: str) -> list[Hint]:
        """Return the hints of a query's intent, newest last; an empty list if there are none.

        Hints may be wrong, so the caller must compare them with the log.
        """
        data = files.read_small(self._path(query_id, _PROGRESS)) or b""
        found = np.frombuffer(data[: len(data) // _HINT.itemsize * _HINT.itemsize], _HINT)
        return [Hint(int(one["rows"]), int(one["physical_offset"])) for one in found if one["rows"] > 0]

    def save_count(self, intent: Intent, count: Count) -> None:
        """Save a count, so that the next writer need not count again. The caller must hold the intent's lock."""
        fields = count.rows, count.physical_offset, count.fingerprint, count.is_complete
        entry = np.array([(*fields, _count_crc(intent, fields))], _COUNT_ENTRY)
        self._write_count(intent, entry.tobytes())

    def clear_count(self, intent: Intent) -> None:
        """Mark the number of an intent's rows in the log as unknown. Call this before rows are appended.

        This is not synced, and need not be: after a power cut no saved count is valid.
        """
        if files.file_size(self._path(intent.key.query_id, _COUNT)) > 0:
            self._write_count(intent, bytes(_COUNT_ENTRY.itemsize))

    def count(self, intent: Intent) -> Count | None:
        """Return the saved count of an intent, or None if the number is unknown.

        The end of the log may have been truncated after the count was saved, so the caller must compare the fingerprint
        of the record at `physical_offset`.
        """
        data = files.read_small(self._path(intent.key.query_id, _COUNT)) or b""
        if len(data) != _COUNT_ENTRY.itemsize or not host.boot_id():
            return None
        entry = np.frombuffer(data, _COUNT_ENTRY)[0]
        rows, physical_offset, fingerprint, is_complete, crc = map(int, entry.tolist())
        fields = rows, physical_offset, fingerprint, is_complete
        if crc != _count_crc(intent, fields) or not 0 <= rows <= intent.rows:
            return None
        return Count(rows, physical_offset, fingerprint, bool(is_complete))

    def remove(self, query_id: str) -> None:
        """Remove a query's intent after its batch was written to the ledger. The caller must hold the store's lock.

        A power cut before `sync` may restore the intent. This does no harm, because the writer that finds the intent
        finds its rows in the store.
        """
        # Remove the intent first: without it the other files have no effect, but it must have a lock while it exists.
        for ending in (_JSON, _PROGRESS, _COUNT, _LOCK):
            self._disk.remove(self._path(query_id, ending))

    def sync(self) -> None:
        """Make the creation and the removal of intents durable, by syncing their folder."""
        self._disk.sync_folder(self.folder)

    def remove_orphans(self) -> None:
        """Remove files that dead processes left and that belong to no intent. The caller must hold the store's lock."""
        names = [name for name, is_folder in files.list_folder(self.folder) if not is_folder]
        queries = {name.removesuffix(_JSON) for name in names if name.endswith(_JSON)}
        for name in names:
            query = _query_of(name)
            if query is None or query in queries:
                continue
            lock = FileLock(files.join(self.folder, query + _LOCK))
            try:
                if files.file_size(lock.path) >= 0 and not lock.try_take():
                    continue  # a live process has locked the file and is about to write the intent
                self._disk.remove(files.join(self.folder, name))
            finally:
                lock.release()

    def staged_names(self) -> set[str]:
        """Return the names of the staging files of all intents. Raises the errors of `read`."""
        return {file.name for intent in self.read_all() for file in intent.files}

    def _write_count(self, intent: Intent, data: bytes) -> None:
        path = self._path(intent.key.query_id, _COUNT)
        if files.file_size(path) < 0:
            self._disk.create(path, 0)
        with self._disk.open(path) as file:
            file.write(0, data)

    def _path(self, query_id: str, ending: str) -> str:
        return files.join(self.folder, safe_name(query_id) + ending)

    def _names(self) -> list[str]:
        """Return the file names of all intents, without their ending."""
        return [name.removesuffix(_JSON) for name, _ in files.list_folder(self.folder) if name.endswith(_JSON)]

    def _read_named(self, name: str) -> Intent | None:
        def build(fields: Mapping[str, Any]) -> Intent:
            intent = _build_intent(fields)
            if safe_name(intent.key.query_id) != name:
                raise ValueError(f"the intent of query {intent.key.query_id}")
            return intent

        return read_side_file(files.join(self.folder, name + _JSON), _PURPOSE, _NEXT_STEP, build)

    def _lock_named(self, name: str) -> FileLock:
        path = files.join(self.folder, name + _LOCK)
        if files.file_size(path) < 0:
            with contextlib.suppress(FileExistsError):
                self._disk.create_lock(path)
        return FileLock(path, only_writers=True)


def _count_crc(intent: Intent, fields: tuple[int, ...]) -> int:
    """Return the checksum that a valid count of this intent has.

    A count of another intent, from before the last boot, or of a torn write has another checksum.
    """
    key = intent.key
    parts = host.boot_id(), key.query_id, key.batch_id, intent.rows, intent.digest, intent.made_ms, *map(int, fields)
    return zlib.crc32(repr(parts).encode())


def _log_order(intent: Intent) -> tuple[int, str]:
    return intent.start, intent.key.query_id


def _query_of(name: str) -> str | None:
    """Return the query's safe name from the name of a file that accompanies an intent, or None for other names.

    These files are lock, progress, count, and an intent that was not written completely.
    """
    for ending in (_LOCK, _PROGRESS, _COUNT, _JSON + TEMPORARY_SUFFIX):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return None


def _intent_fields(intent: Intent) -> dict[str, Any]:
    return {
        "queryId": intent.key.query_id,
        "batchId": intent.key.batch_id,
        "files": [_file_fields(file) for file in intent.files],
        "rows": intent.rows,
        "bytes": intent.bytes,
        "digest": digest_text(intent.digest),
        "createTopics": intent.create_topics,
        "queueCount": intent.queue_count,
        "flush": "sync" if intent.is_synced else "async",
        "start": intent.start,
        "application": intent.application,
        "madeMs": intent.made_ms,
        "checksTopics": intent.checks_topics,
        "note": dict(intent.note),
    }


def _build_intent(fields: Mapping[str, Any]) -> Intent:
    batch_id = None if fields["batchId"] is None else number_of(fields, "batchId")
    checks_topics = fields.get("checksTopics", True)  # older files lack it
    if fields["flush"] not in ("sync", "async") or {type(fields["createTopics"]), type(checks_topics)} != {bool}:
        raise ValueError(
            f"flush {fields['flush']!r}, createTopics {fields['createTopics']!r}, checksTopics {checks_topics!r}"
        )
    return Intent(
        key=CommitKey(text_of(fields, "queryId"), batch_id),
        files=tuple(_build_file(file) for file in fields["files"]),
        rows=number_of(fields, "rows"),
        bytes=number_of(fields, "bytes"),
        digest=digest_of(fields),
        create_topics=fields["createTopics"],
        queue_count=number_of(fields, "queueCount"),
        is_synced=fields["flush"] == "sync",
        start=number_of(fields, "start"),
        application=text_of(fields, "application"),
        made_ms=number_of(fields, "madeMs"),
        checks_topics=checks_topics,
        note=note_of(fields),
    )


def _file_fields(file: StagedFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "rows": file.rows,
        "bytes": file.bytes,
        "digest": digest_text(file.digest),
        "topics": dict(file.topics),
        "largestBytes": file.largest_bytes,
        "fileBytes": file.file_bytes,
    }


def _build_file(fields: Mapping[str, Any]) -> StagedFile:
    return StagedFile(
        name=text_of(fields, "name"),
        rows=number_of(fields, "rows"),
        bytes=number_of(fields, "bytes"),
        digest=digest_of(fields),
        topics={str(topic): int(count) for topic, count in fields["topics"].items()},
        largest_bytes=number_of(fields, "largestBytes"),
        file_bytes=number_of(fields, "fileBytes"),
    )
