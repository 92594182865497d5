"""The files of one store as its writer holds them, and the notes that say how far it was written.

Here stands what every step of a section shares: the parts that write, `abort`, the watermark, the checkpoint. Which
step comes when is for `section.py`; what to believe at the beginning is for `recovery.py`.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DiskFullError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.abort_file import encode_abort
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.queue_unit import QUEUE_UNIT
from rmq_spark.store.format.store_settings import StoreSettings
from rmq_spark.store.format.watermark import Watermark
from rmq_spark.store.log.changes import Changes
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.log.file_sizes import FileSizes
from rmq_spark.store.log.key_index import KeyIndex
from rmq_spark.store.log.log_writer import LogWriter
from rmq_spark.store.log.queue_registry import QueueRegistry
from rmq_spark.store.log.queue_writer import QueueWriter
from rmq_spark.store.log.topic_writer import TopicWriter
from rmq_spark.store.log.watermark_file import write_watermark
from rmq_spark.store.units import QueueKey

_ASK_AGAIN_MS = 10_000
_SPARE_BYTES = 32 << 20  # of the disk, left free for units, notes and the slots of an index file


class StoreFiles:
    """The parts that write one store. Used by one thread, and only under the store's lock."""

    def __init__(
        self,
        root: str,
        folders: tuple[str, ...],
        disk: Disk,
        sizes: FileSizes,
        now_ms: Callable[[], int],
        note_progress: Callable[[], None],
    ) -> None:
        self.root, self.folders, self.disk, self.now_ms, self.note_progress = root, folders, disk, now_ms, note_progress
        self._abort = files.join(root, filenames.ABORT)
        self._checkpoint = files.join(root, filenames.CHECKPOINT)
        self._sizes = sizes
        self.levels = DEFAULT_DELAY_LEVELS
        self.changes = Changes(disk, (root, *folders), note_progress=note_progress)
        self.log = CommitLog(folders, mapped=False)
        self.log_writer = LogWriter(disk, self.log, folders, self.changes, sizes.segment_bytes)
        self.registry = QueueRegistry(root, disk)
        self.topics = TopicWriter(disk, root, note_progress)
        self.delay_offsets = DelayOffsetFile(root, disk, now_ms, lambda _: None)  # under the lock nobody is waited for
        self.queues = self._queue_writer()
        self.index = KeyIndex(root, disk, sizes.index, now_ms, self.changes)
        self.note = nothing_written()
        self._asked_ms: int | None = None
        self.sound_queues: set[QueueKey] = set()  # those that this writer has found without a hole

    def use_sizes(self, sizes: FileSizes) -> None:
        """Give files that are made from now on these sizes, where the store has none yet to learn them from."""
        if sizes != self._sizes:
            self._sizes = sizes
            self.believe(self.note)

    def use_settings(self, settings: StoreSettings, sizes: FileSizes) -> None:
        """Go by the store's settings from now on, and by these sizes where it has no files yet to learn them from."""
        self.levels = settings.levels
        self.topics.schedule_queue_count = len(self.levels)
        self.use_sizes(sizes.or_those(settings.file_sizes))

    def close(self) -> None:
        """Close every file; what is used again is opened again."""
        self.log_writer.close()
        self.log.close()

    def look(self) -> None:
        """Forget what was known of the disk: somebody else may have written."""
        self.log.look()
        self.queues.forget()
        self.index.look()

    def believe(self, note: Watermark) -> None:
        """Go on from a note: it says what changed since the store was settled."""
        self.note = note
        self.changes = Changes(self.disk, (self.root, *self.folders), note.dirty, self.note_progress)
        self.log_writer = LogWriter(self.disk, self.log, self.folders, self.changes, self._sizes.segment_bytes)
        self.queues = self._queue_writer()
        self.index = KeyIndex(self.root, self.disk, self._sizes.index, self.now_ms, self.changes)

    def is_to_be_asked(self, note: Watermark) -> bool:
        """Say whether the queues are to be asked if they agree with a note: once for each answer of yes.

        They are when this writer begins, when the newest note on disk is older than one that it saw, and every ten
        seconds where others write in turn with it: to ask a thousand queues takes longer than many appends.
        """
        if note == self.note:
            return False  # of this writer itself: nobody else has written since
        now_ms, is_older = self.now_ms(), note.number < self.note.number
        if is_older or self._asked_ms is None or abs(now_ms - self._asked_ms) >= _ASK_AGAIN_MS:
            self._asked_ms = now_ms
            return True
        return False

    def next_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset that the next message of a queue will get."""
        return self.queues.next_offset(QueueKey(topic, queue_id))

    def read_checkpoint(self) -> tuple[Checkpoint, int]:
        """Return the checkpoint and the CRC of its page."""
        page = files.read_small(self._checkpoint) or b""
        return decode_checkpoint(page, self._checkpoint), zlib.crc32(page)

    def has_abort(self) -> bool:
        """Say whether the store was not left in order, or is at work."""
        return files.file_size(self._abort) >= 0

    def started_ms(self) -> int:
        """Return when the writer that left `abort` started, ms since the epoch; -1 without one."""
        return files.modified_ms(self._abort)

    def vouch_for_nothing(self) -> None:
        """Leave the store as one that crashed, with a checkpoint according to which nothing is on disk for good."""
        if not self.has_abort():
            self.disk.replace(self._abort, encode_abort(files.process_id()))
        self.disk.replace(self._checkpoint, encode_checkpoint(Checkpoint()))

    def refuse_full_disk(self, log_bytes: int, record_count: int) -> None:
        """Raise DiskFullError if there is no room for so much, before anything is written."""
        wanted = log_bytes + record_count * 4 * QUEUE_UNIT.itemsize + _SPARE_BYTES
        for folder in {self.root, *self.folders}:
            free = files.free_bytes(folder)
            if free < wanted:
                raise DiskFullError(
                    f"the file system of {folder} has {free >> 20} MiB left, and {wanted >> 20} MiB are needed to "
                    f"append {record_count} messages. Nothing was written. Make room there (retention deletes old "
                    "segments), then write again."
                )

    def open_section(self) -> None:
        """Say on disk that bytes behind the watermark are about to change."""
        if self.note.settled_number == 0 and self.note.is_settled:
            # What stood here before our first byte: where recovery begins if the machine loses its power.
            self._write_note(self.note)
        if not self.has_abort():
            # From here a broker that opens the store after a crash recovers it, through a power cut too: the name
            # is on disk before any byte of the log is.
            self.disk.replace(self._abort, encode_abort(files.process_id()))
        elif self.note.is_settled:
            # The writer that made `abort` may have failed, or died, before its name was on disk.
            self.disk.sync_folder(self.root)
        self._write_note(replace(self.note, is_open=True, logged_end=self.note.end))

    def note_logged(self, end: int) -> None:
        """Say on disk that the open section's records stand in the log as a whole, up to `end`."""
        self._write_note(replace(self.note, logged_end=end))

    def close_section(self, end: int, last_ms: int, last_place: int, last_head: bytes) -> None:
        """Say on disk that the log now ends at `end` and every message before it has its unit and its keys."""
        self.registry.write(self.topics.is_deleted)
        self._write_note(
            replace(
                self.note,
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
        """Sync everything that changed, then leave the store as one that was closed in order."""
        if self.note.is_settled and not self.has_abort():
            return
        self.log_writer.close()
        self._note_sync()
        self.changes.sync()
        # That may have taken long. Raises where a broker may have loaded the store meanwhile: it keeps its checkpoint
        # mapped, and whatever dies then must find `abort`. What was synced does no harm.
        self.note_progress()
        before, _ = self.read_checkpoint()
        page = encode_checkpoint(
            replace(
                before,
                physic_msg_timestamp=max(self.note.last_ms, 0),
                logics_msg_timestamp=max(self.note.last_ms, 0),
                index_msg_timestamp=max(before.index_msg_timestamp, self.index.full_until_ms()),
                confirm_phy_offset=self.note.end,
            )
        )
        # All messages are on disk with their units: now the checkpoint may say so. A crash before this leaves
        # `abort` and the older page, from which recovery starts earlier than it needs to.
        self.disk.replace(self._checkpoint, page)
        note = replace(
            self.note,
            checkpoint_crc=zlib.crc32(page),
            settled_end=self.note.end,
            is_open=False,
            is_syncing=False,
            logged_end=0,
            dirty=(),
            index=self.index.state(),
        )
        self.note = write_watermark(self.disk, self.root, note)
        self.note_progress()
        # Only now nothing is left to recover. A crash before this costs the next writer a look at the last segment.
        self.disk.remove(self._abort)
        self.disk.sync_folder(self.root)

    def sync_changes(self) -> None:
        """Sync everything that changed, and leave `abort` and the checkpoint as they are."""
        if self.changes.is_empty():
            return
        self._note_sync()
        self.changes.sync()
        self._write_note(replace(self.note, dirty=(), is_syncing=False))

    def sync_with_log(self, path: str) -> None:
        """Sync the log, then the file at `path`."""
        self._note_sync()
        self.changes.sync_in(self.folders)
        with self.disk.open(path) as file:
            file.sync()
        # On disk the note of the sync stays until the next note of this section replaces it.

    def forget_sync(self) -> None:
        """Write a note that no sync failed: what a failed one left was written and synced."""
        self._write_note(replace(self.note, is_syncing=False))

    def _note_sync(self) -> None:
        """Say on disk that a sync begins: the next writer must not trust it unless a later note follows.

        Before the sync, because after one that fails nothing can be relied on: this process may die, and the disk take
        no more writes. The kernel reports the failure once, and a later sync of the same file succeeds.
        """
        if not self.changes.is_empty():
            is_syncing = self.note.is_syncing
            self._write_note(replace(self.note, dirty=self.changes.names(), is_syncing=True))
            self.note = replace(self.note, is_syncing=is_syncing)

    def _queue_writer(self) -> QueueWriter:
        return QueueWriter(
            self.disk,
            self.root,
            self.changes,
            self._queue_file_bytes,
            self.topics.is_batch,
            self.sync_with_log,
            self.note_progress,
            self.registry,
        )

    def _write_note(self, note: Watermark) -> None:
        self.note = write_watermark(self.disk, self.root, note)

    def _queue_file_bytes(self, layout: np.dtype[np.void]) -> int:
        """Return the length of files of queues: what a queue of the same kind has, else the setting."""
        is_plain = layout is QUEUE_UNIT
        tree = filenames.CONSUME_QUEUE if is_plain else filenames.BATCH_CONSUME_QUEUE
        folder = files.join(self.root, tree)
        for topic, _ in files.list_folder(folder):
            for queue_id, _ in files.list_folder(files.join(folder, topic)):
                for name, is_folder in files.list_folder(files.join(folder, topic, queue_id)):
                    size_bytes = files.file_size(files.join(folder, topic, queue_id, name))
                    # An empty one says nothing: somebody died while making it.
                    if not is_folder and filenames.parse_segment_name(name) is not None and size_bytes > 0:
                        return size_bytes
        return self._sizes.queue_file_bytes if is_plain else self._sizes.batch_queue_file_bytes


def nothing_written() -> Watermark:
    """Return the note of a store without a message."""
    return Watermark(0, -1, -1, b"", host.boot_id(), 0, 0)
