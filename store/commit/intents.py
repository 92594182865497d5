"""Intents: promises, on disk for good, that staged files will be appended, and notes of how far that got.

| file in `rmq/intents/` | what |
| --- | --- |
| `<query>.json` | the intent: from here on its rows come into the store, whoever dies |
| `<query>.lock` | locked (FileLock) by whoever works on it: an intent whose lock is free has lost its owner |
| `<query>.progress` | hints, not synced: which rows stood in the log where; believed only if the log bears them out |
| `<query>.count` | how many rows stand in the log; believed until the machine stops or somebody is about to append |

A query has one intent at a time. All these files are made and taken away under the store's lock, and whoever asks for
the lock file has the store's lock too. So the lock file cannot be taken away under somebody who is about to lock it.
The owner keeps its lock while others have the store's in between.
"""

import contextlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmq_spark.store.commit.keys import INTENTS, CommitKey, make_folders, safe_name, side_path
from rmq_spark.store.commit.side_file import (
    digest_of,
    digest_text,
    encode_side_file,
    note_of,
    number_of,
    read_side_file,
    text_of,
)
from rmq_spark.store.commit.staged_file import StagedFile
from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.changing import TEMPORARY_SUFFIX, Disk
from rmq_spark.store.disk.file_lock import FileLock

_JSON, _LOCK, _PROGRESS, _COUNT = ".json", ".lock", ".progress", ".count"
# One after the other in `<query>.progress`. After a power cut older ones may be right where the newest are not.
_HINT = np.dtype(
    [
        ("rows", ">i8"),  # of the intent, counted from the first; 0 is no hint
        ("physical_offset", ">i8"),  # where the last of them starts
    ]
)
assert _HINT.itemsize == 16
# The one thing in `<query>.count`, written in place; zeros where nobody knows.
_COUNTED = np.dtype(
    [
        ("rows", ">i8"),  # of the intent, counted from the first
        ("physical_offset", ">i8"),  # where the last record starts that was looked at; -1 without one
        ("mark", ">u4"),  # of that record, by which it is known again
        ("is_whole", ">u4"),  # 1: there is no row behind it either
        ("crc", ">u4"),  # of the others, of the intent, and of what names the time since the machine's start
    ]
)
assert _COUNTED.itemsize == 28
_WHAT = (
    "the promise to append what was staged; whoever takes it away gives up the rows that are not in the store yet, and "
    "when the query writes that batch again those that are come twice"
)
_NEXT_STEP = "Restore the file from a copy, or take it away at that price."


@dataclass(frozen=True, slots=True)
class Intent:
    """Who appends which staged files, in which order, from where on. All that a stranger needs to finish it.

    Without `checks_topics` rows go where they say whatever topics.json says by now, as a broker delivers what waited.
    `note` says what the batch stands for to whoever made it; the ledger takes it over with the batch.
    """

    key: CommitKey
    files: tuple[StagedFile, ...]
    rows: int
    bytes: int
    digest: int
    create_topics: bool
    queue_count: int  # of a topic that is made
    is_synced: bool  # flush=sync: on disk for good before the ledger says that it is there
    start: int  # physical offset where the log ended when the intent was made
    application: str  # whose it is, for people
    made_ms: int
    checks_topics: bool = True
    note: Mapping[str, int] = field(default_factory=dict)

    @property
    def topics(self) -> dict[str, int]:
        """Return by topic how many queues it must have: the largest queue id in the files, plus one."""
        topics: dict[str, int] = {}
        for file in self.files:
            for topic, count in file.topics.items():
                topics[topic] = max(topics.get(topic, 0), count)
        return topics


@dataclass(frozen=True, slots=True)
class Hint:
    """The first `rows` rows stood in the log once, the last of them at `physical_offset`."""

    rows: int
    physical_offset: int


@dataclass(frozen=True, slots=True)
class Count:
    """Up to the record at `physical_offset`, which `mark` knows again, exactly the first `rows` rows are in the log.

    Without a record (-1) none was looked at. `is_whole`: there is none behind it, to the log's end. That stays so
    whatever others append, until somebody appends rows of the intent.
    """

    rows: int
    physical_offset: int = -1
    mark: int = 0
    is_whole: bool = False


