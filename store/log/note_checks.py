"""What can be checked of our notes: whether the log and the queues on disk are those of which they speak."""

from collections.abc import Iterator

from rmq_spark.store.disk import host
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError, StorePathError
from rmq_spark.store.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_HEAD
from rmq_spark.store.format.watermark import Watermark
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.log.watermark_file import read_watermarks, watermark_path
from rmq_spark.store.units import QueueKey

_BLOCK_BYTES = 512  # the least that a file system writes, or loses, whole


def refuse_lost_log(store: StoreFiles, note: Watermark | None) -> None:
    """Raise StorePathError if the end of a log that the note vouches for has no file: that is no crash.

    Recovery would take what is missing for torn, and with it the units of messages that were acknowledged.
    """
    end = store.log.segments.end
    if note is None or note.last_place < end or store.read_checkpoint()[1] != note.checkpoint_crc:
        return
    raise StorePathError(
        f"{', '.join(store.folders)}: the segment with the last message is missing. It lies at physical offset "
        f"{note.last_place}, and the segments that are there end at {end}. Nothing was changed. If the commit log lies "
        "elsewhere, or in several folders, name all of them (commitLogPath) and see that they are mounted; if segments "
        f"were lost, restore them from a copy, or remove {watermark_path(store.root)} to go on with what is left."
    )


def begins_record(store: StoreFiles, place: int) -> bool:
    """Say whether a record, or a filler, begins at a physical offset, be it torn."""
    return int.from_bytes(store.log.bytes_at(place, 8)[4:], "big") in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK)


def units_from(store: StoreFiles, physical_offset: int) -> Iterator[tuple[QueueKey, int, int]]:
    """Yield queues that have a unit for a record from a physical offset on, its queue offset and the record's place.

    Behind what a writer of ours noted there is none, unless a broker recovered the store, went on from there and died
    before it wrote a checkpoint, or newer notes are lost. No queue that cannot be read keeps writers from the others.
    """
    for key, queue in TopicTable(store.root).queues.items():
        try:
            if queue.run.is_damaged():
                continue
            offset, place = _unit_from(store, queue, physical_offset)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            continue
        if physical_offset <= place <= store.log.segments.end:
            yield key, offset, place


def _unit_from(store: StoreFiles, queue: ConsumeQueue, physical_offset: int) -> tuple[int, int]:
    """Return queue offset and place of a queue's last unit, or of its first one for a record from there on.

    Where segments are lost with their records, units name places beyond the log's files; but not the first of them,
    at the latest for a record where a segment would begin. Where no unit names a place nearer, one beyond is damage.
    """
    end = queue.search_written_end()
    units = queue.read(max(end - 1, queue.run.begin), end)
    if len(units) and units.physical_offsets[0] > store.log.segments.end:
        first = queue.first_from(physical_offset, end)
        units = queue.read(first, first + 1)
    queue.run.close()
    return (int(units.queue_offsets[0]), int(units.physical_offsets[0])) if len(units) else (0, -1)


def is_within_log(store: StoreFiles, settled: Watermark) -> bool:
    """Say whether what was settled is there, and recovery can begin where it ended: retention may have passed it."""
    if store.read_checkpoint()[1] != settled.checkpoint_crc:
        return False  # a broker writes it whenever it runs
    return has_last_record(store, settled) and settled.end >= store.log.segments.begin


def has_last_record(store: StoreFiles, note: Watermark) -> bool:
    """Say whether the last record that the note names is still where it was."""
    return note.last_place < 0 or store.log.bytes_at(note.last_place, RECORD_HEAD.itemsize) == note.last_head


def is_head_lost(store: StoreFiles, note: Watermark) -> bool:
    """Say whether zeros are where the last record of a note began: all of its head, or up to or from a block's edge."""
    found, size = store.log.bytes_at(note.last_place, RECORD_HEAD.itemsize), RECORD_HEAD.itemsize
    edge = min(-note.last_place % _BLOCK_BYTES, size)
    lost = bytes(len(found)), bytes(edge) + note.last_head[edge:], note.last_head[:edge] + bytes(size - edge)
    return found in lost and not has_last_record(store, note)


def refuse_cut(store: StoreFiles, end: int) -> None:
    """Raise DamageError if the log is found to end, at physical offset `end`, before a record that was not lost.

    No crash takes what was synced; and in the same boot nothing goes but memory, which leaves zeros. So some record is
    damaged, of ours or, behind ours, of a broker's that wrote units for it and for later ones.
    """
    note, settled = read_watermarks(store.root)
    page_crc = store.read_checkpoint()[1]
    if settled is not None and settled.checkpoint_crc == page_crc and end <= settled.last_place:
        raise _no_record(store, end, settled.end)
    if note is None or note.is_syncing or note.checkpoint_crc != page_crc or not is_same_boot(note):
        return
    is_last_damaged = end <= note.last_place and not is_head_lost(store, note)
    # A record that lost memory tore begins as one; behind a settled note it is a broker's.
    is_next_damaged = end <= note.end and not is_end(store, note.end)
    is_next_damaged = is_next_damaged and (note.is_settled or not begins_record(store, note.end))
    if is_last_damaged or (is_next_damaged and any(units_from(store, note.end))):
        raise _no_record(store, end, note.end)


def is_end(store: StoreFiles, place: int) -> bool:
    """Say whether the log may end at a place: nothing stands there where a record, or a filler, would begin."""
    return not any(store.log.bytes_at(place, 8))


def _no_record(store: StoreFiles, place: int, end: int) -> DamageError:
    segment = store.log.segments.holding(place)
    return DamageError(
        f"a record of the log, which was whole up to physical offset {end} at least",
        segment.path if segment is not None else store.folders[0],
        place - segment.begin if segment is not None else place,
        "a whole record",
        "none",
        "Restore the file from a copy; or, to go on without the messages from there on, remove "
        f"{watermark_path(store.root)}.",
    )


def is_same_boot(note: Watermark) -> bool:
    """Say whether the machine has run on since a note was written."""
    return bool(note.boot) and note.boot == host.boot_id()
