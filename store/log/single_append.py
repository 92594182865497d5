"""Appends of single messages to an open write session, with as few system calls as possible.

The first message of a queue in a session is appended by `WriteSession.append`, which checks everything. After that the
files of the queue, of the log and of the key index stay open, and nobody else may write them under the lock. So the
next message of this queue needs no check of what was checked before, and no read except of its index slots.

The steps are those of a write session (`write_session.py`), with one watermark for each message instead of three:

1. The record is written to the log. If a crash follows, the next writer clears it.
2. The watermark records that the record is complete, and that all earlier messages have their entries and keys. If a
   crash follows, the next writer makes the record's entry and its keys.
3. The entry is written, and then the keys.

So the watermark on disk is that of an open session until `finish`, and its end is one message behind. Between two
messages it says that the last record is complete. If the process dies then, the next writer only writes the entry and
the keys of that record again, with the same bytes.
"""

import contextlib
from dataclasses import dataclass, replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import WritableFile
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format.own_files import OpenSlots
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.single_message import SingleRecord
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_state import watermark_path
from rmq_spark.store.log.write_session import Guard, WriteSession
from rmq_spark.store.model import QueueKey

# If a disk has so much more free space than needed, it is not asked again for a while.
_AMPLE_BYTES = 1 << 30
_AMPLE_FOR_MS = 20


@dataclass(slots=True)
class _Log:
    """The end of the log, and its last message: store time (ms), physical offset and header."""

    end: int
    last_ms: int
    last_place: int
    last_head: bytes


class SingleAppender:
    """Appends single messages to the store in one write session. For one thread that holds the store's lock.

    Call `finish` before any other operation of the session, and before its end. Call `close` at the end.
    """

    def __init__(self, store: StoreFiles, guard: Guard, session: WriteSession) -> None:
        self._store, self._guard, self._session = store, guard, session
        self._log: _Log | None = None  # not None: the watermark on disk is that of an open session
        self._file: WritableFile | None = None  # the watermark's
        self._slots: OpenSlots | None = None
        self._ample_until_ms = 0

    def has_open(self, key: QueueKey) -> bool:
        """Say whether the session has appended to this queue, and its newest file has room."""
        return self._store.queues.next_of_open(key) is not None

    def append(self, record: SingleRecord) -> tuple[int, int]:
        """Append a message, whose topic must exist. Return its queue offset and its physical offset.

        Raises the errors of `WriteSession.append`. After an error the session must end with that error, because the
        next session then recovers the store.
        """
        key, size, store = record.queue, len(record.data), self._store
        queue_offset = store.queues.next_of_open(key)
        end = store.watermark.end if self._log is None else self._log.end
        if (
            queue_offset is None
            or not store.log_writer.has_room(end, size)
            or not store.index.has_room(record.key_count)
        ):
            return self._append_checked(record)
        store.heartbeat()
        now_ms = store.now_ms()
        self._refuse_full_disk(size, now_ms)
        if self._log is None:
            self._log = self._open()
        log = self._log
        time_ms = max(now_ms, log.last_ms)  # never decreases, even if the clock does
        record.stamp(queue_offset, log.end, time_ms)
        store.log_writer.write_one(log.end, record.data)
        # As in `WriteSession.append`: if a broker has read the store meanwhile, it appends over this record.
        self._guard.refuse_broker()
        self._note_logged(log, log.end + size)
        store.queues.put_one(key, log.end, size, record.tags_code)
        store.index.put_one(record.key_hashes, log.end, time_ms)
        self._guard.refuse_broker()
        head = bytes(record.data[: RECORD_HEAD.itemsize])
        self._log = _Log(log.end + size, time_ms, log.end, head)
        return queue_offset, log.end

    def finish(self) -> None:
        """Write the watermark of a closed session, unless it is on disk already."""
        log = self._log
        if log is not None:
            self._guard.refuse_broker()
            self._store.close_session(log.end, log.last_ms, log.last_place, log.last_head)
            self._log = None

    def close(self) -> None:
        """Close the watermark's file. Writes nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _append_checked(self, record: SingleRecord) -> tuple[int, int]:
        """Append a message with all checks, and open the files that it belongs to."""
        self.finish()
        appended = self._session.append(record.as_batch())
        with contextlib.suppress(StoreError):  # the message is complete; the next one is appended here again
            self._store.queues.open(record.queue)
            self._store.index.open()
        return int(appended.queue_offsets[0]), int(appended.physical_offsets[0])

    def _open(self) -> _Log:
        before = self._store.watermark
        self._store.open_session()
        if self._file is None:
            self._file = self._store.disk.open(watermark_path(self._store.root))
        self._slots = OpenSlots(self._store.watermark)
        return _Log(before.end, before.last_ms, before.last_place, before.last_head)

    def _note_logged(self, log: _Log, logged_end: int) -> None:
        """Record on disk that the new record is complete, and that all messages before it have entries and keys."""
        store = self._store
        assert self._slots is not None
        assert self._file is not None
        store.watermark = replace(
            store.watermark,
            number=store.watermark.number + 1,
            end=log.end,
            last_ms=log.last_ms,
            last_place=log.last_place,
            last_head=log.last_head,
            logged_end=logged_end,
            index=store.index.state(),
        )
        self._file.write(*self._slots.encode(store.watermark))

    def _refuse_full_disk(self, size: int, now_ms: int) -> None:
        if not self._ample_until_ms - _AMPLE_FOR_MS <= now_ms < self._ample_until_ms:
            store = self._store
            store.refuse_full_disk(size, 1)
            is_ample = all(files.free_bytes(folder) > _AMPLE_BYTES for folder in {store.root, *store.folders})
            self._ample_until_ms = now_ms + _AMPLE_FOR_MS if is_ample else 0
