"""The files of one store for its writer: its open parts, `abort`, the checkpoint and the watermark.

`StoreFiles` has the operations that all steps of a write session share. `write_session.py` calls them in the right
order. `recovery.py` determines which files to trust when a session starts.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DiskFullError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint, encode_abort, encode_checkpoint
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.own_files import StoreSettings, Watermark
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.commit_log_writer import CommitLogWriter, DirtyFiles
from rmq_spark.store.log.consume_queue_writer import ConsumeQueueWriter
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.log.key_index import KeyIndex
from rmq_spark.store.log.queue_registry import QueueRegistry
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_state import write_watermark
from rmq_spark.store.log.topics import TopicWriter
from rmq_spark.store.model import QueueKey

_CHECK_EVERY_MS = 10_000
_SPARE_BYTES = 32 << 20  # free disk space to reserve for entries, watermarks and an index file


class StoreFiles:
    """The open files of one store. For one thread, and only under the store's lock."""

    def __init__(
        self,
        root: str,
        folders: tuple[str, ...],
        disk: Disk,
        sizes: FileSizes,
        now_ms: Callable[[], int],
        heartbeat: Callable[[], None],
    ) -> None:
        self.root, self.folders, self.disk, self.now_ms, self.heartbeat = root, folders, disk, now_ms, heartbeat
        self._abort = files.join(root, filenames.ABORT)
        self._checkpoint = files.join(root, filenames.CHECKPOINT)
        self._sizes = sizes
        self.levels = DEFAULT_DELAY_LEVELS
        self.changes = DirtyFiles(disk, (root, *folders), heartbeat=heartbeat)
        self.log = CommitLog(folders, mapped=False)
        self.log_writer = CommitLogWriter(disk, self.log, folders, self.changes, sizes.segment_bytes)
        self.registry = QueueRegistry(root, disk)
        self.topics = TopicWriter(disk, root, heartbeat)
        self.delay_offsets = DelayOffsetFile(root, disk, now_ms, lambda _: None)  # no waits under the lock
        self.queues = self._queue_writer()
        self._index_shapes: dict[str, IndexShape] = {}
        self.index = KeyIndex(root, disk, sizes.index, now_ms, self.changes, self._index_shapes)
        self.watermark = nothing_written()
        self._checked_ms: int | None = None
        self.sound_queues: set[QueueKey] = set()  # queues in which this writer searched for a hole and found none

    def use_settings(self, settings: StoreSettings, sizes: FileSizes) -> None:
        """Apply the store's settings. `sizes` applies to kinds of files for which the settings have no size."""
        self.levels = settings.levels
        self.topics.schedule_queue_count = len(self.levels)
        sizes = sizes.or_those(settings.file_sizes)
        if sizes != self._sizes:
            self._sizes = sizes
            self.adopt(self.watermark)

    def close(self) -> None:
        """Close every file. The next use opens the file again."""
        self.log_writer.close()
        self.queues.close()
        self.index.close()
        self.log.close()

    def refresh(self) -> None:
        """Discard what is cached from the disk, because another process may have written."""
        self.log.refresh()
        self.queues.forget()
        self.index.refresh()

    def adopt(self, watermark: Watermark) -> None:
        """Continue from a watermark. The watermark lists the files to sync.

        These are the files that changed since the store was last flushed and marked clean.
        """
        self.queues.close()
        self.index.close()
        self.watermark = watermark
        self.changes = DirtyFiles(self.disk, (self.root, *self.folders), watermark.dirty, self.heartbeat)
        self.log_writer = CommitLogWriter(self.disk, self.log, self.folders, self.changes, self._sizes.segment_bytes)
        self.queues = self._queue_writer()
        shape, shapes = self._sizes.index, self._index_shapes
        self.index = KeyIndex(self.root, self.disk, shape, self.now_ms, self.changes, shapes)

    def must_check_queues(self, watermark: Watermark) -> bool:
        """Say whether the queues must be compared with a watermark now.

        They must be compared when this writer starts, and when the newest watermark on disk is older than one that this
        writer has seen. While other writers alternate with this one, they must also be compared every ten seconds. They
        are not compared more often, because comparing a thousand queues takes longer than many appends. A result of
        True restarts the ten seconds.
        """
        if watermark == self.watermark:
            return False  # our own watermark: no other process has written since
        now_ms, is_older = self.now_ms(), watermark.number < self.watermark.number
        if is_older or self._checked_ms is None or abs(now_ms - self._checked_ms) >= _CHECK_EVERY_MS:
            self._checked_ms = now_ms
            return True
        return False

    def read_checkpoint(self) -> tuple[Checkpoint, int]:
        """Return the checkpoint, and the CRC of the file's bytes."""
        page = files.read_small(self._checkpoint) or b""
        return decode_checkpoint(page, self._checkpoint), zlib.crc32(page)

    def has_abort(self) -> bool:
        """Say whether `abort` exists. If it does, the store is in use or was not shut down cleanly."""
        return files.file_size(self._abort) >= 0

    def started_ms(self) -> int:
        """Return when the writer that created `abort` started (ms since the epoch).

        Return -1 if `abort` does not exist.
        """
        return files.modified_ms(self._abort)

    def mark_crashed(self) -> None:
        """Mark the store as crashed and empty the checkpoint, so that the next recovery checks the whole log."""
        if not self.has_abort():
            self.disk.replace(self._abort, encode_abort(files.process_id()))
        self.disk.replace(self._checkpoint, encode_checkpoint(Checkpoint()))

    def refuse_full_disk(self, log_bytes: int, record_count: int) -> None:
        """Raise DiskFullError if there is too little space for these records. Call it before the first write.

        `log_bytes` is the size of the records in the log. Space for their entries and keys is added.
        """
        wanted = log_bytes + record_count * 4 * QUEUE_UNIT.itemsize + _SPARE_BYTES
        for folder in {self.root, *self.folders}:
            free = files.free_bytes(folder)
            if free < wanted:
                raise DiskFullError(
                    f"the file system of {folder} has {free >> 20} MiB left, and {wanted >> 20} MiB are needed to "
                    f"append {record_count} messages. Nothing was written. Make room there (retention deletes old "
                    "segments), then write again."
                )

    def open_session(self) -> None:
        """Record on disk that a write session is open, because bytes after the watermark's end are about to change."""
        if self.watermark.settled_number == 0 and self.watermark.is_settled:
            # Write the state before our first byte, because recovery starts from this state if the machine loses power.
            self._write_watermark(self.watermark)
        if not self.has_abort():
            # The name `abort` is durable before any byte of the log is written. So a broker that opens the store after
            # a crash or a power cut recovers it.
            self.disk.replace(self._abort, encode_abort(files.process_id()))
        elif self.watermark.is_settled:
            # The writer that created `abort` may have failed, or died, before its name was durable.
            self.disk.sync_folder(self.root)
        self._write_watermark(replace(self.watermark, is_open=True, logged_end=self.watermark.end))

    def note_logged(self, end: int) -> None:
        """Record on disk that the log has all records of the open session, complete.

        They end at physical offset `end`.
        """
        self._write_watermark(replace(self.watermark, logged_end=end))

    def close_session(self, end: int, last_ms: int, last_place: int, last_head: bytes) -> None:
        """Record on disk that the log ends at `end`, and that every message before `end` has its entry and its keys.

        `last_ms`, `last_place` and `last_head` are the store time, physical offset and header of the last message.
        """
        self.registry.write(self.topics.is_deleted)
        self._write_watermark(
            replace(
                self.watermark,
                end=end,
                last_ms=last_ms,
                last_place=last_place,
                last_head=last_head,
                is_open=False,
                logged_end=0,
                dirty=self.changes.names(),
                index=self.index.state(),
            )
        )

    def settle(self) -> None:
        """Sync everything that changed, then mark the store as cleanly shut down.

        Does nothing if nothing was written since the last clean shutdown.
        """
        if self.watermark.is_settled and not self.has_abort():
            return
        self.log_writer.close()
        self._mark_syncing()
        self.changes.sync()
        # The sync may have taken long. The heartbeat raises an error if a broker may have loaded the store meanwhile.
        # Such a broker keeps the checkpoint mapped, so the checkpoint must not be replaced. And `abort` must stay, in
        # case the broker dies. What was synced does no harm.
        self.heartbeat()
        before, _ = self.read_checkpoint()
        page = encode_checkpoint(
            replace(
                before,
                physic_msg_timestamp=max(self.watermark.last_ms, 0),
                logics_msg_timestamp=max(self.watermark.last_ms, 0),
                index_msg_timestamp=max(before.index_msg_timestamp, self.index.full_until_ms()),
                confirm_phy_offset=self.watermark.end,
            )
        )
        # Only now are all messages and their entries durable, so that the checkpoint may include them. A crash before
        # this line leaves `abort` and the older checkpoint. Then recovery starts earlier than necessary.
        self.disk.replace(self._checkpoint, page)
        watermark = replace(
            self.watermark,
            checkpoint_crc=zlib.crc32(page),
            settled_end=self.watermark.end,
            is_open=False,
            is_syncing=False,
            logged_end=0,
            dirty=(),
            index=self.index.state(),
        )
        self.watermark = write_watermark(self.disk, self.root, watermark)
        self.heartbeat()
        # Now there is nothing to recover. A crash before this line makes the next writer check the last segment.
        self.disk.remove(self._abort)
        self.disk.sync_folder(self.root)

    def sync_changes(self) -> None:
        """Sync everything that changed. `abort` and the checkpoint stay as they are."""
        if self.changes.is_empty():
            return
        self._mark_syncing()
        self.changes.sync()
        self._write_watermark(replace(self.watermark, dirty=(), is_syncing=False))

    def sync_with_log(self, path: str) -> None:
        """Sync the log, then the file at `path`."""
        self._mark_syncing()
        self.changes.sync_in(self.folders)
        with self.disk.open(path) as file:
            file.sync()
        # The watermark of this sync stays on disk until the next watermark of the session replaces it.

    def mark_synced(self) -> None:
        """Write a watermark without the mark of a failed sync, after everything was written again and synced."""
        self._write_watermark(replace(self.watermark, is_syncing=False))

    def _mark_syncing(self) -> None:
        """Record on disk that a sync begins. If no later watermark follows, the next writer does not trust the files.

        The mark is written before the sync, because it cannot be written reliably after a failed one: this process may
        die, and the disk may accept no more writes. The kernel reports a failed sync only once, and a later sync of the
        same file succeeds although the data is lost.
        """
        if not self.changes.is_empty():
            is_syncing = self.watermark.is_syncing
            self._write_watermark(replace(self.watermark, dirty=self.changes.names(), is_syncing=True))
            self.watermark = replace(self.watermark, is_syncing=is_syncing)

    def _queue_writer(self) -> ConsumeQueueWriter:
        return ConsumeQueueWriter(
            self.disk,
            self.root,
            self.changes,
            self._queue_file_bytes,
            self.topics.is_batch,
            self.sync_with_log,
            self.heartbeat,
            self.registry,
        )

    def _write_watermark(self, watermark: Watermark) -> None:
        self.watermark = write_watermark(self.disk, self.root, watermark)

    def _queue_file_bytes(self, layout: np.dtype[np.void]) -> int:
        """Return the size (bytes) of new queue files of this layout.

        It is the size of an existing file of the same layout, or the size in the settings if there is none.
        """
        is_plain = layout is QUEUE_UNIT
        tree = filenames.CONSUME_QUEUE if is_plain else filenames.BATCH_CONSUME_QUEUE
        folder = files.join(self.root, tree)
        for topic, _ in files.list_folder(folder):
            for queue_id, _ in files.list_folder(files.join(folder, topic)):
                for name, is_folder in files.list_folder(files.join(folder, topic, queue_id)):
                    size_bytes = files.file_size(files.join(folder, topic, queue_id, name))
                    # An empty file does not show the size: a process died while it created the file.
                    if not is_folder and filenames.parse_segment_name(name) is not None and size_bytes > 0:
                        return size_bytes
        return self._sizes.queue_file_bytes if is_plain else self._sizes.batch_queue_file_bytes


def nothing_written() -> Watermark:
    """Return the watermark of an empty store."""
    return Watermark(0, -1, -1, b"", host.boot_id(), 0, 0)
