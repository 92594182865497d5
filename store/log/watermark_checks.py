"""Checks of a watermark: whether the log and the queues on disk match it."""

from collections.abc import Iterator

from rmq_spark.store.disk import host
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError, StorePathError
from rmq_spark.store.format.own_files import Watermark
from rmq_spark.store.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_HEAD
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_state import read_watermarks, watermark_path
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey

_BLOCK_BYTES = 512  # a file system writes or loses blocks of at least this size


def refuse_lost_log(store: StoreFiles, watermark: Watermark | None) -> None:
    """Raise StorePathError if the log's last record, which the watermark guarantees, has no file. No crash causes this.

    Without this check, recovery would treat the missing part as torn, and remove the entries of acknowledged messages.
    """
    end = store.log.segments.end
    if watermark is None or watermark.last_place < end or store.read_checkpoint()[1] != watermark.checkpoint_crc:
        return
    raise StorePathError(
        f"cannot recover the log in {', '.join(store.folders)}: the segments end at {end}; expected the last message "
        f"at physical offset {watermark.last_place}. Its segment is missing. Nothing was changed. If the commit log is "
        "in another folder, or in several, name all of them (commitLogPath) and check that they are mounted. If "
        f"segments were lost, restore them from a copy, or remove {watermark_path(store.root)} to continue without "
        "them."
    )


def begins_record(store: StoreFiles, physical_offset: int) -> bool:
    """Say whether a record or a filler begins at a physical offset. It may be complete or torn."""
    return int.from_bytes(store.log.bytes_at(physical_offset, 8)[4:], "big") in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK)


def entries_from(store: StoreFiles, physical_offset: int) -> Iterator[tuple[QueueKey, int, int]]:
    """Yield (queue, queue offset, physical offset) of each queue that has an entry at or after `physical_offset`.

    That is an entry whose record is at or after `physical_offset`. After the end of our watermark there is no such
    entry, with two exceptions. Either a broker recovered the store, appended there, and died before it wrote a
    checkpoint. Or newer watermarks are lost. A queue that the kernel cannot read is skipped, so that it does not block
    the writers of other queues.
    """
    for key, queue in TopicTable(store.root).queues.items():
        try:
            if queue.run.is_damaged():
                continue
            queue_offset, found = _entry_from(store, queue, physical_offset)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            continue
        if physical_offset <= found <= store.log.segments.end:
            yield key, queue_offset, found


def _entry_from(store: StoreFiles, queue: ConsumeQueue, physical_offset: int) -> tuple[int, int]:
    """Return the queue offset and physical offset of a queue's last entry. Return (0, -1) if it has no entries.

    If the last entry points beyond the log's files, return the first entry for a record at or after `physical_offset`
    instead. Entries point beyond the files if segments are lost with their records. But the first of these entries does
    not, because it points at the latest to the beginning of a lost segment. So if no entry points to a nearer position,
    an entry that points further is damaged.
    """
    end = queue.search_written_end()
    entries = queue.read(max(end - 1, queue.run.begin), end)
    if len(entries) and entries.physical_offsets[0] > store.log.segments.end:
        first = queue.first_from(physical_offset, end)
        entries = queue.read(first, first + 1)
    queue.run.close()
    return (int(entries.queue_offsets[0]), int(entries.physical_offsets[0])) if len(entries) else (0, -1)


def is_within_log(store: StoreFiles, settled: Watermark) -> bool:
    """Say whether the settled state is on disk, and recovery can start at its end.

    It cannot start there if retention has deleted that part of the log.
    """
    if store.read_checkpoint()[1] != settled.checkpoint_crc:
        return False  # brokers write the checkpoint whenever they run
    return has_last_record(store, settled) and settled.end >= store.log.segments.begin


def has_last_record(store: StoreFiles, watermark: Watermark) -> bool:
    """Say whether the last record of the watermark is still at its position in the log."""
    return (
        watermark.last_place < 0
        or store.log.bytes_at(watermark.last_place, RECORD_HEAD.itemsize) == watermark.last_head
    )


def is_head_lost(store: StoreFiles, watermark: Watermark) -> bool:
    """Say whether zeros replaced the header of the watermark's last record, or a part of it.

    The part must begin or end at the boundary of a block, because a block is lost as a whole.
    """
    found, size = store.log.bytes_at(watermark.last_place, RECORD_HEAD.itemsize), RECORD_HEAD.itemsize
    edge = min(-watermark.last_place % _BLOCK_BYTES, size)
    lost = bytes(len(found)), bytes(edge) + watermark.last_head[edge:], watermark.last_head[:edge] + bytes(size - edge)
    return found in lost and not has_last_record(store, watermark)


def refuse_cut(store: StoreFiles, end: int) -> None:
    """Raise DamageError if the log seems to end before a record that cannot have been lost. `end` is a physical offset.

    A crash never removes synced data. Without a restart of the machine, only memory can be lost, which leaves zeros. So
    in other cases a record is damaged. It is either a record of ours, or a record after ours by a broker that wrote
    entries for it and for later ones.
    """
    watermark, settled = read_watermarks(store.root)
    page_crc = store.read_checkpoint()[1]
    if settled is not None and settled.checkpoint_crc == page_crc and end <= settled.last_place:
        raise _no_record(store, end, settled.end)
    if watermark is None or watermark.is_syncing or watermark.checkpoint_crc != page_crc or not is_same_boot(watermark):
        return
    is_last_damaged = end <= watermark.last_place and not is_head_lost(store, watermark)
    # A record that lost memory has torn still begins as a record. After a settled watermark, a broker wrote the record.
    is_next_damaged = end <= watermark.end and not is_end(store, watermark.end)
    is_next_damaged = is_next_damaged and (watermark.is_settled or not begins_record(store, watermark.end))
    if is_last_damaged or (is_next_damaged and any(entries_from(store, watermark.end))):
        raise _no_record(store, end, watermark.end)


def is_end(store: StoreFiles, physical_offset: int) -> bool:
    """Say whether the log may end at a physical offset, because no record or filler begins there."""
    return not any(store.log.bytes_at(physical_offset, 8))


def _no_record(store: StoreFiles, physical_offset: int, end: int) -> DamageError:
    segment = store.log.segments.holding(physical_offset)
    return DamageError(
        f"a record is missing in the log, which was complete at least up to physical offset {end}",
        segment.path if segment is not None else store.folders[0],
        physical_offset - segment.begin if segment is not None else physical_offset,
        "a complete record",
        "none",
        "Restore the file from a copy. Or, to continue without the messages from there on, remove "
        f"{watermark_path(store.root)}.",
    )


def is_same_boot(watermark: Watermark) -> bool:
    """Say whether the machine has not been restarted since the watermark was written. False if that is unknown."""
    return bool(watermark.boot) and watermark.boot == host.boot_id()