class Intents:
    """The intents of one store. What is on the disk is asked anew each time; nothing is kept."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._root, self._disk = root, disk
        self.folder = side_path(root, INTENTS)

    def path(self, query_id: str) -> str:
        """Return the path of a query's intent."""
        return self._path(query_id, _JSON)

    def read(self, query_id: str) -> Intent | None:
        """Return a query's intent, None if it has none. Raises DamageError, or StoreError for a newer version."""
        return self._read_named(safe_name(query_id))

    def read_all(self) -> list[Intent]:
        """Return all intents, the oldest in the log first. Raises what `read` raises."""
        found = [intent for name in self._names() if (intent := self._read_named(name)) is not None]
        return sorted(found, key=_age)

    def take_dead(self) -> list[tuple[Intent, FileLock]]:
        """Return the intents whose owners are dead, the oldest in the log first, and their locks, taken.

        Only under the store's lock; the caller releases the others. Raises what `read` raises, and holds none then.
        """
        dead: list[tuple[Intent, FileLock]] = []
        locks: list[FileLock] = []
        try:
            for name in self._names():
                lock = self._lock_named(name)
                locks.append(lock)
                if lock.try_take():
                    intent = self._read_named(name)
                    dead += [(intent, lock)] if intent is not None else []
        except BaseException:
            for lock in locks:
                lock.release()
            raise
        return sorted(dead, key=lambda pair: _age(pair[0]))

    def lock(self, query_id: str) -> FileLock:
        """Return the lock of a query's intent, not yet taken. Only under the store's lock."""
        make_folders(self._root, self._disk)
        return self._lock_named(safe_name(query_id))

    def write(self, intent: Intent) -> None:
        """Make an intent, or write it anew. Only under the store's lock, by who holds the intent's.

        Once this returns its rows will come into the store. A crash before leaves no intent, or the whole one.
        """
        self._disk.replace(self.path(intent.key.query_id), encode_side_file(_intent_fields(intent)))

    def note_hint(self, intent: Intent, hint: Hint) -> None:
        """Keep in mind how far it got, for whoever has to go on. A power cut may lose or spoil it."""
        path = self._path(intent.key.query_id, _PROGRESS)
        if files.file_size(path) < 0:
            self._disk.create(path, 0)
        with self._disk.open(path) as file:
            behind = file.size() // _HINT.itemsize * _HINT.itemsize
            file.write(behind, np.array([(hint.rows, hint.physical_offset)], _HINT).tobytes())

    def hints(self, query_id: str) -> list[Hint]:
        """Return what was noted, the newest last; nothing if it cannot be read. Nobody vouches for it."""
        data = files.read_small(self._path(query_id, _PROGRESS)) or b""
        found = np.frombuffer(data[: len(data) // _HINT.itemsize * _HINT.itemsize], _HINT)
        return [Hint(int(one["rows"]), int(one["physical_offset"])) for one in found if one["rows"] > 0]

    def note_count(self, intent: Intent, count: Count) -> None:
        """Keep a count, so that nobody has to count again. Only by who holds the intent's lock."""
        fields = count.rows, count.physical_offset, count.mark, count.is_whole
        counted = np.array([(*fields, _count_crc(intent, fields))], _COUNTED)
        self._write_count(intent, counted.tobytes())

    def forget_count(self, intent: Intent) -> None:
        """Before rows are appended: from here nobody knows how many there are.

        Not synced. After a power cut, which may lose this and keep the rows, no count is believed at all.
        """
        if files.file_size(self._path(intent.key.query_id, _COUNT)) > 0:
            self._write_count(intent, bytes(_COUNTED.itemsize))

    def count(self, intent: Intent) -> Count | None:
        """Return what was counted, None if nobody knows. The log may have lost its end since: its record tells."""
        data = files.read_small(self._path(intent.key.query_id, _COUNT)) or b""
        if len(data) != _COUNTED.itemsize or not host.boot_id():
            return None
        found = np.frombuffer(data, _COUNTED)[0]
        rows, place, mark, is_whole = (int(found[name]) for name in ("rows", "physical_offset", "mark", "is_whole"))
        if int(found["crc"]) != _count_crc(intent, (rows, place, mark, is_whole)) or not 0 <= rows <= intent.rows:
            return None
        return Count(rows, place, mark, bool(is_whole))

    def remove(self, query_id: str) -> None:
        """Take a query's intent away: only under the store's lock, when the ledger has its batch.

        A power cut before `sync` may bring the intent back; whoever finds it finds the rows too.
        """
        # The intent first: without it the others mean nothing, but it must not lose its lock while it is there.
        for ending in (_JSON, _PROGRESS, _COUNT, _LOCK):
            self._disk.remove(self._path(query_id, ending))

    def sync(self) -> None:
        """Return when a power cut neither takes away an intent that is there nor brings back one that was removed."""
        self._disk.sync_folder(self.folder)

    def remove_remains(self) -> None:
        """Take away what dead processes left here without an intent. Only under the store's lock."""
        names = [name for name, is_folder in files.list_folder(self.folder) if not is_folder]
        living = {name.removesuffix(_JSON) for name in names if name.endswith(_JSON)}
        for name in names:
            query = _query_of(name)
            if query is None or query in living:
                continue
            lock = FileLock(files.join(self.folder, query + _LOCK))
            try:
                if files.file_size(lock.path) >= 0 and not lock.try_take():
                    continue  # somebody is about to make it
                self._disk.remove(files.join(self.folder, name))
            finally:
                lock.release()

    def staged_names(self) -> set[str]:
        """Return the names of all staged files that an intent names. Raises what `read` raises."""
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
        """Return the names, without ending, of all intents."""
        return [name.removesuffix(_JSON) for name, _ in files.list_folder(self.folder) if name.endswith(_JSON)]

    def _read_named(self, name: str) -> Intent | None:
        def build(fields: Mapping[str, Any]) -> Intent:
            intent = _build_intent(fields)
            if safe_name(intent.key.query_id) != name:
                raise ValueError(f"the intent of query {intent.key.query_id}")
            return intent

        return read_side_file(files.join(self.folder, name + _JSON), _WHAT, _NEXT_STEP, build)

    def _lock_named(self, name: str) -> FileLock:
        path = files.join(self.folder, name + _LOCK)
        if files.file_size(path) < 0:
            with contextlib.suppress(FileExistsError):
                self._disk.create_lock(path)
        return FileLock(path, only_writers=True)


def _count_crc(intent: Intent, fields: tuple[int, ...]) -> int:
    """Return what a count is believed by: one of another intent, from before a power cut, or torn, has another."""
    key = intent.key
    known = host.boot_id(), key.query_id, key.batch_id, intent.rows, intent.digest, intent.made_ms, *map(int, fields)
    return zlib.crc32(repr(known).encode())


def _age(intent: Intent) -> tuple[int, str]:
    return intent.start, intent.key.query_id


def _query_of(name: str) -> str | None:
    """Return the query's name in the name of one of our files, None for others; a half-made intent's too."""
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
    checks_topics = fields.get("checksTopics", True)  # older ones do not say
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
